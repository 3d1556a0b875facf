"""A lake snapshot of a table as the cluster knows it, with the offset of each bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zufluss.model.table import TableBucket

BUCKET_COLUMN = "__bucket"
OFFSET_COLUMN = "__offset"
TIMESTAMP_COLUMN = "__timestamp"
SYSTEM_COLUMNS = (BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN)
"""Columns that tiering adds after those of the table, in this order, with Fluss's names."""


@dataclass(frozen=True, slots=True)
class LakeSnapshot:
    """A snapshot in the lake that was reported to the cluster."""

    table_id: int
    """The table it is of."""
    snapshot_id: int
    """Its id in the lake."""
    offsets: Mapping[TableBucket, int]
    """The snapshot has all records below these offsets, and no records of other buckets."""
    partition_names: Mapping[int, str] = field(default_factory=dict)
    """Names of the partitions among the buckets, where the cluster still knows them."""

    def fresh(self, partitions: Mapping[int, str]) -> frozenset[str]:
        """The names of the given partitions that have no offsets in the snapshot.

        Rows of such a name in the lake belong to an earlier partition that was dropped.
        """
        tiered = {bucket.partition_id for bucket in self.offsets}
        return frozenset(name for id_, name in partitions.items() if id_ not in tiered)
