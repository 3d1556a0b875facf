"""What a fetch reads: the buckets of its request, within limits, in turns of the event loop.

A bucket that a request names twice is read once: the last entry counts, as in Apache Fluss. What a
fetch costs is bounded by the bytes that it reads and the statistics that it looks at, not by what
it returns. A long read is a generator that pauses when it has done enough for one turn of the event
loop, so that other requests can run.

Projection and filters work on whole batches: a projection rewrites the Arrow message to the chosen
columns, a filter drops batches whose statistics prove that no row matches and reports how far it
looked (`filtered_end_offset`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

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
from zufluss.log.log import Log
from zufluss.log.segment import PagesNotCachedError
from zufluss.model.predicate import LITERALS_MAX, TESTS_MAX, InvalidPredicateError
from zufluss.record.batch.stats import Matcher, matcher, read_statistics
from zufluss.record.header import iter_headers
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.projected import read_projected
from zufluss.tablet.remote.logs import RemoteLogRunner
from zufluss.wire import messages as m
from zufluss.wire.codec import text_steps
from zufluss.wire.hot.buckets import BUCKETS_MAX
from zufluss.wire.hot.fetch import FetchedBucket, FetchedTable
from zufluss.wire.predicates import PredicateSize, predicate_size, predicate_steps
from zufluss.wire.tables import partition_id_of

EARLIEST_OFFSET = -2
"""A fetch offset that means: from the start of the log."""
FETCH_BYTES_MAX = 64 * 1024 * 1024
"""Longest answer that a client can ask for; a first batch that is larger still comes whole."""
READ_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of the log that one fetch reads at most, whatever a filter or projection leaves of them."""
PRUNE_WORK_MAX = 20_000
"""Work on statistics that one fetch does at most, in tests of a filter."""
BATCH_WORK = 10
"""Work of reading the statistics of a batch, in tests of a filter."""
TEST_WORK = 20
"""Work of reading one test of a filter, in tests of a filter."""
LITERAL_WORK = 3
"""Work of reading one literal of a filter, in tests of a filter."""
SHORT_BYTES = 64 * 1024
"""Longest answer while the memory of unread answers is short; a larger batch has to wait."""
TURN_BYTES = 4 * 1024 * 1024
"""Bytes that fetches read in one turn of the event loop; a single larger batch may exceed it."""
WORK_BYTES = 4 * 1024
"""Bytes that can be read in the time of one test of a filter."""
BUCKET_BYTES = 8 * 1024
"""Bytes that can be read in the time that one bucket of a request takes without any records."""

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
Reading = Generator[None, None, list[FetchedTable]]
"""A read that pauses between two turns of the event loop."""
BucketReading = Generator[None, None, FetchedBucket]

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
    may_match: Matcher | None
    """Filter for pruning batches."""
    batch_work: int
    """Work of the filter on the statistics of a batch."""
    buckets: tuple[BucketFetch, ...]
    """Its buckets in request order."""
    refusal: ZuflussError | None = None
    """Why this table cannot be read as asked; None if it can. Other tables are not concerned."""


class Filter(NamedTuple):
    """The filter of a table in a request."""

    may_match: Matcher
    """Whether a batch may have a row that matches."""
    tests: int
    """Tests of the filter."""


