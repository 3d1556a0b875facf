"""The interface between tiering and a lake format.

A format is a `LakeTieringFactory`, found by its name through the entry points `zufluss.lake`.
Third parties add theirs in the same way; `zufluss.testing.lake` has the suite it must pass.

| part | runs | does |
|---|---|---|
| `LakeWriter` | a Spark task, per bucket and round | writes Arrow batches to uncommitted files |
| `LakeCommitter` | the driver, per table and round | makes the lake table fit; commits a snapshot |
| `LakeReader` | readers of a union read | plans and reads one snapshot |
| `LakeMaintenance` | the driver, between rounds | compaction, expiry, sweeping of orphans |

Arrow batches are the only data path. Rows of a log table carry all columns of the table, then
`__bucket`, `__offset`, `__timestamp`. The writer of a primary-key table gets folded changes
(`fold.py`): at most one upsert or delete per key.

A worker gets an opaque *handle* from the committer of the round, so that workers never talk to a
catalog. Results of workers travel through `write_result_serde`, committables of the driver through
`committable_serde`: one byte of version, the format's name, the format's own payload.

Exactly once rests on three rules that every committer keeps:

1. A snapshot of ours carries the properties it was committed with, and can be found by them.
2. `commit` names the newest snapshot of ours that the caller knows (`expected`), and is refused
   (`LakeCommitRefusedError`) if a newer one of ours exists. Foreign commits do not count.
3. A commit whose outcome is not certain raises `LakeCommitUnknownError`; no file is deleted before
   the lake has told the outcome.

A partition may be dropped and created again under its name, while the lake still has rows of the
old partition. In its first round the new partition is *fresh*: the snapshot that adds its first
rows leaves the old rows of that name out. Older snapshots keep them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Generic, Protocol, TypeVar, cast

import pyarrow as pa

from zufluss.errors import ConfigError, ErrorCode, ZuflussError
from zufluss.model.expression import Expression
from zufluss.model.table import TableBucket, TableInfo

ENTRY_POINTS = "zufluss.lake"
COMMIT_USER = "__fluss_lake_tiering"
"""The commit user; Fluss's name, so that its tools recognize our snapshots."""

COMMIT_USER_KEY = "commit-user"
OFFSETS_PATH_KEY = "fluss-offsets"
"""The path of the offsets file that the coordinator prepared, under Fluss's key."""
OFFSETS_KEY = "zufluss.offsets"
"""The offsets inline if they are few: JSON `[[partition id or null, bucket, offset], …]`."""
TABLE_ID_KEY = "zufluss.table-id"
TABLE_CREATED_KEY = "zufluss.table-created"
"""Identifies a table together with its id: another cluster may have the same id and name."""
EPOCH_KEY = "zufluss.tiering-epoch"
ROUND_KEY = "zufluss.round"

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
W_contra = TypeVar("W_contra", contravariant=True)
C = TypeVar("C")
T = TypeVar("T")


class LakeError(ZuflussError, code=ErrorCode.UNKNOWN_SERVER_ERROR):
    """The lake cannot be read or written."""


class LakeTableError(LakeError):
    """The lake table does not fit the table; only its owner can fix that."""


class LakeCommitRefusedError(LakeError):
    """The commit certainly had no effect; another commit of ours came first."""


class LakeCommitUnknownError(LakeError):
    """Whether the commit had an effect is unknown: look for its properties in the lake."""


@dataclass(frozen=True, slots=True)
class LakeCapabilities:
    """The capabilities of a format; the tiering service refuses tables that need more."""

    primary_key: bool
    """Upserts and deletes by key."""
    empty_commit: bool
    """A snapshot without files, which only moves offsets."""
    compaction: bool
    """Whether `LakeMaintenance.compact` is implemented."""


@dataclass(frozen=True, slots=True)
class WriterContext:
    """The arguments of the writer of one bucket and round. Pickles; small."""

    table: TableInfo
    """The table as planned; its schema covers every row below `stop_offset`."""
    handle: bytes
    """The handle that the committer of the round made."""
    bucket: TableBucket
    """The bucket."""
    partition: str | None
    """The name of its partition."""
    start_offset: int
    """The first offset of the round's range."""
    stop_offset: int
    """The offset after the range."""
    tiering_epoch: int
    """The epoch of the lease on the table."""
    round_id: str
    """Unique per round."""
    attempt: str
    """Unique per task attempt; file names carry it."""


