"""LZ4 frames that every reader can decompress.

pyarrow decompresses with liblz4, which accepts frames that the format forbids: a match zero bytes
back, the id of an unknown dictionary, bytes after the end. The decoders of the Rust and Java
clients refuse such a frame and would never get past its batch. So `batch/check.py` checks the
structure of frames too, without decompressing. `tests/record/plain_lz4.py` is the plain-Python
twin.

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

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, load_u8, load_u16, load_u32

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


@kernel()
def _length(buf: Any, pos: Any, end: Any, length: Any) -> Any:
    """A length whose first four bits stand in a token, and the position after it."""
    if length < CONTINUED:
        return np.int64(length), np.int64(pos)
    while pos < end:
        byte = load_u8(buf, pos)
        pos += 1
        length += byte
        if byte != 255:
            break
    return np.int64(length), np.int64(pos)


@kernel()
def _block_fault(buf: Any, pos: Any, end: Any) -> Any:
    """Position of the first fault of the block in [pos, end), −1 if there is none."""
    # A sequence is a token, literals, offset and length of a match; the last has only literals.
    while pos < end:
        token = load_u8(buf, pos)
        literals, pos = _length(buf, pos + 1, end, token >> 4)
        if literals > end - pos:
            return np.int64(pos)
        pos += literals
        if pos == end:
            return np.int64(-1)
        if end - pos < 2 or load_u16(buf, pos) == 0:
            return np.int64(pos)
        _, pos = _length(buf, pos + 2, end, token & 15)
    return np.int64(end)


@kernel(types.int64(BYTES, types.int64, types.int64))
def frame_fault(buf: Any, start: Any, end: Any) -> Any:
    """Position of the first fault of the frame that fills buf[start:end], −1 if there is none."""
    if start < 0 or end > len(buf) or end - start < 7 or load_u32(buf, start) != MAGIC:
        return np.int64(start)
    flags, descriptor = load_u8(buf, start + 4), load_u8(buf, start + 5)
    size_code = descriptor >> 4
    if flags & FLAGS_FIXED != VERSION or descriptor & 0x8F != 0 or size_code < 4:
        return np.int64(start + 4)
    # Blocks, each behind its size, up to a size of 0.
    pos = start + 7 + (8 if flags & CONTENT_SIZE else 0)
    checksum = 4 if flags & BLOCK_CHECKSUM else 0
    while end - pos >= 4:
        size = load_u32(buf, pos)
        pos += 4
        if size == 0:
            pos += 4 if flags & CONTENT_CHECKSUM else 0
            return np.int64(-1 if pos == end else pos)
        data = size & ~np.int64(STORED)
        if data > np.int64(1) << (8 + 2 * size_code) or data + checksum > end - pos:
            return np.int64(pos - 4)
        if size & STORED == 0:
            fault = _block_fault(buf, pos, pos + data)
            if fault >= 0:
                return np.int64(fault)
        pos += data + checksum
    return np.int64(pos)
