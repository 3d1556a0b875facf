"""Slow and failing locations, and the removal of files that nothing refers to."""

from __future__ import annotations

import asyncio
import re
import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end.locations.inspection import (
    IN_LAKE,
    LAKE,
    METRICS,
    NO_COPIES,
    SNAPSHOTS,
    SWEEPING,
    keyed,
    live,
    of_table,
    orphan,
    patient,
    patient_again,
    put,
    scrape,
    stored,
    tiered,
    until_snapshot,
    upsert,
)
from tests.end_to_end.locations.stage import (
    DIRS,
    PLACEMENT,
    PROBE_INTERVAL,
    Stage,
    everything,
    reconnected,
    rows,
    until_health,
    write,
)
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client.sync.table import Table
from zufluss.log.files import KILL_AT_VARIABLE
from zufluss.remote.locations import Health
from zufluss.remote.objects import ObjectMissingError, Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.proxy import Fault, FaultProxy
from zufluss.testing.s3 import S3Server, properties

NEAR, FAR = 1, 2
"""Locations by id: a directory, and a bucket behind the proxy."""
FAILURES = "zufluss_remote_log_failures_total"
SWEEPS = "zufluss_remote_sweeps_total"


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def far(s3_server: S3Server) -> str:
    """The address of a location in an object store."""
    return f"{s3_server.bucket(f'e{uuid.uuid4()}')}/place"


@pytest.fixture
def near(tmp_path: Path) -> Path:
    """The address of a directory."""
    return tmp_path / "near"


@pytest.fixture
def places(near: Path, far: str, proxy: FaultProxy) -> dict[str, str]:
    """The configuration of a directory and a bucket behind the proxy."""
    return {
        DIRS: f"{near},{far}",
        PROBE_INTERVAL: "50ms",
        **properties(proxy.endpoint),
        **METRICS,
    }


# -- slow places ---------------------------------------------------------------------------------


def test_the_share_of_a_slow_place_falls_and_the_fast_one_goes_on(
    tmp_path: Path, places: dict[str, str], proxy: FaultProxy
) -> None:
    with patient(tmp_path, places) as it:
        table = it.create("t")
        proxy.set([Fault("latency", seconds=0.2, methods=("PUT",))])
        write(table, 0, 9)
        it.until_copied(table, 9)
        assert weights(it) == [1.0, 1.0]
        it.admin.alter_cluster_configs({"zufluss.remote.adaptive-weights": "true"})
        before = placed(it)
        write(table, 9, 40)
        it.until_copied(table, 40)
        found = Counter({x: count - before[x] for x, count in placed(it).items()})
        assert found[NEAR] > 2 * found[FAR] > 0, "less than a third, and not nothing"
        assert weights(it)[0] == 1.0
        assert 0.05 <= weights(it)[1] < 0.5
        shown = scrape(it.server)
        assert shown['zufluss_remote_effective_weight{location="1"}'] == 1
        assert shown['zufluss_remote_effective_weight{location="2"}'] < 0.5
        assert it.errors(FAR) == 0
        proxy.set()
        assert rows(table) == everything(40)


def weights(it: Stage) -> list[float]:
    """The effective weights, by location."""
    return [seen.effective_weight for x in it.admin.locations().locations for seen in x.servers]


def placed(it: Stage) -> dict[int, int]:
    """How many files the server put into each location."""
    return {
        x.location_id: sum(seen.placed_files for seen in x.servers)
        for x in it.admin.locations().locations
    }


# -- errors of an object store -------------------------------------------------------------------


