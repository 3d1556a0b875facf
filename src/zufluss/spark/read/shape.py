"""The form in which rows reach Spark: columns, types, filter and times.

Rows come from logs, pins and lakes with at least the columns of `ReadShape.columns`, in the types
of the client. They leave as batches of exactly the Arrow schema that Spark derives from its own
schema.

A changelog has three columns of its own before those of the table. Log tables have a changelog too,
in which every row is an append.
"""

from __future__ import annotations

import datetime as dt
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from zufluss.client.read.decode import (
    BUCKET,
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    LOG_OFFSET,
    OFFSET,
    TIMESTAMP,
)
from zufluss.client.read.union_rows import UnionShape
from zufluss.errors import InvalidColumnProjectionError, InvalidTimestampError
from zufluss.model.expression import Expression
from zufluss.model.schema import Schema
from zufluss.model.table import TableInfo
from zufluss.spark.types import for_spark, spark_type

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BATCH_ROWS: Final = 65_536
"""Rows of a batch for Spark; smaller ones cost Spark more than they are worth."""
APPEND: Final = "+A"
"""The change type of a row of a log table."""
CHANGELOG_COLUMNS: Final = (CHANGE_TYPE, LOG_OFFSET, COMMIT_TIMESTAMP)
_KEPT: Final = ("+I", "+U")
"""The changes of a primary-key table that a stream of its rows keeps: rows after a change."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A range of commit times in epoch milliseconds, without its end; None is open."""

    start: int | None = None
    """The first moment."""
    end: int | None = None
    """The moment after the last."""

    def __bool__(self) -> bool:
        return self.start is not None or self.end is not None

    def keep(self, rows: pa.Table, column: str) -> pa.Table:
        """The rows whose timestamp is in the range."""
        millis = pc.cast(rows[column], pa.int64())
        if self.start is not None:
            inside = pc.greater_equal(millis, self.start)
            rows, millis = rows.filter(inside), millis.filter(inside)
        return rows if self.end is None else rows.filter(pc.less(millis, self.end))


