"""The statistics block of a batch: a part of `batch_check.py`.

| size | content |
|---|---|
| 1 | version, 1 |
| 2 | n, the number of columns with statistics |
| 2·n | their column indexes |
| 4·n | their null counts |
| 4, then so many bytes | the row of minima |
| 4, then so many bytes | the row of maxima |

A row is its null bits (which begin at bit 8, in 8-byte steps), one 8-byte slot per column, then the
variable part. `zufluss.record.batch.stats` writes the block; the plain-Python twin of the check is
`tests/record/batch/plain_check.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.fault import BatchFault
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import load_i16, load_i32, load_i64, load_u8
from zufluss.record.kernels.message_read import refuse

SLOT_NONE, SLOT_FIXED, SLOT_VARIABLE, SLOT_TIMESTAMP, SLOT_DECIMAL = range(5)
"""How a column stands in a row; columns with `SLOT_NONE` have no statistics."""
_HEAD_BYTES = 3
_BYTES_MIN = 11
"""Bytes of a block without columns: head and the sizes of two empty rows."""
_DECIMAL_BYTES_MAX = 16


@kernel()
def _check_row(
    buf: Any, row: Any, size: Any, indexes: Any, count: Any, slots: Any, note: Any
) -> Any:
    """Check that every value of a row of minima or maxima lies inside it; returns a fault or 0."""
    if size == 0:
        return np.int64(0)
    null_bytes = ((count + 71) // 64) * 8
    if size < null_bytes + 8 * count:
        return refuse(note, BatchFault.STATISTICS_ROW, -1, -1, size)
    for index in range(count):
        column = load_i16(buf, indexes + 2 * index)
        kind = slots[column]
        is_null = (load_u8(buf, row + ((index + 8) >> 3)) >> (index & 7)) & 1
        if kind == SLOT_FIXED or is_null:
            continue
        # The slot holds offset and length of the value, or up to 7 bytes of the value itself.
        slot = load_i64(buf, row + null_bytes + 8 * index)
        offset = slot >> 32
        length = slot & 0xFFFFFFFF
        if kind == SLOT_TIMESTAMP:
            length = np.int64(8)
        elif slot < 0:
            offset, length = np.int64(0), (slot >> 56) & 0x7F
            if length <= 7:
                continue
            length = size + 1
        too_long = kind == SLOT_DECIMAL and length > _DECIMAL_BYTES_MAX
        if offset < 0 or offset + length > size or too_long:
            return refuse(note, BatchFault.STATISTICS_ROW, -1, column, size)
    return np.int64(0)


@kernel()
def check_statistics(
    buf: Any, start: Any, size: Any, record_count: Any, columns: Any, slots: Any, note: Any
) -> Any:
    """Check the block of `size` bytes at `start`; returns a fault or 0.

    `slots` says for each of the `columns` of the schema how it stands in a row.
    """
    if size < _BYTES_MIN:
        return refuse(note, BatchFault.STATISTICS_LENGTH, -1, size, _BYTES_MIN)
    if load_u8(buf, start) != 1:
        return refuse(note, BatchFault.STATISTICS_VERSION, -1, load_u8(buf, start), 1)
    count = load_i16(buf, start + 1)
    rows_size = size - _BYTES_MIN - 6 * count
    if count < 0 or rows_size < 0:
        return refuse(note, BatchFault.STATISTICS_LENGTH, -1, _BYTES_MIN + 6 * count, size)
    indexes = start + _HEAD_BYTES
    null_counts = indexes + 2 * count
    for index in range(count):
        column = load_i16(buf, indexes + 2 * index)
        if column < 0 or column >= columns or slots[column] == SLOT_NONE:
            return refuse(note, BatchFault.STATISTICS_COLUMN, -1, column, columns)
        nulls = load_i32(buf, null_counts + 4 * index)
        if nulls < 0 or nulls > record_count:
            return refuse(note, BatchFault.STATISTICS_NULL_COUNT, -1, nulls, record_count)
    # The two rows share the rest of the block and must fill it.
    minima = null_counts + 4 * count
    minima_size = load_i32(buf, minima)
    if minima_size < 0 or minima_size > rows_size:
        return refuse(note, BatchFault.STATISTICS_LENGTH, -1, minima_size, size)
    maxima = minima + 4 + minima_size
    maxima_size = load_i32(buf, maxima)
    if maxima_size != rows_size - minima_size:
        return refuse(note, BatchFault.STATISTICS_LENGTH, -1, maxima_size, size)
    fault = _check_row(buf, minima + 4, minima_size, indexes, count, slots, note)
    if fault == 0:
        fault = _check_row(buf, maxima + 4, maxima_size, indexes, count, slots, note)
    return fault
