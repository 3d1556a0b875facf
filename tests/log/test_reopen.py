"""A log that failed is opened again while the others are served, and nothing acknowledged is lost.

Promises A1 and A2: a sync that comes after a failed one proves nothing, so what the checkpoint does
not cover is written again; and what the commit log has of the failed log never comes back to
overtake what was written since.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.log.disk import RecordingFiles, SilentFiles
from tests.log.support import offsets, read_all
from tests.log.test_commit import FIRST, PATH, SECOND, FailingFiles, Server
from zufluss.errors import CorruptRecordError
from zufluss.log.commit_log import BLOCK_BYTES
from zufluss.log.config import FlushMode, LogConfig
from zufluss.log.files import OpenFile
from zufluss.log.log import Log
from zufluss.log.manager import COPY_BYTES_MAX


async def reopened(server: Server) -> Log:
    """Open the first log again, with the workers running."""
    opening = asyncio.ensure_future(server.manager.reopen_log(PATH, FIRST, LogConfig(), 0))
    while not opening.done():
        await asyncio.sleep(0.001)
        server.flush_worker.run()
        server.commit_worker.run()
    return await opening


async def test_a_failed_log_is_opened_again_with_everything_acknowledged(tmp_path: Path) -> None:
    files = FailingFiles()
    server = Server(tmp_path, files)
    server.append()
    server.sync()
    files.failing = "log-0/"
    server.append(body=bytes(COPY_BYTES_MAX))
    server.sync()
    assert server.failures == [server.log()]
    failed = server.log()
    server.manager.let_go(failed)
    files.failing = None
    log = await reopened(server)
    assert log.log_end_offset == 4, "a write that was refused may be there, as after a crash"
    assert (log.high_watermark, log.recovery_point, log.incarnation) == (4, 4, 1)
    server.append()
    server.sync()
    assert server.durable[-1] == (FIRST, 6)


async def test_a_log_whose_disk_still_fails_stays_closed(tmp_path: Path) -> None:
    files = FailingFiles()
    server = Server(tmp_path, files)
    server.append(body=bytes(COPY_BYTES_MAX))
    files.failing = "log-0/"
    server.sync()
    server.manager.let_go(server.log())
    with pytest.raises(OSError, match="Input/output"):
        await reopened(server)
    server.manager.allow(FIRST)
    files.failing = None
    assert (await reopened(server)).log_end_offset == 2


async def test_what_a_failed_sync_left_in_the_page_cache_is_written_again(tmp_path: Path) -> None:
    """The system takes the pages of a failed sync for clean; a second sync would write nothing."""
    files = RecordingFiles(tmp_path)
    server = Server(tmp_path, files)
    server.append()
    server.sync()
    segment = server.log().segments[0]
    server.log().fail(OSError(errno.EIO, "a sync"))
    server.manager.let_go(server.log())
    before = len(files.operations)
    await reopened(server)
    done = [o for o in files.operations[before:] if o.kind in ("write", "sync")]
    written = [o for o in done if o.kind == "write" and len(o.arguments[1]) == segment.size]
    assert written, "the batch in the segment"
    assert any(
        o.kind == "sync" and o.inode == written[0].inode for o in done[done.index(written[0]) :]
    )


async def test_an_acknowledged_entry_that_the_segment_lost_comes_from_the_commit_log(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path)
    server.append()
    server.append(SECOND)
    server.sync()
    segment = server.log().segments[0].path
    server.log().fail(OSError(errno.EIO, "a sync"))
    server.manager.let_go(server.log())
    os.truncate(segment, 0)  # the page was dropped, and the disk never had it
    log = await reopened(server)
    assert len(offsets(read_all(log))) == 1


async def test_a_log_that_lost_what_was_acknowledged_is_damaged(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.append(body=bytes(COPY_BYTES_MAX))
    server.sync()
    segment = server.log().segments[0].path
    server.log().fail(OSError(errno.EIO, "a sync"))
    server.manager.let_go(server.log())
    data = segment.read_bytes()
    os.truncate(segment, 0)
    with pytest.raises(CorruptRecordError, match="acknowledged"):
        await reopened(server)
    assert segment.stat().st_size == 0, "no file is changed"
    again = Server(tmp_path)
    assert again.refused == [FIRST], "the next start serves nothing shorter"
    segment.write_bytes(data)
    mended = Server(tmp_path)
    assert mended.refused == []
    assert mended.log().log_end_offset == 2


async def test_a_small_entry_lost_with_its_commit_file_is_damage_at_every_start(
    tmp_path: Path,
) -> None:
    """Neither checkpoint nor synced segment proves the loss; the running server remembers it."""
    server = Server(tmp_path)
    server.append()
    server.sync()
    segment = server.log().segments[0].path
    server.log().fail(OSError(errno.EIO, "a sync"))
    server.manager.let_go(server.log())
    data = segment.read_bytes()
    os.truncate(segment, 0)
    for path in (tmp_path / ".commit-log").iterdir():
        path.write_bytes(b"")
    with pytest.raises(CorruptRecordError, match=r"ends at offset 0, .* below 2 was acknowledged"):
        await reopened(server)
    assert Server(tmp_path).refused == [FIRST]
    segment.write_bytes(data)
    assert Server(tmp_path).refused == []


async def test_an_end_that_was_synced_in_its_segment_is_missed_after_a_kill(tmp_path: Path) -> None:
    """Without the mark it would look like an end that was never synced."""
    server = Server(tmp_path)
    for _ in range(2):
        server.append(body=bytes(COPY_BYTES_MAX))
        server.sync()
    segment = server.log().segments[0].path
    server.kill()
    data = segment.read_bytes()
    os.truncate(segment, len(data) // 2)
    for _ in range(2):
        again = Server(tmp_path)
        assert again.refused == [FIRST]
        assert again.log(SECOND).log_end_offset == 0, "others are served"
        again.kill()
    segment.write_bytes(data)
    mended = Server(tmp_path)
    assert mended.refused == []
    assert mended.log().log_end_offset == 4


async def test_a_mark_that_cannot_be_written_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "full")
        patch.setattr("zufluss.log.durable.write_mark", Mock(side_effect=full))
        server.append(body=bytes(COPY_BYTES_MAX))
        server.sync()
    assert (server.durable, server.failures) == ([(FIRST, 2)], [])


async def test_a_mark_of_before_a_truncation_does_not_count(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for _ in range(2):
        server.append(body=bytes(COPY_BYTES_MAX))
        server.sync()
    server.log().truncate_to(2)
    server.kill()
    again = Server(tmp_path)
    assert again.refused == []
    assert again.log().log_end_offset == 2


async def test_entries_of_before_the_failure_do_not_overtake_those_written_since(
    tmp_path: Path,
) -> None:
    """Without a new incarnation, a later crash would replay the refused entry at their offset."""
    files = FailingFiles()
    server = Server(tmp_path, files)
    server.append()
    server.sync()
    segment = server.log().segments[0]
    acknowledged = segment.size
    server.append(body=b"refused")
    files.failing = ""  # the disk may have the entry in the commit log all the same
    server.sync()
    assert server.failures == [server.log()]
    files.failing = None
    server.manager.let_go(server.log())
    os.truncate(segment.path, acknowledged)
    entries = sorted((tmp_path / ".commit-log").glob("commit-*.log"))
    saved = {path: path.read_bytes() for path in entries}
    for path in entries:  # this start does not see the refused entry; the disk may show it later
        os.truncate(path, 2 * BLOCK_BYTES)
    assert (await reopened(server)).log_end_offset == 2
    for path, data in saved.items():
        path.write_bytes(data)
    server.append(body=b"acknowledged")
    server.append(body=bytes(COPY_BYTES_MAX))
    server.sync()
    assert server.durable[-1] == (FIRST, 6)
    server.kill()
    log = Server(tmp_path).log()
    assert log.log_end_offset == 6
    assert b"acknowledged" in bytes(read_all(log))
    assert b"refused" not in bytes(read_all(log))


async def test_commit_files_are_free_again_when_the_failed_log_is_open(tmp_path: Path) -> None:
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
    server.manager.let_go(server.log())
    await reopened(server)
    for _ in range(20):
        server.append(SECOND)
        server.sync()
        server.flush_worker.run()
        server.append()
        server.sync()
        server.flush_worker.run()
    assert server.durable[-1] == (FIRST, 42)
    server.kill()
    assert Server(tmp_path).refused == []


class ScarceFiles(SilentFiles):
    """Files that cannot be opened on request."""

    scarce = False

    def open(self, path: Path, *, create: bool = False) -> OpenFile:
        if self.scarce:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open(path, create=create)

    def sync_directory(self, path: Path) -> None:
        if self.scarce:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_file_that_cannot_be_opened_is_no_failed_sync(tmp_path: Path) -> None:
    files = ScarceFiles()
    server = Server(tmp_path, files)
    server.append(body=bytes(COPY_BYTES_MAX))
    server.append(body=b"behind it")
    server.append(SECOND)
    files.scarce = True  # the directory of a new log has to be synced, and cannot be opened
    server.sync()
    assert (server.failures, server.log().failure) == ([], None)
    assert (FIRST, 4) not in server.durable
    files.scarce = False
    server.sync()
    assert server.failures == []
    assert (FIRST, 4) in server.durable
    assert (SECOND, 2) in server.durable
    server.kill()
    assert Server(tmp_path).log().log_end_offset == 4


async def test_a_background_sync_without_descriptors_is_tried_again(tmp_path: Path) -> None:
    files = ScarceFiles()
    server = Server(tmp_path, files)
    server.append()
    server.sync()
    server.log().roll()
    files.scarce = True
    server.flush_worker.run()
    assert (server.failures, server.log().recovery_point) == ([], 0)
    files.scarce = False
    server.append()
    server.sync()
    server.log().roll()
    server.flush_worker.run()
    assert server.log().recovery_point == 4


async def test_nothing_behind_a_lost_entry_goes_into_the_commit_log(tmp_path: Path) -> None:
    """The next group has gathered when the sync of an entry fails. An entry of the commit log
    behind the lost one would refuse the log as damaged, and must not be acknowledged."""
    files = FailingFiles()
    server = Server(tmp_path, files)
    server.append()
    server.sync()
    segment, acknowledged = server.log().segments[0].path, server.log().segments[0].size
    server.append(body=bytes(COPY_BYTES_MAX))
    server.manager.schedule()
    server.append(body=b"behind it")  # gathers while the large entry is being synced
    server.append(SECOND)
    files.failing = "log-0/"
    server.commit_worker.run()
    files.failing = None
    assert server.durable == [(FIRST, 2), (SECOND, 2)]
    server.manager.let_go(server.log())
    os.truncate(segment, acknowledged)  # the disk never had it
    assert (await reopened(server)).log_end_offset == 2


async def test_a_start_whose_sync_failed_writes_again_when_it_is_tried_again(
    tmp_path: Path,
) -> None:
    """The first try has put the entries of the commit log into the segment, and its sync failed."""
    server = Server(tmp_path)
    server.append()
    server.sync()
    segment = server.log().segments[0]
    path, size = segment.path, segment.size
    server.kill()
    os.truncate(path, 0)  # only the commit log has it
    files = FailingFiles()
    files.failing = "log-0/"
    server = Server(tmp_path, files)
    assert server.refused == [FIRST]
    assert path.stat().st_size == size
    files.failing = None
    files.written.clear()
    server.manager.allow(FIRST)
    assert (await reopened(server)).log_end_offset == 2
    assert (str(path), size) in files.written


async def test_a_sync_in_the_mode_interval_without_descriptors_is_tried_again(
    tmp_path: Path,
) -> None:
    files = ScarceFiles()
    server = Server(tmp_path, files, FlushMode.INTERVAL)
    server.append()
    files.scarce = True
    server.manager._on_timer()
    server.flush_worker.run()
    assert (server.failures, server.log().recovery_point) == ([], 0)
    files.scarce = False
    server.manager._on_timer()
    server.flush_worker.run()
    assert server.log().recovery_point == 2
