"""Appends and upserts on a server with two remote locations, and what must hold of both.

One location is a directory, the other an S3 server behind a `FaultProxy`. Segments are small and
snapshots frequent, so that uploads are in progress most of the time. Writers can be paused: then
all their batches are acknowledged, and the tables are read through our client, mostly from remote
storage, and compared with what was sent.

`audit` inspects the locations without the server: every object that the coordinator refers to
exists with the right bytes, the segments of a log follow each other, and a snapshot is the result
of applying the changelog up to its offset.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from crc32c import crc32c

import zufluss
from tests.end_to_end.raw import RawClient
from tests.fault.history import Content, History, violations
from tests.fault.kv_load import (
    RULES,
    PutLane,
    PutWriter,
    SentPut,
    create_keyed_target,
    kv_violations,
)
from tests.fault.load import (
    DATABASE,
    BucketLane,
    Load,
    RawWriter,
    Sent,
    Target,
    Worker,
    create_target,
)
from tests.kv.model import Change, fold
from tests.waiting import WAIT_SECONDS, eventually
from zufluss.client.sync.connection import Connection
from zufluss.coordinator.bucket_remotes import BucketRecord, ManifestRecord
from zufluss.coordinator.records import bucket_remote
from zufluss.meta.embedded import DATABASE_FILE
from zufluss.model.table import TableBucket
from zufluss.remote.files import RemoteFile
from zufluss.remote.manifest import LogManifest
from zufluss.remote.objects import Objects
from zufluss.remote.snapshot import KvSnapshot
from zufluss.remote.uri import parse_location
from zufluss.testing.proxy import FaultProxy
from zufluss.testing.s3 import S3Server, properties
from zufluss.testing.server import DevServer

T = TypeVar("T")

PATIENCE_SECONDS = WAIT_SECONDS
PACE_SECONDS = 0.04
"""Pause of a writer between batches, so that uploads keep up."""
OBJECT_BYTES_MAX = 1 << 26
READS_AT_ONCE = 16
DIRECTORY, IN_S3 = 1, 2
"""The locations by id."""

BUSY = {
    "log.segment.file-size": "16kb",
    "log.index.interval-size": "1kb",
    "log.flush.offset.checkpoint-interval": "100ms",
    "log.retention.check-interval": "50ms",
    "remote.log.task-interval-duration": "20ms",
    "kv.snapshot.interval": "200ms",
    "zufluss.remote.request-timeout": "2s",
    "zufluss.remote.probe-interval": "20ms",
    "zufluss.remote.sweep.interval": "0",
}
QUIET = {"remote.log.task-interval-duration": "1h", "kv.snapshot.interval": "1h"}
"""Options of a server that uploads nothing."""
SWEEPING = {
    **QUIET,
    "zufluss.remote.sweep.interval": "100ms",
    "zufluss.remote.sweep.grace": "0",
}
"""Options of a server that deletes unreferenced files at once; valid only without uploads."""
TABLE = {"table.log.tiered.local-segments": "1", "table.log.arrow.compression.type": "NONE"}
CLIENT = {"client.request-timeout": "5s", "client.scanner.log.fetch.wait-max-time": "20ms"}


class Locations:
    """A directory and an S3 bucket, as a server and as a test reach them."""

    def __init__(self, root: Path, s3: S3Server, proxy: FaultProxy) -> None:
        bucket = f"b{random.SystemRandom().randrange(1 << 48):x}"
        uris = [f"file://{root / 'cold'}", f"{s3.bucket(bucket)}/zufluss"]
        self.properties = {"remote.data.dirs": ",".join(uris), **properties(proxy.endpoint)}
        self._objects = [Objects(parse_location(uri, "location"), s3.properties) for uri in uris]

    def objects(self, location_id: int) -> Objects:
        """The objects of a location, without the proxy."""
        return self._objects[location_id - 1]

    async def names(self) -> set[tuple[int, str]]:
        """Location and path of all files of logs and snapshots."""
        found = set()
        for location_id in (DIRECTORY, IN_S3):
            for kind in ("log", "kv"):
                async for page in self.objects(location_id).list(kind):
                    found |= {(location_id, each.path) for each in page}
        return found

    async def read(self, location_id: int, path: str) -> bytes:
        """All of an object."""
        return await self.objects(location_id).get(path, limit=OBJECT_BYTES_MAX)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Do something with objects."""
    return asyncio.run(work)


