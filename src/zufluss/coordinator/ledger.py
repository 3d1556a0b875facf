"""The ledger: fenced transactions and counters of the metadata store.

Opening the ledger takes the next coordinator epoch. Every transaction checks that this epoch is
still the last one. So of two coordinators on one store only the later one can change anything; the
earlier one gets error 65 at its next transaction, and changes nothing.

Counters never give a number twice: the operation that takes numbers is part of the transaction that
uses them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence

from zufluss.coordinator import records
from zufluss.errors import ErrorCode, ZuflussError, error
from zufluss.meta.api import (
    Check,
    ConflictError,
    Create,
    MetaStore,
    Op,
    Put,
    StoreClosedError,
    VersionedValue,
    portions,
)


class Ledger:
    """The metadata store in the hands of one coordinator. Open it with `Ledger.open`."""

    def __init__(
        self, store: MetaStore, cluster_id: str, form: int, epoch: int, version: int
    ) -> None:
        self.cluster_id = cluster_id
        """The id of the cluster, created with its store."""
        self.form = form
        """The layout that the store had when it was opened; see `records.py`."""
        self.epoch = epoch
        """The coordinator epoch, larger than that of every coordinator before."""
        self.on_fenced: Callable[[], None] = lambda: None
        """Called when another coordinator has taken over."""
        self._store = store
        self._epoch_version = version
        self._counter_lock = asyncio.Lock()

    @classmethod
    async def open(cls, store: MetaStore) -> Ledger:
        """Take over a store, and fence off the coordinator that had it before."""
        cluster_id, form = await _cluster(store)
        last = await store.read(records.EPOCH_PATH)
        epoch = 1 if last is None else int(last.value) + 1
        before = None if last is None else last.version
        version = await store.compare_and_set(records.EPOCH_PATH, records.number(epoch), before)
        return cls(store, cluster_id, form, epoch, version)

    async def commit(self, ops: Sequence[Op]) -> None:
        """Apply all operations or none; error 65 when another coordinator has taken over."""
        try:
            await self._store.transact([Check(records.EPOCH_PATH, self._epoch_version), *ops])
        except ConflictError as conflict:
            if conflict.op.path != records.EPOCH_PATH:
                raise
            self.on_fenced()
            raise error(
                ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION,
                f"coordinator epoch {self.epoch} is over: another coordinator has taken this "
                f"metadata store; ask that one",
            ) from conflict

    async def confirm(self) -> None:
        """Raise error 65 when another coordinator has taken over.

        Asked before files are deleted that the metadata do not name: what was garbage for the
        coordinator of this moment stays garbage.
        """
        await self.commit([])

    async def commit_in_portions(self, ops: Iterable[Op]) -> None:
        """Apply operations in as many transactions as they need, in their order.

        When one fails, those before it have been applied.
        """
        for portion in portions(ops):
            await self.commit(portion)

    async def read(self, path: str) -> VersionedValue | None:
        """The value of a path, or None."""
        return await self._store.read(path)

    async def next_id(self, counter: str, count: int = 1) -> tuple[int, Op]:
        """The next number of a counter, and the operation that takes it and `count - 1` more."""
        stored = await self._store.read(counter)
        if stored is None:
            return 0, Create(counter, records.number(count))
        first = int(stored.value)
        return first, Put(counter, records.number(first + count), stored.version)

    async def take(self, counter: str, count: int) -> range:
        """The next numbers of a counter, in a transaction of their own."""
        async with self._counter_lock:
            first, op = await self.next_id(counter, count)
            await self.commit([op])
        return range(first, first + count)

    async def take_up_to(self, counter: str, count: int, limit: int) -> range | None:
        """Take the next numbers of a counter that stores the last number it gave.

        Returns fewer than `count` numbers near `limit`, none beyond it. Returns None when the
        counter does not exist: it is created and deleted with the table it belongs to.
        """
        async with self._counter_lock:
            stored = await self._store.read(counter)
            if stored is None:
                return None
            before = int(stored.value)
            last = min(before + count, limit)
            if last > before:
                await self.commit([Put(counter, records.number(last), stored.version)])
        return range(before + 1, last + 1)

    def __repr__(self) -> str:
        return f"Ledger(cluster_id={self.cluster_id!r}, epoch={self.epoch})"


def is_without_effect(problem: Exception) -> bool:
    """Whether a failed commit certainly changed nothing; otherwise its outcome is unknown."""
    if isinstance(problem, StoreClosedError):
        return True
    code = problem.code if isinstance(problem, ZuflussError) else None
    return code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION


async def _cluster(store: MetaStore) -> tuple[str, int]:
    """The id of the cluster, and the format of its catalog; a new store gets both."""
    form = await store.read(records.FORMAT_PATH)
    if form is None:
        new_id = uuid.uuid4().hex
        await store.transact(
            [
                Create(records.FORMAT_PATH, records.number(records.FORMAT)),
                Create(records.CLUSTER_PATH, new_id.encode()),
            ]
        )
        return new_id, records.FORMAT
    if records.restore_of(form.value) is not None:
        raise records.CatalogDamagedError(
            "a restore of metadata into this store has not finished: repeat `zufluss metadata "
            "restore` with the same file"
        )
    cluster = await store.read(records.CLUSTER_PATH)
    known = {records.number(each): each for each in (records.FORMAT_1, records.FORMAT)}
    if form.value not in known or cluster is None:
        raise records.CatalogDamagedError(
            f"the catalog has format {form.value!r}, this zufluss reads formats "
            f"{', '.join(map(str, known.values()))}: use the zufluss that wrote it"
        )
    return cluster.value.decode(), known[form.value]
