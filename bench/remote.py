"""Remote storage against the same objects sent and fetched by obstore alone, and restoring.

* `upload`: closed segments with their indexes go out as a server sends them (`RemoteStorage`), one
  checksum and one placement each, against `obstore.put` of the same files. Into an object store;
  then into a directory, where the other side syncs each file and its directory as we do.
* `read`: a client reads a log table from its beginning, of which the server has next to nothing
  left, against `obstore.get_range` of the same segments in ranges of the same size, as many at a
  time. Ours compares checksums and makes Arrow batches, theirs throws the bytes away. Once with
  batches as they are, once with ours as they are by default, where unpacking zstd is the work.
* `share`: bytes of log segments by location after a few hundred, against the weights. Every round
  uploads one segment and one manifest, as in a table that is written slowly.
* `restore`: a server that lost the disk of a bucket, from its start to the first lookup, against
  downloading the files of the same snapshot into synced files.

The object store is moto's, in a process of its own, so its speed is that of Python; it is the same
for both sides.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
from obstore.store import LocalStore

import zufluss
from bench.clients import Worker
from bench.keyed import KEY, random_keys
from bench.kv import Written
from bench.report import Measure, compared, quantity
from bench.work import UNCOMPRESSED, alternate, new_table, ten_columns
from zufluss.client.read.remote import AHEAD, RANGE_BYTES
from zufluss.config import Configuration
from zufluss.model.table import TableBucket, TableInfo
from zufluss.remote.locations import Locations
from zufluss.remote.placement import parse_policy
from zufluss.remote.registry import reconcile
from zufluss.remote.storage import RemoteStorage, Upload
from zufluss.remote.stores import open_store
from zufluss.remote.uri import LocationUri, parse_location
from zufluss.testing.s3 import S3Server
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

KEYS = 10_000_000
SEGMENT_BYTES = 16 << 20
INDEX_BYTES = 16 << 10
AT_ONCE = 4
"""Files on their way at the same time, on both sides."""
TIMEOUT_MS = 60_000
WEIGHTS = (1, 2, 5)
SHARE_OFF_MAX = 0.02
SHARE_ROWS = 200
"""A batch that fills a segment."""
BATCH = 50_000
POLL_SECONDS = 0.05
SERVER = {"zufluss.log.flush": "os", "remote.log.task-interval-duration": "100ms"}
TIERED = {"table.log.tiered.local-segments": "1"}


def run(directory: Path, rounds: int, quick: bool, keys: int = KEYS) -> Iterator[Measure]:
    """Everything; `keys` is the size of the bucket that is restored."""
    with S3Server() as s3:
        bucket = s3.bucket("bench")
        place = parse_location(f"{bucket}/upload", "bench")
        conf = {"remote.data.dirs": place.text, **s3.properties}
        count = 4 if quick else 16
        yield _uploads(directory, "object store", place, conf, rounds, count, at_least=0.8)
        for kind in ("plain", "zstd"):
            where = directory / f"read-{kind}"
            place = parse_location(f"{bucket}/{kind}", "bench")  # a place belongs to one cluster
            conf = {"remote.data.dirs": place.text, **s3.properties}
            yield _catch_up(where, kind, place, conf, rounds, 20 if quick else 100, 0.6)
    local = parse_location(str(directory / "local"), "bench")
    Path(local.path).mkdir()
    yield _uploads(directory, "directory", local, {"remote.data.dirs": local.text}, rounds, count)
    yield _shares(directory / "share", 160 if quick else 800)
    yield from _restore(directory / "restore", 100_000 if quick else keys)


# -- upload ------------------------------------------------------------------------------------


def _uploads(
    directory: Path,
    kind: str,
    place: LocationUri,
    conf: dict[str, str],
    rounds: int,
    count: int,
    at_least: float | None = None,
) -> Measure:
    segments = _segments(directory / f"segments-{kind[0]}", count)
    size = sum(file.stat().st_size for files in segments for file in files)
    configuration = Configuration.of(conf)
    store = _bare_store(place, conf)

    async def ours() -> None:
        storage = _storage(configuration)
        policy = parse_policy("cluster")
        await asyncio.gather(
            *(
                storage.upload([Upload(_name(file), file) for file in files], policy)
                for files in segments
            )
        )

    async def bare() -> None:
        slots = asyncio.Semaphore(AT_ONCE)
        files = [file for each in segments for file in each]
        await asyncio.gather(*(_put(store, slots, file) for file in files))

    mine, others = alternate(
        rounds, (os.getpid(),), lambda: _rate(ours, size), lambda: _rate(bare, size)
    )
    name = f"remote.upload.{'s3' if place.scheme == 's3' else 'directory'}"
    label = f"segments into {'an' if kind[0] == 'o' else 'a'} {kind}, against obstore.put"
    return compared(name, label, mine, others, "B/s", at_least=at_least)


def _segments(directory: Path, count: int) -> list[list[Path]]:
    """The four files of some segments; their content is of no interest to a store."""
    directory.mkdir()
    made = []
    for number in range(count):
        sizes = {"log": SEGMENT_BYTES, "index": INDEX_BYTES, "timeindex": INDEX_BYTES}
        files = [directory / f"{number}.{name}" for name in (*sizes, "writer_snapshot")]
        for file in files:
            file.write_bytes(os.urandom(sizes.get(file.suffix[1:], 100)))
        made.append(files)
    return made


def _storage(conf: Configuration) -> RemoteStorage:
    return RemoteStorage(conf, _locations(conf), state_file=None)


def _locations(conf: Configuration) -> Locations:
    return reconcile(None, conf, {})


def _name(file: Path) -> str:
    return f"log/db/t-1/0/{file.name}"


async def _put(store: Any, slots: asyncio.Semaphore, file: Path) -> None:
    async with slots:
        await obstore.put_async(store, f"bare/{file.name}", file)
        if isinstance(store, LocalStore):
            await asyncio.to_thread(_sync, Path(str(store.prefix)) / "bare" / file.name)


def _sync(file: Path) -> None:
    for path in (file, file.parent):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _bare_store(place: LocationUri, conf: dict[str, str]) -> Any:
    if place.scheme == "file":
        return LocalStore(place.path, mkdir=True)
    properties = {key: value for key, value in conf.items() if key.startswith("s3.")}
    return open_store(place, properties, TIMEOUT_MS, retries=0)


def _rate(work: Callable[[], Awaitable[None]], size: int) -> float:
    async def timed() -> float:
        began = time.perf_counter()
        await work()
        return time.perf_counter() - began

    return size / asyncio.run(timed())


# -- reading -----------------------------------------------------------------------------------


def _catch_up(
    directory: Path,
    kind: str,
    place: LocationUri,
    conf: dict[str, str],
    rounds: int,
    batches: int,
    at_least: float | None,
) -> Measure:
    settings = SERVER | conf | {"log.segment.file-size": str(SEGMENT_BYTES)}
    with ExitStack() as stack:
        server = stack.enter_context(DevServer(directory, settings))
        connection = stack.enter_context(zufluss.connect(server.bootstrap))
        properties = TIERED | (UNCOMPRESSED if kind == "plain" else {})
        info = new_table(connection, f"read_{kind}", properties=properties)
        _append(connection, info, batches, BATCH)
        end = wait_for_remote(server, connection, info)
        store = _bare_store(place, conf)
        paths = asyncio.run(_segment_paths(store, place, info))
        size = sum(paths.values())

        async def bare() -> None:
            slots = asyncio.Semaphore(AHEAD)
            ranges = [
                _get(store, slots, path, start, min(start + RANGE_BYTES, length))
                for path, length in paths.items()
                for start in range(0, length, RANGE_BYTES)
            ]
            await asyncio.gather(*ranges)

        ours, others = alternate(
            rounds,
            (server.pid, os.getpid()),
            lambda: _scan_rate(connection, info, end, size),
            lambda: _rate(bare, size),
        )
    label = f"catch-up read from an object store, {kind}, against obstore.get_range"
    return compared(f"remote.read.{kind}", label, ours, others, "B/s", at_least=at_least)


def _append(connection: zufluss.Connection, info: TableInfo, batches: int, rows: int) -> None:
    with connection.table(str(info.path)).append() as writer:
        for number in range(batches):
            writer.write(ten_columns(rows, number * rows))


def wait_for_remote(server: DevServer, connection: zufluss.Connection, info: TableInfo) -> int:
    """Until the server has one closed segment left; the offset up to which the rest is remote."""
    while len(_local_segments(server, info)) > 2 or not remote_end(connection, info):
        time.sleep(POLL_SECONDS)
    return remote_end(connection, info)


def remote_end(connection: zufluss.Connection, info: TableInfo) -> int:
    """The offset up to which the first bucket's log is in remote storage."""
    answer: m.ListRemoteLogManifestsResponse = connection.call_coordinator(
        ApiKey.LIST_REMOTE_LOG_MANIFESTS, m.ListRemoteLogManifestsRequest(table_id=info.table_id)
    )
    return answer.manifests[0].remote_log_end_offset if answer.manifests else 0


