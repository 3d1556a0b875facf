"""The calls of the coordinator to a tablet server, and their form on the wire.

`TabletGateway` is a tablet server as the coordinator sees it; `coordinator/tablets.py` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zufluss.cluster.configs import DynamicConfigs
from zufluss.cluster.image import BucketState, ClusterImage, ImageChange
from zufluss.cluster.producers import TableProducers
from zufluss.cluster.wal import WalSession, WalSource, source_from_proto, source_to_proto
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import (
    bucket_from_proto,
    bucket_to_proto,
    physical_path_from_proto,
    physical_path_to_proto,
)

if TYPE_CHECKING:
    from zufluss.remote.locations import Locations


@dataclass(frozen=True, slots=True)
class ReplicaAssignment:
    """A bucket that a tablet server has to hold."""

    table_bucket: TableBucket
    """The bucket."""
    physical_path: PhysicalTablePath
    """The table or partition it belongs to."""
    state: BucketState
    """The replicas and the leader of the bucket."""
    source: WalSource | None = None
    """The session of the shared log that has the end of the bucket. None without a shared log, and
    where it is the session of the server itself."""
    lease_ms: int = 0
    """So long the former leader may still answer lookups, from when the order was sent."""

    @property
    def leader_epoch(self) -> int:
        """The epoch of its leader."""
        return self.state.leader_epoch

    @property
    def replicas(self) -> tuple[int, ...]:
        """Ids of the tablet servers that hold it."""
        return self.state.replicas


@dataclass(frozen=True, slots=True)
class ReplicaStop:
    """A bucket that a tablet server has to give up."""

    table_bucket: TableBucket
    """The bucket."""
    leader_epoch: int
    """The epoch of its last leader."""
    delete: bool
    """Whether its files are deleted as well."""
    replicas: tuple[int, ...] = ()
    """Ids of the tablet servers that hold it; not sent."""


@dataclass(frozen=True, slots=True)
class LakeOffsets:
    """The offset of a bucket in the lake; its log below that may be deleted."""

    table_bucket: TableBucket
    """The bucket."""
    snapshot_id: int
    """The id of the lake snapshot."""
    log_end_offset: int
    """All rows below this offset are in the snapshot."""
    replicas: tuple[int, ...] = ()
    """Ids of the tablet servers that hold the bucket; not sent."""


@dataclass(frozen=True, slots=True)
class KvSnapshotOffset:
    """The offset of the oldest retained snapshot: the changelog is needed from there on."""

    table_bucket: TableBucket
    """The bucket."""
    min_retain_offset: int
    """Its log below this offset may be deleted."""
    replicas: tuple[int, ...] = ()
    """Ids of the tablet servers that hold the bucket; not sent."""


class TabletGateway(Protocol):
    """One tablet server as the coordinator calls it."""

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Apply changes to the image of the server."""

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Hold these buckets; returns when all of them serve, raises when one cannot."""

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Give these buckets up, and delete the files of those with `delete`."""

    async def release_bucket(self, bucket: TableBucket, leader_epoch: int) -> int:
        """Write nothing to a bucket any more; returns the number of the session behind its release.

        Raises a retriable error if the bucket goes on there.
        """

    async def prepare_bucket(self, assignment: ReplicaAssignment) -> None:
        """Make ready to lead a bucket whose leader has the live session in the assignment."""

    async def notify_lake_offsets(self, offsets: Sequence[LakeOffsets]) -> None:
        """Note the lake offsets of buckets; buckets that the server does not hold are ignored."""

    async def notify_kv_snapshot_offset(self, offsets: Sequence[KvSnapshotOffset]) -> None:
        """Note where changelogs are needed; buckets that the server does not hold are ignored."""

    async def update_locations(self, locations: Locations) -> None:
        """Use these remote locations, unless the server has this version or a newer one."""

    async def update_configs(self, configs: DynamicConfigs) -> None:
        """Put exactly these options over those that the server was started with."""

    async def update_producers(self, tables: Sequence[TableProducers]) -> None:
        """Use these producers, unless the server has this version or a newer one of a table.

        When this returns, no put that they do not allow is applied any more, not even one that
        arrived before. Tables that the server does not hold are remembered for later buckets.
        """

    async def producer_idle_ms(self, table_id: int, numbers: Sequence[int]) -> list[int]:
        """Milliseconds since each producer wrote to a table at this server; -1 for never."""

    async def end_offsets(self, buckets: Sequence[TableBucket]) -> dict[TableBucket, int]:
        """The end offsets of the logs of buckets; raises unless the server leads all of them."""


