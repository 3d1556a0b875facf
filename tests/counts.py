"""How often tests repeat: samples in `make test`, more in `make test-more`, all in `make fault`.

| command | ZUFLUSS_FAULT | `rounds(sample, full)` |
|---|---|---|
| `make test` | not set | sample |
| `make test-more` | more | three samples, at most full |
| `make fault` | full | full |
"""

import os

import pytest

TIER = os.environ.get("ZUFLUSS_FAULT", "")
FULL = TIER == "full"
MORE_SAMPLES = 3

only_full = pytest.mark.skipif(not FULL, reason="with the full counts only (make fault)")
"""A test whose sample is another test."""


def rounds(sample: int, full: int) -> int:
    """Return how often a test repeats what it tests."""
    if FULL:
        return full
    return min(MORE_SAMPLES * sample, full) if TIER == "more" else sample
