"""Syncing logs in the background and recording their recovery points.

Used when a commit file is full (its entries must be durable in the segments before it is used
again), when a segment was closed, in flush mode `interval`, and now and then to keep recovery
short. It has a worker of its own, because syncing many segment files takes long and group commit
must not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import structlog

from zufluss.log.files import Files
from zufluss.log.log import Log
from zufluss.log.sync import SyncPlan, is_shortage
from zufluss.log.worker import Done, Job, Worker

_logger = structlog.get_logger(__name__)

Undone = Callable[[set[Log]], None]
"""Told which of the logs to be flushed are not durable."""

Outcomes = list[tuple[Log, SyncPlan, Exception | None]]
"""Plans that were carried out, each with its log and its failure."""


class LogFlusher:
    """Carries out sync plans with checkpoints."""

    def __init__(self, files: Files, worker: Worker) -> None:
        self._files = files
        self._worker = worker
        self._queued: dict[Log, None] = {}
        self._waiting: list[tuple[list[Log], Undone]] = []
        self._busy = False

    def flush(self, logs: Iterable[Log], done: Undone | None = None) -> None:
        """Make logs durable as they are now; `done` learns which of them are not.

        A log that cannot be synced is failed; one whose files could not be opened is not, and its
        next flush tries again. A log asked for again while it waits is synced once.
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
        undone: set[Log] = set()
        plans = []
        for log in logs:
            try:
                plan = plan_sync(log, checkpoint=True)
            except (OSError, MemoryError) as e:
                _postponed(log, e)
                undone.add(log)
            else:
                if plan is not None:
                    plans.append((log, plan))

        def job() -> Outcomes:
            return [(log, plan, run_plan(plan, self._files)) for log, plan in plans]

        def finished(outcome: Outcomes | Exception) -> None:
            self._busy = False
            try:
                if isinstance(outcome, Exception):
                    outcome = [(log, plan, outcome) for log, plan in plans]
                undone.update(self._finish(outcome))
            except Exception as e:
                _logger.exception("log_flush_not_noted", reason=repr(e))
                undone.update(logs)
            for flushed, done in waiting:
                done({log for log in flushed if log in undone or is_lost(log)})
            self._start()

        try:
            self._worker.submit(job, finished)
            self._busy = True
        except Exception as e:
            finished(e)

    def _finish(self, outcomes: Outcomes) -> Iterator[Log]:
        """Take the outcomes over; yields the logs that have to be flushed again."""
        for log, plan, error in outcomes:
            if error is None:
                log.synced(plan)
            elif is_shortage(error):
                _postponed(log, error)
                yield log
            else:
                log.fail(error)


def is_lost(log: Log) -> bool:
    """Whether a log failed; a deleted log has nothing left to lose."""
    return log.failure is not None and not log.deleted


def plan_sync(log: Log, *, checkpoint: bool) -> SyncPlan | None:
    """Plan to make a log durable; None if it was deleted, or failed: a sync then proves nothing.

    Raises what `is_shortage` if a file cannot be opened at present.
    """
    if log.failure is not None:
        return None
    try:
        return log.plan_sync(checkpoint=checkpoint)
    except OSError as e:
        if is_shortage(e):
            raise
        log.fail(e)
        return None


def run_plan(plan: SyncPlan, files: Files) -> Exception | None:
    """Carry out a plan in a thread; return what went wrong."""
    try:
        plan.run(files)
    except (OSError, MemoryError) as e:
        return e
    return None


def _postponed(log: Log, error: Exception) -> None:
    _logger.warning("log_sync_postponed", log=str(log), reason=str(error) or repr(error))
