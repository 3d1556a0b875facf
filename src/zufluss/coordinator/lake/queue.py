"""The queue of tables that wait to be tiered: who is next, who holds what, who is late.

Plain state without I/O, over a clock that is passed in. Every table with
`table.datalake.enabled` is in one of these states:

    New | Initialized → Scheduled → Pending → Tiering → Tiered → Scheduled
                            ↑                    ├── finished by force ─→ Pending
                            └────────────────────┴── Failed, or silent

| state | leaves it |
|---|---|
| Scheduled | `table.datalake.freshness` after the last tiering (first: after its creation) |
| Pending | first come, first served, when a service asks for a table |
| Tiering | finished, failed, or no heartbeat for as long as its service declared |

New, Initialized, Tiered and Failed are passed through at once and never seen from outside. A table
that failed once is pending again at once, as in Apache Fluss; when it fails again and again it
waits longer each time, so that a table that cannot be tiered does not take the turn of the others.
A service that falls silent counts as a failure: the table may be what killed it.

A *lease* is one hand-out: table, tiering epoch, coordinator epoch. It is valid while the table is
Tiering with exactly these; with any other, `check` raises `FencedTieringEpochError`, and nothing
changes. The epochs are the caller's to make durable before it hands out (`lake/tables.py`), so they
grow over restarts as well.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import structlog

from zufluss.config.table_options import TABLE_DATALAKE_ENABLED, TABLE_DATALAKE_FRESHNESS
from zufluss.errors import ConfigError, FencedTieringEpochError
from zufluss.model.table import TableInfo, TablePath

log = structlog.get_logger(__name__)

HEARTBEAT_TIMEOUT_MS = 120_000
"""Silence after which a table is taken from a service that declares nothing."""
HEARTBEAT_TIMEOUT_MS_MIN = 1_000
HEARTBEAT_TIMEOUT_MS_MAX = 600_000
BACKOFF_MS_MIN = 1_000
"""How long a table waits after its second failure in a row; twice as long after each further."""
BACKOFF_MS_MAX = 60_000


class TieringState(Enum):
    """Where a table is; the states it only passes through are not here."""

    SCHEDULED = "scheduled"
    PENDING = "pending"
    TIERING = "tiering"


@dataclass(frozen=True, slots=True)
class Lease:
    """One hand-out of a table to a tiering service."""

    table_id: int
    """The table."""
    tiering_epoch: int
    """Grows with every hand-out of the table."""
    coordinator_epoch: int
    """The coordinator that handed it out."""


@dataclass(frozen=True, slots=True)
class TieringStatus:
    """A table of the queue as operators see it."""

    table_id: int
    """The table."""
    path: TablePath
    """Its name."""
    state: TieringState
    """Where it is."""
    tiering_epoch: int
    """The epoch of the last hand-out by this coordinator, 0 before the first."""
    freshness_ms: int
    """How far the lake may lag behind."""
    tier_lag_ms: int
    """Time since the last tiering."""
    tiered_time_ms: int
    """When it was last tiered, or created."""
    last_duration_ms: int | None
    """How long the last finished round took."""
    pending_ms: int
    """How long it has been waiting for a service; 0 when it is not."""
    failures: int
    """Rounds that failed or fell silent since the coordinator started."""
    file_size: int | None
    """Bytes in the lake table, as the last service said that knew it."""
    record_count: int | None
    """Rows in the lake table, likewise."""


@dataclass(slots=True)
class _Table:
    info: TableInfo
    freshness_ms: int
    tiered_ms: int
    state: TieringState = TieringState.SCHEDULED
    due_ms: int = 0
    by_freshness: bool = True
    ticket: int = 0
    epoch: int = 0
    started_ms: int = 0
    seen_ms: int = 0
    timeout_ms: int = HEARTBEAT_TIMEOUT_MS
    failures: int = 0
    failed_in_a_row: int = 0
    duration_ms: int | None = None
    file_size: int | None = None
    record_count: int | None = None


class TieringQueue:
    """The tables to tier. `clock_ms` is the time, `coordinator_epoch` that of this coordinator."""

    def __init__(self, clock_ms: Callable[[], int], coordinator_epoch: int) -> None:
        self.coordinator_epoch = coordinator_epoch
        self._clock_ms = clock_ms
        self._tables: dict[int, _Table] = {}
        self._pending: dict[int, None] = {}  # in the order of their coming
        self._running: dict[int, None] = {}
        self._schedule: list[tuple[int, int, int]] = []  # due, ticket, table; old tickets are void
        self._tickets = itertools.count(1)

    # Tables come, change and go

    def put_table(self, info: TableInfo, tiered_ms: int | None) -> None:
        """The table is new, was altered, or was there at the start; `tiered_ms` if it ever was.

        Without `table.datalake.enabled` it leaves the queue, and whoever holds it is fenced.
        """
        if not info.property(TABLE_DATALAKE_ENABLED):
            self.remove_table(info.table_id)
            return
        freshness_ms: int = info.property(TABLE_DATALAKE_FRESHNESS)
        table = self._tables.get(info.table_id)
        if table is None:
            last = info.created_time if tiered_ms is None else tiered_ms
            table = self._tables[info.table_id] = _Table(info, freshness_ms, last)
            self._after_freshness(table)
            return
        before, table.info, table.freshness_ms = table.freshness_ms, info, freshness_ms
        waits = table.state is not TieringState.TIERING and table.by_freshness
        if waits and before != freshness_ms:
            self._after_freshness(table)

    def remove_table(self, table_id: int) -> None:
        """The table is gone or no longer tiered; nothing when it was not in the queue."""
        if self._tables.pop(table_id, None) is not None:
            self._pending.pop(table_id, None)
            self._running.pop(table_id, None)

    # Hand-outs

    def next_table(self) -> TableInfo | None:
        """The table whose turn it is; it stays pending until `hand_out`."""
        self.advance()
        for table_id in self._pending:
            return self._tables[table_id].info
        return None

    def hand_out(self, table_id: int, tiering_epoch: int, timeout_ms: int) -> Lease | None:
        """Give a pending table to a service; None when it is not pending any more."""
        if table_id not in self._pending:
            return None
        del self._pending[table_id]
        self._running[table_id] = None
        table = self._tables[table_id]
        table.state, table.epoch = TieringState.TIERING, tiering_epoch
        table.started_ms = table.seen_ms = self._clock_ms()
        table.timeout_ms = timeout_ms
        return Lease(table_id, tiering_epoch, self.coordinator_epoch)

    def check(self, lease: Lease) -> None:
        """Raise `FencedTieringEpochError` unless this lease holds."""
        self._leased(lease)

    def renew(self, lease: Lease, timeout_ms: int) -> None:
        """The service that holds the lease lives."""
        table = self._leased(lease)
        table.seen_ms, table.timeout_ms = self._clock_ms(), timeout_ms

    def finish(
        self,
        lease: Lease,
        *,
        by_force: bool = False,
        file_size: int | None = None,
        record_count: int | None = None,
    ) -> None:
        """A round is over; `by_force` says that there is more, so the table is pending again."""
        table = self._leased(lease)
        now = self._clock_ms()
        table.tiered_ms, table.duration_ms = now, now - table.started_ms
        table.failed_in_a_row = 0
        table.file_size = table.file_size if file_size is None else file_size
        table.record_count = table.record_count if record_count is None else record_count
        self._running.pop(lease.table_id)
        if by_force:
            self._at(table, now)
        else:
            self._after_freshness(table)

    def fail(self, lease: Lease) -> None:
        """A round failed; the table comes again, later each time that it fails in a row."""
        table = self._leased(lease)
        self._running.pop(lease.table_id)
        self._again(table, self._clock_ms())

    # Time

    def advance(self) -> None:
        """Do what is due by now: queue tables, take those of silent services back."""
        now = self._clock_ms()
        for table_id in [*self._running]:
            table = self._tables[table_id]
            if now - table.seen_ms >= table.timeout_ms:
                log.warning(
                    "tiering_service_silent",
                    table=str(table.info.path),
                    tiering_epoch=table.epoch,
                    silent_ms=now - table.seen_ms,
                )
                del self._running[table_id]
                self._again(table, now)
        while self._schedule and self._schedule[0][0] <= now:
            due, ticket, table_id = heapq.heappop(self._schedule)
            found = self._tables.get(table_id)
            if found is not None and found.ticket == ticket:
                found.state, found.due_ms = TieringState.PENDING, due
                self._pending[table_id] = None

    # Looking

    def status(self) -> list[TieringStatus]:
        """Every table of the queue, by id."""
        self.advance()
        now = self._clock_ms()
        return [self._status(i, table, now) for i, table in sorted(self._tables.items())]

    def __contains__(self, table_id: int) -> bool:
        return table_id in self._tables

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._tables))

    def __repr__(self) -> str:
        return (
            f"TieringQueue(tables={len(self._tables)}, pending={len(self._pending)}, "
            f"running={sorted(self._running)}, coordinator_epoch={self.coordinator_epoch})"
        )

    def _status(self, table_id: int, table: _Table, now: int) -> TieringStatus:
        pending = table.state is TieringState.PENDING
        return TieringStatus(
            table_id=table_id,
            path=table.info.path,
            state=table.state,
            tiering_epoch=table.epoch,
            freshness_ms=table.freshness_ms,
            tier_lag_ms=now - table.tiered_ms,
            tiered_time_ms=table.tiered_ms,
            last_duration_ms=table.duration_ms,
            pending_ms=now - table.due_ms if pending else 0,
            failures=table.failures,
            file_size=table.file_size,
            record_count=table.record_count,
        )

    def _leased(self, lease: Lease) -> _Table:
        self.advance()
        table = self._tables.get(lease.table_id)
        held = table is not None and table.state is TieringState.TIERING
        if (
            table is not None
            and held
            and table.epoch == lease.tiering_epoch
            and lease.coordinator_epoch == self.coordinator_epoch
        ):
            return table
        now = f"its epoch is {table.epoch}" if table is not None and held else "nobody holds it"
        raise FencedTieringEpochError(
            f"table {lease.table_id} is not held with tiering epoch {lease.tiering_epoch} of "
            f"coordinator epoch {lease.coordinator_epoch}: {now}, the coordinator's is "
            f"{self.coordinator_epoch}; drop the round and ask for a table"
        )

    def _again(self, table: _Table, now: int) -> None:
        """After a round that came to nothing: at once, later each time that happens in a row."""
        table.failures += 1
        table.failed_in_a_row += 1
        self._at(table, now + backoff_ms(table.failed_in_a_row))

    def _after_freshness(self, table: _Table) -> None:
        self._at(table, table.tiered_ms + table.freshness_ms)
        table.by_freshness = True

    def _at(self, table: _Table, due_ms: int) -> None:
        """Schedule a table for a time, whatever it was scheduled for before."""
        table_id = table.info.table_id
        self._pending.pop(table_id, None)
        table.state, table.due_ms, table.by_freshness = TieringState.SCHEDULED, due_ms, False
        table.ticket = next(self._tickets)
        heapq.heappush(self._schedule, (due_ms, table.ticket, table_id))


def backoff_ms(failed_in_a_row: int) -> int:
    """How long a table waits after so many failures in a row."""
    doublings = failed_in_a_row - 2
    return 0 if doublings < 0 else min(BACKOFF_MS_MIN << min(doublings, 16), BACKOFF_MS_MAX)


def check_timeout_ms(timeout_ms: int | None) -> int:
    """The heartbeat timeout a service declared, or the default; `ConfigError` out of bounds."""
    if timeout_ms is None:
        return HEARTBEAT_TIMEOUT_MS
    if not HEARTBEAT_TIMEOUT_MS_MIN <= timeout_ms <= HEARTBEAT_TIMEOUT_MS_MAX:
        raise ConfigError(
            f"heartbeat_timeout_ms {timeout_ms} is not allowed; give "
            f"{HEARTBEAT_TIMEOUT_MS_MIN} to {HEARTBEAT_TIMEOUT_MS_MAX}"
        )
    return timeout_ms
