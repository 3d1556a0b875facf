"""Columns whose functions are called value by value: texts, arrays, bitmaps, sketches.

The same walk over the records as in the kernel, for one column, with Python values. What they are
depends on the type of the column, and so does how they are read and written:

| column | value | kept as |
|---|---|---|
| texts, bytes | bytes | a place in the data of the rows |
| ARRAY | numbers of elements of the given arrays | a place, once they are encoded |
| DECIMAL | unscaled integer | 16 bytes in the cells |

The changelog has the value of a key before and after every record, so what a put makes grows with
the size of a state times the records of its key. There is a limit to that. Who wants the last row
of each key only (`Steps.last_only`) has values in between let go at once, and no limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from zufluss.model.types import Root
from zufluss.record.aggregate import kernels as k
from zufluss.record.aggregate.arrays import Collected
from zufluss.record.aggregate.base import Outside, Refused
from zufluss.record.kernels.row_read import NULLS, PLACED
from zufluss.record.rows.cells import Located
from zufluss.record.rows.codec import RowCodec
from zufluss.record.slices import Bytes, Positions

MADE_BYTES_MAX: Final = 256 << 20
"""Bytes of the values that one put makes, all columns together; rows before it aside."""
TOO_MUCH: Final = (
    "what this put makes of it has more than {0} bytes, since each of its changes has whole values "
    "in it; send fewer rows at a time, by a smaller client.writer.batch-size, fewer of a key by "
    "pre_aggregate, or lower the limit of the column"
)
_ELEMENT_BYTES: Final = 32
"""What an element of an array stands for in that."""


class Steps(NamedTuple):
    """What `kernels.script` said, for Python."""

    new: list[int]
    prev: list[int]
    at: list[int]
    kinds: Bytes
    keep: Bytes
    """Whether a made row stays; set for those that change."""
    last_only: bool
    """Made rows that others start from are not looked at."""


class Room:
    """What may still be made."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, value: Any) -> None:
        """A value is made; raises `Refused` if that is too much."""
        if isinstance(value, tuple):
            self._left -= _ELEMENT_BYTES * len(value)
        elif isinstance(value, bytes):
            self._left -= len(value)
        if self._left < 0:
            raise Refused(TOO_MUCH.format(self._most))


class RefusedRecord(Exception):
    """A function refused the value of a record."""

    def __init__(self, record: int, reason: str) -> None:
        super().__init__(reason)
        self.record = record


class Made(NamedTuple):
    """The made rows, as far as they are known."""

    codec: RowCodec
    given: Located
    rows: Located
    """Room for them."""


class Call(NamedTuple):
    """What is called for a column, and how."""

    function: Outside
    merging: bool
    nullable: bool

    def after(self, state: Any, value: Any) -> Any:
        """The state after a value; None is NULL."""
        if value is None:
            return state
        if state is not None:
            return self.function.add(state, value, merging=self.merging)
        made = self.function.first(value, merging=self.merging)
        if made is None and not self.nullable:
            raise Refused(k.FAULTS[k.NULL_STATE])
        return made


def fold_outside(
    made: Made, steps: Steps, column: int, function: Outside, merging: bool, room: Room
) -> Bytes | None:
    """Make the values of a column; answers bytes that its places are in, behind those there are."""
    data_type = made.codec.schema.columns[column].data_type
    root, call = data_type.root, Call(function, merging, data_type.nullable)
    if root is Root.DECIMAL:
        values = _walk(steps, made.given.count, _decimals(made, column), call, room)
        _write_decimals(made, column, values)
        return None
    if root is Root.ARRAY:
        assert isinstance(function, Collected)
        arrays: pa.ListArray = made.codec.arrays(made.given, [column])[0]
        function.begin(_marks(made.codec, arrays, column) if function.distinct else ())
        values = _walk(steps, made.given.count, _elements(arrays), call, room)
        return _write_arrays(made, column, arrays, values)
    values = _walk(steps, made.given.count, _bytes(made, column), call, room)
    return _write_bytes(made, column, values)


def _walk(
    steps: Steps, given: int, read: Callable[[int], Any], call: Call, room: Room
) -> list[Any]:
    """The value of each made row; None is NULL."""
    values: list[Any] = [None] * len(steps.kinds)
    for i, (new, prev, at) in enumerate(zip(steps.new, steps.prev, steps.at, strict=True)):
        if at < 0:
            continue
        state = None if prev < 0 else read(prev) if prev < given else values[prev - given]
        kind = steps.kinds[at]
        if kind in (k.UPDATE_BEFORE, k.DELETE):
            values[at] = state
            if kind == k.DELETE:
                continue
            at += 1
        try:
            after = None if new < 0 else call.after(state, read(new))
            if steps.last_only and prev >= given:
                values[prev - given] = None
            elif after is not state and not steps.last_only:
                room.take(after)
        except Refused as e:
            raise RefusedRecord(i, str(e)) from None
        values[at] = after
        if kind == k.UPDATE_BEFORE and after != state:
            steps.keep[at - 1 : at + 1] = 1
    return values


