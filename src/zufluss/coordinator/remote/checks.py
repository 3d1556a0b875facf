"""Checks of what tablet servers report of remote files.

The coordinator later deletes by the names of the files. By the offsets, servers delete records of
their logs, and a lost log continues there; so no offset is believed beyond the high watermark of
its bucket.
"""

from __future__ import annotations

from collections.abc import Iterable

from zufluss.cluster.image import ClusterImage
from zufluss.coordinator.bucket_remotes import gone
from zufluss.coordinator.tablets import Tablets
from zufluss.errors import (
    ConfigError,
    ErrorCode,
    LocationMovedError,
    OffsetOutOfRangeError,
    error,
)
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
        raise ConfigError(
            f"{path!r:.300} is not a file of {image.name_of(bucket)}; its files lie in {directory}"
        )
    return name


def bucket_directory(image: ClusterImage, kind: str, bucket: TableBucket) -> str:
    """The directory of a bucket in each location."""
    table = image.table_by_id(bucket.table_id)
    partition_id = bucket.partition_id
    partition = None if partition_id is None else image.partition_by_id(partition_id)
    if table is None or image.leader(bucket) is None:
        raise gone(image.name_of(bucket))
    path = PhysicalTablePath(*table.info.path, None if partition is None else partition.name)
    return layout.bucket_directory(kind, path, bucket)


async def check_reached(
    image: ClusterImage, tablets: Tablets, bucket: TableBucket, known: int, offset: int, what: str
) -> None:
    """Raise if a file claims an offset above `known` and above the high watermark of its bucket.

    The leader is asked, so do not hold a turn. `what` names the file, as `a manifest`.
    """
    for end in (await tablets.unreached(image, {bucket: known}, {bucket: offset})).values():
        raise OffsetOutOfRangeError(
            f"{image.name_of(bucket)} ends at offset {end}, {what} cannot reach {offset}; commit "
            "only what is below the high watermark of the log"
        )


def check_locations(storage: RemoteStorage, location_ids: Iterable[int]) -> None:
    """Raise for locations that do not exist, or that were retired."""
    for location_id in set(location_ids):
        location = storage.locations.get(location_id)
        if location.state is AdminState.RETIRED:
            raise error(
                ErrorCode.STORAGE_EXCEPTION,
                f"location {location} was retired; upload its files to another one",
            )


def check_moves(storage: RemoteStorage, locations_version: int) -> None:
    """Raise `LocationMovedError` if a location was moved since this version of the registry.

    Files that were uploaded under that version may lie at the former address. A move checks only
    files that are committed, so nobody knows whether these were copied. Call it in the turn in
    which the files are committed.
    """
    moved = storage.locations.moved_version
    if locations_version < moved:
        raise LocationMovedError(
            f"the files were uploaded under version {locations_version} of the registry of "
            f"locations, and version {moved} gave a location another address; upload them again, "
            "under the present version"
        )


def check_epoch(reported: int, current: int) -> None:
    """Raise for a report that was meant for another coordinator."""
    if reported != current:
        raise error(
            ErrorCode.INVALID_COORDINATOR_EXCEPTION,
            f"the report belongs to coordinator epoch {reported}, this coordinator has {current}; "
            f"register again",
        )
