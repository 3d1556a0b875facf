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
from typing import TYPE_CHECKING, Any

import structlog

from zufluss.errors import (
    ErrorCode,
    InvalidRequiredAcksError,
    LogStorageError,
    ZuflussError,
)
from zufluss.wire.scan import ProducedBucket, produce_ok, produce_response, scan_produce

if TYPE_CHECKING:
    from zufluss.log.log import Appended
    from zufluss.net.connection import Connection
    from zufluss.replica.replica import Replica
    from zufluss.tablet.server import TableState, TabletServer

log = structlog.get_logger(__name__)

_now_ns = time.time_ns


class PendingProduce:
    """A request of which some entries are written and not yet acknowledged."""

    __slots__ = (
        "answered",
        "connection",
        "deadline",
        "entries",
        "owner",
        "remaining",
        "request_id",
    )

    def __init__(
        self, owner: Producer, connection: Connection, request_id: int, deadline: float
    ) -> None:
        self.owner = owner
        self.connection = connection
        self.request_id = request_id
        self.deadline = deadline
        self.remaining = 0
        self.answered = False
        self.entries: list[ProducedBucket] = []

    def acknowledged(self) -> None:
        """One more entry passed the high watermark."""
        self.remaining -= 1
        if self.remaining == 0:
            self._answer()

    def failed(self, error: ZuflussError) -> None:
        """An entry will not be acknowledged: say so for every entry that was still waiting."""
        if not self.answered:
            self.entries = [
                e
                if e.error_code
                else e._replace(error_code=error.code, error_message=error.message)
                for e in self.entries
            ]
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

    def _answer(self) -> None:
        if self.answered:
            return
        self.answered = True
        self.owner.pending.discard(self)
        self.connection.respond_small(self.request_id, produce_response(self.entries))
        self.connection.done()


class Producer:
    """The handler of PRODUCE_LOG."""

    def __init__(self, server: TabletServer) -> None:
        self.server = server
        self.pending: set[PendingProduce] = set()

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
        scan = scan_produce(view, start, end)
        acks = scan.acks
        if acks != -1 and acks != 1 and acks != 0:
            raise InvalidRequiredAcksError(
                f"acks={acks} is not allowed; use -1 (all), 1 (leader) or 0 (none)"
            )
        if len(scan.buckets) != 1:
            self._many(connection, request_id, scan, array, view)
            return
        partition_id, bucket_id, records_start, records_end = scan.buckets[0]
        try:
            state, replica = self._find(scan.table_id, partition_id, bucket_id)
            appended = self._append(state, replica, array, view, records_start, records_end)
        except ZuflussError as e:
            self._refused(e, scan.table_id, bucket_id)
            entry = ProducedBucket(partition_id, bucket_id, None, e.code, e.message)
            connection.respond_small(request_id, produce_response([entry]))
            connection.done()
            return
        if acks == -1 and appended.end_offset > replica.log.high_watermark:
            pending = self._await(connection, request_id, scan.timeout_ms)
            pending.entries.append(
                ProducedBucket(partition_id, bucket_id, appended.base_offset, 0, None)
            )
            pending.remaining = 1
            replica.await_append(appended.end_offset, pending)
            return
        connection.respond_small(
            request_id, produce_ok(bucket_id, partition_id, appended.base_offset)
        )
        connection.done()

    def _many(
        self, connection: Connection, request_id: int, scan: Any, array: Any, view: memoryview
    ) -> None:
        """Several bucket entries, each on its own, answered together."""
        pending = self._await(connection, request_id, scan.timeout_ms)
        waits: list[tuple[Replica, int]] = []
        for partition_id, bucket_id, start, end in scan.buckets:
            try:
                state, replica = self._find(scan.table_id, partition_id, bucket_id)
                appended = self._append(state, replica, array, view, start, end)
            except ZuflussError as e:
                self._refused(e, scan.table_id, bucket_id)
                entry = ProducedBucket(partition_id, bucket_id, None, e.code, e.message)
            else:
                entry = ProducedBucket(partition_id, bucket_id, appended.base_offset, 0, None)
                if scan.acks == -1 and appended.end_offset > replica.log.high_watermark:
                    waits.append((replica, appended.end_offset))
            pending.entries.append(entry)
        pending.remaining = len(waits) + 1
        for replica, end_offset in waits:
            replica.await_append(end_offset, pending)
        pending.acknowledged()

    def _find(
        self, table_id: int, partition_id: int | None, bucket_id: int
    ) -> tuple[TableState, Replica]:
        state = self.server.tables.get(table_id)
        if state is not None and not state.has_primary_key:
            replica = state.replicas.get((partition_id, bucket_id))
            if replica is not None:
                return state, replica
        raise self.server.why_not(table_id, partition_id, bucket_id)

    def _append(
        self,
        state: TableState,
        replica: Replica,
        array: Any,
        view: memoryview,
        start: int,
        end: int,
    ) -> Appended:
        if replica.failure is not None:
            raise replica.failure
        batches = state.checker.check(array, start, end)
        appended = replica.log.append(view, batches, _now_ns() // 1_000_000)
        if not appended.duplicate:
            self.server.appended(replica, appended.end_offset, view, start, end)
        return appended

    def _await(self, connection: Connection, request_id: int, timeout_ms: int) -> PendingProduce:
        deadline = self.server.loop.time() + timeout_ms / 1000
        pending = PendingProduce(self, connection, request_id, deadline)
        self.pending.add(pending)
        return pending

    def _refused(self, e: ZuflussError, table_id: int, bucket_id: int) -> None:
        if isinstance(e, LogStorageError):
            log.error("append_failed", table_id=table_id, bucket=bucket_id, error=str(e))
        else:
            log.info("append_refused", table_id=table_id, bucket=bucket_id, error=str(e))

    def expire(self, now: float) -> None:
        """Answer the requests whose timeout passed."""
        for pending in [p for p in self.pending if p.deadline < now]:
            pending.timed_out()
