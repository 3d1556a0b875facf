"""Every function gives the result of the plain Python reference, for every type and order."""

from __future__ import annotations

import itertools
import random
from typing import Any

import fluss
import pytest

from tests.counts import rounds
from tests.end_to_end.aggregation.reference import (
    ANY,
    ORDERED,
    SAMPLES,
    TAKES,
    fitting,
    same,
    samples,
    value_of,
)
from tests.end_to_end.aggregation.tables import Row, aggregated, batch_of, changes
from tests.end_to_end.helpers import connected, in_time
from tests.end_to_end.kv import lookup, upsert
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.model.aggregate import FUNCTIONS
from zufluss.model.ddl import parse_type
from zufluss.model.types import Root
from zufluss.testing.server import DevServer

RANDOM, LENGTH = rounds(12, 200), 9
BY = "by"


def named(kind: str) -> str:
    """The name of the column of a type."""
    return "v_" + "".join(c if c.isalnum() else "_" for c in kind).lower()


def inputs_of(function: str, kind: str, rng: random.Random) -> list[list[Any]]:
    """Inputs of the keys: none, one value, values with NULLs before and after, many values."""
    known = samples(function, kind)
    one, other = known[-1], known[0]
    fixed = [[None], [one], [None, one], [one, None], [None, None], [one, one], [other, one, other]]
    some = [[rng.choice([None, *known]) for _ in range(LENGTH)] for _ in range(RANDOM)]
    return [fitting(function, kind, inputs) for inputs in (*fixed, *some)]


def table_for(conn: Connection, function: str) -> Table:
    """A table with one column of each type."""
    parameter = f"({BY} = {BY})" if function.endswith("_by") else ""
    columns = [f"{named(kind)} {kind} {function}{parameter}" for kind in TAKES[function]]
    deciding = f"{BY} DOUBLE {'MIN' if function == 'min_by' else 'MAX'}"
    return aggregated(conn, ", ".join([deciding, *columns]), buckets=2)


def write(table: Table, rows: dict[int, list[Row]]) -> None:
    """Write each key twice: all rows in one batch as `key`, one by one as `-1 - key`."""
    with table.upsert() as writer:
        writer.write(batch_of(table, list(itertools.chain.from_iterable(rows.values()))))
        writer.flush()
        for several in itertools.zip_longest(*rows.values()):
            once = [{**row, "k": -1 - row["k"]} for row in several if row is not None]
            writer.write(batch_of(table, once))
            writer.flush()


def stored(table: Table) -> dict[int, Row]:
    return {row["k"]: row for row in table.scan().to_arrow().to_pylist()}


def test_every_function_and_every_type_is_in_the_table_of_inputs() -> None:
    assert set(TAKES) == set(FUNCTIONS)
    assert {parse_type(kind).root for kind in ANY} == set(Root) == FUNCTIONS["last_value"].roots
    for name, kinds in TAKES.items():
        assert {parse_type(kind).root for kind in kinds} == FUNCTIONS[name].roots, name


@pytest.mark.parametrize("function", TAKES)
def test_a_function_gives_what_plain_python_says_for_every_type(
    conn: Connection, rng: random.Random, function: str
) -> None:
    table, kinds = table_for(conn, function), TAKES[function]
    given = {kind: inputs_of(function, kind, rng) for kind in kinds}
    keys = range(len(given[kinds[0]]))
    deciding = [
        [rng.choice([None, *SAMPLES["DOUBLE"]]) for _ in given[kinds[0]][key]] for key in keys
    ]
    write(
        table,
        {
            key: [
                {"k": key, BY: by, **{named(kind): given[kind][key][i] for kind in kinds}}
                for i, by in enumerate(deciding[key])
            ]
            for key in keys
        },
    )
    found = stored(table)
    assert len(found) == 2 * len(keys)
    for key, kind in itertools.product(keys, kinds):
        inputs = given[kind][key]
        expected = same(function, value_of(function, kind, inputs, deciding[key]))
        for under in (key, -1 - key):
            value = same(function, found[under][named(kind)])
            assert value == expected, (
                f"{function} of {kind}, key {under}: {inputs}, {deciding[key]}"
            )


