"""The nearest known key to a misspelt one, for warnings and errors."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key most like `key`, or None when nothing is near."""
    matches = get_close_matches(key, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def suggestion(key: str, known: Iterable[str]) -> str:
    """The text ` (did you mean …?)` with the nearest key; empty when none is near."""
    match = nearest(key, known)
    return f" (did you mean {match}?)" if match else ""
