"""A location that is a directory: durable, atomic, and guarded against disks that hang.

| path below the root | content |
|---|---|
| `PATH` | the object of that path |
| `.zufluss-tmp/UUID` | an object that is being written |

A put writes a temporary file, syncs it, renames it and syncs the directories that changed: an
acknowledged object survives a power failure, and an unacknowledged one is not visible. The first
put of a process removes temporary files that are older than a day, which a crash left.

A root that existed and is missing now is unavailable, not empty, and is not created again: its file
system was unmounted. A directory that may not be written is unavailable too.

Each location has threads of its own, and abandons work that makes no progress within the timeout: a
network file system that hangs must not block the threads of others.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, suppress
from io import FileIO
from pathlib import Path
from typing import Final, TypeVar

from zufluss import system
from zufluss.clock import wall_ms
from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectExistsError,
    ObjectForbiddenError,
    ObjectMissingError,
    RemoteStorageError,
    check_limit,
)
from zufluss.remote.transfer import ReceivedFile, SentFile, write_all
from zufluss.remote.uri import LocationUri
from zufluss.threads import Threads

T = TypeVar("T")

TEMPORARY: Final = ".zufluss-tmp"
"""The directory of files that are being written, below the root."""

THREADS: Final = 4
COPY_BYTES: Final = 1 << 20
STREAM_BYTES: Final = 4 << 20
PAGE_OBJECTS: Final = 1000
KNOWN_DIRECTORIES_MAX: Final = 10_000
TEMPORARY_LIFE_SECONDS: Final = 24 * 3600
RENAME_TRIES: Final = 10

_FORBIDDEN: Final = (errno.EACCES, errno.EPERM)
_OF_THE_NAME: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""Errors of a path that are no failure of the location, if its root exists."""


class Progress:
    """The progress of a task, written by its thread and read by the waiting event loop."""

    __slots__ = ("_location", "abandoned", "started", "steps")

    def __init__(self, location: Progress | None = None) -> None:
        self._location = location
        """Progress of all tasks of the location, for tasks that wait for a thread."""
        self.started = False
        self.steps = 0
        self.abandoned = False
        """Nobody waits any more: the thread must not create an object."""

    def step(self) -> None:
        """Count a step; raises TimeoutError if the task was abandoned."""
        self.steps += 1
        if self._location is not None:
            self._location.steps += 1
        if self.abandoned:
            raise TimeoutError("abandoned")


