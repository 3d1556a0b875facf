"""Remote files, opened with the security tokens that the cluster hands out.

`RemoteAccess` keeps one token per prefix of addresses, for all readers of a connection; the
longest matching prefix counts. The first reader that comes after 80 % of a token's life renews it,
and a token that the store refuses is renewed at once. While the old token is valid, a failed
renewal does not disturb readers. A cluster that hands out no list of tokens gives one token for
all files of its scheme.

Any server hands out tokens. Only the coordinator knows a dropped table whose snapshots a lease
still holds; it is asked when the other servers give no token for an address.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from zufluss.clock import Clock, ClockMs, wall_ms
from zufluss.errors import CorruptMessageError, ErrorCode, TableNotExistError, ZuflussError
from zufluss.model.table import PhysicalTablePath, TablePath
from zufluss.remote.errors import LocationUnavailableError, ObjectForbiddenError
from zufluss.remote.layout import root_of
from zufluss.remote.objects import Objects
from zufluss.remote.tokens import ENDPOINT, ENDPOINT_REGION, PATH_STYLE
from zufluss.remote.uri import FILE, LocationUri, parse_location
from zufluss.tasks import forgive
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import physical_path_to_proto

RENEW_AT: Final = 0.8
"""The part of its life after which a token is renewed."""
RENEW_SECONDS_MIN: Final = 1.0
"""The shortest time between two renewals, even if the clocks disagree."""

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


class ClusterCall(Protocol):
    """A request to the cluster, retried while its error may pass."""

    async def __call__(self, api_key: ApiKey, request: Message) -> Any:
        """Send the request and return the answer."""


@dataclass(slots=True, eq=False)
class HeldToken:
    """A token in use, and the stores it opens."""

    prefix: str
    """Addresses below this prefix are opened with the token."""
    properties: dict[str, str] = field(repr=False)
    """Properties of the stores, with the credentials."""
    renew_at: float
    """Monotonic time; 0 after the store refused the token."""
    ends_at: float
    """Monotonic time at which the token expires."""
    stores: dict[str, Objects] = field(default_factory=dict)
    """Stores by their root."""

    def covers(self, uri: LocationUri) -> bool:
        """Whether an address lies below the prefix."""
        return f"{uri.text}/".startswith(self.prefix.rstrip("/") + "/")


class RemoteAccess:
    """The remote files of a cluster, for all readers of one connection."""

    def __init__(
        self,
        ask_any: ClusterCall,
        ask_coordinator: ClusterCall,
        *,
        timeout_ms: int,
        clock: Clock = time.monotonic,
        clock_ms: ClockMs = wall_ms,
    ) -> None:
        self._ask_any = ask_any
        self._ask_coordinator = ask_coordinator
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._clock_ms = clock_ms
        self._held: dict[str, HeldToken] = {}
        self._renewals: dict[TablePath, asyncio.Task[None]] = {}

    async def read(
        self,
        table: TablePath,
        uri: LocationUri,
        start: int,
        end: int,
        *,
        seconds: float | None = None,
    ) -> memoryview:
        """The bytes of a range of a file that belongs to a table.

        Raises `LocationUnavailableError` if the store takes longer than `seconds`.
        """
        token = await self._token(table, uri)
        try:
            return await self._range(token, uri, start, end, seconds)
        except ObjectForbiddenError:
            if "s3.access-key" not in token.properties:
                raise  # the store refused other credentials than the token's
            token.renew_at = 0.0
        return await self._range(await self._token(table, uri), uri, start, end, seconds)

    async def objects(self, table: TablePath, directory: str) -> tuple[Objects, str]:
        """The store of a directory of a table, and the path of the directory in it."""
        uri = parse_location(directory, f"a remote directory of table {table}")
        return self._store(await self._token(table, uri), uri)

    async def _range(
        self, token: HeldToken, uri: LocationUri, start: int, end: int, seconds: float | None
    ) -> memoryview:
        objects, path = self._store(token, uri)
        try:
            async with asyncio.timeout(seconds):
                return await objects.get_range(path, start, end)
        except TimeoutError:
            reason = f"no answer within {seconds:g} s"
            raise LocationUnavailableError(objects.uri.text, path, reason) from None

    def _store(self, token: HeldToken, uri: LocationUri) -> tuple[Objects, str]:
        root = _root(token, uri)
        objects = token.stores.get(root.text)
        if objects is None:
            objects = Objects(root, token.properties, timeout_ms=self._timeout_ms)
            token.stores[root.text] = objects
        return objects, uri.path.removeprefix(root.path).strip("/")

    # -- tokens --------------------------------------------------------------------------------

    async def _token(self, table: TablePath, uri: LocationUri) -> HeldToken:
        """The token for an address, renewed if it is missing or near its end."""
        held = self._longest(uri)
        if held is not None and self._clock() < held.renew_at:
            return held
        try:
            await self._renew_once(table, uri)
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

    def _longest(self, uri: LocationUri) -> HeldToken | None:
        tokens = [token for token in self._held.values() if token.covers(uri)]
        return max(tokens, key=lambda token: len(token.prefix), default=None)

    async def _renew_once(self, table: TablePath, uri: LocationUri) -> None:
        """Renew the tokens of a table; concurrent callers share one renewal."""
        task = self._renewals.get(table)
        if task is None:
            task = asyncio.ensure_future(self._renew(table, uri))
            self._renewals[table] = task
            task.add_done_callback(lambda _: self._renewals.pop(table, None))
            task.add_done_callback(forgive)
        await asyncio.shield(task)

    async def _renew(self, table: TablePath, uri: LocationUri) -> None:
        path = physical_path_to_proto(PhysicalTablePath(*table))
        request = m.GetFileSystemSecurityTokenRequest(tables=[path])
        key = ApiKey.GET_FILESYSTEM_SECURITY_TOKEN
        with suppress(TableNotExistError):
            self._take(await self._ask_any(key, request))
            token = self._longest(uri)
            if token is not None and self._clock() < token.renew_at:
                return
        self._take(await self._ask_coordinator(key, request))

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
        held = HeldToken(prefix, _properties(prefix, token), renew_at, ends_at)
        before = self._held.get(prefix)
        if before is not None and before.properties == held.properties:
            held.stores = before.stores
        self._held[prefix] = held


def _properties(
    prefix: str, token: m.GetFileSystemSecurityTokenResponse | m.PbFileSystemToken
) -> dict[str, str]:
    """The properties of a token under our own keys; unknown ones are left out."""
    properties = {
        _PROPERTIES[pair.key]: pair.value for pair in token.addition_info if pair.key in _PROPERTIES
    }
    if not token.token:
        return properties
    try:
        credentials = json.loads(token.token)
        keys = {_CREDENTIALS[k]: str(v) for k, v in credentials.items() if k in _CREDENTIALS and v}
    except (ValueError, AttributeError):
        raise CorruptMessageError(f"the token for {prefix} is no JSON object") from None
    return properties | keys


def _root(token: HeldToken, uri: LocationUri) -> LocationUri:
    """The root of the store of an address. Few stores, because each has its own connections."""
    below = token.prefix.removeprefix(uri.fs_key).strip("/")
    if below and token.prefix.startswith(uri.fs_key):
        return LocationUri(uri.scheme, uri.authority, f"/{below}")
    if (
        uri.scheme == FILE
    ):  # the directory of the location; if it is missing, the disk is not mounted
        return LocationUri(FILE, "", root_of(uri.path) or "/" + uri.path.split("/")[1])
    return LocationUri(uri.scheme, uri.authority, "")
