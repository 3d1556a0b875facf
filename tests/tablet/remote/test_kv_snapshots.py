"""Key-value snapshots of a real tablet server: what is sent, what counts, what is left behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.paths import FIXTURES
from tests.tablet.gateway import Gateway
from tests.tablet.keyed import keyed, many
from tests.tablet.support import TABLE
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.configs import DynamicConfigs
from zufluss.cluster.replicas import KvSnapshotOffset
from zufluss.config import options
from zufluss.errors import NetworkError, ZuflussError
from zufluss.log.holds import Holder
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket
from zufluss.remote.locations import AdminState
from zufluss.remote.snapshot import IdRange, KvSnapshot
from zufluss.tablet.remote.kv_snapshots import BucketSnapshots

BUCKET = TableBucket(TABLE, None, 0)
FIXTURE = FIXTURES / "kv-snapshot" / "0" / "snap-0" / "_METADATA"
OURS = {"location_id", "relative_path", "crc32c"}
"""Fields that Fluss does not have."""


def metadata_of(snapshot: KvSnapshot, root: Path) -> dict[str, Any]:
    (found,) = root.glob(f"kv/db/t-{TABLE}/0/snap-{snapshot.snapshot_id}/_METADATA")
    content: dict[str, Any] = json.loads(found.read_bytes())
    return content


async def test_a_snapshot_has_all_rows_and_the_next_one_sends_only_what_is_new(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 100))
        first = await tablet.snapshot()
        await tablet.put((3, "changed"), (4, None))
        second = await tablet.snapshot()
        assert first is not None
        assert second is not None
        assert (first.snapshot_id, second.snapshot_id) == (0, 1)
        assert (first.log_offset, second.log_offset) == (100, 103)
        assert (first.row_count, second.row_count) == (100, 99)
        assert set(first.shared) < set(second.shared)
        assert len(second.shared) == len(first.shared) + 1
        new = set(second.objects) - set(first.objects)
        assert second.incremental_size == sum(file.size for file in new)
        assert tablet.gateway.snapshots == [first, second]
        names = {file.path for file in (*first.objects, *second.objects)}
        documents = {f"kv/db/t-{TABLE}/0/snap-{i}/_METADATA" for i in (0, 1)}
        assert tablet.remote_files() == [names | documents]


async def test_metadata_has_the_form_that_fluss_writes(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 10))
        snapshot = await tablet.snapshot()
        assert snapshot is not None
        ours = metadata_of(snapshot, tablet.roots[0])
    fluss = json.loads(FIXTURE.read_bytes())
    assert list(ours) == [*fluss, "zufluss_writers", "zufluss_crc32c"]
    for kind in ("shared_file_handles", "private_file_handles"):
        mine, theirs = ours["kv_snapshot_handle"][kind], fluss["kv_snapshot_handle"][kind]
        assert set(mine[0]) - OURS == set(theirs[0])
        assert set(mine[0]["kv_file_handle"]) == set(theirs[0]["kv_file_handle"])
        assert [_kind(f) for f in mine] == [_kind(f) for f in theirs]
    directory = f"{tablet.roots[0].as_uri()}/kv/db/t-{TABLE}/0"
    assert ours["snapshot_location"] == f"{directory}/snap-0"
    for file in ours["kv_snapshot_handle"]["shared_file_handles"]:
        assert file["kv_file_handle"]["path"].startswith(f"{directory}/shared/")


def _kind(file: dict[str, str]) -> str:
    """The name of a RocksDB file without its number."""
    return file["local_path"].strip("0123456789")


async def test_reserved_numbers_of_an_auto_increment_column_are_in_the_metadata(
    tmp_path: Path,
) -> None:
    columns = "id BIGINT NOT NULL, text STRING, n BIGINT"
    schema = Schema.of(columns, ["id"], auto_increment_column=["n"])
    async with keyed(tmp_path, schema=schema, allocate_ids=_allocate) as tablet:
        await tablet.put((1, "row"), targets=(0, 1))
        snapshot = await tablet.snapshot()
        assert snapshot is not None
        assert snapshot.id_ranges == (IdRange(schema.columns[2].id, 41, 139),)
        content = metadata_of(snapshot, tablet.roots[0])
        assert content["auto_inc_id_range"] == [{"column_id": 2, "start": 41, "end": 139}]


async def _allocate(table_id: int, column_id: int, count: int) -> tuple[int, int]:
    return 40, 140


async def test_there_is_no_snapshot_of_nothing_and_none_without_a_change(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        assert await tablet.snapshot() is None
        await tablet.put((1, "a"))
        assert await tablet.snapshot() is not None
        assert await tablet.snapshot() is None
        assert len(tablet.gateway.snapshots) == 1


async def test_a_restart_goes_on_without_sending_files_again(tmp_path: Path) -> None:
    gateway = Gateway()
    async with keyed(tmp_path, gateway=gateway) as tablet:
        await tablet.put(*many(0, 100))
        first = await tablet.snapshot()
    async with keyed(tmp_path, gateway=gateway) as tablet:
        assert await tablet.snapshot() is None
        await tablet.put((1, "new"))
        second = await tablet.snapshot()
        assert first is not None
        assert second is not None
        assert second.snapshot_id == 1
        assert set(first.shared) < set(second.shared)


async def test_another_database_with_files_of_the_same_names_is_sent_whole(tmp_path: Path) -> None:
    gateway = Gateway()
    async with keyed(tmp_path, gateway=gateway) as tablet:
        await tablet.put(*many(0, 100, "aaaa"))
        first = await tablet.snapshot()
    (tmp_path / "data").rename(tmp_path / "lost")
    remotes, gateway.remotes = gateway.remotes, {}
    async with keyed(tmp_path, gateway=gateway) as tablet:
        await tablet.put(*many(0, 100, "bbbb"), (100, "b"))
        gateway.remotes = remotes
        second = await tablet.snapshot()
        assert first is not None
        assert second is not None
        assert [f.name for f in second.shared] == [f.name for f in first.shared]
        assert not set(second.shared) & set(first.shared)


async def test_a_lost_answer_of_a_commit_is_found_out(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 10))
        tablet.gateway.lose_answer = 1
        first = await tablet.snapshot()
        assert tablet.gateway.snapshots == [first]
        await tablet.put((1, "b"))
        second = await tablet.snapshot()
        assert second is not None
        assert second.snapshot_id == 1


async def test_an_attempt_that_failed_burns_its_number_but_not_its_files(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 10))
        tablet.gateway.lose_request = 1
        with pytest.raises(NetworkError, match="before the request"):
            await tablet.snapshot()
        assert not (tablet.kv_directory() / "checkpoint").exists()
        snapshot = await tablet.snapshot()
        assert snapshot is not None
        assert snapshot.snapshot_id == 1
        shared = {f.file.path for f in snapshot.shared}
        assert {p for p in tablet.remote_files()[0] if "/shared/" in p} == shared


async def test_files_of_an_attempt_that_the_sweep_may_take_are_sent_again(tmp_path: Path) -> None:
    async with keyed(tmp_path, conf={"zufluss.remote.sweep.grace": "0ms"}) as tablet:
        await tablet.put(*many(0, 10))
        tablet.gateway.lose_request = 1
        with pytest.raises(NetworkError):
            await tablet.snapshot()
        sent = {p for p in tablet.remote_files()[0] if "/shared/" in p}
        snapshot = await tablet.snapshot()
        assert snapshot is not None
        assert not sent & {f.file.path for f in snapshot.shared}


async def test_while_nobody_knows_how_a_commit_ended_there_is_no_other(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        gateway = tablet.gateway
        await tablet.put(*many(0, 10))
        gateway.lose_answer = 1
        gateway.before_commit = lambda: setattr(gateway, "silent", True)
        for _ in range(2):
            with pytest.raises(NetworkError, match="does not answer"):
                await tablet.snapshot()
        gateway.silent = False
        assert await tablet.snapshot() is None, "it counts"
        assert len(gateway.snapshots) == 1


async def test_a_location_drains_although_nobody_writes(tmp_path: Path) -> None:
    async with keyed(tmp_path, ("a", "b")) as tablet:
        for i in range(4):
            await tablet.put((i, "row"))
            await tablet.snapshot()
        tablet.set_state(1, AdminState.DRAINING)
        later = [await tablet.snapshot() for _ in range(3)]
        taken = [s for s in later if s is not None]
        assert len(taken) == 2, "as many as are kept, then none is needed"
        for snapshot in taken:
            assert {f.file.location_id for f in snapshot.files} == {2}


async def test_each_table_file_has_a_location_of_its_own_and_the_others_lie_together(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path, ("a", "b", "c")) as tablet:
        for i in range(5):
            await tablet.put((i, "row"))
            snapshot = await tablet.snapshot()
            assert snapshot is not None
            (together,) = {f.file.location_id for f in snapshot.private}
            metadata_of(snapshot, tablet.roots[together - 1])
        assert {f.file.location_id for f in snapshot.shared} == {1, 2, 3}


async def test_a_pinned_table_stays_where_it_is_pinned(tmp_path: Path) -> None:
    properties = {"table.zufluss.remote.placement": "pinned:2"}
    async with keyed(tmp_path, ("a", "b"), properties=properties) as tablet:
        await tablet.put((1, "row"))
        await tablet.snapshot()
        here, there = tablet.remote_files()
        assert (here, len(there) > 3) == (set(), True)


async def test_without_any_location_a_snapshot_fails_and_rows_are_served(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        tablet.roots[0].write_bytes(b"")  # no directory can be made there
        await tablet.put((1, "row"))
        with pytest.raises(ZuflussError):
            await tablet.snapshot()
        await tablet.put((2, "row"))
        assert await tablet.rows() == {1: "row", 2: "row"}
        assert not (tablet.kv_directory() / "checkpoint").exists()


async def test_what_a_crash_left_of_a_checkpoint_is_removed_at_the_next_start(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put((1, "row"))
        await tablet.server.kv.checkpoint(tablet.replica())
        left = tablet.kv_directory() / "checkpoint"
        assert left.is_dir()
    async with keyed(tmp_path) as tablet:
        assert not left.exists()
        assert await tablet.rows() == {1: "row"}


async def test_a_bucket_that_fails_does_not_keep_others_from_their_snapshots(
    tmp_path: Path,
) -> None:
    taken = asyncio.Event()

    class Partly(Gateway):
        async def commit_snapshot(
            self, metadata: bytes, leader_epoch: int, locations_version: int = 0
        ) -> None:
            if KvSnapshot.from_json(metadata).bucket.bucket_id == 0:
                raise NetworkError("not this one")
            await super().commit_snapshot(metadata, leader_epoch, locations_version)
            taken.set()

    conf = {"kv.snapshot.interval": "50ms"}
    async with keyed(tmp_path, buckets=2, conf=conf, gateway=Partly()) as tablet:
        for bucket in (0, 1):
            await tablet.put((bucket, "row"), bucket=bucket)
        async with asyncio.timeout(WAIT_SECONDS):
            await taken.wait()


async def test_a_shorter_interval_counts_for_the_snapshots_that_are_waited_for(
    tmp_path: Path,
) -> None:
    taken = asyncio.Event()

    class Watched(Gateway):
        async def commit_snapshot(
            self, metadata: bytes, leader_epoch: int, locations_version: int = 0
        ) -> None:
            await super().commit_snapshot(metadata, leader_epoch, locations_version)
            taken.set()

    conf = {"kv.snapshot.interval": "1h"}
    async with keyed(tmp_path, conf=conf, gateway=Watched()) as tablet:
        await tablet.put((1, "row"))
        await tablet.server.update_configs(DynamicConfigs(1, {"kv.snapshot.interval": "50ms"}))
        async with asyncio.timeout(WAIT_SECONDS):
            await taken.wait()
        await tablet.server.update_configs(DynamicConfigs(2, {}))
        assert tablet.server.conf.get(options.KV_SNAPSHOT_INTERVAL) == 3_600_000


async def test_a_dropped_bucket_ends_its_snapshot(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 10))
        directory = tablet.kv_directory()
        taking = asyncio.ensure_future(tablet.snapshot())
        await asyncio.sleep(0)
        await tablet.drop(0)
        await asyncio.gather(taking, return_exceptions=True)
        await tablet.server.kv.call(lambda: None)
        assert not directory.exists()


def test_a_new_interval_begins_without_a_snapshot_of_every_bucket() -> None:
    bucket = BucketSnapshots(TableBucket(7, None, 0), 2)
    bucket.due(1000.0, 600.0)
    bucket.period = None
    assert not bucket.due(1000.1, 1.0)
    assert any(bucket.due(1000.1 + tick / 10, 1.0) for tick in range(11))


def test_buckets_have_their_own_places_in_the_interval() -> None:
    buckets = [BucketSnapshots(TableBucket(7, None, i), 2) for i in range(64)]
    seen: dict[int, list[int]] = {}
    for tick in range(301):
        for i, bucket in enumerate(buckets):
            if bucket.due(1000 + tick / 10, 10.0):
                seen.setdefault(i, []).append(tick)
    assert all(len(ticks) == 3 for ticks in seen.values())
    assert len(seen) == 64
    first = [ticks[0] for ticks in seen.values()]
    assert max(first.count(t) for t in first) < 6, "never all at once"


async def test_the_changelog_stays_from_the_oldest_snapshot_on(tmp_path: Path) -> None:
    conf = {"log.segment.file-size": "1kb"}
    properties = {"table.log.ttl": "1ms"}
    gateway = Gateway()
    async with keyed(tmp_path, conf=conf, properties=properties, gateway=gateway) as tablet:
        for i in range(30):
            await tablet.put(*many(i, i + 3))
        log = tablet.replica().log
        log.holds.set(Holder.REMOTE_COPY, None)  # the log itself is not in remote storage
        snapshot = await tablet.snapshot()
        assert snapshot is not None
        tablet.server.logs.expire(1 << 50)
        assert log.log_start_offset == 0, "nothing goes before the first snapshot is known"
        await tablet.server.notify_kv_snapshot_offset([KvSnapshotOffset(BUCKET, 20)])
        tablet.server.logs.expire(1 << 50)
        assert 0 < log.log_start_offset <= 20
    async with keyed(tmp_path, conf=conf, properties=properties, gateway=gateway) as tablet:
        assert tablet.replica().log.holds.offset(Holder.SNAPSHOT) == snapshot.log_offset


async def test_offsets_of_buckets_that_are_elsewhere_are_passed_over(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        elsewhere = TableBucket(TABLE, None, 9)
        await tablet.server.notify_kv_snapshot_offset([KvSnapshotOffset(elsewhere, 20)])
        assert tablet.replica().log.holds.offset(Holder.SNAPSHOT) == 0
