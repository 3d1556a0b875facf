"""Requests that are refused before any work, for what their headers say."""

from __future__ import annotations

from zufluss.errors import ErrorCode, RecordTooLargeError
from zufluss.wire.api import Api

CONTROL_BYTES_MAX = 2 * 1024 * 1024
"""Longest body of a client's request that carries no records: decoding multiplies its size."""


def check_control_size(api: Api, size: int) -> None:
    """Refuse a request without records whose body is absurdly long."""
    if size > CONTROL_BYTES_MAX:
        raise RecordTooLargeError(
            f"a {api.name} request of {size} bytes is over the limit of {CONTROL_BYTES_MAX}; "
            "ask for less at a time"
        )


def too_long(length: int, limit: int, login_at: str | None) -> tuple[int, str]:
    """Code and text for a frame over the limit; `login_at` is a listener that waits for a login."""
    if login_at is None:
        code = ErrorCode.RECORD_TOO_LARGE_EXCEPTION
        advice = "(netty.server.max-request-size); send smaller batches"
    else:
        code = ErrorCode.AUTHENTICATE_EXCEPTION
        advice = f"before authentication, which listener {login_at} requires"
    return code, f"request frame of {length} bytes is over the limit of {limit} bytes {advice}"


def unsupported(key: int, version: int, api: Api | None) -> tuple[int, str]:
    """Code and text for an API that is not served, or not in this version."""
    if api is None:
        text = f"API {key} is not served here; ask API_VERSIONS what is"
    else:
        text = (
            f"version {version} of {api.name} is not supported; "
            f"allowed is {api.min_version} to {api.max_version}"
        )
    return ErrorCode.UNSUPPORTED_VERSION, text
