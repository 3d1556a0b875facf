"""Which rows a batch of records makes: kernels that look at keys and change types, not at values.

A batch of n records meets the stored rows of G keys ("groups"), at most one row for each. These
n + G rows are the *source rows*: first the rows of the records, then the stored ones. The fold
writes *result rows*, which are the rows of the changelog in order. Rows are numbered through: a
number of n + G or more is a result row.

    script   which result rows each record writes, and which row it starts from
    divide   which result rows are rows of records as they came, and which records are left to fold
    fold     the values of the result rows, one column at a time (`column_fold.py`)
    settle   which result rows stay: an update that changes nothing is dropped (`fold.py` keeps the
             last one of a batch in which nothing else stays)
    take     the result rows that stay (`column_fold.py`)

A record on a key that has a row writes two result rows, the row before and the row after; without
before images it writes only the second, which always stays. Records are folded in order, so the
row that one record writes is there when the next record of the key starts from it.

The first row of a key is the record's row as it came, unless an operation changes it (`AS_CAME`).
If none does, `divide` lets such rows be read straight into their place among the result rows, and
only the other records, with the stored rows that they meet, go through the fold.

The plain-Python twin is `tests/record/aggregate/plain_aggregation.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.aggregate.cells import is_valid
from zufluss.record.aggregate.opcodes import (
    ASSIGN,
    DELETE,
    INSERT,
    KEEP,
    NO_ROW,
    OP,
    UNCHANGED,
    UPDATE_AFTER,
    UPDATE_BEFORE,
)
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES
from zufluss.record.kernels.raw import address_of
from zufluss.record.kernels.row_read import SLOT

_IN = types.Array(types.int64, 1, "C", readonly=True)
_OUT = types.Array(types.int64, 1, "C")
_LINES = types.Array(types.int64, 2, "C", readonly=True)
_LINES_OUT = types.Array(types.int64, 2, "C")
_BYTES_OUT = types.Array(types.uint8, 1, "C")
_PAIR = types.UniTuple(types.int64, 2)


@kernel(types.void(BYTES, _LINES, _LINES, types.int64, _IN, _BYTES_OUT), short=True)
def find_bare(cells: Any, program: Any, ops: Any, rows: Any, old: Any, bare: Any) -> Any:
    """Set `bare[group]` to 1 if its stored row has only NULLs in columns that no record writes."""
    fields, stride = len(ops), (rows + 63) // 64 * 8
    bitmaps = address_of(cells) + 8 * rows * program[fields, SLOT]
    for group in range(min(len(old), len(bare))):
        bare[group] = 1
        row = old[group]
        if row < 0 or row >= rows:
            continue
        for column in range(fields):
            if ops[column, OP] in (KEEP, ASSIGN) and is_valid(bitmaps + column * stride, row):
                bare[group] = 0


@kernel(
    _PAIR(
        _IN, _IN, BYTES, types.int64, types.boolean, types.boolean, _OUT, _OUT, _OUT, _BYTES_OUT,
        _BYTES_OUT,
    ),
    boundscheck=True,
    short=True,
)  # fmt: skip
def script(
    group: Any,
    new: Any,
    clears: Any,
    sources: Any,
    ignore_deletes: Any,
    before_images: Any,
    current: Any,
    prev: Any,
    at: Any,
    kinds: Any,
    keep: Any,
) -> Any:
    """Decide which result rows the records write; returns their number, and how many are inserts.

    Per record: `group`, `new` (its source row, `NO_ROW` for a delete), and as output `prev` (the
    row it starts from) and `at` (its first result row, `NO_ROW` for none). Per group: `current`
    (its row; after the call the one after the batch) and `clears` (1 = a delete removes the row,
    0 = the row stays because other columns are set). Per result row: `kinds` (its change type) and
    `keep` (1 = it stays whatever its values are). `sources` is the number of source rows.
    """
    count = inserts = np.int64(0)
    for record in range(len(new)):
        key = group[record]
        row = current[key]
        prev[record], at[record] = row, count
        if new[record] == NO_ROW and (row == NO_ROW or ignore_deletes):
            at[record] = NO_ROW
        elif new[record] == NO_ROW and clears[key]:
            kinds[count], keep[count] = DELETE, 1
            current[key] = NO_ROW
            count += 1
        elif row == NO_ROW:
            kinds[count], keep[count] = INSERT, 1
            current[key] = sources + count
            count += 1
            inserts += 1
        elif not before_images:
            kinds[count], keep[count] = UPDATE_AFTER, 1
            current[key] = sources + count
            count += 1
        else:
            # Whether the pair stays is known once the fold has compared the values of all columns.
            kinds[count], kinds[count + 1] = UPDATE_BEFORE, UPDATE_AFTER
            keep[count] = keep[count + 1] = 0
            current[key] = sources + count + 1
            count += 2
    return count, inserts


@kernel(
    _PAIR(_IN, _IN, _IN, BYTES, types.int64, types.int64, _OUT, _OUT, _OUT, _LINES_OUT),
    boundscheck=True,
    short=True,
)
def divide(
    new: Any,
    prev: Any,
    at: Any,
    kinds: Any,
    sources: Any,
    inserts: Any,
    came: Any,
    places: Any,
    needed: Any,
    parts: Any,
) -> Any:
    """Take the inserts out of a script; returns how many records and source rows are left to fold.

    `came[result row]` becomes the record whose row it is, or `NO_ROW`; `places` lists the result
    rows of inserts. `needed` lists the source rows to read: those of inserts first, then those of
    the fold. `parts` gets new, prev and at of the records that are left, where source rows are
    numbered by their position among the needed rows of the fold.
    """
    copied = left = rows = np.int64(0)
    for result in range(len(came)):
        came[result] = NO_ROW
    for record in range(len(new)):
        result, state = at[record], prev[record]
        if result < 0:
            continue
        if kinds[result] == INSERT:
            came[result], places[copied], needed[copied] = record, result, new[record]
            copied += 1
            continue
        parts[0, left], parts[1, left], parts[2, left] = NO_ROW, state, result
        if new[record] != NO_ROW:
            parts[0, left] = rows
            needed[inserts + rows] = new[record]
            rows += 1
        if state < sources:
            parts[1, left] = rows
            needed[inserts + rows] = state
            rows += 1
        left += 1
    # Result rows are numbered behind the source rows, of which there are fewer now.
    for part in range(left):
        if parts[1, part] >= sources:
            parts[1, part] += rows - sources
    return left, rows


@kernel(types.int64(_IN, _IN, BYTES, BYTES, _IN, _OUT, _OUT), boundscheck=True, short=True)
def settle(group: Any, at: Any, kinds: Any, keep: Any, old: Any, final: Any, index: Any) -> Any:
    """List the result rows that stay in `index`; returns how many.

    `final[group]` becomes the position of its last row in that list, `NO_ROW` if the batch deleted
    the key, or `UNCHANGED`.
    """
    for key in range(len(final)):
        final[key] = UNCHANGED
    count = np.int64(0)
    for record in range(len(at)):
        result = at[record]
        if result < 0 or not keep[result]:
            continue
        key = group[record]
        index[count] = result
        count += 1
        if kinds[result] == DELETE:
            final[key] = NO_ROW if old[key] != NO_ROW else UNCHANGED
            continue
        if kinds[result] == UPDATE_BEFORE:
            index[count] = result + 1
            count += 1
        final[key] = count - 1
    return count
