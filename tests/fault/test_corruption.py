"""Damaged files: every read gives the right bytes or a clear error, never wrong bytes.

Promise A7. Files of a stopped server are damaged, and the next start has to cope: an index, a
writer snapshot or a checkpoint only shortens the way, so all data is still served; a damaged
segment gives right bytes or an error for its batches; the other buckets never notice. Batches are
compared by everything their checksum covers, and their offsets: the commit time and the leader
epoch stand outside of it in this format.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.counts import rounds
from tests.end_to_end.raw import OFFSET_EARLIEST, OFFSET_LATEST, RawClient, table_path
from tests.fault.damage import hurt
from tests.fault.history import History
from tests.fault.load import Load, RawWriter, Target, create_target, encode, offset_of, rows
from tests.log.support import append, batch, open_log
from tests.servers import WarmServer
from zufluss.errors import CorruptRecordError
from zufluss.log.checkpoint import read_checkpoint
from zufluss.log.files import Files
from zufluss.log.log import Log
from zufluss.log.segment import PagesNotCachedError
from zufluss.model.table import TableBucket
from zufluss.record.header import BatchHeader, iter_headers
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

HELPERS = (".index", ".timeindex", ".writer_snapshot", ".checkpoint")
"""Files whose loss costs only time."""

OLDEST = "00000000000000000000.log"
"""The first segment. It may not vanish as a whole: that looks as if it had expired."""

Covered = tuple[BatchHeader, bytes]
"""A batch without what its checksum does not cover."""


def covered(records: bytes | memoryview) -> dict[int, Covered]:
    """The batches by base offset."""
    view = memoryview(records)
    return {
        header.base_offset: (
            header._replace(timestamp=0, leader_epoch=0),
            bytes(view[at + header.header_size : at + header.size]),
        )
        for at, header in iter_headers(view)
    }


# -- one log, in this process -----------------------------------------------------------------


class Original(NamedTuple):
    """A log as it was before it was damaged."""

    directory: Path
    batches: dict[int, Covered]
    durable: int
    """Everything below this offset was durable."""
    end: int
    sequence: int
    """The next number of its writer."""


SETTINGS = {"segment_bytes_max": 20_000, "index_interval_bytes": 500}


@pytest.fixture(scope="module", params=["stopped", "killed"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Original:
    """A log of several segments; when killed, its last third was not synced."""
    rng = random.Random(1)
    directory = tmp_path_factory.mktemp("original")
    log = open_log(directory, **SETTINGS)
    for sequence in range(150):
        body = rng.randbytes(rng.randint(20, 700))
        append(log, batch(2, body=body, writer=1, sequence=sequence), now_ms=sequence)
        if sequence == 100 and request.param == "killed":
            plan = log.plan_sync(checkpoint=True)
            plan.run(log.files)
            log.synced(plan)
    batches = covered(bytes(read_everything(log)))
    end = log.log_end_offset
    log.close(clean=request.param == "stopped")
    durable = end if request.param == "stopped" else 202
    return Original(directory, batches, durable, end, 150)


def read_everything(log: Log) -> bytes:
    parts = []
    offset = log.log_start_offset
    while offset < log.high_watermark:
        read = read_patiently(log, offset)
        parts.append(bytes(read[0]))
        offset = read[1]
    return b"".join(parts)


def read_patiently(log: Log, offset: int) -> tuple[memoryview, int]:
    """Read from an offset as the server does, loading cold pages first."""
    for _ in range(50):
        try:
            read = log.read(offset, 3000, at_least_one=True)
        except PagesNotCachedError as cold:
            cold.load()
        else:
            return read.records, read.end_offset
    read = log.read(offset, 3000, at_least_one=True, nowait=False)
    return read.records, read.end_offset


def served(log: Log, original: Original) -> dict[int, Covered]:
    """The batch at each offset; offsets with an error are left out."""
    found: dict[int, Covered] = {}
    for offset in original.batches:
        if offset < log.high_watermark and offset not in found:
            try:
                found |= covered(read_patiently(log, offset)[0])
            except CorruptRecordError:
                continue
    return found


def examine(original: Original, directory: Path, name: str) -> str:
    """Open a damaged log and compare it with the original; returns the outcome."""
    helper = name.endswith(HELPERS)
    try:
        log = open_log(directory, Files(), **SETTINGS)
    except CorruptRecordError:
        assert not helper, "a helper file is damaged and the log is refused"
        return "refused"
    batches = served(log, original)
    wrong = [o for o, b in batches.items() if original.batches.get(o) != b]
    assert not wrong, f"wrong batches at {wrong}"
    assert log.log_end_offset >= original.durable, "something durable was cut"
    if helper:
        assert batches == original.batches
        assert log.writers.retained(1)[-1].sequence == original.sequence - 1
    sequence = log.writers.retained(1)[-1].sequence + 1
    appended = append(log, batch(1, writer=1, sequence=sequence))
    assert list(covered(read_patiently(log, appended.base_offset)[0])) == [appended.base_offset]
    log.close(clean=True)
    return "complete" if batches == original.batches else "partly"


@pytest.mark.slow
def test_no_damage_makes_a_log_give_wrong_batches(
    original: Original, tmp_path: Path, rng: random.Random
) -> None:
    outcomes: Counter[str] = Counter()
    names = sorted(p.name for p in (original.directory / "log-0").iterdir())
    for _ in range(rounds(80, 5000)):
        directory = tmp_path / "damaged"
        shutil.copytree(original.directory, directory)
        name = rng.choice(names)
        what = hurt(directory / "log-0" / name, rng, may_vanish=name != OLDEST)
        try:
            outcome = examine(original, directory, name)
        except Exception as e:
            raise AssertionError(what) from e
        outcomes[f"{Path(name).suffix} {outcome}"] += 1
        shutil.rmtree(directory)
    print(dict(sorted(outcomes.items())))


def test_batches_that_read_ahead_brought_into_the_page_cache_are_verified_too(
    tmp_path: Path,
) -> None:
    """The kernel reads more than it was asked for, so being cached proves nothing."""
    log = open_log(tmp_path)
    for _ in range(3):
        append(log, batch(body=bytes(100)))
    log.close(clean=True)
    (path,) = (tmp_path / "log-0").glob("*.log")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert path.read_bytes() == data  # it is in the page cache now
    log = open_log(tmp_path)
    assert log.read(0, 200).end_offset == 1
    with pytest.raises(CorruptRecordError, match="CRC"):
        log.read(0, 1000)
    with pytest.raises(CorruptRecordError, match="offset 2"):
        log.read(2, 1000)


# -- a whole server ---------------------------------------------------------------------------

PROPERTIES = {"log.segment.file-size": "64kb", "log.index.interval-size": "1kb"}


class Data(NamedTuple):
    """The directory of a server that stopped, and what it held."""

    directory: Path
    target: Target
    contents: dict[TableBucket, dict[int, Covered]]
    killed: bool


@pytest.fixture(scope="module", params=["stopped", "killed"])
def data(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Data]:
    directory = tmp_path_factory.mktemp("data")
    with WarmServer(directory / "data", PROPERTIES) as server:
        target = create_target(server.port, "t", 3)
        history = History()
        load = Load(server.port, history)
        load.add(RawWriter, 1, target)
        load.add(RawWriter, 2, target)
        with load:
            assert history.wait_for_acks(10_000, 60)
        contents = {b: fetch_all(server.port, b)[0] for b in target.all_buckets}
        if request.param == "killed":
            server.kill()
        else:
            server.stop()
            shutil.rmtree(directory / "data" / ".commit-log")
        yield Data(directory / "data", target, contents, request.param == "killed")


def fetch_all(
    port: int, bucket: TableBucket, known: Iterable[int] = ()
) -> tuple[dict[int, Covered], list[str]]:
    """The batches of a bucket, and the errors on the way; reading goes on at the next known one."""
    found: dict[int, Covered] = {}
    errors = []
    with RawClient(port) as client:
        try:
            offset = offset_of(client, bucket, OFFSET_EARLIEST)
            end = offset_of(client, bucket, OFFSET_LATEST)
        except AssertionError as e:
            return {}, [str(e)]
        while offset < end:
            entry = client.fetch(
                bucket.table_id, offset, bucket.bucket_id, max_wait_ms=1, max_bucket_bytes=20_000
            )
            if entry.error_code:
                errors.append(entry.error_message)
                offset = min((o for o in known if o > offset), default=end)
            else:
                found |= covered(entry.records)
                offset = max(offset, *(h.next_offset for h, _ in found.values()))
    return found, errors


def copy(source: Path, target: Path) -> None:
    """Copy a data directory; the commit log is mostly zeros."""
    subprocess.run(["cp", "-a", "--sparse=always", str(source), str(target)], check=True)


def bucket_of(path: Path, target: Target) -> TableBucket | None:
    """The bucket a file belongs to."""
    name = path.parent.name
    return target.bucket(int(name.removeprefix("log-"))) if name.startswith("log-") else None


@pytest.mark.slow
def test_a_damaged_file_never_makes_a_server_give_wrong_batches(
    data: Data, warm_server: Callable[..., WarmServer], rng: random.Random
) -> None:
    files = [p.relative_to(data.directory) for p in data.directory.rglob("*") if p.is_file()]
    files = [p for p in files if p.parts[0] in ("crash", ".commit-log")]
    outcomes: Counter[str] = Counter()
    for number in range(rounds(6, 250)):
        server = warm_server(PROPERTIES, name=f"damaged{number}")
        copy(data.directory, server.data_dir)
        path = server.data_dir / rng.choice(files)
        what = hurt(path, rng, may_vanish=path.name != OLDEST)
        server.start()
        outcome = compare(server.port, data, path, what)
        outcomes[f"{path.suffix} {outcome}"] += 1
        server.kill()
        shutil.rmtree(server.data_dir)
    print(dict(sorted(outcomes.items())))


def compare(port: int, data: Data, path: Path, what: str) -> str:
    """Compare a server's batches with the original; returns the outcome of the damaged bucket."""
    hurt_bucket = bucket_of(path, data.target)
    outcome = "complete"
    for bucket, expected in data.contents.items():
        found, errors = fetch_all(port, bucket, expected)
        wrong = [o for o, b in found.items() if expected.get(o) != b]
        assert not wrong, f"{what}: {bucket} gives wrong batches at {wrong}"
        if found == expected and not errors:
            continue
        assert bucket == hurt_bucket, f"{what}: {bucket} is not whole: {errors[:3]}"
        assert path.suffix == ".log", f"{what}: {bucket} is not whole: {errors[:3]}"
        assert errors or data.killed, f"{what}: {bucket} lost something and does not say so"
        outcome = "partly" if found else "refused"
    with RawClient(port) as client:
        for bucket in data.contents:
            if bucket != hurt_bucket:
                entry = client.produce(bucket.table_id, encode(rows(0, 1, 9)), bucket.bucket_id)
                assert not entry.error_code, f"{what}: {entry.error_message}"
    return outcome


