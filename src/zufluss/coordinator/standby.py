"""What a coordinator answers while another one leads.

A standby has no picture of the cluster. It passes GET_METADATA on to the coordinator that leads, so
a client may begin at any coordinator and finds the leader in the answer. Every other request that
it does not answer itself gets error 65: clients read the metadata again then, and go to the leader.

It offers all APIs: a connection keeps what was offered when it was opened, also when this
coordinator leads later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from zufluss.cluster.image import ClusterNode
from zufluss.errors import ErrorCode, NetworkError, error
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey

if TYPE_CHECKING:
    from zufluss.cluster.replicas import RpcCaller
    from zufluss.net.services import RequestContext, Services

METADATA_TIMEOUT_MS: Final = 5_000
"""How long the coordinator that leads may take for an answer; clients ask others then."""
_OF_CONNECTIONS: Final = (ApiKey.API_VERSIONS, ApiKey.AUTHENTICATE)
"""Answered by the connection itself."""


class Standby:
    """The handlers of a coordinator that waits for its turn."""

    def __init__(
        self,
        node: ClusterNode,
        leader: Callable[[], Awaitable[ClusterNode | None]],
        connect: Callable[[ClusterNode], Awaitable[RpcCaller]],
    ) -> None:
        """`node` is this coordinator, `leader` finds the one that leads."""
        self._node = node
        self._leader = leader
        self._connect = connect

    def register(self, services: Services) -> None:
        """Answer everything that has no handler yet."""
        services.attach(self)
        for key in APIS:
            if key not in services.handlers and key not in _OF_CONNECTIONS:
                services.register(key, self._refuse)

    async def get_metadata(
        self, request: m.MetadataRequest, ctx: RequestContext
    ) -> m.MetadataResponse:
        """GET_METADATA (1012), from the coordinator that leads.

        A network error sends the client to another server while none does.
        """
        leader = await self._leader()
        if leader is None or leader == self._node or request.HasField("listener"):
            raise NetworkError(
                "no coordinator leads the cluster at the moment; try again, or ask another server"
            )
        passed_on = m.MetadataRequest()
        passed_on.CopyFrom(request)
        passed_on.listener = ctx.listener
        connection = await self._connect(leader)
        answer: m.MetadataResponse = await connection.call(
            ApiKey.GET_METADATA, passed_on, timeout_ms=METADATA_TIMEOUT_MS
        )
        return answer

    async def _refuse(self, request: Any, ctx: RequestContext) -> Any:
        leader = await self._leader()
        where = "no coordinator leads the cluster at the moment"
        if leader is not None and leader != self._node:
            where = f"coordinator {leader.node_id} at {leader.endpoints[0]} leads the cluster"
        raise error(
            ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION,
            f"coordinator {self._node.node_id} is a standby, {where}; refresh the metadata and "
            "try again",
        )

    def __repr__(self) -> str:
        return f"Standby({self._node.node_id})"