@pytest.mark.parametrize("function", ["max_by", "min_by"])
def test_a_value_goes_with_the_greatest_or_least_of_any_type_that_has_an_order(
    conn: Connection, rng: random.Random, function: str
) -> None:
    columns = [
        f"{named(kind)} {kind} {function[:3]}, of_{named(kind)} INT {function}(by = {named(kind)})"
        for kind in ORDERED
    ]
    table = aggregated(conn, ", ".join(columns))
    given = {kind: inputs_of("max", kind, rng) for kind in ORDERED}
    numbered = {
        key: [
            {
                "k": key,
                **{named(kind): given[kind][key][i] for kind in ORDERED},
                **{f"of_{named(kind)}": i for kind in ORDERED},
            }
            for i in range(len(given["INT"][key]))
        ]
        for key in range(len(given["INT"]))
    }
    write(table, numbered)
    for key, row in stored(table).items():
        under = max(key, -1 - key)
        for kind in ORDERED:
            inputs = given[kind][under]
            expected = value_of(function, "INT", range(len(inputs)), inputs)
            assert row[f"of_{named(kind)}"] == expected, f"{function} by {kind}: {inputs}"


@pytest.mark.parametrize("rows", ["COMPACTED", "INDEXED"])
@pytest.mark.parametrize("log", ["ARROW", "COMPACTED"])
def test_functions_give_the_same_in_every_format_of_rows_and_changelogs(
    conn: Connection, rng: random.Random, rows: str, log: str
) -> None:
    columns = {name: kinds[-1] for name, kinds in TAKES.items() if not name.endswith("_by")}
    table = aggregated(
        conn,
        ", ".join(f"{name} {kind} {name}" for name, kind in columns.items()),
        **{"table.kv.format": rows, "table.log.format": log},
    )
    inputs = {name: inputs_of(name, kind, rng) for name, kind in columns.items()}
    keys = range(len(inputs["sum"]))
    write(
        table,
        {
            key: [
                {"k": key, **{name: inputs[name][key][i] for name in columns}}
                for i in range(len(inputs["sum"][key]))
            ]
            for key in keys
        },
    )
    found, last = stored(table), {row["k"]: row for _, row in changes(table)}
    for key, (name, kind) in itertools.product(keys, columns.items()):
        expected = same(name, value_of(name, kind, inputs[name][key]))
        for row in (found[key], found[-1 - key], last[key], last[-1 - key]):
            assert same(name, row[name]) == expected, f"{name} of {kind}: {inputs[name][key]}"


async def test_what_a_client_of_fluss_writes_and_reads_is_aggregated(
    server: DevServer, conn: Connection
) -> None:
    """pyfluss does not know the functions: they belong to the table."""
    table = aggregated(
        conn,
        "n BIGINT SUM, c INT COUNT, hi DOUBLE MAX, names STRING LISTAGG, f STRING FIRST_VALUE, "
        "l STRING LAST_VALUE, yes BOOLEAN BOOL_AND, tags ARRAY<INT> COLLECT",
    )
    rows: list[list[Any]] = [
        [1, 5, 9, 1.5, "a", None, "x", True, [1, 2]],
        [1, None, None, None, None, "late", None, None, None],
        [1, -7, 9, 0.5, "b", "later", "y", False, [2, 3]],
    ]
    path = fluss.TablePath(*str(table.info.path).split("."))
    async with connected(server.bootstrap) as connection:
        theirs = await in_time(connection.get_table(path))
        await upsert(theirs, *rows[:2])
        await upsert(theirs, rows[2])
        found = await lookup(theirs, [1])
    assert found == table.lookup(1)
    assert tuple(found.values())[1:] == (-2, 2, 1.5, "a,b", "late", "y", False, [1, 2, 3])
