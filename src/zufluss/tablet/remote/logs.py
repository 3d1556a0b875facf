"""The remote logs of a server: runs the rounds (`rounds.py`) of all buckets, independently.

After a failed round a bucket waits ever longer for the next one, up to `RETRY_SECONDS_MAX`. While
no location works, segments stay on this server and writes go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from zufluss.cluster.refusal import RefusedLocationError
from zufluss.cluster.remote import BucketRemote
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import ErrorCode, ZuflussError, error
from zufluss.log.manager import LogManager
from zufluss.periodic import repeat
from zufluss.remote.files import RemoteFile
from zufluss.remote.stores import store_properties
from zufluss.remote.uri import parse_location
from zufluss.replica.remote_index import RemoteIndexes
from zufluss.replica.remote_log import IndexNeededError, RemoteLog
from zufluss.replica.replica import Replica
from zufluss.tablet.remote.context import RemoteContext
from zufluss.tablet.remote.rounds import RemoteRound, RemoteRoundSettings, due, take_note
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.wire import messages as m

RETRY_SECONDS_MAX: Final = 30.0
"""Longest time between two failing rounds of a bucket, unless the interval is longer."""
READ_AGAIN_SECONDS: Final = 1.0
"""Seconds until an unreadable manifest is read again on a server that copies nothing."""
ROLE: Final = "s3.assumed.role.arn"
"""With this property, a token opens one location only."""
MOVING: Final = ".remote/moving"
"""Where segments lie on their way from one location to another, below the data directory."""
FAILURES: Final = (ZuflussError, OSError, TimeoutError)

log = structlog.get_logger(__name__)


class RemoteLogRunner:
    """Runs the rounds of all buckets of a server. Belongs to the event loop."""

    def __init__(
        self,
        conf: Configuration,
        context: RemoteContext,
        logs: LogManager,
        tasks: BackgroundTasks,
        clock_ms: Callable[[], int],
    ) -> None:
        self.interval = conf.get(options.REMOTE_LOG_TASK_INTERVAL_DURATION) / 1000
        self._conf = conf
        self._context = context
        self._storage = context.storage
        self._settings = RemoteRoundSettings(
            logs,
            clock_ms,
            Path(conf.get(options.DATA_DIR)) / MOVING,
            conf.get(options.ZUFLUSS_REMOTE_SWEEP_GRACE) / 1000,
        )
        self._tasks = tasks
        self._clock_ms = clock_ms
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(conf.get(options.REMOTE_LOG_DATA_TRANSFER_THREAD_NUM))
        self._indexes = RemoteIndexes(context.storage)
        self._rounds: dict[Replica, asyncio.Task[None]] = {}
        self.failures = 0
        """Rounds that failed since the server started."""

    @property
    def enabled(self) -> bool:
        """Whether logs are copied: locations are configured and the interval is not 0."""
        return self.interval > 0 and self._storage.locations.explicit

    def adopt(self, replica: Replica, bucket_remote: BucketRemote) -> None:
        """Give a bucket that was opened its remote log, whose manifest is read soon.

        `bucket_remote` is what the coordinator knows of the remote log.
        """
        remote = self._remote_log(replica, has_files=bucket_remote.manifest_path is not None)
        if remote is not None and not remote.loaded:
            take_note(remote, bucket_remote)
            if remote.manifest_file is None:
                remote.take_over(remote.manifest, None)
            else:
                self._start(replica, remote)

    def _remote_log(self, replica: Replica, *, has_files: bool = False) -> RemoteLog | None:
        """The remote log of a bucket, made if logs are copied or were copied earlier."""
        if replica.remote is None and (self.enabled or has_files):
            replica.remote = RemoteLog(replica.bucket, replica.path, replica.log, self._indexes)
        return replica.remote

    def closed(self, replica: Replica) -> None:
        """A bucket was closed: end its round."""
        task = self._rounds.pop(replica, None)
        if task is not None:
            task.cancel()

    # -- rounds ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Begin the rounds that are due, again and again."""
        moving = self._settings.moving_directory
        await asyncio.to_thread(shutil.rmtree, moving, ignore_errors=True)
        await repeat(self.interval or READ_AGAIN_SECONDS, self.begin, "remote_log_rounds_failed")

    def begin(self) -> None:
        """Begin the rounds that are due and not under way."""
        now_ms, now = self._clock_ms(), self._loop.time()
        for replica in self._context.buckets.replicas():
            remote = self._remote_log(replica)  # locations may have been configured since it opened
            if remote is None or replica in self._rounds or remote.retry_at > now:
                continue
            if due(replica, remote, now_ms, self._storage, copies=self.enabled):
                self._start(replica, remote)

    def _start(self, replica: Replica, remote: RemoteLog) -> None:
        if replica in self._rounds:
            return
        self._rounds[replica] = self._tasks.spawn(self._round(replica, remote))

    async def copy(self, replica: Replica) -> None:
        """Run a round of a bucket now; returns when it, or one that is under way, has ended."""
        remote = self._remote_log(replica)
        if remote is not None:
            self._start(replica, remote)
            await asyncio.wait([self._rounds[replica]])

    async def _round(self, replica: Replica, remote: RemoteLog) -> None:
        try:
            more = True
            while more:
                async with self._slots:
                    round = RemoteRound(self._context, self._settings, replica, remote)
                    more = await round.run(copies=self.enabled)
        except FAILURES as e:
            self._failed(replica, remote, e)
            if remote.failures.bit_count() == 1:  # the 1st, 2nd, 4th … in a row
                log.warning(
                    "remote_log_round_failed",
                    log=str(replica.log),
                    in_a_row=remote.failures,
                    reason=str(e),
                )
        except Exception as e:
            self._failed(replica, remote, e)
            log.exception("remote_log_round_failed", log=str(replica.log))
        else:
            remote.failures, remote.retry_at = 0, 0.0
        finally:
            if self._rounds.get(replica) is asyncio.current_task():
                del self._rounds[replica]
            replica.wake_fetches()

    def _failed(self, replica: Replica, remote: RemoteLog, problem: Exception) -> None:
        self.failures += 1
        remote.failures += 1
        longest = max(self.interval, RETRY_SECONDS_MAX)
        delay = min(
            (self.interval or READ_AGAIN_SECONDS) * 2.0 ** min(remote.failures - 1, 30), longest
        )
        remote.retry_at = self._loop.time() + delay * random.uniform(0.5, 1.0)
        if not remote.loaded:
            remote.problem = error(
                ErrorCode.STORAGE_EXCEPTION,
                f"what remote storage has of {replica.log} could not be read: {problem}; try again",
            )

    async def settled(self) -> None:
        """Wait for the rounds that are under way."""
        while self._rounds:
            await asyncio.wait(list(self._rounds.values()))

    # -- readers --------------------------------------------------------------------------------

    def fetch_info(
        self, replica: Replica, offset: int, *, any_location: bool
    ) -> m.PbRemoteLogFetchInfo | None:
        """The remote segments that have an offset; None if they are not known yet.

        Fetches that wait on the replica are woken when they are.
        """
        assert replica.remote is not None
        if not replica.remote.loaded and replica.remote.problem is None:
            return None
        if not any_location:
            self._check_readable(replica, offset)
        try:
            return replica.remote.fetch_info(offset)
        except IndexNeededError as needed:
            self._tasks.spawn(self._bring(replica, needed.file))
            return None

    async def _bring(self, replica: Replica, file: RemoteFile) -> None:
        with contextlib.suppress(ZuflussError):  # kept by the cache, and the answer of the next try
            await self._indexes.fetch(file)
        replica.wake_fetches()

    def _check_readable(self, replica: Replica, offset: int) -> None:
        """Refuse a reader with credentials of the first location if the offset is elsewhere."""
        assert replica.remote is not None
        _, segment = replica.remote.segment_of(offset)
        locations = self._storage.locations
        location = locations.get(segment.location_id)
        if location == locations.first:
            return
        first, other = (parse_location(x.uri, str(x)) for x in (locations.first, location))
        properties = [store_properties(self._conf, uri) for uri in (first, other)]
        if first.scheme != other.scheme or properties[0] != properties[1] or ROLE in properties[0]:
            raise RefusedLocationError(location.location_id, location.uri)
