"""Housekeeping between rounds: it runs, it is reported, and no row is lost by it."""

from __future__ import annotations

import time
from itertools import count

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from tests.tiering.support import Driver, InlineRunner, append, create_table, lake_rows
from tests.tiering.test_round import KEYED, Crash, crash_at, rows
from tests.tiering.test_service import service, tiered
from tests.waiting import eventually
from zufluss.testing.server import DevServer
from zufluss.tiering.upkeep import Upkeep


def events(logs: list[EventDict]) -> set[str]:
    return {entry["event"] for entry in logs}


@pytest.mark.parametrize(
    ("property", "event"),
    [("auto-compaction", "compacted"), ("auto-expire-snapshot", "snapshots_expired")],
)
def test_upkeep_keeps_every_row(lake: DevServer, driver: Driver, property: str, event: str) -> None:
    name = f"upkeep_{property.replace('-', '_')}"
    properties = {f"table.datalake.{property}": "true"}
    path = create_table(driver.connection, name, KEYED, bucket_count=1, properties=properties)
    written = 0
    with capture_logs() as logs, service(lake, InlineRunner(), snapshot_age="1s"):
        while event not in events(logs):
            with driver.connection.table(path).upsert() as writer:
                writer.write(rows(5, written))
            written += 1
            eventually(lambda: tiered(driver.connection, path))
            assert "upkeep_failed" not in events(logs), logs
    found = lake_rows(driver.admin.table_info(path))
    assert sorted(found["id"].to_pylist()) == list(range(written + 4))
    known = driver.admin.lake_snapshot(path)
    assert known is not None
    assert driver.admin.lake_snapshot(path, readable=True) == known
    assert not driver.round().recovered, "the cluster knows the newest snapshot"


def test_files_of_a_crashed_round_are_swept(lake: DevServer, driver: Driver) -> None:
    path = create_table(driver.connection, "swept", bucket_count=1)
    append(driver.connection, path, rows(5))
    with pytest.raises(Crash):
        driver.round(crash_at("prepare"))
    orphans = list((lake.data_dir / "lake").rglob("*swept*/**/*.parquet"))
    assert len(orphans) == 1
    timing = {"orphan_age": "1s", "sweep_interval": "1s"}
    with capture_logs() as logs, service(lake, InlineRunner(), **timing):
        eventually(lambda: "orphans_removed" in events(logs))
    assert not orphans[0].exists()
    assert sorted(lake_rows(driver.admin.table_info(path))["id"].to_pylist()) == list(range(5))


def test_a_clock_400_days_ahead_expires_no_snapshot_and_sweeps_no_file(
    lake: DevServer, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    expires = {"table.datalake.auto-expire-snapshot": "true"}
    path = create_table(driver.connection, "jumped", bucket_count=1, properties=expires)
    append(driver.connection, path, rows(5))
    with pytest.raises(Crash):
        driver.round(crash_at("prepare"))
    files = set((lake.data_dir / "lake").rglob("*jumped*/**/*.parquet"))
    assert len(files) == 1
    upkeep = Upkeep(driver.cluster, clock=count(step=10**9).__next__)  # a sweep is always due
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 400 * 86_400 * 10**9)
    with capture_logs() as logs:
        for number in range(3):
            append(driver.connection, path, rows(5, 5 + 5 * number))
            lease = driver.receive()
            upkeep.run(lease, driver.tier(lease))
            driver.finish(lease)
    assert "clock_jumped" in events(logs)
    assert not events(logs) & {"upkeep_failed", "snapshots_expired", "orphans_removed"}
    assert files <= set((lake.data_dir / "lake").rglob("*jumped*/**/*.parquet"))
