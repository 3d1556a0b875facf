"""The producers there are: in the store, in memory, at the leaders, and when they last lived.

`producers/producers.py` decides what a call does to a producer; this keeps what came of it. The
producers of one table change in turn (`turn`), durably first. When a write fails and nobody knows
whether it took place, the table is read again before anything else happens to it.

Leaders learn the producers of a table with a version, made of the coordinator's epoch and a count,
so that it grows over restarts. A leader that starts buckets is told first (`tablets.py`), one that
registers is told all. What nobody waits for, the baselines of checkpoints and the end of a
producer, is told by a task, again and again until it arrives.

Time is that of a monotonic clock, and all of it begins anew with a start of the coordinator. A sign
of life is a call, or a put, of which leaders know: they are asked before a producer loses anything.
After `zufluss.producer.hold-max` of silence leaders keep the changelog for it no longer; it is
remembered all the same, unless it owns nothing: then nothing is lost by forgetting it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import structlog

from zufluss.cluster.image import BucketState, ClusterImage, ImageChange, TableGone
from zufluss.cluster.producers import ProducerEntry, TableProducers
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.ledger import Ledger, is_without_effect
from zufluss.coordinator.producers import records
from zufluss.coordinator.producers.rules import Producer
from zufluss.coordinator.tablets import Tablets
from zufluss.coordinator.tasks import Tasks
from zufluss.errors import ZuflussError
from zufluss.meta.api import MetaStore, Op

log = structlog.get_logger(__name__)

TELL_SECONDS: Final = 1.0
"""How often leaders are told what nobody waits for: they stop their puts for it."""
RETRY_SECONDS: Final = 5.0
"""How long news for leaders wait after they could not be told."""
SILENCE_CHECK_SECONDS: Final = 60.0
"""How often producers are looked for that were silent for too long to hold the changelog."""
REMEMBERED_SECONDS: Final = 3600.0
"""No producer is forgotten before, whatever `zufluss.producer.hold-max` says."""
_VERSION_BITS: Final = 32


@dataclass(slots=True)
class TableBook:
    """The producers of one table."""

    table_id: int
    """The table."""
    version: int
    """Grows with each change that leaders must know."""
    producers: dict[str, Producer] = field(default_factory=dict)
    """By id."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the check to the end of a change."""
    doubtful: bool = False
    """Nobody knows how the last change ended: the store is read before the next one."""


