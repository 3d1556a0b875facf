"""A changelog read back: what each key was last changed to, in large pieces and one piece ahead.

Recovery applies the changelog to the state it was once made from. Batches are as small as clients
sent them, and taking one apart costs about the same for ten rows as for ten thousand, so they are
joined; the next piece is read and decompressed in a thread while the last one is applied.

A changelog is what the log has, after what only remote storage has (`Earlier`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from zufluss.record.header import BatchHeader, iter_headers
from zufluss.record.rows.formats import decode_body

READ_BYTES = 8 << 20
"""How much of the changelog is read at a time."""
PIECE_ROWS = 32_768
"""Rows that are applied together, about."""
PIECE_BYTES = 16 << 20
"""Bytes of rows that are applied together, about: they have to fit into memory at once."""

Kinds = npt.NDArray[np.uint8]


class Piece(NamedTuple):
    """Changes that follow each other in a changelog, without the rows before updates."""

    rows: pa.RecordBatch
    """The rows, inserted, updated or deleted."""
    kinds: Kinds
    """Their change types."""
    schema_id: int
    """The schema of the rows."""
    base_offset: int
    """Offset of the last batch among them."""
    end_offset: int
    """Offset after them."""
    size: int
    """Bytes of their batches."""


class Earlier(NamedTuple):
    """The part of a changelog that comes before the log."""

    start_offset: int
    """Where it begins; it goes on to where the log begins."""
    batches: Callable[[int], Iterator[memoryview]]
    """Whole batches in the order of their offsets, from the one at an offset, or earlier, on."""


def changelog_start(changelog: Log, earlier: Earlier | None) -> int:
    """The first offset there is."""
    return changelog.log_start_offset if earlier is None else earlier.start_offset


def pieces(
    table: KvTable, changelog: Log, offset: int, earlier: Earlier | None = None
) -> Iterator[Piece]:
    """The changes from `offset` to the end of the log, which nobody writes to meanwhile.

    `CorruptRecordError` if changes are missing in between.
    """
    if offset == changelog.log_end_offset:
        return
    batches = _log_batches(changelog, max(offset, changelog.log_start_offset))
    if earlier is not None and offset < changelog.log_start_offset:
        batches = chain(earlier.batches(offset), batches)
    yield from pieces_of(table, batches, offset, changelog.log_end_offset)


def pieces_of(
    table: KvTable, batches: Iterator[memoryview], offset: int, until: int
) -> Generator[Piece, None, None]:
    """The changes from `offset` to `until` in batches that are read one piece ahead, in a thread.

    What of the batches lies outside of that is passed over, also part of a batch at the end.
    `CorruptRecordError` if changes are missing in between.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="zufluss-replay") as ahead:
        source = _pieces(table, batches, offset, until)
        following = ahead.submit(next, source, None)
        while (piece := following.result()) is not None:
            following = ahead.submit(next, source, None)
            yield piece


def _log_batches(changelog: Log, offset: int) -> Iterator[memoryview]:
    while offset < changelog.log_end_offset:
        read = changelog.read(offset, READ_BYTES, at_least_one=True, nowait=False)
        yield read.records
        offset = read.end_offset


def _pieces(
    table: KvTable, batches: Iterator[memoryview], offset: int, until: int
) -> Iterator[Piece]:
    waiting: list[Piece] = []
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
    if offset < until:  # a batch that is cut at the end is passed over
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
) -> Piece:
    rows, kinds = decode_changes(table, view, position, header)
    end = min(header.next_offset, until)
    rows, kinds = rows.slice(0, end - header.base_offset), kinds[: end - header.base_offset]
    after = np.flatnonzero(kinds != UPDATE_BEFORE)
    if len(after) < len(kinds):
        rows, kinds = rows.take(pa.array(after)), kinds[after]
    return Piece(rows, kinds, header.schema_id, header.base_offset, end, header.size)


def decode_changes(
    table: KvTable, view: memoryview, position: int, header: BatchHeader
) -> tuple[pa.RecordBatch, Kinds]:
    """The rows of a changelog batch, in the schema they were written under, and their kinds."""
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


def _joined(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    table = pa.Table.from_batches([piece.rows for piece in pieces]).combine_chunks()
    rows = table.to_batches()
    return pieces[-1]._replace(
        rows=rows[0] if rows else pieces[0].rows,
        kinds=np.concatenate([piece.kinds for piece in pieces]),
        size=sum(piece.size for piece in pieces),
    )
