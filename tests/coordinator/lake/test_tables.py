"""The coordinator's lake side over a real store: hand-outs, offsets files, snapshots, restarts."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.support import NOON, TABLET, Cluster, RecordingTablet, table_json
from zufluss.cluster.image import TableEntry
from zufluss.coordinator import records
from zufluss.coordinator.lake.queue import HandOut, TieringState
from zufluss.coordinator.lake.tables import SNAPSHOTS_MAX, retained
from zufluss.coordinator.records import SnapshotRecord
from zufluss.errors import ConfigError, ErrorCode, LakeSnapshotNotExistError, TableNotExistError
from zufluss.meta.api import Delete, Op
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TablePath
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.storage import RemoteStorage
from zufluss.testing.s3 import S3Server
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

FRESHNESS_MS = 180_000
PATH = TablePath("fluss", "events")
PARTITIONED = TablePath("fluss", "by_day")
LAKE = {"datalake.format": "iceberg"}
ENABLED = {"table.datalake.enabled": "true"}
OK = 0
FENCED = ErrorCode.FENCED_TIERING_EPOCH_EXCEPTION
LOG_END = 2_000_000
"""The high watermark of every bucket."""


class LakeCluster(Cluster):
    """A cluster with one clock for the time of day and for turns."""

    def __init__(self, directory: Path, conf: Mapping[str, str] | None = None) -> None:
        super().__init__(directory, conf)
        self.seconds = lambda: self.clock() / 1000


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with a lake and one tablet server."""
    conf = LAKE | {"data.dir": str(tmp_path / "data")}
    cluster = await LakeCluster(tmp_path / "meta", conf).start()
    cluster.tablet.end = LOG_END
    yield cluster
    await cluster.stop()


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """The directory of the offsets files."""
    return tmp_path / "data" / "remote" / "lake"


async def lake_table(
    cluster: Cluster, path: TablePath = PATH, buckets: int = 2, **properties: str
) -> TableEntry:
    return await cluster.catalog.create_table(
        path, table_json(buckets=buckets, properties=ENABLED | properties)
    )


async def partitioned(cluster: Cluster, *days: str) -> dict[str, int]:
    """A table by day with some partitions; their ids."""
    descriptor = TableDescriptor(
        Schema.of("a INT, d STRING"), partition_keys=("d",), bucket_count=2, properties=ENABLED
    )
    await cluster.catalog.create_table(PARTITIONED, descriptor.to_json())
    made = [await cluster.catalog.create_partition(PARTITIONED, {"d": day}) for day in days]
    return {entry.name: entry.partition_id for entry in made}


async def beat(cluster: Cluster, **fields: Any) -> Any:
    return await cluster.call(ApiKey.LAKE_TIERING_HEARTBEAT, **fields)


async def take(cluster: Cluster, **fields: Any) -> m.PbHeartbeatReqForTable:
    """Ask for a table when one must be due, as the service will name it from then on."""
    cluster.clock.now_ms += FRESHNESS_MS
    answer = await beat(cluster, request_table=True, **fields)
    assert answer.HasField("tiering_table")
    return m.PbHeartbeatReqForTable(
        table_id=answer.tiering_table.table_id,
        tiering_epoch=answer.tiering_table.tiering_epoch,
        coordinator_epoch=answer.coordinator_epoch,
    )


async def hold(cluster: Cluster, path: TablePath = PATH) -> None:
    """Have a service that sends no epochs hold a table, as Fluss's own services do."""
    queue = cluster.coordinator.lake.queue
    states = {status.path: status.state for status in queue.status()}
    if states.get(path, TieringState.TIERING) is TieringState.TIERING:
        return
    others = []
    while (answer := await take(cluster)).table_id != cluster.image.table(path).info.table_id:
        others.append(answer)
    await beat(cluster, failed_tables=others)


async def finish(cluster: Cluster, path: TablePath = PATH) -> None:
    """End the round of the service that holds a table."""
    queue = cluster.coordinator.lake.queue
    [held] = [status for status in queue.status() if status.path == path]
    queue.finish(HandOut(held.table_id, held.tiering_epoch, queue.coordinator_epoch))


def epochs(hand_out: m.PbHeartbeatReqForTable | None) -> dict[str, int]:
    if hand_out is None:
        return {}
    return {
        "tiering_epoch": hand_out.tiering_epoch,
        "coordinator_epoch": hand_out.coordinator_epoch,
    }


async def prepare(
    cluster: Cluster,
    offsets: Mapping[int | tuple[int, int], int],
    hand_out: m.PbHeartbeatReqForTable | None = None,
    *,
    path: TablePath = PATH,
    table_id: int | None = None,
    ignore_previous: bool = False,
) -> Any:
    """The answer for one table; offsets by bucket, or by partition and bucket."""
    if hand_out is None:
        await hold(cluster, path)
    pairs = {k if isinstance(k, tuple) else (None, k): v for k, v in offsets.items()}
    table = m.PbTableOffsets(
        table_id=cluster.image.table(path).info.table_id if table_id is None else table_id,
        table_path=m.PbTablePath(database_name=path.database, table_name=path.table),
        bucket_offsets=[
            m.PbBucketOffset(partition_id=p, bucket_id=b, log_end_offset=o)
            for (p, b), o in pairs.items()
        ],
        **epochs(hand_out),
    )
    response = await cluster.call(
        ApiKey.PREPARE_LAKE_TABLE_SNAPSHOT,
        bucket_offsets=[table],
        ignore_previous_table_offsets=ignore_previous,
    )
    return response.prepare_lake_table_resp[0]


async def prepared(cluster: Cluster, offsets: Mapping[Any, int], **how: Any) -> str:
    answer = await prepare(cluster, offsets, **how)
    assert answer.error_code == OK, answer.error_message
    return str(answer.lake_table_offsets_path)


