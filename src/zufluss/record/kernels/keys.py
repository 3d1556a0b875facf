"""Key encoding over whole columns, compiled with numba.

A key is written column by column: kernels named `add_*` add the size of one column's values to the
size of each key, kernels named `put_*` write the column and move each key's cursor on. Layouts and
the plain-Python twin stand in `zufluss.record.keys.encoding`. All loops are bounds-checked by the
compiler: offsets that leave their data end in an IndexError, never in a foreign read or write.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.raw import address_of
from zufluss.record.kernels.varint import put_varint, varint_size

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_U64 = types.Array(types.uint64, 1, "C", readonly=True)
_I64 = types.Array(types.int64, 1, "C", readonly=True)
_OUT = types.Array(types.uint8, 1, "C")
_POSITIONS = types.Array(types.int64, 1, "C")


@kernel()
def _put_varint(value: Any, pos: Any, out: Any) -> Any:
    """Write a varint; returns the position after it. Raises IndexError if it leaves `out`."""
    if pos < 0 or pos + varint_size(value) > len(out):
        raise IndexError("a varint does not fit into its key")
    return put_varint(value, address_of(out), pos)


@kernel(types.void(types.uint64, types.int64, types.int64, _OUT), boundscheck=True)
def _put_low_bytes(value: Any, width: Any, pos: Any, out: Any) -> Any:
    for i in range(width):
        out[pos + i] = np.uint8((value >> np.uint64(8 * i)) & np.uint64(0xFF))


@kernel(types.void(_U64, _POSITIONS), boundscheck=True)
def add_varints(values: Any, sizes: Any) -> Any:
    """Add the varint size of each value."""
    for i in range(len(values)):
        sizes[i] += varint_size(np.int64(values[i]))


@kernel(types.void(_U64, _POSITIONS, _OUT), boundscheck=True)
def put_varints(values: Any, cursors: Any, out: Any) -> Any:
    """Write each value as a varint."""
    for i in range(len(values)):
        cursors[i] = _put_varint(np.int64(values[i]), cursors[i], out)


@kernel(types.void(_U64, types.int64, _POSITIONS, _OUT), boundscheck=True)
def put_fixed(values: Any, width: Any, cursors: Any, out: Any) -> Any:
    """Write the low `width` bytes of each value."""
    for i in range(len(values)):
        _put_low_bytes(values[i], width, cursors[i], out)
        cursors[i] += width


@kernel(types.void(_I64, types.boolean, _POSITIONS), boundscheck=True)
def add_blobs(offsets: Any, prefix: Any, sizes: Any) -> Any:
    """Add the size of each blob, with its length in front if `prefix`."""
    for i in range(len(offsets) - 1):
        size = offsets[i + 1] - offsets[i]
        sizes[i] += size
        if prefix:
            sizes[i] += varint_size(size)


@kernel(types.void(_I64, _BYTES, types.boolean, _POSITIONS, _OUT), boundscheck=True)
def put_blobs(offsets: Any, data: Any, prefix: Any, cursors: Any, out: Any) -> Any:
    """Write each blob, with its length in front if `prefix`."""
    for i in range(len(offsets) - 1):
        pos = cursors[i]
        if prefix:
            pos = _put_varint(offsets[i + 1] - offsets[i], pos, out)
        for at in range(offsets[i], offsets[i + 1]):
            out[pos] = data[at]
            pos += 1
        cursors[i] = pos


@kernel(types.int64(_BYTES, types.int64), boundscheck=True)
def _decimal_size(raw: Any, start: Any) -> Any:
    """Bytes of the shortest two's complement of a 16-byte little-endian number."""
    sign = np.uint8(0xFF) if raw[start + 15] >= np.uint8(0x80) else np.uint8(0)
    size = 16
    while size > 1 and raw[start + size - 1] == sign:
        if (raw[start + size - 2] >= np.uint8(0x80)) != (sign == np.uint8(0xFF)):
            break
        size -= 1
    return size


@kernel(types.void(_BYTES, _POSITIONS), boundscheck=True)
def add_decimals(raw: Any, sizes: Any) -> Any:
    """Add the minimal size of each 16-byte decimal."""
    for i in range(len(sizes)):
        sizes[i] += _decimal_size(raw, 16 * i)


@kernel(types.void(_BYTES, _I64, _OUT), boundscheck=True)
def put_decimals(raw: Any, offsets: Any, out: Any) -> Any:
    """Write each 16-byte decimal big-endian and minimal at its offset."""
    for i in range(len(offsets) - 1):
        size = offsets[i + 1] - offsets[i]
        for k in range(size):
            out[offsets[i] + k] = raw[16 * i + size - 1 - k]


@kernel(types.void(_U64, types.int64, _I64, _OUT), boundscheck=True)
def put_slots(values: Any, slot: Any, starts: Any, out: Any) -> Any:
    """Write each value into the 8-byte slot at `slot` of its row."""
    for i in range(len(values)):
        _put_low_bytes(values[i], 8, starts[i] + slot, out)


@kernel(types.void(_I64, types.int64, _POSITIONS), boundscheck=True)
def add_slot_blobs(offsets: Any, reserved: Any, sizes: Any) -> Any:
    """Add what each blob takes of the variable part: `reserved`, or 8-byte steps beyond 7 bytes."""
    for i in range(len(offsets) - 1):
        size = offsets[i + 1] - offsets[i]
        if reserved > 0:
            sizes[i] += reserved
        elif size > 7:
            sizes[i] += (size + 7) // 8 * 8


@kernel(
    types.void(_I64, _BYTES, types.int64, types.int64, _I64, _POSITIONS, _OUT), boundscheck=True
)
def put_slot_blobs(
    offsets: Any, data: Any, reserved: Any, slot: Any, starts: Any, cursors: Any, out: Any
) -> Any:
    """Write each blob into its slot or, named by it, into the variable part at the cursor."""
    for i in range(len(offsets) - 1):
        size = offsets[i + 1] - offsets[i]
        at = starts[i] + slot
        if reserved == 0 and size <= 7:
            for k in range(size):
                out[at + k] = data[offsets[i] + k]
            out[at + 7] = np.uint8(0x80 | size)
            continue
        _put_low_bytes(np.uint64(size), 4, at, out)
        _put_low_bytes(np.uint64(cursors[i] - starts[i]), 4, at + 4, out)
        for k in range(size):
            out[cursors[i] + k] = data[offsets[i] + k]
        cursors[i] += max(reserved, (size + 7) // 8 * 8)


@kernel(types.void(_U64, _U64, types.int64, _I64, _POSITIONS, _OUT), boundscheck=True)
def put_slot_timestamps(
    millis: Any, nanos: Any, slot: Any, starts: Any, cursors: Any, out: Any
) -> Any:
    """Write nano of milli and offset into each slot, the milliseconds into the variable part."""
    for i in range(len(millis)):
        _put_low_bytes(nanos[i], 4, starts[i] + slot, out)
        _put_low_bytes(np.uint64(cursors[i] - starts[i]), 4, starts[i] + slot + 4, out)
        _put_low_bytes(millis[i], 8, cursors[i], out)
        cursors[i] += 8
