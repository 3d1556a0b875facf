"""Writes a compressed Arrow message: rows to buffers, the choice what to compress, the message.

The buffers of a message stand in a *body* one after the other, each at a multiple of 8. `numbers`
(int64) describes them as the metadata of a message does:

| at                | content                                                            |
|-------------------|--------------------------------------------------------------------|
| 2·i               | node i: number of values, number of NULLs                          |
| 2·nodes + 2·i     | buffer i: offset in the body, size                                 |

`lay_out` makes both from the cells that `row_read.locate` filled, `choose` lists the buffers that
are worth compressing ("packing"), and `assemble` writes the message from packed and unpacked ones.
`zufluss.record.arrow.template` has the template of the metadata; `zufluss.record.arrow.zstd` says
what is packed and why. Nothing is written past an end, whatever the numbers say.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.batch_project import BODY_LENGTH_AT, CODEC_AT, CODED_NODES_AT, LENGTH_AT
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import (
    BYTES,
    copy,
    load_i64,
    store_i32,
    store_i64,
    store_u8,
)
from zufluss.record.kernels.row_read import NESTED, NULLS, PADDED, SINK, SLOT, TEXT

ZSTD = 1
"""Number of the codec in a message."""

SMALL_BYTES = 128
"""Smaller buffers are not packed: the frame around them takes most of the gain."""

GAIN_SHARE = 16
"""A packed buffer is used if it is smaller by at least 1 / GAIN_SHARE."""

REST_BATCHES = 15
"""For how many messages a buffer that gained nothing is not packed."""

PREFIX_BYTES = 8
"""Size of the prefix of each buffer in a compressed message, its uncompressed size."""

STORED = -1
"""Prefix of a buffer that is stored uncompressed."""

OUTSIDE = -1
"""Result of a kernel whose numbers leave its arrays."""

_OFFSETS_MAX = 2**31 - 1
_OUT = types.Array(types.uint8, 1, "C")
_NUMBERS = types.Array(types.int64, 1, "C", readonly=True)
_NUMBERS_OUT = types.Array(types.int64, 1, "C")
_LINES = types.Array(types.int64, 2, "C", readonly=True)


@kernel()
def _padded(size: Any) -> Any:
    return (size + 7) & ~7


@kernel()
def _add(numbers: Any, buffer: Any, at: Any, size: Any) -> Any:
    """Note a buffer in `numbers`; returns where the next one begins."""
    numbers[buffer], numbers[buffer + 1] = at, size
    return at + _padded(size)


@kernel()
def _texts(data: Any, cells: Any, column: Any, count: Any, out: Any, at: Any) -> Any:
    """Write int32 offsets at `at` and the placed values behind them; returns the values' bytes."""
    body = at + _padded(4 * (count + 1))
    pos = body
    if body > out.size:
        return np.int64(OUTSIDE)
    for row in range(count):
        store_i32(out, at + 4 * row, pos - body)
        start = load_i64(cells, column + 8 * row)
        size = load_i64(cells, column + 8 * (count + row)) - start
        if start < 0 or size <= 0:
            continue
        if start + size > data.size or pos + size > out.size:
            return np.int64(OUTSIDE)
        # Most texts are short: two words cost less than a call of memcpy.
        if size <= 16 and start + 16 <= data.size and pos + 16 <= out.size:
            store_i64(out, pos, load_i64(data, start))
            store_i64(out, pos + 8, load_i64(data, start + 8))
        else:
            copy(out, pos, data, start, size)
        pos += size
    store_i32(out, at + 4 * count, pos - body)
    return pos - body if pos - body <= _OFFSETS_MAX else np.int64(OUTSIDE)


