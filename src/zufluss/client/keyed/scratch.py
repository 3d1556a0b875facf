"""Temporary directories that are removed even after their process was killed.

A `Scratch` is removed when it is closed or garbage-collected, or when the process ends. A killed
process (such as a Spark worker whose task is cancelled) leaves its directory behind; the next
process on the host that creates a `Scratch` removes it. Each directory is locked by its process,
and the lock ends with the process. Directories younger than `LEFT_OVER_SECONDS` are left alone,
because a directory exists for a moment before it is locked. Windows has no such locks: there the
directory of a killed process stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from zufluss.clock import wall_ms
from zufluss.system import lock_directory

LEFT_OVER_SECONDS: Final = 600
"""Younger directories are not removed."""

REMOVE_TRIES: Final = 10
"""Tries to remove a directory in which files still appear."""


class Scratch:
    """A new directory below the system's one for temporary files; all calls block briefly."""

    def __init__(self, prefix: str, clock_ms: Callable[[], int] = wall_ms) -> None:
        remove_left_over(prefix, clock_ms())
        self._directory = tempfile.TemporaryDirectory(prefix=prefix)
        self.path = Path(self._directory.name)
        """The directory."""
        lock = lock_directory(self.path, wait=True)
        self._unlock: Callable[[], object] = lambda: None
        if lock is not None:
            self._unlock = weakref.finalize(self, os.close, lock)

    def close(self) -> None:
        """Remove the directory with its files, even if a transfer still adds files."""
        try:
            for tries_left in reversed(range(REMOVE_TRIES)):
                try:
                    self._directory.cleanup()
                    return
                except OSError:  # a file appeared or vanished meanwhile
                    if not tries_left:
                        raise
        finally:
            self._unlock()

    def __repr__(self) -> str:
        return f"Scratch({self.path})"


def remove_left_over(prefix: str, now_ms: int) -> None:
    """Remove directories of processes that have ended."""
    oldest = now_ms / 1000 - LEFT_OVER_SECONDS
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or just removed
            if path.stat().st_mtime < oldest:
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Remove an unlocked directory; raises `OSError` if a process holds its lock.

    Without locks nobody can tell whether the directory is in use, and it stays.
    """
    fd = lock_directory(path, wait=False)
    if fd is None:
        return
    try:
        shutil.rmtree(path)
    finally:
        os.close(fd)
