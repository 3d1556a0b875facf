"""Filter push-down: batches whose statistics prove that no row matches are never sent.

Only whole batches are pruned, on both sides; so each batch here holds one range of values, and a
filter shows which ranges came through. pyfluss's bounded reads (`to_arrow`) end when a batch at
the end of the log arrives, and wait for ever when that one is pruned: every table here ends with
one that every filter lets through.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from decimal import Decimal
from typing import Any

import fluss
import pyarrow as pa
import pytest
from fluss import col

from tests.end_to_end.helpers import append, create, fresh_path, in_time, poll_records, read_arrow
from tests.end_to_end.raw import RawClient

DAY = dt.date(2026, 1, 1)
NOON = dt.datetime(2026, 1, 1, 12)
SCHEMA = pa.schema(
    [
        ("batch", pa.int32()),
        ("i8", pa.int8()),
        ("i64", pa.int64()),
        ("f64", pa.float64()),
        ("text", pa.string()),
        ("amount", pa.decimal128(10, 2)),
        ("big", pa.decimal128(30, 2)),
        ("day", pa.date32()),
        ("at", pa.timestamp("us")),
        ("atz", pa.timestamp("ms", "UTC")),
        ("clock", pa.time32("ms")),
        ("flag", pa.bool_()),
        ("empty", pa.string()),
        ("plain", pa.int64()),
    ]
)
MEASURED = [n for n in SCHEMA.names if n != "plain"]
BATCHES = 4
ROWS = 10
END = 99
"""Value of `batch` in the batch that ends a table."""


def batch(number: int) -> pa.RecordBatch:
    """Batch 0 has the values 0 to 9, batch 1 those from 10 to 19, and so on."""
    return pa.RecordBatch.from_pylist([row(number, number * ROWS + i) for i in range(ROWS)], SCHEMA)


def row(number: int, i: int) -> dict[str, Any]:
    return {
        "batch": number,
        "i8": i,
        "i64": i - 2**62,
        "f64": i / 4,
        "text": f"{i:04} and a long tail of text",
        "amount": Decimal(i) / 4,
        "big": Decimal(10) ** 25 + i,
        "day": DAY + dt.timedelta(days=i),
        "at": NOON + dt.timedelta(microseconds=i),
        "atz": (NOON + dt.timedelta(milliseconds=i)).replace(tzinfo=dt.UTC),
        "clock": dt.time(1, 0, i),
        "flag": number == 0,
        "empty": None if number == 1 else "x",
        "plain": i,
    }


@pytest.fixture(scope="module")
def measured(conn: fluss.FlussConnection) -> fluss.FlussTable:
    """Four batches with statistics, each a range of its own."""

    async def fill() -> fluss.FlussTable:
        path = fresh_path("statistics")
        properties = {"table.statistics.columns": ",".join(MEASURED)}
        table = await create(conn, path, SCHEMA, properties=properties)
        await append(table, *map(batch, range(BATCHES)), last_batch())
        return table

    return asyncio.run(fill())


def last_batch() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([row(END, 0)], SCHEMA)


async def filtered(scan: fluss.TableScan, predicate: fluss.Predicate) -> pa.Table:
    """What comes through the filter, without the batch that ends the table."""
    scan = scan.filter(predicate | (col("batch") == END))
    scanner = await in_time(scan.create_record_batch_log_scanner())
    scanner.subscribe(0, fluss.EARLIEST_OFFSET)
    rows = await in_time(scanner.to_arrow())
    assert rows.column("batch").to_pylist()[-1] == END
    return rows.slice(0, rows.num_rows - 1)


async def surviving(table: fluss.FlussTable, predicate: fluss.Predicate) -> list[int]:
    """Which batches came through the filter."""
    found = await filtered(table.new_scan(), predicate)
    return sorted(set(found.column("batch").to_pylist()))


FILTERS: dict[str, tuple[fluss.Predicate, list[int]]] = {
    "equal": (col("i8") == 25, [2]),
    "equal outside": (col("i8") == 99, []),
    "not equal": (col("i8") != 25, [0, 1, 2, 3]),
    "less": (col("i8") < 10, [0]),
    "less or equal": (col("i8") <= 10, [0, 1]),
    "greater": (col("i8") > 29, [3]),
    "greater or equal": (col("i8") >= 29, [2, 3]),
    "long": (col("i64") < 5 - 2**62, [0]),
    "double": (col("f64") > 7.4, [3]),
    "text": (col("text") >= "0030", [3]),
    "starts with": (col("text").starts_with("001"), [1]),
    "decimal": (col("amount") == Decimal("2.75"), [1]),
    "large decimal": (col("big") > Decimal(10) ** 25 + 35, [3]),
    "date": (col("day") < DAY + dt.timedelta(days=10), [0]),
    "timestamp": (col("at") >= NOON + dt.timedelta(microseconds=20), [2, 3]),
    "timestamp ltz": (
        col("atz") < (NOON + dt.timedelta(milliseconds=10)).replace(tzinfo=dt.UTC),
        [0],
    ),
    "time": (col("clock") > dt.time(1, 0, 29), [3]),
    "boolean": (col("flag") == True, [0]),  # noqa: E712 - builds a predicate
    "is null": (col("empty").is_null(), [1]),
    "is not null": (col("empty").is_not_null(), [0, 2, 3]),
    "in": (col("i8").is_in([3, 33]), [0, 3]),
    "and": ((col("i8") > 5) & (col("i8") < 15), [0, 1]),
    "or": ((col("i8") < 5) | (col("i8") > 35), [0, 3]),
    "contradiction": ((col("i8") < 5) & (col("i8") > 35), []),
    "no statistics": (col("plain") == 25, [0, 1, 2, 3]),
    "or with an unmeasured column": ((col("i8") < 5) | (col("plain") == 25), [0, 1, 2, 3]),
    "and with an unmeasured column": ((col("i8") < 5) & (col("plain") == 25), [0]),
}


@pytest.mark.parametrize("case", FILTERS)
async def test_a_filter_prunes_the_batches_that_cannot_match(
    measured: fluss.FlussTable, case: str
) -> None:
    predicate, expected = FILTERS[case]
    assert await surviving(measured, predicate) == expected


async def test_a_filter_and_a_projection_work_together(measured: fluss.FlussTable) -> None:
    scan = measured.new_scan().project_by_name(["text", "batch"])
    got = await filtered(scan, col("i8") >= 30)
    assert got.equals(pa.Table.from_batches([batch(3)]).select(["text", "batch"]))


async def test_a_follower_with_a_filter_passes_over_what_was_pruned(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, SCHEMA, properties={"table.statistics.columns": "i8"})
    scanner = await in_time(table.new_scan().filter(col("i8") >= 30).create_log_scanner())
    scanner.subscribe(0, fluss.EARLIEST_OFFSET)
    await append(table, batch(0), batch(1))
    assert (await in_time(scanner.poll(200))).is_empty()
    await append(table, batch(3))
    records = await poll_records(scanner, ROWS)
    assert {r.row["batch"] for r in records} == {3}
    assert [r.offset for r in records] == list(range(20, 30))


async def test_batches_with_statistics_are_stored_with_them_and_projected_without(
    measured: fluss.FlussTable, raw: RawClient
) -> None:
    table_id = measured.get_table_info().table_id
    headers = raw.batches(table_id)
    assert [h.magic for h in headers] == [1] * (BATCHES + 1)
    assert all(h.statistics_length > 0 for h in headers)
    projected = raw.fetch(table_id, columns=(0,)).records
    assert len(projected) < len(raw.fetch(table_id).records) / 3


async def test_statistics_of_every_column_are_allowed(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, SCHEMA, properties={"table.statistics.columns": "*"})
    await append(table, batch(0), batch(1), last_batch())
    assert await surviving(table, col("plain") == 3) == [0]
    assert (await read_arrow(table)).num_rows == 2 * ROWS + 1


async def test_a_filter_on_a_table_without_statistics_returns_everything(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, SCHEMA)
    await append(table, batch(0), batch(1), last_batch())
    assert await surviving(table, col("i8") == 3) == [0, 1]
