"""Tokens with which clients read remote files; a server creates them for each file system.

| file system | rights of the token |
|---|---|
| S3 with `s3.assumed.role.arn` | to read the requested prefixes, nothing else: path-scoped |
| S3 with an access key | those of the server's own key |
| any other, or `zufluss.remote.tokens = none` | none: the client uses its own credentials |

A token is JSON as Fluss's clients read it, `{"access_key_id", "access_key_secret",
"security_token"}`, with Hadoop's keys for the address of the store beside it. Tokens are cached and
handed out again while at least half of their life is left. Concurrent requests for the same token
share one request to the token service.

AWS limits the length of a session's policy, which names every prefix twice. So prefixes share a
session as long as their policy fits; many locations in one bucket need several sessions.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from zufluss.config import options as o
from zufluss.config.load import Configuration
from zufluss.remote import sts
from zufluss.remote.stores import REGION, store_properties
from zufluss.remote.sts import AwsKeys, SecurityTokenError, StsSession
from zufluss.remote.uri import S3, LocationUri

LIFE_SECONDS: Final = 3600
"""Life of a token: what a role allows by default."""
KEPT_MAX: Final = 1024
"""Tokens that a server caches at most."""
POLICY_CHARS_MAX: Final = 2048
"""Length of the longest session policy that AWS accepts."""
SESSIONS_MAX: Final = 256
"""Sessions that one request for tokens may need at most."""
SESSION_NAME: Final = "zufluss-reader"

ENDPOINT: Final = "fs.s3a.endpoint"
ENDPOINT_REGION: Final = "fs.s3a.endpoint.region"
PATH_STYLE: Final = "fs.s3a.path.style.access"
_INFO: Final = {
    "s3.endpoint": ENDPOINT,
    "s3.region": ENDPOINT_REGION,
    "s3.path-style-access": PATH_STYLE,
}


@dataclass(frozen=True, slots=True)
class FileSystemToken:
    """Credentials for everything below a prefix."""

    prefix: str
    """An address; of several tokens a client uses the one with the longest prefix of a path."""
    schema: str
    """Scheme of the file system."""
    token: bytes = field(default=b"", repr=False)
    """JSON; empty if the client needs no credentials or has its own."""
    expires_ms: int | None = None
    """Time of expiry in epoch milliseconds; None if the token does not expire."""
    info: Mapping[str, str] = field(default_factory=dict)
    """Address of the store, in Hadoop's keys."""
    path_scoped: bool = False
    """The token covers nothing outside the prefix."""


@dataclass(slots=True)
class _CachedSession:
    task: asyncio.Task[StsSession]
    requested_ms: int


