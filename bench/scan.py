"""Fetch of a whole log, against a bare server that sends the same bytes of a file.

One connection, two requests in flight, each answered with four batches of 1 MiB. Then one column
of ten: how many bytes move, and how fast the rows come. The limit of a request counts the bytes
that are sent, so requests for one column have a smaller one: both get four batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import zufluss
from bench.report import Measure, compared, number
from bench.work import (
    ROWS_1MIB,
    UNCOMPRESSED,
    Target,
    alternate,
    bare_server,
    check_count,
    encoded,
    fetch_frames,
    new_table,
    produce_frames,
    ten_columns,
)
from zufluss.testing.server import DevServer

GOAL = 0.6
GOAL_PROJECTED = 0.2
BATCHES_PER_FETCH = 4
WINDOW = 2
COLUMN = 3
"""One column of ten, 8 of the 87 bytes of a row."""


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """All columns, one column."""
    count = 128 if quick else 256
    with DevServer(directory / "scan", {"zufluss.log.flush": "os"}) as server:
        target = Target(server.bootstrap, (server.pid,))
        with zufluss.connect(server.bootstrap) as connection:
            info = new_table(connection, "scan", properties=UNCOMPRESSED)
            batch = encoded(info, ten_columns(ROWS_1MIB))
            target.load(produce_frames(info, [batch]), window=4, count=count)
            check_count(connection, info, count * ROWS_1MIB)
        size = BATCHES_PER_FETCH * len(batch)
        offsets = range(0, count * ROWS_1MIB, BATCHES_PER_FETCH * ROWS_1MIB)
        everything = fetch_frames(info, offsets, size)
        one = target.load(fetch_frames(info, [0], 1, [COLUMN]), window=1, count=1).bytes_in
        projected = fetch_frames(info, offsets, BATCHES_PER_FETCH * one, [COLUMN])
        file = directory / "bare-scan"
        with file.open("wb") as out:
            for _ in range(count):
                out.write(batch)
        yield from _measure(target, file, size, everything, projected, rounds)
        file.unlink()
        server.stop()


def _measure(
    target: Target,
    file: Path,
    size: int,
    everything: list[bytes],
    projected: list[bytes],
    rounds: int,
) -> Iterator[Measure]:
    count = len(everything)
    with bare_server("read", str(file), "--size", str(size)) as reader:
        bare, full, narrow = alternate(
            rounds,
            (*target.pids, *reader.pids),
            lambda: reader.load(everything, window=WINDOW, count=count),
            lambda: target.load(everything, window=WINDOW, count=count),
            lambda: target.load(projected, window=WINDOW, count=count),
        )
    if full[0].bytes_in < count * size:
        raise RuntimeError(f"fetched {full[0].bytes_in} bytes, there are {count * size}")
    rate = lambda loads: [x.bytes_in / 1e6 / x.seconds for x in loads]  # noqa: E731
    cpu = lambda loads: [x.cpu_seconds / (count * size / 1e9) for x in loads]  # noqa: E731
    yield compared("scan.all", "fetch, all columns", rate(full), rate(bare), "MB/s", at_least=GOAL)
    yield compared(
        "scan.all.cpu",
        "fetch, all columns: server CPU",
        cpu(full),
        cpu(bare),
        "s/GB",
        less_is_better=True,
    )
    share = narrow[0].bytes_in / full[0].bytes_in
    yield Measure(
        "scan.projected.bytes",
        "fetch, 1 of 10 columns: bytes moved",
        f"{number(narrow[0].bytes_in / 1e6)} MB",
        f"{number(full[0].bytes_in / 1e6)} MB (all columns)",
        share,
        at_most=GOAL_PROJECTED,
    )
    rows = count * BATCHES_PER_FETCH * ROWS_1MIB
    yield compared(
        "scan.projected.rows",
        "fetch, 1 of 10 columns: rows",
        [rows / x.seconds for x in narrow],
        [statistics.median(rows / x.seconds for x in full)] * len(narrow),
        " rows/s",
    )