class FetchReader:
    """Reads one fetch request from the replicas of a server."""

    def __init__(
        self,
        buckets: Buckets,
        remote_logs: RemoteLogRunner,
        request: m.FetchLogRequest,
        *,
        checked: bool = True,
    ) -> None:
        """The reader checks the texts of a request that is not `checked`, in turns."""
        self._buckets = buckets
        self._remote_logs = remote_logs
        self.any_location = request.any_location
        """The client has a token for every remote location, not only for the first."""
        self.bytes_max = min(request.max_bytes, FETCH_BYTES_MAX)
        self._checked = checked
        self._request: m.FetchLogRequest | None = request
        """The request until the first read has taken it apart."""
        self.tables: Sequence[TableFetch] = ()
        self.bytes_read = 0
        """Bytes of the answer."""
        self.bytes_found = 0
        """Bytes that the batches of the answer have in the log, before projection."""
        self.bytes_passed = 0
        """Bytes of the log that were read, whatever the filter left of them."""
        self.prune_work = 0
        """Work that was done on statistics."""
        self.filter_work = 0
        """Work that was done to read the filters of the request, in tests of a filter."""
        self.buckets_passed = 0
        """Buckets that were read, with those of the request when it was taken apart."""
        self.answer_now = False
        """A bucket has an answer that must not wait for more data."""
        self._turn_end = TURN_BYTES
        self.short = False
        """Clients have left so much unread that the answer must be small, or wait."""

    def replicas(self) -> list[Replica]:
        """The replicas this fetch can wait on."""
        replicas = []
        for table in self.tables:
            for bucket in table.buckets:
                replica = self._buckets.find(table.table_id, bucket.partition_id, bucket.bucket_id)
                if replica is not None:
                    replicas.append(replica)
        return replicas

    def has_moved(self, tables: list[FetchedTable]) -> bool:
        """Whether a bucket that could be read has other data now, or is gone."""
        for table in tables:
            for read in table.buckets:
                if not read.error_code:
                    replica = self._buckets.find(table.table_id, read.partition_id, read.bucket_id)
                    if replica is None or replica.log.high_watermark != read.high_watermark:
                        return True
        return False

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

    def read(self, *, nowait: bool) -> Reading:
        """Read every bucket within the limits; `PagesNotCachedError` if a page is not cached.

        A generator that pauses when it has done enough for one turn of the event loop.
        """
        self.bytes_read = self.bytes_found = self.bytes_passed = self.prune_work = 0
        self.buckets_passed = self.filter_work = 0
        self.answer_now = False
        self._turn_end = TURN_BYTES
        if self._request is not None:
            self.tables = yield from self._take_apart(self._request)
            self._request = None
        tables = []
        for table in self.tables:
            buckets = []
            for bucket in table.buckets:
                if self.cost >= self._turn_end:
                    yield from self._pause()
                self.buckets_passed += 1
                buckets.append((yield from self._bucket(table, bucket, nowait)))
            tables.append(FetchedTable(table.table_id, buckets))
        return tables

    @property
    def cost(self) -> int:
        """What this read has cost so far, in bytes."""
        work = WORK_BYTES * (self.prune_work + self.filter_work)
        return self.bytes_passed + work + BUCKET_BYTES * self.buckets_passed

    @property
    def bucket_count(self) -> int:
        """The buckets of the request, each once."""
        return sum(len(table.buckets) for table in self.tables)

    def _take_apart(
        self, request: m.FetchLogRequest
    ) -> Generator[None, None, Sequence[TableFetch]]:
        """The tables of a request: of a bucket that is named twice, the last entry counts."""
        if not self._checked:
            for _ in text_steps(request):
                yield from self._worked(buckets=4)  # a step is some 64 texts
        last: dict[tuple[int, int | None, int], tuple[int, BucketFetch]] = {}
        count = len(request.tables_req)
        for number, table in enumerate(request.tables_req):
            table_id = table.table_id
            count += len(table.buckets_req)
            if count > BUCKETS_MAX:
                raise RecordTooLargeError(
                    f"a fetch of {count} tables and buckets; at most {BUCKETS_MAX} are allowed, "
                    "send several"
                )
            for b in table.buckets_req:
                partition_id, bucket_id = partition_id_of(b), b.bucket_id
                entry = BucketFetch(partition_id, bucket_id, b.fetch_offset, b.max_fetch_bytes)
                last[table_id, partition_id, bucket_id] = (number, entry)
                self.buckets_passed += 1
                if self.cost >= self._turn_end:
                    yield from self._pause()
        entries: list[list[BucketFetch]] = [[] for _ in request.tables_req]
        for number, entry in last.values():
            entries[number].append(entry)
        tables = []
        read = PredicateSize(0, 0)
        for table, its_entries in zip(request.tables_req, entries, strict=True):
            filter: Filter | ZuflussError | None = None
            if table.HasField("filter_predicate"):
                size = predicate_size(table.filter_predicate)
                read = PredicateSize(read.tests + size.tests, read.literals + size.literals)
                _check_filters(read)
                filter = yield from self._filter(table, size)
            tables.append(_table_fetch(self._buckets, table, its_entries, filter))
            self.buckets_passed += 1
            if self.cost >= self._turn_end:
                yield from self._pause()
        return tables

    def _filter(
        self, request: m.PbFetchLogReqForTable, size: PredicateSize
    ) -> Generator[None, None, Filter | ZuflussError | None]:
        """Read the filter of a table in turns; returns why it is refused if it is."""
        state = self._buckets.tables.get(request.table_id)
        if state is None:
            return None
        schema_id = request.filter_schema_id if request.HasField("filter_schema_id") else None
        try:
            for step in predicate_steps(request.filter_predicate, state.schema(schema_id)):
                if not isinstance(step, PredicateSize):
                    return Filter(matcher(step), size.tests)
                yield from self._worked(tests=step.tests, literals=step.literals)
        except ZuflussError as e:
            return e
        return None

    def _worked(
        self, *, buckets: int = 0, tests: int = 0, literals: int = 0
    ) -> Generator[None, None, None]:
        """Count work on the request, and let others run if the share of this turn is used up."""
        self.buckets_passed += buckets
        self.filter_work += TEST_WORK * tests + LITERAL_WORK * literals
        if self.cost >= self._turn_end:
            yield from self._pause()

    def _pause(self) -> Generator[None, None, None]:
        """Let other requests run."""
        yield
        self._turn_end = self.cost + TURN_BYTES

    def _bucket(self, table: TableFetch, bucket: BucketFetch, nowait: bool) -> BucketReading:
        try:
            replica = self._buckets.replica(table.table_id, bucket.partition_id, bucket.bucket_id)
            if table.refusal is not None:
                raise table.refusal
            return (yield from self._read_bucket(table, bucket, replica, nowait))
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
    ) -> BucketReading:
        log = replica.log
        offset = _first_offset(bucket, replica)
        if offset < log.log_start_offset and replica.remote is not None:
            return self._remote_bucket(bucket, replica, offset)
        left = READ_BYTES_MAX - self.bytes_passed
        most = min(self.bytes_max, SHORT_BYTES) if self.short else self.bytes_max
        room = min(bucket.bytes_max, most - self.bytes_read, left)
        first = not self.bytes_read and not self.short
        records: Buffers = []
        filtered_end: int | None = None
        if not (room > 0 or first) or left <= 0 or self.prune_work >= PRUNE_WORK_MAX:
            pass
        elif table.may_match is not None:
            records, filtered_end = yield from self._filtered(
                table, log, offset, room, first, nowait
            )
        elif table.columns is not None:
            records = yield from self._projected(
                table, table.columns, log, offset, room, first, nowait
            )
        else:
            records = yield from self._whole_batches(log, offset, room, first, nowait)
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

    def _whole_batches(
        self, log: Log, offset: int, room: int, first: bool, nowait: bool
    ) -> Generator[None, None, Buffers]:
        """The batches of a bucket as they lie in its log, a few megabytes in each turn."""
        records: Buffers = []
        while True:
            some = min(max(room, 0), TURN_BYTES)
            read = log.read(offset, some, at_least_one=first or room > some, nowait=nowait)
            size = len(read.records)
            if not size or (size > room and not first):
                return records
            records.append(read.records)
            self.bytes_found += size
            self.bytes_passed += size
            room -= size
            offset, first = read.end_offset, False
            if some < TURN_BYTES or room <= 0 or offset >= log.high_watermark:
                return records
            yield from self._pause()
            if self.short:
                return records

    def _projected(
        self,
        table: TableFetch,
        columns: tuple[int, ...],
        log: Log,
        offset: int,
        room: int,
        first: bool,
        nowait: bool,
    ) -> Generator[None, None, Buffers]:
        """The batches of a bucket with some columns, a few megabytes of the log in each turn."""
        projector = self._buckets.tables[table.table_id].projector
        records: Buffers = []
        while True:
            span_max = min(TURN_BYTES, READ_BYTES_MAX - self.bytes_passed)
            if span_max <= 0:
                return records
            some, span, offset = read_projected(
                log, projector, columns, offset, room, span_max, at_least_one=first, nowait=nowait
            )
            records += some
            self.bytes_found += span
            self.bytes_passed += span
            room -= sum(map(len, some))
            if span < span_max or room <= 0 or offset >= log.high_watermark:
                return records
            first = False
            yield from self._pause()
            if self.short:
                return records

    def _filtered(
        self, table: TableFetch, log: Log, offset: int, room: int, first: bool, nowait: bool
    ) -> Generator[None, None, tuple[Buffers, int | None]]:
        """The batches that may match, a few megabytes in each turn; see `_prune` for the offset."""
        assert table.may_match is not None
        projector = self._buckets.tables[table.table_id].projector
        records: Buffers = []
        filtered_end: int | None = None
        while True:
            some = min(max(room, 0), TURN_BYTES)
            read = log.read(offset, some, at_least_one=first or room > some, nowait=nowait)
            size = len(read.records)
            if not size or (size > room and not first):
                return records, filtered_end
            self.bytes_found += size
            self.bytes_passed += size
            room -= size
            matches, filtered_end = yield from self._prune(table, table.may_match, read.records)
            if table.columns is not None:
                matches = [p for r in matches for p in projector.project_all(r, table.columns)]
            records += matches
            offset, first = read.end_offset, False
            if some < TURN_BYTES or room <= 0 or offset >= log.high_watermark:
                return records, filtered_end
            if self.prune_work >= PRUNE_WORK_MAX:
                return records, filtered_end
            yield from self._pause()
            if self.short:
                return records, filtered_end

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
        self, table: TableFetch, may_match: Matcher, records: memoryview
    ) -> Generator[None, None, tuple[Buffers, int | None]]:
        """The batches that may match, and the offset after the last one if that was left out."""
        state = self._buckets.tables[table.table_id]
        buffers: Buffers = []
        begin = end = 0
        filtered_end: int | None = None
        for pos, header in iter_headers(records):
            if self.prune_work >= PRUNE_WORK_MAX:
                break
            if self.cost >= self._turn_end:
                yield from self._pause()
            self.prune_work += table.batch_work
            end = pos + header.size
            if _pruned(may_match, records, pos, header, state.schema(header.schema_id)):
                if begin < pos:
                    buffers.append(records[begin:pos])
                begin, filtered_end = end, header.next_offset
            else:
                filtered_end = None
        if begin < end:
            buffers.append(records[begin:end])
        return buffers, filtered_end


