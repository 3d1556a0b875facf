"""Walking over the batches of a segment by their headers alone.

A fetch looks for the batch that holds an offset and takes whole batches from there; recovery lists
every batch of a segment to rebuild its indexes. Both only need the header's length, base offset
and last offset delta. `walk` and `last_whole` stop at the first header that cannot be one and
never look behind `end`; what lies there is the caller's to judge. `scan_segment` gives the
columns of many headers at once. CRCs are not looked at.

`walk_plain` and `scan_plain` are the twins in plain Python.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zufluss.errors import CorruptRecordError
from zufluss.record.header import iter_headers
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import (
    BYTES,
    load_i16,
    load_i32,
    load_i64,
    load_u8,
    types,
)

COLUMNS = 8
"""Columns of the table that `_scan` fills."""


class Walked(NamedTuple):
    """Whole batches found by a walk."""

    first_pos: int
    """Where the first one begins."""
    end_pos: int
    """Where the last one ends; equal to `first_pos` if there is none."""
    next_offset: int
    """Offset after the last one; the wanted offset if there is none."""
    batches: int
    """How many they are."""


class SegmentScan(NamedTuple):
    """The batches of a segment as columns, all int64."""

    positions: npt.NDArray[np.int64]
    """Where each begins."""
    sizes: npt.NDArray[np.int64]
    """Its bytes."""
    base_offsets: npt.NDArray[np.int64]
    """Its first offset."""
    last_offsets: npt.NDArray[np.int64]
    """Its last offset."""
    timestamps: npt.NDArray[np.int64]
    """Its commit time, ms."""
    writer_ids: npt.NDArray[np.int64]
    """Its writer, −1 for none."""
    sequences: npt.NDArray[np.int64]
    """Its batch sequence, −1 for none."""
    schema_ids: npt.NDArray[np.int64]
    """Its schema."""
    end: int
    """Where the last whole batch ends; what follows is no batch."""


@kernel()
def _size(buf: Any, pos: Any, end: Any) -> Any:
    """Bytes of the batch at `pos`, 0 if there is no whole one before `end`."""
    if end - pos < 48:
        return np.int64(0)
    size, magic = load_i32(buf, pos + 8) + 12, load_u8(buf, pos + 12)
    if magic > 2 or size < 48 + 4 * magic or size > end - pos:
        return np.int64(0)
    delta = load_i32(buf, pos + (32 if magic == 2 else 28))
    if delta < 0 or load_i64(buf, pos) < 0:
        return np.int64(0)
    return np.int64(size)


@kernel()
def _next_offset(buf: Any, pos: Any) -> Any:
    delta = load_i32(buf, pos + (32 if load_u8(buf, pos + 12) == 2 else 28))
    return load_i64(buf, pos) + delta + 1


_WALK = types.UniTuple(types.int64, 4)
_I64 = types.int64


@kernel(_WALK(BYTES, _I64, _I64, _I64, _I64, _I64, types.boolean))
def _walk(
    buf: Any, start: Any, end: Any, offset: Any, max_bytes: Any, up_to: Any, at_least_one: Any
) -> Any:
    end = min(end, buf.size)
    pos = max(start, 0)
    size = _size(buf, pos, end)
    while size > 0 and _next_offset(buf, pos) <= offset:
        pos += size
        size = _size(buf, pos, end)
    first, reached, count = pos, offset, np.int64(0)
    while size > 0 and load_i64(buf, pos) < up_to:
        if pos + size - first > max_bytes and not (at_least_one and count == 0):
            break
        reached = _next_offset(buf, pos)
        pos += size
        count += 1
        size = _size(buf, pos, end)
    return first, pos, reached, count


def walk(
    buf: Any,
    start: int,
    end: int,
    offset: int,
    max_bytes: int,
    up_to_offset: int = 2**63 - 1,
    *,
    at_least_one: bool = True,
) -> Walked:
    """Find the whole batches of buf[start:end] from the one that holds `offset` on.

    They take at most `max_bytes` together (`at_least_one`: but for a single larger one), and each
    begins below `up_to_offset`.
    """
    return Walked(*_walk(buf, start, end, offset, max_bytes, up_to_offset, at_least_one))


def walk_plain(
    buf: Any,
    start: int,
    end: int,
    offset: int,
    max_bytes: int,
    up_to_offset: int = 2**63 - 1,
    *,
    at_least_one: bool = True,
) -> Walked:
    """Do the same as `walk`, in plain Python."""
    first = taken = start
    reached, count = offset, 0
    for pos, header in _plain_headers(buf, start, end):
        after = pos + header.size
        if count == 0 and header.next_offset <= offset:
            first = taken = after
            continue
        fits = after - first <= max_bytes or (at_least_one and count == 0)
        if header.base_offset >= up_to_offset or not fits:
            break
        taken, reached, count = after, header.next_offset, count + 1
    return Walked(first, taken, reached, count)


def _plain_headers(buf: Any, start: int, end: int) -> Any:
    """Yield position and header of the batches from `start` on, up to the first that is none."""
    try:
        for pos, header in iter_headers(memoryview(buf)[:end], start):
            if header.last_offset_delta < 0 or header.base_offset < 0:
                return
            yield pos, header
    except CorruptRecordError:
        return


@kernel(types.UniTuple(_I64, 2)(BYTES, _I64, _I64))
def _last_whole(buf: Any, start: Any, end: Any) -> Any:
    end = min(end, buf.size)
    pos, last = max(start, 0), np.int64(-1)
    size = _size(buf, pos, end)
    while size > 0:
        last = pos
        pos += size
        size = _size(buf, pos, end)
    return last, pos


def last_whole(buf: Any, start: int, end: int) -> tuple[int, int]:
    """Return where the last whole batch of buf[start:end] begins (−1: none) and where it ends."""
    begin, after = _last_whole(buf, start, end)
    return begin, after


_TABLE = types.Array(types.int64, 2, "C")


@kernel(types.UniTuple(_I64, 2)(BYTES, _I64, _I64, _TABLE))
def _scan(buf: Any, start: Any, end: Any, table: Any) -> Any:
    """Fill `table` with one column per batch; returns how many and where it stopped."""
    end = min(end, buf.size)
    pos, count = max(start, 0), np.int64(0)
    size = _size(buf, pos, end)
    while size > 0 and count < table.shape[1]:
        shift = 4 if load_u8(buf, pos + 12) == 2 else 0
        table[0, count] = pos
        table[1, count] = size
        table[2, count] = load_i64(buf, pos)
        table[3, count] = _next_offset(buf, pos) - 1
        table[4, count] = load_i64(buf, pos + 13)
        table[5, count] = load_i64(buf, pos + 32 + shift)
        table[6, count] = load_i32(buf, pos + 40 + shift)
        table[7, count] = load_i16(buf, pos + 25 + shift)
        pos += size
        count += 1
        size = _size(buf, pos, end)
    return count, pos


@kernel(_I64(BYTES, _I64, _I64))
def _count(buf: Any, start: Any, end: Any) -> Any:
    end = min(end, buf.size)
    pos, count = max(start, 0), np.int64(0)
    size = _size(buf, pos, end)
    while size > 0:
        pos += size
        count += 1
        size = _size(buf, pos, end)
    return count


def scan_segment(buf: Any, start: int, end: int) -> SegmentScan:
    """List the whole batches of buf[start:end] up to the first bytes that are none."""
    table = np.empty((COLUMNS, _count(buf, start, end)), dtype=np.int64)
    _, after = _scan(buf, start, end, table)
    return SegmentScan._make((*table, after))


def scan_plain(buf: Any, start: int, end: int) -> SegmentScan:
    """Do the same as `scan_segment`, in plain Python."""
    rows = [
        (
            pos,
            h.size,
            h.base_offset,
            h.last_offset,
            h.timestamp,
            h.writer_id,
            h.batch_sequence,
            h.schema_id,
        )
        for pos, h in _plain_headers(buf, start, end)
    ]
    after = rows[-1][0] + rows[-1][1] if rows else start
    table = np.array(rows, dtype=np.int64).reshape(len(rows), COLUMNS).T
    return SegmentScan._make((*table, after))
