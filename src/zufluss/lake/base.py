"""The seam between tiering and a lake format: what a format must bring, and what it may rely on.

A format is a `LakeTieringFactory`, found by its name through the entry points `zufluss.lake`.
Third parties add theirs in the same way; `zufluss.testing.lake` has the suite it must pass.

| part | runs | does |
|---|---|---|
| `LakeWriter` | a Spark task, per bucket and round | Arrow batches into files nobody sees yet |
| `LakeCommitter` | the driver, per table and round | the lake table fits; one snapshot |
| `LakeReader` | readers of a union read | plans and reads one snapshot |
| `LakeMaintenance` | the driver, between rounds | compaction, expiry, sweeping of orphans |

Arrow batches are the only data path. Rows of a log table carry all columns of the table, then
`__bucket`, `__offset`, `__timestamp`. A primary-key table's writer gets what `fold.py` leaves of
the changes: at most one upsert or delete per key.

What a worker needs to write comes as an opaque *handle* from the committer of the round, so that
workers never talk to a catalog. What it wrote travels back through `write_result_serde`, what the
driver is about to commit through `committable_serde`: one byte of version, the format's name, the
format's own payload.

Exactly once rests on three rules that every committer keeps:

1. A snapshot of ours carries the properties it was committed with, and can be found by them.
2. `commit` names the newest snapshot of ours that the caller knows (`expected`), and is refused
   (`LakeCommitRefusedError`) when another one of ours lies on top. Foreign commits do not count.
3. An outcome that is not known for certain is `LakeCommitUnknownError`, and nobody deletes a file
   before the lake was asked again.

A partition may be dropped and created again under its name. Of the earlier one the lake still has
rows; to the round that writes the new one for the first time it is *fresh*: what is there under its
name is left out of the snapshot that adds its first rows. Older snapshots keep it.
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
"""Who commits; Fluss's name, so that its tools know our snapshots."""

COMMIT_USER_KEY = "commit-user"
OFFSETS_PATH_KEY = "fluss-offsets"
"""The offsets file that the coordinator prepared, as Fluss has it."""
OFFSETS_KEY = "zufluss.offsets"
"""The same inline, where it is small: JSON `[[partition id or null, bucket, offset], …]`."""
TABLE_ID_KEY = "zufluss.table-id"
TABLE_CREATED_KEY = "zufluss.table-created"
"""With the id the identity of a table: another cluster may have used the same id and name."""
EPOCH_KEY = "zufluss.tiering-epoch"
ROUND_KEY = "zufluss.round"

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
W_contra = TypeVar("W_contra", contravariant=True)
C = TypeVar("C")
T = TypeVar("T")


class LakeError(ZuflussError):
    """The lake cannot be read or written."""

    code = ErrorCode.UNKNOWN_SERVER_ERROR


class LakeTableError(LakeError):
    """The lake table does not fit the table, and only its owner can mend that."""


class LakeCommitRefusedError(LakeError):
    """The commit certainly had no effect; another commit of ours came first."""


class LakeCommitUnknownError(LakeError):
    """The commit may or may not have had an effect: look for its properties in the lake."""


@dataclass(frozen=True, slots=True)
class LakeCapabilities:
    """What a format can do; the tiering service refuses tables that need more."""

    primary_key: bool
    """Upserts and deletes by key."""
    empty_commit: bool
    """A snapshot without files, which only moves offsets."""
    compaction: bool
    """`LakeMaintenance.compact` does something."""


@dataclass(frozen=True, slots=True)
class WriterContext:
    """Everything the writer of one bucket and round gets. Pickles; small."""

    table: TableInfo
    """The table as planned; its schema covers every row below `stop_offset`."""
    handle: bytes
    """What the committer of the round gave."""
    bucket: TableBucket
    """The bucket."""
    partition: str | None
    """The name of its partition."""
    start_offset: int
    """The first offset of the round's range."""
    stop_offset: int
    """The offset after the range."""
    tiering_epoch: int
    """The epoch of the hand-out."""
    round_id: str
    """Unique per round."""
    attempt: str
    """Unique per task attempt; file names carry it."""


