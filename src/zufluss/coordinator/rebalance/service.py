"""Server tags and rebalances on the wire: APIs 1047 to 1051, and PLAN_REBALANCE, which is ours.

Requests, answers and error codes are Fluss's. Where passwords are asked for, only super users may
change anything.

All goals ask for the same plan here (`planner.py`): a bucket has one replica, its leader, and racks
are respected in any case. No goal at all, which Fluss takes as nothing to do, is refused, as are
goals that do not exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from zufluss.cluster.authority import Authority
from zufluss.cluster.image import ClusterImage
from zufluss.config import options
from zufluss.coordinator.rebalance.planner import Move
from zufluss.coordinator.rebalance.rebalances import Rebalances
from zufluss.coordinator.rebalance.tags import ServerTags
from zufluss.errors import AuthorizationError, ConfigError, RebalanceFailureError
from zufluss.model.rebalance import RebalanceGoal, ServerTag
from zufluss.pacing import paced
from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext


class RebalanceService:
    """Handlers of tags and rebalances."""

    def __init__(
        self, image: ClusterImage, tags: ServerTags, rebalances: Rebalances, authority: Authority
    ) -> None:
        self._image = image
        self._tags = tags
        self._rebalances = rebalances
        self._authority = authority

    async def add_server_tag(
        self, request: m.AddServerTagRequest, ctx: RequestContext
    ) -> m.AddServerTagResponse:
        """ADD_SERVER_TAG (1047): all servers of the request, or none."""
        self._check_operator(ctx, "tag servers")
        await self._tags.add(set(request.server_ids), _tag(request.server_tag))
        return m.AddServerTagResponse()

    async def remove_server_tag(
        self, request: m.RemoveServerTagRequest, ctx: RequestContext
    ) -> m.RemoveServerTagResponse:
        """REMOVE_SERVER_TAG (1048): all servers of the request, or none."""
        self._check_operator(ctx, "tag servers")
        await self._tags.remove(set(request.server_ids), _tag(request.server_tag))
        return m.RemoveServerTagResponse()

    async def rebalance(
        self, request: m.RebalanceRequest, ctx: RequestContext
    ) -> m.RebalanceResponse:
        """REBALANCE (1049): begin to carry out a plan, which is stored when this answers."""
        self._check_operator(ctx, "move buckets")
        _check_goals(request.goals)
        return m.RebalanceResponse(rebalance_id=await self._rebalances.begin())

    async def plan_rebalance(
        self, request: m.PlanRebalanceRequest, ctx: RequestContext
    ) -> m.PlanRebalanceResponse:
        """PLAN_REBALANCE (30070): the moves that a rebalance would make now."""
        _check_goals(request.goals)
        leaders = Counter(self._image.leaders)
        moves = await self._rebalances.plan()
        after = Counter(leaders)
        response = m.PlanRebalanceResponse()
        tables: dict[int, m.PbRebalancePlanForTable] = {}
        async for move in paced(moves):
            after[move.source] -= 1
            after[move.target] += 1
            table_id = move.bucket.table_id
            table = tables.get(table_id)
            if table is None:
                table = tables[table_id] = response.table_plan.add(table_id=table_id)
            table.buckets_plan.append(_plan_to_proto(move))
        for server_id in sorted(self._image.tablets.keys() | (+leaders).keys()):
            response.servers.add(
                server_id=server_id, leaders=leaders[server_id], leaders_after=after[server_id]
            )
        return response

    async def list_rebalance_progress(
        self, request: m.ListRebalanceProgressRequest, ctx: RequestContext
    ) -> m.ListRebalanceProgressResponse:
        """LIST_REBALANCE_PROGRESS (1050): the newest rebalance; empty if there was none."""
        rebalance_id = request.rebalance_id if request.HasField("rebalance_id") else None
        newest = self._rebalances.of(rebalance_id)
        if newest is None:
            return m.ListRebalanceProgressResponse()
        response = m.ListRebalanceProgressResponse(
            rebalance_id=newest.id, rebalance_status=newest.status
        )
        tables: dict[int, m.PbRebalanceProgressForTable] = {}
        async for state in paced(newest.moves):
            table_id = state.move.bucket.table_id
            table = tables.get(table_id)
            if table is None:
                table = tables[table_id] = response.table_progress.add(table_id=table_id)
            table.buckets_progress.add(
                rebalance_plan=_plan_to_proto(state.move),
                rebalance_status=state.status,
                reason=state.reason or None,
            )
        return response

    async def cancel_rebalance(
        self, request: m.CancelRebalanceRequest, ctx: RequestContext
    ) -> m.CancelRebalanceResponse:
        """CANCEL_REBALANCE (1051): begin no more moves; success if there is nothing to cancel."""
        self._check_operator(ctx, "move buckets")
        rebalance_id = request.rebalance_id if request.HasField("rebalance_id") else None
        await self._rebalances.cancel(rebalance_id)
        return m.CancelRebalanceResponse()

    def _check_operator(self, ctx: RequestContext, action: str) -> None:
        if not self._authority.may_operate(ctx.principal):
            raise AuthorizationError(
                f"{ctx.principal or 'an unknown user'} may not {action}; "
                f"{options.SUPER_USERS.key} names who may"
            )


def _tag(value: int) -> ServerTag:
    try:
        return ServerTag(value)
    except ValueError:
        known = ", ".join(f"{tag.value} ({tag.name})" for tag in ServerTag)
        raise ConfigError(f"server tag {value} does not exist; give one of {known}") from None


def _check_goals(goals: Iterable[int]) -> None:
    """Raise `RebalanceFailureError` unless there are goals, all of which exist."""
    asked = list(goals)
    unknown = [goal for goal in asked if goal not in set(RebalanceGoal)]
    if unknown or not asked:
        known = ", ".join(f"{goal.value} ({goal.name})" for goal in RebalanceGoal)
        what = f"goal {unknown[0]} does not exist" if unknown else "a rebalance without a goal"
        raise RebalanceFailureError(f"{what}; give one or more of {known}, which are alike here")


def _plan_to_proto(move: Move) -> m.PbRebalancePlanForBucket:
    return m.PbRebalancePlanForBucket(
        partition_id=move.bucket.partition_id,
        bucket_id=move.bucket.bucket_id,
        original_leader=move.source,
        new_leader=move.target,
        original_replicas=[move.source],
        new_replicas=[move.target],
    )
