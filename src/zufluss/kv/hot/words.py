"""Parts of the kernels of this package: ordered loads and stores, the hash of a key, equality.

Keys are hashed with a seed of the process, so that nobody outside can choose keys that collide.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.intrinsics import intrinsic, ir
from zufluss.record.kernels.memory import BYTES, load_i64, load_u8

ARENA = types.Array(types.uint8, 1, "C")
NUMBERS = types.Array(types.int64, 1, "C")
POSITIONS = types.Array(types.int64, 1, "C", readonly=True)
I64 = types.int64


@intrinsic
def observe(_context: Any, array: Any, _position: Any) -> Any:
    """Load the aligned int64 at a position; later loads are not moved before it (acquire)."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load_atomic(address, "acquire", 8)

    return types.int64(array, types.int64), generate


@intrinsic
def release(_context: Any, array: Any, _position: Any, _value: Any) -> Any:
    """Store an aligned int64 at a position; earlier stores are not moved behind it (release)."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[2], address, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic
def mix(_context: Any, _a: Any, _b: Any) -> Any:
    """Multiply two unsigned numbers to 128 bits; return the two halves combined by XOR."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(a, wide) for a in arguments))
        high = builder.lshr(product, ir.Constant(wide, 64))
        return builder.trunc(builder.xor(product, high), ir.IntType(64))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def swap(_context: Any, _word: Any) -> Any:
    """Return a word with its bytes reversed."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bswap(arguments[0])

    return types.int64(types.int64), generate


@intrinsic
def prefetch(_context: Any, array: Any, _position: Any) -> Any:
    """Ask the processor for the cache line of a position; neither waits nor faults."""

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
    """Return the first eight bytes of `size`, or all of them, as a little-endian number."""
    if size >= 8:
        return load_i64(data, start)
    word = np.int64(0)
    for i in range(size):
        word |= load_u8(data, start + i) << (8 * i)
    return word


@kernel(inline=True)
def hash_key(data: Any, start: Any, size: Any, seed: Any) -> Any:
    """Return a 64-bit hash of a byte string: multiply and fold, 16 bytes a step."""
    # Both multipliers depend on the seed: without it nobody can make one of them 0.
    second_seed = mix(seed, np.int64(-7046029254386353131))
    state = seed ^ size
    at, end = start, start + size
    while at + 16 < end:
        state = mix(load_i64(data, at) ^ second_seed, load_i64(data, at + 8) ^ state)
        at += 16
    # The last 1 to 16 bytes as two words, the missing bytes as zeros; `size` tells these apart.
    low = short_word(data, at, min(end - at, 8))
    at = min(at + 8, end)
    high = short_word(data, at, end - at)
    state = mix(low ^ second_seed, high ^ state)
    return mix(state ^ size, second_seed ^ np.int64(-2024118823216138003))


@kernel(inline=True)
def same(left: Any, left_start: Any, right: Any, right_start: Any, size: Any) -> Any:
    """Whether two byte strings of one length are equal."""
    words = size >> 3
    for i in range(words):
        if load_i64(left, left_start + 8 * i) != load_i64(right, right_start + 8 * i):
            return False
    done = words << 3
    rest = size - done
    left_rest = short_word(left, left_start + done, rest)
    return left_rest == short_word(right, right_start + done, rest)


@kernel(inline=True)
def inside(start: Any, end: Any, size: Any) -> Any:
    """Whether [start, end) lies in [0, size) and its length fits the length field of an entry."""
    return 0 <= start <= end <= size and end - start <= 0x7FFFFFFF - 64


@kernel(I64(BYTES, POSITIONS, POSITIONS, I64, NUMBERS), short=True)
def hash_all(data: Any, starts: Any, ends: Any, seed: Any, out: Any) -> Any:
    """Hash every key; return how many, or the number of the first that lies outside the data."""
    count = min(starts.size, ends.size, out.size)
    for i in range(count):
        if not inside(starts[i], ends[i], data.size):
            return i
        out[i] = hash_key(data, starts[i], ends[i] - starts[i], seed)
    return count


@kernel(
    I64(BYTES, POSITIONS, POSITIONS, POSITIONS, types.Array(types.int32, 1, "C"), NUMBERS, NUMBERS),
    short=True,
)
def group_all(
    data: Any, starts: Any, ends: Any, hashes: Any, table: Any, group: Any, first: Any
) -> Any:
    """Number equal keys alike, by first appearance; return how many differ, −1 for a fault.

    `group` gets the number of each key, `first` the first key of each number. `table` is an empty
    hash table: a power of two of elements, more than there are keys, all −1.
    """
    mask = table.size - 1
    groups = 0
    count = min(starts.size, ends.size, hashes.size, group.size, first.size)
    if count >= table.size:
        return -1
    for i in range(count):
        size = ends[i] - starts[i]
        if not inside(starts[i], ends[i], data.size):
            return -1
        # Linear probing; an element is the number of a group, compared by its first key.
        place = hashes[i] & mask
        while table[place] >= 0:
            known = first[table[place]]
            if (
                hashes[known] == hashes[i]
                and ends[known] - starts[known] == size
                and same(data, starts[known], data, starts[i], size)
            ):
                break
            place = (place + 1) & mask
        if table[place] < 0:
            table[place] = groups
            first[groups] = i
            groups += 1
        group[i] = table[place]
    return groups
