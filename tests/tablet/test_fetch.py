"""Fetches that park, fail late, ask too much, or whose client is gone."""

from __future__ import annotations

import asyncio
import errno
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.tablet.support import SCHEMA, TABLE, Connection, Tablet, batch, fetch_request
from zufluss.errors import CorruptMessageError, ErrorCode, RecordTooLargeError
from zufluss.log.log import Log
from zufluss.log.segment import PagesNotCachedError
from zufluss.model.predicate import LITERALS_MAX, TESTS_MAX, LeafFunction
from zufluss.record.batch.stats import build_statistics
from zufluss.record.header import iter_headers
from zufluss.tablet import fetch
from zufluss.tablet.fetch import Fetch
from zufluss.tablet.fetch_reader import (
    BUCKET_BYTES,
    FETCH_BYTES_MAX,
    TURN_BYTES,
    FetchReader,
)
from zufluss.wire import messages as m
from zufluss.wire.codec import decode
from zufluss.wire.hot.buckets import BUCKETS_MAX


async def append(tablet: Tablet, *buckets: int) -> None:
    connection, sent = await tablet.produce(*buckets)
    assert await connection.produced(sent) == [(bucket, 0) for bucket in buckets]


async def test_a_disk_error_behind_a_cold_page_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes up in a task of its own, where nobody else would answer the client."""
    tablet = await Tablet(tmp_path).start()
    await append(tablet, 0)

    def sick(self: Log, offset: int, *_: Any, nowait: bool = True, **__: Any) -> None:
        if nowait:
            raise PagesNotCachedError(self.segments[0].reader(self.files), 0, 1)
        raise OSError(errno.EIO, "the disk is sick")

    monkeypatch.setattr(Log, "read", sick)
    connection = Connection()
    entry = await connection.fetched(tablet.fetch(connection, max_wait_ms=100))
    assert entry.error_code == ErrorCode.LOG_STORAGE_EXCEPTION
    assert "the disk is sick" in entry.error_message
    monkeypatch.undo()
    await tablet.server.close()


@pytest.mark.parametrize("moment", ["woken", "expired"])
async def test_an_unforeseen_error_of_a_parked_fetch_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    tablet = await Tablet(tmp_path).start()
    connection = Connection()
    sent = tablet.fetch(connection, max_wait_ms=200 if moment == "expired" else 30_000)
    assert len(tablet.server.fetch.parked) == 1
    monkeypatch.setattr(FetchReader, "read", lambda *_, **__: (1 / 0 for _ in "x"))
    if moment == "woken":
        await append(tablet, 0)
    assert await connection.answer(sent) == ErrorCode.UNKNOWN_SERVER_ERROR
    assert not tablet.server.fetch.parked
    assert not tablet.server.buckets.replica(TABLE, None, 0).fetch_waiters
    await tablet.server.close()


async def test_a_parked_fetch_reads_nothing_before_there_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read all of it again with every append would cost the square of what is waited for."""
    tablet = await Tablet(tmp_path).start()
    reads = 0
    read = FetchReader.read

    def counted(self: FetchReader, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        return read(self, **options)

    monkeypatch.setattr(FetchReader, "read", counted)
    connection = Connection()
    sent = tablet.fetch(connection, min_bytes=20 * len(batch()))
    for _ in range(20):
        assert not connection.answers[sent]
        await append(tablet, 0)
        await asyncio.sleep(0)
    entry = await connection.fetched(sent)
    assert (len(entry.records), reads) == (20 * len(batch()), 2)
    await tablet.server.close()


async def test_a_fetch_whose_client_is_gone_is_let_go(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    connection = Connection()
    sent = tablet.fetch(connection)
    connection.closing = True
    await append(tablet, 0)
    await asyncio.sleep(0)
    assert not tablet.server.fetch.parked
    assert not connection.answers[sent]
    await tablet.server.close()


async def test_a_fetch_that_waits_for_its_client_to_read_does_not_park_while_the_server_drains(
    tmp_path: Path,
) -> None:
    tablet = await Tablet(tmp_path).start()
    connection = Connection()
    connection.backlogged = True
    sent = tablet.fetch(connection)
    tablet.server.fetch.drain()
    connection.backlogged = False
    connection.drained[0]()
    assert not (await connection.fetched(sent)).records
    await tablet.server.close()


async def test_an_answer_is_bounded_whatever_a_client_asks_for(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    buckets, remote_logs = tablet.server.buckets, tablet.server.remote_logs
    reader = FetchReader(buckets, remote_logs, fetch_request(max_bytes=2**31 - 1))
    assert reader.bytes_max == FETCH_BYTES_MAX
    many = m.FetchLogRequest(follower_server_id=-1, max_bytes=1, max_wait_ms=0)
    many.tables_req.add(table_id=TABLE, projection_pushdown_enabled=False).buckets_req.extend(
        [m.PbFetchLogReqForBucket(bucket_id=0, fetch_offset=0, max_fetch_bytes=1)] * BUCKETS_MAX
    )
    with pytest.raises(RecordTooLargeError, match="send several"):
        list(FetchReader(buckets, remote_logs, many).read(nowait=True))
    await tablet.server.close()


@pytest.mark.parametrize(
    "statistics",
    [
        pytest.param(struct.pack("<Bhii", 1, 0, 0, 0), id="of no column"),
        pytest.param(struct.pack("<B3h4i", 1, 2, 0, 0, 0, 0, 0, 0), id="of one column twice"),
        pytest.param(
            struct.pack("<Bhhi iqq iqq", 1, 1, 0, 0, 16, 0, 9, 16, 0, 1), id="minimum above maximum"
        ),
    ],
)
async def test_statistics_that_make_no_sense_do_not_stop_a_reader(
    tmp_path: Path, statistics: bytes
) -> None:
    """The batch is in the log; a reader with a filter must get past it as others do."""
    tablet = await Tablet(tmp_path, properties={"table.statistics.columns": "*"}).start()
    records = batch(statistics=statistics)
    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    request.buckets_req.add(bucket_id=0, records=records)
    connection = Connection()
    sent = connection.send(tablet.server.produce.handle, request)
    if await connection.produced(sent) == [(0, ErrorCode.CORRUPT_RECORD_EXCEPTION)]:
        pytest.skip("refused before it is written, which is better still")
    sent = connection.send(tablet.server.fetch.handle, filtered_request(5))
    entry = await connection.fetched(sent)
    assert (entry.error_code, len(entry.records)) == (0, len(records))
    await tablet.server.close()


async def test_a_filtered_fetch_of_many_batches_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics take time to read; a fetch looks at some, and the next ones at the rest."""
    monkeypatch.setattr("zufluss.tablet.fetch_reader.PRUNE_WORK_MAX", 7 * 11)
    monkeypatch.setattr("zufluss.tablet.fetch_reader.TURN_BYTES", 22 * 4096)
    tablet = await Tablet(tmp_path, properties={"table.statistics.columns": "*"}).start()
    rows = pa.RecordBatch.from_arrays([pa.array([1]), pa.array(["x"])], schema=SCHEMA.arrow)
    records = batch(statistics=build_statistics(rows, SCHEMA, (0,)))
    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    request.buckets_req.add(bucket_id=0, records=records * 20)
    connection = Connection()
    sent = connection.send(tablet.server.produce.handle, request)
    assert await connection.produced(sent) == [(0, 0)]
    for literal, ends in ((1, []), (5, [21, 42, 60])):
        offset, found, filtered = 0, 0, []
        while offset < 60:
            wanted = filtered_request(literal, offset)
            entry = await connection.fetched(connection.send(tablet.server.fetch.handle, wanted))
            found += len(entry.records)
            if entry.HasField("filtered_end_offset"):
                offset = entry.filtered_end_offset
                filtered.append(offset)
            else:
                offset = [h.next_offset for _, h in iter_headers(entry.records)][-1]
        assert (found, filtered) == (0 if ends else 20 * len(records), ends)
    await tablet.server.close()


async def test_a_bucket_that_is_named_many_times_is_read_once_from_its_last_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tablet = await Tablet(tmp_path).start()
    await append(tablet, 0)
    reads: list[int] = []
    plain = Log.read

    def counted(self: Log, offset: int, *rest: Any, **options: Any) -> Any:
        reads.append(offset)
        return plain(self, offset, *rest, **options)

    monkeypatch.setattr(Log, "read", counted)
    request = fetch_request(offset=0, max_wait_ms=0)
    for number in range(1500):
        table = request.tables_req[0] if number % 2 else request.tables_req.add(table_id=TABLE)
        table.projection_pushdown_enabled = False
        entry = table.buckets_req.add(bucket_id=0, fetch_offset=number, max_fetch_bytes=1 << 20)
    entry.fetch_offset = 1
    request.tables_req.add(table_id=TABLE, projection_pushdown_enabled=False).buckets_req.append(
        entry
    )
    connection = Connection()
    answer = await connection.answer(connection.send(tablet.server.fetch.handle, request))
    tables = decode(m.FetchLogResponse, answer).tables_resp
    assert [len(table.buckets_resp) for table in tables][-1] == 1
    assert sum(len(table.buckets_resp) for table in tables) == 1
    assert reads == [1]
    await tablet.server.close()


async def test_a_fetch_reads_a_bounded_part_of_the_log_though_its_filter_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tablet = await Tablet(tmp_path, properties={"table.statistics.columns": "*"}).start()
    rows = pa.RecordBatch.from_arrays([pa.array([1]), pa.array(["x"])], schema=SCHEMA.arrow)
    records = batch(statistics=build_statistics(rows, SCHEMA, (0,)))
    monkeypatch.setattr("zufluss.tablet.fetch_reader.READ_BYTES_MAX", 5 * len(records))
    monkeypatch.setattr("zufluss.tablet.fetch_reader.TURN_BYTES", len(records))
    connection = Connection()
    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    for bucket in (0, 1):
        request.buckets_req.add(bucket_id=bucket, records=records * 4)
    assert await connection.produced(connection.send(tablet.server.produce.handle, request))
    wanted = filtered_request(5)
    wanted.tables_req[0].buckets_req.add(bucket_id=1, fetch_offset=0, max_fetch_bytes=1 << 20)
    answer = await connection.answer(connection.send(tablet.server.fetch.handle, wanted))
    (table,) = decode(m.FetchLogResponse, answer).tables_resp
    assert [entry.filtered_end_offset for entry in table.buckets_resp] == [12, 3]
    await tablet.server.close()


@pytest.mark.parametrize(
    "shape", ["literals", "literals of many tables", "tests", "tests of many tables"]
)
async def test_a_filter_that_is_too_large_is_refused_before_it_is_read(
    tmp_path: Path, shape: str
) -> None:
    tablet = await Tablet(tmp_path).start()
    request = filtered_request(5)
    predicate = request.tables_req[0].filter_predicate
    if shape.startswith("literals"):
        predicate.leaf.function = LeafFunction.IN
        count = LITERALS_MAX if shape == "literals" else 4_000
        predicate.leaf.literals.extend([predicate.leaf.literals[0]] * count)
    else:
        leaf = m.PbPredicate()
        leaf.CopyFrom(predicate)
        predicate.type, predicate.compound.function = 1, 0
        predicate.compound.children.extend([leaf] * (TESTS_MAX if shape == "tests" else 400))
    if shape.endswith("of many tables"):
        request.tables_req.extend([request.tables_req[0]] * 2)
    connection = Connection()
    sent = connection.send(tablet.server.fetch.handle, request)
    assert await connection.answer(sent) is ErrorCode.INVALID_SCAN_REQUEST
    await tablet.server.close()


async def test_a_filter_of_many_literals_is_read_in_turns(tmp_path: Path) -> None:
    """10,000 literals held the event loop for 30 ms."""
    tablet = await Tablet(tmp_path).start()
    request = filtered_request(5)
    leaf = request.tables_req[0].filter_predicate.leaf
    leaf.function = LeafFunction.IN
    leaf.literals.extend([leaf.literals[0]] * (LITERALS_MAX - 1))
    reader = FetchReader(tablet.server.buckets, tablet.server.remote_logs, request)
    assert len(list(reader.read(nowait=True))) > 10
    assert reader.tables[0].may_match is not None
    await tablet.server.close()


async def test_the_texts_of_a_long_fetch_are_checked_in_turns(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    request = filtered_request(5)
    leaf = request.tables_req[0].filter_predicate.leaf
    leaf.function, leaf.field_id = LeafFunction.IN, SCHEMA.columns[1].id
    del leaf.literals[:]
    for _ in range(LITERALS_MAX):
        leaf.literals.add(literal_type=8, is_null=False, string_value="abc")
    good = request.SerializeToString()
    end = good.rindex(b"abc")
    bad = good[:end] + b"a\xffc" + good[end + 3 :]
    for body, code in ((good, None), (bad, CorruptMessageError.code)):
        connection, sent = Connection(), 100
        array = np.frombuffer(bytearray(body), np.uint8)
        connection.answers[sent], connection.inflight = [], 1
        handle = tablet.server.fetch.handle
        handle(connection, sent, 0, array, memoryview(array), 0, len(array))  # type: ignore[arg-type]
        assert not connection.answers[sent], "it takes several turns"
        answer = await connection.answer(sent)
        assert (answer if isinstance(answer, ErrorCode) else None) == code
    await tablet.server.close()


def filtered_request(literal: int, offset: int = 0) -> m.FetchLogRequest:
    """A fetch of bucket 0 that wants rows with a = literal."""
    request = fetch_request(offset=offset, max_wait_ms=0)
    predicate = request.tables_req[0].filter_predicate
    predicate.type = 0
    predicate.leaf.function, predicate.leaf.field_id = 0, SCHEMA.columns[0].id
    predicate.leaf.literals.add(literal_type=4, is_null=False, bigint_value=literal)
    return request


async def test_a_projection_of_rows_is_refused_as_one(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path, properties={"table.log.format": "INDEXED"}).start()
    connection = Connection()
    entry = await connection.fetched(tablet.fetch(connection, columns=[0]))
    assert entry.error_code == ErrorCode.INVALID_COLUMN_PROJECTION
    await tablet.server.close()


@pytest.mark.parametrize("columns", [None, (0,)])
@pytest.mark.parametrize("filtered", [False, True])
async def test_a_long_read_is_done_in_turns_and_returns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: tuple[int, ...] | None, filtered: bool
) -> None:
    """Other requests would wait for as long as 64 MB take to be read and projected."""
    tablet = await Tablet(tmp_path, properties={"table.statistics.columns": "*"}).start()
    connection = Connection()
    sizes = []
    for number in range(20):  # every third batch does not match
        value = 1 if number % 3 else 9
        rows = pa.RecordBatch.from_arrays([pa.array([value]), pa.array(["x"])], schema=SCHEMA.arrow)
        records = batch(number + 1, statistics=build_statistics(rows, SCHEMA, (0,)))
        sizes.append(len(records))
        request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
        request.buckets_req.add(bucket_id=0, records=records)
        sent = connection.send(tablet.server.produce.handle, request)
        assert await connection.produced(sent) == [(0, 0)]

    def read() -> tuple[int, bytes, int | None]:
        request = filtered_request(1) if filtered else fetch_request()
        (table,) = request.tables_req
        if columns is not None:
            table.projection_pushdown_enabled = True
            table.projected_fields.extend(columns)
        reader = FetchReader(tablet.server.buckets, tablet.server.remote_logs, request)
        reading, turns = reader.read(nowait=False), 1
        while True:
            try:
                next(reading)
            except StopIteration as end:
                ((bucket,),) = (table.buckets for table in end.value)
                return turns, b"".join(bucket.records), bucket.filtered_end_offset
            turns += 1

    turns, records, end = read()
    assert turns == 1
    monkeypatch.setattr("zufluss.tablet.fetch_reader.TURN_BYTES", 2 * max(sizes))
    monkeypatch.setattr("zufluss.tablet.fetch_reader.WORK_BYTES", 0)
    more_turns, same_records, same_end = read()
    assert (same_records, same_end) == (records, end)
    assert more_turns > 4
    await tablet.server.close()


async def test_a_fetch_of_many_buckets_is_read_in_turns(tmp_path: Path) -> None:
    tablet = await Tablet(tmp_path).start()
    connection = Connection()
    request = fetch_request(max_wait_ms=0)
    for bucket in range(1, 4 * TURN_BYTES // BUCKET_BYTES):
        request.tables_req[0].buckets_req.add(
            bucket_id=bucket % 1000, fetch_offset=0, max_fetch_bytes=1
        )
    sent = connection.send(tablet.server.fetch.handle, request)
    turns = 0
    while not connection.answers[sent]:
        turns += 1
        await asyncio.sleep(0)
    assert 3 < turns < 20
    (table,) = decode(m.FetchLogResponse, await connection.answer(sent)).tables_resp
    assert len(table.buckets_resp) == 1000, "a bucket that is named twice is read once"
    await tablet.server.close()


@pytest.mark.parametrize("parked", [False, True])
async def test_data_behind_a_read_that_takes_several_turns_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parked: bool
) -> None:
    """The read had passed the bucket, so the fetch waited for the next append or its time limit."""
    tablet = await Tablet(tmp_path).start()
    monkeypatch.setattr("zufluss.tablet.fetch_reader.TURN_BYTES", 1)
    monkeypatch.setattr(fetch.FetchHandler, "_end_turn", lambda self: None)  # the test takes steps
    later = tablet.server.fetch._later
    connection = Connection()

    def sent(max_wait_ms: int) -> int:
        request = fetch_request(max_wait_ms=max_wait_ms)
        request.tables_req[0].buckets_req.add(bucket_id=1, fetch_offset=0, max_fetch_bytes=1)
        return connection.send(tablet.server.fetch.handle, request)

    def steps(most: int = 1000) -> int:
        """Take steps of the read until it ends, or `most` of them; how many."""
        for number in range(most):
            if not later:
                return number
            later.popleft().go_on()
        return most

    whole = sent(max_wait_ms=0)
    taken = steps()
    assert connection.answers[whole]
    waiting = sent(max_wait_ms=10_000_000)
    if parked:
        steps()
        (again,) = tablet.server.fetch.parked
        again.serve(final=False)  # as when it was woken: it reads the first bucket
    else:
        steps(taken - 1)
    assert len(later) == 1, "the last bucket is left"
    await append(tablet, 0)
    while tablet.server.fetch._looks:  # the parked one is woken, and reads already
        await asyncio.sleep(0)
    monkeypatch.undo()
    steps(1)
    (table,) = decode(m.FetchLogResponse, await connection.answer(waiting)).tables_resp
    assert [bool(bucket.records) for bucket in table.buckets_resp] == [True, False]
    await tablet.server.close()


async def test_fetches_of_a_client_that_is_gone_wait_no_more(tmp_path: Path) -> None:
    """They stayed for a minute: reconnecting clients could have any number of them."""
    tablet = await Tablet(tmp_path).start()
    connection = Connection()
    for _ in range(5):
        tablet.fetch(connection)
    assert len(tablet.server.fetch.parked) == 5
    assert len(connection.gone) == 1, "a connection is watched once"
    connection.closing = True
    for callback in connection.gone:
        callback()
    assert not tablet.server.fetch.parked
    assert not tablet.server.buckets.replica(TABLE, None, 0).fetch_waiters
    assert tablet.server.fetch._parked_buckets == 0
    await tablet.server.close()


async def test_fetches_beyond_the_bound_of_waiting_buckets_are_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tablet = await Tablet(tmp_path).start()
    monkeypatch.setattr(fetch, "PARKED_BUCKETS_MAX", 2)
    connection = Connection()
    sent = [tablet.fetch(connection) for _ in range(3)]
    assert [len(connection.answers[i]) for i in sent] == [0, 0, 1]
    tablet.server.fetch.drain()
    assert [len(connection.answers[i]) for i in sent] == [1, 1, 1]
    await tablet.server.close()


async def test_woken_fetches_look_at_a_bounded_number_of_buckets_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 long polls of 2,000 buckets held the event loop for 0.8 s at every append."""
    tablet = await Tablet(tmp_path).start()
    monkeypatch.setattr(fetch, "TURN_BYTES", 1)
    connection = Connection()
    for _ in range(10):
        tablet.fetch(connection, min_bytes=1 << 20)
    looks: list[Any] = []
    plain = Fetch.look

    def counted(self: Fetch) -> None:
        looks.append(self)
        plain(self)

    monkeypatch.setattr(Fetch, "look", counted)
    replica = tablet.server.buckets.replica(TABLE, None, 0)
    seen = []
    for _ in range(30):
        replica.wake_fetches()
        before = len(looks)
        await asyncio.sleep(0)
        seen.append(len(looks) - before)
    assert max(seen) == 1
    assert len(set(looks)) == 10, "all of them have looked"
    await tablet.server.close()
