"""Pinned state on the disk: the rows of a bucket at one log offset, whatever is written later.

    <bucket's directory>/pins/<log offset>/state.json     what it holds, as a bucket's own
    <bucket's directory>/pins/<log offset>/rocks/         the database; missing if there are no rows
    <bucket's directory>/pins/<random>.new/               one that is being made, or removed

A state is made under another name and renamed when it is whole, and never changed afterwards. Table
files are hard links to those of the bucket, so it costs what the bucket itself does not need any
more. What a server that was killed leaves is whole or unfinished by its name: unfinished states are
removed when the bucket is opened, whole ones can be found again by their offset.

The directory goes with that of its bucket.
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
"""Where pinned states lie in a bucket's directory."""

UNFINISHED_SUFFIX = ".new"
"""Of a state that is being made, or removed."""

TRIES = 10
"""How often the directory of a dropped bucket is removed, while somebody else is in there."""


class PinnedFiles(NamedTuple):
    """A whole state."""

    directory: Path
    state: KvState
    """What it holds."""

    @property
    def database(self) -> Path | None:
        """Where its rows are, None if there are none."""
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
        """The log offsets of the whole states that are there."""
        return sorted(int(name) for name in self._names() if name.isdecimal())

    def fresh(self) -> Path:
        """An empty directory to make a state in; `UnknownTableOrBucketError` after the end."""
        path = self._unfinished()
        with self._lock:
            self._check_there()
            for parent in self._files.make_directories(path):
                self._files.sync_directory(parent)
        return path

    def finish(self, fresh: Path, state: KvState) -> PinnedFiles:
        """What was made in a fresh directory is whole: the rows of `state`.

        `UnknownTableOrBucketError` after the end.
        """
        target = self.directory / str(state.flushed_offset)
        with self._lock:
            self._check_there()
            write_state(self._files, fresh, state)
            self._files.rename(fresh, target)
            self._files.sync_directory(self.directory)
        return PinnedFiles(target, state)

    def find(self, log_offset: int) -> PinnedFiles | None:
        """The state at this offset, if it is there; one that is not whole after all is removed."""
        path = self.directory / str(log_offset)
        if not path.is_dir():
            return None
        try:
            found = PinnedFiles(path, read_state(path))
            if found.database is not None:
                check_opens(found.database)
        except ZuflussError as e:
            log.warning("kv_pin_damaged", directory=str(path), error=str(e))
            self.remove(log_offset)
            return None
        return found if found.state.flushed_offset == log_offset else None

    def remove(self, log_offset: int) -> None:
        """Free the disk that a state holds; under another name first, or a half looked whole."""
        path = self.directory / str(log_offset)
        with self._lock:
            if not self._gone and path.is_dir():
                doomed = self._unfinished()
                self._files.rename(path, doomed)
                self._files.remove_tree(doomed)

    def discard(self, fresh: Path) -> None:
        """Remove what was made in a fresh directory, if it is still there."""
        with self._lock:
            if not self._gone and fresh.is_dir():
                self._files.remove_tree(fresh)

    def remove_unfinished(self) -> None:
        """Remove what a server that was killed did not finish."""
        for name in self._names():
            if name.endswith(UNFINISHED_SUFFIX):
                self.discard(self.directory / name)

    def end(self) -> None:
        """Remove everything: the bucket is dropped.

        Whoever is still making or removing something here finds that it is gone, and may be in the
        way for a moment.
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
