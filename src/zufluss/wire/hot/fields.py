"""Protobuf fields read by hand: positions in a buffer and views of it instead of copies.

Stricter than protobuf in two ways: a known field with another wire type is refused, and so are
groups, which the protocol does not use. Every function raises `CorruptMessageError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NoReturn

from zufluss.errors import CorruptMessageError
from zufluss.varint import BYTES_MAX, CUT, UINT64_MASK, decode_varint

VARINT: Final = 0
BYTES: Final = 2
_FIXED_SIZES: Final = {1: 8, 5: 4}
"""Bytes of the values of fixed size, by wire type."""
_FIELD_MAX: Final = (1 << 29) - 1
_LENGTH_MAX: Final = (1 << 31) - 1


def read_varint(
    view: memoryview, position: int, end: int, bytes_max: int = BYTES_MAX
) -> tuple[int, int]:
    """Returns the unsigned integer at `position`, cut to 64 bits, and the position after it."""
    value, after = decode_varint(view, position, end, bytes_max)
    if after >= 0:
        return value & UINT64_MASK, after
    if after == CUT:
        raise CorruptMessageError(f"the message ends within the integer at byte {position}")
    raise CorruptMessageError(f"the integer at byte {position} is longer than {bytes_max} bytes")


def read_tag(view: memoryview, position: int, end: int) -> tuple[int, int]:
    """Returns the tag at `position` (field number and wire type) and the position after it."""
    tag, after = read_varint(view, position, end, bytes_max=5)
    if not 1 <= tag >> 3 <= _FIELD_MAX:
        raise CorruptMessageError(
            f"field number {tag >> 3} at byte {position}; allowed are 1 to {_FIELD_MAX}"
        )
    return tag, after


def read_length(view: memoryview, position: int, end: int) -> tuple[int, int]:
    """Returns start and end of the length-prefixed bytes at `position`."""
    length, start = read_varint(view, position, end, bytes_max=5)
    if length > _LENGTH_MAX or start + length > end:
        raise CorruptMessageError(
            f"the field at byte {position} claims {length} bytes, {end - start} are there"
        )
    return start, start + length


def skip_field(view: memoryview, position: int, end: int, wire_type: int) -> int:
    """Returns the position after an unknown field."""
    if wire_type == VARINT:
        return read_varint(view, position, end)[1]
    if wire_type == BYTES:
        return read_length(view, position, end)[1]
    size = _FIXED_SIZES.get(wire_type)
    if size is None:
        raise CorruptMessageError(f"wire type {wire_type} at byte {position} is not supported")
    after = position + size
    if after > end:
        raise CorruptMessageError(f"the message ends within the field at byte {position}")
    return after


def refuse_type(message: str, field: int, wire_type: int) -> NoReturn:
    """Raise the error for a known field with a wire type that is not its own."""
    raise CorruptMessageError(f"field {field} of a {message} has the wire type {wire_type}")


def to_int32(value: int) -> int:
    """Returns the signed number in the low 32 bits."""
    value &= 0xFFFF_FFFF
    return value - (1 << 32) if value >> 31 else value


def to_int64(value: int) -> int:
    """Returns the signed number in 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def fields_of(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields each field of a message: its number, and its value as a number or as a view."""
    position, end = 0, len(view)
    while position < end:
        tag, position = read_varint(view, position, end)
        field, wire_type = tag >> 3, tag & 7
        if wire_type == VARINT:
            number, position = read_varint(view, position, end)
            yield field, number - (1 << 64) if number >> 63 else number
            continue
        size = _FIXED_SIZES.get(wire_type)
        if wire_type == BYTES:
            size, position = read_varint(view, position, end)
        if size is None or size > end - position:
            raise CorruptMessageError(f"field {field} does not end within its message")
        yield field, view[position : position + size]
        position += size
