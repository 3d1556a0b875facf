"""The flush process: writes sorted table files from the shared memory of the server.

Writing a table costs half a microsecond of Python per row, which would be taken from the event loop
in any thread of the server. So it is done here: the process maps the arena, is told where the rows
lie in it, in order, and puts them into a file. It imports nothing but the standard library and
rocksdict, and ends when its input does, so it cannot outlive the server.

Started as `python -m zufluss.kv.flusher <descriptor> <bytes of the arena>`. Little-endian:

| request      | type                                                                    |
|--------------|-------------------------------------------------------------------------|
| path length  | i64                                                                     |
| rows         | i64                                                                     |
| path         | UTF-8                                                                   |
| spans        | 3 × i64 a row: start of the key, of the value, end of the value or −1   |

The answer is one line: `done`, or what went wrong.
"""

from __future__ import annotations

import mmap
import struct
import sys
from typing import BinaryIO

from rocksdict import SstFileWriter

from zufluss.kv.rocks import table_options

REQUEST = struct.Struct("<qq")
"""Path length and number of rows."""

SPAN_BYTES = 24
"""Of one row."""

ROWS_AT_ONCE = 16384
"""Spans read in one piece."""


def write_table(memory: mmap.mmap, path: str, rows: int, spans: BinaryIO) -> None:
    """Write one table file; durable when it returns."""
    writer = SstFileWriter(table_options())
    writer.open(path)
    while rows:
        count = min(rows, ROWS_AT_ONCE)
        numbers = memoryview(spans.read(count * SPAN_BYTES)).cast("q").tolist()
        for key, value, end in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
            if end < 0:
                del writer[memory[key:value]]
            else:
                writer[memory[key:value]] = memory[value:end]
        rows -= count
    writer.finish()


def main(arguments: list[str]) -> None:
    """Serve requests until the input ends."""
    descriptor, size = map(int, arguments)
    memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(header := requests.read(REQUEST.size)) == REQUEST.size:
        path_bytes, rows = REQUEST.unpack(header)
        path = requests.read(path_bytes).decode()
        try:
            write_table(memory, path, rows, requests)
            answer = "done"
        except Exception as e:
            answer = f"{type(e).__name__}: {e}".replace("\n", " ")
        answers.write(answer.encode() + b"\n")
        answers.flush()
        if answer != "done":
            return


if __name__ == "__main__":
    main(sys.argv[1:])
