"""Puts that cost more than there is: refused before they change anything, and never for good."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog.testing

from tests.end_to_end.kv import Codec, kv_batch, put_request
from tests.tablet.keyed import KEYED
from tests.tablet.keyed import keyed as keyed_server
from tests.tablet.parts import Parts, parts
from tests.tablet.support import TABLE, Connection
from tests.waiting import WAIT_SECONDS
from zufluss.errors import ErrorCode, StorageBackpressureError
from zufluss.kv import tablet
from zufluss.kv.hot.entries import NEWEST
from zufluss.kv.store import KvStore, RowsTooLargeError, hash_keys
from zufluss.obs import metrics
from zufluss.record.slices import Slices
from zufluss.tablet import put as put_module
from zufluss.tablet.put import BACKPRESSURE_VERSION, BATCH_BYTES, ENTRIES_WITH_WORKER
from zufluss.tablet.samples import tablet_samples
from zufluss.wire import messages as m
from zufluss.wire.codec import decode
from zufluss.wire.hot.buckets import ENTRIES_AT_ONCE
from zufluss.wire.hot.produce import produce_response

CODEC = Codec(KEYED)


@pytest_asyncio.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Parts]:
    async with parts(tmp_path, KEYED) as made:
        yield made


async def put(keyed: Parts, *records: Any, version: int = BACKPRESSURE_VERSION) -> Any:
    """Put one batch; the answer of its bucket."""
    connection, request = Connection(), put_request(TABLE, kv_batch(records))
    sent = connection.send(keyed.put_handler().handle, request, version)
    (entry,) = decode(m.PutKvResponse, await connection.answer(sent)).buckets_resp
    return entry


def row_count(store: KvStore, count: int) -> int:
    keys = Slices.of([CODEC.key((i,)) for i in range(count)])
    return int((store.get(keys, hash_keys(keys), NEWEST).starts >= 0).sum())


@pytest.mark.parametrize("evicted", [False, True])
async def test_deletes_of_more_stored_bytes_than_a_put_may_read_are_refused(
    keyed: Parts, monkeypatch: pytest.MonkeyPatch, evicted: bool
) -> None:
    """A delete is some bytes, and its changelog has the whole row that it deletes."""
    monkeypatch.setattr(tablet, "STORED_BYTES_MAX", 10_000)
    monkeypatch.setattr(tablet, "STORED_ROWS_MIN", 0)
    replica = await keyed.open()
    for i in range(100):
        assert (await put(keyed, CODEC.put((i, "x" * 1000)))).error_code == 0
    store, end = replica.tablet.store, replica.log.log_end_offset
    if evicted:
        replica.tablet.flush()
        store.flush_wait()
        store.evict(store.memory_bytes)
    refused = await put(keyed, *(CODEC.delete((i,)) for i in range(100)))
    assert refused.error_code == ErrorCode.RECORD_TOO_LARGE_EXCEPTION
    assert "10000 bytes; send fewer keys in a batch" in refused.error_message
    assert replica.log.log_end_offset == end
    assert row_count(store, 100) == 100
    assert (await put(keyed, *(CODEC.delete((i,)) for i in range(5)))).error_code == 0
    monkeypatch.setattr(tablet, "STORED_BYTES_MAX", 10)
    assert (await put(keyed, CODEC.delete((5,)))).error_code == 0, "one row is never too large"
    assert row_count(store, 100) == 94


@pytest.mark.parametrize(
    ("version", "code"),
    [
        (BACKPRESSURE_VERSION, ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION),
        (BACKPRESSURE_VERSION - 1, ErrorCode.KV_STORAGE_EXCEPTION),
    ],
)
async def test_a_put_without_memory_is_refused_and_its_bucket_goes_on(
    keyed: Parts, monkeypatch: pytest.MonkeyPatch, version: int, code: ErrorCode
) -> None:
    replica = await keyed.open()
    assert (await put(keyed, CODEC.put((1, "one")))).error_code == 0

    def none_left(*_: object, **__: object) -> None:
        raise StorageBackpressureError("no memory")

    with monkeypatch.context() as shortage:
        shortage.setattr(KvStore, "put", none_left)
        refused = await put(keyed, CODEC.put((2, "two")), version=version)
    assert refused.error_code == code
    assert replica.failure is None
    assert replica.tablet.failure is None
    assert (await put(keyed, CODEC.put((2, "two")))).log_end_offset == 2
    assert replica.row_count() == 2


class Held:
    """What a frame holds; a weak reference tells when it is freed."""


async def test_what_the_frames_of_a_refusal_held_is_freed_without_a_collection_of_garbage(
    keyed: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 refused puts, or limit scans, kept the rows that they had read: 1 to 2 GB."""
    replica = await keyed.open()
    held: list[weakref.ref[Held]] = []

    def too_large(*_: object, **__: object) -> None:
        rows = Held()
        held.append(weakref.ref(rows))
        raise RowsTooLargeError("rows")

    monkeypatch.setattr(KvStore, "get", too_large)
    gc.disable()
    try:
        refused = await put(keyed, CODEC.put((1, "one")), CODEC.put((2, "two")))
        assert refused.error_code == ErrorCode.RECORD_TOO_LARGE_EXCEPTION
        with suppress(RowsTooLargeError):
            await keyed.kv.call(lambda: replica.tablet.store.get())
        await keyed.kv.call(lambda: None)  # the worker has forgotten its earlier jobs then
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()