# -- load ---------------------------------------------------------------------------------------


class PausedLoad(Load):
    """A load that can be stopped for a while, with everything acknowledged."""

    def __init__(self, port: int, history: History) -> None:
        super().__init__(port, history)
        self.paused = threading.Event()
        self._changed = threading.Condition()
        self._resting = 0

    def pause(self) -> None:
        """Pause all writers; returns when all batches are acknowledged."""
        self.paused.set()
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._resting == len(self.workers) or bool(self.history.problems),
                PATIENCE_SECONDS,
            )
        assert not self.history.problems, self.history.problems
        assert done, "writers were not acknowledged"

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self.paused.clear()
            self._changed.notify_all()

    def rest(self) -> None:
        """A worker is done for now."""
        with self._changed:
            self._resting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.paused.is_set() or self.finish.is_set())
            self._resting -= 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish.set()
        self.resume()
        super().__exit__(kind, value, trace)


class Paced(Worker):
    """A slow writer that can be paused."""

    load: PausedLoad

    @property
    def finishing(self) -> bool:
        return self.load.finish.is_set() or self.load.paused.is_set()

    def work(self) -> None:
        while not self.load.given_up.is_set():
            super().work()  # type: ignore[safe-super]  # the writer's
            if self.load.finish.is_set():
                return
            self.load.rest()

    def wait_a_little(self) -> None:
        self.load.given_up.wait(PACE_SECONDS)


class Appender(Paced, RawWriter):
    """Appends rows."""

    def new_batch(self, lane: BucketLane) -> Sent:
        self.wait_a_little()
        return super().new_batch(lane)


class Upserter(Paced, PutWriter):
    """Puts and deletes rows."""

    def __init__(self, load: PausedLoad, seed: int, target: Target) -> None:
        super().__init__(load, seed, target)
        self.without_changes: Counter[int] = Counter()
        """Batches, by bucket, that changed nothing; each has an offset of its own."""

    def new_batch(self, lane: PutLane) -> SentPut:
        self.wait_a_little()
        before = len(lane.model.changes)
        sent = super().new_batch(lane)
        self.without_changes[lane.bucket] += before == len(lane.model.changes)
        return sent