class LocalDirectory:
    """The objects below one directory."""

    def __init__(
        self, uri: LocationUri, timeout_ms: int, clock_ms: Callable[[], int] = wall_ms
    ) -> None:
        self.uri = uri
        self._clock_ms = clock_ms
        self.root = Path(uri.path)
        self._timeout_ms = timeout_ms
        self._threads = Threads(THREADS, "zufluss-directory", may_hang=True)
        self._progress = Progress()
        self._seen = False
        """The root existed once."""
        self._known: set[Path] = set()
        self._lock = threading.Lock()
        self._tidied = False

    async def put(self, path: str, data: bytes | memoryview, if_absent: bool) -> None:
        """Create an object from bytes."""

        await self._put_pieces(path, [data], if_absent)

    async def create(self, path: str, data: bytes | list[bytes]) -> None:
        """Create an absent object."""
        await self._put_pieces(path, [data] if isinstance(data, bytes) else data, if_absent=True)

    async def _put_pieces(
        self, path: str, pieces: Sequence[bytes | memoryview], if_absent: bool
    ) -> None:
        def write(fd: int, progress: Progress) -> None:
            size = 0
            for piece in pieces:
                view = memoryview(piece).cast("B")
                for start in range(0, len(view), COPY_BYTES):
                    part = view[start : start + COPY_BYTES]
                    write_all(fd, part, size)
                    size += len(part)
                    progress.step()

        await self._run(
            path, lambda progress: self._make(path, progress, write, if_absent), writes=True
        )

    async def put_file(self, path: str, source: Path) -> tuple[int, int]:
        """Create an object from a file; return its size and checksum."""

        def work(progress: Progress) -> tuple[int, int]:
            with closing(SentFile(source, self.uri.text, path)) as origin:

                def write(fd: int, progress: Progress) -> None:
                    buffer = memoryview(bytearray(COPY_BYTES))
                    while data := origin.read_into(buffer):
                        write_all(fd, data, origin.size - len(data))
                        progress.step()

                self._make(path, progress, write, if_absent=False)
                origin.check_unchanged()
                return origin.result

        return await self._run(path, work, writes=True)

    async def get(self, path: str, limit: int) -> bytes:
        """Return all bytes of an object of at most `limit` bytes."""

        def work(progress: Progress) -> bytes:
            with self._open(path) as file:
                size = os.fstat(file.fileno()).st_size
                check_limit(self.uri.text, path, size, limit)
                return b"".join(pieces(file.fileno(), 0, size, progress))

        return await self._run(path, work)

    async def get_range(self, path: str, start: int, end: int) -> memoryview:
        """Return the bytes of a range, fewer at the end of the object."""

        def work(progress: Progress) -> memoryview:
            with self._open(path) as file:
                return memoryview(b"".join(pieces(file.fileno(), start, end, progress)))

        return await self._run(path, work)

    async def get_file(self, path: str, target: Path) -> tuple[int, int]:
        """Copy an object to a local file; return its size and checksum."""

        def work(progress: Progress) -> tuple[int, int]:
            buffer = memoryview(bytearray(COPY_BYTES))
            with self._open(path) as origin:
                file = ReceivedFile(target, self.uri.text, path)
                try:
                    while count := origin.readinto(buffer):
                        file.write(buffer[:count])
                        progress.step()
                    file.sync()
                    progress.step()
                except BaseException:
                    file.discard()
                    raise
                file.keep()
                return file.result

        return await self._run(path, work)

    async def stream(self, path: str, start: int) -> AsyncIterator[memoryview]:
        """Yield the bytes from `start` on, in pieces."""
        while piece := await self.get_range(path, start, start + STREAM_BYTES):
            yield piece
            start += len(piece)

    async def head(self, path: str) -> tuple[int, int]:
        """Return size and time of change (ms) of an object."""

        def work(_: Progress) -> tuple[int, int]:
            with self._open(path) as file:
                stat = os.fstat(file.fileno())
                return stat.st_size, stat.st_mtime_ns // 1_000_000

        return await self._run(path, work)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, and directories that become empty."""

        def work(progress: Progress) -> None:
            self._is_there()
            for path in paths:
                with suppress(FileNotFoundError):
                    (self.root / path).unlink()
                progress.step()
            for directory in sorted({(self.root / path).parent for path in paths}, reverse=True):
                self._remove_empty(directory)

        await self._run(paths[0], work, writes=True)

    async def list(self, prefix: str) -> AsyncIterator[list[tuple[str, int, int]]]:
        """Yield path, size and time of change of the objects below a directory, in pages."""
        entries = self._walk(prefix)

        def page(progress: Progress) -> list[tuple[str, int, int]]:
            objects: list[tuple[str, int, int]] = []
            for entry in entries:
                objects.append(entry)
                progress.step()
                if len(objects) == PAGE_OBJECTS:
                    break
            self._is_there()  # a root that vanishes during the walk looks like its end
            return objects

        while objects := await self._run(prefix, page):
            yield objects

    async def _run(self, path: str, work: Callable[[Progress], T], *, writes: bool = False) -> T:
        progress = Progress(self._progress)

        def run() -> T:
            progress.started = True
            try:
                progress.step()
                return work(progress)
            except OSError as problem:
                raise self._typed(path, problem, writes) from problem
            finally:
                self._progress.step()

        future = asyncio.get_running_loop().run_in_executor(self._threads, run)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await self._wait(future, progress)
            return future.result()
        except TimeoutError:
            reason = f"no progress within {self._timeout_ms} ms; is its file system available?"
            raise LocationUnavailableError(self.uri.text, path, reason) from None
        finally:
            progress.abandoned = True

    async def _wait(self, future: asyncio.Future[T], progress: Progress) -> None:
        """Wait for a task; TimeoutError when the task, or its queue, makes no progress."""
        while True:
            before = self._state(progress)
            done, _ = await asyncio.wait([future], timeout=self._timeout_ms / 1000)
            if done:
                return
            if before == self._state(progress):
                raise TimeoutError

    def _state(self, progress: Progress) -> tuple[bool, int]:
        counted = progress if progress.started else self._progress
        return progress.started, counted.steps

    def _typed(self, path: str, problem: OSError, writes: bool) -> RemoteStorageError:
        uri, reason = self.uri.text, problem.strerror or str(problem)
        if problem.errno in _OF_THE_NAME:
            if not self.root.is_dir():
                return self._unmounted(path)
            if writes or problem.errno == errno.ENAMETOOLONG:
                return RemoteStorageError(uri, path, reason)
            return ObjectMissingError(uri, path, f"there is no such object ({reason})")
        if problem.errno in _FORBIDDEN and not writes:
            return ObjectForbiddenError(uri, path, reason)
        return LocationUnavailableError(uri, path, reason)

    def _unmounted(self, path: str) -> LocationUnavailableError:
        reason = f"the directory {self.root} does not exist; is its file system mounted?"
        return LocationUnavailableError(self.uri.text, path, reason)

    def _is_there(self) -> bool:
        """Whether the root exists; LocationUnavailableError if it existed before and is missing."""
        seen = self._seen
        exists = self.root.is_dir()
        if seen and not exists:
            raise self._unmounted("")
        self._seen = seen or exists
        return exists

    def _open(self, path: str) -> FileIO:
        return FileIO(self.root / path)

    def _make(
        self,
        path: str,
        progress: Progress,
        write: Callable[[int, Progress], None],
        if_absent: bool,
    ) -> None:
        """Write a temporary file, make it durable, and give it its final name."""
        temporary = self._new_temporary()
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                write(fd, progress)
                system.sync_data(fd)
            finally:
                os.close(fd)
            progress.step()
            self._name(temporary, self.root / path, path, if_absent)
        finally:
            temporary.unlink(missing_ok=True)

    def _new_temporary(self) -> Path:
        directory = self.root / TEMPORARY
        if not self._is_there() or not self._tidied:
            make_directories(self.root)
            self._is_there()
        directory.mkdir(exist_ok=True)
        if not self._tidied:
            remove_older(directory, self._clock_ms() / 1000 - TEMPORARY_LIFE_SECONDS)
            self._tidied = True
        return directory / str(uuid.uuid4())

    def _name(self, temporary: Path, target: Path, path: str, if_absent: bool) -> None:
        """Rename or link a file durably; repeated, since deletes remove empty directories."""
        for tries_left in reversed(range(RENAME_TRIES)):
            try:
                self._make_directories(target.parent)
                if if_absent:
                    os.link(temporary, target)
                else:
                    temporary.replace(target)
                break
            except FileExistsError:
                # An earlier try may have made the name without syncing it, and who reads the
                # object now takes it as durable.
                with suppress(FileNotFoundError):
                    system.sync_directory(target.parent)
                raise ObjectExistsError(self.uri.text, path, "the object exists already") from None
            except FileNotFoundError:
                if not tries_left:
                    raise
        with suppress(FileNotFoundError):  # the object was deleted already
            system.sync_directory(target.parent)

    def _make_directories(self, directory: Path) -> None:
        """Create a directory below the root and its parents, durably."""
        below = directory.relative_to(self.root).parts
        for count in range(1, len(below) + 1):
            each = self.root.joinpath(*below[:count])
            try:
                each.mkdir()
            except FileExistsError:
                if each in self._known:
                    continue
            system.sync_directory(each.parent)
            self._remember(each)

    def _remember(self, directory: Path) -> None:
        with self._lock:
            if len(self._known) >= KNOWN_DIRECTORIES_MAX:
                self._known.clear()
            self._known.add(directory)

    def _remove_empty(self, directory: Path) -> None:
        while directory != self.root:
            try:
                directory.rmdir()
            except OSError:  # not empty, or removed by another thread
                return
            with self._lock:
                self._known.discard(directory)
            directory = directory.parent

    def _walk(self, prefix: str) -> Iterator[tuple[str, int, int]]:
        """Yield the objects below a directory, in the order of their names."""
        try:
            with os.scandir(self.root / prefix) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            path = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir(follow_symlinks=False):
                if path != TEMPORARY:
                    yield from self._walk(path)
            elif entry.is_file():
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                yield path, stat.st_size, stat.st_mtime_ns // 1_000_000


def pieces(fd: int, start: int, end: int, progress: Progress) -> Iterator[bytes]:
    """Yield the bytes of a range in pieces, until the range or the file ends."""
    while start < end and (piece := os.pread(fd, min(COPY_BYTES, end - start), start)):
        yield piece
        start += len(piece)
        progress.step()


def make_directories(path: Path) -> None:
    """Create a directory and its parents, durably.

    The parent of an existing directory is synced too: a crash may have prevented that before.
    """
    for each in reversed([p for p in (path, *path.parents) if not p.exists()] or [path]):
        each.mkdir(exist_ok=True)
        with suppress(PermissionError):  # a parent that we cannot open is not new
            system.sync_directory(each.parent)


def remove_older(directory: Path, limit_seconds: float) -> None:
    """Remove the files of a directory that were changed before a time."""
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < limit_seconds:
                path.unlink()
