"""ALTER TABLE while pyfluss reads: old batches and new ones, each with its own schema.

pyfluss has no call to alter a table, so the request is sent by hand. It aligns old batches with
the table's schema when the scan asks for a fixed schema; otherwise each batch keeps its own.
"""

from __future__ import annotations

import json
from typing import Any

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import (
    IDS,
    append,
    arrow_scanner,
    create,
    ids,
    in_time,
    poll_batches,
    poll_records,
    read_arrow,
    record_scanner,
)
from tests.end_to_end.raw import RawClient, table_path
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

WIDER = pa.schema([*IDS, pa.field("score", pa.float64())])
REFUSED = 56


def add_column(path: fluss.TablePath, name: str, kind: dict[str, Any], position: int = 0) -> Any:
    request = m.AlterTableRequest(
        table_path=table_path(path.database_name, path.table_name), ignore_if_not_exists=False
    )
    request.add_columns.add(
        column_name=name,
        data_type_json=json.dumps(kind).encode(),
        column_position_type=position,
    )
    return request


def set_property(path: fluss.TablePath, key: str, value: str | None, op: int = 0) -> Any:
    request = m.AlterTableRequest(
        table_path=table_path(path.database_name, path.table_name), ignore_if_not_exists=False
    )
    change = request.config_changes.add(config_key=key, op_type=op)
    if value is not None:
        change.config_value = value
    return request


def scored(start: int, stop: int) -> pa.RecordBatch:
    old = ids(start, stop)
    return pa.RecordBatch.from_arrays(
        [*old.columns, pa.array([i / 2 for i in range(start, stop)])], schema=WIDER
    )


