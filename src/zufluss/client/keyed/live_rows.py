"""The present rows of primary-key buckets, read from states pinned on servers (`keyed/pins.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pyarrow as pa

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.offsets import BucketPlace
from zufluss.client.keyed.cursor import ScanPiece
from zufluss.client.keyed.pins import BucketPin, BucketPins
from zufluss.client.keyed.rows import BucketRows, KvScanShape, RowPage, RowSource
from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m


class LiveRows(RowSource):
    """Rows from states that are pinned on servers."""

    def __init__(
        self, connection: ClusterConnection, info: TableInfo, shape: KvScanShape, *, resume: bool
    ) -> None:
        super().__init__()
        self._connection = connection
        self._info = info
        self._shape = shape
        self._pins = BucketPins(connection, info, resume=resume)
        self._places: dict[TableBucket, BucketPlace] = {}
        self._at: Mapping[TableBucket, int] = {}

    async def open(
        self, places: Sequence[BucketPlace], at: Mapping[TableBucket, int] | None
    ) -> list[TableBucket]:
        """Pin as many buckets as the servers have room for; returns all, the pinned ones first."""
        self._at = at or {}
        self._places = {place.bucket: place for place in places}
        self.offsets = await self._pins.open(places, self._at, partial=True)
        return sorted(self._places, key=lambda bucket: bucket not in self.offsets)

    def bucket(self, bucket: TableBucket) -> BucketRows:
        """The rows of a bucket; the first page pins it, if it is not pinned yet."""
        return LivePages(self, bucket)

    async def pinned(self, bucket: TableBucket) -> PinRows:
        """The rows of a bucket, which is pinned now if it was not."""
        if bucket not in self.offsets:
            pin = await self._pins.open_one(self._places[bucket], self._at.get(bucket))
            self.offsets[bucket] = pin.log_offset
        return PinRows(self._connection, self._info, self._shape, self._pins, self._pins[bucket])

    def piece(self, bucket: TableBucket, after: bytes | None) -> ScanPiece:
        """What is left of a bucket behind a key, for a cursor."""
        return self._pins.piece(self._places[bucket], after, self._at.get(bucket))

    async def detach(self) -> None:
        """Leave the pins to other processes."""
        await self._pins.detach()

    async def close(self) -> None:
        """Close the pins."""
        await self._pins.close()


class ContinuedRows(LiveRows):
    """The rows that another run has left, as its cursor tells."""

    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        shape: KvScanShape,
        pieces: Sequence[ScanPiece],
        *,
        resume: bool,
    ) -> None:
        super().__init__(connection, info, shape, resume=resume)
        self._pieces = {piece.place.bucket: piece for piece in pieces}

    async def open(
        self, places: Sequence[BucketPlace], at: Mapping[TableBucket, int] | None
    ) -> list[TableBucket]:
        """Take note of the buckets of the cursor; each is pinned when its turn comes."""
        self._places = {place.bucket: place for place in places}
        self.offsets = {
            bucket: piece.log_offset
            for bucket, piece in self._pieces.items()
            if piece.log_offset is not None
        }
        return list(self._places)

    async def pinned(self, bucket: TableBucket) -> PinRows:
        """The rows of a bucket behind the key of the cursor."""
        pin = await self._pins.continued(self._pieces[bucket])
        self.offsets[bucket] = pin.log_offset
        return PinRows(self._connection, self._info, self._shape, self._pins, pin)

    def piece(self, bucket: TableBucket, after: bytes | None) -> ScanPiece:
        """What is left of a bucket behind a key, for a cursor."""
        before = self._pieces[bucket]
        if self._pins.offset(bucket) is None:
            return before if after is None else before._replace(after=after)
        return self._pins.piece(before.place, after or before.after, before.log_offset)


class LivePages(BucketRows):
    """The rows of a bucket that is pinned when its turn comes, and freed when it was read."""

    def __init__(self, source: LiveRows, bucket: TableBucket) -> None:
        self._source = source
        self._bucket = bucket
        self._rows: PinRows | None = None

    async def next_page(self, limit: int | None) -> RowPage:
        """Read the next page; the first call pins the bucket if it is not pinned yet."""
        if self._rows is None:
            self._rows = await self._source.pinned(self._bucket)
        return await self._rows.next_page(limit)

    async def close(self) -> None:
        """Free the pin."""
        if self._rows is not None:
            await self._rows.close()


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
                return RowPage(rows, answer.done, self._pin.cursor)
            if answer.done:
                return RowPage(pa.RecordBatch.from_pylist([], schema=self._shape.schema), True)

    async def close(self) -> None:
        """Let go of the pin, which is closed together with others."""
        self._pins.done(self._pin)

    def _request(self, limit: int | None) -> m.ScanKvSnapshotRequest:
        bucket, options = self._pin.place.bucket, self._connection.options
        return m.ScanKvSnapshotRequest(
            table_id=bucket.table_id,
            partition_id=bucket.partition_id,
            bucket_id=bucket.bucket_id,
            after_key=self._pin.cursor,
            until_key=self._pin.until,
            limit=limit,
            batch_size_bytes=options.kv_fetch_bytes,
            time_limit_ms=options.request_timeout_ms // 2,
            schema_id=self._info.schema_id,
            projected_columns=self._shape.projection,
            filter=self._shape.predicate,
        )

    def _decoded(self, answer: m.ScanKvSnapshotResponse) -> pa.RecordBatch:
        place = self._pin.place
        bucket = place.bucket.named(self._info.path, place.partition)
        try:
            rows = pa.ipc.read_record_batch(pa.py_buffer(answer.records), self._shape.read)
        except (pa.ArrowException, OSError) as e:
            raise CorruptMessageError(f"{bucket}: the rows of a scan cannot be read: {e}") from e
        if rows.num_rows != answer.rows:
            raise CorruptMessageError(
                f"{bucket}: an answer of a scan has {rows.num_rows} rows and says {answer.rows}"
            )
        return self._shape.finish(rows)
