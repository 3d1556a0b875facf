"""Our client against pyfluss, on the same server: what a user of either sees.

Each client lives in a process of its own (`bench.client_worker`) over all rounds; they take turns.
Ten columns, batches of 50,000 rows, four buckets; `flush=os`, because the disk is not the question.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zufluss
from bench.report import Measure, compared
from bench.work import ROOT, UNCOMPRESSED, check_count, new_table
from zufluss.testing.server import DevServer

GOAL = 1.0
BUCKETS = 4
BATCH_ROWS = 50_000
SINGLE_ROWS = 20_000


class Worker:
    """A client process."""

    def __init__(self, library: str, bootstrap: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.client_worker", library, bootstrap],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ,
        )

    def do(self, **work: Any) -> float:
        """Have some work done; the seconds it took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client worker ended with {self.process.wait()} during {work}")
        return float(line)

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


class Case(NamedTuple):
    """A kind of table, and what is measured with it."""

    name: str
    """Prefix of the measures."""
    label: str
    """The same for people."""
    bucket_keys: tuple[str, ...] = ()
    """Bucket keys of the table."""
    properties: dict[str, str] | None = None
    """Properties of the table."""


CASES = (
    Case("client", ""),
    Case("client.plain", ", uncompressed", properties=UNCOMPRESSED),
    Case("client.keyed", ", bucket key", ("id",)),
)


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """Append and scan through both clients."""
    batches = 12 if quick else 40
    with (
        DevServer(directory / "clients", {"zufluss.log.flush": "os"}) as server,
        zufluss.connect(server.bootstrap) as connection,
    ):
        workers = [Worker(library, server.bootstrap) for library in ("zufluss", "pyfluss")]
        try:
            for case in CASES:
                yield from _case(connection, workers, case, batches, rounds)
            yield _single_rows(connection, workers, rounds)
        finally:
            for worker in workers:
                worker.close()


def _case(
    connection: zufluss.Connection, workers: list[Worker], case: Case, batches: int, rounds: int
) -> Iterator[Measure]:
    count = batches * BATCH_ROWS
    kinds = ["append", "scan", *(["scan_2"] if case.name == "client" else [])]
    taken: dict[str, list[list[float]]] = {kind: [[], []] for kind in kinds}
    for i in range(rounds + 1):  # the first round is the warm-up
        for side in (0, 1) if i % 2 else (1, 0):
            name = f"{case.name.replace('.', '_')}_{i}_{side}"
            info = new_table(
                connection,
                name,
                buckets=BUCKETS,
                bucket_keys=case.bucket_keys,
                properties=case.properties,
            )
            seconds = workers[side].do(do="append", table=name, rows=BATCH_ROWS, batches=batches)
            check_count(connection, info, count)
            taken["append"][side].append(seconds)
            if side == 0:
                scanned = info, name
        info, name = scanned
        for kind in kinds[1:]:
            for side in (0, 1) if i % 2 else (1, 0):
                columns = ["id", "c"] if kind == "scan_2" else None
                seconds = workers[side].do(do="scan", table=name, columns=columns, expect=count)
                taken[kind][side].append(seconds)
        for side in (0, 1):
            connection.admin.drop_table(f"fluss.{case.name.replace('.', '_')}_{i}_{side}")
    labels = {"append": "append", "scan": "scan", "scan_2": "scan of 2 of 10 columns"}
    for kind in kinds:
        ours, theirs = ([count / s for s in side[1:]] for side in taken[kind])
        label = f"client {labels[kind]}{case.label}, against pyfluss"
        yield compared(f"{case.name}.{kind}", label, ours, theirs, " rows/s", at_least=GOAL)


def _single_rows(connection: zufluss.Connection, workers: list[Worker], rounds: int) -> Measure:
    rates: list[list[float]] = [[], []]
    for i in range(rounds + 1):
        for side in (0, 1):
            name = f"single_{i}_{side}"
            info = new_table(connection, name, buckets=BUCKETS)
            seconds = workers[side].do(do="append_rows", table=name, rows=SINGLE_ROWS)
            check_count(connection, info, SINGLE_ROWS)
            rates[side].append(SINGLE_ROWS / seconds)
            connection.admin.drop_table(info.path)
    return compared(
        "client.append_rows",
        "client append, row by row, against pyfluss",
        rates[0][1:],
        rates[1][1:],
        " rows/s",
        at_least=GOAL,
    )
