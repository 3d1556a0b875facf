"""Tags of tablet servers, and the goals and states of a rebalance, numbered as on the wire.

Fluss declares three goals. A bucket has one replica, which is its leader, so replicas and leaders
are the same here, and the racks of a table's leaders are always respected: the three goals ask for
the same plan.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ServerTag(IntEnum):
    """Why a tablet server gets no leaders of buckets."""

    PERMANENT_OFFLINE = 0
    """It is about to leave for good."""
    TEMPORARY_OFFLINE = 1
    """It is about to leave for a while, such as for an upgrade."""


class RebalanceGoal(IntEnum):
    """What a rebalance is asked to make even."""

    REPLICA_DISTRIBUTION = 0
    """The numbers of replicas of servers."""
    LEADER_DISTRIBUTION = 1
    """The numbers of leaders of servers."""
    RACK_AWARE = 2
    """The same, and the racks of replicas."""


class RebalanceStatus(IntEnum):
    """The state of a rebalance, or of one of its moves."""

    NOT_STARTED = 0
    REBALANCING = 1
    FAILED = 2
    COMPLETED = 3
    CANCELED = 4
    TIMEOUT = 5
    """Only Fluss's servers answer it."""


FINAL: Final = frozenset(RebalanceStatus) - {
    RebalanceStatus.NOT_STARTED,
    RebalanceStatus.REBALANCING,
}
"""The states in which nothing happens any more."""
