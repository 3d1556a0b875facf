"""A real process, killed with SIGKILL while it changes the catalog."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinator.support import Cluster, table_json
from tests.meta.zookeepers import opener
from tests.paths import ROOT
from zufluss.model.table import TablePath
from zufluss.testing.zookeeper import ZooKeeper

RUNS = 6


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    with ZooKeeper(tmp_path_factory.mktemp("zookeeper")) as zookeeper:
        yield zookeeper


@pytest.fixture(params=["directory", "zookeeper"])
def address(request: pytest.FixtureRequest) -> str | None:
    """Where the metadata are: None for the directory."""
    if request.param == "directory":
        return None
    zookeeper: ZooKeeper = request.getfixturevalue("zookeeper")
    return zookeeper.address


def creator(directory: Path, run: int, address: str | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.coordinator.creator", str(directory), str(run)]
    command += [] if address is None else [address]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def cluster_at(directory: Path, address: str | None) -> Cluster:
    cluster = Cluster(directory)
    if address is not None:
        cluster.open_store = opener(address)
    return cluster


def killed(directory: Path, run: int, lines: int, address: str | None) -> list[list[str]]:
    """What the process acknowledged until it was killed."""
    with creator(directory, run, address) as child:
        assert child.stdout is not None
        seen = "".join(child.stdout.readline() for _ in range(lines))
        child.kill()
        seen += child.stdout.read()
    return [line.split() for line in seen.split("\n")[:-1]]


async def test_nothing_acknowledged_is_lost_and_no_id_is_given_twice(
    tmp_path: Path, address: str | None
) -> None:
    """Acknowledged creates and drops hold; the assigned buckets are those of the tables."""
    chance = random.Random(7)
    said: dict[str, list[str]] = {"table": [], "dropping": [], "gone": [], "writer": [], "id": []}
    ids: list[int] = []
    for run in range(RUNS):
        for kind, word, *rest in killed(tmp_path, run, chance.randint(1, 60), address):
            said[kind].append(word)
            ids += map(int, rest)
    cluster = await cluster_at(tmp_path, address).start()
    found = set(cluster.image.table_names("fluss"))
    assert set(cluster.tablet.buckets) == {bucket for _, bucket, _ in cluster.image.buckets()}
    await cluster.stop()
    assert set(said["table"]) - set(said["dropping"]) <= found
    assert not set(said["gone"]) & found
    assert len(set(ids)) == len(ids) == len(said["table"])
    for kind in ("writer", "id"):
        assert len(set(said[kind])) == len(said[kind])


async def test_a_frozen_coordinator_changes_nothing_when_it_wakes_up(
    tmp_path: Path, zookeeper: ZooKeeper
) -> None:
    """In ZooKeeper another one can be there meanwhile; it alone has the store (A6)."""
    with creator(tmp_path, 0, zookeeper.address) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for _ in range(10):
            child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        later = await cluster_at(tmp_path, zookeeper.address).start()
        await later.catalog.create_table(TablePath("fluss", "later"), table_json())
        before = await later.store.tree("/")
        child.send_signal(signal.SIGCONT)
        _, errors = await asyncio.to_thread(child.communicate)
    assert child.returncode == 1
    assert "NOT_COORDINATOR_LEADER_EXCEPTION" in errors
    assert await later.store.tree("/") == before
    await later.stop()
