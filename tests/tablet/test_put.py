"""Answers to puts while the key-value worker has more to do than it can keep up with."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import pytest_asyncio

from tests.end_to_end.kv import Codec, kv_batch, put_request
from tests.tablet.keyed import KEYED, Keyed, serving
from tests.tablet.parts import Parts, parts
from tests.tablet.support import TABLE, Connection
from tests.waiting import WAIT_SECONDS
from zufluss.errors import ErrorCode, StorageBackpressureError
from zufluss.kv.tablet import KvTablet
from zufluss.model.schema import Schema
from zufluss.tablet.put import (
    BACKPRESSURE_VERSION,
    PRESSURE_FROM,
    QUEUE_BYTES_MAX,
    PendingPut,
    PutHandler,
    _known_error,
)
from zufluss.wire import messages as m
from zufluss.wire.codec import decode
from zufluss.wire.hot.produce import ProducedBucket


@pytest_asyncio.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Parts]:
    async with parts(tmp_path, KEYED) as made:
        yield made


def handler(keyed: Parts, queued: float) -> PutHandler:
    put = keyed.put_handler()
    put._queued_bytes = int(queued * QUEUE_BYTES_MAX)
    return put


def answer(keyed: Parts, queued: float) -> m.PutKvResponse:
    connection: Any = SimpleNamespace()
    pending = PendingPut(handler(keyed, queued), connection, 7, BACKPRESSURE_VERSION, 0.0)
    pending.entries = [
        ProducedBucket(None, 3, 12),
        ProducedBucket(4, 5, None, ErrorCode.CORRUPT_RECORD_EXCEPTION, "why"),
    ]
    return m.PutKvResponse.FromString(pending.body(pending.entries))


async def test_a_handler_without_a_server_puts_into_an_open_bucket(keyed: Parts) -> None:
    replica = await keyed.open()
    put, codec, connection = keyed.put_handler(), Codec(KEYED), Connection()
    request = put_request(TABLE, kv_batch([codec.put((1, "one")), codec.put((2, "two"))]))
    response = decode(
        m.PutKvResponse, await connection.answer(connection.send(put.handle, request))
    )
    assert [entry.error_code for entry in response.buckets_resp] == [0]
    assert replica.row_count() == 2
    assert keyed.contention.puts == 2, "the worker began and ended one put"
    keyed.close_bucket(replica, delete=True)
    response = decode(
        m.PutKvResponse, await connection.answer(connection.send(put.handle, request))
    )
    (entry,) = response.buckets_resp
    assert entry.error_code == ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION


async def test_a_put_is_in_the_changelog_once_when_memory_runs_out_behind_it(
    keyed: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await keyed.open()
    errors = [MemoryError()]

    def flush_due(_tablet: KvTablet, _changelog_bytes: int) -> bool:
        if errors:
            raise errors.pop()
        return False

    monkeypatch.setattr(KvTablet, "flush_due", flush_due)
    put, codec, connection = keyed.put_handler(), Codec(KEYED), Connection()
    request = put_request(TABLE, kv_batch([codec.put((1, "one"))]))
    for end in (1, 3):  # an insert; an update is two changes
        response = decode(
            m.PutKvResponse, await connection.answer(connection.send(put.handle, request))
        )
        assert [entry.error_code for entry in response.buckets_resp] == [0]
        assert replica.log.log_end_offset == end
    assert put._queued_bytes == 0


async def test_a_put_is_in_the_changelog_once_when_memory_runs_out_behind_it_again_and_again(
    keyed: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await keyed.open()
    put, codec, connection = keyed.put_handler(), Codec(KEYED), Connection()

    def no_memory(*_: object, **__: object) -> NoReturn:
        raise MemoryError

    quiet = SimpleNamespace(warning=no_memory, info=lambda *_, **__: None)
    monkeypatch.setattr(KvTablet, "flush_due", no_memory)
    monkeypatch.setattr("zufluss.tablet.put.log", quiet)
    request = put_request(TABLE, kv_batch([codec.put((1, "one"))]))
    response = decode(
        m.PutKvResponse, await connection.answer(connection.send(put.handle, request))
    )
    (entry,) = response.buckets_resp
    assert replica.log.log_end_offset == 1
    assert "would end at 2, not 1" in str(replica.failure), "the worker called twice"
    assert entry.error_code == 0, "it was answered before"


async def test_a_put_into_a_full_queue_is_refused_with_an_error_that_clients_retry_after_a_pause(
    keyed: Parts,
) -> None:
    full = handler(keyed, 1.0)
    with pytest.raises(StorageBackpressureError, match="try again after a pause") as newer:
        full._check_queue()
    older = _known_error(newer.value, BACKPRESSURE_VERSION - 1)
    assert _known_error(newer.value, BACKPRESSURE_VERSION) is newer.value
    assert newer.value.code == ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION
    assert older.code == ErrorCode.KV_STORAGE_EXCEPTION, "older clients do not know the other"
    assert newer.value.retriable
    assert older.retriable


async def test_a_queue_with_room_takes_the_put(keyed: Parts) -> None:
    handler(keyed, 0.99)._check_queue()


async def test_answers_tell_how_full_the_queue_is_once_it_matters(keyed: Parts) -> None:
    for entry in answer(keyed, PRESSURE_FROM / 2).buckets_resp:
        assert not entry.HasField("pressure")
    filled, refused = answer(keyed, 0.75).buckets_resp
    assert filled.pressure == pytest.approx(0.75)
    assert (filled.bucket_id, filled.log_end_offset) == (3, 12)
    assert (refused.partition_id, refused.bucket_id, refused.error_message) == (4, 5, "why")


async def test_a_closed_bucket_with_an_auto_increment_column_is_forgotten(tmp_path: Path) -> None:
    """Its state would stay in memory for as long as the server runs."""
    schema = Schema.of(
        "id BIGINT NOT NULL, text STRING, number BIGINT",
        primary_key=["id"],
        auto_increment_column=["number"],
    )

    async def ids(table_id: int, column_id: int, count: int) -> tuple[int, int]:
        return 1, 1 + count

    tablet = Keyed(tmp_path, schema=schema, allocate_ids=ids)
    async with serving(tablet):
        await tablet.put((1, "one"), targets=(0, 1))
        state = weakref.ref(tablet.replica().tablet)
        await tablet.drop(0)
        async with asyncio.timeout(WAIT_SECONDS):
            while state() is not None:
                await tablet.server.kv.settled()
                gc.collect()
