"""Commits rounds to an Iceberg table, and creates and alters that table to fit ours.

A snapshot of ours carries the commit user and the table's identity. The newest one is found by
walking the parents of the current snapshot; foreign commits may lie in between and on top. Foreign
expiry may remove it, so every commit of ours also writes its id into the table property
`zufluss.newest`, in the same atomic commit. The property counts only when its snapshot is gone: a
table that was rolled back to an older snapshot of ours has that one as newest.

| key of `zufluss.newest` (JSON) | value |
|---|---|
| snapshot | the snapshot's id |
| timestamp | epoch milliseconds |
| properties | the properties of the snapshot |

A snapshot of Fluss's own tiering job has the same commit user and no identity. In a lake table of
ours it counts as one of ours, because the job tiers the table on behalf of the same cluster.

A lake table without any snapshot may be there before its table. One of ours belongs to a CREATE
TABLE that did not end, or to a table that was dropped before it had rows: it is dropped. It cannot
be taken over, because a round of the old table might still commit to it. One that somebody else
created is taken over if it is exactly what would be created.

The commit empties fresh partitions of all their rows, foreign rows included, as if these rows had
been written before the partition was created.

Position deletes name data files. If another writer has replaced such a file since the round began,
the commit is refused; otherwise the deleted rows would come back.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    TableAlreadyExistsError,
)
from pyiceberg.io import load_file_io
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from sqlalchemy.exc import IntegrityError

from zufluss.clock import ClockMs, wall_ms
from zufluss.lake.base import (
    COMMIT_USER,
    COMMIT_USER_KEY,
    TABLE_CREATED_KEY,
    TABLE_ID_KEY,
    CommitResult,
    CommittedSnapshot,
    CommitterContext,
    LakeCommitRefusedError,
    LakeError,
    LakeTableError,
    table_identity,
)
from zufluss.lake.iceberg import schema as s
from zufluss.lake.iceberg.catalog import answered, file_properties, load, places_by_name
from zufluss.lake.iceberg.commit import (
    AppliedCommit,
    commit_snapshot,
    load_table,
    new_snapshot_id,
    sync_metadata,
)
from zufluss.lake.iceberg.handle import (
    POSITION_DELETES,
    IcebergCommittable,
    IcebergWriteResult,
    PartitionValues,
    WriterHandle,
)
from zufluss.lake.iceberg.orphans import file_system, list_files, plain_path
from zufluss.lake.iceberg.private import (
    SnapshotChange,
    delete_quietly,
    is_data,
    live_entries,
    live_files,
)
from zufluss.lake.iceberg.rules import validate
from zufluss.model.lake import BUCKET_COLUMN
from zufluss.model.table import TableInfo

NEWEST_KEY = "zufluss.newest"
_COUNTED = re.compile(
    r"(added|deleted|removed|total|changed|manifests|entries)-|partition(s\.|-summaries)"
)
"""Keys of a snapshot's summary that Iceberg counts itself."""
ATTEMPTS_MAX = 10
"""The most attempts to create or alter a lake table against concurrent changes."""


