"""Offsets of a streaming read, as they stand in the checkpoint of a query.

    {"version": 1, "table_id": 7, "phase": "log", "buckets": {"12/0": 4711, "12/1": 4200},
     "partitions": {"12": "2026-01"}, "starts": {"12/1": 0}, "state": false, "lake": null,
     "fresh": []}

| field | meaning |
|---|---|
| `version` | of this layout |
| `table_id` | the table: one of the same name that was created later is another one |
| `phase` | `state`: a new query, which begins with what the table holds at the offsets; `start`: |
|  | a new query, which begins with the log at the offsets; `log`: a query under way |
| `buckets` | by `partition id/bucket`, or `/bucket` without partitions: everything below is read |
| `partitions` | the names of the partitions, by id |
| `starts` | where the batch that ends here begins, of buckets that were not read before |
| `state` | the batch that ends here is what the table held at the offsets |
| `lake` | the lake snapshot that the state is of, if there is one |
| `fresh` | names of partitions that this snapshot has nothing of: its rows under them are older |

Spark does not keep the first offset of a query, and asks for another one when the first batch has
to be run again. So the offset at the end of the first batch alone defines what the batch reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from zufluss.errors import TableNotExistError, ZuflussError
from zufluss.model.table import TableBucket, TableInfo

VERSION: Final = 1
Phase = Literal["state", "start", "log"]


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The progress of a streaming read."""

    table_id: int
    """The table."""
    phase: Phase
    """What the next batch reads; see the table above."""
    buckets: Mapping[TableBucket, int]
    """The offset of each bucket below which all records are read, or in the state."""
    partitions: Mapping[int, str]
    """Names of partitions by id."""
    starts: Mapping[TableBucket, int] = field(default_factory=dict)
    """The first offset of buckets that were not read before."""
    state: bool = False
    """Whether the batch that ends here is the state of the table."""
    lake: int | None = None
    """The lake snapshot of the state; None if the state is not from a lake."""
    fresh: tuple[str, ...] = ()
    """Names of partitions that the lake snapshot has nothing of."""

    def to_json(self) -> dict[str, Any]:
        """The offset as JSON for the checkpoint."""
        return {
            "version": VERSION,
            "table_id": self.table_id,
            "phase": self.phase,
            "buckets": {_key(bucket): self.buckets[bucket] for bucket in _ordered(self.buckets)},
            "partitions": {str(key): self.partitions[key] for key in sorted(self.partitions)},
            "starts": {_key(bucket): self.starts[bucket] for bucket in _ordered(self.starts)},
            "state": self.state,
            "lake": self.lake,
            "fresh": list(self.fresh),
        }

    @classmethod
    def of(cls, document: Mapping[str, Any], info: TableInfo) -> StreamOffset:
        """The offset of a checkpoint. Raises an error if it is of another table or version."""
        if document.get("version") != VERSION:
            raise ZuflussError(
                f"the checkpoint of this query has offsets of version {document.get('version')!r}, "
                f"this release reads version {VERSION}; go on with the release that wrote it"
            )
        table_id = int(document["table_id"])
        if table_id != info.table_id:
            raise TableNotExistError(
                f"the checkpoint of this query is of another table {info.path} (id {table_id}), "
                f"which was dropped; the table of now has id {info.table_id}. Start the query with "
                "another checkpointLocation"
            )
        return cls(
            table_id,
            document["phase"],
            {_bucket(table_id, key): int(at) for key, at in document["buckets"].items()},
            {int(key): name for key, name in document["partitions"].items()},
            {_bucket(table_id, key): int(at) for key, at in document["starts"].items()},
            document["state"],
            document["lake"],
            tuple(document["fresh"]),
        )


def _ordered(buckets: Mapping[TableBucket, int]) -> list[TableBucket]:
    return sorted(buckets, key=lambda bucket: (bucket.partition_id or 0, bucket.bucket_id))


def _key(bucket: TableBucket) -> str:
    partition = "" if bucket.partition_id is None else bucket.partition_id
    return f"{partition}/{bucket.bucket_id}"


def _bucket(table_id: int, key: str) -> TableBucket:
    partition, _, bucket = key.partition("/")
    return TableBucket(table_id, int(partition) if partition else None, int(bucket))
