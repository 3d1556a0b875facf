"""Rows of a put batch, copied from where they lie into one buffer, and values with their schema id.

A stored value is `schema id i16, little-endian` + compacted row. Each function goes through a batch
once. `change.py` says when each is used. They are kernels and apart from that module because the
number of calls, not the work they do, bounds a put of a few hundred rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zufluss.kv.merge.base import NO_ROW, NUMBERS_IN, NUMBERS_OUT, UNCHANGED, Numbers
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, copy, load_i16, store_u8
from zufluss.record.slices import ABSENT, Positions, Slices

SCHEMA_ID_BYTES = 2
"""Bytes of the schema id that a stored value begins with."""

_TABLE_OUT = types.Array(types.int64, 2, "C")
_COUNTS_IN = types.Array(types.int32, 1, "C", readonly=True)
_COUNTS_OUT = types.Array(types.int32, 1, "C")
_BYTES_OUT = types.Array(types.uint8, 1, "C")
_FOUR: Any = types.UniTuple(types.int64, 4)


class CandidateRows(NamedTuple):
    """Candidates of a put batch, copied into one buffer."""

    rows: Slices
    """The rows, without schema ids; absent for a delete or a key without stored row."""
    field_counts: npt.NDArray[np.int32]
    """The number of fields of each row, by its schema."""
    keys: Slices
    """The key under which each row was sent or is stored."""


class NewValues(NamedTuple):
    """What a batch writes to the store."""

    groups: Positions
    """The groups whose row changes."""
    values: Slices
    """The new value of each of these groups; absent if its key is deleted."""
    more_rows: int
    """By how much the number of rows in the bucket grows; negative if it shrinks."""


def number_candidates(rows: Slices, values: Slices) -> tuple[Numbers, Numbers, int]:
    """Return the candidates of the records and of the stored rows, and the number of deletes."""
    new, old = np.empty(rows.count, np.int64), np.empty(values.count, np.int64)
    return new, old, _number(rows.starts, values.starts, new, old)


def gather(
    rows: Slices,
    schema_id: int,
    values: Slices,
    candidates: Numbers,
    keys: Slices,
    first: Numbers,
    field_counts: npt.NDArray[np.int32],
) -> CandidateRows:
    """Copy candidates into one buffer.

    Candidates below `rows.count` are rows of `schema_id`. The others are stored values, one for
    each group; `first` has the first record of each group. `field_counts` has the number of fields
    by schema id.
    """
    count = len(candidates)
    places = (rows.starts, rows.ends, values.starts, values.ends, candidates)
    data = np.empty(_gathered_size(*places), np.uint8)
    table, counts = np.empty((4, count), np.int64), np.empty(count, np.int32)
    size = _gather(
        rows.data, values.data, *places, keys.starts, keys.ends, first, schema_id, field_counts,
        data, table, counts,
    )  # fmt: skip
    if size != len(data):
        raise IndexError("a row, a stored value or its schema id lies outside of what is known")
    row_starts, row_ends, key_starts, key_ends = table
    return CandidateRows(
        Slices(data, row_starts, row_ends), counts, Slices(keys.data, key_starts, key_ends)
    )


def new_values(rows: Slices, schema_id: int, final: Numbers, old: Numbers) -> NewValues:
    """Return the values that groups end up with; `final` has the number of each group's row."""
    count, size, more_rows, fault = _values_size(rows.starts, rows.ends, final, old)
    if fault:
        raise IndexError("a group ends up with a row that is not there")
    table, data = np.empty((3, count), np.int64), np.empty(size, np.uint8)
    if not _write_values(rows.data, rows.starts, rows.ends, final, schema_id, table, data):
        raise IndexError("a row does not lie within its data")
    groups, starts, ends = table
    return NewValues(groups, Slices(data, starts, ends), more_rows)


def merged_values(
    rows: Slices,
    schema_id: int,
    final: Numbers,
    sources: Numbers,
    old: Numbers,
    encode: Callable[[Numbers, int], Slices],
) -> NewValues:
    """Return the values that groups end up with, of rows of the batch and of merged rows.

    `final` has a row of the changelog for each group. `sources` has for each row of the changelog
    the row of the batch that it is, negative for a merged row. `encode` writes the values of some
    merged rows, behind so many free bytes, which the other values get.
    """
    table, merged = np.empty((3, len(final)), np.int64), np.empty(len(final), np.int64)
    count, merged_count, size, more_rows = _place_merged(
        rows.starts, rows.ends, final, sources, old, table, merged
    )
    if count < 0:
        raise IndexError("a group ends up with a row that is not there")
    values = encode(merged[:merged_count], size)
    groups, starts, ends = table[:, :count]
    if not _write_merged(
        *rows, final, sources, schema_id, groups, values.starts, values.ends, starts, ends,
        values.data,
    ):  # fmt: skip
        raise IndexError("a row does not lie within its data")
    return NewValues(groups, Slices(values.data, starts, ends), more_rows)


