"""DataFrames of splits, for `zufluss.spark.table` of what no file of a lake has.

| table | splits |
|---|---|
| `db.t$changelog` | ranges of the log |
| a primary-key table of which the lake has nothing | the state of its buckets |

They are fixed when the DataFrame is made and read by `mapInArrow`, as tails are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from zufluss.client.admin import Partition
from zufluss.client.read.union_plan import TailRange
from zufluss.model.expression import Expression
from zufluss.model.partition import check_partitioned, partition_name
from zufluss.model.table import TableInfo
from zufluss.spark.read.plan import PlanRequest, log_ranges, state_splits
from zufluss.spark.read.shape import ReadShape, chosen_schema, whole_schema
from zufluss.spark.read.split_read import SplitRead
from zufluss.spark.read.splits import LogSplit, Split, SplitGroup, StateSplit
from zufluss.spark.read.tail import client, pack, tasks_max
from zufluss.spark.source_options import View

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHANGELOG_SUFFIX: Final = "$changelog"


@dataclass(frozen=True, slots=True)
class SplitFrame:
    """A read of splits on its way to a DataFrame."""

    spark: SparkSession
    """The session."""
    bootstrap: str
    """Where the cluster is."""
    options: Mapping[str, Any]
    """Options of the client."""
    columns: Sequence[str] | None
    """Only these columns."""
    filter: Expression | str | None
    """Only what matches; a text is for Spark."""
    partitions: Iterable[Partition] | None
    """Only these partitions."""

    def changes(self, info: TableInfo) -> DataFrame:
        """The changes that the log of a table has now."""
        shape = self._shape(info, changelog=True)
        cluster = client(self.bootstrap, self.options)
        ranges = cluster.thread.run(log_ranges(cluster.connection, self._request(shape)))
        groups = pack(ranges, tasks_max(self.spark), split=not info.has_primary_key)
        return self._frame(shape, [[LogSplit(part) for part in group] for group in groups])

    def state(self, info: TableInfo) -> DataFrame:
        """The rows that a primary-key table has now."""
        shape = self._shape(info, changelog=False)
        cluster = client(self.bootstrap, self.options)
        splits = cluster.thread.run(state_splits(cluster.connection, self._request(shape)))
        found = {split.pin.place.bucket: split for split in splits}
        groups = pack([_size(split) for split in splits], tasks_max(self.spark), split=False)
        return self._frame(shape, [[found[part.bucket] for part in group] for group in groups])

    def _shape(self, info: TableInfo, *, changelog: bool) -> ReadShape:
        schema = whole_schema(info, changelog=changelog)
        if self.columns is not None:
            chosen = chosen_schema(info, schema, tuple(self.columns))
            schema = schema if isinstance(self.filter, str) else chosen
        filter = self.filter if isinstance(self.filter, Expression) else None
        return ReadShape(info, schema, filter, changelog)

    def _request(self, shape: ReadShape) -> PlanRequest:
        view = View.CHANGELOG if shape.changelog else View.ROWS
        return PlanRequest(shape.info, view, self._names(shape.info), shape.prune)

    def _names(self, info: TableInfo) -> tuple[str, ...] | None:
        if self.partitions is None:
            return None
        check_partitioned(info)
        keys = info.partition_keys
        return tuple(p if isinstance(p, str) else partition_name(keys, p) for p in self.partitions)

    def _frame(self, shape: ReadShape, groups: Sequence[Sequence[Split]]) -> DataFrame:
        tasks = _Tasks(SplitRead(self.bootstrap, self.options, shape), groups)
        if not groups:
            frame = self.spark.createDataFrame([], shape.schema)
        else:
            numbers = self.spark.range(0, len(groups), 1, len(groups))
            frame = numbers.mapInArrow(tasks.__call__, shape.schema)
        if not isinstance(self.filter, str):
            return frame
        wanted = self.columns or shape.schema.names
        return frame.filter(self.filter).select(*(f"`{n.replace('`', '``')}`" for n in wanted))


def _size(split: StateSplit) -> TailRange:
    """A state as the range of the log that made it: it has no more rows."""
    place = split.pin.place
    return TailRange(place.bucket, place.partition, 0, split.pin.log_offset)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """What `mapInArrow` runs: the splits of the tasks whose numbers come in."""

    read: SplitRead
    groups: Sequence[Sequence[Split]]

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from self.read.group(SplitGroup(*self.groups[number]))
