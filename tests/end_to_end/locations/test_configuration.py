"""Configurations of locations: their effect, and those that are refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.locations.stage import (
    DIRS,
    PLACEMENT,
    SERVER,
    STRATEGY,
    WEIGHTS,
    Stage,
    batch,
    directories,
    everything,
    reconnected,
    rows,
    rows_by_pyfluss,
    segment_files,
    smooth,
    stage,
    weighted,
    write,
)
from tests.paths import FIXTURES
from tests.servers import RoleServer, WarmServer
from tests.waiting import eventually
from zufluss.config import Configuration
from zufluss.errors import ConfigError
from zufluss.remote.placement import CLUSTER
from zufluss.remote.registry import reconcile
from zufluss.remote.storage import RemoteStorage, Upload
from zufluss.remote.uri import MEMORY_VARIABLE

INTERVAL = "remote.log.task-interval-duration"
BATCHES = 9

UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def joined(dirs: list[Path]) -> str:
    return ",".join(map(str, dirs))


# -- a list of places ----------------------------------------------------------------------------


def test_with_only_dirs_set_a_server_starts_and_serves(tmp_path: Path) -> None:
    dirs = directories(tmp_path, "a", "b")
    with stage(tmp_path, {DIRS: joined(dirs)}) as it:
        check_serves(it, dirs)
        assert it.server.stop() == 0


def test_with_only_dirs_set_coordinator_and_tablet_server_start_and_serve(
    tmp_path: Path,
) -> None:
    dirs = directories(tmp_path, "a", "b")
    coordinator = RoleServer("coordinator", tmp_path, {DIRS: joined(dirs)})
    address = {"zufluss.coordinator.address": coordinator.bootstrap}
    tablet = RoleServer("tablet", tmp_path, {**SERVER, **address})
    with coordinator, tablet, reconnected(tablet) as it:
        check_serves(it, dirs)
        assert (tablet.stop(), coordinator.stop()) == (0, 0)


def check_serves(it: Stage, dirs: list[Path]) -> None:
    table = it.create("served")
    write(table, 0, BATCHES)
    it.until_copied(table, BATCHES)
    it.until_gone(table)
    assert [len(segment_files(d)) for d in dirs] == [4, 4]
    assert rows(table) == everything(BATCHES)
    assert rows_by_pyfluss(it.server.bootstrap, "served") == everything(BATCHES)


# -- a single place ------------------------------------------------------------------------------


def test_with_only_dir_set_its_files_are_those_of_the_single_dir(tmp_path: Path) -> None:
    single, listed = directories(tmp_path, "single", "listed")
    of_one = filled(tmp_path / "1", {"remote.data.dir": str(single)}, single)
    assert of_one == filled(tmp_path / "2", {DIRS: str(listed)}, listed)
    fluss_log = names(FIXTURES / "remote-log" / "0")
    fluss_kv = names(FIXTURES / "kv-snapshot" / "0")
    assert of_one == {
        ".zufluss-cluster",
        *(f"log/fluss/events-ID/0/{name}" for name in fluss_log),
        *(f"kv/fluss/keyed-ID/0/{name}" for name in fluss_kv),
    }


def filled(directory: Path, properties: dict[str, str], root: Path) -> set[str]:
    """The file names below a location that a log table and a primary-key table wrote to."""
    directory.mkdir()
    conf = {**SERVER, "kv.snapshot.interval": "50ms", **properties}
    server = WarmServer(directory / "data", {**conf, INTERVAL: "0"})
    with server:
        with reconnected(server) as it:
            write(it.create("events"), 0, BATCHES)
            assert len(it.admin.locations().locations) == 1
            assert it.home("events") == f"file://{root}"
        assert server.stop() == 0
        local = {p.name: p.read_bytes() for p in server.data_dir.glob("fluss/events-*/log-0/*")}
        server.properties[INTERVAL] = SERVER[INTERVAL]
        server.start()
        with reconnected(server) as it:
            it.until_copied(it.conn.table("events"), BATCHES)
            snapshot_once(it)
            eventually(lambda: len(list(root.glob("log/**/*.manifest"))) == 1)
        assert rows_by_pyfluss(server.bootstrap, "events") == everything(BATCHES)
        assert server.stop() == 0
    check_bytes(root, local)
    check_manifest(root)
    return names(root)


def snapshot_once(it: Stage) -> None:
    it.admin.create_table(
        "keyed", "id BIGINT NOT NULL, text STRING", primary_key=["id"], bucket_count=1
    )
    with it.conn.table("keyed").upsert() as writer:
        writer.write(batch(0))
    eventually(lambda: bool(it.admin.list_kv_snapshots("keyed")))


def names(root: Path) -> set[str]:
    """The names of all files, with placeholders for the parts that differ from run to run."""
    found = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    return {
        re.sub(r"-\d+/0/", "-ID/0/", re.sub(r"\d{20}", "OFFSET", UUID.sub("UUID", x)))
        for x in found
    }


def check_bytes(root: Path, local: dict[str, bytes]) -> None:
    """Assert that segments and indexes in remote storage equal the local ones."""
    for path in segment_files(root):
        assert path.read_bytes() == local[path.name]
        for index in (path.with_suffix(".index"), path.with_suffix(".timeindex")):
            if index.name in local:  # the newest ones are still in memory
                assert index.read_bytes() == local[index.name]


def check_manifest(root: Path) -> None:
    """Assert that a document has all fields of Fluss's, with the same types."""
    theirs, ours = (
        json.loads(next(place.rglob("*.manifest")).read_bytes())
        for place in (FIXTURES / "remote-log", root)
    )
    assert kinds(ours) == {**kinds(theirs), "zufluss_crc32c": int}
    for segment in ours["remote_log_segments"]:
        fields = kinds(segment)
        assert fields.pop("location_id") is int
        assert fields.pop("files") is dict
        assert fields == kinds(theirs["remote_log_segments"][0])


