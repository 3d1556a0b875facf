"""More rows than the shared log can take at the moment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.end_to_end.kv import Codec, kv_batch, put_request
from tests.tablet.keyed import KEYED
from tests.tablet.shared.cluster import SharedCluster, killed
from tests.tablet.support import TABLE, Connection, Tablet
from zufluss.errors import ErrorCode
from zufluss.log.shared.writer import ObjectWriter
from zufluss.model.schema import Schema
from zufluss.wire import messages as m
from zufluss.wire.codec import decode


@pytest_asyncio.fixture
async def tablet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Schema | None
) -> AsyncIterator[Tablet]:
    options = {} if schema is None else {"schema": schema}
    tablet = await SharedCluster(tmp_path, **options).start()
    monkeypatch.setattr(ObjectWriter, "full", property(lambda self: True))
    yield tablet
    monkeypatch.undo()
    await killed(tablet)


@pytest.mark.parametrize("schema", [None])
async def test_an_append_is_refused_with_a_code_that_writers_try_again(tablet: Tablet) -> None:
    connection, request = await tablet.produce(0)
    ((_, code),) = await connection.produced(request)
    assert code == ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION
    assert tablet.server.buckets.replica(TABLE, None, 0).log.log_end_offset == 0


@pytest.mark.parametrize("schema", [KEYED])
@pytest.mark.parametrize(
    ("version", "expected"),
    [(0, ErrorCode.KV_STORAGE_EXCEPTION), (2, ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION)],
)
async def test_a_put_is_refused_with_the_code_of_its_version(
    tablet: Tablet, version: int, expected: ErrorCode
) -> None:
    records = [Codec(KEYED).put((1, "a"))]
    connection = Connection()
    request = put_request(TABLE, kv_batch(records), 0)
    answer = await connection.answer(connection.send(tablet.server.put.handle, request, version))
    (entry,) = decode(m.PutKvResponse, answer).buckets_resp
    assert entry.error_code == expected