def parse_time(key: str, text: str) -> int:
    """Epoch milliseconds of an option's text.

    >>> parse_time("scan.startup.timestamp", "1970-01-01T00:00:01")
    1000
    """
    if text.lstrip("-").isdecimal():
        return int(text)
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidTimestampError(
            f"{key} = {text!r:.60} is neither epoch milliseconds nor a time such as "
            "2026-01-31T12:00:00"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
    return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(milliseconds=1)


ALWAYS: Final = TimeRange()
"""The range of all times."""


@dataclass(frozen=True)
class ReadShape:
    """Columns, filter and times of a read. Pickles."""

    info: TableInfo
    """The table."""
    schema: StructType
    """The schema that Spark was promised."""
    filter: Expression | None = None
    """Only rows that match."""
    changelog: bool = False
    """Whether changes are read rather than rows."""
    times: TimeRange = ALWAYS
    """Only rows of these times."""

    @cached_property
    def _shape(self) -> UnionShape:
        names = [name for name in self.schema.names if not self._is_ours(name)]
        columns = names or self.info.schema.names[:1]
        return UnionShape(self.info, columns, self.filter, with_offsets=False)

    def _is_ours(self, name: str) -> bool:
        return self.changelog and name in CHANGELOG_COLUMNS

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the table to read."""
        return tuple(self._shape.columns)

    @property
    def prune(self) -> Expression | None:
        """The part of the filter that servers and lakes may apply; None for none."""
        return self._shape.prune

    @property
    def with_offsets(self) -> bool:
        """Whether rows of a log table are read with their offsets and times."""
        return not self.info.has_primary_key and (self.changelog or bool(self.times))

    @cached_property
    def _target(self) -> pa.Schema:
        from pyspark.sql.pandas.types import to_arrow_schema

        named = inspect.signature(to_arrow_schema).parameters
        zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in named else {}
        return to_arrow_schema(self.schema, **zone)

    def batches(self, rows: pa.Table, *, filtered: bool) -> Iterator[pa.RecordBatch]:
        """Rows in the form that Spark takes; `filtered` rows all match the filter already."""
        if CHANGE_TYPE in rows.column_names and not self.changelog:
            rows = rows.filter(
                pc.is_in(rows[CHANGE_TYPE].cast(pa.string()), value_set=pa.array(_KEPT))
            )
        if self.times:
            rows = self.times.keep(rows, TIMESTAMP if self.with_offsets else COMMIT_TIMESTAMP)
        rows = self._shape.matching(rows, filtered=filtered)
        if not rows.num_rows:
            return
        if self.changelog and self.with_offsets:
            rows = _as_changes(rows)
        rows = for_spark(_plain(rows.select(self._target.names)))
        if not rows.schema.equals(self._target):
            rows = rows.cast(self._target)
        yield from rows.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)

    @property
    def system_columns(self) -> tuple[str, ...]:
        """The system columns to read from a lake."""
        return (TIMESTAMP,) if self.times else ()


def _as_changes(rows: pa.Table) -> pa.Table:
    """Rows of a log table as changes."""
    changes = pa.array([APPEND], pa.string()).take(pa.array([0] * rows.num_rows, pa.int32()))
    names = {OFFSET: LOG_OFFSET, TIMESTAMP: COMMIT_TIMESTAMP}
    rows = rows.drop_columns([BUCKET])
    rows = rows.rename_columns([names.get(name, name) for name in rows.column_names])
    return rows.append_column(CHANGE_TYPE, changes)


def _plain(rows: pa.Table) -> pa.Table:
    """The rows with dictionary columns decoded."""
    for at, field in enumerate(rows.schema):
        if pa.types.is_dictionary(field.type):
            plain = rows.column(at).cast(field.type.value_type)
            rows = rows.set_column(at, field.with_type(field.type.value_type), plain)
    return rows


def check_schema(info: TableInfo, schema: StructType, known: StructType) -> None:
    """Raise `InvalidColumnProjectionError` unless each column is in `known`, with its type."""
    types = {field.name: field.dataType for field in known}
    for field in schema:
        if field.name not in types:
            raise InvalidColumnProjectionError(
                f"table {info.path} has no column {field.name!r}; it has {', '.join(types)}"
            )
        if field.dataType != types[field.name]:
            raise InvalidColumnProjectionError(
                f"table {info.path}: column {field.name!r} is {types[field.name].simpleString()} "
                f"in Spark, the schema given says {field.dataType.simpleString()}; leave it out, "
                "and cast the DataFrame"
            )


def whole_schema(info: TableInfo, *, changelog: bool) -> StructType:
    """All columns that a read of a table can have."""
    from pyspark.sql import types as s

    fields = [s.StructField(c.name, spark_type(c.data_type)) for c in info.schema.columns]
    if changelog:
        _check_names(info.schema, info)
        ours = (s.StringType(), s.LongType(), s.TimestampType())
        named = zip(CHANGELOG_COLUMNS, ours, strict=True)
        fields = [*(s.StructField(name, of) for name, of in named), *fields]
    return s.StructType(fields)


def _check_names(schema: Schema, info: TableInfo) -> None:
    taken = [name for name in CHANGELOG_COLUMNS if name in schema.names]
    if taken:
        raise InvalidColumnProjectionError(
            f"table {info.path} has a column {taken[0]!r}, which is also a column of every "
            "changelog; it cannot be read as $changelog"
        )


def chosen_schema(info: TableInfo, whole: StructType, names: tuple[str, ...]) -> StructType:
    """The columns asked for, in that order."""
    from pyspark.sql.types import StructType

    unknown = [name for name in names if name not in whole.names]
    if unknown:
        raise InvalidColumnProjectionError(
            f"table {info.path} has no column {unknown[0]!r}; it has {', '.join(whole.names)}"
        )
    twice = [name for at, name in enumerate(names) if name in names[:at]]
    if twice:
        raise InvalidColumnProjectionError(f"table {info.path}: column {twice[0]!r} is named twice")
    return StructType([whole[name] for name in names])
