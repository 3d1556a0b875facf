"""Plans the splits of one round, from the state of the lake and of the cluster.

Pure functions over four inputs: the lake snapshot that the cluster knows, the end (high watermark)
and the beginning of every bucket's log, and the key-value snapshots of primary-key tables. Per
bucket there is at most one split, and the splits of consecutive rounds join without gap or overlap:

| the lake has | and | split |
|---|---|---|
| the bucket up to t | t < end | log from t |
| | t = end | none |
| | the log begins after t | log from its beginning, and a hole; with a primary key an error |
| | the log ends before t | an error: records were lost |
| nothing of it | the log is whole, or the table has no primary key | log from its beginning |
| | the same, and a key-value snapshot is much shorter | that snapshot |
| | the changelog's beginning is gone, a snapshot is there | that snapshot |
| | the changelog's beginning is gone, and no snapshot | an error: rows would be missing |

A snapshot is *much shorter* when it stands for at least `CHANGES_MIN` changes and has at most one
row for `CHANGES_PER_ROW` of them: reading these changes only to fold them away would take several
times as long. Otherwise the changelog is read, because only it knows the offset and the commit time
of each row; rows of a snapshot have -1 for both, as in Fluss. The next round continues with the
changelog from the snapshot's offset. A snapshot is of use only where the lake has nothing of the
bucket: it does not tell which rows of the lake were deleted meanwhile. It is leased while the round
runs, so newer ones do not replace it.

A log split has a maximum number of records; the next round reads the rest.

Retention keeps records that are not tiered, so a log begins after t only if tiering was off for
longer than `table.log.ttl`, or if a lost disk took changes of a primary-key table. A log table then
continues behind a *hole*: its split may have no records at all, so that the next round and union
reads start behind the hole.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from zufluss.lake.base import LakeError
from zufluss.model.lake import LakeSnapshot
from zufluss.model.table import TableBucket, TablePath

SPLIT_COST: Final = 20_000
TASK_COST_MIN: Final = 50_000
"""The fixed cost of a split, and the least cost that a task of its own pays for; in records."""

CHANGES_MIN: Final = 100_000
CHANGES_PER_ROW: Final = 4
"""The limits above which a snapshot is read although the changelog is whole; see above."""


class BucketSnapshot(NamedTuple):
    """The newest snapshot of a bucket's rows."""

    snapshot_id: int
    """Its id."""
    log_offset: int
    """The snapshot has all changes below this offset of the changelog."""
    row_count: int | None = None
    """The number of its rows; None if it is not known."""


@dataclass(frozen=True, slots=True)
class TieringLogSplit:
    """A range of one bucket's log."""

    path: TablePath
    """The table."""
    bucket: TableBucket
    """The bucket."""
    partition: str | None
    """The name of its partition."""
    starting_offset: int
    """The first offset to read."""
    stopping_offset: int
    """The offset after the last one."""

    @property
    def split_id(self) -> str:
        """Unique among the splits of a table."""
        return f"{_bucket_text(self.bucket)}-{self.starting_offset}-{self.stopping_offset}"

    @property
    def records(self) -> int:
        """The number of records, for packing."""
        return self.stopping_offset - self.starting_offset


@dataclass(frozen=True, slots=True)
class TieringSnapshotSplit:
    """The key-value snapshot of one bucket."""

    path: TablePath
    """The table."""
    bucket: TableBucket
    """The bucket."""
    partition: str | None
    """The name of its partition."""
    snapshot_id: int
    """The snapshot."""
    log_offset_of_snapshot: int
    """The snapshot has all changes below this offset of the changelog."""

    @property
    def split_id(self) -> str:
        """Unique among the splits of a table."""
        return f"{_bucket_text(self.bucket)}-kv{self.snapshot_id}-{self.log_offset_of_snapshot}"

    @property
    def starting_offset(self) -> int:
        """A snapshot stands for the changelog from its beginning."""
        return 0

    @property
    def stopping_offset(self) -> int:
        """The offset at which the next round starts."""
        return self.log_offset_of_snapshot

    @property
    def records(self) -> int:
        """An upper bound of its rows, for packing."""
        return self.log_offset_of_snapshot