def test_throttling_counts_against_a_place(
    tmp_path: Path, places: dict[str, str], proxy: FaultProxy
) -> None:
    with patient(tmp_path, places) as it:
        table = it.create("t")
        proxy.set([Fault("status_503", methods=("PUT",))])
        write(table, 0, 9)
        it.until_copied(table, 9)
        assert set(it.places(table)) == {NEAR}
        assert it.errors(FAR) > 0
        assert it.health(FAR) in (Health.SUSPECT, Health.DOWN)
        [seen] = it.admin.locations().locations[FAR - 1].servers
        assert seen.last_error is not None
        assert "SlowDown" in seen.last_error
        assert scrape(it.server)['zufluss_remote_errors_total{location="2"}'] > 0
        proxy.set()
        until_health(it, FAR, Health.ACTIVE)
        assert rows(table) == everything(9)


def test_forbidden_uploads_are_errors_and_move_nothing(
    tmp_path: Path, places: dict[str, str], proxy: FaultProxy, near: Path, far: str
) -> None:
    with patient(tmp_path, places) as it:
        it.create("first")
        table = it.create("second", **{PLACEMENT: "partition"})
        assert it.home("second") == far
        proxy.set([Fault("status_403", methods=("PUT",))])
        write(table, 0, 9)
        eventually(lambda: scrape(it.server)[FAILURES] >= 3, "uploads fail")
        assert stored(near) == {}
        assert it.copied(table) == 0
        assert it.health(FAR) is Health.ACTIVE
        assert it.errors(FAR) == 0
        assert "ExpiredToken" in it.server.log()
        assert f"{far}/log/fluss/second-" in it.server.log()
        proxy.set()
        it.until_copied(table, 9)
        assert stored(near) == {}
        assert rows(table) == everything(9)


def test_a_missing_object_is_an_error_and_no_failure_of_its_place(
    tmp_path: Path, places: dict[str, str], far: str, s3_server: S3Server
) -> None:
    with patient(tmp_path, places) as it:
        table = it.create("t", **{PLACEMENT: f"pinned:{FAR}"})
        write(table, 0, 9)
        it.until_copied(table, 9)
        it.until_gone(table)
        victim = min(p for p in stored(far, s3_server.properties) if p.endswith(f"/{0:020d}.log"))
        store = Objects(parse_location(far, "far"), s3_server.properties)
        asyncio.run(store.delete([victim]))
        with (
            reconnected(it.server) as no_backoff,
            pytest.raises(ObjectMissingError, match=f"{far}/{victim}"),
        ):
            rows(no_backoff.conn.table("t"))
        assert it.health(FAR) is Health.ACTIVE
        assert it.errors(FAR) == 0
        write(table, 9, 12)
        it.until_copied(table, 12)
        assert set(it.places(table, s3_server.properties)) == {FAR}


# -- orphans -------------------------------------------------------------------------------------


def test_orphans_of_crashes_between_upload_and_commit_leave_every_place(
    tmp_path: Path,
) -> None:
    dirs = [tmp_path / "a", tmp_path / "b"]
    copying = {**NO_COPIES, "remote.log.task-interval-duration": "20ms"}
    snapshotting = {**NO_COPIES, **SNAPSHOTS}
    joined = ",".join(map(str, dirs))
    with patient(tmp_path, {DIRS: joined, **NO_COPIES, **METRICS}) as it:
        server, table, changes = it.server, it.create("t"), keyed(it, "changes")
        write(table, 0, 12)
        upsert(changes, 0, 120)
        server.kill()
        for point, conf in (
            ("remote-uploaded#2", copying),
            ("remote-uploaded#1", copying),
            ("remote-manifest#1", copying),
            ("snapshot-uploaded#1", snapshotting),
            ("snapshot-uploaded#1", snapshotting),
        ):
            die_at(server, point, conf)
        before = [len(stored(place)) for place in dirs]
        server.properties |= {**NO_COPIES, **SWEEPING}
        server.environ = {KILL_AT_VARIABLE: ""}
        server.start()
        with patient_again(server) as again:
            counted = live(again)
            assert all(b > c for b, c in zip(before, counted, strict=True)), "orphans in each"
            eventually(lambda: [len(stored(p)) for p in dirs] == counted, "orphans are swept")
            sweeps = scrape(server)[SWEEPS]
            eventually(lambda: scrape(server)[SWEEPS] > sweeps + 1, "it sweeps again")
            assert [len(stored(p)) for p in dirs] == counted == live(again)
            swept = re.findall(r"garbage_deleted .* kind=(\w+) location=(\d)", server.log())
            assert {kind for kind, _ in swept} == {"log", "kv"}
            assert {location for _, location in swept} == {"1", "2"}
            assert rows(again.conn.table("t")) == everything(12)
            found = again.conn.table("changes").lookup(list(range(130)), missing="drop")
            assert sorted(found["id"].to_pylist()) == list(range(120))


