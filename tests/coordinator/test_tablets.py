"""How tablet servers are told: who gets what, and what a failure of one means."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cluster.test_image import STATE, database, partition, table
from tests.coordinator.support import RecordingTablet
from zufluss.cluster import codec
from zufluss.cluster.image import BucketState, ClusterImage, ClusterNode
from zufluss.cluster.replicas import (
    LakeOffsets,
    ReplicaAssignment,
    ReplicaStop,
    assignments,
    lake_offsets_from_proto,
    replica_from_proto,
    stop_from_proto,
)
from zufluss.coordinator.tablets import RemoteTablet, Tablets
from zufluss.errors import (
    LeaderNotAvailableError,
    LogStorageError,
    NetworkError,
)
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

PATH = PhysicalTablePath("d", "t")


def replica(bucket_id: int, *servers: int) -> ReplicaAssignment:
    state = BucketState(servers, servers[0], isr=servers)
    return ReplicaAssignment(TableBucket(7, None, bucket_id), PATH, state)


def stop(bucket_id: int, *servers: int) -> ReplicaStop:
    return ReplicaStop(TableBucket(7, None, bucket_id), 0, True, servers)


def lake_offsets(bucket_id: int, *servers: int) -> LakeOffsets:
    return LakeOffsets(TableBucket(7, None, bucket_id), 4711, 10, servers)


async def two_tablets() -> tuple[Tablets, RecordingTablet, RecordingTablet]:
    tablets, one, two = Tablets(), RecordingTablet(), RecordingTablet()
    tablets.attach(1, one)
    tablets.attach(2, two)
    await tablets.update_metadata([database("d"), table(7)])
    return tablets, one, two


async def test_orders_to_lead_go_to_leaders_and_the_rest_to_all_that_hold_a_bucket() -> None:
    """Standbys have orders of their own (`coordinator/wal/standbys.py`)."""
    tablets, one, two = await two_tablets()
    await tablets.start_replicas([replica(0, 1), replica(1, 2), replica(2, 2, 1)])
    assert sorted(b.bucket_id for b in one.buckets) == [0]
    assert sorted(b.bucket_id for b in two.buckets) == [1, 2]
    await tablets.notify_lake_offsets([lake_offsets(0, 1), lake_offsets(2, 2, 1)])
    assert sorted(b.bucket_id for b in one.lake_offsets) == [0, 2]
    assert sorted(b.bucket_id for b in two.lake_offsets) == [2]
    await tablets.stop_replicas([stop(2, 2, 1)])
    assert sorted(b.bucket_id for b in one.buckets) == [0]
    assert sorted(b.bucket_id for b in two.buckets) == [1]


async def test_metadata_reaches_the_others_when_one_cannot_be_told() -> None:
    """A dead server must not keep the living ones in the dark."""
    tablets, one, two = await two_tablets()

    async def fail(changes: Any) -> None:
        raise NetworkError("gone")

    one.update_metadata = fail  # type: ignore[method-assign]
    await tablets.update_metadata([table(8, "u")])
    assert two.image.table_by_id(8) is not None


async def test_a_defect_is_not_taken_for_a_dead_server() -> None:
    tablets, one, _ = await two_tablets()
    one.stop_failure = TypeError("a defect")
    with pytest.raises(TypeError):
        await tablets.stop_replicas([stop(0, 1)])


async def test_a_leader_that_is_not_there_is_an_error() -> None:
    """A create must not be acknowledged without leaders."""
    tablets, one, _ = await two_tablets()
    with pytest.raises(LeaderNotAvailableError, match="tablet server 3"):
        await tablets.start_replicas([replica(0, 1), replica(1, 3)])
    assert one.buckets == {}
    tablets.detach(1)
    with pytest.raises(LeaderNotAvailableError, match="tablet server 1"):
        await tablets.start_replicas([replica(0, 1)])


async def test_the_assignments_of_a_server_are_all_its_buckets() -> None:
    """The server deletes all other buckets from its disk, so none may be missing."""
    image = ClusterImage()
    image.apply([table(7), table(8, "u", partitioned=True), partition(3, 8), partition(4, 8, "y")])
    for server in STATE.replicas:
        found = {str(r.table_bucket): str(r.physical_path) for r in assignments(image, server)}
        assert found == {
            "table 7, bucket 0": "d.t",
            "table 7, bucket 1": "d.t",
            "table 8, partition 3, bucket 0": "d.u(p=x)",
            "table 8, partition 3, bucket 1": "d.u(p=x)",
            "table 8, partition 4, bucket 0": "d.u(p=y)",
            "table 8, partition 4, bucket 1": "d.u(p=y)",
        }
    assert assignments(image, 3) == []


async def test_a_server_that_is_gone_gets_no_new_buckets_until_it_is_heard_of() -> None:
    tablets, one, _ = await two_tablets()
    nodes = [ClusterNode(1, ()), ClusterNode(2, ())]

    async def gone(replicas: Any) -> None:
        raise NetworkError("refused")

    one.start_replicas = gone  # type: ignore[method-assign]
    with pytest.raises(NetworkError):
        await tablets.start_replicas([replica(0, 1), replica(1, 2)])
    assert tablets.answering(nodes) == [ClusterNode(2, ())]
    tablets.heard_of(1)
    assert tablets.answering(nodes) == nodes


class Wire:
    """A connection that gives prepared answers, and keeps the requests."""

    def __init__(self, answers: dict[ApiKey, Any]) -> None:
        self.answers = answers
        self.requests: list[Any] = []
        self.gate: asyncio.Event | None = None
        self.asked = asyncio.Event()

    async def call(self, api_key: ApiKey, request: Any, *, timeout_ms: int) -> Any:
        self.requests.append(type(request).FromString(request.SerializeToString()))
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        return self.answers[api_key]


def remote(wire: Wire) -> RemoteTablet:
    async def connect() -> Wire:
        return wire

    return RemoteTablet(1, 5, 9, connect, timeout_ms=1000)


async def test_orders_travel_with_their_epochs() -> None:
    wire = Wire(
        {
            ApiKey.UPDATE_METADATA: m.UpdateMetadataResponse(),
            ApiKey.NOTIFY_LEADER_AND_ISR: m.NotifyLeaderAndIsrResponse(),
            ApiKey.STOP_REPLICA: m.StopReplicaResponse(),
            ApiKey.NOTIFY_LAKE_TABLE_OFFSET: m.NotifyLakeTableOffsetResponse(),
        }
    )
    tablet = remote(wire)
    change, start = table(7), replica(1, 2, 1)
    await tablet.update_metadata([change])
    await tablet.start_replicas([start])
    await tablet.stop_replicas([stop(1, 2, 1)])
    await tablet.notify_lake_offsets([lake_offsets(1, 2, 1)])
    update, notify, ended, tiered = wire.requests
    assert all((r.coordinator_epoch, r.server_epoch) == (5, 9) for r in wire.requests)
    assert codec.changes_of(update) == [change]
    assert [replica_from_proto(r) for r in notify.notify_buckets_leader_req] == [start]
    assert [stop_from_proto(r) for r in ended.stop_replicas_req] == [stop(1)]
    assert [lake_offsets_from_proto(r) for r in tiered.notify_buckets_req] == [lake_offsets(1)]


async def test_the_error_of_a_bucket_is_raised() -> None:
    bucket = m.PbTableBucket(table_id=7, bucket_id=1)
    failed = m.PbNotifyLeaderAndIsrRespForBucket(
        table_bucket=bucket, error_code=10, error_message="disk"
    )
    answer = m.NotifyLeaderAndIsrResponse(notify_buckets_leader_resp=[failed])
    tablet = remote(Wire({ApiKey.NOTIFY_LEADER_AND_ISR: answer}))
    with pytest.raises(LogStorageError, match="tablet server 1, table 7, bucket 1: disk"):
        await tablet.start_replicas([replica(1, 1)])


async def test_the_end_of_a_registration_fails_what_is_under_way() -> None:
    """A change that waits for a dead process must not hold up the one that replaces it."""
    wire = Wire({ApiKey.UPDATE_METADATA: m.UpdateMetadataResponse()})
    wire.gate = asyncio.Event()
    tablet = remote(wire)
    order = asyncio.create_task(tablet.update_metadata([table(7)]))
    await wire.asked.wait()
    tablet.end()
    with pytest.raises(NetworkError, match="registered again"):
        await order
    with pytest.raises(NetworkError):
        await tablet.update_metadata([])
