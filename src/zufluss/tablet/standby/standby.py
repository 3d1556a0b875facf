"""One bucket that another server leads and this one follows: its log and its key-value state.

A standby reads as any client does, below the high watermark of the leader. So it has only what is
durable, and never has to take anything back. What it reads goes into a log and a state of the same
kind as a leader's, in the same places on the disk: whoever opens the bucket finds them, and a
take-over goes on in them (`Replica.promote`).

| step | what it does |
|---|---|
| open | the log of this disk as far as it is known to be true, or an empty one at the end of the remote segments |
| compare | the last batch here and at the leader are the same bytes, or everything here is deleted |
| follow | whole batches are appended; their checksums are verified first |
| state | the state of this disk or the newest snapshot, as soon as the log reaches it; then the changelog, in pieces, so that puts of others run in between |

A state that falls behind its log, because memory is short or a new schema is not known here yet, is
brought up from the log again.

Belongs to the event loop.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import structlog

from zufluss.cluster.remote import BucketRemote
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.errors import CorruptRecordError, ZuflussError
from zufluss.kv.replay import ChangelogPiece, EarlierChangelog, pieces_in_turn
from zufluss.kv.tablet import KvTablet
from zufluss.log.holds import Holder
from zufluss.log.log import Log
from zufluss.log.manager import LogBeginning
from zufluss.model.table import TableBucket
from zufluss.record.header import iter_headers, verify_crc
from zufluss.replica.replica import Replica, ReplicaHost, ReplicaSettings
from zufluss.tablet.remote.context import RemoteContext
from zufluss.tablet.remote.restore import Restorer

log = structlog.get_logger(__name__)

RETRY_SECONDS: Final = 0.5
"""Pause before a state that could not follow its log is brought up again."""


class DisagreementError(CorruptRecordError):
    """What is here of a bucket is not what its leader has."""


class Standby:
    """Follows one bucket."""

    def __init__(
        self,
        order: ReplicaAssignment,
        replica: Replica,
        remote: BucketRemote | None,
        host: ReplicaHost,
        context: RemoteContext,
        restorer: Restorer,
        flush_bytes: int,
    ) -> None:
        """`remote` is what the coordinator knows of its remote files."""
        self.order = order
        """The last order: who leads the bucket, in which epoch."""
        self.replica = replica
        self.caught_up_at: float | None = None
        """When it had everything that its leader showed, by the loop's clock; None for never."""
        self.turn = asyncio.Lock()
        """Held while log or state change."""
        self.paused = False
        """It is about to be led here: nothing is read from its leader any more."""
        self._remote = remote
        self._host = host
        self._context = context
        self._restorer = restorer
        self._flush_bytes = flush_bytes
        self._compared = replica.log.log_end_offset == replica.log.log_start_offset
        self._state_at = max((s.log_offset for s in remote.snapshots), default=0) if remote else 0
        """The log has to reach so far before a snapshot continues it."""
        self._earlier: EarlierChangelog | None = None
        """What only remote storage has of the changelog, if the state needs it."""
        self.behind = False
        """The state needs what the log has already (`bring_up_state`)."""

    @classmethod
    async def open(
        cls,
        order: ReplicaAssignment,
        host: ReplicaHost,
        context: RemoteContext,
        restorer: Restorer,
        flush_bytes: int,
    ) -> Standby:
        """Open the log of a bucket; its state comes when the log has reached it."""
        bucket = order.table_bucket
        remote = (await context.gateway.bucket_remotes([bucket])).get(bucket)
        await context.buckets.prepare(bucket.table_id)
        settings = context.buckets.table(bucket.table_id).settings
        remote_end = 0 if remote is None else remote.remote_end_offset or 0

        async def beginning() -> LogBeginning:
            assert remote is not None
            writers, timestamp = await restorer.writers_at_end(remote)
            return LogBeginning(remote_end, writers, timestamp)

        opened = await restorer.logs.open_shared(
            order.physical_path,
            bucket,
            settings.log,
            host.clock_ms(),
            remote_end=remote_end,
            beginning=beginning,
            tail=_nothing,
        )
        opened.holds.set(Holder.REMOTE_COPY, remote_end)
        replica = Replica(host, order, opened)
        return cls(order, replica, remote, host, context, restorer, flush_bytes)

    @property
    def bucket(self) -> TableBucket:
        """The bucket."""
        return self.replica.bucket

    @property
    def log(self) -> Log:
        """Its log."""
        return self.replica.log

    @property
    def settings(self) -> ReplicaSettings:
        """The settings of its table, as they are now."""
        return self._context.buckets.table(self.bucket.table_id).settings

    @property
    def fetch_offset(self) -> int:
        """Where to read next: the last batch once more as long as it has not been compared."""
        end = self.log.log_end_offset
        return end if self._compared else end - 1

    @property
    def reads(self) -> bool:
        """Whether it reads from its leader at present."""
        return not (self.paused or self.behind or self.turn.locked())

    @property
    def has_state(self) -> bool:
        """Whether its log has all that its state still needs."""
        if self.replica.kv is None:
            return self.settings.kv is None
        return self.replica.kv.applied_offset >= self.log.log_start_offset

    def lag_seconds(self, now: float) -> float:
        """How long ago it had everything that its leader showed."""
        return float("inf") if self.caught_up_at is None else max(0.0, now - self.caught_up_at)

    async def take(self, records: memoryview, high_watermark: int, asked: float) -> None:
        """Append what the leader has, and apply it; `asked` is when it was asked for.

        `DisagreementError` if it does not continue what is here.
        """
        async with self.turn:
            if self.paused:
                return
            if high_watermark < self.log.log_end_offset:
                raise DisagreementError(
                    f"{self.bucket}: this standby has offsets below {self.log.log_end_offset}, its "
                    f"leader below {high_watermark}"
                )
            first = self.log.log_end_offset
            if len(records):
                if not self._compared:
                    self._compare(records)
                _verify(records, self.bucket)
                self.log.append_stamped(records)
                self.log.advance_high_watermark(self.log.log_end_offset)
            await self._follow(records, first, high_watermark)
            if not self.behind and self.log.log_end_offset >= high_watermark:
                self.caught_up_at = asked

    def _compare(self, records: memoryview) -> None:
        """Compare the last batch that is here with that of the leader."""
        end = self.log.log_end_offset
        here = self.log.read(end - 1, 1, at_least_one=True, nowait=False).records
        mine = [(h, here[at : at + h.size]) for at, h in iter_headers(here)][-1]
        for at, header in iter_headers(records):
            if header.base_offset == mine[0].base_offset:
                if records[at : at + header.size] != mine[1]:
                    break
                self._compared = True
                return
        raise DisagreementError(
            f"{self.bucket}: the batch that ends at offset {end} is another one at its leader"
        )

    async def _follow(self, records: memoryview, first: int, high_watermark: int) -> None:
        """Apply batches that were appended from offset `first` on."""
        settings, replica = self.settings, self.replica
        if settings.kv is None:
            return
        end = self.log.log_end_offset
        if replica.kv is None:
            self.behind = end >= self._state_at or end >= high_watermark
        elif end > first:
            replica.kv.table = settings.kv
            try:
                await self._host.kv.call(partial(self._apply, replica.kv, records, end))
            except ZuflussError as problem:
                log.warning("standby_not_applied", bucket=str(self.bucket), reason=problem.message)
                self.behind = True

    def _apply(self, tablet: KvTablet, records: memoryview, end: int) -> None:
        """Apply batches to the state. Runs in the key-value worker."""
        if tablet.applied_offset >= end:
            return  # the state of this disk is ahead of its log
        for piece in pieces_in_turn(tablet.table, records, tablet.applied_offset, end):
            tablet.apply(piece, waits=False)
        self._flush_if_due(tablet)

    def _flush_if_due(self, tablet: KvTablet) -> None:
        if tablet.flush_due(self._flush_bytes):
            tablet.flush()

    async def bring_up_state(self) -> None:
        """Bring the state to the end of the log, opened first if it is not open yet."""
        async with self.turn:
            if self.paused:
                return
            table, replica = self.settings.kv, self.replica
            assert table is not None
            if replica.kv is None:
                if self._remote is not None:
                    self._earlier = await self._restorer.restore_state(replica, self._remote)
                replica.kv = await self._host.kv.open_as_flushed(replica, table)
            replica.kv.table = table
            if replica.kv.applied_offset < self.log.log_end_offset:
                changes = replica.kv.missing(self.log, self._earlier)
                more = True
                while more and not self.paused:
                    more = await self._host.kv.call(partial(self._apply_next, replica.kv, changes))
            self.behind = replica.kv.applied_offset < self.log.log_end_offset

    def _apply_next(self, tablet: KvTablet, changes: Iterator[ChangelogPiece]) -> bool:
        """Apply one piece; whether there may be more. Runs in the key-value worker."""
        piece = next(changes, None)
        if piece is None:
            return False
        tablet.apply(piece, waits=False)
        self._flush_if_due(tablet)
        return True

    def close(self, *, delete: bool, failed: bool = False) -> None:
        """Stop to follow; `failed` keeps nothing of what the state has not flushed."""
        self.paused = True
        replica, logs, kv = self.replica, self._host.logs, self._host.kv
        if delete:
            logs.drop(replica.log)
        else:
            logs.let_go(replica.log)
        if replica.kv is not None:
            kv.stop(replica, delete=delete, failed=failed, then=logs.remove_empty_parents)
        elif delete:
            kv.remove(replica.path, replica.bucket)

    def __repr__(self) -> str:
        return f"Standby({self.replica!r}, paused={self.paused}, behind={self.behind})"


def _verify(records: memoryview, bucket: TableBucket) -> None:
    for at, header in iter_headers(records):
        if not verify_crc(records, at, header):
            raise CorruptRecordError(
                f"{bucket}: the batch at offset {header.base_offset} came damaged from its leader"
            )


async def _nothing(start: int) -> Sequence[memoryview]:
    return ()
