"""Encodes keys as bytes, for bucket hashes and for key-value stores.

Keys are encoded from Arrow columns, all rows at once; key i is `data[offsets[i]:offsets[i + 1]]`.
The encoding for a bucket hash depends on the lake of the table, so that zufluss and the lake agree
on buckets: none or lance → compacted, paimon → paimon, iceberg → iceberg, hudi → hudi. A NULL in a
key column raises an error that names the column. `tests/record/keys/plain.py` has the plain twin.

| encoding | key |
|---|---|
| compacted | the fields of a compacted row (`rows`) without null bits |
| paimon | an aligned row (`slots`) |
| iceberg | one column only, below |
| hudi | 4 bytes, the big-endian Java hash of the values as texts (`hudi`) |

| iceberg type | bytes |
|---|---|
| INTEGER, DATE, BIGINT | i64 |
| TIME, TIMESTAMP | i64 microseconds |
| FLOAT, DOUBLE | 4, 8 bytes |
| CHAR, STRING, BYTES, BINARY | the bytes, not empty |
| DECIMAL | shortest big-endian two's complement |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as at

from zufluss.errors import InvalidTableError
from zufluss.lake_formats import LAKE_FORMATS, KeyEncoding
from zufluss.model.table import TableInfo
from zufluss.record.kernels import keys as kernels
from zufluss.record.keys.hash import HashKind, bucket_ids
from zufluss.record.keys.hudi import hudi_codes
from zufluss.record.rows import binary as b

Bytes: TypeAlias = npt.NDArray[np.uint8]
Offsets: TypeAlias = npt.NDArray[np.int64]
_U64: TypeAlias = npt.NDArray[np.uint64]

_UNIT_MICROS = {"s": 1_000_000, "ms": 1_000, "us": 1}


class KeyEncodingError(InvalidTableError):
    """A value or a type cannot be part of a key."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A column of numbers."""

    values: _U64
    """Bit patterns, extended with zeros."""
    width: int
    """Bytes of the type."""
    varint: bool
    """Whether compacted keys hold varints of it."""


@dataclass(frozen=True, slots=True)
class _Timestamps:
    """A column of timestamps finer than milliseconds."""

    millis: _U64
    """Bit patterns of the milliseconds, rounded down."""
    nanos: _U64
    """Nano of the millisecond."""


@dataclass(frozen=True, slots=True)
class _Blobs:
    """A column of values of variable length."""

    offsets: Offsets
    """Value i is `data[offsets[i]:offsets[i + 1]]`."""
    data: Bytes
    """The values, one after the other."""
    reserved: int = 0
    """Bytes that paimon reserves for each."""


_Column: TypeAlias = _Numbers | _Timestamps | _Blobs


@dataclass(frozen=True, slots=True)
class KeyEncoder:
    """How one table encodes and hashes a key."""

    columns: tuple[str, ...]
    """The key columns in key order."""
    encoding: KeyEncoding
    """The layout of the key."""
    lake: str | None = None
    """The lake format whose hash is used."""

    @classmethod
    def of_bucket_key(cls, info: TableInfo) -> KeyEncoder:
        """Return the encoder of a table's bucket key."""
        if not info.bucket_keys:
            raise KeyEncodingError(f"table {info.path} has no bucket key; choose buckets in turn")
        lake = _lake_of(info)
        return cls(info.bucket_keys, bucket_encoding(lake), lake)

    @classmethod
    def of_stored_key(cls, info: TableInfo) -> KeyEncoder:
        """Return the encoder of the keys under which a primary-key table stores its rows.

        The stored key is the *physical* primary key: the primary key without the partition
        columns. Client and server compare its bytes, so both take the encoding from here:

        | lake | `table.kv.format-version` | bucket key | encoding of the stored key |
        |---|---|---|---|
        | none, lance, hudi | any | any | compacted |
        | paimon, iceberg | 1, or absent | any | the lake's |
        | paimon, iceberg | 2 | the physical primary key | the lake's |
        | paimon, iceberg | 2 | part of the physical primary key | compacted |

        Version 2 exists for prefix lookups: part of a key is a prefix of its bytes only in the
        compacted encoding.
        """
        descriptor = info.descriptor
        lake = _lake_of(info)
        version = int(descriptor.properties.get("table.kv.format-version", "1"))
        columns = descriptor.physical_primary_key
        traits = None if lake is None else LAKE_FORMATS.get(lake)
        encoded = traits is not None and traits.stores_encoded_keys
        if encoded and (version == 1 or descriptor.has_default_bucket_key):
            return cls(columns, bucket_encoding(lake), lake)
        return cls(columns, "compacted", lake)

    def encode(self, batch: pa.RecordBatch) -> tuple[Bytes, Offsets]:
        """Return the key of every row, see `encode_keys`."""
        return encode_keys(batch, self.columns, self.encoding)

    def bucket_ids(
        self, batch: pa.RecordBatch, buckets: int, hash: HashKind = "pyfluss"
    ) -> npt.NDArray[np.int32]:
        """Return the bucket of every row."""
        data, offsets = self.encode(batch)
        return bucket_ids(data, offsets, buckets, self.lake, hash)


