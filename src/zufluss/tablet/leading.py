"""Which coordinator leads, for a tablet server: read in ZooKeeper, again and again.

A tablet server that has no answer cannot know whether its coordinator is slow, frozen or replaced.
When another one leads, calls to the former are given up: whoever made them tries again, at the
present one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from zufluss.cluster.image import ClusterNode
from zufluss.cluster.leader import node_from_data
from zufluss.config import zookeeper_options
from zufluss.config.load import Configuration
from zufluss.errors import NetworkError
from zufluss.meta.api import MetaStoreError
from zufluss.meta.open import open_zookeeper
from zufluss.periodic import pause
from zufluss.tasks import end

if TYPE_CHECKING:
    from zufluss.meta.zookeeper_client import ZooKeeperClient

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 0.5
"""The pause between two looks."""
ANSWER_SECONDS: Final = 5.0
"""How long ZooKeeper may take for an answer."""


class LeadingCoordinator:
    """Where the coordinator is. `start` it, and ask for its `node`."""

    def __init__(self, conf: Configuration, on_change: Callable[[ClusterNode], None]) -> None:
        """`on_change` is called with the former coordinator when another one leads."""
        self._conf = conf
        self._on_change = on_change
        self._node: ClusterNode | None = None
        self._connected = False
        self._task: asyncio.Task[None] | None = None

    @property
    def node(self) -> ClusterNode:
        """The coordinator that leads, as far as is known; `NetworkError` if none was found yet."""
        if self._node is None:
            option = zookeeper_options.ZOOKEEPER_ADDRESS
            if not self._connected:
                raise NetworkError(
                    f"ZooKeeper has not answered yet ({option.key} = {self._conf.get(option)}), so "
                    "the coordinator is not known; start ZooKeeper, or correct the address"
                )
            root = self._conf.get(zookeeper_options.ZOOKEEPER_PATH_ROOT)
            raise NetworkError(
                f"no coordinator leads in ZooKeeper below {root}; start one, or correct "
                f"{zookeeper_options.ZOOKEEPER_PATH_ROOT.key}"
            )
        return self._node

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.create_task(self._run(), name="leading-coordinator")

    async def stop(self) -> None:
        """Look no more."""
        await end(self._task)

    async def _run(self) -> None:
        while True:
            try:
                await self._look(await open_zookeeper(self._conf))
            except MetaStoreError as problem:
                log.warning("zookeeper_away", reason=problem.message)
            await pause(LOOK_SECONDS)

    async def _look(self, client: ZooKeeperClient) -> None:
        """Look through a client until that is over, as after a login that was refused."""
        from kazoo.exceptions import KazooException  # an extra, as what follows

        from zufluss.meta.election import Observer

        self._connected = True
        observer = Observer(client, self._conf.get(zookeeper_options.ZOOKEEPER_PATH_ROOT))
        try:
            while not client.is_over:
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        self._note(await observer.leader())
                except (KazooException, TimeoutError):
                    pass  # the one that is known may still lead; kazoo says that it is away
                await pause(LOOK_SECONDS)
        finally:
            await client.close()

    def _note(self, data: bytes | None) -> None:
        if data is None or (node := node_from_data(data)) == self._node:
            return
        former, self._node = self._node, node
        log.info("coordinator_found", coordinator=node.node_id, at=str(node.endpoints[0]))
        if former is not None:
            self._on_change(former)

    def __repr__(self) -> str:
        return f"LeadingCoordinator({self._node})"
