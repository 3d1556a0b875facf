"""The changelog of a primary-key table as Arrow, and what a scan of such a table says."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from tests.client.fake import FakeCluster
from tests.client.pk import create_table, delete, upsert
from zufluss import col
from zufluss.client.connection import AsyncConnection
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import InvalidColumnProjectionError, InvalidTableError
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column

PEOPLE = "id INT, name STRING, age INT, PRIMARY KEY (id)"
ABOUT = ["_change_type", "_log_offset", "_commit_timestamp"]


def changes(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Change type, offset, then the columns."""
    return [(row.pop(ABOUT[0]), *list(row.values())) for row in rows.drop(ABOUT[2:]).to_pylist()]


@pytest.fixture
def people(conn: Connection) -> Table:
    """A table with one bucket and five changes."""
    table = create_table(conn, PEOPLE, bucket_count=1)
    upsert(table, {"id": [1, 2], "name": ["a", "b"], "age": [10, 20]})
    upsert(table, {"id": 1, "name": "A", "age": 11})
    delete(table, {"id": 2})
    return table


FIVE = [
    ("+I", 0, 1, "a", 10),
    ("+I", 1, 2, "b", 20),
    ("-U", 2, 1, "a", 10),
    ("+U", 3, 1, "A", 11),
    ("-D", 4, 2, "b", 20),
]


def test_every_change_has_its_kind_offset_and_time(people: Table) -> None:
    before = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    found = people.changelog().to_arrow()
    assert changes(found) == FIVE
    assert found.schema.names == [*ABOUT, "id", "name", "age"]
    assert found.schema.field("_change_type").type == pa.dictionary(pa.int8(), pa.string())
    assert all(time > before for time in found["_commit_timestamp"].to_pylist())
    assert found.schema == people.changelog().schema


def test_columns_filter_and_range_are_applied(people: Table) -> None:
    assert changes(people.changelog(["name"]).to_arrow()) == [(k, o, n) for k, o, _, n, _ in FIVE]
    adults = people.changelog(["age"], (col("age") > 10) & (col("id") == 1))
    assert changes(adults.to_arrow()) == [("+U", 3, 11)]
    assert changes(people.changelog(start={0: 1}, stop={0: 3}).to_arrow()) == FIVE[1:3]
    assert changes(people.changelog(limit=2).to_arrow()) == FIVE[:2]
    assert people.changelog(start="latest").to_arrow().num_rows == 0


def test_a_log_of_rows_has_the_same_changes(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=1, properties={"table.log.format": "COMPACTED"})
    upsert(table, {"id": [1, 2], "name": ["a", "b"], "age": [10, 20]})
    upsert(table, {"id": 1, "name": "A", "age": 11})
    delete(table, {"id": 2})
    assert changes(table.changelog().to_arrow()) == FIVE
    assert changes(table.changelog(["age"], start={0: 3}).to_arrow()) == [
        ("+U", 3, 11),
        ("-D", 4, 20),
    ]


def test_a_changelog_can_be_read_in_every_form(people: Table) -> None:
    scan = people.changelog(["id"])
    kinds = [kind for kind, *_ in FIVE]
    assert list(scan.to_pandas()["_change_type"]) == kinds
    assert scan.to_polars()["_change_type"].to_list() == kinds
    assert scan.to_duckdb().aggregate("count(*)").fetchall() == [(5,)]
    assert [k for batch in scan for k in batch["_change_type"].to_pylist()] == kinds


def test_a_changelog_can_be_followed_and_resumed(people: Table) -> None:
    with people.changelog(start="latest", stop=None).open() as scanner:
        upsert(people, {"id": 3, "name": "c", "age": 30})
        batch = scanner.poll(timeout_ms=10_000)
        assert batch is not None
        assert changes(pa.Table.from_batches([batch])) == [("+I", 5, 3, "c", 30)]
        resume = scanner.positions()
    upsert(people, {"id": 4})
    found = people.changelog(["id"], start=resume).to_arrow()
    assert changes(found) == [("+I", 6, 4)]


def test_a_put_that_changes_nothing_leaves_no_rows(people: Table) -> None:
    delete(people, {"id": 99})
    upsert(people, {"id": 5})
    assert changes(people.changelog(["id"], start={0: 5}).to_arrow()) == [("+I", 6, 5)]


def test_all_buckets_and_partitions_are_read(conn: Connection) -> None:
    schema = "day STRING, id INT, PRIMARY KEY (day, id)"
    table = create_table(conn, schema, partition_keys=["day"], bucket_count=3)
    upsert(table, [{"day": day, "id": i} for day in ("mon", "tue") for i in range(20)])
    found = table.changelog().to_arrow()
    assert sorted(zip(found["day"].to_pylist(), found["id"].to_pylist(), strict=True)) == [
        (day, i) for day in ("mon", "tue") for i in range(20)
    ]
    monday = table.changelog(partitions=["mon"]).to_arrow()
    assert set(monday["day"].to_pylist()) == {"mon"}
    assert monday.num_rows == 20


def test_changes_from_before_a_column_was_added_have_nulls(conn: Connection, people: Table) -> None:
    conn.admin.alter_table(people.path, add_columns=[Column("city", parse_type("STRING"))])
    altered = conn.table(people.path)
    upsert(altered, {"id": 1, "name": "A", "age": 12, "city": "Ulm"})
    found = changes(altered.changelog(["id", "city"]).to_arrow())
    assert found[:5] == [(kind, offset, key, None) for kind, offset, key, _, _ in FIVE]
    assert found[5:] == [("-U", 5, 1, None), ("+U", 6, 1, "Ulm")]


def test_a_long_changelog_folds_to_the_rows_of_the_table(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=2)
    with table.upsert() as writer:
        for round_ in range(10):
            writer.write({"id": list(range(1_000)), "age": [round_] * 1_000})
            writer.delete({"id": list(range(round_, 1_000, 10))})
    state: dict[int, int] = {}
    for batch in table.changelog(["id", "age"]):
        for kind, _, key, age in changes(pa.Table.from_batches([batch])):
            if kind in ("+I", "+U"):
                state[key] = age
            else:
                assert state.pop(key) == age
    rows = table.lookup(list(range(1_000)), missing="drop")
    assert state == dict(zip(rows["id"].to_pylist(), rows["age"].to_pylist(), strict=True))
    assert len(state) == 900


def test_a_scan_of_the_log_of_a_primary_key_table_names_what_to_use(people: Table) -> None:
    with pytest.raises(
        InvalidTableError, match=r"table.changelog\(\).*table.scan\(\).*table.lookup"
    ):
        people.scan(source="log")


async def test_a_log_table_has_no_changelog(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    table = await connection.table("t")
    with pytest.raises(InvalidTableError, match=r"no primary key.*use table.scan\(\)"):
        table.changelog()


async def test_a_column_of_the_same_name_must_be_left_out(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT, _log_offset INT, PRIMARY KEY (id)")
    table = await connection.table("t")
    with pytest.raises(InvalidColumnProjectionError, match="'_log_offset' of its own"):
        table.changelog()
    assert table.changelog(["id"]).schema.names == [*ABOUT, "id"]
