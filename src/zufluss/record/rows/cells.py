"""Checked rows as cells, and Arrow columns from them.

`read_rows` runs the row kernel and then the array kernels on each nested column: all arrays of a
column become one child column, and so on down. Everything is checked then; `to_arrow` only copies
texts and bytes and builds the arrays. A fault names the record and the field, at any depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.errors import CorruptRecordError
from zufluss.model.types import ArrayType, MapType
from zufluss.record.kernels import array_read
from zufluss.record.kernels import row_read as k
from zufluss.record.rows.plan import Plan
from zufluss.record.slices import Bytes, Positions, Slices

Counts: TypeAlias = npt.NDArray[np.int32]
_ALL: Counts = np.empty(0, np.int32)
_ARROW_BYTES_MAX = 2**31 - 1


class CellFault(Exception):
    """One row, array or map is malformed; `index` is its number among those read together."""

    def __init__(self, index: int, text: str) -> None:
        super().__init__(text)
        self.index = index
        self.text = text


@dataclass(frozen=True, slots=True)
class Inner:
    """The content of a nested column."""

    offsets: Counts
    """Arrow offsets of arrays and maps; empty for a ROW."""
    parts: tuple[LocatedRows, ...]
    """The elements of an ARRAY; keys and values of a MAP; or the fields of a ROW together."""


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """Checked rows as cells: their numbers, and the places of their texts and bytes."""

    rows: Slices
    """The rows; their buffer must not change while the cells are in use."""
    field_counts: Counts
    """Number of fields of each row, empty if all have the schema's."""
    count: int
    """Number of rows, absent ones included."""
    cells: Bytes
    """The cells, see `kernels/row_read.py`."""
    facts: npt.NDArray[np.int64]
    """Per field: NULLs, bytes in places, and the first timestamp that Arrow cannot hold."""
    inner: dict[int, Inner] = field(default_factory=dict)
    """The content of nested columns."""
    shared: bool = False
    """Whether places may overlap, so that their bytes can be more than the buffer has."""

    def places(self, plan: Plan, index: int) -> tuple[Positions, Positions]:
        """Return starts (−1 = NULL) and ends of a field of texts, bytes or nested values."""
        at, size = 8 * self.count * plan.slots[index], 8 * self.count
        starts, ends = self.cells[at : at + size], self.cells[at + size : at + 2 * size]
        return starts.view(np.int64), ends.view(np.int64)


def read_rows(rows: Slices, plan: Plan, counts: Counts = _ALL) -> LocatedRows:
    """Check rows and their nested values; raises `CellFault`."""
    located = empty_cells(rows, counts, rows.count, plan)
    fault, row, index, detail = k.locate(*rows, counts, plan.program, located.cells, located.facts)
    if fault:
        raise _row_fault(fault, row, index, detail, plan)
    if plan.inner:
        read_inner(located, plan)
    return located


def read_among(rows: Slices, plan: Plan, at: Positions, room: LocatedRows) -> None:
    """Check rows, without their nested values, and write them as the rows `at` of `room`."""
    fault, row, index, detail = k.locate_among(
        *rows, plan.program, room.cells, room.facts, at, room.count
    )
    if fault:
        raise _row_fault(fault, row, index, detail, plan)


def _row_fault(fault: int, row: int, index: int, detail: int, plan: Plan) -> CellFault:
    text = k.FAULTS[fault].format(detail)
    if fault >= k.F_CUT:
        text = f"field {index} ({plan.types[index]}): {text}"
    return CellFault(row, text)


