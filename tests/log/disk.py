"""A disk for power-failure tests: record every operation, then lose what was not synced.

`RecordingFiles` performs each operation and notes it. `crash_image` takes the notes up to any
moment and writes a directory tree as a disk could look after the power failed there:

* of the data of a file, everything before its last fdatasync is there; of what came later, any
  part: each write may be there, missing, or torn at 512 or 4096 bytes, in any combination, and the
  file may have grown without its data, which then reads as zeros;
* of the names in a directory, every change before its last sync is there; of the later ones, the
  first few (a journaling file system keeps the order within a directory).

That is the classic block-order checker in a few hundred lines, deterministic by its seed, without
root and without a special kernel. `mark` puts a note of the test between the operations, such as
"this was acknowledged now". `SilentFiles` skips syncs, to recover thousands of images quickly.
`ManualWorker` runs jobs when the test says so, on the test's own thread.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zufluss.log.files import Files, OpenFile
from zufluss.log.worker import Done, Job


class Operation(NamedTuple):
    """One change of the file system, or a note of the test."""

    kind: str
    """create, mkdir, write, truncate, sync, dirsync, rename, unlink, rmdir or mark."""
    inode: int
    """The file or directory it concerns; for names, the directory that holds them."""
    arguments: tuple[Any, ...] = ()
    """Position and bytes, size, names and the inode they name, or the note."""


class RecordingFiles(Files):
    """Files that note every operation. Not for use by several threads at a time."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.operations: list[Operation] = []
        self._serials: dict[int, int] = {}
        self._count = 0
        self._by_fd: dict[int, int] = {}
        self.root_inode = self._assign(root)

    def mark(self, note: Any) -> None:
        """Put a note between the operations."""
        self.operations.append(Operation("mark", 0, (note,)))

    def _assign(self, path: Path) -> int:
        """A number never used before for a new file; the system's own are used again."""
        self._count += 1
        self._serials[path.stat().st_ino] = self._count
        return self._count

    def _inode(self, path: Path) -> int:
        return self._serials[path.stat().st_ino]

    def _note(self, kind: str, inode: int, *arguments: Any) -> None:
        self.operations.append(Operation(kind, inode, arguments))

    def open(self, path: Path, *, create: bool = False) -> OpenFile:
        """Open, noting a creation."""
        new = create and not path.exists()
        file = super().open(path, create=create)
        if new:
            self._note("create", self._inode(path.parent), path.name, self._assign(path))
        self._by_fd[file.fd] = self._serials[os.fstat(file.fd).st_ino]
        return file

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        """Write and note."""
        written = os.pwrite(fd, data, position)
        self._note("write", self._by_fd[fd], position, bytes(memoryview(data)[:written]))
        return written

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        """Note; the real disk need not be waited for."""
        self._note("sync", self._by_fd[fd])

    def truncate(self, fd: int, size: int) -> None:
        """Cut and note."""
        os.ftruncate(fd, size)
        self._note("truncate", self._by_fd[fd], size)

    def mkdir(self, path: Path) -> None:
        """Make a directory and note."""
        super().mkdir(path)
        self._note("mkdir", self._inode(path.parent), path.name, self._assign(path))

    def rename(self, source: Path, target: Path) -> None:
        """Rename within a directory and note."""
        if source.parent != target.parent:
            raise ValueError(f"{source} to {target}: only names of one directory keep their order")
        super().rename(source, target)
        self._note("rename", self._inode(source.parent), source.name, target.name)

    def unlink(self, path: Path) -> None:
        """Remove and note."""
        super().unlink(path)
        self._note("unlink", self._inode(path.parent), path.name)

    def rmdir(self, path: Path) -> None:
        """Remove a directory and note."""
        super().rmdir(path)
        self._note("rmdir", self._inode(path.parent), path.name)

    def sync_directory(self, path: Path) -> None:
        """Note."""
        self._note("dirsync", self._inode(path))


class SilentFiles(Files):
    """Files that skip syncs."""

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        """Do nothing."""

    def sync_directory(self, path: Path) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _History:
    """The changes of one file or directory, split at its last sync."""

    synced: list[Operation] = field(default_factory=list)
    pending: list[Operation] = field(default_factory=list)

    def sync(self) -> None:
        self.synced += self.pending
        self.pending = []


_DATA = ("write", "truncate")
_NAMES = ("create", "mkdir", "rename", "unlink", "rmdir")


