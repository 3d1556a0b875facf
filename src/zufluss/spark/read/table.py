"""`zufluss.spark.table`: a table as a DataFrame, of its lake and of what is not there yet.

The read is pinned when the DataFrame is made: a snapshot of the lake, and an end offset for every
bucket. The DataFrame has these rows however often it is used and whatever is written meanwhile;
make another one to see more. What may go away under it is what retention removes: an expired
snapshot's files, log below `table.log.ttl`, a dropped partition. The read then fails, naming what
is gone, rather than to leave rows out.

| part | read by | filter and columns |
|---|---|---|
| lake | Spark's parquet reader | Spark pushes them down by itself |
| tail of a log table | our client in Python workers | pushed to the server |
| tail of a primary-key table | our client, folded | columns pushed, filter on top |
| primary-key table, nothing in the lake | our client, its pinned state | pushed to the server |

Rows of a primary-key table that are in the lake and were changed since are hidden by an anti-join
with the keys of the tail. These are read a second time for it, keys only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from zufluss.client.admin import Partition
from zufluss.client.connection import as_path
from zufluss.client.read.lake_rows import Shape
from zufluss.client.read.union_plan import TailRange, UnionPlan, plan_union
from zufluss.model.expression import Expression
from zufluss.model.table import TableInfo
from zufluss.spark.read.filters import to_column
from zufluss.spark.read.lake_files import read_files
from zufluss.spark.read.partition_filter import possible_partitions
from zufluss.spark.read.plan import in_lake, lake_files
from zufluss.spark.read.split_frame import CHANGELOG_SUFFIX, SplitFrame
from zufluss.spark.read.tail import Client, TailRead, What, client, pack, tasks_max
from zufluss.spark.types import spark_schema
from zufluss.spark.views import known_bootstrap

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

LAKE_SUFFIX: Final = "$lake"
BROADCAST_RECORDS: Final = 2_000_000
"""A tail of more records is not broadcast; Spark then sorts and merges."""


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
    """A table as it is now: what the lake has of it, and the rest from its log.

    `bootstrap` may be left out after `register(spark, bootstrap)`. `filter` is an expression of
    `zufluss.col`, which is pushed down as far as it goes, or a text of SQL. `limit` is a number of
    rows, any of them. `partitions` are names or `{column: value}`. With `read_optimized`, or for
    `"db.t$lake"`, only the lake is read; `"db.t$changelog"` is the changes, with `_change_type`,
    `_log_offset` and `_commit_timestamp`. `options` are the client's, as for `zufluss.connect`.

    >>> table(spark, "shop.orders", bootstrap="localhost:9123").count()  # doctest: +SKIP
    """
    servers = known_bootstrap(spark, bootstrap)
    parts = None if partitions is None else tuple(partitions)
    splits = SplitFrame(spark, servers, options or {}, columns, filter, parts)
    if path.endswith(CHANGELOG_SUFFIX):
        frame = splits.changes(_info(splits, path.removesuffix(CHANGELOG_SUFFIX)))
    else:
        lake_only = read_optimized or path.endswith(LAKE_SUFFIX)
        frame = _rows(splits, path.removesuffix(LAKE_SUFFIX), read_optimized=lake_only)
    return frame if limit is None else frame.limit(limit)


def _info(wanted: SplitFrame, path: str) -> TableInfo:
    cluster = client(wanted.bootstrap, wanted.options)
    return cluster.thread.run(cluster.connection.admin.table_info(as_path(path)))


def _in_lake(cluster: Client, info: TableInfo) -> bool:
    return cluster.thread.run(in_lake(cluster.connection, info))


def _rows(wanted: SplitFrame, path: str, *, read_optimized: bool) -> DataFrame:
    cluster = client(wanted.bootstrap, wanted.options)
    info = _info(wanted, path)
    if info.has_primary_key and not read_optimized and not _in_lake(cluster, info):
        return wanted.state(info)
    planning = plan_union(
        cluster.connection, info, wanted.partitions, read_optimized=read_optimized
    )
    plan = cluster.thread.run(planning)
    servers, options = wanted.bootstrap, wanted.options
    return _UnionRead(wanted.spark, plan, servers, options, wanted.columns, wanted.filter).frame()


@dataclass(frozen=True, slots=True)
class _UnionRead:
    """One pinned read on its way to a DataFrame."""

    spark: SparkSession
    plan: UnionPlan
    bootstrap: str
    options: Mapping[str, Any]
    columns: Sequence[str] | None
    filter: Expression | str | None

    def frame(self) -> DataFrame:
        shape = self._shape()
        wanted = self._read_columns(shape)
        rows = self._lake(wanted, shape.prune)
        tail = self._tail(wanted, shape.prune)
        if rows is not None and tail is not None:
            if self.plan.info.has_primary_key:
                rows = self._unhidden(rows)
            rows = rows.unionAll(tail)
        frame = rows if rows is not None else tail
        if frame is None:
            frame = self.spark.createDataFrame([], self._schema(wanted))
        return self._finished(frame, shape)

    def _shape(self) -> Shape:
        expression = self.filter if isinstance(self.filter, Expression) else None
        return Shape(self.plan.info, self.columns, expression, with_offsets=False)

    def _read_columns(self, shape: Shape) -> list[str]:
        """What is read: asked for, in the filter, or needed to tell rows apart."""
        info = self.plan.info
        if isinstance(self.filter, str):
            return list(info.schema.names)
        wanted = {*shape.columns, *info.schema.primary_key}
        if self.plan.partitions is not None:
            wanted |= {*info.partition_keys}
        return [name for name in info.schema.names if name in wanted]

    def _schema(self, columns: Sequence[str]) -> StructType:
        return spark_schema(self.plan.info.schema.column(name) for name in columns)

    def _finished(self, frame: DataFrame, shape: Shape) -> DataFrame:
        if isinstance(self.filter, str):
            frame = frame.filter(self.filter)
        elif self.filter is not None:
            frame = frame.filter(to_column(self.filter, self.plan.info.schema))
        return frame.select(*map(_named, shape.schema.names))

    # -- lake ----------------------------------------------------------------------------------

    def _lake(self, columns: Sequence[str], prune: Expression | None) -> DataFrame | None:
        files = lake_files(self.plan, prune)
        if not files:
            return None
        rows = read_files(self.spark, files, self._schema(columns))
        if self.plan.partitions is None:
            return rows
        return rows.filter(self._of_partitions(self.plan.partitions))

    def _of_partitions(self, names: Sequence[str]) -> Column:
        """Rows of these partitions: a reader may prune by them, or not."""
        from pyspark.sql import functions as F

        keys = [_named(key) for key in self.plan.info.partition_keys]
        return F.concat_ws("$", *keys).isin(list(names))

    # -- tail ----------------------------------------------------------------------------------

    def _tail(self, columns: Sequence[str], prune: Expression | None) -> DataFrame | None:
        """Rows of the log; None where there are none."""
        keyed = self.plan.info.has_primary_key
        return self._read_tail(columns, None if keyed else prune, What.ROWS)

    def _unhidden(self, rows: DataFrame) -> DataFrame:
        """Rows of the lake whose keys the tail does not change."""
        from pyspark.sql import functions as F

        keys = list(self.plan.info.schema.primary_key)
        changed = self._read_tail(keys, None, What.KEYS)
        assert changed is not None
        if sum(part.stop - part.start for part in self.plan.tail) <= BROADCAST_RECORDS:
            changed = F.broadcast(changed)
        return rows.join(changed, keys, "left_anti").select(*map(_named, rows.columns))

    def _read_tail(
        self, columns: Sequence[str], filter: Expression | None, what: What
    ) -> DataFrame | None:
        info = self.plan.info
        groups = pack(self._possible(), tasks_max(self.spark), split=not info.has_primary_key)
        if not groups:
            return None
        read = TailRead(self.bootstrap, self.options, info, groups, tuple(columns), filter, what)
        count = len(groups)
        tasks = self.spark.range(0, count, 1, count)
        return tasks.mapInArrow(read.__call__, self._schema(columns))

    def _possible(self) -> list[TailRange]:
        """The tail without partitions that the filter leaves out."""
        tail = self.plan.tail
        expression = self.filter if isinstance(self.filter, Expression) else None
        names = {part.partition for part in tail if part.partition is not None}
        left = {None, *possible_partitions(self.plan.info, expression, names)}
        return [part for part in tail if part.partition in left]


def _named(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.col(f"`{name.replace('`', '``')}`")