def die_at(server: WarmServer, point: str, conf: dict[str, str]) -> None:
    """Run the server until it is killed at a step."""
    server.properties |= conf
    server.environ = {KILL_AT_VARIABLE: point}
    server.launch()
    assert server.wait() == -signal.SIGKILL


# -- dropped tables and partitions ---------------------------------------------------------------


def test_dropping_a_table_or_partition_leaves_nothing_in_any_place(
    tmp_path: Path,
    places: dict[str, str],
    proxy: FaultProxy,
    near: Path,
    far: str,
    s3_server: S3Server,
) -> None:
    def files(table: Table) -> list[set[str]]:
        """The files of a table in each location."""
        return [of_table(table, stored(p, s3_server.properties)) for p in (near, far)]

    def kinds(table: Table) -> set[str]:
        return {path.split("/")[0] for found in files(table) for path in found}

    with patient(tmp_path, {**places, **SNAPSHOTS, **LAKE}) as it:
        server, gone = it.server, keyed(it, "gone", **IN_LAKE)
        days, stays = keyed(it, "days", by_day=True), it.create("stays")
        upsert(gone, 0, 90)
        upsert(days, 0, 60, "a")
        upsert(days, 0, 60, "b")
        write(stays, 0, 9)
        tiered(it, gone, 1, 50)
        until_snapshot(it, gone, 90)
        for day in "ab":
            until_snapshot(it, days, 60, day)
        it.until_copied(gone, 9)
        it.until_copied(stays, 9)
        assert kinds(gone) == {"log", "kv", "lake"}
        assert all(files(gone))
        parts = {p.name: p.partition_id for p in it.admin.list_partitions("days")}
        of_a = f"/a-p{parts['a']}/"
        assert all(any(of_a in path for path in found) for found in files(days))
        it.admin.drop_partition("days", {"day": "a"})
        eventually(lambda: not any(of_a in p for found in files(days) for p in found), "no a")
        proxy.set([Fault("status_503", methods=("DELETE", "POST"))])
        it.admin.drop_table("gone")
        eventually(lambda: not files(gone)[0], "the near place is empty")
        assert files(gone)[1]
        server.kill()
        proxy.set()
        server.start()
        eventually(lambda: not any(files(gone)), "the far place is empty")
        with patient_again(server) as again:
            assert rows(again.conn.table("stays")) == everything(9)
            found = again.conn.table("days").lookup(
                [{"id": i, "day": "b"} for i in range(60)], missing="drop"
            )
            assert len(found) == 60
            again.admin.drop_table("days")
            again.admin.drop_table("stays")
        eventually(lambda: not stored(near) and not stored(far, s3_server.properties), "all gone")


# -- many partitions -----------------------------------------------------------------------------