def _local_segments(server: DevServer, info: TableInfo) -> list[Path]:
    name = f"{info.path.table}-{info.table_id}"
    return [file for file in server.data_dir.rglob("*.log") if any(name in p for p in file.parts)]


async def _segment_paths(store: Any, place: LocationUri, info: TableInfo) -> dict[str, int]:
    """The log files of a table, as the store names them, and their sizes."""
    prefix = f"{place.path.strip('/')}/log/fluss/{info.path.table}-{info.table_id}/"
    found: dict[str, int] = {}
    async for page in obstore.list(store, prefix):
        found |= {each["path"]: each["size"] for each in page if each["path"].endswith(".log")}
    return found


async def _get(store: Any, slots: asyncio.Semaphore, path: str, start: int, end: int) -> None:
    async with slots:
        await obstore.get_range_async(store, path, start=start, end=end)


def _scan_rate(connection: zufluss.Connection, info: TableInfo, end: int, size: int) -> float:
    bucket = TableBucket(info.table_id, None, 0)
    began = time.perf_counter()
    scan = connection.table(str(info.path)).scan(stop={bucket: end})
    rows = sum(batch.num_rows for batch in scan)
    seconds = time.perf_counter() - began
    if rows != end:
        raise RuntimeError(f"{rows} rows were read, there are {end}")
    return size / seconds