class IcebergCommitter:
    """Commits rounds of one table. Not thread-safe."""

    def __init__(self, context: CommitterContext, clock_ms: ClockMs = wall_ms) -> None:
        self._clock_ms = clock_ms
        self.table = context.table
        self._identifier = (context.table.path.database, context.table.path.table)
        self._catalog: Catalog = load(context.properties)
        self._properties = context.properties
        self._lake: Table | None = None

    def prepare_table(self) -> None:
        """Create the lake table, or alter it to fit the table."""
        validate(self.table)
        for _ in range(ATTEMPTS_MAX):
            try:
                with answered(f"lake table {self.table.path}"):
                    self._lake = self._prepared()
                return
            except (CommitFailedException, TableAlreadyExistsError):
                continue  # another writer changed the table: read it again
        raise LakeError(f"lake table {self.table.path} is changed by other writers all the time")

    def writer_handle(self, fresh: Collection[str] = ()) -> bytes:
        """The handle for writers of this round, without live files of `fresh` partitions."""
        lake = self._loaded()
        metadata, io = lake.metadata, lake.io
        base = metadata.current_snapshot()
        keys = metadata.schema().identifier_field_ids
        files = live_files(io, base, keys) if self.table.has_primary_key else {}
        emptied = s.partitions_values(self.table, fresh)
        location = metadata.location.rstrip("/")
        return WriterHandle(
            schema=metadata.schema().model_dump_json(),
            spec=metadata.spec().model_dump_json(),
            location=location,
            data_location=metadata.properties.get("write.data.path", f"{location}/data"),
            io=file_properties(io.properties),
            properties={k: v for k, v in metadata.properties.items() if k != NEWEST_KEY},
            base_snapshot_id=base.snapshot_id if base else None,
            files={at: live for at, live in files.items() if at[:-1] not in emptied},
        ).to_bytes()

    def newest(self) -> CommittedSnapshot | None:
        """The newest snapshot of ours for exactly this table; asks the catalog.

        It is made durable: its writer may have been killed before it could do so.
        """
        self._lake = load_table(self._catalog, self._identifier)
        if self._lake is None or not owned(self._lake.metadata, self.table):
            return None
        with answered(f"lake table {'.'.join(self._identifier)}"):
            sync_metadata(self._lake)
        return newest_snapshot(self._lake.metadata, self.table)

    def to_committable(self, results: Sequence[IcebergWriteResult]) -> IcebergCommittable:
        """All files of a round; their writers must have had the same base."""
        bases = {result.base_snapshot_id for result in results}
        if len(bases) > 1:
            raise LakeError(f"results of one round have the base snapshots {bases}; need one")
        files = [file for result in results for file in result.files]
        paths = {file.path for file in files}
        if len(paths) != len(files):
            raise LakeError("results of one round name a file twice; each must be there once")
        return IcebergCommittable(tuple(files), bases.pop() if bases else None)

    def commit(
        self,
        committable: IcebergCommittable,
        properties: Mapping[str, str],
        expected: int | None,
        fresh: Collection[str] = (),
    ) -> CommitResult:
        """Commit one snapshot with all files and these properties on top of `expected`."""
        snapshot_id = new_snapshot_id()
        emptied = s.partitions_values(self.table, fresh)
        change = round_change(
            self.table, committable, properties, snapshot_id, self._clock_ms(), emptied
        )
        done = self._commit(change, committable, expected, snapshot_id)
        self._lake = done.table
        return done.result()

    def abort(self, committable: IcebergCommittable) -> None:
        """Remove files of a round that was certainly not committed; never one the lake uses."""
        lake = load_table(self._catalog, self._identifier)
        if lake is None:
            return
        used: set[str] = set()
        if owned(lake.metadata, self.table):
            entries = live_entries(lake.io, lake.metadata.current_snapshot())
            used = {entry.data_file.file_path for entry in entries}
        for file in committable.files:
            if file.path not in used:
                delete_quietly(lake.io, file.path)

    def close(self) -> None:
        """Release the table; catalogs are shared by the process."""
        self._lake = None

    def _commit(
        self,
        change: SnapshotChange,
        committable: IcebergCommittable,
        expected: int | None,
        snapshot_id: int,
    ) -> AppliedCommit:
        deletes = {f.referenced_data_file for f in committable.files if f.referenced_data_file}

        def check(lake: Table) -> None:
            check_fence(lake.metadata, self.table, expected)
            if s.missing_columns(self.table, lake.metadata):
                raise LakeTableError(f"lake table {self.table.path} lost columns in mid-round")
            head = lake.metadata.current_snapshot()
            if deletes and (head is None or head.snapshot_id != committable.base_snapshot_id):
                check_live(lake, deletes)

        return commit_snapshot(self._loaded(), change, check, snapshot_id)

    def _loaded(self) -> Table:
        lake = self._lake or load_table(self._catalog, self._identifier)
        if lake is None:
            raise LakeTableError(f"lake table {self.table.path} does not exist; prepare it first")
        self._lake = lake
        return lake

    def _prepared(self) -> Table:
        lake = load_table(self._catalog, self._identifier)
        location = None
        if lake is not None and not owned(lake.metadata, self.table):
            if TABLE_ID_KEY not in lake.metadata.properties:
                return self._adopt(lake)
            location = self._moved_away(lake)
            lake = None
        if lake is None:
            return self._create(location)
        return self._follow(lake)

    def _create(self, location: str | None) -> Table:
        schema = s.iceberg_schema(self.table)
        try:
            self._catalog.create_namespace(self._identifier[:1])
        except (NamespaceAlreadyExistsError, IntegrityError):
            pass  # the usual case: another table created the namespace
        return self._catalog.create_table(
            self._identifier,
            schema=schema,
            location=location or self._own_location(),
            partition_spec=s.partition_spec(self.table, schema),
            sort_order=s.sort_order(schema),
            properties={**s.table_properties(self.table), "format-version": "2"},
        )

    def _own_location(self) -> str | None:
        """A location for the lake table; another one if the usual location is in use."""
        warehouse = self._properties.get("warehouse")
        if warehouse is None or places_by_name(self._catalog):
            return None
        usual = f"{warehouse.rstrip('/')}/{'/'.join(self._identifier)}"
        earlier = f"{self._identifier[1]}__"
        names = [identifier[-1] for identifier in self._catalog.list_tables(self._identifier[:1])]
        if any(name.startswith(earlier) for name in names) or self._is_taken(usual):
            return self._beside(usual)
        return None

    def _is_taken(self, location: str) -> bool:
        """Whether the location has metadata of a renamed table, or of another catalog's table."""
        try:
            system = file_system(load_file_io(self._catalog.properties, location), location)
        except LakeError:
            return False  # a location that cannot be listed is not swept
        return any(True for _ in list_files(system, plain_path(f"{location}/metadata")))

    def _beside(self, location: str) -> str:
        return f"{location.rstrip('/')}-{self.table.table_id}-{self.table.created_time}"

    def _not_adoptable(self, metadata: TableMetadata) -> str | None:
        """Why a lake table of somebody else cannot become that of this table; None if it can."""
        if metadata.snapshots:
            return "it has rows or snapshots already"
        expected, actual = s.iceberg_schema(self.table), metadata.schema()
        names = [field.name for field in expected.fields]
        if [field.name for field in actual.fields] != names:
            return f"its columns are {', '.join(actual.column_names)}, not {', '.join(names)}"
        if actual.identifier_field_names() != expected.identifier_field_names():
            return "its identifier fields are not the primary key"
        if not s.sorted_alike(metadata, expected):
            return f"it is sorted by {metadata.sort_order()}, not by __offset"
        for field in expected.fields:
            if actual.find_field(field.name).required != field.required:
                return f"column {field.name} is {'optional' if field.required else 'required'}"
        try:
            s.missing_columns(self.table, metadata)
        except LakeTableError as problem:
            return problem.message
        return None

    def _adopt(self, lake: Table) -> Table:
        """Make somebody else's lake table that of this table, if it is empty and fits."""
        reason = self._not_adoptable(lake.metadata)
        if reason is not None:
            raise LakeTableError(
                f"{self.table.path} exists in the lake, was not made by zufluss, and cannot be "
                f"taken over: {reason}; rename or drop it there, or name the table differently"
            )
        updates = s.table_properties(self.table)
        stale = {key for key in lake.metadata.properties if key.startswith(s.FLUSS_PREFIX)}
        with lake.transaction() as transaction:
            transaction.set_properties(updates)
            if stale - set(updates):
                transaction.remove_properties(*sorted(stale - set(updates)))
        return lake

    def _moved_away(self, lake: Table) -> str | None:
        """Rename the lake table of an earlier table of this name, or drop it if it has no snapshot;
        returns a new location."""
        properties = lake.metadata.properties
        old_id, old_created = properties[TABLE_ID_KEY], properties[TABLE_CREATED_KEY]
        if (int(old_created), int(old_id)) > (self.table.created_time, self.table.table_id):
            raise LakeTableError(
                f"lake table {self.table.path} belongs to the newer table {old_id}; table "
                f"{self.table.table_id} of this name was dropped and cannot be tiered any more"
            )
        if not lake.metadata.snapshots and NEWEST_KEY not in properties:
            self._catalog.drop_table(self._identifier)
            return None
        if places_by_name(self._catalog):
            raise LakeTableError(
                f"lake table {self.table.path} belongs to the earlier table {old_id} of this name, "
                "and a catalog of type hadoop cannot rename it; drop the lake table with an engine "
                "that reads it, or name the table differently"
            )
        new_name = f"{self._identifier[1]}__{old_id}_{old_created}"
        self._catalog.rename_table(self._identifier, (self._identifier[0], new_name))
        directory, _, _name = lake.metadata.location.rstrip("/").rpartition("/")
        return self._beside(f"{directory}/{self._identifier[1]}")

    def _follow(self, lake: Table) -> Table:
        """Add columns and properties that were added to the table."""
        missing = s.missing_columns(self.table, lake.metadata)
        updates, removals = s.changed_properties(self.table, lake.metadata.properties)
        if not (missing or updates or removals):
            return lake
        with lake.transaction() as transaction:
            if missing:
                with transaction.update_schema() as update:
                    for name in missing:
                        column = self.table.schema.column(name)
                        type_ = s.iceberg_type(column.data_type, itertools.count(1).__next__)
                        update.add_column(name, type_, doc=column.comment)
                        update.move_before(name, BUCKET_COLUMN)
            if updates:
                transaction.set_properties(updates)
            if removals:
                transaction.remove_properties(*sorted(removals))
        return lake


