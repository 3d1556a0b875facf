"""Compaction of Iceberg data files: chooses files and rewrites them.

Every round leaves at least one small file per bucket, and delete files beside older ones. Planning
looks at one bucket of one partition at a time, its files in the order of their offsets:

| what | becomes | when |
|---|---|---|
| neighbours that are small | few large files | `min-input-files` of them, of similar size |
| a file with many rows deleted | a file without them, or none | `delete-ratio-threshold` |
| a file with many delete files | the same file with one | `delete-file-threshold` |

Small is below three quarters of the size that files should have: `write.target-file-size-bytes`, or
`read.split.target-size` where that is less. Sizes are similar when no file is larger than all newer
ones of the group together, times `SIZE_RATIO`: so a row is written a logarithmic number of times
over its life and not once per round. Neighbours stay neighbours, so rows stay in offset order.

The thresholds have the names of Iceberg's own `rewrite_data_files`, as table properties under
`compaction.` (`iceberg.compaction.` in the table's custom properties).

Files are read batch by batch and written through the same writer as rounds; memory holds one row
group, and one byte per row of one file that has deletes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from zufluss.lake.base import LakeTableError
from zufluss.lake.iceberg.deletes import (
    DELETE_SCHEMA,
    ReplacedRows,
    delete_table,
    deleted_positions,
)
from zufluss.lake.iceberg.files import LakeFiles
from zufluss.lake.iceberg.handle import (
    DATA,
    POSITION_DELETES,
    FileKind,
    FileWritten,
    LiveFile,
    PartitionValues,
)
from zufluss.lake.iceberg.parquet import columns_in_file, convert_table
from zufluss.lake.iceberg.statistics import bound_value
from zufluss.lake.iceberg.writer import RollingWriter

SIZE_RATIO: Final = 2
"""A file is merged with newer ones if it is at most this many times as large as all of them."""
SMALL_FRACTION: Final = 0.75
"""Files below this fraction of the target size are small, as in Iceberg."""
SMALL_FILES_MAX: Final = 30
"""More neighbouring small files than this are merged, whatever their sizes."""
BATCH_ROWS: Final = 65_536

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class CompactionOptions:
    """The thresholds of compaction."""

    target_bytes: int = 128 << 20
    """The size that files should have."""
    files_min: int = 3
    """Small files that are worth merging."""
    delete_ratio: float = 0.3
    """The part of a file's rows that must be deleted for a rewrite."""
    delete_files: int = 10
    """Delete files of a data file that are worth merging."""

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> CompactionOptions:
        """The options of a lake table; `LakeTableError` names an invalid one."""
        target = property_number(properties, "write.target-file-size-bytes", 512 << 20, int, 1)
        split = property_number(properties, "read.split.target-size", 128 << 20, int, 1)
        prefix = "compaction."
        return cls(
            min(target, split),
            property_number(properties, f"{prefix}min-input-files", 3, int, 2),
            property_number(properties, f"{prefix}delete-ratio-threshold", 0.3, float, 0.0),
            property_number(properties, f"{prefix}delete-file-threshold", 10, int, 2),
        )

    def is_small(self, file: LiveFile) -> bool:
        """Whether the file is small enough to be merged with its neighbours."""
        return file.size < self.target_bytes * SMALL_FRACTION

    def is_worn(self, file: LiveFile) -> bool:
        """Whether so many rows of the file are deleted that it should be rewritten."""
        return file.deleted > 0 and file.deleted >= self.delete_ratio * file.records


def property_number(
    properties: Mapping[str, str],
    key: str,
    default: Number,
    parse: Callable[[str], Number],
    smallest: Number,
) -> Number:
    """A numeric property of a lake table; `LakeTableError` if it is invalid."""
    text = properties.get(key)
    try:
        value = default if text is None else parse(text)
    except ValueError:
        value = smallest - 1
    if value < smallest:
        raise LakeTableError(f"table property {key} is {text!r}; give a number from {smallest}")
    return value


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The plan for the files of one bucket."""

    partition: PartitionValues
    """The partition values of the bucket."""
    rewrites: tuple[tuple[LiveFile, ...], ...] = ()
    """Groups of files that become new ones, each in the order of offsets."""
    merges: tuple[LiveFile, ...] = ()
    """Files that stay, and whose delete files become one."""

    @property
    def bytes(self) -> int:
        """The approximate number of bytes that the plan reads."""
        return sum(file.size for group in self.rewrites for file in group)


def plan_bucket(
    partition: PartitionValues,
    files: Sequence[LiveFile],
    offset_id: int,
    options: CompactionOptions,
) -> BucketPlan:
    """The plan for a bucket's files; the bounds of field `offset_id` order them."""
    ordered = sorted(files, key=lambda file: (_first_offset(file, offset_id), file.path))
    groups: list[tuple[LiveFile, ...]] = []
    for run in _small_runs(ordered, options):
        groups += _similar(run, options)
    taken = {file.path for group in groups for file in group}
    rest = [file for file in ordered if file.path not in taken]
    groups += [(file,) for file in rest if options.is_worn(file)]
    merges = [
        file
        for file in rest
        if len(file.deletes) >= options.delete_files and not options.is_worn(file)
    ]
    return BucketPlan(partition, tuple(groups), tuple(merges))


