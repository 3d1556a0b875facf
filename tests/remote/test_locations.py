"""The registry of locations: changes by the configuration and by operators."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.config import Configuration
from zufluss.errors import ConfigError, CorruptRecordError, ErrorCode, ZuflussError
from zufluss.remote.locations import (
    IMPLICIT,
    AdminState,
    AlterOp,
    Location,
    Locations,
    UnknownLocationError,
)
from zufluss.remote.registry import alter, reconcile

DIRS = "remote.data.dirs"
WEIGHTS = "remote.data.dirs.weights"


def conf_of(**more: str) -> Configuration:
    return Configuration.of(
        {"data.dir": "/data"} | {k.replace("_", "."): v for k, v in more.items()}
    )


def listed(dirs: str, weights: str | None = None, **more: str) -> Configuration:
    pairs = {"data.dir": "/data", DIRS: dirs}
    if weights is not None:
        pairs |= {"remote.data.dirs.strategy": "WEIGHTED_ROUND_ROBIN", WEIGHTS: weights}
    return Configuration.of(pairs | {k.replace("_", "."): v for k, v in more.items()})


ABC = listed("s3://a/x,s3://b/x,/c", "5,1,1")


def registry(conf: Configuration = ABC) -> Locations:
    return reconcile(None, conf, {})


def operate(
    before: Locations, op: AlterOp, live: dict[int, int] | None = None, **more: Any
) -> Locations:
    return alter(before, op, conf=ABC, live=live or {}, **more)


def test_each_configured_address_gets_an_id_and_its_weight() -> None:
    found = registry()
    assert [(x.location_id, x.uri, x.weight) for x in found.locations] == [
        (1, "s3://a/x", 5),
        (2, "s3://b/x", 1),
        (3, "file:///c", 1),
    ]
    assert found.version == 1
    assert found.explicit


def test_round_robin_gives_every_location_the_same_weight() -> None:
    assert [x.weight for x in registry(listed("/a,/b")).locations] == [1, 1]


def test_a_single_directory_is_one_location() -> None:
    found = registry(conf_of(remote_data_dir="/a"))
    assert [(x.uri, x.weight) for x in found.locations] == [("file:///a", 1)]
    assert found.explicit


def test_the_list_wins_over_the_single_directory_that_is_in_it() -> None:
    found = registry(listed("/b,/a", remote_data_dir="/a/"))
    assert [x.uri for x in found.locations] == ["file:///b", "file:///a"]


def test_a_single_directory_outside_the_list_is_refused_with_both_keys() -> None:
    with pytest.raises(ConfigError, match=r"remote\.data\.dir is .*remote\.data\.dirs"):
        registry(listed("/b,/c", remote_data_dir="/a"))


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        (listed("/a,/b", "0,0"), "one at least must take new files"),
        (listed("/a,/b", "1,-1"), "'-1'; allowed: whole numbers"),
        (listed("/a,/b", "1"), "has 1 weights for the 2"),
        (listed("/a,/b", "1,2,3"), "has 3 weights for the 2"),
        (listed("/a,/b", ""), "has 0 weights for the 2"),
        (listed("/a,/b", "1,1.5"), "'1.5'; allowed: whole numbers"),
        (listed("/a,/b", "1,x"), "'x'; allowed: whole numbers"),
        (listed("/a,/b", "1,²"), "allowed: whole numbers"),
        (listed("/a,/b", "1,99999999999"), "allowed: whole numbers"),
        (listed("/a,/b", "1,2147483648"), "allowed: whole numbers"),
        (conf_of(remote_data_dir=""), "remote.data.dir is empty"),
        (conf_of(remote_data_dir="  "), "remote.data.dir is empty"),
        (listed("/a,/b,/a/"), "file:///a twice"),
        (listed("s3://b/x,s3a://b/x"), "s3://b/x twice"),
        (listed("/a,/a/b"), "one inside the other"),
        (listed("s3://b/a/b,s3://b/a"), "one inside the other"),
        (listed("s3://b,s3://b/a"), "one inside the other"),
        (listed("/a,ftp://b/a"), "scheme 'ftp' is not known"),
        (listed("/a,/b/../c"), r"`\.\.` is not allowed"),
    ],
)
def test_an_invalid_configuration_is_refused_and_changes_nothing(
    conf: Configuration, message: str
) -> None:
    before = registry()
    kept = replace(before)
    with pytest.raises(ConfigError, match=message):
        reconcile(before, conf, {})
    with pytest.raises(ConfigError, match=message):
        reconcile(None, conf, {})
    assert before == kept


def test_weights_without_the_weighted_strategy_are_not_looked_at() -> None:
    """A strategy can be switched back and forth without touching the weights."""
    conf = Configuration.of({DIRS: "/a,/b", WEIGHTS: "1,2,3"})
    assert [x.weight for x in registry(conf).locations] == [1, 1]


def test_the_same_configuration_changes_nothing() -> None:
    before = registry()
    assert reconcile(before, ABC, {1: 7}) is before


def test_another_weight_keeps_the_id_and_raises_the_version() -> None:
    after = reconcile(registry(), listed("s3://a/x,s3://b/x,/c", "0,1,9"), {1: 7})
    assert [(x.location_id, x.weight) for x in after.locations] == [(1, 0), (2, 1), (3, 9)]
    assert after.version == 2


def test_a_new_address_gets_a_new_id_wherever_it_stands_in_the_list() -> None:
    after = reconcile(registry(), listed("/new,s3://a/x,s3://b/x,/c"), {})
    assert [x.uri for x in after.locations] == ["s3://a/x", "s3://b/x", "file:///c", "file:///new"]


def test_an_address_with_files_cannot_be_left_out() -> None:
    with pytest.raises(ConfigError, match=r"location 2 .* still has 17 files"):
        reconcile(registry(), listed("s3://a/x,/c"), {2: 17})


def test_an_address_without_files_is_retired_and_its_id_stays_taken() -> None:
    after = reconcile(registry(), listed("s3://a/x,s3://b/x"), {1: 17})
    assert after.get(3).state is AdminState.RETIRED
    later = reconcile(after, listed("s3://a/x,s3://b/x,/d"), {})
    assert later.get(4).uri == "file:///d"


def test_an_address_that_comes_back_gets_its_old_id() -> None:
    after = reconcile(registry(), listed("s3://a/x,s3://b/x"), {})
    again = reconcile(after, ABC, {})
    assert again.get(3).state is AdminState.ACTIVE
    assert len(again.locations) == 3


def test_without_any_address_there_is_one_beside_the_data() -> None:
    found = registry(conf_of())
    assert [(x.location_id, x.uri) for x in found.locations] == [(1, IMPLICIT)]
    assert not found.explicit
    assert found.resolved(conf_of()).get(1).uri == "file:///data/remote"


def test_the_location_beside_the_data_moves_with_it() -> None:
    stored = Locations.from_json(registry(conf_of()).to_json())
    moved = Configuration.of({"data.dir": "/elsewhere"})
    assert reconcile(stored, moved, {1: 9}) is stored
    assert stored.resolved(moved).get(1).uri == "file:///elsewhere/remote"


def test_the_location_beside_the_data_drains_once_there_is_another() -> None:
    after = reconcile(registry(conf_of()), ABC, {1: 9})
    assert after.explicit
    assert after.get(1).state is AdminState.DRAINING
    assert after.get(2).uri == "s3://a/x"
    assert reconcile(after, ABC, {1: 9}) is after
    assert reconcile(after, ABC, {}).get(1).state is AdminState.RETIRED


def test_the_location_beside_the_data_comes_back_with_the_old_configuration() -> None:
    drained = reconcile(registry(conf_of()), conf_of(remote_data_dir="/a"), {1: 9})
    back = reconcile(drained, conf_of(), {1: 9})
    assert back.get(1).state is AdminState.ACTIVE
    assert back.get(2).state is AdminState.RETIRED
    assert not back.explicit


def test_naming_the_directory_beside_the_data_makes_no_second_location() -> None:
    after = reconcile(registry(conf_of()), conf_of(remote_data_dir="/data/remote"), {1: 9})
    assert [(x.location_id, x.uri) for x in after.locations] == [(1, "file:///data/remote")]
    assert after.explicit


def test_adaptive_weights_follow_the_configuration() -> None:
    after = reconcile(
        registry(),
        listed("s3://a/x,s3://b/x,/c", "5,1,1", **{"zufluss.remote.adaptive-weights": "true"}),
        {},
    )
    assert after.adaptive
    assert after.version == 2


def test_what_an_operator_did_outlives_a_restart_with_the_same_configuration() -> None:
    before = operate(registry(), AlterOp.ADD, uri="/d", weight=4)
    before = operate(before, AlterOp.DRAIN, location_id=1)
    before = operate(before, AlterOp.SET_WEIGHT, location_id=2, weight=9)
    before = operate(before, AlterOp.DRAIN, location_id=3)
    before = operate(before, AlterOp.MOVE, location_id=3, uri="/c2")
    assert reconcile(before, ABC, dict.fromkeys(range(1, 5), 1)) is before


def test_neither_configuration_nor_operator_puts_a_location_into_memory() -> None:
    """Acknowledged rows would be gone after a restart."""
    drained = operate(registry(), AlterOp.DRAIN, location_id=2)
    for refused in (
        lambda: registry(conf_of(remote_data_dir="memory://x")),
        lambda: registry(listed("s3://a/x,memory://x", "1,1")),
        lambda: operate(drained, AlterOp.ADD, uri="memory://x"),
        lambda: operate(drained, AlterOp.MOVE, location_id=2, uri="memory://x"),
    ):
        with pytest.raises(ConfigError, match="memory is lost when the server stops"):
            refused()


def test_a_moved_location_stays_itself_when_the_configuration_follows() -> None:
    """The files keep their location's id."""
    drained = operate(registry(), AlterOp.DRAIN, location_id=2)
    moved = operate(drained, AlterOp.MOVE, location_id=2, uri="s3://copy/x")
    assert moved.get(2).uri == "s3://copy/x"
    after = reconcile(moved, listed("s3://a/x,s3://copy/x,/c", "5,1,1"), {2: 17})
    assert [x.uri for x in after.locations] == ["s3://a/x", "s3://copy/x", "file:///c"]


