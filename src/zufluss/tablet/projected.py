"""Reading some columns of a log: as few bytes of it as that takes.

Of a large batch only the header, the Arrow metadata and the ranges of the wanted columns are read
from the page cache; copying the rest would be most of the work. Small batches are read many at a
time and projected by one kernel call. As in Apache Fluss the limit of a fetch counts projected
bytes, so a narrow projection gets many batches in one answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.log.log import Log
from zufluss.log.reader import LargeBatch
from zufluss.record.arrow.project import Piece, Projector


def read_projected(
    log: Log,
    projector: Projector,
    columns: tuple[int, ...],
    offset: int,
    bytes_max: int,
    span_max: int,
    *,
    at_least_one: bool,
    nowait: bool,
) -> tuple[list[Any], int, int]:
    """Batches from `offset` on with these columns only; their bytes in the log; their end offset.

    `bytes_max` and `at_least_one` are about projected batches. The batches of the log end where
    they have `span_max` bytes or more. Errors as of `Log.read`.
    """
    records: list[Any] = []
    room, span = max(bytes_max, 0), 0
    while offset < log.high_watermark and span < span_max and (room > 0 or not records):
        first = at_least_one and not records
        large = log.large_batch(offset) if nowait else None
        if large is None:
            some = min(room, span_max - span)
            read = log.read(offset, some, at_least_one=first or some < room, nowait=nowait)
            if not len(read.records) or (len(read.records) > room and not first):
                break
            batches = projector.project_all(read.records, columns)
            offset = read.end_offset
            span += len(read.records)
        else:
            prefix, pieces = projector.plan(large.head, 0, large.header, columns)
            size = len(prefix) + sum(p[1] if isinstance(p, tuple) else len(p) for p in pieces)
            if size > room and not first:
                break
            batches = [_read_pieces(log, large, prefix, pieces, size)]
            offset = large.header.next_offset
            span += large.header.size
        records += batches
        room -= sum(map(len, batches))
    return records, span, offset


def _read_pieces(
    log: Log, batch: LargeBatch, prefix: bytearray, pieces: list[Piece], size: int
) -> memoryview:
    """The projected batch in one buffer, its columns read straight into it."""
    out = np.empty(size, np.uint8).data
    at = len(prefix)
    out[:at] = prefix
    for piece in pieces:
        if isinstance(piece, tuple):
            begin, length = piece
            log.read_range(batch, begin, out[at : at + length])
        else:
            length = len(piece)
            out[at : at + length] = piece
        at += length
    return out
