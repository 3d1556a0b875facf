"""A load generator in one process: prepared frames out, answers counted and timed.

Run as `python -m bench.pump HOST:PORT FRAMES --connections N --window W --seconds S`. FRAMES is a
file of request frames back to back; each connection sends its share round and round (`--once`
stops after all frames were sent once), keeping W requests in flight. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import struct
import time
from pathlib import Path


class Stream:
    """One connection with its share of the frames."""

    def __init__(self, address: tuple[str, int], frames: list[bytes], window: int) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frames = frames
        self.window = window
        self.next = 0
        self.sent_at: list[float] = []
        self.pending = b""

    def send(self, count: int) -> None:
        now = time.perf_counter()
        frames = self.frames
        if count == 1:
            self.socket.sendall(frames[self.next % len(frames)])
        else:
            chosen = (frames[(self.next + i) % len(frames)] for i in range(count))
            self.socket.sendall(b"".join(chosen))
        self.next += count
        self.sent_at += [now] * count

    def receive(self, latencies: list[float]) -> tuple[int, int, int]:
        """Answers taken, bytes of them, errors among them."""
        data = self.pending + self.socket.recv(1 << 20)
        now = time.perf_counter()
        taken = size = errors = pos = 0
        while len(data) - pos >= 5:
            (length,) = struct.unpack_from(">i", data, pos)
            if len(data) - pos < 4 + length:
                break
            errors += data[pos + 4] != 0
            latencies.append(now - self.sent_at[taken])
            pos += 4 + length
            size += 4 + length
            taken += 1
        del self.sent_at[:taken]
        self.pending = data[pos:]
        return taken, size, errors


def split_frames(data: bytes) -> list[bytes]:
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
    once: bool,
) -> dict[str, float]:
    streams = [Stream(address, frames[i::connections], window) for i in range(connections)]
    by_fd = {s.socket.fileno(): s for s in streams}
    poller = select.epoll()
    for fd in by_fd:
        poller.register(fd, select.EPOLLIN)
    latencies: list[float] = []
    answered = size = errors = 0
    began = time.perf_counter()
    end = began + seconds
    for s in streams:
        s.send(min(window, len(s.frames)) if once else window)
    outstanding = sum(len(s.sent_at) for s in streams)
    while outstanding:
        for fd, _ in poller.poll():
            s = by_fd[fd]
            taken, got, bad = s.receive(latencies)
            answered, size, errors = answered + taken, size + got, errors + bad
            outstanding -= taken
            more = min(taken, len(s.frames) - s.next) if once else taken
            if more > 0 and time.perf_counter() < end:
                s.send(more)
                outstanding += more
    took = time.perf_counter() - began
    latencies.sort()
    return {
        "answered": answered,
        "errors": errors,
        "bytes_in": size,
        "seconds": took,
        "rps": answered / took,
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("frames")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--once", action="store_true")
    a = parser.parse_args()
    host, port = a.address.rsplit(":", 1)
    frames = split_frames(Path(a.frames).read_bytes())
    result = pump((host, int(port)), frames, a.connections, a.window, a.seconds, a.once)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