def prefixed(rows: Slices, prefix: int, width: int) -> Slices:
    """Copy byte strings, each behind `width` bytes of a number; absent ones stay absent."""
    sizes = np.where(rows.starts == ABSENT, 0, rows.ends - rows.starts + width)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    data = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    if not _prefix(rows.data, rows.starts, rows.ends, prefix, width, starts, data):
        raise IndexError("a slice does not lie within its data")
    return Slices(data, np.where(rows.starts == ABSENT, np.int64(ABSENT), starts), ends)


def longest(slices: Slices) -> int:
    """Return the bytes of the longest byte string, 0 if all are absent."""
    return int(_longest(slices.starts, slices.ends))


@kernel(types.int64(NUMBERS_IN, NUMBERS_IN), short=True)
def _longest(starts: Any, ends: Any) -> Any:
    size_max = np.int64(0)
    for i in range(min(len(starts), len(ends))):
        if starts[i] != ABSENT:
            size_max = max(size_max, ends[i] - starts[i])
    return size_max


@kernel(types.int64(NUMBERS_IN, NUMBERS_IN, NUMBERS_OUT, NUMBERS_OUT), boundscheck=True, short=True)
def _number(row_starts: Any, value_starts: Any, new: Any, old: Any) -> Any:
    """Number records 0, 1, … and stored rows behind them; return the number of deletes."""
    deletes = 0
    for record in range(len(row_starts)):
        new[record] = record if row_starts[record] != ABSENT else NO_ROW
        deletes += row_starts[record] == ABSENT
    for group in range(len(value_starts)):
        old[group] = len(row_starts) + group if value_starts[group] != ABSENT else NO_ROW
    return deletes


@kernel(inline=True)
def _place(
    row_starts: Any, row_ends: Any, value_starts: Any, value_ends: Any, candidate: Any
) -> Any:
    """Return start and end of a candidate's row, `ABSENT` if the candidate does not exist."""
    records = len(row_starts)
    if candidate < 0 or candidate >= records + len(value_starts):
        return np.int64(ABSENT), np.int64(ABSENT)
    if candidate < records:
        return row_starts[candidate], row_ends[candidate]
    group = candidate - records
    start = value_starts[group]
    if start != ABSENT:
        start += SCHEMA_ID_BYTES
    return start, value_ends[group]


@kernel(types.int64(NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN), short=True)
def _gathered_size(
    row_starts: Any, row_ends: Any, value_starts: Any, value_ends: Any, candidates: Any
) -> Any:
    """Return the bytes of all rows that `_gather` copies."""
    size = np.int64(0)
    for i in range(len(candidates)):
        start, end = _place(row_starts, row_ends, value_starts, value_ends, candidates[i])
        if start != ABSENT and end > start:
            size += end - start
    return size


@kernel(
    types.int64(
        BYTES, BYTES, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN,
        NUMBERS_IN, NUMBERS_IN, types.int64, _COUNTS_IN, _BYTES_OUT, _TABLE_OUT, _COUNTS_OUT,
    ),
    short=True,
)  # fmt: skip
def _gather(
    rows: Any,
    values: Any,
    row_starts: Any,
    row_ends: Any,
    value_starts: Any,
    value_ends: Any,
    candidates: Any,
    key_starts: Any,
    key_ends: Any,
    first: Any,
    schema_id: Any,
    field_counts: Any,
    out: Any,
    table: Any,
    counts: Any,
) -> Any:
    """Copy rows one behind the other; return their size, −1 if something lies outside.

    The lines of `table` are row starts, row ends, key starts, key ends.
    """
    at = np.int64(0)
    for i in range(len(candidates)):
        # The key: that of the record itself, or of the first record of the stored row's group.
        candidate = candidates[i]
        stored = candidate >= len(row_starts)
        record = candidate
        if stored:
            if candidate - len(row_starts) >= len(first):
                return np.int64(-1)
            record = first[candidate - len(row_starts)]
        if record < 0 or record >= len(key_starts):
            return np.int64(-1)
        table[2, i], table[3, i] = key_starts[record], key_ends[record]
        # The row: a stored one has its schema id in front, a new one that of the batch.
        start, end = _place(row_starts, row_ends, value_starts, value_ends, candidate)
        schema = np.int64(schema_id)
        table[0, i] = table[1, i] = ABSENT
        if start != ABSENT:
            size = end - start
            limit = len(values) if stored else len(rows)
            if start < 0 or size < 0 or end > limit or at + size > len(out):
                return np.int64(-1)
            if stored:
                schema = load_i16(values, start - SCHEMA_ID_BYTES)
                copy(out, at, values, start, size)
            else:
                copy(out, at, rows, start, size)
            table[0, i] = at
            at += size
            table[1, i] = at
        if schema < 0 or schema >= len(field_counts):
            return np.int64(-1)
        counts[i] = field_counts[schema]
    return at