def _first_offset(file: LiveFile, offset_id: int) -> int:
    bound = file.lower_bounds.get(offset_id)
    return -1 if bound is None else int(bound_value(bound, pa.int64()))


def _small_runs(files: Sequence[LiveFile], options: CompactionOptions) -> Iterator[list[LiveFile]]:
    """Neighbours that are all small."""
    run: list[LiveFile] = []
    for file in files:
        if options.is_small(file):
            run.append(file)
        else:
            yield run
            run = []
    yield run


def _similar(run: list[LiveFile], options: CompactionOptions) -> list[tuple[LiveFile, ...]]:
    """Groups of neighbours of similar size, large enough to be worth it; newest first."""
    if len(run) > SMALL_FILES_MAX:
        return [tuple(run)]
    groups = []
    stop = len(run)
    while stop >= options.files_min:
        start, total = stop - 1, run[stop - 1].size
        while start > 0 and run[start - 1].size <= total * SIZE_RATIO:
            start -= 1
            total += run[start].size
        if stop - start >= options.files_min:
            groups.append(tuple(run[start:stop]))
            stop = start
        else:
            stop -= 1
    return groups


def live_batches(files: LakeFiles, file: LiveFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a file that are not deleted, in a schema; columns the file lacks are null."""
    live = _live_mask(files, file)
    start = 0
    with files.open(file.path) as source, pq.ParquetFile(source) as parquet:
        names = columns_in_file(parquet.schema_arrow, schema)
        for batch in parquet.iter_batches(BATCH_ROWS, columns=list(names.values())):
            stop = start + batch.num_rows
            if live is not None:
                batch = batch.filter(pa.array(live[start:stop]))
            rows = pa.Table.from_batches([batch])
            rows = rows.rename_columns({there: name for name, there in names.items()})
            yield from convert_table(rows, schema).to_batches()
            start = stop


def _live_mask(files: LakeFiles, file: LiveFile) -> npt.NDArray[np.bool_] | None:
    if not file.deletes:
        return None
    live = np.ones(file.records, np.bool_)
    for path in file.deletes:
        live[deleted_positions(files, path, file.path)] = False
    return live


@dataclass
class Rewriter:
    """Carries out plans: writes new files that no snapshot references until the commit."""

    files: LakeFiles
    """The file system."""
    schema: pa.Schema
    """The table's schema, with field ids."""
    properties: Mapping[str, str]
    """The table's properties."""
    added: list[FileWritten] = field(default_factory=list)
    """Files written."""
    replaced: list[LiveFile] = field(default_factory=list)
    """Data files that they replace, delete files included."""
    merged: list[LiveFile] = field(default_factory=list)
    """Data files that stay, and whose delete files are replaced."""

    def carry_out(self, plan: BucketPlan) -> None:
        """Write the files of a bucket's plan."""
        for group in plan.rewrites:
            writer = self._writer(group[0], self.schema, "")
            self._write(
                writer, (b for f in group for b in live_batches(self.files, f, self.schema))
            )
            self._note(DATA, plan.partition, writer)
            self.replaced += group
        for file in plan.merges:
            self._merge_deletes(file, plan.partition)

    def finish(self) -> None:
        """Make all written files durable."""
        self.files.sync_all([file.path for file in self.added])

    def abort(self) -> None:
        """Remove all written files."""
        for file in self.added:
            self.files.remove(file.path)

    def _merge_deletes(self, file: LiveFile, partition: PartitionValues) -> None:
        live = _live_mask(self.files, file)
        assert live is not None, f"{file.path} was planned without delete files"
        rows = delete_table(ReplacedRows(file, np.flatnonzero(~live)))
        writer = self._writer(file, DELETE_SCHEMA, "-deletes")
        self._write(writer, iter(rows.to_batches()))
        self._note(POSITION_DELETES, partition, writer, file.path)
        self.merged.append(file)

    def _writer(self, beside: LiveFile, schema: pa.Schema, suffix: str) -> RollingWriter:
        """A writer of files in the directory of an existing file."""
        base = f"{beside.path.rpartition('/')[0]}/compacted-{uuid.uuid4()}"
        options = CompactionOptions.of(self.properties)
        more = {"write.target-file-size-bytes": str(options.target_bytes)}
        if suffix:
            more["write.metadata.metrics.default"] = "full"  # the data file's path, uncut
        return RollingWriter(self.files, schema, {**self.properties, **more}, base, suffix)

    def _write(self, writer: RollingWriter, batches: Iterator[pa.RecordBatch]) -> None:
        try:
            for batch in batches:
                writer.add(batch)
            writer.close()
        except BaseException:
            writer.abort()
            raise

    def _note(
        self,
        kind: FileKind,
        partition: PartitionValues,
        writer: RollingWriter,
        about: str | None = None,
    ) -> None:
        for path, size, statistics in writer.closed:
            written = FileWritten(
                kind=kind,
                path=path,
                size=size,
                partition=partition,
                referenced_data_file=about,
                **statistics,
            )
            self.added.append(written)
