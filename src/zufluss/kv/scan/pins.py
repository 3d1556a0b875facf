"""Pinned states on disk: the rows of a bucket at one log offset, which never change.

    <bucket's directory>/pins/<log offset>/state.json     a state file, as of a bucket
    <bucket's directory>/pins/<log offset>/rocks/         the database; missing if there are no rows
    <bucket's directory>/pins/<random>.new/               a state that is being made or removed

A state is made under another name and renamed when it is whole. Its table files are hard links to
those of the bucket, so a state costs only the files that the bucket has replaced since. After a
kill the name tells whole states from unfinished ones: opening the bucket removes unfinished ones,
and whole ones are found again by their offset.

Dropping the bucket removes the directory.
"""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import NamedTuple

import structlog

from zufluss.errors import UnknownTableOrBucketError, ZuflussError
from zufluss.kv.cold.checkpoint import COLD_DIRECTORY
from zufluss.kv.cold.rocks import check_opens
from zufluss.kv.cold.state import KvState, read_state, write_state
from zufluss.log.files import Files

log = structlog.get_logger(__name__)

PINS_DIRECTORY = "pins"
"""Directory of pinned states in a bucket's directory."""

UNFINISHED_SUFFIX = ".new"
"""Suffix of a state that is being made or removed."""

TRIES = 10
"""Attempts to remove the directory of a dropped bucket while other threads still use it."""


class PinnedFiles(NamedTuple):
    """The files of a whole pinned state."""

    directory: Path
    state: KvState
    """The state that the files hold."""

    @property
    def database(self) -> Path | None:
        """Directory of the database, None if the state has no rows."""
        database = self.directory / COLD_DIRECTORY
        return database if database.is_dir() else None


class PinDirectory:
    """The pinned states of one bucket. Any thread may call it."""

    def __init__(self, directory: Path, files: Files) -> None:
        self.directory = directory
        self._files = files
        self._lock = threading.Lock()
        self._gone = False

    def offsets(self) -> list[int]:
        """Return the log offsets of the whole states."""
        return sorted(int(name) for name in self._names() if name.isdecimal())

    def fresh(self) -> Path:
        """Create an empty directory to make a state in.

        Raises `UnknownTableOrBucketError` if the bucket was dropped.
        """
        path = self._unfinished()
        with self._lock:
            self._check_there()
            for parent in self._files.make_directories(path):
                self._files.sync_directory(parent)
        return path

    def finish(self, fresh: Path, state: KvState) -> PinnedFiles:
        """Rename a fresh directory, which has the rows of `state`, to its final name.

        Raises `UnknownTableOrBucketError` if the bucket was dropped.
        """
        target = self.directory / str(state.flushed_offset)
        with self._lock:
            self._check_there()
            write_state(self._files, fresh, state)
            self._files.rename(fresh, target)
            self._files.sync_directory(self.directory)
        return PinnedFiles(target, state)

    def find(self, log_offset: int) -> PinnedFiles | None:
        """Return the state at this offset, None if there is none; removes a damaged one."""
        path = self.directory / str(log_offset)
        if not path.is_dir():
            return None
        try:
            pinned = PinnedFiles(path, read_state(path))
            if pinned.database is not None:
                check_opens(pinned.database)
        except ZuflussError as e:
            log.warning("kv_pin_damaged", directory=str(path), error=str(e))
            self.remove(log_offset)
            return None
        return pinned if pinned.state.flushed_offset == log_offset else None

    def remove(self, log_offset: int) -> None:
        """Remove a state; renames it first, so that a half-removed one does not look whole."""
        path = self.directory / str(log_offset)
        with self._lock:
            if not self._gone and path.is_dir():
                doomed = self._unfinished()
                self._files.rename(path, doomed)
                self._files.remove_tree(doomed)

    def discard(self, fresh: Path) -> None:
        """Remove a fresh directory, if it still exists."""
        with self._lock:
            if not self._gone and fresh.is_dir():
                self._files.remove_tree(fresh)

    def remove_unfinished(self) -> None:
        """Remove the states that a killed server did not finish."""
        for name in self._names():
            if name.endswith(UNFINISHED_SUFFIX):
                self.discard(self.directory / name)

    def end(self) -> None:
        """Remove all states: the bucket is dropped.

        Threads that are making or removing a state fail from now on. One may still create a file
        while the directory is removed, hence several attempts.
        """
        with self._lock:
            self._gone = True
        for attempt in range(1, TRIES + 1):
            try:
                if self.directory.is_dir():
                    self._files.remove_tree(self.directory)
                return
            except OSError as e:
                if attempt == TRIES:
                    raise
                log.info("kv_pins_in_use", directory=str(self.directory), error=str(e))

    def _check_there(self) -> None:
        if self._gone:
            raise UnknownTableOrBucketError(f"{self.directory} is gone with its bucket")

    def _names(self) -> list[str]:
        return [p.name for p in self.directory.iterdir()] if self.directory.is_dir() else []

    def _unfinished(self) -> Path:
        return self.directory / f"{secrets.token_hex(8)}{UNFINISHED_SUFFIX}"
