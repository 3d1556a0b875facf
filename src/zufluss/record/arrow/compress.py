"""Compressed Arrow messages of a client's rows: each buffer is packed, or stays as it is.

Arrow compresses every buffer of a message, with a context of its own for each. To create a context
costs as much as to pack a small buffer, and a buffer that does not get smaller, such as random
numbers, still costs its readers the unpacking. So Arrow writes the message uncompressed, which is
one copy, and this module packs the buffers that are worth it:

    Arrow writes   [ metadata ][ buffer         ][ buffer    ][ buffer                 ] …
    we send        [ metadata ][ size, packed ][ -1, unpacked ][ size, packed ] …

| a buffer                              | is                                                      |
|---------------------------------------|---------------------------------------------------------|
| of no bytes                           | left out, as Arrow does                                 |
| below `SMALL_BYTES`                   | sent unpacked                                           |
| that gets smaller by 1 / `GAIN`       | sent packed                                             |
| that does not                         | sent unpacked, and not packed for `REST_BATCHES` more   |

A column of numbers behaves in the next batch as in this one, so columns that cannot be packed cost
the writer next to nothing. To pack and unpack for a gain below a tenth takes a core longer than a
gigabit network takes for the bytes. The bytes are not those of Arrow's own writer, and the same
rows may give other bytes the next time.

`zufluss.record.arrow.zstd` does the same for changelogs with kernels, which clients do not load.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

import pyarrow as pa
import zstandard

from zufluss.record.arrow.message import LZ4_FRAME, parse_message
from zufluss.record.arrow.template import (
    BODY_LENGTH_AT,
    CODEC_AT,
    CODED_NODES_AT,
    LENGTH_AT,
    PREFIX_BYTES,
    STORED,
    message_template,
)

SMALL_BYTES: Final = 128
"""Smaller buffers are not packed: the frame around them takes most of the gain."""

GAIN: Final = 10
"""A packed buffer is used if it is smaller by at least 1 / GAIN."""

REST_BATCHES: Final = 15
"""For how many messages a buffer that gained nothing is not packed."""

Packer: TypeAlias = Callable[[memoryview], bytes]
"""Packs one buffer into a frame."""

_NUMBER = struct.Struct("<q")
_PADDING = [bytes(-size % 8) for size in range(8)]
"""Padding of a buffer, by its size modulo 8."""


class CompressedMessages:
    """Writes the messages of one schema; safe to use from several threads."""

    def __init__(self, schema: pa.Schema, codec: int, level: int) -> None:
        """`codec` is the codec's number in a message, `level` the level of Zstandard."""
        nulls = [pa.nulls(1, field.type) for field in schema]
        message = memoryview(pa.RecordBatch.from_arrays(nulls, schema=schema).serialize())
        plain = self._plain = parse_message(message, 0, len(message))
        """Positions in the message that Arrow writes; the same for any rows of the schema."""
        template = bytearray(message_template(plain.node_count, plain.buffer_count, coded=True))
        template[PREFIX_BYTES + CODEC_AT] = codec
        self._template = template
        self._places = struct.Struct(f"<{2 * plain.buffer_count}q")
        self._codec = codec
        self._level = level
        self._own = threading.local()
        self._rest = [0] * plain.buffer_count
        """Messages for which each buffer is not packed; a guess, so threads need no lock."""

    def write(self, rows: pa.RecordBatch, before: int) -> memoryview:
        """Return the message of rows, with `before` free bytes in front of it."""
        plain = self._plain
        message = memoryview(rows.serialize())
        metadata = self._template.copy()
        nodes_at = PREFIX_BYTES + CODED_NODES_AT
        nodes_end = nodes_at + 16 * plain.node_count
        nodes = message[plain.nodes_pos : plain.nodes_pos + 16 * plain.node_count]
        metadata[nodes_at:nodes_end] = nodes
        parts: list[bytes | bytearray | memoryview] = [bytes(before), metadata]
        places, size = self._add_buffers(message, parts)
        self._places.pack_into(metadata, nodes_end + 8, *places)
        _NUMBER.pack_into(metadata, PREFIX_BYTES + LENGTH_AT, rows.num_rows)
        _NUMBER.pack_into(metadata, PREFIX_BYTES + BODY_LENGTH_AT, size)
        return memoryview(bytearray().join(parts))

    def _add_buffers(
        self, message: memoryview, parts: list[bytes | bytearray | memoryview]
    ) -> tuple[list[int], int]:
        """Append the buffers of Arrow's message to `parts`; returns their places and total size."""
        body = message[self._plain.body_start :]
        numbers = self._places.unpack_from(message, self._plain.buffers_pos)
        places: list[int] = []
        at = 0
        for index, (start, size) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
            taken = 0
            if size:
                data = body[start : start + size]
                packed = self._packed(index, data)
                content = data if packed is None else packed
                taken = len(STORED) + len(content)
                prefix = STORED if packed is None else _NUMBER.pack(size)
                parts += (prefix, content, _PADDING[taken % 8])
            places += (at, taken)
            at += taken + -taken % 8
        return places, at

    def _packed(self, index: int, data: memoryview) -> bytes | None:
        """Return the frame of a buffer, None if it is sent unpacked."""
        size = len(data)
        if size < SMALL_BYTES:
            return None
        if self._rest[index] > 0:
            self._rest[index] -= 1
            return None
        packed = self._pack(data)
        if len(packed) <= size - size // GAIN:
            return packed
        self._rest[index] = REST_BATCHES
        return None

    @property
    def _pack(self) -> Packer:
        """The packer of this thread; its context is not safe to use from several."""
        own: Packer | None = getattr(self._own, "pack", None)
        if own is None:
            own = self._own.pack = _packer(self._codec, self._level)
        return own


def _packer(codec: int, level: int) -> Packer:
    if codec == LZ4_FRAME:
        lz4 = pa.Codec("lz4")
        return lambda data: lz4.compress(data, asbytes=True)
    return zstandard.ZstdCompressor(level=level).compress
