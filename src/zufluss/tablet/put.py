"""PUT_KV, the write path of primary-key tables, top to bottom.

    frame in the receive buffer
      → scan the fields by hand, copy the records of each bucket
      → key-value worker: check, merge, new state                       (kv.tablet.prepare)
      → encoder: the changelog batch, compressed                        (kv.changelog)
      → append the changelog batch to the log, in the order of the worker  (log.append)
      → acknowledge when it is durable                                   (replica.advance)

Batches of one bucket are prepared in the order they came; the entries of one request are answered
together, and the error of one never touches another. A put that cannot be worked out changes
nothing and is refused. After an append that the log refuses, the state is ahead of the log: the
bucket fails, and is opened again from its log.

The worker has a queue with a limit. A put beyond it, or one that key-value memory has no room for
(`kv/memory.py`), is refused with an error that clients retry after a pause. Answers tell how full
the queue is, so that clients can slow down before.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from zufluss.cluster.authority import Authority
from zufluss.config import options
from zufluss.config import table_options as t
from zufluss.config.load import Configuration
from zufluss.errors import (
    AuthorizationError,
    ColumnLockedError,
    ErrorCode,
    ProducerFencedError,
    StorageBackpressureError,
    ZuflussError,
    reason_of,
    refusal_of,
)
from zufluss.kv.changelog import ChangelogBatch
from zufluss.kv.tablet import KvTablet, PreparedPut
from zufluss.log.worker import Done
from zufluss.model.merge import MergeMode, merge_engine
from zufluss.model.table import TableBucket
from zufluss.net.connection import ServerConnection
from zufluss.record.batch.kv import build_kv_batch
from zufluss.record.slices import Bytes, Slices
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import BucketKey, Buckets
from zufluss.tablet.contention import Contention
from zufluss.tablet.durability import Durability
from zufluss.tablet.pending import ALL, LongProduce, PendingEntry, PendingProduce, check_acks
from zufluss.tablet.refusals import RefusalLog
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.wire import messages as m
from zufluss.wire.hot.buckets import ENTRIES_AT_ONCE
from zufluss.wire.hot.produce import ProducedBucket, produce_response
from zufluss.wire.hot.put import PutScan, scan_put, scan_put_steps

log = structlog.get_logger(__name__)

MODES = frozenset(MergeMode)
"""Values of `agg_mode` that a put may have."""
QUEUE_BYTES_MAX = 64 << 20
"""Records that may wait for the worker, each batch counted with `BATCH_BYTES` more."""
BATCH_BYTES = 4096
"""What a batch costs beside its records: the time and memory of so many bytes."""
ENTRIES_WITH_WORKER = 32
"""Entries of a request with many that the worker has at a time: puts of others wait for as many.
With half of them the worker waits for the event loop."""
PRESSURE_FROM = 0.25
"""Answers tell how full the queue is from this share on."""
BACKPRESSURE_VERSION = 2
"""From this version of PUT_KV on clients know the error for a full queue."""

YIELD_TO_LOOKUPS = 0.75
"""The worker rests for this share of the time of a put during which lookups were answered.

