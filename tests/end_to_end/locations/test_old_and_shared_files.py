"""Records of older versions, snapshots in two locations, and offsets files."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

from tests.end_to_end.locations.inspection import (
    IN_LAKE,
    LAKE,
    NO_COPIES,
    SNAPSHOTS,
    keyed,
    lose_disk,
    of_table,
    patient,
    patient_again,
    stored,
    tiered,
    until_snapshot,
    upsert,
)
from tests.end_to_end.locations.stage import (
    DIRS,
    PLACEMENT,
    Stage,
    directories,
    everything,
    rows,
    segment_files,
    write,
)
from tests.servers import WarmServer
from zufluss.client.sync.table import Table
from zufluss.coordinator.remote.locations import LOCATIONS_PATH, PLACEMENT_PATH
from zufluss.meta.api import Delete, Op, Put
from zufluss.meta.embedded import EmbeddedStore
from zufluss.model.table import TableBucket
from zufluss.testing.s3 import S3Server
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

NEWER = ("remote_location", "location", "readable_location")
"""Fields that older records of tables, partitions and lake snapshots do not have."""


def made_older(server: WarmServer, *, without_registry: bool = False) -> None:
    """Convert the metadata to the form that it had before locations existed."""

    async def change() -> None:
        store = await EmbeddedStore.open(server.data_dir / "meta")
        found = [x for x in await store.tree("/tables") if x.value.startswith(b"{")]
        found = [x for x in found if "/remote/" not in x.path]
        older = {x.path: (x.value, dumped(without(json.loads(x.value)))) for x in found}
        ops: list[Op] = [Put(path, new) for path, (old, new) in older.items() if new != old]
        if without_registry:
            ops += [Delete(LOCATIONS_PATH), Delete(PLACEMENT_PATH)]
        assert ops
        await store.transact(ops)
        await store.close()

    asyncio.run(change())


def without(value: Any) -> Any:
    """A document without the newer fields, at any depth."""
    if isinstance(value, list):
        return [without(each) for each in value]
    if isinstance(value, dict):
        return {k: without(v) for k, v in value.items() if k not in NEWER}
    return value


def dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def tiered_to(it: Stage, name: str) -> dict[int, int]:
    """The tiered offsets of a table, by bucket."""
    snapshot = it.admin.lake_snapshot(name)
    assert snapshot is not None
    return {bucket.bucket_id: offset for bucket, offset in snapshot.offsets.items()}


# -- records of older versions -------------------------------------------------------------------


def test_old_registrations_are_in_the_first_place_and_old_and_new_files_are_read(
    tmp_path: Path,
) -> None:
    first, second = dirs = directories(tmp_path, "first", "second")
    conf = {"remote.data.dir": str(first), **SNAPSHOTS, **LAKE}
    with patient(tmp_path, conf) as it:
        server, table = it.server, it.create("t")
        state = keyed(it, "state", by_day=True, **IN_LAKE)
        plain = it.create("lake", **IN_LAKE)
        write(table, 0, 9)
        write(plain, 0, 2)
        upsert(state, 0, 30, "a")
        tiered(it, plain, 1, 15)
        it.until_copied(table, 9)
        it.until_gone(table)
        until_snapshot(it, state, 30, "a")
        assert server.stop() == 0
        made_older(server)
        server.properties = {DIRS: ",".join(map(str, dirs)), **server.properties}
        server.start()
        with patient_again(server) as again:
            assert {again.home(name) for name in ("t", "state", "lake")} == {f"file://{first}"}
            assert partition_homes(again, "state") == [f"file://{first}"]
            table, plain = again.conn.table("t"), again.conn.table("lake")
            assert rows(table) == everything(9)
            assert tiered_to(again, "lake") == {0: 15}
            write(table, 9, 20)
            tiered(again, plain, 2, 20)
            again.until_copied(table, 20)
            again.until_gone(table)
            assert segment_files(first)
            assert segment_files(second)
            assert rows(table) == everything(20)
            assert tiered_to(again, "lake") == {0: 20}
            assert server.stop() == 0
            lose_disk(server, state)
            server.start()
            found = again.conn.table("state").lookup([{"id": i, "day": "a"} for i in range(30)])
            assert found["id"].to_pylist() == list(range(30))


def test_files_from_before_there_was_a_registry_are_read_beside_new_places(
    tmp_path: Path,
) -> None:
    first, second = dirs = directories(tmp_path, "first", "second")
    with patient(tmp_path, {**NO_COPIES, **LAKE}) as it:
        server, table = it.server, it.create("t", **IN_LAKE)
        write(table, 0, 9)
        tiered(it, table, 1, 15)
        assert server.stop() == 0
        made_older(server, without_registry=True)
        (server.data_dir / "remote" / ".zufluss-cluster").unlink()
        server.properties |= {DIRS: ",".join(map(str, dirs))}
        server.properties["remote.log.task-interval-duration"] = "20ms"
        server.start()
        with patient_again(server) as again:
            assert tiered_to(again, "t") == {0: 15}
            table = again.conn.table("t")
            again.until_copied(table, 9)
            again.until_gone(table)
            assert rows(table) == everything(9)
            tiered(again, table, 2, 20)
            assert tiered_to(again, "t") == {0: 20}
            server.kill()
            server.start()
            assert tiered_to(again, "t") == {0: 20}
            assert [len(of_table(table, stored(p), "lake")) for p in (first, second)] in (
                [0, 1],
                [1, 0],
            )


def partition_homes(it: Stage, name: str) -> list[str]:
    """The locations that partitions were created with."""
    path = m.PbTablePath(database_name="fluss", table_name=name)
    request = m.ListPartitionInfosRequest(table_path=path)
    answer = it.conn.call_coordinator(ApiKey.LIST_PARTITION_INFOS, request)
    return [part.remote_data_dir for part in answer.partitions_info]


# -- snapshots in two places ---------------------------------------------------------------------


def test_a_snapshot_whose_files_lie_in_two_places_restores_a_bucket(
    tmp_path: Path, s3_server: S3Server
) -> None:
    near, far = tmp_path / "near", f"{s3_server.bucket(f'e{uuid.uuid4()}')}/place"
    conf = {DIRS: f"{near},{far}", **SNAPSHOTS, **s3_server.properties}
    with patient(tmp_path, conf) as it:
        server, table = it.server, keyed(it, "t")
        end = 0
        while len({place_of(path) for path in table_files(it, table)}) < 2:
            upsert(table, end, end + 10)
            end += 10
            until_snapshot(it, table, end)
            assert end < 500
        names = table_files(it, table)
        assert {path.partition("/kv/")[0] for path in names} == {f"file://{near}", far}
        assert server.stop() == 0
        lose_disk(server, table)
        server.start()
        with patient_again(server) as again:
            table = again.conn.table("t")
            rows = table.lookup(list(range(end + 10)), missing="drop")
            assert sorted(rows["id"].to_pylist()) == list(range(end))
            upsert(table, end, end + 10)
            assert table.lookup({"id": end + 9}) is not None


def table_files(it: Stage, table: Table) -> list[str]:
    """The RocksDB table files of the newest snapshot, as clients find them."""
    newest = it.admin.latest_kv_snapshots(table.path)
    if not newest:
        return []
    bucket = TableBucket(table.info.table_id, None, 0)
    metadata = it.admin.kv_snapshot_metadata(bucket, newest[0].snapshot_id)
    return [file.remote_path for file in metadata.files if "/shared/" in file.remote_path]


def place_of(path: str) -> str:
    return path.partition("/kv/")[0]


# -- offsets files -------------------------------------------------------------------------------


def test_offsets_files_follow_the_place_of_their_table(tmp_path: Path) -> None:
    dirs = directories(tmp_path, "a", "b", "c")
    with patient(tmp_path, {DIRS: ",".join(map(str, dirs)), **NO_COPIES, **LAKE}) as it:
        server = it.server
        names = ["one", "two", "three"]
        tables = [it.create(name, **IN_LAKE) for name in names]
        pinned = it.create("pinned", **IN_LAKE, **{PLACEMENT: "pinned:2"})
        homes = [it.home(name) for name in (*names, "pinned")]
        assert homes == [f"file://{dirs[i]}" for i in (0, 1, 2, 1)]
        for snapshot in (1, 2):
            for table in (*tables, pinned):
                if snapshot == 1:
                    write(table, 0, 2)
                tiered(it, table, snapshot, 5 * snapshot)
            server.kill()
            server.start()
        for table, home in zip((*tables, pinned), homes, strict=True):
            found = {f"file://{p}": of_table(table, stored(p), "lake") for p in dirs}
            assert [p for p, files in found.items() if files] == [home]
            assert tiered_to(it, table.path.table) == {0: 10}
