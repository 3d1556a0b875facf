"""Rows aggregated by whoever writes them: many rows of a key become one row of states.

A table whose few keys get many rows takes one row per key and batch then, sent as states
(`MergeMode.MERGE_STATE`). The outcome is the same as if every row had been sent, but for the
changelog, which has fewer changes; texts and arrays that are cut at a limit may be cut elsewhere,
and floats are added in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.model.merge import MergeMode
from zufluss.model.schema import Schema
from zufluss.record.aggregate import kernels as k
from zufluss.record.aggregate.columns import located
from zufluss.record.aggregate.fold import Aggregator, Records
from zufluss.record.aggregate.registry import Operations, check_targets, operations
from zufluss.record.rows.codec import RowCodec
from zufluss.record.slices import Positions


def pre_aggregate(
    batch: pa.RecordBatch,
    schema: Schema,
    key_columns: Sequence[str],
    targets: Sequence[str] | None = None,
) -> pa.RecordBatch:
    """One row of states for each key, in the order in which keys first appear.

    `targets` are the columns that are written, None for all. The batch may have these alone, and so
    does the outcome then; or all columns, of which the others become NULL. `AggregationError` if a
    value cannot be aggregated.
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
    records = Records(
        located(codec, batch),
        group,
        np.arange(batch.num_rows, dtype=np.int64),
        np.full(groups, k.NO_ROW, np.int64),
        len(schema.columns),
    )
    aggregator = Aggregator(codec, _operations(schema, columns), before_images=False)
    folded = aggregator.fold(records)
    return codec.columns(codec.completed(aggregator.taken(folded.rows, folded.final)))


def _widened(batch: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """The batch with the columns that it lacks, NULL throughout."""
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
    """Functions that are called keep something from call to call: every thread has its own."""
    known = _known_operations(schema, columns)
    return operations(schema, MergeMode.AGGREGATE, columns) if known.outside else known


@lru_cache(maxsize=16)
def _known_operations(schema: Schema, columns: frozenset[int]) -> Operations:
    return operations(schema, MergeMode.AGGREGATE, columns)


def _groups(batch: pa.RecordBatch, key_columns: Sequence[str]) -> tuple[Positions, int]:
    """Of each row: which key, numbered by first appearance; and how many keys there are."""
    group = _numbered(batch.column(key_columns[0]))
    for name in key_columns[1:]:
        pair = pc.add(pc.multiply(group, batch.num_rows), _numbered(batch.column(name)))
        group = _numbered(pair)
    numbers = group.to_numpy()
    return numbers, int(numbers.max(initial=-1)) + 1


def _numbered(values: pa.Array) -> pa.Array:
    """Equal values numbered alike, by first appearance."""
    return values.dictionary_encode().indices.cast(pa.int64())