async def commit(
    cluster: Cluster,
    snapshot_id: int,
    file: str,
    hand_out: m.PbHeartbeatReqForTable | None = None,
    *,
    path: TablePath = PATH,
    readable: str | None = None,
    earliest: int | None = None,
) -> Any:
    if hand_out is None:
        await hold(cluster, path)
    table = m.PbLakeTableSnapshotMetadata(
        table_id=cluster.image.table(path).info.table_id,
        snapshot_id=snapshot_id,
        tiered_bucket_offsets_file_path=file,
        readable_bucket_offsets_file_path=readable,
        earliest_snapshot_id_to_keep=earliest,
        **epochs(hand_out),
    )
    response = await cluster.call(
        ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT, lake_table_snapshot_metadata=[table]
    )
    return response.table_resp[0]


async def tiered(cluster: Cluster, snapshot_id: int, offsets: Mapping[Any, int], **how: Any) -> str:
    """A round without epochs, as Fluss's own services have it, of rows that the log has."""
    path = how.get("path", PATH)
    cluster.tablet.end = max(cluster.tablet.end, *offsets.values())
    file = await prepared(cluster, offsets, path=path)
    answer = await commit(cluster, snapshot_id, file, **how)
    assert answer.error_code == OK, answer.error_message
    await finish(cluster, path)
    await cluster.coordinator.lake.settle()
    return file


async def snapshot(cluster: Cluster, path: TablePath = PATH, **which: Any) -> Any:
    table_path = m.PbTablePath(database_name=path.database, table_name=path.table)
    return await cluster.call(ApiKey.GET_LAKE_SNAPSHOT, table_path=table_path, **which)


def offsets_of(found: Any) -> dict[Any, int]:
    return {
        (b.partition_id, b.bucket_id) if b.HasField("partition_id") else b.bucket_id: b.log_offset
        for b in found.bucket_snapshots
    }


def held_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Event, asyncio.Event]:
    """Two events: a change has reached the store; the change may go on."""
    on_its_way, go_on = asyncio.Event(), asyncio.Event()
    transact = cluster.store.transact

    async def slow(ops: Sequence[Op]) -> None:
        on_its_way.set()
        await go_on.wait()
        await transact(ops)

    monkeypatch.setattr(cluster.store, "transact", slow)
    return on_its_way, go_on


# -- hand-outs ------------------------------------------------------------------------------------


async def test_a_table_is_handed_out_once_with_its_name_and_epochs(cluster: Cluster) -> None:
    entry = await lake_table(cluster)
    assert not (await beat(cluster, request_table=True)).HasField("tiering_table")
    hand_out = await take(cluster)
    assert hand_out.table_id == entry.info.table_id
    assert (hand_out.tiering_epoch, hand_out.coordinator_epoch) == (1, cluster.catalog.epoch)
    assert not (await beat(cluster, request_table=True)).HasField("tiering_table")


async def test_services_that_ask_at_the_same_time_get_different_tables(cluster: Cluster) -> None:
    for name in "abc":
        await lake_table(cluster, TablePath("fluss", name))
    cluster.clock.now_ms += FRESHNESS_MS
    answers = await asyncio.gather(*(beat(cluster, request_table=True) for _ in range(5)))
    names = [a.tiering_table.table_path.table_name for a in answers if a.HasField("tiering_table")]
    assert names == ["a", "b", "c"]


async def test_a_heartbeat_without_a_wish_hands_nothing_out(cluster: Cluster) -> None:
    await lake_table(cluster)
    cluster.clock.now_ms += FRESHNESS_MS
    assert not (await beat(cluster)).HasField("tiering_table")
    assert (await take(cluster)).tiering_epoch == 1


async def test_epochs_grow_over_restarts_and_the_old_ones_are_fenced(cluster: Cluster) -> None:
    await lake_table(cluster)
    old = await take(cluster)
    again = await cluster.restart()
    answer = await beat(again, tiering_tables=[old])
    assert answer.coordinator_epoch > old.coordinator_epoch
    fenced = [r.error.error_code for r in answer.tiering_table_resp]
    assert fenced == [ErrorCode.FENCED_TIERING_EPOCH_EXCEPTION]
    new = await take(again)
    assert new.tiering_epoch > old.tiering_epoch
    await again.stop()


async def test_every_table_of_a_heartbeat_gets_its_own_answer(cluster: Cluster) -> None:
    for name in "abcd":
        await lake_table(cluster, TablePath("fluss", name))
    a, b, c, d = [await take(cluster, heartbeat_timeout_ms=600_000) for _ in range(4)]
    d.tiering_epoch += 1
    gone = m.PbHeartbeatReqForTable(table_id=99, tiering_epoch=1, coordinator_epoch=1)
    a.lake_tiering_stats.file_size = 4711
    answer = await beat(
        cluster,
        finished_tables=[a, d],
        failed_tables=[b, gone],
        tiering_tables=[c],
        force_finished_tables=[a.table_id],
    )
    codes = [
        [r.error.error_code for r in group]
        for group in (
            answer.finished_table_resp,
            answer.failed_table_resp,
            answer.tiering_table_resp,
        )
    ]
    fenced, unknown = ErrorCode.FENCED_TIERING_EPOCH_EXCEPTION, ErrorCode.TABLE_NOT_EXIST
    assert codes == [[OK, fenced], [OK, unknown], [OK]]
    states = {s.path.table: s.state.value for s in cluster.coordinator.lake.queue.status()}
    assert states == {"a": "pending", "b": "pending", "c": "tiering", "d": "tiering"}
    assert cluster.coordinator.lake.queue.status()[0].file_size == 4711


async def test_the_declared_timeout_counts(cluster: Cluster) -> None:
    await lake_table(cluster)
    hand_out = await take(cluster, heartbeat_timeout_ms=10_000)
    cluster.clock.now_ms += 9_999
    answer = await beat(cluster, tiering_tables=[hand_out], heartbeat_timeout_ms=10_000)
    assert not answer.tiering_table_resp[0].HasField("error")
    cluster.clock.now_ms += 10_000
    answer = await beat(cluster, tiering_tables=[hand_out], request_table=True)
    assert answer.tiering_table_resp[0].error.error_code == 50
    assert answer.tiering_table.tiering_epoch == hand_out.tiering_epoch + 1
    with pytest.raises(ConfigError, match="heartbeat_timeout_ms 999"):
        await beat(cluster, heartbeat_timeout_ms=999)


