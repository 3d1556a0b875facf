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
from pathlib import Path
from typing import Final

from crc32c import crc32c

from zufluss.remote.errors import RemoteStorageError

WRITEBACK_BYTES: Final = 8 << 20
"""Bytes after which the kernel is asked to begin writing, so that the sync has less to do."""


class LocalFile:
    """An open file with the size and checksum of the bytes that passed."""

    def __init__(
        self, path: Path, flags: int, task: str, uri: str, object_path: str, opened: Path
    ) -> None:
        self.path = path
        self.size = 0
        self.crc = 0
        self._for = uri, object_path
        self._task = task
        self._lock = threading.Lock()
        with self._named():
            self._fd = os.open(opened, flags | os.O_CLOEXEC, 0o644)

    @property
    def result(self) -> tuple[int, int]:
        """Size and checksum of the bytes that passed."""
        return self.size, self.crc

    def close(self) -> None:
        """Close the file once no call uses it any more."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1

    def _passed(self, data: bytes | memoryview) -> None:
        self.crc = crc32c(data, self.crc)
        self.size += len(data)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn an OSError into a `RemoteStorageError` that names the file."""
        try:
            yield
        except OSError as problem:
            reason = f"cannot {self._task} the local file {self.path}: {problem.strerror}"
            raise RemoteStorageError(*self._for, reason) from problem


class SentFile(LocalFile):
    """A local file that is sent, read from beginning to end."""

    def __init__(self, path: Path, uri: str, object_path: str) -> None:
        super().__init__(path, os.O_RDONLY, "read", uri, object_path, path)
        self.length = os.fstat(self._fd).st_size

    def check_unchanged(self) -> None:
        """Raise if the file grew or shrank on the way: the object is not a copy of it."""
        if self.size != self.length:
            reason = f"{self.size} bytes of {self.path} were read, it had {self.length} before"
            raise RemoteStorageError(*self._for, reason)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end of the file."""
        parts: list[bytes] = []
        with self._lock, self._named():
            while size and (part := os.read(self._fd, size)):
                self._passed(part)
                parts.append(part)
                size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, buffer: memoryview) -> memoryview:
        """Return the next bytes in the beginning of the buffer, none at the end of the file."""
        with self._lock, self._named():
            data = buffer[: os.readv(self._fd, [buffer])]
            self._passed(data)
        return data


class ReceivedFile(LocalFile):
    """A local file that is received: written, then kept or discarded."""

    def __init__(self, path: Path, uri: str, object_path: str) -> None:
        self._part = path.with_name(f".{path.name}.{uuid.uuid4()}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        super().__init__(path, flags, "write", uri, object_path, self._part)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        with self._lock, self._named():
            write_all(self._fd, data, self.size)
            self._passed(data)

    def sync(self) -> None:
        """Write everything to disk."""
        with self._lock, self._named():
            os.fdatasync(self._fd)

    def keep(self) -> None:
        """Give the synced file its name, and close it."""
        try:
            with self._lock, self._named():
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
            os.posix_fadvise(fd, start, position - start, os.POSIX_FADV_DONTNEED)
