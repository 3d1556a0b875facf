"""Cells to stored values: the rows of keys after a batch, without Arrow in between.

A stored value is the schema id (i16, little-endian) and the compacted row. The rows are the same as
those that `record/kernels/row_write.py` writes from Arrow columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from zufluss.record.aggregate.cells import is_valid
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES
from zufluss.record.kernels.raw import (
    address_of,
    copy_bytes,
    peek_i64,
    peek_u8,
    poke_i16,
    poke_i64,
    poke_u8,
)
from zufluss.record.kernels.row_read import (
    BIG_NUMBER,
    FINE_MOMENT,
    FIXED_1,
    FIXED_2,
    FIXED_4,
    FIXED_8,
    LINE,
    MOMENT,
    PARAM,
    PREFIXED,
    SINK,
    SLOT,
    SOURCE,
    TEXT,
    TIME,
    VARINT_32,
    VARINT_64,
)
from zufluss.record.kernels.row_write import (
    COLUMN,
    OFFSET,
    VALUES,
    decimal_size,
    moment_of,
    number_of,
    put_decimal,
    put_number,
)
from zufluss.record.kernels.varint import put_varint_fast

SCHEMA_ID_BYTES = 2
_IN = types.Array(types.int64, 1, "C", readonly=True)
_LINES = types.Array(types.int64, 2, "C", readonly=True)
_LINES_OUT = types.Array(types.int64, 2, "C")
_BYTES_OUT = types.Array(types.uint8, 1, "C")
_LINE_BYTES, _COLUMN_BYTES = 8 * LINE, 8 * COLUMN


_MOST = {
    FIXED_1: 1,
    FIXED_2: 2,
    FIXED_4: 4,
    FIXED_8: 8,
    VARINT_32: 5,
    VARINT_64: 10,
    PREFIXED: 5,
}
"""Largest size of a value by its source, without the bytes of texts and nested values."""
_SECONDS, _MICROS = 0, 2
"""Units of times, see `record/kernels/row_read.py`."""
_NANO_BYTES = 5
_DECIMAL_BYTES = 16


def value_bytes_max(program: npt.NDArray[np.int64]) -> int:
    """Return the largest size of a stored value, without the bytes of texts and nested values."""
    lines = program[:-1]
    sinks: list[int] = lines[:, SINK].tolist()
    size = SCHEMA_ID_BYTES + -(-len(lines) // 8) + sum(_MOST[int(s)] for s in lines[:, SOURCE])
    return size + _NANO_BYTES * sinks.count(FINE_MOMENT) + _DECIMAL_BYTES * sinks.count(BIG_NUMBER)


def is_exact(program: npt.NDArray[np.int64]) -> bool:
    """Return whether cells hold all bits of a row; times in a coarser Arrow unit do not."""
    sinks, units = program[:-1, SINK], program[:-1, PARAM]
    coarse = (sinks == TIME) & (units == _SECONDS) | (sinks == FINE_MOMENT) & (units == _MICROS)
    return not (coarse | (sinks == MOMENT)).any()


@kernel(inline=True)
def _put_placed(column: Any, count: Any, row: Any, data: Any, out: Any, pos: Any) -> Any:
    """Write length and bytes of a placed value; returns the position after it."""
    start, end = peek_i64(column + 8 * row), peek_i64(column + 8 * (count + row))
    pos = put_varint_fast(end - start, out, pos)
    copy_bytes(out + pos, data + start, end - start)
    return pos + end - start


@kernel(inline=True)
def _put_value(
    line: Any, table: Any, column: Any, count: Any, row: Any, data: Any, out: Any, pos: Any
) -> Any:
    """Write a value that is not NULL; returns the position after it.

    `table` is the address of its table line (`kernels/row_write.py`), `column` that of its cells.
    """
    sink, source = peek_i64(line + 8 * SINK), peek_i64(line + 8 * SOURCE)
    if sink >= TEXT:
        return _put_placed(column, count, row, data, out, pos)
    if sink == BIG_NUMBER:
        size = decimal_size(table, row)
        pos = put_varint_fast(size, out, pos)
        put_decimal(table, row, size, out, pos)
        return pos + size
    if sink == FINE_MOMENT:
        millis, nano = moment_of(line, table, row)
        pos = put_number(millis, source, out, pos)
        return put_number(nano, np.int64(VARINT_32), out, pos)
    return put_number(number_of(line, table, row), source, out, pos)


@kernel(
    types.int64(
        BYTES, _LINES, BYTES, types.int64, _IN, types.int64, _LINES_OUT, _BYTES_OUT, _LINES_OUT
    )
)
def put_values(
    data: Any,
    program: Any,
    cells: Any,
    count: Any,
    rows: Any,
    schema_id: Any,
    table: Any,
    out: Any,
    places: Any,
) -> Any:
    """Write the stored values of `rows`; returns the bytes used, and their places in `places`.

    `cells` have `count` rows, and their places point into `data`. `out` has `value_bytes_max` bytes
    for each row and the bytes of all texts and nested values. `table` is scratch memory, a line per
    column.
    """
    fields, of, to = len(program) - 1, address_of(data), address_of(out)
    lines, columns = address_of(program), address_of(table)
    bitmaps = address_of(cells) + 8 * count * program[fields, SLOT]
    stride, head, pos = (count + 63) // 64 * 8, (fields + 7) // 8, np.int64(0)
    # Cells of numbers have the layout of Arrow buffers, so the parts of `row_write` can read them.
    for number in range(fields):
        column = columns + _COLUMN_BYTES * number
        poke_i64(column + 8 * OFFSET, 0)
        poke_i64(column + 8 * VALUES, address_of(cells) + 8 * count * program[number, SLOT])
    for index in range(len(rows)):
        # A stored value is the schema id, then a compacted row: null bits, then its fields.
        row = rows[index]
        places[0, index] = pos
        poke_i16(to + pos, schema_id)
        start = pos + SCHEMA_ID_BYTES
        pos = start + head
        for byte in range(start, pos):
            poke_u8(to + byte, 0)
        line, column = lines, columns
        for number in range(fields):
            if is_valid(bitmaps + number * stride, row):
                values = peek_i64(column + 8 * VALUES)
                pos = _put_value(line, column, values, count, row, of, to, pos)
            else:
                byte = to + start + (number >> 3)
                poke_u8(byte, peek_u8(byte) | np.int64(1) << (number & 7))
            line += _LINE_BYTES
            column += _COLUMN_BYTES
        places[1, index] = pos
    return pos
