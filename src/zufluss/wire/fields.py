"""Protobuf fields read by hand: positions into a buffer instead of copies of what stands there.

Stricter than protobuf in two ways: a known field with another wire type and groups (which the
protocol has none of) are refused. Everything raises `CorruptMessageError`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn

from zufluss.errors import CorruptMessageError
from zufluss.varint import BYTES_MAX, CUT, UINT64_MASK, decode_varint

VARINT: Final = 0
BYTES: Final = 2
_FIXED64: Final = 1
_FIXED32: Final = 5
_FIELD_MAX: Final = (1 << 29) - 1
_LENGTH_MAX: Final = (1 << 31) - 1


class BucketScan(NamedTuple):
    """One bucket of a request that writes, and where its records lie."""

    partition_id: int | None
    """None for a table without partitions."""
    bucket_id: int
    """As sent; whether it exists is the caller's to check."""
    start: int
    """Position of the first byte of the records in the scanned buffer."""
    end: int
    """Position after their last byte."""


def scan_bucket(view: memoryview, position: int, end: int) -> BucketScan:
    """A PbProduceLogReqForBucket or PbPutKvReqForBucket: they have the same fields."""
    partition_id = bucket_id = start = None
    stop = end
    while position < end:
        tag, position = read_tag(view, position, end)
        field, wire_type = tag >> 3, tag & 7
        if field > 3:
            position = skip_field(view, position, end, wire_type)
        elif wire_type != (BYTES if field == 3 else VARINT):
            refuse_type("bucket entry", field, wire_type)
        elif field == 3:
            start, stop = read_length(view, position, end)
            position = stop
        else:
            value, position = read_varint(view, position, end)
            if field == 1:
                partition_id = to_int64(value)
            else:
                bucket_id = to_int32(value)
    if bucket_id is None or start is None:
        raise CorruptMessageError(
            "a bucket entry lacks one of its required fields bucket_id, records"
        )
    return BucketScan(partition_id, bucket_id, start, stop)


def read_varint(
    view: memoryview, position: int, end: int, bytes_max: int = BYTES_MAX
) -> tuple[int, int]:
    """The unsigned integer at `position`, cut to 64 bits, and the position after it."""
    value, after = decode_varint(view, position, end, bytes_max)
    if after >= 0:
        return value & UINT64_MASK, after
    if after == CUT:
        raise CorruptMessageError(f"the message ends within the integer at byte {position}")
    raise CorruptMessageError(f"the integer at byte {position} is longer than {bytes_max} bytes")


def read_tag(view: memoryview, position: int, end: int) -> tuple[int, int]:
    """The field number and wire type at `position`, as one integer, and the position after it."""
    tag, after = read_varint(view, position, end, bytes_max=5)
    if not 1 <= tag >> 3 <= _FIELD_MAX:
        raise CorruptMessageError(
            f"field number {tag >> 3} at byte {position}; allowed are 1 to {_FIELD_MAX}"
        )
    return tag, after


def read_length(view: memoryview, position: int, end: int) -> tuple[int, int]:
    """Start and end of the length-prefixed bytes at `position`."""
    length, start = read_varint(view, position, end, bytes_max=5)
    if length > _LENGTH_MAX or start + length > end:
        raise CorruptMessageError(
            f"the field at byte {position} claims {length} bytes, {end - start} are there"
        )
    return start, start + length


def skip_field(view: memoryview, position: int, end: int, wire_type: int) -> int:
    """The position after an unknown field."""
    if wire_type == VARINT:
        return read_varint(view, position, end)[1]
    if wire_type == BYTES:
        return read_length(view, position, end)[1]
    if wire_type not in (_FIXED64, _FIXED32):
        raise CorruptMessageError(f"wire type {wire_type} at byte {position} is not supported")
    after = position + (8 if wire_type == _FIXED64 else 4)
    if after > end:
        raise CorruptMessageError(f"the message ends within the field at byte {position}")
    return after


def refuse_type(message: str, field: int, wire_type: int) -> NoReturn:
    """Refuse a known field of another wire type than its own."""
    raise CorruptMessageError(f"field {field} of a {message} has the wire type {wire_type}")


def to_int32(value: int) -> int:
    """The signed number of the low 32 bits."""
    value &= 0xFFFF_FFFF
    return value - (1 << 32) if value >> 31 else value


def to_int64(value: int) -> int:
    """The signed number of 64 bits."""
    return value - (1 << 64) if value >> 63 else value
