"""Loads, stores and copies at addresses, for parts of kernels that run once per value.

An array passed from one compiled function to another travels as seven numbers, which costs more
than reading a field of a row. Such parts get the address of the array instead, which their kernel
took once. As in `memory.py`, **nothing is checked here**: the caller has compared the position with
the end, and the caller of the kernel keeps the arrays alive.
"""

from __future__ import annotations

from typing import Any

from zufluss.record.kernels import types
from zufluss.record.kernels.intrinsics import cgutils, intrinsic, ir


@intrinsic
def address_of(_context: Any, array: Any) -> Any:
    """The address of the first byte of an array."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), generate


def _peek(bits: int, signed: bool) -> Any:
    """Make an intrinsic `peek(address) -> int64`."""

    @intrinsic
    def peek(_context: Any, _address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer, align=1)
            if bits == 64:
                return value
            return (builder.sext if signed else builder.zext)(value, ir.IntType(64))

        return types.int64(types.int64), generate

    return peek


peek_u8 = _peek(8, signed=False)
peek_i8 = _peek(8, signed=True)
peek_i16 = _peek(16, signed=True)
peek_i32 = _peek(32, signed=True)
peek_i64 = _peek(64, signed=True)


def _poke(bits: int) -> Any:
    """Make an intrinsic `poke(address, int64)` of the low `bits` bits."""

    @intrinsic
    def poke(_context: Any, _address: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = arguments[1] if bits == 64 else builder.trunc(arguments[1], ir.IntType(bits))
            builder.store(value, pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return poke


poke_u8 = _poke(8)
poke_i16 = _poke(16)
poke_i32 = _poke(32)
poke_i64 = _poke(64)


@intrinsic
def copy_bytes(_context: Any, _to: Any, _of: Any, _size: Any) -> Any:
    """Copy `size` bytes between addresses that do not overlap."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        to, of = (builder.inttoptr(argument, pointer) for argument in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
