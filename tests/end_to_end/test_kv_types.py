"""Every data type in a primary-key table, as a value and as a key, through pyfluss."""

from __future__ import annotations

import asyncio
import datetime as dt
import math
from decimal import Decimal
from itertools import pairwise
from random import Random
from typing import Any

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import fresh_path, refused
from tests.end_to_end.kv import changelog, create_keyed, delete, limit_scan, lookup, lookups, upsert
from tests.end_to_end.samples import SAMPLES, Sample


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
async def test_a_type_comes_back_by_lookup_by_scan_and_in_the_changelog(
    conn: fluss.FlussConnection, path: fluss.TablePath, sample: Sample
) -> None:
    schema = pa.schema([("id", pa.int32()), ("x", sample.type)])
    table = await create_keyed(conn, path, schema)
    expected = sample.row_array()
    rows = [{"id": i, "x": value} for i, value in enumerate(expected.to_pylist())]
    await upsert(table, *rows)
    assert await lookups(table, [[row["id"]] for row in rows]) == rows
    assert [row for _, _, row in await changelog(table, len(rows))] == rows
    scanned = await limit_scan(table, 100)
    assert scanned.column("x").combine_chunks().equals(expected), scanned.to_pylist()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
async def test_an_old_value_of_every_type_stands_in_the_changelog(
    conn: fluss.FlussConnection, path: fluss.TablePath, sample: Sample
) -> None:
    schema = pa.schema([("id", pa.int32()), ("x", sample.type), ("last", pa.string())])
    table = await create_keyed(conn, path, schema)
    values = sample.row_array().to_pylist()
    for value in values:
        await upsert(table, {"id": 1, "x": value, "last": "end"})
    await delete(table, [1])
    records = await changelog(table, 2 * len(values))
    kinds = ["+I", *["-U", "+U"] * (len(values) - 1), "-D"]
    seen = [values[0], *(v for pair in pairwise(values) for v in pair)]
    assert [kind for _, kind, _ in records] == kinds
    assert [row["x"] for _, _, row in records] == [*seen, values[-1]]
    assert {row["last"] for _, _, row in records} == {"end"}


