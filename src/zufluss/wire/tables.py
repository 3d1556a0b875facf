"""Table paths, partitions and buckets as messages, both ways.

Many messages name a bucket by `table_id`, `partition_id` and `bucket_id`. The partition is absent,
not 0, for a table without partitions; `None` stands for that in the model. Servers and clients
convert through this module, so that the rule is written once. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from zufluss.errors import InvalidPartitionError
from zufluss.model.table import PhysicalTablePath, TableBucket, TablePath
from zufluss.wire import messages as m


class NamesPartition(Protocol):
    """A message with an optional partition id."""

    @property
    def partition_id(self) -> int:
        """The partition, 0 when absent."""

    def HasField(self, field_name: Literal["partition_id"], /) -> bool:  # protobuf's name
        """Whether the partition is present."""


class NamesBucket(NamesPartition, Protocol):
    """A message with a bucket of a table that another message names."""

    @property
    def bucket_id(self) -> int:
        """The bucket's number."""


class NamesTableBucket(NamesBucket, Protocol):
    """A message with a bucket and its table."""

    @property
    def table_id(self) -> int:
        """The table's id."""


def path_from_proto(message: m.PbTablePath) -> TablePath:
    """Returns the table path in a message."""
    return TablePath(message.database_name, message.table_name)


def path_to_proto(path: TablePath) -> m.PbTablePath:
    """Returns the message of a table path."""
    return m.PbTablePath(database_name=path.database, table_name=path.table)


def physical_path_from_proto(message: m.PbPhysicalTablePath) -> PhysicalTablePath:
    """Returns the path of a table or partition in a message."""
    partition = message.partition_name if message.HasField("partition_name") else None
    return PhysicalTablePath(message.database_name, message.table_name, partition)


def physical_path_to_proto(path: PhysicalTablePath) -> m.PbPhysicalTablePath:
    """Returns the message of the path of a table or partition."""
    return m.PbPhysicalTablePath(
        database_name=path.database, table_name=path.table, partition_name=path.partition
    )


def partition_id_of(message: NamesPartition) -> int | None:
    """Returns the partition id in a message, None when absent."""
    return message.partition_id if message.HasField("partition_id") else None


def bucket_key(message: NamesBucket) -> tuple[int | None, int]:
    """Returns partition id and bucket id of a message that leaves out the table."""
    partition_id = message.partition_id if message.HasField("partition_id") else None
    return partition_id, message.bucket_id


def bucket_in_table(table_id: int, message: NamesBucket) -> TableBucket:
    """Returns the bucket in a message that leaves out the table."""
    return TableBucket(table_id, *bucket_key(message))


def bucket_from_proto(message: NamesTableBucket) -> TableBucket:
    """Returns the bucket in a message."""
    return TableBucket(message.table_id, *bucket_key(message))


def bucket_to_proto(bucket: TableBucket) -> m.PbTableBucket:
    """Returns the message of a bucket."""
    return m.PbTableBucket(
        table_id=bucket.table_id, partition_id=bucket.partition_id, bucket_id=bucket.bucket_id
    )


def spec_from_proto(message: m.PbPartitionSpec) -> dict[str, str]:
    """Returns the values of a partition by key; InvalidPartitionError for a repeated key."""
    spec: dict[str, str] = {}
    for pair in message.partition_key_values:
        if pair.key in spec:
            raise InvalidPartitionError(f"partition key {pair.key!r} is given twice; give it once")
        spec[pair.key] = pair.value
    return spec


def spec_to_proto(spec: Mapping[str, str]) -> m.PbPartitionSpec:
    """Returns the message of the values of a partition, in key order."""
    pairs = [m.PbKeyValue(key=key, value=value) for key, value in spec.items()]
    return m.PbPartitionSpec(partition_key_values=pairs)


def offsets_from_proto(messages: Iterable[m.PbBucketOffsets]) -> dict[tuple[int | None, int], int]:
    """Returns offsets by partition id and bucket id.

    Raises ValueError for a bucket without an offset and for one with several.
    """
    offsets: dict[tuple[int | None, int], int] = {}
    for part in messages:
        partition_id = partition_id_of(part)
        for bucket_id, offset in zip(part.bucket_ids, part.log_offsets, strict=True):
            if (partition_id, bucket_id) in offsets:
                raise ValueError(f"partition {partition_id}, bucket {bucket_id} is there twice")
            offsets[partition_id, bucket_id] = offset
    return offsets


def offsets_to_proto(offsets: Mapping[tuple[int | None, int], int]) -> list[m.PbBucketOffsets]:
    """Returns offsets by partition id and bucket id as messages, one per partition."""
    parts: dict[int | None, m.PbBucketOffsets] = {}
    for (partition_id, bucket_id), offset in offsets.items():
        part = parts.get(partition_id)
        if part is None:
            part = parts[partition_id] = m.PbBucketOffsets(partition_id=partition_id)
        part.bucket_ids.append(bucket_id)
        part.log_offsets.append(offset)
    return list(parts.values())