def _pruned(may_match: Matcher, records: memoryview, pos: int, header: Any, schema: Any) -> bool:
    if header.statistics_length <= 0:
        return False
    try:
        statistics = read_statistics(
            records, pos + header.header_size, header.statistics_length, schema
        )
    except CorruptRecordError:
        return False  # statistics that say nothing prove nothing; the records themselves are good
    return not may_match(statistics, header.record_count)


def _first_offset(bucket: BucketFetch, replica: Replica) -> int:
    return replica.start_offset if bucket.offset == EARLIEST_OFFSET else bucket.offset


def _start_offset(replica: Replica) -> int | None:
    """The first offset of the log, None while its remote part is not known."""
    remote = replica.remote
    return None if remote is not None and remote.range is None else replica.start_offset


def _check_filters(size: PredicateSize) -> None:
    """Refuse a fetch whose filters are too large together."""
    if size.tests > TESTS_MAX:
        raise InvalidPredicateError(
            f"the filters of a fetch have {size.tests} tests together; at most {TESTS_MAX} are "
            "allowed, fetch fewer tables at a time"
        )
    if size.literals > LITERALS_MAX:
        raise InvalidPredicateError(
            f"the filters of a fetch have {size.literals} literals together; at most "
            f"{LITERALS_MAX} are allowed, fetch fewer tables at a time"
        )


def _table_fetch(
    buckets: Buckets,
    request: m.PbFetchLogReqForTable,
    entries: Sequence[BucketFetch],
    filter: Filter | ZuflussError | None,
) -> TableFetch:
    columns = may_match = None
    refusal = filter if isinstance(filter, ZuflussError) else None
    work = BATCH_WORK
    try:
        columns = _columns(buckets, request)
    except ZuflussError as e:
        refusal = e
    if isinstance(filter, Filter):
        may_match = filter.may_match
        work += filter.tests
    return TableFetch(request.table_id, columns, may_match, work, tuple(entries), refusal)


def _columns(buckets: Buckets, request: m.PbFetchLogReqForTable) -> tuple[int, ...] | None:
    if not request.projection_pushdown_enabled:
        return None
    columns = tuple(request.projected_fields)
    _check_projection(buckets, request.table_id, columns)
    return columns


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
    if columns and (not ascending or columns[0] < 0 or columns[-1] >= count):
        raise InvalidColumnProjectionError(
            f"projected_fields {list(columns)[:20]} of {state.info.path} must be ascending column "
            f"indexes from 0 to {count - 1} without repetition"
        )