def test_the_commit_log_brings_back_what_the_segments_lost(
    warm_server: Callable[..., WarmServer], rng: random.Random
) -> None:
    """As after a power failure: of the segments only what a checkpoint covers is there."""
    server = warm_server(PROPERTIES).start()
    target = create_target(server.port, "t", 2)
    commit_file = server.data_dir / ".commit-log" / "commit-0.log"
    with RawClient(server.port) as client:
        while not commit_file.exists() or commit_file.read_bytes()[:8] != b"ZUFLCMT1":
            client.produce(target.table_id, encode(rows(0, 1, 9)))
        server.stop()
    server.start()
    with RawClient(server.port) as client:
        for key in range(300):
            data = encode(rows(key, rng.randint(1, 9), 100))
            assert not client.produce(target.table_id, data, rng.randrange(2)).error_code
    expected = {b: fetch_all(server.port, b)[0] for b in target.all_buckets}
    server.kill()
    lost = sum(cut_to_checkpoint(d) for d in server.data_dir.glob("crash/*/log-*"))
    assert lost > 0
    server.start()
    assert {b: fetch_all(server.port, b)[0] for b in target.all_buckets} == expected


def cut_to_checkpoint(directory: Path) -> int:
    """Remove what a log has above its recovery point; returns how many bytes that were."""
    checkpoint = read_checkpoint(directory)
    base, position = (checkpoint.segment_base, checkpoint.position) if checkpoint else (0, 0)
    lost = 0
    for path in sorted(directory.glob("*.log")):
        data = path.read_bytes()
        keep = position if int(path.stem) == base else len(data) if int(path.stem) < base else 0
        lost += len(data) - keep
        path.write_bytes(data[:keep])
        if not keep:
            path.unlink()
    return lost


def test_a_bucket_that_is_refused_can_be_dropped_and_frees_its_disk(
    data: Data, warm_server: Callable[..., WarmServer]
) -> None:
    if data.killed:
        pytest.skip("once is enough")
    server = warm_server(PROPERTIES)
    copy(data.directory, server.data_dir)
    for path in server.data_dir.glob("crash/*/log-0/*.log"):
        path.write_bytes(b"rubbish")
    server.start()
    assert "refused" in server.log() or fetch_all(server.port, data.target.bucket(0))[1]
    with RawClient(server.port) as client:
        request = m.DropTableRequest(
            table_path=table_path("crash", "t"), ignore_if_not_exists=False
        )
        client.call(ApiKey.DROP_TABLE, request)
    assert server.stop() == 0
    assert not (server.data_dir / "crash").exists()
