"""Arithmetic for the fold kernels: sums and products that tell overflow, floats as their bits.

The compiler assumes that sums of integers do not overflow. Those that may are LLVM instructions
with a defined result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.intrinsics import intrinsic, ir
from zufluss.record.kernels.raw import peek_i64


def _wrapped(name: str) -> Any:
    """Make an intrinsic `f(a, b)`: the low 64 bits of the result."""

    @intrinsic
    def wrapped(_context: Any, _a: Any, _b: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments)

        return types.int64(types.int64, types.int64), generate

    return wrapped


def _overflows(name: str) -> Any:
    """Make an intrinsic `f(a, b)`: whether the result does not fit 64 bits."""

    @intrinsic
    def overflows(_context: Any, _a: Any, _b: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.extract_value(getattr(builder, name)(*arguments), 1)

        return types.boolean(types.int64, types.int64), generate

    return overflows


add, subtract, multiply = (_wrapped(name) for name in ("add", "sub", "mul"))
add_overflows, subtract_overflows, multiply_overflows = (
    _overflows(f"s{name}_with_overflow") for name in ("add", "sub", "mul")
)


@intrinsic
def double_of(_context: Any, _bits: Any) -> Any:
    """The double of 64 bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def bits_of_double(_context: Any, _value: Any) -> Any:
    """The 64 bits of a double."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def float_of(_context: Any, _bits: Any) -> Any:
    """The float of the low 32 bits, as a double."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        low = builder.trunc(arguments[0], ir.IntType(32))
        return builder.fpext(builder.bitcast(low, ir.FloatType()), ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def bits_of_float(_context: Any, _value: Any) -> Any:
    """The 32 bits of the float that is nearest to a double, with their sign above them."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        near = builder.fptrunc(arguments[0], ir.FloatType())
        return builder.sext(builder.bitcast(near, ir.IntType(32)), ir.IntType(64))

    return types.int64(types.float64), generate


@kernel(inline=True)
def rank(bits: Any, single: Any) -> Any:
    """A number that sorts as the float of these bits: −0.0 before 0.0, every NaN last."""
    value = float_of(bits) if single else double_of(bits)
    if value != value:
        return np.int64(2**63 - 1)
    if bits >= 0:
        return bits
    return bits ^ (np.int64(0x7FFFFFFF) if single else np.int64(2**63 - 1))


@kernel(inline=True)
def negated(low: Any, high: Any) -> Any:
    """The two words of the negative of a 128-bit number."""
    low = subtract(np.int64(0), low)
    high = ~high
    return low, (add(high, np.int64(1)) if low == 0 else high)


@kernel(inline=True)
def wide_sum(low: Any, high: Any, other_low: Any, other_high: Any) -> Any:
    """The two words of the sum of two 128-bit numbers, and whether it is beyond 128 bits."""
    sum_low = add(low, other_low)
    carry = np.int64(1) if np.uint64(sum_low) < np.uint64(low) else np.int64(0)
    sum_high = add(add(high, other_high), carry)
    beyond = (high ^ sum_high) & (other_high ^ sum_high) < 0
    return sum_low, sum_high, beyond


@kernel(inline=True)
def is_within(low: Any, high: Any, limit: Any) -> Any:
    """Whether a 128-bit number is below the limit at an address by magnitude, high word first."""
    if high < 0:
        low, high = negated(low, high)
    limit_high, limit_low = np.uint64(peek_i64(limit)), np.uint64(peek_i64(limit + 8))
    high_word, low_word = np.uint64(high), np.uint64(low)
    return high_word < limit_high or (high_word == limit_high and low_word < limit_low)
