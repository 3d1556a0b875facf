"""Partial updates and partial deletes through pyfluss, by name and by index."""

from __future__ import annotations

import random
from typing import Any

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import refused
from tests.end_to_end.kv import changelog, create_keyed, delete, lookup, upsert, writer_of
from tests.end_to_end.test_primary_key_tables import agrees
from tests.kv.model import Model, Rules

WIDE = pa.schema(
    [("a", pa.string()), ("id", pa.int64()), ("b", pa.int32()), ("c", pa.list_(pa.int32()))]
)
NAMES = tuple(WIDE.names)
RULES = Rules(4, (1,))


@pytest.fixture
async def table(conn: fluss.FlussConnection, path: fluss.TablePath) -> fluss.FlussTable:
    return await create_keyed(conn, path, WIDE)


def row(a: Any, key: int, b: Any, c: Any) -> dict[str, Any]:
    return {"a": a, "id": key, "b": b, "c": c}


@pytest.mark.parametrize("columns", [["id", "b"], ["b", "id"]], ids=["key first", "key last"])
async def test_columns_by_name_are_taken_and_the_others_kept(
    table: fluss.FlussTable, columns: list[str]
) -> None:
    await upsert(table, ["text", 1, 10, [1, None]])
    await upsert(table, {"id": 1, "b": 11}, columns=columns)
    assert await lookup(table, [1]) == row("text", 1, 11, [1, None])
    assert (await changelog(table, 3))[1:] == [
        (1, "-U", row("text", 1, 10, [1, None])),
        (2, "+U", row("text", 1, 11, [1, None])),
    ]


async def test_columns_by_index_are_taken_and_the_others_kept(table: fluss.FlussTable) -> None:
    await upsert(table, ["text", 1, 10, [1]])
    await upsert(table, {"id": 1, "a": None, "c": [2, 3]}, columns=[1, 3, 0])
    assert await lookup(table, [1]) == row(None, 1, 10, [2, 3])


async def test_a_new_key_gets_nulls_for_what_was_not_given(table: fluss.FlussTable) -> None:
    await upsert(table, {"id": 7, "c": []}, columns=["id", "c"])
    assert await lookup(table, [7]) == row(None, 7, None, [])
    assert await changelog(table, 1) == [(0, "+I", row(None, 7, None, []))]


async def test_writers_of_different_columns_fill_one_row(table: fluss.FlussTable) -> None:
    await upsert(table, {"id": 1, "a": "left"}, columns=["id", "a"])
    await upsert(table, {"id": 1, "b": 2}, columns=["id", "b"])
    await upsert(table, {"id": 1, "c": [3]}, columns=["id", "c"])
    assert await lookup(table, [1]) == row("left", 1, 2, [3])


async def test_all_columns_named_are_a_whole_row(table: fluss.FlussTable) -> None:
    await upsert(table, ["old", 1, 1, [1]])
    await upsert(table, {"id": 1, "a": "new"}, columns=NAMES)
    assert await lookup(table, [1]) == row("new", 1, None, None)
    await delete(table, [1], columns=NAMES)
    assert await lookup(table, [1]) is None


async def test_only_the_key_inserts_once_and_then_does_nothing(
    conn: fluss.FlussConnection, table: fluss.FlussTable
) -> None:
    model = Model(RULES)
    for _ in range(2):
        await upsert(table, {"id": 1}, columns=["id"])
        model.upsert((None, 1, None, None), targets=[1])
    assert (len(model.changes), model.end) == (1, 2)
    await agrees(conn, table, model, [(1,)])


async def test_a_delete_of_only_the_key_rewrites_the_row_unless_it_is_empty(
    conn: fluss.FlussConnection, table: fluss.FlussTable
) -> None:
    model = Model(RULES)
    for row_ in (("text", 1, None, None), (None, 1, None, None)):
        model.upsert(row_)
        await upsert(table, row_)
        model.delete((1,), targets=[1])
        await delete(table, [1], columns=["id"])
    assert [c.kind for c in model.changes] == ["+I", "-U", "+U", "-U", "+U", "-D"]
    await agrees(conn, table, model, [(1,)])


async def test_a_partial_delete_empties_its_columns_and_then_removes_the_row(
    table: fluss.FlussTable,
) -> None:
    await upsert(table, ["text", 1, 10, [1]])
    await delete(table, [1], columns=["id", "a"])
    assert await lookup(table, [1]) == row(None, 1, 10, [1])
    await delete(table, [1], columns=["id", "b", "c"])
    assert await lookup(table, [1]) is None
    assert (await changelog(table, 4))[1:] == [
        (1, "-U", row("text", 1, 10, [1])),
        (2, "+U", row(None, 1, 10, [1])),
        (3, "-D", row(None, 1, 10, [1])),
    ]


@pytest.mark.parametrize("image", ["FULL", "WAL"])
async def test_columns_named_in_a_table_that_is_all_key_insert_once(
    conn: fluss.FlussConnection, path: fluss.TablePath, image: Any
) -> None:
    """Naming every column makes a put partial all the same: it shows here, and as +I with WAL."""
    model = Model(Rules(2, (0, 1), image=image))
    schema = pa.schema([("id", pa.int64()), ("s", pa.string())])
    table = await create_keyed(conn, path, schema, ["id", "s"], properties=model.rules.properties)
    for key, targets in (((1, "a"), ()), ((1, "a"), (0, 1)), ((1, "b"), (0, 1))):
        model.upsert(key, targets=targets)
        await upsert(table, key, columns=[schema.names[i] for i in targets])
    model.delete((1, "a"), targets=(0, 1))
    await delete(table, (1, "a"), columns=schema.names)
    await agrees(conn, table, model, [(1, "a"), (1, "b")])


@pytest.mark.parametrize("image", ["FULL", "WAL"])
@pytest.mark.parametrize("seed", range(2))
async def test_any_mix_of_partial_writers_is_as_the_model_says(
    conn: fluss.FlussConnection, path: fluss.TablePath, seed: int, image: Any
) -> None:
    model = Model(Rules(4, (1,), image=image))
    table = await create_keyed(conn, path, WIDE, properties=model.rules.properties)
    rng = random.Random(seed)
    for _ in range(25):
        targets = rng.choice([(), (1,), (1, 2), (0, 1), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
        keys = [rng.randrange(6) for _ in range(rng.randint(1, 5))]
        names = [NAMES[i] for i in targets] or None
        if rng.random() < 0.3:
            model.delete(*((k,) for k in keys), targets=targets)
            await delete(table, *([k] for k in keys), columns=names)
            continue
        rows = [(rng.choice([None, "a", "b"]), k, rng.choice([None, 1, 2]), rng.choice([None, [4]]))
                for k in keys]  # fmt: skip
        model.upsert(*rows, targets=targets)
        given = [{n: r[NAMES.index(n)] for n in names or NAMES} for r in rows]
        await upsert(table, *given, columns=names)
    await agrees(conn, table, model, [(k,) for k in range(7)])


@pytest.mark.parametrize("columns", [["a"], [0, 2], ["b", "c"]], ids=str)
async def test_columns_without_the_key_are_refused(
    table: fluss.FlussTable, columns: list[int | str]
) -> None:
    with refused(-2, 35):
        writer_of(table, columns)


async def test_an_unknown_column_is_refused(table: fluss.FlussTable) -> None:
    with pytest.raises(fluss.FlussError):
        writer_of(table, ["id", "nope"])
    with pytest.raises(fluss.FlussError):
        writer_of(table, [1, 9])