async def test_columns_that_compress_and_columns_that_do_not_are_read_from_one_changelog(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    """In one message some buffers are packed, some as they were, some are too small to try."""
    names = {"id": pa.int32(), "noise": pa.float64(), "text": pa.string(), "flag": pa.bool_()}
    table = await create_keyed(conn, path, pa.schema(list(names.items())))
    random = Random(4)
    for _ in range(3):
        values = ((i, random.random(), f"word {i % 7}", i % 3 == 0) for i in range(400))
        rows = [dict(zip(names, value, strict=True)) for value in values]
        await upsert(table, *rows)
    records = await changelog(table, 5 * 400)
    assert [kind for _, kind, _ in records] == ["+I"] * 400 + ["-U", "+U"] * 800
    assert [row for _, _, row in records[-799::2]] == rows
    noise = await changelog(table, len(records), columns=["noise"])
    assert [row["noise"] for _, _, row in noise] == [row["noise"] for _, _, row in records]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
async def test_not_a_number_is_a_value(
    conn: fluss.FlussConnection, path: fluss.TablePath, kind: pa.DataType
) -> None:
    table = await create_keyed(conn, path, pa.schema([("id", pa.int32()), ("x", kind)]))
    await upsert(table, [1, math.nan])
    rows = await lookup(table, [1])
    assert rows is not None
    assert math.isnan(rows["x"])


MICROS = dt.datetime(2033, 5, 18, 3, 33, 20, 1)
KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "boolean": (pa.bool_(), [True, False]),
    "tinyint": (pa.int8(), [0, 1, -1, 127, -128]),
    "smallint": (pa.int16(), [0, 1, -1, 32_767, -32_768]),
    "int": (pa.int32(), [0, 1, -1, 127, 128, 300, 2**31 - 1, -(2**31)]),
    "bigint": (pa.int64(), [0, 1, -1, 16_384, 2**63 - 1, -(2**63)]),
    "float": (pa.float32(), [0.0, 1.5, -1.5, 2.0**100]),
    "double": (pa.float64(), [0.0, 0.1, -0.1, 5e-324]),
    "string": (pa.string(), ["", "a", "ab", "zufluß → 水 🌊", "x" * 300]),
    "bytes": (pa.binary(), [b"", b"\x00", b"\x00\x00", b"\xff" * 200]),
    "binary_4": (pa.binary(4), [b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"abcd"]),
    "decimal_9_2": (pa.decimal128(9, 2), [Decimal("0.00"), Decimal("-1.25"), Decimal("9999.99")]),
    "decimal_38_10": (
        pa.decimal128(38, 10),
        [Decimal("0E-10"), Decimal("1E-10"), Decimal("-" + "9" * 28 + ".5000000000")],
    ),
    "date": (pa.date32(), [dt.date(1970, 1, 1), dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "time_s": (pa.time32("s"), [dt.time(0), dt.time(23, 59, 59)]),
    "time_ms": (pa.time32("ms"), [dt.time(0), dt.time(23, 59, 59, 999_000)]),
    "timestamp_ms": (pa.timestamp("ms"), [dt.datetime(1970, 1, 1), dt.datetime(2033, 1, 1)]),
    "timestamp_us": (pa.timestamp("us"), [dt.datetime(1970, 1, 1), MICROS]),
    "timestamp_ltz_us": (
        pa.timestamp("us", "UTC"),
        [dt.datetime(1970, 1, 1, tzinfo=dt.UTC), MICROS.replace(tzinfo=dt.UTC)],
    ),
}


@pytest.mark.parametrize("name", KEYS)
async def test_a_type_serves_as_key(
    conn: fluss.FlussConnection, path: fluss.TablePath, name: str
) -> None:
    kind, values = KEYS[name]
    schema = pa.schema([("k", kind), ("n", pa.int32())])
    table = await create_keyed(conn, path, schema, ["k"], bucket_count=3)
    await upsert(table, *({"k": value, "n": i} for i, value in enumerate(values)))
    expected = [{"k": value, "n": i} for i, value in enumerate(values)]
    assert await lookups(table, [[value] for value in values]) == expected
    await delete(table, [values[0]])
    assert await lookups(table, [[values[0]], [values[1]]]) == [None, expected[1]]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.map_(pa.int32(), pa.int32()), pa.struct([("a", pa.int32())])],
    ids=["array", "map", "row"],
)  # fmt: skip
async def test_a_nested_type_is_no_key(
    conn: fluss.FlussConnection, path: fluss.TablePath, kind: pa.DataType
) -> None:
    with refused(15, -2):
        await create_keyed(conn, path, pa.schema([("k", kind), ("n", pa.int32())]), ["k"])


WIDE = pa.schema([("id", pa.int64()), *((s.name, s.type) for s in SAMPLES)])


@pytest.fixture(scope="module")
def wide(conn: fluss.FlussConnection) -> fluss.FlussTable:
    """A table with a column of every type."""
    return asyncio.run(create_keyed(conn, fresh_path("kv_wide"), WIDE))


def wide_row(number: int) -> dict[str, Any]:
    """A row with a value of every type, and NULL in every place once in a while."""
    found: dict[str, Any] = {"id": number}
    for sample in SAMPLES:
        values = sample.row_array().to_pylist()
        found[sample.name] = values[number % len(values)]
    return found


async def test_rows_with_every_type_at_once_come_back(wide: fluss.FlussTable) -> None:
    rows = [wide_row(i) for i in range(40)]
    rows.append({"id": 40, **dict.fromkeys((s.name for s in SAMPLES), None)})
    await upsert(wide, *rows)
    assert await lookups(wide, [[i] for i in range(41)]) == rows
    scanned = (await limit_scan(wide, 100)).sort_by("id")
    for sample in SAMPLES:
        values = [row[sample.name] for row in rows]
        assert scanned.column(sample.name).combine_chunks().equals(pa.array(values, sample.type))