async def test_tables_without_lake_or_tiering_are_never_handed_out(cluster: Cluster) -> None:
    await cluster.catalog.create_table(PATH, table_json())
    cluster.clock.now_ms += 10 * FRESHNESS_MS
    assert not (await beat(cluster, request_table=True)).HasField("tiering_table")


async def test_enabling_disabling_and_freshness_take_effect_at_once(cluster: Cluster) -> None:
    await cluster.catalog.create_table(PATH, table_json())
    cluster.clock.now_ms += 10_000

    async def alter(key: str, value: str) -> None:
        change = m.PbAlterConfig(config_key=key, config_value=value, op_type=0)
        table_path = m.PbTablePath(database_name=PATH.database, table_name=PATH.table)
        await cluster.call(
            ApiKey.ALTER_TABLE,
            table_path=table_path,
            ignore_if_not_exists=False,
            config_changes=[change],
        )

    await alter("table.datalake.enabled", "true")
    assert not (await beat(cluster, request_table=True)).HasField("tiering_table")
    await alter("table.datalake.freshness", "10s")
    answer = await beat(cluster, request_table=True)
    assert answer.tiering_table.tiering_epoch == 1
    await alter("table.datalake.enabled", "false")
    held = m.PbHeartbeatReqForTable(
        table_id=answer.tiering_table.table_id,
        tiering_epoch=1,
        coordinator_epoch=answer.coordinator_epoch,
    )
    answer = await beat(cluster, tiering_tables=[held], request_table=True)
    assert answer.tiering_table_resp[0].error.error_code == 50
    assert not answer.HasField("tiering_table")
    await alter("table.datalake.enabled", "true")
    assert (await beat(cluster, request_table=True)).tiering_table.tiering_epoch == 2


async def test_after_a_restart_freshness_counts_from_the_last_commit(cluster: Cluster) -> None:
    await lake_table(cluster)
    cluster.clock.now_ms += 10 * FRESHNESS_MS
    await tiered(cluster, 1, {0: 5})
    again = await cluster.restart()
    again.clock.now_ms += FRESHNESS_MS - 1
    assert not (await beat(again, request_table=True)).HasField("tiering_table")
    again.clock.now_ms += 1
    assert (await beat(again, request_table=True)).HasField("tiering_table")
    await again.stop()


# -- prepare --------------------------------------------------------------------------------------


async def test_prepared_offsets_are_a_file_in_flusss_form(cluster: Cluster, remote: Path) -> None:
    entry = await lake_table(cluster, buckets=4)
    file = Path(await prepared(cluster, {0: 10, 2: 30}))
    table_id = entry.info.table_id
    assert file.parent == remote / "fluss" / f"events-{table_id}" / "metadata"
    assert file.suffix == ".offsets"
    expected = f'{{"version":1,"table_id":{table_id},"bucket_offsets":[10,-1,30]}}'
    assert file.read_text() == expected


async def test_the_form_is_the_one_that_fluss_writes(cluster: Cluster) -> None:
    """Byte for byte, for the offsets of a file that Apache Fluss 0.9.1 wrote."""
    entry = await lake_table(cluster, buckets=4)
    by_fluss = '{"version":1,"table_id":6,"bucket_offsets":[1248997,1252498,1252245,1246260]}'
    offsets = dict(enumerate(json.loads(by_fluss)["bucket_offsets"]))
    text = Path(await prepared(cluster, offsets)).read_text()
    assert text.replace(f'"table_id":{entry.info.table_id}', '"table_id":6') == by_fluss


async def test_given_offsets_go_over_the_committed_ones(cluster: Cluster) -> None:
    await lake_table(cluster, buckets=3)
    await tiered(cluster, 1, {0: 10, 1: 20})
    file = await prepared(cluster, {1: 25, 2: 5})
    assert json.loads(Path(file).read_text())["bucket_offsets"] == [10, 25, 5]
    file = await prepared(cluster, {1: 3}, ignore_previous=True)
    assert json.loads(Path(file).read_text())["bucket_offsets"] == [-1, 3]


async def test_what_was_prepared_but_not_committed_counts_for_nothing(cluster: Cluster) -> None:
    await lake_table(cluster)
    await prepared(cluster, {0: 50})
    file = await prepared(cluster, {0: 10})
    assert json.loads(Path(file).read_text())["bucket_offsets"] == [10]


@pytest.mark.parametrize(
    ("offsets", "code"),
    [
        ({0: 9}, ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION),
        ({0: -1}, ErrorCode.INVALID_CONFIG_EXCEPTION),
        ({2: 10}, ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION),
        ({-1: 10}, ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION),
        ({(1, 0): 10}, ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION),
    ],
)
async def test_offsets_that_cannot_be_are_refused(
    cluster: Cluster, offsets: Mapping[Any, int], code: ErrorCode
) -> None:
    await lake_table(cluster)
    await tiered(cluster, 1, {0: 10})
    answer = await prepare(cluster, offsets)
    assert answer.error_code == code
    assert not answer.HasField("lake_table_offsets_path")


async def test_offsets_of_partitions_are_kept_apart_and_gone_ones_left_out(
    cluster: Cluster,
) -> None:
    ids = await partitioned(cluster, "x", "y")
    x, y = ids["x"], ids["y"]
    await tiered(cluster, 1, {(x, 0): 1, (y, 1): 2}, path=PARTITIONED)
    found = await snapshot(cluster, PARTITIONED)
    assert offsets_of(found) == {(x, 0): 1, (y, 1): 2}
    assert [b.partition_name for b in found.bucket_snapshots] == ["x", "y"]
    await cluster.catalog.drop_partition(PARTITIONED, {"d": "x"})
    found = await snapshot(cluster, PARTITIONED)
    assert [b.HasField("partition_name") for b in found.bucket_snapshots] == [False, True]
    assert (await prepare(cluster, {(x, 0): 5}, path=PARTITIONED)).error_code == 36
    assert (await prepare(cluster, {0: 5}, path=PARTITIONED)).error_code == 21
    file = await tiered(cluster, 2, {(y, 0): 7}, path=PARTITIONED)
    assert json.loads(Path(file).read_text())["partition_offsets"] == [
        {"partition_id": y, "bucket_offsets": [7, 2]}
    ]


