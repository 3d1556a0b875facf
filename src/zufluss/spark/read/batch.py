"""The batch read of `format("fluss")`.

Spark creates the reader, pickles it for the tasks, and then asks for the partitions. So everything
that the plan pins is in the partitions; the reader holds only what all partitions share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from zufluss.errors import ConfigError, TableNotExistError
from zufluss.model.table import TableInfo
from zufluss.spark import source_options as o
from zufluss.spark.cluster import client
from zufluss.spark.read.filters import checked_filter
from zufluss.spark.read.plan import PlanRequest, plan_splits
from zufluss.spark.read.shape import (
    ReadShape,
    TimeRange,
    check_schema,
    chosen_schema,
    parse_time,
    whole_schema,
)
from zufluss.spark.read.split_read import SplitRead
from zufluss.spark.read.splits import FreshShare, Split, SplitGroup
from zufluss.spark.source_options import SourceOptions, TableView

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def table_info(options: SourceOptions) -> TableInfo:
    """The table as it is now."""
    cluster = client(options.bootstrap, options.client)
    return cluster.run(cluster.connection.admin.table_info(options.path))


def source_schema(options: SourceOptions) -> StructType:
    """The columns that a read of these options has."""
    info = table_info(options)
    whole = whole_schema(info, changelog=options.view is TableView.CHANGELOG)
    columns = options.get(o.COLUMNS)
    if columns is None:
        return whole
    return chosen_schema(info, whole, columns)


def time_range(options: SourceOptions, info: TableInfo) -> TimeRange:
    """The times of the options. Raises `ConfigError` if the rows have no times."""
    start, end = (
        None if (text := options.get(option)) is None else parse_time(option.key, text)
        for option in (o.INCREMENTAL_START, o.INCREMENTAL_END)
    )
    times = TimeRange(start, end)
    if times and info.has_primary_key and options.view is not TableView.CHANGELOG:
        raise ConfigError(
            f"table {info.path} has a primary key: its rows are those of now. Read "
            f"{info.path}$changelog to see the changes between two times"
        )
    if start is not None and end is not None and start > end:
        raise ConfigError(
            f"table {info.path}: {o.INCREMENTAL_START.key} = {start} lies behind "
            f"{o.INCREMENTAL_END.key} = {end}"
        )
    return times


class FlussReader(DataSourceReader):
    """Reads a table, its lake or its changelog once."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        info = table_info(options)
        changelog = options.view is TableView.CHANGELOG
        check_schema(info, schema, whole_schema(info, changelog=changelog))
        filter = checked_filter(options.get(o.FILTER), info.schema)
        times = time_range(options, info)
        shape = ReadShape(info, schema, filter, changelog, times)
        parts, limit = options.get(o.PARTITIONS), options.get(o.LIMIT)
        self._read = SplitRead(options.bootstrap, options.client, shape, parts, limit)
        lake_only = options.view is TableView.ROWS and options.get(o.READ_OPTIMIZED)
        view = TableView.LAKE if lake_only else options.view
        records = options.get(o.MAX_RECORDS_PER_PARTITION)
        self._request = PlanRequest(info, view, parts, shape.prune, times, records)
        self._fresh = options.get(o.READ_FRESH)

    def partitions(self) -> list[InputPartition]:
        """Pin the read now; one task per split, or one task for all if there is a limit."""
        if self._fresh:
            shares = 1 if self._read.limit is not None else self._request.info.bucket_count
            return [FreshShare(number, shares) for number in range(shares)]
        splits = self._plan(self._request)
        if self._read.limit is not None or not splits:
            return [SplitGroup(*splits)]
        return [SplitGroup(split) for split in splits]

    def _plan(self, request: PlanRequest) -> list[Split]:
        cluster = client(self._read.bootstrap, self._read.options)
        return cluster.run(plan_splits(cluster.connection, request))

    def _plan_share(self, share: FreshShare) -> list[Split]:
        try:
            return self._plan(replace(self._request, share=share.share))
        except TableNotExistError as gone:
            raise TableNotExistError(
                f"{gone.message}: make the DataFrame or view anew, call register_views again"
            ) from gone

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        if isinstance(partition, FreshShare):
            partition = SplitGroup(*self._plan_share(partition))
        assert isinstance(partition, SplitGroup)
        return self._read.group(partition)
