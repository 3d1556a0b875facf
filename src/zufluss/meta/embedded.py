"""The metadata store of one process: SQLite in a directory of its own.

For `zufluss dev` and for a coordinator that stands alone. SQLite runs in WAL mode with
`synchronous=FULL`, so a transaction is on stable storage when it is acknowledged, and a crash
leaves whole transactions only. The connection lives on one thread of its own: the event loop never
waits for a disk, and transactions are serial without a lock. A transaction is a few statements,
however many operations it has: Python releases its interpreter lock for each statement, and beside
a busy event loop gets it back only after milliseconds.

A directory belongs to one process. `LOCK` is held (flock) as long as the store is open; a second
opener gets `StoreOwnedError` that names the owner. Every row carries a checksum and the file is
checked on opening: damaged bytes are an error, never an answer.

| table | column | what |
|---|---|---|
| store | format | layout version of this file, 1 |
|       | revision | number of the last transaction; the version of what it wrote |
| entry | path | primary key |
|       | value | the bytes |
|       | version | revision of the transaction that put the value |
|       | crc | CRC-32 over path (UTF-8), version (8 bytes, big-endian) and value |

Revisions are never given twice, so here a version also tells a path that was deleted and created
again from the one before.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from zufluss.meta.api import (
    ConflictError,
    Create,
    Delete,
    Entry,
    MetaStoreError,
    Op,
    Put,
    StoreClosedError,
    StoreOwnedError,
    VersionedValue,
    check_ops,
    check_path,
)
from zufluss.system import sync_directory
from zufluss.threads import Threads

FORMAT = 1
DATABASE_FILE = "metadata.sqlite"
LOCK_FILE = "LOCK"
ROWS_AT_ONCE = 1_000
"""Rows of one statement; each has four parameters, of which SQLite takes 32,766."""

T = TypeVar("T")


class EmbeddedStore:
    """A `MetaStore` in a directory, for one process. Open it with `EmbeddedStore.open`."""

    def __init__(
        self,
        directory: Path,
        lock: int,
        loop: asyncio.AbstractEventLoop,
        thread: Executor,
        database: _Database,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._loop = loop
        self._thread = thread
        self._db = database
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, directory: Path) -> EmbeddedStore:
        """Open the store of a directory, or create it.

        StoreOwnedError when another process has it open, MetaStoreError when it is damaged.
        """
        lock, loop = _own(directory), asyncio.get_running_loop()
        thread = Threads(1, "zufluss-meta")
        try:
            database = await loop.run_in_executor(thread, _Database.open, directory)
        except BaseException:
            thread.shutdown()
            os.close(lock)
            raise
        return cls(directory, lock, loop, thread, database)

    async def read(self, path: str) -> VersionedValue | None:
        """The value of a path, or None."""
        check_path(path)
        return await self._run(lambda: self._db.read(path))

    async def children(self, path: str) -> list[str]:
        """The names one level below a path, sorted."""
        check_path(path, root=True)
        return await self._run(lambda: self._db.children(path))

    async def tree(self, path: str) -> list[Entry]:
        """Every value at or below a path, sorted by path; here even as one snapshot."""
        check_path(path, root=True)
        return await self._run(lambda: self._db.tree(path))

    async def transact(self, ops: Sequence[Op]) -> None:
        """Apply all operations or none."""
        await self._commit(tuple(ops))

    async def compare_and_set(self, path: str, value: bytes, version: int | None) -> int:
        """Put a value when the path has this version (None: no value); its new version."""
        op: Op = Create(path, value) if version is None else Put(path, value, version)
        return await self._commit((op,))

    async def close(self) -> None:
        """Finish the calls under way, and release the directory."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._loop.run_in_executor(self._thread, self._db.close)
        finally:
            self._thread.shutdown()
            os.close(self._lock)

    async def _commit(self, ops: tuple[Op, ...]) -> int:
        check_ops(ops)
        return await self._run(lambda: self._db.transact(ops))

    async def _run(self, work: Callable[[], T]) -> T:
        self._check_open()
        return await self._loop.run_in_executor(self._thread, work)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise StoreClosedError(f"the metadata store {self._directory} is closed")

    def __repr__(self) -> str:
        return f"EmbeddedStore({str(self._directory)!r})"


