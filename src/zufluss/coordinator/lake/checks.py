"""Checks of what a tiering service reports against what the cluster knows.

Retention deletes records that the lake has, so an offset that is not true loses records. Every
reported offset is checked before anything is written:

| report | error |
|---|---|
| a bucket or partition that the table does not have | `UnknownTableOrBucketError`, `PartitionNotExistError` |
| an offset below that of the newest snapshot | `OffsetOutOfRangeError` |
| an offset above the high watermark of its bucket | `OffsetOutOfRangeError` |
| only offsets of the newest snapshot, without epochs | `FencedTieringEpochError` |

The leader of a bucket is asked for the high watermark if the offset is above that of the newest
snapshot. While a leader is away such offsets are refused with a retriable error. After a lost disk
the log of a bucket may end before an offset that only the lake knows. That offset is refused too,
until somebody decides which of the two is right (`docs/tiering.md`).
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

from zufluss.cluster.image import ClusterImage
from zufluss.coordinator.lake.offsets import Offsets
from zufluss.coordinator.tablets import Tablets
from zufluss.errors import (
    ConfigError,
    FencedTieringEpochError,
    OffsetOutOfRangeError,
    PartitionNotExistError,
    UnknownTableOrBucketError,
)
from zufluss.model.table import TableInfo
from zufluss.pacing import paced


async def check_buckets(info: TableInfo, offsets: Offsets, image: ClusterImage) -> None:
    """Raise unless every offset is a number of records of a bucket that the table has."""
    async for bucket, offset in paced(offsets.items()):
        if offset < 0:
            raise ConfigError(
                f"offset {offset} of {image.name_of(bucket)} is not allowed; give 0 or more"
            )
        partition_id = bucket.partition_id
        if info.is_partitioned == (partition_id is None):
            kind = "partitioned" if info.is_partitioned else "not partitioned"
            raise UnknownTableOrBucketError(
                f"{image.name_of(bucket)}: table '{info.path}' is {kind}"
            )
        if partition_id is not None:
            partition = image.partition_by_id(partition_id)
            if partition is None or partition.table_id != info.table_id:
                raise PartitionNotExistError(
                    f"table '{info.path}' has no partition with id {partition_id}; leave its "
                    f"offsets out when it was dropped"
                )
        if not 0 <= bucket.bucket_id < info.bucket_count:
            raise UnknownTableOrBucketError(
                f"{image.name_of(bucket)}: table '{info.path}' has buckets 0 to "
                f"{info.bucket_count - 1}"
            )


def check_forward(info: TableInfo, known: Offsets, offered: Offsets) -> None:
    """Raise if an offset goes back, or is missing."""
    for bucket, offset in known.items():
        if offered.get(bucket, -1) < offset:
            raise OffsetOutOfRangeError(
                f"{bucket.named(info.path)} is in the lake up to offset {offset}, "
                f"{offered.get(bucket, 'nothing')} would go back; read the lake snapshot again and "
                "tier from there"
            )


def check_advance(info: TableInfo, known: Offsets, offered: Offsets) -> None:
    """`FencedTieringEpochError` if a service that names no epochs has no news.

    A round of such a service that was overtaken by another one cannot be told by its epoch. It
    would write rows into the lake that are there already.
    """
    if known and all(known.get(bucket) == offset for bucket, offset in offered.items()):
        raise FencedTieringEpochError(
            f"the lake has all of table '{info.path}' that this round read: another round was "
            "faster; drop its files and ask for the table again"
        )


async def check_reached(
    known: Offsets, offered: Offsets, image: ClusterImage, tablets: Tablets
) -> None:
    """Raise if an offset is above `known` and above the high watermark of its bucket.

    Buckets of dropped partitions are not checked.
    """
    for bucket, end in (await tablets.unreached(image, known, offered)).items():
        raise OffsetOutOfRangeError(
            f"{image.name_of(bucket)} ends at offset {end}, the lake cannot have it up to "
            f"{offered[bucket]}; report the offset after the last record that was tiered. If "
            "the log lost records with a disk, drop and re-create the table"
        )
