"""Converts Arrow columns to row values, the Python forms of `binary.py`.

Row values have the units of the wire: a TIME is in milliseconds, a TIMESTAMP in nanoseconds. Arrow
columns have the unit of the type's precision.
"""

from __future__ import annotations

import pyarrow as pa

from zufluss.model.types import DataType, Root, TemporalType
from zufluss.record.rows.binary import MILLI_NS, Value

UNIT_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
"""Nanoseconds of each unit of an Arrow type."""


def values_of(array: pa.Array, data_type: DataType) -> list[Value]:
    """Return the row values of an Arrow array of a type that is not nested."""
    if isinstance(data_type, TemporalType):
        return _temporal_values(array, data_type)
    if data_type.root is Root.DATE:
        return list(array.cast(pa.int32()).to_pylist())
    return list(array.to_pylist())


def _temporal_values(array: pa.Array, data_type: TemporalType) -> list[Value]:
    scale = UNIT_NS[data_type.unit]
    numbers = array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64()).to_pylist()
    if data_type.root is Root.TIME:
        return [None if n is None else n * scale // MILLI_NS for n in numbers]
    return [None if n is None else n * scale for n in numbers]