@kernel(_FOUR(NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN), short=True)
def _values_size(starts: Any, ends: Any, final: Any, old: Any) -> Any:
    """Return how many groups change, the bytes of their values, more rows, and 1 for a fault."""
    count = size = more_rows = np.int64(0)
    for group in range(len(final)):
        row = final[group]
        if row == UNCHANGED:
            continue
        count += 1
        if row == NO_ROW:
            more_rows -= old[group] != NO_ROW
            continue
        if row < 0 or row >= len(starts) or starts[row] < 0 or ends[row] < starts[row]:
            return count, size, more_rows, np.int64(1)
        more_rows += old[group] == NO_ROW
        size += ends[row] - starts[row] + SCHEMA_ID_BYTES
    return count, size, more_rows, np.int64(0)


@kernel(inline=True)
def _put(data: Any, start: Any, end: Any, prefix: Any, width: Any, out: Any, at: Any) -> Any:
    """Write `width` bytes of `prefix` and data[start:end]; return the end, −1 if outside."""
    size = end - start
    if start < 0 or size < 0 or end > len(data) or at < 0 or at + width + size > len(out):
        return np.int64(-1)
    for i in range(width):
        store_u8(out, at + i, prefix >> (8 * i))
    copy(out, at + width, data, start, size)
    return at + width + size


@kernel(
    types.boolean(
        BYTES, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, types.int64, _TABLE_OUT, _BYTES_OUT
    ),
    short=True,
)  # fmt: skip
def _write_values(
    rows: Any, starts: Any, ends: Any, final: Any, schema_id: Any, table: Any, out: Any
) -> Any:
    """Write the values of the groups that change; False if a row lies outside.

    The lines of `table` are groups, value starts, value ends.
    """
    at, count = np.int64(0), 0
    for group in range(len(final)):
        row = final[group]
        if row == UNCHANGED:
            continue
        table[0, count] = group
        table[1, count] = table[2, count] = ABSENT
        if row != NO_ROW:
            table[1, count] = at
            at = _put(rows, starts[row], ends[row], schema_id, SCHEMA_ID_BYTES, out, at)
            if at < 0:
                return False
            table[2, count] = at
        count += 1
    return True


@kernel(
    _FOUR(
        NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, _TABLE_OUT, NUMBERS_OUT
    ),
    boundscheck=True,
    short=True,
)  # fmt: skip
def _place_merged(
    starts: Any, ends: Any, final: Any, sources: Any, old: Any, table: Any, merged: Any
) -> Any:
    """List the groups that change, and place the values that are rows of the batch.

    Returns the number of groups, −1 for a fault; the number of merged rows, which are in `merged`;
    the bytes of the other values; and by how much the number of rows grows. The lines of `table`
    are groups, value starts, value ends.
    """
    count = merged_count = size = more_rows = np.int64(0)
    for group in range(len(final)):
        row = final[group]
        if row == UNCHANGED:
            continue
        table[0, count] = group
        table[1, count] = table[2, count] = ABSENT
        count += 1
        if row == NO_ROW:
            more_rows -= old[group] != NO_ROW
            continue
        if row < 0 or row >= len(sources) or sources[row] >= len(starts):
            return np.int64(-1), merged_count, size, more_rows
        more_rows += old[group] == NO_ROW
        # Merged rows get their places when they are encoded, behind all rows of the batch.
        record = sources[row]
        if record < 0:
            merged[merged_count] = row
            merged_count += 1
            continue
        table[1, count - 1] = size
        size += max(ends[record] - starts[record], 0) + SCHEMA_ID_BYTES
        table[2, count - 1] = size
    return count, merged_count, size, more_rows


@kernel(
    types.boolean(
        BYTES, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, types.int64, NUMBERS_IN, NUMBERS_IN,
        NUMBERS_IN, NUMBERS_OUT, NUMBERS_OUT, _BYTES_OUT,
    ),
    boundscheck=True,
    short=True,
)  # fmt: skip
def _write_merged(
    rows: Any,
    starts: Any,
    ends: Any,
    final: Any,
    sources: Any,
    schema_id: Any,
    groups: Any,
    merged_starts: Any,
    merged_ends: Any,
    value_starts: Any,
    value_ends: Any,
    out: Any,
) -> Any:
    """Write rows of the batch to their places, and fill in the places of merged rows."""
    merged = 0
    for i in range(len(groups)):
        row = final[groups[i]]
        if row == NO_ROW:
            continue
        record = sources[row]
        if record < 0:
            value_starts[i], value_ends[i] = merged_starts[merged], merged_ends[merged]
            merged += 1
            continue
        start, end, at = starts[record], ends[record], value_starts[i]
        if _put(rows, start, end, schema_id, SCHEMA_ID_BYTES, out, at) < 0:
            return False
    return True


@kernel(
    types.boolean(
        BYTES, NUMBERS_IN, NUMBERS_IN, types.int64, types.int64, NUMBERS_IN, _BYTES_OUT
    ),
    short=True,
)  # fmt: skip
def _prefix(
    data: Any, starts: Any, ends: Any, prefix: Any, width: Any, out_starts: Any, out: Any
) -> Any:
    for i in range(len(starts)):
        if starts[i] == ABSENT:
            continue
        if _put(data, starts[i], ends[i], prefix, width, out, out_starts[i]) < 0:
            return False
    return True
