"""The output of a tiering service: a live table on a terminal, log lines elsewhere.

Rounds without new records change the live table, and are logged at debug level.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol, Self

import structlog
from rich.console import Console
from rich.live import Live
from rich.table import Table

from zufluss.clock import ClockMs, wall_ms
from zufluss.obs.metrics import TieringServiceMetrics
from zufluss.tiering.round import RoundEndedError, RoundLease, RoundResult, TableGoneError

_log = structlog.get_logger("zufluss.tiering")

MEGABYTE = 1e6


class Progress(Protocol):
    """Receives the events of every round, in the threads of the rounds."""

    def began(self, lease: RoundLease) -> None:
        """A table was received."""

    def finished(self, lease: RoundLease, result: RoundResult, seconds: float) -> None:
        """A round succeeded."""

    def ended(self, lease: RoundLease, problem: Exception, seconds: float) -> None:
        """A round failed, or ended early without a fault (`RoundEndedError`)."""


class LogProgress:
    """Log lines."""

    def began(self, lease: RoundLease) -> None:
        """A table was received."""
        table = lease.table
        _log.debug("round_began", table=str(table.path), epoch=table.tiering_epoch)

    def finished(self, lease: RoundLease, result: RoundResult, seconds: float) -> None:
        """A round succeeded."""
        table, milliseconds = str(lease.table.path), round(seconds * 1000)
        if result.recovered:
            _log.info("snapshot_recovered", table=table, snapshot=result.snapshot_id)
        if not result.committed:
            _log.debug("round_idle", table=table, ms=milliseconds)
            return
        _log.info(
            "round_finished",
            table=table,
            records=result.records,
            mb=round(result.size / MEGABYTE, 1),
            ms=milliseconds,
            remaining=result.remaining,
            snapshot=result.snapshot_id,
        )

    def ended(self, lease: RoundLease, problem: Exception, seconds: float) -> None:
        """A round failed, or ended early without a fault (`RoundEndedError`)."""
        if isinstance(problem, RoundEndedError):
            _log.info("round_ended", table=str(lease.table.path), why=problem.message)
        else:
            text = _first_lines(problem)
            _log.warning("round_failed", table=str(lease.table.path), problem=text)


class MetricsProgress:
    """Counts rounds for Prometheus, and passes the events on."""

    def __init__(
        self, metrics: TieringServiceMetrics, also: Progress, clock_ms: ClockMs = wall_ms
    ) -> None:
        self._clock_ms = clock_ms
        self._metrics = metrics
        self._also = also

    def began(self, lease: RoundLease) -> None:
        """A table was received."""
        self._also.began(lease)

    def finished(self, lease: RoundLease, result: RoundResult, seconds: float) -> None:
        """A round succeeded."""
        path = lease.table.path
        self._metrics.round_ended("committed" if result.committed else "empty", seconds)
        self._metrics.lag(path, result.remaining)
        if result.committed:
            self._metrics.committed(path, result.records, result.size, self._clock_ms())
        self._also.finished(lease, result, seconds)

    def ended(self, lease: RoundLease, problem: Exception, seconds: float) -> None:
        """A round failed, or ended early without a fault (`RoundEndedError`)."""
        outcome = "cancelled" if isinstance(problem, RoundEndedError) else "failed"
        self._metrics.round_ended("fenced" if lease.lost else outcome, seconds)
        if isinstance(problem, TableGoneError):
            self._metrics.forget(lease.table.path)
        self._also.ended(lease, problem, seconds)


@dataclass(slots=True)
class _Row:
    """One table on the screen."""

    state: str = "tiering"
    lag: int | None = None
    records: int = 0
    rate: float = 0.0
    committed_ms: int | None = None


class LiveProgress:
    """A table on the terminal that shows each table; use it as a context manager."""

    def __init__(self, console: Console, clock_ms: ClockMs = wall_ms) -> None:
        self._clock_ms = clock_ms
        self._rows: dict[str, _Row] = {}
        self._lock = threading.Lock()
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def began(self, lease: RoundLease) -> None:
        """A table was received."""
        self._row(lease).state = "tiering"

    def finished(self, lease: RoundLease, result: RoundResult, seconds: float) -> None:
        """A round succeeded."""
        row = self._row(lease)
        row.state = "more to do" if result.remaining else "up to date"
        row.lag = result.remaining
        if result.committed:
            row.records += result.records
            row.rate = result.size / MEGABYTE / max(seconds, 1e-9)
            row.committed_ms = self._clock_ms()

    def ended(self, lease: RoundLease, problem: Exception, seconds: float) -> None:
        """A round failed, or ended early without a fault (`RoundEndedError`)."""
        expected = isinstance(problem, RoundEndedError)
        self._row(lease).state = "ended" if expected else f"failed: {_first_lines(problem)[:60]}"

    def render(self) -> Table:
        """The table as it is now."""
        table = Table("table", "state", "lag", "rows", "MB/s", "last commit")
        with self._lock:
            rows = sorted(self._rows.items())
        for name, row in rows:
            lag = "" if row.lag is None else f"{row.lag:,}"
            at = "" if row.committed_ms is None else _time_of_day(row.committed_ms)
            table.add_row(name, row.state, lag, f"{row.records:,}", f"{row.rate:.1f}", at)
        return table

    def _row(self, lease: RoundLease) -> _Row:
        with self._lock:
            return self._rows.setdefault(str(lease.table.path), _Row())


def _time_of_day(wall_ms: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall_ms / 1000))


def _first_lines(problem: Exception) -> str:
    """The message of an error without the JVM's part; a task's error ends with its own line."""
    text = str(problem).strip()
    ours = [line.strip() for line in text.splitlines() if line.startswith("zufluss.")]
    return ours[-1] if ours else text.split("\n\nJVM stacktrace:")[0][:2000]
