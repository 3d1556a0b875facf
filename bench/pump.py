"""A load generator in one process: prepared frames out, answers counted and timed.

FRAMES is a file of request frames back to back. Each connection sends its share of them round and
round and keeps W requests in flight, until the time is up or COUNT requests were sent in all.
Prints one JSON line. Answers are counted by the length in their header and thrown away; whether
the server really took the data is for the caller to ask.

    python -m bench.pump 127.0.0.1:9123 FRAMES --connections 16 --window 1 --seconds 5
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import struct
import time
from collections import deque
from pathlib import Path

HEADER = struct.Struct(">iB")
RECEIVE_BYTES = 4 << 20


class Stream:
    """One connection with its share of the frames."""

    def __init__(self, address: tuple[str, int], frames: list[bytes]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frames = frames
        self.next = 0
        self.sent_at: deque[float] = deque()
        self.head = b""
        """The begin of an answer whose header has not arrived whole."""
        self.rest = 0
        """Bytes of the current answer that have not arrived."""

    def send(self, count: int) -> None:
        """Send the next frames."""
        for _ in range(count):
            self.sent_at.append(time.perf_counter())
            self.socket.sendall(self.frames[self.next])
            self.next = (self.next + 1) % len(self.frames)

    def receive(self, buffer: memoryview, latencies: list[float]) -> tuple[int, int, int]:
        """Answers taken, bytes received, errors among the answers."""
        size = self.socket.recv_into(buffer)
        if not size:
            raise SystemExit("the server closed the connection")
        now = time.perf_counter()
        data = buffer[:size]
        if self.head:
            data, self.head = memoryview(self.head + data), b""
        taken = errors = pos = 0
        while pos < len(data):
            if not self.rest:
                if len(data) - pos < HEADER.size:
                    self.head = bytes(data[pos:])
                    break
                length, kind = HEADER.unpack_from(data, pos)
                errors += kind != 0
                self.rest = 4 + length
            step = min(self.rest, len(data) - pos)
            pos += step
            self.rest -= step
            if not self.rest:
                latencies.append(now - self.sent_at.popleft())
                taken += 1
        return taken, size, errors


def split_frames(data: bytes) -> list[bytes]:
    """The frames of a file."""
    frames, pos = [], 0
    while pos < len(data):
        (length,) = struct.unpack_from(">i", data, pos)
        frames.append(data[pos : pos + 4 + length])
        pos += 4 + length
    return frames


def pump(
    address: tuple[str, int],
    frames: list[bytes],
    connections: int,
    window: int,
    seconds: float,
    count: int | None,
) -> dict[str, float]:
    """Send, receive, measure."""
    streams = [Stream(address, frames[i::connections]) for i in range(connections)]
    by_fd = {s.socket.fileno(): s for s in streams}
    poller = select.epoll()
    for fd in by_fd:
        poller.register(fd, select.EPOLLIN)
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    latencies: list[float] = []
    size = errors = sent = 0
    left = count if count is not None else 1 << 62
    began = time.perf_counter()
    end = began + seconds
    for s in streams:
        burst = min(window, left - sent)
        s.send(burst)
        sent += burst
    while len(latencies) < sent:
        for fd, _ in poller.poll():
            taken, got, bad = by_fd[fd].receive(buffer, latencies)
            size, errors = size + got, errors + bad
            more = min(taken, left - sent)
            if more and time.perf_counter() < end:
                by_fd[fd].send(more)
                sent += more
    took = time.perf_counter() - began
    latencies.sort()
    return {
        "answered": len(latencies),
        "errors": errors,
        "bytes_in": size,
        "seconds": took,
        "rps": len(latencies) / took,
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
    }


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("frames")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--count", type=int)
    a = parser.parse_args()
    host, port = a.address.rsplit(":", 1)
    frames = split_frames(Path(a.frames).read_bytes())
    result = pump((host, int(port)), frames, a.connections, a.window, a.seconds, a.count)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
