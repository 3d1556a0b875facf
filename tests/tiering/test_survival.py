"""The service survives errors in its threads, and a table never waits for a thread that ended.

A worker or the heartbeat that dies leaves a process that looks alive: leases are renewed for ever
for tables that nobody tiers, or no table is ever asked for again.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog

import zufluss
from tests.tiering.support import Driver, InlineRunner, append, create_table, offsets_in_lake
from tests.tiering.test_round import rows
from tests.tiering.test_service import tiered
from tests.waiting import eventually
from zufluss.client.connection import connect_async
from zufluss.client.read import union_plan
from zufluss.errors import NetworkError
from zufluss.lake.base import catalog_properties
from zufluss.testing.server import DevServer
from zufluss.tiering import enumerator
from zufluss.tiering import options as o
from zufluss.tiering.options import TieringOptions
from zufluss.tiering.progress import LogProgress
from zufluss.tiering.round import RoundLease
from zufluss.tiering.service import TieringService


class BrokenOnce(LogProgress):
    """Its terminal goes away under it, as a pipe that is closed at the other end does."""

    def __init__(self) -> None:
        self.told = 0

    def began(self, lease: RoundLease) -> None:
        self.told += 1
        if self.told == 1:
            raise BrokenPipeError("nobody reads this any more")


class BrokenLog:
    """A logger whose stream is closed."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __getattr__(self, _level: str) -> object:
        self.asked.set()
        raise ValueError("I/O operation on closed file")


def options(server: DevServer) -> TieringOptions:
    pairs = {"fluss.bootstrap.servers": server.bootstrap}
    pairs |= {"lake.tiering.poll-interval": "20ms", "lake.tiering.heartbeat-interval": "100ms"}
    return TieringOptions.of(pairs | {"lake.tiering.parallel-tables": "1"})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_outlives_whatever_a_round_raises(lake: DevServer, driver: Driver) -> None:
    path = create_table(driver.connection, "outlived", bucket_count=1)
    append(driver.connection, path, rows(5))
    with zufluss.connect(lake.bootstrap) as connection:
        progress = BrokenOnce()
        made = TieringService(connection, InlineRunner(), options(lake), progress=progress)
        with made:
            eventually(lambda: tiered(driver.connection, path))
    assert progress.told > 1
    info = driver.admin.table_info(path)
    assert offsets_in_lake(info) == [(0, offset) for offset in range(5)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_heartbeats_go_on_when_nothing_can_be_logged(
    lake: DevServer, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = BrokenLog()
    monkeypatch.setattr(enumerator, "_log", log)
    path = create_table(driver.connection, "unlogged", bucket_count=1)
    append(driver.connection, path, rows(5))
    with zufluss.connect(lake.bootstrap) as connection:
        made = TieringService(connection, InlineRunner(), options(lake))
        asked = made._cluster.tiering.heartbeat
        lost = [NetworkError("the line is cut")]

        def heartbeat(**more: object) -> object:
            if lost:
                raise lost.pop()
            return asked(**more)  # type: ignore[arg-type]

        monkeypatch.setattr(made._cluster.tiering, "heartbeat", heartbeat)
        with made:
            eventually(lambda: tiered(driver.connection, path))
    assert log.asked.is_set()


def test_a_partition_that_comes_while_a_read_is_pinned_is_read_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiered between two questions of the plan; who follows the log must not begin it anew."""
    schema, keys = "id INT, day STRING", ["day"]
    path = create_table(driver.connection, "pinned", schema, partition_keys=keys, bucket_count=1)
    driver.admin.create_partition(path, {"day": "mon"})
    append(driver.connection, path, {"id": [1, 2], "day": ["mon", "mon"]})
    driver.round()

    def another_day() -> None:
        driver.admin.create_partition(path, {"day": "tue"})
        append(driver.connection, path, {"id": [3, 4], "day": ["tue", "tue"]})
        driver.round()

    snapshots = union_plan._snapshots

    async def late_snapshots(admin: Any, asked: Any) -> Any:
        monkeypatch.undo()
        await asyncio.to_thread(another_day)
        return await snapshots(admin, asked)

    monkeypatch.setattr(union_plan, "_snapshots", late_snapshots)

    async def pin() -> union_plan.UnionPlan:
        connection = await connect_async(driver.options[o.BOOTSTRAP_SERVERS])
        try:
            return await union_plan.plan_union(connection, path)
        finally:
            await connection.close()

    plan = asyncio.run(pin())
    assert plan.lake is not None
    assert len(plan.lake.offsets) == 2
    assert {part.bucket: part.start for part in plan.tail} == plan.lake.offsets


def test_a_table_at_rest_can_be_read_after_others_expired_its_snapshot(driver: Driver) -> None:
    """An engine that compacts at night and expires what is old, and nothing new to tier."""
    path = create_table(driver.connection, "at_rest", bucket_count=1)
    append(driver.connection, path, rows(3))
    driver.round()
    info = driver.admin.table_info(path)
    catalog = load_catalog("zufluss", **catalog_properties(info, "iceberg"))
    lake = catalog.load_table((info.path.database, info.path.table))
    lake.append(lake.scan().to_arrow().slice(0, 0))
    ours, _theirs = (snapshot.snapshot_id for snapshot in lake.refresh().metadata.snapshots)
    lake.maintenance.expire_snapshots().by_id(ours).commit()
    assert driver.round().committed
    found = driver.connection.table(path).scan(source="union").to_arrow()
    assert found.num_rows == 3
    assert offsets_in_lake(info) == [(0, offset) for offset in range(3)]
    assert not driver.round().committed
