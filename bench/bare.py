"""The machine's own limit: a bare asyncio server that moves the same bytes and knows nothing.

* `append`: receives frames, writes each body to a file, answers with a few bytes; with `ack` the
  answer waits for an fdatasync that all frames in flight share, with `os` it does not.
* `read`: for each frame, `pread`s the next BYTES of a file and sends them as the answer.

No checksum, no checks, no offsets, no index. What zufluss adds to this is the ratio `make bench`
prints.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import struct
import sys

import uvloop


class Bare(asyncio.BufferedProtocol):
    def __init__(self, server: Server) -> None:
        self.server = server
        self.buffer = bytearray(4 << 20)
        self.view = memoryview(self.buffer)
        self.filled = 0
        self.at = 0

    def connection_made(self, transport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int):
        return self.view[self.filled :]

    def buffer_updated(self, n: int) -> None:
        self.filled += n
        pos = 0
        while self.filled - pos >= 4:
            (length,) = struct.unpack_from(">i", self.buffer, pos)
            if self.filled - pos < 4 + length:
                break
            self.server.request(self, self.view[pos + 4 : pos + 4 + length])
            pos += 4 + length
        rest = self.filled - pos
        if pos and rest:
            self.view[:rest] = bytes(self.view[pos : self.filled])
        self.filled = rest


ANSWER = struct.pack(">iBi", 13, 0, 0) + b"\x0a\x06\x10\x00\x28\x00\x00\x00"


class Server:
    def __init__(self, mode: str, policy: str, path: str, size: int) -> None:
        self.mode, self.policy, self.size = mode, policy, size
        flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if mode == "append" else 0)
        self.fd = os.open(path, flags)
        self.end = os.fstat(self.fd).st_size
        self.position = 0
        self.waiting: list[Bare] = []
        self.syncing = False

    def request(self, connection: Bare, body: memoryview) -> None:
        if self.mode == "read":
            data = os.pread(self.fd, self.size, connection.at)
            connection.at = connection.at + self.size if connection.at + self.size < self.end else 0
            header = struct.pack(">iBi", 5 + len(data), 0, 0)
            connection.transport.writelines([header, data])
            return
        os.pwrite(self.fd, body, self.position)
        self.position += len(body)
        if self.policy == "os":
            connection.transport.write(ANSWER)
        else:
            self.waiting.append(connection)
            if not self.syncing:
                self.syncing = True
                asyncio.get_running_loop().call_soon(self.sync)

    def sync(self) -> None:
        batch, self.waiting = self.waiting, []
        future = asyncio.get_running_loop().run_in_executor(None, os.fdatasync, self.fd)
        future.add_done_callback(lambda _: self.synced(batch))

    def synced(self, batch: list[Bare]) -> None:
        for connection in batch:
            connection.transport.write(ANSWER)
        if self.waiting:
            self.sync()
        else:
            self.syncing = False


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["append", "read"])
    parser.add_argument("path")
    parser.add_argument("--policy", choices=["os", "ack"], default="os")
    parser.add_argument("--size", type=int, default=1 << 20)
    a = parser.parse_args()
    state = Server(a.mode, a.policy, a.path, a.size)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Bare(state), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
