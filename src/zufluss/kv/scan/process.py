"""The scan process: reads pages of pinned states outside the server's process.

Iterating a database costs a third of a microsecond of Python per row, all of it with the GIL. A
thread of the server would take this time from writers and lookups, so a process of its own does it.
It imports nothing but the standard library and rocksdict, and ends with its input, so it cannot
outlive the server.

A database is opened for its first page, with all its files, and stays open until the server closes
it; so its files may be removed meanwhile. The iterator at the end of a page is kept, and the next
page continues without a search; a page from any other place begins with a search.

Started as `python -m zufluss.kv.scan.process`. Little-endian:

| request        | type                                                          |
|----------------|---------------------------------------------------------------|
| operation      | i8: 0 read a page, 1 close the database                       |
| path length    | i32                                                           |
| `after` length | i32, −1: from the first key                                   |
| `until` length | i32, −1: to the last key                                      |
| rows           | i64, of the page at most                                      |
| bytes          | i64, of values; the one that reaches it is the last           |
| path           | of the database, file system encoding                         |
| `after`        | the key that the page begins behind                           |
| `until`        | the last key that may be in it                                |

| answer         | type                                                          |
|----------------|---------------------------------------------------------------|
| outcome        | i8: 0 rows, 1 rows and nothing comes after them, 2 a failure  |
| rows           | i64                                                           |
| bytes          | i64, of values, or of the text that says what failed          |
| key length     | i32, −1: no rows                                              |
| last key       |                                                               |
| value lengths  | i32 a row                                                     |
| values         | one behind the other in the order of their keys, or the text  |

A database that cannot be read is closed, and opened again for the next page.
"""

from __future__ import annotations

import gc
import os
import signal
import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from rocksdict import AccessType, Rdict, ReadOptions

from zufluss import system
from zufluss.kv.cold.rocks import table_options

REQUEST = struct.Struct("<biiiqq")
"""Operation, lengths of path, `after` and `until`, rows, bytes."""

ANSWER = struct.Struct("<bqqi")
"""Outcome, rows, bytes, length of the last key."""

READ, CLOSE = 0, 1
ROWS, LAST_ROWS, FAILURE = 0, 1, 2
NONE = -1
"""Length of a missing key."""

NICENESS = 10
"""Niceness of the process: writers and lookups in the server come first."""

ITERATORS_MAX = 16
"""Iterators that are kept per database; the least recently used one is dropped."""

Row: TypeAlias = tuple[bytes, bytes]
Place: TypeAlias = tuple[bytes | None, bytes | None]
"""The last key that was read, and the last key to be read."""


class Request(NamedTuple):
    """A request of the server; the module's table explains the fields."""

    operation: int
    path: str
    after: bytes | None
    until: bytes | None
    rows: int
    size: int


class PageRows(NamedTuple):
    """The rows of a page."""

    values: bytearray
    lengths: list[int]
    last_key: bytes | None
    done: bool


