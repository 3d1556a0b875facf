"""Tokens with which clients read remote files, made by a server for each file system.

| file system | the token opens |
|---|---|
| S3 with `s3.assumed.role.arn` | the prefixes it was made for, nothing else: path-scoped |
| S3 with an access key | what the server's own key opens |
| any other, or `zufluss.remote.tokens = none` | nothing: the client brings what it needs |

A token is JSON as Fluss's clients read it, `{"access_key_id", "access_key_secret",
"security_token"}`, and beside it stand Hadoop's keys for the address of the store. Tokens are kept
and handed out again while at least half of their life is left; several who ask at once share one
request to the token service.
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
from zufluss.remote.sts import AwsKeys, SecurityTokenError, Session
from zufluss.remote.uri import S3, LocationUri

LIFE_SECONDS: Final = 3600
"""How long a token lives; what a role allows by default."""
KEPT_MAX: Final = 1024
"""Tokens that a server remembers."""
POLICY_CHARS_MAX: Final = 2048
"""AWS takes no longer session policy."""
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
    """What opens everything below a prefix."""

    prefix: str
    """An address, or the start of one; the longest prefix of a path counts."""
    schema: str
    """The scheme of the file system."""
    token: bytes = field(default=b"", repr=False)
    """JSON; empty when the client needs none, or brings its own."""
    expires_ms: int | None = None
    """Epoch milliseconds; None if it does not end."""
    info: Mapping[str, str] = field(default_factory=dict)
    """Where the store is, in Hadoop's keys."""
    path_scoped: bool = False
    """It opens nothing outside the prefix."""


@dataclass(slots=True)
class _Kept:
    made: asyncio.Task[Session]
    asked_ms: int


class Tokens:
    """The tokens of one server."""

    def __init__(self, conf: Configuration, clock_ms: Callable[[], int]) -> None:
        self._conf = conf
        self._clock_ms = clock_ms
        self._kept: OrderedDict[tuple[str, tuple[str, ...]], _Kept] = OrderedDict()

    def is_scoped(self, uri: LocationUri) -> bool:
        """Whether tokens of this file system can be limited to prefixes."""
        return "s3.assumed.role.arn" in self._properties(uri) and self._gives(uri)

    def is_secret(self, uri: LocationUri) -> bool:
        """Whether tokens of this file system open anything."""
        return self._gives(uri)

    async def token(self, uri: LocationUri, prefixes: Sequence[str]) -> list[FileSystemToken]:
        """What opens these prefixes, addresses in the file system of `uri`; one entry for each.

        Where tokens cannot be limited, there is one entry for the file system.
        """
        info = self._info(uri)
        if not self._gives(uri):
            return [FileSystemToken(uri.fs_key, uri.scheme, info=info)]
        scoped = self.is_scoped(uri)
        if scoped and not prefixes:
            return []
        session = await self._session(uri, tuple(sorted(prefixes)) if scoped else ())
        return [
            FileSystemToken(
                prefix, uri.scheme, token_json(session.keys), session.expires_ms, info, scoped
            )
            for prefix in (prefixes if scoped else [uri.fs_key])
        ]

    def _properties(self, uri: LocationUri) -> dict[str, str]:
        return store_properties(self._conf, uri)

    def _gives(self, uri: LocationUri) -> bool:
        """The store gives out credentials, and we have what it takes to ask for them.

        Temporary keys are not enough without a role: no session follows from a session.
        """
        if uri.scheme != S3 or self._conf.get(o.ZUFLUSS_REMOTE_TOKENS) == "none":
            return False
        found = self._properties(uri)
        if "s3.access-key" not in found or "s3.secret-key" not in found:
            return False
        return "s3.assumed.role.arn" in found or "s3.session-token" not in found

    def _info(self, uri: LocationUri) -> dict[str, str]:
        if uri.scheme != S3:
            return {}
        found = self._properties(uri)
        if "s3.endpoint" in found:
            found = {"s3.region": REGION, "s3.path-style-access": "true", **found}
        return {name: found[key] for key, name in _INFO.items() if key in found}

    async def _session(self, uri: LocationUri, prefixes: tuple[str, ...]) -> Session:
        key = (uri.fs_key, prefixes)
        kept = self._kept.get(key)
        if kept is None or self._is_old(kept):
            kept = _Kept(asyncio.ensure_future(self._ask(uri, prefixes)), self._clock_ms())
            self._kept[key] = kept
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return await asyncio.shield(kept.made)

    def _is_old(self, kept: _Kept) -> bool:
        if not kept.made.done():
            return False
        if kept.made.cancelled() or kept.made.exception() is not None:
            return True
        left = kept.made.result().expires_ms - self._clock_ms()
        return 2 * left < kept.made.result().expires_ms - kept.asked_ms

    async def _ask(self, uri: LocationUri, prefixes: tuple[str, ...]) -> Session:
        found = self._properties(uri)
        keys = AwsKeys(
            found["s3.access-key"], found["s3.secret-key"], found.get("s3.session-token")
        )
        form = {"Action": "GetSessionToken", "DurationSeconds": str(LIFE_SECONDS)}
        if prefixes:
            form |= {
                "Action": "AssumeRole",
                "RoleArn": found["s3.assumed.role.arn"],
                "RoleSessionName": SESSION_NAME,
                "Policy": _policy_text(uri, prefixes),
            }
        region = found.get("s3.region", REGION)
        timeout_ms = self._conf.get(o.ZUFLUSS_REMOTE_REQUEST_TIMEOUT)
        return await sts.call(_endpoint(found, region), region, keys, form, timeout_ms)


def _endpoint(found: Mapping[str, str], region: str) -> str:
    """The token service; stores with an address of their own have it there, too."""
    own = found.get("s3.assumed.role.sts.endpoint") or found.get("s3.endpoint")
    return own or f"https://sts.{region}.amazonaws.com"


def token_json(keys: AwsKeys) -> bytes:
    """A token as clients read it."""
    fields = {"access_key_id": keys.access_key, "access_key_secret": keys.secret_key}
    if keys.session_token:
        fields["security_token"] = keys.session_token
    return json.dumps(fields).encode()


def session_policy(bucket: str, prefixes: Sequence[str]) -> dict[str, Any]:
    """What reads objects below these prefixes of a bucket, and nothing else.

    Listing is part of it, because S3 says "forbidden" of a missing object to who may not list.
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


def _policy_text(uri: LocationUri, prefixes: Sequence[str]) -> str:
    paths = [prefix.removeprefix(uri.fs_key).strip("/") for prefix in prefixes]
    text = json.dumps(session_policy(uri.authority, paths), separators=(",", ":"))
    if len(text) > POLICY_CHARS_MAX:
        raise SecurityTokenError(
            f"a token for {len(prefixes)} prefixes of {uri.fs_key} needs a policy of {len(text)} "
            f"characters, {POLICY_CHARS_MAX} are allowed; ask for fewer tables at once"
        )
    return text
