"""The writer of primary-key tables: upserts of whole rows or some columns, and deletes.

`write/writer.py` routes, batches and sends. This module encodes a batch: rows and keys of all
chunks at once, then in the order in which they were written. So a key that is written, deleted and
written again within one batch ends with its last write.

With `columns` a writer changes only these columns. The other columns of a row keep their values, or
are null in a new row. Further columns of the input are ignored. An auto-increment column is never
written, even if the input has it.

| columns | refused if |
|---|---|
| some | one is unknown or given twice, a key column is missing, one beside the key is NOT NULL |
| all | never: these are whole rows |

| merge mode | meaning of the rows |
|---|---|
| `aggregate` | inputs of the table's merge engine (default) |
| `overwrite` | new values of the rows, bypassing the merge engine; deletes always delete |
| `merge_state` | states of an aggregation table, as its columns hold them |
| `retract` | inputs of an aggregation table that are taken back |

With `pre_aggregate` the writer folds the rows of each batch to one state per key before it sends
them, which saves bytes and merges if keys repeat.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.keys import check_primary_key
from zufluss.client.write.encode import BATCH_BYTES_MAX, join
from zufluss.client.write.rows import RowChunk
from zufluss.client.write.sender import WriteCall
from zufluss.client.write.writer import BatchWriter, Identity
from zufluss.config import table_options as t
from zufluss.errors import (
    ConfigError,
    ErrorCode,
    InvalidTableError,
    InvalidTargetColumnError,
    RecordTooLargeError,
    error,
)
from zufluss.model.agg_columns import AGGREGATION
from zufluss.model.merge import MergeMode, merge_engine
from zufluss.model.table import TableInfo
from zufluss.record.slices import ABSENT, Slices
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.hot.put import put_request

MergeModeName = Literal["aggregate", "overwrite", "merge_state", "retract"]
"""How the rows of a writer combine with the stored ones."""

Fold = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Folds rows of the table to one per key."""

# The fields of a KV batch's header that change with the writer id; `zufluss.record.batch.kv`
# describes the layout.
_WRITER: Final = struct.Struct("<qi")
_WRITER_AT: Final = 12
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = 5


class AsyncUpsertWriter(BatchWriter):
    """Upserts and deletes rows of a primary-key table; `table.upsert()` makes it.

    >>> async with table.upsert() as writer:  # doctest: +SKIP
    ...     await writer.write({"id": [1, 2], "name": ["a", "b"]})
    ...     await writer.delete({"id": 1})
    """

    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        columns: Sequence[str] | None = None,
        merge_mode: MergeModeName = "aggregate",
        *,
        pre_aggregate: bool = False,
        identity: Identity | None = None,
    ) -> None:
        check_primary_key(info, "upsert", "table.append()")
        mode = put_mode(info, merge_mode, pre_aggregate)
        self.columns = target_columns(info, columns)
        """The written columns, in table order."""
        whole = len(self.columns) == len(info.schema)
        targets = () if whole else info.schema.indexes_of(self.columns)
        request = functools.partial(put_request, targets, agg_mode=mode)
        call = WriteCall(ApiKey.PUT_KV, m.PutKvResponse, request)
        super().__init__(connection, info, call, identity)
        self._pre_aggregates = pre_aggregate
        self._encoder = PutEncoder(info, _folding(info, self.columns) if pre_aggregate else None)

    def columns_of(self, *, delete: bool) -> Sequence[str]:
        """The primary key for deletes, the written columns otherwise."""
        return self.info.schema.primary_key if delete else self.columns

    async def delete(self, data: Any) -> None:
        """Delete rows by key; `data` is in any form of `write`, whole rows or only their keys.

        A key without a row is no error. A writer with `columns` sets its columns to null, and
        removes the row only if no other column has a value.

        >>> await writer.delete({"id": [1, 2]})  # doctest: +SKIP
        """
        self.check_deletes()
        await self._take_over(data, delete=True)

    @property
    def deleted_rows(self) -> int | None:
        """The number of rows that the acknowledged deletes removed; complete after `flush`.

        None if a server did not tell: it is an Apache Fluss server, or a delete was sent twice.

        >>> await writer.delete({"id": [1, 2]})  # doctest: +SKIP
        >>> await writer.flush()  # doctest: +SKIP
        >>> writer.deleted_rows  # doctest: +SKIP
        1
        """
        return self._deleted_rows

    def check_deletes(self) -> None:
        """Raise if this writer has no deletes (`pre_aggregate`)."""
        if self._pre_aggregates:
            raise error(
                ErrorCode.DELETION_DISABLED_EXCEPTION,
                "a writer that aggregates before it sends has no deletes; delete rows of table "
                f"{self.info.path} by a writer without pre_aggregate",
            )

    def encode(self, chunks: Sequence[RowChunk], writer_id: int, sequence: int) -> EncodedPut:
        """Encode the chunks, in order, as one KV batch."""
        return self._encoder.encode(chunks, writer_id, sequence)