def bucket_assign(
    batch: pa.RecordBatch, info: TableInfo, hash: HashKind = "pyfluss"
) -> npt.NDArray[np.int32]:
    """Return the bucket of every row of a table with a bucket key."""
    return KeyEncoder.of_bucket_key(info).bucket_ids(batch, info.bucket_count, hash)


def _lake_of(info: TableInfo) -> str | None:
    """Return the lake format of a table, None if the table is not tiered to a lake."""
    text = info.descriptor.properties.get("table.datalake.format")
    return None if text is None else text.lower()


def bucket_encoding(lake: str | None) -> KeyEncoding:
    """Return the encoding of bucket keys for a lake."""
    if lake is None:
        return "compacted"
    if lake not in LAKE_FORMATS:
        raise KeyEncodingError(f"lake format {lake!r} is none of {', '.join(LAKE_FORMATS)}")
    return LAKE_FORMATS[lake].key_encoding


def encode_keys(
    batch: pa.RecordBatch, columns: Sequence[str], encoding: KeyEncoding
) -> tuple[Bytes, Offsets]:
    """Return the keys of all rows: key i is `data[offsets[i]:offsets[i + 1]]`."""
    arrays = [_key_array(batch, name) for name in columns]
    if encoding == "hudi":
        return _hudi(arrays, columns)
    if encoding == "iceberg":
        return _iceberg(arrays, columns)
    parts = [_column(array, name) for array, name in zip(arrays, columns, strict=True)]
    if encoding == "paimon":
        return _paimon(parts, batch.num_rows)
    return _compacted(parts, batch.num_rows)


def _key_array(batch: pa.RecordBatch, name: str) -> pa.Array:
    if name not in batch.schema.names:
        raise KeyEncodingError(f"key column {name!r} is not among {', '.join(batch.schema.names)}")
    array = batch.column(name)
    if array.null_count:
        raise KeyEncodingError(
            f"key column {name!r} has {array.null_count} NULLs; a key has none, fill or drop them"
        )
    return array


