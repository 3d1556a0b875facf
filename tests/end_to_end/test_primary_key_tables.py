"""Primary-key tables through pyfluss: upsert, delete, look up, follow the changelog.

Everything here was tried with a real Fluss server first. The oracle of the longer runs is
`tests.kv.model`: what the table holds and what its changelog says, in plain Python.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import create, end_offsets, in_time, refused
from tests.end_to_end.kv import (
    KEYED,
    changelog,
    create_keyed,
    delete,
    limit_scan,
    lookup,
    lookups,
    upsert,
    writer_of,
)
from tests.kv.model import Change, Model, Rules, fold

BUCKETS = 5


@pytest.fixture
async def table(conn: fluss.FlussConnection, path: fluss.TablePath) -> fluss.FlussTable:
    return await create_keyed(conn, path)


def row(key: int, text: str | None = None, n: int | None = None) -> dict[str, Any]:
    return {"id": key, "text": text, "n": n}


async def end(conn: fluss.FlussConnection, table: fluss.FlussTable) -> int:
    """The end of the only bucket's changelog."""
    return (await end_offsets(conn.get_admin(), table.get_table_path()))[0]


async def test_a_row_is_found_by_its_key_and_other_keys_are_not(table: fluss.FlussTable) -> None:
    await upsert(table, [1, "one", 10], {"id": 2, "text": "two", "n": 20}, (3, None, None))
    assert await lookup(table, [1]) == row(1, "one", 10)
    assert await lookup(table, {"id": 2}) == row(2, "two", 20)
    assert await lookup(table, (3,)) == row(3)
    assert await lookup(table, [4]) is None


async def test_the_last_row_of_a_key_wins(table: fluss.FlussTable) -> None:
    await upsert(table, [1, "old", 1])
    await upsert(table, [1, "new", None])
    assert await lookup(table, [1]) == row(1, "new", None)


async def test_inserts_updates_and_deletes_are_in_the_changelog_with_their_offsets(
    conn: fluss.FlussConnection, table: fluss.FlussTable
) -> None:
    await upsert(table, [1, "a", 1], [2, "b", 2])
    await upsert(table, [1, "c", 3])
    await delete(table, [2])
    assert await changelog(table, 5) == [
        (0, "+I", row(1, "a", 1)),
        (1, "+I", row(2, "b", 2)),
        (2, "-U", row(1, "a", 1)),
        (3, "+U", row(1, "c", 3)),
        (4, "-D", row(2, "b", 2)),
    ]
    assert await end(conn, table) == 5


async def test_an_update_with_the_same_row_is_an_update_too(table: fluss.FlussTable) -> None:
    await upsert(table, [1, "same", 1])
    await upsert(table, [1, "same", 1])
    kinds = [(offset, kind) for offset, kind, _ in await changelog(table, 3)]
    assert kinds == [(0, "+I"), (1, "-U"), (2, "+U")]


async def test_the_delete_of_an_unknown_key_changes_nothing_and_takes_one_offset(
    conn: fluss.FlussConnection, table: fluss.FlussTable
) -> None:
    await upsert(table, [1, "a", 1])
    await delete(table, [99])
    assert await end(conn, table) == 2
    await delete(table, [98], [97], [96])
    assert await end(conn, table) == 3
    await upsert(table, [2, "b", 2])
    records = await changelog(table, 2)
    assert [(offset, kind) for offset, kind, _ in records] == [(0, "+I"), (3, "+I")]


async def test_records_of_one_batch_see_each_other_in_order(
    conn: fluss.FlussConnection, table: fluss.FlussTable
) -> None:
    writer = writer_of(table)
    writer.upsert([1, "first", 1])
    writer.upsert([1, "second", 2])
    writer.delete([1])
    writer.delete([1])
    writer.upsert([1, "third", 3])
    await in_time(writer.flush())
    assert await changelog(table, 5) == [
        (0, "+I", row(1, "first", 1)),
        (1, "-U", row(1, "first", 1)),
        (2, "+U", row(1, "second", 2)),
        (3, "-D", row(1, "second", 2)),
        (4, "+I", row(1, "third", 3)),
    ]
    assert await lookup(table, [1]) == row(1, "third", 3)
    assert await end(conn, table) == 5