def crash_image(
    operations: Sequence[Operation], root_inode: int, target: Path, rng: random.Random
) -> None:
    """Write into `target` a state that a power failure after these operations could leave."""
    data: dict[int, _History] = {}
    names: dict[int, _History] = {}
    for operation in operations:
        if operation.kind in _DATA:
            data.setdefault(operation.inode, _History()).pending.append(operation)
        elif operation.kind in _NAMES:
            names.setdefault(operation.inode, _History()).pending.append(operation)
        elif operation.kind == "sync":
            data.setdefault(operation.inode, _History()).sync()
        elif operation.kind == "dirsync":
            names.setdefault(operation.inode, _History()).sync()
    loss = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    tear = rng.choice((512, 4096, 1 << 30))
    made = [o.arguments[1] for o in operations if o.kind == "mkdir"]
    directories = {
        inode: _surviving_names(names.get(inode) or _History(), loss, rng)
        for inode in (root_inode, *made)
    }
    _materialise(
        root_inode,
        directories,
        lambda inode: _surviving_data(data.get(inode) or _History(), loss, tear, rng),
        target,
    )


def _surviving_names(history: _History, loss: float, rng: random.Random) -> dict[str, int]:
    kept = sum(rng.random() >= loss for _ in history.pending)
    entries: dict[str, int] = {}
    for operation in (*history.synced, *history.pending[:kept]):
        name = operation.arguments[0]
        if operation.kind in ("create", "mkdir"):
            entries[name] = operation.arguments[1]
        elif operation.kind == "rename":
            entries[operation.arguments[1]] = entries.pop(name)
        else:
            entries.pop(name)
    return entries


def _surviving_data(history: _History, loss: float, tear: int, rng: random.Random) -> bytes:
    content = bytearray()
    for operation in history.synced:
        _apply(content, operation)
    for operation in history.pending:
        if operation.kind == "truncate":
            if rng.random() >= loss:
                _apply(content, operation)
            continue
        position, data = operation.arguments
        if rng.random() < 0.2:  # the size is there, the data may be not
            content.extend(bytes(max(0, position + len(data) - len(content))))
        for start, end in _pieces(position, len(data), tear):
            if rng.random() >= loss:
                piece = data[start - position : end - position]
                _apply(content, Operation("write", 0, (start, piece)))
    return bytes(content)


def _pieces(position: int, length: int, tear: int) -> Iterator[tuple[int, int]]:
    """The parts of a write between multiples of `tear`."""
    start, end = position, position + length
    while start < end:
        following = min(end, (start // tear + 1) * tear)
        yield start, following
        start = following


def _apply(content: bytearray, operation: Operation) -> None:
    if operation.kind == "truncate":
        (size,) = operation.arguments
        del content[size:]
        content.extend(bytes(size - len(content)))
        return
    position, data = operation.arguments
    content.extend(bytes(max(0, position - len(content))))
    content[position : position + len(data)] = data


def _materialise(
    inode: int,
    directories: dict[int, dict[str, int]],
    content_of: Callable[[int], bytes],
    target: Path,
) -> None:
    target.mkdir(exist_ok=True)
    for name, child in directories.get(inode, {}).items():
        if child in directories:
            _materialise(child, directories, content_of, target / name)
        else:
            (target / name).write_bytes(content_of(child))


class ManualWorker:
    """A worker whose jobs run when the test calls `run`."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Job, Done]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, job: Job, done: Done) -> None:
        """Keep the job for later."""
        self._jobs.append((job, done))

    def run(self, count: int | None = None) -> None:
        """Run the next `count` jobs, or all including those they lead to."""
        while self._jobs and count != 0:
            job, done = self._jobs.popleft()
            try:
                outcome = job()
            except Exception as e:
                outcome = e
            done(outcome)
            count = None if count is None else count - 1

    def stop(self) -> None:
        """Run what is left."""
        self.run()


def prefixes(operations: Sequence[Operation], rng: random.Random, count: int) -> Iterable[int]:
    """Moments to crash at: random ones, and those right around syncs, which matter most."""
    syncs = [i for i, o in enumerate(operations) if o.kind in ("sync", "dirsync", "rename", "mark")]
    for _ in range(count):
        if syncs and rng.random() < 0.5:
            yield min(len(operations), rng.choice(syncs) + rng.choice((0, 1)))
        else:
            yield rng.randrange(len(operations) + 1)
