"""The ZooKeeper of the test kit: members stop, die, freeze and come back with their data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from tests.waiting import eventually
from zufluss.testing.zookeeper import ZooKeeper


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    with ZooKeeper(tmp_path_factory.mktemp("ensemble"), members=3) as zookeeper:
        yield zookeeper


@pytest.fixture
def client(ensemble: ZooKeeper) -> Iterator[KazooClient]:
    client = _client(ensemble.address)
    yield client
    client.stop()
    client.close()


def _client(address: str) -> KazooClient:
    client = KazooClient(address, timeout=6, connection_retry={"max_tries": -1, "max_delay": 0.5})
    client.start(60)
    return client


def test_an_ensemble_serves_without_any_one_member(
    ensemble: ZooKeeper, client: KazooClient
) -> None:
    """Two of three are a majority, whoever they are; the third comes back with what it missed."""
    for number, member in enumerate(ensemble.members):
        member.kill()
        client.retry(client.ensure_path, f"/without-{number}")
        assert member.start().running
    lone = _client(ensemble.members[0].address)
    try:
        lone.sync("/")
        assert {f"without-{i}" for i in range(3)} <= set(lone.get_children("/"))
    finally:
        lone.stop()
        lone.close()


def test_another_member_leads_when_the_leader_is_killed(
    ensemble: ZooKeeper, client: KazooClient
) -> None:
    before = ensemble.leader
    before.kill()
    eventually(lambda: any(member.leads for member in ensemble.members), "a new leader")
    assert ensemble.leader is not before
    before.start()


def test_a_frozen_member_goes_on(ensemble: ZooKeeper, client: KazooClient) -> None:
    member = next(member for member in ensemble.members if not member.leads)
    member.pause()
    client.retry(client.ensure_path, "/while-frozen")
    member.resume()
    lone = _client(member.address)
    try:
        lone.sync("/")
        assert lone.exists("/while-frozen")
    finally:
        lone.stop()
        lone.close()


def test_a_single_server_keeps_its_data_over_a_stop(tmp_path: Path) -> None:
    with ZooKeeper(tmp_path) as zookeeper:
        client = _client(zookeeper.address)
        client.create("/kept", b"value")
        client.stop()
        client.close()
        zookeeper.stop()
        assert not zookeeper.members[0].running
        zookeeper.start()
        client = _client(zookeeper.address)
        assert client.get("/kept")[0] == b"value"
        client.stop()
        client.close()
