"""One bucket on this server: its log, its leader epoch, and those who wait on it.

Writers wait until their batch is acknowledged (the high watermark has passed it); readers wait
until there is something new below the high watermark. Both are woken by `advance`, the single
place where the high watermark moves. With one replica the high watermark is what is durable under
the flush policy; with more it will be what enough replicas have.

Everything here runs on the event-loop thread.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from zufluss.errors import InvalidTableError, LogStorageError
from zufluss.log.holds import Holder
from zufluss.model.table import PhysicalTablePath, TableBucket

if TYPE_CHECKING:
    from zufluss.kv.tablet import KvTablet
    from zufluss.log.log import Log
    from zufluss.replica.remote_log import RemoteLog


class AppendWaiter(Protocol):
    """A produce request that waits for the high watermark."""

    def acknowledged(self) -> None:
        """The high watermark passed the batch."""

    def failed(self, error: LogStorageError) -> None:
        """The batch will never be acknowledged."""


class FetchWaiter(Protocol):
    """A parked fetch."""

    def wake(self) -> None:
        """There may be something to read."""


class Replica:
    """A bucket replica that leads (the only kind while there is one tablet server)."""

    __slots__ = (
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

    def __init__(
        self, bucket: TableBucket, path: PhysicalTablePath, log: Log, leader_epoch: int
    ) -> None:
        self.bucket = bucket
        self.path = path
        self.log = log
        self.leader_epoch = leader_epoch
        self.append_waiters: deque[tuple[int, AppendWaiter]] = deque()
        self.fetch_waiters: set[FetchWaiter] = set()
        self.kv: KvTablet | None = None
        """The key-value state of a primary-key table's bucket, None for a log table."""
        self.remote: RemoteLog | None = None
        """What remote storage has of the log, None where logs stay on their server."""
        self.tiered_offset: int | None = None
        """Below it the lake has everything; None until the coordinator has said how far it got."""
        self.failure: LogStorageError | None = None
        """Set when the disk failed under this bucket: it takes no more writes."""

    def __repr__(self) -> str:
        log = self.log
        return (
            f"Replica({self.path} bucket {self.bucket.bucket_id}, leader epoch "
            f"{self.leader_epoch}, offsets {log.log_start_offset}..{log.log_end_offset}, "
            f"high watermark {log.high_watermark})"
        )

    @property
    def start_offset(self) -> int:
        """The first offset there is, here or in remote storage.

        A retriable `ZuflussError` while it is not known what is there.
        """
        here = self.log.log_start_offset
        if self.remote is None or here == 0:
            return here
        there = self.remote.start_offset
        return here if there is None else min(here, there)

    @property
    def tablet(self) -> KvTablet:
        """The key-value state, of a bucket that has one."""
        assert self.kv is not None
        return self.kv

    def row_count(self) -> int:
        """The rows a reader finds: of a log what is durable, of a primary-key table its keys."""
        if self.kv is None:
            return self.log.high_watermark - self.start_offset
        count = self.kv.row_count
        if count is None:
            raise InvalidTableError(
                f"the rows of {self.path} are not counted: with table.changelog.image = WAL a "
                "write does not tell whether its key is new; count them with a scan"
            )
        return count

    def hold_for_lake(self, tiered: bool) -> None:
        """Have retention spare what the lake does not have, if the table is tiered at all."""
        self.log.holds.set(Holder.LAKE, (self.tiered_offset or 0) if tiered else None)

    def advance(self, offset: int) -> None:
        """Move the high watermark to `offset` and wake whom that concerns."""
        self.log.advance_high_watermark(offset)
        if self.kv is not None:
            self.kv.store.horizon = self.log.high_watermark
        waiters = self.append_waiters
        while waiters and waiters[0][0] <= offset:
            waiters.popleft()[1].acknowledged()
        if self.fetch_waiters:
            for fetch in tuple(self.fetch_waiters):
                fetch.wake()

    def await_append(self, end_offset: int, waiter: AppendWaiter) -> None:
        """Tell `waiter` when the high watermark reaches `end_offset`.

        They are told in the order they came; the retry of an earlier batch is told late, not never.
        """
        if self.failure is not None:
            waiter.failed(self.failure)
        else:
            self.append_waiters.append((end_offset, waiter))

    def fail(self, reason: str) -> None:
        """The storage under this bucket failed: refuse writes from now on, fail those waiting."""
        self.failure = LogStorageError(f"{self.path} bucket {self.bucket.bucket_id}: {reason}")
        self.release()

    def release(self) -> None:
        """Answer everybody who waits; the bucket stops or failed."""
        error = self.failure or LogStorageError(
            f"{self.path} bucket {self.bucket.bucket_id} stopped before the write was durable; "
            "send it again"
        )
        waiters, self.append_waiters = self.append_waiters, deque()
        for _, waiter in waiters:
            waiter.failed(error)
        for fetch in tuple(self.fetch_waiters):
            fetch.wake()