TieringSplit = TieringLogSplit | TieringSnapshotSplit


class Hole(NamedTuple):
    """Offsets of a log table that neither the lake nor the log has."""

    bucket: TableBucket
    """The bucket."""
    start: int
    """The first one."""
    stop: int
    """The offset after the last one."""


@dataclass(frozen=True, slots=True)
class TieringPlan:
    """The splits of one round."""

    splits: tuple[TieringSplit, ...]
    """At most one per bucket; none when there is nothing new."""
    remaining: int
    """Records in the log that are left to the next round."""
    holes: tuple[Hole, ...] = ()
    """Offsets between the lake and the splits that are lost."""
    fresh: frozenset[str] = frozenset()
    """Names of partitions of the splits whose earlier namesake the lake may still have."""

    @property
    def offsets(self) -> dict[TableBucket, int]:
        """The offset up to which the lake has each planned bucket after the round."""
        return {split.bucket: split.stopping_offset for split in self.splits}

    @property
    def records(self) -> int:
        """The number of offsets that the round covers."""
        return sum(split.stopping_offset - split.starting_offset for split in self.splits)


@dataclass(frozen=True, slots=True)
class TieringInput:
    """The state of a table as planning needs it; `round.py` says in which order it is read."""

    path: TablePath
    """The table."""
    has_primary_key: bool
    """Whether the table has a primary key, so that its log is a changelog."""
    partitions: Mapping[int, str]
    """Names by id; empty for a table without partitions."""
    lake: LakeSnapshot | None
    """The snapshot that the cluster knows."""
    ends: Mapping[TableBucket, int]
    """The high watermark of every bucket."""
    begins: Mapping[TableBucket, int]
    """The first offset that the log of every bucket still has. A changelog begins behind its last
    loss (`docs/remote-storage.md`): what remote storage has from before cannot be continued."""
    kv_snapshots: Mapping[TableBucket, BucketSnapshot] = field(default_factory=dict)
    """The newest key-value snapshot, of buckets that have one."""


def plan_splits(state: TieringInput, bucket_records_max: int) -> TieringPlan:
    """The splits of the next round; `LakeError` if records are lost that the lake needs."""
    splits: list[TieringSplit] = []
    holes: list[Hole] = []
    remaining = 0
    for bucket in sorted(state.ends, key=_order):
        split = _plan_bucket(state, bucket, bucket_records_max)
        if split is not None:
            splits.append(split)
            remaining += max(state.ends[bucket] - split.stopping_offset, 0)
            tiered = _tiered(state, bucket)
            if tiered is not None and tiered < split.starting_offset:
                holes.append(Hole(bucket, tiered, split.starting_offset))
    fresh = frozenset() if state.lake is None else state.lake.fresh(state.partitions)
    written = {split.partition for split in splits}
    return TieringPlan(tuple(splits), remaining, tuple(holes), fresh & written)


