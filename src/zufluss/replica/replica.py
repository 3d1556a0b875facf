"""One bucket on this server: its log, key-value state, remote part, holds, fence and waiters.

A `Replica` exists while the bucket is open. `open` restores what the disk lost, opens the log,
brings the key-value state to the end of the log, sets the retention holds and the fence, and
notifies the followers of the bucket. `alter` applies new table properties. `close` ends everything
of the bucket, and `reopen` opens a bucket that could not be opened before. After an error that
leaves its state in doubt, `fail` refuses everything and has the server close the bucket and open it
again from its log. What a replica needs of its server comes in a `ReplicaHost`; the directory of
replicas is `tablet/buckets.py`.

Writers wait until their batch is acknowledged (the high watermark has passed it); readers wait
until there is something new below the high watermark. Both are woken by `advance`, the single
place where the high watermark moves. With one replica the high watermark is what is durable under
the flush policy; with more it will be what enough replicas have.

Everything here runs on the event-loop thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import structlog

from zufluss.errors import InvalidTableError, LogStorageError, ZuflussError
from zufluss.kv.producer.fence import Fence
from zufluss.kv.replay import EarlierChangelog
from zufluss.kv.table import KvTable
from zufluss.kv.tablet import KvTablet
from zufluss.log.config import LogConfig
from zufluss.log.holds import Holder
from zufluss.log.log import Log
from zufluss.log.manager import LogManager
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.replica.kv_host import KvHost
from zufluss.replica.remote_log import RemoteLog

logger = structlog.get_logger(__name__)


class AppendWaiter(Protocol):
    """A write that waits for the high watermark."""

    def acknowledged(self) -> None:
        """The high watermark passed the batch."""

    def failed(self, error: ZuflussError) -> None:
        """The batch will never be acknowledged."""


class FetchWaiter(Protocol):
    """A parked fetch."""

    def wake(self) -> None:
        """Called when new records may be readable."""


class Assignment(Protocol):
    """The coordinator's order to hold a bucket (`cluster.replicas.ReplicaAssignment`)."""

    @property
    def table_bucket(self) -> TableBucket:
        """The bucket."""

    @property
    def physical_path(self) -> PhysicalTablePath:
        """The table or partition that the bucket belongs to."""

    @property
    def leader_epoch(self) -> int:
        """The epoch of the bucket's leader."""


class RemoteCopy(Protocol):
    """What remote storage has of a bucket that is being opened (`tablet/remote/copy.py`)."""

    @property
    def snapshot_offset(self) -> int:
        """The changelog from here on continues the oldest snapshot; 0 without a snapshot."""

    async def open_log(self, config: LogConfig, now_ms: int) -> Log:
        """Open the log, restored if the disk lost it."""

    async def restore_state(self, replica: Replica) -> EarlierChangelog | None:
        """Install a snapshot if the disk lost the key-value state.

        Returns the part of the changelog that is only in remote storage, if it has to be replayed.
        """

    async def adopt(self, replica: Replica) -> None:
        """Have the log continue on this server; from here on the bucket may be served."""

    def attach(self, replica: Replica) -> None:
        """Give an open replica its remote log."""


class Fences(Protocol):
    """The producers of all tables (`tablet/producers.py`)."""

    def fence(self, table_id: int) -> Fence:
        """The fence that checks the puts of a table."""

    def held_from(self, bucket: TableBucket) -> int | None:
        """The first offset that a producer of a bucket may have to undo, None if there is none."""


class ReplicaSettings(NamedTuple):
    """What the properties of a table say about its buckets."""

    log: LogConfig
    tiered: bool
    """The table is tiered: nothing expires before it is in the lake."""
    kv: KvTable | None
    """None for a log table."""


