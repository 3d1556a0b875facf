"""The only module that uses undocumented parts of pyiceberg: manifests, and writing a snapshot.

pyiceberg 0.12 cannot write delete files, nor fence a commit, so a snapshot is put together here and
handed to the catalog's public `commit_table`. Everything written is plain Iceberg v2, and local
files are synced: a catalog never names manifests that a power failure can take.

A `SnapshotChange` has the files to add (data, position deletes), the paths to remove, and the
properties of a snapshot. A `SnapshotBuilder` writes its manifests on top of a loaded table, again
for every attempt; the snapshot's id stays the same, so that a lost answer can be looked up.

| manifest | entries | sequence number |
|---|---|---|
| added data, added deletes | ADDED, written once for all attempts | inherited from the snapshot |
| a manifest that lost files | DELETED for those, EXISTING for the rest | its entries' own |
| a merged manifest | EXISTING | its entries' own |

A position delete applies to data files with a sequence number not above its own, so copied entries
keep their numbers. A commit merges `commit.manifest.min-count-to-merge` manifests of the same
content, spec and level (about the same number of files) into one. So the manifest list stays short,
and an entry is copied a logarithmic number of times over the life of a table.

Manifests never change, so their entries are cached by path. Cached entries are shared: read only.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table import DataScan, FileScanTask, Table
from pyiceberg.table.delete_file_index import PATH_FIELD_ID, DeleteFileIndex
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import (
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertCurrentSchemaId,
    AssertDefaultSpecId,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.typedef import Record

from zufluss.clock import ClockMs, wall_ms
from zufluss.lake.base import LakeCommitRefusedError, LakeTableError
from zufluss.lake.iceberg.files import LakeFiles
from zufluss.lake.iceberg.handle import (
    DATA,
    FileWritten,
    LiveFile,
    PartitionValue,
    PartitionValues,
)

MAIN = "main"
MERGE_COUNT_KEY = "commit.manifest.min-count-to-merge"
MERGE_COUNT = 30
"""Number of manifests of a level that are merged; a table property may change it."""
MANIFEST_BYTES_MAX = 8 * 1024 * 1024
"""A manifest of this size is not merged any more."""
CACHED_ENTRIES_MAX = 200_000
"""Manifest entries kept in memory, over all tables of the process."""
_CODEC_KEY = "write.avro.compression-codec"


def data_file(written: FileWritten, spec_id: int) -> DataFile:
    """A file as a manifest entry; position deletes get bounds that name their data file."""
    lower, upper = dict(written.lower_bounds), dict(written.upper_bounds)
    if written.kind != DATA:
        if written.referenced_data_file is None:
            raise ValueError(f"position delete file {written.path} names no data file")
        lower[PATH_FIELD_ID] = upper[PATH_FIELD_ID] = written.referenced_data_file.encode()
    is_data = written.kind == DATA
    file = DataFile.from_args(
        content=DataFileContent.DATA if is_data else DataFileContent.POSITION_DELETES,
        file_path=written.path,
        file_format=FileFormat.PARQUET,
        partition=Record(*written.partition),
        record_count=written.records,
        file_size_in_bytes=written.size,
        column_sizes=dict(written.column_sizes),
        value_counts=dict(written.value_counts),
        null_value_counts=dict(written.null_counts),
        nan_value_counts=dict(written.nan_counts),
        lower_bounds=lower,
        upper_bounds=upper,
        key_metadata=None,
        split_offsets=list(written.split_offsets) or None,
        equality_ids=None,
        sort_order_id=0 if is_data else None,
    )
    file.spec_id = spec_id
    return file


class _EntryCache:
    """Live entries by manifest path, least recently used first; bounded by entries in all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, tuple[ManifestEntry, ...]] = OrderedDict()
        self._entries = 0

    def get(self, io: FileIO, manifest: ManifestFile) -> tuple[ManifestEntry, ...]:
        with self._lock:
            entries = self._cached.get(manifest.manifest_path)
            if entries is not None:
                self._cached.move_to_end(manifest.manifest_path)
                return entries
        entries = tuple(manifest.fetch_manifest_entry(io))
        with self._lock:
            if manifest.manifest_path not in self._cached:
                self._cached[manifest.manifest_path] = entries
                self._entries += len(entries)
            while self._entries > CACHED_ENTRIES_MAX and len(self._cached) > 1:
                self._entries -= len(self._cached.popitem(last=False)[1])
        return entries


