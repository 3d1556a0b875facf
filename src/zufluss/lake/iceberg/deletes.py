"""Finds the rows of a bucket that a round replaces, and reads position delete files.

A primary-key table in the lake never has two live rows of a key. A writer looks up every upserted
or deleted key among the bucket's live rows and deletes the old rows by position, with one delete
file per data file:

| column | type | field id |
|---|---|---|
| file_path | string | 2147483546 |
| pos | long | 2147483545 |

Rows that are deleted by key already (`private.equality_deletes`) are found and deleted once more,
which changes nothing.

A lookup only reads the key columns of files whose bounds admit a key. Files never change, so key
columns and deleted positions are cached in this process, up to `CACHE_BYTES_MAX`; reused Spark
workers find them there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zufluss.lake.base import LakeTableError
from zufluss.lake.iceberg.files import LakeFiles
from zufluss.lake.iceberg.handle import LiveFile
from zufluss.lake.iceberg.parquet import (
    FIELD_ID,
    columns_in_file,
    convert_table,
    field_id,
)
from zufluss.lake.iceberg.statistics import bound_value
from zufluss.lake.keys import KeySet

CACHE_BYTES_MAX: Final = 256 << 20
"""The most bytes of key columns and positions that a process keeps."""

FILE_PATH: Final = "file_path"
POSITION: Final = "pos"
DELETE_SCHEMA: Final = pa.schema(
    [
        pa.field(FILE_PATH, pa.string(), False, {FIELD_ID: b"2147483546"}),
        pa.field(POSITION, pa.int64(), False, {FIELD_ID: b"2147483545"}),
    ]
)

Positions = npt.NDArray[np.int64]


class FileCache:
    """A cache of Arrow tables of immutable files, by name; evicts the least recently used."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._tables: OrderedDict[tuple[str, ...], pa.Table] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: tuple[str, ...], read: Callable[[], pa.Table]) -> pa.Table:
        """The table, read if it is not in the cache."""
        with self._lock:
            table = self._tables.get(key)
            if table is not None:
                self._tables.move_to_end(key)
                return table
        table = read()
        self.put(key, table)
        return table

    def put(self, key: tuple[str, ...], table: pa.Table) -> None:
        """Keep a table, unless it is larger than the whole cache."""
        if table.nbytes > self._bytes_max:
            return
        with self._lock:
            self._drop(key)
            self._tables[key] = table
            self._bytes += table.nbytes
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._tables)))

    def _drop(self, key: tuple[str, ...]) -> None:
        table = self._tables.pop(key, None)
        if table is not None:
            self._bytes -= table.nbytes


_cache = FileCache(CACHE_BYTES_MAX)


class ReplacedRows(NamedTuple):
    """Live rows of a data file that are to be deleted."""

    file: LiveFile
    """The data file."""
    positions: Positions
    """Positions of the rows, ascending."""


class KeyLookup:
    """Finds live rows by key among a bucket's files; `keys` are the key columns in lake types."""

    def __init__(self, files: LakeFiles, keys: pa.Schema) -> None:
        self._files = files
        self._keys = keys
        self._shape = ",".join(str(field_id(field)) for field in keys)

    def find(self, touched: pa.Table, live: Sequence[LiveFile]) -> Iterator[ReplacedRows]:
        """Live positions of the touched keys (columns as in `keys`), file by file."""
        if not touched.num_rows:
            return
        candidates = [file for file in _admitting(touched, live) if not self._is_dead(file)]
        if not candidates:
            return
        columns = [self._key_columns(file) for file in candidates]
        hits = KeySet(touched).contains(pa.concat_tables(columns))
        start = 0
        for file, table in zip(candidates, columns, strict=True):
            hit = hits[start : start + table.num_rows]
            start += table.num_rows
            positions = self._without_deleted(file, hit)
            if len(positions):
                yield ReplacedRows(file, positions)

    def deleted(self, path: str, equality_deletes: Sequence[str]) -> Positions:
        """The positions of a data file whose keys are in one of some equality delete files."""
        rows, *gone = [
            _cache.get((file, self._shape), partial(self._read_keys, file))
            for file in (path, *equality_deletes)
        ]
        return np.flatnonzero(KeySet(pa.concat_tables(gone)).contains(rows))

    def remember(self, path: str, keys: pa.Table) -> None:
        """Keep the key columns of a file that was just written, for the next round."""
        _cache.put((path, self._shape), _owned(keys))

    def _is_dead(self, file: LiveFile) -> bool:
        """Whether all rows are deleted, by position: foreign files may delete a row twice."""
        if file.deleted < file.records:
            return False
        gone = [deleted_positions(self._files, path, file.path) for path in file.deletes]
        return len(np.unique(np.concatenate(gone))) == file.records if gone else not file.records

    def _without_deleted(self, file: LiveFile, hit: npt.NDArray[np.bool_]) -> Positions:
        if file.deletes and hit.any():
            hit = hit.copy()
            for path in file.deletes:
                hit[deleted_positions(self._files, path, file.path)] = False
        return np.flatnonzero(hit)

    def _key_columns(self, file: LiveFile) -> pa.Table:
        table = _cache.get((file.path, self._shape), lambda: self._read_keys(file.path))
        if table.num_rows != file.records:
            raise LakeTableError(
                f"data file {file.path} has {table.num_rows} rows; its manifest entry says "
                f"{file.records}. The lake table is damaged"
            )
        return table

    def _read_keys(self, path: str) -> pa.Table:
        with self._files.open(path) as source, pq.ParquetFile(source) as file:
            names = columns_in_file(file.schema_arrow, self._keys)
            missing = [name for name in self._keys.names if name not in names]
            if missing:
                raise LakeTableError(
                    f"data file {path} has no key column {missing[0]!r}; rows of a primary-key "
                    "table have all of them. The file was not written by tiering"
                )
            table = file.read(columns=list(names.values()))
        table = table.rename_columns({there: name for name, there in names.items()})
        return _owned(convert_table(table, self._keys))


