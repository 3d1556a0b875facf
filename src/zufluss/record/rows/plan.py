"""The program of the row kernels for a list of types, made once per schema.

A `Plan` covers the fields of a row, or the one element of an array. Nested types have plans of
their own below it: a ROW one for its fields, an ARRAY one for its element, a MAP one each for keys
and values. `kernels/row_read.py` describes the lines of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.model.types import (
    NESTED,
    ArrayType,
    DataType,
    DecimalType,
    LengthType,
    MapType,
    Root,
    TemporalType,
)
from zufluss.record.kernels import row_read as k
from zufluss.record.rows import binary as b

Program: TypeAlias = npt.NDArray[np.int64]

_FIXED = {1: k.FIXED_1, 2: k.FIXED_2, 4: k.FIXED_4, 8: k.FIXED_8}
_KEEP = {1: k.KEEP_1, 2: k.KEEP_2, 4: k.KEEP_4, 8: k.KEEP_8}
_VARINTS = {
    Root.INTEGER: k.VARINT_32,
    Root.DATE: k.VARINT_32,
    Root.TIME: k.VARINT_32,
    Root.BIGINT: k.VARINT_64,
}
_BLOBS = {Root.CHAR: k.TEXT, Root.STRING: k.TEXT, Root.BYTES: k.RAW, Root.BINARY: k.PADDED}
_UNITS = {"s": 0, "ms": 1, "us": 2, "ns": 3}
_TWO_CELLS = frozenset({k.NUMBER, k.BIG_NUMBER, k.TEXT, k.RAW, k.PADDED, k.NESTED})


class Plan:
    """The program of some fields, and the plans of nested types."""

    __slots__ = ("arrow", "inner", "program", "sinks", "slots", "types", "widths")

    def __init__(
        self, types: Sequence[DataType], row_format: str, *, element: bool = False
    ) -> None:
        self.types = tuple(types)
        self.arrow = tuple(t.to_arrow() for t in self.types)
        self.program = _program(self.types, row_format, element)
        self.sinks: tuple[int, ...] = tuple(self.program[:-1, k.SINK].tolist())
        self.slots: tuple[int, ...] = tuple(self.program[:, k.SLOT].tolist())
        self.widths = tuple(map(_width, self.arrow))
        self.inner: dict[int, tuple[Plan, ...]] = {
            i: _inner(t, row_format) for i, t in enumerate(self.types) if t.root in NESTED
        }

    def __repr__(self) -> str:
        return f"Plan({', '.join(map(str, self.types))})"


def _inner(data_type: DataType, row_format: str) -> tuple[Plan, ...]:
    if isinstance(data_type, ArrayType):
        return (Plan((data_type.element,), row_format, element=True),)
    if isinstance(data_type, MapType):
        key = data_type.key.as_nullable(False)
        return (
            Plan((key,), row_format, element=True),
            Plan((data_type.value,), row_format, element=True),
        )
    return (Plan(data_type.children(), row_format),)


def _width(arrow: pa.DataType) -> int:
    """Return the bytes of a value in its Arrow buffer, 0 for bits and for places."""
    try:
        return int(arrow.bit_width) // 8
    except ValueError:
        return 0


def _program(types: Sequence[DataType], row_format: str, element: bool) -> Program:
    program = np.zeros((len(types) + 1, k.LINE), np.int64)
    slot = lengths = 0
    for line, data_type in zip(program, types, strict=False):
        line[k.SINK] = sink = _sink(data_type)
        line[k.SOURCE] = source = _source(data_type, row_format, element)
        line[k.PARAM] = _param(data_type)
        line[k.NOT_NULL] = not data_type.nullable
        line[k.FLOATING] = data_type.root in (Root.FLOAT, Root.DOUBLE)
        line[k.SLOT], line[k.LENGTHS] = slot, lengths
        if isinstance(data_type, DecimalType):
            limit = 10**data_type.precision
            line[k.LIMIT_HIGH] = limit >> 64
            line[k.LIMIT_LOW] = np.uint64(limit & (1 << 64) - 1).astype(np.int64)
        slot += 2 if sink in _TWO_CELLS else 1
        lengths += source == k.IN_AREA
    program[-1, k.SLOT], program[-1, k.LENGTHS] = slot, lengths
    program.flags.writeable = False
    return program


def _sink(data_type: DataType) -> int:
    root = data_type.root
    if root in _BLOBS:
        return _BLOBS[root]
    if root in NESTED:
        return k.NESTED
    if isinstance(data_type, DecimalType):
        return k.NUMBER if b.is_compact(data_type) else k.BIG_NUMBER
    if root is Root.BOOLEAN:
        return k.FLAG
    if root is Root.TIME:
        return k.TIME
    if isinstance(data_type, TemporalType):
        if not b.is_compact(data_type):
            return k.FINE_MOMENT
        return k.MOMENT if data_type.unit == "s" else k.KEEP_8
    return _KEEP[b.FIXED[root].size]


def _source(data_type: DataType, row_format: str, element: bool) -> int:
    """Return how a row stores the value; for an array's element the logarithm of its slot size."""
    compacted, root = row_format == "COMPACTED" and not element, data_type.root
    if compacted and root in _VARINTS:
        return _VARINTS[root]
    if root in b.FIXED:
        return _FIXED[b.FIXED[root].size]
    big = isinstance(data_type, DecimalType) and not b.is_compact(data_type)
    if element or not (big or root in _BLOBS or root in NESTED):
        return k.VARINT_64 if compacted else k.FIXED_8
    if compacted:
        return k.PREFIXED
    return k.EXACT if isinstance(data_type, LengthType) else k.IN_AREA


def _param(data_type: DataType) -> int:
    if isinstance(data_type, LengthType):
        return data_type.length
    return _UNITS[data_type.unit] if isinstance(data_type, TemporalType) else 0
