"""Varints inside kernels: parts that other kernels compile in.

A varint is unsigned LEB128: seven bits per byte, lowest first, the top bit set on every byte but
the last. Where eight bytes may be read, the length comes from one bit scan and the value from
three shifts, without a branch on the length; near the end of the data the varint is read byte by
byte. `read_varint` returns the value and the position after it, or one of the negative positions
below. `data` and `out` are addresses (`raw.py`), and positions count from there. The plain-Python
twin is `zufluss.varint`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.intrinsics import intrinsic, ir
from zufluss.record.kernels.raw import peek_i64, peek_u8, poke_i64, poke_u8

CUT = -1
"""The varint runs past the end."""
TOO_LONG = -2
"""The varint has more bytes or bits than its number."""

_HIGH_BITS = -0x7F7F7F7F7F7F7F80
"""The top bit of each of eight bytes, as an int64."""


@intrinsic
def trailing_zeros(_context: Any, value: Any) -> Any:
    """Number of zero bits below the lowest one bit of an int64 that is not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@intrinsic
def leading_zeros(_context: Any, value: Any) -> Any:
    """Number of zero bits above the highest one bit of an int64 that is not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@intrinsic
def shift_right(_context: Any, value: Any, _bits: Any) -> Any:
    """An int64 shifted right, filled with zeros."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.lshr(arguments[0], arguments[1])

    return types.int64(types.int64, types.int64), generate


@kernel()
def _read_slowly(data: Any, pos: Any, end: Any, bits: Any) -> Any:
    """Read a varint byte by byte, as `read_varint` does where fewer than eight bytes are left."""
    value, shift = np.int64(0), np.int64(0)
    while shift < bits:
        if pos >= end:
            return value, np.int64(CUT)
        byte = peek_u8(data + pos)
        if shift + 7 > bits and (byte & 0x7F) >> (bits - shift):
            return value, np.int64(TOO_LONG)
        value |= (byte & 0x7F) << shift
        pos += 1
        shift += 7
        if byte < 0x80:
            return value, pos
    return value, np.int64(TOO_LONG)


@kernel(inline=True)
def read_varint(data: Any, pos: Any, end: Any, bits: Any) -> Any:
    """Read a varint of at most `bits` bits; returns it as an int64, and the position after it."""
    if end - pos >= 8:
        word = peek_i64(data + pos)
        if word & 0x80 == 0:
            return word & 0x7F, pos + 1
        # The last byte of the varint is the first without its top bit.
        stops = ~word & np.int64(_HIGH_BITS)
        if stops != 0:
            size = (trailing_zeros(stops) + 1) >> 3
            if bits == 64 or 7 * size <= bits:
                # Drop the bytes behind it, then close the gaps: 8 times 7 bits, 4 times 14, 2
                # times 28.
                word &= stops ^ (stops - 1)
                word = (word & 0x007F007F007F007F) | shift_right(word & 0x7F007F007F007F00, 1)
                word = (word & 0x00003FFF00003FFF) | shift_right(word & 0x3FFF00003FFF0000, 2)
                word = (word & 0x000000000FFFFFFF) | shift_right(word & 0x0FFFFFFF00000000, 4)
                return word, pos + size
    return _read_slowly(data, pos, end, bits)


@kernel(inline=True)
def varint_size(value: Any) -> Any:
    """Bytes of the varint of an int64's bit pattern."""
    return (70 - leading_zeros(value | 1)) // 7


@kernel()
def put_varint(value: Any, out: Any, pos: Any) -> Any:
    """Write an int64's bit pattern as a varint; returns the position after it."""
    while shift_right(value, 7) != 0:
        poke_u8(out + pos, (value & 0x7F) | 0x80)
        value = shift_right(value, 7)
        pos += 1
    poke_u8(out + pos, value)
    return pos + 1


@kernel(inline=True)
def put_varint_fast(value: Any, out: Any, pos: Any) -> Any:
    """Write as `put_varint` does, where ten bytes may be written whatever the varint's size is."""
    if shift_right(value, 56) != 0:
        return put_varint(value, out, pos)
    # Spread the bits: 2 times 28, 4 times 14, 8 times 7; then set the top bits of all but the last.
    size = varint_size(value)
    word = (value & 0x000000000FFFFFFF) | (value & 0x00FFFFFFF0000000) << 4
    word = (word & 0x00003FFF00003FFF) | (word & 0x0FFFC0000FFFC000) << 2
    word = (word & 0x007F007F007F007F) | (word & 0x3F803F803F803F80) << 1
    more = (np.int64(1) << (8 * (size - 1))) - 1
    poke_i64(out + pos, word | (more & np.int64(_HIGH_BITS)))
    return pos + size