def empty_cells(
    rows: Slices, counts: Counts, count: int, plan: Plan, *, shared: bool = False
) -> LocatedRows:
    """Return cells for `count` rows, not yet filled."""
    fields = len(plan.types)
    size = 8 * count * plan.slots[-1] + fields * ((count + 63) // 64 * 8)
    cells, facts = np.empty(size, np.uint8), np.empty((fields, k.FACTS), np.int64)
    return LocatedRows(rows, counts, count, cells, facts, {}, shared)


def read_inner(located: LocatedRows, plan: Plan) -> None:
    """Check the nested values of rows and read them as cells."""
    for index, inner in plan.inner.items():
        starts, ends = located.places(plan, index)
        slices, data_type = Slices(located.rows.data, starts, ends), plan.types[index]
        try:
            if isinstance(data_type, ArrayType):
                located.inner[index] = _read_arrays(slices, inner[0])
            elif isinstance(data_type, MapType):
                located.inner[index] = _read_maps(slices, inner)
            else:
                located.inner[index] = Inner(_ALL, (read_rows(slices, inner[0]),))
        except CellFault as e:
            raise CellFault(e.index, f"field {index} ({data_type}): {e.text}") from None


def _read_arrays(arrays: Slices, plan: Plan) -> Inner:
    offsets = np.empty(arrays.count + 1, np.int32)
    source = plan.program[0, k.SOURCE]
    fault, index, detail = array_read.open_arrays(*arrays, source, offsets)
    if fault:
        raise CellFault(index, k.FAULTS[fault].format(detail))
    located = empty_cells(arrays, _ALL, int(offsets[-1]), plan)
    fault, index, detail = array_read.read_arrays(
        *arrays, offsets, plan.program, located.cells, located.facts
    )
    if fault:
        raise CellFault(index, k.FAULTS[fault].format(detail))
    if plan.inner:
        try:
            read_inner(located, plan)
        except CellFault as e:
            raise CellFault(_owner(offsets, e.index), e.text) from None
    return Inner(offsets, (located,))


def _owner(offsets: Counts, element: int) -> int:
    return int(np.searchsorted(offsets, element, "right")) - 1


def _read_maps(maps: Slices, plans: Sequence[Plan]) -> Inner:
    middles = np.empty((2, maps.count), np.int64)
    fault, index, detail = array_read.open_maps(*maps, middles)
    if fault:
        raise CellFault(index, k.FAULTS[fault].format(detail))
    keys = _read_arrays(Slices(maps.data, middles[0], middles[1]), plans[0])
    values = np.where(maps.starts < 0, -1, middles[1])
    items = _read_arrays(Slices(maps.data, values, maps.ends), plans[1])
    if not np.array_equal(keys.offsets, items.offsets):
        unlike = int(np.flatnonzero(keys.offsets != items.offsets)[0]) - 1
        count = keys.offsets[unlike + 1] - keys.offsets[unlike]
        raise CellFault(unlike, k.FAULTS[k.F_MAP_COUNTS].format(count))
    return Inner(keys.offsets, (*keys.parts, *items.parts))


def to_arrow(
    located: LocatedRows, plan: Plan, what: str = "record", fields: Sequence[int] | None = None
) -> list[pa.Array]:
    """Return the columns of rows, or only `fields`, as Arrow arrays.

    Raises `CorruptRecordError` for a timestamp that Arrow cannot hold; the error calls a row
    `what`.
    """
    buffer, count = pa.py_buffer(located.cells), located.count
    facts = located.facts.tolist()
    stride = (count + 63) // 64 * 8
    valid_at, column = 8 * count * plan.slots[-1], 8 * count
    arrays = []
    for i in range(len(plan.arrow)) if fields is None else fields:
        arrow = plan.arrow[i]
        nulls, placed, beyond, _ = facts[i]
        valid = buffer.slice(valid_at + i * stride, stride) if nulls else None
        if plan.sinks[i] < k.TEXT:
            if beyond:
                raise beyond_arrow(f"{what} {beyond - 1}", i, plan)
            values = buffer.slice(column * plan.slots[i], count * plan.widths[i] or stride)
            arrays.append(pa.Array.from_buffers(arrow, count, [valid, values], nulls))
        elif plan.sinks[i] == k.NESTED:
            arrays.append(_nested_arrow(located.inner[i], plan, i, count, valid, nulls))
        else:
            body = _gathered(located, plan, i, placed)
            arrays.append(pa.Array.from_buffers(arrow, count, [valid, *body], nulls))
    return arrays


def beyond_arrow(where: str, index: int, plan: Plan) -> CorruptRecordError:
    """Return the error for a timestamp that an Arrow column cannot hold."""
    return CorruptRecordError(
        f"{where}: field {index} ({plan.types[index]}): "
        f"a timestamp is beyond what Arrow holds in its unit"
    )


def _gathered(located: LocatedRows, plan: Plan, index: int, placed: int) -> list[pa.Buffer]:
    """Return the Arrow buffers of a column of texts or bytes, without its validity."""
    count, slot = located.count, plan.slots[index]
    if plan.sinks[index] == k.PADDED:
        width = plan.widths[index]
        out = np.zeros(width * count, np.uint8)
        k.gather_padded(located.rows.data, located.cells, slot, count, width, out)
        return [pa.py_buffer(out)]
    if placed > _ARROW_BYTES_MAX:
        raise ValueError(
            f"field {index} ({plan.types[index]}) has {placed} bytes in {count} rows, an Arrow "
            f"column holds {_ARROW_BYTES_MAX}; decode fewer rows at once"
        )
    body = (4 * (count + 1) + 7) // 8 * 8
    out = np.empty(body + placed, np.uint8)
    k.gather(located.rows.data, located.cells, slot, count, out, body)
    buffer = pa.py_buffer(out)
    return [buffer.slice(0, 4 * (count + 1)), buffer.slice(body, placed)]


def _nested_arrow(
    inner: Inner, plan: Plan, index: int, count: int, valid: pa.Buffer | None, nulls: int
) -> pa.Array:
    arrow, plans = plan.arrow[index], plan.inner[index]
    children = [
        array
        for part, part_plan in zip(inner.parts, plans, strict=True)
        for array in to_arrow(
            part, part_plan, f"column {index} ({plan.types[index]}): nested value"
        )
    ]
    if pa.types.is_struct(arrow):
        return pa.Array.from_buffers(arrow, count, [valid], nulls, children=children)
    if pa.types.is_map(arrow):
        entries = pa.struct([arrow.key_field, arrow.item_field])
        length = inner.parts[0].count
        children = [pa.Array.from_buffers(entries, length, [None], 0, children=children)]
    offsets = pa.py_buffer(inner.offsets)
    return pa.Array.from_buffers(arrow, count, [valid, offsets], nulls, children=children)
