"""Retries of buckets that were refused for a reason that may pass.

A bucket that lost files is refused while the location with their copies is down; a bucket that
failed (a sync failed, the disk is full, memory or descriptors ran out) is closed. Such a bucket is
opened again in the background, ever more rarely, while everything else is served. A bucket with
damaged files is not retried: nothing would make them whole.

Before a bucket is started or stopped, its retries are ended and a try under way is awaited, because
two tries at once would open the same files.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final

import structlog

from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.errors import CorruptRecordError, NotLeaderError, ZuflussError
from zufluss.model.table import TableBucket
from zufluss.periodic import pause
from zufluss.remote.errors import LocationUnavailableError

log = structlog.get_logger(__name__)

FIRST_SECONDS: Final = 0.1
"""Seconds before the first retry of a bucket."""
MOST_SECONDS: Final = 10.0
"""Most seconds between two retries of a bucket that this machine can mend."""
MOST_SECONDS_REMOTE: Final = 60.0
"""Most seconds between two retries of a bucket that needs remote storage, which cost more."""

Open = Callable[[ReplicaAssignment], Awaitable[Exception | None]]
"""Opens a bucket, or returns why it still cannot be opened."""
Sleep = Callable[[float], Awaitable[None]]
"""Waits for some seconds."""


class StaleOrderError(NotLeaderError):
    """The order to lead a bucket was given before the server registered again: another may lead."""


def may_pass(problem: Exception) -> bool:
    """Whether a bucket that was refused for this reason can be opened later as it is.

    `CorruptRecordError` is retriable for clients, which may read from another replica; for the
    server that owns the disk it is not.
    """
    if isinstance(problem, ZuflussError):
        return problem.retriable and not isinstance(problem, (CorruptRecordError, StaleOrderError))
    return True


class Reopener:
    """Retries refused buckets. Belongs to the event loop."""

    def __init__(self, open_bucket: Open, sleep: Sleep = pause) -> None:
        self._open = open_bucket
        self._sleep = sleep
        self.attempts = 0
        """Tries since the server started."""
        self.opened = 0
        """Tries that opened their bucket."""
        self._tries: dict[TableBucket, asyncio.Task[None]] = {}
        self._trying: set[TableBucket] = set()
        self._ending: set[TableBucket] = set()
        self._begun = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Number of buckets that are being retried."""
        return len(self._tries)

    def begin(self) -> None:
        """Begin to retry: all other buckets are open."""
        self._begun.set()

    def add(self, assignment: ReplicaAssignment, *, at_once: bool = False) -> None:
        """Retry a bucket until it opens or the problem cannot pass; `at_once` without a pause."""
        bucket = assignment.table_bucket
        task = self._tries.get(bucket)
        if task is not None and not task.done():
            return
        work = self._again_and_again(assignment, 0.0 if at_once else FIRST_SECONDS)
        task = self._tries[bucket] = asyncio.ensure_future(work)
        task.add_done_callback(partial(self._ended, bucket))

    def _ended(self, bucket: TableBucket, task: asyncio.Task[None]) -> None:
        if self._tries.get(bucket) is task:
            del self._tries[bucket]
            self._ending.discard(bucket)

    async def end(self, buckets: Iterable[TableBucket]) -> None:
        """Stop retrying these buckets; returns when tries under way have ended."""
        tasks = {bucket: self._tries[bucket] for bucket in buckets if bucket in self._tries}
        for bucket, task in tasks.items():
            self._ending.add(bucket)
            if bucket not in self._trying:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks.values())

    async def end_all(self) -> None:
        """Stop retrying every bucket."""
        await self.end(tuple(self._tries))

    async def stop(self) -> None:
        """Cancel every retry; the server stops."""
        tasks = list(self._tries.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _again_and_again(self, assignment: ReplicaAssignment, seconds: float) -> None:
        bucket = assignment.table_bucket
        await self._begun.wait()
        while bucket not in self._ending:
            await self._sleep(seconds * random.uniform(0.5, 1.0))
            self.attempts += 1
            problem = await self._try(assignment)
            if problem is None:
                self.opened += 1
                log.info("bucket_opened_later", bucket=str(bucket))
                return
            remote = isinstance(problem, LocationUnavailableError)
            most = MOST_SECONDS_REMOTE if remote else MOST_SECONDS
            seconds = min(max(seconds * 2, FIRST_SECONDS), most)
            if not may_pass(problem):
                return

    async def _try(self, assignment: ReplicaAssignment) -> Exception | None:
        self._trying.add(assignment.table_bucket)
        try:
            return await self._open(assignment)
        except Exception as e:
            log.exception("bucket_not_opened", bucket=str(assignment.table_bucket))
            return e
        finally:
            self._trying.discard(assignment.table_bucket)

    def __repr__(self) -> str:
        return f"Reopener(waiting={self.waiting})"