class LakeWriter(Protocol[W_co]):
    """Writes files for one bucket and range. `append` for log tables, `apply` for primary keys."""

    def append(self, batch: pa.RecordBatch) -> None:
        """Rows of a log table in offset order; called as often as there are batches."""
        ...

    def apply(self, upserts: pa.Table, deletes: pa.Table) -> None:
        """Folded changes of a primary-key table; called once.

        `upserts` are whole rows with the system columns, by offset; `deletes` has the columns of
        the primary key. Keys of both together are distinct. A key may be unknown to the lake.
        """
        ...

    def complete(self) -> W_co:
        """Close the files and say what was written."""
        ...

    def abort(self) -> None:
        """Remove what was written; nobody has seen it."""
        ...


@dataclass(frozen=True, slots=True)
class CommitterContext:
    """Everything the committer of one table gets."""

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
    """What it was committed with."""
    timestamp_ms: int
    """When."""
    readable: bool = True
    """Readers can use it; not so where a format has to compact first."""
    expired: bool = False
    """Others expired it below a snapshot of theirs: its rows are there, it is not."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """A commit that certainly had its effect."""

    snapshot_id: int
    """The snapshot."""
    readable_snapshot_id: int | None = None
    """The newest one readers can use, where that is another."""
    total_bytes: int | None = None
    """Size of all live files of the lake table after it, where the format knows."""
    total_records: int | None = None
    """Rows in them, deleted ones included."""

    @property
    def readable(self) -> bool:
        """Readers can use it at once."""
        return self.readable_snapshot_id in (None, self.snapshot_id)


class LakeCommitter(Protocol[W_contra, C]):
    """The driver's side of one table. Not thread-safe; made for a round, closed after it."""

    def prepare_table(self) -> None:
        """Create the lake table or let it follow the table; changes nothing if it fits.

        `LakeTableError` when it was changed from outside in a way that does not fit. A lake table
        that belonged to another table of this name is renamed, never emptied.
        """
        ...

    def writer_handle(self, fresh: Collection[str] = ()) -> bytes:
        """What writers of this round need; call after `prepare_table`.

        To writers of `fresh` partitions, by name, the lake has no rows of these.
        """
        ...

    def newest(self) -> CommittedSnapshot | None:
        """The newest snapshot of ours for exactly this table, None if there is none."""
        ...

    def to_committable(self, results: Sequence[W_contra]) -> C:
        """All results of a round as one thing to commit."""
        ...

    def commit(
        self,
        committable: C,
        properties: Mapping[str, str],
        expected: int | None,
        fresh: Collection[str] = (),
    ) -> CommitResult:
        """One snapshot with all files and these properties, if `expected` is the newest of ours.

        Of `fresh` partitions, by name, it has the files of this round and no others.
        """
        ...

    def abort(self, committable: C) -> None:
        """Remove files of a round that was certainly not committed."""
        ...

    def close(self) -> None:
        """Let go of the catalog."""
        ...


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A file of a snapshot, for engines that read files themselves."""

    path: str
    """Where it is."""
    records: int
    """Rows in it, deleted ones included."""
    size: int
    """Bytes."""
    deletes: tuple[str, ...] = ()
    """Position delete files (`file_path`, `pos`) that apply to it."""
    bucket: int | None = None
    """The bucket that all its rows are of, where the layout of the lake says so."""


@dataclass(frozen=True, slots=True)
class LakeScan:
    """A snapshot, planned: what to read, and how to reach it."""

    snapshot_id: int
    """The snapshot."""
    files: tuple[LakeFile, ...]
    """Its files after pruning."""
    plan: Any = field(default=None, compare=False, repr=False)
    """The format's own, for `LakeReader.read`."""


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
        ...

    def read(self, scan: LakeScan, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Live rows with exactly these columns, types as in `table.schema.arrow`.

        System columns may be asked for too. Columns that a file does not have are null.
        """
        ...

    def close(self) -> None:
        """Let go of the catalog."""
        ...


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found."""

    looked_at: int
    """Files in the table's directory."""
    removed: int
    """Orphans that were removed."""
    removed_bytes: int
    """Their size."""


class LakeMaintenance(Protocol):
    """Housekeeping of one lake table. Runs only where its table's rounds run, between them."""

    def compact(self, expected: int | None) -> CommitResult | None:
        """Merge small files and apply deletes; None when there was nothing to do.

        The new snapshot repeats the properties of the newest one of ours, and is refused like a
        commit when `expected` is not that one.
        """
        ...

    def expire(self, older_than_ms: int, keep: Collection[int]) -> int:
        """Expire snapshots older than that, never those in `keep` nor the newest one of ours."""
        ...

    def sweep(self, older_than_ms: int) -> SweepReport:
        """Remove files older than that which no snapshot references."""
        ...

    def close(self) -> None:
        """Let go of the catalog."""
        ...


class LakeTieringFactory(Protocol[W, C]):
    """A lake format."""

    format: str
    """Its name, as `table.datalake.format` has it."""
    capabilities: LakeCapabilities
    """What it can do."""
    write_result_serde: VersionedSerde[W]
    """Write results on their way from task to driver."""
    committable_serde: VersionedSerde[C]
    """Committables, should one have to be kept."""

    def validate_table(self, table: TableInfo) -> None:
        """`LakeTableError` when the format cannot hold such a table."""
        ...

    def create_writer(self, context: WriterContext) -> LakeWriter[W]:
        """The writer of one bucket and round."""
        ...

    def create_committer(self, context: CommitterContext) -> LakeCommitter[W, C]:
        """The committer of one table."""
        ...

    def create_reader(self, context: CommitterContext) -> LakeReader:
        """A reader of one table; `LakeTableError` when there is no lake table yet."""
        ...

    def create_maintenance(self, context: CommitterContext) -> LakeMaintenance:
        """Housekeeping for one table."""
        ...


class VersionedSerde(Generic[T]):
    """A value as bytes that say which format and version wrote them.

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
    """The factory of a format; `ConfigError` names what is installed."""
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if format not in found:
        raise ConfigError(
            f"lake format {format!r} is not installed; installed: "
            f"{', '.join(sorted(found)) or 'none'}"
        )
    try:
        return cast("LakeTieringFactory[Any, Any]", found[format].load()())
    except ImportError as problem:
        raise ConfigError(
            f"lake format {format} needs packages that are not installed ({problem}); "
            f"install zufluss[{format}]"
        ) from problem


def catalog_properties(
    table: TableInfo, format: str, overrides: Mapping[str, str] | None = None
) -> dict[str, str]:
    """How to reach the lake of a table: what the cluster says, replaced by `overrides`.

    The cluster hands its `datalake.<format>.*` out as `table.datalake.<format>.*` of every table.
    """
    prefix = f"table.datalake.{format}."
    properties = table.descriptor.properties
    told = {k.removeprefix(prefix): v for k, v in properties.items() if k.startswith(prefix)}
    return told | dict(overrides or {})


def table_identity(table: TableInfo) -> dict[str, str]:
    """The properties by which a lake table and its snapshots belong to exactly this table."""
    return {TABLE_ID_KEY: str(table.table_id), TABLE_CREATED_KEY: str(table.created_time)}


def offsets_to_json(offsets: Mapping[TableBucket, int]) -> list[list[int | None]]:
    """Offsets as they stand in a snapshot's properties."""
    return [[b.partition_id, b.bucket_id, o] for b, o in sorted(offsets.items(), key=_order)]


def offsets_from_json(
    table_id: int, rows: Iterable[Sequence[int | None]]
) -> dict[TableBucket, int]:
    """The other way."""
    return {TableBucket(table_id, p, cast(int, b)): cast(int, o) for p, b, o in rows}


def _order(item: tuple[TableBucket, int]) -> tuple[int, int]:
    bucket = item[0]
    return (-1 if bucket.partition_id is None else bucket.partition_id, bucket.bucket_id)
