"""User input as Arrow record batches of the table's schema.

A writer takes Arrow tables, batches and readers, everything that speaks the Arrow C data interface
(`__arrow_c_stream__`, `__arrow_c_array__`: DuckDB relations, PyIceberg scans, …), pandas and polars
frames, a dict of columns, one row, and a list of rows. A row is a dict, a dataclass or a named
tuple. All of them become record batches here, with the columns in table order and of the table's
types. A generator or another iterable of rows or batches (`is_stream`) is written item by item.

Columns are matched by name. A column that the input lacks is filled with nulls if the table allows
null. A column that the table lacks, a value that does not fit the column's type, and a null in a
NOT NULL column are `ColumnMismatchError`s that name the column and both types. Casts are safe: a
value is never changed silently (no overflow, no cut fraction, no invalid text, no number as text).

Python rows are converted together, by one call of Arrow. If that fails, they are converted again
by column and by row, so that the error names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from zufluss.errors import InvalidTargetColumnError

Rows = Sequence[Mapping[str, Any]]


class ColumnMismatchError(InvalidTargetColumnError, TypeError):
    """A column of the input does not fit the column of the table."""


def to_batches(
    data: Any, schema: pa.Schema, only: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield `data` as record batches of `schema`; empty batches are left out.

    With `only`, just these columns are kept; the input may lack the others.

    >>> schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    >>> [b.num_rows for b in to_batches({"id": [1, 2], "name": ["a", None]}, schema)]
    [2]
    >>> [b.to_pylist() for b in to_batches([{"id": 1}], schema)]
    [[{'id': 1, 'name': None}]]
    >>> [b.to_pylist() for b in to_batches([{"id": 1, "name": "a"}], schema, ["id"])]
    [[{'id': 1}]]
    """
    target = schema if only is None else chosen(schema, only)
    for batch in _source_batches(data, schema, only):
        if batch.num_rows:
            if only is not None:
                _refuse_unknown(batch.schema.names, schema)
                batch = batch.select([name for name in only if name in batch.schema.names])
            yield conform(batch, target)