class Traffic:
    """A log table and a primary-key table under load, with these properties; a context."""

    def __init__(
        self, server: DevServer, rng: random.Random, properties: dict[str, str] | None = None
    ) -> None:
        self.server = server
        self.log = create_target(server.port, "log", 2, TABLE | (properties or {}))
        self.keyed = create_keyed_target(server.port, "keyed", 2, TABLE | (properties or {}))
        self.appends = PausedLoad(server.port, History())
        self.upserts = PausedLoad(server.port, History())
        self.appends.workers += [
            Appender(self.appends, rng.randrange(1 << 32), self.log) for _ in range(2)
        ]
        self.writers = [Upserter(self.upserts, rng.randrange(1 << 32), self.keyed)]
        self.upserts.workers += self.writers

    @property
    def targets(self) -> tuple[Target, Target]:
        return self.log, self.keyed

    @property
    def buckets(self) -> list[TableBucket]:
        return [bucket for target in self.targets for bucket in target.all_buckets]

    @property
    def acked_rows(self) -> int:
        return self.appends.history.acked_rows + self.upserts.history.acked_rows

    def __enter__(self) -> Self:
        self.appends.__enter__()
        self.upserts.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.appends.__exit__(kind, value, trace)
        self.upserts.__exit__(kind, value, trace)

    def progress(self, rows: int = 50) -> None:
        """Return when so many more rows of both tables were acknowledged."""
        for load in (self.appends, self.upserts):
            done = load.history.wait_for_acks(rows, PATIENCE_SECONDS)
            assert not load.history.problems, load.history.problems
            assert done, "no progress"

    def pause(self) -> None:
        self.appends.pause()
        self.upserts.pause()

    def resume(self) -> None:
        self.appends.resume()
        self.upserts.resume()

    def check(self) -> None:
        """Check both tables against what was sent. Only while paused."""
        with zufluss.connect(self.server.bootstrap, **CLIENT) as conn:
            contents = dict(logs_of(conn, self.log))
            assert violations(self.appends.history, contents) == []
            assert all(content.start == 0 for content in contents.values())
            problems = kv_violations(
                self.server.port, self.keyed, self.writers, lambda b: self.changes(conn, b)
            )
            assert problems == []

    def changes(self, conn: Connection, bucket: int) -> list[Change]:
        """The changelog of a bucket, read with our client from the first offset on."""
        table = conn.table(f"{DATABASE}.{self.keyed.name}")
        rows = table.changelog(buckets=[bucket]).to_arrow().to_pylist()
        offsets = [row["_log_offset"] for row in rows]
        assert offsets == sorted(set(offsets)), "a change is there twice"
        with RawClient(self.server.port) as client:
            end = client.end_offset(self.keyed.table_id, bucket)
        without = sum(writer.without_changes[bucket] for writer in self.writers)
        assert end == len(offsets) + without, "offsets are missing"
        return [
            Change(r["_log_offset"], r["_change_type"], (r["id"], r["batch"], r["text"]))
            for r in rows
        ]


def logs_of(conn: Connection, target: Target) -> Iterator[tuple[TableBucket, Content]]:
    """All of each bucket, read with our client from the first offset on."""
    table = conn.table(f"{DATABASE}.{target.name}")
    for bucket in target.all_buckets:
        scan = table.scan(["key"], with_offsets=True, buckets=[bucket.bucket_id])
        rows = scan.to_arrow()
        offsets = rows["__offset"].to_numpy()
        content = Content(int(offsets[0]) if len(offsets) else 0, rows["key"].to_numpy(), {})
        if not np.array_equal(offsets, np.arange(content.start, content.end)):
            content.problems.append("its offsets are not dense")
        yield bucket, content


# -- what is in the locations -------------------------------------------------------------------


def remotes(server: DevServer, buckets: Iterable[TableBucket]) -> dict[TableBucket, BucketRecord]:
    """What the coordinator has on record of buckets that exist.

    Read beside it, from a copy of its store, which is whole when nothing is committed meanwhile.
    """
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in (DATABASE_FILE, f"{DATABASE_FILE}-wal"):
            with suppress(FileNotFoundError):
                shutil.copy(server.data_dir / "meta" / name, directory)
        with closing(sqlite3.connect(Path(directory) / DATABASE_FILE)) as store:
            for bucket in buckets:
                query = "SELECT value FROM entry WHERE path = ?"
                row = store.execute(query, (bucket_remote(bucket),)).fetchone()
                if row is not None:
                    found[bucket] = BucketRecord.from_json(row[0])
    return found


def settle(traffic: Traffic) -> None:
    """Wait until all closed segments and snapshots are uploaded. Only while paused."""

    def done() -> bool:
        try:
            known = remotes(traffic.server, traffic.buckets)
        except sqlite3.DatabaseError:  # copied in the middle of a change
            return False
        return all(
            _copied(traffic.server.data_dir, target, bucket, known[bucket])
            for target in traffic.targets
            for bucket in target.all_buckets
        ) and all(
            _has_newest(traffic.server.port, bucket, known[bucket])
            for bucket in traffic.keyed.all_buckets
        )

    eventually(done, "everything is in remote storage")