class LocalTablet(TabletGateway, Protocol):
    """A tablet server in the process of the coordinator; it gets everything at its start."""

    async def assign(
        self,
        image: ClusterImage,
        replicas: Sequence[ReplicaAssignment],
        producers: Sequence[TableProducers] = (),
        session: WalSession | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """Use this image, hold exactly these buckets, and delete every other one on the disk.

        `producers` has every table with producers. `session` is the session of the shared log that
        begins now, None where logs are durable on the disk of their server, and if the present one
        `goes_on` under another coordinator: buckets that are open stay so.
        """


class RpcCaller(Protocol):
    """A connection to another server."""

    async def call(self, api_key: ApiKey, request: Any, *, timeout_ms: int) -> Any:
        """Send a request, and return the answer; raises the error in the answer."""


def assignments(image: ClusterImage, server_id: int) -> list[ReplicaAssignment]:
    """Every bucket that one tablet server has to hold."""
    return [
        ReplicaAssignment(bucket, path, state)
        for path, bucket, state in image.buckets()
        if server_id in state.replicas
    ]


def replica_to_proto(replica: ReplicaAssignment) -> m.PbNotifyLeaderAndIsrReqForBucket:
    """Encode an assignment."""
    state = replica.state
    return m.PbNotifyLeaderAndIsrReqForBucket(
        physical_table_path=physical_path_to_proto(replica.physical_path),
        table_bucket=bucket_to_proto(replica.table_bucket),
        leader=state.leader,
        leader_epoch=state.leader_epoch,
        replicas=state.replicas,
        isr=state.isr,
        bucket_epoch=state.bucket_epoch,
        wal_source=None if replica.source is None else source_to_proto(replica.source),
        lease_ms=replica.lease_ms or None,
        wal_epoch=state.wal,
    )


def replica_from_proto(message: m.PbNotifyLeaderAndIsrReqForBucket) -> ReplicaAssignment:
    """Decode an assignment."""
    state = BucketState(
        replicas=tuple(message.replicas),
        leader=message.leader,
        leader_epoch=message.leader_epoch,
        isr=tuple(message.isr),
        bucket_epoch=message.bucket_epoch,
        wal=message.wal_epoch if message.HasField("wal_epoch") else None,
    )
    return ReplicaAssignment(
        bucket_from_proto(message.table_bucket),
        physical_path_from_proto(message.physical_table_path),
        state,
        source_from_proto(message.wal_source) if message.HasField("wal_source") else None,
        message.lease_ms,
    )


def stop_to_proto(stop: ReplicaStop) -> m.PbStopReplicaReqForBucket:
    """Encode a stop, without `replicas`."""
    return m.PbStopReplicaReqForBucket(
        table_bucket=bucket_to_proto(stop.table_bucket),
        leader_epoch=stop.leader_epoch,
        delete=stop.delete,
    )


def stop_from_proto(message: m.PbStopReplicaReqForBucket) -> ReplicaStop:
    """Decode a stop."""
    bucket = bucket_from_proto(message.table_bucket)
    return ReplicaStop(bucket, message.leader_epoch, message.delete)


def lake_offsets_to_proto(offsets: LakeOffsets) -> m.PbNotifyLakeTableOffsetReqForBucket:
    """Encode a lake offset, without `replicas`."""
    bucket = offsets.table_bucket
    return m.PbNotifyLakeTableOffsetReqForBucket(
        table_id=bucket.table_id,
        partition_id=bucket.partition_id,
        bucket_id=bucket.bucket_id,
        snapshot_id=offsets.snapshot_id,
        log_end_offset=offsets.log_end_offset,
    )


def lake_offsets_from_proto(message: m.PbNotifyLakeTableOffsetReqForBucket) -> LakeOffsets:
    """Decode a lake offset; 0 if the message has none."""
    bucket = bucket_from_proto(message)
    return LakeOffsets(bucket, message.snapshot_id, message.log_end_offset)


def kv_snapshot_offset_to_proto(
    offset: KvSnapshotOffset, coordinator_epoch: int
) -> m.NotifyKvSnapshotOffsetRequest:
    """Encode the offset from which a changelog is needed, without `replicas`."""
    bucket = offset.table_bucket
    return m.NotifyKvSnapshotOffsetRequest(
        table_id=bucket.table_id,
        partition_id=bucket.partition_id,
        bucket_id=bucket.bucket_id,
        coordinator_epoch=coordinator_epoch,
        min_retain_offset=offset.min_retain_offset,
    )


def kv_snapshot_offset_from_proto(message: m.NotifyKvSnapshotOffsetRequest) -> KvSnapshotOffset:
    """Decode the offset from which a changelog is needed."""
    bucket = bucket_from_proto(message)
    return KvSnapshotOffset(bucket, message.min_retain_offset)