def put_mode(info: TableInfo, name: MergeModeName, pre_aggregate: bool) -> MergeMode:
    """The merge mode of a writer's puts; raises if the table does not support it."""
    if name not in get_args(MergeModeName):
        raise ConfigError(f"merge_mode {name!r} is none of {', '.join(get_args(MergeModeName))}")
    if pre_aggregate and name != "aggregate":
        raise ConfigError(
            f"pre_aggregate turns inputs into states, but merge_mode {name!r} expects other rows; "
            "leave one of them out"
        )
    mode = MergeMode.MERGE_STATE if pre_aggregate else MergeMode[name.upper()]
    if mode in (MergeMode.MERGE_STATE, MergeMode.RETRACT):
        engine = merge_engine(info.descriptor.properties)
        if engine != AGGREGATION:
            what = "pre_aggregate" if pre_aggregate else f"merge_mode {name!r}"
            raise InvalidTableError(
                f"{what} is for tables whose columns are aggregated; table {info.path} has "
                + (f"the merge engine {engine}" if engine else "no merge engine")
            )
    return mode


def target_columns(info: TableInfo, columns: Sequence[str] | None) -> tuple[str, ...]:
    """The written columns in table order; raises `InvalidTargetColumnError` if not allowed."""
    schema = info.schema
    if columns is None:
        return tuple(name for name in schema.names if name not in schema.auto_increment_column)
    unknown = [name for name in columns if name not in schema]
    if unknown or len(set(columns)) < len(columns):
        raise InvalidTargetColumnError(
            f"columns {', '.join(map(repr, columns))} must be different columns of table "
            f"{info.path}; it has {', '.join(schema.names)}"
        )
    missing = [name for name in schema.primary_key if name not in columns]
    if missing:
        raise InvalidTargetColumnError(
            f"columns {', '.join(columns)} lack {', '.join(missing)} of the primary key of table "
            f"{info.path}; an update names its rows by the whole key, so add it"
        )
    counted = [name for name in schema.auto_increment_column if name in columns]
    if counted:
        raise InvalidTargetColumnError(
            f"column {counted[0]!r} of table {info.path} is counted up by the server; leave it out"
        )
    if len(columns) < len(schema) - len(schema.auto_increment_column):
        _check_nullable(info)
    return tuple(name for name in schema.names if name in columns)


def _check_nullable(info: TableInfo) -> None:
    fixed = [
        column.name
        for column in info.schema.columns
        if column.name not in info.schema.primary_key and not column.data_type.nullable
    ]
    if fixed:
        raise InvalidTargetColumnError(
            f"table {info.path} has no partial updates: column {fixed[0]!r} is NOT NULL, and every "
            "column beside the key must be able to be null in a new row. Write whole rows"
        )


class EncodedPut:
    """A KV batch ready to send; writer id and sequence can be changed."""

    __slots__ = ("_stamped", "view")

    def __init__(self, batch: bytearray, writer_id: int, sequence: int) -> None:
        self.view = memoryview(batch)
        """The bytes of the whole batch."""
        self._stamped = (writer_id, sequence)

    def __len__(self) -> int:
        return len(self.view)

    def stamp(self, writer_id: int, sequence: int) -> None:
        """Write this writer id and sequence into the header, if they differ."""
        if self._stamped != (writer_id, sequence):
            _WRITER.pack_into(self.view, _WRITER_AT, writer_id, sequence)
            _CRC.pack_into(self.view, _CRC_AT, crc32c(self.view[_CRC_AT + _CRC.size :]))
            self._stamped = (writer_id, sequence)


