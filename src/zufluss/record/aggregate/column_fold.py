"""The fold: the values of result rows, computed one column at a time from cells to cells.

`script.py` explains source rows and result rows, and decides which record writes which of them;
`opcodes.py` lists the operations. `fold` walks over the columns and, for each, over the records in
order. Columns that another column decides about (MAX_BY, MIN_BY) come last, when both columns of
the rows before are complete. The plain-Python twin is
`tests/record/aggregate/plain_aggregation.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from zufluss.record.aggregate.cells import (
    DECIMAL_BYTES,
    PLACES,
    CellColumn,
    column_of,
    compare,
    copy_value,
    is_same,
    is_valid,
    store,
    store_decimal,
    width_of,
)
from zufluss.record.aggregate.compute import compute, is_computed
from zufluss.record.aggregate.opcodes import (
    ASSIGN,
    BY,
    DELETE,
    INSERT,
    KEEP,
    KEY,
    LAST,
    LAST_SET,
    MAX,
    MAX_BY,
    MIN,
    MIN_BY,
    NULL_STATE,
    OP,
    OUTSIDE,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    WRAP,
)
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES
from zufluss.record.kernels.raw import address_of, peek_i64, peek_u8, poke_i64, poke_u8
from zufluss.record.kernels.row_read import (
    FACTS,
    LINE,
    NOT_NULL,
    NULLS,
    PLACED,
    begin_cells,
    keep_null,
)

_NULL, _STATE, _INPUT, _COMPUTED = range(4)
"""Which value a record leaves behind."""
_NOTHING = -2
"""In place of a comparison: the input is NULL, so the state stays."""

_IN = types.Array(types.int64, 1, "C", readonly=True)
_LINES = types.Array(types.int64, 2, "C", readonly=True)
_LINES_OUT = types.Array(types.int64, 2, "C")
_BYTES_OUT = types.Array(types.uint8, 1, "C")
_RESULT = types.UniTuple(types.int64, 3)
_LINE_BYTES, _FACT_BYTES = 8 * LINE, 8 * FACTS


class ColumnFold(NamedTuple):
    """The fold of one column: numbers and addresses that stay the same from record to record."""

    op: Any
    wrap: Any
    width: Any
    """Width of its values, see `cells.py`."""
    line: Any
    """Address of its program line."""
    fact: Any
    """Address of its line in the facts of the result rows."""
    data: Any
    """Address of the bytes that places point into."""
    source: CellColumn
    result: CellColumn
    by_line: Any
    """Address of the program line of the column whose values are compared, mostly its own."""
    by_source: CellColumn
    by_result: CellColumn


class RecordAddresses(NamedTuple):
    """What the script says of the records, as addresses."""

    count: Any
    new: Any
    """Per record: its source row, negative for a delete."""
    prev: Any
    """Per record: the row it starts from, negative for none."""
    at: Any
    """Per record: its first result row, negative for none."""
    kinds: Any
    """Per result row: its change type."""
    keep: Any
    """Per result row: whether it stays."""


@kernel(inline=True)
def _mark_changed(keep: Any, after_row: Any) -> Any:
    """Let an update stay: the row after, and the row before, which stands in front of it."""
    poke_u8(keep + after_row, 1)
    poke_u8(keep + after_row - 1, 1)


@kernel(inline=True)
def _put_null(fold: Any, row: Any) -> Any:
    keep_null(fold.line, fold.fact, fold.result.valid, fold.result.values, fold.result.rows, row)


@kernel(inline=True)
def _put_state(fold: Any, state: Any, state_row: Any, state_null: Any, row: Any) -> Any:
    """Write the state as result row `row`; returns its bytes outside of the cells."""
    if state_null:
        _put_null(fold, row)
        return np.int64(0)
    return copy_value(fold.width, state, state_row, fold.result, row)


@kernel(inline=True)
def _put_new(fold: Any, choice: Any, input_row: Any, low: Any, high: Any, row: Any) -> Any:
    """Write the input, or the words of a computed value; returns the bytes outside of the cells."""
    if choice == _INPUT:
        return copy_value(fold.width, fold.source, input_row, fold.result, row)
    if fold.width == DECIMAL_BYTES:
        store_decimal(fold.result, row, low, high)
    else:
        store(fold.width, fold.result, row, low)
    return np.int64(0)


@kernel(inline=True)
def _locate(number: Any, source: Any, result: Any) -> Any:
    """Column and row of a row by its number: result rows are numbered behind the source rows."""
    if number < source.rows:
        return source, number
    return result, number - source.rows


@kernel()
def _order(fold: Any, state_number: Any, input_row: Any) -> Any:
    """Compare the input with the state: −1, 0, 1, or `_NOTHING`; a NULL state loses."""
    if not is_valid(fold.by_source.valid, input_row):
        return np.int64(_NOTHING)
    state, row = _locate(state_number, fold.by_source, fold.by_result)
    if not is_valid(state.valid, row):
        return np.int64(1 if fold.op in (MAX, MAX_BY) else -1)
    width = width_of(fold.by_line)
    return compare(width, fold.by_line, fold.data, fold.by_source, input_row, state, row)


@kernel(inline=True)
def _choose(op: Any, exists: Any, state_null: Any, input_null: Any, order: Any) -> Any:
    """Which value a record with a row leaves behind, if none has to be computed.

    `order` is the comparison of input and state.
    """
    if op in (KEEP, ASSIGN):
        return _STATE if exists else _NULL
    if not exists or op in (LAST, KEY):
        return _INPUT
    if op == MAX_BY:
        return _INPUT if order >= 0 else _STATE
    if op == MIN_BY:
        return _INPUT if order in (-1, 0) else _STATE
    if input_null:
        return _STATE
    if state_null or op == LAST_SET:
        return _INPUT
    if (op == MAX and order > 0) or (op == MIN and order < 0):
        return _INPUT
    return _STATE


@kernel(inline=True)
def _decide(
    fold: Any,
    state: Any,
    state_row: Any,
    state_number: Any,
    state_null: Any,
    input_row: Any,
    input_null: Any,
) -> Any:
    """Fault, which value the record leaves behind, and the two words of a computed one."""
    op, zero = fold.op, np.int64(0)
    if input_row < 0:
        # A delete that leaves the row clears the columns that the put writes.
        return zero, np.int64(_STATE if op in (KEEP, KEY, ASSIGN) else _NULL), zero, zero
    if is_computed(op, state_null, input_null):
        fault, low, high = compute(
            op, fold.wrap, fold.line, fold.width, state, state_row, state_null, fold.source,
            input_row, input_null,
        )  # fmt: skip
        return fault, np.int64(_COMPUTED), low, high
    order = zero
    if state_number >= 0 and op in (MAX, MIN, MAX_BY, MIN_BY):
        order = _order(fold, state_number, input_row)
    choice = _choose(op, state_number >= 0, state_null, input_null, order)
    return zero, np.int64(choice), zero, zero


@kernel()
def _fold_column(fold: Any, records: Any, ids: Any, may_be_null: Any) -> Any:
    """Write one column of the result rows; returns fault and record.

    `may_be_null` spares the look at validity bitmaps while the column has no NULL at all.
    """
    placed, ids_used = np.int64(0), 0
    for record in range(records.count):
        row = peek_i64(records.at + 8 * record)
        if row < 0:
            continue
        state_number = peek_i64(records.prev + 8 * record)
        input_row = peek_i64(records.new + 8 * record)
        state, state_row, state_null = fold.result, np.int64(0), True
        kind = np.int64(INSERT)
        if state_number >= 0:
            # The before image, or the row of a delete, is the state as it was.
            state, state_row = _locate(state_number, fold.source, fold.result)
            state_null = may_be_null and not is_valid(state.valid, state_row)
            kind = peek_u8(records.kinds + row)
            if kind != UPDATE_AFTER:
                placed += _put_state(fold, state, state_row, state_null, row)
                if kind == DELETE:
                    continue
                row += 1
        # The row after: decide which value it has, then write that and note a change.
        input_null = input_row < 0 or (may_be_null and not is_valid(fold.source.valid, input_row))
        fault, choice, low, high = _decide(
            fold, state, state_row, state_number, state_null, input_row, input_null
        )
        if fault:
            return fault, np.int64(record)
        if fold.op == ASSIGN and state_number < 0 and input_row >= 0:
            choice, low = np.int64(_COMPUTED), ids[ids_used]
            ids_used += 1
        changed = False
        if choice == _NULL or (choice == _INPUT and input_null):
            if peek_i64(fold.line + 8 * NOT_NULL):
                return np.int64(NULL_STATE), np.int64(record)
            _put_null(fold, row)
            may_be_null = True
            changed = not state_null
        elif choice == _STATE:
            placed += _put_state(fold, state, state_row, state_null, row)
        else:
            placed += _put_new(fold, choice, input_row, low, high, row)
            # Another column may have marked the row already, which spares the comparison.
            if kind == UPDATE_BEFORE and peek_u8(records.keep + row) == 0:
                changed = state_null or not is_same(
                    fold.width, fold.data, fold.result, row, state, state_row
                )
        if changed and kind == UPDATE_BEFORE:
            _mark_changed(records.keep, row)
    if fold.width == PLACES:
        poke_i64(fold.fact + 8 * PLACED, peek_i64(fold.fact + 8 * PLACED) + placed)
    return np.int64(0), np.int64(0)


@kernel(
    _RESULT(
        BYTES, _LINES, _LINES, _IN, BYTES, types.int64, _BYTES_OUT, types.int64, _LINES_OUT, _IN,
        _IN, _IN, BYTES, types.int64, _IN, _BYTES_OUT, _LINES, types.boolean,
    ),
)  # fmt: skip
def fold(
    data: Any,
    program: Any,
    ops: Any,
    columns: Any,
    source_cells: Any,
    sources: Any,
    result_cells: Any,
    results: Any,
    facts: Any,
    new: Any,
    prev: Any,
    at: Any,
    kinds: Any,
    written: Any,
    ids: Any,
    keep: Any,
    source_facts: Any,
    begun: Any,
) -> Any:
    """Write all columns of the result rows that are no `OUTSIDE`; returns fault, column, record.

    `columns` gives the order. Columns from `written` on are not in the records, whose schema is
    older. `ids` are the numbers for ASSIGN. `begun`: some result rows are there already, so the
    cells must not be cleared.
    """
    fields, lines, notes = len(ops), address_of(program), address_of(facts)
    of, to = address_of(source_cells), address_of(result_cells)
    if not begun:
        begin_cells(lines, fields, results, to, notes)
    records = RecordAddresses(
        len(new), address_of(new), address_of(prev), address_of(at), address_of(kinds),
        address_of(keep),
    )  # fmt: skip
    for position in range(len(columns)):
        index = columns[position]
        op = ops[index, OP]
        if index >= written and op != ASSIGN:
            op = np.int64(KEEP)
        if op == OUTSIDE:
            continue
        line, fact = lines + _LINE_BYTES * index, notes + _FACT_BYTES * index
        by = ops[index, BY] if op in (MAX_BY, MIN_BY) else np.int64(index)
        column = ColumnFold(
            op, ops[index, WRAP], width_of(line), line, fact, address_of(data),
            column_of(lines, fields, of, sources, index),
            column_of(lines, fields, to, results, index),
            lines + _LINE_BYTES * by,
            column_of(lines, fields, of, sources, by),
            column_of(lines, fields, to, results, by),
        )  # fmt: skip
        may_be_null = source_facts[index, NULLS] != 0 or facts[index, NULLS] != 0
        fault, record = _fold_column(column, records, ids, may_be_null)
        if fault:
            return fault, index, record
    return np.int64(0), np.int64(0), np.int64(0)


@kernel(types.void(_LINES, BYTES, types.int64, _IN, _BYTES_OUT, _LINES_OUT), short=True)
def take(program: Any, cells: Any, rows: Any, index: Any, out: Any, facts: Any) -> Any:
    """Copy the rows of cells that `index` lists, in its order, to the cells `out`."""
    fields, taken = len(facts), len(index)
    lines, notes = address_of(program), address_of(facts)
    begin_cells(lines, fields, taken, address_of(out), notes)
    for number in range(fields):
        line, fact = lines + _LINE_BYTES * number, notes + _FACT_BYTES * number
        source = column_of(lines, fields, address_of(cells), rows, number)
        target = column_of(lines, fields, address_of(out), taken, number)
        width, placed = width_of(line), np.int64(0)
        for row in range(taken):
            if is_valid(source.valid, index[row]):
                placed += copy_value(width, source, index[row], target, row)
            else:
                keep_null(line, fact, target.valid, target.values, taken, row)
        poke_i64(fact + 8 * PLACED, placed)
