"""Ids of auto-increment columns, in ranges that are never given twice.

A column has one counter for the whole table, made and deleted with the table (`records.py`).
Buckets take ranges of it and hand the ids out by themselves, so ids have gaps and do not grow
with time over several buckets. A range is durable before it is given; what is left of one when a
server dies is lost or found again by that server, but never given to another.

| column | first id | last id |
|---|---|---|
| INT | 1 | 2147483647 |
| BIGINT | 1 | 9223372036854775806: the id after the last of a range is a number, too |
"""

from __future__ import annotations

from zufluss.cluster.image import ClusterImage
from zufluss.config.values import INT32_MAX, INT64_MAX
from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import ConfigError, InvalidTableError, UnknownTableOrBucketError, ZuflussError
from zufluss.meta.api import ConflictError
from zufluss.model.schema import Column
from zufluss.model.table import TableInfo, unknown_table
from zufluss.model.types import Root


async def allocate_ids(
    ledger: Ledger, image: ClusterImage, table_id: int, column_id: int, count: int
) -> range:
    """The next `count` ids of a column, fewer where its type ends; durable when this returns."""
    if count < 1:
        raise ConfigError(f"count {count} is not allowed; give 1 or more")
    table = image.table_by_id(table_id)
    if table is None:
        raise _no_such_table(table_id)
    column = _auto_increment_column(table.info, column_id)
    limit = INT32_MAX if column.data_type.root is Root.INTEGER else INT64_MAX - 1
    try:
        ids = await ledger.take_up_to(records.id_counter(table_id, column_id), count, limit)
    except ConflictError as conflict:  # the table was dropped between reading and writing
        raise _no_such_table(table_id) from conflict
    if ids is None:
        raise _no_such_table(table_id)
    if not ids:
        raise ZuflussError(
            f"auto-increment column {column.name!r} of table '{table.info.path}' has no ids left: "
            f"{limit} was the last that {column.data_type} allows; copy the rows to a new table"
        )
    return ids


def _no_such_table(table_id: int) -> ZuflussError:
    return UnknownTableOrBucketError(
        f"{unknown_table(table_id)} does not exist; refresh the metadata"
    )


def _auto_increment_column(info: TableInfo, column_id: int) -> Column:
    for name in info.schema.auto_increment_column:
        column = info.schema.column(name)
        if column.id == column_id:
            return column
    names = ", ".join(info.schema.auto_increment_column) or "none"
    raise InvalidTableError(
        f"column id {column_id} of table '{info.path}' is not an auto-increment column; "
        f"auto-increment columns: {names}"
    )
