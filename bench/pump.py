"""The load generator: prepared frames out, answers counted and timed.

Each connection sends its share of the frames round and round and keeps a window of requests in
flight, until the time is up or a number of requests were sent. Answers are counted by the length in
their header and thrown away; whether the server really took the data is for the caller to ask.

Sending and receiving is one compiled loop around `poll`, `send` and `recv` of the C library: a loop
in Python would be slower than the servers it is to measure. It runs as a process that takes one
JSON object per line and answers with another, so that it is started once for many measurements:

    {"address": "127.0.0.1:9123", "frames": FILE, "connections": 16, "window": 1, "seconds": 5.0}

`frames` is a file of request frames back to back; `count` is the number of requests, if limited.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

RECEIVE_BYTES = 4 << 20
LATENCIES_MAX = 4_000_000
CLOCK_MONOTONIC = 1
POLLIN = 1
DONT_WAIT = 0x40
HEADER_BYTES = 5
"""Of an answer: its length, and whether it is an error."""
NEVER = np.int64(1 << 62)

_poll = types.ExternalFunction("poll", types.int32(types.uintp, types.uint64, types.int32))
_send = types.ExternalFunction(
    "send", types.int64(types.int32, types.uintp, types.uint64, types.int32)
)
_recv = types.ExternalFunction(
    "recv", types.int64(types.int32, types.uintp, types.uint64, types.int32)
)
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))


@njit(cache=True)
def now_ns(timespec):
    """The monotonic clock; `timespec` is room for two integers."""
    _clock(CLOCK_MONOTONIC, timespec.ctypes.data)
    return timespec[0] * 1_000_000_000 + timespec[1]


@njit(cache=True)
def send_next(c, fds, data, starts, sizes, next_frame, sent_at, sent, timespec):
    """Send the next frame of connection `c`, as long as it takes; False when that is gone."""
    frame = next_frame[c]
    following = frame + fds.size
    next_frame[c] = following if following < starts.size else c
    sent_at[c, sent[c] % sent_at.shape[1]] = now_ns(timespec)
    sent[c] += 1
    at, end = starts[frame], starts[frame] + sizes[frame]
    while at < end:
        n = _send(fds[c], data.ctypes.data + at, end - at, 0)
        if n <= 0:
            return False
        at += n
    return True


@njit(cache=True)
def take_header(c, byte, head, filled):
    """One more byte of an answer's header: the bytes that follow it, 0 until it is whole."""
    head[c, filled[c]] = byte
    filled[c] += 1
    if filled[c] < HEADER_BYTES:
        return 0
    filled[c] = 0
    length = np.int64(0)
    for i in range(4):
        length = length << 8 | np.int64(head[c, i])
    return length - 1


@njit(cache=True)
def drive(fds, data, starts, sizes, window, duration_ns, count, latencies):
    """Send and receive; returns answered (-1: a connection was closed), bytes, errors, time in ns.

    Connection c sends the frames c, c + n, c + 2n, … of n connections.
    """
    n = fds.size
    timespec = np.zeros(2, np.int64)
    buffer = np.empty(RECEIVE_BYTES, np.uint8)
    polled = np.empty((n, 2), np.int32)
    polled[:, 0] = fds
    sent_at = np.empty((n, window), np.int64)
    next_frame = np.arange(n)
    sent, got, rest = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    head, head_filled = np.zeros((n, HEADER_BYTES), np.uint8), np.zeros(n, np.int64)
    total = answered = received = errors = 0
    began = now_ns(timespec)
    for c in range(n):
        for _ in range(min(window, count - total)):
            if not send_next(c, fds, data, starts, sizes, next_frame, sent_at, sent, timespec):
                return -1, 0, 0, 0
            total += 1
    while answered < total:
        polled[:, 1] = POLLIN
        _poll(polled.ctypes.data, n, -1)
        for c in range(n):
            if polled[c, 1] >> 16 == 0:
                continue
            size = _recv(fds[c], buffer.ctypes.data, buffer.size, DONT_WAIT)
            if size <= 0:
                return -1, 0, 0, 0
            now = now_ns(timespec)
            received += size
            pos = 0
            while pos < size:
                if rest[c] == 0:
                    rest[c] = take_header(c, buffer[pos], head, head_filled)
                    errors += rest[c] > 0 and buffer[pos] != 0
                    pos += 1
                    continue
                step = min(rest[c], size - pos)
                pos += step
                rest[c] -= step
                if rest[c] > 0:
                    continue
                if answered < latencies.size:
                    latencies[answered] = now - sent_at[c, got[c] % window]
                answered += 1
                got[c] += 1
                if total < count and now - began < duration_ns:
                    if not send_next(
                        c, fds, data, starts, sizes, next_frame, sent_at, sent, timespec
                    ):
                        return -1, 0, 0, 0
                    total += 1
    return answered, received, errors, now_ns(timespec) - began


def split_frames(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Where the frames of a file start, and their sizes."""
    starts, sizes, pos = [], [], 0
    while pos < len(data):
        size = 4 + struct.unpack_from(">i", data, pos)[0]
        starts.append(pos)
        sizes.append(size)
        pos += size
    return np.array(starts, np.int64), np.array(sizes, np.int64)


def pump(
    address: str,
    frames: str,
    connections: int = 1,
    window: int = 1,
    seconds: float | None = None,
    count: int | None = None,
) -> dict[str, Any]:
    """One measurement."""
    host, port = address.rsplit(":", 1)
    data = Path(frames).read_bytes()
    starts, sizes = split_frames(data)
    latencies = np.zeros(LATENCIES_MAX, np.int64)
    sockets = [socket.create_connection((host, int(port))) for _ in range(connections)]
    for sock in sockets:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fds = np.array([sock.fileno() for sock in sockets], np.int32)
    duration = NEVER if seconds is None else np.int64(seconds * 1e9)
    limit = NEVER if count is None else np.int64(count)
    array = np.frombuffer(data, np.uint8)
    answered, received, errors, nanoseconds = drive(
        fds, array, starts, sizes, window, duration, limit, latencies
    )
    for sock in sockets:
        sock.close()
    if answered < 0:
        raise ConnectionError(f"{address} closed a connection")
    taken = latencies[: min(answered, latencies.size)] / 1e6
    return {
        "answered": int(answered),
        "errors": int(errors),
        "bytes_in": int(received),
        "seconds": nanoseconds / 1e9,
        "p50_ms": float(np.percentile(taken, 50)),
        "p99_ms": float(np.percentile(taken, 99)),
    }


def main() -> None:
    """Measure what standard input asks for."""
    for line in sys.stdin:
        print(json.dumps(pump(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
