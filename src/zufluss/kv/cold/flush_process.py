"""The flush process: writes sorted table files from rows that the server sends.

Writing a table file costs half a microsecond of Python per row. A thread of the server would take
this time from the event loop, so a process of its own does it. It imports nothing but the standard
library and rocksdict, and ends with its input, so it cannot outlive the server.

Started as `python -m zufluss.kv.cold.flush_process`. Little-endian:

| request       | type                                                 |
|---------------|------------------------------------------------------|
| path length   | i64                                                  |
| path          | file system encoding                                 |
| pieces        | until one without rows                               |

| piece         | type                                                 |
|---------------|------------------------------------------------------|
| rows          | i64                                                  |
| bytes         | i64, of all keys and values                          |
| key lengths   | i32 a row                                            |
| value lengths | i32 a row; −1: the key is deleted                    |
| data          | key and value of each row, in the order of the keys  |

The answer is one line: `done`, or the failure, after which the process ends.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from typing import BinaryIO

from rocksdict import SstFileWriter

from zufluss.kv.cold.rocks import table_options

LENGTH = struct.Struct("<q")
"""Length of the path."""

PIECE = struct.Struct("<qq")
"""Rows and bytes of a piece."""

ROWS_AT_ONCE = 16384
"""Rows of a piece at most."""


def main() -> None:
    """Serve requests until the input ends, or one fails."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(header := requests.read(LENGTH.size)) == LENGTH.size:
        path = os.fsdecode(requests.read(*LENGTH.unpack(header)))
        try:
            write_table(path, requests)
            answer = "done"
        except Exception as e:
            answer = f"{type(e).__name__}: {e}".replace("\n", " ")
        answers.write(answer.encode() + b"\n")
        answers.flush()
        if answer != "done":
            return


def write_table(path: str, rows: BinaryIO) -> None:
    """Write one table file; durable when it returns."""
    writer = SstFileWriter(table_options())
    writer.open(path)
    for key, value in _rows(rows):
        if value is None:
            del writer[key]
        else:
            writer[key] = value
    writer.finish()


def _rows(source: BinaryIO) -> Iterator[tuple[bytes, bytes | None]]:
    while (piece := PIECE.unpack(source.read(PIECE.size)))[0]:
        count, size = piece
        keys = memoryview(source.read(4 * count)).cast("i").tolist()
        values = memoryview(source.read(4 * count)).cast("i").tolist()
        data = source.read(size)
        at = 0
        for key_size, value_size in zip(keys, values, strict=True):
            middle = at + key_size
            if value_size < 0:
                yield data[at:middle], None
                at = middle
            else:
                end = middle + value_size
                yield data[at:middle], data[middle:end]
                at = end


if __name__ == "__main__":
    main()
