"""The health of the cluster, answered from the image by either role."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from zufluss.cluster.image import ClusterImage
from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext


class ClusterHealth(IntEnum):
    """The state of the cluster, numbered as on the wire."""

    GREEN = 0
    YELLOW = 1
    RED = 2


class ClusterService:
    """The handler of GET_CLUSTER_HEALTH."""

    def __init__(self, image: ClusterImage) -> None:
        self._image = image

    async def get_cluster_health(
        self, request: m.GetClusterHealthRequest, ctx: RequestContext
    ) -> m.GetClusterHealthResponse:
        """GET_CLUSTER_HEALTH (1062): red without a leader, yellow without a replica."""
        states = [state for _, _, state in self._image.buckets()]
        replicas = sum(len(state.replicas) for state in states)
        in_sync = sum(len(state.isr) for state in states)
        active = sum(state.leader in self._image.tablets for state in states)
        if active < len(states):
            status = ClusterHealth.RED
        else:
            status = ClusterHealth.YELLOW if in_sync < replicas else ClusterHealth.GREEN
        return m.GetClusterHealthResponse(
            num_replicas=replicas,
            in_sync_replicas=in_sync,
            num_leader_replicas=len(states),
            active_leader_replicas=active,
            status=status,
        )