def test_the_registry_says_in_which_version_a_location_was_last_moved() -> None:
    """Files that were uploaded before may lie at the former address."""
    drained = operate(registry(), AlterOp.DRAIN, location_id=2)
    assert drained.moved_version == 0
    moved = operate(drained, AlterOp.MOVE, location_id=2, uri="s3://copy/x")
    assert moved.moved_version == moved.version == drained.version + 1
    assert operate(moved, AlterOp.MOVE, location_id=2, uri="s3://copy/x") is moved
    after = operate(moved, AlterOp.ADD, uri="s3://new/x")
    assert after.moved_version == moved.version < after.version
    assert Locations.from_json(after.to_json()) == after
    older = {k: v for k, v in json.loads(after.to_json()).items() if k != "moved_version"}
    assert Locations.from_json(json.dumps(older).encode()).moved_version == 0


def test_the_old_and_the_new_address_of_a_moved_location_cannot_both_be_configured() -> None:
    drained = operate(registry(), AlterOp.DRAIN, location_id=2)
    moved = operate(drained, AlterOp.MOVE, location_id=2, uri="s3://copy/x")
    for dirs in ("s3://b/x,s3://copy/x", "s3://copy/x,s3://b/x"):
        with pytest.raises(ConfigError, match="s3://copy/x twice"):
            reconcile(moved, listed(dirs), {})


