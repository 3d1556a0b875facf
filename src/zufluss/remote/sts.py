"""Short-lived S3 credentials from a token service (STS), with the standard library alone.

Two of its actions are used, both as a signed POST of a form:

| action | used if | rights of the credentials |
|---|---|---|
| `AssumeRole` with a policy | a role for readers is configured | those of the policy |
| `GetSessionToken` | only the server's own keys are configured | those of the server |

The signature is AWS's version 4: a chain of HMAC-SHA256 from the secret over date, region and
service, applied to a digest of the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from html import unescape
from typing import Final
from urllib.parse import urlencode, urlsplit

from zufluss.errors import ErrorCode, ZuflussError
from zufluss.threads import Threads

VERSION: Final = "2011-06-15"
ANSWER_BYTES_MAX: Final = 1 << 20
CALLS_AT_ONCE: Final = 4
"""Concurrent requests to token services."""
_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_FORM: Final = "application/x-www-form-urlencoded; charset=utf-8"


class SecurityTokenError(ZuflussError, code=ErrorCode.SECURITY_TOKEN_EXCEPTION):
    """No credentials for clients could be created."""


@dataclass(frozen=True, slots=True)
class AwsKeys:
    """Credentials that sign requests."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class StsSession:
    """Credentials that expire."""

    keys: AwsKeys
    expires_ms: int
    """Time of expiry in epoch milliseconds."""


async def call(
    endpoint: str,
    region: str,
    keys: AwsKeys,
    form: Mapping[str, str],
    timeout_ms: int,
    now_ms: int,
) -> StsSession:
    """Request credentials from a token service; `form` is an action with its parameters."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        _threads(), _call, endpoint, region, keys, form, timeout_ms / 1000, now_ms
    )


@cache
def _threads() -> Threads:
    """Threads of our own: a dead service must not block those of others."""
    return Threads(CALLS_AT_ONCE, "zufluss-tokens", may_hang=True)


def _call(
    endpoint: str,
    region: str,
    keys: AwsKeys,
    form: Mapping[str, str],
    seconds: float,
    now_ms: int,
) -> StsSession:
    import http.client
    import urllib.error
    import urllib.request

    body = urlencode({**form, "Version": VERSION}).encode()
    headers = signed_headers(
        endpoint, region, keys, body, datetime.fromtimestamp(now_ms / 1000, UTC)
    )
    request = urllib.request.Request(endpoint, body, dict(headers), method="POST")
    action = form["Action"]
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return session_of(answer.read(ANSWER_BYTES_MAX).decode("utf-8", "replace"))
    except urllib.error.HTTPError as e:
        text = e.read(ANSWER_BYTES_MAX).decode("utf-8", "replace")
        reason = f"{e.code} {_element(text, 'Code')} {_element(text, 'Message')}".strip()
        raise SecurityTokenError(
            f"the token service {endpoint} refused {action}: {reason:.300}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise SecurityTokenError(
            f"the token service {endpoint} did not answer {action}: {e}; check "
            "s3.assumed.role.sts.endpoint and s3.endpoint"
        ) from None


def session_of(answer: str) -> StsSession:
    """Return the credentials in an answer; ValueError if it has none."""
    expires = datetime.fromisoformat(_element(answer, "Expiration").replace("Z", "+00:00"))
    keys = AwsKeys(
        _element(answer, "AccessKeyId"),
        _element(answer, "SecretAccessKey"),
        _element(answer, "SessionToken"),
    )
    if not keys.access_key or not keys.secret_key:
        raise ValueError("the answer has no credentials")
    return StsSession(keys, int(expires.timestamp() * 1000))


def _element(answer: str, name: str) -> str:
    match = re.search(rf"<{name}>([^<]*)</{name}>", answer)
    return unescape(match[1]).strip() if match else ""


def signed_headers(
    endpoint: str, region: str, keys: AwsKeys, body: bytes, now: datetime
) -> dict[str, str]:
    """Return the headers of a POST to the root of `endpoint`, signature included."""
    parts = urlsplit(endpoint)
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    headers = {"content-type": _FORM, "host": parts.netloc, "x-amz-date": stamp}
    if keys.session_token:
        headers["x-amz-security-token"] = keys.session_token
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = f"POST\n{parts.path or '/'}\n\n{lines}\n{names}\n{_digest(body)}"
    scope = f"{day}/{region}/sts/aws4_request"
    to_sign = f"{_ALGORITHM}\n{stamp}\n{scope}\n{_digest(request.encode())}"
    key = f"AWS4{keys.secret_key}".encode()
    for step in scope.split("/"):
        key = hmac.digest(key, step.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    headers["authorization"] = (
        f"{_ALGORITHM} Credential={keys.access_key}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    return headers


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
