"""Offsets of producers as messages: by bucket here, as columns per partition on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.tables import offsets_from_proto, offsets_to_proto

BucketOffsets = Mapping[TableBucket, int]
"""Offsets by bucket."""


def offsets_to_wire(offsets: BucketOffsets) -> list[m.PbBucketOffsets]:
    """Returns the offsets as messages, one per partition."""
    return offsets_to_proto({bucket[1:]: offset for bucket, offset in offsets.items()})


def offsets_from_wire(table_id: int, parts: Iterable[m.PbBucketOffsets]) -> dict[TableBucket, int]:
    """Returns the offsets in an answer, by bucket."""
    offsets = offsets_from_proto(parts)
    return {TableBucket(table_id, *key): offset for key, offset in offsets.items()}
