"""A location that was destroyed is given up: what is lost is listed, the rest goes on."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.end_to_end.locations.inspection import (
    IN_LAKE,
    LAKE,
    SNAPSHOTS,
    keyed,
    patient,
    patient_again,
    tiered,
    until_snapshot,
    upsert,
)
from tests.end_to_end.locations.stage import DIRS, PLACEMENT, ROWS, Stage, write
from tests.waiting import eventually
from zufluss.cli.main import app
from zufluss.client.sync.lease import KvSnapshotLease
from zufluss.client.sync.table import Table
from zufluss.errors import ConfigError, KvSnapshotRevokedError, OffsetOutOfRangeError
from zufluss.log.files import KILL_AT_VARIABLE, LOST_STEPS
from zufluss.model.table import TableBucket
from zufluss.remote.locations import AdminState
from zufluss.remote.objects import Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import S3Server

pytestmark = pytest.mark.timeout(300)

BATCHES = 9
SEGMENTS = BATCHES - 1
KEYS = 40


@dataclass
class Place:
    """The second location, which a test destroys."""

    uri: str
    properties: Mapping[str, str]

    def destroy(self) -> None:
        """Remove every file, the marker included."""
        if self.uri.startswith("file://"):
            shutil.rmtree(self.uri.removeprefix("file://"))
            return

        async def delete_all() -> None:
            objects = Objects(parse_location(self.uri, "place"), self.properties)
            async for page in objects.list(""):
                await objects.delete([each.path for each in page])

        asyncio.run(delete_all())


@dataclass
class Filled:
    """A server whose files lie in two locations."""

    it: Stage
    second: Place
    log: Table
    state: Table
    lease: KvSnapshotLease

    def run(self, *arguments: str, code: int = 0) -> Result:
        """Run `zufluss location retire 2 --force …`."""
        command = ["location", "retire", "2", "--force", *arguments]
        done = CliRunner().invoke(app, [*command, "--bootstrap", self.it.server.bootstrap])
        assert (done.exit_code != 0) == (code != 0), (done.output, done.exception)
        return done


@pytest.fixture(params=["directory", "s3"])
def second(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "directory":
        return Place(f"file://{tmp_path}/second", {})
    s3: S3Server = request.getfixturevalue("s3_server")
    return Place(f"{s3.bucket(f'e{uuid.uuid4()}')}/second", s3.properties)


@pytest.fixture
def filled(tmp_path: Path, second: Place) -> Iterator[Filled]:
    places = {DIRS: f"{tmp_path}/first,{second.uri}", **second.properties}
    with patient(tmp_path, {**places, **SNAPSHOTS, **LAKE}) as it:
        log, state = it.create("t", **IN_LAKE), keyed(it, "state", **{PLACEMENT: "pinned:2"})
        write(log, 0, BATCHES)
        it.until_copied(log, BATCHES)
        it.until_gone(log)
        lease = take_lease(it, state)
        for number in (1, 2):  # one of the two offsets files is in each location
            tiered(it, log, number, 10 * number)
        yield Filled(it, second, log, state, lease)


def take_lease(it: Stage, state: Table) -> KvSnapshotLease:
    """Lease a snapshot of a table that has all its files in the second location so far."""
    upsert(state, 0, KEYS)
    until_snapshot(it, state, KEYS)
    assert snapshot_locations(it) == {2}
    lease = it.admin.kv_snapshot_lease("fluss.state", lease_id="nightly", duration="1h")
    it.admin.alter_table("fluss.state", set={PLACEMENT: "cluster"})
    return lease


def snapshot_locations(it: Stage) -> set[int]:
    return {
        location.location_id
        for location in it.admin.locations().locations
        if location.state is not AdminState.RETIRED
        for group in it.admin.location_files(location.location_id)
        if group.kind == "kv"
    }


def read_on(table: Table) -> tuple[list[int], list[tuple[int, int]]]:
    """All rows, read by somebody who follows the errors; and the ranges that are lost."""
    ids: list[int] = []
    lost: list[tuple[int, int]] = []
    start = 0
    while True:
        try:
            scan = table.scan(start={TableBucket(table.info.table_id, None, 0): start})
            for batch in scan:
                ids += batch["id"].to_pylist()
            return ids, lost
        except OffsetOutOfRangeError as problem:
            first, last = lost_range(str(problem), start)
            lost.append((first, last))
            start = last + 1


def lost_range(message: str, start: int) -> tuple[int, int]:
    """The first and last lost record, as the error tells."""
    following = re.search(r"read on at offset (\d+)", message)
    assert following, message
    named = re.search(r"records (\d+) to (\d+) were lost", message)
    if named is None:  # at the beginning of a log nobody can tell whether they expired
        return start, int(following[1]) - 1
    assert int(following[1]) == int(named[2]) + 1
    return int(named[1]), int(named[2])


def check_afterwards(it: Stage, log: Table, state: Table, kept: list[int]) -> None:
    """Nothing refers to the location, and everything that was not lost can be read."""
    location = it.admin.locations().get(2)
    assert (location.state, location.live_files) == (AdminState.RETIRED, 0)
    ids, lost = read_on(log)
    assert ids == kept
    missing = sorted(set(range(BATCHES * ROWS)) - set(kept))
    assert sorted(i for first, last in lost for i in range(first, last + 1)) == missing
    assert sorted(state.scan().to_arrow()["id"].to_pylist()) == list(range(KEYS))
    assert it.admin.lake_snapshot("fluss.t") is not None
    assert it.admin.locations().get(1).live_files > 0


def kept_rows(it: Stage, log: Table, second: Place) -> list[int]:
    """The rows that are in the first location, or on the server's disk."""
    places = it.places(log, second.properties)
    assert len(places) == SEGMENTS
    assert places[0] == 1
    here = len(it.local(log)) - 1  # closed segments that are still on the server's disk
    kept = [n for n, place in enumerate(places) if place == 1 or n >= SEGMENTS - here]
    return [i for n in (*kept, SEGMENTS) for i in range(n * ROWS, (n + 1) * ROWS)]


