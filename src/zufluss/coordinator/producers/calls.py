"""What each call does to a producer: its epochs, its columns, its checkpoints, its end.

A producer writes columns of a table exactly once. INIT_PRODUCER begins its next epoch, in turn with
every other call about the table:

| step | durable | if the step fails, or the coordinator dies after it |
|---|---|---|
| check the call, the state, and who has the columns | | nothing changed |
| begin the next epoch; rivals whose TTL is over are lost | one transaction | the epoch stays; call again |
| every leader of the table knows the epoch, and fences the earlier ones | | the epoch stays; call again |
| set the baseline of a new producer to the present ends of the logs | one transaction | no baseline; call again |
| answer | | the caller calls again, and gets another epoch |

So when an epoch is answered, all earlier ones are fenced everywhere, and nobody ever wrote under
the number of a producer without a baseline. Epochs grow, and numbers come from a counter: neither
is given twice (`producers/records.py`).

Silence alone costs a producer nothing. After its TTL other producers may take its columns; then it
is lost. It is remembered until it is released or dropped, or its table is dropped. So the writes of
a writer that comes back without state, however late, are undone, or the writer is refused.

On a log table a producer is only a number: it has no columns, one epoch, and nothing to undo.
Without an id it is not even stored. New numbers of a table are limited per hour. On a primary-key table `fence_only` asks for a number whose
epochs fence each other. Both own nothing and have nothing to undo, so they are forgotten after
`zufluss.producer.hold-max` of silence.

`producers/rules.py` says which calls are allowed; `producers/book.py` keeps store, memory and
leaders equal.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

import structlog

from zufluss.cluster.image import BucketState, ClusterImage, TableEntry
from zufluss.cluster.producers import Baseline
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.ownership import IsSuper, Ownership
from zufluss.coordinator.producers import records, rules
from zufluss.coordinator.producers.book import ProducerBook, TableBook
from zufluss.coordinator.producers.rules import (
    InitCall,
    InitResult,
    ProducerCounts,
    ProducerRecord,
    ProducerStatus,
    TableBuckets,
)
from zufluss.coordinator.tablets import Tablets
from zufluss.errors import ConfigError, UnknownTableOrBucketError
from zufluss.meta.api import Op
from zufluss.model.merge import column_lock
from zufluss.model.producer import EPOCH_MAX, NUMBER_MAX, check_producer_id
from zufluss.model.table import TableBucket, unknown_table

log = structlog.get_logger(__name__)

T = TypeVar("T")

OFFSETS_AT_ONCE: Final = 4096
"""Offsets that are handled on the event loop; more are handled in a thread."""
ASK_SECONDS_MAX: Final = 2.0
"""How long LIST_PRODUCERS waits for leaders to say when each producer wrote."""


class ProducerCalls:
    """Init, checkpoint, release and list."""

    def __init__(
        self,
        book: ProducerBook,
        image: ClusterImage,
        tablets: Tablets,
        conf: Configuration,
        is_super: IsSuper,
    ) -> None:
        self.book = book
        """All producers."""
        self._image = image
        self._tablets = tablets
        self._ownership = Ownership(is_super)
        self._ttl_max_ms = conf.get(options.ZUFLUSS_PRODUCER_TTL_MAX)
        self._count_max = conf.get(options.ZUFLUSS_PRODUCER_COUNT_MAX)

    # Calls

    async def init(self, call: InitCall) -> InitResult:
        """Begin an epoch; when this returns, every earlier one is fenced at all leaders."""
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
        """Move the baseline: changes before these offsets will not be undone.

        Returns the milliseconds until others may take the columns. A call without offsets and id
        only renews the producer.
        """
        self._touch(table_id, producer_id, epoch, principal)
        work = self._checkpoint(table_id, producer_id, epoch, offsets, checkpoint_id, principal)
        return await self.book.tasks.undisturbed(work)

    async def release(
        self, table_id: int, producer_id: str, epoch: int | None, *, principal: str | None
    ) -> None:
        """End a producer; for a caller with an epoch it may have ended before."""
        check_producer_id(producer_id)
        await self.book.tasks.undisturbed(self._release(table_id, producer_id, epoch, principal))

    async def producers(self, table_id: int | None = None) -> list[ProducerStatus]:
        """The producers of a table, or of all tables, and how long they were silent."""
        tables = [t for i, t in self.book.tables.items() if table_id in (None, i) and t.producers]
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_SECONDS_MAX):
                await asyncio.gather(*map(self.book.try_ask, tables))
        return [
            ProducerStatus(producer, self.book.idle_ms(producer))
            for table in tables
            for producer in table.producers.values()
        ]

    @property
    def counts(self) -> ProducerCounts:
        """All producers in numbers."""
        lost = [producer.lost for producer in self.book]
        return ProducerCounts(len(lost), sum(lost))

    # Epochs

    async def _init(self, call: InitCall) -> InitResult:
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
        return InitResult(producer, created, undo)

    def _table_entry(self, table_id: int) -> TableEntry:
        entry = self._image.table_by_id(table_id)
        if entry is None:
            raise UnknownTableOrBucketError(
                f"{unknown_table(table_id)} does not exist, or not any more; refresh the metadata"
            )
        return entry

    async def _next(
        self, table: TableBook, entry: TableEntry, call: InitCall, before: ProducerRecord | None
    ) -> ProducerRecord:
        """The producer of a call in its next epoch; number 0 if it needs a new number."""
        if before is None:
            if call.restored is not None:
                raise rules.not_found(call.producer_id, f"table '{entry.info.path}'")
            return self._new(table, entry, call)
        self._ownership.check_owner(before, call.principal)
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
        """The offsets of the state that a call restores, without dropped partitions.

        An undo refuses offsets beyond the end of a log; another state may be restored after it.
        """
        offsets = call.restored
        if offsets is None:
            return None
        buckets = self._buckets(entry, offsets)
        return await _aside(lambda: buckets.checked(offsets, complete=True), offsets)

    def _new(self, table: TableBook, entry: TableEntry, call: InitCall) -> ProducerRecord:
        rules.check_count(len(table.producers), self._count_max, entry.info)
        return ProducerRecord(
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
        self, table: TableBook, entry: TableEntry, producer: ProducerRecord
    ) -> list[ProducerRecord]:
        """The producers that own the columns; `ColumnLockedError` unless all are silent."""
        rivals = rules.rivals(producer, table.producers.values())
        self._check_silent(producer, rivals, entry)
        if rivals:
            await self.book.ask(table, rivals)
            self._check_silent(producer, rivals, entry)
        return rivals

    def _check_silent(
        self, producer: ProducerRecord, rivals: Iterable[ProducerRecord], entry: TableEntry
    ) -> None:
        for rival in rivals:
            remaining_ms = self._remaining_ms(rival)
            if remaining_ms > 0:
                raise rules.column_locked(producer, rival, remaining_ms, entry.info)

    def _remaining_ms(self, producer: ProducerRecord) -> int:
        return max(0, producer.ttl_ms - self.book.idle_ms(producer))

    async def _begin(
        self,
        table: TableBook,
        producer: ProducerRecord,
        before: ProducerRecord | None,
        rivals: Sequence[ProducerRecord],
    ) -> ProducerRecord:
        """Store an epoch, and in the same transaction that the rivals are lost."""
        if producer.number == 0:
            producer = replace(producer, number=await self._next_number(table.table_id))
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

    async def _next_number(self, table_id: int) -> int:
        number = await self.book.next_number(table_id)
        if number > NUMBER_MAX:
            raise ConfigError(
                f"this cluster has had all of its {NUMBER_MAX} producers; use ids again instead "
                "of new ones, or move the table to a new cluster"
            )
        return number

    async def _end_offsets(self, table: TableBook, producer: ProducerRecord) -> ProducerRecord:
        """Set the baseline of a new producer to the present ends of the logs."""
        baseline = await self._ends(table.table_id)

        def change() -> tuple[ProducerRecord, list[Op]]:
            after = replace(producer, baseline=baseline)
            return after, records.change(producer, after)

        after, ops = await _aside(change, baseline)
        await self.book.write(table, ops, [after])
        return after

    async def _ends(self, table_id: int) -> Baseline:
        """The high watermarks of all buckets of a table; raises if a leader does not answer."""
        states = self.book.states(table_id)
        size = range(sum(len(each) for _, each in states))
        leaders = await _aside(lambda: _by_leader(table_id, states), size)
        ends = await self._tablets.end_offsets(leaders)
        return await _aside(
            lambda: {(b.partition_id, b.bucket_id): end for b, end in ends.items()}, size
        )

    # Producers that own nothing

    async def _fence(self, call: InitCall) -> InitResult:
        """Begin the next epoch of a producer that only fences; after the last, a new number."""
        async with self.book.turn(call.table_id) as table:
            entry = self._table_entry(call.table_id)
            before = table.producers.get(call.producer_id)
            if before is None:
                rules.check_count(len(table.producers), self._count_max, entry.info)
            else:
                self._ownership.check_owner(before, call.principal)
                rules.check_same_use(before, call)
            if before is not None and before.epoch < EPOCH_MAX:
                producer = replace(before, epoch=before.epoch + 1, ttl_ms=call.ttl_ms)
            else:
                producer = _bare(call, await self._next_number(call.table_id))
            ops = records.create(producer) if before is None else records.change(before, producer)
            self.book.seen(producer)
            await self.book.write(table, ops, [producer])
            await self.book.tell(table)
        return InitResult(producer, before is None, False)

    async def _number(self, call: InitCall) -> InitResult:
        """The number of a producer of a log table."""
        if not call.producer_id:
            return InitResult(_bare(call, await self._next_number(call.table_id)), True, False)
        async with self.book.turn(call.table_id) as table:
            entry = self._table_entry(call.table_id)
            before = table.producers.get(call.producer_id)
            if before is not None:
                self._ownership.check_owner(before, call.principal)
                self.book.seen(before)
                return InitResult(before, False, False)
            rules.check_count(len(table.producers), self._count_max, entry.info)
            producer = _bare(call, await self._next_number(call.table_id))
            self.book.seen(producer)
            await self.book.write(table, records.create(producer), [producer])
        return InitResult(producer, True, False)

    # Checkpoints and ends

    def _touch(self, table_id: int, producer_id: str, epoch: int, principal: str | None) -> None:
        """Note a sign of life before the call has waited for its turn."""
        table = self.book.tables.get(table_id)
        producer = None if table is None else table.producers.get(producer_id)
        if producer is None or producer.lost or producer.epoch != epoch:
            return
        if self._ownership.is_owner(producer, principal):
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
            raise rules.not_found(producer_id, unknown_table(table_id))
        async with self.book.turn(table_id) as table:
            before = table.producers.get(producer_id)
            if before is None:
                raise rules.not_found(producer_id, f"table '{entry.info.path}'")
            self._ownership.check(before, principal, epoch)
            rules.check_not_lost(before)
            rules.check_checkpoint_id(before, checkpoint_id)
            if offsets or checkpoint_id is not None:
                await self._advance(table, entry, before, offsets, checkpoint_id)
            return self._remaining_ms(before)

    async def _advance(
        self,
        table: TableBook,
        entry: TableEntry,
        before: ProducerRecord,
        offsets: Baseline,
        checkpoint_id: int | None,
    ) -> None:
        buckets = self._buckets(entry, offsets)
        ends = await self._ends(table.table_id) if offsets else {}

        def change() -> tuple[ProducerRecord, list[Op]]:
            after = replace(
                before,
                baseline=rules.merged(before.baseline, offsets, buckets, ends),
                checkpointed=True,
                checkpoint_id=before.checkpoint_id if checkpoint_id is None else checkpoint_id,
                stateful=checkpoint_id is None,
            )
            return after, records.change(before, after)

        after, ops = await _aside(change, offsets, before.baseline)
        if ops:
            await self.book.write(table, ops, [after])
            self.book.tell_later(table.table_id)

    def _buckets(self, entry: TableEntry, offsets: Baseline) -> TableBuckets:
        return TableBuckets.of(
            self._image, entry.info, {partition_id for partition_id, _ in offsets}
        )

    async def _release(
        self, table_id: int, producer_id: str, epoch: int | None, principal: str | None
    ) -> None:
        entry = self._image.table_by_id(table_id)
        if entry is not None:
            async with self.book.turn(table_id) as table:
                producer = table.producers.get(producer_id)
                if producer is not None:
                    self._ownership.check(producer, principal, epoch)
                    await self.book.end(table, [producer])
                    await self.book.try_tell(table)
                    return
        if epoch is None:
            table_name = unknown_table(table_id) if entry is None else f"table '{entry.info.path}'"
            raise rules.not_found(producer_id, table_name)

    def __repr__(self) -> str:
        counts = self.counts
        return f"ProducerCalls(producers={counts.producers}, lost={counts.lost})"


def _bare(call: InitCall, number: int) -> ProducerRecord:
    return ProducerRecord(
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
    leaders: dict[int, list[TableBucket]] = {}
    for partition_id, of_partition in states:
        for bucket_id, state in enumerate(of_partition):
            bucket = TableBucket(table_id, partition_id, bucket_id)
            leaders.setdefault(state.leader, []).append(bucket)
    return leaders


async def _aside(work: Callable[[], T], *sizes: Sized | None) -> T:
    """Do the work, in a thread if it handles many offsets."""
    if sum(len(each) for each in sizes if each is not None) > OFFSETS_AT_ONCE:
        return await asyncio.to_thread(work)
    return work()
