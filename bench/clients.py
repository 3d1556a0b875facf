"""Our client against pyfluss, on the same server: what a user of either sees.

Each client lives in a process of its own (`bench.client_worker`) over all rounds; they take turns.
Ten columns, batches of 50,000 rows, four buckets; `flush=os`, because the disk is not the question.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zufluss
from bench.report import Measure, compared
from bench.work import ROOT, UNCOMPRESSED, alternate, check_count, new_table
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
    batches = 10 if quick else 24
    with (
        DevServer(directory / "clients", {"zufluss.log.flush": "os"}) as server,
        zufluss.connect(server.bootstrap) as connection,
    ):
        workers = [Worker(library, server.bootstrap) for library in ("zufluss", "pyfluss")]
        try:
            pids = [server.pid, *(worker.process.pid for worker in workers)]
            for case in CASES:
                yield from _case(connection, workers, pids, case, batches, rounds)
            yield _single_rows(connection, workers, pids, rounds)
        finally:
            for worker in workers:
                worker.close()


def _case(
    connection: zufluss.Connection,
    workers: list[Worker],
    pids: list[int],
    case: Case,
    batches: int,
    rounds: int,
) -> Iterator[Measure]:
    count = batches * BATCH_ROWS
    prefix = case.name.replace(".", "_")
    tables = []

    def append(worker: Worker) -> float:
        name = f"{prefix}_{len(tables)}"
        info = new_table(
            connection,
            name,
            buckets=BUCKETS,
            bucket_keys=case.bucket_keys,
            properties=case.properties,
        )
        tables.append(name)
        seconds = worker.do(do="append", table=name, rows=BATCH_ROWS, batches=batches)
        check_count(connection, info, count)
        if len(tables) > 1:
            connection.admin.drop_table(f"fluss.{tables[-2]}")
        return count / seconds

    def scan(worker: Worker, columns: list[str] | None) -> float:
        return count / worker.do(do="scan", table=tables[-1], columns=columns, expect=count)

    works: dict[str, Callable[[Worker], float]] = {
        "append": append,
        "scan": lambda worker: scan(worker, None),
    }
    if case.name == "client":
        works["scan of 2 of 10 columns"] = lambda worker: scan(worker, ["id", "c"])
    for what, work in works.items():
        sides = [lambda worker=worker, work=work: work(worker) for worker in workers]
        ours, theirs = alternate(rounds, pids, *sides)
        name = f"{case.name}.{what.replace(' ', '_')}"
        label = f"client {what}{case.label}, against pyfluss"
        yield compared(name, label, ours, theirs, " rows/s", at_least=GOAL)
    connection.admin.drop_table(f"fluss.{tables[-1]}")


def _single_rows(
    connection: zufluss.Connection, workers: list[Worker], pids: list[int], rounds: int
) -> Measure:
    info = new_table(connection, "single", buckets=BUCKETS)
    sides = [
        lambda worker=worker: (
            SINGLE_ROWS / worker.do(do="append_rows", table="single", rows=SINGLE_ROWS)
        )
        for worker in workers
    ]
    ours, theirs = alternate(rounds, pids, *sides)
    check_count(connection, info, 2 * SINGLE_ROWS * (rounds + 1))
    label = "client append, row by row, against pyfluss"
    return compared("client.append_rows", label, ours, theirs, " rows/s", at_least=GOAL)
