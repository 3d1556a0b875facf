"""Which files lie in a location, whether they are there, and moves that depend on it."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.end_to_end.locations.inspection import (
    IN_LAKE,
    LAKE,
    SNAPSHOTS,
    keyed,
    orphan,
    patient,
    stored,
    tiered,
    until_snapshot,
    upsert,
)
from tests.end_to_end.locations.stage import DIRS, PLACEMENT, Stage, everything, rows, write
from tests.waiting import eventually
from zufluss.cli.main import app
from zufluss.client.sync.table import Table
from zufluss.errors import ConfigError
from zufluss.remote.objects import Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server

BATCHES = 7
SWEPT_BY_HAND = {"zufluss.remote.sweep.interval": "0", "zufluss.remote.sweep.grace": "0"}


@dataclass
class Place:
    """A location that a test changes behind the server's back."""

    uri: str
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def objects(self) -> Objects:
        return Objects(parse_location(self.uri, "place"), self.properties)

    def files(self) -> dict[str, int]:
        """Sizes of the files of tables, by path."""
        return stored(self.uri, self.properties)

    def read(self, path: str) -> bytes:
        return asyncio.run(self.objects.get(path, limit=1 << 24))

    def put(self, path: str, data: bytes) -> None:
        asyncio.run(self.objects.put(path, data))

    def delete(self, *paths: str) -> None:
        asyncio.run(self.objects.delete(paths))


