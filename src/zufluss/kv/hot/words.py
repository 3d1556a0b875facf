"""What the kernels of the store are made of: ordered loads and stores, the hash, equality.

Keys are hashed with a seed of the process, so that nobody outside can choose keys that collide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, intrinsic, load_i64, load_u8, types

ARENA = types.Array(types.uint8, 1, "C")
NUMBERS = types.Array(types.int64, 1, "C")
POSITIONS = types.Array(types.int64, 1, "C", readonly=True)
I64 = types.int64


# --- words -------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def observe(_context: Any, array: Any, _position: Any) -> Any:
    """Load the aligned int64 at a position, before everything that is loaded after it."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load_atomic(address, "acquire", 8)

    return types.int64(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def release(_context: Any, array: Any, _position: Any, _value: Any) -> Any:
    """Store an aligned int64 at a position, after everything that was stored before it."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[2], address, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def mix(_context: Any, _a: Any, _b: Any) -> Any:
    """The two halves of the 128-bit product of two unsigned numbers, one over the other."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(a, wide) for a in arguments))
        high = builder.lshr(product, ir.Constant(wide, 64))
        return builder.trunc(builder.xor(product, high), ir.IntType(64))

    return types.int64(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def swap(_context: Any, _word: Any) -> Any:
    """The bytes of a word in the other order."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bswap(arguments[0])

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: Any, array: Any, _position: Any) -> Any:
    """Ask for the cache line of a position; nothing waits for it and nothing faults."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        address = builder.gep(data, [arguments[1]])
        word = ir.IntType(32)
        request = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [address.type],
            ir.FunctionType(ir.VoidType(), [address.type] + 3 * [word]),
        )
        builder.call(request, [address, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@kernel(inline=True)
def short_word(data: Any, start: Any, size: Any) -> Any:
    """Up to eight bytes as a little-endian number."""
    if size >= 8:
        return load_i64(data, start)
    word = np.int64(0)
    for i in range(size):
        word |= load_u8(data, start + i) << (8 * i)
    return word


@kernel(inline=True)
def hash_key(data: Any, start: Any, size: Any, seed: Any) -> Any:
    """64 bits of a byte string: multiply and fold, 16 bytes a step, keyed by the seed."""
    second = mix(seed, np.int64(-7046029254386353131))
    h = seed ^ size
    at, end = start, start + size
    while at + 16 < end:
        h = mix(load_i64(data, at) ^ second, load_i64(data, at + 8) ^ h)
        at += 16
    low = short_word(data, at, min(end - at, 8))
    at = min(at + 8, end)
    high = short_word(data, at, end - at)
    h = mix(low ^ second, high ^ h)
    return mix(h ^ size, second ^ np.int64(-2024118823216138003))


@kernel(inline=True)
def same(one: Any, at: Any, other: Any, pos: Any, size: Any) -> Any:
    """Whether two byte strings of one length are the same."""
    words = size >> 3
    for i in range(words):
        if load_i64(one, at + 8 * i) != load_i64(other, pos + 8 * i):
            return False
    done = words << 3
    rest = size - done
    return short_word(one, at + done, rest) == short_word(other, pos + done, rest)


@kernel(inline=True)
def inside(start: Any, end: Any, size: Any) -> Any:
    """Whether [start, end) lies in [0, size) and is not longer than a length field can say."""
    return 0 <= start <= end <= size and end - start <= 0x7FFFFFFF - 64


# --- keys --------------------------------------------------------------------------------------


@kernel(I64(BYTES, POSITIONS, POSITIONS, I64, NUMBERS), short=True)
def hash_all(data: Any, starts: Any, ends: Any, seed: Any, out: Any) -> Any:
    """Hash every key; return the first that lies outside the data, or how many there are."""
    n = min(starts.size, ends.size, out.size)
    for i in range(n):
        if not inside(starts[i], ends[i], data.size):
            return i
        out[i] = hash_key(data, starts[i], ends[i] - starts[i], seed)
    return n


@kernel(
    I64(BYTES, POSITIONS, POSITIONS, POSITIONS, types.Array(types.int32, 1, "C"), NUMBERS, NUMBERS),
    short=True,
)
def group_all(
    data: Any, starts: Any, ends: Any, hashes: Any, table: Any, group: Any, first: Any
) -> Any:
    """Number equal keys alike, in order of first appearance; return how many differ, −1 a fault.

    `table` has a power of two of elements, all −1, at least one more than there are keys.
    """
    mask = table.size - 1
    groups = 0
    n = min(starts.size, ends.size, hashes.size, group.size, first.size)
    if n >= table.size:
        return -1
    for i in range(n):
        size = ends[i] - starts[i]
        if not inside(starts[i], ends[i], data.size):
            return -1
        at = hashes[i] & mask
        while table[at] >= 0:
            known = first[table[at]]
            if (
                hashes[known] == hashes[i]
                and ends[known] - starts[known] == size
                and same(data, starts[known], data, starts[i], size)
            ):
                break
            at = (at + 1) & mask
        if table[at] < 0:
            table[at] = groups
            first[groups] = i
            groups += 1
        group[i] = table[at]
    return groups
