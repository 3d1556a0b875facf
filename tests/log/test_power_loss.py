"""Power failures: any moment of a recorded run, any part of what was not synced lost.

A seeded workload drives the log manager with group commit; every operation on files is recorded.
For many moments of the run a disk image is made as a power failure could leave it, the logs are
recovered from it, and compared with what the workload knows: everything acknowledged is there, byte
for byte, without hole or duplicate, and the writers are remembered as their batches say.
`ZUFLUSS_FAULT=full` makes 20 000 images instead of a sample.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.counts import rounds
from tests.log.disk import (
    ManualWorker,
    Operation,
    RecordingFiles,
    SilentFiles,
    crash_image,
    prefixes,
)
from tests.log.support import append, batch, entry, read_all
from zufluss.errors import OffsetOutOfRangeError
from zufluss.log import manager as manager_module
from zufluss.log.config import FlushMode, LogConfig
from zufluss.log.files import Files
from zufluss.log.log import Log
from zufluss.log.manager import LogManager
from zufluss.log.writer_state import WriterState
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.record.header import BatchHeader, iter_headers

WORKLOADS = rounds(10, 50)
IMAGES = rounds(50, 400)

PATH = PhysicalTablePath("db", "events", None)
BUCKETS = [TableBucket(7, None, 0), TableBucket(7, None, 1), TableBucket(7, None, 2)]
CONFIG = LogConfig(
    segment_bytes_max=3000, index_interval_bytes=300, ttl_ms=0, writer_expiry_ms=1 << 50
)
EXPIRING = LogConfig(
    segment_bytes_max=3000, index_interval_bytes=300, ttl_ms=40, writer_expiry_ms=1 << 50
)


@dataclass
class Known:
    """What the workload knows of a bucket: the batches of each truncation period."""

    versions: list[list[bytes]] = field(default_factory=lambda: [[]])
    sequences: dict[int, int] = field(default_factory=dict)


class Workload:
    """A seeded run over three buckets, with restarts."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.rng = random.Random(seed)
        self.files = RecordingFiles(root)
        self.known = {bucket: Known() for bucket in BUCKETS}
        self.now = 1000
        self.start()

    def start(self) -> None:
        self.workers: list[ManualWorker] = []
        self.manager = start_manager(self.root, self.files, self.workers, self._durable)
        self.logs = {bucket: self.manager.log(bucket) for bucket in BUCKETS}
        for bucket, log in self.logs.items():
            assert log is not None
            self._recovered(bucket, log)

    def _recovered(self, bucket: TableBucket, log: Log) -> None:
        """A killed process loses nothing that was written; what was not acknowledged is now."""
        version = self.known[bucket].versions[-1]
        assert log.log_end_offset == _end(version)
        self.files.mark(("ack", bucket, log.log_end_offset))

    def _durable(self, items: list[tuple[Log, int]]) -> None:
        for log, end in items:
            log.advance_high_watermark(end)
            self.files.mark(("ack", log.bucket, end))

    def step(self) -> None:
        self.now += self.rng.randrange(4)
        weights = {
            self.append: 60, self.schedule: 25, self.run_commit: 40, self.run_flush: 10,
            self.roll: 2, self.expire: 2, self.truncate: 1, self.restart: 1, self.stop: 1,
        }  # fmt: skip
        self.rng.choices(list(weights), list(weights.values()))[0]()

    def append(self) -> None:
        bucket = self.rng.choice(BUCKETS)
        log, known = self.logs[bucket], self.known[bucket]
        assert log is not None
        writer = self.rng.choice((-1, 5, 6))
        batches = []
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            sequence = known.sequences.get(writer, -1) + 1 if writer >= 0 else -1
            known.sequences[writer] = sequence
            body = self.rng.randbytes(self.rng.choice((4, 40, 400)))
            batches.append(
                batch(self.rng.randrange(1, 5), body=body, writer=writer, sequence=sequence)
            )
        view, checked = entry(*batches)
        result = log.append(view, checked, self.now)
        stamped = view[checked[0].start : checked[-1].end]
        known.versions[-1] += [bytes(stamped[at : at + h.size]) for at, h in iter_headers(stamped)]
        self.manager.commit(log, result.end_offset, stamped)

    def schedule(self) -> None:
        self.manager.schedule()

    def run_commit(self) -> None:
        self.workers[1].run(1)

    def run_flush(self) -> None:
        self.workers[0].run(1)

    def roll(self) -> None:
        log = self.logs[self.rng.choice(BUCKETS)]
        assert log is not None
        log.roll()

    def expire(self) -> None:
        bucket = self.rng.choice(BUCKETS)
        log = self.logs[bucket]
        assert log is not None
        log.config = EXPIRING
        before = len(self.files.operations)
        retired = log.expire(self.now)
        log.config = CONFIG
        mark = Operation("mark", 0, (("start", bucket, log.log_start_offset),))
        self.files.operations.insert(before, mark)
        if retired is not None:
            retired.remove(self.files)

    def truncate(self) -> None:
        bucket = self.rng.choice(BUCKETS)
        log, known = self.logs[bucket], self.known[bucket]
        assert log is not None
        offset = self.rng.randrange(log.log_start_offset, log.log_end_offset + 1)
        end = max(
            (
                _header(b).base_offset
                for b in known.versions[-1]
                if _header(b).base_offset <= offset
            ),
            default=0,
        )
        end = log.log_end_offset if offset == log.log_end_offset else end
        self.files.mark(("truncating", bucket, end))
        log.truncate_to(offset)
        assert log.log_end_offset == end
        known.versions.append([b for b in known.versions[-1] if _header(b).next_offset <= end])
        known.sequences = _sequences(known.versions[-1])
        self.files.mark(("version", bucket, len(known.versions) - 1))

    def restart(self) -> None:
        """Kill the process and start it again; the page cache survives."""
        for log in self.logs.values():
            assert log is not None
            log.close(clean=False)
        self.start()

    def stop(self) -> None:
        """Stop cleanly and start again."""
        for worker in reversed(self.workers):
            worker.run()
        for log in self.logs.values():
            assert log is not None
            log.close(clean=True)
        self.start()