def test_dropping_a_table_with_a_thousand_partitions_leaves_no_directory(
    tmp_path: Path,
) -> None:
    dirs = [tmp_path / "a", tmp_path / "b"]
    with patient(tmp_path, {DIRS: ",".join(map(str, dirs)), **NO_COPIES}) as it:
        it.admin.create_table("t", "id BIGINT, day STRING", partition_keys=["day"], bucket_count=1)
        table = it.conn.table("t")
        create_partitions(it, 1000)
        parts = it.admin.list_partitions("t")
        assert len(parts) == 1000
        for part in parts:
            path = orphan(table, f"/{part.name}-p{part.partition_id}")
            for place in dirs:
                (place / path).parent.mkdir(parents=True)
                (place / path).write_bytes(b"content")
        it.admin.drop_table("t")
        name = f"t-{table.info.table_id}"
        eventually(
            lambda: not any(list(place.glob(f"*/fluss/{name}/*")) for place in dirs), "all gone"
        )
        assert all(stored(place) == {} for place in dirs)


def create_partitions(it: Stage, count: int) -> None:
    """Do the work in small groups."""
    with ThreadPoolExecutor(16) as threads:
        made = threads.map(lambda i: it.admin.create_partition("t", {"day": str(i)}), range(count))
        assert len(list(made)) == count


# -- files that must stay ------------------------------------------------------------------------


def test_nothing_outside_the_roots_is_deleted(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    outside = tmp_path / "a-copy"
    conf = {DIRS: ",".join(map(str, roots)), **NO_COPIES, **SWEEPING, **METRICS}
    with patient(tmp_path, conf) as it:
        gone, stays = it.create("t"), it.create("t2")
        table = f"t-{gone.info.table_id}"
        segment = f"{uuid.uuid4()}/{0:020d}.log"
        strangers = [
            *(root / f"logs/fluss/{table}/0/{segment}" for root in roots),
            *(root / f"log/fluss/{table}0/0/{segment}" for root in roots),
            *(root / f"log/fluss/t2-{stays.info.table_id}/0/{segment[1:]}" for root in roots),
            *(root / f"log/fluss/unborn-1000/0/{segment}" for root in roots),
            *(root / "README" for root in roots),
            outside / orphan(gone),
            outside / orphan(stays),
        ]
        garbage = [root / orphan(gone) for root in roots]
        for root in roots:  # before the garbage, with which the directory may go
            (root / f"log/fluss/{table}/0").mkdir(parents=True, exist_ok=True)
            (root / f"log/fluss/{table}/0/linked").symlink_to(outside / "log")
        for path in (*strangers, *garbage):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"content")
        eventually(lambda: not any(path.exists() for path in garbage), "garbage is swept")
        it.admin.drop_table("t")
        eventually(lambda: "drop_cleaned" in it.server.log(), "the drop is cleaned")
        swept_again(it)
        assert [path for path in strangers if not path.exists()] == []


def swept_again(it: Stage) -> None:
    """Wait for the end of a sweep that begins after now."""
    before = scrape(it.server)[SWEEPS]
    eventually(lambda: scrape(it.server)[SWEEPS] >= before + 2, "it sweeps again")


def test_nothing_is_deleted_where_a_listing_failed(
    tmp_path: Path,
    places: dict[str, str],
    proxy: FaultProxy,
    near: Path,
    far: str,
    s3_server: S3Server,
) -> None:
    keys = s3_server.properties

    def left(table: Table) -> list[int]:
        return [len(of_table(table, stored(place, keys))) for place in (near, far)]

    with patient(tmp_path, {**places, **NO_COPIES, **SWEEPING}) as it:
        proxy.set([Fault("status_503", methods=("GET",), path_contains="list-type")])
        swept, dropped = it.create("swept"), it.create("dropped")
        for place in (near, far):
            put(place, orphan(swept), keys)
        eventually(lambda: left(swept) == [0, 1], "the place that can be listed is swept")
        swept_again(it)
        it.admin.drop_table("dropped")
        for place in (near, far):
            put(place, orphan(dropped), keys)
        eventually(lambda: left(dropped) == [0, 1], "the place that can be listed is cleaned")
        swept_again(it)
        assert left(swept) == left(dropped) == [0, 1]
        proxy.set()
        eventually(lambda: left(swept) == left(dropped) == [0, 0], "the other one is, too")
