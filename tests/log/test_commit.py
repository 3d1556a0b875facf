"""Group commit, the commit log, and the manager that runs them."""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.log.disk import ManualWorker, RecordingFiles, SilentFiles
from tests.log.support import batch, entry, offsets, read_all
from zufluss.errors import CorruptRecordError, LogStorageError
from zufluss.log.commit import GroupCommit
from zufluss.log.commit_log import BLOCK_BYTES, ENTRY_LENGTH, kept_in, key_of, read_commit_log
from zufluss.log.config import FlushMode, LogConfig
from zufluss.log.files import Files, OpenFile
from zufluss.log.log import WRITERS_INLINE, AppendResult, Log
from zufluss.log.manager import COMMIT_DIRECTORY, COPY_BYTES_MAX, LogManager, log_directory
from zufluss.log.worker import ThreadWorker
from zufluss.log.writer_state import WriterState
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.pacing import TURN_SECONDS

PATH = PhysicalTablePath("db", "t", None)
FIRST, SECOND = TableBucket(1, None, 0), TableBucket(1, None, 1)


class Server:
    """A manager with two logs whose workers the test runs."""

    def __init__(
        self,
        root: Path,
        files: Files | None = None,
        flush: FlushMode = FlushMode.ACK,
        buckets: tuple[TableBucket, ...] = (FIRST, SECOND),
        file_bytes: int = 1 << 16,
        *,
        start: bool = True,
    ) -> None:
        self.durable: list[tuple[TableBucket | None, int]] = []
        self.failures: list[Log] = []
        self.flush_worker, self.commit_worker = ManualWorker(), ManualWorker()
        workers = {"zufluss-flush": self.flush_worker, "zufluss-commit": self.commit_worker}
        self.manager = LogManager(
            root,
            files=files or SilentFiles(),
            flush=flush,
            on_durable=self._durable,
            on_failure=lambda log, cause: self.failures.append(log),
            commit_file_bytes=file_bytes,
            make_worker=workers.__getitem__,
        )
        self.refused: list[TableBucket] = []
        for bucket in buckets:
            try:
                self.manager.open_log(PATH, bucket, LogConfig(), 0)
            except (CorruptRecordError, OSError):
                self.refused.append(bucket)
        if start:
            self.manager.started()
            self.flush_worker.run()

    def _durable(self, items: list[tuple[Log, int]]) -> None:
        for log, end in items:
            log.advance_high_watermark(end)
            self.durable.append((log.bucket, end))

    def log(self, bucket: TableBucket = FIRST) -> Log:
        log = self.manager.log(bucket)
        assert log is not None
        return log

    def append(self, bucket: TableBucket = FIRST, body: bytes = b"body") -> AppendResult:
        view, checked = entry(batch(2, body=body))
        result = self.log(bucket).append(view, checked, 1)
        self.manager.commit(
            self.log(bucket), result.end_offset, view[checked[0].start : checked[-1].end]
        )
        return result

    def sync(self) -> None:
        self.manager.schedule()
        self.commit_worker.run()

    def kill(self) -> None:
        for log in self.manager.logs:
            log.close(clean=False)


async def test_entries_of_a_moment_become_durable_together(tmp_path: Path) -> None:
    files = RecordingFiles(tmp_path)
    server = Server(tmp_path, files)
    for bucket in (FIRST, SECOND, FIRST):
        server.append(bucket)
    server.manager.schedule()
    assert server.durable == []
    assert server.log().read(0, 1000).records.nbytes == 0
    before = len(files.operations)
    server.commit_worker.run()
    assert server.durable == [(FIRST, 4), (SECOND, 2)]
    assert [o.kind for o in files.operations[before:]] == ["write", "write", "sync"]
    assert len(offsets(read_all(server.log()))) == 2


