"""Changelog batches as a scan gives them, from plain changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from zufluss.client.read.decode import CHANGE_TYPES
from zufluss.model.table import TableInfo

Change = tuple[str, dict[str, Any]]
"""A change type and the row."""


def changelog(table: TableInfo, changes: Sequence[Change], first_offset: int = 0) -> pa.RecordBatch:
    """A batch of changes, one offset each."""
    count = len(changes)
    kinds = pa.array([CHANGE_TYPES.index(kind) for kind, _ in changes], pa.int8())
    rows = pa.RecordBatch.from_pylist([row for _, row in changes], schema=table.schema.arrow)
    return pa.RecordBatch.from_arrays(
        [
            pa.DictionaryArray.from_arrays(kinds, pa.array(CHANGE_TYPES)),
            pa.array(range(first_offset, first_offset + count), pa.int64()),
            pa.array([1_700_000_000_000] * count, pa.int64()).cast(pa.timestamp("ms", "UTC")),
            *rows.columns,
        ],
        names=["_change_type", "_log_offset", "_commit_timestamp", *rows.schema.names],
    )