class Tokens:
    """The tokens of one server."""

    def __init__(self, conf: Configuration, clock_ms: Callable[[], int]) -> None:
        self._conf = conf
        self._clock_ms = clock_ms
        self._cached: OrderedDict[tuple[str, tuple[str, ...]], _CachedSession] = OrderedDict()

    def is_scoped(self, uri: LocationUri) -> bool:
        """Whether tokens of this file system can be limited to prefixes."""
        return "s3.assumed.role.arn" in self._properties(uri) and self._issues(uri)

    def is_secret(self, uri: LocationUri) -> bool:
        """Whether tokens of this file system contain credentials."""
        return self._issues(uri)

    async def token(self, uri: LocationUri, prefixes: Sequence[str]) -> list[FileSystemToken]:
        """Return a token for each of these prefixes: addresses in the file system of `uri`.

        If tokens cannot be limited to prefixes, returns one token for the file system.
        """
        info = self._info(uri)
        if not self._issues(uri):
            return [FileSystemToken(uri.fs_key, uri.scheme, info=info)]
        scoped = self.is_scoped(uri)
        if scoped and not prefixes:
            return []
        groups = policy_groups(uri, prefixes) if scoped else [()]
        sessions = await asyncio.gather(*(self._session(uri, group) for group in groups))
        return [
            FileSystemToken(
                prefix, uri.scheme, token_json(session.keys), session.expires_ms, info, scoped
            )
            for group, session in zip(groups, sessions, strict=True)
            for prefix in (group or [uri.fs_key])
        ]

    def _properties(self, uri: LocationUri) -> dict[str, str]:
        return store_properties(self._conf, uri)

    def _issues(self, uri: LocationUri) -> bool:
        """Whether the store issues credentials, and the server can request them.

        Without a role, temporary keys do not suffice: a session cannot create another one.
        """
        if uri.scheme != S3 or self._conf.get(o.ZUFLUSS_REMOTE_TOKENS) == "none":
            return False
        properties = self._properties(uri)
        if "s3.access-key" not in properties or "s3.secret-key" not in properties:
            return False
        return "s3.assumed.role.arn" in properties or "s3.session-token" not in properties

    def _info(self, uri: LocationUri) -> dict[str, str]:
        if uri.scheme != S3:
            return {}
        properties = self._properties(uri)
        if "s3.endpoint" in properties:
            properties = {"s3.region": REGION, "s3.path-style-access": "true", **properties}
        return {name: properties[key] for key, name in _INFO.items() if key in properties}

    async def _session(self, uri: LocationUri, prefixes: tuple[str, ...]) -> StsSession:
        key = (uri.fs_key, prefixes)
        cached = self._cached.get(key)
        if cached is None or self._is_old(cached):
            task = asyncio.ensure_future(self._request(uri, prefixes))
            cached = self._cached[key] = _CachedSession(task, self._clock_ms())
        self._cached.move_to_end(key)
        while len(self._cached) > KEPT_MAX:
            self._cached.popitem(last=False)
        return await asyncio.shield(cached.task)

    def _is_old(self, cached: _CachedSession) -> bool:
        if not cached.task.done():
            return False
        if cached.task.cancelled() or cached.task.exception() is not None:
            return True
        left = cached.task.result().expires_ms - self._clock_ms()
        return 2 * left < cached.task.result().expires_ms - cached.requested_ms

    async def _request(self, uri: LocationUri, prefixes: tuple[str, ...]) -> StsSession:
        properties = self._properties(uri)
        keys = AwsKeys(
            properties["s3.access-key"],
            properties["s3.secret-key"],
            properties.get("s3.session-token"),
        )
        form = {"Action": "GetSessionToken", "DurationSeconds": str(LIFE_SECONDS)}
        if prefixes:
            form |= {
                "Action": "AssumeRole",
                "RoleArn": properties["s3.assumed.role.arn"],
                "RoleSessionName": SESSION_NAME,
                "Policy": policy_text(uri, prefixes),
            }
        region = properties.get("s3.region", REGION)
        timeout_ms = self._conf.get(o.ZUFLUSS_REMOTE_REQUEST_TIMEOUT)
        endpoint = _endpoint(properties, region)
        return await sts.call(endpoint, region, keys, form, timeout_ms, self._clock_ms())


def _endpoint(properties: Mapping[str, str], region: str) -> str:
    """Return the address of the token service; by default that of the store."""
    own = properties.get("s3.assumed.role.sts.endpoint") or properties.get("s3.endpoint")
    return own or f"https://sts.{region}.amazonaws.com"


def token_json(keys: AwsKeys) -> bytes:
    """Return a token in the form that clients read."""
    fields = {"access_key_id": keys.access_key, "access_key_secret": keys.secret_key}
    if keys.session_token:
        fields["security_token"] = keys.session_token
    return json.dumps(fields).encode()


def session_policy(bucket: str, prefixes: Sequence[str]) -> dict[str, Any]:
    """Return a policy that allows to read objects below these prefixes of a bucket, no more.

    It allows listing too: without that right S3 answers "forbidden" for a missing object.
    """
    below = [f"{prefix}/*" if prefix else "*" for prefix in prefixes]
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": "s3:GetObject",
                "Resource": [f"arn:aws:s3:::{bucket}/{path}" for path in below],
            },
            {
                "Effect": "Allow",
                "Action": "s3:ListBucket",
                "Resource": f"arn:aws:s3:::{bucket}",
                "Condition": {"StringLike": {"s3:prefix": below}},
            },
        ],
    }


def policy_text(uri: LocationUri, prefixes: Sequence[str]) -> str:
    """Return the policy of a session for these prefixes, as the token service gets it."""
    paths = [prefix.removeprefix(uri.fs_key).strip("/") for prefix in prefixes]
    return json.dumps(session_policy(uri.authority, paths), separators=(",", ":"))


def policy_groups(uri: LocationUri, prefixes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the prefixes in their order, in groups whose policies are short enough."""
    groups: list[tuple[str, ...]] = [()]
    for prefix in prefixes:
        longer = (*groups[-1], prefix)
        if len(policy_text(uri, longer)) <= POLICY_CHARS_MAX:
            groups[-1] = longer
            continue
        alone = len(policy_text(uri, [prefix]))
        if alone > POLICY_CHARS_MAX:
            raise SecurityTokenError(
                f"a token for {prefix} needs a policy of {alone} characters, {POLICY_CHARS_MAX} "
                "are allowed; use a location with a shorter address"
            )
        groups.append((prefix,))
        if len(groups) > SESSIONS_MAX:
            raise SecurityTokenError(
                f"a token for {len(prefixes)} prefixes of {uri.fs_key} needs more than "
                f"{SESSIONS_MAX} sessions; ask for fewer tables at once"
            )
    return groups