def start_manager(
    root: Path, files: Files, workers: list[ManualWorker], on_durable: Any
) -> LogManager:
    def make_worker(name: str) -> ManualWorker:
        workers.append(ManualWorker())
        return workers[-1]

    manager = LogManager(
        root,
        files=files,
        flush=FlushMode.ACK,
        on_durable=on_durable,
        on_failure=_no_failure,
        commit_file_bytes=16 << 10,
        make_worker=make_worker,
    )
    for bucket in BUCKETS:
        manager.open_log(PATH, bucket, CONFIG, 0)
    manager.started()
    return manager


def _no_failure(log: Log, cause: Exception) -> None:
    raise AssertionError(f"{log} failed: {cause}")


def _header(data: bytes) -> BatchHeader:
    return next(h for _, h in iter_headers(data))


def _end(batches: list[bytes]) -> int:
    return _header(batches[-1]).next_offset if batches else 0


def _sequences(batches: list[bytes]) -> dict[int, int]:
    return {_header(b).writer_id: _header(b).batch_sequence for b in batches}


@dataclass
class Promise:
    """What must hold for a bucket after a crash at some moment."""

    acknowledged: int = 0
    start_max: int = 0
    version: int = 0


def promises(operations: list[Operation]) -> dict[TableBucket, Promise]:
    """The promises made by the marks among these operations."""
    found = {bucket: Promise() for bucket in BUCKETS}
    for operation in operations:
        if operation.kind != "mark":
            continue
        what, bucket, value = operation.arguments[0]
        promise = found[bucket]
        if what == "ack":
            promise.acknowledged = max(promise.acknowledged, value)
        elif what == "start":
            promise.start_max = value
        elif what == "truncating":
            promise.acknowledged = min(promise.acknowledged, value)
        else:
            promise.version = value
    return found


def check_bucket(log: Log, known: Known, promise: Promise) -> None:
    """The recovered log is a prefix of what was appended that keeps the promise."""
    history = known.versions[promise.version]
    assert log.log_end_offset >= promise.acknowledged, "acknowledged data is gone"
    assert log.log_start_offset <= promise.start_max, "data that had not expired is gone"
    prefix = [b for b in history if _header(b).next_offset <= log.log_end_offset]
    assert _end(prefix) == log.log_end_offset
    expected = [b for b in prefix if _header(b).base_offset >= log.log_start_offset]
    assert read_all(log) == b"".join(expected)
    writers = WriterState(1 << 50)
    for data in prefix:
        h = _header(data)
        if h.writer_id >= 0:
            writers.record(h.writer_id, h.batch_sequence, h.base_offset, h.next_offset, h.timestamp)
    assert log.writers == writers


def check_image(image: Path, workload: Workload, moment: int) -> None:
    """Recover an image, check it, go on writing, and recover once more."""
    expected = promises(workload.files.operations[:moment])
    files = SilentFiles()
    manager = start_manager(image, files, [], lambda items: None)
    for bucket in BUCKETS:
        log = manager.log(bucket)
        assert log is not None
        check_bucket(log, workload.known[bucket], expected[bucket])
    before = {}
    for bucket in BUCKETS:
        log = manager.log(bucket)
        assert log is not None
        append(log, batch(3), now_ms=1 << 40)
        before[bucket] = read_all(log)
        log.close(clean=bucket.bucket_id == 0)
    manager = start_manager(image, files, [], lambda items: None)
    for bucket in BUCKETS:
        log = manager.log(bucket)
        assert log is not None
        assert read_all(log) == before[bucket]
        log.close(clean=False)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some entries count as large, so that their segments are synced directly."""
    monkeypatch.setattr(manager_module, "COPY_BYTES_MAX", 400)


@pytest.mark.parametrize("seed", range(WORKLOADS))
async def test_nothing_acknowledged_is_lost_in_a_power_failure(tmp_path: Path, seed: int) -> None:
    """The promise of flush mode `ack`."""
    root = tmp_path / "disk"
    root.mkdir()
    workload = Workload(root, seed)
    for _ in range(workload.rng.choice((60, 250))):
        workload.step()
    rng = random.Random(seed)
    for number, moment in enumerate(prefixes(workload.files.operations, rng, IMAGES)):
        image = tmp_path / "image"
        crash_image(
            workload.files.operations[:moment],
            workload.files.root_inode,
            image,
            random.Random(1000 * seed + number),
        )
        try:
            check_image(image, workload, moment)
        except (AssertionError, OSError, ValueError, OffsetOutOfRangeError) as e:
            raise AssertionError(f"seed {seed}, image {number}, operation {moment}: {e}") from e
        shutil.rmtree(image)
