"""The changes of a table as a DataFrame, for `zufluss.spark.table(spark, "db.t$changelog")`.

Ranges of the log are fixed when the DataFrame is made and read by `mapInArrow`, as tails are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from zufluss.client.admin import Partition
from zufluss.client.connection import as_path
from zufluss.client.union import TailRange
from zufluss.model.expression import Expression
from zufluss.model.partition import check_partitioned, partition_name
from zufluss.model.table import TableInfo
from zufluss.spark.read_shape import ReadShape, chosen_schema, whole_schema
from zufluss.spark.scan_plan import PlanRequest, log_ranges
from zufluss.spark.source_options import View
from zufluss.spark.split_read import SplitRead
from zufluss.spark.splits import LogSplit, SplitGroup
from zufluss.spark.tail import client, pack, tasks_max

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHANGELOG_SUFFIX: Final = "$changelog"


@dataclass(frozen=True, slots=True)
class ChangelogRead:
    """A read of changes on its way to a DataFrame."""

    spark: SparkSession
    """The session."""
    bootstrap: str
    """Where the cluster is."""
    options: Mapping[str, Any]
    """Options of the client."""
    columns: Sequence[str] | None
    """Only these columns."""
    filter: Expression | str | None
    """Only changes that match; a text is for Spark."""
    partitions: Iterable[Partition] | None
    """Only these partitions."""

    def frame(self, path: str) -> DataFrame:
        """The changes that the log of a table has now."""
        cluster = client(self.bootstrap, self.options)
        info = cluster.thread.run(cluster.connection.admin.table_info(as_path(path)))
        filter = None if isinstance(self.filter, str) else self.filter
        request = PlanRequest(info, View.CHANGELOG, self._names(info), filter)
        ranges = cluster.thread.run(log_ranges(cluster.connection, request))
        schema = whole_schema(info, changelog=True)
        sql = self.filter if isinstance(self.filter, str) else None
        if self.columns is not None and sql is None:
            schema = chosen_schema(info, schema, tuple(self.columns))
        shape = ReadShape(info, schema, filter, changelog=True)
        groups = pack(ranges, tasks_max(self.spark), split=not info.has_primary_key)
        tasks = _Tasks(SplitRead(self.bootstrap, self.options, shape), groups)
        if not groups:
            frame = self.spark.createDataFrame([], schema)
        else:
            numbers = self.spark.range(0, len(groups), 1, len(groups))
            frame = numbers.mapInArrow(tasks.__call__, schema)
        if sql is None:
            return frame
        wanted = self.columns or schema.names
        return frame.filter(sql).select(*(f"`{name.replace('`', '``')}`" for name in wanted))

    def _names(self, info: TableInfo) -> tuple[str, ...] | None:
        if self.partitions is None:
            return None
        check_partitioned(info)
        keys = info.partition_keys
        return tuple(p if isinstance(p, str) else partition_name(keys, p) for p in self.partitions)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """What `mapInArrow` runs: the ranges of the tasks whose numbers come in."""

    read: SplitRead
    groups: tuple[tuple[TailRange, ...], ...]

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                splits = (LogSplit(part) for part in self.groups[number])
                yield from self.read.group(SplitGroup(*splits))
