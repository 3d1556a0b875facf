"""The protocol of the shared log loses nothing in any order of events; each shortcut loses rows.

The unsafe designs are not straw men: each was used somewhere, or looks like a simplification. That
their loss is found also shows that the models can find one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.counts import FULL
from tests.log.shared.models import Design, Move

SAFE = {
    "one seal at the first free number": Design(numbers=3, sweep="data"),
    "several seals, the lowest counts": Design(numbers=3, seals=2, sweep="data"),
    "two sealers": Design(numbers=3, sealers=2, lossy=False),
    "two sealers with two seals each": Design(numbers=2, seals=2, sealers=2, lossy=False),
    "a live trim below the recorded floor": Design(trim="floor", lossy=False),
    "trims and lost answers": Design(numbers=2, trim="floor"),
}

LARGE = {
    "four numbers": Design(sweep="data"),
    "three under way": Design(under_way=3, sweep="data"),
    "several seals, four numbers": Design(seals=3, sweep="data"),
    "two sealers with three seals each": Design(numbers=3, seals=3, sealers=2, lossy=False),
    "trims, lost answers, three numbers": Design(numbers=3, trim="floor"),
}

UNSAFE = {
    "acknowledging out of order": Design(numbers=3, in_order=False),
    "deleting the seal with the session": Design(numbers=3, under_way=1, sweep="all"),
    "sealing behind the first free number": Design(numbers=3, under_way=1, seal_ahead=1),
    "trimming alive, sealing from the lowest object on": Design(trim="list", lossy=False),
    "trimming alive, sparing the newest object": Design(trim="newest", lossy=False),
}


@pytest.mark.parametrize("name", SAFE)
def test_no_order_of_events_loses_an_acknowledged_row(name: str) -> None:
    verdict = SAFE[name].verdict()
    assert verdict.loss == ""
    assert verdict.states > 300


@pytest.mark.skipif(not FULL, reason="the small models are enough for every change")
@pytest.mark.parametrize("name", LARGE)
def test_no_order_of_events_loses_an_acknowledged_row_in_larger_models(name: str) -> None:
    assert LARGE[name].verdict().loss == ""


@pytest.mark.parametrize("name", UNSAFE)
def test_the_shortcut_loses_an_acknowledged_row(name: str) -> None:
    assert "acknowledged and not read" in UNSAFE[name].verdict().loss


def test_a_tail_is_carried_before_the_pointer_is_changed() -> None:
    assert Move().verdict().loss == ""
    assert "no rows to read" in replace(Move(), carry_first=False).verdict().loss
