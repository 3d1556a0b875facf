"""Converts the rows of a table between bytes and Arrow batches, whole batches at a time.

A `RowCodec` belongs to one schema and one row format, and works with compiled kernels; the
plain-Python twin is `tests/record/rows/plain_rows.py`. Reading takes two steps, because a server
that only checks rows or compares their keys needs no Arrow batch: `locate` checks every byte of
every row, `columns` builds the batch.

Primary-key tables store their values as compacted (rarely indexed) rows. Both rows start with null
bits, ceil(n / 8) bytes, bit i % 8 of byte i / 8 = field i is NULL; a NULL takes no further bytes.
An indexed row goes on with an i32 length for every field of variable length that is not NULL, in an
area of 4 bytes × the number of such columns (the rest stays zero). Everything is little-endian; a
varint is unsigned LEB128 of the bit pattern.

| type | compacted | indexed |
|---|---|---|
| BOOLEAN, TINYINT / SMALLINT | 1 byte / i16 | the same |
| INTEGER, DATE, TIME | varint, 32 bits | i32 |
| BIGINT, DECIMAL p ≤ 18, TIMESTAMP p ≤ 3 | varint, 64 bits | i64 |
| FLOAT / DOUBLE | 4 / 8 bytes | the same |
| TIMESTAMP p > 3 | varint millis, varint nano of milli | i64, i32 |
| CHAR(n), BINARY(n) | varint length, bytes | exactly n bytes, padded with zeros |
| STRING, BYTES, DECIMAL p > 18 | varint length, bytes | bytes, length in the area |
| ARRAY, MAP, ROW | varint length, bytes | bytes, length in the area |

A ROW inside a row is a row of the same kind; `slots.py` has arrays and maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.errors import CorruptRecordError
from zufluss.model.schema import Schema
from zufluss.model.types import ArrayType
from zufluss.record.kernels import row_read as k
from zufluss.record.kernels.row_keys import match_keys
from zufluss.record.rows.buffers import RowBuffers
from zufluss.record.rows.cells import (
    CellFault,
    LocatedRows,
    empty_cells,
    read_among,
    read_inner,
    read_rows,
    to_arrow,
)
from zufluss.record.rows.plan import Plan
from zufluss.record.rows.write import nested_values, write_rows
from zufluss.record.slices import Bytes, Positions, Slices

__all__ = ["LocatedRows", "RowCodec", "RowFormat"]

RowFormat = Literal["INDEXED", "COMPACTED"]

_ALL = np.empty(0, np.int32)
_NOWHERE: Positions = np.empty(0, np.int64)


class RowCodec:
    """Reads and writes the rows of one schema; safe to use from several threads."""

    def __init__(self, schema: Schema, row_format: RowFormat = "COMPACTED") -> None:
        if row_format not in get_args(RowFormat):
            raise ValueError(f"row format {row_format!r} is none of INDEXED, COMPACTED")
        self.schema = schema
        self.row_format = row_format
        self._arrow = schema.arrow
        self._plan = Plan([column.data_type for column in schema.columns], row_format)
        self.buffers = None if self._plan.inner else RowBuffers(self._plan)
        """Writes located rows as Arrow buffers; None if a column is nested."""

    def __repr__(self) -> str:
        return f"RowCodec({self.row_format}, {len(self.schema.columns)} columns)"

    def locate(
        self, rows: Slices, field_counts: npt.NDArray[np.int32] | None = None
    ) -> LocatedRows:
        """Check every byte of every row; a `CorruptRecordError` names the record and the field.

        `field_counts` has the number of fields of each row: columns are only added at the end, so a
        row of an older schema has fewer, and the others are NULL. Absent rows are all NULL.
        """
        try:
            return read_rows(rows, self._plan, _ALL if field_counts is None else field_counts)
        except CellFault as e:
            raise CorruptRecordError(f"record {e.index}: {e.text}") from None

    def columns(
        self, located: LocatedRows, selection: npt.NDArray[np.int64] | None = None
    ) -> pa.RecordBatch:
        """Return the rows as an Arrow batch, or only those that `selection` lists, in its order."""
        arrays = to_arrow(located, self._plan)
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._arrow)
        return batch if selection is None else batch.take(pa.array(selection))

    def arrays(self, located: LocatedRows, fields: Sequence[int]) -> list[pa.Array]:
        """Return the columns with these indexes as Arrow arrays."""
        return to_arrow(located, self._plan, fields=fields)

    @property
    def cells_per_row(self) -> int:
        """Number of cells of 8 bytes of a row."""
        return self._plan.slots[-1] + 1

    def decode(
        self, rows: Slices, field_counts: npt.NDArray[np.int32] | None = None
    ) -> pa.RecordBatch:
        """Check rows and return them as an Arrow batch."""
        return self.columns(self.locate(rows, field_counts))

    def encode(self, batch: pa.RecordBatch) -> Slices:
        """Return the rows of an Arrow batch, one after the other in one buffer."""
        if not batch.schema.equals(self._arrow):
            batch = self._fitted(batch)
        return write_rows(batch.columns, batch.num_rows, self._plan)

    def row_mismatch(
        self,
        rows: Slices,
        field_counts: npt.NDArray[np.int32],
        key_columns: Sequence[int],
        keys: Slices,
    ) -> int:
        """Return the index of the first row whose compacted key is not `keys[i]`, −1 if none.

        The rows must have been located. Absent rows have no key and never differ. `key_columns` are
        indexes in key order.
        """
        if keys.count != rows.count:
            raise ValueError(f"{keys.count} keys do not belong to {rows.count} rows")
        columns = np.array(key_columns, np.int64)
        places = np.empty((len(self._plan.types), 2), np.int64)
        return int(match_keys(*keys, *rows, field_counts, self._plan.program, columns, places))

    # ------------------------------------------------------------- rows that a fold writes

    @property
    def plan(self) -> Plan:
        """The schema in the form of the kernels."""
        return self._plan

    def check(self, located: LocatedRows) -> None:
        """Raise `CorruptRecordError` if Arrow cannot hold a timestamp; nested ones aside."""
        if self.buffers is not None:
            self.buffers.check(located)
        else:
            sinks = enumerate(self._plan.sinks)
            self.arrays(located, [i for i, sink in sinks if sink in (k.MOMENT, k.FINE_MOMENT)])

    def room(self, data: Bytes, count: int) -> LocatedRows:
        """Return cells for `count` rows that a kernel writes; their places point into `data`."""
        return empty_cells(Slices(data, _NOWHERE, _NOWHERE), _ALL, count, self._plan, shared=True)

    def locate_among(self, rows: Slices, at: Positions, count: int) -> LocatedRows:
        """Return cells for `count` rows, of which `rows` become the rows `at`.

        The other rows are not filled. `rows` have all fields of the schema and are checked as by
        `locate`, without their nested values.
        """
        room = self.room(rows.data, count)
        try:
            read_among(rows, self._plan, at, room)
        except CellFault as e:
            raise CorruptRecordError(f"record {e.index}: {e.text}") from None
        return room

    def moved(self, located: LocatedRows, data: Bytes) -> LocatedRows:
        """Return the same cells for places that point into other, longer data."""
        return replace(located, rows=located.rows._replace(data=data))

    def completed(self, located: LocatedRows) -> LocatedRows:
        """Read the nested values of rows that a fold wrote, and return the rows."""
        if self._plan.inner:
            read_inner(located, self._plan)
        return located

    def encoded_values(self, array: pa.Array, index: int) -> Slices:
        """Return the bytes of the values of a nested column, nothing for a NULL."""
        return nested_values(array, self._plan, index)

    def encoded_elements(self, elements: pa.Array, index: int) -> Slices:
        """Return bytes for the elements of an ARRAY column, NULLs too; equal elements are equal."""
        data_type = self.schema.columns[index].data_type
        assert isinstance(data_type, ArrayType)
        return write_rows([elements], len(elements), Plan((data_type.element,), "COMPACTED"))

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch in the schema's Arrow types; raises `ValueError` for other names."""
        if batch.schema.names != self._arrow.names:
            raise ValueError(
                f"columns {', '.join(batch.schema.names)} are not the schema's "
                f"{', '.join(self._arrow.names)}"
            )
        arrays = [
            array if array.type == field.type else array.cast(field.type)
            for array, field in zip(batch.columns, self._arrow, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)
