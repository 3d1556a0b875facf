"""The end of a coordinator whose metadata store does not decide."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.coordinator.support import Cluster
from tests.meta.zookeepers import open_store
from zufluss.coordinator.turn import stop_in_time
from zufluss.meta.api import MetaStore
from zufluss.model.table import DatabaseDescriptor
from zufluss.testing.tcp import TcpProxy
from zufluss.testing.zookeeper import ZooKeeper


async def test_a_coordinator_stops_while_a_transaction_is_in_doubt(tmp_path: Path) -> None:
    """ZooKeeper is away, and nobody can say for how long."""
    with (
        ZooKeeper(tmp_path / "zookeeper") as zookeeper,
        TcpProxy("127.0.0.1", zookeeper.members[0].port) as proxy,
    ):
        store = await open_store(proxy.address, session_timeout_ms=1000)
        commit = store._client.commit
        sent = asyncio.Event()

        async def commit_and_lose(operations: Sequence[Any]) -> list[Any]:
            proxy.refuse()
            sent.set()
            return await commit(operations)

        async def opened(directory: Path) -> MetaStore:
            return store

        cluster = Cluster(tmp_path / "data")
        cluster.open_store = opened
        await cluster.start()
        store._client.commit = commit_and_lose  # type: ignore[method-assign]
        creating = asyncio.create_task(cluster.catalog.create_database("a", DatabaseDescriptor()))
        await sent.wait()
        await stop_in_time(cluster.coordinator, store, 0.1)
        await asyncio.gather(creating, return_exceptions=True)
