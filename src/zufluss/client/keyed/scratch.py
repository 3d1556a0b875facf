"""Temporary directories that nobody has to clean up after, not even after a killed process.

A `Scratch` is removed when it is closed, or forgotten, or the process ends. What kill -9 leaves, as
it befalls Spark workers whose task is cancelled, is removed by the next process of the host that
makes one: each directory is locked by who uses it, and a lock ends with its process. Directories
are left alone for `LEFT_OVER_SECONDS`, since they are there a moment before they are locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

from zufluss.clock import wall_ms

LEFT_OVER_SECONDS: Final = 600
"""Younger directories are not looked at."""

REMOVE_TRIES: Final = 10
"""How often files may appear in a directory while it is removed."""


class Scratch:
    """A directory of its own below the one for temporary files; all calls block for a moment."""

    def __init__(self, prefix: str) -> None:
        remove_left_over(prefix)
        self._directory = tempfile.TemporaryDirectory(prefix=prefix)
        self.path = Path(self._directory.name)
        """Where it is."""
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._unlock = weakref.finalize(self, os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove it with all that is in it, once; transfers that end meanwhile do no harm."""
        try:
            for tries_left in reversed(range(REMOVE_TRIES)):
                try:
                    self._directory.cleanup()
                    return
                except OSError:  # a last file appeared, or vanished
                    if not tries_left:
                        raise
        finally:
            self._unlock()

    def __repr__(self) -> str:
        return f"Scratch({self.path})"


def remove_left_over(prefix: str) -> None:
    """Remove directories of processes that are gone."""
    oldest = wall_ms() / 1000 - LEFT_OVER_SECONDS
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or just removed
            if path.stat().st_mtime < oldest:
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Remove a directory that nobody uses; `OSError` if somebody does."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(fd)