def round_change(
    table: TableInfo,
    committable: IcebergCommittable,
    properties: Mapping[str, str],
    snapshot_id: int,
    now_ms: int,
    emptied: frozenset[PartitionValues] = frozenset(),
) -> SnapshotChange:
    """The change of the lake table that commits a round, with its properties."""
    marked = {**properties, COMMIT_USER_KEY: COMMIT_USER, **table_identity(table)}
    deletes = any(file.kind == POSITION_DELETES for file in committable.files)
    return SnapshotChange(
        operation="overwrite" if deletes else "append",
        added=committable.files,
        emptied=emptied,
        properties=marked,
        table_properties={NEWEST_KEY: newest_json(snapshot_id, marked, now_ms)},
    )


def newest_json(snapshot_id: int, properties: Mapping[str, str], now_ms: int) -> str:
    """The table property that names the newest snapshot of ours."""
    note = {"snapshot": snapshot_id, "timestamp": now_ms, "properties": dict(properties)}
    return json.dumps(note, separators=(",", ":"))


def owned(metadata: TableMetadata, table: TableInfo) -> bool:
    """Whether the lake table belongs to exactly this table."""
    return _matches(metadata.properties, table)


def newest_snapshot(metadata: TableMetadata, table: TableInfo) -> CommittedSnapshot | None:
    """The newest snapshot of ours in a table's history."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    at = metadata.current_snapshot_id
    if at is None:
        return None  # replaced from outside: no snapshot of it is ours, whatever its properties say
    while at is not None and at in by_id:
        snapshot = by_id[at]
        summary = snapshot.summary.additional_properties if snapshot.summary else {}
        by_fluss = TABLE_ID_KEY not in summary and owned(metadata, table)
        if summary.get(COMMIT_USER_KEY) == COMMIT_USER and (by_fluss or _matches(summary, table)):
            properties = {key: v for key, v in summary.items() if not _COUNTED.match(key)}
            return CommittedSnapshot(at, properties, snapshot.timestamp_ms)
        at = snapshot.parent_snapshot_id
    expired = _noted_newest(metadata, table)
    return expired if expired is not None and expired.snapshot_id not in by_id else None


def check_fence(metadata: TableMetadata, table: TableInfo, expected: int | None) -> None:
    """`LakeCommitRefusedError` unless `expected` is the newest snapshot of ours."""
    if not owned(metadata, table):
        raise LakeCommitRefusedError(
            f"lake table {table.path} belongs to another table of this name by now; this table "
            "was dropped, nothing was committed"
        )
    newest = newest_snapshot(metadata, table)
    actual = newest.snapshot_id if newest else None
    if actual != expected:
        raise LakeCommitRefusedError(
            f"the newest tiering snapshot of {table.path} is {actual}, not {expected}: another "
            "tiering service committed in between, nothing was committed; start a new round"
        )


def check_live(lake: Table, paths: set[str]) -> None:
    """`LakeCommitRefusedError` unless all these data files are in the current snapshot."""
    entries = live_entries(lake.io, lake.metadata.current_snapshot())
    gone = paths - {entry.data_file.file_path for entry in entries if is_data(entry)}
    if gone:
        raise LakeCommitRefusedError(
            f"{len(gone)} data files of {'.'.join(lake.name())} that the round deletes rows of "
            f"were replaced by another writer ({min(gone)} is one); nothing was committed, "
            "plan again"
        )


def _matches(properties: Mapping[str, str], table: TableInfo) -> bool:
    return all(properties.get(key) == value for key, value in table_identity(table).items())


def _noted_newest(metadata: TableMetadata, table: TableInfo) -> CommittedSnapshot | None:
    """The newest snapshot of ours according to the table property."""
    text = metadata.properties.get(NEWEST_KEY)
    if text is None:
        return None
    note = json.loads(text)
    if not _matches(note["properties"], table):
        return None
    noted = note["snapshot"], note["properties"], note["timestamp"]
    return CommittedSnapshot(*noted, expired=metadata.snapshot_by_id(noted[0]) is None)
