"""PRODUCE_LOG, the append path: the hot path of the server, top to bottom on this page.

    frame in the receive buffer
      → scan the fields by hand (no copy of the records)
      → check every batch against its body and the table's schema
      → decide idempotence, stamp offsets and time in place, one write        (log.append)
      → acknowledge: at once, or when the group commit has made it durable     (replica.advance)

Nothing of a bucket entry is written unless all of its batches are good. One entry's error never
touches another entry. `acks=all` (-1) waits for the high watermark; 1 and 0 are answered once
written. The receive buffer is ours only during the call.

A small append costs a call into the kernel more than its bytes, so usual small requests (one
bucket, one batch, `acks=all`) are checked as they come and then gather in an `AppendBuffer` per
bucket until the end of the loop turn: one write and one step of the high watermark for all of them.
They are written in the order of their arrival, because any other append to a bucket first writes
the gathered entries. If the write fails, exactly these entries are refused.

Requests with many entries are checked and appended in turns of the event loop, and compressed
content that takes long to unpack is checked in a thread. The client's later requests wait for that,
so that its batches stay in order; other clients go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import structlog

from zufluss.errors import (
    LogStorageError,
    ZuflussError,
    reason_of,
    refusal_of,
)
from zufluss.log.log import AppendResult
from zufluss.net.connection import ServerConnection
from zufluss.record.batch.check import CheckedBatch, ContentCheck, LaterChecks
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import BucketKey, Buckets, TableState
from zufluss.tablet.durability import Durability
from zufluss.tablet.pending import ALL, LongProduce, PendingEntry, PendingProduce, check_acks
from zufluss.tablet.refusals import RefusalLog
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.threads import Threads
from zufluss.wire.hot.buckets import ENTRIES_AT_ONCE, BucketScan
from zufluss.wire.hot.produce import (
    ProducedBucket,
    ProduceScan,
    produce_ok,
    produce_response,
    scan_produce,
    scan_produce_steps,
)

log = structlog.get_logger(__name__)

SMALL_BYTES_MAX = 64 * 1024
"""Requests up to this size try the path with one kernel call."""
UNPACK_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of compressed content, uncompressed, that a request may have checked on the event loop."""
LATER_BYTES_MAX = 256 * 1024 * 1024
"""Requests that may wait for their turn, or for a thread that checks their content."""
GATHERED_BYTES_MAX = 64 * 1024
"""Entries that gather for one write; as much as the commit log takes as one entry."""

_new = tuple.__new__
_UNFINISHED = -1
"""The waiting position of a request whose entries are not all appended yet."""


class CheckedEntry(NamedTuple):
    """A bucket entry of a request after its batches were checked."""

    bucket: BucketKey
    """The bucket."""
    batches: tuple[CheckedBatch, ...]
    """Its batches, none if they are refused."""
    error: Exception | None
    """Why they are refused; None if they are not."""
    later: list[ContentCheck]
    """Checks of compressed content that are still to be done."""


def refused_entry(bucket: BucketKey, error: Exception) -> CheckedEntry:
    """A bucket entry that cannot be appended."""
    if isinstance(error, ZuflussError):
        error = error.with_traceback(None)  # its frames hold the bytes of the request
    return CheckedEntry(bucket, (), error, [])


def _check_contents(entries: list[CheckedEntry], body: Any) -> list[CheckedEntry]:
    """Do the checks of compressed content that were left; in a thread."""
    done = []
    for entry in entries:
        try:
            for content in entry.later:
                content.run(body)
        except Exception as e:
            done.append(refused_entry(entry.bucket, e))
        else:
            done.append(entry)
    return done


def _lose(connections: Iterable[ServerConnection]) -> None:
    """Close connections of clients that cannot be told what became of their writes.

    They may have been written; a client finds out when it sends them again.
    """
    log.exception("append_not_answered")
    for connection in set(connections):
        connection.abort()


