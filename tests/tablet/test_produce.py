"""Produce requests whose entries fare differently, late, or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.log.disk import SilentFiles
from tests.tablet.support import TABLE, Connection, Tablet, batch
from zufluss.errors import ErrorCode, InvalidRequiredAcksError
from zufluss.log.log import AppendResult, Log
from zufluss.log.manager import COPY_BYTES_MAX
from zufluss.record.arrow.zstd import ZstdMessages
from zufluss.record.batch.check import BATCHES_MAX, ContentCheck
from zufluss.record.header import build_batch, iter_headers
from zufluss.tablet import pending
from zufluss.tablet.produce import GATHERED_BYTES_MAX
from zufluss.wire import messages as m
from zufluss.wire.codec import decode
from zufluss.wire.hot.buckets import ENTRIES_AT_ONCE
from zufluss.wire.hot.produce import produce_response

STORAGE = int(ErrorCode.LOG_STORAGE_EXCEPTION)
UNKNOWN = int(ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION)
NOT_OPEN = int(ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION)
"""Of a bucket that is gone here, while the metadata still names this server as its leader."""


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
    sent = connection.send(tablet.server.produce.handle, request)
    assert await connection.produced(sent) == [(0, 0), (1, STORAGE), (9, UNKNOWN)]
    assert not tablet.server.produce.pending
    await tablet.server.close()


async def test_a_timeout_names_only_what_is_not_durable(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    connection, sent = await tablet.produce(0, 1, timeout_ms=1)
    replica = tablet.server.buckets.replica(TABLE, None, 0)
    replica.advance(replica.log.log_end_offset)
    tablet.server.produce.expire(asyncio.get_running_loop().time() + 1)
    timed_out = int(ErrorCode.REQUEST_TIME_OUT)
    assert await connection.produced(sent) == [(0, 0), (1, timed_out)]
    await tablet.server.close()
    assert await connection.produced(sent) == [(0, 0), (1, timed_out)], "answered once"


async def test_an_unforeseen_error_concerns_its_bucket_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tablet = await Tablet(tmp_path).start()
    replica = tablet.server.buckets.replica(TABLE, None, 1)
    append = type(replica.log).append

    def failing(log: Log, *arguments: Any) -> AppendResult:
        if log is replica.log:
            raise ZeroDivisionError
        return append(log, *arguments)

    monkeypatch.setattr(type(replica.log), "append", failing)
    connection, sent = await tablet.produce(0, 1)
    unknown = int(ErrorCode.UNKNOWN_SERVER_ERROR)
    assert await connection.produced(sent) == [(0, 0), (1, unknown)]
    assert not tablet.server.produce.pending
    await tablet.server.close()


async def test_a_dropped_bucket_answers_its_writers_even_if_its_files_stay(tmp_path: Path) -> None:
    class Stuck(SilentFiles):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    tablet = await Tablet(tmp_path, Stuck()).start()
    connection, sent = await tablet.produce(0, 1)
    await tablet.drop(0, 1)
    assert await connection.produced(sent) == [(0, STORAGE), (1, STORAGE)]
    assert tablet.server.buckets.find(TABLE, None, 1) is None
    await tablet.server.close()


# -- small appends: gathered over a loop turn ---------------------------------------------------


class WrittenFiles(SilentFiles):
    """Files that count the writes to logs, and refuse those to some of them."""

    full = "nothing"

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[str, int]] = []

    def pwrite(self, fd: int, data: Any, position: int) -> int:  # type: ignore[override]
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if self.full in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if path.suffix == ".log" and path.parent.name.startswith("log-"):
            self.writes.append((path.parent.name, len(data)))
        return os.pwrite(fd, data, position)


async def small_tablet(tmp_path: Path, files: WrittenFiles, flush: str = "os") -> Tablet:
    """A tablet that has met its table: the first request is never a usual one."""
    tablet = await Tablet(tmp_path, files, conf={"zufluss.log.flush": flush}).start()
    connection, sent = await tablet.produce(1)
    assert await connection.produced(sent) == [(1, 0)]
    files.writes.clear()
    return tablet


def numbered(rows: int, writer: int = -1, sequence: int = -1) -> bytes:
    """A batch whose writer numbers it."""
    data = batch(rows)
    ((_, header),) = iter_headers(data)
    body = data[header.body_offset :]
    return bytes(build_batch(1, body, rows, writer_id=writer, sequence=sequence))


class Sender:
    """Sends small requests, each over a connection of its own."""

    def __init__(self, tablet: Tablet) -> None:
        self.tablet = tablet
        self.sent: list[tuple[Connection, int]] = []

    def send(self, records: bytes, bucket: int = 0) -> None:
        request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
        request.buckets_req.add(bucket_id=bucket, records=records)
        connection = Connection()
        self.sent.append((connection, connection.send(self.tablet.server.produce.handle, request)))

    async def answers(self) -> list[tuple[int, int]]:
        """Error code and offset of each request, in the order they were sent."""
        found = []
        for connection, sent in self.sent:
            (entry,) = decode(m.ProduceLogResponse, await connection.answer(sent)).buckets_resp
            found.append((entry.error_code, entry.base_offset))
        return found


@pytest.mark.parametrize("flush", ["os", "ack", "interval"])
async def test_small_appends_of_a_turn_share_one_write_and_keep_their_order(
    tmp_path: Path, flush: str
) -> None:
    files = WrittenFiles()
    tablet = await small_tablet(tmp_path, files, flush)
    sender = Sender(tablet)
    for rows in (3, 1, 2):
        sender.send(batch(rows))
    sender.send(batch(5), bucket=1)
    assert not any(connection.answers[sent] for connection, sent in sender.sent), "not written yet"
    assert await sender.answers() == [(0, 0), (0, 3), (0, 4), (0, 3)]
    sizes = [sum(len(batch(rows)) for rows in (3, 1, 2)), len(batch(5))]
    assert files.writes[:2] == [("log-0", sizes[0]), ("log-1", sizes[1])]
    log = tablet.server.buckets.replica(TABLE, None, 0).log
    headers = [header for _, header in iter_headers(log.read(0, 1 << 20).records)]
    assert [(h.base_offset, h.record_count) for h in headers] == [(0, 3), (3, 1), (4, 2)]
    await tablet.server.close()


async def test_a_write_that_fails_refuses_what_it_gathered_and_nothing_else(tmp_path: Path) -> None:
    files = WrittenFiles()
    tablet = await small_tablet(tmp_path, files)
    sender = Sender(tablet)
    sender.send(batch())
    await sender.answers()
    files.full = "log-0/"
    for bucket in (0, 1, 0, 1):
        sender.send(batch(), bucket)
    assert [code for code, _ in await sender.answers()] == [0, STORAGE, 0, STORAGE, 0]
    files.full = "nothing"
    sender.send(batch())
    assert (await sender.answers())[-1] == (0, 3), "the log is as before"
    await tablet.server.close()


async def test_a_writer_is_known_batch_by_batch_within_a_turn(tmp_path: Path) -> None:
    """Its second batch, its retry and its gap are judged by what is written before them."""
    tablet = await small_tablet(tmp_path, WrittenFiles())
    sender = Sender(tablet)
    for sequence in (0, 1, 2, 1, 4, 3):
        sender.send(numbered(2, writer=9, sequence=sequence))
    sender.send(numbered(2, writer=8, sequence=0))
    gap = int(ErrorCode.OUT_OF_ORDER_SEQUENCE_EXCEPTION)
    expected = [(0, 0), (0, 2), (0, 4), (0, 2), (gap, 0), (0, 6), (0, 8)]
    assert await sender.answers() == expected
    await tablet.server.close()


async def test_what_does_not_gather_comes_after_what_gathered_before_it(tmp_path: Path) -> None:
    tablet = await small_tablet(tmp_path, WrittenFiles())
    sender = Sender(tablet)
    sender.send(batch(1))
    sender.send(batch(GATHERED_BYTES_MAX // 8))
    sender.send(batch(1) + batch(1))
    sender.send(batch(1))
    large = GATHERED_BYTES_MAX // 8
    assert await sender.answers() == [(0, 0), (0, 1), (0, 1 + large), (0, 3 + large)]
    await tablet.server.close()


async def test_no_more_gathers_than_the_commit_log_takes_as_one_entry(tmp_path: Path) -> None:
    files = WrittenFiles()
    tablet = await small_tablet(tmp_path, files, "ack")
    sender = Sender(tablet)
    rows = COPY_BYTES_MAX // 25
    assert len(batch(rows)) * 2 > COPY_BYTES_MAX > len(batch(rows))
    for _ in range(3):
        sender.send(batch(rows))
    assert [offset for _, offset in await sender.answers()] == [0, rows, 2 * rows]
    await tablet.server.close()
    segments = [size for name, size in files.writes if name == "log-0"]
    assert segments[:3] == [len(batch(rows))] * 3


async def test_a_bucket_dropped_within_the_turn_refuses_what_gathered(tmp_path: Path) -> None:
    tablet = await small_tablet(tmp_path, WrittenFiles())
    sender = Sender(tablet)
    sender.send(batch())
    await tablet.drop(0)
    assert [code for code, _ in await sender.answers()] == [NOT_OPEN]
    await tablet.server.close()


async def test_an_unforeseen_error_answers_everything_that_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tablet = await small_tablet(tmp_path, WrittenFiles())
    sender = Sender(tablet)
    for _ in range(3):
        sender.send(batch())
    monkeypatch.setattr(Log, "append_new", lambda *_: 1 / 0)
    assert {code for code, _ in await sender.answers()} == {int(ErrorCode.UNKNOWN_SERVER_ERROR)}
    monkeypatch.undo()
    await tablet.server.close()


def packed_batch(rows: int, *, damaged: bool = False) -> bytes:
    """A compressed batch of few bytes, which takes many when it is unpacked."""
    columns = [pa.array([7] * rows, pa.int64()), pa.array(["text"] * rows)]
    rows_batch = pa.RecordBatch.from_arrays(columns, names=["a", "b"])
    zstd = ZstdMessages(rows_batch.schema, 3)
    message = bytearray(zstd.write(zstd.of(rows_batch), 0))
    if damaged:
        message[-40:-8] = bytes(32)
    return bytes(build_batch(1, bytes(message), rows))


async def test_content_that_takes_long_to_unpack_is_checked_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    plain = ContentCheck.run

    def noted(self: ContentCheck, buf: Any) -> None:
        threads.append(threading.current_thread().name)
        plain(self, buf)

    monkeypatch.setattr(ContentCheck, "run", noted)
    tablet = await Tablet(tmp_path).start()
    connection = Connection()
    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    for bucket, damaged in ((0, False), (1, True), (9, False)):
        request.buckets_req.add(bucket_id=bucket, records=packed_batch(600_000, damaged=damaged))
    sent = connection.send(tablet.server.produce.handle, request)
    corrupt = int(ErrorCode.CORRUPT_RECORD_EXCEPTION)
    assert await connection.produced(sent) == [(0, 0), (1, corrupt), (9, UNKNOWN)]
    assert set(threads) == {"zufluss-check_0"}
    assert tablet.server.buckets.replica(TABLE, None, 0).log.log_end_offset == 600_000
    await tablet.server.close()


async def test_a_request_with_many_entries_is_appended_in_turns_and_answered_once(
    tmp_path: Path,
) -> None:
    """65,536 entries of 6 bytes held the event loop for more than a second."""
    tablet = await Tablet(tmp_path).start()
    connection = Connection()
    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    for number in range(2 * ENTRIES_AT_ONCE):
        request.buckets_req.add(bucket_id=(0, 1, 9)[number % 3], records=batch(1))
    request.buckets_req.add(bucket_id=1, records=packed_batch(600_000, damaged=True))
    sent = connection.send(tablet.server.produce.handle, request)
    assert not any(replica.log.log_end_offset for replica in tablet.server.buckets.replicas())
    corrupt = int(ErrorCode.CORRUPT_RECORD_EXCEPTION)
    answers = await connection.produced(sent)
    expected = [(0, 0), (1, 0), (9, UNKNOWN)] * ENTRIES_AT_ONCE
    assert answers == [*expected[: 2 * ENTRIES_AT_ONCE], (1, corrupt)]
    ends = [replica.log.log_end_offset for replica in tablet.server.buckets.replicas()]
    assert ends == [(2 * ENTRIES_AT_ONCE + 2) // 3, (2 * ENTRIES_AT_ONCE + 1) // 3]
    assert not tablet.server.produce.pending
    assert tablet.server.produce._later_bytes == 0
    await tablet.server.close()


async def test_the_answer_to_many_entries_is_encoded_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors of 65,536 entries took 40 ms to encode, in one turn of the event loop."""
    lengths = []

    def encoded(entries: Sequence[Any]) -> bytes:
        lengths.append(len(entries))
        return produce_response(entries)

    monkeypatch.setattr(pending, "produce_response", encoded)
    tablet = await Tablet(tmp_path).start()
    connection = Connection()
    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    count = 3 * ENTRIES_AT_ONCE
    for _ in range(count):
        request.buckets_req.add(bucket_id=9, records=b"")
    sent = connection.send(tablet.server.produce.handle, request)
    assert await connection.produced(sent) == [(9, UNKNOWN)] * count
    assert lengths == [ENTRIES_AT_ONCE] * 3
    await tablet.server.close()


async def test_a_long_request_with_bad_acks_is_refused_as_a_whole(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    connection = Connection()
    request = m.ProduceLogRequest(acks=5, table_id=TABLE, timeout_ms=30_000)
    for _ in range(2 * ENTRIES_AT_ONCE):
        request.buckets_req.add(bucket_id=0, records=batch(1))
    sent = connection.send(tablet.server.produce.handle, request)
    assert await connection.answer(sent) == InvalidRequiredAcksError.code
    assert not any(replica.log.log_end_offset for replica in tablet.server.buckets.replicas())
    await tablet.server.close()
    assert tablet.server.produce._later_bytes == 0


async def test_an_entry_of_many_tiny_batches_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    connection = Connection()
    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    request.buckets_req.add(bucket_id=0, records=batch(1) * BATCHES_MAX)
    request.buckets_req.add(bucket_id=1, records=batch(1) * (BATCHES_MAX + 1))
    sent = connection.send(tablet.server.produce.handle, request)
    too_large = int(ErrorCode.RECORD_TOO_LARGE_EXCEPTION)
    assert await connection.produced(sent) == [(0, 0), (1, too_large)]
    assert tablet.server.buckets.replica(TABLE, None, 1).log.log_end_offset == 0
    await tablet.server.close()
