"""Access rules, which this version does not have, refused in words that Fluss's clients know.

No version of an API is missing, so "unsupported version" would mislead; CREATE_ACLS, LIST_ACLS and
DROP_ACLS get the answer of a Fluss cluster without an authorizer, error 47.
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


def _refuse_access_rules() -> NoReturn:
    raise error(ErrorCode.SECURITY_DISABLED_EXCEPTION, NO_AUTHORIZER)
