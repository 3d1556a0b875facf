"""Rows of pinned state as a client wants them: some columns, those that match, as Arrow.

Stored values are checked and located by one kernel call, whatever schema they were written under:
columns are only ever added at the end, so an older row just has fewer. Then only the columns that
the predicate and the projection name become Arrow arrays. Everything here runs in a thread, without
the GIL for nearly all of it; nothing knows of pins or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.errors import CorruptRecordError, InvalidColumnProjectionError
from zufluss.kv.table import KvTable
from zufluss.model.predicate import Predicate, leaves
from zufluss.model.schema import Schema
from zufluss.record.arrow.matching import matching
from zufluss.record.batch.kv import build_value_batch, split_values
from zufluss.record.rows.codec import LocatedRows
from zufluss.record.slices import Slices

DECODED_BYTES_MAX: Final = 32 << 20
"""A page has so few rows that their cells take no more than this while they are decoded."""
CELL_BYTES: Final = 8


class ArrowPage(NamedTuple):
    """The rows of a page that match, as an Arrow message."""

    records: bytes | None
    """An Arrow record batch message without its schema, None if no row is left."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    """How many rows it has."""
    cut_key: bytes | None
    """The key of the last row, if matching ones that follow it were cut off by the limit."""


class RowReader:
    """Decodes, filters and projects the rows of a primary-key table for one call."""

    def __init__(
        self,
        table: KvTable,
        schema: Schema,
        projected: Sequence[int] = (),
        predicate: Predicate | None = None,
    ) -> None:
        """Rows come under `schema`, whose columns `projected` names by position; none: all.

        `InvalidColumnProjectionError` if these are no columns of it, `InvalidPredicateError` if a
        column has no such values.
        """
        self._table = table
        self._predicate = predicate
        columns = [schema.columns[i] for i in _checked(projected, schema, table)]
        self._arrow = pa.schema([schema.arrow.field(column.name) for column in columns])
        places = {column.id: i for i, column in enumerate(table.schema.columns)}
        self._projected = [places[column.id] for column in columns]
        tested = () if predicate is None else leaves(predicate)
        self._tested = {leaf.field_id: places[leaf.field_id] for leaf in tested}
        if predicate is not None:
            types = {i: table.schema.arrow.field(at).type for i, at in self._tested.items()}
            matching(predicate, {i: pa.array([], kind) for i, kind in types.items()})

    @property
    def filters(self) -> bool:
        """Whether rows may be left out."""
        return self._predicate is not None

    @property
    def rows_max(self) -> int:
        """How many rows may be read at once, for the memory they take decoded."""
        return max(DECODED_BYTES_MAX // (CELL_BYTES * self._table.codec.cells_per_row), 1)

    def read(self, values: Slices, limit: int) -> ArrowPage:
        """At most `limit` rows of these values, in their order."""
        located = self._located(values)
        keep = None
        cut_key = None
        if self._predicate is not None:
            keep = self._matching(self._predicate, located)
            matches = np.flatnonzero(keep.to_numpy(zero_copy_only=False))
            if len(matches) == 0:
                return ArrowPage(None, 0, None)
            if len(matches) > limit:
                cut_key = self._key(located, int(matches[limit - 1]))
        if located.count == 0:
            return ArrowPage(None, 0, None)
        arrays = self._table.codec.arrays(located, self._projected)
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._arrow)
        if keep is not None:
            batch = batch.filter(keep)
        batch = batch.slice(0, limit)
        return ArrowPage(batch.serialize().to_pybytes(), batch.num_rows, cut_key)

    def _located(self, values: Slices) -> LocatedRows:
        table = self._table
        schema_ids, rows = split_values(values)
        known = len(table.field_counts)
        if not ((schema_ids > 0) & (schema_ids < known)).all():
            raise CorruptRecordError(
                f"a stored row of {table.info.path} has the schema {schema_ids.max()}; "
                f"it has 1 to {known - 1}"
            )
        if (schema_ids == table.info.schema_id).all():
            return table.codec.locate(rows)
        return table.codec.locate(rows, table.field_counts[schema_ids])

    def _matching(self, predicate: Predicate, located: LocatedRows) -> pa.BooleanArray:
        arrays = self._table.codec.arrays(located, [*self._tested.values()])
        return matching(predicate, dict(zip(self._tested, arrays, strict=True)))

    def _key(self, located: LocatedRows, row: int) -> bytes:
        """The key that a row stands under."""
        table = self._table
        arrays = table.codec.arrays(located, table.key_columns)
        fields = [table.schema.arrow.field(i) for i in table.key_columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)).slice(row, 1)
        data, offsets = table.key.encode(pc.take(batch, pa.array([0])))
        return data[offsets[0] : offsets[1]].tobytes()


def _checked(projected: Sequence[int], schema: Schema, table: KvTable) -> Sequence[int]:
    count = len(schema.columns)
    if len(set(projected)) < len(projected) or not all(0 <= i < count for i in projected):
        raise InvalidColumnProjectionError(
            f"the columns {[*projected][:20]} cannot be projected: give positions of the "
            f"{count} columns of {table.info.path}, 0 to {count - 1}, each once"
        )
    return projected or range(count)


def value_batch(table: KvTable, values: Slices) -> bytes:
    """Stored values as the value batch that clients of Fluss get, in the table's row format."""
    return build_value_batch(Slices.of(table.for_clients(values)) if table.indexed else values)
