"""FETCH_LOG, the read path, and the long poll that never blocks a socket.

A fetch names tables, buckets and offsets. `FetchReader.read` takes whole batches below the high
watermark from the page cache on the event loop; when a page is not cached, the range is read once
in a thread (which brings it into the cache) and the fetch starts over, so a cold reader never
stalls its neighbours. When there is less than `min_bytes` (counted as it lies in the log), the
fetch parks on its buckets and is answered when they have moved far enough or `max_wait_ms` is over.
Whatever goes wrong, a fetch is answered once: a client waits for it, and so does the count of its
requests in flight.

Errors a client retries without any back-off (`HELD`) are treated like "nothing yet": held until
`max_wait_ms`, unless another bucket has data. Other errors are answered at once.

An offset that is not held here but in remote storage is answered with the segments that have it
(`replica/remote_log.py`); when that answer needs something from there, the fetch is parked
meanwhile like one without records, so nobody waits for a slow location but its readers.

Projection and filters work on whole batches: a projection rewrites the Arrow message to the chosen
columns, a filter drops batches whose statistics prove that no row matches and reports how far it
looked (`filtered_end_offset`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import structlog

from zufluss.cluster.refusal import RefusedLocationError, refusal_batch
from zufluss.errors import (
    CorruptRecordError,
    ErrorCode,
    InvalidColumnProjectionError,
    LogStorageError,
    RecordTooLargeError,
    ZuflussError,
)
from zufluss.log.segment import PagesNotCachedError
from zufluss.model.predicate import Predicate
from zufluss.net.connection import ServerConnection, check_control_size
from zufluss.record.batch.stats import may_match, read_statistics
from zufluss.record.header import iter_headers
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.projected import read_projected
from zufluss.tablet.remote.logs import RemoteLogRunner
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.codec import decode
from zufluss.wire.hot.buckets import BUCKETS_MAX
from zufluss.wire.hot.fetch import FetchedBucket, FetchedTable, fetch_response
from zufluss.wire.predicates import predicate_from_proto
from zufluss.wire.tables import partition_id_of

EARLIEST_OFFSET = -2
"""A fetch offset that means: from the start of the log."""
MAX_WAIT_MS = 60_000
"""Longest long poll; a client that asks for more is answered after this."""
FETCH_BYTES_MAX = 64 * 1024 * 1024
"""Longest answer that a client can ask for; a first batch that is larger still comes whole."""
PRUNE_BATCHES_MAX = 1000
"""Batches whose statistics one fetch reads at most; other requests wait meanwhile."""
COLD_READ_ATTEMPTS = 8
"""A fetch whose pages are evicted again and again is served blocking after this many tries."""

HELD = frozenset(
    {
        ErrorCode.UNKNOWN_SERVER_ERROR,
        ErrorCode.LOG_STORAGE_EXCEPTION,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION,
        ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION,
        ErrorCode.STORAGE_EXCEPTION,
        ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION,
    }
)
"""Errors that pyfluss retries at once, thousands of times a second: held until `max_wait_ms`."""

Buffers = list[Any]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BucketFetch:
    """The part of a request for one bucket."""

    partition_id: int | None
    """Partition id, absent for plain tables."""
    bucket_id: int
    """Bucket."""
    offset: int
    """First offset to read, or EARLIEST_OFFSET."""
    bytes_max: int
    """Limit for this bucket; the first bucket with data may pass it by one batch."""


@dataclass(frozen=True, slots=True)
class TableFetch:
    """The part of a request for one table."""

    table_id: int
    """Table."""
    columns: tuple[int, ...] | None
    """Projected column indexes, ascending, or None for all."""
    predicate: Predicate | None
    """Filter for pruning batches."""
    buckets: tuple[BucketFetch, ...]
    """Its buckets in request order."""
    refusal: ZuflussError | None = None
    """Why this table cannot be read as asked; None if it can. Other tables are not concerned."""


class FetchReader:
    """Reads one fetch request from the replicas of a server."""

    def __init__(
        self, buckets: Buckets, remote_logs: RemoteLogRunner, request: m.FetchLogRequest
    ) -> None:
        count = len(request.tables_req) + sum(len(t.buckets_req) for t in request.tables_req)
        if count > BUCKETS_MAX:
            raise RecordTooLargeError(
                f"a fetch of {count} tables and buckets; at most {BUCKETS_MAX} are allowed, "
                "send several"
            )
        self._buckets = buckets
        self._remote_logs = remote_logs
        self.any_location = request.any_location
        """The client has a token for every remote location, not only for the first."""
        self.bytes_max = min(request.max_bytes, FETCH_BYTES_MAX)
        self.tables = tuple(_table_fetch(buckets, t) for t in request.tables_req)
        self.bytes_read = 0
        """Bytes of the answer."""
        self.bytes_found = 0
        """Bytes that the batches of the answer have in the log, before projection."""
        self.batches_pruned = 0
        """Batches whose statistics were read."""
        self.answer_now = False
        """A bucket has an answer that must not wait for more data."""

    def replicas(self) -> list[Replica]:
        """The replicas this fetch can wait on."""
        replicas = []
        for table in self.tables:
            for bucket in table.buckets:
                replica = self._buckets.find(table.table_id, bucket.partition_id, bucket.bucket_id)
                if replica is not None:
                    replicas.append(replica)
        return replicas

    def worth_reading(self, bytes_min: int) -> bool:
        """Whether a read may return `bytes_min` or an error; reads no records."""
        size = 0
        for table in self.tables:
            for bucket in table.buckets:
                replica = self._buckets.find(table.table_id, bucket.partition_id, bucket.bucket_id)
                if replica is None:
                    continue
                try:
                    first = _first_offset(bucket, replica)
                    length = replica.log.locate(first, FETCH_BYTES_MAX).length
                except (ZuflussError, OSError):
                    return True
                size += min(length, bucket.bytes_max)
                if size >= bytes_min:
                    return True
        return False

    def read(self, *, nowait: bool) -> list[FetchedTable]:
        """Read every bucket within the limits; `PagesNotCachedError` if a page is not cached."""
        self.bytes_read = self.bytes_found = self.batches_pruned = 0
        self.answer_now = False
        return [
            FetchedTable(
                table.table_id, [self._bucket(table, bucket, nowait) for bucket in table.buckets]
            )
            for table in self.tables
        ]

    def _bucket(self, table: TableFetch, bucket: BucketFetch, nowait: bool) -> FetchedBucket:
        try:
            replica = self._buckets.replica(table.table_id, bucket.partition_id, bucket.bucket_id)
            if table.refusal is not None:
                raise table.refusal
            return self._read_bucket(table, bucket, replica, nowait)
        except PagesNotCachedError:
            raise
        except (ZuflussError, OSError) as e:
            if isinstance(e, ZuflussError):
                problem = e
            else:
                problem = LogStorageError(f"{replica} cannot be read: {e}; check the disk")
                log.error("read_failed", replica=repr(replica), error=str(e))
            if problem.code not in HELD:
                self.answer_now = True
            return FetchedBucket(
                bucket.partition_id, bucket.bucket_id, problem.code, problem.message
            )

    def _read_bucket(
        self, table: TableFetch, bucket: BucketFetch, replica: Replica, nowait: bool
    ) -> FetchedBucket:
        log = replica.log
        offset = _first_offset(bucket, replica)
        if offset < log.log_start_offset and replica.remote is not None:
            return self._remote_bucket(bucket, replica, offset)
        room = min(bucket.bytes_max, self.bytes_max - self.bytes_read)
        first = not self.bytes_read
        records: Buffers = []
        filtered_end: int | None = None
        projector = self._buckets.tables[table.table_id].projector
        if not (room > 0 or first):
            pass
        elif table.columns is not None and table.predicate is None:
            records, span = read_projected(
                log, projector, table.columns, offset, room, at_least_one=first, nowait=nowait
            )
            self.bytes_found += span
        else:
            read = log.read(offset, max(room, 0), at_least_one=first, nowait=nowait)
            records = [read.records] if len(read.records) else []
            self.bytes_found += len(read.records)
            if records and table.predicate is not None:
                records, filtered_end = self._prune(table, table.predicate, records[0])
            if table.columns is not None:
                records = [p for r in records for p in projector.project_all(r, table.columns)]
        self.bytes_read += sum(map(len, records))
        if filtered_end is not None:
            self.answer_now = True
        return FetchedBucket(
            bucket.partition_id,
            bucket.bucket_id,
            0,
            None,
            log.high_watermark,
            _start_offset(replica),
            records,
            filtered_end,
        )

    def _remote_bucket(self, bucket: BucketFetch, replica: Replica, offset: int) -> FetchedBucket:
        """Answer with the remote segments that have an offset; nothing while they are looked up."""
        refused: Buffers = []
        info = None
        try:
            info = self._remote_logs.fetch_info(replica, offset, any_location=self.any_location)
        except RefusedLocationError as e:
            refused = [refusal_batch(e.location_id, offset)]
        if info is not None or refused:
            self.answer_now = True
        return FetchedBucket(
            bucket.partition_id,
            bucket.bucket_id,
            high_watermark=replica.log.high_watermark,
            log_start_offset=_start_offset(replica),
            records=None if info is not None else refused,
            remote=None if info is None else info.SerializeToString(),
        )

    def _prune(
        self, table: TableFetch, predicate: Predicate, records: memoryview
    ) -> tuple[Buffers, int | None]:
        """The batches that may match, and the offset after the last one if that was left out."""
        state = self._buckets.tables[table.table_id]
        buffers: Buffers = []
        begin = end = 0
        filtered_end: int | None = None
        for pos, header in iter_headers(records):
            if self.batches_pruned >= PRUNE_BATCHES_MAX:
                break
            self.batches_pruned += 1
            end = pos + header.size
            if _pruned(predicate, records, pos, header, state.schema(header.schema_id)):
                if begin < pos:
                    buffers.append(records[begin:pos])
                begin, filtered_end = end, header.next_offset
            else:
                filtered_end = None
        if begin < end:
            buffers.append(records[begin:end])
        return buffers, filtered_end


def _pruned(predicate: Predicate, records: memoryview, pos: int, header: Any, schema: Any) -> bool:
    if header.statistics_length <= 0:
        return False
    try:
        statistics = read_statistics(
            records, pos + header.header_size, header.statistics_length, schema
        )
    except CorruptRecordError:
        return False  # statistics that say nothing prove nothing; the records themselves are good
    return not may_match(predicate, statistics, header.record_count)


def _first_offset(bucket: BucketFetch, replica: Replica) -> int:
    return replica.start_offset if bucket.offset == EARLIEST_OFFSET else bucket.offset


def _start_offset(replica: Replica) -> int | None:
    """The first offset of the log, None while its remote part is not known."""
    remote = replica.remote
    return None if remote is not None and remote.range is None else replica.start_offset


def _table_fetch(buckets: Buckets, request: m.PbFetchLogReqForTable) -> TableFetch:
    columns = predicate = refusal = None
    try:
        columns = _columns(buckets, request)
        predicate = _predicate(buckets, request)
    except ZuflussError as e:
        refusal = e
    entries = tuple(
        BucketFetch(
            partition_id_of(b),
            b.bucket_id,
            b.fetch_offset,
            b.max_fetch_bytes,
        )
        for b in request.buckets_req
    )
    return TableFetch(request.table_id, columns, predicate, entries, refusal)


def _columns(buckets: Buckets, request: m.PbFetchLogReqForTable) -> tuple[int, ...] | None:
    if not request.projection_pushdown_enabled:
        return None
    columns = tuple(request.projected_fields)
    _check_projection(buckets, request.table_id, columns)
    return columns


def _predicate(buckets: Buckets, request: m.PbFetchLogReqForTable) -> Predicate | None:
    state = buckets.tables.get(request.table_id)
    if state is None or not request.HasField("filter_predicate"):
        return None
    schema_id = request.filter_schema_id if request.HasField("filter_schema_id") else None
    return predicate_from_proto(request.filter_predicate, state.schema(schema_id))


def _check_projection(buckets: Buckets, table_id: int, columns: Sequence[int]) -> None:
    state = buckets.tables.get(table_id)
    if state is None:
        return  # each bucket says so
    if state.info.log_format != "ARROW":
        raise InvalidColumnProjectionError(
            f"{state.info.path} has the log format {state.info.log_format}; the server projects "
            "ARROW only, fetch all columns"
        )
    count = len(state.info.schema.columns)
    ascending = all(a < b for a, b in pairwise(columns))
    if not columns or not ascending or columns[0] < 0 or columns[-1] >= count:
        raise InvalidColumnProjectionError(
            f"projected_fields {list(columns)[:20]} of {state.info.path} must be ascending column "
            f"indexes from 0 to {count - 1} without repetition, at least one"
        )


class Fetch:
    """One request until it is answered: read at once, or parked and read later."""

    __slots__ = (
        "_handler",
        "bytes_min",
        "cold_reads",
        "connection",
        "deadline",
        "reader",
        "replicas",
        "request_id",
        "scheduled",
        "timer",
    )

    def __init__(
        self,
        handler: FetchHandler,
        connection: ServerConnection,
        request_id: int,
        reader: FetchReader,
        bytes_min: int,
        wait_seconds: float,
    ) -> None:
        self._handler = handler
        self.connection = connection
        self.request_id = request_id
        self.reader = reader
        self.bytes_min = bytes_min
        self.deadline = handler.loop.time() + wait_seconds
        self.replicas: list[Replica] = []
        self.timer: asyncio.TimerHandle | None = None
        self.scheduled = False
        self.cold_reads = 0

    def serve(self, *, final: bool) -> None:
        """Answer if there is enough data or `final` is set; park otherwise."""
        if self.connection.closing:
            self._unpark()  # nobody is there to answer
            return
        if self.connection.backlogged:
            self._unpark()
            self.connection.when_drained(lambda: self.serve(final=final))
            return
        final = final or self._handler.draining
        reader = self.reader
        try:
            tables = reader.read(nowait=self.cold_reads < COLD_READ_ATTEMPTS)
            if not final and not reader.answer_now and reader.bytes_found < self.bytes_min:
                self._park()
                return
            self.connection.respond(self.request_id, *fetch_response(tables))
        except PagesNotCachedError as cold:
            self.cold_reads += 1
            self._unpark()
            self._handler.tasks.spawn(self._read_ahead(cold, final))
            return
        except Exception:
            log.exception("fetch_failed", peer=self.connection.peer)
            self.connection.respond_error(
                self.request_id, ErrorCode.UNKNOWN_SERVER_ERROR, "internal server error"
            )
        self._unpark()
        self.connection.done()

    async def _read_ahead(self, cold: PagesNotCachedError, final: bool) -> None:
        """Bring the pages of a cold read into the page cache in a thread, then start over."""
        handler = self._handler
        try:
            await handler.loop.run_in_executor(handler.readers, cold.load)
        except (OSError, RuntimeError) as e:  # the disk, or the threads are gone: the server stops
            log.error("cold_read_failed", error=str(e))
            self.cold_reads = COLD_READ_ATTEMPTS  # the blocking read meets the error, and answers
        self.serve(final=final)

    def _park(self) -> None:
        if self.timer is not None:
            return
        self.replicas = self.reader.replicas()
        for replica in self.replicas:
            replica.fetch_waiters.add(self)
        self.timer = self._handler.loop.call_at(self.deadline, self.expire)
        self._handler.parked.add(self)

    def _unpark(self) -> None:
        if self.timer is None:
            return
        self.timer.cancel()
        self.timer = None
        for replica in self.replicas:
            replica.fetch_waiters.discard(self)
        self._handler.parked.discard(self)

    def wake(self) -> None:
        """A bucket has new data: look again at the end of this loop turn."""
        if not self.scheduled:
            self.scheduled = True
            self._handler.loop.call_soon(self._look)

    def _look(self) -> None:
        self.scheduled = False
        if self.timer is None:
            return
        if self.bytes_min <= 1 or self.reader.worth_reading(self.bytes_min):
            self.serve(final=False)

    def expire(self) -> None:
        """The time limit passed: answer with the data that is there."""
        if self.timer is not None:
            self.serve(final=True)


class FetchHandler:
    """The handler of FETCH_LOG."""

    def __init__(
        self,
        buckets: Buckets,
        remote_logs: RemoteLogRunner,
        readers: ThreadPoolExecutor,
        tasks: BackgroundTasks,
    ) -> None:
        """`readers` are the threads that bring cold pages into the page cache."""
        self._buckets = buckets
        self._remote_logs = remote_logs
        self.readers = readers
        self.tasks = tasks
        self.loop = asyncio.get_running_loop()
        self.parked: set[Fetch] = set()
        self.draining = False

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
        """Answer one request now, or park it."""
        check_control_size(APIS[ApiKey.FETCH_LOG], end - start)
        request = decode(m.FetchLogRequest, view[start:end])
        reader = FetchReader(self._buckets, self._remote_logs, request)
        wait_ms = min(request.max_wait_ms, MAX_WAIT_MS)
        bytes_min = request.min_bytes if request.HasField("min_bytes") else 1
        fetch = Fetch(self, connection, request_id, reader, bytes_min, wait_ms / 1000)
        fetch.serve(final=wait_ms <= 0 or self.draining)

    def drain(self) -> None:
        """Answer every parked fetch with the data that is there; the server stops."""
        self.draining = True
        for fetch in tuple(self.parked):
            fetch.expire()
