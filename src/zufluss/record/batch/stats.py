"""Column statistics of a log batch: reading, building, and skipping batches by them.

With `table.statistics.columns`, each batch of a table has a block in front of its records with the
number of NULLs, the smallest and the largest value of those columns. A fetch with a filter skips
batches whose statistics prove that no record matches. Writers compute the block
(`build_statistics`); the server checks its shape on produce (`kernels/batch_statistics.py`) and
reads it on fetch (`read_statistics`, `matcher`). The server does not check the values: a writer
with wrong statistics hides its own rows.

| offset | field |
|---|---|
| 0 | version u8 = 1 |
| 1 | number of columns n, i16 |
| 3 | n × i16 index of the column in the schema |
| 3 + 2n | n × i32 NULL count, −1 = unknown |
| 3 + 6n | size of the minimum row i32 (0 = none), aligned row of n fields (`slots`) |
| then | size of the maximum row i32 (0 = none), aligned row of n fields |

A NULL in the minimum or maximum row means "unknown", never "no value": Java writers leave bounds of
CHAR out. Pruning is deliberately weak for floating-point numbers, where writers and readers differ
on NaN and on the sign of zero.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from zufluss.errors import ConfigError, CorruptRecordError
from zufluss.model.predicate import CompoundFunction, Leaf, LeafFunction, Predicate
from zufluss.model.schema import Schema
from zufluss.model.types import NESTED, DataType, Root
from zufluss.record.rows import binary as b
from zufluss.record.rows.binary import Reader, Value
from zufluss.record.rows.slots import read_aligned, write_aligned
from zufluss.record.rows.values import values_of

VERSION = 1
"""The only version of the block."""

TEXT_BOUND_BYTES_MAX = 1024
"""Longer texts are no bounds: statistics must be small compared with their batch."""

_UNSUPPORTED = NESTED | {Root.BYTES, Root.BINARY}
_FLOATS = (Root.FLOAT, Root.DOUBLE)


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """The statistics of one column in a batch."""

    data_type: DataType
    """The column's type."""
    null_count: int | None
    """Number of NULLs, None if unknown."""
    minimum: Value
    """The smallest value in the canonical form of predicates, None if unknown."""
    maximum: Value
    """The largest value, None if unknown."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of one batch."""

    columns: Mapping[int, ColumnStatistics]
    """Statistics by column id, which predicates use too."""


def supports(data_type: DataType) -> bool:
    """Return whether columns of the type can have statistics."""
    return data_type.root not in _UNSUPPORTED


def parse_statistics_columns(value: str | None, schema: Schema) -> tuple[int, ...]:
    """Return the column indexes of `table.statistics.columns`: `*`, or names between commas."""
    if value is None:
        return ()
    if value.strip() == "*":
        return tuple(i for i, c in enumerate(schema.columns) if supports(c.data_type))
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names:
        raise _config_error(value, "names no column; give names or *, or leave the property out")
    for name in names:
        if name not in schema.names:
            raise _config_error(value, f"names {name!r}; columns are {', '.join(schema.names)}")
        if not supports(schema.columns[schema.index_of(name)].data_type):
            raise _config_error(
                value, f"names {name!r}; BYTES, BINARY, ARRAY, MAP and ROW have no statistics"
            )
    return tuple(schema.index_of(name) for name in dict.fromkeys(names))


def read_statistics(view: Any, start: int, length: int, schema: Schema) -> Statistics:
    """Return the statistics in `view[start:start + length]`; `schema` is that of the batch."""
    reader = Reader(memoryview(view), start, start + length)
    version = reader.number(b.BOOL)
    if version != VERSION:
        raise CorruptRecordError(f"statistics have version {version}, {VERSION} is readable")
    indexes = _read_indexes(reader, schema)
    null_counts = [reader.number(b.I32) for _ in indexes]
    if min(null_counts) < -1:
        raise CorruptRecordError(f"statistics count {min(null_counts)} NULLs")
    columns = [schema.columns[i] for i in indexes]
    types = [column.data_type for column in columns]
    lows, highs = _read_bounds(reader, types), _read_bounds(reader, types)
    reader.finish("the statistics")
    statistics = {}
    for column, nulls, low, high in zip(columns, null_counts, lows, highs, strict=True):
        if low is not None and high is not None and low > high:
            raise CorruptRecordError(f"column {column.name!r} has a minimum above its maximum")
        count = None if nulls < 0 else nulls
        statistics[column.id] = ColumnStatistics(column.data_type, count, low, high)
    return Statistics(statistics)


