"""The queue of tables to tier: which is next, which service holds which, which service is silent.

Plain state without I/O, over clocks that are passed in. Turns and silence are counted by the
monotonic clock, so that a wall clock that jumps neither ends rounds nor puts tables off; the wall
clock only says when a table was last tiered. Every table with `table.datalake.enabled` is in one of
these states:

    New | Initialized → Scheduled → Pending → Tiering → Tiered → Scheduled
                            ↑                    ├── finished by force ─→ Pending
                            └────────────────────┴── Failed, or silent

| state | leaves it |
|---|---|
| Scheduled | `table.datalake.freshness` after the last tiering (first: after its creation) |
| Pending | first come, first served, when a service asks for a table |
| Tiering | finished, failed, or no heartbeat for as long as its service declared |

A table leaves New, Initialized, Tiered and Failed at once, so nobody sees it in these states. A
table whose round failed once is pending again at once, as in Apache Fluss. After further failures
in a row it waits longer each time, so that a table that cannot be tiered does not block the others.
Silence of a service is a failure of its table, which may have killed the service.

A *hand-out* consists of table, tiering epoch and coordinator epoch. It is valid while the table is
Tiering with the same epochs; otherwise `check` raises `FencedTieringEpochError`. The caller makes
the tiering epoch durable before the hand-out (`lake/tables.py`), so it grows over restarts.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import structlog

from zufluss.clock import Clock, ClockMs
from zufluss.config.table_options import TABLE_DATALAKE_ENABLED, TABLE_DATALAKE_FRESHNESS
from zufluss.errors import ConfigError, FencedTieringEpochError
from zufluss.model.table import TableInfo, TablePath, unknown_table

log = structlog.get_logger(__name__)

HEARTBEAT_TIMEOUT_MS = 120_000
"""Silence after which a service loses its table, if it declares no timeout."""
HEARTBEAT_TIMEOUT_MS_MIN = 1_000
HEARTBEAT_TIMEOUT_MS_MAX = 600_000
BACKOFF_MS_MIN = 1_000
"""How long a table waits after its second failure in a row; twice as long after each further."""
BACKOFF_MS_MAX = 60_000


class TieringState(Enum):
    """The state of a table in the queue."""

    SCHEDULED = "scheduled"
    PENDING = "pending"
    TIERING = "tiering"


@dataclass(frozen=True, slots=True)
class HandOut:
    """One hand-out of a table to a tiering service."""

    table_id: int
    """The id of the table."""
    tiering_epoch: int
    """Grows with every hand-out of the table."""
    coordinator_epoch: int
    """The epoch of the coordinator that handed the table out."""


@dataclass(frozen=True, slots=True)
class TieringStatus:
    """A table of the queue as operators see it."""

    table_id: int
    """The id of the table."""
    path: TablePath
    """Its name."""
    state: TieringState
    """Its state."""
    tiering_epoch: int
    """The epoch of the last hand-out by this coordinator, 0 before the first."""
    freshness_ms: int
    """How far the lake may lag behind."""
    tier_lag_ms: int
    """Time since the last tiering."""
    tiered_time_ms: int
    """When it was last tiered, or created, epoch milliseconds."""
    last_duration_ms: int | None
    """Duration of the last finished round; None before the first."""
    pending_ms: int
    """How long it has been waiting for a service; 0 if it is not pending."""
    failures: int
    """Rounds that failed or fell silent since the coordinator started."""
    file_size: int | None
    """Bytes in the lake table, as last reported; None if no service reported them."""
    record_count: int | None
    """Rows in the lake table, as last reported; None if no service reported them."""


@dataclass(slots=True)
class _Table:
    """A table of the queue; times are those of the queue's monotonic clock, but for one."""

    info: TableInfo
    freshness_ms: int
    tiered_wall_ms: int
    tiered_ms: int
    state: TieringState = TieringState.SCHEDULED
    due_ms: int = 0
    by_freshness: bool = True
    ticket: int = 0
    epoch: int = 0
    started_ms: int = 0
    seen_ms: int = 0
    timeout_ms: int = HEARTBEAT_TIMEOUT_MS
    names_epochs: bool = True
    failures: int = 0
    failed_in_a_row: int = 0
    duration_ms: int | None = None
    file_size: int | None = None
    record_count: int | None = None


