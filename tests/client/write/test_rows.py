"""The buffer of single rows: order, limits by number and size, rows that do not fit."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tests.client.pk import create_table
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.client.write.rows import ROWS_MAX, ROWS_PER_CHECK, RowBuffer, RowChunk

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])


def buffer(bytes_max: int = 1 << 20) -> RowBuffer:
    return RowBuffer(SCHEMA, lambda delete: ["id"] if delete else None, bytes_max)


def added(rows: RowBuffer, row: dict[str, Any]) -> bool:
    """Add a row as a writer does; True if the buffer is full."""
    gathered = rows.add(row, False)
    return (gathered == 1 or gathered % ROWS_PER_CHECK == 0) and rows.check()


def test_a_buffer_is_full_after_many_rows_or_after_large_ones() -> None:
    rows = buffer()
    assert [added(rows, {"id": n}) for n in range(ROWS_MAX)].index(True) == ROWS_MAX - 1
    large = buffer(bytes_max=100_000)
    full = [added(large, {"id": n, "text": "x" * 1_000}) for n in range(1_000)].index(True) + 1
    assert full * 1_000 <= 100_000 + 2 * ROWS_PER_CHECK * 1_000


def test_rows_are_taken_in_order_and_counted_until_then() -> None:
    rows = buffer()
    for number in range(3):
        rows.add({"id": number}, False)
    rows.add({"id": 1}, True)
    rows.add({"id": "x"}, False)
    rows.add({"id": 4}, False)
    assert rows.count == 6
    rows.convert()
    assert rows.count == 6
    count, taken = rows.take()
    assert (count, rows.count) == (6, 0)
    chunks = [c for c in taken if isinstance(c, RowChunk)]
    ids = [(chunk.rows["id"].to_pylist(), chunk.delete) for chunk in chunks]
    assert ids == [([0, 1, 2], False), ([1], True), ([4], False)]
    (unfit,) = [c for c in taken if not isinstance(c, RowChunk)]
    assert "in the row {'id': 'x'}" in unfit.reason.message


def test_a_single_row_is_sent_without_another_one_and_without_a_flush(conn: Connection) -> None:
    table = create_table(conn, "id BIGINT, text STRING")
    writer = table.append()
    for number in range(3):
        writer.write({"id": number})
        eventually(lambda: table.count() == number + 1)  # noqa: B023 - called in this turn only
    writer.close()
