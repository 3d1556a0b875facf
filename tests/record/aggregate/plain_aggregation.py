"""The fold in plain Python: the oracle for the kernels and for the code around them.

It folds one record at a time, one column at a time, with the Python objects of Arrow values.
Bitmaps and sketches are united by the same libraries; tests compare their content.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any, NamedTuple

import numpy as np

from zufluss.model.aggregate import BY, DELIMITER, IGNORE_RETRACT, LIMIT, OVERFLOW, AggFunction
from zufluss.model.merge import MergeMode
from zufluss.model.schema import Column, Schema
from zufluss.model.types import DecimalType, Root
from zufluss.record.aggregate.functions import RefusedValue
from zufluss.record.aggregate.opcodes import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from zufluss.record.aggregate.sketches import SKETCHES

_BITS = {Root.TINYINT: 8, Root.SMALLINT: 16, Root.INTEGER: 32, Root.BIGINT: 64}
_EXACT = Context(prec=100, rounding=ROUND_HALF_UP)

Row = tuple[Any, ...]
Change = tuple[tuple[int, Row], ...]
"""Rows of the changelog that belong together, with their kinds."""


class Step(NamedTuple):
    """One value on its way into a state."""

    column: Column
    function: AggFunction
    mode: MergeMode
    exists: bool
    """The key has a row."""
    state: Any
    value: Any
    by_state: Any
    """Of the column that decides, for `max_by` and `min_by`."""
    by_value: Any


class PlainAggregation:
    """The rows of a table by key, changed by puts."""

    def __init__(self, schema: Schema, *, deletes: bool = False) -> None:
        self._schema = schema
        self._deletes = deletes
        self._keys = [schema.index_of(name) for name in schema.primary_key]
        self.rows: dict[Row, Row] = {}
        """By key."""

    def put(
        self,
        records: Iterable[Row],
        mode: MergeMode = MergeMode.AGGREGATE,
        targets: Set[int] | None = None,
    ) -> list[tuple[int, Row]]:
        """Fold all records or none; returns the changelog. A record of only a key is a delete.

        Updates that change nothing are left out, unless there is no other change: then the last
        one stays.
        """
        before = dict(self.rows)
        try:
            found = [change for record in records for change in self._put(record, mode, targets)]
        except RefusedValue:
            self.rows = before
            raise
        kept = [change for change in found if not _is_idle(change)]
        return [row for change in kept or found[-1:] for row in change]

    def _put(self, record: Row, mode: MergeMode, targets: Set[int] | None) -> list[Change]:
        delete = len(record) < len(self._schema.columns)
        key = record if delete else tuple(record[i] for i in self._keys)
        old = self.rows.get(key)
        if delete:
            return self._delete(key, old, targets)
        new = self._after(old, record, mode, targets)
        self.rows[key] = new
        if old is None:
            return [((INSERT, new),)]
        return [((UPDATE_BEFORE, old), (UPDATE_AFTER, new))]

    def _delete(self, key: Row, old: Row | None, targets: Set[int] | None) -> list[Change]:
        if old is None or not self._deletes:
            return []
        others = () if targets is None else set(range(len(old))) - targets
        if all(old[i] is None for i in others):
            del self.rows[key]
            return [((DELETE, old),)]
        assert targets is not None
        kept = {*others, *self._keys}
        new = self.rows[key] = tuple(v if i in kept else None for i, v in enumerate(old))
        return [((UPDATE_BEFORE, old), (UPDATE_AFTER, new))]

    def _after(
        self, old: Row | None, record: Row, mode: MergeMode, targets: Set[int] | None
    ) -> Row:
        values: list[Any] = []
        for i, column in enumerate(self._schema.columns):
            state = None if old is None else old[i]
            if i in self._keys:
                values.append(record[i])
            elif targets is not None and i not in targets:
                values.append(state)
            else:
                values.append(self._value(column, state, old, record, record[i], mode))
        return tuple(values)

    def _value(
        self,
        column: Column,
        state: Any,
        old: Row | None,
        record: Row,
        value: Any,
        mode: MergeMode,
    ) -> Any:
        function = column.agg_function
        assert function is not None
        by = function.parameter(BY)
        j = None if by is None else self._schema.index_of(by)
        step = Step(
            column,
            function,
            mode,
            old is not None,
            state,
            value,
            None if j is None or old is None else old[j],
            None if j is None else record[j],
        )
        return after(step)


def after(step: Step) -> Any:
    """Return the state after a value."""
    name = step.function.type
    if step.mode is MergeMode.RETRACT:
        return _taken_back(step)
    if name == "count" and step.mode is MergeMode.AGGREGATE:
        return _whole((step.state or 0) + (step.value is not None), step)
    if name == "last_value":
        return step.value
    if name in ("max_by", "min_by"):
        return _by(step)
    if step.value is None:
        return step.state
    if step.state is None:
        return _first(step)
    return _added(step)


def _by(step: Step) -> Any:
    if not step.exists:
        return step.value
    if step.by_value is None:
        return step.state
    if step.by_state is None:
        return step.value
    first, second = rank(step.by_state), rank(step.by_value)
    wins = second >= first if step.function.type == "max_by" else second <= first
    return step.value if wins else step.state


def _first(step: Step) -> Any:
    name, value = step.function.type, step.value
    if name in ("listagg", "string_agg"):
        return _listed([], step)
    if name in ("array_agg", "collect"):
        return _collected([], step)
    if name in SKETCHES:
        function = SKETCHES[name](step.column).function
        assert function is not None
        return function.first(value, merging=False)
    return value


def _added(step: Step) -> Any:
    name, state, value = step.function.type, step.state, step.value
    if name == "last_value_ignore_nulls":
        return value
    if name in ("first_value", "first_value_ignore_nulls"):
        return state
    if name in ("max", "bool_or"):
        return value if rank(value) > rank(state) else state
    if name in ("min", "bool_and"):
        return value if rank(value) < rank(state) else state
    if name in ("sum", "count", "product"):
        with np.errstate(all="ignore"):
            one, other = _exact(state, step), _exact(value, step)
            return _whole(one * other if name == "product" else one + other, step)
    if name in ("listagg", "string_agg"):
        return _listed([state], step)
    if name in ("array_agg", "collect"):
        return _collected(state, step)
    function = SKETCHES[name](step.column).function
    assert function is not None
    return function.add(state, value, merging=False)


def _taken_back(step: Step) -> Any:
    name, state, value = step.function.type, step.state, step.value
    if step.function.parameter(IGNORE_RETRACT) == "true":
        return state
    if name == "count":
        return _whole((state or 0) - (value is not None), step)
    if name not in ("sum", "product"):
        raise RefusedValue(f"{name} cannot take a value back")
    if value is None:
        return state
    if name == "sum":
        with np.errstate(all="ignore"):
            return _whole(_exact(state or 0, step) - _exact(value, step), step)
    if state is None or value == 0:
        raise RefusedValue("no product, or divided by 0")
    if step.column.data_type.root in _BITS:
        if state % value:
            raise RefusedValue("inexact")
        return _whole(state // value, step)
    if isinstance(state, Decimal):
        return _whole(_EXACT.divide(state, value), step)
    with np.errstate(all="ignore"):
        return float(_exact(state, step) / _exact(value, step))


# --- numbers -----------------------------------------------------------------------------------


def _exact(value: Any, step: Step) -> Any:
    """Return the number in a form that computes as its column type does."""
    root = step.column.data_type.root
    if root is Root.FLOAT:
        return np.float32(value)
    if root is Root.DOUBLE:
        return np.float64(value)
    return _Wide(value) if root is Root.DECIMAL else value


class _Wide:
    """A decimal that keeps all its digits."""

    def __init__(self, value: Any) -> None:
        self.value = Decimal(value)

    def __add__(self, other: _Wide) -> Decimal:
        return _EXACT.add(self.value, other.value)

    def __sub__(self, other: _Wide) -> Decimal:
        return _EXACT.subtract(self.value, other.value)

    def __mul__(self, other: _Wide) -> Decimal:
        return _EXACT.multiply(self.value, other.value)


def _whole(result: Any, step: Step) -> Any:
    """Return a computed number as a value of the column; raises `RefusedValue` beyond its type."""
    data_type = step.column.data_type
    if isinstance(data_type, DecimalType):
        rounded = result.quantize(Decimal(1).scaleb(-data_type.scale), context=_EXACT)
        if abs(rounded) >= Decimal(10) ** (data_type.precision - data_type.scale):
            raise RefusedValue(f"beyond {data_type}")
        return rounded
    if data_type.root not in _BITS:
        return float(result)
    half = 1 << (_BITS[data_type.root] - 1)
    if -half <= result < half:
        return result
    if step.function.parameter(OVERFLOW) == "wrap":
        return (result + half) % (2 * half) - half
    raise RefusedValue(f"beyond {data_type}")


def rank(value: Any) -> Any:
    """Return a sort key of the value: −0.0 before 0.0, NaN last."""
    if isinstance(value, float):
        return (True, 0.0, 1.0) if math.isnan(value) else (False, value, math.copysign(1, value))
    return value.encode() if isinstance(value, str) else value


def _is_idle(change: Change) -> bool:
    """Return whether a change is an update that changes nothing."""
    return len(change) == 2 and _same(change[0][1], change[1][1])


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Return whether two rows have the same bits."""
    return all(_marked(a) == _marked(b) for a, b in zip(old, new, strict=True))


