"""The changelog has whole rows before and after a change; full and partial deletes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import fluss
import pytest

from tests.counts import rounds
from tests.end_to_end.aggregation.tables import (
    Change,
    Row,
    aggregated,
    changes,
    delete,
    end_offset,
    put,
    put_code,
    values,
)
from tests.end_to_end.helpers import connected, in_time
from tests.end_to_end.kv import Codec, changelog, kv_batch, raw_changelog
from tests.end_to_end.kv import delete as delete_by_pyfluss
from tests.end_to_end.kv import upsert as upsert_by_pyfluss
from tests.end_to_end.raw import RawClient
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.model.merge import MergeMode
from zufluss.testing.server import DevServer

COLUMNS = "n BIGINT SUM, t STRING LAST_VALUE_IGNORE_NULLS, tags ARRAY<INT> ARRAY_AGG"
DISABLED = ErrorCode.DELETION_DISABLED_EXCEPTION


def image(key: int, n: Any, t: Any, tags: Any) -> Row:
    return {"k": key, "n": n, "t": t, "tags": tags}


# -- images of rows ------------------------------------------------------------------------------


def test_inserts_updates_and_deletes_have_whole_images(conn: Connection, raw: RawClient) -> None:
    table = aggregated(conn, COLUMNS, table__delete__behavior="ALLOW")
    put(table, (1, 5, "a", [1]))
    put(table, (1, 2, None, [2]))
    delete(table, 1, 7)
    put(table, (1, 3, None, None))
    assert changes(table) == [
        ("+I", image(1, 5, "a", [1])),
        ("-U", image(1, 5, "a", [1])),
        ("+U", image(1, 7, "a", [1, 2])),
        ("-D", image(1, 7, "a", [1, 2])),
        ("+I", image(1, 3, None, None)),
    ]
    by_hand = raw_changelog(raw, table.info.table_id, table.schema)
    assert [(kind, row) for _, kind, row in by_hand] == [
        (kind, tuple(row.values())) for kind, row in changes(table)
    ]


def test_every_row_of_a_batch_has_its_change(conn: Connection) -> None:
    """Rows of one key in one batch are not combined: a reader sees every intermediate state."""
    table = aggregated(conn, "n BIGINT SUM, c INT COUNT")
    put(table, (1, 5, 0), (2, None, None), (1, 0, None), (1, -5, 0), (2, 1, None))
    assert [(kind, *row.values()) for kind, row in changes(table)] == [
        ("+I", 1, 5, 1),
        ("+I", 2, None, 0),
        ("-U", 1, 5, 1),
        ("+U", 1, 0, 2),
        ("-U", 2, None, 0),
        ("+U", 2, 1, 0),
    ]


async def test_a_client_of_fluss_reads_the_same_changes(
    server: DevServer, conn: Connection
) -> None:
    table = aggregated(conn, COLUMNS, table__delete__behavior="ALLOW")
    path = fluss.TablePath(*str(table.info.path).split("."))
    async with connected(server.bootstrap) as connection:
        theirs = await in_time(connection.get_table(path))
        await upsert_by_pyfluss(theirs, [1, 5, "a", [1]], [1, 2, None, None])
        await upsert_by_pyfluss(theirs, [1, None, None, None])
        await delete_by_pyfluss(theirs, [1])
        records = [(kind, row) for _, kind, row in await changelog(theirs, 6)]
    assert records == changes(table)
    assert [kind for kind, _ in records] == ["+I", "-U", "+U", "-U", "+U", "-D"]


def replayed(changes: list[Change]) -> dict[int, Row]:
    """Apply changes to rows; asserts that each before-image is the stored row."""
    rows: dict[int, Row] = {}
    for kind, row in changes:
        if kind == "+I":
            assert row["k"] not in rows
            rows[row["k"]] = row
        elif kind == "-D":
            assert rows.pop(row["k"]) == row
        else:
            if kind == "-U":
                assert rows[row["k"]] == row
            rows[row["k"]] = row
    return rows


def test_the_changelog_replayed_is_the_table_whatever_was_put(
    conn: Connection, rng: random.Random
) -> None:
    table = aggregated(conn, COLUMNS, table__delete__behavior="ALLOW")
    for _ in range(rounds(25, 400)):
        keys = [rng.randrange(5) for _ in range(rng.randrange(1, 6))]
        columns = rng.choice([None, ["k", "n"], ["k", "t", "tags"]])
        if rng.random() < 0.25:
            delete(table, *keys, columns=columns)
            continue
        names = columns or table.schema.names
        value = {
            "n": lambda: rng.choice([None, 0, 1, -3]),
            "t": lambda: rng.choice([None, "a", "b"]),
            "tags": lambda: rng.choice([None, [], [None, 7]]),
        }
        put(table, *([k, *(value[n]() for n in names[1:])] for k in keys), columns=columns)
    records = changes(table)
    assert {row["k"]: row for row in table.scan().to_arrow().to_pylist()} == replayed(records)
    updates = sum(kind == "+U" for kind, _ in records)
    idle = sum(a[1] == b[1] for a, b in itertools.pairwise(records) if b[0] == "+U")
    assert idle < updates, "an update that changes nothing is there only if its put has no other"


def test_an_update_that_changes_nothing_is_logged_if_its_put_has_nothing_else(
    conn: Connection, raw: RawClient
) -> None:
    """So a put that updates rows is seen at its end offset, as Fluss's undo needs it."""
    table = aggregated(conn, COLUMNS)
    put(table, (1, 5, "a", None), (2, 6, "b", None))
    put(table, (1, 0, None, None), (2, 1, None, None), (1, None, "a", None))
    assert end_offset(raw, table) == 4
    put(table, (2, None, "b", None), (1, 0, None, None), (1, None, "a", None))
    assert end_offset(raw, table) == 6
    assert changes(table, start=2) == [
        ("-U", image(2, 6, "b", None)),
        ("+U", image(2, 7, "b", None)),
        ("-U", image(1, 5, "a", None)),
        ("+U", image(1, 5, "a", None)),
    ]
    assert (values(table, 1), values(table, 2)) == ((5, "a", None), (7, "b", None))


