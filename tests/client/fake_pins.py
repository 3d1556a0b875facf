"""A fake cluster whose primary-key buckets can be pinned and scanned, and fail on demand.

A bucket is its rows by key and the offset of its changelog. Pinning copies the rows; the copies of
all offsets are kept, so that a pin that is gone can be opened again where it was, unless the test
forgets them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from google.protobuf.message import Message

from tests.client.fake import FakeCluster
from tests.waiting import WAIT_SECONDS
from zufluss.errors import ErrorCode, ZuflussError, error
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import partition_id_of

Rows = dict[bytes, dict[str, Any]]
IDLE_MS = 60_000


class PinCluster(FakeCluster):
    """Rows by bucket, pins of them, and what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[TableBucket, Rows] = defaultdict(dict)
        self.offsets: Counter[TableBucket] = Counter()
        self.history: dict[tuple[TableBucket, int], Rows] = {}
        self.pins: dict[bytes, tuple[TableBucket, Rows]] = {}
        self.closed: list[bytes] = []
        self.opens: list[m.OpenKvSnapshotRequest] = []
        self.scans: list[m.ScanKvSnapshotRequest] = []
        self.page_rows = 3
        self.idle_ms = IDLE_MS
        self.open_fault: Callable[[TableBucket], ErrorCode | None] = lambda _: None
        """Asked for each bucket that is to be opened."""
        self.scan_fault: Callable[[TableBucket, int], ErrorCode | str | None] = lambda *_: None
        """Asked for each call (bucket, its number): an error code, "lost" to drop the connection,
        "empty" to answer without rows, "hang" never to answer."""
        self._numbers = itertools.count(1)
        self.handlers[ApiKey.OPEN_KV_SNAPSHOT] = self._open
        self.handlers[ApiKey.SCAN_KV_SNAPSHOT] = self._scan
        self.handlers[ApiKey.CLOSE_KV_SNAPSHOT] = self._close

    def fill(self, info: TableInfo, count: int, partition_id: int | None = None) -> None:
        """Rows 0 to `count`, spread over the buckets."""
        for number in range(count):
            bucket = TableBucket(info.table_id, partition_id, number % info.bucket_count)
            self.rows[bucket][b"%08d" % number] = {"id": number, "name": f"row {number}"}
            self.offsets[bucket] += 1

    def calls(self, bucket_id: int) -> list[m.ScanKvSnapshotRequest]:
        """The calls about one bucket."""
        return [request for request in self.scans if request.bucket_id == bucket_id]

    async def _open(self, request: m.OpenKvSnapshotRequest) -> Message | ZuflussError:
        self.opens.append(request)
        response = m.OpenKvSnapshotResponse()
        for wanted in request.buckets:
            bucket = _bucket(request.table_id, wanted)
            code = self.open_fault(bucket)
            if code is not None:
                return error(code, "as told")
            offset = wanted.log_offset if wanted.HasField("log_offset") else self.offsets[bucket]
            if not wanted.HasField("log_offset"):
                self.history[bucket, offset] = dict(sorted(self.rows[bucket].items()))
            if (bucket, offset) not in self.history:
                return error(ErrorCode.KV_PIN_GONE, f"nothing is left of offset {offset}")
            pin_id = b"pin %d" % next(self._numbers)
            self.pins[pin_id] = bucket, self.history[bucket, offset]
            response.pins.add(
                pin_id=pin_id,
                log_offset=offset,
                leader_epoch=0,
                idle_ms=self.idle_ms,
                remaining_ms=10 * self.idle_ms,
            )
        return response

    async def _scan(self, request: m.ScanKvSnapshotRequest) -> Message | ZuflussError | None:
        self.scans.append(request)
        bucket = _bucket(request.table_id, request)
        fault = self.scan_fault(bucket, len(self.calls(request.bucket_id)))
        if isinstance(fault, ErrorCode):
            return error(fault, "as told")
        if fault == "lost":
            self.drop_connections()
        if fault in ("lost", "hang"):
            return None
        after = request.after_key if request.HasField("after_key") else b""
        if fault == "empty":
            return m.ScanKvSnapshotResponse(rows=0, done=False, last_key=after or None)
        if request.pin_id not in self.pins:
            return error(ErrorCode.UNKNOWN_SCANNER_ID, "no such pin")
        _, rows = self.pins[request.pin_id]
        left = [key for key in rows if key > after]
        limit = request.limit if request.HasField("limit") else self.page_rows
        page = left[: min(limit, self.page_rows)]
        response = m.ScanKvSnapshotResponse(rows=len(page), done=len(page) == len(left))
        if page:
            response.last_key = page[-1]
            response.records = self._records(request, [rows[key] for key in page])
        return response

    def _records(self, request: m.ScanKvSnapshotRequest, rows: list[dict[str, Any]]) -> bytes:
        [table] = [t for t in self.tables.values() if t.info.table_id == request.table_id]
        batch = pa.RecordBatch.from_pylist(rows, schema=table.info.schema.arrow)
        if request.projected_columns:
            batch = batch.select(list(request.projected_columns))
        return bytes(batch.serialize())

    async def _close(self, request: m.CloseKvSnapshotRequest) -> Message:
        self.closed += request.pin_ids
        for pin_id in request.pin_ids:
            self.pins.pop(pin_id, None)
        return m.CloseKvSnapshotResponse()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that other tasks do."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                await asyncio.sleep(0.001)


def _bucket(table_id: int, entry: Any) -> TableBucket:
    partition_id = partition_id_of(entry)
    return TableBucket(table_id, partition_id, entry.bucket_id)
