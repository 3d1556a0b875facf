"""Memory of the server: at rest, per idle connection, per bucket.

Differences of its resident memory while connections come that say hello and wait, while buckets of
new tables are made, and while one small batch is written to each of them (which opens its files).
The first half of each kind only fills the memory the process has to spare and is not counted.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

import zufluss
from bench.report import Measure
from bench.work import (
    UNCOMPRESSED,
    Target,
    check_count,
    encoded,
    new_table,
    produce_frames,
    rss_bytes,
)
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.frame import pack_request

CONNECTIONS = 4_000
TABLES = 8
BUCKETS = 500


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """One server, three differences."""
    with (
        DevServer(directory / "memory", {"zufluss.log.flush": "os"}) as server,
        zufluss.connect(server.bootstrap) as connection,
    ):
        target = Target(server.bootstrap, (server.pid,))
        _fill(connection, target, "warm", 4)
        rest = rss_bytes(target.pids)
        yield Measure(
            "memory.rest",
            "server memory, one table",
            f"{rest / 1e6:.0f} MB",
            value=rest / 1024,
            unit="KiB",
            less_is_better=True,
        )
        yield _connections(target)
        yield from _buckets(connection, target)


def _line(name: str, label: str, difference: int, count: int) -> Measure:
    each = difference / count / 1024
    return Measure(
        name, label, f"{each:.1f} KiB", f"({count} of them)", each, "KiB", less_is_better=True
    )


def _connections(target: Target) -> Measure:
    host, port = target.address.rsplit(":", 1)
    hello = m.ApiVersionsRequest(client_software_name="bench", client_software_version="1")
    frame = pack_request(ApiKey.API_VERSIONS, 0, 1, hello.SerializeToString())
    opened = []
    for i in range(2 * CONNECTIONS):
        if i == CONNECTIONS:
            before = rss_bytes(target.pids)
        sock = socket.create_connection((host, int(port)))
        opened.append(sock)
        sock.sendall(frame)
        (length,) = struct.unpack(">i", sock.recv(4, socket.MSG_WAITALL))
        sock.recv(length, socket.MSG_WAITALL)
    after = rss_bytes(target.pids)
    for sock in opened:
        sock.close()
    label = "server memory per idle connection"
    return _line("memory.connection", label, after - before, CONNECTIONS)


def _buckets(connection: zufluss.Connection, target: Target) -> Iterator[Measure]:
    infos = []
    for i in range(2 * TABLES):
        if i == TABLES:
            before = rss_bytes(target.pids)
        infos.append(_table(connection, f"wide_{i}", BUCKETS))
    created = rss_bytes(target.pids)
    count = TABLES * BUCKETS
    yield _line("memory.bucket", "server memory per empty bucket", created - before, count)
    for i, info in enumerate(infos):
        if i == TABLES:
            half = rss_bytes(target.pids)
        _append(connection, target, info)
    opened = rss_bytes(target.pids) - half
    label = "server memory per bucket being written"
    yield _line("memory.open_bucket", label, created - before + opened, count)


def _table(connection: zufluss.Connection, name: str, buckets: int):
    return new_table(
        connection, name, "id BIGINT, text STRING", buckets=buckets, properties=UNCOMPRESSED
    )


def _append(connection: zufluss.Connection, target: Target, info) -> None:
    rows = pa.record_batch({"id": [1], "text": ["x" * 100]}, schema=info.schema.arrow)
    frames = produce_frames(info, [encoded(info, rows)])
    target.load(frames, count=len(frames))
    check_count(connection, info, len(frames))


def _fill(connection: zufluss.Connection, target: Target, name: str, buckets: int) -> None:
    _append(connection, target, _table(connection, name, buckets))
