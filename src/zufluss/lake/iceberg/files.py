"""Files of a lake table by location: local ones directly, others through pyiceberg's FileIO.

Local files need no library and are made durable here: after `sync_all` the files and all their
parent directories survive a power cut. Object stores are durable when a write ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from zufluss import system


def local_path(location: str) -> Path | None:
    """The path of a local file, None for other schemes."""
    if location.startswith("file:"):
        location = location.removeprefix("file:").removeprefix("//")
    return Path(location) if location.startswith("/") else None


class LakeFiles:
    """The file system of a lake table."""

    def __init__(self, io: Mapping[str, str], location: str) -> None:
        self._properties = dict(io)
        self._location = location
        self._io: Any = None

    def create(self, location: str) -> pa.NativeFile:
        """Create a file and its directories, and open it for writing."""
        path = local_path(location)
        if path is None:
            return self._remote().new_output(location).create(overwrite=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return pa.OSFile(str(path), "wb")

    def open(self, location: str) -> pa.NativeFile:
        """Open a file for random reads."""
        path = local_path(location)
        if path is None:
            return self._remote().new_input(location).open(seekable=True)
        return pa.OSFile(str(path), "rb")

    def sync_all(self, locations: Iterable[str]) -> None:
        """Return when these closed files, and their names, are durable."""
        paths = {path for location in locations if (path := local_path(location))}
        root = local_path(self._location)
        while paths:
            for path in paths:
                _fsync(path)
            paths = {path.parent for path in paths if path not in (root, path.parent)}

    def remove(self, location: str) -> None:
        """Remove a file if it exists."""
        path = local_path(location)
        if path is not None:
            path.unlink(missing_ok=True)
        elif self._remote().new_input(location).exists():
            self._remote().delete(location)

    def _remote(self) -> Any:
        if self._io is None:
            from pyiceberg.io import load_file_io

            self._io = load_file_io(self._properties, self._location)
        return self._io


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        system.sync_names(fd)
    finally:
        os.close(fd)