def build_statistics(batch: pa.RecordBatch, schema: Schema, columns: Sequence[int]) -> bytes:
    """Return the block of a batch for these columns; empty without columns or rows."""
    if not columns or batch.num_rows == 0:
        return b""
    types = [schema.columns[i].data_type for i in columns]
    arrays = [batch.column(i) for i in columns]
    bounds = [_bounds(array, ty) for array, ty in zip(arrays, types, strict=True)]
    out = bytearray(b.BOOL.pack(VERSION) + b.I16.pack(len(columns)))
    for index in columns:
        out += b.I16.pack(index)
    for array in arrays:
        out += b.I32.pack(array.null_count)
    for side in (0, 1):
        row = write_aligned([pair[side] for pair in bounds], types)
        out += b.I32.pack(len(row)) + row
    return bytes(out)


Matcher: TypeAlias = "Callable[[Statistics, int], bool]"
"""Takes the statistics of a batch and its number of records; false only if no record can match."""


def may_match(predicate: Predicate, statistics: Statistics, record_count: int) -> bool:
    """Return false only if no record of the batch can match."""
    return matcher(predicate)(statistics, record_count)


def matcher(predicate: Predicate) -> Matcher:
    """Return a test of batches; the cost of one test hardly depends on the length of lists."""
    if isinstance(predicate, Leaf):
        return _leaf_matcher(predicate)
    join = all if predicate.function is CompoundFunction.AND else any
    children = [matcher(child) for child in predicate.children]
    return lambda statistics, count: join(child(statistics, count) for child in children)


def _leaf_matcher(leaf: Leaf) -> Matcher:
    kinds = {_kind(literal) for literal in leaf.literals}
    ordered = sorted(leaf.literals) if len(kinds) == 1 and None not in kinds else None
    kind = next(iter(kinds), None)
    in_range = None if ordered is None else _range_test(leaf.function, ordered)
    in_float_range = (
        None if ordered is None else _range_test(_LOOSE.get(leaf.function, leaf.function), ordered)
    )

    def test(statistics: Statistics, record_count: int) -> bool:
        column = statistics.columns.get(leaf.field_id)
        if column is None:
            return True
        if leaf.function is LeafFunction.IS_NULL:
            return column.null_count != 0
        low, high = column.minimum, column.maximum
        if column.null_count == record_count and low is None and high is None:
            return False  # every value is NULL, and NULL matches nothing else
        if leaf.function is LeafFunction.IS_NOT_NULL or low is None or high is None:
            return True
        chosen = in_float_range if column.data_type.root in _FLOATS else in_range
        if chosen is None or not (_kind(low) == _kind(high) == kind):
            return True  # values of different kinds have no order
        return chosen(low, high)

    return test


_LOOSE = {
    LeafFunction.LESS_THAN: LeafFunction.LESS_OR_EQUAL,
    LeafFunction.GREATER_THAN: LeafFunction.GREATER_OR_EQUAL,
    LeafFunction.NOT_EQUAL: LeafFunction.IS_NOT_NULL,
    LeafFunction.NOT_IN: LeafFunction.IS_NOT_NULL,
}
"""Weaker tests for floating-point columns: -0.0 may sort below 0.0, and bounds may ignore NaN."""