def chosen(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """The schema with only some columns, in the order of `names`."""
    return pa.schema([schema.field(name) for name in names])


_SINGLE = frozenset({bool, int, float, str, bytes, Decimal, datetime, date, time, timedelta})
"""Types whose values are never columns."""


def is_plain_row(data: Any) -> bool:
    """Whether `data` is a row by its first value alone, as most rows are; no schema is needed.

    If other values are columns, the dict fits no table, which its conversion tells.
    """
    if type(data) is dict:
        for value in data.values():
            return type(value) in _SINGLE
    return False


def single_row(data: Any, schema: pa.Schema) -> Mapping[str, Any] | None:
    """The row that `data` is, as a mapping: a dict without columns, a dataclass, a named tuple.

    None if `data` is anything else.
    """
    if is_plain_row(data):
        row: Mapping[str, Any] = data
        return row
    if isinstance(data, Mapping):
        return None if _holds_columns(data, schema) else data
    return _object_row(data)


def is_stream(data: Any) -> bool:
    """Whether `data` is an iterable of rows or batches that can be read once, item by item."""
    if isinstance(data, str | bytes | Sequence | Mapping | pa.Table | pa.RecordBatch):
        return False
    if isinstance(data, pa.RecordBatchReader) or hasattr(data, "__arrow_c_stream__"):
        return False
    if hasattr(data, "__arrow_c_array__") or hasattr(data, "__array__"):
        return False
    return isinstance(data, Iterable)


def _object_row(data: Any) -> Mapping[str, Any] | None:
    if is_dataclass(data) and not isinstance(data, type):
        return asdict(data)
    if isinstance(data, tuple) and hasattr(data, "_asdict"):
        values: Mapping[str, Any] = data._asdict()
        return values
    return None


def rows_to_batch(
    rows: Rows, schema: pa.Schema, only: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Convert Python rows to one record batch; with `only`, just these columns.

    The error for rows that do not fit names the first of them.
    """
    target = schema if only is None else chosen(schema, only)
    try:
        if len(rows) == 1:
            _holds_columns(rows[0], schema)
        _refuse_unknown(set().union(*rows), schema)
        return conform(_rows_batch(rows, target), target)
    except ColumnMismatchError as e:
        if len(rows) == 1:
            raise ColumnMismatchError(f"{e.message}, in the row {dict(rows[0])!r:.200}") from e
        for number, row in enumerate(rows):
            try:
                rows_to_batch([row], schema, only)
            except ColumnMismatchError as problem:
                raise ColumnMismatchError(f"row {number}: {problem.message}") from e
        raise


def _rows_batch(rows: Rows, target: pa.Schema) -> pa.RecordBatch:
    try:
        structs = pa.array(rows, type=pa.struct(list(target)), from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, LookupError):
        columns = [
            _column(field, [row.get(field.name) for row in rows], field.type) for field in target
        ]
        return pa.RecordBatch.from_arrays(columns, schema=target)
    return pa.RecordBatch.from_struct_array(structs)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert `batch` to the columns, order and types of `schema`; a fitting batch is returned."""
    if batch.schema.equals(schema) and not _has_forbidden_null(batch, schema):
        return batch
    _refuse_unknown(batch.schema.names, schema)
    columns = [_conform_column(batch, field) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _source_batches(
    data: Any, schema: pa.Schema, only: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    if isinstance(data, pa.RecordBatch):
        yield data
    elif isinstance(data, pa.Table):
        yield from data.to_batches()
    elif isinstance(data, pa.RecordBatchReader):
        yield from data
    elif isinstance(data, Mapping):
        yield _mapping_batch(data, schema, only)
    elif _is_frame_of(data, "pandas"):
        yield from _pandas_table(data, schema).to_batches()
    elif _is_frame_of(data, "polars"):
        yield from _polars_table(data).to_batches()
    elif hasattr(data, "__arrow_c_stream__"):
        yield from pa.RecordBatchReader.from_stream(data)
    elif hasattr(data, "__arrow_c_array__"):
        yield pa.record_batch(data)
    elif isinstance(data, Sequence) and (rows := _listed_rows(data)) is not None:
        yield rows_to_batch(rows, schema, only)
    else:
        raise TypeError(
            f"cannot write a {type(data).__module__}.{type(data).__qualname__}; give an Arrow "
            "table, batch, reader or anything with __arrow_c_stream__, a pandas or polars "
            "DataFrame, a dict of columns, one row (a dict, a dataclass, a named tuple), or a list "
            "or generator of rows"
        )


def _listed_rows(data: Sequence[Any]) -> Rows | None:
    """The rows of a list; None if an item is no row."""
    rows = [row if isinstance(row, Mapping) else _object_row(row) for row in data]
    return [row for row in rows if row is not None] if all(r is not None for r in rows) else None


def _is_frame_of(data: Any, package: str) -> bool:
    kind = type(data)
    return kind.__name__ == "DataFrame" and kind.__module__.split(".")[0] == package


def _pandas_table(frame: Any, schema: pa.Schema) -> pa.Table:
    """Convert a pandas frame; object columns get the table's type, others keep their own."""
    _refuse_unknown([str(name) for name in frame.columns], schema)
    columns: dict[str, Any] = {}
    for name in frame.columns:
        series, field = frame[name], schema.field(str(name))
        target = field.type if series.dtype == object else None
        columns[field.name] = _column(field, series, target)
    return pa.table(columns)


def _polars_table(frame: Any) -> pa.Table:
    """Convert a polars frame, without view types, which older Arrow releases cannot cast."""
    import polars

    return frame.to_arrow(compat_level=polars.CompatLevel.oldest())


def _mapping_batch(
    data: Mapping[str, Any], schema: pa.Schema, only: Sequence[str] | None
) -> pa.RecordBatch:
    if not _holds_columns(data, schema):
        return rows_to_batch([data], schema, only)
    _refuse_unknown(data, schema)
    columns = {}
    for name, values in data.items():
        target = schema.field(name).type if isinstance(values, list | tuple) else None
        column = _column(schema.field(name), values, target)
        columns[name] = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    sizes = {len(column) for column in columns.values()}
    if len(sizes) > 1:
        raise ColumnMismatchError(
            "the columns differ in length: "
            + ", ".join(f"{name!r} {len(column)}" for name, column in columns.items())
        )
    return pa.record_batch(columns)


def _holds_columns(data: Mapping[str, Any], schema: pa.Schema) -> bool:
    """Whether a dict holds columns. A list is a single value if its column is a list or map."""
    verdicts = {_is_column(values, _type_of(name, schema)) for name, values in data.items()}
    verdicts.discard(None)
    if verdicts == {True, False}:
        columns = [n for n, v in data.items() if _is_column(v, _type_of(n, schema))]
        raise ColumnMismatchError(
            f"the dict mixes columns ({', '.join(columns)}) with single values; give either one "
            "value per column (a row) or one list per column"
        )
    return True in verdicts


def _is_column(values: Any, target: pa.DataType | None) -> bool | None:
    if isinstance(values, pa.Array | pa.ChunkedArray) or hasattr(values, "__array__"):
        return bool(getattr(values, "ndim", 1) > 0)
    if not isinstance(values, list | tuple):
        return None if values is None else False
    if target is None or not pa.types.is_nested(target) or pa.types.is_struct(target):
        return True
    first = next((v for v in values if v is not None), None)
    if pa.types.is_map(target):
        return None if first is None else isinstance(first, list | dict)
    return None if first is None else isinstance(first, list | tuple)


def _type_of(name: str, schema: pa.Schema) -> pa.DataType | None:
    position = schema.get_field_index(name)
    return schema.field(position).type if position >= 0 else None


def _column(field: pa.Field, values: Any, target: pa.DataType | None) -> Any:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        return pa.array(values, type=target, from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as e:
        raise ColumnMismatchError(f"column {field.name!r} ({field.type}): {e}") from e


def _conform_column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    position = batch.schema.get_field_index(field.name)
    if position < 0:
        column = pa.nulls(batch.num_rows, field.type)
    else:
        column = _cast(batch.column(position), field)
    if not field.nullable and column.null_count:
        what = "is missing" if position < 0 else f"has {column.null_count} nulls"
        raise ColumnMismatchError(f"column {field.name!r} {what}, but the table says NOT NULL")
    return column


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type.equals(field.type):
        return column
    if pa.types.is_string(field.type) and not _is_text(column.type):
        raise ColumnMismatchError(
            f"column {field.name!r}: the input has {column.type}, the table text; convert the "
            "column to text first"
        )
    try:
        return column.cast(field.type, safe=True)
    except pa.ArrowException as e:
        raise ColumnMismatchError(
            f"column {field.name!r}: the input has {column.type}, the table {field.type}: {e}"
        ) from e


def _is_text(data_type: pa.DataType) -> bool:
    kind = data_type.value_type if pa.types.is_dictionary(data_type) else data_type
    text = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return pa.types.is_null(kind) or str(kind) in text


def _has_forbidden_null(batch: pa.RecordBatch, schema: pa.Schema) -> bool:
    return any(not field.nullable and batch.column(i).null_count for i, field in enumerate(schema))


def _refuse_unknown(names: Any, schema: pa.Schema) -> None:
    known = set(schema.names)
    unknown = [str(name) for name in names if name not in known]
    if unknown:
        raise ColumnMismatchError(
            f"the table has no column {', '.join(map(repr, sorted(unknown)))}; its columns are "
            f"{', '.join(schema.names)}"
        )
    if len(set(names)) != len(list(names)):
        raise ColumnMismatchError("a column name occurs twice in the input")
