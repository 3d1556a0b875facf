"""Append of 1 MiB batches, against a bare server that writes the same bytes.

Both sides get the same frames from the same pump: one connection, four requests in flight, one
file (one bucket). `ack` waits for an fdatasync that the requests in flight share, `os` leaves it to
the kernel. Rounds alternate, and before each one the same amount of memory is freed afresh.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import zufluss
from bench.report import Measure, compared
from bench.work import (
    ROWS_1MIB,
    UNCOMPRESSED,
    Load,
    Target,
    alternate,
    bare_server,
    check_count,
    encoded,
    new_table,
    produce_frames,
    recycle_pages,
    ten_columns,
)
from zufluss.model.table import TableInfo
from zufluss.testing.server import DevServer

GOAL = 0.6
WINDOW = 4


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """Both flush modes."""
    for policy in ("os", "ack"):
        data = directory / f"append-{policy}"
        with DevServer(data, {"zufluss.log.flush": policy}) as server:
            with zufluss.connect(server.bootstrap) as connection:
                side = Ours(connection, Target(server.bootstrap, (server.pid,)), directory)
                yield from _policy(side, policy, rounds, 32 if quick else 64)
            server.stop()


class Ours:
    """Our side: a table per round, so that each one starts with an empty log."""

    def __init__(self, connection: zufluss.Connection, target: Target, directory: Path) -> None:
        self.connection = connection
        self.target = target
        self.directory = directory
        self.round = 0
        rows = [ten_columns(ROWS_1MIB, i * ROWS_1MIB) for i in range(8)]
        info = self.new_table()
        self.batches = [encoded(info, batch) for batch in rows]
        self.drop(info)

    def new_table(self) -> TableInfo:
        """The table of the next round."""
        self.round += 1
        return new_table(self.connection, f"append_{self.round}", properties=UNCOMPRESSED)

    def drop(self, info: TableInfo) -> None:
        """Give the disk back."""
        self.connection.admin.drop_table(info.path)

    def load(self, count: int) -> Load:
        """One round."""
        info = self.new_table()
        frames = produce_frames(info, self.batches)
        recycle_pages(self.directory, count << 20)
        load = self.target.load(frames, window=WINDOW, count=count)
        check_count(self.connection, info, count * ROWS_1MIB)
        self.drop(info)
        return load

    def load_bare(self, target: Target, file: Path, count: int) -> Load:
        """The same frames on the bare server."""
        info = self.new_table()
        frames = produce_frames(info, self.batches)
        os.truncate(file, 0)
        recycle_pages(self.directory, count << 20)
        load = target.load(frames, window=WINDOW, count=count)
        self.drop(info)
        return load


def _policy(side: Ours, policy: str, rounds: int, count: int) -> Iterator[Measure]:
    file = side.directory / "bare-append"
    size = len(side.batches[0])
    with bare_server("append", str(file), "--policy", policy) as target:
        ours, bare = alternate(
            rounds,
            (*side.target.pids, *target.pids),
            lambda: side.load(count),
            lambda: side.load_bare(target, file, count),
        )
    file.unlink()
    rate = lambda loads: [x.rps * size / 1e6 for x in loads]  # noqa: E731
    label = f"append 1 MiB, flush={policy}"
    yield compared(f"append.{policy}", label, rate(ours), rate(bare), "MB/s", at_least=GOAL)
    yield compared(
        f"append.{policy}.cpu",
        f"{label}: server CPU",
        [x.cpu_seconds / (x.answered * size / 1e9) for x in ours],
        [x.cpu_seconds / (x.answered * size / 1e9) for x in bare],
        "s/GB",
        less_is_better=True,
    )
