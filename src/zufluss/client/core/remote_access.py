"""The tokens of a connection: what opens which remote files, asked for once and renewed in time.

They belong to the connection and are kept by prefix, so tables do not overwrite each other's; the
longest prefix of an address counts. A token is renewed when 80 % of its life is over, by whoever
reads next, and at once when a store refuses it. As long as the old one is good, a server that
cannot be reached does not disturb readers.

A cluster without lists of tokens gives one for all files of its scheme.

Any server gives tokens, but of a table that was dropped while a lease holds its snapshots only the
coordinator knows. It is asked where no other server gives a token for an address.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from zufluss.clock import Clock, ClockMs, wall_ms
from zufluss.errors import CorruptMessageError, ErrorCode, TableNotExistError, ZuflussError
from zufluss.model.table import PhysicalTablePath, TablePath
from zufluss.remote.errors import LocationUnavailableError, ObjectForbiddenError
from zufluss.remote.layout import root_of
from zufluss.remote.objects import Objects
from zufluss.remote.tokens import ENDPOINT, ENDPOINT_REGION, PATH_STYLE
from zufluss.remote.uri import FILE, LocationUri, parse_location
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import physical_path_to_proto

if TYPE_CHECKING:
    from zufluss.client.connection import AsyncConnection

RENEW_AT: Final = 0.8
"""The part of its life after which a token is renewed."""
RENEW_SECONDS_MIN: Final = 1.0
"""The shortest time between two renewals, however wrong the clocks are."""

_PROPERTIES: Final = {
    ENDPOINT: "s3.endpoint",
    ENDPOINT_REGION: "s3.region",
    PATH_STYLE: "s3.path-style-access",
}
_CREDENTIALS: Final = {
    "access_key_id": "s3.access-key",
    "access_key_secret": "s3.secret-key",
    "security_token": "s3.session-token",
}


@dataclass(slots=True, eq=False)
class Access:
    """A token in use: the stores that it opens."""

    prefix: str
    """What it opens."""
    properties: dict[str, str] = field(repr=False)
    """Of the stores."""
    renew_at: float
    """Monotonic time."""
    ends_at: float
    """Monotonic time; it is good for nothing then."""
    stores: dict[str, Objects] = field(default_factory=dict)
    """By their root."""

    def covers(self, uri: LocationUri) -> bool:
        """Whether an address lies below the prefix."""
        return f"{uri.text}/".startswith(self.prefix.rstrip("/") + "/")


class RemoteFiles:
    """The remote files of a cluster, for the readers of one connection."""

    def __init__(
        self,
        connection: AsyncConnection,
        clock: Clock = time.monotonic,
        clock_ms: ClockMs = wall_ms,
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._clock_ms = clock_ms
        self._held: dict[str, Access] = {}
        self._asking: dict[TablePath, asyncio.Task[None]] = {}

    async def read(self, table: TablePath, uri: LocationUri, start: int, end: int) -> memoryview:
        """The bytes of a range of a file that belongs to a table."""
        access = await self._access(table, uri)
        try:
            return await self._range(access, uri, start, end)
        except ObjectForbiddenError:
            if "s3.access-key" not in access.properties:
                raise  # it was not our token that was refused
            access.renew_at = 0.0
        return await self._range(await self._access(table, uri), uri, start, end)

    async def objects(self, table: TablePath, directory: str) -> tuple[Objects, str]:
        """The store of a directory of a table, and the path of the directory in it."""
        uri = parse_location(directory, f"a remote directory of table {table}")
        return self._store(await self._access(table, uri), uri)

    async def _range(self, access: Access, uri: LocationUri, start: int, end: int) -> memoryview:
        objects, path = self._store(access, uri)
        return await objects.get_range(path, start, end)

    def _store(self, access: Access, uri: LocationUri) -> tuple[Objects, str]:
        root = _root(access, uri)
        objects = access.stores.get(root.text)
        if objects is None:
            timeout_ms = self._connection.options.request_timeout_ms
            objects = Objects(root, access.properties, timeout_ms=timeout_ms)
            access.stores[root.text] = objects
        return objects, uri.path.removeprefix(root.path).strip("/")

    # -- tokens --------------------------------------------------------------------------------

    async def _access(self, table: TablePath, uri: LocationUri) -> Access:
        """The token for an address, asked for if there is none or the old one ends soon."""
        held = self._longest(uri)
        if held is not None and self._clock() < held.renew_at:
            return held
        try:
            await self._ask(table, uri)
        except ZuflussError as e:
            if held is None or self._clock() >= held.ends_at or not held.renew_at:
                if e.code is ErrorCode.SECURITY_TOKEN_EXCEPTION:
                    raise LocationUnavailableError(uri.text, "", e.message) from e
                raise
            held.renew_at = self._clock() + RENEW_SECONDS_MIN
        held = self._longest(uri)
        if held is None:
            raise LocationUnavailableError(uri.text, "", "the cluster gave no token for it")
        return held

    def _longest(self, uri: LocationUri) -> Access | None:
        found = [access for access in self._held.values() if access.covers(uri)]
        return max(found, key=lambda access: len(access.prefix), default=None)

    async def _ask(self, table: TablePath, uri: LocationUri) -> None:
        task = self._asking.get(table)
        if task is None:
            task = asyncio.ensure_future(self._renew(table, uri))
            self._asking[table] = task
            task.add_done_callback(lambda _: self._asking.pop(table, None))
        await asyncio.shield(task)

    async def _renew(self, table: TablePath, uri: LocationUri) -> None:
        path = physical_path_to_proto(PhysicalTablePath(*table))
        request = m.GetFileSystemSecurityTokenRequest(tables=[path])
        key = ApiKey.GET_FILESYSTEM_SECURITY_TOKEN
        with suppress(TableNotExistError):
            self._take(await self._connection.call_any(key, request))
            found = self._longest(uri)
            if found is not None and self._clock() < found.renew_at:
                return
        self._take(await self._connection.call_coordinator(key, request))

    def _take(self, answer: m.GetFileSystemSecurityTokenResponse) -> None:
        if not answer.tokens:
            self._hold(f"{answer.schema}://", answer)
        for token in answer.tokens:
            self._hold(token.prefix, token)

    def _hold(
        self, prefix: str, token: m.GetFileSystemSecurityTokenResponse | m.PbFileSystemToken
    ) -> None:
        now, ends_at = self._clock(), float("inf")
        renew_at = ends_at
        if token.HasField("expiration_time"):
            life = (token.expiration_time - self._clock_ms()) / 1000
            ends_at = now + life
            renew_at = now + max(life * RENEW_AT, RENEW_SECONDS_MIN)
        access = Access(prefix, _properties(prefix, token), renew_at, ends_at)
        before = self._held.get(prefix)
        if before is not None and before.properties == access.properties:
            access.stores = before.stores
        self._held[prefix] = access


def _properties(
    prefix: str, token: m.GetFileSystemSecurityTokenResponse | m.PbFileSystemToken
) -> dict[str, str]:
    """What a token says, in our own keys; what we do not know is left out."""
    found = {
        _PROPERTIES[pair.key]: pair.value for pair in token.addition_info if pair.key in _PROPERTIES
    }
    if not token.token:
        return found
    try:
        credentials = json.loads(token.token)
        keys = {_CREDENTIALS[k]: str(v) for k, v in credentials.items() if k in _CREDENTIALS and v}
    except (ValueError, AttributeError):
        raise CorruptMessageError(f"the token for {prefix} is no JSON object") from None
    return found | keys


def _root(access: Access, uri: LocationUri) -> LocationUri:
    """Where the store of an address begins: few stores, each with connections of its own."""
    below = access.prefix.removeprefix(uri.fs_key).strip("/")
    if below and access.prefix.startswith(uri.fs_key):
        return LocationUri(uri.scheme, uri.authority, f"/{below}")
    if uri.scheme == FILE:  # the directory of the location: without it, the disk is away
        return LocationUri(FILE, "", root_of(uri.path) or "/" + uri.path.split("/")[1])
    return LocationUri(uri.scheme, uri.authority, "")
