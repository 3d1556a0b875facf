"""Describes a write to a table, checked on the driver before any task starts.

| table | kind | what makes it exact |
|---|---|---|
| log | `LOG` | numbered batches: the server drops batches that it has already |
| primary key | `UPSERT` | the key: a repeated row is the same; old writers are fenced |
| primary key, engine `aggregation` | `AGGREGATE` | a producer: uncommitted changes are undone |

The columns of the rows are those of the table, by name and in any order, or those that
`write.columns` names. Types are those of `types.py`, or narrower ones of the same sort: an INT fits
a BIGINT. Tasks check NOT NULL columns for nulls before they send their first row, since Spark
declares most columns nullable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from zufluss.client.core.convert import ColumnMismatchError
from zufluss.client.write.upsert import target_columns
from zufluss.config.nearest import suggestion
from zufluss.config.table_options import TABLE_DELETE_BEHAVIOR
from zufluss.errors import ConfigError, InvalidProducerIdError
from zufluss.model.agg_columns import AGGREGATION
from zufluss.model.merge import merge_engine
from zufluss.model.producer import check_producer_id
from zufluss.model.schema import Column
from zufluss.model.table import TableInfo
from zufluss.spark.cluster import client
from zufluss.spark.source_options import (
    CHANGE_TYPE_COLUMN,
    TXN_ID,
    WRITE_COLUMNS,
    WRITE_ORDER,
    SourceOptions,
)
from zufluss.spark.types import spark_type

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_WIDER: Final = (("tinyint", "smallint", "int", "bigint"), ("float", "double"))
"""Rows of types; each type has all values of the types before it."""


class SinkKind(Enum):
    """How rows are written to a table."""

    LOG = "log"
    UPSERT = "upsert"
    AGGREGATE = "aggregate"


@dataclass(frozen=True, slots=True)
class Sink:
    """One write, as its tasks receive it. Pickles."""

    bootstrap: str
    """The address of the cluster."""
    options: Mapping[str, Any]
    """Options of the client."""
    info: TableInfo
    """The table, as it was when the write began."""
    kind: SinkKind
    """How the table is written."""
    columns: tuple[str, ...]
    """The columns that are written, in table order."""
    change_column: str | None
    """The column with the change type of each row; None if every row is an upsert."""
    canonical: bool
    """Whether rows are sorted by their content before they are written."""

    @property
    def last_wins(self) -> bool:
        """Whether the last row of a key replaces all others."""
        return self.kind is SinkKind.UPSERT and not merge_engine(self.info.descriptor.properties)

    @property
    def ignores_deletes(self) -> bool:
        """Whether the table ignores deletes; then they are not sent."""
        return bool(self.info.property(TABLE_DELETE_BEHAVIOR) == "IGNORE")

    @property
    def partial(self) -> tuple[str, ...] | None:
        """The columns of a partial update; None if all columns are written."""
        whole = target_columns(self.info, None) if self.info.has_primary_key else self.columns
        return None if self.columns == whole else self.columns


def make_sink(options: SourceOptions, schema: StructType, overwrite: bool) -> Sink:
    """The write of these options and rows of this schema. Raises an error if it is not possible."""
    if overwrite:
        raise ConfigError(
            f"table {options.path} cannot be overwritten by Spark; write with mode append (INSERT "
            "INTO), or drop rows, a partition or the table first"
        )
    cluster = client(options.bootstrap, options.client)
    info = cluster.run(cluster.connection.table_info(options.path, refresh=True))
    kind = kind_of(info)
    _check_options(options, info, kind)
    columns = _columns(info, options.get(WRITE_COLUMNS))
    change_column = options.get(CHANGE_TYPE_COLUMN)
    check_schema(info, columns, schema, change_column)
    canonical = options.get(WRITE_ORDER) == "canonical"
    return Sink(options.bootstrap, options.client, info, kind, columns, change_column, canonical)


def kind_of(info: TableInfo) -> SinkKind:
    """How a table is written."""
    if not info.has_primary_key:
        return SinkKind.LOG
    engine = merge_engine(info.descriptor.properties)
    return SinkKind.AGGREGATE if engine == AGGREGATION else SinkKind.UPSERT


def _check_options(options: SourceOptions, info: TableInfo, kind: SinkKind) -> None:
    _check_txn_id(options.get(TXN_ID), info)
    if kind is SinkKind.LOG:
        for option in (WRITE_COLUMNS, CHANGE_TYPE_COLUMN):
            if option.key in options.values:
                raise ConfigError(
                    f"option {option.key} is for primary-key tables, and {info.path} is a log, to "
                    "which whole rows are appended; leave it out"
                )
    elif CHANGE_TYPE_COLUMN.key in options.values and options.get(WRITE_ORDER) == "canonical":
        raise ConfigError(
            f"option {WRITE_ORDER.key} = canonical does not go with {CHANGE_TYPE_COLUMN.key}: the "
            f"changes of one key in table {info.path} have an order. Leave one of both out"
        )
    elif kind is SinkKind.UPSERT and options.get(WRITE_ORDER) == "canonical":
        raise ConfigError(
            f"option {WRITE_ORDER.key} = canonical is for log and aggregation tables; of rows of "
            f"one key the last one counts in table {info.path}, so their order stays. Leave it out"
        )


def _check_txn_id(txn_id: str | None, info: TableInfo) -> None:
    try:
        if txn_id is not None:
            check_producer_id(txn_id)
    except InvalidProducerIdError as problem:
        raise ConfigError(
            f"table {info.path}: option {TXN_ID.key} names who writes: {problem.message}"
        ) from None


def _columns(info: TableInfo, names: Sequence[str] | None) -> tuple[str, ...]:
    if info.has_primary_key:
        return target_columns(info, names)
    return tuple(info.schema.names)


def check_schema(
    info: TableInfo, columns: Sequence[str], schema: StructType, change_column: str | None
) -> None:
    """Raise `ColumnMismatchError` unless rows of the schema can be written to these columns."""
    fields = {field.name: field.dataType for field in schema.fields}
    if len(fields) < len(schema.fields):
        raise ColumnMismatchError(f"a column name occurs twice in the rows for table {info.path}")
    if change_column is not None:
        _check_change_column(info, fields.pop(change_column, None), change_column)
    for name in fields:
        if name not in columns:
            there = name in info.schema
            why = "is not among those to be written" if there else "is not in the table"
            raise ColumnMismatchError(
                f"column {name!r} of the rows {why}{suggestion(name, columns)}; table {info.path} "
                f"takes {', '.join(columns)}. Drop it from the rows"
            )
    for name in columns:
        if name not in fields:
            raise ColumnMismatchError(_missing(info, name))
        _check_type(info, info.schema.column(name), fields[name])


def _missing(info: TableInfo, name: str) -> str:
    message = f"column {name!r} of table {info.path} is missing in the rows"
    if not info.schema.column(name).data_type.nullable:
        return f"{message}, and it is NOT NULL; add it"
    if info.has_primary_key:
        return f"{message}; add it, or name the columns to be written in {WRITE_COLUMNS.key}"
    return f"{message}; add it, with lit(None) for nothing"


def _check_change_column(info: TableInfo, of: DataType | None, name: str) -> None:
    if name in info.schema:
        raise ConfigError(
            f"{CHANGE_TYPE_COLUMN.key} = {name} is a column of table {info.path}; it has to be one "
            "that only the rows have"
        )
    if of is None or of.simpleString() != "string":
        what = "is missing in the rows" if of is None else f"is {of.simpleString()}, not string"
        raise ColumnMismatchError(
            f"column {name!r}, which says for table {info.path} what to do with each row, {what}"
        )


def _check_type(info: TableInfo, column: Column, data_type: DataType) -> None:
    expected, actual = spark_type(column.data_type).simpleString(), data_type.simpleString()
    if expected == actual or _is_wider(spark_type(column.data_type), data_type):
        return
    if actual == "void":
        if column.data_type.nullable:
            return
        raise ColumnMismatchError(f"column {column.name!r} of table {info.path} is NOT NULL")
    raise ColumnMismatchError(
        f"column {column.name!r} of table {info.path} is {column.data_type}, in Spark {expected}; "
        f"the rows have {actual}. Cast it: col({column.name!r}).cast({expected!r})"
    )


def _is_wider(wide: DataType, narrow: DataType) -> bool:
    """Whether a type has all values of another one."""
    from pyspark.sql.types import DecimalType

    if isinstance(wide, DecimalType) and isinstance(narrow, DecimalType):
        digits = wide.precision - wide.scale >= narrow.precision - narrow.scale
        return bool(digits and wide.scale >= narrow.scale)
    names = (narrow.simpleString(), wide.simpleString())
    return any(
        row.index(names[0]) < row.index(names[1])
        for row in _WIDER
        if names[0] in row and names[1] in row
    )
