"""The fence of a primary-key table: which writer may write which columns.

The coordinator decides which producers a table has. All buckets of a table share one `Fence`, which
the event loop replaces as a whole. The key-value worker asks the fence right before it works out a
put, so that puts which were waiting when the fence changed are refused too: after one more job of
the worker no put that the new fence refuses can get into the log.

| writer | error | unless |
|---|---|---|
| without producer | `ColumnLockedError` | the put writes no column of an exclusive producer |
| of a producer | `ProducerFencedError` | the producer exists, is not lost, and is in this epoch |
| of a producer | `InvalidTargetColumnError` | the put writes only columns of the producer |
| of a producer | `UndoUnderWayError` | no undo of the producer is under way in this bucket |
| of a shared producer | `ColumnLockedError` | as without producer |

A put without target columns, and a delete in it, writes every column outside the key. The undo task
belongs to the leader: a client that uses its number is fenced.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from zufluss.errors import (
    ColumnLockedError,
    InvalidTargetColumnError,
    ProducerFencedError,
    UndoUnderWayError,
)
from zufluss.kv.table import KvTable
from zufluss.model.producer import UNDO_TASK, ProducerWriter, is_producer

T = TypeVar("T")

TARGETS_MAX: Final = 1024
"""Sets of target columns whose result a fence caches at most."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A producer of a table, as its buckets see it."""

    producer_id: str
    """Id of the producer, for messages."""
    number: int
    """The number that its writer ids contain."""
    epoch: int
    """The present epoch."""
    column_ids: frozenset[int]
    """Ids of the columns it writes; empty: all, also those that are added later."""
    exclusive: bool
    """No other writer may write these columns."""
    lost: bool
    """The producer may never write again, and owns no columns."""

    def owns(self, column_id: int) -> bool:
        """Whether the producer writes a column."""
        return not self.column_ids or column_id in self.column_ids


@dataclass(slots=True)
class Activity:
    """When producers of a table last wrote to this server, accepted or not."""

    seconds: dict[int, float] = field(default_factory=dict)
    """Monotonic seconds by producer number. Written by the worker, read by the event loop."""

    def idle_ms(self, number: int) -> int:
        """Return the time since a producer wrote, −1 for never."""
        at = self.seconds.get(number)
        return -1 if at is None else max(0, round((time.monotonic() - at) * 1000))


class Fence:
    """The producers of one table, and the checks of puts against them."""

    def __init__(self, owners: Iterable[Owner] = (), activity: Activity | None = None) -> None:
        self._owners: Mapping[int, Owner] = {owner.number: owner for owner in owners}
        self._activity = Activity() if activity is None else activity
        self._locks = [o for o in self._owners.values() if o.exclusive and not o.lost]
        self._free: set[tuple[int, tuple[int, ...]]] = set()
        """Schema ids with target columns that no exclusive producer owns any of: a cache."""
        self._own: set[tuple[int, int, tuple[int, ...]]] = set()
        """Schema ids, producers and target columns that the producer owns all of: a cache."""

    def owner(self, number: int) -> Owner | None:
        """Return a producer of the table, None if the table has no such producer."""
        return self._owners.get(number)

    def check(
        self,
        table: KvTable,
        writer_id: int,
        targets: tuple[int, ...],
        undoing: Mapping[int, int],
    ) -> None:
        """Raise why a put is refused; `undoing` maps producers under undo to their epochs."""
        if not is_producer(writer_id):
            self._check_locks(table, targets)
            return
        owner = self.present(table, writer_id, task=None)
        if not owner.exclusive:
            self._check_locks(table, targets)
        self._activity.seconds[owner.number] = time.monotonic()
        if undoing.get(owner.number) == owner.epoch:
            raise UndoUnderWayError(
                f"{table.info.path}: what earlier epochs of producer {owner.producer_id} wrote to "
                "this bucket is being undone; try again when that is done"
            )
        if (table.info.schema_id, owner.number, targets) not in self._own:
            self._check_own(table, owner, targets)

    def present(self, table: KvTable, writer_id: int, *, task: int | None) -> Owner:
        """Return the producer of a writer; raises `ProducerFencedError` unless it may write.

        `task` is the task that the writer must have, None for any task of a client.
        """
        writer = ProducerWriter.of(writer_id)
        assert writer is not None
        path, number = table.info.path, writer.number
        if (writer.task == UNDO_TASK) is not (task == UNDO_TASK):
            raise ProducerFencedError(
                f"{path}: task {writer.task} of producer {number} is not for clients; tasks are "
                f"0 to {UNDO_TASK - 1}"
            )
        owner = self._owners.get(number)
        if owner is None:
            raise ProducerFencedError(
                f"{path} has no producer with number {number}: it was released or dropped; "
                "this writer must end"
            )
        if owner.lost:
            raise ProducerFencedError(
                f"{path}: producer {owner.producer_id} gave no sign of life, and others have taken "
                "its columns; it cannot come back. Drop it and begin under another id"
            )
        if owner.epoch != writer.epoch:
            raise ProducerFencedError(
                f"{path}: producer {owner.producer_id} is in epoch {owner.epoch}, not "
                f"{writer.epoch}; it was started again, and this writer must end"
            )
        return owner

    def _check_locks(self, table: KvTable, targets: tuple[int, ...]) -> None:
        if self._locks and (table.info.schema_id, targets) not in self._free:
            self._check_free(table, targets)

    def _check_free(self, table: KvTable, targets: tuple[int, ...]) -> None:
        locked = [
            (name, owner.producer_id)
            for column_id, name in _written(table, targets).items()
            for owner in self._locks
            if owner.owns(column_id)
        ]
        if locked:
            names, owners = zip(*locked, strict=True)
            raise ColumnLockedError(
                f"{table.info.path}: columns {', '.join(names)} belong to producer "
                f"{', '.join(sorted({*owners}))}; "
                "write only other columns, as a partial update, or end the producer and free them "
                "with zufluss producer drop"
            )
        _remember(self._free, (table.info.schema_id, targets))

    def _check_own(self, table: KvTable, owner: Owner, targets: tuple[int, ...]) -> None:
        written = _written(table, targets)
        others = [name for i, name in written.items() if not owner.owns(i)]
        if others:
            raise InvalidTargetColumnError(
                f"{table.info.path}: producer {owner.producer_id} does not own columns "
                f"{', '.join(others)}; name its own as target columns, or begin it with these too"
            )
        _remember(self._own, (table.info.schema_id, owner.number, targets))


OPEN: Final = Fence()
"""The fence of tables without producers."""


def _written(table: KvTable, targets: tuple[int, ...]) -> dict[int, str]:
    """Return ids and names of the columns outside the key that a put writes.

    Positions out of range and the auto-increment column are left out: `KvTable` refuses them.
    """
    columns = table.schema.columns
    positions = [i for i in targets if 0 <= i < len(columns)] if targets else range(len(columns))
    keys = {table.auto_increment, *map(table.schema.index_of, table.schema.primary_key)}
    return {columns[i].id: columns[i].name for i in positions if i not in keys}


def _remember(known: set[T], what: T) -> None:
    if len(known) < TARGETS_MAX:
        known.add(what)
