"""What a service shows and counts."""

from __future__ import annotations

import io
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console
from structlog.testing import capture_logs

from tests.tiering.support import Driver, append, create_table
from tests.tiering.test_round import rows
from zufluss.obs.metrics import TieringServiceMetrics
from zufluss.tiering.progress import LiveProgress, LogProgress, MetricsProgress
from zufluss.tiering.round import RoundEndedError, RoundLease, RoundResult, TableGoneError

OF_TABLE = {"database": "fluss", "table": "shown"}


@pytest.fixture
def round_of(driver: Driver) -> tuple[RoundLease, RoundResult]:
    path = create_table(driver.connection, "shown", bucket_count=1)
    append(driver.connection, path, rows(1234))
    lease = driver.receive()
    return lease, driver.tier(lease)


def test_the_live_table_has_a_line_per_table(round_of: tuple[RoundLease, RoundResult]) -> None:
    lease, result = round_of
    console = Console(file=io.StringIO(), width=120)
    progress = LiveProgress(console)
    progress.began(lease)
    assert line(console, progress)[1] == "tiering"
    progress.finished(lease, result, 0.5)
    name, state, lag, moved = line(console, progress)[:4]
    assert (name, state, lag, moved) == ("fluss.shown", "up to date", "0", "1,234")
    progress.ended(lease, ValueError("no space left"), 0.5)
    assert line(console, progress)[1] == "failed: no space left"
    progress.ended(lease, RoundEndedError("dropped"), 0.5)
    assert line(console, progress)[1] == "ended"


def line(console: Console, progress: LiveProgress) -> list[str]:
    with console.capture() as capture:
        console.print(progress.render())
    body = next(text for text in capture.get().splitlines() if "fluss.shown" in text)
    return [cell.strip() for cell in body.strip("│").split("│")]


def test_log_lines_say_what_was_moved_and_what_failed(
    round_of: tuple[RoundLease, RoundResult],
) -> None:
    lease, result = round_of
    progress = LogProgress()
    with capture_logs() as logs:
        progress.finished(lease, result, 0.25)
        progress.ended(lease, RoundEndedError("it was dropped"), 0.5)
        progress.ended(lease, ValueError("Traceback\nzufluss.errors.X: why\n\nat java"), 0.5)
    assert [entry["event"] for entry in logs] == ["round_finished", "round_ended", "round_failed"]
    finished: dict[str, Any] = dict(logs[0])
    assert (finished["table"], finished["records"], finished["ms"]) == ("fluss.shown", 1234, 250)
    assert logs[1]["why"] == "it was dropped"
    assert logs[2]["problem"] == "zufluss.errors.X: why"


def test_rounds_are_counted_by_outcome(round_of: tuple[RoundLease, RoundResult]) -> None:
    lease, result = round_of
    registry = CollectorRegistry()
    progress = MetricsProgress(TieringServiceMetrics(registry), LogProgress())
    progress.finished(lease, result, 0.25)
    progress.ended(lease, ValueError("no"), 0.5)
    progress.ended(lease, RoundEndedError("stopping"), 0.5)
    name = "zufluss_tiering_service_rounds_total"
    counts = {o: registry.get_sample_value(name, {"outcome": o}) for o in OUTCOMES}
    assert counts == {"committed": 1, "failed": 1, "cancelled": 1, "fenced": None}
    assert registry.get_sample_value("zufluss_tiering_service_rows_total", OF_TABLE) == 1234
    lease.end("lost", lost=True)
    progress.ended(lease, TableGoneError("dropped"), 0.5)
    assert registry.get_sample_value(name, {"outcome": "fenced"}) == 1
    assert registry.get_sample_value("zufluss_tiering_service_rows_total", OF_TABLE) is None


OUTCOMES = ("committed", "failed", "cancelled", "fenced")
