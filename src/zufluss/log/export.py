"""A closed segment as it leaves for remote storage: four files that readers can trust.

The batches go as they are. The indexes and the writer snapshot beside them are ours to rebuild when
a power failure or a full disk has left them missing or damaged: here a damaged index costs time,
because each entry is checked against its batch, but a remote reader has only the entry.

Everything here reads closed segments, which never change, and may run in any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from zufluss.errors import CorruptRecordError
from zufluss.log.files import Files
from zufluss.log.index import OFFSET_ENTRY, TIME_ENTRY
from zufluss.log.segment import INDEX_SUFFIX, SNAPSHOT_SUFFIX, TIME_INDEX_SUFFIX, Segment, headers
from zufluss.log.writer_state import WriterState

_OFFSETS = np.dtype([("offset", ">i4"), ("position", ">i4")])
_TIMES = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Export:
    """A closed segment, its indexes and its writer snapshot."""

    start_offset: int
    end_offset: int
    max_timestamp: int
    """The newest commit timestamp in it."""
    log: Path
    """The batches."""
    index: bytes
    """Offset to position (`index.py`)."""
    timeindex: bytes
    """Timestamp to offset (`index.py`)."""
    writer_snapshot: bytes
    """The writers at its end (`writer_state.py`)."""


def export(segment: Segment, end_offset: int, files: Files, writer_expiry_ms: int) -> Export:
    """The files to copy of a closed segment; `CorruptRecordError` if its batches are damaged."""
    index, times = _read(segment, INDEX_SUFFIX), _read(segment, TIME_INDEX_SUFFIX)
    if not _plausible_offsets(segment, end_offset, index) or not _plausible_times(
        times, _newest(segment, index, files)
    ):
        _logger.info("log_index_made_for_remote", segment=str(segment.path))
        index, times = build_indexes(segment, files)
    max_timestamp, _ = TIME_ENTRY.unpack_from(times, len(times) - TIME_ENTRY.size)
    writers = _writers_at(segment, end_offset, files, writer_expiry_ms)
    return Export(
        segment.base_offset, end_offset, max_timestamp, segment.path, index, times, writers
    )


def _read(segment: Segment, suffix: str) -> bytes:
    try:
        return (segment.directory / f"{segment.base_offset:020d}{suffix}").read_bytes()
    except FileNotFoundError:
        return b""


def _plausible_offsets(segment: Segment, end_offset: int, data: bytes) -> bool:
    if len(data) % OFFSET_ENTRY.size:
        return False
    if not data:
        return segment.size <= 2 * segment.interval_bytes
    entries = np.frombuffer(data, _OFFSETS)
    offsets, positions = entries["offset"], entries["position"]
    return bool(
        offsets[0] >= 0
        and segment.base_offset + int(offsets[-1]) < end_offset
        and positions[0] > 0
        and positions[-1] < segment.size
        and np.all(np.diff(offsets) > 0)
        and np.all(np.diff(positions) > 0)
    )


def _newest(segment: Segment, index: bytes, files: Files) -> int:
    """The timestamp of the last batch, found from the last entry of a plausible index on."""
    start = OFFSET_ENTRY.unpack_from(index, len(index) - OFFSET_ENTRY.size)[1] if index else 0
    return max(
        header.timestamp for _, header in headers(files.open(segment.path), start, segment.size)
    )


def _plausible_times(data: bytes, newest: int) -> bool:
    if not data or len(data) % TIME_ENTRY.size:
        return False
    entries = np.frombuffer(data, _TIMES)
    return bool(
        entries["timestamp"][-1] == newest
        and entries["offset"][0] >= 0
        and np.all(np.diff(entries["timestamp"]) > 0)
        and np.all(np.diff(entries["offset"]) > 0)
    )


def build_indexes(segment: Segment, files: Files) -> tuple[bytes, bytes]:
    """Both indexes of a closed segment, made from its batches."""
    index, times = bytearray(), bytearray()
    base, unindexed = segment.base_offset, 0
    newest = written = (-1, 0)
    for position, header in headers(files.open(segment.path), 0, segment.size):
        if header.timestamp > newest[0]:
            newest = (header.timestamp, header.base_offset - base)
        if unindexed > segment.interval_bytes:
            index += OFFSET_ENTRY.pack(header.last_offset - base, position)
            unindexed = 0
            if newest != written:
                times += TIME_ENTRY.pack(*newest)
                written = newest
        unindexed += header.size
    if newest != written:
        times += TIME_ENTRY.pack(*newest)
    return bytes(index), bytes(times)


def _writers_at(segment: Segment, offset: int, files: Files, expiry_ms: int) -> bytes:
    """The writer snapshot at the end of a segment, from the one at its start if it is lost."""
    snapshot = _snapshot(segment.directory, offset)
    if snapshot is not None:
        return snapshot
    before = _snapshot(segment.directory, segment.base_offset)
    if before is None and segment.base_offset:
        raise CorruptRecordError(
            f"{segment.path}: the writer snapshots at its start and end are missing or damaged, so "
            "the segment is not copied to remote storage; it stays on this server"
        )
    state = WriterState(expiry_ms) if before is None else WriterState.from_json(before, expiry_ms)
    for _, header in headers(files.open(segment.path), 0, segment.size):
        if header.writer_id >= 0:
            state.record(
                header.writer_id,
                header.batch_sequence,
                header.base_offset,
                header.next_offset,
                header.timestamp,
            )
    return state.to_json()


def _snapshot(directory: Path, offset: int) -> bytes | None:
    try:
        data = (directory / f"{offset:020d}{SNAPSHOT_SUFFIX}").read_bytes()
        WriterState.from_json(data, 0)
    except (FileNotFoundError, ValueError):
        return None
    return data
