"""LOOKUP, PREFIX_LOOKUP and LIMIT_SCAN of primary-key tables.

A lookup whose keys are in memory is answered on the event loop where it stands: one kernel takes
the request apart, one finds the values and writes the answer. What is not in memory, prefixes and
scans are worked out by the key-value worker, in order with the puts.

Readers see what lies below the high watermark: never a row that a crash could take back, always
one that was acknowledged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import structlog

from zufluss.errors import ErrorCode, RecordTooLargeError, ZuflussError
from zufluss.kv.store import LookupPlaces
from zufluss.net.connection import ServerConnection
from zufluss.net.services import RequestContext
from zufluss.record.batch.kv import build_value_batch
from zufluss.record.kernels.lookup import scan_lookup
from zufluss.record.slices import Slices
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.contention import Contention
from zufluss.tablet.put import PutHandler
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.wire import messages as m
from zufluss.wire.codec import decode
from zufluss.wire.tables import partition_id_of

log = structlog.get_logger(__name__)

KEYS_MAX = 4096
"""Most keys of a request that is answered on the event loop."""
ANSWER_BYTES = 256 * 1024
"""Largest answer that is written on the event loop."""
PREFIX_BYTES_MAX = 64 << 20
"""Most bytes of rows in the answer to a prefix lookup; a larger one is refused."""


class LookupHandler:
    """The handlers of requests that read rows by key."""

    def __init__(
        self,
        buckets: Buckets,
        kv: KvHost,
        put: PutHandler,
        contention: Contention,
        tasks: BackgroundTasks,
    ) -> None:
        """`put` inserts the rows of lookups that insert missing keys."""
        self._buckets = buckets
        self._kv = kv
        self._put = put
        self._contention = contention
        self._tasks = tasks
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
        places = self._places
        count, table_id, partition, bucket = scan_lookup(
            array, start, end, places.starts, places.ends
        )
        if count >= 0:
            table = self._buckets.tables.get(table_id)
            key = (None if partition < 0 else partition, bucket)
            replica = None if table is None else table.replicas.get(key)
            if replica is not None and replica.kv is not None and not replica.kv.table.indexed:
                horizon, out = replica.log.high_watermark, self._out
                size = replica.kv.store.answer(
                    array, places, count, horizon, partition, bucket, out
                )
                if size >= 0:
                    self._contention.lookups += 1
                    connection.respond_small(request_id, out[:size].tobytes())
                    connection.done()
                    return
        request = decode(m.LookupRequest, view[start:end])
        self._tasks.spawn(self._answer(connection, request_id, request))

    async def _answer(
        self, connection: ServerConnection, request_id: int, request: m.LookupRequest
    ) -> None:
        """Answer a lookup of several buckets, of rows that are not in memory, or that inserts."""
        try:
            response = await self._look_up(request)
            connection.respond_small(request_id, response.SerializeToString())
        except ZuflussError as e:
            connection.respond_error(request_id, e.code, e.message)
        except Exception:
            log.exception("lookup_failed", peer=connection.peer)
            connection.respond_error(
                request_id, ErrorCode.UNKNOWN_SERVER_ERROR, "internal server error"
            )
        finally:
            connection.done()

    async def _look_up(self, request: m.LookupRequest) -> m.LookupResponse:
        response = m.LookupResponse()
        for bucket in request.buckets_req:
            partition_id = partition_id_of(bucket)
            entry = response.buckets_resp.add(bucket_id=bucket.bucket_id)
            if partition_id is not None:
                entry.partition_id = partition_id
            try:
                replica = self._buckets.kv_replica(request.table_id, partition_id, bucket.bucket_id)
                keys = Slices.of(bucket.keys)
                values = await self._values(replica, keys)
                if request.insert_if_not_exists and None in values:
                    missing = [k for k, v in zip(bucket.keys, values, strict=True) if v is None]
                    await self._put.insert(replica, Slices.of(dict.fromkeys(missing)))
                    values = await self._values(replica, keys)
                for value in values:
                    entry.values.add(values=value)
            except ZuflussError as e:
                entry.error_code, entry.error_message = e.code, e.message
        return response

    async def _values(self, replica: Replica, keys: Slices) -> list[bytes | None]:
        tablet = replica.tablet
        horizon = replica.log.high_watermark
        return await self._kv.call(
            lambda: tablet.table.for_clients(tablet.store.get_at(keys, horizon))
        )

    async def prefix_lookup(
        self, request: m.PrefixLookupRequest, context: RequestContext
    ) -> m.PrefixLookupResponse:
        """PREFIX_LOOKUP: the rows whose keys begin with one of some prefixes, in key order."""
        response = m.PrefixLookupResponse()
        for bucket in request.buckets_req:
            partition_id = partition_id_of(bucket)
            entry = response.buckets_resp.add(bucket_id=bucket.bucket_id)
            if partition_id is not None:
                entry.partition_id = partition_id
            try:
                replica = self._buckets.kv_replica(request.table_id, partition_id, bucket.bucket_id)
                for values in await self._prefixes(replica, Slices.of(bucket.keys)):
                    entry.value_lists.add(values=values)
            except ZuflussError as e:
                entry.error_code, entry.error_message = e.code, e.message
        return response

    async def _prefixes(self, replica: Replica, prefixes: Slices) -> list[list[bytes]]:
        tablet = replica.tablet
        horizon = replica.log.high_watermark

        def work() -> list[list[bytes]]:
            groups = tablet.store.prefix(prefixes, horizon)
            size = sum(int((values.ends - values.starts).sum()) for values in groups)
            if size > PREFIX_BYTES_MAX:
                raise RecordTooLargeError(
                    f"the rows of these prefixes take {size} bytes, an answer at most "
                    f"{PREFIX_BYTES_MAX}; ask for fewer or longer prefixes"
                )
            lists = (tablet.table.for_clients(values) for values in groups)
            return [[value for value in values if value is not None] for values in lists]

        return await self._kv.call(work)

    async def first_rows(self, replica: Replica, limit: int) -> bytes:
        """A batch of the first `limit` rows of a bucket, as LIMIT_SCAN answers."""
        tablet = replica.tablet
        horizon = replica.log.high_watermark

        def work() -> bytes:
            _, values = tablet.store.scan(None, max(limit, 0), PREFIX_BYTES_MAX, horizon)
            return build_value_batch(Slices.of(tablet.table.for_clients(values)))

        return await self._kv.call(work)
