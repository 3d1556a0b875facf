"""Pinned states: the rows of buckets at one moment, for scans.

    open:     flush up to the high watermark → hard links of the cold tier → rename → pages
    release:  the last user leaves → pages under way end → files are closed → directory removed

A state is the rows of a bucket at one log offset (`kv/scan/pins.py`). Readers that open a bucket at
the same offset share one state. Later writes, flushes and compactions do not change it, so any page
can be read any number of times, by any reader.

States that a server leaves on the disk when it stops or is killed are kept for `kv.scanner.ttl`
after the next start, for readers that ask for the same offset again. Later the state is rebuilt
(`scan/rebuild.py`), where that is possible.

When a bucket stops, its states answer no more questions. Their files are deleted with the bucket,
or left for its next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

import structlog

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import (
    InvalidScanRequestError,
    KvScanBusyError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.kv.cold.checkpoint import COLD_DIRECTORY
from zufluss.kv.rest import Rests
from zufluss.kv.scan.pins import PinDirectory, PinnedFiles
from zufluss.kv.scan.scanner import EMPTY, Page, Scanner
from zufluss.model.table import TableBucket
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.contention import Contention
from zufluss.tablet.scan.rebuild import Rebuilder
from zufluss.tablet.tasks import BackgroundTasks

__all__ = ["Page", "PinStates", "PinnedState"]

log = structlog.get_logger(__name__)

PAGES_MAX: Final = 32
"""Most pages that are being read or wait to be claimed."""
REBUILT_SECONDS: Final = 60.0
"""How long a rebuilt state is kept after its reader gave up waiting."""

Question: TypeAlias = tuple[bytes | None, bytes | None, int, int]
"""The parameters of a page: after, until, rows, size."""
Place: TypeAlias = tuple[Path, Question]
"""A page of a database."""
Key: TypeAlias = tuple[TableBucket, int]
"""Bucket and log offset."""


class PinnedState:
    """The rows of a bucket at one log offset, shared by all scans of it. On the event loop."""

    def __init__(
        self, owner: PinStates, replica: Replica, pins: PinDirectory, files: PinnedFiles
    ) -> None:
        self.bucket = replica.bucket
        self.path = replica.path
        """The table and partition of the bucket."""
        self.log_offset = files.state.flushed_offset
        """The rows contain exactly the changes below this offset."""
        self.directory = files.directory
        """Directory of its files."""
        counted = replica.tablet.table.before_images
        self.rows: int | None = files.state.row_count if counted else None
        """Number of rows, None where they are not counted."""
        self.pins = pins
        """The pins of the bucket, which own the directory."""
        self.users = 0
        self.failure: ZuflussError | None = None
        """Why the state answers no more questions; None while it does."""
        self._owner = owner
        self._database = None if files.database is None else files.database.absolute()

    def __repr__(self) -> str:
        return f"PinnedState({self.bucket} at {self.log_offset}, {self.users} users)"

    async def page(
        self,
        after: bytes | None,
        until: bytes | None,
        rows: int,
        size: int,
        wait: float | None = None,
    ) -> Page | None:
        """Rows after the key `after` (None: from the first) up to and including `until`.

        Returns at least one row if there is one, at most `rows`, and stops when their values take
        `size` bytes or more. `last_key` is `after` if there are no rows. Returns None if the page
        was not read within `wait` seconds: it is read on, and the same call gets it later. Equal
        calls get equal rows, and any number of calls may be under way. An unclaimed page is
        discarded when another page of the state is asked for.

        `LogStorageError` if the files cannot be read; `UnknownTableOrBucketError` after the bucket
        has stopped.
        """
        if self.failure is not None:
            raise self.failure
        if self._database is None:
            return EMPTY._replace(last_key=after)
        place = (self._database, (after, until, rows, size))
        pages = self._owner.pages
        try:
            async with asyncio.timeout(wait):
                reading = await pages.begin(place)
                if not reading.done():
                    await asyncio.wait({reading})
        except TimeoutError:
            return None
        pages.claim(place, reading)
        if reading.cancelled():
            raise _stopped(self.bucket)
        page = reading.result()
        return page if page.last_key is not None else page._replace(last_key=after)

    def acquire(self) -> PinnedState:
        """Count one more user, who calls `release`; returns the state."""
        self.users += 1
        return self

    async def release(self) -> None:
        """Count one user less. With the last one the state ends, after the pages under way."""
        self.users -= 1
        if not self.users:
            await self._owner.end(self)

    async def settled(self) -> Path | None:
        """Wait until no page is being read; returns the database to close, None without rows."""
        if self._database is not None:
            await self._owner.pages.settled(self._database)
        return self._database


class Pages:
    """The pages of all states that are being read or wait to be claimed."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._pages: dict[Place, asyncio.Future[Page]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    async def begin(self, place: Place) -> asyncio.Future[Page]:
        """Begin to read a page, when there are fewer than `PAGES_MAX`; joins one under way."""
        while place not in self._pages:
            self._drop(place[0] if len(self._pages) < PAGES_MAX else None)
            if len(self._pages) < PAGES_MAX:
                reading = asyncio.wrap_future(self._scanner.read(place[0], *place[1]))
                reading.add_done_callback(_noticed)
                self._pages[place] = reading
            else:
                waiting = [*self._pages.values()]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return self._pages[place]

    def claim(self, place: Place, reading: asyncio.Future[Page]) -> None:
        """Forget a page that a reader has claimed."""
        if self._pages.get(place) is reading:
            del self._pages[place]

    async def settled(self, database: Path) -> None:
        """Wait until no page of a state is being read, and discard its unclaimed pages."""
        if reading := [page for place, page in self._pages.items() if place[0] == database]:
            await asyncio.wait(reading)
        self._drop(database)

    def _drop(self, database: Path | None) -> None:
        """Discard unclaimed pages of a state, or of all states for None."""
        for place, reading in [*self._pages.items()]:
            if reading.done() and database in (None, place[0]):
                del self._pages[place]


