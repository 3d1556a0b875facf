"""Metrics: declared once, documented as declared, shown as they are."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tests.paths import DOCS
from tests.waiting import WAIT_SECONDS
from zufluss.coordinator.lake.queue import TieringState, TieringStatus
from zufluss.errors import ConfigError
from zufluss.model.table import TablePath
from zufluss.obs import metrics
from zufluss.obs.endpoint import HttpEndpoint
from zufluss.obs.metrics import (
    METRICS,
    Metric,
    MetricKind,
    SampleCollector,
    TieringServiceMetrics,
    new_registry,
)
from zufluss.obs.server import tiering_samples

from .endpoints import made

PAGE = DOCS / "metrics.md"
ORDERS = TablePath("shop", "orders")
CLICKS = TablePath("shop", "clicks")


def scrape(endpoint: HttpEndpoint) -> dict[tuple[str, tuple[str, ...]], float]:
    """Every series as it is served: name and label values."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{endpoint.port}/metrics", timeout=WAIT_SECONDS
    ) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def registry() -> CollectorRegistry:
    return new_registry()


@pytest.fixture
def endpoint(registry: CollectorRegistry) -> Iterator[HttpEndpoint]:
    served = made(registry)
    yield served
    served.close()


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_every_metric_is_named_by_the_rules_and_says_what_it_means(metric: Metric) -> None:
    assert re.fullmatch(r"zufluss_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert not metric.name.endswith(("_ms", "_kb"))
    assert metric.help.endswith(".")


def test_the_page_shows_every_metric_as_it_is_declared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PAGE.read_text() == metrics.render(), "python -m zufluss.obs.metrics docs/metrics.md"
    assert all(f"| `{name}` |" in PAGE.read_text() for name in METRICS)
    assert metrics.main(["--check", str(PAGE)]) == 0
    assert metrics.main(["--check", str(tmp_path / "none.md")]) == 1
    assert "stale" in capsys.readouterr().err


def test_a_tiering_service_shows_its_rounds(
    registry: CollectorRegistry, endpoint: HttpEndpoint
) -> None:
    service = TieringServiceMetrics(registry)
    service.round_ended("committed", 1.5)
    service.round_ended("committed", 2.0)
    service.round_ended("failed", 0.5)
    service.committed(ORDERS, rows=100, size=2048, at_ms=5_000)
    service.committed(ORDERS, rows=50, size=1024, at_ms=7_500)
    service.lag(ORDERS, 12)
    service.lag(CLICKS, 3)
    shown = scrape(endpoint)
    prefix = "zufluss_tiering_service"
    assert shown[f"{prefix}_rounds_total", ("committed",)] == 2
    assert shown[f"{prefix}_rounds_total", ("failed",)] == 1
    assert shown[f"{prefix}_rows_total", ORDERS] == 150
    assert shown[f"{prefix}_bytes_total", ORDERS] == 3072
    assert shown[f"{prefix}_lag_rows", ORDERS] == 12
    assert shown[f"{prefix}_round_seconds_sum", ()] == 4.0
    assert shown[f"{prefix}_last_commit_timestamp_seconds", ORDERS] == 7.5
    service.forget(ORDERS)
    service.forget(ORDERS)
    shown = scrape(endpoint)
    assert not any(labels == ORDERS for _, labels in shown)
    assert shown[f"{prefix}_lag_rows", CLICKS] == 3


def status(path: TablePath, state: TieringState, **values: int | None) -> TieringStatus:
    numbers: dict[str, int | None] = {
        "table_id": 1, "tiering_epoch": 3, "freshness_ms": 60_000, "tier_lag_ms": 90_500,
        "tiered_time_ms": 0, "last_duration_ms": None, "pending_ms": 0, "failures": 0,
        "file_size": None, "record_count": None,
    }  # fmt: skip
    return TieringStatus(path=path, state=state, **{**numbers, **values})  # type: ignore[arg-type]


def test_the_queue_of_the_coordinator_is_shown_table_by_table(
    registry: CollectorRegistry, endpoint: HttpEndpoint
) -> None:
    tables = [
        status(ORDERS, TieringState.PENDING, pending_ms=2_000, failures=4),
        status(CLICKS, TieringState.TIERING, last_duration_ms=1_250, file_size=77, record_count=9),
    ]
    registry.register(SampleCollector(tiering_samples(lambda: tables)))  # type: ignore[arg-type]
    shown = {key: value for key, value in scrape(endpoint).items() if "tiering" in key[0]}
    assert shown == {
        ("zufluss_tiering_pending_tables", ()): 1,
        ("zufluss_tiering_running_tables", ()): 1,
        ("zufluss_tiering_lag_seconds", ORDERS): 90.5,
        ("zufluss_tiering_lag_seconds", CLICKS): 90.5,
        ("zufluss_tiering_last_duration_seconds", CLICKS): 1.25,
        ("zufluss_tiering_pending_seconds", ORDERS): 2,
        ("zufluss_tiering_pending_seconds", CLICKS): 0,
        ("zufluss_tiering_failures_total", ORDERS): 4,
        ("zufluss_tiering_failures_total", CLICKS): 0,
        ("zufluss_tiering_file_size_bytes", CLICKS): 77,
        ("zufluss_tiering_records", CLICKS): 9,
    }


def test_a_process_shows_itself(endpoint: HttpEndpoint) -> None:
    assert scrape(endpoint)["process_resident_memory_bytes", ()] > 0


def test_a_port_that_is_taken_is_named_with_the_way_out(
    registry: CollectorRegistry, endpoint: HttpEndpoint
) -> None:
    with pytest.raises(ConfigError, match=rf"metrics\.port.*{endpoint.port}.*another port"):
        made(registry, endpoint.port)


def test_closing_frees_port_and_thread(registry: CollectorRegistry) -> None:
    before = threading.active_count()
    endpoint = made(registry)
    scrape(endpoint)
    endpoint.close()
    assert threading.active_count() <= before + 1, "the answer's own thread may still end"
    with pytest.raises(urllib.error.URLError):
        scrape(endpoint)
