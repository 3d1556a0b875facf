"""Requests for buckets that are changing their leader, held for a moment.

A hand-over takes a few hundred milliseconds. Writes that arrive meanwhile are neither taken nor
refused: they wait here, and are handled as if they had just arrived once it is clear who leads the
bucket, or after `HELD_SECONDS`. So a client notices a slow answer, and not an error after which it
pauses.

| who | what waits | until |
|---|---|---|
| the former leader | writes | the metadata names the next leader, or the bucket is not released after all |
| the next leader | writes and lookups | the bucket is open here |

Writes of a bucket are handled in the order of their arrival, also those that wait for another
bucket only: a writer that numbers its batches would be refused otherwise. A request with so many entries that
it is handled in turns is not held.

Belongs to the event loop.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import structlog

from zufluss.errors import StorageBackpressureError, refusal_of
from zufluss.model.table import TableBucket
from zufluss.net.connection import ServerConnection
from zufluss.net.services import RawHandler
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.codec import decode
from zufluss.wire.hot.produce import scan_produce
from zufluss.wire.hot.put import scan_put
from zufluss.wire.tables import bucket_key

log = structlog.get_logger(__name__)

HELD_SECONDS: Final = 2.0
"""How long a request is held at most."""
HELD_BYTES_MAX: Final = 64 << 20
"""Requests that may be held together."""
LOOKUP_BYTES_MAX: Final = 64 << 10
"""Longer lookups are not held."""
WRITES: Final = frozenset({ApiKey.PRODUCE_LOG, ApiKey.PUT_KV})
EVERYTHING: Final = WRITES | {ApiKey.LOOKUP}


class _Hold(NamedTuple):
    """A bucket whose requests are held."""

    keys: frozenset[ApiKey]
    """The kinds of requests that wait."""
    timer: asyncio.TimerHandle


class _Waiting(NamedTuple):
    """A request that waits."""

    key: ApiKey
    buckets: Sequence[TableBucket]
    size: int
    handle: Callable[[], None]


class HeldRequests:
    """Holds requests for buckets, and lets them go on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._held: dict[TableBucket, _Hold] = {}
        self._waiting: list[_Waiting] = []
        """What waits, in the order of its arrival."""
        self._behind: set[TableBucket] = set()
        """The buckets of the writes that wait."""
        self._bytes = 0

    @property
    def buckets(self) -> Iterable[TableBucket]:
        """The buckets whose requests are held."""
        return tuple(self._held)

    def hold(self, bucket: TableBucket, keys: frozenset[ApiKey]) -> None:
        """Hold requests of these kinds for a bucket from now on, for at most `HELD_SECONDS`."""
        known = self._held.get(bucket)
        if known is not None:
            self._held[bucket] = known._replace(keys=known.keys | keys)
            return
        timer = self._loop.call_later(HELD_SECONDS, self.go_on, bucket)
        self._held[bucket] = _Hold(keys, timer)

    def go_on(self, bucket: TableBucket) -> None:
        """Hold nothing more for a bucket, and handle what waits for no other one."""
        held = self._held.pop(bucket, None)
        if held is None:
            return
        held.timer.cancel()
        waiting, self._waiting, self._behind = self._waiting, [], set()
        for request in waiting:
            if self._waits(request.key, request.buckets):
                self._keep(request)
            else:
                self._bytes -= request.size
                request.handle()

    def stop(self) -> None:
        """Hold nothing any more: the server stops."""
        for bucket in self.buckets:
            self.go_on(bucket)

    def _waits(self, key: ApiKey, buckets: Sequence[TableBucket]) -> bool:
        """Whether a request waits: for one of its buckets, or behind a write to one of them."""
        if key in WRITES and not self._behind.isdisjoint(buckets):
            return True
        return any((hold := self._held.get(each)) and key in hold.keys for each in buckets)

    def _keep(self, request: _Waiting) -> None:
        self._waiting.append(request)
        if request.key in WRITES:
            self._behind.update(request.buckets)

    def before(self, key: ApiKey, handler: RawHandler) -> RawHandler:
        """The handler of an API that is asked only when the request is not to be held."""

        def handle(
            connection: ServerConnection,
            request_id: int,
            version: int,
            array: Any,
            view: memoryview,
            start: int,
            end: int,
        ) -> None:
            buckets = _buckets_of(key, view, start, end) if self._held else ()
            if not self._waits(key, buckets):
                handler(connection, request_id, version, array, view, start, end)
                return
            size = end - start
            if self._bytes + size > HELD_BYTES_MAX:
                raise StorageBackpressureError(
                    f"{self._bytes} bytes wait for buckets that are handed over, {HELD_BYTES_MAX} "
                    "are allowed; try again after a pause"
                )
            received = array[start:end].copy()
            again = partial(_handle, handler, connection, request_id, version, received)
            self._keep(_Waiting(key, buckets, size, again))
            self._bytes += size

        return handle


def _buckets_of(key: ApiKey, view: memoryview, start: int, end: int) -> Sequence[TableBucket]:
    if key == ApiKey.LOOKUP:
        if end - start > LOOKUP_BYTES_MAX:
            return ()
        request = decode(m.LookupRequest, view[start:end])
        return [TableBucket(request.table_id, *bucket_key(x)) for x in request.buckets_req]
    scan = scan_produce(view, start, end) if key == ApiKey.PRODUCE_LOG else None
    put = scan_put(view, start, end) if key == ApiKey.PUT_KV else None
    found = scan or put
    return () if found is None else [TableBucket(found.table_id, *x[:2]) for x in found.buckets]


def _handle(
    handler: RawHandler,
    connection: ServerConnection,
    request_id: int,
    version: int,
    received: Any,
) -> None:
    """Handle a request that was held; its errors are answered as those of others."""
    view = memoryview(received)
    try:
        handler(connection, request_id, version, received, view, 0, len(view))
    except Exception as problem:
        refusal = refusal_of(problem)
        if refusal is not problem:
            log.exception("held_request_failed", peer=connection.peer)
        connection.respond_error(request_id, refusal.code, refusal.message)
        connection.done()
