"""Checks of files that tablet servers report: the coordinator later deletes by these names."""

from __future__ import annotations

from collections.abc import Iterable

from zufluss.cluster.image import ClusterImage
from zufluss.coordinator.bucket_remotes import gone
from zufluss.errors import ConfigError, ErrorCode, error
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote import layout
from zufluss.remote.layout import RemoteName
from zufluss.remote.locations import AdminState
from zufluss.remote.storage import RemoteStorage


def check_name(image: ClusterImage, kind: str, bucket: TableBucket, path: str) -> RemoteName:
    """Parse the path of a file; `ConfigError` unless it lies in the directory of its bucket."""
    directory = bucket_directory(image, kind, bucket)
    name = layout.parse(path)
    if name is None or not path.startswith(f"{directory}/"):
        raise ConfigError(f"{path!r:.300} is not a file of {bucket}; its files lie in {directory}")
    return name


def bucket_directory(image: ClusterImage, kind: str, bucket: TableBucket) -> str:
    """The directory of a bucket in each location."""
    table = image.table_by_id(bucket.table_id)
    partition_id = bucket.partition_id
    partition = None if partition_id is None else image.partition_by_id(partition_id)
    if table is None or image.leader(bucket) is None:
        raise gone(bucket)
    path = PhysicalTablePath(*table.info.path, None if partition is None else partition.name)
    return layout.bucket_directory(kind, path, bucket)


def check_locations(storage: RemoteStorage, location_ids: Iterable[int]) -> None:
    """Raise for locations that do not exist, or that were retired."""
    for location_id in set(location_ids):
        location = storage.locations.get(location_id)
        if location.state is AdminState.RETIRED:
            raise error(
                ErrorCode.STORAGE_EXCEPTION,
                f"location {location} was retired; upload its files to another one",
            )


def check_epoch(reported: int, current: int) -> None:
    """Raise for a report that was meant for another coordinator."""
    if reported != current:
        raise error(
            ErrorCode.INVALID_COORDINATOR_EXCEPTION,
            f"the report belongs to coordinator epoch {reported}, this coordinator has {current}; "
            f"register again",
        )
