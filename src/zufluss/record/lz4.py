"""LZ4 frames that every reader can decompress.

pyarrow decompresses with liblz4, which accepts frames that the format forbids: a match zero bytes
back, the id of an unknown dictionary, bytes after the end. The decoders of the Rust and Java
clients refuse such a frame and would never get past its batch. So `batch/check.py` checks the
structure of frames too, without decompressing. `kernels/lz4.py` is the compiled form; `frame_fault`
is its twin.

| frame            | bytes |                                                                      |
|------------------|-------|----------------------------------------------------------------------|
| magic            | 4     | 04 22 4d 18                                                          |
| flags            | 1     | version 01 (2 bits), blocks independent, block checksums, content    |
|                  |       | size, content checksum, reserved 0, dictionary id (must be 0)        |
| block descriptor | 1     | bits 4–6: largest block (4 64 KiB … 7 4 MiB), all others 0           |
| content size     | 0, 8  | if its flag is set                                                   |
| header checksum  | 1     |                                                                      |
| blocks           |       | u32 size (top bit: stored as is), data, u32 checksum if flagged      |
| end              | 4     | size 0                                                               |
| content checksum | 0, 4  | if its flag is set                                                   |

A block is a row of sequences: a token (literal length, match length less 4; 15 continues in bytes
of 255), literals, u16 distance back (never 0). The last sequence ends with its literals. Checksums
and distances that reach before the data are left to the decompression.
"""

from __future__ import annotations

import struct

from zufluss.record.header import Buffer

MAGIC = 0x184D2204
FLAGS_FIXED = 0b1100_0011
"""Flag bits with a fixed value: version, reserved, dictionary id."""
VERSION = 0b0100_0000
BLOCK_CHECKSUM = 0b0001_0000
CONTENT_SIZE = 0b0000_1000
CONTENT_CHECKSUM = 0b0000_0100
STORED = 0x8000_0000
CONTINUED = 15
"""Length in a token that continues in the following bytes."""


def frame_fault(view: Buffer, start: int, end: int) -> int:
    """Return the position of the first fault of the frame view[start:end], −1 if there is none."""
    if end - start < 7 or struct.unpack_from("<I", view, start)[0] != MAGIC:
        return start
    flags, descriptor = view[start + 4], view[start + 5]
    size_code = descriptor >> 4
    if flags & FLAGS_FIXED != VERSION or descriptor & 0x8F or size_code < 4:
        return start + 4
    pos = start + 7 + (8 if flags & CONTENT_SIZE else 0)
    checksum = 4 if flags & BLOCK_CHECKSUM else 0
    while end - pos >= 4:
        size = struct.unpack_from("<I", view, pos)[0]
        pos += 4
        if size == 0:
            pos += 4 if flags & CONTENT_CHECKSUM else 0
            return -1 if pos == end else pos
        data = size & ~STORED
        if data > 1 << (8 + 2 * size_code) or data + checksum > end - pos:
            return pos - 4
        fault = -1 if size & STORED else _block_fault(view, pos, pos + data)
        if fault >= 0:
            return fault
        pos += data + checksum
    return pos


def _block_fault(view: Buffer, pos: int, end: int) -> int:
    while pos < end:
        token = view[pos]
        literals, pos = _length(view, pos + 1, end, token >> 4)
        if literals > end - pos:
            return pos
        pos += literals
        if pos == end:
            return -1
        if end - pos < 2 or (view[pos] == 0 and view[pos + 1] == 0):
            return pos
        _, pos = _length(view, pos + 2, end, token & 15)
    return end


def _length(view: Buffer, pos: int, end: int, length: int) -> tuple[int, int]:
    """Return a length whose first four bits stand in a token, and the position after it."""
    if length < CONTINUED:
        return length, pos
    while pos < end:
        byte = view[pos]
        pos += 1
        length += byte
        if byte != 255:
            break
    return length, pos
