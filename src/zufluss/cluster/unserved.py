"""Procedures of Fluss's clients that this version does not carry out, in words that clients know.

Flink's catalog offers access rules and rebalances as procedures. No version of an API is missing,
so "unsupported version" would mislead; the answers are those of a Fluss cluster without an
authorizer and without a rebalance under way. What would have to be done is refused, with error 61
(REBALANCE_FAILURE) where Fluss has no refusal of its own, because buckets that are about to move
would be a lie.

| API | Apache Fluss | here |
|---|---|---|
| CREATE_ACLS, LIST_ACLS, DROP_ACLS | error 47 without an authorizer | error 47 |
| REBALANCE | a task, finished at once when nothing has to move | error 61 |
| LIST_REBALANCE_PROGRESS | empty without a task | empty |
| CANCEL_REBALANCE | success without a task | success |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from zufluss.errors import ErrorCode, error
from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

NO_AUTHORIZER: Final = (
    "No Authorizer is configured. This version has no access rules: who may connect may read and "
    "write all tables; limit that with a `sasl` listener"
)
"""Clients compare the first sentence."""


class AccessRuleListing:
    """The handler of LIST_ACLS, which both roles serve."""

    async def list_acls(
        self, request: m.ListAclsRequest, ctx: RequestContext
    ) -> m.ListAclsResponse:
        """LIST_ACLS (1040): refused, as by Fluss without an authorizer."""
        _refuse_access_rules()


class UnservedProcedures(AccessRuleListing):
    """Handlers of the coordinator's procedures that this version does not carry out."""

    async def create_acls(
        self, request: m.CreateAclsRequest, ctx: RequestContext
    ) -> m.CreateAclsResponse:
        """CREATE_ACLS (1039): refused, as by Fluss without an authorizer."""
        _refuse_access_rules()

    async def drop_acls(
        self, request: m.DropAclsRequest, ctx: RequestContext
    ) -> m.DropAclsResponse:
        """DROP_ACLS (1041): refused, as by Fluss without an authorizer."""
        _refuse_access_rules()

    async def rebalance(
        self, request: m.RebalanceRequest, ctx: RequestContext
    ) -> m.RebalanceResponse:
        """REBALANCE (1049): refused."""
        raise error(
            ErrorCode.REBALANCE_FAILURE_EXCEPTION,
            "this version moves no buckets between servers, so nothing was rebalanced; new tables "
            "and partitions are spread over all tablet servers",
        )

    async def list_rebalance_progress(
        self, request: m.ListRebalanceProgressRequest, ctx: RequestContext
    ) -> m.ListRebalanceProgressResponse:
        """LIST_REBALANCE_PROGRESS (1050): there is no task."""
        return m.ListRebalanceProgressResponse()

    async def cancel_rebalance(
        self, request: m.CancelRebalanceRequest, ctx: RequestContext
    ) -> m.CancelRebalanceResponse:
        """CANCEL_REBALANCE (1051): there is no task to cancel."""
        return m.CancelRebalanceResponse()


def _refuse_access_rules() -> NoReturn:
    raise error(ErrorCode.SECURITY_DISABLED_EXCEPTION, NO_AUTHORIZER)
