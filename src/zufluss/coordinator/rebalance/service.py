"""Server tags and rebalances on the wire: APIs 1047 to 1051.

Requests, answers and error codes are Fluss's. Where passwords are asked for, only super users may
change anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zufluss.cluster.authority import Authority
from zufluss.config import options
from zufluss.coordinator.rebalance.tags import ServerTags
from zufluss.errors import AuthorizationError, ConfigError
from zufluss.model.rebalance import ServerTag
from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext


class RebalanceService:
    """Handlers of tags."""

    def __init__(self, tags: ServerTags, authority: Authority) -> None:
        self._tags = tags
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
