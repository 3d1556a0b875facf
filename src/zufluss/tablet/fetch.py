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

Buckets are read by `fetch_reader.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Executor
from functools import partial
from typing import Any

import structlog

from zufluss.errors import ZuflussError, refusal_of
from zufluss.log.segment import PagesNotCachedError
from zufluss.net.connection import ServerConnection
from zufluss.net.refusals import check_control_size
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.fetch_reader import (
    BUCKET_BYTES,
    TURN_BYTES,
    FetchReader,
    Reading,
)
from zufluss.tablet.remote.logs import RemoteLogRunner
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.codec import BYTES_AT_ONCE, decode, parse
from zufluss.wire.hot.fetch import fetch_response

MAX_WAIT_MS = 60_000
"""Longest long poll; a client that asks for more is answered after this."""
SMALL_BYTES = 64 * 1024
"""A read that costs less than this is not counted."""
PARKED_BUCKETS_MAX = 1_000_000
"""Buckets of all parked fetches; a fetch beyond that is answered with the data that is there."""
COLD_READ_ATTEMPTS = 8
"""A fetch whose pages are evicted again and again is served blocking after this many tries."""

log = structlog.get_logger(__name__)


class Fetch:
    """One request until it is answered: read at once, or parked and read later."""

    __slots__ = (
        "_handler",
        "bytes_min",
        "cold_reads",
        "connection",
        "deadline",
        "final",
        "held",
        "reader",
        "reading",
        "replicas",
        "request_id",
        "scheduled",
        "timer",
        "turned",
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
        self.final = False
        """Answer with the data that is there, however little."""
        self.reading: Reading | None = None
        """The read that is under way."""
        self.turned = False
        """It took several turns: a bucket that it has passed may have new data."""
        self.held = 0
        """Bytes that it holds between two turns of the event loop."""

    def serve(self, *, final: bool) -> None:
        """Answer if there is enough data or `final` is set; park otherwise."""
        self.final = self.final or final
        if self.reading is not None:
            return
        if self.connection.closing:
            self._unpark()  # the client is gone
            return
        if self.connection.backlogged:
            self._unpark()
            self.connection.when_drained(lambda: self.serve(final=final))
            return
        self.reader.short = self.connection.short
        self.turned = False
        self.reading = self.reader.read(nowait=self.cold_reads < COLD_READ_ATTEMPTS)
        self._handler.begin(self)

    def go_on(self) -> int:
        """Read as much as fits into one turn of the event loop; answer after the last one.

        Returns what that cost, in bytes.
        """
        before = self.reader.cost
        self._step()
        cost = self.reader.cost
        return cost - before if cost >= before else cost  # a new read counts from zero

    def _step(self) -> None:
        reader, connection, reading = self.reader, self.connection, self.reading
        assert reading is not None
        held, self.held = self.held, 0
        if held:
            connection.hold(-held)
        try:
            if connection.closing:
                self._unpark()
                return
            if not held and connection.backlogged:  # by the answers to other fetches of it
                self.reading = None
                self.serve(final=self.final)
                return
            reader.short = reader.short or connection.short or connection.backlogged
            next(reading)
            self.turned = True
            self.held = reader.bytes_passed
            connection.hold(self.held)
            self._handler.continue_later(self)
            return
        except StopIteration as end:
            self.reading = None
            final = self.final or not self._handler.may_park(self)
            if not final and not reader.answer_now and reader.bytes_found < self.bytes_min:
                self._park()
                if self.turned and reader.has_moved(end.value):
                    self.wake()
                return
            self.connection.respond(self.request_id, *fetch_response(end.value))
        except PagesNotCachedError as cold:
            self.reading = None
            self.cold_reads += 1
            self._unpark()
            self._handler.tasks.spawn(self._read_ahead(cold))
            return
        except ZuflussError as e:
            self.connection.respond_error(self.request_id, e.code, e.message)
        except Exception as e:
            log.exception("fetch_failed", peer=self.connection.peer)
            refusal = refusal_of(e)
            self.connection.respond_error(self.request_id, refusal.code, refusal.message)
        self._unpark()
        self.connection.done()

    async def _read_ahead(self, cold: PagesNotCachedError) -> None:
        """Bring the pages of a cold read into the page cache in a thread, then start over."""
        handler = self._handler
        try:
            await handler.loop.run_in_executor(handler.readers, cold.load)
        except (OSError, RuntimeError) as e:  # the disk, or the threads are gone: the server stops
            log.error("cold_read_failed", error=str(e))
            self.cold_reads = COLD_READ_ATTEMPTS  # the blocking read meets the error, and answers
        self.serve(final=self.final)

    def _park(self) -> None:
        if self.timer is not None:
            return
        self.replicas = self.reader.replicas()
        for replica in self.replicas:
            replica.fetch_waiters.add(self)
        self.timer = self._handler.loop.call_at(self.deadline, self.expire)
        self._handler.park(self)

    def leave(self) -> None:
        """The client is gone: wait no more."""
        self._unpark()

    def _unpark(self) -> None:
        if self.timer is None:
            return
        self.timer.cancel()
        self.timer = None
        for replica in self.replicas:
            replica.fetch_waiters.discard(self)
        self._handler.unpark(self)

    def wake(self) -> None:
        """A bucket has new data: look again in the next turn of the loop, or soon after it."""
        if not self.scheduled:
            self.scheduled = True
            self._handler.look_later(self)

    def look(self) -> None:
        """Read if there is enough data, or the reason to wait is gone."""
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
        readers: Executor,
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
        self._later: deque[Fetch] = deque()
        """Fetches that go on in a later turn of the event loop."""
        self._turn_cost = 0
        """What the fetches that began in this turn have cost, in bytes."""
        self._turn_ends = False
        self._looks: deque[Fetch] = deque()
        """Parked fetches that were woken."""
        self._parked_buckets = 0
        self._parked_by: dict[ServerConnection, set[Fetch]] = {}
        """The parked fetches of each connection that ever parked one."""

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
        body, checked = view[start:end], end - start <= BYTES_AT_ONCE
        request = decode(m.FetchLogRequest, body) if checked else parse(m.FetchLogRequest, body)
        reader = FetchReader(self._buckets, self._remote_logs, request, checked=checked)
        wait_ms = min(request.max_wait_ms, MAX_WAIT_MS)
        bytes_min = request.min_bytes if request.HasField("min_bytes") else 1
        fetch = Fetch(self, connection, request_id, reader, bytes_min, wait_ms / 1000)
        fetch.serve(final=wait_ms <= 0 or self.draining)

    def begin(self, fetch: Fetch) -> None:
        """Read now, or later if fetches have begun to read enough in this turn."""
        if self._turn_cost >= TURN_BYTES:
            self._later.append(fetch)
            self._end_turn()
            return
        cost = fetch.go_on()
        if cost >= SMALL_BYTES:
            self._turn_cost += cost
            self._end_turn()

    def continue_later(self, fetch: Fetch) -> None:
        """Go on with a fetch in the next turn, before others begin: it holds what it has read."""
        self._later.appendleft(fetch)
        self._end_turn()

    def _end_turn(self) -> None:
        if not self._turn_ends:
            self._turn_ends = True
            self.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Do one step of the fetches that wait; those that come now have a share of their own."""
        self._turn_ends = False
        self._turn_cost = cost = 0
        while self._later and cost < TURN_BYTES:
            cost += self._later.popleft().go_on()
        if self._later:
            self._end_turn()

    # -- parked fetches ---------------------------------------------------------------------

    def may_park(self, fetch: Fetch) -> bool:
        """Whether a fetch may wait for data."""
        parked = self._parked_buckets + fetch.reader.bucket_count
        return not self.draining and (fetch.timer is not None or parked <= PARKED_BUCKETS_MAX)

    def park(self, fetch: Fetch) -> None:
        """Remember a fetch that waits; it is forgotten when its connection ends."""
        self.parked.add(fetch)
        self._parked_buckets += fetch.reader.bucket_count
        connection = fetch.connection
        fetches = self._parked_by.get(connection)
        if fetches is None:
            fetches = self._parked_by[connection] = set()
            connection.when_gone(partial(self._gone, connection))
        fetches.add(fetch)

    def unpark(self, fetch: Fetch) -> None:
        """Forget a fetch that does not wait any more."""
        self.parked.discard(fetch)
        self._parked_buckets -= fetch.reader.bucket_count
        self._parked_by.get(fetch.connection, set()).discard(fetch)

    def _gone(self, connection: ServerConnection) -> None:
        for fetch in self._parked_by.pop(connection):
            fetch.leave()

    def look_later(self, fetch: Fetch) -> None:
        """Have a woken fetch look at its buckets, a bounded number of them in each turn."""
        self._looks.append(fetch)
        if len(self._looks) == 1:
            self.loop.call_soon(self._look)

    def _look(self) -> None:
        cost, waiting = 0, len(self._looks)
        while waiting and cost < TURN_BYTES:
            waiting -= 1
            fetch = self._looks.popleft()
            cost += BUCKET_BYTES * fetch.reader.bucket_count
            fetch.look()
        if self._looks:
            self.loop.call_soon(self._look)

    def drain(self) -> None:
        """Answer every parked fetch with the data that is there; the server stops."""
        self.draining = True
        for fetch in tuple(self.parked):
            fetch.expire()
