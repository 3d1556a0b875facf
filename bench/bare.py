"""The machine's own limit: a bare asyncio server that only moves the same bytes.

* `append` receives frames, writes each to a file and answers with a few bytes; with `ack` the
  answer waits for an fdatasync that all frames in flight share, with `os` it does not.
* `read`: each frame is answered with the next SIZE bytes of a file, by one `pread` and one write.
* `answer`: each frame is answered with a frame of SIZE bytes, always the same.

No checksum, no checks, no offsets, no index. What zufluss adds to this is the ratio `make bench`
prints. It is written to be as fast as asyncio allows: one buffer, no copy between socket and file,
the same loop, the same malloc settings as the server.

    python -m bench.bare append FILE --policy ack
    python -m bench.bare read FILE --size 1048576
    python -m bench.bare answer --size 100
"""

from __future__ import annotations

import argparse
import asyncio
import os
import struct
import sys
from collections.abc import Callable

import uvloop

BUFFER_BYTES = 8 << 20
SMALL_BYTES = 64 << 10
LENGTH = struct.Struct(">i")
ID_AT = slice(8, 12)
ANSWER_HEADER = struct.Struct(">iB4s")
ANSWER_BODY = b"\x0a\x06\x10\x00\x28\x00\x00\x00"
"""As long as the answer to a produce request."""

Request = Callable[["Bare", memoryview], None]


def answer(request_id: bytes, size: int) -> bytes:
    """The header of an answer."""
    return ANSWER_HEADER.pack(5 + size, 0, request_id)


class Bare(asyncio.BufferedProtocol):
    """One connection: cuts the stream into frames."""

    def __init__(self, request: Request, buffer_bytes: int) -> None:
        self.request = request
        self.view = memoryview(bytearray(buffer_bytes))
        self.filled = 0
        self.at = 0
        """Where the next read of this connection starts."""

    def connection_made(self, transport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Never past the end of a large frame, so that nothing has to be moved afterwards."""
        if self.filled < LENGTH.size:
            return self.view[self.filled : SMALL_BYTES]
        (length,) = LENGTH.unpack_from(self.view)
        return self.view[self.filled : max(SMALL_BYTES, LENGTH.size + length)]

    def buffer_updated(self, nbytes: int) -> None:
        self.filled += nbytes
        pos = 0
        while self.filled - pos >= LENGTH.size:
            end = pos + LENGTH.size + LENGTH.unpack_from(self.view, pos)[0]
            if self.filled < end:
                break
            self.request(self, self.view[pos:end])
            pos = end
        if pos:
            rest = bytes(self.view[pos : self.filled])
            self.view[: len(rest)] = rest
            self.filled = len(rest)


class Appender:
    """Writes frames one after the other into a file."""

    def __init__(self, path: str, policy: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.position = 0
        self.ack = policy == "ack"
        self.waiting: list[tuple[Bare, bytes]] = []
        self.syncing = False

    def request(self, connection: Bare, frame: memoryview) -> None:
        self.position += os.pwrite(self.fd, frame, self.position)
        request_id = bytes(frame[ID_AT])
        if not self.ack:
            self.answer(connection, request_id)
            return
        self.waiting.append((connection, request_id))
        if not self.syncing:
            self.syncing = True
            asyncio.get_running_loop().call_soon(self.sync)

    def answer(self, connection: Bare, request_id: bytes) -> None:
        connection.transport.write(answer(request_id, len(ANSWER_BODY)) + ANSWER_BODY)

    def sync(self) -> None:
        batch, self.waiting = self.waiting, []
        future = asyncio.get_running_loop().run_in_executor(None, os.fdatasync, self.fd)
        future.add_done_callback(lambda _: self.synced(batch))

    def synced(self, batch: list[tuple[Bare, bytes]]) -> None:
        if self.waiting:
            self.sync()
        else:
            self.syncing = False
        for connection, request_id in batch:
            self.answer(connection, request_id)


class Reader:
    """Reads a file round and round."""

    def __init__(self, path: str, size: int) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        self.size = size
        self.end = os.fstat(self.fd).st_size // size * size

    def request(self, connection: Bare, frame: memoryview) -> None:
        data = os.pread(self.fd, self.size, connection.at)
        connection.at = (connection.at + self.size) % self.end
        connection.transport.write(answer(bytes(frame[ID_AT]), len(data)))
        connection.transport.write(data)


class Answerer:
    """Has one answer for everything."""

    def __init__(self, size: int) -> None:
        self.body = bytes(max(0, size - ANSWER_HEADER.size))

    def request(self, connection: Bare, frame: memoryview) -> None:
        head = answer(bytes(frame[ID_AT]), len(self.body))
        connection.transport.write(head + self.body)


async def main() -> None:
    """Serve until standard input ends; the port is the first line of output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["append", "read", "answer"])
    parser.add_argument("path", nargs="?", default="")
    parser.add_argument("--policy", choices=["os", "ack"], default="os")
    parser.add_argument("--size", type=int, default=1 << 20)
    a = parser.parse_args()
    work: Appender | Reader | Answerer
    if a.mode == "append":
        work = Appender(a.path, a.policy)
    else:
        work = Reader(a.path, a.size) if a.mode == "read" else Answerer(a.size)
    loop = asyncio.get_running_loop()
    size = SMALL_BYTES if a.mode == "answer" else BUFFER_BYTES
    server = await loop.create_server(lambda: Bare(work.request, size), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
