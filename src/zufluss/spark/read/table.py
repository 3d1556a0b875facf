"""`zufluss.spark.table`: a table as a DataFrame, of its lake and of its log.

The read is pinned when the DataFrame is made: a snapshot of the lake, and an end offset for every
bucket. The DataFrame has these rows however often it is used and whatever is written meanwhile;
make another one to see more. Retention may remove what it needs: the files of an expired snapshot,
log below `table.log.ttl`, a dropped partition. The read then fails and names what is gone.

| part | read by | filter and columns |
|---|---|---|
| lake | Spark's parquet reader; the lake's own where the files are others | pushed down |
| tail of a log table | our client in Python workers | pushed to the server |
| tail of a primary-key table | our client, folded | columns pushed, filter after folding |
| primary-key table, nothing in the lake | our client, its pinned state | pushed to the server |

Rows of a primary-key table that are in the lake and were changed since are hidden by an anti-join
with the keys of the tail. The tail is read a second time for that, keys only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from zufluss.client.core.catalog import Partition
from zufluss.client.core.cluster import as_path
from zufluss.client.read.union_plan import TailRange, UnionPlan, plan_union
from zufluss.client.read.union_rows import UnionShape
from zufluss.lake_formats import LAKE_FORMATS
from zufluss.model.expression import Expression
from zufluss.model.table import TableInfo, TablePath
from zufluss.spark.cluster import client, known_bootstrap
from zufluss.spark.read.filters import checked_filter, to_column
from zufluss.spark.read.lake_files import read_files
from zufluss.spark.read.plan import PlanRequest, in_lake, lake_files, lake_splits
from zufluss.spark.read.shape import ReadShape
from zufluss.spark.read.split_frame import FrameRequest
from zufluss.spark.read.splits import KeyedLakeSplit, KeySplit, LogSplit
from zufluss.spark.source_options import TableView
from zufluss.spark.types import quoted, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

BROADCAST_RECORDS: Final = 2_000_000
"""A tail of more records is not broadcast; Spark then sorts and merges."""

Groups = Sequence[Sequence[TailRange]]
"""The ranges of each task."""


def table(
    spark: SparkSession,
    path: str,
    *,
    bootstrap: str | None = None,
    columns: Sequence[str] | None = None,
    filter: Expression | str | None = None,
    limit: int | None = None,
    partitions: Iterable[Partition] | None = None,
    read_optimized: bool = False,
    options: Mapping[str, Any] | None = None,
) -> DataFrame:
    """A table as it is now: the rows in its lake, and the rest from its log.

    `bootstrap` may be left out after `register(spark, bootstrap)`. `filter` is an expression of
    `zufluss.col`, or a text as for `table.scan`; it is pushed down as far as it goes. `limit` is a
    number of rows, any of them. `partitions` are names or `{column: value}`. With
    `read_optimized`, or for `"db.t$lake"`, only the lake is read; `"db.t$changelog"` is the
    changes, with `_change_type`, `_log_offset` and `_commit_timestamp`. `options` are the client's,
    as for `zufluss.connect`.

    >>> table(spark, "shop.orders", bootstrap="localhost:9123").count()  # doctest: +SKIP
    """
    servers = known_bootstrap(spark, bootstrap)
    parts = None if partitions is None else tuple(partitions)
    cluster = client(servers, options or {})
    info = cluster.run(cluster.connection.admin.table_info(_table_path(path)))
    chosen = checked_filter(filter, info.schema)
    request = FrameRequest(spark, servers, options or {}, columns, chosen, parts)
    frame = _frame(request, info, path, read_optimized=read_optimized)
    return frame if limit is None else frame.limit(limit)


def _table_path(path: str) -> TablePath:
    changelog, lake = TableView.CHANGELOG.value, TableView.LAKE.value
    return as_path(path.removesuffix(changelog if path.endswith(changelog) else lake))


def _frame(request: FrameRequest, info: TableInfo, path: str, *, read_optimized: bool) -> DataFrame:
    cluster = request.client()
    if path.endswith(TableView.CHANGELOG.value):
        return request.changes(info)
    lake_only = read_optimized or path.endswith(TableView.LAKE.value)
    stateful = info.has_primary_key and not lake_only
    if stateful and not cluster.run(in_lake(cluster.connection, info)):
        return request.state(info)
    planning = plan_union(cluster.connection, info, request.partitions, read_optimized=lake_only)
    return _UnionFrame(request, cluster.run(planning)).frame()


@dataclass(frozen=True, slots=True)
class _UnionFrame:
    """Makes the DataFrame of one pinned union read."""

    request: FrameRequest
    plan: UnionPlan

    def frame(self) -> DataFrame:
        info, expression = self.plan.info, self.request.filter
        result = UnionShape(info, self.request.columns, expression, with_offsets=False)
        columns = spark_schema(info.schema.column(name) for name in self._read_columns(result))
        shape = ReadShape(info, columns, expression)
        rows, groups = self._lake(shape), self._tail_groups()
        if rows is None:
            rows = self._tail(shape, groups)
        elif groups:
            live = self._unchanged(rows, groups) if info.has_primary_key else rows
            rows = live.unionAll(self._tail(shape, groups))
        return self._filtered(rows).select(*map(quoted, result.schema.names))

    def _read_columns(self, result: UnionShape) -> list[str]:
        """The columns that are asked for, in the filter, or needed to tell rows apart."""
        info = self.plan.info
        names = {*result.columns, *info.schema.primary_key}
        if self.plan.partitions is not None:
            names |= {*info.partition_keys}
        return [name for name in info.schema.names if name in names]

    def _filtered(self, frame: DataFrame) -> DataFrame:
        filter = self.request.filter
        if filter is None:
            return frame
        return frame.filter(to_column(filter, self.plan.info.schema))

    # -- lake ----------------------------------------------------------------------------------

    def _lake(self, shape: ReadShape) -> DataFrame | None:
        """Rows of the lake, read by Spark itself if it can; None where there are no files."""
        files = lake_files(self.plan, shape.prune)
        if self.plan.lake is None or not files:
            return None
        by_key = any(file.equality_deletes for file in files)
        if LAKE_FORMATS[self.plan.lake_format].parquet_files and not by_key:
            rows = read_files(self.request.spark, files, shape.schema)
        else:
            splits = lake_splits(self.plan.lake.snapshot_id, files)
            rows = self.request.frame(shape, [[split] for split in splits])
        if self.plan.partitions is None:
            return rows
        return rows.filter(self._of_partitions(self.plan.partitions))

    def _of_partitions(self, names: Sequence[str]) -> Column:
        """Rows of these partitions: a reader may prune by them, or not."""
        from pyspark.sql import functions as F

        keys = map(quoted, self.plan.info.partition_keys)
        return F.concat_ws("$", *keys).isin(list(names))

    # -- tail ----------------------------------------------------------------------------------

    def _tail_groups(self) -> Groups:
        """The ranges of each task, without partitions that the filter leaves out."""
        info = self.plan.info
        request = PlanRequest(info, TableView.ROWS, prune=self.request.filter)
        return self.request.packed(request.possible(self.plan.tail), split=not info.has_primary_key)

    def _tail(self, shape: ReadShape, groups: Groups) -> DataFrame:
        """Rows of the log; of a primary-key table the rows that its changes leave."""
        keyed = self.plan.info.has_primary_key
        return self.request.frame(
            shape,
            [[KeyedLakeSplit(None, (p,)) if keyed else LogSplit(p) for p in g] for g in groups],
        )

    def _unchanged(self, rows: DataFrame, groups: Groups) -> DataFrame:
        """Rows of the lake whose keys the tail does not change."""
        from pyspark.sql import functions as F

        info = self.plan.info
        keys = list(info.schema.primary_key)
        shape = ReadShape(info, spark_schema(map(info.schema.column, keys)))
        changed = self.request.frame(shape, [[KeySplit(p) for p in group] for group in groups])
        if sum(part.stop - part.start for part in self.plan.tail) <= BROADCAST_RECORDS:
            changed = F.broadcast(changed)
        return rows.join(changed, keys, "left_anti").select(*map(quoted, rows.columns))