async def test_a_deleted_key_is_gone_and_can_be_inserted_again(table: fluss.FlussTable) -> None:
    await upsert(table, [1, "a", 1])
    await delete(table, {"id": 1})
    assert await lookup(table, [1]) is None
    await upsert(table, [1, "b", 2])
    assert await lookup(table, [1]) == row(1, "b", 2)
    assert [kind for _, kind, _ in await changelog(table, 3)] == ["+I", "-D", "+I"]


async def test_a_lookup_sees_a_write_as_soon_as_it_is_acknowledged(
    table: fluss.FlussTable,
) -> None:
    writer, lookuper = writer_of(table), table.new_lookup().create_lookuper()
    for n in range(20):
        handle = writer.upsert([1, "x" * n, n])
        await in_time(writer.flush())
        await in_time(handle.wait())
        assert await in_time(lookuper.lookup([1])) == row(1, "x" * n, n)


async def test_many_lookups_at_once_get_each_their_own_row(table: fluss.FlussTable) -> None:
    await upsert(table, *([i, f"row {i}", i] for i in range(300)))
    lookuper = table.new_lookup().create_lookuper()

    async def one(key: int) -> Any:
        return await lookuper.lookup([key])

    keys = [*range(0, 400, 3), 7, 7, 399, 0]
    found = await in_time(asyncio.gather(*map(one, keys)))
    assert found == [row(k, f"row {k}", k) if k < 300 else None for k in keys]


@pytest.mark.parametrize(
    "columns", [["n", "id"], [2], ["text"], [0, 1, 2], ["id"]], ids=lambda c: "-".join(map(str, c))
)
async def test_a_projected_changelog_keeps_kinds_and_offsets(
    table: fluss.FlussTable, columns: list[int | str]
) -> None:
    await upsert(table, [1, "a", 1], [2, None, None])
    await delete(table, [7])
    await upsert(table, [1, "b", None])
    await delete(table, [2])
    whole = await changelog(table, 5)
    names = [c if isinstance(c, str) else KEYED.names[c] for c in columns]
    expected = [(offset, kind, {n: r[n] for n in names}) for offset, kind, r in whole]
    assert [offset for offset, _, _ in whole] == [0, 1, 3, 4, 5]
    assert await changelog(table, 5, columns=columns) == expected


async def test_the_changelog_can_be_read_from_any_offset(table: fluss.FlussTable) -> None:
    await upsert(table, *([i, "a", i] for i in range(5)))
    await upsert(table, *([i, "b", i] for i in range(5)))
    whole = await changelog(table, 15)
    for start in (0, 3, 5, 6, 11, 14):
        assert await changelog(table, 15 - start, {0: start}) == whole[start:]


async def test_a_limit_scan_gives_whole_rows_in_the_order_of_their_keys(
    table: fluss.FlussTable,
) -> None:
    assert (await limit_scan(table, 10)).num_rows == 0
    await upsert(table, *([i, f"row {i}", i] for i in range(9, -1, -1)))
    await delete(table, [3])
    expected = [row(i, f"row {i}", i) for i in (0, 1, 2, 4, 5, 6, 7, 8, 9)]
    for limit in (1, 4, 9, 100):
        assert (await limit_scan(table, limit)).to_pylist() == expected[:limit]
    projected = await limit_scan(table, 2, columns=["n", "id"])
    assert projected.to_pylist() == [{"n": 0, "id": 0}, {"n": 1, "id": 1}]


COMPOSITE = pa.schema(
    [("v", pa.string()), ("b", pa.string()), ("a", pa.int32()), ("c", pa.int64())]
)