@pytest.fixture(params=["directory", "s3"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> list[Place]:
    """A location, and a place to copy it to."""
    if request.param == "directory":
        return [Place(f"file://{tmp_path}/{name}") for name in ("second", "copy")]
    s3: S3Server = request.getfixturevalue("s3_server")
    root = s3.bucket(f"e{uuid.uuid4()}")
    return [Place(f"{root}/{name}", s3.properties) for name in ("second", "copy")]


@dataclass
class Filled:
    """A server whose second location has files of each kind, and no upload under way."""

    it: Stage
    second: Place
    copy: Place
    log: Table
    state: Table

    def run(self, *arguments: str, code: int = 0) -> Result:
        """Run `zufluss location …`."""
        command = ["location", *arguments, "--bootstrap", self.it.server.bootstrap]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == code or (code and done.exception), (done.output, done.exception)
        return done


@pytest.fixture
def filled(tmp_path: Path, places: list[Place]) -> Iterator[Filled]:
    second, copy = places
    places_conf = {DIRS: f"{tmp_path}/first,{second.uri}", **second.properties}
    with patient(tmp_path, {**places_conf, **SNAPSHOTS, **LAKE, **SWEPT_BY_HAND}) as it:
        table, state = (
            it.create("t", **IN_LAKE),
            keyed(it, "state", **IN_LAKE, **{PLACEMENT: "pinned:2"}),
        )
        write(table, 0, BATCHES)
        for end in range(10, 40, 10):
            upsert(state, end - 10, end)
            until_snapshot(it, state, end)
        for each in (table, state):
            tiered(it, each, 1, 10)
        it.until_copied(table, BATCHES)
        it.until_copied(state, 3)
        it.until_gone(table)
        it.admin.alter_location("set-weight", 2, weight=0)

        def is_quiet() -> bool:
            return len(second.files()) == it.admin.locations().get(2).live_files

        eventually(is_quiet, "only live files are left in the location")
        assert {path.partition("/")[0] for path in second.files()} == {"log", "kv", "lake"}
        yield Filled(it, second, copy, table, state)


def test_the_files_of_a_location_are_listed_by_table_and_kind(filled: Filled) -> None:
    listed = json.loads(filled.run("files", "2", "-o", "json").stdout)
    assert {(row["table"], row["kind"]) for row in listed} >= {
        ("fluss.t", "log"),
        ("fluss.state", "kv"),
    }
    on_disk = filled.second.files()
    assert sum(row["files"] for row in listed) == len(on_disk)
    groups = filled.it.admin.location_files(2, documents=True)
    for group in groups:
        below = f"{group.kind}/fluss/{group.table.table}-"
        paths = [path for path in on_disk if path.startswith(below)]
        assert group.files == len(paths)
    [log] = [g for g in groups if (g.table.table, g.kind) == ("t", "log")]
    segments = filled.it.manifest(filled.log, 0, filled.second.properties).segments
    held = {s.start_offset for s in segments if s.location_id == 2}
    assert held == {s for start, end in log.offsets for s in range(start, end, 10)}
    [kv] = [g for g in groups if (g.table.table, g.kind) == ("state", "kv")]
    known = {s.snapshot_id for s in filled.it.admin.list_kv_snapshots("state")}
    assert kv.snapshot_ids
    assert known.issuperset(kv.snapshot_ids)


def test_files_that_are_missing_or_cut_are_found(filled: Filled) -> None:
    second = filled.second
    assert "no problems" in filled.run("verify").stderr
    index = next(path for path in second.files() if path.endswith(".index"))
    shared = next(path for path in second.files() if "/shared/" in path)
    kept = {path: second.read(path) for path in (index, shared)}
    second.delete(index, shared)
    second.put(shared, kept[shared][:-1])
    found = json.loads(filled.run("verify", "2", "-o", "json", code=1).stdout)
    assert {row["path"]: row["problem"] for row in found} == {
        index: "it is missing",
        shared: f"it has {len(kept[shared]) - 1} bytes instead of {len(kept[shared])}",
    }
    assert {row["table"] for row in found} <= {"fluss.t", "fluss.state"}
    second.delete(shared)
    for path, data in kept.items():
        second.put(path, data)
    seen: list[tuple[int, int]] = []
    groups = filled.it.admin.verify_location(2, progress=lambda *at: seen.append(at))
    assert not any(group.problems for group in groups)
    assert seen[-1] == (len(groups), len(groups))


def test_a_location_moves_only_when_all_its_files_are_at_the_new_address(filled: Filled) -> None:
    """A move that checked the marker alone made every other file unreadable."""
    it, second, copy = filled.it, filled.second, filled.copy
    copy.put(".zufluss-cluster", second.read(".zufluss-cluster"))
    paths = sorted(second.files())
    manifest = next((path for path in paths if path.endswith(".manifest")), paths[0])
    cut = next(path for path in paths if path.endswith(".log"))
    for path in paths:
        if path not in (manifest, cut):
            copy.put(path, second.read(path))
    copy.put(cut, second.read(cut)[1:])
    with pytest.raises(ConfigError, match=r"cannot move to .* nothing was changed: ") as refused:
        it.admin.alter_location("move", 2, uri=copy.uri)
    assert f"{cut} of fluss." in refused.value.message or manifest in refused.value.message
    problems = filled.run("verify", "2", "--at", copy.uri, code=1).stdout
    assert manifest in problems
    assert it.admin.locations().get(2).uri == second.uri
    assert rows(filled.log) == everything(BATCHES)
    for path in (manifest, cut):
        copy.delete(path)
        copy.put(path, second.read(path))
    assert "no problems" in filled.run("verify", "2", "--at", copy.uri).stderr
    filled.run("move", "2", copy.uri)
    second.delete(*second.files())
    assert rows(filled.log) == everything(BATCHES)
    assert it.admin.locations().get(2).uri == copy.uri
    assert "no problems" in filled.run("verify", "2").stderr


def test_a_sweep_says_what_it_would_delete_and_why_and_then_does_it(filled: Filled) -> None:
    live = set(filled.second.files())
    state = f"kv/fluss/state-{filled.state.info.table_id}/0"
    names = {
        orphan(filled.log): "no manifest refers to it",
        f"{state}/shared/{uuid.uuid4()}": "no kept snapshot refers to it",
        f"{state[:-1]}7/shared/{uuid.uuid4()}": "its table, partition or bucket does not exist "
        "any more",
    }
    for path in names:
        filled.second.put(path, b"left by a crash")
    filled.second.put("not/ours", b"somebody else's")
    shown = json.loads(filled.run("sweep", "2", "--dry-run", "-o", "json").stdout)
    assert {row["path"]: row["reason"] for row in shown} == names
    assert {row["bytes"] for row in shown} == {15}
    assert set(filled.second.files()) == {*live, *names, "not/ours"}
    assert "3 files with 45 bytes were deleted" in filled.run("sweep").stderr
    assert set(filled.second.files()) == {*live, "not/ours"}
    result = filled.it.admin.sweep_locations()
    assert (result.files, result.unused, result.failures) == (0, (), ())
    assert "no problems" in filled.run("verify").stderr


def test_a_sweep_leaves_alone_what_it_cannot_judge(filled: Filled) -> None:
    metadata = [path for path in filled.second.files() if path.endswith("/_METADATA")]
    kept = {path: filled.second.read(path) for path in metadata}
    filled.it.server.stop()
    filled.it.server.start()  # it remembers no list of files
    for path in metadata:
        filled.second.delete(path)
        filled.second.put(path, b"damaged")
    done = filled.run("sweep", "2", code=1)
    assert "left alone: " in done.stderr
    assert set(kept) <= set(filled.second.files())


def test_a_location_that_does_not_exist_is_refused_at_once(filled: Filled) -> None:
    for call in (filled.it.admin.verify_location, filled.it.admin.location_files):
        with pytest.raises(ConfigError, match="there is no location 9, or it is retired"):
            call(9)
    with pytest.raises(ConfigError, match="there is no location 9"):
        filled.it.admin.probe_locations(9)
