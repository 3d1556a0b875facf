"""Reads snapshots of a lake table as Arrow batches, files and row groups in parallel.

pyiceberg plans a scan: it prunes files by partition and column bounds, and pairs data files with
their position deletes. It knows no equality deletes, which Fluss's tiering job leaves behind; they
become deleted positions here, by a look at the key columns of both files. Files are read here: a
few threads read row groups ahead of the consumer, find columns by field id (columns that a file
lacks are null), drop deleted positions, and convert the types back to those of the table.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.table import Table

from zufluss.lake.base import CommitterContext, LakeFile, LakeScan, LakeTableError
from zufluss.lake.iceberg.catalog import load
from zufluss.lake.iceberg.commit import load_table
from zufluss.lake.iceberg.committer import owned
from zufluss.lake.iceberg.deletes import KeyLookup, Positions, deleted_positions
from zufluss.lake.iceberg.files import LakeFiles
from zufluss.lake.iceberg.parquet import arrow_schema, columns_in_file, convert_table
from zufluss.lake.iceberg.private import equality_deletes, plan_rows
from zufluss.lake.iceberg.pruning import pruning_expression
from zufluss.lake.iceberg.schema import partitions_values
from zufluss.model.expression import Expression
from zufluss.model.lake import BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN

THREADS_MAX: Final = 4
"""Threads that read for one scan."""
BATCH_ROWS: Final = 131_072
"""Rows of a batch, at most."""

_SYSTEM_FIELDS: Final = (
    pa.field(BUCKET_COLUMN, pa.int32(), nullable=False),
    pa.field(OFFSET_COLUMN, pa.int64(), nullable=False),
    pa.field(TIMESTAMP_COLUMN, pa.timestamp("ms", tz="UTC"), nullable=False),
)
A = TypeVar("A")
B = TypeVar("B")


class _RowGroup(NamedTuple):
    """A piece of work for a thread."""

    path: str
    footer: pq.FileMetaData
    number: int
    first: int
    """The position of its first row in the file."""
    deleted: Positions
    """All deleted positions of the file, ascending."""


class IcebergReader:
    """The `LakeReader` of one table."""

    def __init__(self, context: CommitterContext) -> None:
        self._table = context.table
        path = context.table.path
        lake = load_table(load(context.properties), (path.database, path.table))
        if lake is None or not owned(lake.metadata, context.table):
            raise LakeTableError(
                f"there is no lake table {path} of table id {context.table.table_id} yet; it "
                "appears with the first round of the tiering service"
            )
        self._lake: Table = lake
        self._files = LakeFiles(
            {key: str(value) for key, value in lake.io.properties.items()}, lake.location()
        )

    def plan(
        self,
        snapshot_id: int,
        *,
        filter: Expression | None = None,
        partitions: Collection[str] | None = None,
        without: Collection[str] = (),
    ) -> LakeScan:
        """The files of a snapshot, without those that certainly have no matching row."""
        self._see(snapshot_id)
        chosen = None
        if partitions is not None and self._table.is_partitioned:
            chosen = partitions_values(self._table, partitions)
        unwanted = partitions_values(self._table, without)
        scan = self._lake.scan(row_filter=self._pruning(filter), snapshot_id=snapshot_id)
        files = []
        try:
            keys = self._lake.schema().identifier_field_ids
            gone = equality_deletes(self._lake.io, scan.snapshot(), keys)
            for task in plan_rows(scan):
                file = task.file
                values = tuple(file.partition[i] for i in range(len(file.partition) - 1))
                if values not in unwanted and (chosen is None or values in chosen):
                    files.append(_lake_file(task, gone.get(file.file_path, ())))
        except ValueError as problem:
            raise LakeTableError(
                f"snapshot {snapshot_id} of lake table {self._table.path} cannot be planned: "
                f"{problem}"
            ) from problem
        return LakeScan(snapshot_id, tuple(files))

    def read(self, scan: LakeScan, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Live rows of the planned files."""
        target = self._target(columns)
        lake = arrow_schema(self._lake.schema().model_dump_json())
        known = pa.schema([lake.field(name) for name in columns if name in lake.names])
        threads = min(THREADS_MAX, os.cpu_count() or 1)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="zufluss-lake-read")
        try:
            groups = (g for part in _ahead(pool, self._row_groups, scan.files) for g in part)
            for table in _ahead(pool, lambda group: self._read(group, known, target), groups):
                yield from table.to_batches(max_chunksize=BATCH_ROWS)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Does nothing; the catalog is shared by the process."""

    def _see(self, snapshot_id: int) -> None:
        """Load the table again if it does not have the snapshot; raises if it still has not."""
        if self._lake.snapshot_by_id(snapshot_id) is None:
            self._lake.refresh()
        if self._lake.snapshot_by_id(snapshot_id) is None:
            raise LakeTableError(
                f"lake table {self._table.path} has no snapshot {snapshot_id}; it was expired, "
                "take a newer one"
            )

    def _pruning(self, filter: Expression | None) -> BooleanExpression:
        if filter is None:
            return AlwaysTrue()
        known = frozenset(field.name for field in self._lake.schema().fields)
        return pruning_expression(filter, self._table.schema, known)

    def _target(self, columns: Sequence[str]) -> pa.Schema:
        fields = {field.name: field for field in (*self._table.schema.arrow, *_SYSTEM_FIELDS)}
        unknown = [name for name in columns if name not in fields]
        if unknown:
            raise LakeTableError(
                f"table {self._table.path} has no column {unknown[0]!r}; it has {', '.join(fields)}"
            )
        return pa.schema([fields[name] for name in columns])

    def _row_groups(self, file: LakeFile) -> list[_RowGroup]:
        with self._files.open(file.path) as source:
            footer = pq.read_metadata(source)
        gone = [deleted_positions(self._files, path, file.path) for path in file.deletes]
        if file.equality_deletes:
            gone.append(self._by_key().deleted(file.path, file.equality_deletes))
        deleted = np.unique(np.concatenate(gone)) if gone else np.empty(0, np.int64)
        groups, first = [], 0
        for number in range(footer.num_row_groups):
            groups.append(_RowGroup(file.path, footer, number, first, deleted))
            first += footer.row_group(number).num_rows
        return groups

    def _by_key(self) -> KeyLookup:
        schema = self._lake.schema()
        fields = arrow_schema(schema.model_dump_json())
        names = sorted(schema.identifier_field_names(), key=fields.get_field_index)
        return KeyLookup(self._files, pa.schema([fields.field(name) for name in names]))

    def _read(self, group: _RowGroup, known: pa.Schema, target: pa.Schema) -> pa.Table:
        with (
            self._files.open(group.path) as source,
            pq.ParquetFile(source, metadata=group.footer, pre_buffer=True) as file,
        ):
            names = columns_in_file(file.schema_arrow, known)
            table = file.read_row_group(group.number, columns=list(names.values()))
        here = {there: name for name, there in names.items()}
        table = table.rename_columns([here[name] for name in table.column_names])
        rows = group.footer.row_group(group.number).num_rows
        if not names:
            table = pa.table({"": pa.nulls(rows)})
        low, high = np.searchsorted(group.deleted, (group.first, group.first + rows))
        if low < high:
            live = np.ones(rows, np.bool_)
            live[group.deleted[low:high] - group.first] = False
            table = table.filter(pa.array(live))
        return convert_table(table, target)


def _ahead(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """The results of the work in order, a few of them computed ahead."""
    waiting: deque[Future[B]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > THREADS_MAX:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _lake_file(task: Any, equality_deletes: tuple[str, ...]) -> LakeFile:
    return LakeFile(
        path=task.file.file_path,
        records=task.file.record_count,
        size=task.file.file_size_in_bytes,
        deletes=tuple(sorted(file.file_path for file in task.delete_files)),
        equality_deletes=equality_deletes,
        bucket=task.file.partition[len(task.file.partition) - 1],
    )
