"""Produce requests of 1 KiB: latency and requests per second, against the bare server.

One request in flight per connection, so the latency is that of a client that waits. The bare
server writes the same frames into one file with the same sync policy; it checks and knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

import zufluss
from bench.report import Measure, compared
from bench.work import (
    UNCOMPRESSED,
    Load,
    Target,
    alternate,
    bare_server,
    check_count,
    encoded,
    new_table,
    produce_frames,
)
from zufluss.testing.server import DevServer

ROWS = 8
TEXT_BYTES = 76
"""Of each row, so that a request is 1 KiB."""
BUCKETS = 4
CONNECTIONS = (1, 16)


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """Both flush modes, one and sixteen connections."""
    seconds = 0.4 if quick else 0.8
    for policy in ("os", "ack"):
        data = directory / f"small-{policy}"
        with DevServer(data, {"zufluss.log.flush": policy}) as server:
            target = Target(server.bootstrap, (server.pid,))
            with zufluss.connect(server.bootstrap) as connection:
                for connections in CONNECTIONS:
                    loads = _alternate(
                        connection, target, directory, policy, connections, rounds, seconds
                    )
                    yield from _lines(policy, connections, *loads)
            server.stop()


def _alternate(
    connection: zufluss.Connection,
    target: Target,
    directory: Path,
    policy: str,
    connections: int,
    rounds: int,
    seconds: float,
) -> tuple[list[Load], list[Load]]:
    info = new_table(
        connection,
        f"small_{policy}_{connections}",
        "id BIGINT, text STRING",
        buckets=BUCKETS,
        properties=UNCOMPRESSED,
    )
    columns = {"id": list(range(ROWS)), "text": ["x" * TEXT_BYTES] * ROWS}
    batch = encoded(info, pa.record_batch(columns, schema=info.schema.arrow))
    frames = produce_frames(info, [batch] * 64)
    file = directory / "bare-small"
    with bare_server("append", str(file), "--policy", policy) as reference:
        answered = 0

        def ours_once() -> Load:
            nonlocal answered
            load = target.load(frames, connections=connections, seconds=seconds)
            answered += load.answered
            return load

        def bare_once() -> Load:
            return reference.load(frames, connections=connections, seconds=seconds)

        pids = (*target.pids, *reference.pids)
        ours, bare = alternate(rounds, pids, ours_once, bare_once)
    file.unlink()
    check_count(connection, info, ROWS * answered)
    return ours, bare


def _lines(policy: str, connections: int, ours: list[Load], bare: list[Load]) -> Iterator[Measure]:
    name = f"small.{policy}.{connections}"
    label = f"append 1 KiB × {connections}, flush={policy}"
    yield compared(name, label, [x.rps for x in ours], [x.rps for x in bare], "/s")
    for quantile in ("p50", "p99"):
        yield compared(
            f"{name}.{quantile}",
            f"{label}: {quantile}",
            [getattr(x, f"{quantile}_ms") for x in ours],
            [getattr(x, f"{quantile}_ms") for x in bare],
            "ms",
            less_is_better=True,
        )
    yield compared(
        f"{name}.cpu",
        f"{label}: server CPU",
        [x.cpu_seconds / x.answered * 1e6 for x in ours],
        [x.cpu_seconds / x.answered * 1e6 for x in bare],
        "µs",
        less_is_better=True,
    )
