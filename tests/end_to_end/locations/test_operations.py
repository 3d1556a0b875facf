"""Moving a location, concurrent changes, and what listing and metrics show."""

from __future__ import annotations

import asyncio
import random
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

import zufluss
from tests.coordinator.remotes import locations
from tests.coordinator.support import COORDINATOR, TABLET, Cluster
from tests.end_to_end.locations.inspection import (
    DOCUMENTS,
    IN_LAKE,
    LAKE,
    METRICS,
    NO_COPIES,
    SNAPSHOTS,
    SWEEPING,
    cli,
    keyed,
    listed_by_cli,
    live,
    lose_disk,
    patient,
    patient_again,
    scrape,
    stored,
    tiered,
    until_snapshot,
    upsert,
)
from tests.end_to_end.locations.stage import (
    CLIENT,
    DIRS,
    Stage,
    directories,
    everything,
    rows,
    write,
)
from tests.waiting import eventually
from zufluss.client.locations import RemoteLocation
from zufluss.coordinator.remote.locations import LOCATIONS_PATH, ConfigChange
from zufluss.coordinator.server import Coordinator
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.model.alter import ConfigOp
from zufluss.remote.locations import AdminState, AlterOp, Locations
from zufluss.remote.objects import Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server

# -- moving a location ---------------------------------------------------------------------------


def test_everything_in_a_moved_place_is_read_without_a_manifest_rewritten(
    tmp_path: Path, s3_server: S3Server
) -> None:
    stays, old = directories(tmp_path, "stays", "old")
    new = f"{s3_server.bucket(f'e{uuid.uuid4()}')}/new"
    keys = s3_server.properties
    conf = {DIRS: f"{stays},{old}", **SNAPSHOTS, **LAKE, **keys}
    with patient(tmp_path, conf) as it:
        server, table, state = it.server, it.create("t", **IN_LAKE), keyed(it, "state", **IN_LAKE)
        write(table, 0, 12)
        tiered(it, table, 1, 20)
        for end in range(10, 70, 10):
            upsert(state, end - 10, end)
            until_snapshot(it, state, end)
        tiered(it, state, 1, 20)
        it.until_copied(table, 12)
        it.until_copied(state, 6)
        it.until_gone(table)
        cli(server, "location", "set-weight", "2", "0")
        quiet(it, lambda: [len(stored(p)) for p in (stays, old)])
        before = {path: (old / path).read_bytes() for path in stored(old)}
        kinds = {path.partition("/")[0] for path in before}
        assert kinds == {"log", "kv", "lake"}, "the place has files of each kind"
        copy(old, new, keys)
        cli(server, "location", "move", "2", new)
        old.rename(tmp_path / "gone")
        check_all(it, 12, 60)
        assert server.stop() == 0
        lose_disk(server, table, state)
        server.start()
        with patient_again(server) as again:
            check_all(again, 11, 60)
            assert again.admin.locations().locations[1].uri == new
        after = {path: content(new, path, keys) for path in stored(new, keys)}
        assert after.items() <= before.items()
        assert {p for p in before if p.endswith(".manifest")} == {
            p for p in after if p.endswith(".manifest")
        }


def check_all(it: Stage, batches: int, keys: int) -> None:
    """Assert that log segments, offsets files, changelog, snapshot and state can be read."""
    assert rows(it.conn.table("t"))[: batches * 10] == everything(batches)
    for name in ("t", "state"):
        snapshot = it.admin.lake_snapshot(name)
        assert snapshot is not None
        assert set(snapshot.offsets.values()) == {20}
    state = it.conn.table("state")
    newest = it.admin.latest_kv_snapshots("state")[0]
    with state.kv_snapshot(newest.bucket, newest.snapshot_id) as reader:
        assert sum(len(part) for part in reader) == keys
    changes = state.changelog(stop={0: keys - 10}).to_arrow()
    assert changes["id"].to_pylist() == list(range(keys - 10))
    assert len(state.lookup(list(range(keys + 10)), missing="drop")) == keys