@kernel()
def _equal_widths(
    data: Any, cells: Any, column: Any, count: Any, width: Any, out: Any, at: Any
) -> Any:
    """Write the placed values in `width` bytes each, padded with zeros; returns their bytes."""
    if at + count * width > out.size:
        return np.int64(OUTSIDE)
    out[at : at + count * width] = 0
    for row in range(count):
        start = load_i64(cells, column + 8 * row)
        size = load_i64(cells, column + 8 * (count + row)) - start
        if start < 0 or size <= 0:
            continue
        if size > width or start + size > data.size:
            return np.int64(OUTSIDE)
        copy(out, at + width * row, data, start, size)
    return count * width


@kernel()
def _column(
    data: Any,
    cells: Any,
    column: Any,
    end: Any,
    sink: Any,
    count: Any,
    size: Any,
    out: Any,
    at: Any,
) -> Any:
    """Write the values of a field at `at`; returns the bytes of its last buffer, or `OUTSIDE`.

    Fields that are no places stand in cells with the bytes of their Arrow buffer.
    """
    if sink == PADDED:
        return _equal_widths(data, cells, column, count, size // max(count, 1), out, at)
    if sink >= TEXT:
        return _texts(data, cells, column, count, out, at)
    if column + size > end or at + size > out.size:
        return np.int64(OUTSIDE)
    copy(out, at, cells, column, size)
    return size


@kernel(
    types.int64(BYTES, BYTES, _LINES, _LINES, _NUMBERS, types.int64, _OUT, _NUMBERS_OUT),
    short=True,
)
def lay_out(
    data: Any,
    cells: Any,
    facts: Any,
    program: Any,
    widths: Any,
    count: Any,
    out: Any,
    numbers: Any,
) -> Any:
    """Write the columns of rows as a body; returns its size, or `OUTSIDE`.

    `data`, `cells`, `facts` and `program` are those of `row_read.locate`; `widths` has the bytes of
    a value in its Arrow buffer, 0 for bits. Nested columns are not supported.
    """
    fields, stride, bits = widths.size, (count + 63) // 64 * 8, (count + 7) >> 3
    if len(program) != fields + 1 or len(facts) != fields or numbers.size < 2 * fields:
        return np.int64(OUTSIDE)
    bitmaps = 8 * count * program[fields, SLOT]
    if count < 0 or bitmaps < 0 or bitmaps + fields * stride > cells.size:
        return np.int64(OUTSIDE)
    at, buffer = np.int64(0), 2 * fields
    for field in range(fields):
        sink, nulls = program[field, SINK], facts[field, NULLS]
        valid = bits if nulls else np.int64(0)
        if sink >= NESTED or buffer + 6 > numbers.size + 2 * (sink < TEXT or sink == PADDED):
            return np.int64(OUTSIDE)
        if at + valid > out.size:
            return np.int64(OUTSIDE)
        # The node, then the buffers: validity (empty without NULLs), offsets of texts, values.
        numbers[2 * field], numbers[2 * field + 1] = count, nulls
        copy(out, at, cells, bitmaps + field * stride, valid)
        at = _add(numbers, buffer, at, valid)
        buffer += 2
        size = count * widths[field] if widths[field] else bits
        column = 8 * count * program[field, SLOT]
        size = _column(data, cells, column, bitmaps, sink, count, size, out, at)
        if size < 0:
            return np.int64(OUTSIDE)
        if sink >= TEXT and sink != PADDED:
            at = _add(numbers, buffer, at, 4 * (count + 1))
            buffer += 2
        at = _add(numbers, buffer, at, size)
        buffer += 2
    return at if buffer == numbers.size else np.int64(OUTSIDE)


@kernel(types.int64(_NUMBERS, types.int64, _NUMBERS_OUT, _NUMBERS_OUT), short=True)
def choose(numbers: Any, nodes: Any, rest: Any, places: Any) -> Any:
    """Write offset and size of the buffers to pack to `places`; returns how many there are.

    `rest` counts for each buffer the messages for which it is not packed.
    """
    chosen = 0
    if numbers.size < 2 * (nodes + rest.size) or places.size < 2 * rest.size:
        return np.int64(0)
    for buffer in range(rest.size):
        entry = 2 * (nodes + buffer)
        if rest[buffer] > 0:
            rest[buffer] -= 1
        elif numbers[entry + 1] >= SMALL_BYTES:
            places[2 * chosen], places[2 * chosen + 1] = numbers[entry], numbers[entry + 1]
            chosen += 1
    return np.int64(chosen)


@kernel()
def _begin(template: Any, numbers: Any, nodes: Any, count: Any, out: Any, at: Any) -> Any:
    """Write the metadata without buffers and body length; returns where the buffers' places go."""
    table = at + 8 + CODED_NODES_AT
    copy(out, at, template, 0, template.size)
    store_u8(out, at + 8 + CODEC_AT, np.int64(ZSTD))
    store_i64(out, at + 8 + LENGTH_AT, count)
    for number in range(2 * nodes):
        store_i64(out, table + 8 * number, numbers[number])
    return table + 16 * nodes + 8


@kernel()
def _write(out: Any, pos: Any, prefix: Any, source: Any, start: Any, size: Any) -> Any:
    """Write a buffer behind its prefix and pad it with zeros; returns where the next begins."""
    store_i64(out, pos, prefix)
    copy(out, pos + PREFIX_BYTES, source, start, size)
    end = pos + PREFIX_BYTES + _padded(size)
    for padding in range(pos + PREFIX_BYTES + size, end):
        store_u8(out, padding, np.int64(0))
    return end


@kernel(
    types.int64(
        BYTES, BYTES, _NUMBERS, types.int64, types.int64, BYTES, _NUMBERS, _NUMBERS, _NUMBERS_OUT,
        _OUT, types.int64,
    ),
    short=True,
)  # fmt: skip
def assemble(
    template: Any,
    body: Any,
    numbers: Any,
    nodes: Any,
    count: Any,
    packed: Any,
    sizes: Any,
    places: Any,
    rest: Any,
    out: Any,
    at: Any,
) -> Any:
    """Write the message of `count` rows to `out` from `at` on; returns its end, or `OUTSIDE`.

    `packed` holds the packed buffers one after the other: `places` says which buffers they are,
    `sizes` how large they are. A buffer that is hardly smaller is written unpacked, and not packed
    for the next `REST_BATCHES` messages.
    """
    begin = pos = at + template.size
    if at < 0 or begin > out.size or nodes < 0 or numbers.size != 2 * (nodes + rest.size):
        return np.int64(OUTSIDE)
    if 8 + CODED_NODES_AT + 16 * (nodes + rest.size) + 8 != template.size:
        return np.int64(OUTSIDE)
    table = _begin(template, numbers, nodes, count, out, at)
    taken, packed_end = 0, np.int64(0)
    for buffer in range(rest.size):
        entry = 2 * (nodes + buffer)
        offset, size = numbers[entry], numbers[entry + 1]
        if offset < 0 or size < 0 or size > body.size or offset > body.size - size:
            return np.int64(OUTSIDE)
        if PREFIX_BYTES + _padded(size) > out.size - pos:
            return np.int64(OUTSIDE)
        # Packed buffers come in the order of buffers: the next one is this, or a later one.
        packed_size, start = size, pos
        if taken < sizes.size and 2 * taken < places.size and places[2 * taken] == offset and size:
            packed_size = sizes[taken]
            taken += 1
            packed_end += packed_size
            if packed_size < 0 or packed_end > packed.size:
                return np.int64(OUTSIDE)
            if packed_size > size - size // GAIN_SHARE:
                rest[buffer] = REST_BATCHES
                packed_size = size
        if packed_size < size:
            pos = _write(out, pos, size, packed, packed_end - packed_size, packed_size)
        elif size:
            pos = _write(out, pos, np.int64(STORED), body, offset, size)
        store_i64(out, table + 16 * buffer, start - begin)
        written = packed_size + PREFIX_BYTES if size else np.int64(0)
        store_i64(out, table + 16 * buffer + 8, written)
    store_i64(out, at + 8 + BODY_LENGTH_AT, pos - begin)
    return pos if taken == sizes.size else np.int64(OUTSIDE)
