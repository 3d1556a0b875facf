"""Rows from where they lie into one buffer, and out of it as values with their schema id.

Each of these goes once through a batch. They are apart from `change.py`, which says what they are
for, because a put of a few hundred rows is bound by the number of calls and not by what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from zufluss.kv.merge.base import NO_ROW, UNCHANGED, Numbers
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, copy, load_i16, store_u8
from zufluss.record.slices import ABSENT, Positions, Slices

SCHEMA_ID_BYTES = 2
"""A stored value begins with the schema id of its row, little-endian."""

_IN = types.Array(types.int64, 1, "C", readonly=True)
_OUT = types.Array(types.int64, 1, "C")
_TABLE = types.Array(types.int64, 2, "C")
_COUNTS = types.Array(types.int32, 1, "C", readonly=True)
_COUNTS_OUT = types.Array(types.int32, 1, "C")
_BYTES_OUT = types.Array(types.uint8, 1, "C")
_PAIR: Any = types.UniTuple(types.int64, 2)  # type: ignore[no-untyped-call]
_FOUR: Any = types.UniTuple(types.int64, 4)  # type: ignore[no-untyped-call]


class Gathered(NamedTuple):
    """Candidates of a put batch, brought together."""

    rows: Slices
    """The rows, without schema ids; absent where there is none."""
    field_counts: npt.NDArray[np.int32]
    """The number of fields of each, by its schema."""
    keys: Slices
    """The key each was sent under, or is stored under."""


class Changed(NamedTuple):
    """What a batch leaves behind."""

    groups: Positions
    """The groups whose row changes."""
    values: Slices
    """Their values: schema id and row; absent for those that are deleted."""
    more_rows: int
    """How many rows there are more, or less."""


def number_candidates(rows: Slices, values: Slices) -> tuple[Numbers, Numbers, int]:
    """Candidate numbers of the records and of the stored rows, and how many deletes there are."""
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
) -> Gathered:
    """Bring candidates together.

    Those below `rows.count` are rows of `schema_id`; those from there on stored values, one for
    each group, whose first record is `first`. `field_counts` has the fields of every schema id.
    """
    count = len(candidates)
    sizes = (rows.starts, rows.ends, values.starts, values.ends, candidates)
    data = np.empty(_gathered_size(*sizes), np.uint8)
    table, counts = np.empty((4, count), np.int64), np.empty(count, np.int32)
    size = _gather(
        rows.data, values.data, *sizes, keys.starts, keys.ends, first, schema_id, field_counts,
        data, table, counts,
    )  # fmt: skip
    if size != len(data):
        raise IndexError("a row, a stored value or its schema id lies outside of what is known")
    placed = Slices(data, table[0], table[1])
    return Gathered(placed, counts, Slices(keys.data, table[2], table[3]))


def changed_values(rows: Slices, schema_id: int, final: Numbers, old: Numbers) -> Changed:
    """The values that the groups end up with, of rows of `schema_id` by number."""
    count, size, more_rows, fault = _changed_size(rows.starts, rows.ends, final, old)
    if fault:
        raise IndexError("a group ends up with a row that is not there")
    table, data = np.empty((3, count), np.int64), np.empty(size, np.uint8)
    if not _write_changed(rows.data, rows.starts, rows.ends, final, schema_id, table, data):
        raise IndexError("a row does not lie within its data")
    return Changed(table[0], Slices(data, table[1], table[2]), more_rows)


def merged_values(
    rows: Slices,
    schema_id: int,
    final: Numbers,
    came: Numbers,
    old: Numbers,
    made: Callable[[Numbers, int], Slices],
) -> Changed:
    """The values that the groups end up with, of rows of the batch and of rows that were made.

    `final` has a row of the changelog for each group. `came` has of each of those the row of the
    batch that it is; where it is none, `made` writes its value, behind so many bytes that it leaves
    free.
    """
    table, index = np.empty((3, len(final)), np.int64), np.empty(len(final), np.int64)
    count, others, size, more_rows = _merged_size(
        rows.starts, rows.ends, final, came, old, table, index
    )
    if count < 0:
        raise IndexError("a group ends up with a row that is not there")
    values = made(index[:others], size)
    groups, starts, ends = table[:, :count]
    if not _write_merged(
        *rows, final, came, schema_id, groups, values.starts, values.ends, starts, ends, values.data
    ):
        raise IndexError("a row does not lie within its data")
    return Changed(groups, Slices(values.data, starts, ends), more_rows)


def prefixed(rows: Slices, prefix: int, width: int) -> Slices:
    """All of them behind `width` bytes of a number; absent ones stay absent."""
    sizes = np.where(rows.starts == ABSENT, 0, rows.ends - rows.starts + width)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    data = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    if not _prefix(rows.data, rows.starts, rows.ends, prefix, width, starts, data):
        raise IndexError("a slice does not lie within its data")
    return Slices(data, np.where(rows.starts == ABSENT, np.int64(ABSENT), starts), ends)


def longest(slices: Slices) -> int:
    """Bytes of the longest; absent ones have none."""
    return int(_longest(slices.starts, slices.ends))


@kernel(types.int64(_IN, _IN), short=True)
def _longest(starts: Any, ends: Any) -> Any:
    most = np.int64(0)
    for i in range(min(len(starts), len(ends))):
        if starts[i] != ABSENT:
            most = max(most, ends[i] - starts[i])
    return most


@kernel(types.int64(_IN, _IN, _OUT, _OUT), boundscheck=True, short=True)
def _number(rows: Any, values: Any, new: Any, old: Any) -> Any:
    deletes = 0
    for i in range(len(rows)):
        new[i] = i if rows[i] != ABSENT else NO_ROW
        deletes += rows[i] == ABSENT
    for g in range(len(values)):
        old[g] = len(rows) + g if values[g] != ABSENT else NO_ROW
    return deletes


@kernel(inline=True)
def _place(rows: Any, row_ends: Any, values: Any, value_ends: Any, candidate: Any) -> Any:
    """Where a candidate lies; one that does not exist is as absent as one without a row."""
    count = len(rows)
    if candidate < 0 or candidate >= count + len(values):
        return np.int64(ABSENT), np.int64(ABSENT)
    if candidate < count:
        return rows[candidate], row_ends[candidate]
    start = values[candidate - count]
    if start != ABSENT:
        start += SCHEMA_ID_BYTES
    return start, value_ends[candidate - count]


@kernel(types.int64(_IN, _IN, _IN, _IN, _IN), short=True)
def _gathered_size(rows: Any, row_ends: Any, values: Any, value_ends: Any, candidates: Any) -> Any:
    size = np.int64(0)
    for k in range(len(candidates)):
        start, end = _place(rows, row_ends, values, value_ends, candidates[k])
        if start != ABSENT and end > start:
            size += end - start
    return size


@kernel(
    types.int64(
        BYTES, BYTES, _IN, _IN, _IN, _IN, _IN, _IN, _IN, _IN, types.int64, _COUNTS, _BYTES_OUT,
        _TABLE, _COUNTS_OUT,
    ),
    short=True,
)  # fmt: skip
def _gather(
    rows_data: Any,
    values_data: Any,
    rows: Any,
    row_ends: Any,
    values: Any,
    value_ends: Any,
    candidates: Any,
    keys: Any,
    key_ends: Any,
    first: Any,
    schema_id: Any,
    field_counts: Any,
    out: Any,
    table: Any,
    counts: Any,
) -> Any:
    """Copy the rows one after the other; answers their size, −1 if something lies outside."""
    at = np.int64(0)
    for k in range(len(candidates)):
        candidate = candidates[k]
        stored = candidate >= len(rows)
        record = candidate
        if stored:
            if candidate - len(rows) >= len(first):
                return np.int64(-1)
            record = first[candidate - len(rows)]
        if record < 0 or record >= len(keys):
            return np.int64(-1)
        table[2, k], table[3, k] = keys[record], key_ends[record]
        start, end = _place(rows, row_ends, values, value_ends, candidate)
        schema = np.int64(schema_id)
        table[0, k] = table[1, k] = ABSENT
        if start != ABSENT:
            size = end - start
            limit = len(values_data) if stored else len(rows_data)
            if start < 0 or size < 0 or end > limit or at + size > len(out):
                return np.int64(-1)
            if stored:
                schema = load_i16(values_data, start - SCHEMA_ID_BYTES)
                copy(out, at, values_data, start, size)
            else:
                copy(out, at, rows_data, start, size)
            table[0, k] = at
            at += size
            table[1, k] = at
        if schema < 0 or schema >= len(field_counts):
            return np.int64(-1)
        counts[k] = field_counts[schema]
    return at


@kernel(_FOUR(_IN, _IN, _IN, _IN), short=True)
def _changed_size(starts: Any, ends: Any, final: Any, old: Any) -> Any:
    """How many groups change, the bytes of their values, more rows, and whether one is missing."""
    count = size = more = np.int64(0)
    for g in range(len(final)):
        row = final[g]
        if row == UNCHANGED:
            continue
        count += 1
        if row == NO_ROW:
            more -= old[g] != NO_ROW
            continue
        if row < 0 or row >= len(starts) or starts[row] < 0 or ends[row] < starts[row]:
            return count, size, more, np.int64(1)
        more += old[g] == NO_ROW
        size += ends[row] - starts[row] + SCHEMA_ID_BYTES
    return count, size, more, np.int64(0)


@kernel(inline=True)
def _put(data: Any, start: Any, end: Any, prefix: Any, width: Any, out: Any, at: Any) -> Any:
    """Write `width` bytes of `prefix` and a slice; where it ends, −1 if it lies outside."""
    size = end - start
    if start < 0 or size < 0 or end > len(data) or at < 0 or at + width + size > len(out):
        return np.int64(-1)
    for b in range(width):
        store_u8(out, at + b, prefix >> (8 * b))
    copy(out, at + width, data, start, size)
    return at + width + size


@kernel(types.boolean(BYTES, _IN, _IN, _IN, types.int64, _TABLE, _BYTES_OUT), short=True)
def _write_changed(
    data: Any, starts: Any, ends: Any, final: Any, schema_id: Any, table: Any, out: Any
) -> Any:
    at, count = np.int64(0), 0
    for g in range(len(final)):
        row = final[g]
        if row == UNCHANGED:
            continue
        table[0, count] = g
        table[1, count] = table[2, count] = ABSENT
        if row != NO_ROW:
            table[1, count] = at
            at = _put(data, starts[row], ends[row], schema_id, SCHEMA_ID_BYTES, out, at)
            if at < 0:
                return False
            table[2, count] = at
        count += 1
    return True


@kernel(_FOUR(_IN, _IN, _IN, _IN, _IN, _TABLE, _OUT), boundscheck=True, short=True)
def _merged_size(
    starts: Any, ends: Any, final: Any, came: Any, old: Any, table: Any, index: Any
) -> Any:
    """Number the groups that change and place their values, those that are made aside.

    Answers how many groups, or −1; how many made rows, in `index`; the bytes of the other values;
    and how many rows more there are.
    """
    count = others = size = more = np.int64(0)
    for g in range(len(final)):
        row = final[g]
        if row == UNCHANGED:
            continue
        table[0, count] = g
        table[1, count] = table[2, count] = ABSENT
        count += 1
        if row == NO_ROW:
            more -= old[g] != NO_ROW
            continue
        if row < 0 or row >= len(came) or came[row] >= len(starts):
            return np.int64(-1), others, size, more
        more += old[g] == NO_ROW
        if came[row] < 0:
            index[others] = row
            others += 1
            continue
        table[1, count - 1] = size
        size += max(ends[came[row]] - starts[came[row]], 0) + SCHEMA_ID_BYTES
        table[2, count - 1] = size
    return count, others, size, more


@kernel(
    types.boolean(
        BYTES, _IN, _IN, _IN, _IN, types.int64, _IN, _IN, _IN, _OUT, _OUT, _BYTES_OUT
    ),
    boundscheck=True,
    short=True,
)  # fmt: skip
def _write_merged(
    data: Any,
    starts: Any,
    ends: Any,
    final: Any,
    came: Any,
    schema_id: Any,
    groups: Any,
    made_starts: Any,
    made_ends: Any,
    value_starts: Any,
    value_ends: Any,
    out: Any,
) -> Any:
    """Write the rows that came to their places, and tell the places of those that were made."""
    made = 0
    for k in range(len(groups)):
        row = final[groups[k]]
        if row == NO_ROW:
            continue
        record = came[row]
        if record < 0:
            value_starts[k], value_ends[k] = made_starts[made], made_ends[made]
            made += 1
            continue
        start, end, at = starts[record], ends[record], value_starts[k]
        if _put(data, start, end, schema_id, SCHEMA_ID_BYTES, out, at) < 0:
            return False
    return True


@kernel(types.boolean(BYTES, _IN, _IN, types.int64, types.int64, _IN, _BYTES_OUT), short=True)
def _prefix(
    data: Any, starts: Any, ends: Any, prefix: Any, width: Any, out_starts: Any, out: Any
) -> Any:
    for i in range(len(starts)):
        if starts[i] == ABSENT:
            continue
        if _put(data, starts[i], ends[i], prefix, width, out, out_starts[i]) < 0:
            return False
    return True
