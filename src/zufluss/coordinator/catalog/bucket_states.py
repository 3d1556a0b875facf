"""Who leads which bucket, changed for many buckets at once.

The states of a table's buckets lie in values of `records.BUCKETS_AT_ONCE`. A take-over changes
thousands of them, so a change is stored in transactions of a bounded size, each applied to the
image before the next one. A bucket that is dropped meanwhile is left out.

Changes take turns with each other only: they need not wait for a change of the catalog.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from zufluss.cluster.image import (
    BucketState,
    ClusterImage,
    Holder,
    ImageChange,
    PartitionPut,
    TableEntry,
    TablePut,
)
from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.meta.api import ConflictError, Op
from zufluss.model.table import TableBucket

VALUES_AT_ONCE = 500
"""Values that change in one transaction."""
STATES_AT_ONCE = 5_000
"""Bucket states in all values that change in one transaction."""

T = TypeVar("T")

StatesKey = tuple[int, int | None, int]
"""Names a value with bucket states: ids of a table and partition, and `records.chunk_of`."""
_StatesOf = tuple[StatesKey, dict[int, BucketState]]
"""New states in such a value, by bucket number."""


class BucketStates:
    """Changes the states of buckets, in the store and in the image."""

    def __init__(self, ledger: Ledger, image: ClusterImage) -> None:
        self._ledger = ledger
        self._image = image
        self._turn = asyncio.Lock()
        """Held while states are decided on, stored and applied."""

    async def change(
        self, decide: Callable[[], Mapping[TableBucket, BucketState]]
    ) -> tuple[list[TableBucket], list[ImageChange]]:
        """Replace the states of buckets by those that `decide` returns for the present image.

        Returns the buckets that have their new state, and the changes, which `Catalog.tell` sends
        to others if leaders are among them.
        """
        done: list[TableBucket] = []
        changes: dict[tuple[int, int | None], ImageChange] = {}
        async with self._turn:
            by_key: dict[StatesKey, dict[int, BucketState]] = {}
            for bucket, state in decide().items():
                by_key.setdefault(states_key(bucket), {})[bucket.bucket_id] = state
            for keys in self.in_portions(list(by_key)):
                portion = [(key, by_key[key]) for key in keys]
                for (table_id, partition_id, _), states in await self._put(portion):
                    ids = table_id, partition_id
                    done += [TableBucket(*ids, number) for number in states]
                    if (change := self._apply(ids, states)) is not None:
                        changes[ids] = change
                await asyncio.sleep(0)
        return done, list(changes.values())

    async def between_changes(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work that must not overlap with a change of states, such as one that is stored only.

        Whoever holds `Catalog.exclusive`, too, takes it first.
        """
        async with self._turn:
            return await work()

    def in_portions(self, keys: Sequence[StatesKey]) -> Iterator[Sequence[StatesKey]]:
        """The keys in portions: `change` changes what is in one of them in one transaction."""
        begin, room = 0, STATES_AT_ONCE
        for at, (table_id, partition_id, _) in enumerate(keys):
            holder = self._image.holder(TableBucket(table_id, partition_id, 0))
            size = 0 if holder is None else min(len(holder.buckets), records.BUCKETS_AT_ONCE)
            if at > begin and (size > room or at - begin == VALUES_AT_ONCE):
                yield keys[begin:at]
                begin, room = at, STATES_AT_ONCE
            room -= size
        if keys:
            yield keys[begin:]

    async def _put(self, portion: list[_StatesOf]) -> list[_StatesOf]:
        """Store the states of some tables and partitions; returns those that were there."""
        while portion:
            there: list[_StatesOf] = []
            ops: list[Op] = []
            for each in portion:
                (table_id, partition_id, chunk), states = each
                entry = self._with_states((table_id, partition_id), states)
                if entry is not None:
                    there.append(each)
                    ops.append(records.put_buckets(entry, chunk))
            portion = there
            try:
                await self._ledger.commit(ops)
                return portion
            except ConflictError as conflict:  # dropped, which the image does not know yet
                portion = portion[: conflict.index - 1] + portion[conflict.index :]
        return []

    def _apply(
        self, ids: tuple[int, int | None], states: Mapping[int, BucketState]
    ) -> ImageChange | None:
        entry = self._with_states(ids, states)
        if entry is None:
            return None
        put = TablePut(entry) if isinstance(entry, TableEntry) else PartitionPut(entry)
        self._image.apply([put])
        return put

    def _with_states(
        self, ids: tuple[int, int | None], states: Mapping[int, BucketState]
    ) -> Holder | None:
        """The present table or partition with other states of its buckets; None if it is gone."""
        holder = self._image.holder(TableBucket(*ids, 0))
        if holder is None:
            return None
        return replace(
            holder,
            buckets=tuple(states.get(i, state) for i, state in enumerate(holder.buckets)),
        )


def states_key(bucket: TableBucket) -> StatesKey:
    """The key of the value that has the state of a bucket."""
    return bucket.table_id, bucket.partition_id, records.chunk_of(bucket.bucket_id)
