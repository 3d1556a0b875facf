"""Arrow columns to cells: the result of `RowCodec.locate`, without rows in between.

Numbers have the same bytes in cells as in Arrow buffers, and texts need only their places, so whole
buffers are copied. A batch with nested columns is encoded to rows first, because their cells are
places of encoded values.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from zufluss.record.kernels import row_read as k
from zufluss.record.rows.cells import LocatedRows
from zufluss.record.rows.codec import RowCodec
from zufluss.record.slices import Bytes

_NO_BYTES: Bytes = np.empty(0, np.uint8)


def located(codec: RowCodec, batch: pa.RecordBatch) -> LocatedRows:
    """Return the cells of a batch."""
    plain = batch.schema.types == codec.schema.arrow.types
    if codec.plan.inner or not plain or any(column.offset for column in batch.columns):
        return codec.locate(codec.encode(batch))
    rows = codec.room(_NO_BYTES, batch.num_rows)
    rows.facts[:] = 0
    data: list[Bytes] = []
    base = 0
    for i, column in enumerate(batch.columns):
        _write_valid(codec, rows, i, column)
        if codec.plan.sinks[i] < k.TEXT:
            _write_numbers(codec, rows, i, column)
        else:
            data.append(_write_places(codec, rows, i, column, base))
            base += len(data[-1])
    return codec.moved(rows, np.concatenate(data) if data else _NO_BYTES)


def _write_valid(codec: RowCodec, rows: LocatedRows, i: int, column: pa.Array) -> None:
    stride = (rows.count + 63) // 64 * 8
    at = 8 * rows.count * codec.plan.slots[-1] + i * stride
    bits, size = column.buffers()[0], (rows.count + 7) // 8
    rows.cells[at : at + stride] = 0xFF
    if bits is not None:
        rows.cells[at : at + size] = np.frombuffer(bits, np.uint8, size)
    rows.facts[i, k.NULLS] = column.null_count


def _write_numbers(codec: RowCodec, rows: LocatedRows, i: int, column: pa.Array) -> None:
    size = rows.count * codec.plan.widths[i] or (rows.count + 7) // 8
    at = 8 * rows.count * codec.plan.slots[i]
    rows.cells[at : at + size] = np.frombuffer(column.buffers()[1], np.uint8, size)


def _write_places(codec: RowCodec, rows: LocatedRows, i: int, column: pa.Array, base: int) -> Bytes:
    """Write the places of the values, from `base` on; returns the bytes that they point into."""
    starts, ends = rows.places(codec.plan, i)
    buffers, count = column.buffers(), rows.count
    if codec.plan.sinks[i] == k.PADDED:
        width = codec.plan.widths[i]
        starts[:] = np.arange(count) * width + base
        ends[:] = starts + width
        body = buffers[1]
    else:
        offsets = np.frombuffer(buffers[1], np.int32, count + 1)
        starts[:], ends[:] = offsets[:-1], offsets[1:]
        starts += base
        ends += base
        body = buffers[2]
    if column.null_count:
        absent = column.is_null().to_numpy(zero_copy_only=False)
        starts[absent] = ends[absent] = -1
    rows.facts[i, k.PLACED] = int((ends - starts).sum())
    return _NO_BYTES if body is None else np.frombuffer(body, np.uint8)
