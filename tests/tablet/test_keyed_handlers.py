"""The handlers of primary-key tables, without a tablet server: lookups, scans and undos."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.end_to_end.kv import Codec, kv_batch, lookup_request, prefix_request, put_request
from tests.end_to_end.scans import (
    arrow_of,
    next_request,
    open_request,
    page_request,
    pin_request,
    rows_of,
)
from tests.tablet.keyed import KEYED
from tests.tablet.parts import Parts, parts
from tests.tablet.support import TABLE, Connection
from zufluss.cluster.producers import ProducerEntry, TableProducers
from zufluss.errors import (
    ErrorCode,
    InvalidScanRequestError,
    LeaderNotAvailableError,
    ProducerFencedError,
    UndoImpossibleError,
)
from zufluss.log.holds import Holder
from zufluss.model.producer import ProducerWriter
from zufluss.net.services import RequestContext
from zufluss.replica.replica import Replica
from zufluss.tablet.lookup import LookupHandler
from zufluss.tablet.put import PutHandler
from zufluss.tablet.scan.sessions import ScanSessions
from zufluss.wire import messages as m
from zufluss.wire.codec import decode

CODEC = Codec(KEYED)
CONTEXT = RequestContext(None, "CLIENT", 0, "test")
PRODUCER = 3

Row = tuple[int, str]


@pytest_asyncio.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Parts]:
    async with parts(tmp_path, KEYED) as table:
        yield table


async def put_rows(put: PutHandler, *rows: Row, writer_id: int = -1, sequence: int = -1) -> int:
    """Put rows in one batch; returns the error code."""
    records = kv_batch([CODEC.put(row) for row in rows], writer_id=writer_id, sequence=sequence)
    connection = Connection()
    answer = await connection.answer(connection.send(put.handle, put_request(TABLE, records)))
    (entry,) = decode(m.PutKvResponse, answer).buckets_resp
    return int(entry.error_code)


async def look_up(
    lookup: LookupHandler, *keys: int, buckets: int = 1
) -> list[list[Row | None] | ErrorCode]:
    """The rows of keys in each bucket, or the error code of the bucket."""
    request = m.LookupRequest(table_id=TABLE)
    for bucket in range(buckets):
        request.buckets_req.add(bucket_id=bucket, keys=[CODEC.key((key,)) for key in keys])
    connection = Connection()
    answer = await connection.answer(connection.send(lookup.handle, request))
    return [
        ErrorCode(entry.error_code)
        if entry.error_code
        else [CODEC.value(value.values) for value in entry.values]
        for entry in decode(m.LookupResponse, answer).buckets_resp
    ]


# -- lookups ------------------------------------------------------------------------------------


async def test_a_lookup_of_rows_in_memory_is_answered_at_once(keyed: Parts) -> None:
    await keyed.open()
    put, connection = keyed.put_handler(), Connection()
    lookup = keyed.lookup_handler(put)
    await put_rows(put, (1, "one"))
    sent = connection.send(lookup.handle, lookup_request(TABLE, [CODEC.key((1,))]))
    assert connection.answers[sent], "answered before the handler returned"
    assert connection.inflight == 0
    assert await look_up(lookup, 1, 2) == [[(1, "one"), None]]


async def test_a_lookup_sees_no_row_that_a_crash_could_take_back(tmp_path: Path) -> None:
    async with parts(tmp_path, KEYED, "ack") as keyed:
        replica = await keyed.open()
        put = keyed.put_handler()
        await put_rows(put, (1, "one"))
        replica.log.high_watermark = 0
        assert await look_up(keyed.lookup_handler(put), 1) == [[None]]


async def test_each_bucket_of_a_lookup_has_its_own_answer(keyed: Parts) -> None:
    await keyed.open()
    put = keyed.put_handler()
    await put_rows(put, (1, "one"))
    unknown = ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION
    assert await look_up(keyed.lookup_handler(put), 1, buckets=2) == [[(1, "one")], unknown]


async def test_a_lookup_without_memory_to_begin_costs_its_client_the_connection(
    keyed: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer the client would wait for its timeout, and the bytes stay counted."""

    async def no_memory(*_: object) -> None:
        raise MemoryError

    await keyed.open()
    handler, connection = keyed.lookup_handler(keyed.put_handler()), Connection()
    request = lookup_request(TABLE, [CODEC.key((1,))])
    request.buckets_req.add(bucket_id=1)
    with monkeypatch.context() as shortage:
        shortage.setattr(LookupHandler, "_answer", no_memory)
        connection.send(handler.handle, request)
        while not connection.closing:
            await asyncio.sleep(0)
    assert handler._pending_bytes == 0


async def test_a_lookup_that_inserts_answers_the_new_row(keyed: Parts) -> None:
    replica = await keyed.open()
    put, connection = keyed.put_handler(), Connection()
    lookup = keyed.lookup_handler(put)
    request = lookup_request(TABLE, [CODEC.key((7,)), CODEC.key((7,))])
    request.insert_if_not_exists = True
    answer = await connection.answer(connection.send(lookup.handle, request))
    (entry,) = decode(m.LookupResponse, answer).buckets_resp
    assert [CODEC.value(value.values) for value in entry.values] == [(7, None)] * 2
    assert replica.row_count() == 1


