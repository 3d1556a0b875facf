"""The producer book: all producers in memory, in the metadata store, and at the leaders.

`producers/calls.py` decides what a call does to a producer; the book carries the decision out. The
changes of one table take turns (`turns.py`), durably first. When a write fails with an unknown
outcome, the producers of the table are read again before anything else happens to them.

Leaders get the producers of a table with a version that is made of the coordinator epoch and a
count, so that it grows over restarts. A leader gets them before it starts buckets (`tablets.py`),
and with its registration. Changes that no caller waits for, such as baselines of checkpoints and
ends of producers, are sent by a task, again and again until they arrive.

Times are those of a monotonic clock, and begin anew when the coordinator starts. Signs of life of a
producer are its calls, and its puts, which only leaders see: they are asked before a producer loses
anything. After `zufluss.producer.hold-max` of silence leaders no longer keep the changelog for a
producer. The producer itself is remembered, unless it owns nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog

from zufluss.cluster.image import BucketState, ClusterImage, ImageChange, TableGone
from zufluss.cluster.producers import ProducerEntry, TableProducers
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.producers import records
from zufluss.coordinator.producers.rules import ProducerRecord
from zufluss.coordinator.tablets import Tablets
from zufluss.coordinator.tasks import PendingTasks
from zufluss.coordinator.turns import Turns
from zufluss.errors import ConfigError, ZuflussError
from zufluss.meta.api import MetaStore, Op
from zufluss.periodic import pause
from zufluss.tasks import end

log = structlog.get_logger(__name__)

TELL_SECONDS: Final = 1.0
"""Pause between two rounds of news for leaders, which stop their puts for each."""
RETRY_SECONDS: Final = 5.0
"""Pause after news for leaders could not be delivered."""
SILENCE_CHECK_SECONDS: Final = 60.0
"""Interval between two checks for producers that were silent for `hold-max`."""
REMEMBERED_SECONDS: Final = 3600.0
"""Silence after which a producer is forgotten at the earliest, if it owns nothing."""
ENDED_AT_ONCE: Final = 200
"""Producers that end in one transaction."""
NUMBERS_PER_HOUR_MAX: Final = 1000
"""New producers of a table within an hour; at this pace a cluster's numbers last for years."""
HOUR_SECONDS: Final = 3600.0
_VERSION_BITS: Final = 32


@dataclass(slots=True)
class TableBook:
    """The producers of one table."""

    table_id: int
    """The id of the table."""
    version: int
    """Grows with each change that leaders must know."""
    producers: dict[str, ProducerRecord] = field(default_factory=dict)
    """The producers by id."""


