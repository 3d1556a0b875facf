"""Shares of new files: exact, interleaved, and kept over restarts and changes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.errors import ConfigError, CorruptRecordError
from zufluss.remote.locations import AdminState, Location, Locations
from zufluss.remote.placement import CLUSTER, PARTITION, SmoothRoundRobin, Spread, parse_policy

WEIGHTS = st.dictionaries(st.integers(1, 9), st.integers(1, 50), min_size=1, max_size=6)


def picks(picker: SmoothRoundRobin, weights: dict[int, int], count: int) -> list[int]:
    return [picker.pick(weights) for _ in range(count)]


def test_five_one_one_is_interleaved() -> None:
    assert picks(SmoothRoundRobin(), {1: 5, 2: 1, 3: 1}, 7) == [1, 1, 2, 1, 3, 1, 1]


def test_seven_hundred_files_are_shared_exactly() -> None:
    """With 5, 1, 1 the first location has at most four files in a row."""
    order = picks(SmoothRoundRobin(), {1: 5, 2: 1, 3: 1}, 700)
    assert Counter(order) == {1: 500, 2: 100, 3: 100}
    others = [index for index, location in enumerate(order) if location != 1]
    assert max(b - a for a, b in pairwise(others)) <= 5


def test_weight_zero_gets_none_of_a_thousand_files() -> None:
    assert Counter(picks(SmoothRoundRobin(), {1: 3, 2: 0, 3: 1}, 1000)) == {1: 750, 3: 250}


def test_equal_weights_take_turns() -> None:
    assert picks(SmoothRoundRobin(), {7: 1, 3: 1, 5: 1}, 6) == [3, 5, 7, 3, 5, 7]


def test_no_location_to_pick_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no weight above 0"):
        SmoothRoundRobin().pick({1: 0})


@pytest.mark.parametrize("value", [2**31 - 1, 2**63 - 1, -(2**63), 2**200])
def test_no_stored_number_is_too_large(value: int) -> None:
    picker = SmoothRoundRobin({1: value, 2: -value})
    assert Counter(picks(picker, {1: 1, 2: 1}, 100)).keys() == {1, 2}
    assert abs(picker.current[1]) <= 4


@pytest.mark.parametrize("weight", [2**31 - 1, 2**63 - 1])
def test_no_weight_is_too_large(weight: int) -> None:
    assert Counter(picks(SmoothRoundRobin(), {1: weight, 2: weight}, 100)) == {1: 50, 2: 50}


@given(WEIGHTS, st.integers(1, 4))
@settings(max_examples=100)
def test_every_round_of_picks_has_the_exact_shares(weights: dict[int, int], rounds: int) -> None:
    picker = SmoothRoundRobin()
    total = sum(weights.values())
    for _ in range(rounds):
        assert Counter(picks(picker, weights, total)) == weights
        assert not any(picker.current.values())


@given(WEIGHTS, st.integers(1, 300))
@settings(max_examples=100)
def test_shares_are_never_far_off_in_between(weights: dict[int, int], count: int) -> None:
    """No location is ahead by a whole file, nor behind by as many as there are locations."""
    found = Counter(picks(SmoothRoundRobin(), weights, count))
    total = sum(weights.values())
    for key, weight in weights.items():
        share = count * weight / total
        assert found[key] < share + 1
        assert found[key] > share - len(weights)


@given(WEIGHTS, st.lists(st.booleans(), max_size=60))
@settings(max_examples=50)
def test_restarts_do_not_change_what_is_picked(
    weights: dict[int, int], restarts: list[bool]
) -> None:
    steady, restarted = SmoothRoundRobin(), SmoothRoundRobin()
    for restart in restarts:
        if restart:
            restarted = SmoothRoundRobin.from_json(restarted.to_json())
        assert restarted.pick(weights) == steady.pick(weights)


def test_a_restart_after_every_file_keeps_the_shares() -> None:
    """Beginning anew would send every file to the first location."""
    found: Counter[int] = Counter()
    stored = SmoothRoundRobin().to_json()
    for _ in range(300):
        picker = SmoothRoundRobin.from_json(stored)
        found[picker.pick({1: 1, 2: 1, 3: 1})] += 1
        stored = picker.to_json()
    assert found == {1: 100, 2: 100, 3: 100}


def test_new_weights_hold_at_once() -> None:
    """A debt of 1000 : 1 is not paid back one by one."""
    picker = SmoothRoundRobin()
    picks(picker, {1: 1000, 2: 1}, 400)
    found = Counter(picks(picker, {1: 1, 2: 1}, 100))
    assert abs(found[1] - found[2]) <= 4


@given(st.lists(st.dictionaries(st.integers(1, 5), st.integers(0, 9), min_size=1), max_size=60))
@settings(max_examples=100)
def test_locations_that_come_and_go_leave_no_debt(sets: list[dict[int, int]]) -> None:
    picker = SmoothRoundRobin()
    for weights in sets:
        if any(weights.values()):
            assert weights[picker.pick(weights)] > 0
    everyone = dict.fromkeys(range(1, 6), 1)
    found = Counter(picks(picker, everyone, 500))
    assert all(abs(found[key] - 100) <= 10 for key in everyone)


def test_a_pick_without_a_choice_takes_nobodys_turn() -> None:
    """A manifest goes beside its segment; the next segments must not notice."""
    picker, alone = SmoothRoundRobin(), SmoothRoundRobin()
    weights = {1: 5, 2: 1, 3: 1}
    for _ in range(70):
        picked = picker.pick(weights)
        assert picker.pick({picked: weights[picked]}) == picked
        assert picked == alone.pick(weights)


def test_locations_that_are_gone_are_forgotten() -> None:
    picker = SmoothRoundRobin({1: 5, 2: -5})
    picker.keep([2, 3])
    assert picker.current == {2: -5}


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"current":[]}', b'{"current":{"a":1}}', b'{"current":{"1":1.5}}']
)
def test_a_damaged_state_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        SmoothRoundRobin.from_json(data)


@pytest.mark.parametrize("text", ["cluster", "partition", "pinned:1", "pinned:1,3"])
def test_a_policy_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_policy(text)) == text


def test_policies_allow_what_they_say() -> None:
    assert parse_policy(" cluster ") == CLUSTER
    assert parse_policy("partition") == PARTITION
    pinned = parse_policy("pinned: 3, 1,3")
    assert pinned.spread is Spread.PINNED
    assert [x for x in range(5) if pinned.allows(x)] == [1, 3]
    assert CLUSTER.allows(2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pinned",
        "pinned:",
        "pinned:a",
        "pinned:1,,2",
        "pinned:-1",
        "cluster:1",
        "PINNED:1",
        "pinned:1;2",
        "pinned:99999999999",
        "pinned:²",
        "pinned:" + ",".join(map(str, range(65))),
    ],
)
def test_a_policy_that_cannot_be_read_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"table\.zufluss\.remote\.placement"):
        parse_policy(text)


def test_a_table_is_pinned_to_locations_that_are_there() -> None:
    found = Locations(
        1, (Location(1, "/a"), Location(2, "/b", state=AdminState.RETIRED)), explicit=True
    )
    parse_policy("pinned:1").check(found)
    CLUSTER.check(found)
    for text in ("pinned:1,2", "pinned:7"):
        with pytest.raises(ConfigError, match=r"there is no location \d; there are 1"):
            parse_policy(text).check(found)