# --- NULLs -------------------------------------------------------------------------------------


def _write_nulls(made: Made, column: int, values: list[Any]) -> Any:
    """Write the validity of a column; which values are there."""
    rows, plan = made.rows, made.codec.plan
    there = np.fromiter((value is not None for value in values), np.bool_, len(values))
    stride = (rows.count + 63) // 64 * 8
    at = 8 * rows.count * plan.slots[-1] + column * stride
    bits = np.packbits(there, bitorder="little")
    rows.cells[at : at + stride] = 0
    rows.cells[at : at + len(bits)] = bits
    rows.facts[column, NULLS] = len(values) - np.count_nonzero(there)
    return there


# --- decimals ----------------------------------------------------------------------------------


def _decimals(made: Made, column: int) -> Callable[[int], int | None]:
    given, slot = made.given, made.codec.plan.slots[column]
    stride = (given.count + 63) // 64 * 8
    at, bits = 8 * given.count * slot, 8 * given.count * made.codec.plan.slots[-1] + column * stride

    def read(row: int) -> int | None:
        if not given.cells[bits + (row >> 3)] >> (row & 7) & 1:
            return None
        word = given.cells[at + 16 * row : at + 16 * row + 16].tobytes()
        return int.from_bytes(word, "little", signed=True)

    return read


def _write_decimals(made: Made, column: int, values: list[int | None]) -> None:
    _write_nulls(made, column, values)
    at = 8 * made.rows.count * made.codec.plan.slots[column]
    words = b"".join((value or 0).to_bytes(16, "little", signed=True) for value in values)
    made.rows.cells[at : at + len(words)] = np.frombuffer(words, np.uint8)


# --- texts and bytes ---------------------------------------------------------------------------


def _bytes(made: Made, column: int) -> Callable[[int], bytes | None]:
    data = made.given.rows.data
    starts, ends = (a.tolist() for a in made.given.places(made.codec.plan, column))

    def read(row: int) -> bytes | None:
        return None if starts[row] < 0 else data[starts[row] : ends[row]].tobytes()

    return read


def _write_bytes(made: Made, column: int, values: list[bytes | None]) -> Bytes:
    """Each of them once, although a state mostly stands in two rows."""
    base = len(made.rows.rows.data)
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
    _write_places(made, column, values, starts, starts + sizes)
    return np.frombuffer(b"".join(parts), np.uint8)


def _write_places(
    made: Made, column: int, values: list[Any], starts: Positions, ends: Positions
) -> None:
    there = _write_nulls(made, column, values)
    begin, behind = made.rows.places(made.codec.plan, column)
    begin[:], behind[:] = np.where(there, starts, -1), np.where(there, ends, -1)
    made.rows.facts[column, PLACED] = int((behind - begin).sum())


# --- arrays ------------------------------------------------------------------------------------


def _elements(arrays: pa.ListArray) -> Callable[[int], tuple[int, ...] | None]:
    offsets = arrays.offsets.tolist()
    valid = arrays.is_valid().to_pylist()

    def read(row: int) -> tuple[int, ...] | None:
        return tuple(range(offsets[row], offsets[row + 1])) if valid[row] else None

    return read


def _marks(codec: RowCodec, arrays: pa.ListArray, column: int) -> list[int]:
    """Numbers of elements that are the same for the same bytes."""
    marks: dict[bytes | None, int] = {}
    elements = codec.encoded_elements(arrays.values, column).tolist()
    return [marks.setdefault(element, len(marks)) for element in elements]


def _write_arrays(
    made: Made, column: int, arrays: pa.ListArray, values: list[tuple[int, ...] | None]
) -> Bytes:
    """Each of them once, although a state mostly stands in two rows."""
    numbers: dict[int, int] = {}
    states: list[tuple[int, ...]] = []
    which = np.zeros(len(values), np.int64)
    for i, value in enumerate(values):
        if value is not None:
            which[i] = numbers.setdefault(id(value), len(states))
            if which[i] == len(states):
                states.append(value)
    if not states:
        _write_places(made, column, values, which, which)
        return np.empty(0, np.uint8)
    sizes = np.fromiter(map(len, states), np.int64, len(states))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]).astype(np.int32)
    elements = np.fromiter((e for state in states for e in state), np.int64, int(offsets[-1]))
    joined = pa.ListArray.from_arrays(
        pa.array(offsets), arrays.values.take(pa.array(elements)), type=arrays.type
    )
    coded = made.codec.encoded_values(joined, column)
    base = len(made.rows.rows.data)
    _write_places(made, column, values, coded.starts[which] + base, coded.ends[which] + base)
    return coded.data
