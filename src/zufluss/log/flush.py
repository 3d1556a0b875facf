"""Syncing logs in the background and recording their recovery points.

Used when a commit file is full (its entries must be durable in the segments before it is used
again), when a segment was closed, in flush mode `interval`, and now and then to keep recovery
short. It has a worker of its own, because syncing many segment files takes long and group commit
must not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zufluss.log.files import Files
from zufluss.log.log import Log
from zufluss.log.sync import SyncPlan
from zufluss.log.worker import Done, Job, Worker

OnFailure = Callable[[Log, Exception], None]
"""Told about a log that had to be closed for writes."""

Outcomes = list[tuple[Log, SyncPlan, Exception | None]]
"""Plans that were carried out, each with its log and its failure."""


class LogFlusher:
    """Carries out sync plans with checkpoints."""

    def __init__(self, files: Files, worker: Worker, on_failure: OnFailure) -> None:
        self._files = files
        self._worker = worker
        self._on_failure = on_failure
        self._queued: dict[Log, None] = {}
        self._waiting: list[tuple[list[Log], Callable[[bool], None]]] = []
        self._busy = False

    def flush(self, logs: Iterable[Log], done: Callable[[bool], None] | None = None) -> None:
        """Make logs durable as they are now; `done` learns whether all of them are.

        A log that cannot be synced is failed. A log asked for again while it waits is synced once.
        """
        flushed = list(logs)
        self._queued.update(dict.fromkeys(flushed))
        if done is not None:
            self._waiting.append((flushed, done))
        self._start()

    def submit(self, job: Job, done: Done) -> None:
        """Run another slow job in the same thread."""
        self._worker.submit(job, done)

    def _start(self) -> None:
        if self._busy or not (self._queued or self._waiting):
            return
        logs, self._queued = self._queued, {}
        waiting, self._waiting = self._waiting, []
        planned = [(log, plan_sync(log, self._on_failure, checkpoint=True)) for log in logs]
        plans = [(log, plan) for log, plan in planned if plan is not None]
        self._busy = True

        def job() -> Outcomes:
            return [(log, plan, run_plan(plan, self._files)) for log, plan in plans]

        def finished(outcome: object) -> None:
            self._busy = False
            if isinstance(outcome, Exception):
                raise outcome
            self._finish(outcome)  # type: ignore[arg-type]
            for flushed, done in waiting:
                done(all(log.failure is None or log.deleted for log in flushed))
            self._start()

        self._worker.submit(job, finished)

    def _finish(self, outcomes: Outcomes) -> None:
        for log, plan, error in outcomes:
            if error is None:
                log.synced(plan)
            else:
                fail_log(log, error, self._on_failure)


def plan_sync(log: Log, on_failure: OnFailure, *, checkpoint: bool) -> SyncPlan | None:
    """Plan to make a log durable; None if it was deleted, or failed: a sync then proves nothing."""
    if log.failure is not None:
        return None
    try:
        return log.plan_sync(checkpoint=checkpoint)
    except OSError as e:
        fail_log(log, e, on_failure)
        return None


def run_plan(plan: SyncPlan, files: Files) -> Exception | None:
    """Carry out a plan in a thread; return what went wrong."""
    try:
        plan.run(files)
    except OSError as e:
        return e
    return None


def fail_log(log: Log, error: Exception, on_failure: OnFailure) -> None:
    """Close a log for writes and report it; a deleted log has nothing left to lose."""
    if not log.deleted:
        log.fail(error)
        on_failure(log, error)