async def test_a_partition_of_another_table_is_refused(cluster: Cluster) -> None:
    ids = await partitioned(cluster, "x")
    other = TablePath("fluss", "other")
    descriptor = TableDescriptor(
        Schema.of("a INT, d STRING"), partition_keys=("d",), bucket_count=1, properties=ENABLED
    )
    await cluster.catalog.create_table(other, descriptor.to_json())
    assert (await prepare(cluster, {(ids["x"], 0): 1}, path=other)).error_code == 36


async def test_a_table_that_was_created_again_is_another_one(cluster: Cluster) -> None:
    old = (await lake_table(cluster)).info.table_id
    await tiered(cluster, 1, {0: 10})
    await cluster.catalog.drop_table(PATH)
    await lake_table(cluster)
    assert (await prepare(cluster, {0: 5}, table_id=old)).error_code == 7
    with pytest.raises(LakeSnapshotNotExistError):
        await snapshot(cluster)
    assert (await prepare(cluster, {0: 5})).error_code == OK


async def test_without_a_lake_nothing_can_be_prepared_or_committed(tmp_path: Path) -> None:
    cluster = await LakeCluster(tmp_path / "meta", {"data.dir": str(tmp_path)}).start()
    await cluster.catalog.create_table(PATH, table_json())
    code = ErrorCode.LAKE_STORAGE_NOT_CONFIGURED_EXCEPTION
    assert (await prepare(cluster, {0: 1})).error_code == code
    assert (await commit(cluster, 1, "x.offsets")).error_code == code
    with pytest.raises(LakeSnapshotNotExistError):
        await snapshot(cluster)
    await cluster.stop()


async def test_offsets_files_lie_in_the_remote_data_directory(tmp_path: Path) -> None:
    conf = LAKE | {"remote.data.dir": f"file://{tmp_path}/sh ared"}
    cluster = await LakeCluster(tmp_path / "meta", conf).start()
    cluster.tablet.end = LOG_END
    await lake_table(cluster)
    assert (await prepared(cluster, {0: 1})).startswith(f"{tmp_path}/sh ared/lake/fluss/events-")
    await cluster.stop()


async def test_offsets_files_may_lie_in_s3(tmp_path: Path) -> None:
    with S3Server() as s3:
        root = f"{s3.bucket('shared')}/zufluss"
        cluster = LakeCluster(tmp_path / "meta", LAKE | {"remote.data.dir": root} | s3.properties)
        await cluster.start()
        cluster.tablet.end = LOG_END
        await lake_table(cluster)
        first = await tiered(cluster, 1, {0: 10})
        assert first.startswith(f"{root}/lake/fluss/events-")
        again = await cluster.restart()
        await tiered(again, 2, {0: 12, 1: 5})
        assert offsets_of(await snapshot(again)) == {0: 12, 1: 5}
        assert (await commit(again, 3, first)).error_code == ErrorCode.UNKNOWN_SERVER_ERROR
        await again.stop()


async def test_a_remote_data_directory_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "meta", {"remote.data.dir": "ftp://host/path"})
    with pytest.raises(ConfigError, match=r"remote\.data\.dir has 'ftp://host/path'"):
        await cluster.start()
    await cluster.store.close()


async def test_a_cluster_that_lost_its_lake_hands_nothing_out(cluster: Cluster) -> None:
    await lake_table(cluster)
    await cluster.stop()
    without = LakeCluster(cluster.directory)
    without.clock.now_ms += FRESHNESS_MS
    await without.start()
    assert not (await beat(without, request_table=True)).HasField("tiering_table")
    await without.stop()


async def test_a_disk_that_cannot_be_written_is_an_error_of_the_table(
    cluster: Cluster, remote: Path
) -> None:
    await lake_table(cluster)
    remote.write_text("a file where the directory should be")
    answer = await prepare(cluster, {0: 1})
    assert answer.error_code == ErrorCode.STORAGE_EXCEPTION
    assert "cannot be written" in answer.error_message


# -- commit ---------------------------------------------------------------------------------------


async def test_a_commit_is_the_tables_snapshot_also_after_a_restart(cluster: Cluster) -> None:
    entry = await lake_table(cluster)
    await tiered(cluster, 4711, {0: 10, 1: 20})
    again = await cluster.restart()
    found = await snapshot(again)
    assert (found.table_id, found.snapshotId) == (entry.info.table_id, 4711)
    assert offsets_of(found) == {0: 10, 1: 20}
    assert (await prepare(again, {0: 9})).error_code != OK
    await again.stop()


async def test_a_data_directory_that_was_moved_keeps_its_snapshots(
    cluster: Cluster, tmp_path: Path
) -> None:
    await lake_table(cluster)
    await tiered(cluster, 1, {0: 10})
    await cluster.stop()
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = LakeCluster(cluster.directory, LAKE | {"data.dir": str(tmp_path / "moved")})
    moved.clock = cluster.clock
    await moved.start()
    moved.tablet.end = LOG_END
    assert offsets_of(await snapshot(moved)) == {0: 10}
    assert (await prepared(moved, {0: 11})).startswith(str(tmp_path / "moved"))
    await moved.stop()


async def test_a_commit_of_the_same_snapshot_changes_nothing(cluster: Cluster) -> None:
    await lake_table(cluster)
    file = await tiered(cluster, 1, {0: 10})
    await hold(cluster)
    before = await cluster.store.tree("/tables")
    assert (await commit(cluster, 1, file)).error_code == OK
    same_offsets = await prepared(cluster, {0: 10})
    assert (await commit(cluster, 1, same_offsets)).error_code == OK
    assert await cluster.store.tree("/tables") == before
    other_offsets = await prepared(cluster, {0: 11})
    answer = await commit(cluster, 1, other_offsets)
    assert answer.error_code == ErrorCode.INVALID_CONFIG_EXCEPTION
    assert "other offsets" in answer.error_message


