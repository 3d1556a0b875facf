"""Folds the changes of one bucket: keeps the last change of every key, by offset.

A lake holds the rows of a table, not its history. `Folder` takes the batches of a changelog scan in
offset order, from any starting point, and keeps at most one change per key: the row as last
written, or its deletion. `-U` rows are dropped, since the `+U` after them has all that is needed.

Memory follows the number of distinct keys: batches wait until there are as many rows as the last
fold left (at least `PENDING_ROWS`), then all are folded into one table. No row is copied more than
a few times on average, and rows never become Python objects.

Tasks of the tiering service use it, and union reads for the tail of the log. `inserted` turns the
rows of a key-value snapshot, which stands for all changes below an offset, into folded changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.lake.keys import number_keys
from zufluss.model.lake import BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN
from zufluss.model.table import TableInfo

PENDING_ROWS: Final = 1_000_000
"""The least number of rows that wait before they are folded."""

CHANGE_TYPE: Final = "_change_type"
LOG_OFFSET: Final = "_log_offset"
COMMIT_TIMESTAMP: Final = "_commit_timestamp"
BEFORE_UPDATE: Final = "-U"
DELETE: Final = "-D"

UNKNOWN: Final = -1
"""`__offset`, and milliseconds of `__timestamp`, of a row from a key-value snapshot, whose last
change is not known. Fluss writes the same."""

_SYSTEM_FIELDS: Final = (
    pa.field(BUCKET_COLUMN, pa.int32(), nullable=False),
    pa.field(OFFSET_COLUMN, pa.int64(), nullable=False),
    pa.field(TIMESTAMP_COLUMN, pa.timestamp("ms", tz="UTC"), nullable=False),
)


class FoldedChanges(NamedTuple):
    """The last changes of a bucket's keys. Keys of both tables together are distinct."""

    upserts: pa.Table
    """Columns of the table and system columns, by offset."""
    deletes: pa.Table
    """Columns of the primary key and `__offset`, by offset."""
    changes: int
    """Records that were folded, `-U` included."""


def inserted(table: TableInfo, bucket_id: int, batches: Sequence[pa.RecordBatch]) -> FoldedChanges:
    """The rows of a key-value snapshot as folded changes; they have the table's columns."""
    rows = pa.Table.from_batches(batches, table.schema.arrow)
    values = (bucket_id, UNKNOWN, UNKNOWN)
    about = [
        pa.repeat(pa.scalar(value, field.type), rows.num_rows)
        for value, field in zip(values, _SYSTEM_FIELDS, strict=True)
    ]
    upserts = pa.Table.from_arrays(
        [*rows.columns, *about], schema=pa.schema([*table.schema.arrow, *_SYSTEM_FIELDS])
    )
    return FoldedChanges(upserts, Folder(table, bucket_id).finish().deletes, rows.num_rows)


class Folder:
    """Folds the changes of one bucket: `add` batches in offset order, then `finish` once."""

    def __init__(self, table: TableInfo, bucket_id: int) -> None:
        self._key = list(table.schema.primary_key)
        self._compared = list(table.descriptor.physical_primary_key)
        self._arrow = table.schema.arrow
        self._bucket_id = bucket_id
        self._kept: pa.Table | None = None
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._changes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the next changes, as a changelog scan gives them."""
        self._changes += batch.num_rows
        kinds = batch.column(batch.schema.get_field_index(CHANGE_TYPE))
        before = _is(kinds, BEFORE_UPDATE)
        if before.any():
            batch = batch.filter(pa.array(~before))
        if not batch.num_rows:
            return
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        kept = 0 if self._kept is None else self._kept.num_rows
        if self._pending_rows > max(PENDING_ROWS, kept):
            self._fold()

    def finish(self) -> FoldedChanges:
        """The folded changes of all batches."""
        self._fold()
        rows = self._kept
        if rows is None:
            rows = self._empty()
        deleted = np.concatenate(
            [np.empty(0, np.bool_), *(_is(chunk, DELETE) for chunk in rows[CHANGE_TYPE].chunks)]
        )
        gone, there = rows.slice(0, 0), rows
        if deleted.any():
            gone, there = rows.filter(pa.array(deleted)), rows.filter(pa.array(~deleted))
        return FoldedChanges(self._upserts(there), self._deletes(gone), self._changes)

    def _fold(self) -> None:
        """Fold the pending rows into the kept rows; both are in offset order."""
        if not self._pending:
            return
        batches = [] if self._kept is None else self._kept.to_batches()
        rows = pa.Table.from_batches([*batches, *self._pending])
        numbers, count = number_keys(rows.select(self._compared))
        positions = np.arange(rows.num_rows)
        last = np.empty(count, np.int64)
        last[numbers] = positions  # for equal indices the last assignment wins
        keep = last[numbers] == positions
        if not keep.all():
            rows = rows.filter(pa.array(keep))
        self._kept = rows
        self._pending, self._pending_rows = [], 0

    def _upserts(self, rows: pa.Table) -> pa.Table:
        bucket = pa.array(np.full(rows.num_rows, self._bucket_id, np.int32))
        columns = [rows[name] for name in self._arrow.names]
        about = [bucket, rows[LOG_OFFSET], rows[COMMIT_TIMESTAMP]]
        schema = pa.schema([*self._arrow, *_SYSTEM_FIELDS])
        return pa.Table.from_arrays([*columns, *about], schema=schema)

    def _deletes(self, rows: pa.Table) -> pa.Table:
        columns = [rows[name] for name in (*self._key, LOG_OFFSET)]
        schema = pa.schema([*(self._arrow.field(name) for name in self._key), _SYSTEM_FIELDS[1]])
        return pa.Table.from_arrays(columns, schema=schema)

    def _empty(self) -> pa.Table:
        about = [
            pa.field(CHANGE_TYPE, pa.string()),
            pa.field(LOG_OFFSET, pa.int64()),
            pa.field(COMMIT_TIMESTAMP, pa.timestamp("ms", tz="UTC")),
        ]
        return pa.schema([*about, *self._arrow]).empty_table()


def _is(kinds: pa.Array, kind: str) -> npt.NDArray[np.bool_]:
    """Which rows are changes of a kind; a dictionary column is compared by its indices."""
    if not pa.types.is_dictionary(kinds.type):
        return np.asarray(pc.equal(kinds, kind).to_numpy(zero_copy_only=False))
    known = kinds.dictionary.to_pylist()
    if kind not in known:
        return np.zeros(len(kinds), np.bool_)
    return np.asarray(kinds.indices.to_numpy() == known.index(kind))
