"""Values inside Arrow buffers: the parts of `batch_check.py` that look at every value.

Each is a loop over one buffer, arranged so that a right buffer is passed over once, with vector
instructions where that counts (validity bits, offsets, ASCII). Positions are absolute in `buf`, and
the caller has checked that the buffer lies within it. `validity` is the position of the validity
bits, −1 if no value is NULL; what stands below a NULL does not matter. The plain-Python twin is
`tests/record/batch/plain_check.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.fault import BatchFault
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import load_i32, load_i64, load_u8, popcount
from zufluss.record.kernels.message_read import refuse
from zufluss.record.kernels.raw import address_of
from zufluss.record.kernels.utf8 import HIGH_BITS, find_non_utf8

_SIGN_BIT = -(2**63)


@kernel()
def is_valid(buf: Any, validity: Any, index: Any) -> Any:
    """Whether a value is not NULL."""
    return validity < 0 or (load_u8(buf, validity + (index >> 3)) >> (index & 7)) & 1 != 0


@kernel()
def has_unmasked_null(buf: Any, validity: Any, parent_validity: Any, count: Any) -> Any:
    """Whether a value is NULL although its parent is not."""
    unmasked = False
    for index in range(count):
        parent_valid = is_valid(buf, parent_validity, index)
        unmasked |= not is_valid(buf, validity, index) and parent_valid
    return unmasked


@kernel()
def count_ones(buf: Any, start: Any, count: Any) -> Any:
    """Number of one bits among the first `count` bits."""
    total = np.int64(0)
    words = count >> 6
    for word in range(words):
        total += popcount(load_i64(buf, start + 8 * word))
    for bit in range(words << 6, count & ~7, 8):
        total += popcount(load_u8(buf, start + (bit >> 3)))
    if count & 7:
        total += popcount(load_u8(buf, start + (count >> 3)) & ((1 << (count & 7)) - 1))
    return total


@kernel()
def _is_ascii(buf: Any, start: Any, end: Any) -> Any:
    """Whether no byte of buf[start:end] has its top bit set."""
    # Without a way out of the loop the compiler makes vector instructions of it.
    seen = np.int64(0)
    words = (end - start) >> 3
    for word in range(words):
        seen |= load_i64(buf, start + 8 * word)
    rest = np.int64(0)
    for position in range(start + 8 * words, end):
        rest |= load_u8(buf, position)
    return seen & HIGH_BITS == 0 and rest < 128


@kernel()
def check_strings(
    buf: Any, offsets: Any, data: Any, count: Any, validity: Any, node: Any, note: Any
) -> Any:
    """Check that every value is UTF-8; offsets have been checked before."""
    start = data + load_i32(buf, offsets)
    end = data + load_i32(buf, offsets + 4 * count)
    if _is_ascii(buf, start, end):
        return np.int64(0)
    # All bytes at once: right if they are UTF-8 together and no value begins within a character.
    if find_non_utf8(address_of(buf), start, end) < 0:
        cut = False
        for index in range(1, count):
            position = data + load_i32(buf, offsets + 4 * index)
            cut |= position < end and load_u8(buf, position) & 0xC0 == 0x80
        if not cut:
            return np.int64(0)
    # Value by value, to name the first wrong one; values below a NULL may be anything.
    for index in range(count):
        if is_valid(buf, validity, index):
            value_start = data + load_i32(buf, offsets + 4 * index)
            value_end = data + load_i32(buf, offsets + 4 * index + 4)
            wrong = find_non_utf8(address_of(buf), value_start, value_end)
            if wrong >= 0:
                return refuse(note, BatchFault.UTF8, node, index, wrong - data)
    return np.int64(0)


@kernel()
def find_wrong_time(buf: Any, start: Any, width: Any, count: Any, validity: Any, limit: Any) -> Any:
    """Index of the first time of day outside [0, limit), or `count`."""
    for index in range(count):
        if width == 4:
            value = load_i32(buf, start + 4 * index)
        else:
            value = load_i64(buf, start + 8 * index)
        if (value < 0 or value >= limit) and is_valid(buf, validity, index):
            return index
    return count


@kernel()
def find_wrong_decimal(
    buf: Any, start: Any, count: Any, validity: Any, limit_low: Any, limit_high: Any
) -> Any:
    """Index of the first decimal whose magnitude is not below the limit, or `count`."""
    for index in range(count):
        low = load_i64(buf, start + 16 * index)
        high = load_i64(buf, start + 16 * index + 8)
        if high < 0:
            low = -low
            high = ~high if low != 0 else -high
        # Unsigned comparison of the low words by flipping their sign bits.
        below = (low ^ np.int64(_SIGN_BIT)) < (limit_low ^ np.int64(_SIGN_BIT))
        fits = high >= 0 and (high < limit_high or (high == limit_high and below))
        if not fits and is_valid(buf, validity, index):
            return index
    return count


@kernel()
def check_offsets(buf: Any, start: Any, count: Any, limit: Any, node: Any, note: Any) -> Any:
    """Check count + 1 offsets: not negative, not falling, the last at most `limit`."""
    first, last = load_i32(buf, start), load_i32(buf, start + 4 * count)
    # First whether any falls, a vector loop; only then which one.
    falling = False
    for index in range(count):
        falling |= load_i32(buf, start + 4 * index + 4) < load_i32(buf, start + 4 * index)
    if falling:
        for index in range(count):
            offset, following = start + 4 * index, start + 4 * index + 4
            if load_i32(buf, following) < load_i32(buf, offset):
                value = load_i32(buf, following)
                return refuse(note, BatchFault.OFFSETS_ORDER, node, index + 1, value)
    if first < 0 or last > limit:
        return refuse(note, BatchFault.OFFSETS_RANGE, node, first if first < 0 else last, limit)
    return np.int64(0)
