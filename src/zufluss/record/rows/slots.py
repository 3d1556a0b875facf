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
bounded by the bytes. A ROW has the format of the row around it, so the caller passes the functions
that read and write one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from zufluss.errors import CorruptRecordError
from zufluss.model.types import ArrayType, DataType, DecimalType, MapType, Root, RowType
from zufluss.record.rows import binary as b
from zufluss.record.rows.binary import Reader, Value

RowReader: TypeAlias = Callable[[memoryview, int, int, Sequence[DataType]], Sequence[Value]]
RowWriter: TypeAlias = Callable[[Sequence[Value], Sequence[DataType]], bytes]

SLOT = 8
_INLINE_MAX = 7
_TEXT = (Root.CHAR, Root.STRING)
_BLOB = (Root.CHAR, Root.STRING, Root.BYTES, Root.BINARY)


def read_array(
    view: memoryview, pos: int, end: int, element: DataType, read_row: RowReader
) -> list[Value]:
    """Return the elements of the array `view[pos:end]`."""
    values = _elements(view, pos, end, element, read_row)
    if not element.nullable and None in values:
        raise CorruptRecordError(f"element {values.index(None)} of an array is NOT NULL and NULL")
    return values


def _elements(
    view: memoryview, pos: int, end: int, element: DataType, read_row: RowReader
) -> list[Value]:
    reader = Reader(view, pos, end)
    count = reader.number(b.I32)
    if count < 0:
        raise CorruptRecordError(f"an array has {count} elements")
    nulls = reader.take(-(-count // 32) * 4)
    stride = _stride(element)
    start = reader.take(count * stride)
    cursor = _VariablePart(view, pos, end, min(pos + _round8(reader.pos - pos), end))
    values: list[Value] = []
    for i in range(count):
        if view[nulls + i // 8] >> i % 8 & 1:
            values.append(None)
        else:
            values.append(_read_slot(cursor, start + i * stride, element, read_row))
    if end - pos > _round8(cursor.used - pos) + _reserved(element) * count:
        raise CorruptRecordError(f"{end - cursor.used} bytes are left over after an array")
    return values


def read_map(
    view: memoryview, pos: int, end: int, data_type: MapType, read_row: RowReader
) -> list[tuple[Value, Value]]:
    """Return the entries of the map `view[pos:end]`."""
    reader = Reader(view, pos, end)
    start = reader.take(reader.number(b.I32))
    keys = _elements(view, start, reader.pos, data_type.key, read_row)
    values = read_array(view, reader.pos, end, data_type.value, read_row)
    if len(keys) != len(values):
        raise CorruptRecordError(f"a map has {len(keys)} keys and {len(values)} values")
    if None in keys:
        raise CorruptRecordError("a map has a NULL key")
    return list(zip(keys, values, strict=True))


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
            values.append(_read_slot(cursor, slots + SLOT * i, data_type, _no_rows))
    return values


def write_array(values: Sequence[Value], element: DataType, write_row: RowWriter) -> bytes:
    """Return the bytes of an array."""
    nulls = -(-len(values) // 32) * 4
    stride = _stride(element)
    out = bytearray(b.I32.pack(len(values)) + bytes(nulls + stride * len(values)))
    out += bytes(-len(out) % 8)
    for i, value in enumerate(values):
        if value is None:
            out[4 + i // 8] |= 1 << i % 8
        else:
            _write_slot(out, 4 + nulls + stride * i, value, element, write_row)
    return bytes(out)


def write_map(
    entries: Sequence[tuple[Value, Value]], data_type: MapType, write_row: RowWriter
) -> bytes:
    """Return the bytes of a map."""
    keys = write_array([key for key, _ in entries], data_type.key, write_row)
    values = write_array([value for _, value in entries], data_type.value, write_row)
    return b.I32.pack(len(keys)) + keys + values


def write_aligned(values: Sequence[Value], types: Sequence[DataType]) -> bytes:
    """Return the bytes of an aligned row."""
    header = _aligned_header(len(types))
    out = bytearray(header + SLOT * len(types))
    for i, (value, data_type) in enumerate(zip(values, types, strict=True)):
        if value is None:
            out[(i + 8) // 8] |= 1 << i % 8
        else:
            _write_slot(out, header + SLOT * i, value, data_type, _no_row_writer)
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


def _read_slot(part: _VariablePart, slot: int, data_type: DataType, read_row: RowReader) -> Value:
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
    start, end = part.piece(high, low)
    return read_nested(view, start, end, data_type, read_row)


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


def read_nested(
    view: memoryview, pos: int, end: int, data_type: DataType, read_row: RowReader
) -> Value:
    """Return the ARRAY, MAP or ROW `view[pos:end]`."""
    if isinstance(data_type, ArrayType):
        return read_array(view, pos, end, data_type.element, read_row)
    if isinstance(data_type, MapType):
        return read_map(view, pos, end, data_type, read_row)
    fields = tuple(read_row(view, pos, end, data_type.children()))
    for i, (value, child) in enumerate(zip(fields, data_type.children(), strict=True)):
        if value is None and not child.nullable:
            raise CorruptRecordError(f"field {i} of a ROW is NOT NULL and NULL")
    return fields


def write_nested(value: Value, data_type: DataType, write_row: RowWriter) -> bytes:
    """Return the bytes of an ARRAY, MAP or ROW."""
    if isinstance(data_type, ArrayType):
        return write_array(value, data_type.element, write_row)
    if isinstance(data_type, MapType):
        return write_map(value, data_type, write_row)
    if isinstance(data_type, RowType):
        return write_row(value, data_type.children())
    raise ValueError(f"{data_type} is not a nested type")


def _write_slot(
    out: bytearray, slot: int, value: Value, data_type: DataType, write_row: RowWriter
) -> None:
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
        _append(out, slot, write_nested(value, data_type, write_row))


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


def _stride(element: DataType) -> int:
    fixed = b.FIXED.get(element.root)
    return SLOT if fixed is None else fixed.size


def _reserved(data_type: DataType) -> int:
    """Return the bytes of the variable part that a NULL or short value may leave unused."""
    if b.is_compact(data_type):
        return 0
    return b.DECIMAL_BYTES_MAX if data_type.root is Root.DECIMAL else SLOT


def _round8(size: int) -> int:
    return -(-size // 8) * 8


def _aligned_header(fields: int) -> int:
    return (fields + 63 + 8) // 64 * 8


def _no_rows(view: memoryview, pos: int, end: int, types: Sequence[DataType]) -> Sequence[Value]:
    raise CorruptRecordError("an aligned row holds no nested values")


def _no_row_writer(values: Sequence[Value], types: Sequence[DataType]) -> bytes:
    raise ValueError("an aligned row holds no nested values")