# -- deletes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("behavior", [None, "IGNORE"])
def test_deletes_are_ignored_unless_the_table_says_otherwise(
    conn: Connection, raw: RawClient, behavior: str | None
) -> None:
    given = {} if behavior is None else {"table.delete.behavior": behavior}
    table = aggregated(conn, COLUMNS, **given)
    put(table, (1, 5, "a", None))
    delete(table, 1, 2)
    delete(table, 1, columns=["k", "n"])
    assert (values(table, 1), values(table, 2)) == ((5, "a", None), None)
    assert [kind for kind, _ in changes(table)] == ["+I"]


def test_deletes_are_an_error_where_they_are_disabled(conn: Connection, raw: RawClient) -> None:
    table = aggregated(conn, "n BIGINT SUM, t STRING LAST_VALUE", table__delete__behavior="DISABLE")
    put(table, (1, 5, "a"))
    for columns in (None, ["k", "n"]):
        with pytest.raises(ZuflussError, match="takes no deletes") as caught:
            delete(table, 1, columns=columns)
        assert caught.value.code == DISABLED
    codec, table_id = Codec(table.schema), table.info.table_id
    mixed = kv_batch([codec.put((2, 1, "b")), codec.delete((1,))])
    for mode in set(MergeMode) - {MergeMode.OVERWRITE}:
        assert put_code(raw, table_id, mixed, mode=mode) != 0, "the batch is refused as a whole"
    assert (values(table, 1), values(table, 2)) == ((5, "a"), None)
    assert put_code(raw, table_id, mixed, mode=MergeMode.OVERWRITE) == 0
    assert (values(table, 1), values(table, 2)) == (None, (1, "b"))


def test_deletes_remove_rows_where_they_are_allowed(conn: Connection) -> None:
    table = aggregated(conn, "n BIGINT SUM, f STRING FIRST_VALUE", table__delete__behavior="ALLOW")
    put(table, (1, 5, "a"), (2, 6, "b"))
    delete(table, 1, 3)
    assert (values(table, 1), values(table, 2)) == (None, (6, "b"))
    put(table, (1, 2, None))
    assert values(table, 1) == (2, None), "nothing is left of what was before"


def partial(conn: Connection) -> Table:
    return aggregated(
        conn,
        "n BIGINT SUM, c INT COUNT, t STRING LISTAGG, m DOUBLE MAX",
        table__delete__behavior="ALLOW",
    )


def test_a_partial_delete_sets_its_columns_to_null_and_no_others(conn: Connection) -> None:
    table = partial(conn)
    put(table, (1, 5, 1, "a", 1.5), (2, None, None, "b", None))
    delete(table, 1, 2, 9, columns=["k", "n", "t"])
    assert values(table, 1) == (None, 1, None, 1.5)
    assert values(table, 9) is None
    put(table, (1, 7, "z"), columns=["k", "n", "t"])
    assert values(table, 1) == (7, 1, "z", 1.5), "the functions begin anew"


def test_a_partial_delete_removes_a_row_of_which_nothing_is_left(conn: Connection) -> None:
    table = partial(conn)
    put(table, (1, 5, "a"), (2, None, None), columns=["k", "n", "t"])
    delete(table, 1, columns=["k", "n"])
    assert values(table, 1) == (None, None, "a", None)
    delete(table, 1, 2, columns=["k", "n", "t"])
    assert (values(table, 1), values(table, 2)) == (None, None)
    assert [(kind, *row.values()) for kind, row in changes(table)][2:] == [
        ("-U", 1, 5, None, "a", None),
        ("+U", 1, None, None, "a", None),
        ("-D", 1, None, None, "a", None),
        ("-D", 2, None, None, None, None),
    ]
