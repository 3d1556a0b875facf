"""Arrays, maps and rows inside rows, in plain Python: the oracle of the array kernels.

`zufluss.record.rows.slots` has the layouts, and reads and writes values that are not nested. A ROW
has the format of the row around it, so the caller passes the functions that read and write one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from zufluss.errors import CorruptRecordError
from zufluss.model.types import NESTED, ArrayType, DataType, MapType, Root, RowType
from zufluss.record.rows import binary as b
from zufluss.record.rows import slots
from zufluss.record.rows.binary import Reader, Value
from zufluss.record.rows.slots import SLOT

RowReader: TypeAlias = Callable[[memoryview, int, int, Sequence[DataType]], Sequence[Value]]
RowWriter: TypeAlias = Callable[[Sequence[Value], Sequence[DataType]], bytes]


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
    cursor = slots._VariablePart(view, pos, end, min(pos + slots._round8(reader.pos - pos), end))
    values: list[Value] = []
    for i in range(count):
        if view[nulls + i // 8] >> i % 8 & 1:
            values.append(None)
        else:
            values.append(_read_slot(cursor, start + i * stride, element, read_row))
    if end - pos > slots._round8(cursor.used - pos) + _reserved(element) * count:
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


def _read_slot(
    part: slots._VariablePart, slot: int, data_type: DataType, read_row: RowReader
) -> Value:
    if data_type.root not in NESTED:
        return slots._read_slot(part, slot, data_type)
    size, offset = b.I32.unpack_from(part.view, slot)[0], b.I32.unpack_from(part.view, slot + 4)[0]
    start, end = part.piece(offset, size)
    return read_nested(part.view, start, end, data_type, read_row)


def _write_slot(
    out: bytearray, slot: int, value: Value, data_type: DataType, write_row: RowWriter
) -> None:
    if data_type.root in NESTED:
        slots._append(out, slot, write_nested(value, data_type, write_row))
    else:
        slots._write_slot(out, slot, value, data_type)


def _stride(element: DataType) -> int:
    fixed = b.FIXED.get(element.root)
    return SLOT if fixed is None else fixed.size


def _reserved(data_type: DataType) -> int:
    """Return the bytes of the variable part that a NULL or short value may leave unused."""
    if b.is_compact(data_type):
        return 0
    return b.DECIMAL_BYTES_MAX if data_type.root is Root.DECIMAL else SLOT
