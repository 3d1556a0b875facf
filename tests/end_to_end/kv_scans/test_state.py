"""A scan has each key once, in key order, as the table was when the scan was opened."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pyarrow as pa
import pytest

import zufluss
from tests.client.pk import create_table, delete, upsert
from tests.end_to_end.kv_scans.support import bucket_directory, close_pins, create, tables_of
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    CODEC,
    Row,
    all_rows,
    delete_rows,
    go_on,
    good,
    in_key_order,
    numbered,
    open_request,
    page,
    pages,
    pin,
    put_rows,
)
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.testing.server import DevServer

COUNT, BUCKETS = 100_000, 3
COLUMNS = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
SMALL = 16 << 10
FEW = 300


def texts(ids: range, text: str) -> dict[str, list[object]]:
    return {"id": [*ids], "text": [f"{text} {i}" for i in ids]}


@pytest.fixture(scope="module")
def large(server: DevServer) -> Iterator[tuple[Table, list[Row]]]:
    """A table of 100,000 rows, some overwritten, and what is in it; others were deleted."""
    small = {"client.scanner.kv.fetch.max-bytes": str(SMALL)}
    with zufluss.connect(server.bootstrap, **small) as connection:
        table = create_table(connection, COLUMNS, bucket_count=BUCKETS)
        upsert(table, texts(range(COUNT + 1000), "row"))
        upsert(table, texts(range(0, COUNT, 5), "changed"))
        delete(table, {"id": [*range(COUNT, COUNT + 1000)]})
        model = [(i, f"{'row' if i % 5 else 'changed'} {i}") for i in range(COUNT)]
        yield table, model


def check(found: list[list[Row]], model: list[Row]) -> None:
    """Assert: the rows of each bucket are in key order, and all rows together equal the model."""
    for rows in found:
        keys = [CODEC.key(row) for row in rows]
        assert all(a < b for a, b in pairwise(keys))
    assert len(found) == BUCKETS
    assert sorted(row for rows in found for row in rows) == model


def test_a_client_gets_100_000_rows_in_small_pages_each_once_in_key_order(
    large: tuple[Table, list[Row]],
) -> None:
    table, model = large
    found: list[list[Row]] = []
    for bucket in range(BUCKETS):
        batches: list[pa.RecordBatch] = list(table.scan(buckets=[bucket]))
        assert len(batches) > 30
        assert max(batch.num_rows for batch in batches) < COUNT / BUCKETS / 20
        rows = pa.Table.from_batches(batches).to_pydict()
        found.append(list(zip(rows["id"], rows["text"], strict=True)))
    check(found, model)
    assert table.scan().to_arrow().num_rows == COUNT


def test_a_client_of_fluss_gets_100_000_rows_in_small_batches_each_once_in_key_order(
    raw: RawClient, large: tuple[Table, list[Row]]
) -> None:
    table, model = large
    opened = [
        good(raw, open_request(table.info.table_id, bucket, size=SMALL))
        for bucket in range(BUCKETS)
    ]
    check([go_on(raw, first, SMALL) for first in opened], model)


def compact_away(server: DevServer, raw: RawClient, table_id: int, text: str) -> None:
    """Write and flush all keys until none of the current files is in use any more."""
    database = bucket_directory(server, table_id) / "rocks"
    before = tables_of(database)
    assert before

    def gone() -> bool:
        put_rows(raw, table_id, numbered(0, FEW, text))
        (later,) = pin(raw, table_id)  # has the state flushed
        close_pins(raw, later.pin_id)
        return not before & tables_of(database)

    eventually(gone, f"a compaction of {database}")


def test_scans_are_of_the_state_at_open_though_every_key_is_changed_and_compacted(
    server: DevServer, raw: RawClient
) -> None:
    """Rows are overwritten, deleted, inserted and compacted: pins and scans do not change."""
    table_id, before = create(raw), in_key_order(numbered(0, FEW))
    put_rows(raw, table_id, before)
    (made,) = pin(raw, table_id)
    first = good(raw, open_request(table_id, size=500))
    begun = page(raw, table_id, made.pin_id, size=500)
    assert 0 < begun.rows < FEW / 5
    put_rows(raw, table_id, numbered(0, FEW, "changed"))
    delete_rows(raw, table_id, numbered(0, FEW))
    (nothing,) = pin(raw, table_id)
    compact_away(server, raw, table_id, "again")
    middle = pages(raw, table_id, made.pin_id, size=500, after_key=begun.last_key)
    assert all_rows([begun, *middle]) == before
    delete_rows(raw, table_id, numbered(0, FEW))
    compact_away(server, raw, table_id, "once more")
    assert go_on(raw, first, 500) == before
    assert all_rows(pages(raw, table_id, made.pin_id, size=300)) == before, "from its beginning"
    assert all_rows(pages(raw, table_id, nothing.pin_id)) == []
    (now,) = pin(raw, table_id)
    assert all_rows(pages(raw, table_id, now.pin_id)) == in_key_order(numbered(0, FEW, "once more"))
    close_pins(raw, made.pin_id, nothing.pin_id, now.pin_id)


def test_a_scan_of_the_client_is_of_the_state_at_open(
    server: DevServer, raw: RawClient, paged: Connection
) -> None:
    table = create_table(paged, COLUMNS, bucket_count=1)
    upsert(table, texts(range(FEW), "row"))
    with table.scan(prefetch=0).open() as scanner:
        taken = [next(scanner)]
        delete(table, {"id": [*range(FEW)]})
        compact_away(server, raw, table.info.table_id, "again")
        taken += scanner
    rows = pa.Table.from_batches(taken).to_pydict()
    found = list(zip(rows["id"], rows["text"], strict=True))
    assert found == in_key_order(numbered(0, FEW))
    assert 0 < taken[0].num_rows < FEW
