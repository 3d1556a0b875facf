"""Values that an operation computes from a state and an input: parts of the fold kernel.

Sums, products and counts of integers tell overflow and wrap only where the column says so. Floats
are computed as doubles and rounded to their type. Decimals are 128 bits in two words, low first.
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
    is_within,
    multiply,
    multiply_overflows,
    negated,
    subtract,
    subtract_overflows,
    wide_sum,
)
from zufluss.record.aggregate.cells import DECIMAL_BYTES, load
from zufluss.record.aggregate.opcodes import (
    BY_ZERO,
    COUNT,
    DIVIDE,
    INEXACT,
    NO_STATE,
    OVERFLOWS,
    PRODUCT,
    SUBTRACT,
    SUM,
    UNCOUNT,
)
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.raw import peek_i64
from zufluss.record.kernels.row_read import FLOATING, LIMIT_HIGH


@kernel(inline=True)
def is_computed(op: Any, state_null: Any, input_null: Any) -> Any:
    """Whether the value has to be computed; otherwise it is the state, the input or NULL."""
    if op < SUM or op > UNCOUNT:
        return False
    if op in (COUNT, UNCOUNT):
        return True
    if input_null:
        return False
    return not state_null or op in (SUBTRACT, DIVIDE)


@kernel(inline=True)
def _fits(width: Any, value: Any) -> Any:
    """Whether an integer fits its type of `width` bytes."""
    return width == 8 or -(np.int64(1) << (8 * width - 1)) <= value < np.int64(1) << (8 * width - 1)


@kernel()
def _integer(op: Any, width: Any, wrap: Any, state: Any, value: Any) -> Any:
    """Fault and result of a sum, a product or a count of integers."""
    zero = np.int64(0)
    if op in (SUM, COUNT):
        beyond, result = add_overflows(state, value), add(state, value)
    elif op in (SUBTRACT, UNCOUNT):
        beyond, result = subtract_overflows(state, value), subtract(state, value)
    elif op == PRODUCT:
        beyond, result = multiply_overflows(state, value), multiply(state, value)
    else:
        # DIVIDE: the least integer divided by −1 overflows, which the machine's division traps on.
        if value == 0:
            return np.int64(BY_ZERO), zero
        if value == -1:
            beyond, result = subtract_overflows(zero, state), subtract(zero, state)
        elif state % value != 0:
            return np.int64(INEXACT), zero
        else:
            beyond, result = False, state // value
    if beyond or not _fits(width, result):
        if not wrap:
            return np.int64(OVERFLOWS), zero
        result = result << (64 - 8 * width) >> (64 - 8 * width)
    return zero, result


@kernel()
def _floating(op: Any, width: Any, state_bits: Any, value_bits: Any, has_state: Any) -> Any:
    """Fault and bits of a sum or a product of floats."""
    value = float_of(value_bits) if width == 4 else double_of(value_bits)
    state = 0.0
    if has_state:
        state = float_of(state_bits) if width == 4 else double_of(state_bits)
    if op == SUM:
        result = state + value
    elif op == SUBTRACT:
        result = state - value
    elif op == PRODUCT:
        result = state * value
    else:
        if value == 0.0:
            return np.int64(BY_ZERO), np.int64(0)
        result = state / value
    return np.int64(0), bits_of_float(result) if width == 4 else bits_of_double(result)


@kernel()
def _decimal(op: Any, line: Any, has_state: Any, state: Any, value: Any) -> Any:
    """Fault, low word and high word of a sum of the decimals at two addresses."""
    low, high = peek_i64(value), peek_i64(value + 8)
    if op == SUBTRACT:
        low, high = negated(low, high)
    beyond = False
    if has_state:
        low, high, beyond = wide_sum(peek_i64(state), peek_i64(state + 8), low, high)
    if beyond or not is_within(low, high, line + 8 * LIMIT_HIGH):
        return np.int64(OVERFLOWS), np.int64(0), np.int64(0)
    return np.int64(0), low, high


@kernel()
def compute(
    op: Any,
    wrap: Any,
    line: Any,
    width: Any,
    state: Any,
    state_row: Any,
    state_null: Any,
    inputs: Any,
    input_row: Any,
    input_null: Any,
) -> Any:
    """Fault, low word and high word of a computed value; `state` and `inputs` are columns."""
    zero = np.int64(0)
    if op == DIVIDE and state_null:
        return np.int64(NO_STATE), zero, zero
    if width == DECIMAL_BYTES:
        old, more = state.values + 16 * state_row, inputs.values + 16 * input_row
        return _decimal(op, line, not state_null, old, more)
    before = zero if state_null else load(width, state, state_row)
    if op in (COUNT, UNCOUNT):
        fault, result = _integer(op, width, wrap, before, np.int64(0 if input_null else 1))
    elif peek_i64(line + 8 * FLOATING):
        value = load(width, inputs, input_row)
        fault, result = _floating(op, width, before, value, not state_null)
    else:
        fault, result = _integer(op, width, wrap, before, load(width, inputs, input_row))
    return fault, result, zero
