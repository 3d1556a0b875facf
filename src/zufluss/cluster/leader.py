"""What a candidate for the turn of the coordinator tells others in ZooKeeper: where it is.

A JSON object: `id`, and `listeners` (`NAME://host:port`, with commas between).
"""

from __future__ import annotations

import json

from zufluss.cluster import codec
from zufluss.cluster.image import ClusterNode
from zufluss.config.values import parse_endpoints


def node_to_data(node: ClusterNode) -> bytes:
    """A coordinator as its candidate tells others."""
    value = {"id": node.node_id, "listeners": codec.listeners_to_text(node.endpoints)}
    return json.dumps(value).encode()


def node_from_data(data: bytes) -> ClusterNode:
    """A coordinator from what its candidate tells others."""
    value = json.loads(data)
    return ClusterNode(value["id"], parse_endpoints(value["listeners"]))
