"""A thread for syncs: jobs in, outcomes back on the event loop, in order.

Syncing blocks, so it runs beside the loop; everything else of a log runs on the loop. A job is a
function without arguments; `done` is called on the loop with its result, or with the exception it
raised. One worker runs one job at a time, which is what group commit wants: while one sync is under
way the next group gathers. Outcomes that gathered are delivered in turns of the loop's, because
each may answer a request, and thousands of answers at once would hold up everybody else.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import structlog

from zufluss.pacing import TURN_SECONDS
from zufluss.threads import start

log = structlog.get_logger(__name__)

Job = Callable[[], Any]
"""Runs in the thread."""

Done = Callable[[Any], None]
"""Runs on the loop, with the job's result or its exception; once more if memory ran out in it."""


class Worker(Protocol):
    """Runs jobs one after the other."""

    def submit(self, job: Job, done: Done) -> None:
        """Run `job`, then `done` on the event loop."""

    def stop(self) -> None:
        """Finish the jobs submitted so far and take no more. Blocks."""


class ThreadWorker:
    """A worker with a thread of its own."""

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._jobs: SimpleQueue[tuple[Job, Done | None] | None] = SimpleQueue()
        self._outcomes: deque[tuple[Done, Any]] = deque()
        self._reported = False
        """The loop was woken and has not delivered the outcomes yet."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start(self._thread)

    def submit(self, job: Job, done: Done) -> None:
        """Run `job` in the thread, then `done` on the event loop."""
        self._jobs.put((job, done))

    def run(self, job: Job) -> None:
        """Run `job` in the thread; it sees to the rest itself, and what it raises is logged."""
        self._jobs.put((job, None))

    def stop(self) -> None:
        """Finish the jobs submitted so far and end the thread. Blocks; not for the loop thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            if done is None:
                try:
                    job()
                except Exception:
                    log.exception("job_failed")
                continue
            try:
                outcome = job()
            except Exception as e:
                outcome = e
            self._outcomes.append((done, outcome))
            if not self._reported:
                self._reported = True
                self._loop.call_soon_threadsafe(self._report)
            del item, job, done, outcome

    def _report(self) -> None:
        """On the loop: deliver the outcomes that gathered; a wake-up for each would cost more."""
        self._reported = False
        ends = self._clock() + TURN_SECONDS
        try:
            while self._outcomes:
                done, outcome = self._outcomes.popleft()
                try:
                    done(outcome)
                except MemoryError:  # perhaps before it began, and somebody waits for it
                    log.exception("outcome_not_taken")
                    done(outcome)
                if self._clock() >= ends:
                    break
        finally:
            if self._outcomes:  # the turn is over, or one of them raised, which the loop logs
                self._reported = True
                self._loop.call_soon(self._report)
