"""The buffer of single rows: order, limits by number and size, rows that do not fit."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tests.client.pk import create_table
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.client.write.rows import ROWS_MAX, ROWS_PER_CHECK, RowBuffer, RowChunk

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])


def buffer(bytes_max: int = 1 << 20) -> RowBuffer:
    return RowBuffer(SCHEMA, lambda delete: ["id"] if delete else None, bytes_max)


def added(rows: RowBuffer, row: dict[str, Any], delete: bool = False) -> bool:
    """Add a row as a writer does; True if the buffer is full."""
    gathered = rows.add(row, delete)
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


def test_a_buffer_of_alternating_writes_and_deletes_becomes_full() -> None:
    rows = buffer()
    full = [added(rows, {"id": n}, delete=n % 2 == 1) for n in range(ROWS_MAX)]
    assert full.index(True) == ROWS_MAX - 1
    count, taken = rows.take()
    assert count == len(taken) == ROWS_MAX
    assert all(isinstance(c, RowChunk) and c.delete is bool(n % 2) for n, c in enumerate(taken))


def test_the_kind_of_rows_is_kept_across_conversions() -> None:
    rows = buffer()
    for number, delete in enumerate([True, True, False, True]):
        rows.add({"id": number}, delete)
        if number in (1, 2):
            rows.convert()
    _, taken = rows.take()
    kinds = [(c.rows["id"].to_pylist(), c.delete) for c in taken if isinstance(c, RowChunk)]
    assert kinds == [([0, 1], True), ([2], False), ([3], True)]


def test_a_large_row_fills_the_buffer_at_once() -> None:
    rows = buffer(bytes_max=1_000)
    assert added(rows, {"id": 1, "text": bytearray(1_000)})


def test_a_row_that_does_not_fit_leaves_the_others_in_few_chunks() -> None:
    rows = buffer()
    for number in range(1_024):
        rows.add({"id": "x" if number == 700 else number}, False)
    count, taken = rows.take()
    assert (count, len(taken)) == (1_024, 11)
    ids = [i for c in taken if isinstance(c, RowChunk) for i in c.rows["id"].to_pylist()]
    assert ids == [n for n in range(1_024) if n != 700]


def test_a_conversion_that_a_signal_ends_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = buffer()
    rows.add({"id": 1}, False)
    with monkeypatch.context() as patched:
        patched.setattr("zufluss.client.write.rows.rows_to_batch", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            rows.convert()
    count, (chunk,) = rows.take()
    assert isinstance(chunk, RowChunk)
    assert (count, chunk.rows["id"].to_pylist()) == (1, [1])


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_dict_may_be_changed_after_it_was_written() -> None:
    rows = buffer()
    row = {"id": 0}
    for number in range(3):
        row["id"] = number
        rows.add(row, False)
    _, (chunk,) = rows.take()
    assert isinstance(chunk, RowChunk)
    assert chunk.rows["id"].to_pylist() == [0, 1, 2]


def test_a_single_row_is_sent_without_another_one_and_without_a_flush(conn: Connection) -> None:
    table = create_table(conn, "id BIGINT, text STRING")
    writer = table.append()
    for number in range(3):
        writer.write({"id": number})
        eventually(lambda: table.count() == number + 1)  # noqa: B023 - called in this turn only
    writer.close()