async def test_memory_and_open_files_of_primary_key_buckets_are_measured(tmp_path: Path) -> None:
    async with keyed_server(tmp_path) as server:
        await server.put(*((i, "x" * 100) for i in range(100)))
        samples = {sample.metric: sample.value for sample in tablet_samples(server.server)()}
        assert 10_000 < samples[metrics.KV_MEMORY_DIRTY_BYTES] < samples[metrics.KV_MEMORY_BYTES]
        assert samples[metrics.KV_MEMORY_REFUSALS] == 0
        assert samples[metrics.KV_DATABASE_DESCRIPTORS] >= 0


async def test_a_put_with_many_entries_is_begun_in_turns_and_logged_once(
    keyed: Parts,
) -> None:
    """65,536 unknown buckets held the event loop for four seconds, most of it for log lines."""
    await keyed.open()
    handler, connection = keyed.put_handler(), Connection()
    request = m.PutKvRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    for number in range(2 * ENTRIES_AT_ONCE):
        request.buckets_req.add(bucket_id=number % 2, records=kv_batch([CODEC.put((number, "x"))]))
    with structlog.testing.capture_logs() as lines:
        sent = connection.send(handler.handle, request, BACKPRESSURE_VERSION)
        assert not connection.answers[sent]
        answer = decode(m.PutKvResponse, await connection.answer(sent))
    unknown = ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION
    assert [e.error_code for e in answer.buckets_resp] == [0, unknown] * ENTRIES_AT_ONCE
    assert [line["event"] for line in lines].count("put_refused") == 1
    assert handler.pressure() == 0
    assert not handler.pending


async def test_a_put_with_many_entries_that_times_out_is_answered_in_turns(
    keyed: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its 65,536 entries were refused, and their errors encoded, in one turn of the event loop.

    Few of them are with the worker meanwhile: puts of others waited for 128.
    """
    await keyed.open()
    handler, connection = keyed.put_handler(), Connection()
    count = 3 * ENTRIES_AT_ONCE
    waiting: list[Any] = []
    full = asyncio.Event()

    def submit(entry: Any, *_: object) -> None:
        waiting.append(entry)
        if len(waiting) == ENTRIES_WITH_WORKER:
            full.set()

    monkeypatch.setattr(handler, "_submit", submit)
    lengths = []

    def encoded(entries: Sequence[Any]) -> bytes:
        lengths.append(len(entries))
        return produce_response(entries)

    monkeypatch.setattr(put_module, "produce_response", encoded)
    request = m.PutKvRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    for number in range(count):
        request.buckets_req.add(bucket_id=0, records=kv_batch([CODEC.put((number, "x"))]))
    sent = connection.send(handler.handle, request, BACKPRESSURE_VERSION)
    async with asyncio.timeout(WAIT_SECONDS):
        await full.wait()
    for _ in range(count):
        await asyncio.sleep(0)
    assert len(waiting) == ENTRIES_WITH_WORKER
    waiting[1].acknowledged()
    handler.expire(asyncio.get_running_loop().time() + 31)
    answer = decode(m.PutKvResponse, await connection.answer(sent))
    late = ErrorCode.REQUEST_TIME_OUT
    assert [e.error_code for e in answer.buckets_resp] == [late, 0] + [late] * (count - 2)
    assert lengths == [ENTRIES_AT_ONCE] * 3
    assert not handler.pending


async def test_many_small_batches_count_more_than_their_bytes_in_the_queue(
    keyed: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker takes 0.1 ms for a batch of one row; 40,000 of them are 2 MB."""
    await keyed.open()
    monkeypatch.setattr(put_module, "QUEUE_BYTES_MAX", 10 * BATCH_BYTES)
    handler, connection = keyed.put_handler(), Connection()
    request = m.PutKvRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    for number in range(ENTRIES_AT_ONCE):
        request.buckets_req.add(bucket_id=0, records=kv_batch([CODEC.put((number, "x"))]))
    sent = connection.send(handler.handle, request, BACKPRESSURE_VERSION)
    answer = decode(m.PutKvResponse, await connection.answer(sent))
    full = ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION
    assert [e.error_code for e in answer.buckets_resp] == [0] * 10 + [full] * (ENTRIES_AT_ONCE - 10)
