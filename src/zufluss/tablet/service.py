"""Requests of clients to bucket leaders besides the hot paths: offsets, limit scans, statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from zufluss.errors import InvalidTimestampError, RecordTooLargeError, ZuflussError
from zufluss.log.segment import PagesNotCachedError
from zufluss.net.services import EncodedResponse, RequestContext
from zufluss.pacing import Pace, paced
from zufluss.replica.replica import Replica
from zufluss.tablet.answers import Buffer
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.fetch_reader import TURN_BYTES
from zufluss.tablet.lookup import LookupHandler
from zufluss.varint import encode_varint
from zufluss.wire import messages as m
from zufluss.wire.hot.buckets import BUCKETS_MAX
from zufluss.wire.tables import partition_id_of

T = TypeVar("T")

EARLIEST, LATEST, TIMESTAMP = 0, 1, 2
RECORDS_TAG = b"\x22"
"""Tag of the field `records` of a LimitScanResponse."""
LIMIT_SCANS_MAX = 2
"""Limit scans at a time, each with its answer in memory."""
LIMIT_SCAN_BYTES_MAX = 64 * 1024 * 1024
"""A limit scan returns whole batches up to this size; beyond it the request is refused."""


class TabletService:
    """The handlers of LIST_OFFSETS, LIMIT_SCAN and GET_TABLE_STATS."""

    def __init__(
        self,
        buckets: Buckets,
        lookup: LookupHandler,
        readers: Executor,
        clock_ms: Callable[[], int],
    ) -> None:
        """`readers` are the threads that bring cold pages into the page cache."""
        self._buckets = buckets
        self._lookup = lookup
        self._readers = readers
        self._clock_ms = clock_ms
        self._limit_scans = asyncio.Semaphore(LIMIT_SCANS_MAX)

    async def list_offsets(
        self, request: m.ListOffsetsRequest, context: RequestContext
    ) -> m.ListOffsetsResponse:
        """LIST_OFFSETS: earliest, latest or by-timestamp offsets of buckets."""
        self._buckets.check_present()
        _check_bucket_count(len(request.bucket_id))
        find = self._offset_finder(request)
        timestamp = request.startTimestamp if request.offset_type == TIMESTAMP else None
        partition_id = partition_id_of(request)
        response = m.ListOffsetsResponse()
        async for bucket_id in paced(request.bucket_id):
            entry = response.buckets_resp.add(bucket_id=bucket_id)
            try:
                replica = self._buckets.replica(request.table_id, partition_id, bucket_id)
                offset = await self._when_cached(partial(find, replica))
                if timestamp is not None and replica.remote is not None:
                    remote = await replica.remote.offset_for_timestamp(timestamp)
                    offset = offset if remote is None else remote
                entry.offset = offset
            except ZuflussError as e:
                entry.error_code, entry.error_message = e.code, e.message
        return response

    async def _when_cached(self, look: Callable[[], T]) -> T:
        """Call `look`, again after a thread has read the pages that were not cached."""
        while True:
            try:
                return look()
            except PagesNotCachedError as cold:
                await asyncio.get_running_loop().run_in_executor(self._readers, cold.load)

    def _offset_finder(self, request: m.ListOffsetsRequest) -> Callable[[Replica], int]:
        if request.offset_type == EARLIEST and request.unbroken:
            return lambda replica: replica.unbroken_offset
        if request.offset_type == EARLIEST:
            return lambda replica: replica.start_offset
        if request.offset_type == LATEST:
            return lambda replica: replica.log.high_watermark
        if request.offset_type != TIMESTAMP:
            raise ZuflussError(
                f"offset_type {request.offset_type} is not known; "
                "use 0 (earliest), 1 (latest) or 2 (timestamp)"
            )
        if not request.HasField("startTimestamp"):
            raise ZuflussError("offset_type 2 (timestamp) needs startTimestamp, in epoch millis")
        timestamp, now = request.startTimestamp, self._clock_ms()

        def by_timestamp(replica: Replica) -> int:
            if timestamp > max(now, replica.log.last_timestamp):
                raise InvalidTimestampError(
                    f"the fetch timestamp {timestamp} is larger than the current timestamp {now} "
                    "of this server; use latest instead"
                )
            return replica.log.offset_for_timestamp(timestamp, nowait=True)

        return by_timestamp

    async def get_table_stats(
        self, request: m.GetTableStatsRequest, context: RequestContext
    ) -> m.GetTableStatsResponse:
        """GET_TABLE_STATS: the number of rows in buckets; there are no column statistics."""
        self._buckets.check_present()
        _check_bucket_count(len(request.buckets_req))
        response = m.GetTableStatsResponse()
        async for bucket in paced(request.buckets_req):
            partition_id = partition_id_of(bucket)
            entry = response.buckets_resp.add(bucket_id=bucket.bucket_id, partition_id=partition_id)
            try:
                replica = self._buckets.replica(request.table_id, partition_id, bucket.bucket_id)
                entry.row_count = replica.row_count()
            except ZuflussError as e:
                entry.error_code, entry.error_message = e.code, e.message
        return response

    async def limit_scan(
        self, request: m.LimitScanRequest, context: RequestContext
    ) -> EncodedResponse:
        """LIMIT_SCAN: the last rows of a log in whole batches, or rows of a primary-key table."""
        self._buckets.check_present()
        while True:
            await context.reader.room()
            async with self._limit_scans:
                if context.reader.has_room:  # and no other answer has taken it meanwhile
                    return await self._limit_scan(request)

    async def _limit_scan(self, request: m.LimitScanRequest) -> EncodedResponse:
        partition_id = partition_id_of(request)
        response = m.LimitScanResponse(is_log_table=True)
        records: list[Buffer] = []
        try:
            replica = self._buckets.replica(request.table_id, partition_id, request.bucket_id)
            response.is_log_table = replica.kv is None
            if replica.kv is not None:
                records = await self._lookup.first_rows(replica, request.limit)
            else:
                records = await self._last_rows(replica, request.limit)
            records = [RECORDS_TAG + encode_varint(sum(map(len, records))), *records]
        except ZuflussError as e:
            response.error_code, response.error_message = e.code, e.message
        return EncodedResponse([response.SerializeToString(), *records])

    async def _last_rows(self, replica: Replica, limit: int) -> list[Buffer]:
        log = replica.log
        if limit <= 0:
            return []
        end = log.high_watermark
        offset = max(replica.start_offset, end - limit)
        room = LIMIT_SCAN_BYTES_MAX
        pace = Pace.current()
        parts: list[Buffer] = []
        if replica.remote is not None and offset < log.log_start_offset:
            here = log.log_start_offset
            remote = await replica.remote.batches_below(here, offset, room)
            if remote is None:
                raise _too_large(limit)
            parts += remote
            room -= sum(map(len, parts))
            offset = here
        while offset < end:
            some = min(room, TURN_BYTES)
            read = await self._when_cached(partial(log.read, offset, some, at_least_one=True))
            room -= len(read.records)
            if room < 0:
                raise _too_large(limit)
            parts.append(read.records)
            offset = read.end_offset
            await pace.pause()
        return parts


def _too_large(limit: int) -> RecordTooLargeError:
    return RecordTooLargeError(
        f"the last {limit} rows take more than {LIMIT_SCAN_BYTES_MAX} bytes; "
        "ask for fewer rows or use a log scan"
    )


def _check_bucket_count(count: int) -> None:
    if count > BUCKETS_MAX:
        raise RecordTooLargeError(
            f"{count} buckets in one request; at most {BUCKETS_MAX} are allowed, send several"
        )
