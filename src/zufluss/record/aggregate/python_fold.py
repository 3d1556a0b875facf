"""The fold of columns whose functions are in Python: texts, arrays, bitmaps, sketches.

`fold_in_python` walks over the records as the kernel does, for one column, with Python values:

| column | Python value | stored as |
|---|---|---|
| texts, bytes | bytes | a place in the data of the rows |
| ARRAY | numbers of elements of the source arrays | a place, once they are encoded |
| DECIMAL | unscaled integer | 16 bytes in the cells |

The changelog holds the value of a key before and after every record, so the bytes of a put grow
with the size of a state times the records of its key, up to `RESULT_BYTES_MAX`. If only the last
row of each key is needed (`RecordSteps.last_only`), states in between are dropped at once, and
there is no limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from zufluss.model.types import Root
from zufluss.record.aggregate import opcodes as op
from zufluss.record.aggregate.arrays import ElementCollector
from zufluss.record.aggregate.functions import RefusedValue, ValueFunction
from zufluss.record.kernels.row_read import NULLS, PLACED
from zufluss.record.rows.cells import LocatedRows
from zufluss.record.rows.codec import RowCodec
from zufluss.record.slices import Bytes, Positions

RESULT_BYTES_MAX: Final = 256 << 20
"""Bytes of the values that one put computes, all columns together, without stored rows."""
TOO_MUCH: Final = (
    "what this put makes of it has more than {0} bytes, since each of its changes has whole values "
    "in it; send fewer rows at a time, by a smaller client.writer.batch-size, fewer of a key by "
    "pre_aggregate, or lower the limit of the column"
)
_ELEMENT_BYTES: Final = 32
"""Bytes that an element of an array counts for in that sum."""


class RecordSteps(NamedTuple):
    """The result of the kernel `script`, as Python lists."""

    new: list[int]
    prev: list[int]
    at: list[int]
    kinds: Bytes
    keep: Bytes
    """Whether a result row stays; the fold sets 1 for rows that change."""
    last_only: bool
    """Whether only the last row of each key is needed."""


class ByteBudget:
    """Bytes that a put may still compute."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, value: Any) -> None:
        """Count a computed value; raises `RefusedValue` if the budget is exceeded."""
        if isinstance(value, tuple):
            self._left -= _ELEMENT_BYTES * len(value)
        elif isinstance(value, bytes):
            self._left -= len(value)
        if self._left < 0:
            raise RefusedValue(TOO_MUCH.format(self._most))


class RefusedRecord(Exception):
    """A function refused the value of a record."""

    def __init__(self, record: int, reason: str) -> None:
        super().__init__(reason)
        self.record = record


class FoldCells(NamedTuple):
    """The cells that a fold reads and writes."""

    codec: RowCodec
    sources: LocatedRows
    results: LocatedRows


class FunctionCall(NamedTuple):
    """The function of a column, and how to call it."""

    function: ValueFunction
    merging: bool
    nullable: bool

    def after(self, state: Any, value: Any) -> Any:
        """Return the state after a value; None is NULL."""
        if value is None:
            return state
        if state is not None:
            return self.function.add(state, value, merging=self.merging)
        first = self.function.first(value, merging=self.merging)
        if first is None and not self.nullable:
            raise RefusedValue(op.FAULTS[op.NULL_STATE])
        return first


def fold_in_python(
    cells: FoldCells,
    steps: RecordSteps,
    column: int,
    function: ValueFunction,
    merging: bool,
    budget: ByteBudget,
) -> Bytes | None:
    """Write one column of the result rows.

    Returns the bytes to append to the data of the rows, which the column's places point into; None
    if the column has no places. Raises `RefusedRecord`.
    """
    data_type = cells.codec.schema.columns[column].data_type
    root, call = data_type.root, FunctionCall(function, merging, data_type.nullable)
    if root is Root.DECIMAL:
        values = _walk(steps, cells.sources.count, _decimals(cells, column), call, budget)
        _write_decimals(cells, column, values)
        return None
    if root is Root.ARRAY:
        assert isinstance(function, ElementCollector)
        arrays: pa.ListArray = cells.codec.arrays(cells.sources, [column])[0]
        function.begin(_marks(cells.codec, arrays, column) if function.distinct else ())
        values = _walk(steps, cells.sources.count, _elements(arrays), call, budget)
        return _write_arrays(cells, column, arrays, values)
    values = _walk(steps, cells.sources.count, _bytes(cells, column), call, budget)
    return _write_bytes(cells, column, values)


def _walk(
    steps: RecordSteps,
    sources: int,
    read: Callable[[int], Any],
    call: FunctionCall,
    budget: ByteBudget,
) -> list[Any]:
    """Return the value of each result row; None is NULL."""
    values: list[Any] = [None] * len(steps.kinds)
    for i, (new, prev, at) in enumerate(zip(steps.new, steps.prev, steps.at, strict=True)):
        if at < 0:
            continue
        state = None if prev < 0 else read(prev) if prev < sources else values[prev - sources]
        kind = steps.kinds[at]
        if kind in (op.UPDATE_BEFORE, op.DELETE):
            values[at] = state
            if kind == op.DELETE:
                continue
            at += 1
        try:
            after = None if new < 0 else call.after(state, read(new))
            if steps.last_only and prev >= sources:
                values[prev - sources] = None
            elif after is not state and not steps.last_only:
                budget.take(after)
        except RefusedValue as e:
            raise RefusedRecord(i, str(e)) from None
        values[at] = after
        if kind == op.UPDATE_BEFORE and after != state:
            steps.keep[at - 1 : at + 1] = 1
    return values