def deleted_positions(files: LakeFiles, delete_path: str, data_path: str) -> Positions:
    """The positions of a data file that a position delete file names."""
    table = _cache.get((delete_path, data_path), lambda: _read(files, delete_path, data_path))
    return np.asarray(table[POSITION].to_numpy())


def _read(files: LakeFiles, delete_path: str, data_path: str) -> pa.Table:
    with files.open(delete_path) as source:
        table = pq.read_table(source, columns=[FILE_PATH, POSITION], read_dictionary=[FILE_PATH])
    of_file = pc.equal(table[FILE_PATH].cast(pa.string()), data_path)
    return _owned(table.filter(of_file).select([POSITION]))


def delete_table(rows: ReplacedRows) -> pa.Table:
    """The rows of a position delete file."""
    count = len(rows.positions)
    paths = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), [rows.file.path])
    return pa.Table.from_arrays(
        [paths.cast(pa.string()), pa.array(rows.positions, pa.int64())], schema=DELETE_SCHEMA
    )


def _owned(table: pa.Table) -> pa.Table:
    """The table in one chunk per column, sharing no buffers with larger ones."""
    return pa.concat_tables([table, table.slice(0, 0)]).combine_chunks()


def _admitting(touched: pa.Table, files: Sequence[LiveFile]) -> list[LiveFile]:
    """Files whose bounds do not exclude all touched keys."""
    tests = [_test(field, touched[field.name]) for field in touched.schema]
    return [file for file in files if all(test(file) for test in tests)]


def _test(field: pa.Field, column: pa.ChunkedArray) -> Callable[[LiveFile], bool]:
    """Whether a file may hold one of the column's values, by its bounds."""
    id, kind = cast(int, field_id(field)), field.type
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        bits = pa.int32() if kind.bit_width == 32 else pa.int64()
        values = np.sort(np.concatenate([chunk.view(bits).to_numpy() for chunk in column.chunks]))
        return lambda file: _has_between(values, *_bounds(file, id, kind))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        ends = pc.min_max(column.cast(pa.binary())).as_py()
        return lambda file: _overlaps(ends["min"], ends["max"], *_bounds(file, id, kind))
    return lambda file: True


def _bounds(file: LiveFile, id: int, kind: pa.DataType) -> tuple[Any, Any]:
    low, high = file.lower_bounds.get(id), file.upper_bounds.get(id)
    return (
        None if low is None else bound_value(low, kind),
        None if high is None else bound_value(high, kind),
    )


def _has_between(values: npt.NDArray[Any], low: int | None, high: int | None) -> bool:
    """Whether one of the sorted values lies between, ends included."""
    start = 0 if low is None else int(np.searchsorted(values, low))
    stop = len(values) if high is None else int(np.searchsorted(values, high, side="right"))
    return start < stop


def _overlaps(smallest: bytes, largest: bytes, low: bytes | None, high: bytes | None) -> bool:
    return (low is None or low <= largest) and (high is None or smallest <= high)
