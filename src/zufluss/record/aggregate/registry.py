"""All aggregation functions by name, and the operations of a put on the columns of a schema."""

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
from zufluss.record.aggregate import opcodes as op
from zufluss.record.aggregate.arrays import ARRAYS
from zufluss.record.aggregate.functions import Builder, Implementation, ValueFunction
from zufluss.record.aggregate.numbers import NUMBERS
from zufluss.record.aggregate.picks import PICKS
from zufluss.record.aggregate.sketches import SKETCHES
from zufluss.record.aggregate.texts import TEXTS

BUILDERS: Final[Mapping[str, Builder]] = MappingProxyType(
    {**NUMBERS, **PICKS, **TEXTS, **ARRAYS, **SKETCHES}
)
"""Implementation builders of all functions of `zufluss.model.aggregate`, by name."""

_BY_ANOTHER = (op.MAX_BY, op.MIN_BY)


class Operations(NamedTuple):
    """What a put does with each column."""

    lines: npt.NDArray[np.int64]
    """One line per column, see `opcodes.py`."""
    order: npt.NDArray[np.int64]
    """The columns, in the order in which they are folded."""
    functions: Mapping[int, ValueFunction]
    """The functions in Python, by column."""
    merging: bool
    """Whether the rows hold states instead of input values."""


def operations(
    schema: Schema,
    mode: MergeMode,
    targets: Set[int],
    auto_increment: int | None = None,
) -> Operations:
    """Return the operations of a put that writes the columns `targets`, the key among them.

    The mode `OVERWRITE` does not aggregate and is not allowed. Raises `AggregationError` if the
    mode is `RETRACT` and a column cannot take values back.
    """
    lines = np.zeros((len(schema.columns), op.OPS_LINE), np.int64)
    functions: dict[int, ValueFunction] = {}
    for i, column in enumerate(schema.columns):
        if column.name in schema.primary_key:
            lines[i, op.OP] = op.KEY
        elif i == auto_increment and i not in targets:
            lines[i, op.OP] = op.ASSIGN
        elif i not in targets:
            lines[i, op.OP] = op.KEEP
        else:
            _write_line(lines[i], i, column, schema, mode, functions)
    late = np.isin(lines[:, op.OP], _BY_ANOTHER)
    order = np.concatenate([np.flatnonzero(~late), np.flatnonzero(late)])
    return Operations(lines, order, functions, mode is MergeMode.MERGE_STATE)


def _write_line(
    line: npt.NDArray[np.int64],
    index: int,
    column: Column,
    schema: Schema,
    mode: MergeMode,
    functions: dict[int, ValueFunction],
) -> None:
    function = _function(column)
    implementation = BUILDERS[function.type](column)
    operation, in_python = _operation(implementation, mode, column, function)
    line[op.OP] = operation
    line[op.WRAP] = function.parameter(OVERFLOW) == "wrap"
    if operation in _BY_ANOTHER:
        line[op.BY] = schema.index_of(function.parameter(BY) or "")
    if operation == op.OUTSIDE and in_python is not None:
        functions[index] = in_python


def _function(column: Column) -> AggFunction:
    function = column.agg_function
    if function is None or function.type not in BUILDERS:
        named = "no aggregation function" if function is None else f"the function {function.type}"
        raise AggregationError(
            f"column {column.name!r} has {named}, which this version cannot carry out; upgrade it"
        )
    return function


def _operation(
    implementation: Implementation, mode: MergeMode, column: Column, function: AggFunction
) -> tuple[int, ValueFunction | None]:
    if mode is MergeMode.MERGE_STATE:
        return implementation.merge, implementation.function
    if mode is MergeMode.AGGREGATE:
        return implementation.add, implementation.function
    if function.parameter(IGNORE_RETRACT) == "true":
        return op.KEEP, None
    if implementation.retract is None:
        raise AggregationError(
            f"column {column.name!r} is aggregated by {function.type}, which cannot take a value "
            "back; leave the column out of the put, or set its ignore_retract to true"
        )
    return implementation.retract, implementation.retract_function


def check_targets(schema: Schema, targets: Set[int]) -> None:
    """Raise `InvalidTargetColumnError` if only one of a column and its `by` is written."""
    for i, column in enumerate(schema.columns):
        function = column.agg_function
        if function is None:
            continue
        by = function.parameter(BY)
        if by is not None and (i in targets) != (schema.index_of(by) in targets):
            raise InvalidTargetColumnError(
                f"column {column.name!r} is aggregated by {function.type} of {by!r}; "
                "a put has both columns or neither"
            )
