"""Pre-aggregation by the writer: many rows of a key become one row of states.

For a table whose few keys get many rows the client then sends one row per key and batch, as states
(`MergeMode.MERGE_STATE`). The stored rows are the same as if every row had been sent, with three
differences: the changelog has fewer changes, texts and arrays that reach their limit may be cut
elsewhere, and floats are added in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.model.merge import MergeMode
from zufluss.model.schema import Schema
from zufluss.record.aggregate import opcodes as op
from zufluss.record.aggregate.columns import located
from zufluss.record.aggregate.fold import Aggregator, FoldInput
from zufluss.record.aggregate.registry import Operations, check_targets, operations
from zufluss.record.rows.codec import RowCodec
from zufluss.record.slices import Positions


def pre_aggregate(
    batch: pa.RecordBatch,
    schema: Schema,
    key_columns: Sequence[str],
    targets: Sequence[str] | None = None,
) -> pa.RecordBatch:
    """Return one row of states per key, in the order in which keys first appear.

    `targets` are the columns to write, None for all. A batch of only these columns gives a batch of
    only these; in a batch of all columns the others become NULL. Raises `AggregationError` if a
    value is refused.
    """
    if batch.num_columns < len(schema.columns):
        whole = pre_aggregate(_widened(batch, schema), schema, key_columns, batch.schema.names)
        return whole.select(batch.schema.names)
    names = schema.names if targets is None else targets
    columns = frozenset(schema.index_of(name) for name in (*names, *key_columns))
    if targets is not None:
        check_targets(schema, columns)
    codec = _codec(schema)
    group, groups = _groups(batch, key_columns)
    records = FoldInput(
        located(codec, batch),
        group,
        np.arange(batch.num_rows, dtype=np.int64),
        np.full(groups, op.NO_ROW, np.int64),
        len(schema.columns),
    )
    aggregator = Aggregator(codec, _operations(schema, columns), before_images=False)
    folded = aggregator.fold(records)
    return codec.columns(codec.completed(aggregator.taken(folded.rows, folded.final)))


def _widened(batch: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """Return the batch with the columns that it lacks, all NULL."""
    names = frozenset(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in names else pa.nulls(batch.num_rows, field.type)
        for field in schema.arrow
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema.arrow)


@lru_cache(maxsize=16)
def _codec(schema: Schema) -> RowCodec:
    return RowCodec(schema)


def _operations(schema: Schema, columns: frozenset[int]) -> Operations:
    """Return the operations; Python functions keep state between calls and are not shared."""
    cached = _cached_operations(schema, columns)
    return operations(schema, MergeMode.AGGREGATE, columns) if cached.functions else cached


@lru_cache(maxsize=16)
def _cached_operations(schema: Schema, columns: frozenset[int]) -> Operations:
    return operations(schema, MergeMode.AGGREGATE, columns)


def _groups(batch: pa.RecordBatch, key_columns: Sequence[str]) -> tuple[Positions, int]:
    """Return the number of each row's key, by first appearance, and the number of keys."""
    group = _numbered(batch.column(key_columns[0]))
    for name in key_columns[1:]:
        pair = pc.add(pc.multiply(group, batch.num_rows), _numbered(batch.column(name)))
        group = _numbered(pair)
    numbers = group.to_numpy()
    return numbers, int(numbers.max(initial=-1)) + 1


def _numbered(values: pa.Array) -> pa.Array:
    """Return a number for each value, by first appearance; equal values have equal numbers."""
    return values.dictionary_encode().indices.cast(pa.int64())