def test_a_location_cannot_be_moved_onto_another() -> None:
    drained = operate(registry(), AlterOp.DRAIN, location_id=1)
    with pytest.raises(ConfigError, match="s3://b/x twice"):
        operate(drained, AlterOp.MOVE, location_id=1, uri="s3a://b//x/")


def test_the_only_location_that_takes_files_can_be_moved() -> None:
    only = registry(listed("/a"))
    assert operate(only, AlterOp.MOVE, location_id=1, uri="/b").get(1).uri == "file:///b"


def test_one_directory_under_two_names_is_refused(tmp_path: Path) -> None:
    """To the sweep of each name, the files of the other would be garbage."""
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = registry(listed(f"{tmp_path}/a,{tmp_path}/b"))
    for address in (tmp_path / "link", tmp_path / "link" / "below"):
        with pytest.raises(ConfigError, match=r"symbolic links followed.*/a"):
            operate(before, AlterOp.ADD, uri=str(address))
        with pytest.raises(ConfigError, match="symbolic links followed"):
            registry(listed(f"{tmp_path}/a,{address}"))


def test_the_address_of_a_retired_location_belongs_to_the_location_that_has_it_now() -> None:
    before = reconcile(registry(), listed("s3://b/x,/c"), {})
    before = operate(before, AlterOp.DRAIN, location_id=2)
    before = operate(before, AlterOp.MOVE, location_id=2, uri="s3://a/x")
    after = reconcile(before, listed("s3://a/x,/c"), {2: 7})
    assert after.get(1).state is AdminState.RETIRED
    assert (after.get(2).uri, after.get(2).state) == ("s3://a/x", AdminState.ACTIVE)


