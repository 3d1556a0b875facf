"""Produce requests whose entries fare differently, late, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.tablet.support import TABLE, Connection, Tablet, batch
from zufluss.errors import ErrorCode
from zufluss.log.manager import COPY_BYTES_MAX
from zufluss.testing.files import SilentFiles
from zufluss.wire import messages as m

STORAGE = int(ErrorCode.LOG_STORAGE_EXCEPTION)
UNKNOWN = int(ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION)


class SickFiles(SilentFiles):
    """Files of which some cannot be synced."""

    sick = "nothing"

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        if self.sick in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_a_failed_bucket_takes_no_other_bucket_of_the_request_with_it(tmp_path: Path) -> None:
    """Who is told that a durable batch failed sends it again, and without a writer id twice."""
    files = SickFiles()
    tablet = await Tablet(tmp_path, files).start()
    files.sick = "log-1/"
    large = batch(COPY_BYTES_MAX // 8)
    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    for bucket in (0, 1, 9):
        request.buckets_req.add(bucket_id=bucket, records=large)
    connection = Connection()
    sent = connection.send(tablet.server.producer.handle, request)
    assert await connection.produced(sent) == [(0, 0), (1, STORAGE), (9, UNKNOWN)]
    assert not tablet.server.producer.pending
    await tablet.server.close()


async def test_a_timeout_names_only_what_is_not_durable(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    connection, sent = await tablet.produce(0, 1, timeout_ms=1)
    replica = tablet.server.replica(TABLE, None, 0)
    replica.advance(replica.log.log_end_offset)
    tablet.server.producer.expire(tablet.server.loop.time() + 1)
    timed_out = int(ErrorCode.REQUEST_TIME_OUT)
    assert await connection.produced(sent) == [(0, 0), (1, timed_out)]
    await tablet.server.close()
    assert await connection.produced(sent) == [(0, 0), (1, timed_out)], "answered once"


async def test_an_unforeseen_error_leaves_nothing_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network answers it; a second answer later would take a request off the count twice."""
    tablet = await Tablet(tmp_path).start()
    replica = tablet.server.replica(TABLE, None, 1)
    monkeypatch.setattr(type(replica.log), "append", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await tablet.produce(0, 1)
    assert not tablet.server.producer.pending
    monkeypatch.undo()
    await tablet.server.close()


async def test_a_dropped_bucket_answers_its_writers_even_if_its_files_stay(tmp_path: Path) -> None:
    class Stuck(SilentFiles):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    tablet = await Tablet(tmp_path, Stuck()).start()
    connection, sent = await tablet.produce(0, 1)
    await tablet.drop(0, 1)
    assert await connection.produced(sent) == [(0, STORAGE), (1, STORAGE)]
    assert tablet.server.find_replica(TABLE, None, 1) is None
    await tablet.server.close()