# --- NULLs -------------------------------------------------------------------------------------


def _write_nulls(cells: FoldCells, column: int, values: list[Any]) -> Any:
    """Write the validity of a column; returns which values are not NULL."""
    rows, plan = cells.results, cells.codec.plan
    there = np.fromiter((value is not None for value in values), np.bool_, len(values))
    stride = (rows.count + 63) // 64 * 8
    at = 8 * rows.count * plan.slots[-1] + column * stride
    bits = np.packbits(there, bitorder="little")
    rows.cells[at : at + stride] = 0
    rows.cells[at : at + len(bits)] = bits
    rows.facts[column, NULLS] = len(values) - np.count_nonzero(there)
    return there


# --- decimals ----------------------------------------------------------------------------------


def _decimals(cells: FoldCells, column: int) -> Callable[[int], int | None]:
    sources, slot = cells.sources, cells.codec.plan.slots[column]
    stride = (sources.count + 63) // 64 * 8
    at = 8 * sources.count * slot
    bits = 8 * sources.count * cells.codec.plan.slots[-1] + column * stride

    def read(row: int) -> int | None:
        if not sources.cells[bits + (row >> 3)] >> (row & 7) & 1:
            return None
        word = sources.cells[at + 16 * row : at + 16 * row + 16].tobytes()
        return int.from_bytes(word, "little", signed=True)

    return read


def _write_decimals(cells: FoldCells, column: int, values: list[int | None]) -> None:
    _write_nulls(cells, column, values)
    at = 8 * cells.results.count * cells.codec.plan.slots[column]
    words = b"".join((value or 0).to_bytes(16, "little", signed=True) for value in values)
    cells.results.cells[at : at + len(words)] = np.frombuffer(words, np.uint8)


# --- texts and bytes ---------------------------------------------------------------------------


def _bytes(cells: FoldCells, column: int) -> Callable[[int], bytes | None]:
    data = cells.sources.rows.data
    starts, ends = (a.tolist() for a in cells.sources.places(cells.codec.plan, column))

    def read(row: int) -> bytes | None:
        return None if starts[row] < 0 else data[starts[row] : ends[row]].tobytes()

    return read


def _write_bytes(cells: FoldCells, column: int, values: list[bytes | None]) -> Bytes:
    """Write the values; each state once, although it mostly stands in two rows."""
    base = len(cells.results.rows.data)
    places: dict[int, int] = {}
    parts: list[bytes] = []
    starts, end = np.full(len(values), -1, np.int64), base
    for i, value in enumerate(values):
        if value is None:
            continue
        if id(value) not in places:
            places[id(value)] = end
            parts.append(value)
            end += len(value)
        starts[i] = places[id(value)]
    sizes = np.fromiter((len(value or b"") for value in values), np.int64, len(values))
    _write_places(cells, column, values, starts, starts + sizes)
    return np.frombuffer(b"".join(parts), np.uint8)


def _write_places(
    cells: FoldCells, column: int, values: list[Any], starts: Positions, ends: Positions
) -> None:
    there = _write_nulls(cells, column, values)
    begin, behind = cells.results.places(cells.codec.plan, column)
    begin[:], behind[:] = np.where(there, starts, -1), np.where(there, ends, -1)
    cells.results.facts[column, PLACED] = int((behind - begin).sum())


# --- arrays ------------------------------------------------------------------------------------


def _elements(arrays: pa.ListArray) -> Callable[[int], tuple[int, ...] | None]:
    offsets = arrays.offsets.tolist()
    valid = arrays.is_valid().to_pylist()

    def read(row: int) -> tuple[int, ...] | None:
        return tuple(range(offsets[row], offsets[row + 1])) if valid[row] else None

    return read


def _marks(codec: RowCodec, arrays: pa.ListArray, column: int) -> list[int]:
    """Return a number for each element that elements with equal bytes share."""
    marks: dict[bytes | None, int] = {}
    elements = codec.encoded_elements(arrays.values, column).tolist()
    return [marks.setdefault(element, len(marks)) for element in elements]


def _write_arrays(
    cells: FoldCells, column: int, arrays: pa.ListArray, values: list[tuple[int, ...] | None]
) -> Bytes:
    """Write the values; each state once, although it mostly stands in two rows."""
    numbers: dict[int, int] = {}
    states: list[tuple[int, ...]] = []
    which = np.zeros(len(values), np.int64)
    for i, value in enumerate(values):
        if value is not None:
            which[i] = numbers.setdefault(id(value), len(states))
            if which[i] == len(states):
                states.append(value)
    if not states:
        _write_places(cells, column, values, which, which)
        return np.empty(0, np.uint8)
    sizes = np.fromiter(map(len, states), np.int64, len(states))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]).astype(np.int32)
    elements = np.fromiter((e for state in states for e in state), np.int64, int(offsets[-1]))
    joined = pa.ListArray.from_arrays(
        pa.array(offsets), arrays.values.take(pa.array(elements)), type=arrays.type
    )
    coded = cells.codec.encoded_values(joined, column)
    base = len(cells.results.rows.data)
    _write_places(cells, column, values, coded.starts[which] + base, coded.ends[which] + base)
    return coded.data
