"""Helpers for tests of functions, schemas and modes: aggregation tables, puts, changelogs."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tests.end_to_end.kv import PUT_VERSION, put_request
from tests.end_to_end.raw import RawClient, table_path
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.client.write.upsert import MergeModeName
from zufluss.errors import ZuflussError
from zufluss.model.merge import MergeMode
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

DATABASE = "fluss"
"""The database that every server has from its start."""
ENGINE = {"table.merge-engine": "aggregation"}
DEFAULT_FUNCTION = "table.merge-engine.aggregation.default-function"
DELETES = "table.delete.behavior"

Row = dict[str, Any]
Change = tuple[str, Row]
"""Kind and row of a changelog record."""

_NUMBERS = itertools.count()
_RUN = secrets.token_hex(3)


def fresh_name() -> str:
    """The name of a table that no other test uses."""
    return f"agg_{_RUN}_{next(_NUMBERS)}"


# -- the client ---------------------------------------------------------------------------------


def aggregated(
    conn: Connection, columns: str, *, key: str = "k INT", buckets: int = 1, **properties: str
) -> Table:
    """A new table of a key column and `columns`; properties with `__` for `.`, `_` for `-`."""
    name = f"{DATABASE}.{fresh_name()}"
    named = {k.replace("__", ".").replace("_", "-"): v for k, v in properties.items()}
    conn.admin.create_table(
        name,
        f"{key}, {columns}, PRIMARY KEY ({key.split()[0]})",
        bucket_count=buckets,
        properties={**ENGINE, **named},
    )
    return conn.table(name)


def put(
    table: Table,
    *rows: Sequence[Any],
    columns: Sequence[str] | None = None,
    mode: MergeModeName = "aggregate",
) -> None:
    """Put rows in one batch and wait for the acknowledgement; with the named columns, or all."""
    names = list(columns or table.schema.names)
    with table.upsert(columns, merge_mode=mode) as writer:
        writer.write(batch_of(table, [dict(zip(names, row, strict=True)) for row in rows]))


def batch_of(table: Table, rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows as Arrow, in the types of the table."""
    arrow = table.schema.arrow
    return pa.RecordBatch.from_pylist(
        rows, pa.schema([field for field in arrow if field.name in rows[0]])
    )


def delete(table: Table, *keys: Any, columns: Sequence[str] | None = None) -> None:
    """Delete keys in one batch and wait for the acknowledgement."""
    (key,) = table.schema.primary_key
    with table.upsert(columns) as writer:
        writer.delete({key: list(keys)})


def values(table: Table, key: Any) -> tuple[Any, ...] | None:
    """The columns of a row without its key."""
    row = table.lookup(key)
    return None if row is None else tuple(row.values())[1:]


def changes(table: Table, start: int = 0) -> list[Change]:
    """The changelog of the only bucket from an offset on."""
    found = table.changelog(start={0: start}).to_arrow()
    rows = found.drop(["_log_offset", "_commit_timestamp"]).to_pylist()
    return [(row.pop("_change_type"), row) for row in rows]


# -- by hand ------------------------------------------------------------------------------------


def end_offset(raw: RawClient, table: Table) -> int:
    """The end offset of the changelog of the only bucket."""
    return raw.end_offset(table.info.table_id)


def put_code(
    raw: RawClient,
    table_id: int,
    records: bytes,
    *,
    mode: int = MergeMode.AGGREGATE,
    targets: Sequence[int] = (),
) -> int:
    """Put a batch; the error code of the bucket, or of the request."""
    request = put_request(table_id, records, targets=targets)
    request.agg_mode = mode
    try:
        (entry,) = raw.call(ApiKey.PUT_KV, request, PUT_VERSION).buckets_resp
    except ZuflussError as e:
        return int(e.code)
    return int(entry.error_code)


def refusal(raw: RawClient, table: TableDescriptor | bytes) -> ZuflussError | None:
    """Request a table by raw JSON; returns the error of the answer."""
    request = m.CreateTableRequest(
        table_path=table_path(DATABASE, fresh_name()),
        table_json=table if isinstance(table, bytes) else table.to_json(),
        ignore_if_exists=False,
    )
    return raw.request(ApiKey.CREATE_TABLE, request).error


def described(columns: str, **properties: str) -> TableDescriptor:
    """An aggregation table with the key `k`; properties as for `aggregated`."""
    named = {k.replace("__", ".").replace("_", "-"): v for k, v in properties.items()}
    return TableDescriptor(
        Schema.of(f"k INT, {columns}", ["k"]), bucket_count=1, properties={**ENGINE, **named}
    )