def test_the_location_beside_the_data_is_not_used_again_beside_others() -> None:
    before = operate(registry(conf_of()), AlterOp.ADD, live={1: 3}, uri="/d")
    with pytest.raises(ConfigError, match="other machines cannot read"):
        operate(before, AlterOp.ACTIVATE, location_id=1)


def test_an_added_location_takes_files() -> None:
    after = operate(registry(), AlterOp.ADD, uri="/d", weight=4)
    assert after.get(4) == Location(4, "file:///d", 4)
    assert after.version == 2


def test_a_configured_address_that_an_operator_added_before_is_the_same_location() -> None:
    added = operate(registry(), AlterOp.ADD, uri="/d")
    after = reconcile(added, listed("s3://a/x,s3://b/x,/c,/d"), {4: 1})
    assert len(after.locations) == 4


@pytest.mark.parametrize("uri", ["/c", "/c/d", "s3://a", "", "ftp://x/y", "/x/../y"])
def test_an_address_that_overlaps_or_cannot_be_is_not_added(uri: str) -> None:
    with pytest.raises(ConfigError):
        operate(registry(), AlterOp.ADD, uri=uri)


def test_nothing_is_added_inside_the_location_beside_the_data() -> None:
    with pytest.raises(ConfigError, match="one inside the other"):
        alter(registry(conf_of()), AlterOp.ADD, conf=conf_of(), uri="/data/remote/x", live={1: 1})


def test_adding_a_location_drains_the_one_beside_the_data() -> None:
    after = alter(registry(conf_of()), AlterOp.ADD, conf=conf_of(), uri="/d", live={1: 3})
    assert after.explicit
    assert after.get(1).state is AdminState.DRAINING
    assert reconcile(after, conf_of(), {1: 3}) is after


def test_a_location_is_drained_and_retired_when_nothing_is_left() -> None:
    drained = operate(registry(), AlterOp.DRAIN, location_id=1)
    assert drained.get(1).state is AdminState.DRAINING
    with pytest.raises(ConfigError, match=r"location 1 .* still has 4 files"):
        operate(drained, AlterOp.RETIRE, {1: 4}, location_id=1)
    retired = operate(drained, AlterOp.RETIRE, location_id=1)
    assert retired.get(1).state is AdminState.RETIRED
    assert retired.first.location_id == 2


def test_a_location_that_takes_files_is_not_retired() -> None:
    with pytest.raises(ConfigError, match="drain it first"):
        operate(registry(), AlterOp.RETIRE, location_id=1)


def test_a_drained_location_can_be_activated() -> None:
    drained = operate(registry(), AlterOp.DRAIN, location_id=1)
    assert operate(drained, AlterOp.ACTIVATE, location_id=1).get(1).takes_files


def test_an_alteration_without_effect_changes_no_version() -> None:
    before = registry()
    assert operate(before, AlterOp.ACTIVATE, location_id=1) is before


def test_the_last_location_that_takes_files_stays() -> None:
    one = registry(conf_of(remote_data_dir="/a"))
    for op, more in ((AlterOp.DRAIN, {}), (AlterOp.SET_WEIGHT, {"weight": 0})):
        with pytest.raises(ConfigError, match="no location would take new files"):
            operate(one, op, location_id=1, **more)


def test_a_configuration_cannot_leave_drained_locations_alone() -> None:
    drained = operate(registry(), AlterOp.DRAIN, location_id=1)
    with pytest.raises(ConfigError, match="no location would take new files"):
        reconcile(drained, listed("s3://a/x,s3://b/x,/c", "5,0,0"), {})


