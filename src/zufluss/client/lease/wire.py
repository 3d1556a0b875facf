"""Messages of leases of key-value snapshots: requests, and the columns of answers as dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zufluss.client.core.cluster import ClusterConnection
from zufluss.errors import ConfigError, TableNotPartitionedError
from zufluss.model.lease import LeasedSnapshot, Revoked, Unavailable
from zufluss.model.partition import partition_name
from zufluss.model.table import TableBucket, TablePath
from zufluss.wire import messages as m
from zufluss.wire.tables import bucket_to_proto, partition_id_of


async def targets_of(
    connection: ClusterConnection,
    tables: Sequence[TablePath],
    partition: str | Mapping[str, str] | None,
    buckets: Iterable[int | TableBucket] | None,
) -> list[m.PbLeaseTarget]:
    """The targets of a lease: tables, one partition or some buckets of each, or single buckets."""
    chosen = None if buckets is None else [*buckets]
    exact = [each for each in chosen or () if isinstance(each, TableBucket)]
    numbers = sorted({each for each in chosen or () if not isinstance(each, TableBucket)})
    if (exact and numbers) or bool(exact) == bool(tables) or (chosen is not None and not chosen):
        raise ConfigError(
            "a lease of snapshots needs tables, maybe with some of their bucket numbers, or "
            f"TableBuckets without tables; it got {len(tables)} tables and "
            f"{'no choice of' if chosen is None else len(chosen)} buckets"
        )
    if exact:
        return bucket_targets(exact)
    return [await _target(connection, path, partition, numbers) for path in tables]


async def _target(
    connection: ClusterConnection,
    path: TablePath,
    partition: str | Mapping[str, str] | None,
    numbers: Sequence[int],
) -> m.PbLeaseTarget:
    info = await connection.table_info(path, refresh=True)
    target = m.PbLeaseTarget(table_id=info.table_id, bucket_ids=numbers)
    if partition is not None:
        if not info.is_partitioned:
            raise TableNotPartitionedError(f"table {path} is not partitioned; name no partition")
        name = partition
        if not isinstance(name, str):
            name = partition_name(info.partition_keys, name)
        connection.metadata.forget_partition(info.table_id, name)  # it may have been created again
        target.partition_id = (await connection.partition(info, name)).partition_id
    return target


def bucket_targets(buckets: Iterable[TableBucket]) -> list[m.PbLeaseTarget]:
    """Buckets as targets, grouped by table and partition."""
    grouped: dict[tuple[int, int | None], set[int]] = {}
    for table_id, partition_id, bucket_id in buckets:
        grouped.setdefault((table_id, partition_id), set()).add(bucket_id)
    return [
        m.PbLeaseTarget(table_id=table, partition_id=partition, bucket_ids=sorted(numbers))
        for (table, partition), numbers in grouped.items()
    ]


def acquire_request(
    lease_id: str, duration_ms: int, targets: Sequence[m.PbLeaseTarget]
) -> m.AcquireLatestKvSnapshotLeaseRequest:
    """The request that creates a lease or takes it over."""
    return m.AcquireLatestKvSnapshotLeaseRequest(
        lease_id=lease_id, lease_duration_ms=duration_ms, targets=targets
    )


def release_request(
    lease_id: str, epoch: int, buckets: Iterable[TableBucket]
) -> m.ReleaseKvSnapshotLeaseRequest:
    """The request that releases the snapshots of some buckets."""
    return m.ReleaseKvSnapshotLeaseRequest(
        lease_id=lease_id,
        lease_epoch=epoch,
        buckets_to_release=map(bucket_to_proto, buckets),
    )


def leased_of(messages: Iterable[m.PbLeasedSnapshots]) -> dict[TableBucket, LeasedSnapshot]:
    """The leased snapshots in an answer."""
    return {
        TableBucket(message.table_id, partition_id_of(message), bucket_id): LeasedSnapshot(
            number, offset
        )
        for message in messages
        for bucket_id, number, offset in zip(
            message.bucket_ids, message.snapshot_ids, message.log_offsets, strict=True
        )
    }


def unavailable_of(messages: Iterable[m.PbUnavailableSnapshots]) -> dict[TableBucket, Unavailable]:
    """The buckets in an answer that have no snapshot, with the reason."""
    return {
        TableBucket(message.table_id, partition_id_of(message), bucket_id): Unavailable(reason)
        for message in messages
        for bucket_id, reason in zip(message.bucket_ids, message.reasons, strict=True)
    }


def revoked_of(messages: Iterable[m.PbRevokedSnapshots]) -> list[Revoked]:
    """The dropped tables and partitions in an answer."""
    return [
        Revoked(message.table_id, partition_id_of(message), message.what) for message in messages
    ]
