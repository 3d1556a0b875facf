"""Every function by its name, and the operations of a put on the columns of a schema."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zufluss.errors import AggregationError, InvalidTargetColumnError
from zufluss.model.aggregate import BY, IGNORE_RETRACT, OVERFLOW, AggFunction
from zufluss.model.merge import MergeMode
from zufluss.model.schema import Column, Schema
from zufluss.record.aggregate import kernels as k
from zufluss.record.aggregate.arrays import ARRAYS
from zufluss.record.aggregate.base import Builder, Carried, Outside
from zufluss.record.aggregate.numbers import NUMBERS
from zufluss.record.aggregate.picks import PICKS
from zufluss.record.aggregate.sketches import SKETCHES
from zufluss.record.aggregate.texts import TEXTS

BUILDERS: Final[Mapping[str, Builder]] = MappingProxyType(
    {**NUMBERS, **PICKS, **TEXTS, **ARRAYS, **SKETCHES}
)
"""How every function of `zufluss.model.aggregate` is carried out."""

_BY_ANOTHER = (k.MAX_BY, k.MIN_BY)


class Operations(NamedTuple):
    """What a put does with each column."""

    lines: npt.NDArray[np.int64]
    """The operations of the kernel."""
    order: npt.NDArray[np.int64]
    """The columns in the order they are folded in."""
    outside: Mapping[int, Outside]
    """The functions that are called, by column."""
    merging: bool
    """The rows have states."""


def operations(
    schema: Schema,
    mode: MergeMode,
    targets: Set[int],
    auto_increment: int | None = None,
) -> Operations:
    """The operations of puts that write the columns `targets`; the key is among them.

    `OVERWRITE` is none of its modes. `AggregationError` if a column cannot be taken back.
    """
    lines = np.zeros((len(schema.columns), k.OPS_LINE), np.int64)
    functions: dict[int, Outside] = {}
    for i, column in enumerate(schema.columns):
        if column.name in schema.primary_key:
            lines[i, k.OP] = k.KEY
        elif i == auto_increment and i not in targets:
            lines[i, k.OP] = k.ASSIGN
        elif i not in targets:
            lines[i, k.OP] = k.KEEP
        else:
            _write_line(lines[i], i, column, schema, mode, functions)
    late = np.isin(lines[:, k.OP], _BY_ANOTHER)
    order = np.concatenate([np.flatnonzero(~late), np.flatnonzero(late)])
    return Operations(lines, order, functions, mode is MergeMode.MERGE_STATE)


def _write_line(
    line: npt.NDArray[np.int64],
    index: int,
    column: Column,
    schema: Schema,
    mode: MergeMode,
    functions: dict[int, Outside],
) -> None:
    function = _function(column)
    carried = BUILDERS[function.type](column)
    op, outside = _operation(carried, mode, column, function)
    line[k.OP] = op
    line[k.WRAP] = function.parameter(OVERFLOW) == "wrap"
    if op in _BY_ANOTHER:
        line[k.BY] = schema.index_of(function.parameter(BY) or "")
    if op == k.OUTSIDE and outside is not None:
        functions[index] = outside


def _function(column: Column) -> AggFunction:
    function = column.agg_function
    if function is None or function.type not in BUILDERS:
        named = "no aggregation function" if function is None else f"the function {function.type}"
        raise AggregationError(
            f"column {column.name!r} has {named}, which this version cannot carry out; upgrade it"
        )
    return function


def _operation(
    carried: Carried, mode: MergeMode, column: Column, function: AggFunction
) -> tuple[int, Outside | None]:
    if mode is MergeMode.MERGE_STATE:
        return carried.merge, carried.outside
    if mode is MergeMode.AGGREGATE:
        return carried.add, carried.outside
    if function.parameter(IGNORE_RETRACT) == "true":
        return k.KEEP, None
    if carried.retract is None:
        raise AggregationError(
            f"column {column.name!r} is aggregated by {function.type}, which cannot take a value "
            "back; leave the column out of the put, or set its ignore_retract to true"
        )
    return carried.retract, carried.retracting


def check_targets(schema: Schema, targets: Set[int]) -> None:
    """`InvalidTargetColumnError` if a put of some columns would leave out one that it needs."""
    for i, column in enumerate(schema.columns):
        function = column.agg_function
        if function is None:
            continue
        if function.type == "first_value" and i not in targets:
            raise InvalidTargetColumnError(
                f"column {column.name!r} is aggregated by first_value and must be in every put, "
                "since the first put of a key sets it; write it too, or use "
                "first_value_ignore_nulls"
            )
        by = function.parameter(BY)
        if by is not None and (i in targets) != (schema.index_of(by) in targets):
            raise InvalidTargetColumnError(
                f"column {column.name!r} is aggregated by {function.type} of {by!r}; "
                "a put has both columns or neither"
            )
