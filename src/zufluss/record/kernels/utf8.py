"""UTF-8 inside kernels: parts that other kernels compile in.

`data` is an address (`raw.py`), and positions count from there. The plain-Python twin is
`bytes.decode`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.raw import peek_i32, peek_i64, peek_u8

HIGH_BITS = -0x7F7F7F7F7F7F7F80
"""The top bit of each of eight bytes, as an int64: ASCII has none of them."""
_HIGH_BITS_4 = 0x80808080


@kernel()
def _sequence_size(data: Any, pos: Any, end: Any) -> Any:
    """Bytes of the well-formed UTF-8 sequence at `pos` that is not ASCII; 0 if there is none."""
    lead = peek_u8(data + pos)
    size = 2 if lead < 0xE0 else (3 if lead < 0xF0 else 4)
    if lead < 0xC2 or lead > 0xF4 or end - pos < size:
        return np.int64(0)
    # The second byte has a smaller range after four leads: no overlong forms, no surrogates, and
    # no code points beyond U+10FFFF.
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
    for offset in range(2, size):
        if peek_u8(data + pos + offset) & 0xC0 != 0x80:
            return np.int64(0)
    return np.int64(size)


@kernel(inline=True)
def _is_ascii(data: Any, pos: Any, end: Any) -> Any:
    """Whether all bytes are below 0x80; short texts take two loads that may overlap."""
    size = end - pos
    if size >= 8:
        seen = peek_i64(data + end - 8)
        while end - pos > 8:
            seen |= peek_i64(data + pos)
            pos += 8
        return seen & np.int64(HIGH_BITS) == 0
    if size >= 4:
        return (peek_i32(data + pos) | peek_i32(data + end - 4)) & np.int64(_HIGH_BITS_4) == 0
    seen = np.int64(0)
    while pos < end:
        seen |= peek_u8(data + pos)
        pos += 1
    return seen < 0x80


@kernel()
def find_non_utf8(data: Any, pos: Any, end: Any) -> Any:
    """Position of the first byte that is not UTF-8, −1 if there is none; for longer texts."""
    while pos < end:
        if end - pos >= 8 and peek_i64(data + pos) & np.int64(HIGH_BITS) == 0:
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
    """As `find_non_utf8`, compiled into its caller for texts that are mostly short and ASCII."""
    if _is_ascii(data, pos, end):
        return np.int64(-1)
    return find_non_utf8(data, pos, end)