async def test_the_next_group_gathers_while_one_is_syncing(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.append()
    server.manager.schedule()
    for _ in range(3):
        server.append()
        server.manager.schedule()
    assert len(server.commit_worker) == 1
    server.commit_worker.run(1)
    assert server.durable == [(FIRST, 2)]
    assert len(server.commit_worker) == 1
    server.commit_worker.run()
    assert server.durable == [(FIRST, 2), (FIRST, 8)]


async def test_a_large_entry_is_synced_in_its_segment(tmp_path: Path) -> None:
    files = RecordingFiles(tmp_path)
    server = Server(tmp_path, files)
    server.append(body=bytes(COPY_BYTES_MAX))
    before = len(files.operations)
    server.sync()
    kinds = [o.kind for o in files.operations[before:]]
    assert kinds[0] == "sync"
    assert kinds[-2:] == ["create", "write"], "the mark, which is not synced"
    assert kinds.count("write") == 1
    assert server.durable == [(FIRST, 2)]


async def test_the_commit_log_restores_what_the_segments_lost(tmp_path: Path) -> None:
    """Acknowledged entries are in the commit log only, until their segments are synced."""
    server = Server(tmp_path)
    for i in range(9):
        server.append(body=bytes([i]) * 300)
        server.append(SECOND)
        server.sync()
    before = read_all(server.log())
    server.kill()
    directory = log_directory(tmp_path, PATH, FIRST)
    for path in directory.iterdir():
        path.unlink()
    server = Server(tmp_path)
    assert read_all(server.log()) == before
    assert server.log(SECOND).log_end_offset == 18
    server.kill()
    (tmp_path / COMMIT_DIRECTORY / "commit-0.log").unlink()
    assert read_all(Server(tmp_path).log()) == before


async def test_a_log_that_is_written_before_others_are_open_leaves_them_their_entries(
    tmp_path: Path,
) -> None:
    """A tablet server of its own serves a bucket while it still opens the next one."""
    server = Server(tmp_path)
    for bucket in (FIRST, SECOND):
        server.append(bucket)
    server.sync()
    before = read_all(server.log(SECOND))
    server.kill()
    for path in log_directory(tmp_path, PATH, SECOND).iterdir():
        path.unlink()
    again = Server(tmp_path, buckets=(FIRST,), start=False)
    for _ in range(3):
        again.append(FIRST, body=b"." * 3000)
        again.sync()
        again.flush_worker.run()
    assert again.durable == [(FIRST, 4), (FIRST, 6), (FIRST, 8)], "synced in the segment"
    again.manager.open_log(PATH, SECOND, LogConfig(), 0)
    again.manager.started()
    assert read_all(again.log(SECOND)) == before


async def test_entries_of_a_dropped_table_are_ignored(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.append()
    server.sync()
    server.manager.drop(server.log())
    server.flush_worker.run()
    assert not log_directory(tmp_path, PATH, FIRST).exists()
    assert log_directory(tmp_path, PATH, SECOND).exists()
    server.kill()
    server = Server(tmp_path, buckets=(SECOND, TableBucket(2, None, 0)))
    assert server.refused == []
    assert server.log(TableBucket(2, None, 0)).log_end_offset == 0


async def test_a_log_dropped_while_its_group_gathers_costs_the_others_nothing(
    tmp_path: Path,
) -> None:
    """Its files are gone when the group starts; the group of the others must start all the same."""
    server = Server(tmp_path)
    server.append(SECOND)
    server.manager.schedule()
    server.append(FIRST, bytes(COPY_BYTES_MAX))
    server.append(SECOND)
    server.manager.drop(server.log())
    server.commit_worker.run()
    assert server.durable == [(SECOND, 2), (SECOND, 4)]
    server.append(SECOND)
    server.sync()
    entries, _ = read_commit_log(tmp_path / COMMIT_DIRECTORY)
    assert [offsets(bytes(e.batches)) for e in entries[(1, -1, 1)]] == [
        [(0, 2)], [(2, 2)], [(4, 2)],
    ]  # fmt: skip
    assert server.failures == []


async def test_a_full_commit_file_is_reused_only_when_its_entries_are_in_the_segments(
    tmp_path: Path,
) -> None:
    files = RecordingFiles(tmp_path)
    server = Server(tmp_path, files, file_bytes=4 * BLOCK_BYTES)
    for _ in range(3):
        server.append()
        server.sync()
    assert server.log().recovery_point == 0
    server.append()
    server.sync()  # no second file yet: this group goes to the segment
    server.flush_worker.run()
    assert server.log().recovery_point == 8
    for _ in range(20):
        server.append()
        server.sync()
        server.flush_worker.run()
    assert server.durable[-1] == (FIRST, 48)
    names = sorted(p.name for p in (tmp_path / COMMIT_DIRECTORY).iterdir())
    assert names == ["commit-0.log", "commit-1.log", "commit-2.log"]
    server.kill()
    assert Server(tmp_path).log().log_end_offset == 48


async def test_stale_groups_of_a_reused_file_are_never_replayed(tmp_path: Path) -> None:
    server = Server(tmp_path, file_bytes=4 * BLOCK_BYTES)
    for _ in range(32):
        server.append()
        server.sync()
        server.flush_worker.run()
    entries, generation = read_commit_log(tmp_path / COMMIT_DIRECTORY)
    assert generation > 3
    found = entries[(1, -1, 0)]
    bases = [offsets(bytes(e.batches))[0][0] for e in found]
    assert bases == list(range(64 - 2 * len(bases), 64, 2))


async def test_a_damaged_group_in_the_middle_refuses_the_logs_that_need_it(tmp_path: Path) -> None:
    """Bytes that were durable are damaged in both places: that must not look like a torn tail."""
    server = Server(tmp_path)
    server.append()
    server.sync()
    for bucket in (FIRST, SECOND):
        server.append(bucket)
        server.sync()
    server.kill()
    path = tmp_path / COMMIT_DIRECTORY / "commit-0.log"
    data = bytearray(path.read_bytes())
    data[BLOCK_BYTES + 100] ^= 1
    path.write_bytes(data)
    for lost in log_directory(tmp_path, PATH, FIRST).glob("*.log"):
        lost.unlink()
    server = Server(tmp_path)
    assert server.refused == [FIRST]
    assert server.log(SECOND).log_end_offset == 2
    kept = list((tmp_path / COMMIT_DIRECTORY).glob("*.kept"))
    assert len(kept) == 1
    server.append(SECOND)
    server.sync()
    server.kill()
    assert Server(tmp_path).refused == [FIRST]


class ClosedFiles(SilentFiles):
    """Files of which some cannot be opened."""

    def __init__(self, closed: str) -> None:
        super().__init__()
        self.closed = closed

    def open(self, path: Path, *, create: bool = False) -> OpenFile:
        if self.closed in str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open(path, create=create)


@pytest.mark.parametrize("write_between", [False, True])
async def test_a_log_that_the_disk_does_not_let_us_open_loses_nothing(
    tmp_path: Path, write_between: bool
) -> None:
    """Its acknowledged end may be in the commit log only, over any number of such starts."""
    server = Server(tmp_path)
    for _ in range(4):
        server.append()
    server.sync()
    before = read_all(server.log())
    server.kill()
    for lost in log_directory(tmp_path, PATH, FIRST).iterdir():
        lost.unlink()
    for _ in range(3):
        server = Server(tmp_path, ClosedFiles("log-0/"))
        assert server.refused == [FIRST]
        if write_between:
            server.append(SECOND)
            server.sync()
        server.kill()
    server = Server(tmp_path)
    assert read_all(server.log()) == before
    assert not list((tmp_path / COMMIT_DIRECTORY).glob("*.kept"))


async def test_a_refused_log_is_not_opened_without_the_commit_log(tmp_path: Path) -> None:
    """The disk is well again, but only the next start reads the entries it lacks."""
    server = Server(tmp_path)
    server.append()
    server.sync()
    server.kill()
    for lost in log_directory(tmp_path, PATH, FIRST).iterdir():
        lost.unlink()
    files = ClosedFiles("log-0/")
    server = Server(tmp_path, files)
    files.closed = "nothing"
    with pytest.raises(OSError, match="Too many open files"):
        server.manager.open_log(PATH, FIRST, LogConfig(), 0)
    server.kill()
    assert Server(tmp_path).log().log_end_offset == 2


async def test_truncated_entries_do_not_come_back(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for _ in range(4):
        server.append()
    server.sync()
    server.log().truncate_to(4)
    server.append(body=b"new")
    server.sync()
    before = read_all(server.log())
    server.kill()
    server = Server(tmp_path)
    assert read_all(server.log()) == before


async def test_a_group_under_way_does_not_acknowledge_a_truncated_log(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.append()
    server.append()
    server.manager.schedule()
    server.log().truncate_to(0)
    server.append(body=b"new")
    server.commit_worker.run(1)
    assert server.durable == []


async def test_entries_that_were_never_added_are_made_durable_with_the_next(tmp_path: Path) -> None:
    """Whoever appends without waiting must not leave a hole before those who wait."""
    server = Server(tmp_path)
    view, checked = entry(batch(2))
    server.log().append(view, checked, 1)
    server.append()
    server.sync()
    server.append()
    server.sync()
    entries, _ = read_commit_log(tmp_path / COMMIT_DIRECTORY)
    assert [offsets(bytes(e.batches)) for e in entries[(1, -1, 0)]] == [[(4, 2)]]
    assert server.log().segments[0].synced > 0


class FailingFiles(SilentFiles):
    """Files whose syncs fail on request, and that remember what was written."""

    failing: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, int]] = []
        """Path and size of each write."""

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        if self.failing is not None and self.failing in _name_of(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        self.written.append((_name_of(fd), len(data)))
        return os.pwrite(fd, data, position)


def _name_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


async def test_entries_that_the_commit_log_does_not_take_are_synced_in_their_segments(
    tmp_path: Path,
) -> None:
    files = FailingFiles()
    server = Server(tmp_path, files)
    server.append()
    server.manager.schedule()
    server.append(SECOND)
    files.failing = "commit-"
    server.commit_worker.run()
    assert sorted(server.durable) == [(FIRST, 2), (SECOND, 2)]
    assert server.failures == []
    assert server.log().segments[0].synced == server.log().segments[0].size


async def test_a_commit_file_that_failed_is_replaced_when_nobody_needs_it(tmp_path: Path) -> None:
    files = FailingFiles()
    server = Server(tmp_path, files)
    server.append()
    server.sync()
    files.failing = "commit-"
    server.append()
    server.sync()
    assert server.durable == [(FIRST, 2), (FIRST, 4)]
    files.failing = None
    server.flush_worker.run()
    assert [p.name for p in (tmp_path / COMMIT_DIRECTORY).iterdir()] == ["commit-1.log"]
    server.append()
    server.sync()
    entries, _ = read_commit_log(tmp_path / COMMIT_DIRECTORY)
    assert [offsets(bytes(e.batches)) for e in entries[(1, -1, 0)]] == [[(4, 2)]]


async def test_a_failed_sync_of_commit_log_and_segments_is_never_acknowledged(
    tmp_path: Path,
) -> None:
    files = FailingFiles()
    server = Server(tmp_path, files)
    server.append()
    server.append(SECOND)
    files.failing = ""
    server.sync()
    assert server.durable == []
    assert set(server.failures) == {server.log(), server.log(SECOND)}
    files.failing = None
    with pytest.raises(LogStorageError, match="opens it again"):
        server.append()
    server.sync()
    assert server.durable == []


async def test_a_failed_sync_of_a_segment_concerns_its_log_only(tmp_path: Path) -> None:
    files = FailingFiles()
    server = Server(tmp_path, files)
    files.failing = "log-0/"
    server.append(body=bytes(COPY_BYTES_MAX))
    server.append(SECOND)
    server.sync()
    assert (server.durable, server.failures) == ([(SECOND, 2)], [server.log()])


async def test_nothing_follows_in_the_commit_log_what_a_failed_sync_lost(tmp_path: Path) -> None:
    """A hole there would refuse the log at the next start, although nothing durable is missing."""
    files = FailingFiles()
    server = Server(tmp_path, files)
    server.append()
    server.sync()
    files.failing = "log-0/"
    server.append(body=bytes(COPY_BYTES_MAX))
    server.append(body=b"behind the hole")
    server.append(SECOND)
    server.sync()
    assert server.durable == [(FIRST, 2), (SECOND, 2)]
    assert server.failures == [server.log()]
    server.kill()
    for lost in log_directory(tmp_path, PATH, FIRST).iterdir():
        lost.unlink()
    server = Server(tmp_path)
    assert server.refused == []
    assert (server.log().log_end_offset, server.log(SECOND).log_end_offset) == (2, 2)


async def test_a_sync_that_succeeds_after_another_of_the_same_log_failed_proves_nothing(
    tmp_path: Path,
) -> None:
    """The system reports a lost page once, to whoever syncs first."""
    files = FailingFiles()
    server = Server(tmp_path, files)
    server.append(body=bytes(COPY_BYTES_MAX))
    server.manager.schedule()
    server.log().fail(OSError(errno.EIO, "met by the flusher"))
    server.commit_worker.run()
    assert server.durable == []
    assert server.log().high_watermark == 0


async def test_a_commit_file_that_may_hold_the_only_copy_is_not_reused(tmp_path: Path) -> None:
    files = FailingFiles()
    server = Server(tmp_path, files, file_bytes=2 * BLOCK_BYTES)
    server.append()
    server.sync()
    files.failing = "log-0/"
    for _ in range(6):
        server.append(SECOND)
        server.sync()
        server.flush_worker.run()
    assert server.failures == [server.log()]
    files.failing = None
    server.kill()
    for lost in log_directory(tmp_path, PATH, FIRST).glob("*"):
        lost.unlink()
    assert Server(tmp_path).log().log_end_offset == 2


@pytest.mark.parametrize("flush", [FlushMode.OS, FlushMode.INTERVAL])
async def test_other_modes_acknowledge_at_once(tmp_path: Path, flush: FlushMode) -> None:
    server = Server(tmp_path, flush=flush)
    view, checked = entry(batch(2))
    result = server.log().append(view, checked, 1)
    assert server.manager.commit(server.log(), result.end_offset, view)
    assert list((tmp_path / COMMIT_DIRECTORY).iterdir()) == []


async def test_a_closed_segment_is_synced_in_every_mode(tmp_path: Path) -> None:
    server = Server(tmp_path, flush=FlushMode.OS)
    server.append()
    server.log().roll()
    server.flush_worker.run()
    assert server.log().recovery_point == 2


async def test_a_change_of_the_flush_mode_replays_and_drops_the_commit_log(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.append()
    server.sync()
    server.kill()
    for lost in log_directory(tmp_path, PATH, FIRST).iterdir():
        lost.unlink()
    server = Server(tmp_path, flush=FlushMode.OS)
    assert server.log().log_end_offset == 2
    assert list((tmp_path / COMMIT_DIRECTORY).iterdir()) == []


async def test_interrupted_deletions_are_finished_at_the_next_start(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.append()
    deleted = server.log().delete()
    assert deleted.exists()
    Server(tmp_path, buckets=(SECOND,))
    assert not deleted.exists()


async def test_dropping_all_buckets_leaves_no_directory(tmp_path: Path) -> None:
    partitioned = PhysicalTablePath("db", "p", "2026")
    bucket = TableBucket(9, 4, 0)
    server = Server(tmp_path)
    server.manager.open_log(partitioned, bucket, LogConfig(), 0)
    assert (tmp_path / "db/p-9/2026-p4/log-0").exists()
    for dropped in (FIRST, SECOND, bucket):
        server.manager.drop(server.log(dropped))
    server.flush_worker.run()
    assert [p.name for p in tmp_path.iterdir()] == [COMMIT_DIRECTORY]


def restarted(root: Path) -> LogManager:
    """A manager that has opened nothing yet."""
    return LogManager(
        root,
        files=SilentFiles(),
        flush=FlushMode.ACK,
        on_durable=lambda items: None,
        on_failure=_unexpected,
        commit_file_bytes=1 << 16,
        make_worker=lambda name: ManualWorker(),
    )


async def test_a_log_made_anew_is_not_refused_for_a_commit_log_that_it_does_not_reach(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path, buckets=(FIRST,))
    server.append(body=bytes(COPY_BYTES_MAX))
    server.append()
    server.sync()
    server.kill()
    shutil.rmtree(log_directory(tmp_path, PATH, FIRST))
    dies_before_it_has_started = restarted(tmp_path)
    dies_before_it_has_started.create_log_at(PATH, FIRST, 1, WriterState(0).to_json(), 0)
    server = Server(tmp_path, buckets=(FIRST,))
    assert server.refused == []
    assert server.log().log_end_offset == 1
    server.append()
    server.sync()
    server.kill()
    assert Server(tmp_path, buckets=(FIRST,)).log().log_end_offset == 3


async def test_a_refused_log_that_is_made_later_still_gets_its_end_from_the_commit_log(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path, buckets=(FIRST,))
    for _ in range(3):
        server.append()
    server.sync()
    server.kill()
    shutil.rmtree(log_directory(tmp_path, PATH, FIRST))
    manager = restarted(tmp_path)
    manager.refuse(FIRST, OSError("its location is down"))
    manager.started()
    assert kept_in(tmp_path / COMMIT_DIRECTORY)
    with pytest.raises(OSError, match="down"):
        manager.open_log(PATH, FIRST, LogConfig(), 0)
    manager.allow(FIRST)
    manager.create_log_at(PATH, FIRST, 2, WriterState(0).to_json(), 0)
    assert manager.open_log(PATH, FIRST, LogConfig(), 0).log_end_offset == 6
    manager.settle(FIRST)
    assert kept_in(tmp_path / COMMIT_DIRECTORY) == []


async def test_group_commit_with_real_threads(tmp_path: Path) -> None:
    """The same through threads, a real disk, and a clean stop."""
    changed = asyncio.Event()

    def on_durable(items: list[tuple[Log, int]]) -> None:
        for log, end in items:
            log.advance_high_watermark(end)
        changed.set()

    def start() -> LogManager:
        manager = LogManager(
            tmp_path,
            files=Files(),
            flush=FlushMode.ACK,
            on_durable=on_durable,
            on_failure=_unexpected,
            commit_file_bytes=1 << 16,
        )
        for bucket in (FIRST, SECOND):
            manager.open_log(PATH, bucket, LogConfig(segment_bytes_max=20_000), 0)
        manager.started()
        return manager

    manager = start()
    for i in range(300):
        for bucket in (FIRST, SECOND):
            log = manager.log(bucket)
            assert log is not None
            view, checked = entry(batch(2, body=bytes(100 + i)))
            result = log.append(view, checked, i)
            manager.commit(log, result.end_offset, view[checked[0].start : checked[-1].end])
        manager.schedule()
        if i % 10 == 0:
            while any(log.high_watermark < log.log_end_offset for log in manager.logs):
                changed.clear()
                await changed.wait()
                manager.schedule()
    logs = list(manager.logs)
    await manager.close()
    assert all(log.high_watermark == 600 for log in logs), "closing finishes what was under way"
    manager = start()
    assert [log.log_end_offset for log in manager.logs] == [600, 600]
    assert all(log.recovery_point == 600 for log in manager.logs)
    await manager.close()


def _unexpected(log: Log, cause: Any) -> None:
    raise AssertionError(f"{log} failed: {cause}")


async def test_the_snapshot_of_many_writers_is_not_written_by_the_event_loop(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path, flush=FlushMode.OS)
    log = server.log()
    log.config = LogConfig(ttl_ms=10)
    for writer in range(WRITERS_INLINE + 1):
        view, checked = entry(batch(writer=writer, sequence=0))
        log.append(view, checked, 1)
    log.advance_high_watermark(log.log_end_offset)
    log.roll()
    snapshot = log.directory / f"{log.log_end_offset:020d}.writer_snapshot"
    assert not snapshot.exists()
    assert server.manager.expire_log(log, 1000) == 0, "its batches are all there is of the writers"
    server.flush_worker.run()
    assert snapshot.exists()
    assert server.manager.expire_log(log, 1000) == 1
    server.flush_worker.run()
    server.kill()
    writers = Server(tmp_path, flush=FlushMode.OS).log().writers
    assert writers.retained(WRITERS_INLINE)


class ForgetfulBuffer(bytearray):
    """A buffer that memory runs out for when an entry of a size is added."""

    def __iadd__(self, other: Any) -> ForgetfulBuffer:  # type: ignore[override,misc]
        if len(other) > ENTRY_LENGTH.size and isinstance(other, memoryview):
            raise MemoryError
        return super().__iadd__(other)  # type: ignore[return-value]


async def test_an_entry_that_memory_ran_out_for_does_not_spoil_those_of_others(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path)
    server.append(FIRST)
    group = server.manager._group._gathering
    group.buffer = ForgetfulBuffer(group.buffer)
    with pytest.raises(MemoryError):
        server.append(SECOND)
    group.buffer = bytearray(group.buffer)
    server.append(FIRST)
    server.sync()
    assert (FIRST, 4) in server.durable
    server.kill()
    entries, _ = read_commit_log(tmp_path / COMMIT_DIRECTORY)
    assert {key: len(found) for key, found in entries.items()} == {key_of(FIRST): 2}


@pytest.mark.parametrize("step", ["_plan_syncs", "_place", "_finish"])
async def test_a_group_that_cannot_be_finished_fails_its_logs_and_no_later_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    server = Server(tmp_path)

    def fail(*arguments: Any) -> None:
        raise MemoryError

    server.append(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(GroupCommit, step, fail)
        server.sync()
    assert server.failures == [server.log(FIRST)]
    server.append(SECOND)
    server.sync()
    assert server.durable == [(SECOND, 2)]


async def test_an_outcome_that_memory_ran_out_for_is_delivered_again() -> None:
    worker = ThreadWorker("test", asyncio.get_running_loop())
    outcomes: asyncio.Queue[int] = asyncio.Queue()
    failures = [MemoryError()]

    def done(outcome: int) -> None:
        if failures:
            raise failures.pop()
        outcomes.put_nowait(outcome)

    worker.submit(lambda: 1, done)
    worker.submit(lambda: 2, done)
    assert [await outcomes.get(), await outcomes.get()] == [1, 2]
    await asyncio.get_running_loop().run_in_executor(None, worker.stop)


async def test_outcomes_that_gathered_are_delivered_in_turns_of_the_loop() -> None:
    """Each may answer a request: thousands at once would hold up everything else."""
    now = itertools.count(step=TURN_SECONDS / 3)
    worker = ThreadWorker("test", asyncio.get_running_loop(), lambda: next(now))
    delivered: list[int] = []
    for number in range(10):
        worker.submit(functools.partial(int, number), delivered.append)
    worker.stop()  # every outcome is there before the loop takes the first
    lengths = []
    while len(delivered) < 10:
        await asyncio.sleep(0)
        lengths.append(len(delivered))
    assert delivered == list(range(10))
    assert [length for length in lengths if length] == [3, 6, 9, 10]
