"""The tiering service: one resident process that moves tables into the lake, round by round.

The enumerator's thread receives tables and puts them into a queue; a few table workers take them
from there, each with one round at a time. A round is one Spark job, so tables in parallel share the
cores. Several services may run beside each other; the coordinator gives each table to one of them.

Stopping is graceful: the service takes no new tables, gives running rounds a limited time, cancels
the rest, and reports them as failed so that another service can take their tables at once.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from zufluss.client.sync.connection import Connection
from zufluss.client.tiering import TieringClient, TieringStats
from zufluss.obs.endpoint import ProbeAnswer
from zufluss.obs.pulse import ALIVE, READY, STUCK, UNREADY
from zufluss.tiering import options as o
from zufluss.tiering.enumerator import Enumerator
from zufluss.tiering.progress import LogProgress, Progress
from zufluss.tiering.round import (
    Cluster,
    OnStep,
    RoundEndedError,
    RoundLease,
    RoundResult,
    TieringRound,
)
from zufluss.tiering.runner import JobRunner
from zufluss.tiering.upkeep import Upkeep

_log = structlog.get_logger("zufluss.tiering")

CANCEL_SECONDS: Final = 10.0
"""How long a cancelled round may take to end."""
CANCEL_STEP_SECONDS: Final = 0.2


def no_step(name: str) -> None:
    """The `on_step` that does nothing."""


class TieringService:
    """Runs rounds until it is stopped; calls `failed` if the Spark session is gone."""

    def __init__(
        self,
        connection: Connection,
        runner: JobRunner,
        options: o.TieringOptions,
        *,
        progress: Progress | None = None,
        on_step: OnStep = no_step,
        failed: Callable[[str], None] | None = None,
    ) -> None:
        tiering = TieringClient(connection)
        self._cluster = Cluster(connection, tiering, runner, options)
        self._runner = runner
        self._options = options
        self._progress = progress or LogProgress()
        self._on_step = on_step
        self._failed = failed
        self._upkeep = Upkeep(self._cluster)
        self._stopping = False
        self._queue: queue.SimpleQueue[RoundLease | None] = queue.SimpleQueue()
        self._enumerator = Enumerator(tiering, options, self._queue.put, self._cancel)
        self._workers = [
            runner.thread(self._work, f"tiering-{number}")
            for number in range(options[o.PARALLEL_TABLES])
        ]

    def health(self) -> ProbeAnswer:
        """Whether the threads of the service run. Without its Spark session the process ends."""
        running = self._enumerator.alive and all(worker.is_alive() for worker in self._workers)
        if running or self._stopping:
            return ProbeAnswer(True, ALIVE)
        return ProbeAnswer(False, STUCK, ("threads of the service have ended",))

    def ready(self) -> ProbeAnswer:
        """Whether the service gets tables from the coordinator."""
        problems = tuple(self._enumerator.problems())
        if problems:
            return ProbeAnswer(False, UNREADY, problems)
        health = self.health()
        return ProbeAnswer(True, READY) if health.ok else health

    def start(self) -> None:
        """Start to tier tables."""
        for worker in self._workers:
            worker.start()
        self._enumerator.start()

    def stop(self) -> None:
        """Stop gracefully; returns when all rounds are reported."""
        self._stopping = True
        self._enumerator.drain()
        for _ in self._workers:
            self._queue.put(None)
        if not self._join(self._options[o.STOP_TIMEOUT] / 1000):
            self._cancel_all()
        self._enumerator.close()

    def __enter__(self) -> TieringService:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- table workers -------------------------------------------------------------------------

    def _work(self) -> None:
        while (lease := self._queue.get()) is not None:
            try:
                self._tier(lease)
            except Exception as problem:  # the worker must survive, or the table would stay leased
                self._enumerator.fail(lease)
                with suppress(Exception):  # the log itself may be the problem
                    _log.error("worker_failed", table=str(lease.table.path), problem=str(problem))

    def _tier(self, lease: RoundLease) -> None:
        """Run one round and the housekeeping after it. Errors are reported, not raised."""
        self._progress.began(lease)
        began = time.perf_counter()
        try:
            result = TieringRound(self._cluster, lease, self._on_step).run()
        except RoundEndedError as problem:
            self._progress.ended(lease, problem, time.perf_counter() - began)
            self._enumerator.fail(lease)
        except Exception as problem:
            self._progress.ended(lease, problem, time.perf_counter() - began)
            self._enumerator.fail(lease)
            self._check_runner()
        else:
            self._progress.finished(lease, result, time.perf_counter() - began)
            self._upkeep.run(lease, result)
            self._enumerator.finish(lease, _stats(result), more=result.remaining > 0)

    def _check_runner(self) -> None:
        if not self._runner.alive() and self._failed is not None:
            self._enumerator.drain()
            self._failed("the Spark session is gone; start the service again")

    # -- ends ----------------------------------------------------------------------------------

    def _cancel(self, lease: RoundLease) -> None:
        try:
            self._runner.cancel(lease.tag)
        except Exception as problem:  # a session that is gone has no jobs left
            _log.warning("cancel_failed", table=str(lease.table.path), problem=str(problem))

    def _cancel_all(self) -> None:
        deadline = time.monotonic() + CANCEL_SECONDS
        while time.monotonic() < deadline:
            for lease in self._enumerator.running():
                lease.end("the service stops")
                self._cancel(lease)
            if self._join(CANCEL_STEP_SECONDS):
                return

    def _join(self, seconds: float) -> bool:
        """Wait for the table workers; True if all have ended."""
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            worker.join(max(deadline - time.monotonic(), 0.0))
        return not any(worker.is_alive() for worker in self._workers)


def _stats(result: RoundResult) -> TieringStats:
    return TieringStats(file_size=result.total_bytes, record_count=result.total_records)
