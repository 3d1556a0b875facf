"""Compacted and indexed rows, and log bodies made of them, in plain Python.

The oracle of the kernels behind `zufluss.record.rows.codec` and `zufluss.record.batch.row_body`,
which have the layouts: it checks every bound and every value. Values have the Python forms of
`zufluss.record.rows.binary`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tests.record.rows.plain_nested import read_nested, write_nested
from tests.record.rows.plain_values import batch_of_rows, rows_of_batch
from zufluss.errors import CorruptRecordError
from zufluss.model.schema import Schema
from zufluss.model.types import NESTED, DataType, DecimalType, LengthType, Root
from zufluss.record.rows import binary as b
from zufluss.record.rows.binary import Reader, Value
from zufluss.record.rows.slots import from_blob, to_blob
from zufluss.varint import CUT, TOO_LONG, decode_varint, encode_varint

CHANGE_TYPE_MAX = 4
"""The largest change type, -D."""

_TIMESTAMPS = (Root.TIMESTAMP, Root.TIMESTAMP_LTZ)
_VARINTS = (Root.INTEGER, Root.DATE, Root.TIME, Root.BIGINT)


class RowReader(Reader):
    """A cursor that also reads the fields of rows."""

    __slots__ = ()

    def blob(self, size: int) -> bytes:
        """Read `size` bytes as a copy."""
        start = self.take(size)
        return self.view[start : start + size].tobytes()

    def varint(self, bits: int) -> int:
        """Read a varint of at most 32 or 64 bits (5 or 10 bytes)."""
        bytes_max = -(-bits // 7)
        value, after = decode_varint(self.view, self.pos, self.end, bytes_max)
        if after == TOO_LONG:
            raise CorruptRecordError(f"a number of {bits} bits has more than {bytes_max} bytes")
        if after == CUT:
            raise CorruptRecordError("the data ends within a number")
        self.pos = after
        if value >> bits:
            raise CorruptRecordError(f"number {value} does not fit {bits} bits")
        return value

    def signed_varint(self, bits: int) -> int:
        """Read a varint whose bit pattern is a signed number."""
        value = self.varint(bits)
        return value - (1 << bits) if value >> (bits - 1) else value


def varint(value: int, bits: int = 64) -> bytes:
    """Return the varint of the lowest `bits` bits of a number."""
    return encode_varint(value & ((1 << bits) - 1))


def check_body(buf: Any, start: int, end: int, count: int, schema: Schema, log_format: str) -> None:
    """Raise `CorruptRecordError` unless `buf[start:end]` is exactly `count` valid records."""
    for _ in _records(buf, start, end, count, schema, log_format):
        pass


def decode_body(
    buf: Any, start: int, end: int, count: int, schema: Schema, log_format: str
) -> tuple[pa.RecordBatch, npt.NDArray[np.uint8]]:
    """Return the records of a body as an Arrow batch, and their change types."""
    records = list(_records(buf, start, end, count, schema, log_format))
    changes = np.array([change for change, _ in records], dtype=np.uint8)
    return batch_of_rows([row for _, row in records], schema), changes


def encode_body(
    batch: pa.RecordBatch,
    schema: Schema,
    log_format: str,
    change_types: Sequence[int] | npt.NDArray[np.uint8] | None = None,
) -> bytes:
    """Return the body of a batch; all records are appends unless `change_types` are given."""
    _, encode = _codec(log_format)
    types = [column.data_type for column in schema.columns]
    changes = [0] * batch.num_rows if change_types is None else [int(c) for c in change_types]
    out = bytearray()
    for change, row in zip(changes, rows_of_batch(batch, schema), strict=True):
        data = encode(row, types)
        out += b.I32.pack(len(data) + 1)
        out.append(change)
        out += data
    return bytes(out)


def decode_compacted(
    view: memoryview, pos: int, end: int, types: Sequence[DataType]
) -> list[Value]:
    """Return the fields of the compacted row `view[pos:end]`."""
    reader = RowReader(view, pos, end)
    nulls = reader.take(-(-len(types) // 8))
    values: list[Value] = []
    for i, data_type in enumerate(types):
        if view[nulls + i // 8] >> i % 8 & 1:
            values.append(None)
            continue
        try:
            values.append(_read_compacted(reader, data_type))
        except CorruptRecordError as e:
            raise CorruptRecordError(f"field {i} ({data_type}): {e.message}") from None
    reader.finish("the last field")
    return values


def encode_compacted(values: Sequence[Value], types: Sequence[DataType]) -> bytes:
    """Return the bytes of a compacted row."""
    out = _null_bits(values)
    for value, data_type in zip(values, types, strict=True):
        if value is not None:
            out += compacted_field(value, data_type)
    return bytes(out)


def compacted_field(value: Value, data_type: DataType) -> bytes:
    """Return one field of a compacted row; a compacted key is such fields without null bits."""
    root = data_type.root
    if root in _VARINTS:
        return varint(value, 64 if root is Root.BIGINT else 32)
    fixed = b.FIXED.get(root)
    if fixed is not None:
        return fixed.pack(value)
    if root in _TIMESTAMPS:
        milliseconds, nano = b.timestamp_parts(value)
        tail = b"" if b.is_compact(data_type) else varint(nano, 32)
        return varint(milliseconds) + tail
    if isinstance(data_type, DecimalType) and b.is_compact(data_type):
        return varint(b.unscaled(value, data_type))
    data = _variable_bytes(value, data_type, encode_compacted)
    return varint(len(data), 32) + data


def decode_indexed(view: memoryview, pos: int, end: int, types: Sequence[DataType]) -> list[Value]:
    """Return the fields of the indexed row `view[pos:end]`."""
    reader = RowReader(view, pos, end)
    nulls = reader.take(-(-len(types) // 8))
    variable = sum(map(_is_variable, types))
    lengths = RowReader(view, reader.take(4 * variable), reader.pos)
    values: list[Value] = []
    for i, data_type in enumerate(types):
        if view[nulls + i // 8] >> i % 8 & 1:
            values.append(None)
            continue
        try:
            values.append(_read_indexed(reader, lengths, data_type))
        except CorruptRecordError as e:
            raise CorruptRecordError(f"field {i} ({data_type}): {e.message}") from None
    reader.finish("the last field")
    return values


def encode_indexed(values: Sequence[Value], types: Sequence[DataType]) -> bytes:
    """Return the bytes of an indexed row."""
    lengths, fields = bytearray(), bytearray()
    for value, data_type in zip(values, types, strict=True):
        if value is not None:
            data = _indexed_field(value, data_type)
            if _is_variable(data_type):
                lengths += b.I32.pack(len(data))
            fields += data
    area = 4 * sum(map(_is_variable, types))
    return bytes(_null_bits(values) + lengths.ljust(area, b"\0") + fields)


def _codec(
    log_format: str,
) -> tuple[
    Callable[[memoryview, int, int, Sequence[DataType]], list[Value]],
    Callable[[Sequence[Value], Sequence[DataType]], bytes],
]:
    if log_format == "COMPACTED":
        return decode_compacted, encode_compacted
    if log_format == "INDEXED":
        return decode_indexed, encode_indexed
    raise ValueError(f"log format {log_format!r} has no rows; INDEXED and COMPACTED have")


def _records(
    buf: Any, start: int, end: int, count: int, schema: Schema, log_format: str
) -> Iterator[tuple[int, list[Value]]]:
    decode, _ = _codec(log_format)
    types = [column.data_type for column in schema.columns]
    view = memoryview(buf)
    reader = RowReader(view, start, end)
    for i in range(count):
        try:
            size = reader.number(b.I32)
            at = reader.take(size)
            record = RowReader(view, at, at + size)
            change = record.number(b.BOOL)
            if change > CHANGE_TYPE_MAX:
                raise CorruptRecordError(f"change type {change} is unknown, 0 to 4 are allowed")
            row = decode(view, record.pos, record.end, types)
            _refuse_nulls(row, schema)
        except CorruptRecordError as e:
            raise CorruptRecordError(f"record {i} of {count}: {e.message}") from None
        yield change, row
    reader.finish(f"the {count} records of the body")


def _refuse_nulls(row: list[Value], schema: Schema) -> None:
    for value, column in zip(row, schema.columns, strict=True):
        if value is None and not column.data_type.nullable:
            raise CorruptRecordError(f"column {column.name!r} is NOT NULL and has a NULL")


def _read_compacted(reader: RowReader, data_type: DataType) -> Value:
    root = data_type.root
    if root in _VARINTS:
        bits = 64 if root is Root.BIGINT else 32
        return b.from_number(reader.signed_varint(bits), data_type)
    fixed = b.FIXED.get(root)
    if fixed is not None:
        return b.from_number(reader.number(fixed), data_type)
    if root in _TIMESTAMPS:
        milliseconds = reader.signed_varint(64)
        return b.timestamp(milliseconds, 0 if b.is_compact(data_type) else reader.varint(32))
    if isinstance(data_type, DecimalType) and b.is_compact(data_type):
        return b.decimal(reader.signed_varint(64), data_type)
    return _read_variable(reader, reader.varint(32), data_type, decode_compacted)


def _read_indexed(reader: RowReader, lengths: RowReader, data_type: DataType) -> Value:
    fixed = b.FIXED.get(data_type.root)
    if fixed is not None:
        return b.from_number(reader.number(fixed), data_type)
    if data_type.root in _TIMESTAMPS:
        milliseconds = reader.number(b.I64)
        return b.timestamp(milliseconds, 0 if b.is_compact(data_type) else reader.number(b.I32))
    if isinstance(data_type, DecimalType) and b.is_compact(data_type):
        return b.decimal(reader.number(b.I64), data_type)
    if isinstance(data_type, LengthType):
        data = reader.blob(data_type.length)
        return from_blob(data.rstrip(b"\0") if data_type.root is Root.CHAR else data, data_type)
    return _read_variable(reader, lengths.number(b.I32), data_type, decode_indexed)


def _read_variable(
    reader: RowReader,
    size: int,
    data_type: DataType,
    read_row: Callable[[memoryview, int, int, Sequence[DataType]], list[Value]],
) -> Value:
    if isinstance(data_type, DecimalType):
        return b.decimal_from_bytes(reader.blob(size), data_type)
    if data_type.root in NESTED:
        start = reader.take(size)
        return read_nested(reader.view, start, reader.pos, data_type, read_row)
    return from_blob(reader.blob(size), data_type)


def _indexed_field(value: Value, data_type: DataType) -> bytes:
    fixed = b.FIXED.get(data_type.root)
    if fixed is not None:
        return fixed.pack(value)
    if data_type.root in _TIMESTAMPS:
        milliseconds, nano = b.timestamp_parts(value)
        return b.I64.pack(milliseconds) + (b"" if b.is_compact(data_type) else b.I32.pack(nano))
    if isinstance(data_type, DecimalType) and b.is_compact(data_type):
        return b.I64.pack(b.unscaled(value, data_type))
    data = _variable_bytes(value, data_type, encode_indexed)
    if not isinstance(data_type, LengthType):
        return data
    if len(data) > data_type.length:
        raise ValueError(f"{value!r} has {len(data)} bytes, {data_type} holds {data_type.length}")
    return data.ljust(data_type.length, b"\0")


def _variable_bytes(
    value: Value,
    data_type: DataType,
    write_row: Callable[[Sequence[Value], Sequence[DataType]], bytes],
) -> bytes:
    if isinstance(data_type, DecimalType):
        return b.minimal_bytes(b.unscaled(value, data_type))
    if data_type.root in NESTED:
        return write_nested(value, data_type, write_row)
    return to_blob(value, data_type)


def _is_variable(data_type: DataType) -> bool:
    """Return whether an indexed row has a length for the type."""
    if isinstance(data_type, DecimalType):
        return not b.is_compact(data_type)
    return data_type.root in (Root.STRING, Root.BYTES) or data_type.root in NESTED


def _null_bits(values: Sequence[Value]) -> bytearray:
    out = bytearray(-(-len(values) // 8))
    for i, value in enumerate(values):
        if value is None:
            out[i // 8] |= 1 << i % 8
    return out
