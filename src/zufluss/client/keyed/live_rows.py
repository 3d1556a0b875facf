"""The present rows of primary-key buckets, read from states pinned on servers (`keyed/pins.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pyarrow as pa

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.offsets import BucketPlace
from zufluss.client.core.partitions import offsets_at
from zufluss.client.keyed.pins import BucketPin, BucketPins
from zufluss.client.keyed.rows import BucketRows, KvScanShape, RowPage, RowSource
from zufluss.client.read.scan import Offsets
from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m


class LiveRows(RowSource):
    """Rows from states that are pinned on servers."""

    def __init__(
        self, connection: ClusterConnection, info: TableInfo, shape: KvScanShape, *, resume: bool
    ) -> None:
        self._connection = connection
        self._info = info
        self._shape = shape
        self._pins = BucketPins(connection, info, resume=resume)

    async def open(
        self, places: Sequence[BucketPlace], at: Offsets | None
    ) -> dict[TableBucket, int]:
        """Pin all buckets or none; returns where the changelog of each continues."""
        offsets = {} if at is None else offsets_at(self._info, places, at)
        pinned = [place for place in places if at is None or place.bucket in offsets]
        return await self._pins.open(pinned, offsets)

    def bucket(self, bucket: TableBucket) -> PinRows:
        """The rows of an opened bucket."""
        return PinRows(self._connection, self._info, self._shape, self._pins, self._pins[bucket])

    async def close(self) -> None:
        """Close the pins."""
        await self._pins.close()


class PinRows(BucketRows):
    """The rows of a pinned bucket."""

    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        shape: KvScanShape,
        pins: BucketPins,
        pin: BucketPin,
    ) -> None:
        self._connection = connection
        self._info = info
        self._shape = shape
        self._pins = pins
        self._pin = pin

    async def next_page(self, limit: int | None) -> RowPage:
        """Read pages until one has rows or is the last one."""
        while True:
            answer = await self._pins.scan(self._pin, self._request(limit))
            if answer.rows:
                loop, executor = asyncio.get_running_loop(), self._connection.executor
                rows = await loop.run_in_executor(executor, self._decoded, answer)
                return RowPage(rows, answer.done)
            if answer.done:
                return RowPage(pa.RecordBatch.from_pylist([], schema=self._shape.schema), True)

    async def close(self) -> None:
        """Do nothing: `LiveRows.close` closes all pins together."""

    def _request(self, limit: int | None) -> m.ScanKvSnapshotRequest:
        bucket, options = self._pin.place.bucket, self._connection.options
        return m.ScanKvSnapshotRequest(
            table_id=bucket.table_id,
            partition_id=bucket.partition_id,
            bucket_id=bucket.bucket_id,
            after_key=self._pin.cursor,
            limit=limit,
            batch_size_bytes=options.kv_fetch_bytes,
            time_limit_ms=options.request_timeout_ms // 2,
            schema_id=self._info.schema_id,
            projected_columns=self._shape.projection,
            filter=self._shape.predicate,
        )

    def _decoded(self, answer: m.ScanKvSnapshotResponse) -> pa.RecordBatch:
        bucket = self._pin.place.bucket
        try:
            rows = pa.ipc.read_record_batch(pa.py_buffer(answer.records), self._shape.read)
        except (pa.ArrowException, OSError) as e:
            raise CorruptMessageError(f"{bucket}: the rows of a scan cannot be read: {e}") from e
        if rows.num_rows != answer.rows:
            raise CorruptMessageError(
                f"{bucket}: an answer of a scan has {rows.num_rows} rows and says {answer.rows}"
            )
        return self._shape.finish(rows)
