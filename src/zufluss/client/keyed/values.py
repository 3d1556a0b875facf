"""Decodes values of a primary-key table, from lookups, limit scans and snapshots, to Arrow.

A value is the id of the schema it was written under (i16), and a row. Most values have the schema
that the table was opened with. Others are decoded under their own schema, which the cluster is
asked for once, and their columns are matched by id: a column that the value lacks is null, a column
that is newer than the opened table is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.client.core.buckets import group_rows
from zufluss.client.core.catalog import table_schema
from zufluss.client.core.cluster import ClusterConnection
from zufluss.config import table_options as t
from zufluss.model.schema import Schema
from zufluss.model.table import TableInfo
from zufluss.record.slices import Slices

if TYPE_CHECKING:
    from zufluss.record.rows.codec import RowFormat

THREAD_VALUES_MIN: Final = 2_048
"""Fewer values are decoded on the event loop, not in a thread."""


class ValueDecoder:
    """Decodes the values of one table; `row_format` replaces the table's format."""

    def __init__(
        self, connection: ClusterConnection, info: TableInfo, row_format: RowFormat | None = None
    ) -> None:
        from zufluss.record.batch.kv import split_values  # these load the compiled kernels
        from zufluss.record.rows.codec import RowCodec

        self._split = split_values
        self._codec = RowCodec
        self._connection = connection
        self._info = info
        self._format: RowFormat = row_format or info.property(t.TABLE_KV_FORMAT)
        self._codecs = {info.schema_id: RowCodec(info.schema, self._format)}
        self._schemas = {info.schema_id: info.schema}

    async def decode(self, values: Slices) -> pa.RecordBatch:
        """Decode values, none of them absent, in the table's schema."""
        ids, rows = self._split(values)
        for schema_id in set(ids.tolist()) - self._codecs.keys():
            schema = await table_schema(self._connection, self._info.path, schema_id)
            self._codecs[schema_id] = self._codec(schema, self._format)
            self._schemas[schema_id] = schema
        if values.count < THREAD_VALUES_MIN:
            return self._decode(rows, ids)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._connection.executor, self._decode, rows, ids)

    def _decode(self, rows: Slices, ids: npt.NDArray[np.int16]) -> pa.RecordBatch:
        if (ids == self._info.schema_id).all():
            return self._codecs[self._info.schema_id].decode(rows)
        parts, places = [], []
        for schema_id, at in group_rows(ids):
            part = self._codecs[schema_id].decode(rows.take(at))
            parts.append(_aligned(part, self._schemas[schema_id], self._info.schema))
            places.append(at)
        joined = pa.Table.from_batches(parts).take(pa.array(np.argsort(np.concatenate(places))))
        return joined.combine_chunks().to_batches()[0]


def slices_of(values: Iterable[bytes]) -> Slices:
    """Join byte strings to slices of one buffer."""
    known = list(values)
    ends = np.cumsum(np.fromiter(map(len, known), np.int64, len(known)))
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    return Slices.contiguous(np.frombuffer(b"".join(known), np.uint8), offsets)


def _aligned(rows: pa.RecordBatch, have: Schema, want: Schema) -> pa.RecordBatch:
    """The columns of `want`, matched by id; null if `have` lacks them."""
    positions = {column.id: i for i, column in enumerate(have.columns)}
    columns = []
    for column, field in zip(want.columns, want.arrow, strict=True):
        at = positions.get(column.id)
        columns.append(pa.nulls(rows.num_rows, field.type) if at is None else rows.column(at))
    return pa.RecordBatch.from_arrays(columns, schema=want.arrow)