def kinds(value: dict[str, Any]) -> dict[str, type]:
    return {key: type(each) for key, each in value.items()}


# -- both options --------------------------------------------------------------------------------


def test_with_both_set_the_list_wins(tmp_path: Path) -> None:
    dirs = directories(tmp_path, "a", "b")
    with stage(tmp_path, {"remote.data.dir": str(dirs[0]), DIRS: joined(dirs)}) as it:
        table = it.create("both")
        write(table, 0, BATCHES)
        it.until_copied(table, BATCHES)
        assert Counter(it.places(table)) == {1: 4, 2: 4}
        assert [len(segment_files(d)) for d in dirs] == [4, 4]


def test_a_single_dir_that_is_not_in_the_list_refuses_the_start(tmp_path: Path) -> None:
    dirs = directories(tmp_path, "a", "b")
    conf = {"remote.data.dir": str(tmp_path / "other"), DIRS: joined(dirs)}
    with pytest.raises(RuntimeError) as caught, stage(tmp_path, conf):
        pass
    message = re.sub("[^!-~]", "", str(caught.value))  # it is in a box that breaks lines anywhere
    assert f"remote.data.dirisfile://{tmp_path}/other," in message
    assert f"notoneof{DIRS}(file://{tmp_path}/a," in message
    assert not any(d.exists() for d in (*dirs, tmp_path / "other"))


# -- spreading files -----------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["cluster", "partition"])
def test_three_dirs_six_tables_and_their_files_are_found_two_each(
    tmp_path: Path, placement: str
) -> None:
    dirs = directories(tmp_path, "a", "b", "c")
    with stage(tmp_path, {DIRS: joined(dirs)}) as it:
        tables = {f"t{i}": it.create(f"t{i}", **{PLACEMENT: placement}) for i in range(6)}
        for table in tables.values():
            write(table, 0, 2)
        for table in tables.values():
            it.until_copied(table, 2)
        homes = {name: it.home(name) for name in tables}
        assert Counter(homes.values()) == {f"file://{d}": 2 for d in dirs}
        found = {
            d: [p.relative_to(d).parts[2].split("-")[0] for p in segment_files(d)] for d in dirs
        }
        assert [len(each) for each in found.values()] == [2, 2, 2]
        assert sorted(name for each in found.values() for name in each) == sorted(tables)
        if placement == "partition":
            assert {n: f"file://{d}" for d, each in found.items() for n in each} == homes


# -- weights -------------------------------------------------------------------------------------


def test_weights_five_one_one_are_kept_exactly_and_smoothly(tmp_path: Path) -> None:
    dirs = directories(tmp_path, "a", "b", "c")
    with stage(tmp_path, weighted(dirs, 5, 1, 1)) as it:
        table = it.create("weighed")
        write(table, 0, 71)
        it.until_copied(table, 71)
        assert [len(segment_files(d)) for d in dirs] == [50, 10, 10]
        assert it.places(table) == smooth({1: 5, 2: 1, 3: 1}, 70)
        assert it.places(table)[:7] == [1, 1, 2, 1, 3, 1, 1]


async def test_over_seven_hundred_placements_the_shares_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, "1")
    placed = await placements(tmp_path, "5,1,1", 700)
    assert Counter(placed) == {1: 500, 2: 100, 3: 100}
    assert placed == smooth({1: 5, 2: 1, 3: 1}, 700)


