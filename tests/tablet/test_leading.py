"""A tablet server looks for the coordinator that leads, and says why it has not found it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.waiting import WAIT_SECONDS
from zufluss.cluster.image import ClusterNode
from zufluss.cluster.leader import node_to_data
from zufluss.config.load import Configuration
from zufluss.config.values import Endpoint
from zufluss.errors import NetworkError
from zufluss.tablet import leading
from zufluss.tablet.leading import LeadingCoordinator


class Client:
    """A connection to ZooKeeper, where a coordinator leads."""

    def __init__(self, data: bytes) -> None:
        self.nodes = {"x-0000000001": data}
        self.is_over = False

    async def children(self, paths: list[str]) -> list[list[str]]:
        return [list(self.nodes)]

    async def data(self, paths: list[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(data=self.nodes[path.rsplit("/", 1)[1]]) for path in paths]

    async def close(self) -> None:
        self.is_over = True


def coordinator(node_id: int) -> ClusterNode:
    return ClusterNode(node_id, (Endpoint("INTERNAL", f"host-{node_id}", 1),))


async def test_another_coordinator_is_found_after_a_login_that_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kazoo gives up for good then, and this server would ask the former coordinator for ever."""
    clients = [Client(node_to_data(coordinator(1))), Client(node_to_data(coordinator(2)))]
    opened: list[Client] = []

    async def open_next(conf: Configuration) -> Client:
        opened.append(clients[len(opened)])
        return opened[-1]

    async def no_pause(seconds: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(leading, "open_zookeeper", open_next)
    monkeypatch.setattr(leading, "pause", no_pause)
    former: list[ClusterNode] = []
    looking = LeadingCoordinator(Configuration.of({}), former.append)
    looking.start()
    async with asyncio.timeout(WAIT_SECONDS):
        while looking._node is None:
            await asyncio.sleep(0)
        clients[0].is_over = True
        while looking.node != coordinator(2):
            await asyncio.sleep(0)
    assert former == [coordinator(1)]
    await looking.stop()


def unconnected() -> LeadingCoordinator:
    conf = Configuration.of({"zookeeper.address": "zk1:2181", "zookeeper.path.root": "/one"})
    return LeadingCoordinator(conf, lambda former: None)


def test_a_server_that_never_reached_zookeeper_names_its_address() -> None:
    with pytest.raises(NetworkError, match=r"zookeeper.address = zk1:2181.*correct the address"):
        _ = unconnected().node


def test_a_server_that_reached_zookeeper_names_the_root_without_a_coordinator() -> None:
    looking = unconnected()
    looking._connected = True
    with pytest.raises(NetworkError, match="no coordinator leads in ZooKeeper below /one"):
        _ = looking.node
