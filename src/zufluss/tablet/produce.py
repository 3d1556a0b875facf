"""PRODUCE_LOG, the append path: the hot path of the server, top to bottom on this page.

    frame in the receive buffer
      → scan the fields by hand (no copy of the records)
      → check every batch against its body and the table's schema
      → decide idempotence, stamp offsets and time in place, one write        (log.append)
      → acknowledge: at once, or when the group commit has made it durable     (replica.advance)

Nothing of a bucket entry is written unless all of its batches are good. One entry's error never
touches another entry. `acks=all` (-1) waits for the high watermark; 1 and 0 are answered once
written. The receive buffer is ours only during the call, which is enough: what must outlive it
has been written by then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from zufluss.errors import (
    ErrorCode,
    InvalidRequiredAcksError,
    LogStorageError,
    ZuflussError,
)
from zufluss.wire.scan import (
    ProducedBucket,
    ProduceScan,
    produce_ok,
    produce_response,
    scan_produce,
)

if TYPE_CHECKING:
    from zufluss.log.log import Appended
    from zufluss.net.connection import Connection
    from zufluss.record.check import CheckedBatch
    from zufluss.replica.replica import Replica
    from zufluss.tablet.server import BucketKey, TableState, TabletServer

log = structlog.get_logger(__name__)

ALL = -1
ACKS = (ALL, 1, 0)
SMALL_BYTES_MAX = 64 * 1024
"""Requests up to this size try the path with one kernel call."""

_now_ns = time.time_ns
_LONE = {0}
"""What waits of a request with one entry; shared, since nothing is ever taken from it."""


class Awaiting(Protocol):
    """A handler with requests that wait to be acknowledged."""

    pending: set[PendingProduce]


class PendingProduce:
    """A request of which some entries are written and not yet acknowledged."""

    __slots__ = (
        "answered",
        "connection",
        "deadline",
        "entries",
        "owner",
        "request_id",
        "waiting",
    )

    def __init__(
        self, owner: Awaiting, connection: Connection, request_id: int, deadline: float
    ) -> None:
        self.owner = owner
        self.connection = connection
        self.request_id = request_id
        self.deadline = deadline
        self.answered = False
        self.entries: list[ProducedBucket] = []
        self.waiting: set[int] = _LONE
        """Positions of the entries that are not acknowledged yet."""

    def acknowledged(self) -> None:
        """Its lone entry passed the high watermark."""
        self._answer()

    def failed(self, error: ZuflussError) -> None:
        """What still waits will not be acknowledged; what was acknowledged stays so."""
        for position in self.waiting:
            self.refuse(position, error)
        self._answer()

    def refuse(self, position: int, error: ZuflussError) -> None:
        """Have one entry answered with an error."""
        self.entries[position] = self.entries[position]._replace(
            base_offset=None, error_code=error.code, error_message=error.message
        )

    def settled(self, position: int) -> None:
        """The outcome of one of several entries is known."""
        self.waiting.discard(position)
        if not self.waiting:
            self._answer()

    def timed_out(self) -> None:
        """The client's timeout passed before the data was durable."""
        self.failed(
            ZuflussError(
                "the write was not durable within the request's timeout_ms; it may still become "
                "so: retry with the same writer id and sequence",
                code=ErrorCode.REQUEST_TIME_OUT,
            )
        )

    def body(self) -> bytes:
        """The answer."""
        return produce_response(self.entries)

    def _answer(self) -> None:
        if self.answered:
            return
        self.answered = True
        self.owner.pending.discard(self)
        self.connection.respond_small(self.request_id, self.body())
        self.connection.done()


class PendingEntry:
    """One of several entries of a pending request."""

    __slots__ = ("pending", "position")

    def __init__(self, pending: PendingProduce, position: int) -> None:
        self.pending = pending
        self.position = position

    def acknowledged(self) -> None:
        """It passed the high watermark."""
        self.pending.settled(self.position)

    def failed(self, error: ZuflussError) -> None:
        """It will not be acknowledged; the other entries may well be."""
        if not self.pending.answered:
            self.pending.refuse(self.position, error)
            self.pending.settled(self.position)


