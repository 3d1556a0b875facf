"""Encodes keys from whole columns.

Keys are written column by column: kernels named `add_*` add the size of a column's values to the
size of each key, kernels named `put_*` write the column and advance each key's cursor. The layouts
stand in `zufluss.record.keys.encoding`; the plain-Python twin is `tests/record/keys/plain.py`.
Every index is bounds-checked: offsets that leave their data raise IndexError.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
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
    for byte in range(width):
        out[pos + byte] = np.uint8((value >> np.uint64(8 * byte)) & np.uint64(0xFF))


@kernel(types.void(_U64, _POSITIONS), boundscheck=True)
def add_varints(values: Any, sizes: Any) -> Any:
    """Add the size of each value as a varint."""
    for row in range(len(values)):
        sizes[row] += varint_size(np.int64(values[row]))


@kernel(types.void(_U64, _POSITIONS, _OUT), boundscheck=True)
def put_varints(values: Any, cursors: Any, out: Any) -> Any:
    """Write each value as a varint."""
    for row in range(len(values)):
        cursors[row] = _put_varint(np.int64(values[row]), cursors[row], out)


@kernel(types.void(_U64, types.int64, _POSITIONS, _OUT), boundscheck=True)
def put_fixed(values: Any, width: Any, cursors: Any, out: Any) -> Any:
    """Write the lowest `width` bytes of each value."""
    for row in range(len(values)):
        _put_low_bytes(values[row], width, cursors[row], out)
        cursors[row] += width


@kernel(types.void(_I64, types.boolean, _POSITIONS), boundscheck=True)
def add_blobs(offsets: Any, prefix: Any, sizes: Any) -> Any:
    """Add the size of each blob, with its length in front if `prefix`."""
    for row in range(len(offsets) - 1):
        size = offsets[row + 1] - offsets[row]
        sizes[row] += size
        if prefix:
            sizes[row] += varint_size(size)


@kernel(types.void(_I64, _BYTES, types.boolean, _POSITIONS, _OUT), boundscheck=True)
def put_blobs(offsets: Any, data: Any, prefix: Any, cursors: Any, out: Any) -> Any:
    """Write each blob, with its length in front if `prefix`."""
    for row in range(len(offsets) - 1):
        pos = cursors[row]
        if prefix:
            pos = _put_varint(offsets[row + 1] - offsets[row], pos, out)
        for at in range(offsets[row], offsets[row + 1]):
            out[pos] = data[at]
            pos += 1
        cursors[row] = pos


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
    """Add the size of the shortest form of each 16-byte decimal."""
    for row in range(len(sizes)):
        sizes[row] += _decimal_size(raw, 16 * row)


@kernel(types.void(_BYTES, _I64, _OUT), boundscheck=True)
def put_decimals(raw: Any, offsets: Any, out: Any) -> Any:
    """Write each 16-byte decimal big-endian, in the size that its offsets leave."""
    for row in range(len(offsets) - 1):
        size = offsets[row + 1] - offsets[row]
        for byte in range(size):
            out[offsets[row] + byte] = raw[16 * row + size - 1 - byte]


@kernel(types.void(_U64, types.int64, _I64, _OUT), boundscheck=True)
def put_slots(values: Any, slot: Any, starts: Any, out: Any) -> Any:
    """Write each value into the 8-byte slot at `slot` of its row."""
    for row in range(len(values)):
        _put_low_bytes(values[row], 8, starts[row] + slot, out)


@kernel(types.void(_I64, types.int64, _POSITIONS), boundscheck=True)
def add_slot_blobs(offsets: Any, reserved: Any, sizes: Any) -> Any:
    """Add the bytes of each blob in the variable part.

    These are `reserved`, or else 8-byte steps; none for up to 7 bytes, which fit the slot.
    """
    for row in range(len(offsets) - 1):
        size = offsets[row + 1] - offsets[row]
        if reserved > 0:
            sizes[row] += reserved
        elif size > 7:
            sizes[row] += (size + 7) // 8 * 8


@kernel(
    types.void(_I64, _BYTES, types.int64, types.int64, _I64, _POSITIONS, _OUT), boundscheck=True
)
def put_slot_blobs(
    offsets: Any, data: Any, reserved: Any, slot: Any, starts: Any, cursors: Any, out: Any
) -> Any:
    """Write each blob into its slot, or into the variable part at the cursor.

    In the second case the slot holds the size and the offset in the row.
    """
    for row in range(len(offsets) - 1):
        size = offsets[row + 1] - offsets[row]
        at = starts[row] + slot
        if reserved == 0 and size <= 7:
            for byte in range(size):
                out[at + byte] = data[offsets[row] + byte]
            out[at + 7] = np.uint8(0x80 | size)
            continue
        _put_low_bytes(np.uint64(size), 4, at, out)
        _put_low_bytes(np.uint64(cursors[row] - starts[row]), 4, at + 4, out)
        for byte in range(size):
            out[cursors[row] + byte] = data[offsets[row] + byte]
        cursors[row] += max(reserved, (size + 7) // 8 * 8)


@kernel(types.void(_U64, _U64, types.int64, _I64, _POSITIONS, _OUT), boundscheck=True)
def put_slot_timestamps(
    millis: Any, nanos: Any, slot: Any, starts: Any, cursors: Any, out: Any
) -> Any:
    """Write nano and offset into the slot, the milliseconds into the variable part."""
    for row in range(len(millis)):
        _put_low_bytes(nanos[row], 4, starts[row] + slot, out)
        _put_low_bytes(np.uint64(cursors[row] - starts[row]), 4, starts[row] + slot + 4, out)
        _put_low_bytes(millis[row], 8, cursors[row], out)
        cursors[row] += 8
