"""The file layer: the only code of the package that changes the file system.

Every write, truncation, sync, rename, creation and removal of the log goes through one `Files`
object that is handed in. That gives three things: a test can record all operations and build the
disk as a power failure would leave it (`tests/log/disk.py`), a crash test can kill the process
at the n-th operation of a kind, and a reader finds the durability rules in one place. Reading is
not wrapped; it changes nothing.

Nothing here is durable until it was synced: data with `fdatasync`, the names of created, renamed
and removed files with `sync_directory`. `ZUFLUSS_KILL_AT=<operation>#<n>` makes the process kill
itself with SIGKILL right before the n-th operation of that name, counted over all threads; the
operations are `open`, `write`, `truncate`, `fdatasync`, `dirsync`, `rename`, `unlink`, `rmdir` and
`mkdir`. Longer procedures name their steps with `reach`, which can be kill points too (`STEPS`).
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zufluss import system
from zufluss.errors import ConfigError

KILL_AT_VARIABLE = "ZUFLUSS_KILL_AT"
"""Environment variable that names the operation to die at."""

OPERATIONS = (
    "open", "write", "truncate", "fdatasync", "dirsync", "rename", "unlink", "rmdir", "mkdir",
)  # fmt: skip
"""Names of the operations that can be a kill point."""

STEPS = (
    "remote-uploaded", "remote-manifest", "remote-committed", "remote-local-delete",
    "remote-delete", "snapshot-checkpoint", "snapshot-uploaded", "snapshot-metadata",
    "snapshot-committed", "retain-delete", "retain-deleted", "clean-delete", "clean-deleted",
    "sweep-delete",
)  # fmt: skip
"""Steps of longer procedures that can be a kill point: of the remote log, after the upload of a
segment, after its manifest was written, after that was committed, before the segment is deleted
here, before files are deleted there; of a key-value snapshot, after its checkpoint was made, its
files were uploaded, `_METADATA` was written, and that was committed; of one that is dropped, before
its files are deleted and after; of a dropped table, before its files are deleted and after; of the
sweep, before it deletes."""

LOST_STEPS = ("lost-revoke", "lost-forget", "lost-lake", "lost-retire")
"""Steps of giving up a destroyed location: before leases are revoked, snapshots are removed from
their records, offsets files of lakes are written anew, and the location is retired."""

WAL_STEPS = (
    "wal-close", "wal-seal", "wal-sealed", "wal-assign", "wal-assigned", "wal-takeover",
    "wal-taken-over", "wal-delete", "wal-recover", "wal-carry", "wal-carried", "wal-adopted",
    "wal-trim", "wal-trim-carried", "wal-trim-noted", "wal-trimmed",
)  # fmt: skip
"""The same, where several tablet servers share a log. At the coordinator: before a session is
closed, before it is sealed and after; before its buckets get other leaders and after; before it is
noted that one of these has a bucket and after; before objects of a session that nobody needs are
deleted. At a new leader: before it reads the session of the former one, before it writes the end of
a bucket into its own session, after that, and after the coordinator noted it. At any leader, of
each round of trimming: before short tails are written again and after, after the coordinator noted
the floor, and after the objects below it were deleted."""

HANDOVER_STEPS = (
    "handover-prepare", "handover-release", "handover-assign", "handover-assigned",
    "handover-adopted", "handover-hold", "handover-released",
)  # fmt: skip
"""The same, when a bucket is handed over. At the coordinator: before the next leader prepares,
before the present one is asked for a release, after it has released the bucket, after the
transaction that names the next leader, and when that one serves. At the leader: before it holds
writes, and when its release is durable."""

OPEN_FILES_MAX = 256
"""Files kept open for reading old segments and indexes; the least recently used is closed."""


class OpenFile:
    """A file descriptor that is closed with its last reference.

    A slice handed to a reader thread, a sync in flight and the log itself may all hold the same
    file; the last user closes it, so a segment may be deleted while it is read.
    """

    __slots__ = ("_close", "fd")

    def __init__(self, fd: int, close: Any = os.close) -> None:
        self.fd = fd
        self._close = close

    def __del__(self) -> None:
        self._close(self.fd)

    def __repr__(self) -> str:
        return f"OpenFile(fd={self.fd})"


class Files:
    """The operations on files, straight through to the operating system."""

    def __init__(self, open_files_max: int = OPEN_FILES_MAX) -> None:
        self._open_files_max = open_files_max
        self._cached: OrderedDict[str, OpenFile] = OrderedDict()
        self._cache_lock = threading.Lock()

    pwrite = staticmethod(os.pwrite)
    """Write bytes at a position, return how many were written. The hot one: no wrapper at all."""

    fdatasync = staticmethod(system.sync_data)
    """Make the data of a file durable; other systems than Linux have other calls for that."""

    truncate = staticmethod(os.ftruncate)
    """Cut or extend an open file."""

    reserve = staticmethod(system.reserve)
    """Have disk blocks behind the end of a file, whose size stays; whether that was possible.

    A hint that makes writes cheaper. Nothing of it can be seen in the file, and `truncate` to the
    file's own size gives the blocks back."""

    def reach(self, step: str) -> None:
        """Mark a step of a procedure by name; only crash tests act on the mark."""

    def open(self, path: Path, *, create: bool = False) -> OpenFile:
        """Open for reading and writing; with `create` the file is made if it is missing."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return OpenFile(os.open(path, flags, 0o644))

    def mkdir(self, path: Path) -> None:
        """Make one directory."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory, replacing the one that had the new name."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        system.sync_directory(path)

    def make_directories(self, path: Path) -> list[Path]:
        """Make a directory with its parents; return the directories that got a name, inmost first.

        Their names are durable when these are synced. Other threads may make the same ones.
        """
        missing = list(itertools.takewhile(lambda p: not p.exists(), (path, *path.parents)))
        for directory in reversed(missing):
            with suppress(FileExistsError):
                self.mkdir(directory)
        return [directory.parent for directory in missing]

    def write_all(self, fd: int, data: Any, position: int) -> None:
        """Write all of `data`; a write cut short is continued until it is done or fails."""
        view = memoryview(data)
        while view.nbytes:
            written = self.pwrite(fd, view, position)
            view = view[written:]
            position += written

    def put(self, path: Path, data: bytes, *, sync: bool = False) -> None:
        """Make `path` a file of exactly these bytes."""
        file = self.open(path, create=True)
        self.truncate(file.fd, 0)
        self.write_all(file.fd, data, 0)
        if sync:
            self.fdatasync(file.fd)

    def sync_file(self, path: Path) -> None:
        """Make the data of a closed file durable; a file that is gone needs none."""
        try:
            file = self.open(path)
        except FileNotFoundError:
            return
        self.fdatasync(file.fd)

    def unlink_if_there(self, path: Path) -> None:
        """Remove a file that may be missing."""
        self.forget(path)
        try:
            self.unlink(path)
        except FileNotFoundError:
            return

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and everything in it."""
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                self.remove_tree(entry)
            else:
                self.unlink(entry)
        self.rmdir(path)

    def cached(self, path: Path) -> OpenFile:
        """An open file for reading, from a bounded pool. For any thread."""
        key = str(path)
        with self._cache_lock:
            file = self._cached.get(key)
            if file is not None:
                self._cached.move_to_end(key)
                return file
        file = self.open(path)
        with self._cache_lock:
            self._cached[key] = file
            evicted = len(self._cached) > self._open_files_max and self._cached.popitem(last=False)
        del evicted  # closed here, outside of the lock
        return file

    def forget(self, path: Path) -> None:
        """Drop a file from the pool; for files about to be removed or replaced."""
        with self._cache_lock:
            forgotten = self._cached.pop(str(path), None)
        del forgotten


class KillingFiles(Files):
    """Files that kill the process right before the n-th operation of one name."""

    def __init__(self, operation: str, hit: int) -> None:
        super().__init__()
        self._operation = operation
        self._hit = hit
        self._count = itertools.count(1)

    def _pass(self, operation: str) -> None:
        if operation == self._operation and next(self._count) == self._hit:
            os.kill(os.getpid(), signal.SIGKILL)

    def reach(self, step: str) -> None:
        """Go on, or die."""
        self._pass(step)

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        """Write, or die."""
        self._pass("write")
        return os.pwrite(fd, data, position)

    def fdatasync(self, fd: int) -> None:
        """Sync, or die."""
        self._pass("fdatasync")
        system.sync_data(fd)

    def truncate(self, fd: int, size: int) -> None:
        """Cut, or die."""
        self._pass("truncate")
        os.ftruncate(fd, size)

    def open(self, path: Path, *, create: bool = False) -> OpenFile:
        """Open, or die."""
        self._pass("open")
        return super().open(path, create=create)

    def mkdir(self, path: Path) -> None:
        """Make a directory, or die."""
        self._pass("mkdir")
        super().mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, or die."""
        self._pass("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file, or die."""
        self._pass("unlink")
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove a directory, or die."""
        self._pass("rmdir")
        super().rmdir(path)

    def sync_directory(self, path: Path) -> None:
        """Sync a directory, or die."""
        self._pass("dirsync")
        super().sync_directory(path)


def files_from_environment(environ: Mapping[str, str] = os.environ) -> Files:
    """The file layer of a server: plain, or with the kill point the environment names."""
    point = environ.get(KILL_AT_VARIABLE)
    if not point:
        return Files()
    operation, _, hit = point.partition("#")
    names = (*OPERATIONS, *STEPS, *LOST_STEPS, *WAL_STEPS, *HANDOVER_STEPS)
    if operation not in names or not hit.isdecimal() or int(hit) < 1:
        raise ConfigError(
            f"{KILL_AT_VARIABLE}={point!r} is not of the form <operation>#<n> with n from 1 and an "
            f"operation of {', '.join(names)}; unset it for normal service"
        )
    return KillingFiles(operation, int(hit))