def test_a_destroyed_location_is_given_up_with_a_list_of_what_is_lost(filled: Filled) -> None:
    it = filled.it
    refused = filled.run("--yes", code=1)
    assert isinstance(refused.exception, ConfigError)
    assert "works, so nothing in it is lost; drain it" in str(refused.exception)
    kept = kept_rows(it, filled.log, filled.second)
    groups = it.admin.location_files(2, documents=True)
    filled.second.destroy()

    listed = json.loads(filled.run("--dry-run", "-o", "json").stdout)
    assert {(row["table"], row["bucket"], row["kind"]) for row in listed} == {
        (str(group.table.path), group.bucket_id, group.kind) for group in groups
    }
    log_row = next(row for row in listed if (row["table"], row["kind"]) == ("fluss.t", "log"))
    assert log_row["offsets"]
    assert it.admin.locations().get(2).state is AdminState.ACTIVE, "nothing was changed"
    assert filled.run(code=1).exit_code == 1, "nobody said yes"
    assert it.admin.locations().get(2).state is AdminState.ACTIVE

    done = filled.run("--yes")
    assert "is retired; nothing refers to its files any more" in done.output
    check_afterwards(it, filled.log, filled.state, kept)
    assert snapshot_locations(it) == {1}
    filled.lease.renew()
    with pytest.raises(KvSnapshotRevokedError, match="lost with location 2"):
        filled.lease.check()
    write(filled.log, BATCHES, BATCHES + 2)
    eventually(lambda: it.copied(filled.log) >= BATCHES * ROWS, "segments are copied again")


def test_after_that_a_lost_disk_is_restored_again(filled: Filled) -> None:
    it, server = filled.it, filled.it.server
    kept = kept_rows(it, filled.log, filled.second)
    filled.second.destroy()
    filled.run("--yes")
    write(filled.log, BATCHES, BATCHES + 1)  # closes the last segment
    eventually(lambda: it.copied(filled.log) == BATCHES * ROWS, "everything is copied")
    it.admin.take_kv_snapshots("fluss.state")
    server.kill()
    shutil.rmtree(server.data_dir / "fluss")
    server.start()
    with patient_again(server) as again:
        log, state = (again.conn.table(f"fluss.{name}") for name in ("t", "state"))
        ids, _ = read_on(log)
        assert ids[: len(kept)] == kept
        assert sorted(state.scan().to_arrow()["id"].to_pylist()) == list(range(KEYS))


@pytest.mark.parametrize(
    "step", [*LOST_STEPS, "remote-manifest#1", "remote-committed#1", "snapshot-committed#1"]
)
@pytest.mark.parametrize("second", ["directory"], indirect=True)
def test_a_killed_server_goes_on_with_a_lost_location(filled: Filled, step: str) -> None:
    it, server = filled.it, filled.it.server
    kept = kept_rows(it, filled.log, filled.second)
    server.stop()
    filled.second.destroy()
    server.environ = {KILL_AT_VARIABLE: step if "#" in step else f"{step}#1"}
    server.start()
    with patient_again(server) as again:
        CliRunner().invoke(
            app,
            ["location", "retire", "2", "--force", "--yes", "--bootstrap", server.bootstrap,
             "-Dclient.request-timeout=2s"],
        )  # fmt: skip
        del again
    assert server.wait() == -signal.SIGKILL, f"{step} was not reached"
    server.environ = {KILL_AT_VARIABLE: ""}
    server.start()
    with patient_again(server) as again:
        is_retired = lambda: again.admin.locations().get(2).state is AdminState.RETIRED  # noqa: E731
        if again.admin.locations().get(2).state is AdminState.ACTIVE:  # it died before that
            again.admin.retire_lost_location(2)
        eventually(is_retired, "the server goes on by itself")
        log, state = (again.conn.table(f"fluss.{name}") for name in ("t", "state"))
        check_killed(again, log, state, kept)


def check_killed(it: Stage, log: Table, state: Table, kept: list[int]) -> None:
    """After a restart manifests of the lost location are lost, too, with all they list."""
    ids, _ = read_on(log)
    assert set(ids) <= set(kept)
    assert ids == sorted(ids)
    assert ids[-ROWS:] == kept[-ROWS:]
    assert sorted(state.scan().to_arrow()["id"].to_pylist()) == list(range(KEYS))
    assert it.admin.locations().get(2).live_files == 0
