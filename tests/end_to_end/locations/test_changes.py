"""Locations of different kinds together, and changes of locations under load."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fluss
import pytest

from tests.end_to_end.helpers import IDS, connected, create, in_time
from tests.end_to_end.locations.stage import (
    DIRS,
    ROWS,
    SERVER,
    Stage,
    batch,
    directories,
    everything,
    objects_in,
    reconnected,
    rows,
    rows_by_pyfluss,
    smooth,
    stage,
    weighted,
    write,
)
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client.sync.admin import Admin
from zufluss.errors import ConfigError
from zufluss.remote.locations import AdminState
from zufluss.remote.placement import STATE_FILE, SmoothRoundRobin
from zufluss.testing.s3 import S3Server

BATCHES = 13


# -- directories and buckets together ------------------------------------------------------------


def test_a_directory_and_a_bucket_in_one_list_write_read_and_drop(
    tmp_path: Path, s3_server: S3Server
) -> None:
    bucket = s3_server.bucket(f"mixed-{time.time_ns()}")
    places = [f"file://{tmp_path}/files", f"{bucket}/objects"]
    s3 = s3_server.properties

    def files() -> list[int]:
        return [len(objects_in(place, s3, "log", "kv", "lake")) for place in places]

    with stage(tmp_path, {DIRS: ",".join(places), **s3}) as it:
        table = it.create("mixed")
        write(table, 0, BATCHES)
        it.until_copied(table, BATCHES)
        it.until_gone(table)
        assert it.places(table, s3) == [1, 2] * 6
        assert min(files()) >= 6 * 4
        assert rows(table) == everything(BATCHES)
        it.admin.drop_table("mixed")
        eventually(lambda: files() == [0, 0], "all files of a dropped table are gone")


# -- adding a location ---------------------------------------------------------------------------


class Traffic:
    """A writer and a reader of pyfluss, until they are stopped."""

    def __init__(self, table: fluss.FlussTable) -> None:
        self.table = table
        self.acknowledged = 0
        """Batches."""
        self.gaps: list[float] = []
        """Seconds between acknowledgements."""
        self.seen: list[int] = []
        """Rows."""
        self.stopped = False

    async def write(self) -> None:
        writer = self.table.new_append().create_writer()
        last = time.monotonic()
        while not self.stopped:
            handle = writer.write_arrow_batch(batch(self.acknowledged).to_batches()[0].cast(IDS))
            await in_time(writer.flush())
            await in_time(handle.wait())
            self.acknowledged += 1
            self.gaps.append(time.monotonic() - last)
            last += self.gaps[-1]

    async def read(self) -> None:
        scanner = await in_time(self.table.new_scan().create_log_scanner())
        scanner.subscribe_buckets({0: fluss.EARLIEST_OFFSET})
        while not (self.stopped and len(self.seen) >= self.acknowledged * ROWS):
            self.seen += [record.row["id"] for record in await in_time(scanner.poll(100))]

    async def until(self, batches: int) -> None:
        """Wait until writer and reader have got so far."""

        async def both() -> None:
            while self.acknowledged < batches or len(self.seen) < batches * ROWS:
                await asyncio.sleep(0.005)

        await in_time(both())


async def test_a_dir_added_under_traffic_gets_files_and_nobody_notices(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    dirs = directories(tmp_path, "a", "b", "new")
    with stage(tmp_path, {DIRS: ",".join(map(str, dirs[:2]))}) as it:
        async with connected(it.server.bootstrap) as conn:
            path = fluss.TablePath("fluss", "busy")
            await create(conn, path, bucket_count=1)
            table = it.conn.table("busy")
            traffic = Traffic(await in_time(conn.get_table(path)))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(traffic.write())
                tasks.create_task(traffic.read())
                await traffic.until(20)
                before = traffic.acknowledged
                changed = {DIRS: ",".join(map(str, dirs))}
                await asyncio.to_thread(it.admin.alter_cluster_configs, changed)
                since = traffic.acknowledged
                await traffic.until(since + 20)
                traffic.stopped = True
        assert traffic.seen == everything(traffic.acknowledged)
        it.until_copied(table, traffic.acknowledged)
        segments = it.manifest(table).segments
        placed = [s.location_id for s in segments if s.start_offset > since * ROWS]
        assert 3 in placed[:3], "the new place has its turn among the next three files"
        assert Counter(placed)[3] >= len(placed) // 3
        assert rows(table) == everything(traffic.acknowledged)
        record_property("longest_gap_ms", round(1000 * max(traffic.gaps[before:]), 1))


# -- removing a location -------------------------------------------------------------------------


def test_a_dir_with_files_is_kept_until_they_have_left_it(tmp_path: Path) -> None:
    dirs = directories(tmp_path, "a", "b")
    snapshots = {"kv.snapshot.interval": "50ms", "kv.snapshot.num-retained": "1"}
    with stage(tmp_path, {DIRS: ",".join(map(str, dirs)), **snapshots}) as it:
        table = it.create("stays")
        write(table, 0, BATCHES)
        it.until_copied(table, BATCHES)
        it.until_gone(table)
        snapshot_once(it)
        files = it.admin.locations().locations[0].live_files
        assert files > 6 * 4
        without = {DIRS: str(dirs[1])}
        with pytest.raises(ConfigError, match=rf"location 1 .*still has {files} files"):
            it.admin.alter_cluster_configs(without)
        assert it.configs()[DIRS] == (",".join(map(str, dirs)), "INITIAL_SERVER_CONFIG")
        it.admin.alter_location("drain", 1)
        eventually(lambda: it.admin.locations().locations[0].live_files == 0, "drained")
        it.admin.alter_cluster_configs(without)
        assert it.admin.locations().locations[0].state is AdminState.RETIRED
        assert set(it.places(table)) == {2}
        assert rows(table) == everything(BATCHES)
        assert rows_by_pyfluss(it.server.bootstrap, "stays") == everything(BATCHES)
        eventually(lambda: not files_in(dirs[0]), "nothing is left in the removed place")
        write(table, BATCHES, BATCHES + 5)
        it.until_copied(table, BATCHES + 5)
        assert not files_in(dirs[0])
        assert it.server.stop() == 0
        it.server.start()
        assert rows(it.conn.table("stays")) == everything(BATCHES + 5)
        newest = it.admin.list_kv_snapshots("keyed")[-1]
        with it.conn.table("keyed").kv_snapshot(newest.bucket, newest.snapshot_id) as reader:
            assert [i for found in reader for i in found["id"].to_pylist()] == everything(1)


def snapshot_once(it: Stage) -> None:
    """A primary-key table with a snapshot and no later writes."""
    it.admin.create_table(
        "keyed", "id BIGINT NOT NULL, text STRING", primary_key=["id"], bucket_count=1
    )
    with it.conn.table("keyed").upsert() as writer:
        writer.write(batch(0))
    eventually(lambda: bool(it.admin.list_kv_snapshots("keyed")))


def files_in(directory: Path) -> list[str]:
    """The files of tables in a location."""
    return [str(p) for kind in ("log", "kv") for p in directory.glob(f"{kind}/**/*") if p.is_file()]


# -- tables created during changes ---------------------------------------------------------------


async def test_tables_created_during_reconfigurations_have_a_dir_of_either(
    tmp_path: Path,
) -> None:
    dirs = directories(tmp_path, "a", "b", "c")
    with stage(tmp_path, {DIRS: ",".join(map(str, dirs[:2]))}) as it:
        async with connected(it.server.bootstrap) as conn:
            changes = asyncio.create_task(asyncio.to_thread(reconfigure, it.admin, dirs))
            names: list[str] = []
            while not changes.done() or len(names) < 20:
                names.append(f"t{len(names)}")
                await create(conn, fluss.TablePath("fluss", names[-1]), bucket_count=1)
            await changes
        homes = Counter([it.home(name) for name in names])
        assert set(homes) <= {f"file://{d}" for d in dirs}
        assert min(homes[f"file://{d}"] for d in dirs[:2]) > 0


def reconfigure(admin: Admin, dirs: list[Path]) -> None:
    for _ in range(10):
        admin.alter_cluster_configs({DIRS: ",".join(map(str, dirs))})
        admin.alter_cluster_configs({DIRS: ",".join(map(str, dirs[:2]))})


# -- restarts ------------------------------------------------------------------------------------


def test_restarts_do_not_skew_the_next_three_hundred_files(tmp_path: Path) -> None:
    lives, files = 6, 50
    weights = {1: 5, 2: 3, 3: 1}
    dirs = directories(tmp_path, "a", "b", "c")
    conf = {**SERVER, **weighted(dirs, *weights.values())}
    server = WarmServer(tmp_path / "data", conf)
    homes: list[str] = []
    with server:
        with reconnected(server) as it:
            it.create("long")
        for life in range(lives):
            with reconnected(server) as it:
                write(it.conn.table("long"), life * files, (life + 1) * files)
                it.until_copied(it.conn.table("long"), (life + 1) * files)
                it.create(f"of_life_{life}")
                homes.append(it.home(f"of_life_{life}"))
            assert server.stop() == 0
            server.start()
        with reconnected(server) as it:
            table = it.conn.table("long")
            write(table, lives * files, lives * files + 1)
            it.until_copied(table, lives * files + 1)
            places = it.places(table)
    assert len(places) == 300
    assert places == smooth(weights, 300)
    for location_id, count in Counter(places).items():
        assert abs(count / 300 - weights[location_id] / 9) < 0.02
    turns = [f"file://{dirs[x - 1]}" for x in smooth(weights, lives + 1)]
    assert homes == turns[1:], "the first turn was that of the long table"


# -- counters of the round-robin -----------------------------------------------------------------

EDGES = [2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**31), -(2**63)]


@pytest.mark.parametrize("edge", EDGES)
def test_the_pick_after_a_counter_at_its_edge_is_valid(edge: int) -> None:
    weights = {1: 1, 2: 1, 3: 1}
    for current in ({1: edge}, {1: edge, 2: -edge, 3: edge}):
        picker = SmoothRoundRobin.from_json(SmoothRoundRobin(current).to_json())
        picked = Counter(picker.pick(weights) for _ in range(300))
        assert set(picked) == set(weights)
        assert max(picked.values()) - min(picked.values()) <= 6


def test_a_server_whose_counters_stand_at_their_edges_goes_on(tmp_path: Path) -> None:
    dirs = directories(tmp_path, "a", "b")
    stored = tmp_path / "data" / STATE_FILE
    stored.parent.mkdir(parents=True)
    stored.write_text(json.dumps({"current": {"1": 2**63 - 1, "2": 2**31 - 1}}))
    with stage(tmp_path, {DIRS: ",".join(map(str, dirs))}) as it:
        table = it.create("edge")
        write(table, 0, BATCHES)
        it.until_copied(table, BATCHES)
        places = Counter(it.places(table))
        assert set(places) == {1, 2}
        assert abs(places[1] - places[2]) <= 4
        assert rows(table) == everything(BATCHES)