class ProducerBook:
    """All producers, durable."""

    def __init__(
        self,
        store: MetaStore,
        ledger: Ledger,
        image: ClusterImage,
        changes: Feed[Sequence[ImageChange]],
        tablets: Tablets,
        clock: Callable[[], float],
        hold_seconds: float,
    ) -> None:
        self.tables: dict[int, TableBook] = {}
        """Every table that has producers, or had some."""
        self.tasks = Tasks("producers")
        """Changes of producers under way."""
        self._store = store
        self._ledger = ledger
        self._image = image
        self._tablets = tablets
        self._clock = clock
        self._hold_seconds = hold_seconds
        self._seen: dict[int, float] = {}
        self._silent: set[int] = set()
        self._changes = 0
        self._untold: set[int] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        changes.subscribe(self._changed)

    async def load(self) -> None:
        """Take over what the store knows; every producer has its full time from now on."""
        entries = await self._store.tree(records.PRODUCERS_PATH)
        for producer in await asyncio.to_thread(records.load, entries):
            self._table(producer.table_id).producers[producer.producer_id] = producer
            self.seen(producer)
        for table_id in [i for i in self.tables if self._image.table_by_id(i) is None]:
            await self._forget_table(table_id)

    def start(self) -> None:
        """Tell leaders what nobody waits for, from now on."""
        self._task = asyncio.create_task(self._run(), name="producers")

    async def stop(self) -> None:
        """Finish what was begun, and tell nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self.tasks.settle()

    def __iter__(self) -> Iterator[Producer]:
        """Every producer."""
        return (p for table in self.tables.values() for p in table.producers.values())

    # One table at a time

    @asynccontextmanager
    async def turn(self, table_id: int) -> AsyncIterator[TableBook]:
        """Be the only one who changes producers of a table; its memory is what the store has."""
        table = self._table(table_id)
        async with table.lock:
            if table.doubtful:
                await self._read_again(table)
            yield table

    def _table(self, table_id: int) -> TableBook:
        if table_id not in self.tables:
            self.tables[table_id] = TableBook(table_id, self._next_version())
        return self.tables[table_id]

    def _next_version(self) -> int:
        self._changes += 1
        return self._ledger.epoch << _VERSION_BITS | self._changes

    async def _read_again(self, table: TableBook) -> None:
        entries = await self._store.tree(records.table_path(table.table_id))
        found = await asyncio.to_thread(records.load, entries)
        for producer in found:
            self._seen.setdefault(producer.number, self._clock())
        table.producers = {producer.producer_id: producer for producer in found}
        table.doubtful = False
        self._news(table)

    async def next_number(self) -> int:
        """A number that no producer ever had."""
        return (await self._ledger.take(records.PRODUCER_COUNTER, 1))[0] + 1

    async def write(self, table: TableBook, ops: Sequence[Op], after: Iterable[Producer]) -> None:
        """Make a change durable, then let it count here."""
        await self._commit(table, ops)
        table.producers |= {producer.producer_id: producer for producer in after}
        table.version = self._next_version()

    async def end(self, table: TableBook, producers: Sequence[Producer]) -> None:
        """Forget producers, durably first."""
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
            table.doubtful = not is_without_effect(problem)
            raise

    # Tables that are dropped

    def _changed(self, changes: Sequence[ImageChange]) -> None:
        for change in changes:
            if isinstance(change, TableGone) and change.table_id in self.tables:
                self.tasks.later(self._forget_table(change.table_id))

    async def _forget_table(self, table_id: int) -> None:
        """Delete the producers of a dropped table; what is left, the next start deletes."""
        try:
            async with self.turn(table_id) as table:
                if table.producers:
                    await self.end(table, list(table.producers.values()))
                self.tables.pop(table_id, None)
        except ZuflussError as problem:
            log.warning("producers_not_deleted", table_id=table_id, error=str(problem))

    # What leaders know

    def of_table(self, table_id: int) -> TableProducers | None:
        """The producers of a table as its leaders must know them; None if it never had any.

        Leaders of a log table have nothing to check, and are told nothing.
        """
        table, entry = self.tables.get(table_id), self._image.table_by_id(table_id)
        if table is None or entry is None or not entry.info.has_primary_key:
            return None
        entries = tuple(map(self._entry, table.producers.values()))
        return TableProducers(table_id, table.version, entries)

    def of_server(self, server_id: int) -> list[TableProducers]:
        """The producers of the tables that a server leads buckets of."""
        held = [i for i in self.tables if server_id in self.leaders(i)]
        return [found for i in held if (found := self.of_table(i)) is not None]

    def server_joined(self, server_id: int) -> None:
        """A server is there again: tell it what changed while it came."""
        for table_id in self.tables:
            if server_id in self.leaders(table_id):
                self.tell_later(table_id)

    def _entry(self, producer: Producer) -> ProducerEntry:
        lives = producer.baseline is not None and not producer.lost
        of_all = producer.exclusive and producer.all_columns
        return ProducerEntry(
            producer.producer_id,
            producer.number,
            producer.epoch,
            frozenset() if of_all else producer.column_ids,
            producer.exclusive,
            producer.lost,
            producer.baseline or {},
            holds=lives and producer.number not in self._silent,
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
        """Tell every leader of a table; an error unless all know, and then the task goes on."""
        known = self.of_table(table.table_id)
        if known is None:
            return
        try:
            await self._tablets.update_producers(known, self.leaders(table.table_id))
        except ZuflussError:
            self.tell_later(table.table_id)
            raise

    def tell_later(self, table_id: int) -> None:
        """Let the task tell the leaders of a table."""
        self._untold.add(table_id)
        self._wake.set()

    async def try_tell(self, table: TableBook) -> bool:
        """Tell every leader of a table; if that fails, the task goes on."""
        try:
            await self.tell(table)
        except ZuflussError as problem:
            log.warning("producers_not_told", table_id=table.table_id, error=str(problem))
            return False
        return True

    async def tell_all(self) -> bool:
        """Tell leaders what they do not know yet; whether all know now. The task does it itself."""
        todo, self._untold = self._untold, set()
        tables = [self.tables[i] for i in todo if i in self.tables]
        return all(await asyncio.gather(*map(self.try_tell, tables)))

    def _news(self, table: TableBook) -> None:
        table.version = self._next_version()
        self.tell_later(table.table_id)

    async def _run(self) -> None:
        next_check = self._clock() + SILENCE_CHECK_SECONDS
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_CHECK_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if self._untold:
                    told = await self.tell_all()
                    await asyncio.sleep(TELL_SECONDS if told else RETRY_SECONDS)
                if self._clock() >= next_check:
                    next_check = self._clock() + SILENCE_CHECK_SECONDS
                    await self.look_for_silence()
            except Exception:
                log.exception("producers_task_failed")

    # Signs of life

    def seen(self, producer: Producer) -> None:
        """A producer lives."""
        self._seen[producer.number] = self._clock()
        if producer.number in self._silent:
            self._silent.discard(producer.number)
            self._news(self._table(producer.table_id))

    def idle_ms(self, producer: Producer) -> int:
        """How long ago a producer lived, as far as it is known here."""
        return int(1000 * (self._clock() - self._seen[producer.number]))

    async def ask(self, table: TableBook, producers: Iterable[Producer]) -> None:
        """Learn from all leaders of a table when producers wrote; an error if one says nothing."""
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
        """Learn when the producers of a table wrote, if all leaders say so."""
        try:
            await self.ask(table, list(table.producers.values()))
        except ZuflussError as problem:
            log.info("producers_not_asked", table_id=table.table_id, error=str(problem))
            return False
        return True

    async def look_for_silence(self) -> None:
        """Keep changelogs no longer for who was silent for `hold-max`; the task does it itself."""
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
        """Forget who was silent and owns nothing."""
        async with self.turn(table.table_id):
            gone = self._forgettable(table)
            if gone:
                await self.end(table, gone)
                self.tell_later(table.table_id)

    def _forgettable(self, table: TableBook) -> list[Producer]:
        entry = self._image.table_by_id(table.table_id)
        is_log = entry is not None and not entry.info.has_primary_key
        limit = self._clock() - max(self._hold_seconds, REMEMBERED_SECONDS)
        return [
            producer
            for producer in table.producers.values()
            if (is_log or producer.fence_only) and self._seen[producer.number] < limit
        ]

    def _long_silent(self, table: TableBook) -> list[Producer]:
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
