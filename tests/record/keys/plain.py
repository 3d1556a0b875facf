"""Keys in plain Python, one row at a time: the oracle of the kernels that encode them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tests.record.rows.plain_rows import compacted_field
from tests.record.rows.plain_values import values_of
from zufluss.lake_formats import KeyEncoding
from zufluss.model.arrow_types import from_arrow
from zufluss.model.types import DataType, DecimalType, Root
from zufluss.record.keys import hudi
from zufluss.record.rows import binary as b
from zufluss.record.rows.binary import Value
from zufluss.record.rows.slots import to_blob, write_aligned


def encode_key(
    batch: pa.RecordBatch, row: int, columns: Sequence[str], encoding: KeyEncoding
) -> bytes:
    """Return the key of one row, in plain Python."""
    arrays = [batch.column(name).slice(row, 1) for name in columns]
    types = [from_arrow(array.type) for array in arrays]
    values = [values_of(array, ty)[0] for array, ty in zip(arrays, types, strict=True)]
    if encoding == "hudi":
        return hudi_code(values, types, columns).to_bytes(4, "big")
    if encoding == "paimon":
        return write_aligned(values, types)
    if encoding == "iceberg":
        return _iceberg_key(values[0], types[0])
    return b"".join(compacted_field(v, ty) for v, ty in zip(values, types, strict=True))


def _iceberg_key(value: Value, data_type: DataType) -> bytes:
    root = data_type.root
    if isinstance(data_type, DecimalType):
        return b.minimal_bytes(b.unscaled(value, data_type))
    if root in (Root.FLOAT, Root.DOUBLE):
        return b.FIXED[root].pack(value)
    if root is Root.TIME:
        return b.I64.pack(value * 1000)
    if root is Root.TIMESTAMP:
        return b.I64.pack(value // 1000)
    if root in (Root.INTEGER, Root.BIGINT, Root.DATE):
        return b.I64.pack(value)
    return to_blob(value, data_type)


def hudi_code(values: Sequence[Value], types: Sequence[DataType], columns: Sequence[str]) -> int:
    """Return `List<String>.hashCode()` of one row, in plain Python."""
    code = 1
    for value, data_type, name in zip(values, types, columns, strict=True):
        code = code * 31 + hudi.string_hash(hudi._element(value, data_type, name, len(values) > 1))
    return code & 0xFFFFFFFF