@pytest.fixture
async def evolved(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> fluss.FlussTable:
    """Ten rows with two columns, then ten with three."""
    await append(await create(conn, path), ids(0, 10))
    raw.call(ApiKey.ALTER_TABLE, add_column(path, "score", {"type": "DOUBLE"}))
    table = await in_time(conn.get_table(path))
    await append(table, scored(10, 20))
    return table


EXPECTED = [{"id": i, "text": f"row {i}", "score": None if i < 10 else i / 2} for i in range(20)]


async def test_the_table_has_a_new_schema_id_and_the_new_column_last(
    evolved: fluss.FlussTable,
) -> None:
    info = evolved.get_table_info()
    assert info.schema_id == 2
    assert info.get_column_names() == ["id", "text", "score"]
    assert evolved.arrow_schema == WIDER


async def test_records_of_both_schemas_are_read_with_nulls_for_what_was_not_there(
    evolved: fluss.FlussTable,
) -> None:
    scanner = await in_time(evolved.new_scan().with_fixed_schema(True).create_log_scanner())
    scanner.subscribe(0, fluss.EARLIEST_OFFSET)
    assert [r.row for r in await poll_records(scanner, 20)] == EXPECTED


async def test_arrow_batches_of_both_schemas_are_read_as_one_table(
    evolved: fluss.FlussTable,
) -> None:
    scan = evolved.new_scan().with_fixed_schema(True)
    scanner = await in_time(scan.create_record_batch_log_scanner())
    scanner.subscribe(0, fluss.EARLIEST_OFFSET)
    assert (await in_time(scanner.to_arrow())).to_pylist() == EXPECTED


async def test_batches_keep_the_schema_they_were_written_with(
    evolved: fluss.FlussTable,
) -> None:
    batches = await poll_batches(await arrow_scanner(evolved), 20)
    assert [b.batch.schema.names for b in batches] == [["id", "text"], ["id", "text", "score"]]


@pytest.mark.parametrize("columns", [["score"], ["score", "id"], ["id"], ["text", "score"]])
async def test_a_projection_reaches_into_batches_that_lack_the_column(
    evolved: fluss.FlussTable, columns: list[str]
) -> None:
    got = await read_arrow(evolved, columns=columns)
    assert got.to_pylist() == [{c: row[c] for c in columns} for row in EXPECTED]


async def test_a_scanner_and_a_writer_from_before_go_on(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> None:
    old = await create(conn, path)
    scanner = await record_scanner(old)
    await append(old, ids(0, 3))
    assert len(await poll_records(scanner, 3)) == 3
    raw.call(ApiKey.ALTER_TABLE, add_column(path, "score", {"type": "DOUBLE"}))
    await append(old, ids(3, 6))
    await append(await in_time(conn.get_table(path)), scored(6, 9))
    records = await poll_records(scanner, 6)
    assert [(r.row["id"], r.row["text"]) for r in records] == [(i, f"row {i}") for i in range(3, 9)]


async def test_every_schema_can_be_asked_for_by_its_id(
    evolved: fluss.FlussTable, raw: RawClient
) -> None:
    path = evolved.get_table_path()
    where = table_path(path.database_name, path.table_name)
    for schema_id, count in ((1, 2), (2, 3)):
        answer = raw.call(
            ApiKey.GET_TABLE_SCHEMA, m.GetTableSchemaRequest(table_path=where, schema_id=schema_id)
        )
        assert answer.schema_id == schema_id
        assert len(json.loads(answer.schema_json)["columns"]) == count
    latest = raw.call(ApiKey.GET_TABLE_SCHEMA, m.GetTableSchemaRequest(table_path=where))
    assert latest.schema_id == 2
    ids_given = [c["id"] for c in json.loads(latest.schema_json)["columns"]]
    assert ids_given == [0, 1, 2]


async def test_a_nested_column_is_added_and_read(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> None:
    await append(await create(conn, path), ids(0, 2))
    kind = {"type": "ARRAY", "element_type": {"type": "STRING"}}
    raw.call(ApiKey.ALTER_TABLE, add_column(path, "tags", kind))
    table = await in_time(conn.get_table(path))
    schema = pa.schema([*IDS, pa.field("tags", pa.list_(pa.string()))])
    await append(table, pa.record_batch([[2], ["x"], [["a", None]]], schema=schema))
    got = (await read_arrow(table, columns=["tags"])).column(0).to_pylist()
    assert got == [None, None, ["a", None]]


CHANGES: dict[str, Any] = {
    "existing column": lambda p: add_column(p, "text", {"type": "STRING"}),
    "not null": lambda p: add_column(p, "x", {"type": "STRING", "nullable": False}),
    "first": lambda p: add_column(p, "x", {"type": "STRING"}, position=1),
    "unalterable property": lambda p: set_property(p, "table.replication.factor", "1"),
    "unknown property": lambda p: set_property(p, "table.nonsense", "1"),
    "append to a property": lambda p: set_property(p, "table.log.ttl", "1d", op=2),
}


@pytest.mark.parametrize("case", CHANGES)
async def test_a_change_that_is_not_possible_is_refused_and_changes_nothing(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient, case: str
) -> None:
    await create(conn, path)
    assert raw.error_code(ApiKey.ALTER_TABLE, CHANGES[case](path)) == REFUSED
    info = await in_time(conn.get_admin().get_table_info(path))
    assert (info.schema_id, info.get_column_names()) == (1, ["id", "text"])


async def test_altered_properties_show_in_the_table(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> None:
    await create(conn, path, custom_properties={"team": "ops"})
    raw.call(ApiKey.ALTER_TABLE, set_property(path, "table.log.ttl", "2 d"))
    raw.call(ApiKey.ALTER_TABLE, set_property(path, "owner", "alice"))
    raw.call(ApiKey.ALTER_TABLE, set_property(path, "team", None, op=1))
    info = await in_time(conn.get_admin().get_table_info(path))
    assert info.get_properties()["table.log.ttl"] == "2 d"
    assert info.get_custom_properties() == {"owner": "alice"}
    assert info.schema_id == 1


async def test_altering_a_missing_table_is_refused_unless_ignored(
    path: fluss.TablePath, raw: RawClient
) -> None:
    request = set_property(path, "owner", "alice")
    assert raw.error_code(ApiKey.ALTER_TABLE, request) == 7
    request.ignore_if_not_exists = True
    assert raw.error_code(ApiKey.ALTER_TABLE, request) == 0
