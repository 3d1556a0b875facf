"""Arrays, maps and aligned rows: values in slots of equal width with a variable part behind.

Arrays and maps stand inside compacted and indexed rows; aligned rows hold the minima and maxima of
batch statistics and are also the keys of Paimon tables. All three put a small value into its slot
and a larger one into the variable part. Offsets count from the start of the array or row.
Everything is little-endian.

| array | bytes |
|---|---|
| count | i32 |
| null bits | 4 × ceil(count / 32), bit i of it = element i is NULL |
| elements | count × stride: BOOLEAN, TINYINT 1; SMALLINT 2; INTEGER, DATE, TIME, FLOAT 4; else 8 |
| padding | zeros up to a multiple of 8 |
| variable part | each value padded to 8 |

| aligned row of n fields | bytes |
|---|---|
| header, null bits | ((n + 63 + 8) / 64) × 8; byte 0 is zero, bit i + 8 = field i is NULL |
| slots | n × 8 |
| variable part | as above |

| in an 8-byte slot | slot | variable part |
|---|---|---|
| numbers, DECIMAL p ≤ 18, TIMESTAMP p ≤ 3 | the number in the low bytes | |
| text, bytes up to 7 | the bytes, last byte 0x80 + length | |
| text, bytes over 7 | length i32, offset i32 | the bytes |
| DECIMAL p > 18 | length i32, offset i32 | big-endian bytes, 16 reserved |
| TIMESTAMP p > 3 | nano of milli i32, offset i32 | i64 milliseconds |
| ARRAY, MAP, ROW | length i32, offset i32 | their bytes |

A map is `size of the key array i32`, key array, value array.

Values in the variable part must come in slot order and never overlap, so the work of a reader is
bounded by the bytes. A ROW has the format of the row around it. This module has aligned rows,
`kernels/array_read.py` and `kernels/array_write.py` have arrays and maps, whose plain-Python twin
is `tests/record/rows/plain_nested.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from zufluss.errors import CorruptRecordError
from zufluss.model.types import DataType, DecimalType, Root
from zufluss.record.rows import binary as b
from zufluss.record.rows.binary import Reader, Value

SLOT = 8
_INLINE_MAX = 7
_TEXT = (Root.CHAR, Root.STRING)
_BLOB = (Root.CHAR, Root.STRING, Root.BYTES, Root.BINARY)


def read_aligned(view: memoryview, pos: int, end: int, types: Sequence[DataType]) -> list[Value]:
    """Return the fields of the aligned row `view[pos:end]`, which has no nested types."""
    reader = Reader(view, pos, end)
    header = reader.take(_aligned_header(len(types)))
    slots = reader.take(SLOT * len(types))
    cursor = _VariablePart(view, pos, end, reader.pos)
    values: list[Value] = []
    for i, data_type in enumerate(types):
        if view[header + (i + 8) // 8] >> i % 8 & 1:
            values.append(None)
        else:
            values.append(_read_slot(cursor, slots + SLOT * i, data_type))
    return values


def write_aligned(values: Sequence[Value], types: Sequence[DataType]) -> bytes:
    """Return the bytes of an aligned row."""
    header = _aligned_header(len(types))
    out = bytearray(header + SLOT * len(types))
    for i, (value, data_type) in enumerate(zip(values, types, strict=True)):
        if value is None:
            out[(i + 8) // 8] |= 1 << i % 8
        else:
            _write_slot(out, header + SLOT * i, value, data_type)
    return bytes(out)


class _VariablePart:
    """Returns places in the variable part, each behind the one before."""

    __slots__ = ("base", "end", "used", "view")

    def __init__(self, view: memoryview, base: int, end: int, used: int) -> None:
        self.view = view
        self.base = base
        self.end = end
        self.used = used

    def piece(self, offset: int, size: int) -> tuple[int, int]:
        start = self.base + offset
        if offset < 0 or size < 0 or start < self.used or start + size > self.end:
            raise CorruptRecordError(
                f"a value of {size} bytes at offset {offset} is not within the variable part"
            )
        self.used = start + size
        return start, self.used


def _read_slot(part: _VariablePart, slot: int, data_type: DataType) -> Value:
    view = part.view
    fixed = b.FIXED.get(data_type.root)
    if fixed is not None:
        return b.from_number(fixed.unpack_from(view, slot)[0], data_type)
    low, high = b.I32.unpack_from(view, slot)[0], b.I32.unpack_from(view, slot + 4)[0]
    if isinstance(data_type, DecimalType):
        return _read_decimal(part, slot, data_type)
    if data_type.root in (Root.TIMESTAMP, Root.TIMESTAMP_LTZ):
        if b.is_compact(data_type):
            return b.timestamp(b.I64.unpack_from(view, slot)[0])
        start, _ = part.piece(high, SLOT)
        return b.timestamp(b.I64.unpack_from(view, start)[0], low)
    if data_type.root in _BLOB:
        return from_blob(_read_blob(part, slot), data_type)
    raise CorruptRecordError("an aligned row holds no nested values")


def _read_blob(part: _VariablePart, slot: int) -> bytes:
    mark = part.view[slot + _INLINE_MAX]
    if mark & 0x80:
        size = mark & 0x7F
        if size > _INLINE_MAX:
            raise CorruptRecordError(f"a slot claims {size} bytes, it holds {_INLINE_MAX}")
        return part.view[slot : slot + size].tobytes()
    size, offset = b.I32.unpack_from(part.view, slot)[0], b.I32.unpack_from(part.view, slot + 4)[0]
    start, end = part.piece(offset, size)
    return part.view[start:end].tobytes()


def _read_decimal(part: _VariablePart, slot: int, data_type: DecimalType) -> Value:
    if b.is_compact(data_type):
        return b.decimal(b.I64.unpack_from(part.view, slot)[0], data_type)
    return b.decimal_from_bytes(_read_blob(part, slot), data_type)


def from_blob(data: bytes, data_type: DataType) -> Value:
    """Return the CHAR, STRING, BYTES or BINARY value of its bytes."""
    if data_type.root in _TEXT:
        return b.text(data)
    length = getattr(data_type, "length", None)
    if length is not None and len(data) > length:
        raise CorruptRecordError(f"{len(data)} bytes are too many for {data_type}")
    return data


def to_blob(value: Value, data_type: DataType) -> bytes:
    """Return the bytes of a CHAR, STRING, BYTES or BINARY value."""
    return value.encode() if data_type.root in _TEXT else bytes(value)


def _write_slot(out: bytearray, slot: int, value: Value, data_type: DataType) -> None:
    fixed = b.FIXED.get(data_type.root)
    if fixed is not None:
        fixed.pack_into(out, slot, value)
    elif isinstance(data_type, DecimalType):
        number = b.unscaled(value, data_type)
        if b.is_compact(data_type):
            b.I64.pack_into(out, slot, number)
        else:
            _append(out, slot, b.minimal_bytes(number), b.DECIMAL_BYTES_MAX)
    elif data_type.root in (Root.TIMESTAMP, Root.TIMESTAMP_LTZ):
        _write_timestamp(out, slot, value, data_type)
    elif data_type.root in _BLOB:
        _write_blob(out, slot, to_blob(value, data_type))
    else:
        raise ValueError("an aligned row holds no nested values")


def _write_timestamp(out: bytearray, slot: int, value: int, data_type: DataType) -> None:
    milliseconds, nano = b.timestamp_parts(value)
    if b.is_compact(data_type):
        b.I64.pack_into(out, slot, milliseconds)
    else:
        b.I64.pack_into(out, slot, len(out) << 32 | nano)
        out += b.I64.pack(milliseconds)


def _write_blob(out: bytearray, slot: int, data: bytes) -> None:
    if len(data) > _INLINE_MAX:
        _append(out, slot, data)
    else:
        out[slot : slot + SLOT] = data.ljust(_INLINE_MAX, b"\0") + bytes([0x80 | len(data)])


def _append(out: bytearray, slot: int, data: bytes, reserved: int = 0) -> None:
    b.I64.pack_into(out, slot, len(out) << 32 | len(data))
    out += data.ljust(max(reserved, _round8(len(data))), b"\0")


def _round8(size: int) -> int:
    return -(-size // 8) * 8


def _aligned_header(fields: int) -> int:
    return (fields + 63 + 8) // 64 * 8
