"""The fold: what records do to their keys, column by column, from cells to cells.

A batch of n records meets G stored rows, one for each group at most. All n + G are *given* rows,
in the cells of `RowCodec.locate`; what comes out are the *made* rows, the rows of the changelog in
its order. Rows are numbered through: a number of n + G or more is a made row.

    script   which record makes which rows, and which row it starts from
    divide   which made rows are rows as they came, and what is left to be folded
    fold     the values of the made rows, a column at a time
    settle   which made rows stay: an update that changes nothing is taken out again
    take     the made rows without those

A record on a key that has a row makes two: the row as it was, and as it is now; without before
images it makes the second only, and that stays. `script` decides this by keys alone. A fold goes
through the records in order, so that the row which one record makes is there when the next one
starts from it.

The first row of a key is what came, unless an operation makes something else of it (`AS_CAME`). If
none does, such rows are taken apart at their place among the made ones, and only the other records,
with the stored rows that they meet, are given to the fold.

| column of `ops` | content |
|---|---|
| OP | what is done with the values |
| BY | MAX_BY, MIN_BY: the column that decides |
| WRAP | 1 = integers beyond their type lose their upper bits, else they are a fault |

Columns are folded in the order they are listed in, those that others decide about at the end. The
twin of all this is `zufluss.record.aggregate.plain`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.aggregate.arithmetic import (
    add,
    add_overflows,
    bits_of_double,
    bits_of_float,
    double_of,
    float_of,
    multiply,
    multiply_overflows,
    negated,
    subtract,
    subtract_overflows,
    wide_sum,
    within,
)
from zufluss.record.aggregate.cells import (
    PLACES,
    WIDE,
    compare,
    copy_value,
    is_valid,
    load,
    same,
    store,
    width_of,
)
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, types
from zufluss.record.kernels.raw import address_of, peek_i64, peek_u8, poke_i64, poke_u8
from zufluss.record.kernels.row_read import (
    FACTS,
    FLOATING,
    LIMIT_HIGH,
    LINE,
    NOT_NULL,
    NULLS,
    PLACED,
    SLOT,
    begin_cells,
    keep_null,
)

KEEP, KEY, LAST, LAST_SET, FIRST, FIRST_SET, MAX, MIN, MAX_BY, MIN_BY = range(10)
SUM, SUBTRACT, PRODUCT, DIVIDE, COUNT, UNCOUNT, ASSIGN, OUTSIDE = range(10, 18)
AS_CAME = (KEY, LAST, LAST_SET, FIRST, FIRST_SET, MAX, MIN, MAX_BY, MIN_BY, SUM, PRODUCT)
"""Operations that leave the first value of a key as it is, NULL or not."""
OP, BY, WRAP = range(3)
OPS_LINE = 3
"""Numbers in a line of `ops`."""

INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE = 1, 2, 3, 4
"""Change types, as in the log format."""
NO_ROW, UNCHANGED = -1, -2
"""In place of a row: there is none; nothing happened to the key."""

OVERFLOWS, BY_ZERO, INEXACT, NO_STATE, NULL_STATE = range(1, 6)
FAULTS = {
    OVERFLOWS: "the value is beyond {0}",
    BY_ZERO: "a product cannot be divided by 0 to take that back",
    INEXACT: "the product is no multiple of the value to be taken back",
    NO_STATE: "there is no product that a value could be taken back from",
    NULL_STATE: "it is NOT NULL, and nothing is left of it",
}
"""What to say of a fault and the type of the column."""

_OF_NULL, _OF_STATE, _OF_INPUT, _MADE = range(4)
_IN = types.Array(types.int64, 1, "C", readonly=True)
_OUT = types.Array(types.int64, 1, "C")
_LINES = types.Array(types.int64, 2, "C", readonly=True)
_LINES_OUT = types.Array(types.int64, 2, "C")
_COUNTS = types.Array(types.int32, 1, "C", readonly=True)
_BYTES_OUT = types.Array(types.uint8, 1, "C")
_PAIR = types.UniTuple(types.int64, 2)
_THREE = types.UniTuple(types.int64, 3)
_LINE_BYTES, _FACT_BYTES = 8 * LINE, 8 * FACTS


@kernel(types.void(BYTES, _LINES, _LINES, types.int64, _IN, _BYTES_OUT), short=True)
def bare(cells: Any, program: Any, ops: Any, count: Any, old: Any, out: Any) -> Any:
    """Of each group: whether the columns that no record writes are all NULL."""
    fields, stride = len(ops), (count + 63) // 64 * 8
    bitmaps = address_of(cells) + 8 * count * program[fields, SLOT]
    for g in range(min(len(old), len(out))):
        out[g] = 1
        row = old[g]
        if row < 0 or row >= count:
            continue
        for c in range(fields):
            if ops[c, OP] in (KEEP, ASSIGN) and is_valid(bitmaps + c * stride, row):
                out[g] = 0


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
    given: Any,
    ignore_deletes: Any,
    before_images: Any,
    current: Any,
    prev: Any,
    at: Any,
    kinds: Any,
    keep: Any,
) -> Any:
    """Say which rows records make; answers how many rows, and how many are of new keys.

    `current` has the row of each group and ends as it is after the batch. `clears` has for each
    group whether a delete leaves the row with other columns: 0; or takes it away: 1.
    """
    count = inserts = np.int64(0)
    for i in range(len(new)):
        g = group[i]
        row = current[g]
        prev[i], at[i] = row, count
        if new[i] == NO_ROW and (row == NO_ROW or ignore_deletes):
            at[i] = NO_ROW
        elif new[i] == NO_ROW and clears[g]:
            kinds[count], keep[count] = DELETE, 1
            current[g] = NO_ROW
            count += 1
        elif row == NO_ROW:
            kinds[count], keep[count] = INSERT, 1
            current[g] = given + count
            count += 1
            inserts += 1
        elif not before_images:
            kinds[count], keep[count] = UPDATE_AFTER, 1
            current[g] = given + count
            count += 1
        else:
            kinds[count], kinds[count + 1] = UPDATE_BEFORE, UPDATE_AFTER
            keep[count] = keep[count + 1] = 0
            current[g] = given + count + 1
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
    given: Any,
    inserts: Any,
    came: Any,
    places: Any,
    wanted: Any,
    parts: Any,
) -> Any:
    """Take the first rows of keys out of a script; answers how many records and rows are left.

    `came` gets of each made row the record that it is the row of, or `NO_ROW`; `places` where these
    rows are among those made. `wanted` gets the given rows that are needed: these first, then those
    of the fold. `parts` gets what the fold wants to know of its records: new, prev and at, where
    given rows are numbered by their place in `wanted`.
    """
    straight = left = rows = np.int64(0)
    for q in range(len(came)):
        came[q] = NO_ROW
    for i in range(len(new)):
        q, p = at[i], prev[i]
        if q < 0:
            continue
        if kinds[q] == INSERT:
            came[q], places[straight], wanted[straight] = i, q, new[i]
            straight += 1
            continue
        parts[0, left], parts[1, left], parts[2, left] = NO_ROW, p, q
        if new[i] != NO_ROW:
            parts[0, left] = rows
            wanted[inserts + rows] = new[i]
            rows += 1
        if p < given:
            parts[1, left] = rows
            wanted[inserts + rows] = p
            rows += 1
        left += 1
    for k in range(left):
        if parts[1, k] >= given:
            parts[1, k] += rows - given
    return left, rows


@kernel(inline=True)
def _is_made(op: Any, state_null: Any, input_null: Any) -> Any:
    """Whether the value has to be computed; if not, it is one of those there are."""
    if op < SUM or op > UNCOUNT:
        return False
    if op in (COUNT, UNCOUNT):
        return True
    if input_null:
        return False
    return not state_null or op in (SUBTRACT, DIVIDE)


@kernel(inline=True)
def _fits(width: Any, value: Any) -> Any:
    return width == 8 or -(np.int64(1) << (8 * width - 1)) <= value < np.int64(1) << (8 * width - 1)


@kernel()
def _integer(op: Any, width: Any, wrap: Any, state: Any, value: Any) -> Any:
    """Fault and outcome of a sum, a product or a count of integers."""
    zero = np.int64(0)
    if op in (SUM, COUNT):
        beyond, made = add_overflows(state, value), add(state, value)
    elif op in (SUBTRACT, UNCOUNT):
        beyond, made = subtract_overflows(state, value), subtract(state, value)
    elif op == PRODUCT:
        beyond, made = multiply_overflows(state, value), multiply(state, value)
    else:
        if value == 0:
            return np.int64(BY_ZERO), zero
        if value == -1:
            beyond, made = subtract_overflows(zero, state), subtract(zero, state)
        elif state % value != 0:
            return np.int64(INEXACT), zero
        else:
            beyond, made = False, state // value
    if beyond or not _fits(width, made):
        if not wrap:
            return np.int64(OVERFLOWS), zero
        made = made << (64 - 8 * width) >> (64 - 8 * width)
    return zero, made


@kernel()
def _floating(op: Any, width: Any, state_bits: Any, value_bits: Any, has_state: Any) -> Any:
    """Fault and bits of a sum or a product of floats."""
    value = float_of(value_bits) if width == 4 else double_of(value_bits)
    state = 0.0
    if has_state:
        state = float_of(state_bits) if width == 4 else double_of(state_bits)
    if op == SUM:
        made = state + value
    elif op == SUBTRACT:
        made = state - value
    elif op == PRODUCT:
        made = state * value
    else:
        if value == 0.0:
            return np.int64(BY_ZERO), np.int64(0)
        made = state / value
    return np.int64(0), bits_of_float(made) if width == 4 else bits_of_double(made)


@kernel()
def _decimal(op: Any, line: Any, has_state: Any, state: Any, value: Any) -> Any:
    """Fault and words of a sum of decimals that stand at two addresses."""
    low, high = peek_i64(value), peek_i64(value + 8)
    if op == SUBTRACT:
        low, high = negated(low, high)
    beyond = False
    if has_state:
        low, high, beyond = wide_sum(peek_i64(state), peek_i64(state + 8), low, high)
    if beyond or not within(low, high, line + 8 * LIMIT_HIGH):
        return np.int64(OVERFLOWS), np.int64(0), np.int64(0)
    return np.int64(0), low, high


@kernel(inline=True)
def _source(op: Any, exists: Any, unset: Any, state_null: Any, input_null: Any, order: Any) -> Any:
    """Which value a record that has a row leaves behind.

    `order` compares input and state, of MAX_BY and MIN_BY those that decide; −2: by nothing.
    """
    if op in (KEEP, ASSIGN):
        return _OF_STATE if exists else _OF_NULL
    if not exists or op in (LAST, KEY):
        return _OF_INPUT
    if op == FIRST:
        return _OF_INPUT if unset else _OF_STATE
    if op == MAX_BY:
        return _OF_INPUT if order >= 0 else _OF_STATE
    if op == MIN_BY:
        return _OF_INPUT if order in (-1, 0) else _OF_STATE
    if input_null:
        return _OF_STATE
    if state_null or op == LAST_SET:
        return _OF_INPUT
    if (op == MAX and order > 0) or (op == MIN and order < 0):
        return _OF_INPUT
    return _OF_STATE


@kernel(inline=True)
def _row(number: Any, given: Any, of: Any, bits: Any, to: Any, to_bits: Any, made: Any) -> Any:
    """Column, bitmap, rows there, and row of a row by its number."""
    if number < given:
        return of, bits, given, number
    return to, to_bits, made, number - given


@kernel(inline=True)
def _mark(keep: Any, row: Any) -> Any:
    """Note that an update changes something: the row, and that before it, stay."""
    poke_u8(keep + row, 1)
    poke_u8(keep + row - 1, 1)


@kernel()
def _order(
    op: Any,
    line: Any,
    data: Any,
    given: Any,
    of: Any,
    bits: Any,
    to: Any,
    to_bits: Any,
    made: Any,
    state: Any,
    value: Any,
) -> Any:
    """How the input compares with the state, by rows; −2 if the state stays whatever it is."""
    if not is_valid(bits, value):
        return np.int64(-2)
    column, valid, count, row = _row(state, given, of, bits, to, to_bits, made)
    if not is_valid(valid, row):
        return np.int64(1 if op in (MAX, MAX_BY) else -1)
    width = width_of(line)
    return compare(width, line, data, of, given, value, column, count, row)


@kernel()
def _compute(
    op: Any,
    wrap: Any,
    line: Any,
    width: Any,
    state: Any,
    row: Any,
    state_null: Any,
    of: Any,
    value: Any,
    input_null: Any,
) -> Any:
    """Fault and words of a value that is computed; `state` and `of` are columns."""
    zero = np.int64(0)
    if op == DIVIDE and state_null:
        return np.int64(NO_STATE), zero, zero
    if width == WIDE:
        return _decimal(op, line, not state_null, state + 16 * row, of + 16 * value)
    before = zero if state_null else load(width, state, row)
    if op in (COUNT, UNCOUNT):
        fault, made = _integer(op, width, wrap, before, np.int64(0 if input_null else 1))
    elif peek_i64(line + 8 * FLOATING):
        fault, made = _floating(op, width, before, load(width, of, value), not state_null)
    else:
        fault, made = _integer(op, width, wrap, before, load(width, of, value))
    return fault, made, zero


@kernel()
def _fold_column(
    c: Any,
    op: Any,
    by: Any,
    wrap: Any,
    data: Any,
    program: Any,
    fields: Any,
    cells: Any,
    given: Any,
    cells_made: Any,
    made: Any,
    facts: Any,
    new: Any,
    prev: Any,
    at: Any,
    kinds: Any,
    count: Any,
    counts: Any,
    ids: Any,
    keep: Any,
    facts_given: Any,
) -> Any:
    """Make the values of one column; answers fault and record."""
    line, fact = program + _LINE_BYTES * c, facts + _FACT_BYTES * c
    slots = peek_i64(program + _LINE_BYTES * fields + 8 * SLOT)
    bitmaps, bitmaps_made = cells + 8 * given * slots, cells_made + 8 * made * slots
    stride, stride_made = (given + 63) // 64 * 8, (made + 63) // 64 * 8
    slot, width = peek_i64(line + 8 * SLOT), width_of(line)
    of, bits = cells + 8 * given * slot, bitmaps + c * stride
    to, to_bits = cells_made + 8 * made * slot, bitmaps_made + c * stride_made
    not_null = peek_i64(line + 8 * NOT_NULL) != 0
    d = by if op in (MAX_BY, MIN_BY) else np.int64(c)
    d_line = program + _LINE_BYTES * d
    d_slot = peek_i64(d_line + 8 * SLOT)
    d_of, d_bits = cells + 8 * given * d_slot, bitmaps + d * stride
    d_to, d_to_bits = cells_made + 8 * made * d_slot, bitmaps_made + d * stride_made
    ordered, computes = op in (MAX, MIN, MAX_BY, MIN_BY), SUM <= op <= UNCOUNT
    nulls = peek_i64(facts_given + _FACT_BYTES * c + 8 * NULLS) != 0
    nulls = nulls or peek_i64(fact + 8 * NULLS) != 0
    placed, used, low, high = np.int64(0), 0, np.int64(0), np.int64(0)
    for i in range(count):
        q = peek_i64(at + 8 * i)
        if q < 0:
            continue
        p, r = peek_i64(prev + 8 * i), peek_i64(new + 8 * i)
        exists = p >= 0
        state, rows, row, state_null, kind = to, made, np.int64(0), True, np.int64(INSERT)
        if exists:
            state, valid, rows, row = _row(p, given, of, bits, to, to_bits, made)
            state_null = nulls and not is_valid(valid, row)
            kind = peek_u8(kinds + q)
            if kind != UPDATE_AFTER:
                if state_null:
                    keep_null(line, fact, to_bits, to, made, q)
                else:
                    placed += copy_value(width, state, rows, row, to, made, q)
                if kind == DELETE:
                    continue
                q += 1
        input_null = r < 0 or (nulls and not is_valid(bits, r))
        if r < 0:
            source = _OF_STATE if op in (KEEP, KEY, ASSIGN) else _OF_NULL
        elif computes and _is_made(op, state_null, input_null):
            source = _MADE
            fault, low, high = _compute(
                op, wrap, line, width, state, row, state_null, of, r, input_null
            )
            if fault:
                return fault, np.int64(i)
        elif op == ASSIGN and not exists:
            source, low, high = _MADE, ids[used], np.int64(0)
            used += 1
        else:
            order = np.int64(0)
            if ordered and exists:
                order = _order(op, d_line, data, given, d_of, d_bits, d_to, d_to_bits, made, p, r)
            unset = op == FIRST and 0 <= p < given and len(counts) > 0 and counts[p] <= c
            source = _source(op, exists, unset, state_null, input_null, order)
            if unset and kind == UPDATE_BEFORE:
                _mark(keep, q)
        if source == _OF_NULL or (source == _OF_INPUT and input_null):
            if not_null:
                return np.int64(NULL_STATE), np.int64(i)
            keep_null(line, fact, to_bits, to, made, q)
            nulls = True
            if kind == UPDATE_BEFORE and not state_null:
                _mark(keep, q)
            continue
        if source == _OF_STATE:
            if state_null:
                keep_null(line, fact, to_bits, to, made, q)
            else:
                placed += copy_value(width, state, rows, row, to, made, q)
            continue
        if source == _OF_INPUT:
            placed += copy_value(width, of, given, r, to, made, q)
        elif width == WIDE:
            poke_i64(to + 16 * q, low)
            poke_i64(to + 16 * q + 8, high)
        else:
            store(width, to, q, low)
        if (
            kind == UPDATE_BEFORE
            and peek_u8(keep + q) == 0
            and (state_null or not same(width, data, to, made, q, state, rows, row))
        ):
            _mark(keep, q)
    if width == PLACES:
        poke_i64(fact + 8 * PLACED, peek_i64(fact + 8 * PLACED) + placed)
    return np.int64(0), np.int64(0)


@kernel(
    _THREE(
        BYTES, _LINES, _LINES, _IN, BYTES, types.int64, _BYTES_OUT, types.int64, _LINES_OUT, _IN,
        _IN, _IN, BYTES, _COUNTS, types.int64, _IN, _BYTES_OUT, _LINES, types.boolean,
    ),
)  # fmt: skip
def fold(
    data: Any,
    program: Any,
    ops: Any,
    columns: Any,
    cells: Any,
    given: Any,
    cells_made: Any,
    made: Any,
    facts: Any,
    new: Any,
    prev: Any,
    at: Any,
    kinds: Any,
    counts: Any,
    written: Any,
    ids: Any,
    keep: Any,
    facts_given: Any,
    begun: Any,
) -> Any:
    """Make the values of all columns but those folded outside; answers fault, column, record.

    `columns` has their order, `counts` the fields of each given row; columns from `written` on are
    not in the records, whose schema is older. Some made rows are there already where they were
    `begun`.
    """
    fields = len(ops)
    if not begun:
        begin_cells(address_of(program), fields, made, address_of(cells_made), address_of(facts))
    for k in range(len(columns)):
        c = columns[k]
        op = ops[c, OP]
        if c >= written and op != ASSIGN:
            op = np.int64(KEEP)
        if op == OUTSIDE:
            continue
        fault, record = _fold_column(
            c, op, ops[c, BY], ops[c, WRAP], address_of(data), address_of(program), fields,
            address_of(cells), given, address_of(cells_made), made, address_of(facts),
            address_of(new), address_of(prev), address_of(at), address_of(kinds), len(new), counts,
            ids, address_of(keep), address_of(facts_given),
        )  # fmt: skip
        if fault:
            return fault, c, record
    return np.int64(0), np.int64(0), np.int64(0)


@kernel(types.int64(_IN, _IN, BYTES, BYTES, _IN, _OUT, _OUT), boundscheck=True, short=True)
def settle(group: Any, at: Any, kinds: Any, keep: Any, old: Any, final: Any, index: Any) -> Any:
    """Number the made rows that stay, in `index`; answers how many.

    `final` has for each group the number of its row after the batch, `NO_ROW` or `UNCHANGED`.
    """
    for g in range(len(final)):
        final[g] = UNCHANGED
    count = np.int64(0)
    for i in range(len(at)):
        q = at[i]
        if q < 0 or not keep[q]:
            continue
        g = group[i]
        index[count] = q
        count += 1
        if kinds[q] == DELETE:
            final[g] = NO_ROW if old[g] != NO_ROW else UNCHANGED
            continue
        if kinds[q] == UPDATE_BEFORE:
            index[count] = q + 1
            count += 1
        final[g] = count - 1
    return count


@kernel(types.void(_LINES, BYTES, types.int64, _IN, _BYTES_OUT, _LINES_OUT), short=True)
def take(program: Any, cells: Any, count: Any, index: Any, out: Any, facts: Any) -> Any:
    """Copy some rows of cells in an order."""
    fields, kept = len(facts), len(index)
    lines, notes = address_of(program), address_of(facts)
    bitmaps = address_of(cells) + 8 * count * program[fields, SLOT]
    to_bitmaps = begin_cells(lines, fields, kept, address_of(out), notes)
    for c in range(fields):
        line, fact = lines + _LINE_BYTES * c, notes + _FACT_BYTES * c
        slot, width, placed = peek_i64(line + 8 * SLOT), width_of(line), np.int64(0)
        of, to = address_of(cells) + 8 * count * slot, address_of(out) + 8 * kept * slot
        bits = bitmaps + c * ((count + 63) // 64 * 8)
        to_bits = to_bitmaps + c * ((kept + 63) // 64 * 8)
        for k in range(kept):
            if is_valid(bits, index[k]):
                placed += copy_value(width, of, count, index[k], to, kept, k)
            else:
                keep_null(line, fact, to_bits, to, kept, k)
        poke_i64(fact + 8 * PLACED, placed)
