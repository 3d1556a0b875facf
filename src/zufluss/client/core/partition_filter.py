"""Partition pruning: partitions in which certainly no row matches a filter are not read.

Only those parts of the filter count that are joined by AND and test nothing but partition keys, and
only keys whose values can be read from the partition name: texts, integers, booleans and dates. A
partition whose name is no value of the key's type is always read.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from zufluss.model.expression import Combination, Expression
from zufluss.model.partition import spec_of
from zufluss.model.predicate import CompoundFunction
from zufluss.model.table import TableInfo
from zufluss.model.types import Root

_READABLE: Final = frozenset(
    {Root.CHAR, Root.STRING, Root.TINYINT, Root.SMALLINT, Root.INTEGER, Root.BIGINT, Root.BOOLEAN}
    | {Root.DATE}
)


def possible_partitions(
    info: TableInfo, filter: Expression | None, names: Collection[str]
) -> set[str]:
    """The names of the partitions that may have matching rows."""
    keys = [k for k in info.partition_keys if info.schema.column(k).data_type.root in _READABLE]
    parts = [part for part in _joined(filter) if part.columns <= set(keys)]
    if not parts or not names:
        return set(names)
    ordered = sorted(names)
    specs = [spec_of(info.partition_keys, name) for name in ordered]
    columns = {k: _values(info, k, [spec[k] for spec in specs]) for k in keys}
    rows = pa.table({**columns, "": pa.array(ordered)})
    strange = [pc.filter(rows[""], values.is_null()) for values in columns.values()]
    for part in parts:
        rows = rows.filter(part.to_arrow(info.schema))
    return {name for column in (rows[""], *strange) for name in column.to_pylist()}


def _joined(filter: Expression | None) -> tuple[Expression, ...]:
    """The parts of the filter that all have to be true."""
    if filter is None:
        return ()
    if isinstance(filter, Combination) and filter.function is CompoundFunction.AND:
        return filter.children
    return (filter,)


def _values(info: TableInfo, key: str, texts: list[str]) -> pa.Array:
    """The values of the key; null where a text is no value of its type."""
    of = info.schema.arrow.field(key).type
    try:
        return pa.array(texts, pa.utf8()).cast(of)
    except pa.ArrowInvalid:
        return pa.array([_value(text, of) for text in texts], of)


def _value(text: str, of: pa.DataType) -> object:
    try:
        return pa.scalar(text).cast(of).as_py()
    except pa.ArrowInvalid:
        return None
