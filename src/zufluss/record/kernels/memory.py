"""Loads and stores for kernels: little-endian integers at any byte position of a uint8 array.

numpy views demand alignment, and assembling integers from bytes keeps LLVM from using vector
instructions. So each load or store is one unaligned machine instruction, and a copy is one
`memcpy`. **They do not check bounds**: the caller has compared the position with the end, and tests
run every kernel over mutated and truncated input.
"""

from __future__ import annotations

import sys
from typing import Any

from zufluss.record.kernels import types
from zufluss.record.kernels.intrinsics import cgutils, intrinsic, ir

BYTES = types.Array(types.uint8, 1, "C", readonly=True)
"""Type of an array that a kernel only reads; writable arrays are accepted too."""

if sys.byteorder != "little":
    raise ImportError(
        "the kernels read little-endian integers in place; this machine is big-endian"
    )


def _load(bits: int, signed: bool) -> Any:
    """Make an intrinsic `load(array, position) -> int64` of an integer with `bits` bits."""

    @intrinsic
    def load(_context: Any, array: Any, _position: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            data = context.make_array(array)(context, builder, arguments[0]).data
            address = builder.gep(data, [arguments[1]])
            address = builder.bitcast(address, ir.IntType(bits).as_pointer())
            value = builder.load(address, align=1)
            if bits == 64:
                return value
            return (builder.sext if signed else builder.zext)(value, ir.IntType(64))

        return types.int64(array, types.int64), generate

    return load


load_u8 = _load(8, signed=False)
load_u16 = _load(16, signed=False)
load_i16 = _load(16, signed=True)
load_i32 = _load(32, signed=True)
load_u32 = _load(32, signed=False)
load_i64 = _load(64, signed=True)


def _store(bits: int) -> Any:
    """Make an intrinsic `store(array, position, int64)` of the low `bits` bits."""

    @intrinsic
    def store(_context: Any, array: Any, _position: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            data = context.make_array(array)(context, builder, arguments[0]).data
            address = builder.gep(data, [arguments[1]])
            address = builder.bitcast(address, ir.IntType(bits).as_pointer())
            value = arguments[2] if bits == 64 else builder.trunc(arguments[2], ir.IntType(bits))
            builder.store(value, address, align=1)
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int64), generate

    return store


store_u8 = _store(8)
store_i32 = _store(32)
store_i64 = _store(64)


@intrinsic
def copy(_context: Any, target: Any, _at: Any, source: Any, _pos: Any, _size: Any) -> Any:
    """Copy `size` bytes of `source` at `pos` to `target` at `at`; the arrays must not overlap."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to = context.make_array(target)(context, builder, arguments[0]).data
        of = context.make_array(source)(context, builder, arguments[2]).data
        to, of = builder.gep(to, [arguments[1]]), builder.gep(of, [arguments[3]])
        cgutils.raw_memcpy(builder, to, of, arguments[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), generate


@intrinsic
def popcount(_context: Any, value: Any) -> Any:
    """Number of one bits of an int64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), generate