class ProducerBook:
    """All producers, durable. Open it with `ProducerBook.open`."""

    def __init__(
        self,
        store: MetaStore,
        ledger: Ledger,
        image: ClusterImage,
        changes: Feed[Sequence[ImageChange]],
        tablets: Tablets,
        conf: Configuration,
        clock: Callable[[], float],
    ) -> None:
        self.tables: dict[int, TableBook] = {}
        """The producers of each table that has or had some, by table id."""
        self.tasks = PendingTasks("producers")
        """Changes of producers under way."""
        self._store = store
        self._ledger = ledger
        self._image = image
        self._tablets = tablets
        self._clock = clock
        self._hold_seconds = conf.get(options.ZUFLUSS_PRODUCER_HOLD_MAX) / 1000
        self._turns = Turns(self._read_again)
        self._seen: dict[int, float] = {}
        self._silent: set[int] = set()
        self._taken: dict[int, deque[float]] = {}
        self._changes = 0
        self._untold: set[int] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        changes.subscribe(self._changed)

    @classmethod
    async def open(
        cls,
        store: MetaStore,
        ledger: Ledger,
        image: ClusterImage,
        changes: Feed[Sequence[ImageChange]],
        tablets: Tablets,
        conf: Configuration,
        clock: Callable[[], float],
    ) -> ProducerBook:
        """Load all producers; their silence counts from now on."""
        book = cls(store, ledger, image, changes, tablets, conf, clock)
        entries = await store.tree(records.PRODUCERS_PATH)
        for producer in await asyncio.to_thread(records.load, entries):
            book._table(producer.table_id).producers[producer.producer_id] = producer
            book.seen(producer)
        for table_id in [i for i in book.tables if image.table_by_id(i) is None]:
            await book._forget_table(table_id)
        return book

    def start(self) -> None:
        """Send news to leaders, and check for silent producers, from now on."""
        self._task = asyncio.create_task(self._run(), name="producers")

    async def stop(self) -> None:
        """Finish the changes under way, and send no more news."""
        await end(self._task)
        await self.tasks.settle()

    def __iter__(self) -> Iterator[ProducerRecord]:
        """Every producer."""
        return (p for table in self.tables.values() for p in table.producers.values())

    # One table at a time

    @asynccontextmanager
    async def turn(self, table_id: int) -> AsyncIterator[TableBook]:
        """Have the turn of a table in this block, with its producers as the store has them."""
        async with self._turns.turn(table_id):
            await self._turns.settle(table_id)
            yield self._table(table_id)

    def _table(self, table_id: int) -> TableBook:
        if table_id not in self.tables:
            self.tables[table_id] = TableBook(table_id, self._next_version())
        return self.tables[table_id]

    def _next_version(self) -> int:
        self._changes += 1
        return self._ledger.epoch << _VERSION_BITS | self._changes

    async def _read_again(self, table_id: int) -> None:
        entries = await self._store.tree(records.table_path(table_id))
        producers = await asyncio.to_thread(records.load, entries)
        for producer in producers:
            self._seen.setdefault(producer.number, self._clock())
        table = self._table(table_id)
        table.producers = {producer.producer_id: producer for producer in producers}
        self._news(table)

    async def next_number(self, table_id: int) -> int:
        """A number that no producer ever had.

        `ConfigError` after `NUMBERS_PER_HOUR_MAX` within an hour: the numbers of a cluster are
        finite, and nobody may use them up.
        """
        now, taken = self._clock(), self._taken.setdefault(table_id, deque())
        while taken and now - taken[0] >= HOUR_SECONDS:
            taken.popleft()
        if len(taken) >= NUMBERS_PER_HOUR_MAX:
            raise ConfigError(
                f"table {self._image.table_name(table_id)} had {NUMBERS_PER_HOUR_MAX} new "
                "producers within an hour, more are not allowed; use producer ids again instead of "
                f"new ones, or of none, or try again in {HOUR_SECONDS - (now - taken[0]):.0f} s"
            )
        taken.append(now)
        return (await self._ledger.take(records.PRODUCER_COUNTER, 1))[0] + 1

    async def write(
        self, table: TableBook, ops: Sequence[Op], after: Iterable[ProducerRecord]
    ) -> None:
        """Store a change, then put the producers `after` it into memory."""
        await self._commit(table, ops)
        table.producers |= {producer.producer_id: producer for producer in after}
        table.version = self._next_version()

    async def end(self, table: TableBook, producers: Sequence[ProducerRecord]) -> None:
        """Delete producers, in the store first; many in several transactions."""
        for at in range(0, len(producers), ENDED_AT_ONCE):
            await self._end(table, producers[at : at + ENDED_AT_ONCE])

    async def _end(self, table: TableBook, producers: Sequence[ProducerRecord]) -> None:
        ops = [op for producer in producers for op in records.delete(producer)]
        await self._commit(table, ops)
        for producer in producers:
            del table.producers[producer.producer_id]
            self._seen.pop(producer.number, None)
            self._silent.discard(producer.number)
            log.info("producer_ended", producer=producer.producer_id, table_id=table.table_id)
        table.version = self._next_version()

    async def _commit(self, table: TableBook, ops: Sequence[Op]) -> None:
        try:
            await self._ledger.commit(ops)
        except Exception as problem:
            self._turns.failed(table.table_id, problem)
            raise

    # Tables that are dropped

    def _changed(self, changes: Sequence[ImageChange]) -> None:
        for change in changes:
            if isinstance(change, TableGone) and change.table_id in self.tables:
                self.tasks.later(self._forget_table(change.table_id))

    async def _forget_table(self, table_id: int) -> None:
        """Delete the producers of a dropped table; the next start does it after a failure."""
        try:
            async with self.turn(table_id) as table:
                if table.producers:
                    await self.end(table, list(table.producers.values()))
                self.tables.pop(table_id, None)
                self._taken.pop(table_id, None)
        except ZuflussError as problem:
            log.warning("producers_not_deleted", table_id=table_id, error=str(problem))

    # Leaders

    def of_table(self, table_id: int) -> TableProducers | None:
        """The producers of a table as its leaders must know them; None if it never had any.

        Also None for a log table, whose leaders check no producers.
        """
        table, entry = self.tables.get(table_id), self._image.table_by_id(table_id)
        if table is None or entry is None or not entry.info.has_primary_key:
            return None
        entries = tuple(map(self._entry, table.producers.values()))
        return TableProducers(table_id, table.version, entries)

    def of_server(self, server_id: int) -> list[TableProducers]:
        """The producers of all tables of which a server leads buckets."""
        table_ids = [i for i in self.tables if server_id in self.leaders(i)]
        return list(filter(None, map(self.of_table, table_ids)))

    def server_joined(self, server_id: int) -> None:
        """Send a server that joined the changes made during its registration."""
        for table_id in self.tables:
            if server_id in self.leaders(table_id):
                self.tell_later(table_id)

    def _entry(self, producer: ProducerRecord) -> ProducerEntry:
        has_undo = producer.baseline is not None and not producer.lost
        owns_all = producer.exclusive and producer.all_columns
        return ProducerEntry(
            producer.producer_id,
            producer.number,
            producer.epoch,
            frozenset() if owns_all else producer.column_ids,
            producer.exclusive,
            producer.lost,
            producer.baseline or {},
            holds=has_undo and producer.number not in self._silent,
        )

    def states(self, table_id: int) -> list[tuple[int | None, tuple[BucketState, ...]]]:
        """The states of the buckets of a table by partition."""
        entry = self._image.table_by_id(table_id)
        if entry is None:
            return []
        if not entry.info.is_partitioned:
            return [(None, entry.buckets)]
        return [(p.partition_id, p.buckets) for p in self._image.partitions(table_id).values()]

    def leaders(self, table_id: int) -> set[int]:
        """The servers that lead buckets of a table."""
        return {state.leader for _, states in self.states(table_id) for state in states}

    async def tell(self, table: TableBook) -> None:
        """Send the producers to every leader of a table.

        Raises unless all leaders got them; then the task sends them again.
        """
        producers = self.of_table(table.table_id)
        if producers is None:
            return
        try:
            await self._tablets.update_producers(producers, self.leaders(table.table_id))
        except ZuflussError:
            self.tell_later(table.table_id)
            raise

    def tell_later(self, table_id: int) -> None:
        """Let the task send the producers to the leaders of a table."""
        self._untold.add(table_id)
        self._wake.set()

    async def try_tell(self, table: TableBook) -> bool:
        """As `tell`, but log a failure; returns whether all leaders got them."""
        try:
            await self.tell(table)
        except ZuflussError as problem:
            log.warning("producers_not_told", table_id=table.table_id, error=str(problem))
            return False
        return True

    async def tell_all(self) -> bool:
        """Send all outstanding news; returns whether they arrived. The task calls this."""
        todo, self._untold = self._untold, set()
        tables = [self.tables[i] for i in todo if i in self.tables]
        return all(await asyncio.gather(*map(self.try_tell, tables)))

    def _news(self, table: TableBook) -> None:
        table.version = self._next_version()
        self.tell_later(table.table_id)

    async def _run(self) -> None:
        next_check = self._clock() + SILENCE_CHECK_SECONDS
        while True:
            await pause(SILENCE_CHECK_SECONDS, self._wake)
            self._wake.clear()
            try:
                if self._untold:
                    complete = await self.tell_all()
                    await asyncio.sleep(TELL_SECONDS if complete else RETRY_SECONDS)
                if self._clock() >= next_check:
                    next_check = self._clock() + SILENCE_CHECK_SECONDS
                    await self.look_for_silence()
            except Exception:
                log.exception("producers_task_failed")

    # Signs of life

    def seen(self, producer: ProducerRecord) -> None:
        """Note a sign of life of a producer."""
        self._seen[producer.number] = self._clock()
        if producer.number in self._silent:
            self._silent.discard(producer.number)
            self._news(self._table(producer.table_id))

    def idle_ms(self, producer: ProducerRecord) -> int:
        """Time since the last known sign of life of a producer."""
        return int(1000 * (self._clock() - self._seen[producer.number]))

    async def ask(self, table: TableBook, producers: Iterable[ProducerRecord]) -> None:
        """Ask all leaders of a table when producers wrote; raises if one does not answer."""
        if self.of_table(table.table_id) is None:
            return
        numbers = [producer.number for producer in producers]
        now = self._clock()
        leaders = self.leaders(table.table_id)
        idle = await self._tablets.producer_idle_ms(table.table_id, numbers, leaders)
        for number, idle_ms in zip(numbers, idle, strict=True):
            if idle_ms >= 0 and number in self._seen:
                self._seen[number] = max(self._seen[number], now - idle_ms / 1000)

    async def try_ask(self, table: TableBook) -> bool:
        """As `ask`, but log a failure; returns whether all leaders answered."""
        try:
            await self.ask(table, list(table.producers.values()))
        except ZuflussError as problem:
            log.info("producers_not_asked", table_id=table.table_id, error=str(problem))
            return False
        return True

    async def look_for_silence(self) -> None:
        """Release the changelogs of producers that were silent for `hold-max`, and forget those
        that own nothing. The task calls this.
        """
        for table in list(self.tables.values()):
            silent = self._long_silent(table) or self._forgettable(table)
            if silent and await self.try_ask(table):
                await self._forget(table)
                gone = self._long_silent(table)
                self._silent |= {producer.number for producer in gone}
                for producer in gone:
                    log.warning("producer_silent", producer=producer.producer_id)
                if gone:
                    self._news(table)

    async def _forget(self, table: TableBook) -> None:
        """Delete the producers that were silent and own nothing."""
        async with self.turn(table.table_id):
            gone = self._forgettable(table)
            if gone:
                await self.end(table, gone)
                self.tell_later(table.table_id)

    def _forgettable(self, table: TableBook) -> list[ProducerRecord]:
        entry = self._image.table_by_id(table.table_id)
        is_log = entry is not None and not entry.info.has_primary_key
        limit = self._clock() - max(self._hold_seconds, REMEMBERED_SECONDS)
        return [
            producer
            for producer in table.producers.values()
            if (is_log or producer.fence_only) and self._seen[producer.number] < limit
        ]

    def _long_silent(self, table: TableBook) -> list[ProducerRecord]:
        limit = self._clock() - self._hold_seconds
        return [
            producer
            for producer in table.producers.values()
            if not producer.lost
            and producer.number not in self._silent
            and self._seen[producer.number] < limit
        ]

    def __repr__(self) -> str:
        return f"ProducerBook(tables={len(self.tables)}, untold={len(self._untold)})"
