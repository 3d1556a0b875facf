"""Which snapshots an acquire gets: found, pinned, and encoded as the lease will store them.

A snapshot is found and pinned without an `await` in between, so that nobody drops it meanwhile. A
bucket whose change is being committed is waited for first, because that change was decided without
the pin.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zufluss.cluster.image import PartitionEntry
from zufluss.coordinator.bucket_remotes import BucketRemotes
from zufluss.coordinator.leases.book import BUCKETS_AT_ONCE, LeaseBook
from zufluss.coordinator.leases.records import encode_table
from zufluss.coordinator.leases.rules import LeasedTable, SnapshotPin, check_size
from zufluss.model.lease import LeasedSnapshot, Unavailable
from zufluss.model.table import TableBucket

ENCODED_AT_ONCE = 5_000
"""Pins of a table that are encoded on the event loop; more are encoded in a thread."""


@dataclass(slots=True)
class Selection:
    """The snapshots that an acquire got, pinned."""

    new: dict[TableBucket, SnapshotPin] = field(default_factory=dict)
    """Pins that the lease did not have before."""
    leased: dict[TableBucket, LeasedSnapshot] = field(default_factory=dict)
    """The answer: snapshots by bucket, those included that the lease had before."""
    unavailable: dict[TableBucket, Unavailable] = field(default_factory=dict)
    """Buckets without the snapshot that was asked for."""
    tables: dict[int, LeasedTable] = field(default_factory=dict)
    """The tables of the lease that the new pins change, by id."""
    values: dict[int, bytes] = field(default_factory=dict)
    """The same tables as they are stored."""

    async def answer_all(self, pins: Iterable[tuple[TableBucket, SnapshotPin]]) -> None:
        """Put pins that the lease had before into the answer."""
        for at, (bucket, pin) in enumerate(pins, 1):
            self.leased[bucket] = pin.leased
            if at % BUCKETS_AT_ONCE == 0:
                await asyncio.sleep(0)


class Selector:
    """Selects snapshots for leases."""

    def __init__(self, book: LeaseBook, remotes: BucketRemotes, bytes_max: int | None) -> None:
        """`bytes_max` is the limit for the leased snapshots of a table together."""
        self._book = book
        self._remotes = remotes
        self._bytes_max = bytes_max

    async def select(
        self, held: Mapping[int, LeasedTable], snapshots: Mapping[TableBucket, int | None]
    ) -> Selection:
        """Pin a snapshot of each bucket: by its id, or the newest for None.

        `held` are the tables of the lease so far. Nothing stays pinned when this raises.
        """
        selection = Selection()
        try:
            await self._pin(held, snapshots, selection)
            self._check_sizes(held, selection.new)
            for table_id, pins in (await _by_table(selection.new)).items():
                before = held.get(table_id, LeasedTable())
                merged = await encoded({**before.pins, **pins}, before.revoked)
                selection.tables[table_id], selection.values[table_id] = merged
        except Exception:
            await self._book.unpin(selection.new.items())
            raise
        return selection

    async def _pin(
        self,
        held: Mapping[int, LeasedTable],
        snapshots: Mapping[TableBucket, int | None],
        selection: Selection,
    ) -> None:
        for at, (bucket, snapshot_id) in enumerate(snapshots.items(), 1):
            if at % BUCKETS_AT_ONCE == 0:
                await asyncio.sleep(0)
            if not self._remotes.is_certain(bucket):
                await self._remotes.certain(bucket)
            pin = self._resolve(bucket, snapshot_id)
            if isinstance(pin, Unavailable):
                selection.unavailable[bucket] = pin
                continue
            selection.leased[bucket] = pin.leased
            table = held.get(bucket.table_id)
            before = None if table is None else table.pins.get(bucket)
            if before is None or before.snapshot_id != pin.snapshot_id:
                self._book.pins.add(bucket, pin)
                selection.new[bucket] = pin

    def _resolve(self, bucket: TableBucket, snapshot_id: int | None) -> SnapshotPin | Unavailable:
        image = self._remotes.image
        holder = image.holder(bucket)
        foreign = isinstance(holder, PartitionEntry) and holder.table_id != bucket.table_id
        if foreign or image.bucket_state(bucket) is None:
            return Unavailable.NO_BUCKET
        record = self._remotes.get(bucket)
        if not record.next_snapshot_id:
            return Unavailable.NO_SNAPSHOT
        for handle in reversed(record.snapshots):
            if snapshot_id in (None, handle.snapshot_id):
                return SnapshotPin.of(handle)
        return Unavailable.GONE

    def _check_sizes(
        self, held: Mapping[int, LeasedTable], new: Mapping[TableBucket, SnapshotPin]
    ) -> None:
        """`ConfigError` if the new pins make the leased snapshots of a table too large."""
        if self._bytes_max is None:
            return
        pins = self._book.pins
        more: Counter[int] = Counter()
        less: Counter[int] = Counter()
        for bucket, pin in new.items():
            more[bucket.table_id] += pin.size * pins.only_once(bucket, pin)
        for bucket, pin in _pins_of(held, new):
            less[bucket.table_id] += pin.size * pins.only_once(bucket, pin)
        for table_id in more:
            size = pins.bytes_of(table_id)
            before, after = size - more[table_id], size - less[table_id]
            check_size(after, before, self._bytes_max, self._remotes.image.table_name(table_id))

    def __repr__(self) -> str:
        return f"Selector(bytes_max={self._bytes_max})"


async def _by_table(
    pins: Mapping[TableBucket, SnapshotPin],
) -> dict[int, dict[TableBucket, SnapshotPin]]:
    tables: dict[int, dict[TableBucket, SnapshotPin]] = {}
    for at, (bucket, pin) in enumerate(pins.items(), 1):
        tables.setdefault(bucket.table_id, {})[bucket] = pin
        if at % BUCKETS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return tables


async def encoded(
    pins: Mapping[TableBucket, SnapshotPin], revoked: Mapping[int | None, str]
) -> tuple[LeasedTable, bytes]:
    """The pins and revocations of a lease in one table, also as they are stored."""

    def encode() -> tuple[LeasedTable, bytes]:
        table = LeasedTable.of(pins, revoked)
        return table, encode_table(table)

    return await asyncio.to_thread(encode) if len(pins) > ENCODED_AT_ONCE else encode()


async def pins_of(
    tables: Mapping[int, LeasedTable], buckets: Iterable[TableBucket]
) -> list[tuple[TableBucket, SnapshotPin]]:
    """The pins that a lease has of some buckets; other tasks run meanwhile."""
    todo = list(buckets)
    pins: list[tuple[TableBucket, SnapshotPin]] = []
    for at in range(0, len(todo), BUCKETS_AT_ONCE):
        if at:
            await asyncio.sleep(0)
        pins += _pins_of(tables, todo[at : at + BUCKETS_AT_ONCE])
    return pins


def _pins_of(
    tables: Mapping[int, LeasedTable], buckets: Iterable[TableBucket]
) -> list[tuple[TableBucket, SnapshotPin]]:
    return [
        (bucket, pin)
        for bucket in buckets
        if (table := tables.get(bucket.table_id)) is not None
        and (pin := table.pins.get(bucket)) is not None
    ]