# -- shares ------------------------------------------------------------------------------------


def _shares(directory: Path, segments: int) -> Measure:
    """Bytes of log segments by location, after a restart in the middle."""
    places = [directory / f"location-{number}" for number in range(len(WEIGHTS))]
    settings = SERVER | {
        "log.segment.file-size": "8kb",
        "remote.log.task-interval-duration": "20ms",
        "remote.data.dirs": ",".join(map(str, places)),
        "remote.data.dirs.strategy": "WEIGHTED_ROUND_ROBIN",
        "remote.data.dirs.weights": ",".join(map(str, WEIGHTS)),
    }
    with (
        DevServer(directory / "server", settings) as server,
        zufluss.connect(server.bootstrap) as connection,
    ):
        info = new_table(connection, "share", properties=TIERED)
        rows = 0
        for number in range(segments):
            if number == segments // 2:
                server.stop()
                server.start()
            _append(connection, info, 1, SHARE_ROWS)
            while remote_end(connection, info) < rows:
                time.sleep(POLL_SECONDS / 10)
            rows += SHARE_ROWS
    used = [_log_bytes(place) for place in places]
    off = max(
        abs(size / sum(used) - weight / sum(WEIGHTS))
        for size, weight in zip(used, WEIGHTS, strict=True)
    )
    return Measure(
        "remote.share",
        f"bytes by location, furthest from weights {':'.join(map(str, WEIGHTS))}",
        f"{off:.2%}",
        ", ".join(quantity(size, "B") for size in used),
        off,
        "",
        at_most=SHARE_OFF_MAX,
    )