class AppendBuffer:
    """Small entries of one bucket that came in this loop turn: one batch and one request each."""

    __slots__ = ("batches", "buffer", "requests", "table", "writers")

    def __init__(self, table: TableState) -> None:
        self.table = table
        self.buffer = bytearray()
        """The batches, back to back."""
        self.batches: list[CheckedBatch] = []
        """Their positions in the buffer."""
        self.requests: list[tuple[ServerConnection, int, int]] = []
        """The requests of the batches: connection, request id, timeout_ms."""
        self.writers: set[int] = set()
        """The idempotent writers of the batches. A second batch of a writer takes the general
        path: its sequence number can only be checked after the first was written."""


class ProduceHandler:
    """The handler of PRODUCE_LOG."""

    def __init__(
        self,
        buckets: Buckets,
        durability: Durability,
        tasks: BackgroundTasks,
        clock_ms: Callable[[], int],
        expiry_ms: Callable[[], int] | None = None,
    ) -> None:
        """`expiry_ms` is the time by which writers have expired; by default the clock's."""
        self._buckets = buckets
        self.tasks = tasks
        self._clock_ms = clock_ms
        self._expiry_ms = expiry_ms or clock_ms
        self._durability = durability
        self._loop = asyncio.get_running_loop()
        self.pending: set[PendingProduce] = set()
        self._checkers = Threads(1, "zufluss-check")
        self._later_bytes = 0
        self._refusals = RefusalLog()
        self._gathered: dict[Replica, AppendBuffer] = {}
        self._last: TableState | None = None
        """The table of the last request, which is usually that of the next one."""

    def handle(
        self,
        connection: ServerConnection,
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
            if usual is not None and self._gather(connection, request_id, table, view, usual):
                return
        scan = scan_produce(view, start, end)
        if scan is None or len(scan.buckets) > ENTRIES_AT_ONCE:
            received = array[start:end]
            self._begin_later(connection, received, partial(self._long, connection, request_id))
            return
        check_acks(scan.acks)
        table = self._buckets.tables.get(scan.table_id)
        self._last = None if table is None or table.has_primary_key else table
        later = LaterChecks(UNPACK_BYTES_MAX)
        entries = [
            self._check_entry(scan.table_id, bucket, array, later) for bucket in scan.buckets
        ]
        if later.checks:
            unpack = partial(self._unpack, connection, request_id, scan, entries)
            self._begin_later(connection, array[:end], unpack)
        else:
            self._write_checked(connection, request_id, scan, entries, view)

    def _check_entry(
        self, table_id: int, scanned: BucketScan, array: Any, later: LaterChecks
    ) -> CheckedEntry:
        """Check a bucket entry; content that takes long to check is left to `later`."""
        bucket = (scanned.partition_id, scanned.bucket_id)
        before = len(later.checks)
        try:
            batches = self._check(table_id, bucket, array, scanned.start, scanned.end, later)
        except Exception as e:
            return refused_entry(bucket, e)
        return CheckedEntry(bucket, batches, None, later.checks[before:])

    def _write_checked(
        self,
        connection: ServerConnection,
        request_id: int,
        scan: ProduceScan,
        entries: list[CheckedEntry],
        view: memoryview,
    ) -> None:
        """Append the entries that are good; answer now or when they are durable."""
        if len(entries) != 1:
            self._many(connection, request_id, scan, entries, view)
            return
        (entry,) = entries
        if entry.error is not None:
            refused = self._refused(entry.error, scan.table_id, entry.bucket)
            connection.finish(request_id, produce_response([refused]))
            return
        table = self._buckets.tables.get(scan.table_id)
        self._one(connection, request_id, scan, table, entry, view)

    def _begin_later(
        self,
        connection: ServerConnection,
        received: Any,
        handle: Callable[[Any], Coroutine[Any, Any, None]],
    ) -> None:
        """Handle a request beside others, with a copy of the bytes that were received."""
        size = len(received)
        if self._later_bytes + size > LATER_BYTES_MAX:
            raise LogStorageError(
                f"{self._later_bytes} bytes of requests wait to be checked, "
                f"{LATER_BYTES_MAX} are allowed; try again after a pause"
            )
        body = received.copy()

        def handled() -> None:
            self._later_bytes -= size
            connection.go_on()

        self._later_bytes += size
        connection.stop_requests()
        self.tasks.answer(connection, handle(body), handled)

    async def _long(self, connection: ServerConnection, request_id: int, body: Any) -> None:
        """Scan, check and append a request with many entries in turns."""
        pace, view = connection.pace, memoryview(body)
        try:
            scan = await pace.result(scan_produce_steps(view, 0, len(view)))
            check_acks(scan.acks)
            later = LaterChecks(UNPACK_BYTES_MAX)
            entries = []
            for bucket in scan.buckets:
                await pace.pause()
                entries.append(self._check_entry(scan.table_id, bucket, body, later))
            if later.checks:
                entries = await self._check_contents(entries, body)
        except Exception as problem:
            self._refuse_request(connection, request_id, problem)
            return
        try:
            await self._append_in_turns(connection, request_id, scan, entries, view)
        except Exception:  # some may have been written
            _lose([connection])

    async def _unpack(
        self,
        connection: ServerConnection,
        request_id: int,
        scan: ProduceScan,
        entries: list[CheckedEntry],
        body: Any,
    ) -> None:
        """Check the content of a request with few entries in a thread, then append it."""
        try:
            checked = await self._check_contents(entries, body)
        except Exception as problem:
            self._refuse_request(connection, request_id, problem)
            return
        self._write_checked(connection, request_id, scan, checked, memoryview(body))

    async def _check_contents(self, entries: list[CheckedEntry], body: Any) -> list[CheckedEntry]:
        return await self._loop.run_in_executor(self._checkers, _check_contents, entries, body)

    def _refuse_request(
        self, connection: ServerConnection, request_id: int, problem: Exception
    ) -> None:
        """Answer a whole request with an error: nothing of it was written."""
        refusal = refusal_of(problem)
        if refusal is not problem:
            log.error("produce_failed", exc_info=problem)
        connection.respond_error(request_id, refusal.code, refusal.message)
        connection.done()

    async def _append_in_turns(
        self,
        connection: ServerConnection,
        request_id: int,
        scan: ProduceScan,
        checked: Sequence[CheckedEntry],
        view: memoryview,
    ) -> None:
        """Append many bucket entries, each on its own, and answer them together."""
        pace = connection.pace
        pending = LongProduce(self, connection, request_id, 0.0)
        pending.waiting = {_UNFINISHED}
        for position, entry in enumerate(checked):
            await pace.pause()
            produced, wait = self._append_entry(scan, entry, view)
            pending.entries.append(produced)
            if wait is not None:
                pending.waiting.add(position)
                replica, end_offset = wait
                replica.await_append(end_offset, PendingEntry(pending, position))
        pending.deadline = self._loop.time() + scan.timeout_ms / 1000
        self.pending.add(pending)  # only now: entries that are not appended yet cannot time out
        pending.settled(_UNFINISHED)

    # -- small appends: gathered over a loop turn -------------------------------------------

    def _gather(
        self,
        connection: ServerConnection,
        request_id: int,
        table: TableState,
        view: memoryview,
        usual: tuple[int, ...],
    ) -> bool:
        """Gather a usual request until the end of the turn; False if it takes the general path."""
        (
            start, end, magic, schema_id, count, delta, writer_id, sequence,
            _, partition, bucket_id, timeout_ms,
        ) = usual  # fmt: skip
        replica = table.replicas.get((None if partition < 0 else partition, bucket_id))
        if replica is None:
            return False
        gathered = self._gathered.get(replica)
        if gathered is None:
            if not self._gathered:
                connection.at_turn_end(self.write_gathered)
            gathered = self._gathered[replica] = AppendBuffer(table)
        buffer = gathered.buffer
        at = len(buffer)
        stop = at + end - start
        if stop > GATHERED_BYTES_MAX and at:
            return False
        if writer_id >= 0:
            if writer_id in gathered.writers or not replica.log.writers.is_next(
                writer_id, sequence
            ):
                return False
            gathered.writers.add(writer_id)
        entries = len(gathered.requests)
        try:
            buffer += view[start:end]
            gathered.batches.append(
                _new(CheckedBatch, (at, stop, magic, schema_id, count, delta, writer_id, sequence))
            )
            gathered.requests.append((connection, request_id, timeout_ms))
        except BaseException:
            del buffer[at:], gathered.batches[entries:], gathered.requests[entries:]
            gathered.writers.discard(writer_id)
            raise
        return True

    def write_gathered(self) -> None:
        """Write the entries that gathered in this loop turn."""
        gathered, self._gathered = self._gathered, {}
        for replica, entries in gathered.items():
            try:
                self._write(replica, entries)
            except Exception:
                _lose(connection for connection, _, _ in entries.requests)

    def _write(self, replica: Replica, gathered: AppendBuffer) -> None:
        """Append the gathered entries of a bucket; answer their requests now or when durable."""
        if not gathered.batches:
            return
        bucket = (replica.bucket.partition_id, replica.bucket.bucket_id)
        view = memoryview(gathered.buffer)
        try:
            if gathered.table.replicas.get(bucket) is not replica:
                raise self._buckets.why_not(gathered.table.info.table_id, *bucket)
            if replica.failure is not None:
                raise replica.failure
            self._durability.admit()
            appended = replica.log.append_new(view, gathered.batches, self._clock_ms())
            try:
                self._durability.appended(replica, appended.end_offset, view, 0, len(view))
            except Exception as e:
                raise replica.fail(f"an append was not committed ({reason_of(e)})") from e
        except Exception as e:
            self._refuse_gathered(e, gathered, bucket)
            return
        try:
            self._answer_gathered(replica, gathered, appended)
        except Exception:
            _lose(connection for connection, _, _ in gathered.requests)

    def _answer_gathered(
        self, replica: Replica, gathered: AppendBuffer, appended: AppendResult
    ) -> None:
        """Answer the requests of entries that were written, now or when they are durable."""
        durable = appended.end_offset <= replica.log.high_watermark
        _, partition_id, bucket_id = replica.bucket
        base = appended.base_offset
        for (connection, request_id, timeout_ms), batch in zip(
            gathered.requests, gathered.batches, strict=True
        ):
            offset = base
            base += batch[5] + 1
            if durable:
                connection.finish(request_id, produce_ok(bucket_id, partition_id, offset))
            else:
                pending = self._await(connection, request_id, timeout_ms)
                pending.entries.append(ProducedBucket(partition_id, bucket_id, offset))
                replica.await_append(base, pending)

    def _refuse_gathered(self, e: Exception, gathered: AppendBuffer, bucket: BucketKey) -> None:
        """Refuse the requests whose entries could not be written."""
        refused = produce_response([self._refused(e, gathered.table.info.table_id, bucket)])
        for connection, request_id, _ in gathered.requests:
            connection.finish(request_id, refused)

    # -- all others -------------------------------------------------------------------------

    def _one(
        self,
        connection: ServerConnection,
        request_id: int,
        scan: ProduceScan,
        table: TableState | None,
        entry: CheckedEntry,
        view: memoryview,
    ) -> None:
        """Append the checked batches of a request with one bucket; answer now or when durable."""
        partition_id, bucket_id = bucket = entry.bucket
        try:
            replica = None if table is None else table.replicas.get(bucket)
            replica = replica or self._missing(scan.table_id, bucket)
            appended = self._append(replica, view, entry.batches)
        except Exception as e:
            refused = self._refused(e, scan.table_id, bucket)
            connection.finish(request_id, produce_response([refused]))
            return
        try:
            if scan.acks == ALL and appended.end_offset > replica.log.high_watermark:
                pending = self._await(connection, request_id, scan.timeout_ms)
                produced = ProducedBucket(partition_id, bucket_id, appended.base_offset)
                pending.entries.append(produced)
                replica.await_append(appended.end_offset, pending)
                return
            connection.finish(request_id, produce_ok(bucket_id, partition_id, appended.base_offset))
        except Exception:
            _lose([connection])

    def _many(
        self,
        connection: ServerConnection,
        request_id: int,
        scan: ProduceScan,
        checked: list[CheckedEntry],
        view: memoryview,
    ) -> None:
        """Append several bucket entries, each on its own, and answer them together."""
        try:
            self._append_many(connection, request_id, scan, checked, view)
        except Exception:  # some may have been written
            _lose([connection])

    def _append_many(
        self,
        connection: ServerConnection,
        request_id: int,
        scan: ProduceScan,
        checked: list[CheckedEntry],
        view: memoryview,
    ) -> None:
        entries: list[ProducedBucket] = []
        waits: list[tuple[int, Replica, int]] = []
        for entry in checked:
            produced, wait = self._append_entry(scan, entry, view)
            if wait is not None:
                waits.append((len(entries), *wait))
            entries.append(produced)
        if not waits:
            connection.finish(request_id, produce_response(entries))
            return
        pending = self._await(connection, request_id, scan.timeout_ms)
        pending.entries = entries
        pending.waiting = {position for position, _, _ in waits}
        for position, replica, end_offset in waits:
            replica.await_append(end_offset, PendingEntry(pending, position))

    def _append_entry(
        self, scan: ProduceScan, entry: CheckedEntry, view: memoryview
    ) -> tuple[ProducedBucket, tuple[Replica, int] | None]:
        """Append a bucket entry; its answer, and which offset to wait for if it is not durable."""
        bucket = entry.bucket
        try:
            if entry.error is not None:
                raise entry.error
            replica = self._missing(scan.table_id, bucket)
            appended = self._append(replica, view, entry.batches)
        except Exception as e:
            return self._refused(e, scan.table_id, bucket), None
        wait = None
        if scan.acks == ALL and appended.end_offset > replica.log.high_watermark:
            wait = (replica, appended.end_offset)
        return ProducedBucket(*bucket, appended.base_offset), wait

    def _check(
        self,
        table_id: int,
        bucket: BucketKey,
        array: Any,
        start: int,
        end: int,
        later: LaterChecks,
    ) -> tuple[CheckedBatch, ...]:
        """Check a bucket entry; raises why the bucket or a batch is refused."""
        table = self._buckets.tables.get(table_id)
        if table is None or table.has_primary_key or bucket not in table.replicas:
            raise self._buckets.why_not(table_id, *bucket)
        return table.checker.check(array, start, end, later)

    def _missing(self, table_id: int, bucket: BucketKey) -> Replica:
        """The replica in the present state of a table, which may have been dropped meanwhile."""
        current = self._buckets.tables.get(table_id)
        if current is None or bucket not in current.replicas:
            raise self._buckets.why_not(table_id, *bucket)
        return current.replicas[bucket]

    def _append(
        self, replica: Replica, view: memoryview, batches: tuple[CheckedBatch, ...]
    ) -> AppendResult:
        gathered = self._gathered.pop(replica, None)
        if gathered is not None:
            self._write(replica, gathered)
        if replica.failure is not None:
            raise replica.failure
        self._durability.admit()
        appended = replica.log.append(view, batches, self._clock_ms(), self._expiry_ms())
        if not appended.duplicate:
            start, end = batches[0].start, batches[-1].end
            try:
                self._durability.appended(replica, appended.end_offset, view, start, end)
            except Exception as e:
                raise replica.fail(f"an append was not committed ({reason_of(e)})") from e
        return appended

    def _await(
        self, connection: ServerConnection, request_id: int, timeout_ms: int
    ) -> PendingProduce:
        deadline = self._loop.time() + timeout_ms / 1000
        pending = PendingProduce(self, connection, request_id, deadline)
        self.pending.add(pending)
        return pending

    def _refused(self, problem: Exception, table_id: int, bucket: BucketKey) -> ProducedBucket:
        """The answer for a refused entry."""
        e = refusal_of(problem)
        if e is not problem or isinstance(e, LogStorageError):
            self._refusals.failed("append_failed", e, problem, table_id, bucket=bucket)
        else:
            self._refusals.refused("append_refused", e, table_id, bucket=bucket)
        return ProducedBucket(*bucket, None, e.code, e.message)

    def expire(self, now: float) -> None:
        """Answer the requests whose timeout passed."""
        self.write_gathered()  # nothing is there, unless the end of a turn failed
        for pending in [p for p in self.pending if p.deadline < now]:
            pending.timed_out()