_entries = _EntryCache()


def manifest_entries(io: FileIO, manifest: ManifestFile) -> tuple[ManifestEntry, ...]:
    """The live entries of a manifest, sequence numbers filled in. Shared: read only."""
    return _entries.get(io, manifest)


def live_entries(io: FileIO, snapshot: Snapshot | None) -> Iterator[ManifestEntry]:
    """The live entries of a snapshot, data and delete files. Shared: read only."""
    for manifest in snapshot.manifests(io) if snapshot is not None else ():
        yield from manifest_entries(io, manifest)


def is_data(entry: ManifestEntry) -> bool:
    """Whether the entry is a data file, not a delete file."""
    return bool(entry.data_file.content == DataFileContent.DATA)


def is_position_deletes(entry: ManifestEntry) -> bool:
    """Whether the entry is a file of position deletes."""
    return bool(entry.data_file.content == DataFileContent.POSITION_DELETES)


def partition_of(file: DataFile) -> PartitionValues:
    """The partition values of a file as plain data."""
    return tuple(cast("PartitionValue", file.partition[i]) for i in range(len(file.partition)))


def live_files(
    io: FileIO, snapshot: Snapshot | None, key_ids: Iterable[int]
) -> dict[PartitionValues, tuple[LiveFile, ...]]:
    """Data files of a snapshot by partition, each with its delete files and bounds of the key.

    Equality deletes are left out: see `equality_deletes`.
    """
    entries = list(live_entries(io, snapshot))
    index = DeleteFileIndex()
    for entry in entries:
        if entry.data_file.content == DataFileContent.POSITION_DELETES:
            index.add_delete_file(entry, partition_key=entry.data_file.partition)
    ids = frozenset(key_ids)
    out: defaultdict[PartitionValues, list[LiveFile]] = defaultdict(list)
    for entry in filter(is_data, entries):
        file = entry.data_file
        deletes = index.for_data_file(entry.sequence_number or 0, file, file.partition)
        out[partition_of(file)].append(_live_file(file, deletes, ids))
    return {partition: tuple(files) for partition, files in out.items()}


def equality_deletes(
    io: FileIO, snapshot: Snapshot | None, key_ids: Iterable[int]
) -> dict[str, tuple[str, ...]]:
    """The equality delete files of each data file that has some, by its path.

    Fluss's tiering job writes them: they delete rows by the primary key, in files of the same
    partition with a smaller sequence number. `LakeTableError` if one has other columns.
    """
    keys = sorted(key_ids)
    found: defaultdict[tuple[int, PartitionValues], list[tuple[int, str]]] = defaultdict(list)
    for manifest in snapshot.manifests(io) if snapshot is not None else ():
        if manifest.content != ManifestContent.DELETES:
            continue
        for entry in manifest_entries(io, manifest):
            file = entry.data_file
            if file.content != DataFileContent.EQUALITY_DELETES:
                continue
            if sorted(file.equality_ids or ()) != keys:
                raise LakeTableError(
                    f"{file.file_path} deletes rows by the fields {file.equality_ids}, which are "
                    "not the primary key; rewrite the lake table's files with its writer's engine"
                )
            at = (file.spec_id, partition_of(file))
            found[at].append((entry.sequence_number or 0, file.file_path))
    out = {}
    for entry in filter(is_data, live_entries(io, snapshot) if found else ()):
        file, number = entry.data_file, entry.sequence_number or 0
        deletes = found.get((file.spec_id, partition_of(file)), ())
        out[file.file_path] = tuple(sorted(path for later, path in deletes if number < later))
    return {path: deletes for path, deletes in out.items() if deletes}


def plan_rows(scan: DataScan) -> Iterable[FileScanTask]:
    """The tasks of a scan, as if there were no equality deletes, at which pyiceberg gives up."""
    snapshot = scan.snapshot()
    if int(_total_equality_deletes(snapshot)) == 0:
        return scan.plan_files()
    assert snapshot is not None
    return scan._manifest_planner.plan_files(
        snapshot.manifests(scan.io),
        lambda entry: bool(entry.data_file.content != DataFileContent.EQUALITY_DELETES),
    )


def _total_equality_deletes(snapshot: Snapshot | None) -> str:
    summary = None if snapshot is None else snapshot.summary
    return "0" if summary is None else summary.get("total-equality-deletes") or "0"


