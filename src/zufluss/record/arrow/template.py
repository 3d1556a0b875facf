"""The metadata of an Arrow message as a template, in which only numbers differ within a table.

Positions are from the metadata's start; the marker and the metadata length stand before it.

| at     | content                                   | at              | content               |
|--------|-------------------------------------------|-----------------|-----------------------|
| 0      | root offset → 16                          | 56              | RecordBatch table     |
| 4      | vtable of Message                         | 64              | record count, i64     |
| 16     | Message table                             | 80, 88 (coded)  | BodyCompression table |
| 24     | body length, i64                          | 92 (coded)      | codec                 |
| 32, 34 | version, header type                      | 88, 104 (coded) | nodes                 |
| 40     | vtable of RecordBatch                     | then            | buffers               |

The kernels repeat the positions (`kernels/batch_project.py`), and a test holds them equal; clients
use this module without loading any kernel.
"""

from __future__ import annotations

import struct

PREFIX_BYTES = 8
"""Marker and metadata length, before the metadata."""

BODY_LENGTH_AT, LENGTH_AT, CODEC_AT, NODES_AT, CODED_NODES_AT = 24, 64, 92, 88, 104
"""Positions of the numbers that differ from batch to batch."""

STORED = b"\xff" * 8
"""Prefix of a buffer that a compressed message holds uncompressed."""


def message_template(nodes: int, buffers: int, coded: bool) -> bytes:
    """Build an encapsulated message without a body, all its numbers 0."""
    message = struct.pack("<I 6H i I q H B 5x", 16, 12, 20, 16, 18, 4, 8, 12, 36, 0, 4, 3)
    nodes_vector = (100 if coded else 84, nodes)
    buffers_vector = (nodes_vector[0] + 4 + 16 * nodes + 4, buffers)
    compression = 88 if coded else 0
    table = struct.pack(
        "<6H 4x i I q I I",
        *(12, 24, 8, 4, 16, 20 if coded else 0),
        *(16, nodes_vector[0] - 60, 0, buffers_vector[0] - 72, compression and compression - 76),
    )
    codec = struct.pack("<4H i B B 2x", 8, 8, 4, 5, 8, 0, 0) if coded else b""
    metadata = bytearray(message + table + codec)
    for position, count in (nodes_vector, buffers_vector):
        metadata += bytes(position - len(metadata)) + struct.pack("<I", count) + bytes(16 * count)
    return struct.pack("<Ii", 0xFFFFFFFF, len(metadata)) + bytes(metadata)
