"""All sources of a scan: live rows equal those of a snapshot plus the changes after it."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from tests.client.pk import create_table, delete, upsert
from tests.end_to_end.kv_scans.support import Change, State, applied, by_key
from tests.waiting import eventually
from zufluss import col
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import ZuflussError
from zufluss.model.table import TableBucket

COLUMNS = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
KEYS, BUCKETS = 400, 3


def rows_of(found: pa.Table) -> State:
    return by_key((row["id"], row["text"]) for row in found.to_pylist())


def changes_of(found: pa.Table) -> list[Change]:
    """Rows in the order of each bucket; buckets have no common order."""
    sorted_rows = found.sort_by("_log_offset").to_pylist()
    return [(c["_log_offset"], c["_change_type"], (c["id"], c["text"])) for c in sorted_rows]


def change(table: Table, rng: random.Random, turn: int) -> None:
    ids = rng.sample(range(KEYS), 100)
    upsert(table, {"id": ids, "text": [f"turn {turn} {i}" for i in ids]})
    delete(table, {"id": ids[:40]})


def offsets_of_snapshots(connection: Connection, table: Table) -> dict[TableBucket, int]:
    """Wait until the newest snapshots contain the whole changelog; returns their rows."""
    ends = connection.admin.list_offsets(table.path)

    def found() -> dict[TableBucket, int]:
        return {s.bucket: s.log_offset for s in connection.admin.latest_kv_snapshots(table.path)}

    eventually(lambda: {b.bucket_id: at for b, at in found().items()} == ends, "a snapshot")
    return found()


def test_live_rows_are_those_of_the_snapshot_and_the_log_at_the_same_offset(
    paged: Connection, rng: random.Random
) -> None:
    table = create_table(paged, COLUMNS, bucket_count=BUCKETS)
    history: list[tuple[dict[TableBucket, int], State]] = []
    for turn in range(3):
        change(table, rng, turn)
        offsets = offsets_of_snapshots(paged, table)
        with table.scan(source="snapshot").open() as scanner:
            assert scanner.log_offsets == offsets
            stored = rows_of(pa.Table.from_batches([*scanner], scanner.schema))
        with table.scan(source="live").open() as scanner:
            assert scanner.log_offsets == offsets, "nothing was written since"
            assert rows_of(pa.Table.from_batches([*scanner], scanner.schema)) == stored
        assert stored
        history.append((offsets, stored))
    change(table, rng, 3)
    with table.scan(source="live").open() as scanner:
        ends = scanner.log_offsets
        now = rows_of(pa.Table.from_batches([*scanner], scanner.schema))
    for offsets, stored in history:
        assert rows_of(table.scan(source="live", at=offsets).to_arrow()) == stored
        behind = table.changelog(start=offsets, stop=ends).to_arrow()
        assert applied(stored, changes_of(behind)) == now
    assert applied({}, changes_of(table.changelog(stop=ends).to_arrow())) == now


def test_columns_filter_and_limit_mean_the_same_for_every_source(
    paged: Connection, rng: random.Random
) -> None:
    table = create_table(paged, COLUMNS, bucket_count=BUCKETS)
    change(table, rng, 0)
    offsets_of_snapshots(paged, table)
    predicate = (col("id") >= 100) & (col("id") < 300)
    rows = [
        table.scan(["text", "id"], predicate, source=source).to_arrow().sort_by("id")  # type: ignore[arg-type]
        for source in ("live", "snapshot")
    ]
    assert rows[0].num_rows > 5
    assert rows[0] == rows[1]
    assert rows[0].schema.names == ["text", "id"]
    assert table.scan(["text", "id"], predicate).to_arrow().sort_by("id") == rows[0], "the default"
    for source in ("live", "snapshot"):
        few = table.scan(["id"], predicate, source=source, limit=5).to_arrow()  # type: ignore[arg-type]
        assert set(few["id"].to_pylist()) < set(rows[0]["id"].to_pylist())
        assert few.num_rows == 5


def test_every_scan_is_an_arrow_stream(paged: Connection, rng: random.Random) -> None:
    table = create_table(paged, COLUMNS, bucket_count=BUCKETS)
    change(table, rng, 0)
    offsets_of_snapshots(paged, table)
    total = sum(rows_of(table.scan().to_arrow()))
    for source in ("live", "snapshot"):
        scan = table.scan(source=source)  # type: ignore[arg-type]
        assert pa.table(scan).num_rows == 60
        assert scan.to_polars()["id"].sum() == total
        assert scan.to_duckdb().aggregate("count(*), sum(id)").fetchall() == [(60, total)]


def test_the_log_of_a_primary_key_table_is_its_changelog(paged: Connection) -> None:
    """`source="log"` is refused, and the message names the changelog."""
    table = create_table(paged, COLUMNS, bucket_count=1)
    with pytest.raises((ZuflussError, ValueError), match="changelog"):
        table.scan(source="log").to_arrow()
    appended = create_table(paged, "id BIGINT, text STRING", bucket_count=1)
    with appended.append() as writer:
        writer.write({"id": [1, 2], "text": ["a", "b"]})
    assert appended.scan(source="log").to_arrow() == appended.scan().to_arrow()
    for source in ("live", "snapshot"):
        with pytest.raises(ZuflussError):
            appended.scan(source=source)  # type: ignore[arg-type]