async def placements(directory: Path, weights: str, count: int) -> list[int]:
    """The locations that a server's storage chooses for a number of files."""
    places = [f"memory://place-{n}" for n in range(1, 4)]
    conf = Configuration.of(weighted(places, weights) | {"data.dir": str(directory)})
    storage = RemoteStorage(conf, reconcile(None, conf, {}), state_file=directory / "placement")
    found = []
    for n in range(count):
        [file] = await storage.upload([Upload(f"log/db/t-1/0/{n}", b"x")], CLUSTER)
        found.append(file.location_id)
    return found


# -- weight zero ---------------------------------------------------------------------------------


def test_weight_zero_gets_no_new_file_and_what_it_has_is_read(tmp_path: Path) -> None:
    dirs = directories(tmp_path, "a", "b")
    with stage(tmp_path, weighted(dirs, 1, 1)) as it:
        table = it.create("fading")
        write(table, 0, BATCHES)
        it.until_copied(table, BATCHES)
        before = set(segment_files(dirs[0]))
        assert len(before) == 4
        it.admin.alter_cluster_configs({WEIGHTS: "0,1"})
        write(table, BATCHES, 40)
        it.until_copied(table, 40)
        it.until_gone(table)
        assert it.places(table)[8:] == [2] * 31
        assert set(segment_files(dirs[0])) == before
        assert rows(table) == everything(40)
        assert rows_by_pyfluss(it.server.bootstrap, "fading") == everything(40)


async def test_weight_zero_gets_none_of_a_thousand_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, "1")
    assert Counter(await placements(tmp_path, "1,0,3", 1000)) == {1: 250, 3: 750}


# -- lists that are refused ----------------------------------------------------------------------

REFUSED = {
    "all weights 0": ("{a},{b}", "0,0", "is 0 for every location"),
    "negative weight": ("{a},{b}", "1,-1", "'-1'; allowed: whole numbers"),
    "too few weights": ("{a},{b}", "1", "has 1 weights for the 2"),
    "too many weights": ("{a},{b}", "1,2,3", "has 3 weights for the 2"),
    "fraction": ("{a},{b}", "1,1.5", "'1.5'; allowed: whole numbers"),
    "word": ("{a},{b}", "1,two", "'two'; allowed: whole numbers"),
    "empty path": ("{a},,{b}", "1,1,1", "empty"),
    "blank path": ("{a}, ,{b}", "1,1,1", "empty"),
    "empty list": ("", "", "still has"),
    "duplicate": ("{a},{b},{a}", "1,1,1", "twice"),
    "duplicate in another spelling": ("{a},{b},file://{a}/", "1,1,1", "twice"),
    "inside another": ("{a},{b},{a}/inside", "1,1,1", "one inside the other"),
    "around another": ("{a},{b},{parent}", "1,1,1", "one inside the other"),
}


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, list[Path]]]:
    """A server with files in two locations of weights 2 and 1, configured at run time."""
    root = tmp_path_factory.mktemp("weighed")
    dirs = directories(root, "a", "b")
    with stage(root, {DIRS: joined(dirs)}) as it:
        it.admin.alter_cluster_configs({STRATEGY: "WEIGHTED_ROUND_ROBIN", WEIGHTS: "2,1"})
        table = it.create("before")
        write(table, 0, 4)
        it.until_copied(table, 4)
        yield it, dirs


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_list_is_refused_and_the_old_one_stays(
    weighed: tuple[Stage, list[Path]], case: str
) -> None:
    it, (a, b) = weighed
    dirs, weights, why = REFUSED[case]
    change = {DIRS: dirs.format(a=a, b=b, parent=a.parent), WEIGHTS: weights}
    configs, locations = it.configs(), it.admin.locations()
    with pytest.raises(ConfigError, match=why):
        it.admin.alter_cluster_configs(change)
    assert it.configs() == configs
    after = it.admin.locations()
    assert after.version == locations.version
    assert [(x.uri, x.weight) for x in after.locations] == [(f"file://{a}", 2), (f"file://{b}", 1)]


def test_after_refusals_files_go_where_the_old_list_says(
    weighed: tuple[Stage, list[Path]],
) -> None:
    it, (a, b) = weighed
    for dirs, weights, _ in REFUSED.values():
        with pytest.raises(ConfigError):
            it.admin.alter_cluster_configs(
                {DIRS: dirs.format(a=a, b=b, parent=a.parent), WEIGHTS: weights}
            )
    table = it.create("after")
    write(table, 0, 7)
    it.until_copied(table, 7)
    assert Counter(it.places(table)) == {1: 4, 2: 2}
    before = it.configs(), it.admin.locations().version
    assert it.server.stop() == 0
    it.server.start()
    assert (it.configs(), it.admin.locations().version) == before
    assert rows(it.conn.table("after")) == everything(7)
