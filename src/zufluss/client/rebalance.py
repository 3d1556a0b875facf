"""Rebalances as clients see them: plans, progress, and their messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zufluss.model.rebalance import FINAL, RebalanceStatus
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m


class RebalanceMove(NamedTuple):
    """A bucket that changes its leader."""

    bucket: TableBucket
    """The bucket."""
    source: int
    """The tablet server that leads it, or did."""
    target: int
    """The tablet server that shall lead it."""
    status: RebalanceStatus = RebalanceStatus.NOT_STARTED
    """How far it is."""
    reason: str = ""
    """Why it failed or was skipped; servers of Fluss do not tell it."""


class ServerShare(NamedTuple):
    """What a tablet server leads."""

    server_id: int
    """Its id."""
    leaders: int
    """The buckets that it leads."""
    leaders_after: int
    """The buckets that it leads after all moves."""


class RebalancePlan(NamedTuple):
    """What a rebalance would do now."""

    moves: list[RebalanceMove]
    """Its moves, by table."""
    servers: list[ServerShare]
    """The servers, by id."""


@dataclass(frozen=True, slots=True)
class RebalanceProgress:
    """A rebalance that is carried out, or was."""

    id: str
    """Its id."""
    status: RebalanceStatus
    """How far it is; FAILED also if only some moves failed."""
    moves: list[RebalanceMove]
    """Its moves, by table."""

    @property
    def ended(self) -> int:
        """Moves that are completed, or will never be."""
        return sum(move.status in FINAL for move in self.moves)

    @property
    def has_ended(self) -> bool:
        """Whether nothing happens any more; moves of a cancelled one may be under way."""
        under_way = any(move.status is RebalanceStatus.REBALANCING for move in self.moves)
        return self.status in FINAL and not under_way

    def count(self, status: RebalanceStatus) -> int:
        """Moves with a status."""
        return sum(move.status is status for move in self.moves)


def plan_of(answer: m.PlanRebalanceResponse) -> RebalancePlan:
    """Decode an answer to PLAN_REBALANCE."""
    moves = [
        _move(table.table_id, each) for table in answer.table_plan for each in table.buckets_plan
    ]
    shares = [ServerShare(s.server_id, s.leaders, s.leaders_after) for s in answer.servers]
    return RebalancePlan(moves, shares)


def progress_of(answer: m.ListRebalanceProgressResponse) -> RebalanceProgress | None:
    """Decode an answer to LIST_REBALANCE_PROGRESS; None if there was no rebalance."""
    if not answer.HasField("rebalance_id"):
        return None
    moves = list(_moves(answer.table_progress))
    return RebalanceProgress(answer.rebalance_id, RebalanceStatus(answer.rebalance_status), moves)


def _moves(tables: Collection[m.PbRebalanceProgressForTable]) -> Iterator[RebalanceMove]:
    for table in tables:
        for each in table.buckets_progress:
            status = RebalanceStatus(each.rebalance_status)
            move = _move(table.table_id, each.rebalance_plan)
            yield move._replace(status=status, reason=each.reason)


def _move(table_id: int, plan: m.PbRebalancePlanForBucket) -> RebalanceMove:
    partition_id = plan.partition_id if plan.HasField("partition_id") else None
    bucket = TableBucket(table_id, partition_id, plan.bucket_id)
    return RebalanceMove(bucket, plan.original_leader, plan.new_leader)