@dataclass(frozen=True, slots=True)
class ReplicaHost:
    """What the replicas of a server share."""

    logs: LogManager
    kv: KvHost
    fences: Fences
    clock_ms: Callable[[], int]
    opened: tuple[Callable[[Replica], None], ...]
    """Called with each replica that was opened."""
    closed: tuple[Callable[[Replica], None], ...]
    """Called with each replica that is being closed, before its files are given up."""
    failed: Callable[[Replica], None]
    """Called with a replica that failed: close it and open its bucket again."""

    def remove(self, path: PhysicalTablePath, bucket: TableBucket) -> None:
        """Delete the files of a bucket that could not be opened."""
        self.logs.drop_refused(path, bucket)
        self.kv.remove(path, bucket)


class Replica:
    """A replica of a bucket that this server leads, or that it follows as a standby."""

    __slots__ = (
        "_closing",
        "_given_up",
        "_host",
        "_tiered",
        "append_waiters",
        "bucket",
        "failure",
        "fetch_waiters",
        "kv",
        "leader_epoch",
        "log",
        "path",
        "remote",
        "tiered_offset",
    )

    def __init__(self, host: ReplicaHost, assignment: Assignment, log: Log) -> None:
        self._host = host
        self.bucket = assignment.table_bucket
        self.path = assignment.physical_path
        self.log = log
        self.append_waiters: deque[tuple[int, AppendWaiter]] = deque()
        self.fetch_waiters: set[FetchWaiter] = set()
        self.kv: KvTablet | None = None
        """The key-value state of a primary-key table's bucket, None for a log table."""
        self.remote: RemoteLog | None = None
        """The remote part of the log, None where logs stay on their server."""
        self.tiered_offset: int | None = None
        """Everything below is in the lake; None until the coordinator has said how far it got."""
        self.failure: LogStorageError | None = None
        """Set when the bucket failed: it takes no writes until it was opened again."""
        self._tiered = True
        self._closing: deque[Callable[[], None]] | None = None
        """The steps of `close` that are left; None before it is called."""
        self._given_up: ZuflussError | None = None
        """Why the bucket was closed, for writes that wait; None for no particular reason."""
        self.lead(assignment.leader_epoch)

    def __repr__(self) -> str:
        log = self.log
        return (
            f"Replica({self.path} bucket {self.bucket.bucket_id}, leader epoch "
            f"{self.leader_epoch}, offsets {log.log_start_offset}..{log.log_end_offset}, "
            f"high watermark {log.high_watermark})"
        )

    # -- life -------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls, host: ReplicaHost, assignment: Assignment, settings: ReplicaSettings, copy: RemoteCopy
    ) -> Replica:
        """Open the log and the key-value state of a bucket, restored from `copy` where lost.

        Raises if the bucket cannot be served; nothing of it is open then.
        """
        log = await copy.open_log(settings.log, host.clock_ms())
        replica: Replica | None = None
        try:
            replica = cls(host, assignment, log)
            await replica._come_up(settings, copy)
        except BaseException:
            if replica is not None and replica.kv is not None:
                host.kv.stop(replica, delete=False, failed=True)
            host.logs.let_go(log)
            raise
        return replica

    async def _come_up(self, settings: ReplicaSettings, copy: RemoteCopy) -> None:
        """Bring the key-value state to the end of the log, and begin to serve the bucket."""
        host, replica, log = self._host, self, self.log
        replica._hold_for_lake()  # as if tiered: nothing expires while the bucket comes up
        replica.hold_for_producers()
        if settings.kv is not None:
            log.holds.set(Holder.SNAPSHOT, copy.snapshot_offset)
            earlier = await copy.restore_state(replica)
            replica.kv = await host.kv.open(replica, settings.kv, earlier)
            replica.kv.fence = host.fences.fence(self.bucket.table_id)
            replica.hold_for_producers()  # they may have changed while the state came up
        await self._begin_to_serve(settings, copy)

    async def promote(self, leader_epoch: int, settings: ReplicaSettings, copy: RemoteCopy) -> None:
        """Lead a bucket that was followed here (`tablet/standby`), once its log has the end.

        The state is brought to the end of the log; what it had followed is not read again.
        """
        self.lead(leader_epoch)
        self._hold_for_lake()
        self.hold_for_producers()
        if self.kv is not None:
            assert settings.kv is not None
            self.log.holds.set(Holder.SNAPSHOT, copy.snapshot_offset)
            self.kv.table = settings.kv
            await self._host.kv.call(partial(self.kv.recover, self.log))
            self.kv.fence = self._host.fences.fence(self.bucket.table_id)
            self.hold_for_producers()
        await self._begin_to_serve(settings, copy)

    async def _begin_to_serve(self, settings: ReplicaSettings, copy: RemoteCopy) -> None:
        """Have this server continue the log, and tell who follows the opening of buckets."""
        host, replica, log = self._host, self, self.log
        await copy.adopt(replica)
        if log.failure is not None:  # nobody was told: the bucket is not served yet
            raise LogStorageError(f"{log} failed while its bucket was opened: {log.failure}")
        replica.alter(settings)
        copy.attach(replica)
        for opened in host.opened:
            opened(replica)

    @classmethod
    async def reopen(
        cls, host: ReplicaHost, assignment: Assignment, settings: ReplicaSettings, copy: RemoteCopy
    ) -> Replica:
        """Open a bucket that was refused earlier; raises as `open` while it still cannot be."""
        host.logs.allow(assignment.table_bucket)
        replica = await cls.open(host, assignment, settings, copy)
        try:
            host.logs.settle(assignment.table_bucket)
        except Exception as e:  # the next start reads and removes them
            logger.error("commit_files_kept", bucket=str(replica.bucket), reason=repr(e))
        return replica

    def alter(self, settings: ReplicaSettings) -> None:
        """Apply the properties of the table."""
        self.log.config = settings.log
        self._tiered = settings.tiered
        self._hold_for_lake()
        if self.kv is not None and settings.kv is not None:
            self.kv.table = settings.kv

    def close(self, *, delete: bool, reason: ZuflussError | None = None) -> None:
        """Give the bucket up, and its files with `delete`. Answers all waiters, with `reason`.

        If a step fails, the next call continues with that step.
        """
        if self._closing is None:
            self._given_up = reason
            self._closing = deque(partial(closed, self) for closed in self._host.closed)
            self._closing.append(partial(self._give_up_files, delete=delete))
            if self.kv is not None:
                self._closing.append(partial(self._stop_kv, delete=delete))
            self._closing.append(self.release)
        while self._closing:
            self._closing[0]()
            self._closing.popleft()

    def _give_up_files(self, *, delete: bool) -> None:
        if not delete:
            self._host.logs.let_go(self.log)
            return
        try:
            self._host.logs.drop(self.log)
        except OSError as e:
            # The next start removes what the coordinator does not assign.
            logger.error("log_not_removed", bucket=str(self.bucket), error=str(e))

    def _stop_kv(self, *, delete: bool) -> None:
        remove = self._host.logs.remove_empty_parents
        self._host.kv.stop(self, delete=delete, failed=self.failure is not None, then=remove)

    def lead(self, leader_epoch: int) -> None:
        """Lead the bucket in this epoch."""
        self.leader_epoch = self.log.leader_epoch = leader_epoch

    # -- what is there ----------------------------------------------------------------------

    @property
    def start_offset(self) -> int:
        """The first offset of the log, here or in remote storage.

        Raises a retriable `ZuflussError` while the remote part is not known.
        """
        here = self.log.log_start_offset
        if self.remote is None or here == 0:
            return here
        there = self.remote.start_offset
        return here if there is None else min(here, there)

    @property
    def unbroken_offset(self) -> int:
        """The first offset from which on no record of the log was lost with a disk.

        Raises a retriable `ZuflussError` while the remote part is not known.
        """
        if self.remote is None or self.log.log_start_offset == 0:
            return self.log.log_start_offset
        losses = self.remote.losses
        return losses[-1][1] + 1 if losses else self.start_offset

    def _lost_records(self) -> int:
        if self.remote is None or self.log.log_start_offset == 0:
            return 0
        return sum(last + 1 - first for first, last in self.remote.losses)

    @property
    def tablet(self) -> KvTablet:
        """The key-value state of a bucket that has one."""
        assert self.kv is not None
        return self.kv

    def row_count(self) -> int:
        """The number of visible rows: records of a log table, keys of a primary-key table.

        Raises `InvalidTableError` for a table whose rows are not counted.
        """
        if self.kv is None:
            return self.log.high_watermark - self.start_offset - self._lost_records()
        count = self.kv.row_count
        if count is None:
            raise InvalidTableError(
                f"Row count is disabled for this table '{self.path.path}'. With "
                "table.changelog.image = WAL a write does not tell whether its key is new; count "
                "them with a scan"
            )
        return count

    # -- holds ------------------------------------------------------------------------------

    def lake_reached(self, offset: int | None) -> None:
        """Note that the lake has everything below `offset`; None if that is not known any more.

        The lake cannot have more than the log has had: an offset beyond its end counts as the end.
        """
        self.tiered_offset = None if offset is None else min(offset, self.log.high_watermark)
        self._hold_for_lake()

    def _hold_for_lake(self) -> None:
        self.log.holds.set(Holder.LAKE, (self.tiered_offset or 0) if self._tiered else None)

    def hold_for_producers(self) -> None:
        """Have retention spare what a producer may have to undo."""
        self.log.holds.set(Holder.PRODUCER, self._host.fences.held_from(self.bucket))

    # -- waiters ----------------------------------------------------------------------------

    def advance(self, offset: int) -> None:
        """Move the high watermark to `offset`, acknowledge writes below it and wake fetches."""
        self.log.advance_high_watermark(offset)
        if self.kv is not None:
            self.kv.store.horizon = self.log.high_watermark
        waiters = self.append_waiters
        while waiters and waiters[0][0] <= offset:
            waiters[0][1].acknowledged()
            waiters.popleft()
        if self.fetch_waiters:
            for fetch in tuple(self.fetch_waiters):
                fetch.wake()

    def await_append(self, end_offset: int, waiter: AppendWaiter) -> None:
        """Tell `waiter` when the high watermark reaches `end_offset`.

        Waiters are answered in order; the retry of an earlier batch is answered late, not never.
        """
        if self.failure is not None:
            waiter.failed(self.failure)
        else:
            self.append_waiters.append((end_offset, waiter))

    def wake_fetches(self) -> None:
        """Let the parked fetches look again."""
        for fetch in tuple(self.fetch_waiters):
            fetch.wake()

    def fail(self, reason: str) -> LogStorageError:
        """State or log of this bucket are in doubt: refuse everything until it was opened again.

        Returns the answer to requests.
        """
        if self.failure is None:
            self.failure = LogStorageError(
                f"{self.bucket.named(self.path)}: {reason}; the server opens the bucket again by "
                "itself, try again later"
            )
            try:
                self.release()
            finally:
                self._host.failed(self)
        return self.failure

    def found_failure(self) -> Exception | None:
        """Why the bucket takes no writes, whoever noticed; None if it takes them."""
        return self.failure or self.log.failure or (self.kv.failure if self.kv else None)

    def release(self) -> None:
        """Answer all waiters; the bucket stops or failed."""
        error = self._given_up or self.failure
        if error is None:
            name = self.bucket.named(self.path)
            error = LogStorageError(f"{name} stopped before the write was durable; send it again")
        waiters, self.append_waiters = self.append_waiters, deque()
        for _, waiter in waiters:
            waiter.failed(error)
        self.wake_fetches()