def _live_file(file: DataFile, deletes: Iterable[DataFile], ids: frozenset[int]) -> LiveFile:
    by_path = sorted(deletes, key=lambda delete: delete.file_path)
    return LiveFile(
        path=file.file_path,
        records=file.record_count,
        size=file.file_size_in_bytes,
        deletes=tuple(delete.file_path for delete in by_path),
        deleted=sum(delete.record_count for delete in by_path),
        lower_bounds={i: b for i, b in (file.lower_bounds or {}).items() if i in ids},
        upper_bounds={i: b for i, b in (file.upper_bounds or {}).items() if i in ids},
    )


class _DeleteManifestWriter(ManifestWriterV2):
    """A manifest of delete files, which pyiceberg does not write."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


@dataclass(frozen=True, slots=True)
class SnapshotChange:
    """The change that a snapshot makes."""

    operation: Literal["append", "overwrite", "replace", "delete"]
    """The operation of the summary. `replace` changes no rows; an `append` that removes files
    becomes an `overwrite`."""
    added: Sequence[FileWritten] = ()
    """New files, all of the current partition spec."""
    removed: frozenset[str] = frozenset()
    """Paths of live data and delete files to take out."""
    emptied: frozenset[PartitionValues] = frozenset()
    """Partitions (values without the bucket) that lose all files they have at the commit."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Properties of the snapshot."""
    table_properties: Mapping[str, str] = field(default_factory=dict)
    """Table properties that the same commit sets."""


@dataclass(frozen=True, slots=True)
class StagedSnapshot:
    """A snapshot that is written but not committed."""

    snapshot: Snapshot
    """The snapshot."""
    requirements: tuple[TableRequirement, ...]
    """Requirements of the commit: same table, schema, partition spec and parent."""
    updates: tuple[TableUpdate, ...]
    """Updates of the commit."""


