"""Locations that belong to another cluster, or that are not mounted, are left alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import zufluss
from tests.coordinator.remotes import (
    KEYED,
    files_below,
    keyed_json,
    locations,
    segment,
    snapshot,
    storage,
)
from tests.coordinator.support import DAY_MS, Cluster
from tests.servers import WarmServer
from zufluss.coordinator import records
from zufluss.errors import ConfigError
from zufluss.model.table import TableBucket
from zufluss.remote.layout import CLUSTER
from zufluss.remote.locations import AlterOp, Health
from zufluss.testing.s3 import S3Server
from zufluss.wire.api import ApiKey

DIRS = "remote.data.dirs"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as running:
        running.bucket("shared")
        yield running


@pytest.fixture(params=["file", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The configuration of one location, of each kind."""
    if request.param == "file":
        return {DIRS: f"file://{tmp_path}/root"}
    server = request.getfixturevalue("s3")
    return {DIRS: f"s3://shared/{tmp_path.name}", **server.properties}


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with two locations, and a primary-key table with files in both."""
    cluster = await started(tmp_path / "meta", locations(tmp_path))
    await cluster.catalog.create_table(KEYED, keyed_json())
    for location_id in (1, 2):
        await fill(cluster, location_id)
    yield cluster
    await cluster.stop()


async def started(directory: Path, conf: dict[str, str]) -> Cluster:
    cluster = await Cluster(directory, conf).start()
    cluster.clock.now_ms = int(time.time() * 1000) + 2 * DAY_MS
    return cluster


async def fill(cluster: Cluster, location_id: int) -> None:
    bucket = TableBucket(cluster.image.table(KEYED).info.table_id, None, 0)
    await segment(cluster, bucket, 0, 10, location_id)
    await snapshot(cluster, bucket, location_id, location_id=location_id)


async def drop(cluster: Cluster) -> None:
    await cluster.catalog.drop_table(KEYED)
    await cluster.coordinator.remote.cleaner.drops.settle()


async def cleaned_again(cluster: Cluster) -> None:
    drops = cluster.coordinator.remote.cleaner.drops
    drops.hurry()
    await drops.settle()


async def notes(cluster: Cluster) -> list[str]:
    return [note.path for note in await cluster.store.tree(records.DROPS_PATH)]


async def alter(cluster: Cluster, op: AlterOp, location_id: int | None = None, **more: str) -> None:
    chosen: dict[str, Any] = {} if location_id is None else {"location_id": location_id}
    await cluster.call(ApiKey.ALTER_LOCATION, op=op, **chosen, **more)


def away(directory: Path) -> Path:
    """Move a directory away; returns its new path."""
    return directory.rename(directory.with_suffix(".away"))


async def test_each_location_is_marked_also_the_one_beside_the_data(
    cluster: Cluster, tmp_path: Path
) -> None:
    await alter(cluster, AlterOp.ADD, uri=str(tmp_path / "l3"))
    mine = (tmp_path / "l1" / CLUSTER).read_bytes()
    assert cluster.catalog.cluster_id.encode() in mine
    assert all((tmp_path / name / CLUSTER).read_bytes() == mine for name in ("l2", "l3"))
    other = await Cluster(tmp_path / "other" / "meta").start()
    assert (tmp_path / "other" / "data" / "remote" / CLUSTER).exists()
    await other.stop()


async def test_a_second_cluster_on_the_same_root_touches_nothing(
    tmp_path: Path, root: dict[str, str]
) -> None:
    first = await started(tmp_path / "one" / "meta", root)
    await first.catalog.create_table(KEYED, keyed_json())
    await fill(first, 1)
    pages = storage(first).objects(1).list("")
    before = {each.path async for page in pages for each in page}
    second = await started(tmp_path / "two" / "meta", root)
    await second.catalog.create_table(KEYED, keyed_json())
    await second.coordinator.remote.sweep.sweep()
    assert second.coordinator.remote.sweep.counts.deleted_files == 0
    await drop(second)
    await storage(second).probe_due()
    assert len(await notes(second)) == 1
    [report] = storage(second).reports()
    assert report.health is Health.DOWN
    mine, other = first.catalog.cluster_id, second.catalog.cluster_id
    assert f"belongs to cluster {mine}, this is cluster {other}" in (report.last_error or "")
    pages = storage(first).objects(1).list("")
    assert {each.path async for page in pages for each in page} == before
    await second.stop()
    await first.stop()


async def test_the_location_of_another_cluster_cannot_be_added(
    cluster: Cluster, tmp_path: Path, root: dict[str, str]
) -> None:
    other = await Cluster(tmp_path / "other" / "meta", root).start()
    cluster.conf = cluster.conf.with_overrides({k: v for k, v in root.items() if k != DIRS})
    again = await cluster.restart()
    before = again.coordinator.locations.locations
    whose = f"cluster {other.catalog.cluster_id}, this is cluster {again.catalog.cluster_id}"
    with pytest.raises(ConfigError, match=f"location 3 .*{whose}; use an address"):
        await alter(again, AlterOp.ADD, uri=root[DIRS])
    change = {"config_key": DIRS, "config_value": root[DIRS], "op_type": 2}
    with pytest.raises(ConfigError, match=whose):
        await again.call(ApiKey.ALTER_CLUSTER_CONFIGS, alter_configs=[change])
    assert again.coordinator.locations.locations == before
    assert all(report.health is Health.ACTIVE for report in storage(again).reports())
    await again.stop()
    await other.stop()


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "gone"])
@pytest.mark.parametrize("restarted", [True, False], ids=["restarted", "running"])
async def test_a_drop_is_cleaned_where_a_root_is_not_mounted_once_it_is_back(
    cluster: Cluster, tmp_path: Path, empty: bool, restarted: bool
) -> None:
    root = tmp_path / "l2"
    before = {p for p in files_below(away(root)) if p.startswith(("log/", "kv/"))}
    if empty:
        root.mkdir()
    if restarted:
        cluster = await cluster.restart()
    await drop(cluster)
    assert len(await notes(cluster)) == 1
    assert not {p for p in files_below(tmp_path) if p.startswith("l1/")}
    assert not root.exists() or list(root.iterdir()) == []
    shutil.rmtree(root, ignore_errors=True)
    root.with_suffix(".away").rename(root)
    assert before <= files_below(root)
    await cleaned_again(cluster)
    assert await notes(cluster) == []
    assert files_below(root) == set()
    if restarted:
        await cluster.stop()


async def test_the_sweep_deletes_nothing_without_a_marker(cluster: Cluster, tmp_path: Path) -> None:
    held = (tmp_path / "l2" / CLUSTER).rename(tmp_path / "held")
    before = {p for p in files_below(tmp_path) if p.startswith("l2/")}
    sweep = cluster.coordinator.remote.sweep
    await sweep.sweep()
    left = {p for p in files_below(tmp_path) if p.startswith(("l1/", "l2/"))}
    assert left == before
    assert sweep.counts.failures == 2
    held.rename(tmp_path / "l2" / CLUSTER)
    await sweep.sweep()
    assert not {p for p in files_below(tmp_path) if p.startswith(("l1/", "l2/"))}


async def test_a_location_that_could_not_be_marked_at_the_start_is_marked_by_a_probe(
    tmp_path: Path,
) -> None:
    (tmp_path / "l2").write_text("no directory")
    cluster = await started(tmp_path / "meta", locations(tmp_path))
    marks = [x.marked for x in cluster.coordinator.locations.locations.locations]
    assert marks == [True, False]
    (tmp_path / "l2").unlink()
    await storage(cluster).probe(2)
    assert (tmp_path / "l2" / CLUSTER).exists()
    again = await cluster.restart()
    assert all(x.marked for x in again.coordinator.locations.locations.locations)
    await again.stop()


async def test_a_location_moves_only_to_where_its_marker_was_copied(
    cluster: Cluster, tmp_path: Path
) -> None:
    await alter(cluster, AlterOp.DRAIN, 2)
    (tmp_path / "new").mkdir()
    with pytest.raises(ConfigError, match=r"location 2 .*/new\) cannot be used, .* is missing"):
        await alter(cluster, AlterOp.MOVE, 2, uri=str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="does not exist"):
        await alter(cluster, AlterOp.MOVE, 2, uri=str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
    shutil.copytree(tmp_path / "l2", tmp_path / "new", dirs_exist_ok=True)
    await alter(cluster, AlterOp.MOVE, 2, uri=str(tmp_path / "new"))
    assert storage(cluster).uri(2) == f"file://{tmp_path}/new"


async def test_a_location_that_was_emptied_is_marked_anew_when_it_was_retired_between(
    tmp_path: Path,
) -> None:
    cluster = await started(tmp_path / "meta", locations(tmp_path))
    (tmp_path / "l2" / CLUSTER).unlink()
    again = await cluster.restart()
    [_, report] = storage(again).reports()
    assert report.health is Health.DOWN
    await alter(again, AlterOp.DRAIN, 2)
    await alter(again, AlterOp.RETIRE, 2)
    await alter(again, AlterOp.ACTIVATE, 2)
    assert (tmp_path / "l2" / CLUSTER).exists()
    await again.stop()


def test_the_second_of_two_servers_on_one_root_shows_whose_it_is(
    tmp_path: Path, root: dict[str, str]
) -> None:
    with WarmServer(tmp_path / "one", root) as first, WarmServer(tmp_path / "two", root) as second:
        seen = []
        for server in (first, second):
            with zufluss.connect(server.bootstrap) as connection:
                [location] = connection.admin.locations().locations
                seen.append((location.health.name, location.servers[0].last_error))
    assert seen[0] == ("ACTIVE", None)
    assert seen[1][0] == "DOWN"
    assert "belongs to cluster" in (seen[1][1] or "")
