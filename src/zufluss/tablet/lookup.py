"""LOOKUP, PREFIX_LOOKUP and LIMIT_SCAN of primary-key tables.

A lookup whose keys are in memory is answered on the event loop where it stands: one kernel takes
the request apart, one finds the values and writes the answer. What is not in memory, prefixes and
scans are worked out by the key-value worker, in order with the puts: some keys at a time, so that
puts and other lookups run in between, and within a number of bytes (`answers.py`).

Buckets that another server leads are refused, or asked for there (`forwarding.py`).

Readers see what lies below the high watermark: never a row that a crash could take back, always
one that was acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from zufluss.errors import ErrorCode, RecordTooLargeError, ZuflussError, refusal_of
from zufluss.kv.hot.order import KeysNotSortedError, successor
from zufluss.kv.store import SCAN_ROWS, LookupPlaces, RowsTooLargeError, group_keys, hash_keys
from zufluss.kv.tablet import KvTablet
from zufluss.net.connection import ServerConnection
from zufluss.net.refusals import check_control_size
from zufluss.net.services import EncodedResponse, Reader, RequestContext
from zufluss.pacing import ITEMS_AT_ONCE, paced
from zufluss.record.batch.kv import value_header, value_records
from zufluss.record.kernels.lookup import scan_lookup
from zufluss.record.slices import Slices
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica
from zufluss.tablet.answers import (
    SHORT_MEMORY_BYTES,
    Answers,
    Buffer,
    RowsAnswer,
    encoded,
)
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.contention import Contention
from zufluss.tablet.forwarding import Forwarding, Lookup
from zufluss.tablet.put import PutHandler
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.codec import BYTES_AT_ONCE, decode, decode_steps
from zufluss.wire.hot.buckets import BUCKETS_MAX

log = structlog.get_logger(__name__)

T = TypeVar("T")

KEYS_MAX = 4096
"""Most keys of a request that is answered on the event loop, or of a small answer."""
SORTS_MAX = 1
"""Buckets whose keys are sorted at the same time, each with copies of its keys."""
REQUEST_BYTES = 256 * 1024
"""Largest request that is answered on the event loop."""
ANSWER_BYTES = 256 * 1024
"""Largest answer that is written on the event loop."""
REQUEST_KEYS_MAX = 1 << 16
"""Most keys or prefixes of one request."""
STEP_KEYS = 1024
"""Keys whose rows the key-value worker reads in one step, or a limit scan's rows; puts run in
between."""
STEP_PREFIXES = 64
"""Prefixes that the key-value worker looks for in one step."""
STEP_BYTES = 1 << 20
"""A step of the key-value worker ends when the rows behind its prefixes take so many bytes; the
rows of one step of a limit scan take no more, unless one row does."""
PENDING_BYTES_MAX = 64 << 20
"""Requests that may wait for the key-value worker."""


class EncodedRows(NamedTuple):
    """Rows as they stand in an answer."""

    encoded: Buffer
    """The bytes of the rows with their tags and lengths."""
    absent: Sequence[int]
    """Positions of the keys without a row."""


class LookupHandler:
    """The handlers of requests that read rows by key."""

    def __init__(
        self,
        buckets: Buckets,
        kv: KvHost,
        put: PutHandler,
        contention: Contention,
        tasks: BackgroundTasks,
        answers: Answers,
        forwarding: Forwarding,
    ) -> None:
        """`put` inserts the rows of lookups that insert missing keys."""
        self._buckets = buckets
        self._kv = kv
        self._put = put
        self._contention = contention
        self._tasks = tasks
        self._answers = answers
        self._forwarding = forwarding
        self._pending_bytes = 0
        self._sorting: WeakKeyDictionary[KvTablet, asyncio.Lock] = WeakKeyDictionary()
        """Locks of tables whose keys are being sorted."""
        self._sorts = asyncio.Semaphore(SORTS_MAX)
        self._places = LookupPlaces.of(KEYS_MAX)
        self._out = np.empty(ANSWER_BYTES, np.uint8)

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
        """Answer one LOOKUP."""
        self._buckets.check_present()
        places, count = self._places, -1
        if end - start <= REQUEST_BYTES:
            count, table_id, partition, bucket = scan_lookup(
                array, start, end, places.starts, places.ends
            )
        if count >= 0:
            table = self._buckets.tables.get(table_id)
            key = (None if partition < 0 else partition, bucket)
            replica = None if table is None else table.replicas.get(key)
            if replica is not None and replica.kv is not None and not replica.kv.table.indexed:
                horizon = replica.log.high_watermark
                out = self._out[:SHORT_MEMORY_BYTES] if connection.short else self._out
                size = replica.kv.store.answer(
                    array, places, count, horizon, partition, bucket, out
                )
                if size >= 0:
                    self._contention.lookups += 1
                    connection.respond_small(request_id, out[:size].tobytes())
                    connection.done()
                    return
        size = end - start
        check_control_size(APIS[ApiKey.LOOKUP], size)
        if self._pending_bytes + size > PENDING_BYTES_MAX:
            raise ZuflussError(
                f"{self._pending_bytes} bytes of lookups wait for this server, {PENDING_BYTES_MAX} "
                "are allowed; try again after a pause",
                code=ErrorCode.KV_STORAGE_EXCEPTION,
            )
        body = view[start:end]
        request = decode(m.LookupRequest, body) if size <= BYTES_AT_ONCE else bytes(body)
        self._pending_bytes += size
        answer = self._answer(connection, request_id, request)
        self._tasks.answer(connection, answer, partial(self._release, size))

    def _release(self, size: int) -> None:
        """A lookup of this size is not pending any more."""
        self._pending_bytes -= size

    async def _answer(
        self, connection: ServerConnection, request_id: int, received: m.LookupRequest | bytes
    ) -> None:
        """Answer a lookup of several buckets, of rows that are not in memory, or that inserts.

        A long request comes as bytes and is decoded here, in turns.
        """
        try:
            if isinstance(received, bytes):
                connection.pace.adopt()
                received = await connection.pace.result(decode_steps(m.LookupRequest, received))
            request: m.LookupRequest = received
            buffers = await self._made(ApiKey.LOOKUP, request, connection, self._look_up)
            connection.respond(request_id, buffers, sum(map(len, buffers)))
        except ZuflussError as e:
            connection.respond_error(request_id, e.code, e.message)
        except Exception as e:
            log.exception("lookup_failed", peer=connection.peer)
            refusal = refusal_of(e)
            connection.respond_error(request_id, refusal.code, refusal.message)
        finally:
            connection.done()

    async def _made(
        self,
        key: ApiKey,
        request: Lookup,
        reader: Reader,
        look_up: Callable[[Lookup, int], Awaitable[list[Buffer]]],
    ) -> list[Buffer]:
        """Returns the answer to a request; other leaders are asked for their buckets meanwhile."""
        few = await _count_keys(request) <= KEYS_MAX
        here, elsewhere = await self._forwarding.split(request, reader)
        own = self._answers.make(reader, few, lambda room: look_up(here, room))
        if not elsewhere:
            return await own
        answer = self._forwarding.answer
        forwarded = (answer(key, leader, part, reader) for leader, part in elsewhere)
        parts: tuple[list[Buffer], list[Buffer]]
        parts = await asyncio.gather(own, asyncio.gather(*forwarded))
        return [*parts[0], *parts[1]]

    async def _look_up(self, request: m.LookupRequest, room: int) -> list[Buffer]:
        """Returns a LookupResponse within `room` bytes, as buffers to send in turn."""
        insert = request.insert_if_not_exists
        answer = RowsAnswer(m.PbLookupRespForBucket, room)
        for bucket in request.buckets_req:
            await answer.next_bucket(bucket)
            try:
                replica = self._buckets.kv_replica(
                    request.table_id, answer.partition_id, bucket.bucket_id
                )
                for begin in range(0, len(bucket.keys), STEP_KEYS):
                    keys = bucket.keys[begin : begin + STEP_KEYS]
                    rows = await self._rows(replica, keys, answer.room)
                    if insert and rows.absent:
                        missing = dict.fromkeys(keys[i] for i in rows.absent)
                        await self._put.insert(replica, Slices.of(missing))
                        rows = await self._rows(replica, keys, answer.room)
                    answer.add(rows.encoded)
            except RowsTooLargeError:
                raise
            except ZuflussError as e:
                answer.refuse(e)
        return answer.finish()

    async def _rows(self, replica: Replica, keys: Sequence[bytes], room: int) -> EncodedRows:
        """Read the rows of some keys; a key that is named twice is read once."""
        horizon = replica.log.high_watermark

        def work(tablet: KvTablet) -> EncodedRows:
            places = Slices.of(keys)
            group, first = group_keys(places, hash_keys(places))
            values = tablet.store.get_at(places.take(first), horizon, bytes_max=room)
            values = _for_clients(tablet, values).take(group)
            absent = np.flatnonzero(values.starts < 0).tolist()
            return EncodedRows(encoded(values, room, listed=False), absent)

        return await self._worked(replica, work)

    async def _worked(self, replica: Replica, work: Callable[[KvTablet], T]) -> T:
        """Run one step in the key-value worker; keys that it needs in order are sorted before."""
        while True:
            try:
                return await self._step(replica, work)
            except KeysNotSortedError:
                await self._sort_keys(replica)

    async def _step(self, replica: Replica, work: Callable[[KvTablet], T]) -> T:
        """Run one step in the key-value worker, unless the bucket has been closed meanwhile."""
        if not self._buckets.serves(replica):
            raise self._buckets.why_not(*replica.bucket)
        tablet = replica.tablet
        return await self._kv.call(lambda: work(tablet))

    async def _sort_keys(self, replica: Replica) -> None:
        """Sort the keys of a bucket beside the worker, or wait until another request has."""
        lock = self._sorting.setdefault(replica.tablet, asyncio.Lock())
        another = lock.locked()
        async with lock:
            if another:
                return
            async with self._sorts:
                copy = await self._step(replica, lambda tablet: tablet.store.order.begin_base())
                while await self._step(replica, lambda _: copy.copy_some()):
                    pass
                await asyncio.get_running_loop().run_in_executor(None, copy.sort)
                await self._step(replica, lambda tablet: tablet.store.order.take_base(copy))

    async def prefix_lookup(
        self, request: m.PrefixLookupRequest, context: RequestContext
    ) -> EncodedResponse:
        """PREFIX_LOOKUP: the rows whose keys begin with one of some prefixes, in key order."""
        self._buckets.check_present()
        reader = context.reader
        buffers = await self._made(ApiKey.PREFIX_LOOKUP, request, reader, self._prefixes)
        return EncodedResponse(buffers)

    async def _prefixes(self, request: m.PrefixLookupRequest, room: int) -> list[Buffer]:
        """Returns a PrefixLookupResponse within `room` bytes, as buffers to send in turn."""
        answer = RowsAnswer(m.PbPrefixLookupRespForBucket, room)
        for bucket in request.buckets_req:
            await answer.next_bucket(bucket)
            try:
                replica = self._buckets.kv_replica(
                    request.table_id, answer.partition_id, bucket.bucket_id
                )
                lists: dict[bytes, list[Buffer]] = {}
                for begin in range(0, len(bucket.keys), STEP_PREFIXES):
                    prefixes = bucket.keys[begin : begin + STEP_PREFIXES]
                    new = dict.fromkeys(prefix for prefix in prefixes if prefix not in lists)
                    lists |= await self._prefix_rows(replica, new, answer.room)
                    for prefix in prefixes:
                        answer.add_list(lists[prefix])
            except RowsTooLargeError:
                raise
            except ZuflussError as e:
                answer.refuse(e)
        return answer.finish()

    async def _prefix_rows(
        self, replica: Replica, prefixes: Iterable[bytes], room: int
    ) -> dict[bytes, list[Buffer]]:
        """Read the rows behind some prefixes, page after page; few rows are read in one step."""
        horizon = replica.log.high_watermark
        lists: dict[bytes, list[Buffer]] = {prefix: [] for prefix in prefixes}
        ranges = [(prefix, prefix) for prefix in reversed(lists)]  # prefix, and where to go on

        def work(tablet: KvTablet) -> int:
            rows = size = 0
            while ranges and rows < SCAN_ROWS and size < STEP_BYTES:
                prefix, low = ranges[-1]
                values, following = tablet.store.page(low, successor(prefix), horizon, room - size)
                ranges.pop()
                page = encoded(_for_clients(tablet, values), room - size, listed=True)
                rows, size = rows + values.count, size + len(page)
                lists[prefix].append(page)
                if following is not None:
                    ranges.append((prefix, following))
            return size

        while ranges:
            room -= await self._worked(replica, work)
        return lists

    async def first_rows(self, replica: Replica, limit: int) -> list[Buffer]:
        """A batch of the first `limit` rows of a bucket, as LIMIT_SCAN answers, in parts."""
        horizon, room, rows = replica.log.high_watermark, self._answers.bytes_max, STEP_KEYS
        low: bytes | None = b"" if limit > 0 else None
        pages: list[Buffer] = []
        total = 0
        while low is not None and limit > 0:
            rows = min(rows, limit)
            size = room if rows == 1 else min(room, STEP_BYTES)

            def work(
                tablet: KvTablet, low: bytes = low, size: int = size, rows: int = rows
            ) -> tuple[Buffer, int, bytes | None]:
                values, following = tablet.store.page(low, None, horizon, size, rows)
                return *value_records(_for_clients(tablet, values)), following

            try:
                page, count, low = await self._worked(replica, work)
            except RowsTooLargeError:
                if rows == 1:
                    raise self._answers.too_large() from None
                rows //= 2
                continue
            limit -= count
            total += count
            room -= len(page)
            pages.append(page)
            if 2 * len(page) <= STEP_BYTES:  # the rows were large, and these are not
                rows = min(2 * rows, STEP_KEYS)
        return [value_header(sum(map(len, pages)), total), *pages]


async def _count_keys(request: m.LookupRequest | m.PrefixLookupRequest) -> int:
    """Returns the number of keys; refuses too many keys or buckets before any work on them."""
    entries: Sequence[Any] = request.buckets_req
    buckets, keys = len(entries), 0
    if buckets <= ITEMS_AT_ONCE:
        keys = sum(len(entry.keys) for entry in entries)
    else:
        async for entry in paced(entries):
            keys += len(entry.keys)
    if keys > REQUEST_KEYS_MAX or buckets > BUCKETS_MAX:
        raise RecordTooLargeError(
            f"a lookup of {keys} keys in {buckets} buckets; at most {REQUEST_KEYS_MAX} keys in "
            f"{BUCKETS_MAX} buckets are allowed, send several"
        )
    return keys


def _for_clients(tablet: KvTablet, values: Slices) -> Slices:
    """Returns stored values as clients get them."""
    table = tablet.table
    return Slices.of(table.for_clients(values)) if table.indexed else values
