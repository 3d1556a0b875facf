"""The session of a server: numbered objects, several under way, acknowledged in order.

    append → gather.py → object n: create if absent ──► created, or exists and is ours: n is own
                         n+1 … under way                exists and is not ours: fenced
             own[0…m] without a gap ──► on_durable, object by object

Object n is acknowledged when 0…n are all known to be our own. This is what makes one seal end the
session: whoever put a foreign object at k will never see us acknowledge k or anything above, though
objects above k may be there. A put that fails or times out is sent again for ever, the same bytes
under the same name, so it does not matter which of the requests arrives and when. A put that takes
much longer than others is sent a second time while the first one goes on.

"It exists" is never believed without a look (S3 says so, too, when two requests merely met): the
first 96 bytes of the object are compared with ours, which have a random nonce.

Unsent bytes are bounded by those who append: when `full`, a server takes no more rows.

Memory may run out at any line. What was begun then is done by `go_on`, which is called each second:
an object has its number only when it is sent, and is acknowledged only when it is noted.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

import structlog

from zufluss.clock import Clock
from zufluss.log.shared.api import (
    OnDurable,
    OnFenced,
    Session,
    SessionCounts,
    SessionFencedError,
    Waiting,
    WrittenObject,
)
from zufluss.log.shared.gather import Gathering
from zufluss.log.shared.pace import Pace, backoff_seconds
from zufluss.log.shared.store import ObjectStore, WalSettings
from zufluss.model.table import TableBucket
from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectExistsError,
    ObjectMissingError,
)
from zufluss.remote.wal import (
    HEADER_BYTES,
    EntryKind,
    WalHeader,
    WalKind,
    WalName,
    encode_pieces,
)

AHEAD_FACTOR: Final = 4
"""Objects above one that is not known to be ours, at most, as a multiple of those under way."""
WRITTEN_MAX: Final = 512
"""Durable objects that are described one by one; trimming begins at half as many."""
MEMORY_SECONDS: Final = 0.1
"""Pause after an object could not be built for lack of memory."""

_logger = structlog.get_logger(__name__)


class _UnderWay(NamedTuple):
    """An object that was sent."""

    task: asyncio.Task[bool]
    """Ends with whether it is ours."""
    began: float
    """When it was started."""
    data: list[bytes]
    """Its bytes."""
    written: WrittenObject
    """What is in it."""

    @property
    def failed(self) -> bool:
        """Whether its task ended without an outcome: for lack of memory, say, for a timer."""
        task = self.task
        return task.done() and not task.cancelled() and task.exception() is not None


class ObjectWriter:
    """A session over a store of objects; a `SessionWriter`."""

    def __init__(
        self,
        store: ObjectStore,
        session: Session,
        settings: WalSettings,
        on_durable: OnDurable,
        on_fenced: OnFenced,
        *,
        clock: Clock,
        random: Random,
        nonce: Callable[[], bytes],
    ) -> None:
        self._store = store
        self._session = session
        self._settings = settings
        self._on_durable = on_durable
        self._on_fenced = on_fenced
        self._clock = clock
        self._random = random
        self._nonce = nonce
        self._loop = asyncio.get_running_loop()
        self._gathering = Gathering(settings.object_bytes)
        self._pace = Pace(settings.interval_seconds, settings.in_flight, clock)
        self._next = 0
        self._durable = 0
        self._own: dict[int, WrittenObject] = {}
        """Objects that are known to be ours, above one that is not."""
        self.written: deque[WrittenObject] = deque()
        """The durable objects that were not trimmed, in order."""
        self.counts = SessionCounts()
        self._under_way: dict[int, _UnderWay] = {}
        """Objects whose outcome is not known yet, in order."""
        self._failure = ""
        """Why the last request failed; empty after one that succeeded."""
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._at_once = 0
        """Objects below this number start without waiting for more entries."""
        self._closing = False
        self._stopped = False
        self._error: SessionFencedError | None = None
        self._changed = asyncio.Event()
        """Set when a waiting coroutine should look again."""

    @property
    def full(self) -> bool:
        """So much waits that nothing more should be appended before there is `room`."""
        return self._gathering.length >= self._settings.gathered_bytes

    @property
    def waiting(self) -> Waiting:
        """What is not durable yet."""
        oldest = next(iter(self._under_way.values()), None)
        seconds = 0.0 if oldest is None else self._clock() - oldest.began
        return Waiting(self._gathering.length, seconds, self._failure)

    @property
    def durable_number(self) -> int:
        """All objects below this number are durable: no floor may lie above it."""
        return self._durable

    def append(
        self,
        bucket: TableBucket,
        leader_epoch: int,
        first_offset: int,
        end_offset: int,
        batches: bytes | memoryview,
        kind: EntryKind = EntryKind.BATCHES,
    ) -> None:
        """Have batches made durable; see `SessionWriter`."""
        if self._error is not None:
            raise self._error
        if self._closing:
            raise ValueError(f"{self!r} was closed")
        self._gathering.add(bucket, leader_epoch, first_offset, end_offset, batches, kind)
        if not self._scheduled:
            self._loop.call_soon(self._start)
            self._scheduled = True

    def end_offset(self, bucket: TableBucket) -> int | None:
        """The end of what was appended of a bucket, durable or not; None if nothing was."""
        return self._gathering.end_offset(bucket)

    def go_on(self) -> None:
        """Do what a lack of memory has interrupted; called periodically."""
        for sent in [*self._under_way.values()]:
            if sent.failed:
                self._send(sent.data, sent.written)
            elif sent.task.done():
                self._sent(sent)
        self._acknowledge()
        self._changed.set()
        self._start()

    async def room(self) -> None:
        """Wait until the session should take entries, or is fenced."""
        await self._wait_for(lambda: not self.full)

    async def drained(self, *, at_once: bool = False) -> int:
        """Wait until everything that was appended before the call is durable.

        `at_once` starts the object that gathers entries without waiting for more of them. Returns
        the number behind the last object of it; what is appended meanwhile may lie in that object,
        too. Raises SessionFencedError if the session ends before.
        """
        if self._error is None and not self._stopped:  # otherwise the gathered entries are gone
            behind = self._next + self._gathering.objects
            if at_once and self._durable < behind:
                self._at_once = max(self._at_once, behind)
                self._start()
            await self._wait_for(lambda: self._stopped or self._durable >= behind)
            if self._durable >= behind:
                return behind
        raise self._error or SessionFencedError(
            f"the session of server {self._session.server_id} was stopped: what it appended last "
            "may be durable or not"
        )

    def trimmed(self, floor: int) -> None:
        """Forget the objects below a floor: they were deleted, or will be."""
        while self.written and self.written[0].number < floor:
            self.written.popleft()

    async def close(self) -> None:
        """Make everything durable and end the session; raises SessionFencedError."""
        self._closing = True
        self._start()
        await self._wait_for(lambda: not self._gathering.waits and self._next == self._durable)
        if self._error is not None:
            raise self._error
        header = self._header(WalKind.CLOSE)
        self._send(encode_pieces(header), WrittenObject(header.number, 0, [], header.number))
        await self._wait_for(lambda: self._next == self._durable)
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        """Give up: what is not durable yet may become durable or not."""
        self._closing = self._stopped = True
        tasks = [under_way.task for under_way in self._under_way.values()]
        self._cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        while self._error is None and not condition():
            self._changed.clear()
            await self._changed.wait()

    # Starting objects

    def _start(self) -> None:
        """Start the objects that may start now, and a timer for the next."""
        self._scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._gathering.waits and self._has_slot():
            hurried = self._next < self._at_once
            at_once = self._closing or hurried or self._gathering.complete
            left = 0.0 if at_once else self._pace.seconds_left(len(self._under_way))
            if left > 0 or not self._start_object():
                self._timer = self._loop.call_later(left or MEMORY_SECONDS, self._start)
                return

    def _has_slot(self) -> bool:
        allowed = self._pace.in_flight
        return (
            self._error is None
            and len(self._under_way) < allowed
            and self._next - self._durable < AHEAD_FACTOR * allowed
        )

    def _start_object(self) -> bool:
        """Give the oldest object its number and send it; False if there is no memory for it."""
        try:
            entries = self._gathering.oldest()
            header = self._header(WalKind.DATA)
            data = encode_pieces(header, entries)
            ends = [(entry.bucket, entry.end_offset) for entry in entries]
            length = sum(entry.length for entry in entries)
            self._send(data, WrittenObject(header.number, length, ends, header.number))
        except MemoryError:
            _logger.warning("wal_object_postponed", number=self._next, reason="no memory")
            return False
        self._gathering.drop_oldest()  # if not, it is sent twice: readers skip what they have
        self._pace.started()
        self._changed.set()
        return True

    def _header(self, kind: WalKind) -> WalHeader:
        return WalHeader(kind, *self._session, self._next, self._nonce(), self._durable)

    def _send(self, data: list[bytes], written: WrittenObject) -> None:
        number, behind = written.number, written.number + 1
        name, began = WalName(self._session.server_epoch, number), self._clock()
        former = self._under_way.get(number)
        task = self._loop.create_task(self._created(name, data))
        try:
            sent = self._under_way[number] = _UnderWay(task, began, data, written)
            task.add_done_callback(lambda _: self._sent(sent))
        except BaseException:
            task.cancel()  # it has not begun
            if former is not None:
                self._under_way[number] = former
            else:
                self._under_way.pop(number, None)
            raise
        self._next = max(self._next, behind)

    # Puts

    async def _created(self, name: WalName, data: list[bytes]) -> bool:
        """Create an object, trying for ever; return whether it is ours."""
        failures = 0
        while True:
            began = self._clock()
            try:
                ours = await self._try(name.path, data)
            except Exception as error:  # of whatever kind: the next try decides
                throttled = isinstance(error, LocationUnavailableError) and error.throttled
                self._pace.failed(began, throttled)
                self._failure = str(error) or repr(error)
                self.counts.failures += 1
                _logger.warning("wal_put_failed", path=name.path, reason=self._failure)
            else:
                if ours is not None:
                    self._failure = ""
                    self._pace.succeeded(self._clock() - began)
                    return ours
            failures += 1
            await asyncio.sleep(backoff_seconds(failures, self._random.random()))

    async def _try(self, path: str, data: list[bytes]) -> bool | None:
        """Create an object with one request, or two if the first is slow.

        Whether it is ours, None if nobody can tell. The last error is raised if both fail.
        """
        requests = [self._request(path, data)]
        pending = set(requests)
        try:
            timeout = self._pace.slow_seconds
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                timeout = None
                if not done:
                    requests.append(self._request(path, data))
                    pending.add(requests[-1])
                for request in done:
                    if request.exception() is None and request.result() is not None:
                        return request.result()
            return requests[-1].result()
        finally:
            for request in pending:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    def _request(self, path: str, data: list[bytes]) -> asyncio.Task[bool | None]:
        return self._loop.create_task(self._create(path, data))

    async def _create(self, path: str, data: list[bytes]) -> bool | None:
        try:
            await self._store.create(path, data)
        except ObjectExistsError:
            return await self._is_ours(path, data[0])
        return True

    async def _is_ours(self, path: str, header: bytes) -> bool | None:
        """Whether the object that exists is ours, by its header; None if there is none."""
        try:
            head = await self._store.get_range(path, 0, HEADER_BYTES)
        except ObjectMissingError:
            return None
        except ObjectCorruptError:  # it is shorter than a header
            return False
        return head == header

    def _sent(self, sent: _UnderWay) -> None:
        """Take the outcome of an object; acknowledge those that are ours without a gap."""
        number = sent.written.number
        if self._under_way.get(number) is not sent:
            return  # it was taken already
        if self._error is not None or sent.task.cancelled():
            del self._under_way[number]
            return
        if sent.failed:
            _logger.warning(
                "wal_put_interrupted", path=WalName(self._session.server_epoch, number).path
            )
            return  # `go_on` sends it again
        if not sent.task.result():
            self._fence(number)
            return
        self._own[number] = sent.written
        del self._under_way[number]
        self._acknowledge()
        self._changed.set()
        self._start()

    def _acknowledge(self) -> None:
        """Acknowledge the objects that are ours without a gap."""
        while (durable := self._own.get(self._durable)) is not None:
            behind, noted = self._durable + 1, self.written
            if durable.ends:
                # Noted first: what is not would be trimmed without being carried.
                if not noted or noted[-1].number < durable.number:
                    noted.append(durable)
                self._on_durable(durable.ends)
                self.counts.objects += 1
                self.counts.bytes += durable.length
            del self._own[self._durable]
            self._durable = behind
        if len(self.written) > WRITTEN_MAX:
            self.written = _in_pairs(self.written)

    # The end

    def _fence(self, number: int) -> None:
        name = WalName(self._session.server_epoch, number)
        self._error = SessionFencedError(
            f"the session of server {self._session.server_id} was ended by another: "
            f"{self._store.uri.text}/{name.path} is not ours; the server must register again"
        )
        _logger.warning("wal_session_fenced", path=name.path, durable=self._durable)
        self._cancel()
        self._on_fenced(self._error)

    def _cancel(self) -> None:
        """Stop everything that is under way; nothing is acknowledged any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._gathering.clear()
        self._own.clear()
        for under_way in self._under_way.values():
            under_way.task.cancel()
        self._changed.set()

    def __repr__(self) -> str:
        return (
            f"ObjectWriter(server_epoch={self._session.server_epoch}, next={self._next}, "
            f"durable={self._durable}, under_way={len(self._under_way)})"
        )


def _in_pairs(objects: deque[WrittenObject]) -> deque[WrittenObject]:
    """Describe each two objects as one, so that memory is bounded while nothing can be trimmed."""
    rest = iter(objects)
    pairs: deque[WrittenObject] = deque()
    for one in rest:
        other = next(rest, None)
        if other is None:
            pairs.append(one)
            break
        ends = [*(dict(one.ends) | dict(other.ends)).items()]
        length = one.length + other.length
        pairs.append(WrittenObject(other.number, length, ends, one.first_number))
    return pairs
