"""Which segments have outlived the table's `table.log.ttl`, and how they leave the disk.

A segment goes when its newest batch is older than the time to live. Segments leave oldest first
and only as long as each has expired, so a log never gets a hole. The files are renamed first (the
log forgets them at once, on the event loop), then the directory is synced and they are unlinked in
a thread, because freeing a gigabyte takes the file system a while. A crash in between leaves files
called `.deleted`, which the next start removes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from zufluss.log.files import Files
from zufluss.log.segment import DELETED_SUFFIX, Segment


def expired(segments: Sequence[Segment], files: Files, now_ms: int, ttl_ms: int) -> list[Segment]:
    """The leading segments whose newest batch is older than `ttl_ms`; 0 expires nothing."""
    if ttl_ms <= 0:
        return []
    limit = now_ms - ttl_ms

    def is_expired(segment: Segment) -> bool:
        return segment.size > 0 and segment.newest_timestamp(files) < limit

    return list(takewhile(is_expired, segments))


def retire(files: Files, segments: Sequence[Segment]) -> list[Path]:
    """Rename the files of segments out of the log, oldest first; return what to remove."""
    retired = []
    for segment in segments:
        path = segment.path
        files.forget(path)
        target = path.with_name(path.name + DELETED_SUFFIX)
        files.rename(path, target)
        retired.append(target)
        retired += segment.paths[1:]
    return retired


def remove(files: Files, directory: Path, paths: Sequence[Path]) -> None:
    """Unlink retired files once their new names are durable. Safe in a thread."""
    files.sync_directory(directory)
    for path in paths:
        try:
            files.unlink(path)
        except FileNotFoundError:
            continue


def remove_deleted(files: Files, directory: Path) -> None:
    """Remove the directory of a deleted log, and parents that became empty. Safe in a thread."""
    files.sync_directory(directory.parent)
    files.remove_tree(directory)
