"""Reading a split inside a Python worker of Spark, as Arrow batches that Spark takes.

The connection of a worker lives on from task to task (`tail.client`). A split names what it needs;
when that is gone by now (retention, a dropped partition) the task fails and says what is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.client.core.offsets import places_of
from zufluss.client.keyed.live_rows import PinRows
from zufluss.client.keyed.pins import Pin, Pins
from zufluss.client.keyed.rows import Shape as KvShape
from zufluss.client.read.nanos import cut_to_micros
from zufluss.client.read.union_plan import TailRange
from zufluss.lake.base import LakeError, LakeScan
from zufluss.lake.keys import KeySet
from zufluss.model.partition import partition_values
from zufluss.spark.read.plan import open_lake
from zufluss.spark.read.shape import ReadShape
from zufluss.spark.read.splits import (
    KeyedLakeSplit,
    LakeSplit,
    LogSplit,
    Split,
    SplitGroup,
    StateSplit,
)
from zufluss.spark.read.tail import BATCH_ROWS, Client, client, folded, gathered, log_batches

Tables = Iterator[pa.Table]


@dataclass(frozen=True, slots=True)
class SplitRead:
    """How the splits of a read are read. Pickles; small."""

    bootstrap: str
    """Where the cluster is."""
    options: Mapping[str, Any]
    """Options of the client."""
    shape: ReadShape
    """What is handed out."""
    partitions: tuple[str, ...] | None = None
    """Only rows of these partitions: lakes may have others in a file."""
    limit: int | None = None
    """At most so many rows of a group."""

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
            self._let_go([split.pin for split in waiting if isinstance(split, StateSplit)])

    def _let_go(self, unread: Sequence[Pin]) -> None:
        """Close pins that this task is not going to read."""
        if unread:
            here = self._client()
            pins = here.thread.call(lambda: Pins(here.connection, self.shape.info, resume=False))
            for pin in unread:
                here.thread.call(lambda pin=pin: pins.adopt(pin))  # type: ignore[misc]
            here.thread.run(pins.close())

    def read(self, split: Split) -> Any:
        """A generator of the batches of one split."""
        if isinstance(split, LogSplit):
            return self._log(split.part)
        if isinstance(split, StateSplit):
            return self._state(split)
        if isinstance(split, LakeSplit):
            return self._lake(split, None)
        return self._keyed(split)

    def _client(self) -> Client:
        return client(self.bootstrap, self.options)

    # -- log -----------------------------------------------------------------------------------

    def _log(self, part: TailRange) -> Iterator[pa.RecordBatch]:
        shape = self.shape
        wanted = (shape.columns, shape.prune)
        found = log_batches(
            self._client(), shape.info, part, *wanted, with_offsets=shape.with_offsets
        )
        for rows in gathered(found):
            yield from shape.batches(rows, filtered=shape.prune is not None)

    # -- pinned state --------------------------------------------------------------------------

    def _state(self, split: StateSplit) -> Iterator[pa.RecordBatch]:
        here = self._client()
        pins, rows = here.thread.run(self._adopted(split))
        try:
            for table in gathered(self._pages(rows)):
                yield from self.shape.batches(table, filtered=self.shape.prune is not None)
        finally:
            here.thread.run(pins.close())

    async def _adopted(self, split: StateSplit) -> tuple[Pins, PinRows]:
        connection, info = self._client().connection, self.shape.info
        await places_of(connection, info, [split.pin.place.partition])
        pins = Pins(connection, info, resume=True)
        shape = KvShape(info, self.shape.columns, self.shape.prune)
        return pins, PinRows(connection, info, shape, pins, pins.adopt(split.pin))

    def _pages(self, rows: PinRows) -> Iterator[pa.RecordBatch]:
        thread = self._client().thread
        done = False
        while not done:
            page = thread.run(rows.next_page(None))
            done = page.done
            if page.rows.num_rows:
                yield page.rows

    # -- lake ----------------------------------------------------------------------------------

    def _lake(self, split: LakeSplit, hidden: KeySet | None) -> Iterator[pa.RecordBatch]:
        reader = open_lake(self.shape.info)
        try:
            scan = LakeScan(split.snapshot_id, split.files)
            least = 0 if hidden is None else BATCH_ROWS
            for rows in gathered(reader.read(scan, self._lake_columns(hidden)), least):
                yield from self.shape.batches(self._wanted(rows, hidden), filtered=False)
        except FileNotFoundError as gone:
            raise LakeError(
                f"table {self.shape.info.path}: a file of lake snapshot {split.snapshot_id} that "
                f"was planned for this read is gone now; make the DataFrame anew ({gone})"
            ) from gone
        finally:
            reader.close()

    def _lake_columns(self, hidden: KeySet | None) -> list[str]:
        info = self.shape.info
        wanted = [*self.shape.columns]
        if self.partitions is not None:
            wanted += info.partition_keys
        if hidden is not None:
            wanted += info.schema.primary_key
        return list(dict.fromkeys([*wanted, *self.shape.system_columns]))

    def _wanted(self, rows: pa.Table, hidden: KeySet | None) -> pa.Table:
        keep = np.ones(rows.num_rows, np.bool_)
        info = self.shape.info
        if self.partitions is not None:
            keys = info.partition_keys
            types = {key: info.schema.column(key).data_type for key in keys}
            names = pa.array(self.partitions, pa.utf8())
            parts = rows.select(list(keys)).to_batches()
            found = [pc.is_in(partition_values(b, keys, types), value_set=names) for b in parts]
            keep &= np.concatenate([np.empty(0, np.bool_), *map(np.asarray, found)])
        if hidden is not None:
            keep &= ~hidden.contains(rows.select(list(info.schema.primary_key)))
        return rows if keep.all() else rows.filter(pa.array(keep))

    def _keyed(self, split: KeyedLakeSplit) -> Iterator[pa.RecordBatch]:
        """Rows of the lake whose key was not changed since, then what the changes leave."""
        keys = list(self.shape.info.schema.primary_key)
        here, info, columns = self._client(), self.shape.info, self.shape.columns
        tails = [folded(here, info, part, columns) for part in split.tails]
        if split.lake is not None:
            changed = [t.select(keys) for one in tails for t in (one.upserts, one.deletes)]
            hidden = cut_to_micros(pa.concat_tables(changed)) if changed else None
            yield from self._lake(split.lake, KeySet(hidden) if hidden else None)
        for one in tails:
            yield from self.shape.batches(one.upserts, filtered=False)
