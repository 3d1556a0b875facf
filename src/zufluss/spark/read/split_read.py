"""Reading splits inside a Python worker of Spark, as Arrow batches that Spark takes.

This is the only code in which a task reads lake rows, log tails and pinned states: the data source
and `zufluss.spark.table` both hand their splits to it. The steps that make a union read of rows are
those of `client/read/union_rows.py`.

A split names everything it needs. When some of it is gone (retention, a dropped partition) the task
fails and says what is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from zufluss.client.core.offsets import places_of
from zufluss.client.keyed.live_rows import PinRows
from zufluss.client.keyed.pins import BucketPin, BucketPins
from zufluss.client.keyed.rows import KvScanShape as KvShape
from zufluss.client.read.lake_rows import open_lake
from zufluss.client.read.union_plan import TailRange
from zufluss.client.read.union_rows import (
    LakeSelection,
    changed_keys,
    fold_tail,
    gathered,
    open_ranges,
    range_scan,
)
from zufluss.errors import OffsetOutOfRangeError, PartitionNotExistError
from zufluss.lake.base import LakeError, LakeScan
from zufluss.lake.fold import FoldedChanges
from zufluss.model.expression import Expression
from zufluss.spark.cluster import Client, client
from zufluss.spark.read.shape import BATCH_ROWS, ReadShape
from zufluss.spark.read.splits import (
    KeyedLakeSplit,
    KeySplit,
    LakeSplit,
    LogSplit,
    Split,
    SplitGroup,
    StateSplit,
)


@dataclass(frozen=True, slots=True)
class SplitRead:
    """Reads the splits of one relation. Pickles; small."""

    bootstrap: str
    """The address of the cluster."""
    options: Mapping[str, Any]
    """Options of the client."""
    shape: ReadShape
    """Columns, filter and form of the rows."""
    partitions: tuple[str, ...] | None = None
    """Only rows of these partitions, since a file of a lake may have others too; None for all."""
    limit: int | None = None
    """At most this many rows of a group."""

    def group(self, group: SplitGroup) -> Iterator[pa.RecordBatch]:
        """The rows of a task, no more than the limit."""
        left = self.limit
        waiting = list(group.splits)
        try:
            while waiting and left != 0:
                with closing(self.read(waiting.pop(0))) as rows:
                    for batch in rows:
                        if left is not None:
                            batch = batch.slice(0, left)
                            left -= batch.num_rows
                        yield batch
                        if left == 0:
                            break
        finally:
            self._release([split.pin for split in waiting if isinstance(split, StateSplit)])

    def _release(self, unread: Sequence[BucketPin]) -> None:
        """Close pins that this task is not going to read."""
        if unread:
            here = self._client()
            pins = here.thread.call(
                lambda: BucketPins(here.connection, self.shape.info, resume=False)
            )
            for pin in unread:
                here.thread.call(lambda pin=pin: pins.adopt(pin))  # type: ignore[misc]
            here.run(pins.close())

    def read(self, split: Split) -> Any:
        """A generator of the batches of one split."""
        if isinstance(split, LogSplit):
            return self._log(split.part)
        if isinstance(split, StateSplit):
            return self._state(split)
        if isinstance(split, LakeSplit):
            return self._lake(split, None)
        if isinstance(split, KeySplit):
            return self._keys(split.part)
        return self._keyed(split)

    def _client(self) -> Client:
        return client(self.bootstrap, self.options)

    # -- log -----------------------------------------------------------------------------------

    def _log(self, part: TailRange) -> Iterator[pa.RecordBatch]:
        shape = self.shape
        batches = self._records(part, shape.columns, shape.prune, with_offsets=shape.with_offsets)
        for rows in gathered(batches, BATCH_ROWS):
            yield from shape.batches(rows, filtered=shape.prune is not None)

    def _keys(self, part: TailRange) -> Iterator[pa.RecordBatch]:
        """The keys that a range changes; most of them once, though not all."""
        keys = list(self.shape.info.schema.primary_key)
        for rows in gathered(self._records(part, keys), BATCH_ROWS * 16):
            distinct = rows.select(keys).group_by(keys, use_threads=False).aggregate([])
            yield from self.shape.batches(distinct, filtered=True)

    def _records(
        self,
        part: TailRange,
        columns: Sequence[str],
        filter: Expression | None = None,
        *,
        with_offsets: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The batches of one range, changes of a primary-key table."""
        here, info = self._client(), self.shape.info
        scan = range_scan(here.connection, info, part, columns, filter, with_offsets=with_offsets)
        with self._planned(part):
            scanner = here.run(open_ranges(scan, [part]))
            try:
                while (batch := here.run(scanner.next_batch())) is not None:
                    yield batch
            finally:
                here.run(scanner.close())

    @contextmanager
    def _planned(self, part: TailRange) -> Iterator[None]:
        """Errors of a range that is gone say that it was planned for this read."""
        try:
            yield
        except (OffsetOutOfRangeError, PartitionNotExistError) as gone:
            raise type(gone)(
                f"records {part.start} to {part.stop} of "
                f"{part.bucket.named(self.shape.info.path, part.partition)} were planned for this "
                "read and are gone now, by table.log.ttl or because the partition was dropped; "
                f"make the DataFrame anew ({gone.message})"
            ) from gone

    # -- pinned state --------------------------------------------------------------------------

    def _state(self, split: StateSplit) -> Iterator[pa.RecordBatch]:
        here = self._client()
        pins, rows = here.run(self._adopted(split))
        try:
            for table in gathered(self._pages(rows), BATCH_ROWS):
                yield from self.shape.batches(table, filtered=self.shape.prune is not None)
        finally:
            here.run(pins.close())

    async def _adopted(self, split: StateSplit) -> tuple[BucketPins, PinRows]:
        connection, info = self._client().connection, self.shape.info
        await places_of(connection, info, [split.pin.place.partition])
        pins = BucketPins(connection, info, resume=True)
        shape = KvShape(info, self.shape.columns, self.shape.prune)
        return pins, PinRows(connection, info, shape, pins, pins.adopt(split.pin))

    def _pages(self, rows: PinRows) -> Iterator[pa.RecordBatch]:
        here = self._client()
        done = False
        while not done:
            page = here.run(rows.next_page(None))
            done = page.done
            if page.rows.num_rows:
                yield page.rows

    # -- lake ----------------------------------------------------------------------------------

    def _lake(self, split: LakeSplit, changed: pa.Table | None) -> Iterator[pa.RecordBatch]:
        """Rows of the lake whose key is not among the changed ones."""
        shape = self.shape
        selection = LakeSelection(shape.info, partitions=self.partitions, changed=changed)
        columns = list(dict.fromkeys([*shape.columns, *selection.columns, *shape.system_columns]))
        reader = open_lake(shape.info)
        try:
            scan = LakeScan(split.snapshot_id, split.files)
            for rows in selection.select(reader.read(scan, columns)):
                yield from shape.batches(rows, filtered=False)
        except FileNotFoundError as gone:
            raise LakeError(
                f"table {shape.info.path}: a file of lake snapshot {split.snapshot_id} that "
                f"was planned for this read is gone now; make the DataFrame anew ({gone})"
            ) from gone
        finally:
            reader.close()

    def _keyed(self, split: KeyedLakeSplit) -> Iterator[pa.RecordBatch]:
        """Rows of the lake whose key was not changed since, then what the changes leave."""
        tails = [self._folded(part) for part in split.tails]
        if split.lake is not None:
            yield from self._lake(split.lake, changed_keys(self.shape.info, tails))
        for tail in tails:
            yield from self.shape.batches(tail.upserts, filtered=False)

    def _folded(self, part: TailRange) -> FoldedChanges:
        here, shape = self._client(), self.shape
        with self._planned(part):
            return here.run(fold_tail(here.connection, shape.info, part, shape.columns))