class SnapshotBuilder:
    """Writes the manifests of one change, attempt by attempt, always under the same id."""

    def __init__(
        self, change: SnapshotChange, snapshot_id: int, clock_ms: ClockMs = wall_ms
    ) -> None:
        self.change = change
        self.snapshot_id = snapshot_id
        self._clock_ms = clock_ms
        self._added: list[ManifestFile] | None = None
        self._scratch: list[str] = []
        self._kept: list[str] = []

    def stage(self, table: Table) -> StagedSnapshot:
        """Write the change on top of the table's current snapshot."""
        self._scratch += self._kept
        self._kept = []
        if self._added is None:
            self._added = self._write_added(table)
        metadata = table.metadata
        parent = metadata.current_snapshot()
        manifests = [m for m in parent.manifests(table.io) if _has_live(m)] if parent else []
        removed: list[DataFile] = []
        if self.change.removed or self.change.emptied:
            manifests, removed = self._without(table, manifests)
        manifests = self._merged(table, manifests)
        fields = {
            "snapshot-id": self.snapshot_id,
            "parent-snapshot-id": parent.snapshot_id if parent else None,
            "manifest-list": self._write_list(table, parent, self._added + manifests),
            "sequence-number": metadata.next_sequence_number(),
            "summary": self._summary(metadata, parent, removed),
            "schema-id": metadata.current_schema_id,
            # times of the history must not go back, even if this clock is behind
            "timestamp-ms": max(self._clock_ms(), metadata.last_updated_ms),
        }
        snapshot = Snapshot.model_validate(fields)
        written = [*self._kept, *(manifest.manifest_path for manifest in self._added)]
        LakeFiles({}, metadata.location).sync_all(written)
        return StagedSnapshot(snapshot, _requirements(metadata), self._updates(snapshot))

    def discard(self, io: FileIO, *, landed: bool) -> None:
        """Remove the files of failed attempts; all files if no attempt was applied."""
        doomed = list(self._scratch)
        if not landed:
            doomed += self._kept + [m.manifest_path for m in self._added or ()]
        for path in doomed:
            delete_quietly(io, path)
        self._scratch = []

    def _updates(self, snapshot: Snapshot) -> tuple[TableUpdate, ...]:
        updates: tuple[TableUpdate, ...] = (
            AddSnapshotUpdate(snapshot=snapshot),
            SetSnapshotRefUpdate.model_validate(
                {"ref-name": MAIN, "type": "branch", "snapshot-id": self.snapshot_id}
            ),
        )
        properties = dict(self.change.table_properties)
        return (*updates, SetPropertiesUpdate(updates=properties)) if properties else updates

    def _write_added(self, table: Table) -> list[ManifestFile]:
        spec_id = table.metadata.default_spec_id
        added = [data_file(written, spec_id) for written in self.change.added]
        out = []
        for content in (DataFileContent.DATA, DataFileContent.POSITION_DELETES):
            files = [file for file in added if file.content == content]
            if files:
                add = [_added_entry(self.snapshot_id, file) for file in files]
                out.append(self._write(table, spec_id, content == DataFileContent.DATA, add))
        return out

    def _write(
        self, table: Table, spec_id: int, data: bool, entries: Iterable[ManifestEntry]
    ) -> ManifestFile:
        metadata = table.metadata
        writer_of: Callable[..., ManifestWriter] = (
            ManifestWriterV2 if data else _DeleteManifestWriter
        )
        path = self._path(table, f"{uuid.uuid4()}-m0.avro")
        with writer_of(
            spec=metadata.specs()[spec_id],
            schema=metadata.schema(),
            output_file=table.io.new_output(path),
            snapshot_id=self.snapshot_id,
            avro_compression=_codec(metadata),
        ) as writer:
            for entry in entries:
                writer.add_entry(entry)
        return writer.to_manifest_file()

    def _rewrite(
        self, table: Table, like: ManifestFile, entries: Iterable[ManifestEntry]
    ) -> ManifestFile:
        data = like.content == ManifestContent.DATA
        manifest = self._write(table, like.partition_spec_id, data, entries)
        self._kept.append(manifest.manifest_path)
        return manifest

    def _write_list(
        self, table: Table, parent: Snapshot | None, manifests: list[ManifestFile]
    ) -> str:
        path = self._path(table, f"snap-{self.snapshot_id}-0-{uuid.uuid4()}.avro")
        self._kept.append(path)
        with write_manifest_list(
            format_version=2,
            output_file=table.io.new_output(path),
            snapshot_id=self.snapshot_id,
            parent_snapshot_id=parent.snapshot_id if parent else None,
            sequence_number=table.metadata.next_sequence_number(),
            avro_compression=_codec(table.metadata),
        ) as writer:
            writer.add_manifests(manifests)
        return path

    def _without(
        self, table: Table, manifests: list[ManifestFile]
    ) -> tuple[list[ManifestFile], list[DataFile]]:
        """The manifests without the removed files, and those files."""
        out: list[ManifestFile] = []
        removed: list[DataFile] = []
        for manifest in manifests:
            entries = manifest_entries(table.io, manifest)
            gone = [entry for entry in entries if self._goes(entry.data_file)]
            if not gone:
                out.append(manifest)
                continue
            removed += [entry.data_file for entry in gone]
            paths = {entry.data_file.file_path for entry in gone}
            rest = [_existing(e) for e in entries if e.data_file.file_path not in paths]
            deleted = [_deleted(self.snapshot_id, entry) for entry in gone]
            out.append(self._rewrite(table, manifest, rest + deleted))
        missing = self.change.removed - {file.file_path for file in removed}
        if missing:
            raise LakeCommitRefusedError(
                f"{len(missing)} files that the commit replaces are not in {'.'.join(table.name())}"
                f" any more ({min(missing)} is one); another writer replaced them, plan again"
            )
        return out, removed

    def _goes(self, file: DataFile) -> bool:
        change = self.change
        return file.file_path in change.removed or partition_of(file)[:-1] in change.emptied

    def _merged(self, table: Table, manifests: list[ManifestFile]) -> list[ManifestFile]:
        """The manifests, with every level that is full merged into one."""
        count_min = max(2, int(table.metadata.properties.get(MERGE_COUNT_KEY, MERGE_COUNT)))
        levels: defaultdict[tuple[Any, ...], list[ManifestFile]] = defaultdict(list)
        for manifest in manifests:
            levels[_level(manifest, self.snapshot_id, count_min)].append(manifest)
        doomed: set[str] = set()
        merged: list[ManifestFile] = []
        for key, level in levels.items():
            if key[0] and len(level) >= count_min:
                entries = [_existing(e) for m in level for e in manifest_entries(table.io, m)]
                merged.append(self._rewrite(table, level[0], entries))
                doomed.update(m.manifest_path for m in level)
        return merged + [m for m in manifests if m.manifest_path not in doomed]

    def _summary(
        self, metadata: TableMetadata, parent: Snapshot | None, removed: Sequence[DataFile]
    ) -> Summary:
        limit = int(metadata.properties.get("write.summary.partition-limit", "0"))
        collector = SnapshotSummaryCollector(partition_summary_limit=limit)
        schema, specs = metadata.schema(), metadata.specs()
        for written in self.change.added:
            file = data_file(written, metadata.default_spec_id)
            collector.add_file(file, schema=schema, partition_spec=specs[file.spec_id])
        for file in removed:
            collector.remove_file(file, schema=schema, partition_spec=specs[file.spec_id])
        counted = Summary(Operation.OVERWRITE, **{**self.change.properties, **collector.build()})
        totals = update_snapshot_summaries(counted, parent.summary if parent else None)
        replaces = self.change.operation == "append" and removed
        operation = Operation.OVERWRITE if replaces else Operation(self.change.operation)
        return Summary(operation, **totals.additional_properties)

    def _path(self, table: Table, name: str) -> str:
        return table.location_provider().new_metadata_location(name)