async def test_a_prefix_lookup_answers_the_rows_of_each_prefix(keyed: Parts) -> None:
    await keyed.open()
    put = keyed.put_handler()
    await put_rows(put, (1, "one"), (2, "two"))
    request = prefix_request(TABLE, [CODEC.key((2,)), b"", CODEC.key((5,))])
    answer = await keyed.lookup_handler(put).prefix_lookup(request, CONTEXT)
    (entry,) = decode(m.PrefixLookupResponse, b"".join(answer.buffers)).buckets_resp
    rows = [[CODEC.value(value) for value in values.values] for values in entry.value_lists]
    assert rows == [[(2, "two")], [(1, "one"), (2, "two")], []]


# -- scans --------------------------------------------------------------------------------------


async def test_a_pin_answers_the_rows_of_its_offset_until_its_bucket_is_closed(
    keyed: Parts,
) -> None:
    replica = await keyed.open()
    put, scans = keyed.put_handler(), keyed.scan_service()
    await put_rows(put, (1, "one"), (2, "two"))
    (pin,) = (await scans.open_kv_snapshot(pin_request(TABLE), CONTEXT)).pins
    await put_rows(put, (1, "changed"))
    request = page_request(TABLE, pin.pin_id, schema=KEYED)
    answer = await scans.scan_kv_snapshot(request, CONTEXT)
    assert arrow_of(answer, KEYED.arrow).to_pydict() == {"id": [1, 2], "text": ["one", "two"]}
    assert (answer.done, pin.log_offset) == (True, 2)
    keyed.close_bucket(replica, delete=False)
    assert len(scans.pins) == 0
    with pytest.raises(LeaderNotAvailableError):
        await scans.scan_kv_snapshot(request, CONTEXT)


async def test_an_earlier_state_is_rebuilt_from_the_changelog(keyed: Parts) -> None:
    await keyed.open()
    put, scans = keyed.put_handler(), keyed.scan_service()
    for text in ("first", "second", "third"):
        await put_rows(put, (1, text))
    (pin,) = (await scans.open_kv_snapshot(pin_request(TABLE, at=[1]), CONTEXT)).pins
    answer = await scans.scan_kv_snapshot(page_request(TABLE, pin.pin_id), CONTEXT)
    assert arrow_of(answer, KEYED.arrow).to_pydict() == {"id": [1], "text": ["first"]}
    with pytest.raises(InvalidScanRequestError, match="no state at offset 9"):
        await scans.open_kv_snapshot(pin_request(TABLE, at=[9]), CONTEXT)


async def test_a_scan_of_fluss_continues_where_its_last_answer_ended(keyed: Parts) -> None:
    await keyed.open()
    put = keyed.put_handler()
    sessions = ScanSessions(keyed.scan_service())
    await put_rows(put, (1, "one"), (2, "two"))
    answer = await sessions.scan_kv(open_request(TABLE, size=1), CONTEXT)
    scanner_id, answers = answer.scanner_id, [rows_of(answer)]
    while answer.has_more_results:  # an answer is empty if its time passed before the first row
        answer = await sessions.scan_kv(next_request(scanner_id, len(answers), 1), CONTEXT)
        answers.append(rows_of(answer))
    assert [rows for rows in answers if rows] == [[(1, "one")], [(2, "two")]]
    wrong = await sessions.scan_kv(next_request(b"no scan", 1), CONTEXT)
    assert wrong.error_code == ErrorCode.UNKNOWN_SCANNER_ID


# -- undos --------------------------------------------------------------------------------------


def begin_epoch(keyed: Parts, replica: Replica, epoch: int) -> None:
    """Tell the bucket that the producer of column `text` has begun an epoch."""
    entry = ProducerEntry("p", PRODUCER, epoch, frozenset({1}), exclusive=True, lost=False)
    keyed.producers.update(TableProducers(TABLE, epoch, (entry,)))
    replica.tablet.fence = keyed.producers.fence(TABLE)


def undo_request(epoch: int, from_offset: int) -> m.UndoProducerRequest:
    return m.UndoProducerRequest(
        table_id=TABLE,
        bucket_id=0,
        producer_number=PRODUCER,
        epoch=epoch,
        from_offset=from_offset,
    )


async def test_an_undo_takes_back_the_changes_of_earlier_epochs(keyed: Parts) -> None:
    replica = await keyed.open()
    put = keyed.put_handler()
    undos, lookup = keyed.undo_handler(put), keyed.lookup_handler(put)
    await put_rows(put, (1, "before"))
    begin_epoch(keyed, replica, 1)
    writer_id = ProducerWriter(PRODUCER, 1, 0).writer_id
    assert await put_rows(put, (1, "after"), (2, "new"), writer_id=writer_id, sequence=0) == 0
    begin_epoch(keyed, replica, 2)
    with pytest.raises(ProducerFencedError):
        await undos.undo_producer(undo_request(1, 1), CONTEXT)
    answer = await undos.undo_producer(undo_request(2, 1), CONTEXT)
    assert (answer.done, answer.keys, answer.position) == (True, 2, answer.end_offset)
    assert await look_up(lookup, 1, 2) == [[(1, "before"), None]]
    assert replica.log.holds.offset(Holder.UNDO) is None, "retention may go on"
    assert undos.keys_total == 2


async def test_an_undo_from_an_offset_that_does_not_exist_changes_nothing(keyed: Parts) -> None:
    replica = await keyed.open()
    put = keyed.put_handler()
    undos = keyed.undo_handler(put)
    begin_epoch(keyed, replica, 1)
    for from_offset in (-1, 5):
        with pytest.raises(UndoImpossibleError, match="nothing was changed"):
            await undos.undo_producer(undo_request(1, from_offset), CONTEXT)
    assert replica.log.log_end_offset == 0
    assert not replica.tablet.undoing, "puts of the producer are accepted again"
