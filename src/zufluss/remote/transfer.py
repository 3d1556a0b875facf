"""The local end of a transfer: the file that is sent, and the file that is received.

Both count bytes and compute the CRC-32C on the way, so a file is read or written once. A failure of
a local file is not one of the location: it is a plain `RemoteStorageError` that names the local
file and does not count for the location's health.

A received file gets its name when it is whole and on disk; until then it is `.NAME.UUID.part`
beside it. All calls block and belong in threads; a lock keeps a descriptor open while an abandoned
call still uses it.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

from crc32c import crc32c

from zufluss import system
from zufluss.remote.errors import RemoteStorageError

WRITEBACK_BYTES: Final = 8 << 20
"""Bytes after which the kernel is asked to begin writing, so that the sync has less to do."""


def _private(path: str, flags: int) -> int:
    """Open a file; a new one can be written by its owner only."""
    return os.open(path, flags, 0o644)


class LocalFile:
    """An open file with the size and checksum of the bytes that passed."""

    def __init__(
        self, path: Path, mode: str, task: str, uri: str, object_path: str, opened: Path
    ) -> None:
        self.path = path
        self.size = 0
        self.crc = 0
        self._for = uri, object_path
        self._task = task
        self._lock = threading.Lock()
        with self._named():
            self._file = FileIO(opened, mode, opener=_private)

    @property
    def result(self) -> tuple[int, int]:
        """Size and checksum of the bytes that passed."""
        return self.size, self.crc

    def close(self) -> None:
        """Close the file once no call uses it any more."""
        with self._lock:
            self._file.close()

    def _passed(self, data: bytes | memoryview) -> None:
        self.crc = crc32c(data, self.crc)
        self.size += len(data)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn an error of the file into a `RemoteStorageError` that names the file."""
        try:
            yield
        except OSError as problem:
            raise self._failure(problem.strerror) from problem
        except ValueError as problem:  # of a file that was closed meanwhile
            raise self._failure(problem) from problem

    def _failure(self, problem: object) -> RemoteStorageError:
        reason = f"cannot {self._task} the local file {self.path}: {problem}"
        return RemoteStorageError(*self._for, reason)


class SentFile(LocalFile):
    """A local file that is sent, read from beginning to end."""

    def __init__(self, path: Path, uri: str, object_path: str) -> None:
        super().__init__(path, "r", "read", uri, object_path, path)
        self.length = os.fstat(self._file.fileno()).st_size

    def check_unchanged(self) -> None:
        """Raise if the file grew or shrank on the way: the object is not a copy of it."""
        if self.size != self.length:
            reason = f"{self.size} bytes of {self.path} were read, it had {self.length} before"
            raise RemoteStorageError(*self._for, reason)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end of the file."""
        parts: list[bytes] = []
        with self._lock, self._named():
            while size and (part := self._file.read(size)):
                self._passed(part)
                parts.append(part)
                size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, buffer: memoryview) -> memoryview:
        """Return the next bytes in the beginning of the buffer, none at the end of the file."""
        with self._lock, self._named():
            data = buffer[: self._file.readinto(buffer)]
            self._passed(data)
        return data


class ReceivedFile(LocalFile):
    """A local file that is received: written, then kept or discarded."""

    def __init__(self, path: Path, uri: str, object_path: str) -> None:
        self._part = path.with_name(f".{path.name}.{uuid.uuid4()}.part")
        super().__init__(path, "x", "write", uri, object_path, self._part)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        with self._lock, self._named():
            write_all(self._file.fileno(), data, self.size)
            self._passed(data)

    def sync(self) -> None:
        """Write everything to disk."""
        with self._lock, self._named():
            system.sync_data(self._file.fileno())

    def keep(self) -> None:
        """Close the synced file, and give it its name."""
        try:
            self.close()  # first: Windows renames no open file
            with self._named():
                self._part.replace(self.path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file, and remove it unless it was kept."""
        self.close()
        self._part.unlink(missing_ok=True)


def write_all(fd: int, data: bytes | memoryview, position: int) -> None:
    """Append bytes at `position`, the end of the file, and ask the kernel to write them early."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        view = view[written:]
        before, position = position, position + written
        if before // WRITEBACK_BYTES != position // WRITEBACK_BYTES:
            start = before // WRITEBACK_BYTES * WRITEBACK_BYTES
            system.begin_writeback(fd, start, position - start)