def pack(splits: Sequence[TieringSplit], tasks_max: int) -> list[tuple[TieringSplit, ...]]:
    """The splits in at most `tasks_max` groups of about equal cost, none of them empty.

    A small amount of work goes into few tasks, since the start of a task costs more than reading a
    few thousand records.
    """
    total = sum(map(cost, splits))
    count = min(len(splits), tasks_max, -(-total // TASK_COST_MIN))
    loads = [(0, index) for index in range(count)]
    groups: list[list[TieringSplit]] = [[] for _ in range(count)]
    for split in sorted(splits, key=lambda s: (-s.records, s.split_id)):
        load, index = heapq.heappop(loads)
        groups[index].append(split)
        heapq.heappush(loads, (load + cost(split), index))
    return [tuple(group) for group in groups]


def cost(split: TieringSplit) -> int:
    """The cost of a split in records; opening a scan and closing a file count too."""
    return SPLIT_COST + split.records


def known_offsets(
    partitions: Iterable[int], offsets: Mapping[TableBucket, int]
) -> dict[TableBucket, int]:
    """Offsets without those of partitions that are gone."""
    there = {None, *partitions}
    return {b: offset for b, offset in offsets.items() if b.partition_id in there}


def _plan_bucket(state: TieringInput, bucket: TableBucket, records_max: int) -> TieringSplit | None:
    partition = _partition_of(state, bucket)
    begin, end = state.begins[bucket], state.ends[bucket]
    tiered = _tiered(state, bucket)
    snapshot = state.kv_snapshots.get(bucket)
    if tiered is None and snapshot is not None and _stands_for_changes(snapshot, begin):
        return TieringSnapshotSplit(state.path, bucket, partition, *snapshot[:2])
    known = tiered or 0
    if known > end:
        raise LakeError(_too_short(bucket.named(state.path, partition), known, end))
    if state.has_primary_key and begin > known:
        raise LakeError(_lost_changes(bucket.named(state.path, partition), known, begin))
    start = max(known, begin)
    if start == end and (tiered is None or start == tiered):
        return None
    stop = min(end, start + records_max)
    return TieringLogSplit(state.path, bucket, partition, start, stop)


def asks_for_snapshot(state: TieringInput, bucket: TableBucket) -> bool:
    """Whether the plan of a bucket may use its key-value snapshot."""
    if not state.has_primary_key or _tiered(state, bucket) is not None:
        return False
    return state.begins[bucket] > 0 or state.ends[bucket] >= CHANGES_MIN


def asks_for_rows(state: TieringInput, bucket: TableBucket, snapshot: BucketSnapshot) -> bool:
    """Whether the number of its rows decides if the plan uses a snapshot."""
    return state.begins[bucket] == 0 and snapshot.log_offset >= CHANGES_MIN


def _stands_for_changes(snapshot: BucketSnapshot, begin: int) -> bool:
    if begin > 0:
        return snapshot.log_offset >= begin
    if snapshot.row_count is None or snapshot.log_offset < CHANGES_MIN:
        return False
    return snapshot.row_count * CHANGES_PER_ROW <= snapshot.log_offset


def _too_short(bucket: str, tiered: int, end: int) -> str:
    return (
        f"{bucket}: the lake has records up to {tiered - 1}, but the log ends at {end}; the "
        "cluster lost acknowledged records, or stands on an older copy of its data. Restore the "
        "log, or drop and re-create the table"
    )


def _lost_changes(bucket: str, tiered: int, begin: int) -> str:
    return (
        f"{bucket}: records {tiered} to {begin - 1} are neither in the lake nor in the log any "
        "more: table.log.ttl removed these changes while the table was not tiered, or they were "
        "lost with a disk. Rows that they changed would be wrong in the lake for ever. A key-value "
        "snapshot stands for them only where the lake has nothing of the bucket, and if there is "
        "one. Restore the log; or set table.datalake.enabled=false and leave the lake as it is; or "
        "drop and re-create the table"
    )


def _tiered(state: TieringInput, bucket: TableBucket) -> int | None:
    return None if state.lake is None else state.lake.offsets.get(bucket)


def _partition_of(state: TieringInput, bucket: TableBucket) -> str | None:
    return None if bucket.partition_id is None else state.partitions[bucket.partition_id]


def _bucket_text(bucket: TableBucket) -> str:
    partition = "" if bucket.partition_id is None else f"p{bucket.partition_id}-"
    return f"{bucket.table_id}-{partition}{bucket.bucket_id}"


def _order(bucket: TableBucket) -> tuple[int, int]:
    return (-1 if bucket.partition_id is None else bucket.partition_id, bucket.bucket_id)
