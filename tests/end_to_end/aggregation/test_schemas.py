"""Partial updates write their own columns, and old rows merge, after columns were added.

Columns can only be added at the end: dropping and renaming is refused. So a position in a put
always means the same column, as an id would. Ownership of producers is stored by column id.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest

import zufluss
from tests.end_to_end.aggregation.tables import (
    DATABASE,
    DEFAULT_FUNCTION,
    aggregated,
    changes,
    put,
    put_code,
    values,
)
from tests.end_to_end.kv import Codec, kv_batch, raw_changelog
from tests.end_to_end.raw import RawClient, table_path
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import (
    ColumnLockedError,
    ErrorCode,
    InvalidTargetColumnError,
)
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

COLUMNS = "n BIGINT SUM, t STRING LISTAGG, m INT MAX"
TARGETS = ErrorCode.INVALID_TARGET_COLUMN


def added(conn: Connection, table: Table, columns: str) -> Table:
    """The table, opened again after a column was added."""
    conn.admin.alter_table(table.info.path, add_columns=columns)
    return conn.table(table.info.path)


# -- partial updates -----------------------------------------------------------------------------


def test_partial_updates_hit_their_columns_before_and_after_columns_are_added(
    conn: Connection, raw: RawClient
) -> None:
    old = aggregated(conn, COLUMNS)
    with old.upsert(["k", "m", "n"]) as writer:
        writer.write({"k": [1], "n": [5], "m": [7]})
        writer.flush()
        new = added(conn, old, "x BIGINT SUM, y STRING LISTAGG")
        writer.write({"k": [1], "n": [1], "m": [9]})
        writer.flush()
        assert values(new, 1) == (6, None, 9, None, None), "a writer that was there before"
    put(old, (1, "a"), columns=["k", "t"])
    put(new, (1, 2, "b"), columns=["k", "x", "t"])
    put(new, (1, "c", 10), columns=["k", "y", "m"])
    assert values(new, 1) == (6, "a,b", 10, 2, "c")
    assert values(old, 1) == (6, "a,b", 10), "readers of the old schema see its columns"


def test_positions_on_the_wire_are_of_the_same_columns_under_both_schemas(
    conn: Connection, raw: RawClient
) -> None:
    table = aggregated(conn, COLUMNS)
    first, table_id = Codec(table.schema, 1), table.info.table_id
    assert put_code(raw, table_id, kv_batch([first.put((1, 5, None, None))]), targets=[0, 1]) == 0
    new = added(conn, table, "x BIGINT SUM")
    second = Codec(new.schema, 2)
    old_rows = kv_batch([first.put((1, None, None, 3))])
    new_rows = kv_batch([second.put((1, 1, None, None, 40))], schema_id=2)
    assert put_code(raw, table_id, old_rows, targets=[3, 0]) == 0
    assert put_code(raw, table_id, new_rows, targets=[4, 0, 1]) == 0
    assert values(new, 1) == (6, None, 3, 40)
    assert put_code(raw, table_id, old_rows, targets=[0, 4]) == 0
    assert values(new, 1) == (6, None, 3, 40), "an old row has nothing for the new column"
    for targets in ([0, 5], [0, -1], [0, 1, 1, 9]):
        assert put_code(raw, table_id, new_rows, targets=targets) == TARGETS
    assert values(new, 1) == (6, None, 3, 40)


@pytest.mark.parametrize("verb", ["drop", "rename", "modify"])
def test_columns_cannot_be_dropped_or_renamed_so_no_position_changes_its_meaning(
    conn: Connection, raw: RawClient, verb: str
) -> None:
    table = aggregated(conn, COLUMNS)
    request = m.AlterTableRequest(
        table_path=table_path(DATABASE, table.info.path.table), ignore_if_not_exists=False
    )
    if verb == "drop":
        request.drop_columns.add(column_name="n")
    elif verb == "rename":
        request.rename_columns.add(old_column_name="n", new_column_name="o")
    else:
        request.modify_columns.add(column_name="n", column_position_type=0)
    code = raw.error_code(ApiKey.ALTER_TABLE, request)
    assert code == ErrorCode.INVALID_ALTER_TABLE_EXCEPTION
    put(table, (1, 5, 6), columns=["k", "n", "m"])
    assert values(table, 1) == (5, None, 6)


def test_columns_added_in_front_are_refused(conn: Connection, raw: RawClient) -> None:
    table = aggregated(conn, COLUMNS)
    for position in (1, 3):
        request = m.AlterTableRequest(
            table_path=table_path(DATABASE, table.info.path.table), ignore_if_not_exists=False
        )
        request.add_columns.add(
            column_name="x",
            data_type_json=b'{"type": "BIGINT"}',
            column_position_type=position,
            agg_function_type="sum",
        )
        code = raw.error_code(ApiKey.ALTER_TABLE, request)
        assert code == ErrorCode.INVALID_ALTER_TABLE_EXCEPTION


def test_a_producer_owns_its_columns_by_id_though_others_are_added(conn: Connection) -> None:
    table = aggregated(conn, COLUMNS)
    writer = table.exactly_once_writer("job", ["k", "m", "n"])
    writer.write({"k": [1], "n": [5], "m": [7]})
    kept = writer.checkpoint().to_bytes()
    writer.write({"k": [1], "n": [100], "m": [100]})
    writer.flush()
    new = added(conn, table, "x BIGINT SUM")
    put(new, (1, "a", 3), columns=["k", "t", "x"])
    with new.exactly_once_writer(state=kept) as again:
        assert again.columns == ("k", "n", "m")
        assert values(new, 1) == (5, "a", 7, 3), "what it wrote is undone, and nothing else"
        again.write({"k": [1], "n": [1], "m": [1]})
        again.flush()
        with pytest.raises(ColumnLockedError, match="columns n belong to producer job"):
            put(new, (1, 1), columns=["k", "n"])
        again.release()
    assert values(new, 1) == (6, "a", 7, 3)


def test_a_put_without_the_key_or_of_a_table_with_not_null_columns_is_refused(
    conn: Connection, raw: RawClient
) -> None:
    table = aggregated(conn, COLUMNS)
    fixed = aggregated(conn, "n BIGINT NOT NULL SUM, m INT MAX")
    with pytest.raises(InvalidTargetColumnError, match="lack k of the primary key"):
        table.upsert(["n", "m"])
    with pytest.raises(InvalidTargetColumnError, match="'n' is NOT NULL"):
        fixed.upsert(["k", "m"])
    rows = kv_batch([Codec(table.schema).put((1, 5, None, None))])
    assert put_code(raw, table.info.table_id, rows, targets=[1]) == TARGETS
    rows = kv_batch([Codec(fixed.schema).put((1, 5, 5))])
    for targets in ([0, 2], [0, 1]):
        assert put_code(raw, fixed.info.table_id, rows, targets=targets) == TARGETS
    assert (values(table, 1), values(fixed, 1)) == (None, None)


# -- added columns -------------------------------------------------------------------------------

NEW = (
    "s BIGINT SUM, p INT PRODUCT, c INT COUNT, hi DOUBLE MAX, lo DATE MIN, f STRING FIRST_VALUE, "
    "fi STRING FIRST_VALUE_IGNORE_NULLS, l STRING LAST_VALUE, li STRING LAST_VALUE_IGNORE_NULLS, "
    "ls STRING LISTAGG, a ARRAY<INT> ARRAY_AGG, co ARRAY<INT> COLLECT, yes BOOLEAN BOOL_AND, "
    "mb STRING MAX_BY(by = hi)"
)
NOTHING = (None,) * 14


def filled(number: int, text: str) -> tuple[Any, ...]:
    """A value for every column of `NEW`."""
    day = dt.date(2024, 1, number)
    lists = ([number], [number])
    return (number, number, number, number / 2, day, *[text] * 5, *lists, True, text)


def test_an_added_column_of_any_function_is_null_and_old_rows_merge_right(
    conn: Connection, raw: RawClient
) -> None:
    old = aggregated(conn, "n BIGINT SUM")
    put(old, (1, 5), (2, 6), (3, 7))
    new = added(conn, old, NEW)
    assert [values(new, key) for key in (1, 2, 3)] == [(n, *NOTHING) for n in (5, 6, 7)]
    put(new, (1, 1, *filled(3, "a")))
    put(new, (1, None, *filled(2, "b")), (4, 9, *filled(2, "z")))
    put(new, (2, None, *NOTHING))
    day = dt.date(2024, 1, 2)
    merged = (5, 6, 2, 1.5, day, "a", "a", "b", "b", "a,b", [3, 2], [3, 2], True, "a")
    fresh = (2, 2, 1, 1.0, day, *["z"] * 5, [2], [2], True, "z")
    assert values(new, 1) == (6, *merged)
    assert values(new, 4) == (9, *fresh)
    assert values(new, 2) == (6, None, None, 0, *NOTHING[3:]), "its rows are counted from now on"
    assert values(new, 3) == (7, *NOTHING), "nobody has written it"
    before = raw_changelog(raw, new.info.table_id, old.schema)[:3]
    assert [(kind, row) for _, kind, row in before] == [
        ("+I", (1, 5)), ("+I", (2, 6)), ("+I", (3, 7))
    ]  # fmt: skip
    after = changes(new)[3:5]
    assert [tuple(row.values()) for _, row in after] == [
        (1, 5, *NOTHING),
        (1, 6, 3, 3, 1, 1.5, dt.date(2024, 1, 3), *["a"] * 5, [3], [3], True, "a"),
    ], "the image before has the new columns too"


def test_writers_of_the_old_schema_leave_new_columns_as_they_are(conn: Connection) -> None:
    old = aggregated(conn, "n BIGINT SUM")
    with old.upsert() as writer:
        writer.write({"k": [1, 2], "n": [5, 5]})
        writer.flush()
        new = added(conn, old, NEW)
        put(new, (1, None, *filled(3, "a")))
        was = values(new, 1)
        writer.write({"k": [1, 2, 3], "n": [1, 1, 1]})
        writer.flush()
    assert was is not None
    assert values(new, 1) == (6, *was[1:])
    assert values(new, 2) == (6, *NOTHING)
    put(new, (3, None, *filled(2, "b")))
    row = values(new, 3)
    assert row is not None
    assert row[:4] == (1, 2, 2, 1)


def test_columns_added_twice_get_the_default_and_survive_kill_9(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server({"kv.snapshot.interval": "200ms"})
    with zufluss.connect(server.bootstrap) as connection:
        table = aggregated(connection, "n BIGINT SUM", **{DEFAULT_FUNCTION: "last_value"})
        put(table, (1, 5), (2, 5))
        table = added(connection, table, "x STRING")
        put(table, (1, 1, "a"))
        table = added(connection, table, "y INT MAX")
        put(table, (2, 1, "b", 4))
        path = table.info.path
    server.kill()
    server.start()
    with zufluss.connect(server.bootstrap) as connection:
        table = connection.table(path)
        assert [values(table, key) for key in (1, 2)] == [(6, "a", None), (6, "b", 4)]
        put(table, (1, 1, None, 3), (2, 1, "c", 3))
        assert [values(table, key) for key in (1, 2)] == [(7, None, 3), (7, "c", 4)]
