"""How a server reaches the other servers of its cluster, and which of them is its coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from zufluss.cluster.image import ClusterNode
from zufluss.config import options, zookeeper_options
from zufluss.config.load import Configuration
from zufluss.errors import ConfigError, NetworkError
from zufluss.net.client import RpcConnection, open_connection
from zufluss.tablet.leading import LeadingCoordinator

CONNECT_TIMEOUT_MS = 10_000
"""How long one server waits for another to accept a connection."""


class ServerConnections:
    """Connections to other servers of the cluster, one per address, opened when needed."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], RpcConnection] = {}
        self._opening: dict[tuple[str, int], asyncio.Task[RpcConnection]] = {}

    async def connect(self, host: str, port: int) -> RpcConnection:
        """A live connection to an internal listener; callers that wait for one share it."""
        known = self._open.get((host, port))
        if known is not None and not known.closed:
            return known
        opening = self._opening.get((host, port))
        if opening is None:
            opening = asyncio.create_task(self._connected(host, port))
            self._opening[host, port] = opening
            opening.add_done_callback(lambda _: self._opening.pop((host, port)))
        return await asyncio.shield(opening)

    async def to_server(self, listener: str, node: ClusterNode) -> RpcConnection:
        """A live connection to the internal `listener` of a server."""
        endpoint = node.endpoint(listener)
        if endpoint is None:
            raise NetworkError(
                f"server {node.node_id} has no listener {listener} (internal.listener.name)"
            )
        return await self.connect(endpoint.host, endpoint.port)

    async def _connected(self, host: str, port: int) -> RpcConnection:
        connection = await open_connection(host, port, connect_timeout_ms=CONNECT_TIMEOUT_MS)
        self._open[host, port] = connection
        return connection

    def drop(self, host: str, port: int) -> None:
        """Close the connection to an address; calls under way fail."""
        if (known := self._open.pop((host, port), None)) is not None:
            known.close()

    def close(self) -> None:
        """Close them all."""
        for opening in self._opening.values():
            opening.cancel()
        for connection in self._open.values():
            connection.close()


def coordinator_of(
    conf: Configuration, connections: ServerConnections
) -> tuple[LeadingCoordinator | None, Callable[[], Awaitable[RpcConnection]]]:
    """How a tablet server reaches the coordinator: the one that leads, or the only one."""
    if not conf.get(zookeeper_options.ZOOKEEPER_ADDRESS):
        host, port = _coordinator_address(conf)
        return None, lambda: connections.connect(host, port)
    internal = conf.get(options.INTERNAL_LISTENER_NAME)

    def forget(former: ClusterNode) -> None:
        if (endpoint := former.endpoint(internal)) is not None:
            connections.drop(endpoint.host, endpoint.port)

    leading = LeadingCoordinator(conf, forget)

    async def connect() -> RpcConnection:
        return await connections.to_server(internal, leading.node)

    return leading, connect


def _coordinator_address(conf: Configuration) -> tuple[str, int]:
    address = conf.get(options.ZUFLUSS_COORDINATOR_ADDRESS) or ""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"zufluss.coordinator.address {address!r} is not host:port; a tablet server of its own "
            "needs the address of the coordinator's internal listener"
        )
    return host.strip("[]"), int(port)
