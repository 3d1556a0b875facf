"""Producers as plain values, and which calls are allowed, without I/O.

| call asks for | allowed if |
|---|---|
| a producer of a primary-key table | its changelog has full rows |
| a producer of a log table | always: it is only a number that tells its appends apart |
| a fence of a primary-key table | always: it is a number and an epoch, and owns nothing |
| shared columns | the changes of one producer can be undone alone, or replayed |
| columns of another producer | that producer has been silent for its TTL; it is *lost* then, for good |
| an epoch without state | the producer reported no checkpoint, or its last checkpoint has an id |
| an epoch with state | the state is of this producer, and complete |
| the same id | the caller is the owner or a super user, and the columns are the same |

A producer keeps the columns and the kind of lock it was created with, because its earlier epochs
are undone by them. A producer of all columns also gets columns that the table gets later. If it
owns them alone, it owns new ones from their creation on: its undo empties them, so nobody else may
have written them.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zufluss.cluster.image import ClusterImage, TableEntry
from zufluss.cluster.producers import Baseline
from zufluss.config import options
from zufluss.config import table_options as t
from zufluss.errors import (
    ColumnLockedError,
    ConfigError,
    InvalidTableError,
    InvalidTargetColumnError,
    ProducerFencedError,
    ProducerNotFoundError,
    ProducerStateError,
)
from zufluss.model.aggregate import FLOATS, FUNCTIONS
from zufluss.model.merge import merge_engine
from zufluss.model.producer import EPOCH_MAX
from zufluss.model.schema import Column
from zufluss.model.table import TableInfo


@dataclass(frozen=True, slots=True)
class ProducerRecord:
    """One producer of a table, as it is stored."""

    producer_id: str
    """Its id."""
    table_id: int
    """The id of the table."""
    number: int
    """The number in its writer ids; no other producer ever has it."""
    epoch: int
    """Its present epoch, from 1 on."""
    owner: str | None
    """The principal that created it; None without authentication."""
    column_ids: frozenset[int]
    """The columns it writes."""
    all_columns: bool
    """Whether it was created for all columns."""
    exclusive: bool
    """Whether the producer is the only writer of its columns."""
    ttl_ms: int
    """Silence after which other producers may take its columns."""
    checkpointed: bool = False
    """Whether it has reported a checkpoint, or was restored from one."""
    checkpoint_id: int | None = None
    """The greatest id of a checkpoint that it reported."""
    stateful: bool = False
    """Whether its last checkpoint had no id, so that only its state identifies the baseline."""
    lost: bool = False
    """Whether other producers have taken columns of it."""
    baseline: Baseline | None = None
    """Its changes from these offsets on may have to be undone; None before its first answer."""
    fence_only: bool = False
    """Whether it owns nothing and has nothing to undo, and only its epochs fence each other."""

    @property
    def title(self) -> str:
        """How messages call the producer."""
        return f"producer {self.producer_id!r}"

    def fenced(self, epoch: int) -> ProducerFencedError:
        """The error for a call of another epoch."""
        return ProducerFencedError(
            f"{self.title} has begun epoch {self.epoch}, the call is of epoch {epoch}: another "
            "writer runs under this id; this one must end"
        )


@dataclass(frozen=True, slots=True)
class InitCall:
    """An INIT_PRODUCER call."""

    producer_id: str
    """The id of the producer."""
    table_id: int
    """The id of the table."""
    ttl_ms: int
    """Its time to live."""
    column_ids: tuple[int, ...] = ()
    """The columns it will write; empty for all columns outside the key."""
    restored: Baseline | None = None
    """The offsets of the checkpoint that is restored; None without state."""
    restored_number: int | None = None
    """The producer number in that checkpoint, if the caller knows it."""
    principal: str | None = None
    """The caller."""
    fence_only: bool = False
    """Whether the call asks for epochs only, without columns and undo."""
    renew: bool = False
    """Whether earlier epochs are undone already, and a new number with fresh epochs is wanted."""


@dataclass(frozen=True, slots=True)
class InitResult:
    """The answer to INIT_PRODUCER: every earlier epoch is fenced."""

    producer: ProducerRecord
    """The producer in its new epoch, with its baseline."""
    created: bool
    """Whether the producer is new, so that it has written nothing."""
    undo_needed: bool
    """Whether replaying the writes of earlier epochs could change the result."""


@dataclass(frozen=True, slots=True)
class ProducerStatus:
    """A producer in a list."""

    producer: ProducerRecord
    """The producer."""
    idle_ms: int
    """Time since its last sign of life."""


class ProducerCounts(NamedTuple):
    """All producers in numbers."""

    producers: int
    """Number of producers, the lost ones included."""
    lost: int
    """Producers that lost their columns and cannot come back."""


@dataclass(frozen=True, slots=True)
class TableBuckets:
    """The buckets of a table; checks offsets, also in another thread."""

    table: str
    """The path of the table, for messages."""
    bucket_count: int
    """Buckets of the table, or of each partition."""
    partitions: Mapping[int, str] | None
    """The names of its partitions by id; None for a table without partitions."""
    foreign: frozenset[int] = field(default_factory=frozenset)
    """Partitions in the offsets that belong to other tables."""

    @classmethod
    def of(cls, image: ClusterImage, info: TableInfo, named: Iterable[int | None]) -> TableBuckets:
        """The present buckets of a table; `named` are the partitions in the offsets."""
        if not info.is_partitioned:
            return cls(str(info.path), info.bucket_count, None)
        there = {p.partition_id: p.name for p in image.partitions(info.table_id).values()}
        unknown = {i for i in named if i is not None} - there.keys()
        foreign = frozenset(i for i in unknown if image.partition_by_id(i) is not None)
        return cls(str(info.path), info.bucket_count, there, foreign)

    def checked(self, offsets: Baseline, *, complete: bool) -> dict[tuple[int | None, int], int]:
        """The offsets without dropped partitions; `ProducerStateError` if they do not fit."""
        buckets: dict[int | None, int] = {} if self.partitions is not None else {None: 0}
        for (partition_id, bucket_id), offset in offsets.items():
            self._check(partition_id, bucket_id, offset)
            buckets[partition_id] = buckets.get(partition_id, 0) + 1
        for partition_id, count in buckets.items():
            if complete and count != self.bucket_count:
                raise ProducerStateError(
                    f"the state has {count} of the {self.bucket_count} buckets of "
                    f"{self.name(partition_id)}; give the offsets of all its buckets"
                )
        if self.partitions is None:
            return dict(offsets)
        return {key: value for key, value in offsets.items() if key[0] in self.partitions}

    def _check(self, partition_id: int | None, bucket_id: int, offset: int) -> None:
        if (partition_id is None) != (self.partitions is None) or partition_id in self.foreign:
            raise ProducerStateError(
                f"the offsets are not of table '{self.table}': it has no "
                f"{self._owner(partition_id)}; use the state with the table it was taken of"
            )
        if not 0 <= bucket_id < self.bucket_count or offset < 0:
            raise ProducerStateError(
                f"offset {offset} of bucket {bucket_id} cannot be one of "
                f"{self.name(partition_id)}, which has {self.bucket_count} buckets, with offsets "
                "from 0 on"
            )

    def name(self, partition_id: int | None) -> str:
        """The table, or one of its partitions, for messages."""
        if self.partitions is None and partition_id is None:
            return f"table '{self.table}'"
        return f"table '{self.table}', {self._owner(partition_id)}"

    def _owner(self, partition_id: int | None) -> str:
        if partition_id is None:
            return "buckets without partition"
        return f"partition {(self.partitions or {}).get(partition_id, f'id {partition_id}')}"


def merged(
    before: Baseline | None, reported: Baseline, buckets: TableBuckets, ends: Baseline
) -> Baseline:
    """The baseline after a reported checkpoint; no offset in it goes back.

    `ProducerStateError` for an offset beyond the end of its log: a later change before the offset
    could never be undone.
    """
    checked = buckets.checked(reported, complete=False)
    for key, offset in checked.items():
        if offset > max(ends.get(key, offset), (before or {}).get(key, 0)):
            raise ProducerStateError(
                f"checkpoint at offset {offset} of bucket {key[1]} of {buckets.name(key[0])}, "
                f"whose log ends at {ends[key]}; report the offset after the last write that was "
                "acknowledged, or start the producer again if the log lost records with a disk"
            )
    there = buckets.partitions
    existing = {k: v for k, v in (before or {}).items() if there is None or k[0] in there}
    after = existing | {k: max(v, existing.get(k, 0)) for k, v in checked.items()}
    return before if before is not None and after == before else after


# Tables and columns


def check_table(info: TableInfo) -> None:
    """`InvalidTableError` for a table whose puts cannot be undone."""
    if info.property(t.TABLE_CHANGELOG_IMAGE) != "FULL":
        raise InvalidTableError(
            f"table '{info.path}' has {t.TABLE_CHANGELOG_IMAGE.key} = "
            f"{info.property(t.TABLE_CHANGELOG_IMAGE)}: puts are undone by old rows, which its "
            "changelog lacks; producers need FULL"
        )


def columns_of(info: TableInfo, column_ids: Collection[int]) -> dict[int, Column]:
    """The columns outside the key with these ids; all of them without ids."""
    key = info.schema.primary_key
    there = {column.id: column for column in info.schema.columns}
    writable = {i: column for i, column in there.items() if column.name not in key}
    wrong = [i for i in column_ids if i not in writable]
    if wrong:
        what = f"column {there[wrong[0]].name!r} of the key" if wrong[0] in there else "unknown"
        allowed = ", ".join(f"{i} ({column.name})" for i, column in writable.items())
        raise InvalidTargetColumnError(
            f"column id {wrong[0]} of table '{info.path}' is {what}; a producer can own {allowed}"
        )
    columns = {i: writable[i] for i in column_ids} or writable
    if not columns:
        raise InvalidTargetColumnError(
            f"table '{info.path}' has no column outside its primary key that a producer could own"
        )
    return columns


def check_shared(info: TableInfo, columns: Iterable[Column]) -> None:
    """`InvalidTargetColumnError` for columns that cannot be undone for one producer alone."""
    for column in columns:
        function = column.agg_function
        if function is None or FUNCTIONS[function.type].idempotent:
            continue
        what = f"{function.type} of {column.data_type} cannot be undone for one of them alone"
        invertible = FUNCTIONS[function.type].invertible and column.data_type.root not in FLOATS
        if invertible and not deletes_happen(info):
            continue
        if invertible:
            what += f" while {t.TABLE_DELETE_BEHAVIOR.key} is ALLOW"
        raise InvalidTargetColumnError(
            f"column {column.name!r} of table '{info.path}' cannot be shared by producers: {what}; "
            f"set {t.TABLE_COLUMN_LOCK_ENABLED.key} = true, or leave the column out"
        )


def deletes_happen(info: TableInfo) -> bool:
    """Whether a writer can delete rows of a table."""
    properties = info.descriptor.properties
    default = "ALLOW" if merge_engine(properties) is None else "IGNORE"
    return properties.get(t.TABLE_DELETE_BEHAVIOR.key, default).strip().upper() == "ALLOW"


def undo_needed(info: TableInfo, columns: Iterable[Column]) -> bool:
    """Whether replaying rows could give another result."""
    functions = (column.agg_function for column in columns)
    same = all(f is None or FUNCTIONS[f.type].idempotent for f in functions)
    return deletes_happen(info) or not same


# Producers


def check_ttl(ttl_ms: int, most_ms: int) -> None:
    """`ConfigError` for a time to live that is not allowed."""
    if not 1 <= ttl_ms <= most_ms:
        raise ConfigError(
            f"a producer cannot have a TTL of {ttl_ms} ms: 1 to {most_ms} are allowed "
            f"({options.ZUFLUSS_PRODUCER_TTL_MAX.key}); writes and renewals prolong it"
        )


def check_count(count: int, most: int, info: TableInfo) -> None:
    """`ConfigError` when a table has as many producers as allowed."""
    if count >= most:
        raise ConfigError(
            f"table '{info.path}' has {count} producers, at most {most} are allowed "
            f"({options.ZUFLUSS_PRODUCER_COUNT_MAX.key}); drop those that ended: see `zufluss "
            "producer list`"
        )


def check_not_lost(producer: ProducerRecord) -> None:
    """`ProducerFencedError` for a producer whose columns others have taken."""
    if producer.lost:
        raise ProducerFencedError(
            f"producer {producer.producer_id!r} was silent for longer than its TTL of "
            f"{producer.ttl_ms} ms, and another one has taken columns of it: it cannot come back; "
            "drop it (zufluss producer drop), and begin anew under another id"
        )


def check_same_use(before: ProducerRecord, call: InitCall) -> None:
    """`ProducerStateError` when an id is used both for a fence and for a producer."""
    if before.fence_only != call.fence_only:
        uses = "plain upserts, which nothing is undone of", "writes that can be undone"
        was, asked = uses if before.fence_only else reversed(uses)
        raise ProducerStateError(
            f"producer {before.producer_id!r} is for {was}, and is asked for {asked}; take "
            "another id, or drop it first (zufluss producer drop)"
        )


def check_state(before: ProducerRecord, call: InitCall) -> None:
    """`ProducerStateError` for a state from which changes would be doubled or lost."""
    if before.epoch >= EPOCH_MAX:
        raise ProducerStateError(
            f"producer {before.producer_id!r} has had all of its {EPOCH_MAX} epochs; begin anew "
            "under another id"
        )
    if call.restored is None:
        if before.stateful:
            raise ProducerStateError(
                f"producer {before.producer_id!r} has checkpoints, so it cannot begin without "
                "state: restore its latest one, or drop it (zufluss producer drop) to begin anew "
                "with what it wrote"
            )
        return
    if before.baseline is None or call.restored_number not in (None, before.number):
        raise ProducerStateError(
            f"the state is not of this producer {before.producer_id!r} with number "
            f"{before.number}, but of one that was dropped since: what it wrote cannot be undone "
            "any more; begin without state, and drop the producer before if it has checkpoints"
        )


def check_checkpoint_id(before: ProducerRecord, checkpoint_id: int | None) -> None:
    """`ProducerStateError` for a checkpoint that is older than one that was reported."""
    last = before.checkpoint_id
    if checkpoint_id is not None and last is not None and checkpoint_id < last:
        raise ProducerStateError(
            f"producer {before.producer_id!r} has reported checkpoint {last}, so {checkpoint_id} "
            "is over: another writer may run under this id; begin again from the latest one"
        )


def not_found(producer_id: str, table: str) -> ProducerNotFoundError:
    """The error for a producer that does not exist, or has ended."""
    return ProducerNotFoundError(
        f"{table} has no producer {producer_id!r}, or not any more: it was released or dropped, "
        "and what it wrote cannot be undone; begin without state"
    )


def next_columns(before: ProducerRecord, call: InitCall, entry: TableEntry) -> frozenset[int]:
    """The columns of the next epoch; `ProducerStateError` if it asks for others."""
    info = entry.info
    requested = frozenset(columns_of(info, call.column_ids))
    if before.all_columns and not call.column_ids:
        return requested
    owned = before.column_ids & {column.id for column in info.schema.columns}
    if requested != owned:
        names = {column.id: column.name for column in info.schema.columns}
        raise ProducerStateError(
            f"producer {before.producer_id!r} writes the columns {_names(owned, names)} of table "
            f"'{info.path}', not {_names(requested, names)}: what it wrote could not be undone; "
            "release it first, or take another id"
        )
    return owned


def rivals(producer: ProducerRecord, others: Iterable[ProducerRecord]) -> list[ProducerRecord]:
    """The other producers that own columns of this one exclusively."""
    return [
        other
        for other in others
        if other.producer_id != producer.producer_id
        and not other.lost
        and not other.fence_only
        and (other.exclusive or producer.exclusive)
        and (_owns_all(other) or _owns_all(producer) or other.column_ids & producer.column_ids)
    ]


def _owns_all(producer: ProducerRecord) -> bool:
    """Whether a producer owns all columns, including those that the table gets later."""
    return producer.exclusive and producer.all_columns


def column_locked(
    record: ProducerRecord, rival: ProducerRecord, remaining_ms: int, info: TableInfo
) -> ColumnLockedError:
    """The error for columns of a producer that was not silent for its TTL."""
    names = {column.id: column.name for column in info.schema.columns}
    common = record.column_ids & rival.column_ids or record.column_ids
    return ColumnLockedError(
        f"producer {rival.producer_id!r} owns the columns {_names(common, names)} of table "
        f"'{info.path}' for at least {remaining_ms} ms more; write other columns, wait until it is "
        f"silent for its TTL of {rival.ttl_ms} ms, or end it (zufluss producer drop)"
    )


def _names(column_ids: Iterable[int], names: Mapping[int, str]) -> str:
    return ", ".join(names.get(i, str(i)) for i in sorted(column_ids))