class PinStates:
    """The pinned states of a server. Belongs to the event loop."""

    def __init__(
        self,
        conf: Configuration,
        buckets: Buckets,
        kv: KvHost,
        rebuilder: Rebuilder,
        contention: Contention,
        tasks: BackgroundTasks,
    ) -> None:
        self.rests = Rests(lambda: contention.puts)
        """Decides when scans rest so that puts get ahead."""
        self.scanner = Scanner(rests=self.rests)
        self.pages = Pages(self.scanner)
        self._buckets = buckets
        self._kv = kv
        self._rebuilder = rebuilder
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._left_seconds = conf.get(options.KV_SCANNER_TTL) / 1000
        self._making_max = conf.get(options.KV_SCANNER_MAX_PER_SERVER)
        self._states: dict[Key, PinnedState] = {}
        self._ending: dict[Key, asyncio.Task[None]] = {}
        self._turns: WeakValueDictionary[TableBucket | Key, asyncio.Lock] = WeakValueDictionary()
        """Locks: of a bucket while it is opened, of a state while it is made or removed."""
        self._making: dict[asyncio.Task[PinnedState], Replica] = {}
        self._timers: dict[Replica, asyncio.TimerHandle] = {}
        """When the states that an earlier life of a bucket left are removed."""

    # -- making ---------------------------------------------------------------------------------

    async def open_state(self, replica: Replica) -> PinnedState:
        """Pin the present state of a bucket, up to the high watermark. Acquired once.

        An existing state is shared if nothing was written since.
        """
        return await self._in_own_task(replica, self._open(replica))

    async def rebuild_state(self, replica: Replica, log_offset: int) -> PinnedState:
        """Pin the state at exactly this offset, kept or rebuilt. Acquired once.

        `InvalidScanRequestError` above the high watermark; `KvPinGoneError` says what is missing
        where it cannot be rebuilt; retriable errors while remote storage does not answer.
        """
        end = replica.log.high_watermark
        if not 0 <= log_offset <= end:
            raise InvalidScanRequestError(
                f"{replica.bucket.named(replica.path)} has no state at offset {log_offset}; "
                f"allowed: 0 to {end}, as far as its changelog is kept"
            )
        if log_offset == end:
            state = await self.open_state(replica)
            if state.log_offset == log_offset:
                return state
            await state.release()
        return await self._in_own_task(replica, self._find(replica, log_offset), REBUILT_SECONDS)

    async def _in_own_task(
        self, replica: Replica, work: Coroutine[Any, Any, PinnedState], keep_seconds: float = 0
    ) -> PinnedState:
        """Make a state in a task of its own, which also ends well if the caller is cancelled.

        Then the state is kept for `keep_seconds`, for a caller that asks again, and released.
        `KvScanBusyError` if too many states are being made.
        """
        if len(self._making) >= self._making_max:
            work.close()
            raise KvScanBusyError(
                f"{len(self._making)} states are being made for scans, as many as "
                f"{options.KV_SCANNER_MAX_PER_SERVER.key} allows; ask again"
            )
        task = self._loop.create_task(work)
        self._making[task] = replica
        task.add_done_callback(self._making.pop)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise _stopped(replica.bucket) from None
            task.add_done_callback(partial(self._release_unclaimed, keep_seconds))
            raise

    def _release_unclaimed(self, keep_seconds: float, task: asyncio.Task[PinnedState]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._tasks.spawn(_release_after(keep_seconds, task.result()))

    async def _open(self, replica: Replica) -> PinnedState:
        store, bucket = replica.tablet.store, replica.bucket
        async with self._turn(bucket):
            horizon = store.horizon
            known = await self._known((bucket, horizon))
            if known is not None:
                return known.acquire()
            fresh = await asyncio.to_thread(store.pins.fresh)
            try:
                target = fresh / COLD_DIRECTORY
                state = await self._kv.pin(replica, target, horizon, self.rests)
                finish = partial(asyncio.to_thread, store.pins.finish, fresh, state)
                return await self._known_or(replica, state.flushed_offset, finish)
            finally:
                await asyncio.to_thread(store.pins.discard, fresh)

    async def _find(self, replica: Replica, log_offset: int) -> PinnedState:
        rebuild = partial(self._rebuilder.rebuild, replica, log_offset)
        return await self._known_or(replica, log_offset, rebuild)

    async def _known_or(
        self, replica: Replica, log_offset: int, make: Callable[[], Awaitable[PinnedFiles]]
    ) -> PinnedState:
        """The state in use, else the one that an earlier life of the bucket left, else a new one.

        Acquired once.
        """
        pins, key = replica.tablet.store.pins, (replica.bucket, log_offset)
        async with self._turn(key):
            known = await self._known(key)
            if known is not None:
                return known.acquire()
            files = await asyncio.to_thread(pins.find, log_offset)
            return self._new(replica, files or await make())

    def _new(self, replica: Replica, files: PinnedFiles) -> PinnedState:
        if not self._buckets.serves(replica):
            raise _stopped(replica.bucket)
        state = PinnedState(self, replica, replica.tablet.store.pins, files)
        self._states[state.bucket, state.log_offset] = state
        return state.acquire()

    def _turn(self, key: TableBucket | Key) -> asyncio.Lock:
        return self._turns.setdefault(key, asyncio.Lock())

    async def _known(self, key: Key) -> PinnedState | None:
        """The state in use, None if there is none; waits for one that is being removed."""
        while (ending := self._ending.get(key)) is not None:
            await asyncio.wait({ending})  # lets `_ended` run, also if it is done already
        return self._states.get(key)

    # -- the end --------------------------------------------------------------------------------

    async def end(self, state: PinnedState) -> None:
        """Remove a state that has no users."""
        key = (state.bucket, state.log_offset)
        if self._states.get(key) is state:
            del self._states[key]
        task = self._loop.create_task(self._end(state))
        self._ending[key] = task
        task.add_done_callback(partial(self._ended, key))
        await asyncio.wait({task})

    async def _end(self, state: PinnedState) -> None:
        database = await state.settled()
        if database is not None:
            await asyncio.wrap_future(self.scanner.close(database))
        if state.failure is None:
            await asyncio.to_thread(state.pins.remove, state.log_offset)

    def _ended(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._ending.get(key) is task:
            del self._ending[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("kv_pin_not_removed", bucket=str(key[0]), offset=key[1], error=str(error))

    # -- buckets that start and stop ------------------------------------------------------------

    def opened(self, replica: Replica) -> None:
        """Keep the states that an earlier life of a bucket left, for a while.

        States beyond the end of its log go at once: other changes will get these offsets.
        """
        if replica.kv is None:
            return
        offsets = replica.tablet.store.pins.offsets()
        if offsets:
            later = partial(self._remove_later, replica)
            self._timers[replica] = self._loop.call_later(self._left_seconds, later)
        if offsets and offsets[-1] > replica.log.log_end_offset:
            self._tasks.spawn(self._remove_left(replica, replica.log.log_end_offset + 1))

    def closed(self, replica: Replica) -> None:
        """A bucket was closed: its states answer no more questions."""
        timer = self._timers.pop(replica, None)
        if timer is not None:
            timer.cancel()
        self._rebuilder.end(replica)
        for key, state in [*self._states.items()]:
            if state.bucket == replica.bucket:
                state.failure = _stopped(replica.bucket)
                del self._states[key]

    def _remove_later(self, replica: Replica) -> None:
        del self._timers[replica]
        self._tasks.spawn(self._remove_left(replica, 0))

    async def _remove_left(self, replica: Replica, start: int) -> None:
        """Remove unused states at `start` and above."""
        pins, bucket = replica.tablet.store.pins, replica.bucket
        for offset in await asyncio.to_thread(pins.offsets):
            async with self._turn((bucket, offset)):
                used = (bucket, offset) in self._states or (bucket, offset) in self._ending
                if offset >= start and not used:
                    await asyncio.to_thread(pins.remove, offset)

    async def stop(self) -> None:
        """End the processes that read. States are left on the disk for the next start."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._rebuilder.stop()
        await asyncio.gather(*self._making, return_exceptions=True)
        for state in self._states.values():
            state.failure = _stopped(state.bucket)
        await self._loop.run_in_executor(None, self.scanner.stop)
        await asyncio.gather(*self._ending.values(), return_exceptions=True)


async def _release_after(seconds: float, state: PinnedState) -> None:
    await asyncio.sleep(seconds)
    await state.release()


def _stopped(bucket: TableBucket) -> UnknownTableOrBucketError:
    return UnknownTableOrBucketError(
        f"{bucket} has stopped on this server, and its pinned states with it; refresh the metadata "
        "and open the scan again"
    )


def _noticed(reading: asyncio.Future[Page]) -> None:
    """Mark the failure of a page as seen: it may never be claimed."""
    if not reading.cancelled():
        reading.exception()