class TieringQueue:
    """The tables to tier. `clock_ms` is the wall clock, `clock` the monotonic one."""

    def __init__(
        self, clock_ms: ClockMs, coordinator_epoch: int, clock: Clock = time.monotonic
    ) -> None:
        self.coordinator_epoch = coordinator_epoch
        self._clock_ms = clock_ms
        self._clock = clock
        self._tables: dict[int, _Table] = {}
        self._pending: dict[int, None] = {}  # in the order of their coming
        self._running: dict[int, None] = {}
        self._schedule: list[tuple[int, int, int]] = []  # due, ticket, table; old tickets are void
        self._tickets = itertools.count(1)

    # Tables

    def put_table(self, info: TableInfo, tiered_ms: int | None) -> None:
        """Add a table, or follow its alteration; `tiered_ms` is when it was last tiered, wall time.

        Without `table.datalake.enabled` it leaves the queue, and the service that holds it is
        fenced.
        """
        if not info.property(TABLE_DATALAKE_ENABLED):
            self.remove_table(info.table_id)
            return
        freshness_ms: int = info.property(TABLE_DATALAKE_FRESHNESS)
        table = self._tables.get(info.table_id)
        if table is None:
            last = info.created_time if tiered_ms is None else tiered_ms
            age = max(0, self._clock_ms() - last)
            table = _Table(info, freshness_ms, last, self._now_ms() - age)
            self._tables[info.table_id] = table
            self._after_freshness(table)
            return
        before, table.info, table.freshness_ms = table.freshness_ms, info, freshness_ms
        waits = table.state is not TieringState.TIERING and table.by_freshness
        if waits and before != freshness_ms:
            self._after_freshness(table)

    def remove_table(self, table_id: int) -> None:
        """Remove a table that was dropped or is no longer tiered."""
        if self._tables.pop(table_id, None) is not None:
            self._pending.pop(table_id, None)
            self._running.pop(table_id, None)

    # Hand-outs

    def next_table(self) -> TableInfo | None:
        """The table whose turn it is; it stays pending until `hand_out`. None without any."""
        self.advance()
        for table_id in self._pending:
            return self._tables[table_id].info
        return None

    def hand_out(
        self, table_id: int, tiering_epoch: int, timeout_ms: int, names_epochs: bool = True
    ) -> HandOut | None:
        """Give a pending table to a service; None when it is not pending any more.

        A service with `names_epochs` names its hand-out in every report.
        """
        if table_id not in self._pending:
            return None
        del self._pending[table_id]
        self._running[table_id] = None
        table = self._tables[table_id]
        table.state, table.epoch = TieringState.TIERING, tiering_epoch
        table.started_ms = table.seen_ms = self._now_ms()
        table.timeout_ms, table.names_epochs = timeout_ms, names_epochs
        return HandOut(table_id, tiering_epoch, self.coordinator_epoch)

    def check(self, hand_out: HandOut) -> None:
        """`FencedTieringEpochError` unless a hand-out is valid."""
        self._held(hand_out)

    def check_unnamed(self, table_id: int) -> None:
        """`FencedTieringEpochError` unless a service that names no epochs holds the table."""
        self.advance()
        table = self._tables.get(table_id)
        if table is not None and table.state is TieringState.TIERING and not table.names_epochs:
            return
        raise FencedTieringEpochError(
            f"{_named(table, table_id)} is not held by a service that names no epochs; ask for the "
            "table with LAKE_TIERING_HEARTBEAT, and name tiering_epoch and coordinator_epoch in "
            "reports"
        )

    def renew(self, hand_out: HandOut, timeout_ms: int) -> None:
        """Note a heartbeat of the service that holds a table."""
        table = self._held(hand_out)
        table.seen_ms, table.timeout_ms = self._now_ms(), timeout_ms

    def finish(
        self,
        hand_out: HandOut,
        *,
        by_force: bool = False,
        file_size: int | None = None,
        record_count: int | None = None,
    ) -> None:
        """End a round; with `by_force` there is more to tier, and the table is pending again."""
        table = self._held(hand_out)
        now = self._now_ms()
        table.tiered_wall_ms, table.tiered_ms = self._clock_ms(), now
        table.duration_ms = now - table.started_ms
        table.failed_in_a_row = 0
        table.file_size = table.file_size if file_size is None else file_size
        table.record_count = table.record_count if record_count is None else record_count
        self._running.pop(hand_out.table_id)
        if by_force:
            self._at(table, now)
        else:
            self._after_freshness(table)

    def fail(self, hand_out: HandOut) -> None:
        """End a round that failed; the table waits longer after each failure in a row."""
        table = self._held(hand_out)
        self._running.pop(hand_out.table_id)
        self._again(table, self._now_ms())

    # Time

    def advance(self) -> None:
        """Queue the tables that are due by now, and take tables back from silent services."""
        now = self._now_ms()
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
            scheduled = self._tables.get(table_id)
            if scheduled is not None and scheduled.ticket == ticket:
                scheduled.state, scheduled.due_ms = TieringState.PENDING, due
                self._pending[table_id] = None

    def _now_ms(self) -> int:
        return round(self._clock() * 1000)

    # Status

    def status(self) -> list[TieringStatus]:
        """Every table of the queue, by id."""
        self.advance()
        now = self._now_ms()
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
            tiered_time_ms=table.tiered_wall_ms,
            last_duration_ms=table.duration_ms,
            pending_ms=now - table.due_ms if pending else 0,
            failures=table.failures,
            file_size=table.file_size,
            record_count=table.record_count,
        )

    def _held(self, hand_out: HandOut) -> _Table:
        self.advance()
        table = self._tables.get(hand_out.table_id)
        is_held = table is not None and table.state is TieringState.TIERING
        if (
            table is not None
            and is_held
            and table.epoch == hand_out.tiering_epoch
            and hand_out.coordinator_epoch == self.coordinator_epoch
        ):
            return table
        now = f"its epoch is {table.epoch}" if table is not None and is_held else "nobody holds it"
        raise FencedTieringEpochError(
            f"{_named(table, hand_out.table_id)} is not held with tiering epoch "
            f"{hand_out.tiering_epoch} of coordinator epoch {hand_out.coordinator_epoch}: {now}, "
            f"the coordinator's is {self.coordinator_epoch}; drop the round and ask for a table"
        )

    def _again(self, table: _Table, now: int) -> None:
        """Schedule a table after a failed round."""
        table.failures += 1
        table.failed_in_a_row += 1
        self._at(table, now + backoff_ms(table.failed_in_a_row))

    def _after_freshness(self, table: _Table) -> None:
        self._at(table, table.tiered_ms + table.freshness_ms)
        table.by_freshness = True

    def _at(self, table: _Table, due_ms: int) -> None:
        """Schedule a table for a time; an earlier schedule of it is void."""
        table_id = table.info.table_id
        self._pending.pop(table_id, None)
        table.state, table.due_ms, table.by_freshness = TieringState.SCHEDULED, due_ms, False
        table.ticket = next(self._tickets)
        heapq.heappush(self._schedule, (due_ms, table.ticket, table_id))


def _named(table: _Table | None, table_id: int) -> str:
    return unknown_table(table_id) if table is None else f"table '{table.info.path}'"


def backoff_ms(failed_in_a_row: int) -> int:
    """How long a table waits after a number of failures in a row."""
    doublings = failed_in_a_row - 2
    return 0 if doublings < 0 else min(BACKOFF_MS_MIN << min(doublings, 16), BACKOFF_MS_MAX)


def check_timeout_ms(timeout_ms: int | None) -> int:
    """The timeout that a service declared, or the default; `ConfigError` if out of bounds."""
    if timeout_ms is None:
        return HEARTBEAT_TIMEOUT_MS
    if not HEARTBEAT_TIMEOUT_MS_MIN <= timeout_ms <= HEARTBEAT_TIMEOUT_MS_MAX:
        raise ConfigError(
            f"heartbeat_timeout_ms {timeout_ms} is not allowed; give "
            f"{HEARTBEAT_TIMEOUT_MS_MIN} to {HEARTBEAT_TIMEOUT_MS_MAX}"
        )
    return timeout_ms
