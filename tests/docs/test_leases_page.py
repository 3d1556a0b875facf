"""Options and metrics that docs/leases.md names exist."""

from __future__ import annotations

import re

from tests.paths import DOCS
from zufluss.config.options import OPTIONS
from zufluss.obs.metrics import render

PAGE = DOCS / "leases.md"


def test_the_options_of_the_page_exist() -> None:
    named = set(re.findall(r"`((?:zufluss\.)?kv\.snapshot\.[a-z.-]+)", PAGE.read_text()))
    assert len(named) >= 7
    for key in named:
        assert key in OPTIONS


def test_the_metrics_of_the_page_exist() -> None:
    declared = render()
    named = re.findall(r"`(zufluss_\w+)`", PAGE.read_text())
    assert len(named) == 5
    for name in named:
        assert f"`{name}`" in declared
