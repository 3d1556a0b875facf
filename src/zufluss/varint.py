"""Unsigned LEB128 integers ("varints") in plain Python, for the wire, for records and for leases.

Protobuf messages, compacted rows and lease records all write an integer in groups of seven bits,
lowest group first; every byte but the last has its top bit set. A negative number is written as
its 64-bit pattern, which takes ten bytes. The counterpart inside kernels is
`record/kernels/varint.py`.

`decode_varint` raises nothing: its callers raise the error of their own format.
"""

from __future__ import annotations

from typing import Final

CUT: Final = -1
"""The data ends within the varint."""
TOO_LONG: Final = -2
"""The varint has more bytes than allowed."""
BYTES_MAX: Final = 10
"""Bytes of the longest varint, that of a 64-bit pattern."""
UINT64_MASK: Final = (1 << 64) - 1

ONE_BYTE: Final = [bytes((value,)) for value in range(0x80)]
"""The varints of the numbers below 128."""


def encode_varint(value: int) -> bytes:
    """Return the varint of a 64-bit number; a negative one is written as its bit pattern."""
    if 0 <= value < 0x80:
        return ONE_BYTE[value]
    if 0 <= value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if 0 <= value < 0x20_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    value &= UINT64_MASK
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def decode_varint(
    data: bytes | memoryview, position: int, end: int, bytes_max: int = BYTES_MAX
) -> tuple[int, int]:
    """Return the number at `position` and the position after it.

    The position is `CUT` if `data[:end]` ends within the varint and `TOO_LONG` if the varint has
    more than `bytes_max` bytes. Ten bytes hold up to 70 bits; the caller masks or refuses those
    above its type.
    """
    if position < end and (byte := data[position]) < 0x80:
        return byte, position + 1
    value = shift = 0
    for index in range(position, min(end, position + bytes_max)):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    return 0, TOO_LONG if end - position >= bytes_max else CUT