class LakeWriter(Protocol[W_co]):
    """Writes files for one bucket and range. `append` for log tables, `apply` for primary keys."""

    def append(self, batch: pa.RecordBatch) -> None:
        """Write rows of a log table, in offset order; called once per batch."""

    def apply(self, upserts: pa.Table, deletes: pa.Table) -> None:
        """Write the folded changes of a primary-key table; called once.

        `upserts` are whole rows with the system columns, by offset; `deletes` has the columns of
        the primary key. Keys of both together are distinct. A key may be unknown to the lake.
        """

    def complete(self) -> W_co:
        """Close the files; returns a description of them."""

    def abort(self) -> None:
        """Remove the files, which no snapshot references yet."""


@dataclass(frozen=True, slots=True)
class CommitterContext:
    """The arguments of the committer, reader or maintenance of one table."""

    table: TableInfo
    """The table."""
    properties: Mapping[str, str]
    """Catalog properties, without prefix."""


@dataclass(frozen=True, slots=True)
class CommittedSnapshot:
    """A snapshot of ours in the lake."""

    snapshot_id: int
    """Its id."""
    properties: Mapping[str, str]
    """The properties of its commit."""
    timestamp_ms: int
    """The time of the commit, in epoch milliseconds."""
    readable: bool = True
    """Whether readers can use it; not so if the format has to compact it first."""
    expired: bool = False
    """Whether another writer expired it: its rows are in a newer snapshot, it is gone itself."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of a commit that certainly had its effect."""

    snapshot_id: int
    """The snapshot."""
    readable_snapshot_id: int | None = None
    """The newest snapshot that readers can use; None if it is the same one."""
    total_bytes: int | None = None
    """The size of all live files after the commit; None if the format does not know it."""
    total_records: int | None = None
    """Rows in these files, deleted ones included; None if the format does not know them."""

    @property
    def readable(self) -> bool:
        """Whether readers can use the snapshot at once."""
        return self.readable_snapshot_id in (None, self.snapshot_id)


class LakeCommitter(Protocol[W_contra, C]):
    """Commits one table on the driver. Not thread-safe; created for a round, closed after it."""

    def prepare_table(self) -> None:
        """Create the lake table, or alter it to fit the table.

        `LakeTableError` when it was changed from outside in a way that does not fit. A lake table
        that belonged to another table of this name is renamed, never emptied.
        """

    def writer_handle(self, fresh: Collection[str] = ()) -> bytes:
        """The handle for writers of this round; call after `prepare_table`.

        Writers see no earlier rows of `fresh` partitions (names).
        """

    def newest(self) -> CommittedSnapshot | None:
        """The newest snapshot of ours for exactly this table, None if there is none."""

    def to_committable(self, results: Sequence[W_contra]) -> C:
        """All results of a round as one committable."""

    def commit(
        self,
        committable: C,
        properties: Mapping[str, str],
        expected: int | None,
        fresh: Collection[str] = (),
    ) -> CommitResult:
        """Commit one snapshot with all files and these properties on top of `expected`.

        Of `fresh` partitions (names) the snapshot has only the files of this round.
        """

    def abort(self, committable: C) -> None:
        """Remove files of a round that was certainly not committed."""

    def close(self) -> None:
        """Release the catalog."""


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A file of a snapshot, for engines that read files themselves."""

    path: str
    """Its location."""
    records: int
    """Rows in it, deleted ones included."""
    size: int
    """Bytes."""
    deletes: tuple[str, ...] = ()
    """Position delete files (`file_path`, `pos`) that apply to it."""
    equality_deletes: tuple[str, ...] = ()
    """Files of deleted keys that apply to it, too. Only the format's `LakeReader` applies them."""
    bucket: int | None = None
    """The bucket of all its rows; None if the layout of the lake does not tell."""


@dataclass(frozen=True, slots=True)
class LakeScan:
    """The planned read of a snapshot."""

    snapshot_id: int
    """The snapshot."""
    files: tuple[LakeFile, ...]
    """Its files after pruning."""
    plan: Any = field(default=None, compare=False, repr=False)
    """Data of the format for `LakeReader.read`."""


