"""The remote logs of a server: every bucket gets its round, and none waits for another.

A bucket whose round fails is tried again later and later, up to `RETRY_SECONDS_MAX`; when no
location works that is all that happens: segments stay here, and writers write on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from typing import TYPE_CHECKING, Final

import structlog

from zufluss.cluster.refusal import RefusedLocationError
from zufluss.config import options
from zufluss.errors import ErrorCode, ZuflussError, error
from zufluss.remote.files import RemoteFile
from zufluss.remote.stores import store_properties
from zufluss.remote.uri import parse_location
from zufluss.replica.remote_index import RemoteIndexes
from zufluss.replica.remote_log import IndexNeededError, RemoteLog
from zufluss.tablet.remote.rounds import MOVING, Round, due, take_note

if TYPE_CHECKING:
    from zufluss.cluster.remote import BucketRemote
    from zufluss.replica.replica import Replica
    from zufluss.tablet.server import TabletServer
    from zufluss.wire import messages as m

RETRY_SECONDS_MAX: Final = 30.0
"""Longest time between two rounds of a bucket that fail, unless rounds are rarer anyway."""
READ_AGAIN_SECONDS: Final = 1.0
"""Where nothing is copied: the time until a manifest that could not be read is tried again."""
ROLE: Final = "s3.assumed.role.arn"
"""With a role, tokens open one location only."""
FAILURES: Final = (ZuflussError, OSError, TimeoutError)

log = structlog.get_logger(__name__)


class RemoteLogs:
    """Runs the rounds of all buckets of a server. Belongs to the event loop."""

    def __init__(self, server: TabletServer) -> None:
        self.server = server
        self.interval = server.conf.get(options.REMOTE_LOG_TASK_INTERVAL_DURATION) / 1000
        self._slots = asyncio.Semaphore(
            server.conf.get(options.REMOTE_LOG_DATA_TRANSFER_THREAD_NUM)
        )
        self._indexes: RemoteIndexes | None = None
        self._rounds: dict[Replica, asyncio.Task[None]] = {}
        self.failures = 0
        """Rounds that failed since the server started."""

    @property
    def indexes(self) -> RemoteIndexes:
        """Indexes of remote segments."""
        if self._indexes is None:
            self._indexes = RemoteIndexes(self.server.remote)
        return self._indexes

    @property
    def enabled(self) -> bool:
        """Logs are copied to remote storage: somebody said where, and did not switch it off."""
        return self.interval > 0 and self.server.remote.locations.explicit

    def adopt(self, replica: Replica, told: BucketRemote | None) -> None:
        """Have a remote log for a bucket that this server leads now; it is read soon.

        `told` is what the coordinator knows of it.
        """
        remote = self._made(replica, told is not None and told.manifest_path is not None)
        if remote is not None and not remote.loaded:
            take_note(remote, told)
            if remote.manifest_file is None:
                remote.take_over(remote.manifest, None)
            else:
                self._start(replica, remote)

    def _made(self, replica: Replica, has_files: bool = False) -> RemoteLog | None:
        """The remote log of a bucket; what was copied before is read though no more is copied."""
        if replica.remote is None and (self.enabled or has_files):
            replica.remote = RemoteLog(replica.bucket, replica.path, replica.log, self.indexes)
        return replica.remote

    def forget(self, replica: Replica) -> None:
        """A bucket is not here any more."""
        task = self._rounds.pop(replica, None)
        if task is not None:
            task.cancel()

    # -- rounds ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Begin the rounds that are due, again and again."""
        await asyncio.to_thread(shutil.rmtree, self.server.data_dir / MOVING, ignore_errors=True)
        while True:
            await asyncio.sleep(self.interval or READ_AGAIN_SECONDS)
            try:
                self.begin()
            except Exception:
                log.exception("remote_log_rounds_failed")

    def begin(self) -> None:
        """Begin the rounds that are due and not under way."""
        now_ms, now = self.server.clock_ms(), self.server.loop.time()
        for table in self.server.tables.values():
            for replica in table.replicas.values():
                remote = self._made(replica)  # locations may have been configured since it came up
                if remote is None or replica in self._rounds or remote.retry_at > now:
                    continue
                if due(replica, remote, now_ms, self.server.remote, copies=self.enabled):
                    self._start(replica, remote)

    def _start(self, replica: Replica, remote: RemoteLog) -> None:
        if replica in self._rounds:
            return
        self._rounds[replica] = self.server.spawn(self._round(replica, remote))

    async def _round(self, replica: Replica, remote: RemoteLog) -> None:
        try:
            more = True
            while more:
                async with self._slots:
                    more = await Round(self.server, replica, remote).run(copies=self.enabled)
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
            self._wake(replica)

    def _failed(self, replica: Replica, remote: RemoteLog, problem: Exception) -> None:
        self.failures += 1
        remote.failures += 1
        longest = max(self.interval, RETRY_SECONDS_MAX)
        delay = min(
            (self.interval or READ_AGAIN_SECONDS) * 2.0 ** min(remote.failures - 1, 30), longest
        )
        remote.retry_at = self.server.loop.time() + delay * random.uniform(0.5, 1.0)
        if not remote.loaded:
            remote.problem = error(
                ErrorCode.STORAGE_EXCEPTION,
                f"what remote storage has of {replica.log} could not be read: {problem}; try again",
            )

    def _wake(self, replica: Replica) -> None:
        """Let fetches look again that wait for something in remote storage."""
        for fetch in tuple(replica.fetch_waiters):
            fetch.wake()

    async def settled(self) -> None:
        """Wait for the rounds that are under way."""
        while self._rounds:
            await asyncio.wait(list(self._rounds.values()))

    # -- readers --------------------------------------------------------------------------------

    def fetch_info(
        self, replica: Replica, offset: int, *, any_location: bool
    ) -> m.PbRemoteLogFetchInfo | None:
        """Where a reader finds an offset that is not held here; None if that is not known yet.

        Whoever waits on the replica is woken when it is.
        """
        assert replica.remote is not None
        if not replica.remote.loaded and replica.remote.problem is None:
            return None
        if not any_location:
            self._check_readable(replica, offset)
        try:
            return replica.remote.fetch_info(offset)
        except IndexNeededError as needed:
            self.server.spawn(self._bring(replica, needed.file))
            return None

    async def _bring(self, replica: Replica, file: RemoteFile) -> None:
        with contextlib.suppress(ZuflussError):  # kept by the cache, and the answer of the next try
            await self.indexes.fetch(file)
        self._wake(replica)

    def _check_readable(self, replica: Replica, offset: int) -> None:
        """Refuse a reader that has the credentials of the first location only, for another one."""
        assert replica.remote is not None
        _, segment = replica.remote.segment_of(offset)
        locations = self.server.remote.locations
        location = locations.get(segment.location_id)
        if location == locations.first:
            return
        first, other = (parse_location(x.uri, str(x)) for x in (locations.first, location))
        found = [store_properties(self.server.conf, uri) for uri in (first, other)]
        if first.scheme != other.scheme or found[0] != found[1] or ROLE in found[0]:
            raise RefusedLocationError(location.location_id, location.uri)
