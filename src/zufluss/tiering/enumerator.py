"""Heartbeats of the service: it receives tables, reports rounds, and learns of lost leases.

One thread talks to the coordinator, independent of the rounds. A heartbeat names the tables whose
rounds are running, those that finished or failed since the last one, and whether there is room for
another table. The answer may have a new table, and names the tables whose lease is lost: their
rounds are told to end.

While the coordinator cannot be reached, rounds go on and their reports wait. After the heartbeat
timeout the coordinator gives the tables to another service and refuses our commits, so correctness
does not depend on speed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import structlog

from zufluss.client.tiering import Heartbeat, TieringClient, TieringLease, TieringStats
from zufluss.errors import ZuflussError
from zufluss.tiering import options as o
from zufluss.tiering.round import RoundLease

_log = structlog.get_logger("zufluss.tiering")

PAUSE_SECONDS_MAX: Final = 5.0
"""The longest pause between heartbeats while the coordinator does not answer."""
CLOSE_SECONDS: Final = 10.0
"""How long the last heartbeat may take. Without it the leases end by their timeout."""


@dataclass(slots=True)
class _Reports:
    """The outcomes of rounds that the next heartbeat reports."""

    finished: dict[TieringLease, TieringStats] = field(default_factory=dict)
    more: set[int] = field(default_factory=set)
    failed: list[TieringLease] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.finished or self.failed)

    def before(self, later: _Reports) -> _Reports:
        """These reports and later ones, joined."""
        finished = self.finished | later.finished
        return _Reports(finished, self.more | later.more, self.failed + later.failed)


class Enumerator:
    """Asks for tables and passes them to `on_table`; `finish` and `fail` report their rounds.

    `on_table` and `on_lost` are called in the enumerator's thread and must not wait long.
    """

    def __init__(
        self,
        tiering: TieringClient,
        options: o.TieringOptions,
        on_table: Callable[[RoundLease], None],
        on_lost: Callable[[RoundLease], None],
    ) -> None:
        self._tiering = tiering
        self._slots: int = options[o.PARALLEL_TABLES]
        self._poll_seconds = options[o.POLL_INTERVAL] / 1000
        self._beat_seconds = options[o.HEARTBEAT_INTERVAL] / 1000
        self._timeout_ms: int = options[o.HEARTBEAT_TIMEOUT]
        self._on_table = on_table
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._running: dict[TieringLease, RoundLease] = {}
        self._reports = _Reports()
        self._asking = True
        self._closed = False
        self._away = 0
        self._answered = False
        self._thread = threading.Thread(target=self._run, name="tiering-heartbeat", daemon=True)

    # -- what the service calls ----------------------------------------------------------------

    def start(self) -> None:
        """Start to ask for tables."""
        self._thread.start()

    def finish(self, lease: RoundLease, stats: TieringStats, *, more: bool = False) -> None:
        """Report a successful round; with `more` the table needs another round at once."""
        with self._lock:
            if self._running.pop(lease.table, None) is not None and not lease.lost:
                self._reports.finished[lease.table] = stats
                if more:
                    self._reports.more.add(lease.table.table_id)
        self._wake.set()

    def fail(self, lease: RoundLease) -> None:
        """Report a round without a commit; the coordinator decides when to try again."""
        with self._lock:
            if self._running.pop(lease.table, None) is not None and not lease.lost:
                self._reports.failed.append(lease.table)
        self._wake.set()

    def running(self) -> list[RoundLease]:
        """The leases of running rounds."""
        with self._lock:
            return list(self._running.values())

    @property
    def alive(self) -> bool:
        """Whether the thread of the heartbeats runs."""
        return self._thread.is_alive()

    def problems(self) -> list[str]:
        """Why the service cannot get tables at present; for any thread."""
        if not self._asking:
            return ["the service stops"]
        if self._away:
            return [f"the coordinator did not answer the last {self._away} heartbeats"]
        return [] if self._answered else ["the coordinator has not answered yet"]

    def drain(self) -> None:
        """Ask for no more tables; the leases of running rounds are still renewed."""
        self._asking = False
        self._wake.set()

    def close(self) -> None:
        """Report all outcomes, running rounds as failed, and stop the thread."""
        with self._lock:
            self._reports.failed += self._held()
            self._running.clear()
        self._asking = False
        self._closed = True
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            if not self._lasting_beat():
                self._wake.wait(self._pause())
        self._lasting_beat()

    def _lasting_beat(self) -> bool:
        """Send a heartbeat. Errors are logged and do not stop the thread."""
        try:
            return self._beat()
        except Exception as problem:
            _say("error", "heartbeat_failed", problem=str(problem))
            return False

    def _pause(self) -> float:
        if self._away:
            return min(self._poll_seconds * 2.0 ** min(self._away, 16), PAUSE_SECONDS_MAX)
        with self._lock:
            room = self._asking and len(self._running) < self._slots
        return self._poll_seconds if room else self._beat_seconds

    def _beat(self) -> bool:
        """Send a heartbeat; True if another one should follow at once."""
        with self._lock:
            lost = [lease for lease in self._running.values() if lease.lost]
            running = self._held()
            reports, self._reports = self._reports, _Reports()
            room = self._asking and len(self._running) < self._slots
        for lease in lost:
            self._on_lost(lease)  # repeated, since the job may not have begun the last time
        if not (running or reports or room):
            return False
        try:
            answer = self._tiering.heartbeat(
                running=running,
                finished=reports.finished,
                force_finished=reports.more,
                failed=reports.failed,
                request_table=room,
                timeout_ms=self._timeout_ms,
            )
        except Exception as problem:  # of any kind: this thread must go on
            self._coordinator_away(reports, problem)
            return False
        return self._take(answer)

    def _held(self) -> list[TieringLease]:
        return [table for table, lease in self._running.items() if not lease.lost]

    def _coordinator_away(self, reports: _Reports, problem: Exception) -> None:
        """Keep the reports for the next heartbeat."""
        self._away += 1
        if self._away == 1:
            _say("warning", "coordinator_away", problem=str(problem))
        with self._lock:
            self._reports = reports.before(self._reports)

    def _take(self, answer: Heartbeat) -> bool:
        if self._away:
            _say("info", "coordinator_back", heartbeats_missed=self._away)
        self._away = 0
        self._answered = True
        for table_id, problem in answer.refused.items():
            self._lose(table_id, problem)
        if answer.table is None:
            return False
        lease = RoundLease(answer.table)
        with self._lock:
            self._running[answer.table] = lease
            room = len(self._running) < self._slots
        self._on_table(lease)
        return room

    def _lose(self, table_id: int, problem: ZuflussError) -> None:
        """End the rounds of a table whose lease is lost."""
        with self._lock:
            leases = [lease for table, lease in self._running.items() if table.table_id == table_id]
        for lease in leases:
            if not lease.lost:
                lease.end(f"the lease was lost ({problem})", lost=True)
                self._on_lost(lease)


def _say(level: str, event: str, **about: object) -> None:
    """Log an event; a log that cannot be written must not stop the heartbeat."""
    with suppress(Exception):
        getattr(_log, level)(event, **about)
