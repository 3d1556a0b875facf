"""Producers: who writes which columns exactly once, and which epoch of them is the present one.

INIT_PRODUCER goes through these steps, in turn with every other call about the table:

| step | durable | if it fails, or the coordinator dies after it |
|---|---|---|
| check the call, the state, and who has the columns | | nothing changed |
| the next epoch; rivals that are over are lost | one transaction | the epoch stays; call again |
| every leader of the table knows it, and fences | | the epoch stays; call again |
| the baseline of a new producer: where logs end now | one transaction | no baseline; call again |
| answer | | the caller calls again, and gets another epoch |

So when an epoch is answered, all before it are fenced everywhere, and nobody ever wrote under the
number of a producer that has no baseline yet. Epochs grow, and numbers come from a counter: neither
is given twice (`producers/records.py`).

Silence costs a producer nothing by itself. After its TTL others may take its columns: it is lost
then. It is remembered until it is released or dropped, or its table is: so a writer that comes back
without state, however late, is undone, or refused.

On a log table a producer is no more than its number: it has no columns, one epoch, and nothing is
undone. Without an id there is not even a record of it. On a primary-key table `fence_only` asks for
little more, a number whose epochs fence each other. Neither owns anything or has anything undone,
so both are forgotten after `zufluss.producer.hold-max` of silence.

What is allowed stands in `producers/rules.py`; who is told, and who lives, in `producers/book.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

import structlog

from zufluss.cluster.image import BucketState, ClusterImage, ImageChange, TableEntry
from zufluss.cluster.producers import Baseline
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.producers import records, rules
from zufluss.coordinator.producers.book import ProducerBook, TableBook
from zufluss.coordinator.producers.rules import (
    Buckets,
    InitCall,
    Initialised,
    Producer,
    ProducerCounts,
    ProducerInfo,
)
from zufluss.coordinator.tablets import Tablets
from zufluss.errors import ConfigError, UnknownTableOrBucketError
from zufluss.meta.api import MetaStore, Op
from zufluss.model.merge import column_lock
from zufluss.model.producer import EPOCH_MAX, NUMBER_MAX, check_producer_id
from zufluss.model.table import TableBucket

log = structlog.get_logger(__name__)

T = TypeVar("T")
IsSuper = Callable[[str | None], bool]

OFFSETS_AT_ONCE: Final = 4096
"""Offsets that are handled on the event loop; more are handled in a thread."""
ASK_SECONDS_MAX: Final = 2.0
"""How long a list of producers waits for leaders to say who wrote."""


class Producers:
    """All producers, durable. Open it with `Producers.open`."""

    def __init__(
        self,
        store: MetaStore,
        ledger: Ledger,
        image: ClusterImage,
        changes: Feed[Sequence[ImageChange]],
        tablets: Tablets,
        conf: Configuration,
        is_super: IsSuper,
        clock: Callable[[], float],
    ) -> None:
        hold_ms = conf.get(options.ZUFLUSS_PRODUCER_HOLD_MAX)
        self.book = ProducerBook(store, ledger, image, changes, tablets, clock, hold_ms / 1000)
        """What there is."""
        self._image = image
        self._tablets = tablets
        self._is_super = is_super
        self._ttl_max_ms = conf.get(options.ZUFLUSS_PRODUCER_TTL_MAX)
        self._count_max = conf.get(options.ZUFLUSS_PRODUCER_COUNT_MAX)

    @classmethod
    async def open(
        cls,
        store: MetaStore,
        ledger: Ledger,
        image: ClusterImage,
        changes: Feed[Sequence[ImageChange]],
        tablets: Tablets,
        conf: Configuration,
        *,
        is_super: IsSuper,
        clock: Callable[[], float],
    ) -> Producers:
        """Take over what the store knows; `clock` gives seconds that never jump."""
        self = cls(store, ledger, image, changes, tablets, conf, is_super, clock)
        await self.book.load()
        return self

    # Calls

    async def init(self, call: InitCall) -> Initialised:
        """Begin an epoch: when this returns, nobody can write as an earlier one."""
        entry = self._table_entry(call.table_id)
        if entry.info.has_primary_key or call.producer_id:
            check_producer_id(call.producer_id)
        rules.check_ttl(call.ttl_ms, self._ttl_max_ms)
        begin = self._number
        if entry.info.has_primary_key:
            begin = self._fence if call.fence_only else self._init
        return await self.book.tasks.undisturbed(begin(call))

    async def checkpoint(
        self,
        table_id: int,
        producer_id: str,
        epoch: int,
        offsets: Baseline,
        *,
        checkpoint_id: int | None = None,
        principal: str | None,
    ) -> int:
        """What is before these offsets will not be undone; how long it lasts now, ms.

        Without offsets and id it is renewed, no more.
        """
        self._touch(table_id, producer_id, epoch, principal)
        work = self._checkpoint(table_id, producer_id, epoch, offsets, checkpoint_id, principal)
        return await self.book.tasks.undisturbed(work)

    async def release(
        self, table_id: int, producer_id: str, epoch: int | None, *, principal: str | None
    ) -> None:
        """End a producer; one that ended before is fine for who knows its epoch."""
        check_producer_id(producer_id)
        await self.book.tasks.undisturbed(self._release(table_id, producer_id, epoch, principal))

    async def producers(self, table_id: int | None = None) -> list[ProducerInfo]:
        """The producers of a table, or all, and how long they were silent."""
        tables = [t for i, t in self.book.tables.items() if table_id in (None, i) and t.producers]
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_SECONDS_MAX):
                await asyncio.gather(*map(self.book.try_ask, tables))
        return [
            ProducerInfo(producer, self.book.idle_ms(producer))
            for table in tables
            for producer in table.producers.values()
        ]

    @property
    def counts(self) -> ProducerCounts:
        """All producers in numbers."""
        lost = [producer.lost for producer in self.book]
        return ProducerCounts(len(lost), sum(lost))

    # Epochs

    async def _init(self, call: InitCall) -> Initialised:
        async with self.book.turn(call.table_id) as table:
            entry = self._table_entry(call.table_id)
            rules.check_table(entry.info)
            before = table.producers.get(call.producer_id)
            producer = await self._next(table, entry, call, before)
            columns = rules.columns_of(entry.info, producer.column_ids).values()
            if not producer.exclusive:
                rules.check_shared(entry.info, columns)
            rivals = await self._silent_rivals(table, entry, producer)
            producer = await self._begin(table, producer, before, rivals)
            await self.book.tell(table)
            created = producer.baseline is None
            if created:
                producer = await self._end_offsets(table, producer)
                await self.book.try_tell(table)  # leaders keep the changelog from there on
        undo = rules.undo_needed(entry.info, columns)
        return Initialised(producer, created, undo)

    def _table_entry(self, table_id: int) -> TableEntry:
        entry = self._image.table_by_id(table_id)
        if entry is None:
            raise UnknownTableOrBucketError(
                f"there is no table with id {table_id}, or not any more; refresh the metadata"
            )
        return entry

    async def _next(
        self, table: TableBook, entry: TableEntry, call: InitCall, before: Producer | None
    ) -> Producer:
        """The producer of a call in its next epoch; a new or renewed one has no number yet."""
        if before is None:
            if call.restored is not None:
                raise rules.not_found(call.producer_id, f"'{entry.info.path}'")
            return self._new(table, entry, call)
        rules.check_owner(before, call.principal, self._is_super(call.principal))
        rules.check_same_use(before, call)
        rules.check_not_lost(before)
        rules.check_state(before, call)
        restored = await self._restored(entry, call)
        if call.renew and restored is None:
            return replace(before, number=0, epoch=1, baseline=None)
        return replace(
            before,
            epoch=before.epoch + 1,
            column_ids=rules.next_columns(before, call, entry),
            ttl_ms=call.ttl_ms,
            checkpointed=before.checkpointed or restored is not None,
            stateful=before.stateful or restored is not None,
            baseline=before.baseline if restored is None else restored,
        )

    async def _restored(self, entry: TableEntry, call: InitCall) -> Baseline | None:
        """The offsets that a call comes back to, of the partitions that there still are."""
        offsets = call.restored
        if offsets is None:
            return None
        buckets = self._buckets(entry, offsets)
        return await _aside(lambda: buckets.checked(offsets, complete=True), offsets)

    def _new(self, table: TableBook, entry: TableEntry, call: InitCall) -> Producer:
        rules.check_count(len(table.producers), self._count_max, entry.info)
        return Producer(
            producer_id=call.producer_id,
            table_id=call.table_id,
            number=0,
            epoch=1,
            owner=call.principal,
            column_ids=frozenset(rules.columns_of(entry.info, call.column_ids)),
            all_columns=not call.column_ids,
            exclusive=column_lock(entry.info.descriptor.properties),
            ttl_ms=call.ttl_ms,
        )

    async def _silent_rivals(
        self, table: TableBook, entry: TableEntry, producer: Producer
    ) -> list[Producer]:
        """Who has the columns and was silent for its TTL; `ColumnLockedError` if one was not."""
        rivals = rules.rivals(producer, table.producers.values())
        self._check_silent(producer, rivals, entry)
        if rivals:
            await self.book.ask(table, rivals)
            self._check_silent(producer, rivals, entry)
        return rivals

    def _check_silent(
        self, producer: Producer, rivals: Iterable[Producer], entry: TableEntry
    ) -> None:
        for rival in rivals:
            remaining_ms = self._remaining_ms(rival)
            if remaining_ms > 0:
                raise rules.column_locked(producer, rival, remaining_ms, entry.info)

    def _remaining_ms(self, producer: Producer) -> int:
        return max(0, producer.ttl_ms - self.book.idle_ms(producer))

    async def _begin(
        self,
        table: TableBook,
        producer: Producer,
        before: Producer | None,
        rivals: Sequence[Producer],
    ) -> Producer:
        """Make an epoch durable, and with it that rivals are lost."""
        if producer.number == 0:
            producer = replace(producer, number=await self._next_number())
        lost = [replace(rival, lost=True) for rival in rivals]
        ops = await _aside(
            lambda: (
                records.create(producer) if before is None else records.change(before, producer)
            ),
            producer.baseline,
        )
        for rival, after in zip(rivals, lost, strict=True):
            ops += records.change(rival, after)
        self.book.seen(producer)
        await self.book.write(table, ops, [producer, *lost])
        log.info(
            "producer_epoch",
            producer=producer.producer_id,
            table_id=producer.table_id,
            number=producer.number,
            epoch=producer.epoch,
            lost=[rival.producer_id for rival in lost],
        )
        return producer

    async def _next_number(self) -> int:
        number = await self.book.next_number()
        if number > NUMBER_MAX:
            raise ConfigError(
                f"this cluster has had all of its {NUMBER_MAX} producers; use ids again instead "
                "of new ones, or move the table to a new cluster"
            )
        return number

    async def _end_offsets(self, table: TableBook, producer: Producer) -> Producer:
        """Let a new producer begin where the logs end now."""
        states = self.book.states(table.table_id)
        size = sum(len(each) for _, each in states)
        leaders = await _aside(lambda: _by_leader(table.table_id, states), range(size))
        ends = await self._tablets.end_offsets(leaders)

        def change() -> tuple[Producer, list[Op]]:
            baseline = {(b.partition_id, b.bucket_id): end for b, end in ends.items()}
            after = replace(producer, baseline=baseline)
            return after, records.change(producer, after)

        after, ops = await _aside(change, ends)
        await self.book.write(table, ops, [after])
        return after

    # Producers that own nothing

    async def _fence(self, call: InitCall) -> Initialised:
        """The next epoch of a producer that only fences; after the last one, a new number."""
        async with self.book.turn(call.table_id) as table:
            entry = self._table_entry(call.table_id)
            before = table.producers.get(call.producer_id)
            if before is None:
                rules.check_count(len(table.producers), self._count_max, entry.info)
            else:
                rules.check_owner(before, call.principal, self._is_super(call.principal))
                rules.check_same_use(before, call)
            if before is not None and before.epoch < EPOCH_MAX:
                producer = replace(before, epoch=before.epoch + 1, ttl_ms=call.ttl_ms)
            else:
                producer = _bare(call, await self._next_number())
            ops = records.create(producer) if before is None else records.change(before, producer)
            self.book.seen(producer)
            await self.book.write(table, ops, [producer])
            await self.book.tell(table)
        return Initialised(producer, before is None, False)

    async def _number(self, call: InitCall) -> Initialised:
        """The number of a producer of a log table."""
        if not call.producer_id:
            return Initialised(_bare(call, await self._next_number()), True, False)
        async with self.book.turn(call.table_id) as table:
            entry = self._table_entry(call.table_id)
            before = table.producers.get(call.producer_id)
            if before is not None:
                rules.check_owner(before, call.principal, self._is_super(call.principal))
                self.book.seen(before)
                return Initialised(before, False, False)
            rules.check_count(len(table.producers), self._count_max, entry.info)
            producer = _bare(call, await self._next_number())
            self.book.seen(producer)
            await self.book.write(table, records.create(producer), [producer])
        return Initialised(producer, True, False)

    # Checkpoints and ends

    def _touch(self, table_id: int, producer_id: str, epoch: int, principal: str | None) -> None:
        """A sign of life, at once: it may have to wait for its turn."""
        table = self.book.tables.get(table_id)
        producer = None if table is None else table.producers.get(producer_id)
        if producer is None or producer.lost or producer.epoch != epoch:
            return
        if producer.owner == principal or self._is_super(principal):
            self.book.seen(producer)

    async def _checkpoint(
        self,
        table_id: int,
        producer_id: str,
        epoch: int,
        offsets: Baseline,
        checkpoint_id: int | None,
        principal: str | None,
    ) -> int:
        entry = self._image.table_by_id(table_id)
        if entry is None:
            raise rules.not_found(producer_id, table_id)
        async with self.book.turn(table_id) as table:
            before = table.producers.get(producer_id)
            if before is None:
                raise rules.not_found(producer_id, f"'{entry.info.path}'")
            self._check_mine(before, epoch, principal)
            rules.check_not_lost(before)
            rules.check_checkpoint_id(before, checkpoint_id)
            if offsets or checkpoint_id is not None:
                await self._advance(table, entry, before, offsets, checkpoint_id)
            return self._remaining_ms(before)

    async def _advance(
        self,
        table: TableBook,
        entry: TableEntry,
        before: Producer,
        offsets: Baseline,
        checkpoint_id: int | None,
    ) -> None:
        buckets = self._buckets(entry, offsets)

        def change() -> tuple[Producer, list[Op]]:
            after = replace(
                before,
                baseline=rules.merged(before.baseline, offsets, buckets),
                checkpointed=True,
                checkpoint_id=before.checkpoint_id if checkpoint_id is None else checkpoint_id,
                stateful=checkpoint_id is None,
            )
            return after, records.change(before, after)

        after, ops = await _aside(change, offsets, before.baseline)
        if ops:
            await self.book.write(table, ops, [after])
            self.book.tell_later(table.table_id)

    def _buckets(self, entry: TableEntry, offsets: Baseline) -> Buckets:
        return Buckets.of(self._image, entry.info, {partition_id for partition_id, _ in offsets})

    def _check_mine(self, producer: Producer, epoch: int | None, principal: str | None) -> None:
        rules.check_owner(producer, principal, self._is_super(principal))
        rules.check_epoch(producer, epoch)

    async def _release(
        self, table_id: int, producer_id: str, epoch: int | None, principal: str | None
    ) -> None:
        entry = self._image.table_by_id(table_id)
        if entry is not None:
            async with self.book.turn(table_id) as table:
                producer = table.producers.get(producer_id)
                if producer is not None:
                    self._check_mine(producer, epoch, principal)
                    await self.book.end(table, [producer])
                    await self.book.try_tell(table)
                    return
        if epoch is None:
            raise rules.not_found(
                producer_id, table_id if entry is None else f"'{entry.info.path}'"
            )

    def __repr__(self) -> str:
        counts = self.counts
        return f"Producers(producers={counts.producers}, lost={counts.lost})"


def _bare(call: InitCall, number: int) -> Producer:
    return Producer(
        producer_id=call.producer_id,
        table_id=call.table_id,
        number=number,
        epoch=1,
        owner=call.principal,
        column_ids=frozenset(),
        all_columns=False,
        exclusive=False,
        ttl_ms=call.ttl_ms,
        fence_only=call.fence_only,
    )


def _by_leader(
    table_id: int, states: Iterable[tuple[int | None, Sequence[BucketState]]]
) -> dict[int, list[TableBucket]]:
    """The buckets of a table by their leader."""
    found: dict[int, list[TableBucket]] = {}
    for partition_id, of_partition in states:
        for bucket_id, state in enumerate(of_partition):
            bucket = TableBucket(table_id, partition_id, bucket_id)
            found.setdefault(state.leader, []).append(bucket)
    return found


async def _aside(work: Callable[[], T], *sizes: Sized | None) -> T:
    """Do something, in a thread if it is about many offsets."""
    if sum(len(each) for each in sizes if each is not None) > OFFSETS_AT_ONCE:
        return await asyncio.to_thread(work)
    return work()
