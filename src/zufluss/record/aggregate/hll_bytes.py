"""Checks the bytes of a HyperLogLog sketch before the library that unites sketches reads them.

`datasketches` trusts its input: a register beyond the largest value of a hash, or a full register
without its exception, makes it read and write outside of its arrays. So this module checks
everything it relies on. Numbers are little-endian; a sketch is *compact*, or has room for updates.

| bytes | content |
|---|---|
| 0 | numbers in the head: 2 LIST, 3 SET, 10 REGISTERS |
| 1, 2 | 1, 7: version and family |
| 3 | binary logarithm of the number of registers, 4 to 21 |
| 4 | binary logarithm of the room for coupons, or for exceptions |
| 5 | flags: 4 empty, 8 compact |
| 6 | LIST: its coupons; REGISTERS of 4 bits: what is added to each |
| 7 | bits 0–1: 0 LIST, 1 SET, 2 REGISTERS; bits 2–3: registers of 4, 6 or 8 bits |
| LIST: from 8 | coupons, i32 |
| SET: 8, from 12 | how many, and the coupons, i32 |
| REGISTERS: 8, 16, 24 | three doubles that estimates are made of |
| REGISTERS: 32, 36 | i32: registers that are 0; exceptions |
| REGISTERS: from 40 | the registers; then the exceptions of those of 4 bits that are 15 |

A coupon, and an exception, is `register | value << 26`; a coupon of 0 is none.
"""

from __future__ import annotations

from struct import unpack_from
from typing import Final

import numpy as np
import numpy.typing as npt

LIST, SET, REGISTERS = range(3)
_HEAD: Final = {LIST: 2, SET: 3, REGISTERS: 10}
_BITS: Final = (4, 6, 8)
_LIST_ROOM_BITS: Final = 3
_SET_ROOM_BITS: Final = 5
_EMPTY, _COMPACT = 4, 8
_REGISTERS_AT: Final = 40
_SLOT_BITS: Final = 26
_VALUE_MAX: Final = 63
_FULL: Final = 15
"""Value of a register of 4 bits whose real value stands among the exceptions."""

Words = npt.NDArray[np.uint32]


def check_hll(value: bytes) -> None:
    """Raise `ValueError` if the bytes are no valid sketch."""
    if len(value) < 8:
        raise ValueError("they are too few")
    head, version, family, slot_bits, room_bits, flags, count, mode = value[:8]
    kind, width = mode & 3, mode >> 2 & 3
    if (version, family) != (1, 7) or not 4 <= slot_bits <= 21 or width > 2:
        raise ValueError("their first bytes are not those of a sketch")
    if _HEAD.get(kind) != head:
        raise ValueError(f"a head of {head} numbers does not go with mode {kind}")
    compact = bool(flags & _COMPACT)
    if kind == LIST:
        _check_list(value, room_bits, 0 if flags & _EMPTY else count, compact)
    elif kind == SET:
        _check_set(value, room_bits, slot_bits, compact)
    else:
        _check_registers(value, _BITS[width], 1 << slot_bits, count, room_bits, compact)


def _words(value: bytes, start: int, count: int) -> Words:
    if start + 4 * count > len(value):
        raise ValueError("they end too early")
    return np.frombuffer(value, np.dtype("<u4"), count, start)


def _check_coupons(coupons: Words, count: int) -> None:
    """Raise `ValueError` unless there are `count` coupons, none twice."""
    there = coupons[coupons != 0]
    if len(there) != count or len(np.unique(there)) != count:
        raise ValueError(f"they do not have {count} different coupons")
    if (there >> _SLOT_BITS == 0).any():
        raise ValueError("a coupon has no value")


def _check_list(value: bytes, room_bits: int, count: int, compact: bool) -> None:
    room = 1 << _LIST_ROOM_BITS
    if room_bits != _LIST_ROOM_BITS or count >= room:
        raise ValueError(f"{count} coupons in room of 2^{room_bits} are no list")
    _check_coupons(_words(value, 8, count if compact else room), count)


def _check_set(value: bytes, room_bits: int, slot_bits: int, compact: bool) -> None:
    (count,) = _words(value, 8, 1).tolist()
    room = 1 << room_bits
    if (
        not _SET_ROOM_BITS <= room_bits <= max(slot_bits - 3, _SET_ROOM_BITS)
        or 4 * count > 3 * room
    ):
        raise ValueError(f"{count} coupons in room of 2^{room_bits} are no set")
    _check_coupons(_words(value, 12, count if compact else room), count)


def _check_registers(
    value: bytes, bits: int, slots: int, least: int, room_bits: int, compact: bool
) -> None:
    size = slots * bits // 8 + (bits == 6)
    if len(value) < _REGISTERS_AT + size:
        raise ValueError("they end too early")
    if not np.isfinite(np.array(unpack_from("<ddd", value, 8))).all():
        raise ValueError("an accumulator of its estimate is not a finite number")
    zeros, exceptions = unpack_from("<ii", value, 32)
    registers = np.frombuffer(value, np.uint8, size, _REGISTERS_AT)
    if bits != 4 and (least or exceptions):
        raise ValueError(f"registers of {bits} bits have no exceptions")
    if bits == 8 and (registers > _VALUE_MAX).any():
        raise ValueError(f"a register is beyond {_VALUE_MAX}")
    if bits != 4:
        return
    nibbles = np.stack([registers & 15, registers >> 4], axis=1).reshape(-1)
    if least + _FULL > _VALUE_MAX + 1 or zeros != np.count_nonzero(nibbles == 0):
        raise ValueError("its least register is not what it says")
    exceptional = _exceptions(value, _REGISTERS_AT + size, exceptions, room_bits, compact)
    full = np.flatnonzero(nibbles == _FULL)
    where = np.sort((exceptional & (1 << _SLOT_BITS) - 1) & np.uint32(slots - 1))
    if not np.array_equal(where, full) or (exceptional >> _SLOT_BITS < least + _FULL).any():
        raise ValueError("the exceptions are not those of its registers")


def _exceptions(value: bytes, start: int, count: int, room_bits: int, compact: bool) -> Words:
    if not count:
        return np.empty(0, np.uint32)
    room = 1 << min(room_bits, 31)
    if count < 0 or 4 * count > 3 * room:
        raise ValueError(f"{count} exceptions do not go into room of 2^{room_bits}")
    words = _words(value, start, count if compact else room)
    return words if compact else words[words != 0]
