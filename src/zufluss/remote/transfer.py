"""The local end of a transfer: the file that is sent, and the file that is received.

Both count bytes and keep the CRC-32C on the way, so a file is read or written once. What goes wrong
here is not the location's fault: it is a plain `RemoteStorageError` that names the local file and
does not count for the health of the location.

A received file appears under its name when it is whole and its data is on disk; until then it is
`.NAME.UUID.part` beside it. All calls block and belong into threads; a lock keeps a descriptor open
while a call that nobody waits for any more still uses it.
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
"""After so many bytes the kernel is asked to begin writing them: the sync has less to do then."""


class LocalFile:
    """An open file with the bytes that passed and their checksum."""

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
        """Size and checksum of what passed."""
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
        """Have a failure say which file it was."""
        try:
            yield
        except OSError as problem:
            reason = f"cannot {self._task} the local file {self.path}: {problem.strerror}"
            raise RemoteStorageError(*self._for, reason) from problem


class Source(LocalFile):
    """A local file on its way to a location, read from its beginning to its end."""

    def __init__(self, path: Path, uri: str, object_path: str) -> None:
        super().__init__(path, os.O_RDONLY, "read", uri, object_path, path)
        self.length = os.fstat(self._fd).st_size

    def check_unchanged(self) -> None:
        """Refuse a file that grew or shrank on the way: what was sent is no copy of it."""
        if self.size != self.length:
            reason = f"{self.size} bytes of {self.path} were read, it had {self.length} before"
            raise RemoteStorageError(*self._for, reason)

    def read(self, size: int) -> bytes:
        """The next bytes, as many as asked for unless the file ends."""
        parts: list[bytes] = []
        with self._lock, self._named():
            while size and (part := os.read(self._fd, size)):
                self._passed(part)
                parts.append(part)
                size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, buffer: memoryview) -> memoryview:
        """The next bytes in the buffer's beginning; empty at the end."""
        with self._lock, self._named():
            data = buffer[: os.readv(self._fd, [buffer])]
            self._passed(data)
        return data


class Target(LocalFile):
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
        """Have everything on disk."""
        with self._lock, self._named():
            os.fdatasync(self._fd)

    def keep(self) -> None:
        """Give the file, which is synced, its name."""
        try:
            with self._lock, self._named():
                self._part.replace(self.path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Leave nothing behind but what was kept."""
        self.close()
        self._part.unlink(missing_ok=True)


def write_all(fd: int, data: bytes | memoryview, position: int) -> None:
    """Append bytes that begin at `position` of the file, and have the kernel write them early."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        view = view[written:]
        before, position = position, position + written
        if before // WRITEBACK_BYTES != position // WRITEBACK_BYTES:
            start = before // WRITEBACK_BYTES * WRITEBACK_BYTES
            os.posix_fadvise(fd, start, position - start, os.POSIX_FADV_DONTNEED)
