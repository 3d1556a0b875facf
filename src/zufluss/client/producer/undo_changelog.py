"""Undo by the client: reads the changelog and writes back what every key had before.

The leaders' own undo (`producer/undo.py`) reads nothing over the network and is the usual one. Only
a producer that owns its columns can be undone by the client: nobody else changed them, so the
*first* change of a key behind the baseline shows the columns as they were there.

| first change | write, past merge engine and delete behavior, to the producer's columns only |
|---|---|
| `+I` | a delete: the row is removed, unless others have values in it |
| `-U`, `-D` | the columns of that row |

Before a bucket is read, an empty put of the new epoch is sent to it. Puts are done in turn, so when
it is acknowledged, all puts of earlier epochs are in the changelog, below the end that is then
read. A crash in the middle does no harm: restored rows come behind the first change of their keys.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.offsets import BucketPlace, list_offsets
from zufluss.client.core.partitions import chosen_places
from zufluss.client.producer.handle import CLIENT_UNDO_TASK, ProducerSession
from zufluss.client.producer.undo import OnUndo, UndoProgress, UndoTally
from zufluss.client.producer.wire import BucketOffsets
from zufluss.client.read.decode import CHANGE_TYPE
from zufluss.client.read.log_scan import AsyncLogScan
from zufluss.client.write.rows import RowChunk
from zufluss.client.write.upsert import AsyncUpsertWriter
from zufluss.client.write.writer import Identity
from zufluss.errors import ProducerStateError, UndoImpossibleError
from zufluss.model.table import TableInfo
from zufluss.record.slices import Slices


async def undo_by_changelog(
    connection: ClusterConnection,
    info: TableInfo,
    producer: ProducerSession,
    baseline: BucketOffsets,
    on_progress: OnUndo | None = None,
) -> UndoProgress:
    """Restore the producer's columns as they were at the baseline."""
    check_undoable(info, producer)
    places = await chosen_places(connection, info, None, None)
    tally = UndoTally(len(places), on_progress)
    async with _UndoWriter(connection, info, producer) as writer:
        await writer.settle(places)
        ends = await list_offsets(connection, info, places, "latest")
        starts = await list_offsets(connection, info, places, "unbroken")
        for bucket, first in starts.items():
            _check_range(
                baseline.get(bucket, 0), first, ends[bucket], connection.metadata.name_of(bucket)
            )
        for place in places:
            start = baseline.get(place.bucket, 0)
            keys = await _undo_bucket(connection, info, writer, place, start, ends[place.bucket])
            records = ends[place.bucket] - start
            tally.note(place.bucket, records, records, keys, done=True)
    return tally.total


def check_undoable(info: TableInfo, producer: ProducerSession) -> None:
    """Raise `ProducerStateError` if only the server can undo."""
    if not producer.exclusive:
        raise ProducerStateError(
            f"producer {producer.producer_id!r} shares its columns of {info.path} with others, and "
            "a changelog does not tell whose change is whose; leave out undo='client'"
        )
    if info.schema.auto_increment_column:
        raise ProducerStateError(
            f"column {info.schema.auto_increment_column[0]!r} of {info.path} is counted up by the "
            "server and written by nobody else; leave out undo='client'"
        )


def _check_range(start: int, first: int, end: int, bucket: str) -> None:
    if not first <= start <= end:
        raise UndoImpossibleError(
            f"{bucket}: changes from offset {start} on are to be undone, but its changelog is from "
            f"{first} to {end}; nothing was touched. Drop the producer to go on without an undo"
        )


class _UndoWriter(AsyncUpsertWriter):
    """Writes old rows back, under the new epoch."""

    def __init__(
        self, connection: ClusterConnection, info: TableInfo, producer: ProducerSession
    ) -> None:
        identity = Identity(producer.handle.writer_id(CLIENT_UNDO_TASK))
        columns = producer.handle.columns(info)
        super().__init__(connection, info, columns, "overwrite", identity=identity)

    async def settle(self, places: list[BucketPlace]) -> None:
        """Send an empty put to every bucket and wait for it."""
        schema = pa.schema([self.info.schema.arrow.field(name) for name in self.columns])
        nothing = RowChunk(pa.RecordBatch.from_pylist([], schema=schema), False)
        async with self._order:
            self._writer_id = await self._sender.new_writer_id()
            for place in places:
                bucket = place.bucket
                queue = self._queue(place.partition, bucket.partition_id, bucket.bucket_id)
                await self._append(queue, nothing, self._router.new_assigner())
        await self.flush()


async def _undo_bucket(
    connection: ClusterConnection,
    info: TableInfo,
    writer: _UndoWriter,
    place: BucketPlace,
    start: int,
    end: int,
) -> int:
    """Restore the keys of one bucket; returns their number."""
    if start == end:
        return 0
    first = _FirstChanges(info)
    scan = AsyncLogScan(
        connection,
        info,
        writer.columns,
        partitions=None if place.partition is None else (place.partition,),
        buckets=(place.bucket.bucket_id,),
        start={place.bucket: start},
        stop={place.bucket: end},
        changelog=True,
    )
    async for batch in scan:
        inserted, before = first.of(batch)
        keys = inserted.select(list(info.schema.primary_key))
        await writer.write_batches([keys] if keys.num_rows else [], delete=True)
        await writer.write_batches([before] if before.num_rows else [])
    await writer.flush()
    return len(first.seen)


class _FirstChanges:
    """Finds the first change of each key."""

    def __init__(self, info: TableInfo) -> None:
        from zufluss.record.keys.encoding import KeyEncoder  # loads the compiled kernels

        self.seen: set[bytes] = set()
        """Keys whose first change was found."""
        self._keys = KeyEncoder.of_stored_key(info)

    def of(self, changes: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """The rows of first changes: inserted rows, and rows before their change."""
        kinds = changes.column(CHANGE_TYPE).dictionary_decode()
        rows = changes.select(changes.schema.names[3:])
        chosen = self._first(rows, np.array(kinds.to_pylist()) == "+U")
        rows, kinds = rows.take(pa.array(chosen)), kinds.take(pa.array(chosen))
        inserted = np.array(kinds.to_pylist(), dtype="U2") == "+I"
        return rows.filter(pa.array(inserted)), rows.filter(pa.array(~inserted))

    def _first(self, rows: pa.RecordBatch, after: npt.NDArray[np.bool_]) -> list[int]:
        keys = Slices.contiguous(*self._keys.encode(rows))
        chosen = []
        for i in np.flatnonzero(~after).tolist():
            key = keys.item(i)
            assert key is not None
            if key not in self.seen:
                self.seen.add(key)
                chosen.append(i)
        return chosen