async def test_a_commit_that_would_go_back_is_refused(cluster: Cluster) -> None:
    """Prepared before another commit came, so that prepare could not see it."""
    await lake_table(cluster)
    file, late, less = [await prepared(cluster, o) for o in ({0: 10}, {0: 5}, {1: 5})]
    assert (await commit(cluster, 1, file)).error_code == OK
    for back in (late, less):
        answer = await commit(cluster, 2, back)
        assert answer.error_code == ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION
    assert (await snapshot(cluster)).snapshotId == 1


async def test_a_fenced_service_prepares_and_commits_nothing(cluster: Cluster) -> None:
    await lake_table(cluster)
    zombie = await take(cluster, heartbeat_timeout_ms=10_000)
    file = await prepared(cluster, {0: 10}, hand_out=zombie)
    service = await take(cluster)
    assert service.tiering_epoch == zombie.tiering_epoch + 1
    before = await cluster.store.tree("/tables")
    fenced = ErrorCode.FENCED_TIERING_EPOCH_EXCEPTION
    assert (await prepare(cluster, {0: 10}, zombie)).error_code == fenced
    assert (await commit(cluster, 1, file, zombie)).error_code == fenced
    other_coordinator = m.PbHeartbeatReqForTable()
    other_coordinator.CopyFrom(service)
    other_coordinator.coordinator_epoch -= 1
    assert (await commit(cluster, 1, file, other_coordinator)).error_code == fenced
    assert await cluster.store.tree("/tables") == before
    with pytest.raises(LakeSnapshotNotExistError):
        await snapshot(cluster)
    assert (await commit(cluster, 1, file, service)).error_code == OK


async def test_a_service_that_finished_cannot_commit_any_more(cluster: Cluster) -> None:
    await lake_table(cluster)
    hand_out = await take(cluster)
    file = await prepared(cluster, {0: 10}, hand_out=hand_out)
    await beat(cluster, finished_tables=[hand_out])
    assert (await commit(cluster, 1, file, hand_out)).error_code == 50


