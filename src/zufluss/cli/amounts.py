"""Numbers as people read them: bytes, counts, rates and durations, short and with a unit."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))
UNKNOWN: Final = "?"


def bytes_text(size: float | None) -> str:
    """A number of bytes: `17 B`, `2.5 MiB`."""
    if size is None:
        return UNKNOWN
    value, unit = float(size), 0
    while abs(value) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_BYTE_UNITS[unit]}"


def count_text(count: float | None) -> str:
    """A whole number with separators: `1,234,567`."""
    return UNKNOWN if count is None else f"{count:,.0f}"


def rate_text(rate: float | None) -> str:
    """A number per second; small ones have a decimal place."""
    if rate is None:
        return UNKNOWN
    return f"{rate:,.0f}/s" if rate >= 10 or rate == 0 else f"{rate:.1f}/s"


def seconds_text(seconds: float | None) -> str:
    """A duration in its largest unit and the next: `2 d 3 h`, `4 min 10 s`, `0.3 s`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == 0 else f"{seconds:.1f} s"
    sizes = [*_SECONDS_UNITS, (1, "s")]
    for (size, unit), (next_size, next_unit) in pairwise(sizes):
        if seconds >= size:
            rest = int(seconds % size // next_size)
            return f"{int(seconds // size)} {unit} {rest} {next_unit}"
    raise AssertionError(seconds)
