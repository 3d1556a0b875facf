"""A bounds-checked cursor over bytes, and the conversions between bytes and Python values.

Compacted rows, indexed rows, arrays and statistics hold the same values in different places. This
module has what they share: `Reader`, which refuses to leave its range, and the conversions between
a value's bytes and its Python form. It is plain Python, clear rather than fast, and part of the
oracle for the kernels. Callers are `slots.py` and `batch/stats.py`.

| type | Python form |
|---|---|
| BOOLEAN | bool |
| TINYINT SMALLINT INTEGER BIGINT | int |
| FLOAT DOUBLE | float |
| CHAR STRING | str |
| BYTES BINARY | bytes |
| DECIMAL | decimal.Decimal with the type's scale |
| DATE | int, days since 1970-01-01 |
| TIME | int, milliseconds of the day |
| TIMESTAMP, TIMESTAMP_LTZ | int, nanoseconds since 1970-01-01 |
| ARRAY | list |
| MAP | list of (key, value) pairs |
| ROW | tuple |
| NULL | None |
"""

from __future__ import annotations

import struct
from decimal import Context, Decimal
from typing import Any, TypeAlias

from zufluss.errors import CorruptRecordError
from zufluss.model.types import DataType, DecimalType, Root, TemporalType

Value: TypeAlias = Any
"""A value in its Python form."""

BOOL = struct.Struct("<B")
I8 = struct.Struct("<b")
I16 = struct.Struct("<h")
I32 = struct.Struct("<i")
I64 = struct.Struct("<q")
F32 = struct.Struct("<f")
F64 = struct.Struct("<d")

FIXED = {
    Root.BOOLEAN: BOOL,
    Root.TINYINT: I8,
    Root.SMALLINT: I16,
    Root.INTEGER: I32,
    Root.DATE: I32,
    Root.TIME: I32,
    Root.BIGINT: I64,
    Root.FLOAT: F32,
    Root.DOUBLE: F64,
}
"""The types that are one little-endian number."""

COMPACT_DECIMAL_PRECISION = 18
"""Decimals up to this precision are an i64; others are big-endian bytes."""

COMPACT_TIMESTAMP_PRECISION = 3
"""Timestamps up to this precision are only milliseconds; others have a nano of the millisecond."""

DECIMAL_BYTES_MAX = 16
"""Bytes of the largest DECIMAL(38)."""

DAY_MS = 86_400_000
MILLI_NS = 1_000_000
_EXACT = Context(prec=60)


class Reader:
    """A cursor over `view[pos:end]` that raises `CorruptRecordError` instead of leaving it."""

    __slots__ = ("end", "pos", "view")

    def __init__(self, view: memoryview, pos: int, end: int) -> None:
        if not 0 <= pos <= end <= len(view):
            raise CorruptRecordError(f"bytes {pos} to {end} leave the buffer of {len(view)} bytes")
        self.view = view
        self.pos = pos
        self.end = end

    def take(self, size: int) -> int:
        """Step over `size` bytes; return where they start."""
        start = self.pos
        if size < 0 or size > self.end - start:
            raise CorruptRecordError(f"{size} bytes are needed, {self.end - start} are left")
        self.pos = start + size
        return start

    def number(self, layout: struct.Struct) -> Any:
        """Read a number."""
        return layout.unpack_from(self.view, self.take(layout.size))[0]

    def finish(self, what: str) -> None:
        """Raise `CorruptRecordError` if bytes are left over."""
        if self.pos != self.end:
            raise CorruptRecordError(f"{self.end - self.pos} bytes are left over after {what}")


def text(data: bytes) -> str:
    """Return the text of UTF-8 bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise CorruptRecordError(f"text is not UTF-8 at its byte {e.start}") from None


def boolean(byte: int) -> bool:
    """Return the BOOLEAN of a byte."""
    if byte > 1:
        raise CorruptRecordError(f"a BOOLEAN is {byte}, neither 0 nor 1")
    return byte == 1


def time_of_day(milliseconds: int) -> int:
    """Return a TIME after checking that it lies within the day."""
    if not 0 <= milliseconds < DAY_MS:
        raise CorruptRecordError(f"a TIME is {milliseconds} ms, outside the day")
    return milliseconds


def timestamp(milliseconds: int, nano_of_milli: int = 0) -> int:
    """Return the TIMESTAMP of its two parts."""
    if not 0 <= nano_of_milli < MILLI_NS:
        raise CorruptRecordError(f"nano of the millisecond {nano_of_milli} is not 0 to 999999")
    return milliseconds * MILLI_NS + nano_of_milli


def timestamp_parts(nanoseconds: int) -> tuple[int, int]:
    """Return milliseconds (rounded down) and nano of the millisecond of a TIMESTAMP."""
    return divmod(nanoseconds, MILLI_NS)


def decimal(unscaled: int, data_type: DecimalType) -> Decimal:
    """Return the DECIMAL of an unscaled number."""
    if abs(unscaled) >= 10**data_type.precision:
        raise CorruptRecordError(f"unscaled decimal {unscaled} has too many digits for {data_type}")
    return Decimal(unscaled).scaleb(-data_type.scale, _EXACT)


def decimal_from_bytes(data: bytes, data_type: DecimalType) -> Decimal:
    """Return the DECIMAL of an unscaled number in big-endian two's complement."""
    if not 1 <= len(data) <= DECIMAL_BYTES_MAX:
        raise CorruptRecordError(f"a decimal has {len(data)} bytes, 1 to 16 are allowed")
    return decimal(int.from_bytes(data, "big", signed=True), data_type)


def unscaled(value: Decimal, data_type: DecimalType) -> int:
    """Return the unscaled number of a DECIMAL; raises `ValueError` if the type cannot hold it."""
    shifted = value.scaleb(data_type.scale, _EXACT)
    number = int(shifted)
    if number != shifted or abs(number) >= 10**data_type.precision:
        raise ValueError(f"{value} is no {data_type}")
    return number


def minimal_bytes(number: int) -> bytes:
    """Return the shortest big-endian two's complement of a number."""
    bits = (number if number >= 0 else ~number).bit_length()
    return number.to_bytes(bits // 8 + 1, "big", signed=True)


def is_compact(data_type: DataType) -> bool:
    """Return whether a decimal fits an i64 or a timestamp has whole milliseconds.

    True for all other types.
    """
    if isinstance(data_type, DecimalType):
        return data_type.precision <= COMPACT_DECIMAL_PRECISION
    if isinstance(data_type, TemporalType) and data_type.root is not Root.TIME:
        return data_type.precision <= COMPACT_TIMESTAMP_PRECISION
    return True


def from_number(number: Any, data_type: DataType) -> Value:
    """Return the value of a fixed-width number, after checking its range."""
    if data_type.root is Root.BOOLEAN:
        return boolean(number)
    if data_type.root is Root.TIME:
        return time_of_day(number)
    return number
