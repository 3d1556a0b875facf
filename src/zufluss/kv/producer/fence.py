"""Who may write which columns of a primary-key table, while it has producers.

The coordinator says which producers a table has; all buckets of the table share one `Fence`, which
the event loop replaces as a whole. It is asked in the key-value worker, right before a put is
worked out, so that puts which came before the news, and wait, are refused as well: when the worker
has done one more job, no put that the fence refuses can get into the log any more.

| writer | refused | unless |
|---|---|---|
| of no producer | `ColumnLockedError` | it writes no column that an exclusive producer owns |
| of a producer | `ProducerFencedError` | the producer is there, not lost, and in this epoch |
| of a producer | `InvalidTargetColumnError` | it writes nothing but columns of the producer |
| of a producer | `UndoUnderWayError` | nothing of it is just being undone here |
| of a producer that shares | `ColumnLockedError` | as of no producer |

A put without target columns, and a delete in it, writes every column that is not in the key. The
task of undos belongs to the leader: a client that uses it is fenced.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from zufluss.errors import (
    ColumnLockedError,
    InvalidTargetColumnError,
    ProducerFencedError,
    UndoUnderWayError,
)
from zufluss.model.producer import UNDO_TASK, ProducerWriter, is_producer

if TYPE_CHECKING:
    from zufluss.kv.table import KvTable

T = TypeVar("T")

TARGETS_MAX: Final = 1024
"""Sets of target columns that a fence remembers its answer for."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A producer, as a bucket knows it."""

    producer_id: str
    """Its id, for messages."""
    number: int
    """What its writer ids are made of."""
    epoch: int
    """Its present epoch."""
    column_ids: frozenset[int]
    """The columns it writes; none: all there are, also those that the table gets later."""
    exclusive: bool
    """Nobody else may write them."""
    lost: bool
    """It may never write again, and owns nothing."""

    def owns(self, column_id: int) -> bool:
        """Whether it writes a column."""
        return not self.column_ids or column_id in self.column_ids


@dataclass(slots=True)
class Activity:
    """When the producers of a table last wrote on this server, whatever became of it."""

    seconds: dict[int, float] = field(default_factory=dict)
    """By number, on the monotonic clock. Written by the worker, read by the event loop."""

    def idle_ms(self, number: int) -> int:
        """How long ago a producer wrote; −1 for never."""
        at = self.seconds.get(number)
        return -1 if at is None else max(0, round((time.monotonic() - at) * 1000))


class Fence:
    """The producers of one table."""

    def __init__(self, owners: Iterable[Owner] = (), activity: Activity | None = None) -> None:
        self._owners: Mapping[int, Owner] = {owner.number: owner for owner in owners}
        self._activity = Activity() if activity is None else activity
        self._locks = [o for o in self._owners.values() if o.exclusive and not o.lost]
        self._free: set[tuple[int, tuple[int, ...]]] = set()
        """Schema ids and target columns that nobody owns any of."""
        self._own: set[tuple[int, int, tuple[int, ...]]] = set()
        """The same, of a producer that owns all of them."""

    def owner(self, number: int) -> Owner | None:
        """A producer of the table; None if it has no such, or no longer."""
        return self._owners.get(number)

    def check(
        self,
        table: KvTable,
        writer_id: int,
        targets: tuple[int, ...],
        undoing: Mapping[int, int],
    ) -> None:
        """Refuse a put; `undoing` has the producers that are being undone, and their epochs."""
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
        """The producer of a writer of its present epoch; `ProducerFencedError`.

        `task` is the one it must have; None for any that clients may have.
        """
        writer = ProducerWriter.of(writer_id)
        assert writer is not None
        path, number = table.info.path, writer.number
        if (writer.task == UNDO_TASK) is not (task == UNDO_TASK):
            raise ProducerFencedError(
                f"{path}: task {writer.task} of producer {number} is none of a client's; tasks are "
                f"0 to {UNDO_TASK - 1}"
            )
        owner = self._owners.get(number)
        if owner is None:
            raise ProducerFencedError(
                f"{path} has no producer with number {number}, or no longer: it was released or "
                "dropped; this writer must end"
            )
        if owner.lost:
            raise ProducerFencedError(
                f"{path}: producer {owner.producer_id} gave no sign of life, and others have taken "
                "columns of it; it can never come back, drop it and begin under another id"
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
"""Of tables without producers."""


def _written(table: KvTable, targets: tuple[int, ...]) -> dict[int, str]:
    """Ids and names of the columns outside the key that a put writes.

    Positions that are none are somebody else's to refuse, and so is an auto-increment column.
    """
    columns = table.schema.columns
    positions = [i for i in targets if 0 <= i < len(columns)] if targets else range(len(columns))
    keys = {table.auto_increment, *map(table.schema.index_of, table.schema.primary_key)}
    return {columns[i].id: columns[i].name for i in positions if i not in keys}


def _remember(known: set[T], what: T) -> None:
    if len(known) < TARGETS_MAX:
        known.add(what)
