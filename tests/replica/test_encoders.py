"""Changelog batches of large rows, beside those of other buckets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.kv import PUT_VERSION, kv_batch, put_request
from tests.tablet.keyed import Keyed, keyed
from tests.tablet.support import TABLE, Connection
from zufluss.errors import ErrorCode
from zufluss.kv.changelog import Changes
from zufluss.replica import encoders
from zufluss.wire import messages as m
from zufluss.wire.codec import decode

LARGE, SMALL = "x" * 200_000, "y"


class Gate:
    """Holds the encoding of batches of large rows until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        monkeypatch.setattr(encoders, "LARGE_BYTES", len(LARGE))
        encode = Changes.encode

        def held(changes: Changes) -> Any:
            if threading.current_thread().name == "zufluss-changelog-large":
                self._open.wait()
            return encode(changes)

        monkeypatch.setattr(Changes, "encode", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@asynccontextmanager
async def two_buckets(root: Path, gate: Gate) -> AsyncIterator[Keyed]:
    async with keyed(root, buckets=2) as tablet:
        try:
            yield tablet
        finally:
            gate.open()  # else a test that fails hangs


async def put(tablet: Keyed, key: int, text: str, bucket: int = 0) -> tuple[int, int]:
    """Put a row; returns the error code and the end offset."""
    connection = Connection()
    request = put_request(TABLE, kv_batch([tablet.codec.put((key, text))]), bucket)
    answer = await connection.answer(
        connection.send(tablet.server.put.handle, request, PUT_VERSION)
    )
    (entry,) = decode(m.PutKvResponse, answer).buckets_resp
    return int(entry.error_code), int(entry.log_end_offset)


async def test_large_rows_hold_the_later_puts_of_their_bucket_and_of_no_other(
    tmp_path: Path, gate: Gate
) -> None:
    async with two_buckets(tmp_path, gate) as tablet:
        large = asyncio.create_task(put(tablet, 1, LARGE))
        await asyncio.sleep(0)  # it is the worker's first
        later = asyncio.create_task(put(tablet, 2, SMALL))
        assert await put(tablet, 3, SMALL, bucket=1) == (0, 1)
        assert not large.done()
        assert not later.done()
        gate.open()
        assert await large == (0, 1)
        assert await later == (0, 2)
        assert await put(tablet, 2, SMALL) == (0, 4)
        assert not tablet.server.kv.encoders._following
        assert not tablet.server.kv.encoders._bytes


async def test_puts_are_refused_while_too_many_large_rows_wait(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "WAITING_BYTES_MAX", len(LARGE))
    async with two_buckets(tmp_path, gate) as tablet:
        first = asyncio.create_task(put(tablet, 1, LARGE))
        await asyncio.sleep(0)
        refused = await put(tablet, 2, SMALL)
        assert refused[0] == ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION
        assert await put(tablet, 3, SMALL, bucket=1) == (0, 1)
        gate.open()
        assert await first == (0, 1)
        assert await put(tablet, 2, SMALL) == (0, 2)
        assert await tablet.rows() == {1: LARGE, 2: SMALL}
