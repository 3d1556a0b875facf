"""Arrow columns to rows: nested columns become bytes first, from the inside out.

A nested column is encoded to one byte string per value, which then stands in the row as any other
bytes. The kernels get the buffers of all columns as a table of addresses (`kernels/row_write.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from zufluss.model.types import ArrayType, MapType
from zufluss.record.kernels import array_write
from zufluss.record.kernels import row_write as k
from zufluss.record.rows.plan import Plan
from zufluss.record.slices import Bytes, Positions, Slices

_WASTE_MIN = 4096
_NOTHING = (0,) * k.COLUMN


def write_rows(arrays: Sequence[pa.Array], count: int, plan: Plan) -> Slices:
    """Return the rows of columns in the plan's Arrow types; raises `ValueError` with the column."""
    blobs = {i: nested_values(arrays[i], plan, i) for i in plan.inner}
    lines = [_line(array, blobs.get(i)) for i, array in enumerate(arrays)]
    table = np.array([*lines, _NOTHING], np.int64)
    fault, column, most = k.measure(plan.program, table, count)
    if not fault:
        out, offsets = np.empty(most, np.uint8), np.empty(count + 1, np.int64)
        fault, column, most = k.put_rows(plan.program, table, out, offsets)
    if fault:
        raise _refusal(fault, column, most, plan)
    return Slices.contiguous(_trimmed(out, int(offsets[-1])), offsets)


def _refusal(fault: int, column: int, detail: int, plan: Plan) -> ValueError:
    return ValueError(f"column {column} ({plan.types[column]}): {k.FAULTS[fault].format(detail)}")


def _trimmed(out: Bytes, size: int) -> Bytes:
    """Return the used part of a buffer; a copy if most of the buffer is unused."""
    used = out[:size]
    return used.copy() if len(out) > 2 * size + _WASTE_MIN else used


def _line(array: pa.Array, blobs: Slices | None) -> tuple[int, ...]:
    """Return the table line of a column; `blobs` are its encoded values if it is nested."""
    buffers = array.buffers()
    valid = buffers[0]
    head = (valid.address, valid.size) if valid is not None else (0, 0)
    if blobs is not None:
        return _blob_line(head, array.offset, blobs)
    values, body = buffers[1], buffers[2] if len(buffers) > 2 else None
    return (
        *head,
        *((values.address, values.size) if values is not None else (0, 0)),
        *((body.address, body.size) if body is not None else (0, 0)),
        array.offset,
        0,
    )


def _blob_line(head: tuple[int, int], offset: int, blobs: Slices) -> tuple[int, ...]:
    """Return the table line of encoded values; value 0 stands at the array's offset."""
    data, starts, _ = blobs
    address, size = starts.ctypes.data - 8 * offset, 8 * (offset + len(starts) + 1)
    return (*head, address, size, data.ctypes.data, data.size, offset, 1)


def nested_values(array: pa.Array, plan: Plan, index: int) -> Slices:
    """Return the bytes of every value of a nested column, nothing for a NULL."""
    data_type, plans = plan.types[index], plan.inner[index]
    if isinstance(data_type, ArrayType):
        data, offsets = _arrays(array, array.values, plans[0])
    elif isinstance(data_type, MapType):
        data, offsets = _maps(array, plans)
    else:
        children = [array.field(i) for i in range(array.type.num_fields)]
        return write_rows(children, len(array), plans[0])
    return Slices.contiguous(data, offsets)


def _arrays(array: pa.Array, values: pa.Array, plan: Plan) -> tuple[Bytes, Positions]:
    count = len(array)
    if count == 0:
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    lists = array.offsets.to_numpy()
    first, elements = int(lists[0]), int(lists[-1] - lists[0])
    values = values.slice(first, elements)
    blobs = nested_values(values, plan, 0) if plan.inner else None
    table = np.array([_line(values, blobs), _NOTHING], np.int64)
    fault, _, most = k.measure(plan.program, table, elements)
    if not fault:
        size = most + elements + array_write.ARRAY_MAX * count
        out, offsets = np.zeros(size, np.uint8), np.empty(count + 1, np.int64)
        parent = np.array([_parent(array)], np.int64)
        fault = array_write.put_arrays(parent, lists, elements, plan.program, table, out, offsets)
    if fault:
        raise _refusal(fault, 0, 0, plan)
    return _trimmed(out, int(offsets[-1])), offsets


def _maps(array: pa.Array, plans: Sequence[Plan]) -> tuple[Bytes, Positions]:
    keys, key_offsets = _arrays(array, array.keys, plans[0])
    values, value_offsets = _arrays(array, array.items, plans[1])
    out = np.empty(len(keys) + len(values) + 4 * len(array), np.uint8)
    offsets = np.empty(len(array) + 1, np.int64)
    parent = np.array([_parent(array)], np.int64)
    array_write.put_maps(parent, keys, key_offsets, values, value_offsets, out, offsets)
    return out[: int(offsets[-1])], offsets


def _parent(array: pa.Array) -> tuple[int, ...]:
    """Return the table line of a column for a kernel that only reads its NULLs."""
    valid = array.buffers()[0]
    address = 0 if valid is None else valid.address
    return (address, 0, 0, 0, 0, 0, array.offset, 0)