class Database:
    """One pinned state."""

    def __init__(self, path: str) -> None:
        if not os.path.isdir(path):  # noqa: PTH112  RocksDB would create it
            raise FileNotFoundError("there is no such directory")
        options = table_options()
        options.set_max_open_files(-1)
        self._options = ReadOptions()
        self._options.fill_cache(False)  # type: ignore[call-arg]  # its stub forgets the argument
        self._rows = Rdict(path, options, {"default": options}, AccessType.read_only())
        self._places: OrderedDict[Place, tuple[Row, Iterator[Any]]] = OrderedDict()

    def page(self, after: bytes | None, until: bytes | None, rows: int, size: int) -> PageRows:
        """Return the rows behind `after`, at least one if there is one."""
        values, lengths = bytearray(), list[int]()
        row, following = self._from(after, until)
        key = None
        if row is not None:
            key, value = row
            values += value
            lengths.append(len(value))
            if len(values) < size:
                for key, value in islice(following, rows - 1):  # noqa: B007  the last counts
                    values += value
                    lengths.append(len(value))
                    if len(values) >= size:
                        break
        row = next(following, None)
        if row is None:
            self._check_end(after if key is None else key, until)
        else:
            self._keep((key, until), (row, following))
        return PageRows(values, lengths, key, row is None)

    def close(self) -> None:
        """Close the files of the database."""
        self._places.clear()
        self._rows.close()

    def _from(self, after: bytes | None, until: bytes | None) -> tuple[Row | None, Iterator[Any]]:
        iterator = self._places.pop((after, until), None)
        if iterator is not None:
            return iterator
        low = None if after is None else after + b"\0"
        following: Iterator[Any] = self._rows.items(from_key=low, read_opt=self._options)
        if until is not None:  # RocksDB has no upper bound in raw mode
            following = takewhile(lambda row: row[0] <= until, following)
        return next(following, None), following

    def _keep(self, place: Place, where: tuple[Row, Iterator[Any]]) -> None:
        self._places[place] = where
        if len(self._places) > ITERATORS_MAX:
            self._places.popitem(last=False)

    def _check_end(self, last: bytes | None, until: bytes | None) -> None:
        """Raise `OSError` if rows are left: an iterator that fails just stops."""
        cursor = self._rows.iter()
        if last is None:
            cursor.seek_to_first()
        else:
            cursor.seek(last + b"\0")
        if cursor.valid() and (until is None or cursor.key() <= until):
            raise OSError("a file could not be read to its end")
        cursor.status()


class Databases:
    """The open databases by path."""

    def __init__(self) -> None:
        self._open: dict[str, Database] = {}

    def page(self, request: Request) -> PageRows:
        """Return the page of a request."""
        _, path, after, until, rows, size = request
        if path not in self._open:
            self._open[path] = Database(path)
        try:
            return self._open[path].page(after, until, rows, size)
        except BaseException:
            self.close(path)
            raise

    def close(self, path: str) -> None:
        """Close a database, if it is open."""
        database = self._open.pop(path, None)
        if database is not None:
            database.close()


def main() -> None:
    """Serve requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal; the server ends the input
    os.nice(NICENESS)
    system.raise_open_files_limit()  # a database keeps all its files open
    gc.disable()  # a page makes a million objects, and no cycles
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    databases = Databases()
    while (request := read_request(requests)) is not None:
        if request.operation == CLOSE:
            databases.close(request.path)
            continue
        try:
            answer = _rows_answer(databases.page(request))
        except Exception as e:
            text = f"{type(e).__name__}: {e}".encode()
            answer = [ANSWER.pack(FAILURE, 0, len(text), NONE), text]
        for part in answer:
            answers.write(part)
        answers.flush()
        del answer


def _rows_answer(page: PageRows) -> list[Any]:
    values, lengths, key, done = page
    head = ANSWER.pack(
        LAST_ROWS if done else ROWS, len(lengths), len(values), NONE if key is None else len(key)
    )
    return [head, key or b"", array("i", lengths), values]


def pack_request(request: Request) -> bytes:
    """Return the bytes of a request."""
    operation, path, after, until, rows, size = request
    name = os.fsencode(path)
    low = NONE if after is None else len(after)
    high = NONE if until is None else len(until)
    head = REQUEST.pack(operation, len(name), low, high, rows, size)
    return b"".join((head, name, after or b"", until or b""))


def read_request(source: BinaryIO) -> Request | None:
    """Read the next request, None at the end of the input."""
    head = source.read(REQUEST.size)
    if len(head) < REQUEST.size:
        return None
    operation, name, low, high, rows, size = REQUEST.unpack(head)
    path = os.fsdecode(source.read(name))
    after = None if low == NONE else source.read(low)
    until = None if high == NONE else source.read(high)
    return Request(operation, path, after, until, rows, size)


if __name__ == "__main__":
    main()
