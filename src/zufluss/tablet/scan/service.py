"""Scans of pinned state: OPEN_KV_SNAPSHOT, SCAN_KV_SNAPSHOT and CLOSE_KV_SNAPSHOT.

OPEN pins the state of buckets, all of them or none; with `partial` the first ones, as many as there
is room for. SCAN answers the rows of a pin after a key, as Arrow. CLOSE releases the pin, or leaves
it to another process. The server keeps the pin, the client sends the cursor with every
call, so a call may be repeated, sent from another process, or made with an older key, and gets the
same rows. `scan/pins.py` says how long pins live, `scan/rows.py` decodes the rows, and
`scan/sessions.py` implements Fluss's SCAN_KV on top of this module.

A call searches until it has rows, reaches the end, or runs out of time, and answers how far it
came. Rows that do not match and long runs of deleted rows cost several calls, but never a long one.

A request is checked before it counts as a use of its pin. Calls wait for a connection that has not
read its earlier answers, and only so many pages are in memory at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeVar

from zufluss.cluster.token_service import MayRead, everybody
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import (
    AuthorizationError,
    ErrorCode,
    InvalidScanRequestError,
    KvScanBusyError,
    KvScanExpiredError,
)
from zufluss.kv.table import KvTable
from zufluss.net.services import Reader, RequestContext
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.scan.pins import PinLimits, StatePin, StatePins
from zufluss.tablet.scan.rows import ArrowPage, RowReader
from zufluss.tablet.scan.states import Page, PinnedState, PinStates
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.threads import Threads
from zufluss.wire import messages as m
from zufluss.wire.codec import decode
from zufluss.wire.hot.buckets import BUCKETS_MAX
from zufluss.wire.predicates import predicate_from_proto
from zufluss.wire.tables import partition_id_of

T = TypeVar("T")

DECODE_THREADS: Final = 2
"""Threads that decode pages."""
SHARE: Final = 4
"""A partial OPEN gets at most one in this number of the pins that a server may have."""
FILTER_BYTES: Final = 256
"""A filter that is longer is checked in a thread: a test of few bytes takes long to prepare."""
CALLS_MAX: Final = 16
"""Most calls that read at the same time, each with a page in memory."""


@dataclass(slots=True)
class ScanSession:
    """The cursor of a SCAN_KV (`scan/sessions.py`)."""

    left: int | None
    """Rows that the limit still allows, None without one."""
    after: bytes | None = None
    """The key of the last row that was answered."""
    call_seq_id: int = -1
    """The last call that was answered."""
    answer: m.ScanKvResponse | None = None
    """The answer to that call."""
    busy: bool = False
    """A call is under way."""


@dataclass(slots=True)
class PinContent:
    """The content of a pin."""

    state: PinnedState
    """The rows, shared by all pins of the bucket at the same offset."""
    session: ScanSession | None = None
    """The cursor of the SCAN_KV that opened the pin, None for OPEN_KV_SNAPSHOT."""
    rows: int = 0
    """Rows that its calls were answered."""
    bytes: int = 0
    """Of the records in these answers."""


class PinTarget(NamedTuple):
    """A state to pin."""

    replica: Replica
    """The bucket."""
    log_offset: int | None
    """The state at this offset, None for the present one."""


@dataclass(slots=True)
class ScanCounts:
    """What the scans of a table have answered since the start."""

    rows: int = 0
    bytes: int = 0
    """Of the records in answers."""


class ScanService:
    """The handlers of scans, and the pins of one server."""

    def __init__(
        self,
        conf: Configuration,
        buckets: Buckets,
        states: PinStates,
        tasks: BackgroundTasks,
        may_read: MayRead = everybody,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is read for the age of pins."""
        self._buckets = buckets
        self._states = states
        self._tasks = tasks
        self.loop = asyncio.get_running_loop()
        self.pins: StatePins[PinContent] = StatePins(
            PinLimits.of(conf), self._let_go, clock, buckets.name_of
        )
        self.counts: dict[int, ScanCounts] = {}
        """By table id."""
        self.calls = asyncio.Semaphore(CALLS_MAX)
        self.seconds_max = conf.get(options.ZUFLUSS_KV_SCANNER_TIME_LIMIT) / 1000
        """How long a call may look for rows."""
        self._size_max = conf.get(options.KV_SCANNER_MAX_BATCH_SIZE)
        self._may_read = may_read
        self._threads = Threads(DECODE_THREADS, "zufluss-scan")

    def closed(self, replica: Replica) -> None:
        """End the pins of a bucket that was closed or begins a new leader epoch."""
        self.pins.end_bucket(replica.bucket)

    def stop(self) -> None:
        """Decode no more rows. States stay on the disk, for clients that return after a restart."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- handlers ---------------------------------------------------------------------------

    async def open_kv_snapshot(
        self, request: m.OpenKvSnapshotRequest, context: RequestContext
    ) -> m.OpenKvSnapshotResponse:
        """OPEN_KV_SNAPSHOT (30030)."""
        count = len(request.buckets)
        if not 1 <= count <= BUCKETS_MAX:
            raise InvalidScanRequestError(
                f"the call names {count} buckets to pin; name 1 to {BUCKETS_MAX} of them"
            )
        buckets = request.buckets[: self._pins_at_once(count, partial=request.partial)]
        targets = [self._target(request.table_id, b, context.principal) for b in buckets]
        seconds = None
        if request.HasField("time_limit_ms"):
            seconds = not_negative("time_limit_ms", request.time_limit_ms) / 1000
        try:
            async with asyncio.timeout(seconds):
                pins = await self.open(targets, context.principal, partial=request.partial)
        except TimeoutError:
            raise KvScanBusyError(
                f"the state of {count} buckets is still being made after {seconds:g} s; ask again"
            ) from None
        for pin in pins:
            if not request.detached:
                self.pins.hold(pin, context.reader)
        limits = self.pins.limits
        return m.OpenKvSnapshotResponse(
            pins=[
                m.PbPin(
                    pin_id=pin.pin_id,
                    log_offset=pin.content.state.log_offset,
                    leader_epoch=pin.leader_epoch,
                    idle_ms=round(limits.idle_seconds * 1000),
                    remaining_ms=int(self.pins.remaining_seconds(pin) * 1000),
                    grace_ms=round(limits.grace_seconds * 1000),
                )
                for pin in pins
            ]
        )

    async def scan_kv_snapshot(
        self, request: m.ScanKvSnapshotRequest, context: RequestContext
    ) -> m.ScanKvSnapshotResponse:
        """SCAN_KV_SNAPSHOT (30031)."""
        await context.reader.room()
        partition_id = partition_id_of(request)
        who = context.principal
        replica = self.replica(request.table_id, partition_id, request.bucket_id, who)
        check = partial(self._search, request, replica.tablet.table)
        search = await self.in_thread(check) if len(request.filter) > FILTER_BYTES else check()
        pin = self.pins.find(request.pin_id, who)
        self.check_leader(pin, replica)
        with self.pins.use(pin, context.reader) as pinned:
            async with self.turn(search.deadline, context.reader) as mine:
                if not mine:
                    return m.ScanKvSnapshotResponse(last_key=search.after, done=False, rows=0)
                return await self._rows(search, pinned)

    async def close_kv_snapshot(
        self, request: m.CloseKvSnapshotRequest, context: RequestContext
    ) -> m.CloseKvSnapshotResponse:
        """CLOSE_KV_SNAPSHOT (30032)."""
        let_go = self.pins.detach if request.detach else self.pins.close
        for pin_id in request.pin_ids:
            let_go(pin_id, context.principal)
        return m.CloseKvSnapshotResponse()

    # -- pins -------------------------------------------------------------------------------

    def replica(
        self, table_id: int, partition_id: int | None, bucket_id: int, principal: str | None
    ) -> Replica:
        """A bucket of a primary-key table that the principal may read."""
        replica = self._buckets.kv_replica(table_id, partition_id, bucket_id)
        if not self._may_read(principal, replica.path.path):
            raise AuthorizationError(
                f"{principal or 'an unknown user'} may not read {replica.path}"
            )
        return replica

    def sees(self, principal: str | None, pin: StatePin[PinContent]) -> bool:
        """Whether a principal may know of a pin."""
        return self._may_read(principal, pin.content.state.path.path)

    async def open(
        self, targets: Sequence[PinTarget], principal: str | None, *, partial: bool = False
    ) -> list[StatePin[PinContent]]:
        """Pin states, all of them or none; with `partial` as many as there is room for."""
        self._buckets.check_present()
        pins: list[StatePin[PinContent]] = []
        try:
            self._begin(pins, targets, principal, partial=partial)
            work = (self._make(pin, each) for pin, each in zip(pins, targets, strict=False))
            outcomes = await asyncio.gather(*work, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            for pin in pins:  # one may have ended while others were opened
                self.pins.find(pin.pin_id, principal)
        except BaseException:
            for pin in pins:
                self.pins.abandon(pin)
            raise
        return pins

    def _pins_at_once(self, count: int, *, partial: bool) -> int:
        """How many of `count` buckets a call may pin; raises if that is too few for it."""
        most = self.pins.limits.per_server
        if partial:
            return max(most // SHARE, 1)
        if count > most:
            raise InvalidScanRequestError(
                f"the call pins {count} buckets at once; {options.KV_SCANNER_MAX_PER_SERVER.key} "
                f"allows {most} on this server: raise it, or scan fewer partitions or buckets at a "
                "time"
            )
        return count

    def _begin(
        self,
        pins: list[StatePin[PinContent]],
        targets: Sequence[PinTarget],
        principal: str | None,
        *,
        partial: bool,
    ) -> None:
        """Add a pin for each target; with `partial` stop where there is no room, after one."""
        for replica, _ in targets:
            try:
                pins.append(self.pins.begin(replica.bucket, principal, replica.leader_epoch))
            except KvScanBusyError:
                if not (partial and pins):
                    raise
                return

    async def _make(self, pin: StatePin[PinContent], target: PinTarget) -> None:
        states = self._states
        if target.log_offset is None:
            state = await states.open_state(target.replica)
        else:
            state = await states.rebuild_state(target.replica, target.log_offset)
        self.pins.complete(pin, PinContent(state))

    def check_leader(self, pin: StatePin[PinContent], replica: Replica) -> None:
        """Refuse a pin of another bucket, or of an earlier time of this one."""
        if pin.bucket != replica.bucket:
            raise KvScanExpiredError(
                f"the pin {pin.pin_id.hex()} belongs to {self._buckets.name_of(pin.bucket)}, not "
                f"to {replica.bucket.named(replica.path)}",
                code=ErrorCode.UNKNOWN_SCANNER_ID,
            )
        if pin.leader_epoch != replica.leader_epoch:
            self.pins.end_bucket(pin.bucket)
            self.pins.find(pin.pin_id, pin.owner)  # raises why it has ended

    def _let_go(self, pinned: PinContent) -> None:
        self._tasks.spawn(pinned.state.release())

    # -- rows -------------------------------------------------------------------------------

    @asynccontextmanager
    async def turn(self, deadline: float, reader: Reader | None = None) -> AsyncIterator[bool]:
        """Wait to be one of the few calls that read; False if the deadline has passed.

        Waits again if there is no room for the answer when the turn comes.
        """
        mine = False
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                mine = await self.calls.acquire()
                while reader is not None and not reader.has_room:
                    self.calls.release()
                    mine = False
                    await reader.room()
                    mine = await self.calls.acquire()
        try:
            yield mine
        finally:
            if mine:
                self.calls.release()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Decode rows, or check a filter, in a thread."""
        return await self.loop.run_in_executor(self._threads, work)

    def size(self, asked: int) -> int:
        """The page size for a request of `asked` bytes, at most the allowed one."""
        if asked <= 0:
            raise InvalidScanRequestError(
                f"batch_size_bytes is {asked}; ask for 1 to {self._size_max} bytes"
            )
        return min(asked, self._size_max)

    def _target(self, table_id: int, bucket: m.PbPinBucket, principal: str | None) -> PinTarget:
        partition_id = partition_id_of(bucket)
        replica = self.replica(table_id, partition_id, bucket.bucket_id, principal)
        offset = bucket.log_offset if bucket.HasField("log_offset") else None
        if offset is not None and offset < 0:
            raise InvalidScanRequestError(
                f"{replica.bucket.named(replica.path)} has no log offset {offset}; they begin at 0"
            )
        return PinTarget(replica, offset)

    def _search(self, request: m.ScanKvSnapshotRequest, table: KvTable) -> Search:
        """The search of a call; raises if the request is malformed."""
        schema = table.schema_of(request.schema_id)
        predicate = None
        if request.HasField("filter"):
            predicate = predicate_from_proto(decode(m.PbPredicate, request.filter), schema)
        seconds = self.seconds_max
        if request.HasField("time_limit_ms"):
            seconds = min(seconds, not_negative("time_limit_ms", request.time_limit_ms) / 1000)
        return Search(
            RowReader(table, schema, request.projected_columns, predicate),
            request.after_key if request.HasField("after_key") else None,
            request.until_key if request.HasField("until_key") else None,
            not_negative("limit", request.limit) or None,
            self.size(request.batch_size_bytes),
            self.loop.time() + seconds,
        )

    def count(self, pinned: PinContent, rows: int, size: int) -> None:
        """Count the rows and bytes of an answer."""
        table_id, tables = pinned.state.bucket.table_id, self._buckets.tables
        if table_id not in self.counts:
            self.counts = {i: counts for i, counts in self.counts.items() if i in tables}
        for counts in (pinned, self.counts.setdefault(table_id, ScanCounts())):
            counts.rows += rows
            counts.bytes += size

    async def _rows(self, search: Search, pinned: PinContent) -> m.ScanKvSnapshotResponse:
        after, state = search.after, pinned.state
        while True:
            left = search.deadline - self.loop.time()
            page = await state.page(
                after, search.until, search.page_rows, search.size, max(left, 0.0)
            )
            if page is None:
                return m.ScanKvSnapshotResponse(last_key=after, done=False, rows=0)
            rows = await self._read(search, page)
            after = page.last_key if rows.cut_key is None else rows.cut_key
            done = page.done and rows.cut_key is None
            if rows.count or done or self.loop.time() >= search.deadline:
                self.count(pinned, rows.count, len(rows.records or b""))
                return m.ScanKvSnapshotResponse(
                    records=rows.records, last_key=after, done=done, rows=rows.count
                )

    async def _read(self, search: Search, page: Page) -> ArrowPage:
        values = page.values
        limit = search.limit or values.count
        return await self.in_thread(lambda: search.reader.read(values, limit))


@dataclass(frozen=True, slots=True)
class Search:
    """What one call looks for."""

    reader: RowReader
    """Makes the rows."""
    after: bytes | None
    """Rows behind this key."""
    until: bytes | None
    """Up to this one."""
    limit: int | None
    """At most this many rows."""
    size: int
    """Stop when the stored rows take this many bytes."""
    deadline: float
    """Until then, on the clock of the loop."""

    @property
    def page_rows(self) -> int:
        """Rows of a page: a filter may leave out any number, otherwise the limit is enough."""
        most = self.reader.rows_max
        return most if self.limit is None or self.reader.filters else min(most, self.limit)


def not_negative(name: str, value: int) -> int:
    """A number of a request; `InvalidScanRequestError` if it is negative."""
    if value < 0:
        raise InvalidScanRequestError(f"{name} is {value}; give 0 or more")
    return value
