"""Arrow messages compressed with Zstandard: one context packs all buffers of a message.

Arrow compresses each buffer of a message with a context of its own. To create and clear a context
costs as much as to compress the few kilobytes of a column of a small batch, and a batch has two or
three buffers for every column. Here the buffers are laid out uncompressed first, by Arrow or
straight from rows; one context packs those of all columns, and the metadata is written around them:

    laid out   [ buffer              ][ buffer     ][ buffer                      ] …
    sent       [ metadata ][ size, packed ][ -1, unpacked ][ size, packed ] …

A buffer stays unpacked if it is small or gets hardly smaller. Numbers that did not get smaller in
one batch will not in the next, so such a buffer is not packed for some batches before it is tried
again. The bytes are not those of Arrow's own writer, and the same rows may give other bytes the
next time.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import zstandard

from zufluss.record.arrow.message import parse_message
from zufluss.record.arrow.template import message_template
from zufluss.record.kernels import message_write as k
from zufluss.record.slices import Bytes, Positions

_PADDING_BYTES = 16
"""Largest prefix and padding of a buffer in a message."""
_NONE = np.empty(0, np.int64)


class Buffers(NamedTuple):
    """The content of a message, uncompressed."""

    rows: int
    """Number of rows, at least one."""
    numbers: Positions
    """Nodes and places of the buffers, see `kernels/message_write.py`."""
    body: Bytes
    """The buffers."""


class ZstdMessages:
    """Writes the messages of one schema; safe to use from several threads."""

    def __init__(self, schema: pa.Schema, level: int) -> None:
        nulls = [pa.nulls(1, field.type) for field in schema]
        message = memoryview(pa.RecordBatch.from_arrays(nulls, schema=schema).serialize())
        plain = self._plain = parse_message(message, 0, len(message))
        """Positions in the message that Arrow writes; the same for any rows of the schema."""
        template = message_template(plain.node_count, plain.buffer_count, coded=True)
        self._template = np.frombuffer(template, np.uint8)
        self._level = level
        self._own = threading.local()
        self._rest = np.zeros(plain.buffer_count, np.int64)
        """Messages for which each buffer is not packed; a guess, so threads need no lock."""

    def of(self, rows: pa.RecordBatch) -> Buffers:
        """Return the buffers of one or more rows."""
        plain = self._plain
        message = np.frombuffer(rows.serialize(), np.uint8)
        nodes = message[plain.nodes_pos : plain.nodes_pos + 16 * plain.node_count]
        places = message[plain.buffers_pos : plain.buffers_pos + 16 * plain.buffer_count]
        numbers = np.concatenate([nodes, places]).view(np.int64)
        return Buffers(rows.num_rows, numbers, message[plain.body_start :])

    def write(self, buffers: Buffers, before: int) -> memoryview:
        """Return the message, with `before` free bytes in front of it."""
        rows, numbers, body = buffers
        rest, nodes = self._rest, self._plain.node_count
        places = np.empty(2 * len(rest), np.int64)
        chosen = k.choose(numbers, nodes, rest, places)
        packed, sizes = self._pack(body, places[: 2 * chosen]) if chosen else (b"", _NONE)
        room = before + len(self._template) + len(body) + _PADDING_BYTES * len(rest)
        out = np.empty(room, np.uint8)
        end = k.assemble(
            self._template, body, numbers, nodes, rows, np.frombuffer(packed, np.uint8), sizes,
            places, rest, out, before,
        )  # fmt: skip
        if end == k.OUTSIDE:
            raise IndexError("a buffer of the message does not lie where its metadata says")
        return out.data[:end]

    def _pack(self, body: Bytes, places: Positions) -> tuple[bytes, Positions]:
        """Pack the buffers at these places; returns them one after the other, and their sizes."""
        source = zstandard.BufferWithSegments(body.data, places.tobytes())
        packed = self._compressor.multi_compress_to_buffer(source)
        parts = [packed[i].tobytes() for i in range(len(packed))]
        return b"".join(parts), np.fromiter(map(len, parts), np.int64, len(parts))

    @property
    def _compressor(self) -> zstandard.ZstdCompressor:
        """The compressor of this thread; it is not safe to use from several."""
        own: zstandard.ZstdCompressor | None = getattr(self._own, "compressor", None)
        if own is None:
            own = self._own.compressor = zstandard.ZstdCompressor(level=self._level)
        return own
