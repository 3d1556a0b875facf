"""Batches, logs and readers for the tests of the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.log.disk import SilentFiles
from zufluss.log.config import LogConfig
from zufluss.log.files import Files
from zufluss.log.log import AppendResult, Log
from zufluss.model.table import TableBucket
from zufluss.record.batch.check import CheckedBatch
from zufluss.record.header import build_batch, iter_headers

BUCKET = TableBucket(1, None, 0)


def batch(
    records: int = 1,
    *,
    body: bytes = b"body",
    writer: int = -1,
    sequence: int = -1,
    magic: int = 0,
) -> bytearray:
    return build_batch(1, body, records, magic=magic, writer_id=writer, sequence=sequence)


def entry(*batches: bytes | bytearray) -> tuple[memoryview, tuple[CheckedBatch, ...]]:
    """What the server has of a bucket entry: a writable view, and where its batches are."""
    data = bytearray(b"frame" + b"".join(batches))
    checked = []
    for at, h in iter_headers(memoryview(data)[5:]):
        start = at + 5
        checked.append(
            CheckedBatch(
                start, start + h.size, h.magic, h.schema_id, h.record_count,
                h.last_offset_delta, h.writer_id, h.batch_sequence,
            )
        )  # fmt: skip
    return memoryview(data), tuple(checked)


def append(
    log: Log, *batches: bytes | bytearray, now_ms: int = 1000, visible: bool = True
) -> AppendResult:
    view, checked = entry(*batches)
    result = log.append(view, checked, now_ms)
    if visible:
        log.advance_high_watermark(result.end_offset)
    return result


def open_log(
    directory: Path, files: Files | None = None, *, now_ms: int = 0, **settings: int
) -> Log:
    return Log.open(
        directory / "log-0",
        LogConfig(**settings),  # type: ignore[arg-type]
        files=files or SilentFiles(),
        now_ms=now_ms,
        bucket=BUCKET,
    )


def crash(log: Log) -> None:
    """Drop a log as a killed process does: the page cache stays, nothing else happens."""
    log.close(clean=False)


def expire(log: Log, now_ms: int) -> list[int]:
    """Expire and remove segments; return their base offsets."""
    retired = log.expire(now_ms)
    if retired is None:
        return []
    retired.remove(log.files)
    return [segment.base_offset for segment in retired.segments]


def read_all(log: Log, max_bytes: int = 1 << 20) -> bytes:
    """Everything readers can see, by sequential reads."""
    parts = []
    offset = log.log_start_offset
    while offset < log.high_watermark:
        found = log.read(offset, max_bytes, at_least_one=True)
        assert found.end_offset > offset
        parts.append(bytes(found.records))
        offset = found.end_offset
    return b"".join(parts)


def offsets(data: bytes) -> list[tuple[int, int]]:
    """Base offset and number of offsets of each batch."""
    return [(h.base_offset, h.last_offset_delta + 1) for _, h in iter_headers(data)]


def segment_files(directory: Path, suffix: str) -> Sequence[Path]:
    return sorted((directory / "log-0").glob(f"*{suffix}"))
