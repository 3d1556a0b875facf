"""Arrow messages compressed with zstd, by one context per thread.

Arrow makes a new zstd context for every buffer it compresses. A batch of some hundred rows has a
dozen small buffers, and then making contexts takes nearly as long as compressing. So Arrow writes
the message uncompressed, which costs next to nothing, and the buffers are compressed here. What
comes out is what Arrow would have written: each buffer is `uncompressed length i64`, zstd frame.
"""

from __future__ import annotations

import struct
import threading

import zstandard

from zufluss.record.arrow import CODECS, ArrowMessage, parse_message
from zufluss.record.template import (
    BODY_LENGTH_AT,
    CODEC_AT,
    CODED_NODES_AT,
    LENGTH_AT,
    PREFIX_BYTES,
    message_template,
)

_NUMBER = struct.Struct("<q")
_PLACE = struct.Struct("<qq")
_METADATA_LENGTH = struct.Struct("<4xi")
_PADDING = [bytes(-size % 8) for size in range(8)]
"""What follows a buffer, by its size modulo 8."""


class ZstdMessages:
    """Compresses the messages of one schema; safe to use from several threads."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._of_thread = threading.local()
        self._layouts: dict[int, tuple[ArrowMessage, bytes]] = {}
        """By metadata length: where nodes and buffers stand, and the metadata to be filled in."""

    def compress(self, message: memoryview, before: int) -> memoryview:
        """The message, compressed, with `before` bytes left free in front of it."""
        layout, template = self._layout(message)
        metadata = bytearray(template)
        at = PREFIX_BYTES + CODED_NODES_AT
        nodes = message[layout.nodes_pos : layout.nodes_pos + 16 * layout.node_count]
        metadata[at : at + len(nodes)] = nodes
        at += len(nodes) + 8
        parts: list[bytes | bytearray] = [bytes(before), metadata]
        compress, body, end = self._compressor().compress, layout.body_start, 0
        places = message[layout.buffers_pos : layout.buffers_pos + 16 * layout.buffer_count]
        for offset, length in _PLACE.iter_unpack(places):
            size = 0
            if length:
                frame = compress(message[body + offset : body + offset + length])
                size = _NUMBER.size + len(frame)
                parts += (_NUMBER.pack(length), frame, _PADDING[size % 8])
            _PLACE.pack_into(metadata, at, end, size)
            at += _PLACE.size
            end += size + -size % 8
        _NUMBER.pack_into(metadata, PREFIX_BYTES + LENGTH_AT, _NUMBER.unpack_from(nodes)[0])
        _NUMBER.pack_into(metadata, PREFIX_BYTES + BODY_LENGTH_AT, end)
        return memoryview(bytearray().join(parts))

    def _layout(self, message: memoryview) -> tuple[ArrowMessage, bytes]:
        """Arrow lays the metadata of all messages of a schema out alike, so one is looked at."""
        (size,) = _METADATA_LENGTH.unpack_from(message)
        known = self._layouts.get(size)
        if known is None:
            layout = parse_message(message, 0, len(message))
            template = bytearray(message_template(layout.node_count, layout.buffer_count, True))
            template[PREFIX_BYTES + CODEC_AT] = CODECS.index("zstd")
            known = self._layouts[size] = layout, bytes(template)
        return known

    def _compressor(self) -> zstandard.ZstdCompressor:
        mine = getattr(self._of_thread, "compressor", None)
        if mine is None:
            mine = self._of_thread.compressor = zstandard.ZstdCompressor(level=self._level)
        return mine
