"""The changelog read back for recovery: rows and change types in large pieces.

Recovery applies the changelog to the last flushed state. Batches are as small as clients sent them,
and decoding costs about the same for ten rows as for ten thousand, so batches are joined. A thread
reads and decompresses the next piece while the caller applies the last one.

A changelog consists of the local log and, before it, of the part that only remote storage has
(`EarlierChangelog`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.errors import CorruptRecordError
from zufluss.kv.merge.base import UPDATE_BEFORE
from zufluss.kv.table import KvTable
from zufluss.log.log import Log
from zufluss.record.arrow.message import decode
from zufluss.record.batch.row_body import decode_body
from zufluss.record.header import BatchHeader, iter_headers
from zufluss.threads import Threads

READ_BYTES = 8 << 20
"""Bytes of the changelog that are read at a time."""
PIECE_ROWS = 32_768
"""Rows of a piece, about."""
PIECE_BYTES = 16 << 20
"""Bytes of the rows of a piece, about: they have to fit into memory at once."""

Kinds = npt.NDArray[np.uint8]


class ChangelogPiece(NamedTuple):
    """Consecutive changes of a changelog, without the before images of updates."""

    rows: pa.RecordBatch
    """The rows, inserted, updated or deleted."""
    kinds: Kinds
    """Their change types."""
    schema_id: int
    """The schema of the rows."""
    base_offset: int
    """Base offset of the last batch of the piece."""
    end_offset: int
    """The log offset after the piece."""
    size: int
    """Bytes of the batches."""


class EarlierChangelog(NamedTuple):
    """The part of a changelog that lies before the local log, in remote storage."""

    start_offset: int
    """Where the part begins; it ends where the log begins."""
    batches: Callable[[int], Iterator[memoryview]]
    """Returns whole batches in order; the first one contains the given offset or lies before."""


def changelog_start(changelog: Log, earlier: EarlierChangelog | None) -> int:
    """Return the first offset of a changelog."""
    return changelog.log_start_offset if earlier is None else earlier.start_offset


def pieces(
    table: KvTable, changelog: Log, offset: int, earlier: EarlierChangelog | None = None
) -> Iterator[ChangelogPiece]:
    """Yield the changes from `offset` to the end of the log, which nobody writes to meanwhile.

    Raises `CorruptRecordError` if changes are missing in between.
    """
    if offset == changelog.log_end_offset:
        return
    batches = _log_batches(changelog, max(offset, changelog.log_start_offset))
    if earlier is not None and offset < changelog.log_start_offset:
        batches = chain(earlier.batches(offset), batches)
    yield from pieces_of(table, batches, offset, changelog.log_end_offset)


def pieces_of(
    table: KvTable, batches: Iterator[memoryview], offset: int, until: int
) -> Generator[ChangelogPiece, None, None]:
    """Yield the changes from `offset` to `until`; a thread reads one piece ahead.

    Changes outside of this range are skipped, even within the last batch. Raises
    `CorruptRecordError` if changes are missing in between.
    """
    with Threads(1, "zufluss-replay") as ahead:
        source = _pieces(table, batches, offset, until)
        following = ahead.submit(next, source, None)
        while (piece := following.result()) is not None:
            following = ahead.submit(next, source, None)
            yield piece


def pieces_in_turn(
    table: KvTable, records: memoryview, offset: int, until: int
) -> Iterator[ChangelogPiece]:
    """Yield the changes from `offset` to `until` of batches in memory, read by the caller's thread.

    Raises `CorruptRecordError` if changes are missing in between.
    """
    return _pieces(table, iter((records,)), offset, until)


def _log_batches(changelog: Log, offset: int) -> Iterator[memoryview]:
    while offset < changelog.log_end_offset:
        read = changelog.read(offset, READ_BYTES, at_least_one=True, nowait=False)
        yield read.records
        offset = read.end_offset


def _pieces(
    table: KvTable, batches: Iterator[memoryview], offset: int, until: int
) -> Iterator[ChangelogPiece]:
    waiting: list[ChangelogPiece] = []
    rows = size = 0
    for records in batches:
        for position, header in iter_headers(records):
            if header.next_offset <= offset or offset >= until:
                continue
            if header.base_offset != offset:
                raise _hole(table, offset, header.base_offset)
            offset = header.next_offset
            changed = waiting and waiting[0].schema_id != header.schema_id
            if changed or rows >= PIECE_ROWS or size >= PIECE_BYTES:
                yield _joined(waiting)
                waiting, rows, size = [], 0, 0
            waiting.append(_piece(table, records, position, header, until))
            rows += waiting[-1].rows.num_rows
            size += waiting[-1].rows.nbytes
        if offset >= until:
            break
    if offset < until:
        raise _hole(table, offset, until)
    if waiting:
        yield _joined(waiting)


def _hole(table: KvTable, offset: int, end: int) -> CorruptRecordError:
    return CorruptRecordError(
        f"the changelog of {table.info.path} has nothing from offset {offset} to {end}; restore "
        "its files from a backup, or drop the table"
    )


def _piece(
    table: KvTable, view: memoryview, position: int, header: BatchHeader, until: int
) -> ChangelogPiece:
    rows, kinds = decode_changes(table, view, position, header)
    end = min(header.next_offset, until)
    rows, kinds = rows.slice(0, end - header.base_offset), kinds[: end - header.base_offset]
    after = np.flatnonzero(kinds != UPDATE_BEFORE)
    if len(after) < len(kinds):
        rows, kinds = rows.take(pa.array(after)), kinds[after]
    return ChangelogPiece(rows, kinds, header.schema_id, header.base_offset, end, header.size)


def decode_changes(
    table: KvTable, view: memoryview, position: int, header: BatchHeader
) -> tuple[pa.RecordBatch, Kinds]:
    """Return the rows of a changelog batch, in the schema of the batch, and their change types."""
    schema = table.schema_of(header.schema_id)
    if table.info.log_format == "ARROW":
        rows, kinds = decode(view, position, header, schema.arrow)
    else:
        body = position + header.header_size + header.statistics_length
        rows, kinds = decode_body(
            view, body, position + header.size, header.record_count, schema, table.info.log_format
        )
    assert kinds is not None
    return rows, kinds


def _joined(pieces: list[ChangelogPiece]) -> ChangelogPiece:
    if len(pieces) == 1:
        return pieces[0]
    table = pa.Table.from_batches([piece.rows for piece in pieces]).combine_chunks()
    rows = table.to_batches()
    return pieces[-1]._replace(
        rows=rows[0] if rows else pieces[0].rows,
        kinds=np.concatenate([piece.kinds for piece in pieces]),
        size=sum(piece.size for piece in pieces),
    )