def _log_bytes(place: Path) -> int:
    return sum(file.stat().st_size for file in (place / "log").rglob("*.log"))


# -- restoring ---------------------------------------------------------------------------------


def _restore(directory: Path, keys: int) -> Iterator[Measure]:
    directory.mkdir()
    settings = SERVER | {
        "remote.data.dirs": str(directory / "remote"),
        "kv.snapshot.interval": "1s",
        "log.segment.file-size": "64mb",
    }
    with ExitStack() as stack:
        server = stack.enter_context(DevServer(directory / "server", settings))
        with zufluss.connect(server.bootstrap) as connection:
            info = new_table(connection, "lost", primary_key=KEY, properties=TIERED)
            worker = Worker("zufluss", server.bootstrap)
            try:
                Written(connection, info, worker).load(keys)
            finally:
                worker.close()
            files = _wait_for_snapshot(connection, info)
        server.stop()
        whole = _first_lookup(server, info, keys)
        server.stop()
        size = sum(file.stat().st_size for file in files)
        _lose_disk(server, info, size)
        seconds = _first_lookup(server, info, keys)
        plain = [_download(files, directory / "plain") for _ in range(3)]
    download = statistics.median(plain)
    yield Measure(
        "remote.restore",
        f"a bucket of {keys / 1e6:g} M keys whose disk is lost: start to first lookup, against "
        f"downloading its {quantity(size, 'B')}",
        f"{seconds:.2f} s (with its disk {whole:.2f} s)",
        f"{download:.2f} s",
        seconds / download,
        less_is_better=True,
    )


def _wait_for_snapshot(connection: zufluss.Connection, info: TableInfo) -> list[Path]:
    """The files of a snapshot that has everything."""
    admin = connection.admin
    (end,) = admin.list_offsets(info.path).values()
    while True:
        for found in admin.latest_kv_snapshots(info.path):
            if found.log_offset == end:
                about = admin.kv_snapshot_metadata(found.bucket, found.snapshot_id)
                return [Path(file.remote_path.removeprefix("file://")) for file in about.files]
        time.sleep(POLL_SECONDS)


def _lose_disk(server: DevServer, info: TableInfo, at_least: int) -> None:
    name = f"{info.path.table}-{info.table_id}"
    gone = [path for path in server.data_dir.rglob(f"*{name}*") if path.is_dir()]
    size = sum(file.stat().st_size for path in gone for file in path.rglob("*") if file.is_file())
    if size < at_least:
        raise RuntimeError(f"{server.data_dir} has {size} bytes of {name}, not {at_least}")
    for path in sorted(gone):
        shutil.rmtree(path, ignore_errors=True)


def _first_lookup(server: DevServer, info: TableInfo, keys: int) -> float:
    """Seconds from the start of a stopped server to its first answer; rows are checked after."""
    began = time.perf_counter()
    server.start()
    with zufluss.connect(server.bootstrap, **{"client.request-timeout": "600s"}) as connection:
        table = connection.table(str(info.path))
        table.lookup(keys // 2)
        seconds = time.perf_counter() - began
        wanted = pa.table({KEY[0]: random_keys(10_000, keys, 3)})
        missing = len(wanted) - table.lookup(wanted, missing="drop").num_rows
    if missing:
        raise RuntimeError(
            f"{missing} of {len(wanted)} rows are gone after the bucket was restored"
        )
    return seconds


def _download(files: Sequence[Path], target: Path) -> float:
    """Seconds to copy files by obstore, into synced files."""

    async def one(slots: asyncio.Semaphore, file: Path) -> None:
        async with slots:
            answer = await obstore.get_async(LocalStore(file.parent), file.name)
            with (target / file.name).open("wb") as out:
                async for part in answer.stream(min_chunk_size=4 << 20):
                    out.write(part)
            await asyncio.to_thread(_sync, target / file.name)

    async def every() -> None:
        slots = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(one(slots, file) for file in files))

    target.mkdir()
    try:
        return 1 / _rate(every, 1)
    finally:
        shutil.rmtree(target)
