"""GET_FILESYSTEM_SECURITY_TOKEN: tokens with which clients read remote files, from either role.

Clients of Fluss name no tables and get one token, that of the first location. Clients of zufluss
name tables and get a list with one token for each file system, or for each prefix if tokens can be
limited to prefixes (`remote/tokens.py`).

| file system | tables named | none named |
|---|---|---|
| limits tokens | the directories of these tables | whole locations for users who may read all tables, otherwise the directories of the tables they may read |
| does not | one token for the file system, only for users who may read all tables | the same |
| needs none | an empty token for everybody | the same |

So nobody gets a token for a table that they may not read. A file system whose token service does
not answer is left out of the list, since the others can be read without it. Only clients of Fluss,
which need the first file system, get the error.

A dropped table whose snapshots leases still hold can be named as before: the token opens its old
directories, even when another table has its name by now. Only the coordinator knows such tables.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import structlog

from zufluss.cluster.image import ClusterImage
from zufluss.errors import AuthorizationError, ZuflussError
from zufluss.model.table import TablePath
from zufluss.pacing import paced
from zufluss.remote.layout import KV, LAKE, LOG, table_directory
from zufluss.remote.locations import Locations
from zufluss.remote.sts import SecurityTokenError
from zufluss.remote.tokens import FileSystemToken, Tokens
from zufluss.remote.uri import LocationUri, parse_location
from zufluss.wire import messages as m
from zufluss.wire.tables import physical_path_from_proto

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

log = structlog.get_logger(__name__)

MayRead = Callable[[str | None, TablePath], bool]
"""Whether a principal may read a table; None is a user without authentication."""
DroppedTables = Callable[[TablePath], Sequence[int]]
"""The ids of dropped tables of a name whose snapshots leases still hold."""


def everybody(principal: str | None, path: TablePath) -> bool:
    """Every user may read every table."""
    return True


def no_dropped(path: TablePath) -> Sequence[int]:
    """No dropped tables: tablet servers do not know leases."""
    return ()


class TokenService:
    """The handler of file system tokens."""

    def __init__(
        self,
        image: ClusterImage,
        locations: Callable[[], Locations],
        tokens: Tokens,
        may_read: MayRead = everybody,
        dropped: DroppedTables = no_dropped,
    ) -> None:
        """`locations` returns the present registry, with full addresses."""
        self._image = image
        self._locations = locations
        self._tokens = tokens
        self._may_read = may_read
        self._dropped = dropped

    async def get_filesystem_security_token(
        self, request: m.GetFileSystemSecurityTokenRequest, ctx: RequestContext
    ) -> m.GetFileSystemSecurityTokenResponse:
        """GET_FILESYSTEM_SECURITY_TOKEN (1025)."""
        named = {physical_path_from_proto(path).path: None async for path in paced(request.tables)}
        for path in named:
            self._check(ctx.principal, path)
        systems: dict[str, list[LocationUri]] = {}
        for location in self._locations().live:
            root = parse_location(location.uri, str(location))
            systems.setdefault(root.fs_key, []).append(root)
        tokens: list[FileSystemToken] = []
        failures: dict[str, ZuflussError] = {}
        for key, roots in systems.items():
            try:
                tokens += await self._of_file_system(roots, list(named), ctx.principal)
            except (SecurityTokenError, AuthorizationError) as e:
                log.warning("no_token", file_system=key, error=str(e))
                failures[key] = e
        first = next(iter(systems))
        if first in failures and not (named and tokens):
            raise failures[first]
        return _response(first, tokens)

    def _check(self, principal: str | None, path: TablePath) -> None:
        if not self._dropped(path):
            self._image.table(path)
        if not self._may_read(principal, path):
            raise AuthorizationError(f"{principal or 'an unknown user'} may not read table {path}")

    async def _of_file_system(
        self, roots: list[LocationUri], named: Sequence[TablePath], principal: str | None
    ) -> list[FileSystemToken]:
        """The tokens of one file system, whose locations are `roots`."""
        scoped, all_tables = self._tokens.is_scoped(roots[0]), self._reads_all(principal)
        if scoped and (named or not all_tables):
            tables = named or self._readable(principal)
            return await self._tokens.token(roots[0], self._directories(roots, tables))
        if self._tokens.is_secret(roots[0]) and not all_tables:
            raise AuthorizationError(
                f"{principal or 'an unknown user'} may not read every table, and tokens of "
                f"{roots[0].fs_key} open all of them; set s3.assumed.role.arn to limit them"
            )
        return await self._tokens.token(roots[0], [root.text for root in roots])

    def _readable(self, principal: str | None) -> list[TablePath]:
        return [
            entry.info.path
            for entry in self._image.tables()
            if self._may_read(principal, entry.info.path)
        ]

    def _reads_all(self, principal: str | None) -> bool:
        return all(self._may_read(principal, entry.info.path) for entry in self._image.tables())

    def _directories(self, roots: Iterable[LocationUri], tables: Sequence[TablePath]) -> list[str]:
        """The directories of tables in locations."""
        return [
            f"{root.text}/{table_directory(kind, path, table_id)}"
            for root in roots
            for path in tables
            for table_id in self._ids(path)
            for kind in (LOG, KV, LAKE)
        ]

    def _ids(self, path: TablePath) -> list[int]:
        """The ids of the table of a name, and of dropped ones of that name with leases."""
        entry = self._image.find_table(path)
        now = [] if entry is None else [entry.info.table_id]
        return [*now, *(each for each in self._dropped(path) if each not in now)]


def _response(
    first: str, tokens: Sequence[FileSystemToken]
) -> m.GetFileSystemSecurityTokenResponse:
    """The list of tokens, and for clients of Fluss the token of the first file system."""
    classic = next((x for x in tokens if f"{x.prefix}/".startswith(f"{first}/")), None)
    if classic is None:
        classic = FileSystemToken(first, first.partition(":")[0])
    return m.GetFileSystemSecurityTokenResponse(
        schema=classic.schema,
        token=classic.token,
        expiration_time=classic.expires_ms,
        addition_info=_pairs(classic),
        tokens=[
            m.PbFileSystemToken(
                prefix=token.prefix,
                schema=token.schema,
                token=token.token,
                expiration_time=token.expires_ms,
                addition_info=_pairs(token),
                path_scoped=token.path_scoped,
            )
            for token in tokens
        ],
    )


def _pairs(token: FileSystemToken) -> list[m.PbKeyValue]:
    return [m.PbKeyValue(key=key, value=value) for key, value in token.info.items()]
