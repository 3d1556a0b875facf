"""First values: puts may leave them out, and a NULL is none, as on a real Fluss.

The same whole rows, partial puts, partial deletes and overwrites gave the same values on a real
Fluss 0.9.1, before and after a kill -9 of its tablet server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import fluss
import pytest

import zufluss
from tests.end_to_end.aggregation.flink_sink import FlinkSink, SinkTable
from tests.end_to_end.aggregation.tables import (
    aggregated,
    changes,
    delete,
    fresh_name,
    put,
    values,
)
from tests.end_to_end.helpers import connected, in_time
from tests.end_to_end.kv import changelog, lookup, upsert
from tests.end_to_end.raw import RawClient
from zufluss.client.sync.connection import Connection
from zufluss.model.schema import Schema
from zufluss.testing.server import DevServer

BOTH_NAMES = "a STRING FIRST_VALUE, b STRING FIRST_VALUE_IGNORE_NULLS, n INT FIRST_VALUE"
FIRST_AND_SUM = "a STRING FIRST_VALUE, n BIGINT SUM"
FIRST_WITH_NULL = "at BIGINT MIN, a STRING MIN_BY(by = at), n BIGINT SUM"
HERE = (None, 0)


@pytest.mark.parametrize("together", [True, False], ids=["one batch", "four puts"])
def test_the_first_value_that_is_not_null_stays_under_both_names(
    conn: Connection, together: bool
) -> None:
    table = aggregated(conn, BOTH_NAMES)
    rows = [
        (1, None, None, None),
        (1, "x", "y", None),
        (1, None, None, 7),
        (1, "later", "later", 8),
    ]
    for few in [rows] if together else [[row] for row in rows]:
        put(table, *few)
    assert values(table, 1) == ("x", "y", 7)


def test_a_column_that_no_put_has_named_waits_for_its_first_value(conn: Connection) -> None:
    table = aggregated(conn, FIRST_AND_SUM)
    put(table, (1, 5), (1, 6), columns=["k", "n"])
    put(table, (1, None), columns=["k", "a"])
    put(table, (1, "x"), (1, "late"), columns=["k", "a"])
    put(table, (1, 1), columns=["k", "n"])
    assert [tuple(row.values())[1:] for _, row in changes(table)] == [
        (None, 5),
        *[(None, 5), (None, 11)],
        *[(None, 11), (None, 11)],
        *[(None, 11), ("x", 11)],
        *[("x", 11), ("x", 12)],
    ]


def test_a_partial_delete_and_an_overwrite_with_null_take_the_first_value_away(
    conn: Connection,
) -> None:
    table = aggregated(conn, FIRST_AND_SUM, table__delete__behavior="ALLOW")
    put(table, (1, "old", 1), (2, "old", 2))
    delete(table, 1, columns=["k", "a"])
    put(table, (2, None), columns=["k", "a"], mode="overwrite")
    assert (values(table, 1), values(table, 2)) == ((None, 1), (None, 2))
    put(table, (1, "new"), (2, "new"), (1, "late"), columns=["k", "a"])
    assert (values(table, 1), values(table, 2)) == (("new", 1), ("new", 2))


def test_a_retract_may_leave_the_first_value_out(conn: Connection) -> None:
    table = aggregated(conn, FIRST_AND_SUM)
    put(table, (1, 5), columns=["k", "n"])
    put(table, (1, 2), columns=["k", "n"], mode="retract")
    put(table, (1, "x"), columns=["k", "a"])
    assert values(table, 1) == ("x", 3)


@pytest.mark.parametrize("pre_aggregate", [False, True])
def test_rows_that_the_writer_aggregates_first_have_the_same_first_values(
    conn: Connection, pre_aggregate: bool
) -> None:
    table = aggregated(conn, FIRST_AND_SUM)
    with table.upsert(pre_aggregate=pre_aggregate) as writer:
        writer.write({"k": [1, 1, 2], "a": [None, "x", None], "n": [1, 1, 1]})
        writer.flush()
        writer.write({"k": [1, 2, 2], "a": ["late", "y", "late"], "n": [1, 1, 1]})
    assert (values(table, 1), values(table, 2)) == (("x", 3), ("y", 3))


async def test_puts_of_pyfluss_that_leave_first_values_out_survive_kill_9(
    new_server: Callable[..., DevServer],
) -> None:
    """Some rows come back from a snapshot, others from the changelog."""
    server = new_server({"kv.snapshot.interval": "200ms"})
    with zufluss.connect(server.bootstrap) as connection:
        info = aggregated(connection, FIRST_AND_SUM).info

    def row(key: int, a: str | None, n: int | None) -> dict[str, Any]:
        return {"k": key, "a": a, "n": n}

    path = fluss.TablePath(*str(info.path).split("."))
    async with connected(server.bootstrap) as theirs:
        table = await in_time(theirs.get_table(path))
        await upsert(table, *({"k": k, "n": 5} for k in (1, 2, 3)), columns=["k", "n"])
        await upsert(table, {"k": 1, "a": None}, {"k": 2, "a": "x"}, columns=["k", "a"])
        assert await lookup(table, [1]) == row(1, None, 5)
    server.kill()
    server.start()
    async with connected(server.bootstrap) as theirs:
        table = await in_time(theirs.get_table(path))
        await upsert(table, *({"k": k, "a": "y"} for k in (1, 2, 3)), columns=["k", "a"])
        found = [await lookup(table, [key]) for key in (1, 2, 3)]
        assert found == [row(1, "y", 5), row(2, "x", 5), row(3, "y", 5)]
        assert [(kind, r) for _, kind, r in await changelog(table, 9)] == [
            *[("+I", row(key, None, 5)) for key in (1, 2, 3)],
            *[("-U", row(2, None, 5)), ("+U", row(2, "x", 5))],
            *[("-U", row(1, None, 5)), ("+U", row(1, "y", 5))],
            *[("-U", row(3, None, 5)), ("+U", row(3, "y", 5))],
        ]


def test_a_first_value_that_is_added_to_a_table_survives_kill_9(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server({"kv.snapshot.interval": "200ms"})
    with zufluss.connect(server.bootstrap) as connection:
        table = aggregated(connection, "n BIGINT SUM")
        put(table, (1, 5), (2, 5))
        connection.admin.alter_table(table.info.path, add_columns="a STRING FIRST_VALUE")
        table = connection.table(table.info.path)
        put(table, (1, 1, None), (2, 1, "x"))
        path = table.info.path
    server.kill()
    server.start()
    with zufluss.connect(server.bootstrap) as connection:
        table = connection.table(path)
        put(table, (1, "y"), (2, "y"), columns=["k", "a"])
        assert (values(table, 1), values(table, 2)) == ((6, "y"), (6, "x"))


# -- undo ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("undo", ["server", "client"])
def test_a_first_value_that_was_undone_is_set_again_by_the_replay(
    conn: Connection, undo: Literal["server", "client"]
) -> None:
    """Another writer made the row before, so the undo leaves it, with a NULL."""
    table = aggregated(conn, "a STRING FIRST_VALUE, m BIGINT SUM, n BIGINT SUM")
    put(table, (1, 5), (2, 5), columns=["k", "n"])
    writer = table.exactly_once_writer("job", columns=["k", "a", "m"])
    writer.write({"k": [2], "a": ["kept"], "m": [1]})
    state = writer.checkpoint()
    writer.write({"k": [1, 2, 3], "a": [None, "late", "x"], "m": [1, 1, 1]})
    writer.write({"k": [1], "a": ["x"], "m": [1]})
    writer.flush()
    assert [values(table, key) for key in (1, 2, 3)] == [
        ("x", 2, 5),
        ("kept", 2, 5),
        ("x", 1, None),
    ]
    again = table.exactly_once_writer(state=state, undo=undo)
    assert [values(table, key) for key in (1, 2, 3)] == [(None, None, 5), ("kept", 1, 5), None]
    again.write({"k": [1, 3], "a": ["y", "z"], "m": [1, 1]})
    again.release()
    assert [values(table, key) for key in (1, 3)] == [("y", 1, 5), ("z", 1, None)]


def test_a_first_value_that_flinks_sink_undoes_is_set_again_by_the_replay(raw: RawClient) -> None:
    """Its undo is an OVERWRITE put of values: it could not tell the server that none was set."""
    schema = Schema.of("k INT, a STRING FIRST_VALUE, m BIGINT SUM, n BIGINT SUM", ["k"])
    table = SinkTable.create(raw, fresh_name(), schema)
    FlinkSink(table, "other-job", columns=(0, 3)).start().write(HERE, (1, None, None, 5))
    job = f"job-{table.table_id}"
    for first in ("x", "y"):
        sink = FlinkSink(table, job, columns=(0, 1, 2)).start()
        assert table.rows(HERE, (1,), (2,)) == [(1, None, None, 5), None]
        sink.write(HERE, (1, None, 1, None), (1, first, 1, None), (2, first, 1, None))
        assert table.rows(HERE, (1,), (2,)) == [(1, first, 2, 5), (2, first, 1, None)]


# -- a first value that may be NULL --------------------------------------------------------------


def test_min_by_keeps_a_null_that_came_first_and_puts_may_leave_it_out(conn: Connection) -> None:
    """The column that decides says whether a put has named the value, in rows and changelogs."""
    table = aggregated(conn, FIRST_WITH_NULL)
    put(table, (1, 5), (2, 5), columns=["k", "n"])
    put(table, (1, 10, None), columns=["k", "at", "a"])
    put(table, (1, 11, "late"), (2, 11, "x"), (2, 12, None), columns=["k", "at", "a"])
    assert (values(table, 1), values(table, 2)) == ((10, None, 5), (11, "x", 5))


@pytest.mark.parametrize("undo", ["server", "client"])
def test_an_undo_of_min_by_keeps_a_null_that_came_first_and_forgets_a_later_one(
    conn: Connection, undo: Literal["server", "client"]
) -> None:
    table = aggregated(conn, FIRST_WITH_NULL)
    put(table, (1, 5), (2, 5), columns=["k", "n"])
    writer = table.exactly_once_writer("job")
    writer.write({"k": [1], "at": [10], "a": [None], "n": [1]})
    state = writer.checkpoint()
    writer.write({"k": [1, 2], "at": [11, 11], "a": ["late", None], "n": [1, 1]})
    writer.flush()
    assert (values(table, 1), values(table, 2)) == ((10, None, 7), (11, None, 6))
    again = table.exactly_once_writer(state=state, undo=undo)
    assert (values(table, 1), values(table, 2)) == ((10, None, 6), (None, None, 5))
    again.write({"k": [1, 2], "at": [12, 12], "a": ["late", "x"], "n": [1, 1]})
    again.release()
    assert (values(table, 1), values(table, 2)) == ((10, None, 7), (12, "x", 6))
