"""Disk errors: no sync after a failed one is believed, and nothing stays broken when they end.

Promise A1. After a failed fdatasync the content of the disk is unknown, so the server never
acknowledges these writes; it closes their buckets and opens them again from their logs, until that
works. When the disk is full, the write that did not fit is undone, the client may repeat it, and
everything continues once there is space again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import SERVERS
from tests.counts import rounds
from tests.end_to_end.raw import RawClient
from tests.fault.history import Ack, History, violations
from tests.fault.load import LOST, Target, create_target, encode, read_all, rows
from tests.fault.small_disk import SmallDisk, small_disk
from tests.fault.strace import injected
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.errors import ErrorCode
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

STORAGE = ErrorCode.LOG_STORAGE_EXCEPTION
COPIED, LARGE = 20, 70_000
"""Sizes of a row: a small one is synced with the commit log, a large one with its segment."""


class Writer:
    """One row at a time to any bucket, repeated with the same number until it is acknowledged."""

    def __init__(self, port: int, target: Target) -> None:
        self.history = History()
        self.target = target
        self.lanes = {b: self.history.lane(gapless=True) for b in range(target.buckets)}
        self.pending: dict[int, tuple[int, bytes]] = {}
        self.sequences = dict.fromkeys(self.lanes, 0)
        self.connect(port)
        request = m.InitWriterRequest()
        self.writer_id = self.client.call(ApiKey.INIT_WRITER, request).writer_id

    def connect(self, port: int) -> None:
        self.client = RawClient(port)

    def write(self, bucket: int = 0, size: int = COPIED) -> int:
        """Send the row that waits, or a new one; the error code of the answer."""
        if bucket not in self.pending:
            key = self.lanes[bucket].take(1)
            data = encode(rows(key, 1, size), self.writer_id, self.sequences[bucket])
            self.pending[bucket] = key, data
            self.sequences[bucket] += 1
        key, data = self.pending[bucket]
        entry = self.client.produce(self.target.table_id, data, bucket)
        if not entry.error_code:
            del self.pending[bucket]
            where = self.target.bucket(bucket)
            self.history.acknowledged(Ack(key, 1, where, entry.base_offset))
        return int(entry.error_code)

    def end(self, bucket: int = 0) -> int:
        return self.client.end_offset(self.target.table_id, bucket)


@pytest.fixture
def server(warm_server: Callable[..., WarmServer]) -> WarmServer:
    return warm_server({"log.segment.file-size": "1mb"}).start()


@pytest.fixture
def writer(server: WarmServer) -> Iterator[Writer]:
    """A writer whose first rows are acknowledged; the commit log is in use."""
    writer = Writer(server.port, create_target(server.port, "t", 3))
    commit_file = server.data_dir / ".commit-log" / "commit-0.log"
    while not commit_file.exists() or commit_file.read_bytes()[:8] != b"ZUFLCMT1":
        assert writer.write() == 0
    assert [writer.write(bucket) for bucket in writer.lanes] == [0, 0, 0]
    yield writer
    writer.client.socket.close()


def check_after_restart(server: WarmServer, writer: Writer) -> None:
    """Assert that acknowledged rows exist, and that refused rows can be written now."""
    server.kill()
    server.start()
    writer.connect(server.port)
    assert [writer.write(bucket) for bucket in writer.lanes] == [0, 0, 0]
    assert [writer.write(bucket) for bucket in writer.lanes] == [0, 0, 0]
    assert violations(writer.history, read_all(server.port, [writer.target])) == []


def until_written(writer: Writer, bucket: int) -> None:
    """Repeat a write until the server has opened the bucket again."""
    eventually(lambda: writer.write(bucket) == 0, f"a write to bucket {bucket}")


def test_a_failed_sync_is_never_acknowledged_and_its_buckets_come_back_by_themselves(
    server: WarmServer, writer: Writer
) -> None:
    with injected(server.pid, "fdatasync:error=EIO"):
        assert writer.write(0) == STORAGE
        assert writer.write(1) == STORAGE
        assert writer.write(0) == STORAGE, "it is still being opened"
        examined = writer.client.call(ApiKey.EXAMINE_SERVER, m.ExamineServerRequest())
        problems = {f.subject: f.text for f in examined.findings if f.severity == 2}
        assert "recovering since" in problems["bucket crash.t 0"]
        assert "Input/output error" in problems["bucket crash.t 0"]
    for bucket in writer.lanes:
        until_written(writer, bucket)
    assert violations(writer.history, read_all(server.port, [writer.target])) == []
    check_after_restart(server, writer)


def test_a_failed_sync_of_a_segment_concerns_its_bucket_only(
    server: WarmServer, writer: Writer
) -> None:
    with injected(server.pid, "fdatasync:error=EIO:when=1"):
        assert writer.write(0, LARGE) == STORAGE
        assert writer.write(1) == 0
    assert [writer.write(bucket) for bucket in (1, 2)] == [0, 0]
    until_written(writer, 0)
    check_after_restart(server, writer)


@pytest.mark.parametrize("size", [COPIED, LARGE])
def test_a_write_that_does_not_fit_is_undone_and_can_be_repeated(
    server: WarmServer, writer: Writer, size: int
) -> None:
    for bucket in writer.lanes:
        end = writer.end(bucket)
        with injected(server.pid, "pwrite64:error=ENOSPC"):
            assert writer.write(bucket, size) == STORAGE
            assert writer.write(bucket) == STORAGE
        assert writer.end(bucket) == end
        assert writer.write(bucket) == 0
        assert writer.end(bucket) == end + 1
    check_after_restart(server, writer)


@pytest.mark.slow
def test_errors_of_the_disk_at_random_never_make_an_acknowledged_row_vanish(
    server: WarmServer, rng: random.Random
) -> None:
    """Any of these calls fails at random, in our code or in SQLite, until the server is killed."""
    for number in range(rounds(3, 100)):
        writer = Writer(server.port, create_target(server.port, f"t{number}", 3))
        call = rng.choice(("fdatasync", "pwrite64", "fsync", "ftruncate", "rename"))
        error = rng.choice(("EIO", "ENOSPC"))
        rule = f"{call}:error={error}:when={rng.randint(1, 20)}+{rng.randint(1, 5)}"
        with injected(server.pid, rule):
            for _ in range(60):
                writer.write(rng.randrange(3), rng.choice((COPIED, 5000, LARGE)))
        restart_and_check(server, writer, rule)


SYSTEM_CALLS = ("pwrite64", "fdatasync", "fsync", "ftruncate", "openat", "rename", "unlink")


@pytest.mark.slow
def test_a_death_at_any_system_call_loses_nothing(server: WarmServer, rng: random.Random) -> None:
    """Cross-checks our kill points: strace also sees calls that have none."""
    for number in range(rounds(6, 300)):
        writer = Writer(server.port, create_target(server.port, f"t{number}", 3))
        rule = f"{rng.choice(SYSTEM_CALLS)}:signal=KILL:when={rng.randint(1, 60)}"
        with injected(server.pid, rule):
            try:
                for step in range(40):
                    assert writer.write(rng.randrange(3), rng.choice((COPIED, LARGE))) == 0
                    if step % 8 == 0:
                        create_target(server.port, f"other{number}_{step}", 1)
            except LOST:
                pass
        restart_and_check(server, writer, rule)


def restart_and_check(server: WarmServer, writer: Writer, rule: str) -> None:
    """Kill and restart the server, and repeat unacknowledged writes."""
    server.kill()
    server.start()
    writer.connect(server.port)
    for bucket in list(writer.pending):
        assert writer.write(bucket) == 0, rule
    assert violations(writer.history, read_all(server.port, [writer.target])) == [], rule


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "120m") as disk:
        yield disk


@pytest.mark.slow
def test_a_full_disk_refuses_writes_serves_reads_and_recovers(
    disk: SmallDisk, rng: random.Random, request: pytest.FixtureRequest
) -> None:
    server = disk.server({"log.segment.file-size": "1mb"})
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        target = create_target(server.port, "t", 2)
        writer = Writer(server.port, target)
        for _ in range(rounds(3, 200)):
            disk.fill(leave=rng.choice((0, 4096, 300_000)))
            fill_up(writer, rng)
            assert violations(writer.history, read_all(server.port, [target])) == []
            disk.free()
            for bucket in writer.lanes:
                assert writer.write(bucket) == 0
            assert violations(writer.history, read_all(server.port, [target])) == []
        disk.fill(leave=0)
        server.kill()
        with suppress(RuntimeError):  # it may need space to start
            server.start()
            server.kill()
        disk.free()
        server.start()
        assert violations(writer.history, read_all(server.port, [target])) == []


def fill_up(writer: Writer, rng: random.Random) -> None:
    """Write until the disk is full, and a few times more."""
    refused = 0
    while refused < 5:
        code = writer.write(rng.randrange(2), rng.choice((COPIED, LARGE)))
        assert code in (0, STORAGE)
        refused += code == STORAGE
