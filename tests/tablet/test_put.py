"""What a put is answered when the key-value worker has more to do than it can keep up with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zufluss.config.load import Configuration
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.tablet.put import (
    BACKPRESSURE_VERSION,
    PRESSURE_FROM,
    QUEUE_BYTES_MAX,
    PendingPut,
    Putter,
)
from zufluss.wire import messages as m
from zufluss.wire.hot.produce import ProducedBucket


def putter(queued: float) -> Putter:
    server: Any = SimpleNamespace(conf=Configuration.of({}))
    made = Putter(server)
    made._queued_bytes = int(queued * QUEUE_BYTES_MAX)
    return made


def answer(queued: float) -> m.PutKvResponse:
    connection: Any = SimpleNamespace()
    pending = PendingPut(putter(queued), connection, 7, 0.0)
    pending.entries = [
        ProducedBucket(None, 3, 12),
        ProducedBucket(4, 5, None, ErrorCode.CORRUPT_RECORD_EXCEPTION, "why"),
    ]
    return m.PutKvResponse.FromString(pending.body())


def test_a_put_into_a_full_queue_is_refused_with_an_error_that_clients_retry_after_a_pause() -> (
    None
):
    full = putter(1.0)
    with pytest.raises(ZuflussError, match="try again after a pause") as newer:
        full._check_queue(BACKPRESSURE_VERSION)
    with pytest.raises(ZuflussError) as older:
        full._check_queue(BACKPRESSURE_VERSION - 1)
    assert newer.value.code == ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION
    assert older.value.code == ErrorCode.KV_STORAGE_EXCEPTION, "older clients do not know the other"
    assert newer.value.retriable
    assert older.value.retriable


def test_a_queue_with_room_takes_the_put() -> None:
    putter(0.99)._check_queue(BACKPRESSURE_VERSION)


def test_answers_tell_how_full_the_queue_is_once_it_matters() -> None:
    for entry in answer(PRESSURE_FROM / 2).buckets_resp:
        assert not entry.HasField("pressure")
    filled, refused = answer(0.75).buckets_resp
    assert filled.pressure == pytest.approx(0.75)
    assert (filled.bucket_id, filled.log_end_offset) == (3, 12)
    assert (refused.partition_id, refused.bucket_id, refused.error_message) == (4, 5, "why")