async def test_a_composite_key_is_found_by_all_its_columns(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create_keyed(conn, path, COMPOSITE, ["a", "b", "c"], bucket_count=3)
    keys = [(1, "", 0), (1, "x", 0), (1, "x", 1), (-1, "x", 2**62), (300, "ü", -1)]
    for a, b, c in keys:
        await upsert(table, {"v": f"{a}/{b}/{c}", "b": b, "a": a, "c": c})
    for a, b, c in keys:
        expected = {"v": f"{a}/{b}/{c}", "b": b, "a": a, "c": c}
        assert await lookup(table, {"a": a, "b": b, "c": c}) == expected
        assert await lookup(table, [a, b, c]) == expected
    assert await lookup(table, [1, "x", 2]) is None
    await delete(table, [1, "x", 0])
    assert await lookup(table, [1, "x", 0]) is None
    assert await lookup(table, [1, "x", 1]) is not None


async def test_a_table_may_consist_of_its_key_only(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create_keyed(conn, path, pa.schema([("id", pa.int64()), ("s", pa.string())]),
                               ["id", "s"])  # fmt: skip
    await upsert(table, [1, "a"])
    await upsert(table, [1, "a"], [1, "b"])
    await delete(table, [1, "b"])
    assert [kind for _, kind, _ in await changelog(table, 5)] == ["+I", "-U", "+U", "+I", "-D"]
    assert await lookups(table, [[1, "a"], [1, "b"]]) == [{"id": 1, "s": "a"}, None]


async def test_rows_spread_over_buckets_and_are_found_in_all_of_them(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create_keyed(conn, path, bucket_count=BUCKETS)
    await upsert(table, *([i, f"row {i}", i] for i in range(200)))
    ends = await end_offsets(conn.get_admin(), path, range(BUCKETS))
    assert sum(ends.values()) == 200
    assert min(ends.values()) > 0
    scanned = [(await limit_scan(table, 1000, b)).to_pylist() for b in range(BUCKETS)]
    assert [len(rows) for rows in scanned] == [ends[b] for b in range(BUCKETS)]
    assert sorted(r["id"] for rows in scanned for r in rows) == list(range(200))
    assert await lookups(table, [[i] for i in range(0, 200, 17)]) == [
        row(i, f"row {i}", i) for i in range(0, 200, 17)
    ]


async def test_big_rows_and_big_keys_come_back(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create_keyed(
        conn, path, pa.schema([("k", pa.string()), ("v", pa.binary())]), ["k"]
    )
    rows = [{"k": f"{i}" * (1 << i), "v": bytes([i]) * (1 << (i + 4))} for i in range(10)]
    rows.append({"k": "long", "v": bytes(500_000)})
    for one in rows:
        await upsert(table, one)
    assert await lookups(table, [[r["k"]] for r in rows]) == rows


async def test_a_null_in_the_key_is_refused_by_the_client_and_nothing_is_written(
    conn: fluss.FlussConnection, table: fluss.FlussTable
) -> None:
    with refused(-2):
        writer_of(table).upsert([None, "a", 1])
    assert await end(conn, table) == 0


async def test_a_log_table_has_no_upsert_and_no_lookup(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    with pytest.raises(fluss.FlussError):
        table.new_upsert().create_writer()
    with pytest.raises(fluss.FlussError):
        table.new_lookup().create_lookuper()


@pytest.mark.parametrize("seed", range(3))
async def test_any_mix_of_upserts_and_deletes_is_as_the_model_says(
    conn: fluss.FlussConnection, table: fluss.FlussTable, seed: int
) -> None:
    rng, model = random.Random(seed), Model(Rules(3, (0,)))
    for number in range(12):
        keys = [rng.randrange(12) for _ in range(rng.randint(1, 8))]
        if rng.random() < 0.7:
            rows = [(k, rng.choice([None, f"{number}"]), rng.choice([None, k])) for k in keys]
            model.upsert(*rows)
            await upsert(table, *rows)
        else:
            model.delete(*((k,) for k in keys))
            await delete(table, *([k] for k in keys))
    await agrees(conn, table, model, [(k,) for k in range(13)])


async def agrees(
    conn: fluss.FlussConnection, table: fluss.FlussTable, model: Model, keys: list[tuple[Any, ...]]
) -> None:
    """State and changelog of the table's only bucket are the model's, and each other's."""
    records = await changelog(table, len(model.changes))
    found = [Change(offset, kind, tuple(r.values())) for offset, kind, r in records]  # type: ignore[arg-type]
    assert found == model.changes
    assert fold(found, model.rules) == model.rows
    assert await end(conn, table) == model.end
    state = await lookups(table, [list(k) for k in keys])
    assert [r and tuple(r.values()) for r in state] == [model.rows.get(k) for k in keys]
    scanned = (await limit_scan(table, 10_000)).to_pylist()
    assert {model.rules.key(tuple(r.values())): tuple(r.values()) for r in scanned} == model.rows
