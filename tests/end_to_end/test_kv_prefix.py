"""Prefix lookups through pyfluss: all rows under a bucket key that is a prefix of the key."""

from __future__ import annotations

import asyncio
from typing import Any

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import in_time
from tests.end_to_end.kv import create_keyed, delete, lookup, upsert

SCHEMA = pa.schema([("a", pa.int32()), ("b", pa.string()), ("c", pa.int64()), ("v", pa.string())])
KEY = ["a", "b", "c"]


async def under(table: fluss.FlussTable, prefix: Any, columns: list[str]) -> list[dict[str, Any]]:
    """The rows under a prefix."""
    return await in_time(table.new_lookup().lookup_by(columns).create_lookuper().lookup(prefix))


def row(a: int, b: str, c: int) -> dict[str, Any]:
    return {"a": a, "b": b, "c": c, "v": f"{a}{b}{c}"}


@pytest.fixture
async def table(conn: fluss.FlussConnection, path: fluss.TablePath) -> fluss.FlussTable:
    table = await create_keyed(conn, path, SCHEMA, KEY, bucket_keys=["a", "b"], bucket_count=3)
    rows = [row(a, b, c) for a in (1, 2, 300) for b in ("", "x", "xy") for c in (2, 0, 1)]
    await upsert(table, *rows)
    return table


async def test_all_rows_under_a_prefix_come_in_key_order(table: fluss.FlussTable) -> None:
    for a in (1, 2, 300):
        for b in ("", "x", "xy"):
            expected = [row(a, b, c) for c in (0, 1, 2)]
            assert await under(table, [a, b], ["a", "b"]) == expected
            assert await under(table, {"a": a, "b": b}, ["a", "b"]) == expected


async def test_an_unknown_prefix_has_no_rows(table: fluss.FlussTable) -> None:
    assert await under(table, [1, "xyz"], ["a", "b"]) == []
    assert await under(table, [3, "x"], ["a", "b"]) == []


async def test_updates_and_deletes_show_under_their_prefix(table: fluss.FlussTable) -> None:
    await delete(table, [1, "x", 1])
    await upsert(table, [1, "x", 0, "changed"], [1, "x", 7, None])
    expected = [
        {"a": 1, "b": "x", "c": 0, "v": "changed"},
        row(1, "x", 2),
        {"a": 1, "b": "x", "c": 7, "v": None},
    ]
    assert await under(table, [1, "x"], ["a", "b"]) == expected
    assert await lookup(table, [1, "x", 7]) == expected[2]
    await delete(table, [1, "x", 0], [1, "x", 2], [1, "x", 7])
    assert await under(table, [1, "x"], ["a", "b"]) == []
    assert await under(table, [1, "xy"], ["a", "b"]) == [row(1, "xy", c) for c in (0, 1, 2)]


async def test_rows_come_in_the_order_of_their_key_bytes(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    """A negative number is ten bytes of ones, so it stands after the positive ones."""
    table = await create_keyed(conn, path, SCHEMA, KEY, bucket_keys=["a"])
    numbers = [0, 1, 127, 128, 300, 16_384, -1, -(2**63)]
    await upsert(table, *([1, b, c, None] for b in ("z", "", "é") for c in numbers))
    found = [(r["b"], r["c"]) for r in await under(table, [1], ["a"])]
    assert found == sorted(found, key=key_bytes)
    assert len(found) == 3 * len(numbers)


def key_bytes(key: tuple[str, int]) -> bytes:
    text = key[0].encode()
    number, parts = key[1] & (2**64 - 1), bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([len(text)]) + text + bytes(parts) + bytes([number])


async def test_many_rows_under_one_prefix_and_many_prefixes_at_once(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create_keyed(conn, path, SCHEMA, KEY, bucket_keys=["a"], bucket_count=2)
    await upsert(table, *([a, "b", c, "v" * 50] for a in range(20) for c in range(100)))
    lookuper = table.new_lookup().lookup_by(["a"]).create_lookuper()

    async def one(a: int) -> list[int]:
        return sorted(r["c"] for r in await lookuper.lookup([a]))

    found = await in_time(asyncio.gather(*(one(a) for a in range(25))))
    assert found == [list(range(100))] * 20 + [[]] * 5


async def test_a_lookup_by_other_columns_is_refused(table: fluss.FlussTable) -> None:
    for columns in (["a"], ["b", "a"], ["v"], ["a", "b", "c", "v"]):
        with pytest.raises(fluss.FlussError):
            table.new_lookup().lookup_by(columns).create_lookuper()


async def test_a_prefix_of_a_partitioned_table_begins_with_its_partition(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    schema = pa.schema([("day", pa.string()), *SCHEMA])
    table = await create_keyed(
        conn, path, schema, ["day", *KEY], partition_keys=["day"], bucket_keys=["a"]
    )
    for day in ("mon", "tue"):
        await in_time(conn.get_admin().create_partition(path, {"day": day}))
        await upsert(table, *({"day": day, **row(a, "x", c)} for a in (1, 2) for c in (0, 1)))
    found = await under(table, ["tue", 2], ["day", "a"])
    assert found == [{"day": "tue", **row(2, "x", c)} for c in (0, 1)]
    assert await under(table, {"day": "mon", "a": 3}, ["day", "a"]) == []
