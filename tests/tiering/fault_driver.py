"""A tiering service that gets a signal at a chosen step: the process behind `faults.DriverProcess`.

It is the real service with the real command line, and three things put into it: a trap that sends
the signal, a journal of its rounds that survives any death, and for most tests jobs that run in the
process itself instead of in Spark. Steps are those of `zufluss.tiering.round`; two more end where
the effect is there and the driver has not heard of it:

| step | the signal comes |
|---|---|
| `lake-commit+` | when the catalog has applied the commit |
| `server-commit+` | when the coordinator has |
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog

import zufluss.lake.iceberg.committer
import zufluss.lake.iceberg.maintenance  # imported here so that no fork has to
import zufluss.lake.iceberg.writer  # noqa: F401
from tests.tiering.support import InlineRunner
from zufluss.client.tiering import TieringClient
from zufluss.tiering import main as service_main
from zufluss.tiering.progress import LogProgress
from zufluss.tiering.round import STEPS, RoundLease, RoundResult

PR_SET_PDEATHSIG = 1
ORDERS = "ZUFLUSS_TEST_ORDERS"
"""The orders of a process with Spark, in its environment."""
KILL_POINTS = (*STEPS[:7], "lake-commit+", "server-commit", "server-commit+", "finish")


@dataclass(frozen=True)
class Orders:
    """The orders of a driver."""

    options: dict[str, str]
    """Its command line."""
    journal: str
    """The file it notes its rounds in."""
    step: str = ""
    """Where it gets the signal; empty for nowhere."""
    nth: int = 1
    """The how manieth time it comes there."""
    number: int = signal.SIGKILL
    """The signal; SIGKILL is for all of its process group."""
    spark: bool = False
    """Jobs run in Spark."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Trap:
    """Sends the signal when the step is reached."""

    orders: Orders
    seen: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, name: str) -> None:
        with self.lock:
            self.seen[name] += 1
            if name != self.orders.step or self.seen[name] != self.orders.nth:
                return
        if self.orders.number == signal.SIGKILL:
            os.killpg(0, signal.SIGKILL)
        else:  # to this thread, which otherwise might go on until another one takes the signal
            signal.pthread_kill(threading.get_ident(), self.orders.number)


class Journal(LogProgress):
    """Notes every round in a file, one write each."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _note(self, event: str, lease: RoundLease) -> None:
        table = lease.table
        note = {"event": event, "table": str(table.path), "epoch": table.tiering_epoch}
        note |= {"pid": os.getpid(), "at": time.monotonic()}
        os.write(self._file, json.dumps(note).encode() + b"\n")

    def began(self, lease: RoundLease) -> None:
        self._note("began", lease)
        super().began(lease)

    def finished(self, lease: RoundLease, result: RoundResult, seconds: float) -> None:
        self._note("committed" if result.committed else "idle", lease)
        super().finished(lease, result, seconds)

    def ended(self, lease: RoundLease, problem: Exception, seconds: float) -> None:
        self._note("ended", lease)
        super().ended(lease, problem, seconds)


def drive(orders: Orders) -> int:
    """Be the service; the exit code."""
    trap = Trap(orders)
    _trap_after(SqlCatalog, "commit_table", functools.partial(trap, "lake-commit+"))
    _trap_after(TieringClient, "commit", functools.partial(trap, "server-commit+"))
    service_main._shown = lambda _stack: Journal(orders.journal)
    if not orders.spark:
        service_main._runner = lambda _options, _stack: InlineRunner()  # type: ignore[assignment]
    return service_main.main([f"--{key}={value}" for key, value in orders.options.items()], trap)


def forked(orders: Orders, log: str) -> None:
    """Be the service in a fork, in a process group of its own, with its output in a file."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody survives the tests
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.exit(drive(orders))


def _trap_after(owner: type, name: str, trap: Callable[[], None]) -> None:
    """Come to the trap when a call had its effect."""
    real = getattr(owner, name)

    def call(*args: Any, **more: Any) -> Any:
        answer = real(*args, **more)
        trap()
        return answer

    setattr(owner, name, call)


if __name__ == "__main__":
    sys.exit(drive(Orders(**json.loads(os.environ[ORDERS]))))