def _range_test(function: LeafFunction, ordered: list[Any]) -> Callable[[Any, Any], bool]:
    """Return the test whether a value between two bounds can pass; literals are in order."""
    x = ordered[0]
    match function:
        case LeafFunction.EQUAL | LeafFunction.IN:

            def between(low: Any, high: Any) -> bool:
                at = bisect_left(ordered, low)
                return at < len(ordered) and bool(ordered[at] <= high)

            return between
        case LeafFunction.NOT_EQUAL | LeafFunction.NOT_IN:
            excluded = frozenset(ordered)
            return lambda low, high: bool(low != high or low not in excluded)
        case LeafFunction.LESS_THAN:
            return lambda low, high: bool(low < x)
        case LeafFunction.LESS_OR_EQUAL:
            return lambda low, high: bool(low <= x)
        case LeafFunction.GREATER_THAN:
            return lambda low, high: bool(high > x)
        case LeafFunction.GREATER_OR_EQUAL:
            return lambda low, high: bool(high >= x)
        case LeafFunction.STARTS_WITH if isinstance(x, str):
            return lambda low, high: bool(high >= x and (low <= x or low.startswith(x)))
        case _:
            return lambda low, high: True


def _kind(value: Value) -> type | None:
    """Return the kind of values that a value can be ordered among, None for NaN."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return int if _is_number(value) else type(value)


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _read_indexes(reader: Reader, schema: Schema) -> list[int]:
    count = reader.number(b.I16)
    if not 1 <= count <= len(schema.columns):
        raise CorruptRecordError(
            f"statistics have {count} columns, the schema has {len(schema.columns)}"
        )
    indexes = [reader.number(b.I16) for _ in range(count)]
    if len(set(indexes)) != count:
        raise CorruptRecordError("statistics name a column twice")
    for index in indexes:
        if not 0 <= index < len(schema.columns):
            raise CorruptRecordError(
                f"statistics name column {index}, the schema has {len(schema.columns)}"
            )
        column = schema.columns[index]
        if not supports(column.data_type):
            raise CorruptRecordError(f"{column.data_type} of {column.name!r} has no statistics")
    return indexes


def _read_bounds(reader: Reader, types: Sequence[DataType]) -> list[Value]:
    size = reader.number(b.I32)
    if size == 0:
        return [None] * len(types)
    start = reader.take(size)
    return read_aligned(reader.view, start, reader.pos, types)


def _bounds(array: pa.Array, data_type: DataType) -> tuple[Value, Value]:
    """Return minimum and maximum of a column, (None, None) if they are unknown or unsafe."""
    if data_type.root is Root.CHAR or array.null_count == len(array):
        return None, None
    if data_type.root in _FLOATS:
        return _float_bounds(array)
    pair = pc.min_max(array)
    ends = pa.array([pair["min"], pair["max"]], array.type)
    if data_type.root is Root.STRING:
        if pc.max(pc.binary_length(ends)).as_py() > TEXT_BOUND_BYTES_MAX:
            return None, None
    elif data_type.root is Root.TIME and not _whole_milliseconds(ends):
        return None, None
    low, high = values_of(ends, data_type)
    return low, high


def _float_bounds(array: pa.Array) -> tuple[float, float]:
    """Return bounds with NaN as the largest number and -0.0 below 0.0."""
    nan = pc.is_nan(array)
    numbers = pc.min_max(array.filter(pc.invert(nan)))
    if numbers["min"].as_py() is None:
        return math.nan, math.nan
    low, high = numbers["min"].as_py(), numbers["max"].as_py()
    if pc.any(nan).as_py():
        high = math.nan
    return (-0.0 if low == 0 else low), (0.0 if high == 0 else high)


def _whole_milliseconds(ends: pa.Array) -> bool:
    """Return whether times have whole milliseconds, the unit of a bound."""
    per_milli = {"us": 1_000, "ns": 1_000_000}.get(ends.type.unit, 1)
    return per_milli == 1 or all(v % per_milli == 0 for v in ends.cast(pa.int64()).to_pylist())


def _config_error(value: str, reason: str) -> ConfigError:
    return ConfigError(f"table.statistics.columns = {value!r} {reason}")