class LakeReader(Protocol):
    """Reads snapshots of one table."""

    def plan(
        self,
        snapshot_id: int,
        *,
        filter: Expression | None = None,
        partitions: Collection[str] | None = None,
        without: Collection[str] = (),
    ) -> LakeScan:
        """The files of a snapshot; `filter` and `partitions` (names) may prune, nothing else.

        No row of the partitions named in `without` is among them.
        """

    def read(self, scan: LakeScan, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Live rows with exactly these columns, types as in `table.schema.arrow`.

        System columns are allowed, too. Columns that a file does not have are null.
        """

    def close(self) -> None:
        """Release the catalog."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The result of a sweep."""

    looked_at: int
    """Files in the table's directory."""
    removed: int
    """Orphans that were removed."""
    removed_bytes: int
    """Their size."""


class LakeMaintenance(Protocol):
    """Housekeeping of one lake table. Runs between rounds, in the process that runs the rounds."""

    def compact(self, expected: int | None) -> CommitResult | None:
        """Merge small files and apply deletes; None if there was nothing to do.

        The new snapshot repeats the properties of the newest snapshot of ours, and is refused like
        a commit when `expected` is another one.
        """

    def expire(self, older_than_ms: int, keep: Collection[int]) -> int:
        """Expire older snapshots, but none of `keep` and not the newest one of ours."""

    def sweep(self, older_than_ms: int) -> SweepReport:
        """Remove older files that no snapshot references."""

    def close(self) -> None:
        """Release the catalog."""


class LakeTieringFactory(Protocol[W, C]):
    """A lake format."""

    format: str
    """Its name in `table.datalake.format`."""
    capabilities: LakeCapabilities
    """Its capabilities."""
    write_result_serde: VersionedSerde[W]
    """Serializes write results for the way from task to driver."""
    committable_serde: VersionedSerde[C]
    """Serializes committables."""

    def validate_table(self, table: TableInfo) -> None:
        """Raise `LakeTableError` if the format cannot hold such a table."""

    def create_writer(self, context: WriterContext) -> LakeWriter[W]:
        """The writer of one bucket and round."""

    def create_committer(self, context: CommitterContext) -> LakeCommitter[W, C]:
        """The committer of one table."""

    def create_reader(self, context: CommitterContext) -> LakeReader:
        """A reader of one table; `LakeTableError` if there is no lake table yet."""

    def create_maintenance(self, context: CommitterContext) -> LakeMaintenance:
        """Housekeeping for one table."""


class VersionedSerde(Generic[T]):
    """Serializes values as bytes that name the format and version that wrote them.

    | bytes | field |
    |---|---|
    | 1 | version of the payload |
    | 1 | n, length of the format's name |
    | n | the format's name, ASCII |
    | rest | payload |
    """

    def __init__(
        self,
        format: str,
        version: int,
        dump: Callable[[T], bytes],
        load: Callable[[bytes], T],
    ) -> None:
        self.format = format
        self.version = version
        self._dump = dump
        self._load = load
        self._header = struct.pack("BB", version, len(format)) + format.encode("ascii")

    def dumps(self, value: T) -> bytes:
        """The value as bytes."""
        return self._header + self._dump(value)

    def loads(self, data: bytes) -> T:
        """The value of bytes that this format and version wrote; `LakeError` otherwise."""
        if not data.startswith(self._header):
            raise LakeError(
                f"bytes {data[:24]!r} were not written by lake format {self.format} version "
                f"{self.version}; driver and executors must run the same version of zufluss"
            )
        return self._load(data[len(self._header) :])


def lake_factory(format: str) -> LakeTieringFactory[Any, Any]:
    """The factory of a format; `ConfigError` names the installed formats."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if format not in points:
        raise ConfigError(
            f"lake format {format!r} is not installed; installed: "
            f"{', '.join(sorted(points)) or 'none'}"
        )
    try:
        return cast("LakeTieringFactory[Any, Any]", points[format].load()())
    except ImportError as problem:
        raise ConfigError(
            f"lake format {format} needs packages that are not installed ({problem}); "
            f"install zufluss[{format}]"
        ) from problem


def catalog_properties(
    table: TableInfo, format: str, overrides: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The catalog properties of a table's lake: the cluster's, replaced by `overrides`.

    The cluster hands its `datalake.<format>.*` out as `table.datalake.<format>.*` of every table.
    """
    prefix = f"table.datalake.{format}."
    properties = table.descriptor.properties
    known = {k.removeprefix(prefix): v for k, v in properties.items() if k.startswith(prefix)}
    return known | dict(overrides or {})


def table_identity(table: TableInfo) -> dict[str, str]:
    """The properties that tie a lake table and its snapshots to exactly this table."""
    return {TABLE_ID_KEY: str(table.table_id), TABLE_CREATED_KEY: str(table.created_time)}


def offsets_to_json(offsets: Mapping[TableBucket, int]) -> list[list[int | None]]:
    """Offsets in the form of a snapshot's properties."""
    return [[b.partition_id, b.bucket_id, o] for b, o in sorted(offsets.items(), key=_order)]


def offsets_from_json(
    table_id: int, rows: Iterable[Sequence[int | None]]
) -> dict[TableBucket, int]:
    """The offsets that `offsets_to_json` wrote."""
    return {TableBucket(table_id, p, cast(int, b)): cast(int, o) for p, b, o in rows}


def _order(item: tuple[TableBucket, int]) -> tuple[int, int]:
    bucket = item[0]
    return (-1 if bucket.partition_id is None else bucket.partition_id, bucket.bucket_id)