class Producer:
    """The handler of PRODUCE_LOG."""

    def __init__(self, server: TabletServer) -> None:
        self.server = server
        self.pending: set[PendingProduce] = set()
        self._last: TableState | None = None
        """The table of the last request: the next one is usually of the same."""

    def handle(
        self,
        connection: Connection,
        request_id: int,
        version: int,
        array: Any,
        view: memoryview,
        start: int,
        end: int,
    ) -> None:
        """Answer one request."""
        table = self._last
        if end - start <= SMALL_BYTES_MAX and table is not None:
            usual = table.checker.check_produce(array, view, start, end, table.info.table_id)
            if usual is not None:
                bucket, timeout_ms, batches = usual
                self._one(connection, request_id, ALL, timeout_ms, table, bucket, view, batches)
                return
        scan = scan_produce(view, start, end)
        if scan.acks not in ACKS:
            raise InvalidRequiredAcksError(
                f"acks={scan.acks} is not allowed; use -1 (all), 1 (leader) or 0 (none)"
            )
        table = self.server.tables.get(scan.table_id)
        self._last = None if table is None or table.has_primary_key else table
        if len(scan.buckets) != 1:
            self._many(connection, request_id, scan, array, view)
            return
        partition_id, bucket_id, records, stop = scan.buckets[0]
        bucket = (partition_id, bucket_id)
        try:
            batches = self._check(scan.table_id, bucket, array, records, stop)
        except ZuflussError as e:
            refused = self._refused(e, scan.table_id, bucket)
            connection.respond_small(request_id, produce_response([refused]))
            connection.done()
            return
        assert table is not None  # _check found it
        self._one(connection, request_id, scan.acks, scan.timeout_ms, table, bucket, view, batches)

    def _one(
        self,
        connection: Connection,
        request_id: int,
        acks: int,
        timeout_ms: int,
        table: TableState,
        bucket: BucketKey,
        view: memoryview,
        batches: tuple[CheckedBatch, ...],
    ) -> None:
        """Append the checked batches of a request with one bucket, and answer or wait."""
        partition_id, bucket_id = bucket
        try:
            replica = table.replicas.get(bucket) or self._missing(table, bucket)
            appended = self._append(replica, view, batches)
        except ZuflussError as e:
            refused = self._refused(e, table.info.table_id, bucket)
            connection.respond_small(request_id, produce_response([refused]))
            connection.done()
            return
        if acks == ALL and appended.end_offset > replica.log.high_watermark:
            pending = self._await(connection, request_id, timeout_ms)
            pending.entries.append(ProducedBucket(partition_id, bucket_id, appended.base_offset))
            replica.await_append(appended.end_offset, pending)
            return
        connection.respond_small(
            request_id, produce_ok(bucket_id, partition_id, appended.base_offset)
        )
        connection.done()

    def _many(
        self,
        connection: Connection,
        request_id: int,
        scan: ProduceScan,
        array: Any,
        view: memoryview,
    ) -> None:
        """Several bucket entries, each on its own, answered together."""
        entries: list[ProducedBucket] = []
        waits: list[tuple[int, Replica, int]] = []
        refused = 0
        for partition_id, bucket_id, start, end in scan.buckets:
            bucket = (partition_id, bucket_id)
            try:
                batches = self._check(scan.table_id, bucket, array, start, end)
                replica = self.server.tables[scan.table_id].replicas[bucket]
                appended = self._append(replica, view, batches)
            except ZuflussError as e:
                entry = self._refused(e, scan.table_id, bucket, quiet=refused > 0)
                refused += 1
            else:
                entry = ProducedBucket(partition_id, bucket_id, appended.base_offset)
                if scan.acks == ALL and appended.end_offset > replica.log.high_watermark:
                    waits.append((len(entries), replica, appended.end_offset))
            entries.append(entry)
        if not waits:
            connection.respond_small(request_id, produce_response(entries))
            connection.done()
            return
        pending = self._await(connection, request_id, scan.timeout_ms)
        pending.entries = entries
        pending.waiting = {position for position, _, _ in waits}
        for position, replica, end_offset in waits:
            replica.await_append(end_offset, PendingEntry(pending, position))

    def _check(
        self, table_id: int, bucket: BucketKey, array: Any, start: int, end: int
    ) -> tuple[CheckedBatch, ...]:
        """Check a bucket entry of a log table that is served here; raises what is wrong."""
        table = self.server.tables.get(table_id)
        if table is None or table.has_primary_key or bucket not in table.replicas:
            raise self.server.why_not(table_id, *bucket)
        return table.checker.check(array, start, end)

    def _missing(self, table: TableState, bucket: BucketKey) -> Replica:
        """The replica, if the table has another state since its last bucket was dropped."""
        current = self.server.tables.get(table.info.table_id)
        if current is None or bucket not in current.replicas:
            raise self.server.why_not(table.info.table_id, *bucket)
        self._last = current
        return current.replicas[bucket]

    def _append(
        self, replica: Replica, view: memoryview, batches: tuple[CheckedBatch, ...]
    ) -> Appended:
        if replica.failure is not None:
            raise replica.failure
        appended = replica.log.append(view, batches, _now_ns() // 1_000_000)
        if not appended.duplicate:
            self.server.appended(
                replica, appended.end_offset, view, batches[0].start, batches[-1].end
            )
        return appended

    def _await(self, connection: Connection, request_id: int, timeout_ms: int) -> PendingProduce:
        deadline = self.server.loop.time() + timeout_ms / 1000
        pending = PendingProduce(self, connection, request_id, deadline)
        self.pending.add(pending)
        return pending

    def _refused(
        self, e: ZuflussError, table_id: int, bucket: BucketKey, *, quiet: bool = False
    ) -> ProducedBucket:
        """The answer for a refused entry; the log gets one line per request, not per entry."""
        if isinstance(e, LogStorageError):
            log.error("append_failed", table_id=table_id, bucket=bucket, error=str(e))
        elif not quiet:
            log.info("append_refused", table_id=table_id, bucket=bucket, error=str(e))
        return ProducedBucket(*bucket, None, e.code, e.message)

    def expire(self, now: float) -> None:
        """Answer the requests whose timeout passed."""
        for pending in [p for p in self.pending if p.deadline < now]:
            pending.timed_out()