def _copied(data_dir: Path, target: Target, bucket: TableBucket, known: BucketRecord) -> bool:
    """Whether every segment but the active one is in remote storage."""
    directory = data_dir / DATABASE / f"{target.name}-{target.table_id}"
    files = (directory / f"log-{bucket.bucket_id}").glob("*.log")
    active = max(int(path.stem) for path in files)
    return active == (0 if known.manifest is None else known.manifest.end_offset)


def _has_newest(port: int, bucket: TableBucket, known: BucketRecord) -> bool:
    with RawClient(port) as client:
        end = client.end_offset(bucket.table_id, bucket.bucket_id)
    return bool(end == (known.snapshots[-1].log_offset if known.snapshots else 0))


class Audit(NamedTuple):
    """The objects that the coordinator refers to."""

    names: set[tuple[int, str]]
    """Location and path of all objects."""
    files: list[RemoteFile]
    """Objects whose checksum is known."""
    problems: list[str]


async def audit(locations: Locations, known: Mapping[TableBucket, BucketRecord]) -> Audit:
    """All objects that the coordinator refers to, and their defects."""
    found = Audit(set(), [], [])
    for bucket, record in known.items():
        if record.manifest is not None:
            at = record.manifest.location_id, record.manifest.path
            found.names.add(at)
            manifest = LogManifest.from_json(await locations.read(*at))
            found.files.extend(manifest.files)
            problems = _manifest_problems(manifest, record.manifest)
            found.problems.extend(f"{bucket}: {problem}" for problem in problems)
        for handle in record.snapshots:
            at = handle.metadata_location, handle.metadata_path
            found.names.add(at)
            snapshot = KvSnapshot.from_json(await locations.read(*at))
            found.files.extend(snapshot.objects)
    at_once = asyncio.Semaphore(READS_AT_ONCE)
    reads = (_problems(locations, file, at_once) for file in set(found.files))
    for problems in await asyncio.gather(*reads):
        found.problems.extend(problems)
    found.names.update((file.location_id, file.path) for file in found.files)
    return found


def _manifest_problems(manifest: LogManifest, record: ManifestRecord) -> Iterator[str]:
    segments = manifest.segments
    ends = [record.start_offset, *(s.end_offset for s in segments)]
    if [*(s.start_offset for s in segments), record.end_offset] != ends:
        yield f"segments do not follow each other: {segments}"
    twice = [i for i, n in Counter(s.segment_id for s in segments).items() if n > 1]
    if twice:
        yield f"segments that are there twice: {twice}"


async def _problems(
    locations: Locations, file: RemoteFile, at_once: asyncio.Semaphore
) -> list[str]:
    try:
        async with at_once:
            data = await locations.read(file.location_id, file.path)
    except Exception as e:
        return [f"{file}: {e}"]
    return [] if (len(data), crc32c(data)) == file[2:] else [f"{file} has other bytes"]


def snapshot_problems(traffic: Traffic, known: Mapping[TableBucket, BucketRecord]) -> list[str]:
    """Snapshots, read with our client, that are not the fold of the changelog below them."""
    found = []
    with zufluss.connect(traffic.server.bootstrap, **CLIENT) as conn:
        table = conn.table(f"{DATABASE}.keyed")
        for bucket in traffic.keyed.all_buckets:
            changes = traffic.changes(conn, bucket.bucket_id)
            for handle in known[bucket].snapshots:
                state = fold([c for c in changes if c.offset < handle.log_offset], RULES)
                with table.kv_snapshot(bucket, handle.snapshot_id) as reader:
                    rows = [tuple(row.values()) for part in reader for row in part.to_pylist()]
                if {row[:1]: row for row in rows} != state:
                    found.append(f"{bucket}: snapshot {handle.snapshot_id} is not the fold")
    return found


def check_locations(traffic: Traffic, locations: Locations) -> Audit:
    """Assert that every referenced object exists and is intact."""
    known = remotes(traffic.server, traffic.buckets)
    audit_result = run(audit(locations, known))
    problems = [*audit_result.problems, *snapshot_problems(traffic, known)]
    assert problems == [], problems[:5]
    return audit_result
