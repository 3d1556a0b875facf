"""Which segments have outlived the table's `table.log.ttl`, and how they leave the disk.

A segment goes when its newest batch is older than the time to live. Segments leave oldest first
and only as long as each has expired, so a log never gets a hole. The log forgets them at once, on
the event loop; the files are removed in a thread, because freeing a gigabyte takes the file system
a while. Before that the writer snapshots at their ends are made durable: the batches these were
made from are about to be gone. A crash in between brings segments back, and they expire again.

What recovery still needs, and what the lake does not have yet, stays however old it is:
`Log.expire` knows from which offset on that is.

A log that remote storage has a part of keeps only its newest segments here (`surplus`), and lets
nothing go that is not there: the time to live then is the remote copy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from zufluss.log.config import LogConfig
from zufluss.log.files import Files
from zufluss.log.segment import Segment


def expired(segments: Sequence[Segment], files: Files, now_ms: int, ttl_ms: int) -> list[Segment]:
    """The leading segments whose newest batch is older than `ttl_ms`; 0 expires nothing."""
    if ttl_ms <= 0:
        return []
    limit = now_ms - ttl_ms

    def is_expired(segment: Segment) -> bool:
        return segment.size > 0 and segment.newest_timestamp(files) < limit

    return list(takewhile(is_expired, segments))


def surplus(
    segments: Sequence[Segment], files: Files, now_ms: int, config: LogConfig
) -> list[Segment]:
    """The leading segments that need not be here when remote storage has them."""
    old = expired(segments, files, now_ms, config.local_ttl_ms)
    too_many = len(segments) - 1 - config.local_segments
    return list(segments[: max(len(old), too_many, 0)])


@dataclass(frozen=True, slots=True)
class RetiredSegments:
    """Segments that were removed from a log and whose files still exist."""

    directory: Path
    """Where they are."""
    segments: tuple[Segment, ...]
    """Oldest first."""
    snapshots: tuple[Path, ...]
    """The writer snapshots at the end of each, which take their place."""
    paths: tuple[Path, ...]
    """All files to remove, in order."""

    def remove(self, files: Files) -> None:
        """Remove the files. Safe in a thread."""
        for path in self.snapshots:
            files.sync_file(path)
        files.sync_directory(self.directory)
        for path in self.paths:
            try:
                files.unlink(path)
            except FileNotFoundError:
                continue


def remove_deleted(files: Files, directory: Path) -> None:
    """Remove the directory of a deleted log. Safe in a thread."""
    files.sync_directory(directory.parent)
    files.remove_tree(directory)