@pytest.mark.parametrize(
    ("op", "more", "message"),
    [
        (AlterOp.ADD, {}, "needs an address"),
        (AlterOp.DRAIN, {}, "needs the id"),
        (AlterOp.DRAIN, {"location_id": 9}, "no location 9; there are 1, 2, 3"),
        (AlterOp.MOVE, {"location_id": 1}, "needs the new address"),
        (AlterOp.MOVE, {"location_id": 1, "uri": "s3://d/x"}, "still takes files.*weight 0"),
        (AlterOp.ADD, {"uri": "s3://b/x/"}, "twice"),
        (AlterOp.SET_WEIGHT, {"location_id": 1}, "needs a weight"),
        (AlterOp.SET_WEIGHT, {"location_id": 1, "weight": -1}, "has -1; allowed"),
        (AlterOp.ADD, {"uri": "/d", "weight": 2**31}, "allowed: whole numbers"),
    ],
)
def test_an_alteration_says_what_it_lacks(op: AlterOp, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        operate(registry(), op, **more)


def test_a_retired_location_is_only_activated() -> None:
    retired = reconcile(registry(), listed("s3://a/x,s3://b/x"), {})
    with pytest.raises(ConfigError, match="activate it first"):
        operate(retired, AlterOp.MOVE, location_id=3, uri="/d")
    assert operate(retired, AlterOp.ACTIVATE, location_id=3).get(3).takes_files


def test_a_change_of_another_version_is_a_conflict() -> None:
    with pytest.raises(ZuflussError) as e:
        operate(registry(), AlterOp.DRAIN, location_id=1, expected_version=2)
    assert e.value.code is ErrorCode.INVALID_UPDATE_VERSION_EXCEPTION
    assert operate(registry(), AlterOp.DRAIN, location_id=1, expected_version=1).version == 2


def test_an_unknown_id_is_retriable_because_a_newer_registry_may_have_it() -> None:
    with pytest.raises(UnknownLocationError, match="location 9 is not in version 1") as e:
        registry().get(9)
    assert e.value.retriable


def test_an_empty_registry_has_no_first_location() -> None:
    with pytest.raises(UnknownLocationError):
        Locations(0, (), explicit=False).first  # noqa: B018


def test_an_address_travels_only_in_full() -> None:
    with pytest.raises(ValueError, match="has no address for a message"):
        registry(conf_of()).to_proto()


LOCATION = st.builds(
    Location,
    st.integers(1, 2**31 - 1),
    st.text(min_size=1),
    st.integers(0, 2**31 - 1),
    st.sampled_from(AdminState),
    st.none() | st.text(),
    st.none() | st.integers(0, 2**31 - 1),
)
LOCATIONS = st.builds(
    Locations,
    st.integers(0, 2**63 - 1),
    st.lists(LOCATION, max_size=5).map(tuple),
    st.booleans(),
    st.booleans(),
)


@given(LOCATIONS)
@settings(max_examples=50)
def test_a_registry_comes_back_from_storage_as_it_was(found: Locations) -> None:
    assert Locations.from_json(found.to_json()) == found


@given(LOCATIONS)
@settings(max_examples=50)
def test_a_registry_comes_back_from_the_wire_without_what_was_configured(found: Locations) -> None:
    plain = tuple(replace(x, configured=None, configured_weight=None) for x in found.locations)
    assert Locations.from_proto(found.to_proto()) == replace(found, locations=plain)


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(st.sampled_from(["version", "locations", "explicit", "adaptive"]), x)
        ),
        max_leaves=8,
    ).map(lambda x: json.dumps(x).encode())
)
@settings(max_examples=100)
def test_a_damaged_registry_is_a_typed_error(data: bytes) -> None:
    try:
        Locations.from_json(data)
    except CorruptRecordError:
        return


URIS = ["/a", "/b", "/c", "s3://d/x", "/a/b"]
STEP = st.one_of(
    st.tuples(st.just("conf"), st.lists(st.sampled_from(URIS), max_size=3)),
    st.tuples(
        st.sampled_from(list(AlterOp)), st.integers(1, 5), st.sampled_from(URIS), st.integers(0, 2)
    ),
)


@given(st.lists(STEP, max_size=12), st.dictionaries(st.integers(1, 4), st.integers(0, 2)))
@settings(max_examples=100)
def test_no_change_reuses_an_id_loses_files_or_leaves_nowhere_to_write(
    steps: list[tuple[Any, ...]], live: dict[int, int]
) -> None:
    """Whatever is asked for, in any order."""
    conf = conf_of()
    found = reconcile(None, conf, live)
    for step in steps:
        before = found
        try:
            if step[0] == "conf":
                found = reconcile(before, listed(",".join(step[1])), live)
                conf = listed(",".join(step[1]))
            else:
                op, location_id, uri, weight = step
                found = alter(
                    before,
                    op,
                    conf=conf,
                    live=live,
                    location_id=location_id,
                    uri=uri,
                    weight=weight,
                )
        except ConfigError:
            continue
        _check_step(before, found, live)


def _check_step(before: Locations, found: Locations, live: dict[int, int]) -> None:
    assert found is before or found.version == before.version + 1
    assert any(x.takes_files for x in found.locations)
    assert {x.location_id for x in before.locations} <= {x.location_id for x in found.locations}
    for old in before.locations:
        new = found.get(old.location_id)
        if live.get(old.location_id) and old.state is not AdminState.RETIRED:
            assert new.state is not AdminState.RETIRED