class PutEncoder:
    """Encodes KV batches of one table. Threads may share it."""

    def __init__(self, info: TableInfo, fold: Fold | None = None) -> None:
        from zufluss.record.batch.kv import build_kv_batch  # these load the compiled kernels
        from zufluss.record.keys.encoding import KeyEncoder
        from zufluss.record.rows.codec import RowCodec

        self._build = build_kv_batch
        self._path = info.path
        self._schema = info.schema.arrow
        self._schema_id = info.schema_id
        self._keys = KeyEncoder.of_stored_key(info)
        self._rows = RowCodec(info.schema, info.property(t.TABLE_KV_FORMAT))
        self._fold = fold

    def encode(self, chunks: Sequence[RowChunk], writer_id: int, sequence: int) -> EncodedPut:
        """Encode the chunks, in order, as one KV batch."""
        upserts = [chunk.rows for chunk in chunks if not chunk.delete]
        deletes = [chunk.rows for chunk in chunks if chunk.delete]
        parts = []
        if upserts:
            rows = self._complete(join(upserts))
            if self._fold is not None:
                rows = self._fold(rows)
            parts.append((self._key_slices(rows), self._rows.encode(rows)))
        if deletes:
            keys = self._key_slices(join(deletes))
            parts.append((keys, _absent(keys.count)))
        keys, values = parts[0]
        if len(parts) > 1:
            order = _interleaved(chunks)
            keys = _concatenated([part[0] for part in parts]).take(order)
            values = _concatenated([part[1] for part in parts]).take(order)
        batch = self._build(self._schema_id, keys, values, writer_id, sequence)
        if len(batch) > BATCH_BYTES_MAX:
            raise RecordTooLargeError(
                f"{keys.count} rows for table {self._path} take {len(batch)} bytes; one batch "
                f"holds at most {BATCH_BYTES_MAX}. Lower client.writer.batch-size or write smaller "
                "rows"
            )
        return EncodedPut(batch, writer_id, sequence)

    def _key_slices(self, rows: pa.RecordBatch) -> Slices:
        return Slices.contiguous(*self._keys.encode(rows))

    def _complete(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Add the columns that the writer does not write, as nulls."""
        if rows.schema.names == self._schema.names:
            return rows
        columns = [
            rows.column(field.name)
            if field.name in rows.schema.names
            else pa.nulls(rows.num_rows, field.type)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _folding(info: TableInfo, columns: Sequence[str]) -> Fold:
    """The fold of `pre_aggregate`: one row per key, with states of the written columns."""
    from zufluss.record.aggregate.local import pre_aggregate  # loads the compiled kernels

    schema = info.schema
    targets = None if len(columns) == len(schema) else tuple(columns)
    return lambda rows: pre_aggregate(rows, schema, schema.primary_key, targets)


def _absent(count: int) -> Slices:
    nowhere = np.full(count, ABSENT, np.int64)
    return Slices(np.empty(0, np.uint8), nowhere, nowhere)


def _concatenated(parts: Sequence[Slices]) -> Slices:
    shifts = np.cumsum([0, *(len(part.data) for part in parts[:-1])])
    starts = [
        np.where(part.starts == ABSENT, ABSENT, part.starts + shift)
        for part, shift in zip(parts, shifts, strict=True)
    ]
    ends = [part.ends + shift for part, shift in zip(parts, shifts, strict=True)]
    data = np.concatenate([part.data for part in parts])
    return Slices(data, np.concatenate(starts), np.concatenate(ends))


def _interleaved(chunks: Sequence[RowChunk]) -> npt.NDArray[np.int64]:
    """For each row in written order, its index when all upserts precede all deletes."""
    sizes = np.array([chunk.rows.num_rows for chunk in chunks])
    deletes = np.repeat([chunk.delete for chunk in chunks], sizes)
    return np.where(
        deletes, np.cumsum(deletes) - 1 + np.count_nonzero(~deletes), np.cumsum(~deletes) - 1
    )
