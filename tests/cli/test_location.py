"""`zufluss location` against a real server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import WarmServer

from .conftest import Result

Zufluss = Callable[..., Result]


@pytest.fixture
def zufluss(run: Callable[..., Result], tmp_path: Path) -> Iterator[Zufluss]:
    """Runs a command against a server of its own with one location."""
    properties = {"remote.data.dir": str(tmp_path / "one")}
    with WarmServer(tmp_path / "data", properties) as server:

        def run_against_server(*arguments: str, code: int = 0) -> Result:
            result = run(*arguments, "--bootstrap", server.bootstrap)
            assert result.code == code, result
            return result

        yield run_against_server


def locations(zufluss: Zufluss) -> dict[int, Any]:
    found = json.loads(zufluss("location", "list", "--output", "json").out)
    return {location["id"]: location for location in found["locations"]}


def test_a_location_lives_from_add_to_retire(zufluss: Zufluss, tmp_path: Path) -> None:
    two, three = (f"file://{tmp_path}/{name}" for name in ("two", "three"))
    said = zufluss("location", "add", two, "--weight", "2").err
    assert f"location 2 at {two} is active with weight 2" in said
    zufluss("location", "set-weight", "2", "5")
    zufluss("location", "drain", "2")
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    zufluss("location", "move", "2", three)
    found = locations(zufluss)
    assert (found[1]["uri"], found[1]["state"]) == (f"file://{tmp_path}/one", "active")
    assert found[2]["uri"] == three
    assert (found[2]["state"], found[2]["weight"], found[2]["files"]) == ("draining", 5, 0)
    assert [server["health"] for server in found[2]["servers"]] == ["active"]
    zufluss("location", "activate", "2")
    assert locations(zufluss)[2]["state"] == "active"
    zufluss("location", "drain", "2")
    zufluss("location", "retire", "2")
    assert locations(zufluss)[2]["state"] == "retired"


def test_the_list_for_people_has_a_line_per_location(zufluss: Zufluss, tmp_path: Path) -> None:
    result = zufluss("location", "list")
    head, _, line = result.out.splitlines()
    assert head.split()[:5] == ["id", "uri", "weight", "state", "health"]
    assert line.split()[:5] == ["1", f"file://{tmp_path}/one", "1", "active", "active"]
    assert "version 1" in result.err


def test_a_probe_tries_every_location_and_fails_with_one(zufluss: Zufluss, tmp_path: Path) -> None:
    assert json.loads(zufluss("location", "probe", "-o", "json").out)[0]["works"]
    two = tmp_path / "two"
    zufluss("location", "add", str(two))
    two.rename(tmp_path / "away")
    two.write_text("a file where the directory should be")
    found = json.loads(zufluss("location", "probe", "-o", "json", code=1).out)
    assert [probe["works"] for probe in found] == [True, False]
    assert str(two) in found[1]["error"]
    zufluss("location", "probe", "1")


def test_an_unusable_location_is_not_added(zufluss: Zufluss, tmp_path: Path) -> None:
    """Otherwise it would be called active and get files of every table."""
    (tmp_path / "file").write_text("a file where the directory should be")
    frozen = tmp_path / "frozen"
    frozen.mkdir()
    (frozen / ".zufluss-tmp").write_text("nothing can be written here")
    for place in (str(tmp_path / "file"), str(frozen), "s3://no-such-bucket-there/x"):
        said = zufluss("location", "add", place, code=1).err
        assert "location 2" in said
        assert place in said
        assert "cannot be used, nothing was changed" in said
    assert list(locations(zufluss)) == [1]


def test_a_weight_below_zero_is_refused_with_the_reason(zufluss: Zufluss) -> None:
    for weight in ("-5", "-1"):
        said = zufluss("location", "set-weight", "1", weight, code=2).err
        assert "Invalid value for 'WEIGHT': Input should be greater than or equal to 0" in said
    assert locations(zufluss)[1]["weight"] == 1
    said = zufluss("location", "drain", str(10**12), code=1).err
    assert "the id of a location cannot be 1000000000000" in said


def test_a_drain_names_the_tables_that_are_pinned_to_the_location(
    zufluss: Zufluss, tmp_path: Path
) -> None:
    """Otherwise it waits for ever, and nobody knows for what."""
    for name in ("two", "three"):
        zufluss("location", "add", str(tmp_path / name))
    for table, pinned in {"stuck": "2", "free": "2,3", "elsewhere": "3"}.items():
        placement = f"table.zufluss.remote.placement=pinned:{pinned}"
        zufluss("table", "create", table, "id BIGINT", "--property", placement)
    said = zufluss("location", "drain", "2").err
    assert "these tables, which are pinned to it: fluss.stuck. " in said
    assert "zufluss table alter TABLE --set table.zufluss.remote.placement=cluster" in said
    assert "fluss.stuck" in zufluss("location", "list").err
    shown = json.loads(zufluss("location", "show", "2", "-o", "json").out)
    assert (shown["state"], shown["pinned_tables"]) == ("draining", ["fluss.stuck"])
    assert "fluss.stuck" in zufluss("location", "show", "2").out
    zufluss("table", "alter", "stuck", "--set", "table.zufluss.remote.placement=cluster")
    assert "pinned" not in zufluss("location", "list").err
    assert "there is no location 9" in zufluss("location", "show", "9", code=1).err


def test_a_refusal_of_the_server_is_printed_and_changes_nothing(
    zufluss: Zufluss, tmp_path: Path
) -> None:
    before = locations(zufluss)
    assert "no location would take new files" in zufluss("location", "drain", "1", code=1).err
    assert "there is no location 7" in zufluss("location", "drain", "7", code=1).err
    assert "drain it first" in zufluss("location", "retire", "1", code=1).err
    inside = zufluss("location", "add", str(tmp_path / "one" / "inside"), code=1).err
    assert "one inside the other" in inside
    other = ("location", "add", str(tmp_path / "two"), "--if-version", "99")
    assert "version 1, not 99" in zufluss(*other, code=1).err
    zufluss("location", "set-weight", "1", "many", code=2)
    assert locations(zufluss) == before