async def test_a_commit_let_through_is_done_before_the_next_hand_out(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hand-out runs out while the commit is on its way to the store."""
    await lake_table(cluster)
    hand_out = await take(cluster)
    file = await prepared(cluster, {0: 10}, hand_out=hand_out)
    on_its_way, go_on = held_back(cluster, monkeypatch)
    committing = asyncio.create_task(commit(cluster, 1, file, hand_out))
    await on_its_way.wait()
    cluster.clock.now_ms += FRESHNESS_MS
    next_service = asyncio.create_task(beat(cluster, request_table=True, tiering_tables=[hand_out]))
    go_on.set()
    answer = await next_service
    assert committing.done()
    assert (await committing).error_code == OK
    assert answer.tiering_table_resp[0].error.error_code == 50
    assert answer.tiering_table.tiering_epoch == hand_out.tiering_epoch + 1
    assert (await snapshot(cluster)).snapshotId == 1


async def test_a_commit_is_finished_when_its_caller_goes_away(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lake_table(cluster)
    file = await prepared(cluster, {0: 10})
    on_its_way, go_on = held_back(cluster, monkeypatch)
    committing = asyncio.create_task(commit(cluster, 1, file))
    await on_its_way.wait()
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    go_on.set()
    await cluster.coordinator.lake.settle()
    assert offsets_of(await snapshot(cluster)) == {0: 10}


async def test_the_old_form_of_a_commit_merges_and_commits(cluster: Cluster) -> None:
    entry = await lake_table(cluster, buckets=3)
    await hold(cluster)
    for snapshot_id, offsets in ((1, {0: 10, 1: 5}), (2, {1: 7, 2: 3})):
        table = m.PbLakeTableSnapshotInfo(
            table_id=entry.info.table_id,
            snapshot_id=snapshot_id,
            buckets_req=[
                m.PbLakeTableOffsetForBucket(bucket_id=b, log_end_offset=o, max_timestamp=1)
                for b, o in offsets.items()
            ],
        )
        response = await cluster.call(ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT, tables_req=[table])
        assert [(r.table_id, r.error_code) for r in response.table_resp] == [
            (entry.info.table_id, OK)
        ]
    found = await snapshot(cluster)
    assert (found.snapshotId, offsets_of(found)) == (2, {0: 10, 1: 7, 2: 3})
    back = m.PbLakeTableSnapshotInfo(table_id=entry.info.table_id, snapshot_id=3)
    back.buckets_req.add(bucket_id=0, log_end_offset=1)
    nameless = m.PbLakeTableSnapshotInfo(snapshot_id=3)
    response = await cluster.call(ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT, tables_req=[back, nameless])
    assert all(r.error_code for r in response.table_resp)


async def test_of_both_forms_for_one_table_the_file_counts(cluster: Cluster) -> None:
    entry = await lake_table(cluster)
    table_id = entry.info.table_id
    file = await prepared(cluster, {0: 10, 1: 4})
    told = m.PbLakeTableSnapshotInfo(table_id=table_id, snapshot_id=1)
    told.buckets_req.add(bucket_id=0, log_end_offset=10)
    response = await cluster.call(
        ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT,
        tables_req=[told],
        lake_table_snapshot_metadata=[
            m.PbLakeTableSnapshotMetadata(
                table_id=table_id, snapshot_id=1, tiered_bucket_offsets_file_path=file
            )
        ],
    )
    assert [r.error_code for r in response.table_resp] == [OK]
    assert offsets_of(await snapshot(cluster)) == {0: 10, 1: 4}


@pytest.mark.parametrize("offset", [LOG_END + 1, 10**15, 2**63 - 1])
async def test_an_offset_beyond_the_high_watermark_is_refused_by_prepare_and_by_commit(
    cluster: Cluster, offset: int
) -> None:
    """Retention would delete records that are not in the lake."""
    table_id = (await lake_table(cluster)).info.table_id
    beyond = ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION
    assert (await prepare(cluster, {0: offset})).error_code == beyond
    old = m.PbLakeTableSnapshotInfo(table_id=table_id, snapshot_id=1)
    old.buckets_req.add(bucket_id=0, log_end_offset=offset)
    response = await cluster.call(ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT, tables_req=[old])
    assert "ends at offset 2000000" in response.table_resp[0].error_message
    file = await prepared(cluster, {0: LOG_END, 1: LOG_END})
    cluster.tablet.end = 10  # the disk was lost after prepare
    assert (await commit(cluster, 1, file)).error_code == beyond
    with pytest.raises(LakeSnapshotNotExistError):
        await snapshot(cluster)
    assert (await prepare(cluster, {0: 10})).error_code == OK


async def test_new_offsets_wait_for_the_leader_that_knows_the_high_watermark(
    cluster: Cluster,
) -> None:
    await lake_table(cluster)
    file = await tiered(cluster, 1, {0: 10})
    cluster.tablet.deaf = OSError("away")
    code = ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION
    assert (await prepare(cluster, {0: 11})).error_code == code
    assert (await commit(cluster, 1, file)).error_code == OK  # nothing new in it
    assert (await prepare(cluster, {0: 10})).error_code == OK
    cluster.tablet.deaf = None
    assert (await prepare(cluster, {0: 11})).error_code == OK


async def test_a_report_without_epochs_is_refused_unless_a_service_without_them_holds_the_table(
    cluster: Cluster,
) -> None:
    table_id = (await lake_table(cluster)).info.table_id
    old = m.PbLakeTableSnapshotInfo(table_id=table_id, snapshot_id=1)
    old.buckets_req.add(bucket_id=0, log_end_offset=10)

    async def commit_without_epochs() -> int:
        response = await cluster.call(ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT, tables_req=[old])
        return int(response.table_resp[0].error_code)

    assert await commit_without_epochs() == FENCED  # nobody holds it
    named = await take(cluster, heartbeat_timeout_ms=60_000)
    assert await commit_without_epochs() == FENCED
    await beat(cluster, failed_tables=[named])
    unnamed = await take(cluster)
    assert await commit_without_epochs() == OK
    await beat(cluster, finished_tables=[unnamed])
    old.snapshot_id = 2
    assert await commit_without_epochs() == FENCED


async def test_after_a_commit_with_epochs_a_service_without_them_must_have_news(
    cluster: Cluster,
) -> None:
    """A round of such a service that was overtaken would write rows into the lake again."""
    await lake_table(cluster)
    named = await take(cluster)
    file = await prepared(cluster, {0: 10, 1: 5}, hand_out=named)
    assert (await commit(cluster, 1, file, named)).error_code == OK
    assert (await prepare(cluster, {0: 10})).error_code == FENCED  # it is held by name
    again = await cluster.restart()
    unnamed = await take(again)
    for overtaken in ({0: 10}, {0: 10, 1: 5}):
        answer = await prepare(again, overtaken)
        assert answer.error_code == FENCED
        assert "another round was faster" in answer.error_message
    news = await prepared(again, {0: 11, 1: 5})
    assert (await commit(again, 2, news)).error_code == OK
    await beat(again, finished_tables=[unnamed])
    named = await take(again, heartbeat_timeout_ms=60_000)
    file = await prepared(again, {0: 12}, hand_out=named)
    assert (await commit(again, 3, file, named)).error_code == OK
    await again.stop()


def elsewhere(directory: Path, own: Path) -> Iterator[str]:
    """Paths that are not offsets files of a table."""
    outside = directory / "outside.offsets"
    outside.write_text('{"version":1,"table_id":0,"bucket_offsets":[1]}')
    link = own.parent / "link.offsets"
    link.symlink_to(outside)
    yield str(outside)
    yield f"{own.parent}/../../../../{outside.name}"
    yield str(link)
    yield f"file://{outside}"
    loop = own.parent / "loop.offsets"
    loop.symlink_to(loop)
    yield str(loop)
    yield "s3://bucket/x.offsets"
    yield f"file://elsewhere{own}"
    yield f"file:{own}%00.offsets"
    yield "\0"
    yield ""
    yield "x.offsets"
    yield str(own.with_suffix(".json"))


async def test_a_path_outside_of_the_tables_directory_is_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    await lake_table(cluster)
    own = await prepared(cluster, {0: 10})
    other = TablePath("fluss", "events2")
    await lake_table(cluster, other)
    foreign = await prepared(cluster, {0: 10}, path=other)
    for path in (*elsewhere(tmp_path, Path(own)), foreign):
        answer = await commit(cluster, 1, path)
        assert answer.error_code == ErrorCode.INVALID_CONFIG_EXCEPTION, path
        answer = await commit(cluster, 1, own, readable=path)
        assert answer.error_code == ErrorCode.INVALID_CONFIG_EXCEPTION, path
    with pytest.raises(LakeSnapshotNotExistError):
        await snapshot(cluster)
    for uri in (f"file:{own}", f"file://{own}", f"file://localhost{own}"):
        assert (await commit(cluster, 1, uri)).error_code == OK


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version":2,"table_id":ID,"bucket_offsets":[1]}',
        '{"version":1,"table_id":99,"bucket_offsets":[1]}',
        '{"version":1,"table_id":ID,"bucket_offsets":[-2]}',
        '{"version":1,"table_id":ID,"bucket_offsets":[1.5]}',
        '{"version":1,"table_id":ID,"bucket_offsets":["1"]}',
        '{"version":1,"table_id":ID,"partition_offsets":[1]}',
        '{"version":1,"table_id":ID,"partition_offsets":[{"partition_id":"1","bucket_offsets":[1]}]}',
    ],
)
async def test_a_damaged_offsets_file_is_refused(cluster: Cluster, text: str) -> None:
    entry = await lake_table(cluster)
    file = Path(await prepared(cluster, {0: 10}))
    file.write_text(text.replace("ID", str(entry.info.table_id)))
    answer = await commit(cluster, 1, str(file))
    assert answer.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert "cannot be read" in answer.error_message
    with pytest.raises(LakeSnapshotNotExistError):
        await snapshot(cluster)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (f"{uuid.UUID(int=1)}.offsets", ErrorCode.UNKNOWN_SERVER_ERROR),
        ("other.offsets", ErrorCode.INVALID_CONFIG_EXCEPTION),
        ("x" * 10_000 + ".offsets", ErrorCode.INVALID_CONFIG_EXCEPTION),
    ],
)
async def test_a_file_that_is_not_there_cannot_be_committed(
    cluster: Cluster, name: str, code: ErrorCode
) -> None:
    await lake_table(cluster)
    own = Path(await prepared(cluster, {0: 10}))
    answer = await commit(cluster, 1, str(own.parent / name))
    assert answer.error_code == code
    assert len(answer.error_message) < 1_000


async def test_a_lost_offsets_file_is_mended_by_a_snapshot_with_all_offsets(
    cluster: Cluster,
) -> None:
    await lake_table(cluster)
    Path(await tiered(cluster, 1, {0: 10})).unlink()
    again = await cluster.restart()
    assert (await prepare(again, {1: 5})).error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    file = await prepared(again, {0: 12, 1: 5}, ignore_previous=True)
    assert (await commit(again, 2, file)).error_code == OK
    assert offsets_of(await snapshot(again)) == {0: 12, 1: 5}
    await again.stop()


async def test_a_snapshot_waits_for_a_location_that_does_not_answer_and_nobody_else_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lake_table(cluster)
    other = TablePath("fluss", "other")
    await lake_table(cluster, other)
    first = await tiered(cluster, 1, {0: 10})
    back = await prepared(cluster, {0: 5}, ignore_previous=True)
    again = await cluster.restart()
    reached, answer = asyncio.Event(), asyncio.Event()
    read_at = RemoteStorage.read_at

    async def hanging(self: RemoteStorage, location_id: int, path: str, *, limit: int) -> bytes:
        if first.endswith(path):
            reached.set()
            await answer.wait()
            raise LocationUnavailableError(first, "", "no answer")
        return await read_at(self, location_id, path, limit=limit)

    monkeypatch.setattr(RemoteStorage, "read_at", hanging)
    waiting = asyncio.create_task(commit(again, 2, back))
    await reached.wait()
    assert (await take(again)).tiering_epoch  # while the commit waits
    answer.set()
    assert (await waiting).error_code == ErrorCode.STORAGE_EXCEPTION
    monkeypatch.undo()
    assert (await commit(again, 2, back)).error_code != OK  # it goes back
    assert offsets_of(await snapshot(again)) == {0: 10}
    await again.stop()


async def test_no_request_whatever_its_numbers_makes_a_handler_fail(cluster: Cluster) -> None:
    table_id = (await lake_table(cluster)).info.table_id
    ids = await partitioned(cluster, "x")
    file = await tiered(cluster, 1, {0: 10})
    hand_out = await take(cluster)
    chance = random.Random(5)
    where = m.PbTablePath(database_name=PATH.database, table_name=PATH.table)

    def number(*likely: int) -> int:
        return chance.choice([*likely, 0, 1, -1, 2**31 - 1, -(2**31)])

    def large(*likely: int) -> int:
        return chance.choice([number(*likely), 2**63 - 1, -(2**63)])

    def bucket(kind: type[Any]) -> Any:
        made = kind(bucket_id=number(0), log_end_offset=large(10, 11))
        if chance.random() < 0.5:
            made.partition_id = large(ids["x"])
        return made

    for _ in range(300):
        held = m.PbHeartbeatReqForTable(
            table_id=large(table_id),
            tiering_epoch=large(hand_out.tiering_epoch),
            coordinator_epoch=number(hand_out.coordinator_epoch),
        )
        offsets = m.PbTableOffsets(
            table_id=large(table_id),
            table_path=where,
            bucket_offsets=[bucket(m.PbBucketOffset) for _ in range(2)],
            **(epochs(held) if chance.random() < 0.5 else {}),
        )
        old = m.PbLakeTableSnapshotInfo(
            table_id=large(table_id),
            snapshot_id=large(1),
            buckets_req=[bucket(m.PbLakeTableOffsetForBucket)],
        )
        new = m.PbLakeTableSnapshotMetadata(
            table_id=large(table_id),
            snapshot_id=large(1),
            tiered_bucket_offsets_file_path=chance.choice([file, "", "/", "\U0001f4a5" * 300]),
            earliest_snapshot_id_to_keep=large(1),
        )
        groups = {f"{kind}_tables": [held] for kind in ("tiering", "finished", "failed")} | {
            "force_finished_tables": [large(table_id)]
        }
        await beat(cluster, request_table=True, **groups)
        await cluster.call(ApiKey.PREPARE_LAKE_TABLE_SNAPSHOT, bucket_offsets=[offsets])
        await cluster.call(
            ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT, tables_req=[old], lake_table_snapshot_metadata=[new]
        )
    await cluster.coordinator.lake.settle()
    again = await cluster.restart()
    assert offsets_of(await snapshot(again))[0] >= 10
    await again.stop()


# -- which snapshots are kept ---------------------------------------------------------------------


async def test_only_the_newest_snapshot_is_kept_and_other_files_go(
    cluster: Cluster, remote: Path
) -> None:
    await lake_table(cluster)
    never_committed = await prepared(cluster, {0: 1})
    for snapshot_id in (9, 4, 7):
        file = await tiered(cluster, snapshot_id, {0: 10})
    assert not Path(never_committed).exists()
    assert [str(p) for p in remote.rglob("*.offsets")] == [file]
    assert (await snapshot(cluster)).snapshotId == 7
    with pytest.raises(LakeSnapshotNotExistError, match="no lake snapshot 9"):
        await snapshot(cluster, snapshot_id=9)


async def test_a_file_prepared_after_the_one_committed_stays(cluster: Cluster) -> None:
    await lake_table(cluster)
    file = await prepared(cluster, {0: 10})
    later = await prepared(cluster, {0: 20})
    await commit(cluster, 1, file)
    await cluster.coordinator.lake.settle()
    assert (await commit(cluster, 2, later)).error_code == OK


async def test_snapshots_are_kept_from_the_earliest_that_is_needed(cluster: Cluster) -> None:
    await lake_table(cluster)
    for snapshot_id in (9, 4, 7):
        await tiered(cluster, snapshot_id, {0: 10}, earliest=-1)
    await tiered(cluster, 2, {0: 11}, earliest=4)
    for snapshot_id in (4, 7, 2):
        found = await snapshot(cluster, snapshot_id=snapshot_id)
        assert found.snapshotId == snapshot_id
    with pytest.raises(LakeSnapshotNotExistError):
        await snapshot(cluster, snapshot_id=9)


async def test_the_newest_readable_snapshot_stays_until_there_is_a_newer_one(
    cluster: Cluster,
) -> None:
    await lake_table(cluster)
    with pytest.raises(LakeSnapshotNotExistError, match="readable"):
        await snapshot(cluster, readable=True)
    readable = await prepared(cluster, {0: 4}, ignore_previous=True)
    await tiered(cluster, 1, {0: 10}, readable=readable)
    await tiered(cluster, 2, {0: 20})
    found = await snapshot(cluster, readable=True)
    assert (found.snapshotId, offsets_of(found)) == (1, {0: 4})
    assert offsets_of(await snapshot(cluster)) == {0: 20}
    with pytest.raises(ConfigError, match="together"):
        await snapshot(cluster, readable=True, snapshot_id=1)
    readable = await prepared(cluster, {0: 18}, ignore_previous=True)
    await tiered(cluster, 3, {0: 30}, readable=readable)
    assert (await snapshot(cluster, readable=True)).snapshotId == 3
    with pytest.raises(LakeSnapshotNotExistError):
        await snapshot(cluster, snapshot_id=1)


async def test_what_is_readable_may_be_told_later_and_is_never_more_than_tiered(
    cluster: Cluster,
) -> None:
    await lake_table(cluster)
    file = await tiered(cluster, 1, {0: 10})
    more = await prepared(cluster, {0: 11}, ignore_previous=True)
    assert (await commit(cluster, 1, file, readable=more)).error_code != OK
    some = await prepared(cluster, {0: 9}, ignore_previous=True)
    assert (await commit(cluster, 1, file, readable=some)).error_code == OK
    assert offsets_of(await snapshot(cluster, readable=True)) == {0: 9}


def test_an_unknown_earliest_snapshot_keeps_all_up_to_a_limit() -> None:
    many: tuple[SnapshotRecord, ...] = ()
    for i in range(3 * SNAPSHOTS_MAX):
        many = retained(many, SnapshotRecord(i, f"{i}", "r" if i == 5 else None), earliest=-7)
    assert len(many) <= SNAPSHOTS_MAX
    assert many[0].snapshot_id == 5
    assert many[-1].snapshot_id == 3 * SNAPSHOTS_MAX - 1


# -- tablet servers and tables that go ------------------------------------------------------------


async def test_tablet_servers_are_told_after_a_commit_and_when_they_join(
    cluster: Cluster,
) -> None:
    table_id = (await lake_table(cluster)).info.table_id
    ids = await partitioned(cluster, "x")
    await tiered(cluster, 1, {0: 10})
    await tiered(cluster, 2, {(ids["x"], 1): 7}, path=PARTITIONED)
    partitioned_id = cluster.image.table(PARTITIONED).info.table_id
    expected = {
        TableBucket(table_id, None, 0): (1, 10),
        TableBucket(partitioned_id, ids["x"], 1): (2, 7),
    }

    def told(tablet: RecordingTablet) -> dict[TableBucket, tuple[int, int]]:
        return {b: (o.snapshot_id, o.log_end_offset) for b, o in tablet.lake_offsets.items()}

    assert told(cluster.tablet) == expected
    joining = RecordingTablet()
    await cluster.coordinator.attach(TABLET, joining)
    await cluster.coordinator.lake.settle()
    assert told(joining) == expected
    again = await cluster.restart()
    await again.coordinator.lake.settle()
    assert told(again.tablet) == expected
    await again.stop()


async def test_a_dropped_table_leaves_nothing_behind(cluster: Cluster, remote: Path) -> None:
    await lake_table(cluster)
    await tiered(cluster, 1, {0: 10})
    hand_out = await take(cluster)
    await cluster.catalog.drop_table(PATH)
    await cluster.coordinator.remote.cleaner.drops.settle()
    assert [p for p in remote.rglob("*") if p.is_file()] == []
    assert await cluster.store.tree("/tables") == []
    answer = await beat(cluster, tiering_tables=[hand_out], request_table=True)
    assert answer.tiering_table_resp[0].error.error_code == ErrorCode.TABLE_NOT_EXIST
    assert not answer.HasField("tiering_table")
    with pytest.raises(TableNotExistError):
        await snapshot(cluster)


async def test_a_dropped_database_takes_its_lake_tables_along(cluster: Cluster) -> None:
    await cluster.call(ApiKey.CREATE_DATABASE, database_name="d", ignore_if_exists=False)
    path = TablePath("d", "t")
    await lake_table(cluster, path)
    await tiered(cluster, 1, {0: 10}, path=path)
    await cluster.catalog.drop_database("d", cascade=True)
    assert await cluster.store.tree("/tables") == []
    assert cluster.coordinator.lake.queue.status() == []


async def test_a_table_from_before_there_were_lakes_gets_its_records(cluster: Cluster) -> None:
    """A store of an older version has no lake paths below its tables."""
    table_id = (await lake_table(cluster)).info.table_id
    epoch = records.tiering_epoch(table_id)
    snapshots = epoch.replace("epoch", "snapshots")
    await cluster.catalog.ledger.commit([Delete(epoch), Delete(snapshots)])
    again = await cluster.restart()
    hand_out = await take(again)
    assert hand_out.tiering_epoch == 1
    await tiered(again, 1, {0: 10})
    await again.catalog.drop_table(PATH)
    assert await again.store.tree("/tables") == []
    await again.stop()


async def test_a_drop_during_a_hand_out_gives_nothing_away(cluster: Cluster) -> None:
    await lake_table(cluster)
    cluster.clock.now_ms = NOON + FRESHNESS_MS
    dropping = asyncio.create_task(cluster.catalog.drop_table(PATH))
    answers = [await beat(cluster, request_table=True) for _ in range(5)]
    await dropping
    assert sum(a.HasField("tiering_table") for a in answers) <= 1
    assert not (await beat(cluster, request_table=True)).HasField("tiering_table")
    again = await cluster.restart()
    assert await again.store.tree("/tables") == []
    await again.stop()
