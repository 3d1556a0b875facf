"""One log: offsets, reads, rolls, retention, truncation, failures."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.log.disk import SilentFiles
from tests.log.support import (
    append,
    batch,
    crash,
    expire,
    offsets,
    open_log,
    read_all,
    segment_files,
)
from zufluss.errors import CorruptRecordError, LogStorageError, OffsetOutOfRangeError
from zufluss.log.files import OpenFile
from zufluss.log.log import RESERVE_FROM_BYTES
from zufluss.log.reader import CURSORS_MAX
from zufluss.log.retention import remove_deleted
from zufluss.log.segment import PagesNotCachedError, read_slice
from zufluss.record.header import iter_headers, read_header


def test_offsets_are_dense_and_stamped_into_the_batches(tmp_path: Path) -> None:
    """Readers place every record by the base offset the server stamped."""
    log = open_log(tmp_path)
    assert append(log, batch(3), now_ms=10)[:2] == (0, 3)
    assert append(log, batch(2), batch(4), now_ms=20)[:2] == (3, 9)
    headers = [h for _, h in iter_headers(read_all(log))]
    assert [(h.base_offset, h.next_offset, h.timestamp) for h in headers] == [
        (0, 3, 10), (3, 5, 20), (5, 9, 20),
    ]  # fmt: skip


def test_an_empty_changelog_batch_takes_one_offset(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert append(log, batch(0, body=b"")).end_offset == 1


def test_commit_timestamps_never_go_back_when_the_clock_does(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for now in (100, 40, 101):
        append(log, batch(), now_ms=now)
    assert [h.timestamp for _, h in iter_headers(read_all(log))] == [100, 100, 101]
    crash(log)
    log = open_log(tmp_path)
    append(log, batch(), now_ms=5)
    assert [h.timestamp for _, h in iter_headers(read_all(log))][-1] == 101


@pytest.mark.parametrize("magic", [0, 1, 2])
def test_every_header_version_is_stored_and_magic_2_gets_the_epoch(
    tmp_path: Path, magic: int
) -> None:
    log = open_log(tmp_path)
    log.leader_epoch = 7
    append(log, batch(2, magic=magic))
    crash(log)
    header = read_header(read_all(open_log(tmp_path)), 0)
    assert (header.magic, header.leader_epoch) == (magic, 7 if magic == 2 else -1)


def test_readers_see_nothing_above_the_high_watermark(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes_max=200)
    ends = [append(log, batch(2), visible=False).end_offset for _ in range(9)]
    assert len(log.segments) > 2
    assert log.read(0, 1 << 20).records.nbytes == 0
    for end in ends:
        log.advance_high_watermark(end)
        assert offsets(read_all(log))[-1] == (end - 2, 2)
        with pytest.raises(OffsetOutOfRangeError):
            log.locate(end + 1, 100)
    log.advance_high_watermark(3)
    assert log.high_watermark == 18


def test_the_high_watermark_stops_at_the_end_of_an_entry(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, batch(2), visible=False)
    append(log, batch(2), visible=False)
    log.advance_high_watermark(3)
    assert log.high_watermark == 2


def test_a_read_starts_with_the_batch_that_contains_the_offset(tmp_path: Path) -> None:
    log = open_log(tmp_path, index_interval_bytes=100)
    for _ in range(50):
        append(log, batch(5))
    log._cursors.clear()
    for offset in range(250):
        found = log.read(offset, 60)
        assert offsets(bytes(found.records)) == [(offset // 5 * 5, 5)]
        log._cursors.clear()


@pytest.mark.parametrize("interval", [0, 100, 1 << 20])
@pytest.mark.parametrize("max_bytes", [1, 52, 53, 500, 1 << 20])
def test_limits_give_whole_batches(tmp_path: Path, max_bytes: int, interval: int) -> None:
    log = open_log(tmp_path, index_interval_bytes=interval, segment_bytes_max=1000)
    for i in range(60):
        append(log, batch(3, body=bytes(i % 7)))
    found = log.read(0, max_bytes)
    assert len(found.records) <= max_bytes
    assert read_all(log, max_bytes) == read_all(log)
    assert offsets(read_all(log, max_bytes)) == [(3 * i, 3) for i in range(60)]


def test_a_batch_over_the_limit_is_read_only_when_asked_for_at_least_one(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, batch(2, body=bytes(5000)))
    append(log, batch(2))
    assert log.read(0, 100) == (memoryview(b""), 0)
    found = log.read(0, 100, at_least_one=True)
    assert offsets(bytes(found.records)) == [(0, 2)]
    assert found.end_offset == 2


def test_offsets_outside_of_the_log_are_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, batch(3))
    for offset in (-1, -2, 4):
        with pytest.raises(OffsetOutOfRangeError, match=r"out of range: .* has 0 to 3"):
            log.read(offset, 100)
    assert log.read(3, 100).records.nbytes == 0


def test_a_reader_at_the_tail_never_searches(tmp_path: Path, monkeypatch: Any) -> None:
    """A search per poll would make tailing cost more than appending."""
    log = open_log(tmp_path, segment_bytes_max=2000)
    append(log, batch())
    offset = log.read(0, 1 << 20).end_offset
    monkeypatch.setattr("zufluss.log.segment.Segment.position_of", None)
    for _ in range(100):
        append(log, batch())
        offset = log.read(offset, 1 << 20).end_offset
        assert offset == log.high_watermark


def test_many_readers_do_not_grow_the_memory_of_a_log(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(200):
        append(log, batch())
    for offset in range(200):
        log.locate(offset, 60)
    assert len(log._cursors) == CURSORS_MAX


def test_a_slice_stays_readable_after_its_segment_was_deleted(tmp_path: Path) -> None:
    """A reader thread may be slower than retention."""
    log = open_log(tmp_path, ttl_ms=100)
    append(log, batch(5), now_ms=10)
    part = log.locate(0, 1000)
    expire(log, 1000)
    assert not segment_files(tmp_path, "00.log")
    assert offsets(bytes(read_slice(part, nowait=False))) == [(0, 5)]


def test_bytes_that_are_not_in_memory_are_loaded_in_a_thread(
    tmp_path: Path, monkeypatch: Any
) -> None:
    log = open_log(tmp_path)
    append(log, batch(5))
    real = os.preadv

    def not_cached(fd: int, buffers: list[Any], position: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError(errno.EAGAIN, "")
        return real(fd, buffers, position, flags)

    monkeypatch.setattr(os, "preadv", not_cached)
    with pytest.raises(PagesNotCachedError) as caught:
        log.read(0, 1000)
    caught.value.load()
    monkeypatch.undo()
    assert log.read(0, 1000).end_offset == 5


def test_damaged_bytes_from_the_disk_are_not_served(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, batch(5, body=bytes(100)))
    path = segment_files(tmp_path, ".log")[0]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecordError, match="offset 0"):
        log.read(0, 1000, nowait=False)


def test_a_full_segment_is_closed_before_an_entry_and_entries_are_not_split(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes_max=300)
    for _ in range(10):
        append(log, batch(), batch())
    assert [s.base_offset for s in log.segments] == [0, 4, 8, 12, 16]
    assert all(s.size <= 300 for s in log.segments)
    names = [p.name for p in segment_files(tmp_path, ".log")]
    assert names[1] == "00000000000000000004.log"


def test_an_entry_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes_max=300)
    append(log, batch())
    append(log, batch(body=bytes(1000)))
    append(log, batch())
    assert [s.base_offset for s in log.segments] == [0, 1, 2]
    assert offsets(read_all(log)) == [(0, 1), (1, 1), (2, 1)]


def test_a_full_index_closes_the_segment(tmp_path: Path) -> None:
    log = open_log(tmp_path, index_interval_bytes=0, index_bytes_max=80)
    for now in range(40):
        append(log, batch(), now_ms=now)
    assert len(log.segments) > 4
    assert len(offsets(read_all(log))) == 40


@pytest.mark.parametrize("interval", [0, 150, 4096])
def test_offsets_by_timestamp_are_those_of_the_first_batch_at_or_after(
    tmp_path: Path, interval: int
) -> None:
    log = open_log(tmp_path, index_interval_bytes=interval, segment_bytes_max=900)
    stamps = [10 * (i // 3) for i in range(60)]
    for now in stamps:
        append(log, batch(2), now_ms=now)
    for reopened in (log, _reopened(log, tmp_path, index_interval_bytes=interval)):
        for ts in range(-5, 205):
            expected = next((2 * i for i, s in enumerate(stamps) if s >= ts), 120)
            assert reopened.offset_for_timestamp(ts) == expected


def _reopened(log: Any, tmp_path: Path, **settings: int) -> Any:
    log.close(clean=True)
    return open_log(tmp_path, **settings)


def test_an_offset_by_timestamp_is_never_above_the_high_watermark(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, batch(), now_ms=10)
    append(log, batch(), now_ms=20, visible=False)
    assert log.offset_for_timestamp(15) == 1
    assert log.offset_for_timestamp(20) == 1


def test_retention_deletes_expired_segments_and_keeps_the_end(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes_max=120, ttl_ms=100)
    for now in (0, 10, 20, 200, 210):
        append(log, batch(), now_ms=now)
    assert expire(log, 201) == [0]
    assert (log.log_start_offset, log.log_end_offset) == (2, 5)
    expire(log, 1000)
    assert (log.log_start_offset, log.log_end_offset, log.size) == (5, 5, 0)
    assert len(segment_files(tmp_path, "*")) <= 4
    crash(log)
    log = open_log(tmp_path)
    assert append(log, batch()).base_offset == 5


def test_the_segment_being_written_stays_when_the_server_wants_it_so(tmp_path: Path) -> None:
    log = open_log(tmp_path, ttl_ms=100)
    append(log, batch(), now_ms=0)
    assert log.expire(1000, rolls_active=False) is None
    assert log.expire(1000, rolls_active=False) is None
    assert log.log_start_offset == 0


def test_a_time_to_live_of_zero_keeps_everything(tmp_path: Path) -> None:
    log = open_log(tmp_path, ttl_ms=0)
    append(log, batch(), now_ms=0)
    assert log.expire(1 << 50) is None


def test_deletion_leaves_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, batch())
    deleted = log.delete()
    assert not log.directory.exists()
    with pytest.raises(LogStorageError):
        append(log, batch())
    remove_deleted(log.files, deleted)
    assert list(tmp_path.iterdir()) == []


def test_truncation_removes_the_batches_that_reach_the_offset(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes_max=200)
    for sequence in range(12):
        append(log, batch(2, writer=1, sequence=sequence), now_ms=sequence)
    before = read_all(log)
    log.truncate_to(9)
    assert (log.log_end_offset, log.high_watermark) == (8, 8)
    assert read_all(log) == before[: len(read_all(log))]
    assert [b.sequence for b in log.writers.retained(1)] == [0, 1, 2, 3]
    assert append(log, batch(2, writer=1, sequence=4)).base_offset == 8
    crash(log)
    assert open_log(tmp_path).log_end_offset == 10


def test_truncation_keeps_a_lower_high_watermark(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(4):
        append(log, batch(), visible=False)
    log.advance_high_watermark(1)
    log.truncate_to(3)
    assert (log.high_watermark, log.log_end_offset) == (1, 3)
    log.advance_high_watermark(3)
    assert len(offsets(read_all(log))) == 3


class FailingFiles(SilentFiles):
    """Files whose next writes fail or are cut short."""

    failing: int | None = None
    short: int | None = None

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        if self.failing is not None:
            raise OSError(self.failing, os.strerror(self.failing))
        if self.short is not None:
            return os.pwrite(fd, memoryview(data)[: self.short], position)
        return os.pwrite(fd, data, position)


@pytest.mark.parametrize(
    "fault", [{"failing": errno.ENOSPC}, {"failing": errno.EIO}, {"short": 70}]
)
def test_a_write_that_fails_leaves_the_log_as_it_was(tmp_path: Path, fault: dict[str, int]) -> None:
    """A full disk must refuse, keep reading, and go on when there is space again."""
    files = FailingFiles()
    log = open_log(tmp_path, files)
    append(log, batch(3, writer=1, sequence=0))
    before = read_all(log)
    files.failing, files.short = fault.get("failing"), fault.get("short")
    for _ in range(2):
        with pytest.raises(LogStorageError) as caught:
            append(log, batch(3, writer=1, sequence=1), batch(3, writer=1, sequence=2))
        assert caught.value.retriable
    assert (log.log_end_offset, read_all(log)) == (3, before)
    assert segment_files(tmp_path, ".log")[0].stat().st_size == len(before)
    files.failing = files.short = None
    assert append(log, batch(3, writer=1, sequence=1)).base_offset == 3


def test_a_full_disk_at_a_roll_refuses_the_append_only(tmp_path: Path) -> None:
    files = FailingFiles()
    log = open_log(tmp_path, files, segment_bytes_max=100)
    append(log, batch())
    files.failing = errno.ENOSPC
    with pytest.raises(LogStorageError):
        append(log, batch())
    files.failing = None
    assert append(log, batch()).base_offset == 1
    assert offsets(read_all(log)) == [(0, 1), (1, 1)]


def test_retention_frees_closed_segments_of_a_full_disk(tmp_path: Path) -> None:
    """Closing the segment being written needs room; freeing the others must not wait for it."""
    files = FailingFiles()
    log = open_log(tmp_path, files, segment_bytes_max=120, ttl_ms=100)
    for now in (0, 10, 20):
        append(log, batch(writer=1, sequence=now // 10), now_ms=now)
    files.failing = errno.ENOSPC
    assert expire(log, 1000) == [0]
    assert (log.log_start_offset, log.log_end_offset) == (2, 3)
    files.failing = None
    assert expire(log, 1000) == [2]


class NoIndexFiles(SilentFiles):
    """Files on a disk with no room for an index."""

    def open(self, path: Path, *, create: bool = False) -> OpenFile:
        if path.suffix in (".index", ".timeindex"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().open(path, create=create)


def test_an_index_that_cannot_be_written_does_not_refuse_the_append(tmp_path: Path) -> None:
    log = open_log(tmp_path, NoIndexFiles(), index_interval_bytes=0)
    for _ in range(500):
        append(log, batch())
    assert log.log_end_offset == 500
    assert log.locate(250, 1000).length


def test_a_failed_log_takes_no_writes_and_still_reads(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, batch())
    log.fail(OSError(errno.EIO, "sync failed"))
    with pytest.raises(LogStorageError, match="opens it again"):
        append(log, batch())
    assert len(offsets(read_all(log))) == 1


def test_blocks_reserved_ahead_are_given_back(tmp_path: Path) -> None:
    """They are behind the end of the file: nobody sees them, but they take room on the disk."""
    log = open_log(tmp_path)
    large = batch(body=bytes(RESERVE_FROM_BYTES))
    for _ in range(5):
        append(log, large)
    segment = log.segments[0]
    reserved, size = segment.reserved, segment.size
    assert segment.path.stat().st_size == size, "readers and recovery see what was written"
    if reserved:  # not every file system can
        assert reserved > size
    log.roll()
    assert segment.path.stat().st_blocks * 512 < size + 64 * 1024
    append(log, large)
    crash(log)
    log = open_log(tmp_path)
    append(log, batch())
    log.close(clean=True)
    assert log.segments[-1].path.stat().st_blocks * 512 < log.segments[-1].size + 64 * 1024
