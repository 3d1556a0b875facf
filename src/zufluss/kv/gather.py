"""Rows from where they lie into one buffer, and out of it as values with their schema id."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, copy, load_i16, store_u8
from zufluss.record.slices import ABSENT, Positions, Slices

SCHEMA_ID_BYTES = 2
"""A stored value begins with the schema id of its row, little-endian."""

_IN = types.Array(types.int64, 1, "C", readonly=True)
_OUT = types.Array(types.int64, 1, "C")
_BYTES_OUT = types.Array(types.uint8, 1, "C")


def gather_rows(
    rows: Slices, schema_id: int, values: Slices, wanted: Positions
) -> tuple[Slices, npt.NDArray[np.int64]]:
    """Copy rows by number, and the schema id of each.

    Numbers below `rows.count` are rows of `schema_id`, those from there on stored values, whose
    schema ids are taken off. One that is absent stays so.
    """
    count = rows.count
    starts = np.concatenate((rows.starts, values.starts))[wanted]
    ends = np.concatenate((rows.ends, values.ends))[wanted]
    lengths = np.where(starts == ABSENT, 0, ends - starts)
    data = np.empty(int(lengths.sum()), np.uint8)
    schema_ids = np.full(len(wanted), schema_id, np.int64)
    size = _gather(rows.data, values.data, wanted, count, starts, ends, data, schema_ids)
    if size < 0:
        raise IndexError("a slice does not lie within its data")
    return Slices(data[:size], starts, ends), schema_ids


def prefix_rows(rows: Slices, wanted: Positions, schema_id: int) -> Slices:
    """Values of these rows, by number; a negative number is an absent value."""
    return _prefixed(rows, wanted, schema_id, SCHEMA_ID_BYTES)


def prefix_zeros(rows: Slices, count: int) -> Slices:
    """All of them, behind so many zero bytes."""
    return _prefixed(rows, np.arange(rows.count, dtype=np.int64), 0, count)


def _prefixed(rows: Slices, wanted: Positions, prefix: int, width: int) -> Slices:
    there = wanted >= 0
    lengths = np.zeros(len(wanted), np.int64)
    chosen = wanted[there]
    lengths[there] = rows.ends[chosen] - rows.starts[chosen] + width
    ends = np.cumsum(lengths)
    starts = ends - lengths
    data = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    if not _prefix(rows.data, rows.starts, rows.ends, wanted, prefix, width, starts, data):
        raise IndexError("a slice does not lie within its data")
    starts[~there] = ABSENT
    return Slices(data, starts, ends)


@kernel(types.int64(BYTES, BYTES, _IN, types.int64, _OUT, _OUT, _BYTES_OUT, _OUT))
def _gather(
    rows: Any,
    values: Any,
    wanted: Any,
    count: Any,
    starts: Any,
    ends: Any,
    out: Any,
    schema_ids: Any,
) -> Any:
    """Copy one after the other, setting starts and ends to the copies; −1 if one lies outside."""
    at = 0
    for k in range(len(wanted)):
        start, end = starts[k], ends[k]
        if start == ABSENT:
            continue
        stored = wanted[k] >= count
        limit = len(values) if stored else len(rows)
        if start < 0 or end > limit:
            return -1
        if stored:
            if end - start < SCHEMA_ID_BYTES:
                return -1
            schema_ids[k] = load_i16(values, start)
            start += SCHEMA_ID_BYTES
        size = end - start
        if size < 0 or at + size > len(out):
            return -1
        if stored:
            copy(out, at, values, start, size)
        else:
            copy(out, at, rows, start, size)
        starts[k] = at
        at += size
        ends[k] = at
    return at


@kernel(types.boolean(BYTES, _IN, _IN, _IN, types.int64, types.int64, _IN, _BYTES_OUT))
def _prefix(
    data: Any,
    starts: Any,
    ends: Any,
    wanted: Any,
    prefix: Any,
    width: Any,
    out_starts: Any,
    out: Any,
) -> Any:
    """Write each wanted slice behind `width` bytes of `prefix`; False if one lies outside."""
    for k in range(len(wanted)):
        i = wanted[k]
        if i < 0:
            continue
        if i >= len(starts):
            return False
        start, size, at = starts[i], ends[i] - starts[i], out_starts[k]
        if start < 0 or size < 0 or ends[i] > len(data):
            return False
        if at + width + size > len(out):
            return False
        for b in range(width):
            store_u8(out, at + b, prefix >> (8 * b))
        copy(out, at + width, data, start, size)
    return True