def delete_quietly(io: FileIO, path: str) -> bool:
    """Delete an unused file; a file that cannot be deleted is left to the sweep."""
    try:
        io.delete(path)
    except Exception:  # of any library: a commit that was made must not look like a failure
        return False
    return True


def delete_old_metadata(io: FileIO, before: TableMetadata, after: TableMetadata) -> None:
    """Delete metadata files that left the metadata log with this commit, if the table says so."""
    if after.properties.get("write.metadata.delete-after-commit.enabled", "").lower() != "true":
        return
    retained = {log.metadata_file for log in after.metadata_log}
    for log in before.metadata_log:
        if log.metadata_file not in retained:
            delete_quietly(io, log.metadata_file)


class _Shared(list[Any]):
    """A list whose items never change, so that copying the metadata around it copies no item."""

    def __deepcopy__(self, _memo: Any) -> _Shared:
        return _Shared(self)

    def __add__(self, other: Any) -> Any:
        return _Shared(super().__add__(other))


def shared(metadata: TableMetadata) -> TableMetadata:
    """Metadata that is cheap to copy: pyiceberg copies all snapshots deeply for every commit."""
    names = ("snapshots", "snapshot_log", "metadata_log", "schemas")
    return metadata.model_copy(update={name: _Shared(getattr(metadata, name)) for name in names})


def _requirements(metadata: TableMetadata) -> tuple[TableRequirement, ...]:
    head = metadata.current_snapshot()
    return (
        AssertTableUUID(uuid=metadata.table_uuid),
        AssertRefSnapshotId.model_validate(
            {"ref": MAIN, "snapshot-id": head.snapshot_id if head else None}
        ),
        AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
        AssertDefaultSpecId.model_validate({"default-spec-id": metadata.default_spec_id}),
    )


def _codec(metadata: TableMetadata) -> Any:
    return metadata.properties.get(_CODEC_KEY, "gzip")


def _has_live(manifest: ManifestFile) -> bool:
    return manifest.has_added_files() or manifest.has_existing_files()


def _level(manifest: ManifestFile, snapshot_id: int, fan_in: int) -> tuple[Any, ...]:
    """The key of manifests that may be merged together; its first item says if any may."""
    files = (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)
    small = manifest.manifest_length < MANIFEST_BYTES_MAX
    mergeable = small and manifest.added_snapshot_id != snapshot_id
    level = int(math.log(max(files, 1), fan_in))
    return mergeable, manifest.content, manifest.partition_spec_id, level


def _added_entry(snapshot_id: int, file: DataFile) -> ManifestEntry:
    return ManifestEntry.from_args(
        status=ManifestEntryStatus.ADDED,
        snapshot_id=snapshot_id,
        sequence_number=None,
        file_sequence_number=None,
        data_file=file,
    )


def _copied(
    entry: ManifestEntry, status: ManifestEntryStatus, snapshot_id: int | None
) -> ManifestEntry:
    return ManifestEntry.from_args(
        status=status,
        snapshot_id=snapshot_id,
        sequence_number=entry.sequence_number,
        file_sequence_number=entry.file_sequence_number,
        data_file=entry.data_file,
    )


def _existing(entry: ManifestEntry) -> ManifestEntry:
    return _copied(entry, ManifestEntryStatus.EXISTING, entry.snapshot_id)


def _deleted(snapshot_id: int, entry: ManifestEntry) -> ManifestEntry:
    return _copied(entry, ManifestEntryStatus.DELETED, snapshot_id)
