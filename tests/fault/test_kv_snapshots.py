"""A real server that loses its disk, or dies in the middle of a snapshot.

The tests use a client, which must find every acknowledged row again. The server takes snapshots
often, and a test waits for the files of committed ones.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zufluss
from tests.counts import FULL
from tests.servers import Apart
from tests.waiting import eventually
from zufluss.errors import ZuflussError
from zufluss.log.files import KILL_AT_VARIABLE, STEPS
from zufluss.testing.server import DevServer

OFTEN = {"kv.snapshot.interval": "100ms"}
NEVER = {"kv.snapshot.interval": "1h"}
SNAPSHOT_STEPS = [step for step in STEPS if step.startswith("snapshot-")]


def locations(root: Path, count: int) -> dict[str, str]:
    return {"remote.data.dirs": ",".join(str(root / f"remote-{i}") for i in range(count))}


def newest_offset(server: DevServer, bucket: int = 0) -> int:
    """The log offset of the newest snapshot that the server logged as taken."""
    offsets = [
        int(line.split("log_offset=")[1].split()[0])
        for line in server.output
        if "kv_snapshot_taken" in line and f"bucket {bucket}'" in line
    ]
    return max(offsets, default=0)


def upsert(server: DevServer, rows: dict[int, str]) -> None:
    with (
        zufluss.connect(server.bootstrap) as conn,
        conn.table("fluss.t").upsert() as writer,
    ):
        writer.write({"id": [*rows], "v": [*rows.values()]})


def create(server: DevServer) -> None:
    with zufluss.connect(server.bootstrap) as conn:
        columns = "id INT NOT NULL, v STRING"
        conn.admin.create_table("fluss.t", columns, primary_key=["id"], bucket_count=1)


def found(server: DevServer, keys: range) -> dict[int, str]:
    with zufluss.connect(server.bootstrap) as conn:
        rows = conn.table("fluss.t").lookup([*keys], missing="drop").to_pylist()
    return {row["id"]: row["v"] for row in rows}


def lose_disk(server: DevServer) -> None:
    """Remove the table directories of the server; metadata and remote storage stay."""
    (table,) = server.data_dir.glob("fluss/t-*")
    shutil.rmtree(table)


def files_of_tables(root: Path) -> list[dict[str, Any]]:
    """The table files in all `_METADATA` below a directory."""
    documents = [json.loads(p.read_bytes()) for p in root.glob("**/snap-*/_METADATA")]
    return [f for d in documents for f in d["kv_snapshot_handle"]["shared_file_handles"]]


def test_a_table_whose_directories_are_gone_comes_back_with_state_changelog_and_lookups(
    new_server: Callable[..., DevServer], tmp_path: Path
) -> None:
    server = new_server(OFTEN | locations(tmp_path, 2))
    create(server)
    rows = {i: f"first {i}" for i in range(200)}
    upsert(server, rows)
    eventually(lambda: newest_offset(server) >= 200)
    changed = {i: f"second {i}" for i in range(150, 250)}
    upsert(server, changed)
    rows |= changed
    end = 200 + 2 * 50 + 50
    eventually(lambda: newest_offset(server) >= end)
    used = {f["location_id"] for f in files_of_tables(tmp_path)}
    assert used == {1, 2}, "the table files of the snapshots lie in two locations"
    assert server.stop() == 0
    lose_disk(server)
    server.start()
    assert found(server, range(300)) == rows
    upsert(server, {0: "after"})
    with zufluss.connect(server.bootstrap) as conn:
        changes = conn.table("fluss.t").changelog(["id", "v"], start=end).to_arrow()
    assert changes["_change_type"].to_pylist() == ["-U", "+U"]
    assert changes["v"].to_pylist() == ["first 0", "after"]
    rows[0] = "after"
    eventually(lambda: newest_offset(server) >= end + 2)
    server.kill()
    lose_disk(server)
    server.start()
    assert found(server, range(300)) == rows


def test_a_damaged_file_in_remote_storage_refuses_the_bucket_and_names_the_file(
    new_server: Callable[..., DevServer], tmp_path: Path
) -> None:
    server = new_server(OFTEN | locations(tmp_path, 1))
    create(server)
    upsert(server, {i: f"row {i}" for i in range(100)})
    eventually(lambda: newest_offset(server) >= 100)
    assert server.stop() == 0
    for path in tmp_path.glob("remote-0/**/shared/*"):
        data = bytearray(path.read_bytes())
        data[20] ^= 1
        path.write_bytes(data)
    lose_disk(server)
    server.start()
    log = server.log()
    assert "bucket_refused" in log
    assert "with checksum" in log
    with (
        zufluss.connect(server.bootstrap, **{"client.request-timeout": "2s"}) as conn,
        pytest.raises(ZuflussError),
    ):
        conn.table("fluss.t").lookup([1])


def test_a_tablet_server_of_its_own_that_lost_its_disk_gets_its_buckets_back(
    new_apart: Callable[..., Apart], tmp_path: Path
) -> None:
    remote = locations(tmp_path, 2)
    coordinator, tablet = new_apart(OFTEN | remote)
    create(coordinator)
    upsert(coordinator, {i: f"row {i}" for i in range(100)})
    eventually(lambda: newest_offset(tablet) >= 100)
    tablet.kill()
    lose_disk(tablet)
    tablet.start()
    assert found(coordinator, range(200)) == {i: f"row {i}" for i in range(100)}
    upsert(coordinator, {7: "after"})
    eventually(lambda: newest_offset(tablet) >= 102)


@pytest.mark.parametrize("step", SNAPSHOT_STEPS if FULL else SNAPSHOT_STEPS[-1:])
def test_a_death_in_any_step_of_a_snapshot_loses_nothing(
    new_server: Callable[..., DevServer], tmp_path: Path, step: str
) -> None:
    server = new_server(NEVER | locations(tmp_path, 2))
    create(server)
    rows: dict[int, str] = {}
    end = 0
    for life in range(2):
        changed = {i: f"life {life} row {i}" for i in range(40 * life, 40 * life + 80)}
        upsert(server, changed)
        end += len(changed) + len(changed.keys() & rows.keys())
        rows |= changed
        server.kill()
        die_at(server, step)
        server.start()
        assert found(server, range(200)) == rows
        assert not [*server.data_dir.glob("fluss/t-*/kv-0/checkpoint*")]
    server.kill()
    server.properties |= OFTEN
    server.start()
    upsert(server, {199: "last"})
    eventually(lambda: newest_offset(server) == end + 1)
    assert server.stop() == 0
    lose_disk(server)
    server.start()
    assert found(server, range(200)) == {**rows, 199: "last"}


def die_at(server: DevServer, step: str) -> None:
    """Run the server until a snapshot reaches this step and it is killed; later it takes none."""
    server.properties |= OFTEN
    server.environ = {KILL_AT_VARIABLE: f"{step}#1"}
    try:
        server.start()
    except RuntimeError as e:
        assert "before it was ready" in str(e)  # noqa: PT017  it may well be that quick
    assert server.wait() == -signal.SIGKILL
    server.properties |= NEVER
    server.environ = {KILL_AT_VARIABLE: ""}
