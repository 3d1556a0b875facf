"""The check of LZ4 frames in plain Python: the oracle of `zufluss.record.kernels.lz4`."""

from __future__ import annotations

import struct

from zufluss.record.header import Buffer
from zufluss.record.kernels.lz4 import (
    BLOCK_CHECKSUM,
    CONTENT_CHECKSUM,
    CONTENT_SIZE,
    CONTINUED,
    FLAGS_FIXED,
    MAGIC,
    STORED,
    VERSION,
)


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