def copy(source: Path, target: str, properties: dict[str, str]) -> None:
    """Copy all files, the marker included."""
    objects = Objects(parse_location(target, "target"), properties)

    async def put() -> None:
        for path in source.rglob("*"):
            if path.is_file():
                await objects.put_file(str(path.relative_to(source)), path)

    asyncio.run(put())


def content(place: str, path: str, properties: dict[str, str]) -> bytes:
    objects = Objects(parse_location(place, "place"), properties)
    return asyncio.run(objects.get(path, limit=1 << 24))


def quiet(it: Stage, files: Callable[[], list[int]]) -> None:
    """Wait until only referenced files are left."""
    eventually(lambda: files() == live(it), "only files that count are left")


# -- racing changes ------------------------------------------------------------------------------


def test_of_two_racing_changes_one_wins_and_the_other_gets_a_conflict(tmp_path: Path) -> None:
    with patient(tmp_path, {DIRS: str(tmp_path / "first")}) as it:
        version = it.admin.locations().version
        outcomes: list[RemoteLocation | ZuflussError] = []
        start = threading.Barrier(2)

        def add(name: str) -> None:
            with zufluss.connect(it.server.bootstrap, **CLIENT) as conn:
                start.wait()
                try:
                    uri = str(tmp_path / name)
                    outcomes.append(
                        conn.admin.alter_location("add", uri=uri, expected_version=version)
                    )
                except ZuflussError as error:
                    outcomes.append(error)

        threads = [threading.Thread(target=add, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [won] = [x for x in outcomes if isinstance(x, RemoteLocation)]
        [lost] = [x for x in outcomes if isinstance(x, ZuflussError)]
        assert f"version {version + 1}, not {version}" in lost.message
        locations = it.admin.locations()
        assert locations.version == version + 1
        assert [x.uri for x in locations.locations] == [f"file://{tmp_path / 'first'}", won.uri]


async def test_of_two_coordinators_the_one_that_was_replaced_changes_nothing(
    tmp_path: Path,
) -> None:
    cluster = await Cluster(tmp_path / "meta", locations(tmp_path)).start()
    later = await Coordinator.open(cluster.conf, cluster.store, COORDINATOR, cluster.clock)
    await later.attach(TABLET, cluster.tablet)
    set_it = ConfigChange("remote.data.dirs.strategy", "ROUND_ROBIN", ConfigOp.SET)
    outcomes = await asyncio.gather(
        later.locations.alter(AlterOp.ADD, uri=f"file://{tmp_path}/l3"),
        cluster.coordinator.locations.alter(AlterOp.ADD, uri=f"file://{tmp_path}/l4"),
        cluster.coordinator.locations.alter_configs([set_it]),
        return_exceptions=True,
    )
    assert not isinstance(outcomes[0], BaseException)
    for lost in outcomes[1:]:
        assert isinstance(lost, ZuflussError)
        assert lost.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
    stored_now = await cluster.store.read(LOCATIONS_PATH)
    assert stored_now is not None
    found = [x.uri for x in Locations.from_json(stored_now.value).locations]
    assert found == [f"file://{tmp_path}/l{i}" for i in (1, 2, 3)]
    assert await cluster.store.read("/configs/cluster") is None
    await later.stop()
    await cluster.stop()


# -- listing and metrics -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_shown_of_places_is_what_lies_there(tmp_path: Path, seed: int) -> None:
    dirs = directories(tmp_path, "a", "b", "c")
    conf = {DIRS: ",".join(map(str, dirs[:2])), **SNAPSHOTS, **LAKE, **METRICS}
    with patient(tmp_path, conf) as it:
        load = Load(it, random.Random(seed), dirs)
        for _ in range(3):
            for _ in range(8):
                load.step()
            eventually(lambda: shown_alike(it), "list, command and metrics agree")
        assert it.server.stop() == 0
        it.server.properties |= {**NO_COPIES, **SWEEPING}
        it.server.start()
        eventually(lambda: live_really(it, dirs), "what is there is what counts")
        assert shown_alike(it)
        assert live_really(it, dirs)
        for name, batches in load.tables.items():
            assert load.rows(name) == everything(batches)


class Load:
    """Random operations on tables, and on the weights and states of locations."""

    def __init__(self, it: Stage, choose: random.Random, dirs: list[Path]) -> None:
        self.it = it
        self.choose = choose
        self.dirs = dirs
        self.tables: dict[str, int] = {}
        self.number = 0

    def step(self) -> None:
        """Do one random operation."""
        steps = [self.create, self.grow, self.grow, self.grow, self.drop, self.tier, self.operate]
        self.choose.choice(steps if len(self.tables) > 1 else [self.create])()

    def create(self) -> None:
        self.number += 1
        name = f"t{self.number}"
        if self.number % 2:
            keyed(self.it, name, **IN_LAKE)
        else:
            self.it.create(name, **IN_LAKE)
        self.tables[name] = 0
        self.add(name, 3)

    def grow(self) -> None:
        self.add(self.choose.choice(sorted(self.tables)), self.choose.randint(1, 4))

    def add(self, name: str, batches: int) -> None:
        table, before = self.it.conn.table(name), self.tables[name]
        if table.info.has_primary_key:
            upsert(table, before * 10, (before + batches) * 10)
        else:
            write(table, before, before + batches)
        self.tables[name] += batches

    def drop(self) -> None:
        name = self.choose.choice(sorted(self.tables))
        self.it.admin.drop_table(name)
        del self.tables[name]

    def rows(self, name: str) -> list[int]:
        table = self.it.conn.table(name)
        if not table.info.has_primary_key:
            return rows(table)
        found = table.lookup(list(range(self.tables[name] * 10)), missing="drop")
        return sorted(found["id"].to_pylist())

    def tier(self) -> None:
        self.number += 1
        name = self.choose.choice(sorted(self.tables))
        tiered(self.it, self.it.conn.table(name), self.number, self.tables[name] * 10)

    def operate(self) -> None:
        admin = self.it.admin
        known = admin.locations().locations
        if len(known) < len(self.dirs):
            admin.alter_location("add", uri=str(self.dirs[-1]), weight=2)
            return
        location_id = self.choose.choice((2, 3))
        state = known[location_id - 1].state
        admin.alter_location("drain" if state is AdminState.ACTIVE else "activate", location_id)


def live_really(it: Stage, dirs: list[Path]) -> bool:
    """Whether a location has exactly the referenced files, with their sizes."""
    shown = {x.location_id: (x.live_files, x.live_bytes) for x in it.admin.locations().locations}
    return shown == {location_id: really(dirs[location_id - 1]) for location_id in shown}


def really(directory: Path) -> tuple[int, int]:
    """The number of files, and the bytes of those whose size is recorded."""
    files = stored(directory)
    return len(files), sum(size for path, size in files.items() if not DOCUMENTS.fullmatch(path))


def shown_alike(it: Stage) -> bool:
    """Whether list, command and metrics agree; False if the state changed meanwhile."""
    locations = it.admin.locations()
    metrics, command = scrape(it.server), listed_by_cli(it.server)
    if it.admin.locations() != locations:
        return False
    assert metrics["zufluss_remote_registry_version"] == locations.version
    for location in locations.locations:
        [seen] = location.servers
        told = command[location.location_id]
        assert (told["uri"], told["state"], told["weight"]) == (
            location.uri,
            location.state.name.lower(),
            location.weight,
        )
        assert (told["files"], told["bytes"]) == (location.live_files, location.live_bytes)
        for name, value in {
            "live_files": location.live_files,
            "live_bytes": location.live_bytes,
            "state": location.state,
            "weight": location.weight,
            "placed_files_total": seen.placed_files,
            "placed_bytes_total": seen.placed_bytes,
            "errors_total": seen.errors,
            "health": seen.health,
            "effective_weight": seen.effective_weight,
        }.items():
            label = f'{{location="{location.location_id}"}}'
            assert metrics[f"zufluss_remote_{name}{label}"] == value, name
    return True