Puts keep both cores busy if they can, and then lookups wait for a core at every turn. A put takes
about a millisecond, so nobody waits long for this."""

_COUNT_AT = 24
_COUNT = struct.Struct("<i")


class StateAheadError(Exception):
    """A put was applied to the state, and will not be in the log."""


class AppendablePut(NamedTuple):
    """A put batch that is ready to be appended."""

    batch: ChangelogBatch | None
    """None if the batch is a duplicate of one that was appended earlier."""
    end_offset: int
    """The end of the log after the batch."""
    now_ms: int
    """The time at which the batch was prepared."""
    deleted_rows: int | None
    """As in `PreparedPut`."""


class PendingPut(PendingProduce):
    """A put of which some entries are not acknowledged yet."""

    __slots__ = ("pressure", "version")

    def __init__(
        self,
        owner: PutHandler,
        connection: ServerConnection,
        request_id: int,
        version: int,
        deadline: float,
    ) -> None:
        super().__init__(owner, connection, request_id, deadline)
        self.pressure: Callable[[], float] = owner.pressure
        self.version = version

    def refuse(self, position: int, error: ZuflussError) -> None:
        """Answer one entry with an error, by a code that the client knows."""
        super().refuse(position, _known_error(error, self.version))

    def body(self, entries: Sequence[ProducedBucket]) -> bytes:
        """The answer about these entries; with the pressure from `PRESSURE_FROM` on."""
        answer = produce_response(entries)
        pressure = self.pressure()
        if pressure < PRESSURE_FROM:
            return answer
        response = m.PutKvResponse.FromString(answer)
        for entry in response.buckets_resp:
            entry.pressure = pressure
        return response.SerializeToString()


class LongPut(LongProduce, PendingPut):
    """A put with many entries, whose answer is encoded in turns of the event loop."""

    __slots__ = ()


class PutEntry(PendingEntry):
    """One bucket of a put."""

    __slots__ = ()
    pending: PendingPut

    def appended(self, bucket: TableBucket, end_offset: int, deleted_rows: int | None) -> None:
        """The changelog of the entry is in the log, up to `end_offset`."""
        entry = ProducedBucket(
            bucket.partition_id, bucket.bucket_id, end_offset, deleted_rows=deleted_rows
        )
        self.pending.entries[self.position] = entry


class WindowedEntry(PutEntry):
    """One bucket of a put with many, of which only some are with the worker at a time."""

    __slots__ = ("_window",)

    def __init__(self, pending: PendingPut, position: int, window: asyncio.Semaphore) -> None:
        super().__init__(pending, position)
        self._window: asyncio.Semaphore | None = window

    def appended(self, bucket: TableBucket, end_offset: int, deleted_rows: int | None) -> None:
        """The worker is done with the entry; another one may follow."""
        super().appended(bucket, end_offset, deleted_rows)
        self._make_room()

    def failed(self, error: ZuflussError) -> None:
        """The entry was refused, or will never be durable; another one may follow."""
        super().failed(error)
        self._make_room()

    def _make_room(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.release()


class ServerPut:
    """A put that the server itself makes, for a lookup that inserts."""

    __slots__ = ("outcome",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: asyncio.Future[None] = loop.create_future()

    def appended(self, bucket: TableBucket, end_offset: int, deleted_rows: int | None) -> None:
        """The put is in the log."""

    def acknowledged(self) -> None:
        """The put is durable."""
        if not self.outcome.done():
            self.outcome.set_result(None)

    def failed(self, error: ZuflussError) -> None:
        """The put was refused, or will never be durable."""
        if not self.outcome.done():
            self.outcome.set_exception(error)


AllocateIds = Callable[[int, int, int], Awaitable[tuple[int, int]]]
"""Asks the coordinator for ids of an auto-increment column: table id, column id and count give the
first id and the one after the last."""


class PutHandler:
    """The handler of PUT_KV."""

    def __init__(
        self,
        conf: Configuration,
        buckets: Buckets,
        durability: Durability,
        kv: KvHost,
        contention: Contention,
        tasks: BackgroundTasks,
        clock_ms: Callable[[], int],
        allocate_ids: AllocateIds,
        expiry_ms: Callable[[], int] | None = None,
    ) -> None:
        """`expiry_ms` is the time by which writers have expired; by default the clock's."""
        self._buckets = buckets
        self._durability = durability
        self._kv = kv
        self._contention = contention
        self.tasks = tasks
        self._clock_ms = clock_ms
        self._expiry_ms = expiry_ms or clock_ms
        self._allocate_ids = allocate_ids
        self._loop = asyncio.get_running_loop()
        self.pending: set[PendingProduce] = set()
        self.fenced = 0
        """Puts that a fence refused."""
        self._queued_bytes = 0
        self._refusals = RefusalLog()
        self._authority = Authority(conf)
        self._flush_bytes = conf.get(options.ZUFLUSS_KV_FLUSH_LOG_SIZE)
        self._locks: WeakKeyDictionary[KvTablet, asyncio.Lock] = WeakKeyDictionary()
        """Held while ids are reserved for a bucket; a bucket that was closed leaves none behind."""

    def pressure(self) -> float:
        """How full the worker's queue is, from 0 to 1."""
        return self._queued_bytes / QUEUE_BYTES_MAX

    def expire(self, now: float) -> None:
        """Answer the requests whose timeout passed."""
        for pending in [p for p in self.pending if p.deadline < now]:
            pending.timed_out()

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
        scan = scan_put(view, start, end)
        if scan is None or len(scan.buckets) > ENTRIES_AT_ONCE:
            self._begin_later(connection, request_id, version, array[start:end])
            return
        may_overwrite = self._check_request(scan, connection)
        pending = PendingPut(self, connection, request_id, version, self._deadline(scan))
        pending.entries = [ProducedBucket(b.partition_id, b.bucket_id) for b in scan.buckets]
        pending.waiting = set(range(len(scan.buckets)))
        self.pending.add(pending)
        if not scan.buckets:
            pending.acknowledged()
        for position in range(len(scan.buckets)):
            self._begin_entry(PutEntry(pending, position), scan, may_overwrite, array)

    def _check_request(self, scan: PutScan, connection: ServerConnection) -> bool:
        """Refuse a request that is not served; return whether it may pass the merge engine."""
        check_acks(scan.acks)
        _check_mode(scan.mode)
        return scan.mode != MergeMode.OVERWRITE or self._authority.may_overwrite(
            connection.principal
        )

    def _deadline(self, scan: PutScan) -> float:
        return self._loop.time() + scan.timeout_ms / 1000

    def _begin_entry(self, entry: PutEntry, scan: PutScan, may_overwrite: bool, array: Any) -> None:
        """Hand the records of one bucket to the worker, or refuse them."""
        partition_id, bucket_id, begin, stop = scan.buckets[entry.position]
        try:
            replica = self._buckets.kv_replica(scan.table_id, partition_id, bucket_id)
            if not may_overwrite:
                _check_overwrite(replica, entry.pending.connection.principal)
            self._check_queue()
            self._submit(entry, replica, scan, array[begin:stop].copy())
        except Exception as e:
            self.refuse(entry, e, scan.table_id, (partition_id, bucket_id))

    def _begin_later(
        self, connection: ServerConnection, request_id: int, version: int, received: Any
    ) -> None:
        """Begin a request with many entries in turns; the client's later requests wait."""
        try:
            self._check_queue()
        except ZuflussError as e:
            raise _known_error(e, version) from None
        body = received.copy()

        def begun() -> None:
            self._queued_bytes -= len(body)
            connection.go_on()

        self._queued_bytes += len(body)
        connection.stop_requests()
        beginning = self._begin_in_turns(connection, request_id, version, body)
        self.tasks.answer(connection, beginning, begun)

    async def _begin_in_turns(
        self, connection: ServerConnection, request_id: int, version: int, body: Any
    ) -> None:
        """Begin the entries one by one, so that the worker has puts of others in between."""
        pace, view = connection.pace, memoryview(body)
        try:
            scan = await pace.result(scan_put_steps(view, 0, len(view)))
            may_overwrite = self._check_request(scan, connection)
            pending = LongPut(self, connection, request_id, version, self._deadline(scan))
            pending.waiting = set()
            for position, bucket in enumerate(scan.buckets):
                await pace.pause()
                pending.entries.append(ProducedBucket(bucket.partition_id, bucket.bucket_id))
                pending.waiting.add(position)
        except Exception as problem:
            refusal = refusal_of(problem)
            if refusal is not problem:
                log.error("put_failed", exc_info=problem)
            connection.respond_error(request_id, refusal.code, refusal.message)
            connection.done()
            return
        window = asyncio.Semaphore(ENTRIES_WITH_WORKER)
        try:
            self.pending.add(pending)
            if not scan.buckets:
                pending.acknowledged()
            for position in range(len(scan.buckets)):
                await window.acquire()
                await pace.pause()
                entry = WindowedEntry(pending, position, window)
                self._begin_entry(entry, scan, may_overwrite, body)
        except Exception:  # some may have been written, and the client cannot be told which
            log.exception("put_not_answered")
            connection.abort()

    def _check_queue(self) -> None:
        """Refuse a put that the worker, or the shared log, has no room for."""
        if self._queued_bytes >= QUEUE_BYTES_MAX:
            raise StorageBackpressureError(
                f"{self._queued_bytes} bytes of puts wait for this server, {QUEUE_BYTES_MAX} are "
                "allowed; try again after a pause"
            )
        self._durability.admit()

    def _submit(
        self, entry: PutEntry | ServerPut, replica: Replica, scan: PutScan, records: Bytes
    ) -> None:
        """Hand the records of one bucket to the worker."""
        if replica.tablet.table.auto_increment is not None:
            self.tasks.spawn(self._submit_with_ids(entry, replica, scan, records))
            return
        self.work(entry, replica, scan.acks, records, scan.targets, scan.mode)

    def work(
        self,
        entry: PutEntry | ServerPut,
        replica: Replica,
        acks: int,
        records: Bytes,
        targets: tuple[int, ...],
        mode: int,
    ) -> None:
        """Hand one batch to the worker; its outcome comes back to `_prepared`."""
        tablet, size = replica.tablet, BATCH_BYTES + len(records)
        promised = 0 if tablet.table.auto_increment is None else _record_count(records)
        now_ms, expiry_ms, encoders = self._clock_ms(), self._expiry_ms(), self._kv.encoders

        def prepare() -> PreparedPut:
            encoders.check(tablet)
            return tablet.prepare(records, targets, mode, now_ms, expiry_ms)

        def prepared() -> None:
            nonlocal size, promised
            self._queued_bytes -= size
            tablet.ids.promised -= promised
            size = promised = 0  # the worker calls it again if memory runs out behind it

        self._queued_bytes += size
        try:
            self.run(entry, replica, acks, prepare, prepared)
        except BaseException:
            prepared()
            raise

    def run(
        self,
        entry: PutEntry | ServerPut,
        replica: Replica,
        acks: int,
        prepare: Callable[[], PreparedPut],
        prepared: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a batch in the worker, after all earlier ones, and append its changelog.

        `prepared` is called on the event loop when `prepare` has succeeded or failed.
        """
        encoders, contention = self._kv.encoders, self._contention
        tablet = replica.tablet

        def work() -> None:
            began, lookups = time.monotonic(), contention.lookups
            contention.puts += 1
            submit: Callable[[Done], None]
            try:
                put = prepare()
            except Exception as e:
                if isinstance(e, ZuflussError):
                    e = e.with_traceback(None)  # its frames hold the records
                submit = partial(encoders.refuse, partial(_raise, e))
            else:
                submit = partial(encoders.submit, tablet, put.row_bytes, partial(_encode, put))
            try:
                submit(done)
            except Exception as e:
                ahead = StateAheadError(f"the changelog of a put could not be encoded: {e!r}")
                self._loop.call_soon_threadsafe(done, ahead)
            contention.puts += 1
            if contention.lookups > lookups:
                time.sleep(YIELD_TO_LOOKUPS * (time.monotonic() - began))

        def done(outcome: AppendablePut | Exception) -> None:
            prepared()
            self._prepared(entry, replica, acks, outcome)

        self._kv.worker.run(work)

    async def _submit_with_ids(
        self, entry: PutEntry | ServerPut, replica: Replica, scan: PutScan, records: Bytes
    ) -> None:
        """Reserve ids for the rows of an auto-increment table, in order of arrival, then submit."""
        try:
            await self.reserve_ids(replica, _record_count(records))
            self.work(entry, replica, scan.acks, records, scan.targets, scan.mode)
        except Exception as e:
            self.refuse(entry, e, scan.table_id, _bucket_key(replica))

    async def reserve_ids(self, replica: Replica, count: int) -> None:
        """Reserve ids for a batch of `count` records.

        Near the end of the column's type fewer are handed out than asked for, then an error.
        """
        tablet = replica.tablet
        table = tablet.table
        assert table.auto_increment is not None
        lock = self._locks.setdefault(tablet, asyncio.Lock())
        column = table.schema.columns[table.auto_increment]
        cached = table.info.property(t.TABLE_AUTO_INCREMENT_CACHE_SIZE)
        async with lock:
            while (missing := tablet.ids.promised + count - tablet.ids.left) > 0:
                tablet.ids.add(
                    *await self._allocate_ids(
                        replica.bucket.table_id, column.id, max(missing, cached)
                    )
                )
            tablet.ids.promised += count

    async def insert(self, replica: Replica, keys: Slices) -> None:
        """Insert a row for each of these keys that does not exist; returns when durable."""
        table = replica.tablet.table
        rows = table.codec.encode(table.rows_of_keys(keys))
        records = np.frombuffer(build_kv_batch(table.info.schema_id, keys, rows), np.uint8)
        targets = tuple(sorted(table.schema.index_of(name) for name in table.schema.primary_key))
        if table.auto_increment is not None:
            await self.reserve_ids(replica, keys.count)
        insert = ServerPut(self._loop)
        self.work(insert, replica, ALL, records, targets, 0)
        await insert.outcome

    def _prepared(
        self,
        entry: PutEntry | ServerPut,
        replica: Replica,
        acks: int,
        outcome: AppendablePut | Exception,
    ) -> None:
        """Append the changelog that the worker prepared, and acknowledge it when durable."""
        bucket = replica.bucket
        try:
            end_offset = self._append(replica, outcome)
            deleted_rows = outcome.deleted_rows if isinstance(outcome, AppendablePut) else None
            entry.appended(bucket, end_offset, deleted_rows)
            if acks == ALL and end_offset > replica.log.high_watermark:
                replica.await_append(end_offset, entry)
            else:
                entry.acknowledged()
        except ZuflussError as e:
            self.refuse(entry, e, bucket.table_id, _bucket_key(replica))
            return
        except Exception as e:
            error = replica.fail(f"a put was not completed ({reason_of(e)})")
            self.refuse(entry, error, bucket.table_id, _bucket_key(replica))
            return
        try:
            if replica.tablet.flush_due(self._flush_bytes):
                self._kv.worker.submit(replica.tablet.flush, partial(_flush_begun, replica))
        except Exception as e:  # the put is done, and must not be done again; a later one flushes
            log.warning("flush_not_begun", bucket=str(bucket), error=reason_of(e))

    def _append(self, replica: Replica, outcome: AppendablePut | Exception) -> int:
        if replica.failure is not None:
            raise replica.failure
        if not self._buckets.serves(replica):
            raise self._buckets.why_not(*replica.bucket)
        if isinstance(outcome, StateAheadError) or replica.tablet.failure is not None:
            reason = reason_of(replica.tablet.failure or outcome)
            raise replica.fail(f"a put was not completed ({reason})")
        if isinstance(outcome, Exception):
            if not isinstance(outcome, ZuflussError):
                log.error("put_failed", bucket=str(replica.bucket), exc_info=outcome)
            raise refusal_of(outcome)
        if outcome.batch is None:
            if outcome.end_offset > replica.log.log_end_offset:
                raise replica.fail("a put that is in the state is not in the log")
            return outcome.end_offset
        view, checked = outcome.batch
        end_offset = replica.log.log_end_offset + checked.last_offset_delta + 1
        if end_offset != outcome.end_offset:  # a gap, or the worker repeats a finished append
            raise replica.fail(
                f"the changelog of a put would end at {end_offset}, not {outcome.end_offset}"
            )
        replica.tablet.unflushed_bytes += len(view)
        try:
            # The state has decided about the writer; the log may have forgotten another one since.
            replica.log.append_new(view, (checked,), outcome.now_ms)
        except Exception as e:
            reason = f"the changelog of a put was not written ({reason_of(e)})"
            raise replica.fail(reason) from e
        self._durability.appended(replica, end_offset, view, 0, len(view))
        return end_offset

    def refuse(
        self, entry: PutEntry | ServerPut, problem: Exception, table_id: int, bucket: BucketKey
    ) -> None:
        """Answer one entry with an error."""
        error = refusal_of(problem)
        self._refusals.refused("put_refused", error, table_id, bucket=bucket)
        if isinstance(error, ProducerFencedError | ColumnLockedError):
            self.fenced += 1
        entry.failed(error)


def _encode(prepared: PreparedPut) -> AppendablePut:
    try:
        batch = None if prepared.changes is None else prepared.changes.encode()
    except Exception as e:
        raise StateAheadError(f"the changelog of a put could not be encoded: {e!r}") from e
    return AppendablePut(batch, prepared.end_offset, prepared.now_ms, prepared.deleted_rows)


def _known_error(error: ZuflussError, version: int) -> ZuflussError:
    """Return the error for a client of this version of PUT_KV; clients try again after both."""
    if isinstance(error, StorageBackpressureError) and version < BACKPRESSURE_VERSION:
        return ZuflussError(error.message, code=ErrorCode.KV_STORAGE_EXCEPTION)
    return error


def _raise(error: Exception) -> None:
    raise error


def _bucket_key(replica: Replica) -> BucketKey:
    return replica.bucket.partition_id, replica.bucket.bucket_id


def _record_count(records: Bytes) -> int:
    """The record count of an unchecked batch, at most its number of bytes."""
    if len(records) < _COUNT_AT + 4:
        return 0
    (count,) = _COUNT.unpack(records[_COUNT_AT : _COUNT_AT + 4].tobytes())
    return max(0, min(int(count), len(records)))


def _check_mode(mode: int) -> None:
    if mode not in MODES:
        known = ", ".join(f"{each.value} ({each.name})" for each in MergeMode)
        raise ZuflussError(
            f"agg_mode {mode} is not supported; allowed: {known}",
            code=ErrorCode.UNSUPPORTED_VERSION,
        )


def _check_overwrite(replica: Replica, principal: str | None) -> None:
    """Refuse an overwrite past the rules of a table to a user who may not overwrite."""
    table = replica.tablet.table
    engine = merge_engine(table.info.descriptor.properties)
    if engine is None and table.deletes == "ALLOW":
        return
    rule = (
        f"{t.TABLE_DELETE_BEHAVIOR.key} = {table.deletes}"
        if engine is None
        else f"the merge engine {engine}"
    )
    raise AuthorizationError(
        f"{principal or 'an unknown user'} may not overwrite rows of {replica.path}, which has "
        f"{rule}; put them with agg_mode 0, or have {principal or 'a user'} "
        f"added to {options.ZUFLUSS_OVERWRITE_USERS.key}"
    )


def _flush_begun(replica: Replica, outcome: object) -> None:
    if isinstance(outcome, Exception):
        log.error("flush_not_begun", bucket=str(replica.bucket), exc_info=outcome)
