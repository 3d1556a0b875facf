"""Parses and prints times and positions in a log."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

import typer

EARLIEST: Final = "earliest"
UNBROKEN: Final = "unbroken"
LATEST: Final = "latest"

Position = Literal["earliest", "unbroken", "latest"] | int
"""The beginning or end of a log, the end of its last loss, or epoch milliseconds."""


def iso_time(epoch_ms: int) -> str:
    """Format epoch milliseconds as ISO 8601 in UTC."""
    moment = datetime.fromtimestamp(epoch_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time_ms(text: str) -> int:
    """Parse ISO 8601 (UTC unless it has a zone) or a number to epoch milliseconds."""
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a point in time; allowed: earliest, unbroken, latest, epoch "
            "milliseconds, ISO 8601 such as 2026-01-31T08:00:00Z; offset:N where the help has it"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def parse_position(text: str) -> Position:
    """Parse `earliest`, `unbroken`, `latest` or a time to a position of the client."""
    if text == EARLIEST:
        return EARLIEST
    if text == UNBROKEN:
        return UNBROKEN
    return LATEST if text == LATEST else parse_time_ms(text)
