"""Varints and UTF-8 inside kernels: parts that other kernels compile in.

A varint is unsigned LEB128: seven bits per byte, lowest first, the top bit set on every byte but
the last. Where eight bytes may be read, the length comes from one bit scan and the value from
three shifts, without a branch on the length; near the end of the data the varint is read byte by
byte. `read_varint` returns the value and the position after it, or one of the negative positions
below. `data` and `out` are addresses (`raw.py`), and positions count from there. The plain-Python
twins are `varint.py` and `text` of `zufluss.record.rows.binary`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import intrinsic, types
from zufluss.record.kernels.raw import peek_i32, peek_i64, peek_u8, poke_i64, poke_u8

CUT = -1
"""The varint runs past the end."""
TOO_LONG = -2
"""The varint has more bytes or bits than its number."""

_HIGH = -0x7F7F7F7F7F7F7F80  # 0x80 in every byte, as an int64
_HIGH32 = 0x80808080


@intrinsic  # type: ignore[untyped-decorator]
def trailing_zeros(_context: Any, value: Any) -> Any:
    """Number of zero bits below the lowest one bit of an int64 that is not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def leading_zeros(_context: Any, value: Any) -> Any:
    """Number of zero bits above the highest one bit of an int64 that is not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def shift_right(_context: Any, value: Any, _bits: Any) -> Any:
    """An int64 shifted right, filled with zeros."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.lshr(arguments[0], arguments[1])

    return types.int64(types.int64, types.int64), generate


@kernel()
def _read_slowly(data: Any, pos: Any, end: Any, bits: Any) -> Any:
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
        stops = ~word & np.int64(_HIGH)
        if stops != 0:
            size = (trailing_zeros(stops) + 1) >> 3
            if 7 * size <= bits:
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
    """Write an int64's bit pattern as a varint; answers the position behind it."""
    while shift_right(value, 7) != 0:
        poke_u8(out + pos, (value & 0x7F) | 0x80)
        value = shift_right(value, 7)
        pos += 1
    poke_u8(out + pos, value)
    return pos + 1


@kernel(inline=True)
def put_varint_fast(value: Any, out: Any, pos: Any) -> Any:
    """As `put_varint`, where ten bytes may be written whatever the length is."""
    if shift_right(value, 56) != 0:
        return put_varint(value, out, pos)
    size = varint_size(value)
    word = (value & 0x000000000FFFFFFF) | (value & 0x00FFFFFFF0000000) << 4
    word = (word & 0x00003FFF00003FFF) | (word & 0x0FFFC0000FFFC000) << 2
    word = (word & 0x007F007F007F007F) | (word & 0x3F803F803F803F80) << 1
    more = (np.int64(1) << (8 * (size - 1))) - 1
    poke_i64(out + pos, word | (more & np.int64(_HIGH)))
    return pos + size


@kernel()
def _sequence_size(data: Any, pos: Any, end: Any) -> Any:
    """Bytes of the well-formed UTF-8 sequence at `pos` that is not ASCII, 0 if there is none."""
    lead = peek_u8(data + pos)
    size = 2 if lead < 0xE0 else (3 if lead < 0xF0 else 4)
    if lead < 0xC2 or lead > 0xF4 or end - pos < size:
        return np.int64(0)
    low, high = 0x80, 0xBF
    if lead == 0xE0:
        low = 0xA0
    elif lead == 0xED:
        high = 0x9F
    elif lead == 0xF0:
        low = 0x90
    elif lead == 0xF4:
        high = 0x8F
    second = peek_u8(data + pos + 1)
    if second < low or second > high:
        return np.int64(0)
    for i in range(2, size):
        if peek_u8(data + pos + i) & 0xC0 != 0x80:
            return np.int64(0)
    return np.int64(size)


@kernel(inline=True)
def _is_ascii(data: Any, pos: Any, end: Any) -> Any:
    """Whether all bytes are below 0x80; short texts take two loads that may overlap."""
    size = end - pos
    if size >= 8:
        bits = peek_i64(data + end - 8)
        while end - pos > 8:
            bits |= peek_i64(data + pos)
            pos += 8
        return bits & np.int64(_HIGH) == 0
    if size >= 4:
        return (peek_i32(data + pos) | peek_i32(data + end - 4)) & np.int64(_HIGH32) == 0
    bits = np.int64(0)
    while pos < end:
        bits |= peek_u8(data + pos)
        pos += 1
    return bits < 0x80


@kernel()
def _utf8_fault(data: Any, pos: Any, end: Any) -> Any:
    while pos < end:
        if end - pos >= 8 and peek_i64(data + pos) & np.int64(_HIGH) == 0:
            pos += 8
        elif peek_u8(data + pos) < 0x80:
            pos += 1
        else:
            size = _sequence_size(data, pos, end)
            if size == 0:
                return pos
            pos += size
    return np.int64(-1)


@kernel(inline=True)
def utf8_fault(data: Any, pos: Any, end: Any) -> Any:
    """Where text stops being UTF-8, −1 if all of it is."""
    if _is_ascii(data, pos, end):
        return np.int64(-1)
    return _utf8_fault(data, pos, end)