def _marked(value: Any) -> Any:
    return np.float64(value).tobytes() if isinstance(value, float) else value


# --- texts and arrays --------------------------------------------------------------------------


def _fits(size: int, default: int, step: Step) -> bool:
    text = step.function.parameter(LIMIT)
    if size <= (default if text is None else int(text)):
        return True
    if step.function.parameter(OVERFLOW) != "truncate":
        raise RefusedValue("beyond the limit")
    return False


def _listed(texts: list[str], step: Step) -> str | None:
    delimiter = step.function.parameter(DELIMITER) or ","
    merging = step.mode is MergeMode.MERGE_STATE
    parts = step.value.split(delimiter) if merging else [step.value]
    if _fits(len(delimiter.join([*texts, step.value]).encode()), 1 << 20, step):
        return delimiter.join([*texts, step.value])
    for part in parts:
        if _fits(len(delimiter.join([*texts, part]).encode()), 1 << 20, step):
            texts = [delimiter.join([*texts, part])]
    return texts[0] if texts else None


def _collected(state: list[Any], step: Step) -> list[Any]:
    joined = [*state, *step.value]
    if step.function.type == "collect":
        joined = list({repr(element): element for element in joined}.values())
    if _fits(len(joined), 100_000, step):
        return joined
    return joined[: int(step.function.parameter(LIMIT) or 100_000)]
