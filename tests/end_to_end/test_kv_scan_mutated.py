"""Mutated scan requests: answered with rows or a known error, and no scan leaks.

A pin that stays open through all of them still has its rows in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import fluss
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.end_to_end.helpers import fresh_path
from tests.end_to_end.kv import create_by_hand
from tests.end_to_end.raw import ConnectionEndedError, RawClient
from tests.end_to_end.scans import (
    CODEC,
    SCANNED,
    all_rows,
    close_request,
    good,
    in_key_order,
    next_request,
    numbered,
    open_request,
    page_request,
    pages,
    pin,
    pin_request,
    put_rows,
)
from tests.end_to_end.test_mutated_requests import EXAMPLES, SETTINGS, expected, mutations
from zufluss.model.expression import col
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.codec import decode
from zufluss.wire.frame import ResponseFrame

COUNT = 50

pytestmark = pytest.mark.timeout(3600 if EXAMPLES > 1000 else 400)


class Fuzzed(NamedTuple):
    """A table, a pin of it, and a scan in the middle of it."""

    table_id: int
    pin: m.PbPin
    scanner_id: bytes

    def requests(self) -> list[tuple[ApiKey, bytes]]:
        """Valid requests of every kind."""
        table_id, pin_id = self.table_id, self.pin.pin_id
        predicate = (col("id").isin([1, 2, 3]) | col("text").contains("4")).resolve(SCANNED)
        at = self.pin.log_offset
        found = [
            (ApiKey.SCAN_KV, open_request(table_id, size=100, limit=10)),
            (ApiKey.SCAN_KV, next_request(self.scanner_id, 0, 100)),
            (ApiKey.SCAN_KV, close_request(b"x" * 16)),
            (ApiKey.OPEN_KV_SNAPSHOT, pin_request(table_id)),
            (ApiKey.OPEN_KV_SNAPSHOT, pin_request(table_id, [0, 0], [at, None])),
            (ApiKey.SCAN_KV_SNAPSHOT, page_request(table_id, pin_id, limit=5)),
            (
                ApiKey.SCAN_KV_SNAPSHOT,
                page_request(
                    table_id,
                    pin_id,
                    after_key=CODEC.key((3,)),
                    until_key=CODEC.key((40,)),
                    filter=predicate,
                    projected_columns=[1, 0],
                    time_limit_ms=1000,
                ),
            ),
            (ApiKey.CLOSE_KV_SNAPSHOT, m.CloseKvSnapshotRequest(pin_ids=[b"x" * 16])),
        ]
        return [(key, request.SerializeToString()) for key, request in found]


@pytest.fixture(scope="module")
def fuzzed(dev_server: DevServer, conn: fluss.FlussConnection) -> Iterator[Fuzzed]:
    """The table and scans that mutated requests use; at the end the pin still has its rows."""
    with RawClient(dev_server.port) as raw:
        table_id = create_by_hand(raw, fresh_path("fuzzed_scan").table_name, SCANNED)
        put_rows(raw, table_id, numbered(0, COUNT))
        (made,) = pin(raw, table_id)
        scanner = good(raw, open_request(table_id, size=100)).scanner_id
        put_rows(raw, table_id, numbered(0, COUNT, "changed"))
    yield Fuzzed(table_id, made, scanner)
    with RawClient(dev_server.port) as raw:
        assert all_rows(pages(raw, table_id, made.pin_id)) == in_key_order(numbered(0, COUNT))


@SETTINGS
@given(data=st.data())
def test_a_request_with_a_damaged_body_is_answered_and_opens_nothing_unseen(
    dev_server: DevServer, fuzzed: Fuzzed, data: st.DataObject
) -> None:
    key, body = data.draw(st.sampled_from(fuzzed.requests()))
    damaged = data.draw(mutations(body))
    with RawClient(dev_server.port) as raw:
        try:
            frame = raw.request(key, damaged)
        except ConnectionEndedError:
            frame = None
        if frame is not None:
            expected(frame)
            close_again(raw, key, frame)
    with RawClient(dev_server.port) as raw:  # there is room for another one, so nothing is left
        (made,) = pin(raw, fuzzed.table_id)
        raw.call(ApiKey.CLOSE_KV_SNAPSHOT, m.CloseKvSnapshotRequest(pin_ids=[made.pin_id]))


def close_again(raw: RawClient, key: ApiKey, frame: ResponseFrame) -> None:
    """Close what a request opened."""
    if frame.error is not None:
        return
    opened: list[bytes] = []
    if key is ApiKey.OPEN_KV_SNAPSHOT:
        opened = [p.pin_id for p in decode(m.OpenKvSnapshotResponse, frame.body).pins]
    elif key is ApiKey.SCAN_KV:
        answer = decode(m.ScanKvResponse, frame.body)
        opened = [answer.scanner_id] if answer.HasField("log_offset") else []
    raw.call(ApiKey.CLOSE_KV_SNAPSHOT, m.CloseKvSnapshotRequest(pin_ids=opened))
