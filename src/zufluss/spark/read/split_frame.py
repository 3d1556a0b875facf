"""DataFrames of splits, for the parts of `zufluss.spark.table` that Spark cannot read by itself.

The splits are fixed when the DataFrame is made. `mapInArrow` runs a task per group of splits, which
reads them as the data source does (`read/split_read.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from zufluss.client.core.catalog import Partition
from zufluss.client.read.union_plan import TailRange
from zufluss.model.expression import Expression
from zufluss.model.partition import check_partitioned, partition_name
from zufluss.model.table import TableInfo
from zufluss.spark.cluster import Client, client
from zufluss.spark.read.packing import pack, tasks_max
from zufluss.spark.read.plan import PlanRequest, log_ranges, state_splits
from zufluss.spark.read.shape import ReadShape, chosen_schema, whole_schema
from zufluss.spark.read.split_read import SplitRead
from zufluss.spark.read.splits import LogSplit, Split, SplitGroup, StateSplit
from zufluss.spark.source_options import TableView

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """The arguments of one call of `zufluss.spark.table`."""

    spark: SparkSession
    """The session."""
    bootstrap: str
    """The address of the cluster."""
    options: Mapping[str, Any]
    """Options of the client."""
    columns: Sequence[str] | None
    """Only these columns; None for all."""
    filter: Expression | None
    """Only rows that match."""
    partitions: tuple[Partition, ...] | None
    """Only these partitions; None for all."""

    def client(self) -> Client:
        """This process's client of the cluster."""
        return client(self.bootstrap, self.options)

    def changes(self, info: TableInfo) -> DataFrame:
        """The changes that the log of a table has now."""
        shape = self._shape(info, changelog=True)
        cluster = self.client()
        ranges = cluster.run(log_ranges(cluster.connection, self._plan_request(shape)))
        groups = self.packed(ranges, split=not info.has_primary_key)
        return self.frame(shape, [[LogSplit(p) for p in group] for group in groups])

    def state(self, info: TableInfo) -> DataFrame:
        """The rows that a primary-key table has now, by its pinned state."""
        shape = self._shape(info, changelog=False)
        cluster = self.client()
        splits = cluster.run(state_splits(cluster.connection, self._plan_request(shape)))
        by_bucket = {split.pin.place.bucket: split for split in splits}
        groups = self.packed([_changelog(split) for split in splits], split=False)
        states = [[by_bucket[part.bucket] for part in group] for group in groups]
        return self.frame(shape, states)

    def packed(
        self, ranges: Sequence[TailRange], *, split: bool
    ) -> tuple[tuple[TailRange, ...], ...]:
        """The ranges of each task; with `split` a range may be cut."""
        return pack(ranges, tasks_max(self.spark), split=split)

    def frame(self, shape: ReadShape, groups: Sequence[Sequence[Split]]) -> DataFrame:
        """The rows of these splits; one task per group."""
        if not groups:
            return self.spark.createDataFrame([], shape.schema)
        tasks = _Tasks(SplitRead(self.bootstrap, self.options, shape), groups)
        numbers = self.spark.range(0, len(groups), 1, len(groups))
        return numbers.mapInArrow(tasks.__call__, shape.schema)

    def _shape(self, info: TableInfo, *, changelog: bool) -> ReadShape:
        schema = whole_schema(info, changelog=changelog)
        if self.columns is not None:
            schema = chosen_schema(info, schema, tuple(self.columns))
        return ReadShape(info, schema, self.filter, changelog)

    def _plan_request(self, shape: ReadShape) -> PlanRequest:
        view = TableView.CHANGELOG if shape.changelog else TableView.ROWS
        return PlanRequest(shape.info, view, self._partition_names(shape.info), shape.prune)

    def _partition_names(self, info: TableInfo) -> tuple[str, ...] | None:
        if self.partitions is None:
            return None
        check_partitioned(info)
        keys = info.partition_keys
        return tuple(p if isinstance(p, str) else partition_name(keys, p) for p in self.partitions)


def _changelog(split: StateSplit) -> TailRange:
    """The changelog that made a state, as an upper bound of the state's size."""
    place = split.pin.place
    return TailRange(place.bucket, place.partition, 0, split.pin.log_offset)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """The function that `mapInArrow` runs: reads the groups whose numbers come in."""

    read: SplitRead
    groups: Sequence[Sequence[Split]]

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from self.read.group(SplitGroup(*self.groups[number]))