class _Database:
    """The SQLite file; every method runs on the store's thread."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    @classmethod
    def open(cls, directory: Path) -> _Database:
        path = directory / DATABASE_FILE
        with _storage(path):
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                database = cls(connection, path)
                database._prepare()
                _sync(directory)
            except BaseException:
                connection.close()
                raise
        return database

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode=EXCLUSIVE")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        run("PRAGMA fullfsync=ON")  # on macOS a sync reaches the medium only with this
        damage = run("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise MetaStoreError(f"{self._path} is damaged ({damage}): restore it from a backup")
        with self._transaction():
            run("CREATE TABLE IF NOT EXISTS store (format INTEGER, revision INTEGER)")
            run(
                "CREATE TABLE IF NOT EXISTS entry (path TEXT PRIMARY KEY, value BLOB NOT NULL,"
                " version INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID"
            )
            row = run("SELECT format FROM store").fetchone()
            if row is None:
                run("INSERT INTO store VALUES (?, 0)", (FORMAT,))
            elif row[0] != FORMAT:
                raise MetaStoreError(
                    f"{self._path} has format {row[0]}, this zufluss reads format {FORMAT}: "
                    f"use the zufluss that wrote it"
                )

    def close(self) -> None:
        with _storage(self._path):
            self._connection.close()

    def read(self, path: str) -> VersionedValue | None:
        with _storage(self._path):
            row = self._connection.execute(
                "SELECT path, value, version, crc FROM entry WHERE path = ?", (path,)
            ).fetchone()
        return None if row is None else VersionedValue(self._verified(row), row[2])

    def tree(self, path: str) -> list[Entry]:
        with _storage(self._path):
            rows = self._connection.execute(
                "SELECT path, value, version, crc FROM entry"
                " WHERE path = ? OR (path >= ? AND path < ?) ORDER BY path",
                (path, *_below(path)),
            ).fetchall()
        return [Entry(row[0], self._verified(row), row[2]) for row in rows]

    def children(self, path: str) -> list[str]:
        low, high = _below(path)
        with _storage(self._path):
            rows = self._connection.execute(
                "SELECT path FROM entry WHERE path >= ? AND path < ?", (low, high)
            ).fetchall()
        return sorted({row[0][len(low) :].split("/", 1)[0] for row in rows})

    def transact(self, ops: Sequence[Op]) -> int:
        with _storage(self._path), self._transaction():
            run = self._connection.execute
            run("UPDATE store SET revision = revision + 1")
            revision: int = run("SELECT revision FROM store").fetchone()[0]
            before: dict[str, int] = {}
            for some in _in_pieces(ops):
                before |= self._versions([op.path for op in some])
            for index, op in enumerate(ops):
                if not _fits(op, before.get(op.path)):
                    raise ConflictError(index, op, before.get(op.path))
            for put in _in_pieces([op for op in ops if isinstance(op, Create | Put)]):
                self._put(put, revision)
            for deleted in _in_pieces([op.path for op in ops if isinstance(op, Delete)]):
                run(f"DELETE FROM entry WHERE path IN ({_places(deleted)})", deleted)
        return revision

    def _versions(self, paths: Sequence[str]) -> dict[str, int]:
        """The versions of the paths that have a value, in one row."""
        row = self._connection.execute(
            f"SELECT json_group_object(path, version) FROM entry WHERE path IN ({_places(paths)})",
            paths,
        ).fetchone()
        versions: dict[str, int] = json.loads(row[0])
        return versions

    def _put(self, ops: Sequence[Create | Put], revision: int) -> None:
        rows = ", ".join(["(?, ?, ?, ?)"] * len(ops))
        values: list[str | bytes | int] = []
        for op in ops:
            values += op.path, op.value, revision, _crc(op.path, revision, op.value)
        self._connection.execute(f"REPLACE INTO entry VALUES {rows}", values)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _verified(self, row: tuple[str, bytes, int, int]) -> bytes:
        path, value, version, crc = row
        if crc != _crc(path, version, value):
            raise MetaStoreError(
                f"the value of {path} in {self._path} is damaged (checksum {crc} does not fit): "
                f"restore the file from a backup"
            )
        return value


def _fits(op: Op, actual: int | None) -> bool:
    if isinstance(op, Create):
        return actual is None
    return actual is not None and op.version in (None, actual)


def _in_pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items in pieces of the size that one statement takes."""
    for at in range(0, len(items), ROWS_AT_ONCE):
        yield items[at : at + ROWS_AT_ONCE]


def _places(items: Sequence[object]) -> str:
    return ", ".join("?" * len(items))


def _below(path: str) -> tuple[str, str]:
    """The range of the paths below one: "0" is the character after "/"."""
    base = "" if path == "/" else path
    return f"{base}/", f"{base}0"


def _crc(path: str, version: int, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(version.to_bytes(8, "big"), zlib.crc32(path.encode())))


@contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise MetaStoreError(
            f"{path} cannot be used: {error}; check the disk and the permissions of its directory"
        ) from error


def _own(directory: Path) -> int:
    """Lock the directory for this process; the lock ends with the returned descriptor."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise StoreOwnedError(
            f"the metadata store {directory} is open in process {owner}: "
            f"stop it, or give this server a directory of its own"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _sync(directory: Path) -> None:
    """Make the names of new files in the directory, and its own name, durable."""
    for place in (directory, directory.parent):
        sync_directory(place)
