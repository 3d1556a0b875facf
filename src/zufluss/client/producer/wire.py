"""Offsets of producers as messages: by bucket here, columns per partition on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zufluss.model.table import TableBucket
from zufluss.wire import messages as m

Offsets = Mapping[TableBucket, int]
"""Where buckets stand."""


def offsets_to_wire(offsets: Offsets) -> list[m.PbBucketOffsets]:
    """Offsets as columns, one message per partition."""
    grouped: dict[int | None, m.PbBucketOffsets] = {}
    for bucket, offset in offsets.items():
        columns = grouped.get(bucket.partition_id)
        if columns is None:
            columns = m.PbBucketOffsets(partition_id=bucket.partition_id)
            grouped[bucket.partition_id] = columns
        columns.bucket_ids.append(bucket.bucket_id)
        columns.log_offsets.append(offset)
    return list(grouped.values())


def offsets_from_wire(table_id: int, found: Iterable[m.PbBucketOffsets]) -> dict[TableBucket, int]:
    """The offsets of an answer, by bucket."""
    return {
        TableBucket(
            table_id, each.partition_id if each.HasField("partition_id") else None, bucket
        ): (offset)
        for each in found
        for bucket, offset in zip(each.bucket_ids, each.log_offsets, strict=True)
    }