def _column(array: pa.Array, name: str) -> _Column:
    kind = array.type
    if at.is_string(kind) or at.is_binary(kind):
        return _blobs(array)
    if at.is_fixed_size_binary(kind):
        return _fixed_blobs(array)
    if at.is_decimal128(kind):
        return _decimals(array)
    if at.is_timestamp(kind):
        return _timestamps(array)
    if at.is_time(kind):
        return _number(_time_micros(array).astype(np.int64) // 1000, np.int32, varint=True)
    if at.is_date32(kind):
        return _number(array.cast(pa.int32()).to_numpy(), np.int32, varint=True)
    if at.is_boolean(kind):
        return _number(array.cast(pa.int8()).to_numpy(), np.int8, varint=False)
    if at.is_signed_integer(kind) or at.is_float32(kind) or at.is_float64(kind):
        values = array.to_numpy()
        varint = values.dtype in (np.int32, np.int64)
        return _number(values, values.dtype, varint=varint)
    raise KeyEncodingError(f"key column {name!r} of Arrow type {kind} cannot be part of a key")


def _number(values: npt.NDArray[np.generic], kind: npt.DTypeLike, *, varint: bool) -> _Numbers:
    typed = np.ascontiguousarray(values.astype(kind, copy=False))
    width = typed.dtype.itemsize
    return _Numbers(typed.view(f"u{width}").astype(np.uint64), width, varint)


def _time_micros(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return a TIME column in microseconds of the day, rounded down to whole milliseconds."""
    unit = array.type.unit
    integers = array.cast(pa.int32() if at.is_time32(array.type) else pa.int64())
    values = integers.to_numpy().astype(np.int64)
    micros = values // 1000 if unit == "ns" else values * _UNIT_MICROS[unit]
    whole: npt.NDArray[np.int64] = micros // 1000 * 1000
    return whole


def _timestamps(array: pa.Array) -> _Numbers | _Timestamps:
    unit = array.type.unit
    if unit in ("s", "ms"):
        whole = array.cast(pa.timestamp("ms")).cast(pa.int64()).to_numpy()
        return _number(whole, np.int64, varint=True)
    per_milli, nanos = (1_000, 1_000) if unit == "us" else (1_000_000, 1)
    values = array.cast(pa.int64()).to_numpy()
    millis = values // per_milli
    rest = (values - millis * per_milli) * nanos
    return _Timestamps(millis.view(np.uint64), rest.astype(np.uint64))


def _blobs(array: pa.Array) -> _Blobs:
    _, offsets, data = array.buffers()
    positions = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    raw = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return _Blobs(positions.astype(np.int64), raw)


def _fixed_blobs(array: pa.Array) -> _Blobs:
    width = array.type.byte_width
    offsets = (np.arange(len(array) + 1, dtype=np.int64) + array.offset) * width
    return _Blobs(offsets, np.frombuffer(array.buffers()[1], np.uint8))


def _raw_decimals(array: pa.Array) -> Bytes:
    raw = np.frombuffer(array.buffers()[1], np.uint8)
    return raw[16 * array.offset : 16 * (array.offset + len(array))]


def _decimals(array: pa.Array) -> _Numbers | _Blobs:
    if array.type.precision <= b.COMPACT_DECIMAL_PRECISION:
        low = _raw_decimals(array).view(np.int64)[::2]
        return _number(low, np.int64, varint=True)
    return _minimal_decimals(array)


def _minimal_decimals(array: pa.Array) -> _Blobs:
    raw = _raw_decimals(array)
    sizes = np.zeros(len(array), np.int64)
    kernels.add_decimals(raw, sizes)
    offsets = _offsets(sizes)
    data = np.empty(int(offsets[-1]), np.uint8)
    kernels.put_decimals(raw, offsets, data)
    return _Blobs(offsets, data, b.DECIMAL_BYTES_MAX)


def _offsets(sizes: Offsets) -> Offsets:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _compacted(parts: Sequence[_Column], count: int) -> tuple[Bytes, Offsets]:
    sizes = np.zeros(count, np.int64)
    for part in parts:
        match part:
            case _Numbers(values, _, True):
                kernels.add_varints(values, sizes)
            case _Numbers(_, width, _):
                sizes += width
            case _Timestamps(millis, nanos):
                kernels.add_varints(millis, sizes)
                kernels.add_varints(nanos, sizes)
            case _Blobs(offsets, _, _):
                kernels.add_blobs(offsets, True, sizes)
    starts = _offsets(sizes)
    out = np.empty(int(starts[-1]), np.uint8)
    cursors = starts[:-1].copy()
    for part in parts:
        match part:
            case _Numbers(values, _, True):
                kernels.put_varints(values, cursors, out)
            case _Numbers(values, width, _):
                kernels.put_fixed(values, width, cursors, out)
            case _Timestamps(millis, nanos):
                kernels.put_varints(millis, cursors, out)
                kernels.put_varints(nanos, cursors, out)
            case _Blobs(offsets, data, _):
                kernels.put_blobs(offsets, data, True, cursors, out)
    return out, starts


def _paimon(parts: Sequence[_Column], count: int) -> tuple[Bytes, Offsets]:
    header = (len(parts) + 63 + 8) // 64 * 8
    fixed = header + 8 * len(parts)
    sizes = np.full(count, fixed, np.int64)
    for part in parts:
        if isinstance(part, _Blobs):
            kernels.add_slot_blobs(part.offsets, part.reserved, sizes)
        elif isinstance(part, _Timestamps):
            sizes += 8
    starts = _offsets(sizes)
    out = np.zeros(int(starts[-1]), np.uint8)
    cursors = starts[:-1] + fixed
    for i, part in enumerate(parts):
        slot = header + 8 * i
        match part:
            case _Numbers(values, _, _):
                kernels.put_slots(values, slot, starts, out)
            case _Timestamps(millis, nanos):
                kernels.put_slot_timestamps(millis, nanos, slot, starts, cursors, out)
            case _Blobs(offsets, data, reserved):
                kernels.put_slot_blobs(offsets, data, reserved, slot, starts, cursors, out)
    return out, starts


def _iceberg(arrays: Sequence[pa.Array], columns: Sequence[str]) -> tuple[Bytes, Offsets]:
    _check_iceberg(arrays, columns)
    array, kind = arrays[0], arrays[0].type
    if at.is_decimal128(kind):
        blobs = _minimal_decimals(array)
        return blobs.data, blobs.offsets
    part = _column(array, columns[0])
    if isinstance(part, _Blobs):
        start, end = int(part.offsets[0]), int(part.offsets[-1])
        return part.data[start:end], part.offsets - start
    if at.is_integer(kind) or at.is_date32(kind):
        values = array.cast(pa.int32()) if at.is_date32(kind) else array
        return _wide(values.to_numpy().astype(np.int64))
    if at.is_time(kind):
        return _wide(_time_micros(array))
    if at.is_timestamp(kind):
        fine = array if kind.unit == "ns" else array.cast(pa.timestamp("us"))
        numbers = fine.cast(pa.int64()).to_numpy()
        return _wide(numbers // 1000 if kind.unit == "ns" else numbers)
    return _wide(array.to_numpy())


def _wide(values: npt.NDArray[np.generic]) -> tuple[Bytes, Offsets]:
    """Return keys that are one number each."""
    raw = np.ascontiguousarray(values)
    width = raw.dtype.itemsize
    return raw.view(np.uint8), np.arange(len(raw) + 1, dtype=np.int64) * width


def _check_iceberg(arrays: Sequence[pa.Array], columns: Sequence[str]) -> None:
    if len(arrays) != 1:
        raise KeyEncodingError(f"an iceberg bucket key is one column, not {', '.join(columns)}")
    array, kind = arrays[0], arrays[0].type
    zoned = at.is_timestamp(kind) and kind.tz is not None
    if at.is_boolean(kind) or at.is_int8(kind) or at.is_int16(kind) or zoned:
        raise KeyEncodingError(
            f"key column {columns[0]!r}: iceberg has no buckets of BOOLEAN, TINYINT, SMALLINT "
            f"and TIMESTAMP_LTZ; choose another bucket key"
        )
    if (at.is_string(kind) or at.is_binary(kind)) and (np.diff(_blobs(array).offsets) == 0).any():
        raise KeyEncodingError(f"key column {columns[0]!r} has an empty value; iceberg allows none")


def _hudi(arrays: Sequence[pa.Array], columns: Sequence[str]) -> tuple[Bytes, Offsets]:
    codes = hudi_codes(arrays, columns)
    return codes.astype(">u4").view(np.uint8), np.arange(len(codes) + 1, dtype=np.int64) * 4
