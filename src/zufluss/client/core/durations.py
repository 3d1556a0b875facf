"""Durations as users write them."""

from __future__ import annotations

from datetime import timedelta

from zufluss.config.values import parse_duration_ms
from zufluss.errors import ConfigError

Duration = str | int | timedelta
"""A text such as `"6h"`, milliseconds, or a timedelta."""


def duration_ms_of(duration: Duration, name: str = "lease duration") -> int:
    """Convert to milliseconds; raises `ConfigError` for an invalid text.

    The server decides which durations it accepts.
    """
    if isinstance(duration, timedelta):
        return duration // timedelta(milliseconds=1)
    if isinstance(duration, int):
        return duration
    try:
        return parse_duration_ms(duration)
    except ValueError as allowed:
        raise ConfigError(f"the {name} {duration!r} is not allowed; allowed: {allowed}") from None
