"""Orders to a tablet server: which buckets to hold, which to give up, and their form on the wire.

`TabletGateway` is a tablet server as the coordinator sees it, `coordinator/tablets.py` sends to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zufluss.cluster.image import BucketState, ClusterImage, ImageChange
from zufluss.cluster.producers import TableProducers
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
    """Who holds it and who leads it."""

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
    """Its files go as well."""
    replicas: tuple[int, ...] = ()
    """Ids of the tablet servers that hold it; does not travel."""


@dataclass(frozen=True, slots=True)
class LakeOffsets:
    """How far a bucket got in the lake; its log below that may go."""

    table_bucket: TableBucket
    """The bucket."""
    snapshot_id: int
    """The lake snapshot that has it."""
    log_end_offset: int
    """Everything below this offset is in the snapshot."""
    replicas: tuple[int, ...] = ()
    """Ids of the tablet servers that hold the bucket; does not travel."""


@dataclass(frozen=True, slots=True)
class KvSnapshotOffset:
    """From where on the changelog of a bucket is needed: its oldest retained snapshot's offset."""

    table_bucket: TableBucket
    """The bucket."""
    min_retain_offset: int
    """Its log below this offset may go."""
    replicas: tuple[int, ...] = ()
    """Ids of the tablet servers that hold the bucket; does not travel."""


class TabletGateway(Protocol):
    """One tablet server, told what to do by the coordinator."""

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Apply these changes to its picture of the cluster."""
        ...

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Hold these buckets; return when each of them serves, raise when one cannot."""
        ...

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Give these buckets up, and free their disk where it says delete."""
        ...

    async def notify_lake_offsets(self, offsets: Sequence[LakeOffsets]) -> None:
        """Know how far these buckets got in the lake; buckets it does not hold are passed over."""
        ...

    async def notify_kv_snapshot_offset(self, offsets: Sequence[KvSnapshotOffset]) -> None:
        """Know from where on changelogs are needed; buckets it does not hold are passed over."""
        ...

    async def update_locations(self, locations: Locations) -> None:
        """Know where remote files may lie; a version it has already, or a newer one, stays."""
        ...

    async def update_producers(self, tables: Sequence[TableProducers]) -> None:
        """Know the producers of tables; a version it has already, or a newer one, stays.

        When this returns, no put that these do not allow is applied any more, not even one that
        arrived before. Tables it does not hold are remembered, too: their buckets may come.
        """
        ...

    async def producer_idle_ms(self, table_id: int, numbers: Sequence[int]) -> list[int]:
        """How long ago producers wrote to a table here, in the order asked; -1 for never."""
        ...

    async def end_offsets(self, buckets: Sequence[TableBucket]) -> dict[TableBucket, int]:
        """The ends of the logs of buckets that it leads; raise when it does not lead one."""
        ...


class LocalTablet(TabletGateway, Protocol):
    """A tablet server in the coordinator's process: it is told everything at once at start."""

    async def assign(
        self,
        image: ClusterImage,
        replicas: Sequence[ReplicaAssignment],
        producers: Sequence[TableProducers] = (),
    ) -> None:
        """Take over this picture, hold exactly these buckets, delete every other on the disk.

        `producers` are all there are: a table that is not among them has none.
        """
        ...


class RpcCaller(Protocol):
    """What speaking to another server needs of a connection."""

    async def call(self, api_key: ApiKey, request: Any, *, timeout_ms: int) -> Any:
        """The answer to a request; raises the error it carries."""
        ...


def assignments(image: ClusterImage, server_id: int) -> list[ReplicaAssignment]:
    """Every bucket that one tablet server has to hold."""
    return [
        ReplicaAssignment(bucket, path, state)
        for path, bucket, state in image.buckets()
        if server_id in state.replicas
    ]


def replica_to_proto(replica: ReplicaAssignment) -> m.PbNotifyLeaderAndIsrReqForBucket:
    """An assignment as it travels."""
    state = replica.state
    return m.PbNotifyLeaderAndIsrReqForBucket(
        physical_table_path=physical_path_to_proto(replica.physical_path),
        table_bucket=bucket_to_proto(replica.table_bucket),
        leader=state.leader,
        leader_epoch=state.leader_epoch,
        replicas=state.replicas,
        isr=state.isr,
        bucket_epoch=state.bucket_epoch,
    )


def replica_from_proto(message: m.PbNotifyLeaderAndIsrReqForBucket) -> ReplicaAssignment:
    """An assignment as it arrived."""
    state = BucketState(
        replicas=tuple(message.replicas),
        leader=message.leader,
        leader_epoch=message.leader_epoch,
        isr=tuple(message.isr),
        bucket_epoch=message.bucket_epoch,
    )
    return ReplicaAssignment(
        bucket_from_proto(message.table_bucket),
        physical_path_from_proto(message.physical_table_path),
        state,
    )


def stop_to_proto(stop: ReplicaStop) -> m.PbStopReplicaReqForBucket:
    """A stop as it travels; who held the bucket stays behind."""
    return m.PbStopReplicaReqForBucket(
        table_bucket=bucket_to_proto(stop.table_bucket),
        leader_epoch=stop.leader_epoch,
        delete=stop.delete,
    )


def stop_from_proto(message: m.PbStopReplicaReqForBucket) -> ReplicaStop:
    """A stop as it arrived, at a server that held the bucket."""
    bucket = bucket_from_proto(message.table_bucket)
    return ReplicaStop(bucket, message.leader_epoch, message.delete)


def lake_offsets_to_proto(offsets: LakeOffsets) -> m.PbNotifyLakeTableOffsetReqForBucket:
    """A bucket's lake offset as it travels; who holds the bucket stays behind."""
    bucket = offsets.table_bucket
    return m.PbNotifyLakeTableOffsetReqForBucket(
        table_id=bucket.table_id,
        partition_id=bucket.partition_id,
        bucket_id=bucket.bucket_id,
        snapshot_id=offsets.snapshot_id,
        log_end_offset=offsets.log_end_offset,
    )


def lake_offsets_from_proto(message: m.PbNotifyLakeTableOffsetReqForBucket) -> LakeOffsets:
    """A bucket's lake offset as it arrived; 0, nothing, where none is said."""
    bucket = bucket_from_proto(message)
    return LakeOffsets(bucket, message.snapshot_id, message.log_end_offset)


def kv_snapshot_offset_to_proto(
    offset: KvSnapshotOffset, coordinator_epoch: int
) -> m.NotifyKvSnapshotOffsetRequest:
    """From where on a changelog is needed, as it travels; who holds the bucket stays behind."""
    bucket = offset.table_bucket
    return m.NotifyKvSnapshotOffsetRequest(
        table_id=bucket.table_id,
        partition_id=bucket.partition_id,
        bucket_id=bucket.bucket_id,
        coordinator_epoch=coordinator_epoch,
        min_retain_offset=offset.min_retain_offset,
    )


def kv_snapshot_offset_from_proto(message: m.NotifyKvSnapshotOffsetRequest) -> KvSnapshotOffset:
    """From where on a changelog is needed, as it arrived."""
    bucket = bucket_from_proto(message)
    return KvSnapshotOffset(bucket, message.min_retain_offset)
