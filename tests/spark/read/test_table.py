"""Union reads in Spark equal the union reads of the Python client, and stay as they were pinned."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import zufluss
import zufluss.spark
from tests.client.pk import create_table
from tests.client.read.test_union_scan import RETENTION, wait_for
from tests.client.rounds import Rounds, lake_table
from tests.counts import FULL
from tests.servers import WarmServer
from tests.tiering.fluss_job import FlussJob
from zufluss import col
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import InvalidColumnProjectionError, PartitionNotExistError
from zufluss.lake.base import CommitterContext, catalog_properties, lake_factory
from zufluss.lake_formats import LAKE_FORMATS
from zufluss.model.predicate import InvalidPredicateError
from zufluss.testing.server import DevServer

Rows = list[tuple[Any, ...]]


class Lake:
    """What the tests do with tables: write, tier, read both ways."""

    def __init__(self, spark: Any, connection: Connection, rounds: Rounds, bootstrap: str) -> None:
        self.spark = spark
        self.connection = connection
        self.rounds = rounds
        self.bootstrap = bootstrap

    def frame(self, table: Table, suffix: str = "", **wanted: Any) -> Any:
        path = f"{table.path}{suffix}"
        return zufluss.spark.table(self.spark, path, bootstrap=self.bootstrap, **wanted)

    def rows(self, table: Table, suffix: str = "", **wanted: Any) -> Rows:
        return plain(self.frame(table, suffix, **wanted))

    def client_rows(self, table: Table, **wanted: Any) -> Rows:
        found = table.scan(source="union", **wanted).to_arrow().to_pylist()
        return sorted((tuple(row.values()) for row in found), key=repr)


def plain(frame: Any) -> Rows:
    return sorted((tuple(row) for row in frame.collect()), key=repr)


@pytest.fixture
def lake(spark: Any, connection: Connection, rounds: Rounds, lake_server: DevServer) -> Lake:
    return Lake(spark, connection, rounds, lake_server.bootstrap)


@pytest.fixture
def log_table(connection: Connection) -> Iterator[Table]:
    with lake_table(connection, "id INT, name STRING", bucket_count=2) as table:
        yield table


@pytest.fixture
def keyed_table(connection: Connection) -> Iterator[Table]:
    schema = "id INT, name STRING"
    with lake_table(connection, schema, primary_key=["id"], bucket_count=2) as table:
        yield table


def append(table: Table, **columns: list[Any]) -> None:
    with table.append() as writer:
        writer.write(columns)


def upsert(table: Table, **columns: list[Any]) -> None:
    with table.upsert() as writer:
        writer.write(columns)


def delete(table: Table, **columns: list[Any]) -> None:
    with table.upsert() as writer:
        writer.delete(columns)


# -- log tables --------------------------------------------------------------------------------


def test_an_empty_table_is_an_empty_frame_with_its_columns(lake, log_table):
    frame = lake.frame(log_table)
    assert frame.collect() == []
    assert frame.dtypes == [("id", "int"), ("name", "string")]


def test_rows_come_from_the_log_before_the_first_round(lake, log_table):
    append(log_table, id=[1, 2], name=["a", None])
    assert lake.rows(log_table) == [(1, "a"), (2, None)]


def test_rows_of_lake_and_log_are_there_once(lake, log_table):
    append(log_table, id=list(range(100)), name=["lake"] * 100)
    lake.rounds.tier(log_table)
    append(log_table, id=list(range(100, 130)), name=["log"] * 30)
    found = lake.rows(log_table)
    assert found == lake.client_rows(log_table)
    assert sorted(row[0] for row in found) == list(range(130))


def test_the_lakes_part_is_read_without_python(lake, log_table, capsys):
    append(log_table, id=[1], name=["a"])
    lake.rounds.tier(log_table)
    lake.frame(log_table).explain()
    shown = capsys.readouterr().out
    assert "FileScan parquet" in shown
    assert "MapInArrow" not in shown, "nothing is left in the log"


def test_a_frame_has_the_same_rows_after_writes_and_rounds(lake, log_table):
    append(log_table, id=[1, 2], name=["a", "b"])
    lake.rounds.tier(log_table)
    append(log_table, id=[3], name=["c"])
    frame = lake.frame(log_table)
    before = plain(frame)
    append(log_table, id=[4], name=["d"])
    lake.rounds.tier(log_table)
    assert plain(frame) == before == [(1, "a"), (2, "b"), (3, "c")]
    assert plain(frame.union(frame)) == sorted(before * 2, key=repr)
    assert len(lake.rows(log_table)) == 4


@pytest.mark.parametrize("how", ["suffix", "option"])
def test_the_lake_alone_can_be_read(lake, log_table, how):
    append(log_table, id=[1], name=["a"])
    lake.rounds.tier(log_table)
    append(log_table, id=[2], name=["b"])
    wanted = {"suffix": "$lake"} if how == "suffix" else {"read_optimized": True}
    assert lake.rows(log_table, **wanted) == [(1, "a")]


def test_columns_come_in_the_order_asked_for(lake, log_table):
    append(log_table, id=[1], name=["a"])
    lake.rounds.tier(log_table)
    append(log_table, id=[2], name=["b"])
    assert lake.rows(log_table, columns=["name", "id"]) == [("a", 1), ("b", 2)]
    assert lake.rows(log_table, columns=["name"], filter=col("id") > 1) == [("b",)]
    assert lake.rows(log_table, columns=["name"], filter="id > 1 OR name = 'a'") == [("a",), ("b",)]


def test_an_unknown_column_is_refused(lake, log_table):
    with pytest.raises(InvalidColumnProjectionError, match="nmae"):
        lake.frame(log_table, columns=["nmae"])
    with pytest.raises(InvalidPredicateError, match="nmae"):
        lake.frame(log_table, filter=col("nmae") == "a")
    for text, where in (
        ("nmae = 'a'", r"character 1\).*id, name"),
        ("upper(name) = 'A'", "character"),
    ):
        with pytest.raises(InvalidPredicateError, match=where):
            lake.frame(log_table, filter=text)


def test_a_column_that_was_added_is_null_in_older_rows(lake, log_table):
    append(log_table, id=[1], name=["a"])
    lake.rounds.tier(log_table)
    lake.connection.admin.alter_table(log_table.path, add_columns="extra BIGINT")
    table = lake.connection.table(log_table.path)
    append(table, id=[2], name=["b"], extra=[20])
    expected = [(1, "a", None), (2, "b", 20)]
    assert lake.rows(table) == expected
    lake.rounds.tier(table)
    assert lake.rows(table) == expected


def test_a_range_of_one_bucket_is_read_by_several_tasks(lake, connection, monkeypatch):
    monkeypatch.setattr("zufluss.spark.read.packing.TASK_ROWS", 300)
    with lake_table(connection, "id INT", bucket_count=1) as table:
        append(table, id=list(range(1000)))
        frame = lake.frame(table)
        assert frame.rdd.getNumPartitions() == 4
        assert sorted(row[0] for row in frame.collect()) == list(range(1000))


def test_a_file_of_the_lake_that_is_gone_fails_the_read(lake, log_table):
    append(log_table, id=[1], name=["a"])
    lake.rounds.tier(log_table)
    frame = lake.frame(log_table)
    info = log_table.info
    context = CommitterContext(info, catalog_properties(info, "iceberg"))
    snapshot = lake.connection.admin.lake_snapshot(info.path)
    (file,) = lake_factory("iceberg").create_reader(context).plan(snapshot.snapshot_id).files
    Path(file.path.removeprefix("file://")).unlink()
    with pytest.raises(Exception, match=r"FILE_NOT_EXIST|does not exist"):
        frame.collect()


# -- primary keys ------------------------------------------------------------------------------


def test_changes_in_the_log_hide_rows_of_the_lake(lake, keyed_table):
    upsert(keyed_table, id=[1, 2, 3, 4], name=["a", "b", "c", "d"])
    lake.rounds.tier(keyed_table)
    upsert(keyed_table, id=[2, 5], name=["B", "e"])
    delete(keyed_table, id=[3, 5])
    expected = [(1, "a"), (2, "B"), (4, "d")]
    assert lake.rows(keyed_table) == expected == lake.client_rows(keyed_table)
    assert lake.rows(keyed_table, columns=["name"]) == [("B",), ("a",), ("d",)]
    assert lake.rows(keyed_table, filter=col("name") == "b") == []
    assert lake.rows(keyed_table, filter="name = 'B'") == [(2, "B")]
    assert lake.rows(keyed_table, read_optimized=True)[1] == (2, "b")


def test_deletes_in_the_lake_are_applied(lake, keyed_table):
    upsert(keyed_table, id=list(range(50)), name=["first"] * 50)
    lake.rounds.tier(keyed_table)
    upsert(keyed_table, id=list(range(0, 50, 5)), name=["second"] * 10)
    delete(keyed_table, id=[1, 2])
    lake.rounds.tier(keyed_table)
    upsert(keyed_table, id=list(range(100, 120)), name=["third"] * 20)
    lake.rounds.tier(keyed_table)
    found = lake.rows(keyed_table)
    assert found == lake.client_rows(keyed_table)
    assert len(found) == 68
    assert lake.rows(keyed_table, read_optimized=True) == found


def test_a_tail_that_is_too_long_to_be_broadcast_gives_the_same_rows(
    lake, keyed_table, monkeypatch
):
    upsert(keyed_table, id=[1, 2], name=["a", "b"])
    lake.rounds.tier(keyed_table)
    upsert(keyed_table, id=[2], name=["B"])
    monkeypatch.setattr("zufluss.spark.read.table.BROADCAST_RECORDS", 0)
    assert lake.rows(keyed_table) == [(1, "a"), (2, "B")]


def test_a_lake_whose_files_spark_cannot_read_is_read_by_the_lakes_reader(
    lake, keyed_table, log_table, monkeypatch
):
    traits = replace(LAKE_FORMATS["iceberg"], parquet_files=False)
    monkeypatch.setitem(LAKE_FORMATS, "iceberg", traits)
    monkeypatch.delattr("zufluss.spark.read.table.read_files")
    for table, write in ((keyed_table, upsert), (log_table, append)):
        write(table, id=[1, 2], name=["a", "b"])
        lake.rounds.tier(table)
        write(table, id=[3], name=["c"])
        assert lake.rows(table) == [(1, "a"), (2, "b"), (3, "c")]
        assert lake.rows(table, columns=["name"], filter=col("id") <= 2) == [("a",), ("b",)]
    upsert(keyed_table, id=[2], name=["B"])
    assert lake.rows(keyed_table) == [(1, "a"), (2, "B"), (3, "c")]


def test_rows_that_flusss_job_deleted_by_key_are_gone(lake, keyed_table):
    """Spark's own reader would show them, so the lake's reader reads such files."""
    upsert(keyed_table, id=[1, 2, 3], name=["a", "b", "c"])
    lake.rounds.tier(keyed_table)
    upsert(keyed_table, id=[2], name=["B"])
    delete(keyed_table, id=[3])
    while FlussJob(lake.connection).round().info.path != keyed_table.path:
        pass
    expected = [(1, "a"), (2, "B")]
    assert lake.rows(keyed_table) == lake.client_rows(keyed_table) == expected
    assert lake.rows(keyed_table, "$lake") == expected


def test_random_changes_and_rounds_equal_a_model(lake, keyed_table):
    chance = random.Random(5)
    model: dict[int, str] = {}
    for step in range(6):
        ids = chance.sample(range(60), 20)
        upsert(keyed_table, id=ids, name=[f"{step}-{i}" for i in ids])
        model |= {i: f"{step}-{i}" for i in ids}
        gone = chance.sample(range(60), 8)
        delete(keyed_table, id=gone)
        for i in gone:
            model.pop(i, None)
        if chance.random() < 0.6:
            lake.rounds.tier(keyed_table)
        assert lake.rows(keyed_table) == sorted(model.items(), key=repr)


def test_rows_that_are_in_no_lake_come_from_the_state(lake, keyed_table):
    upsert(keyed_table, id=[1, 2, 3], name=["a", "b", "c"])
    upsert(keyed_table, id=[2], name=["B"])
    delete(keyed_table, id=[3])
    frame = lake.frame(keyed_table)
    upsert(keyed_table, id=[1, 4], name=["later", "later"])
    assert plain(frame) == [(1, "a"), (2, "B")]
    assert plain(frame) == [(1, "a"), (2, "B")], "again, with no pin left"
    assert lake.rows(keyed_table, columns=["name"], filter=col("id") > 1) == [("B",), ("later",)]
    assert lake.rows(keyed_table, columns=["name"], filter="id = 2") == [("B",)]


def test_a_table_in_no_lake_is_read_after_its_changelog_was_cut(spark, tmp_path):
    properties = {"table.log.ttl": "1ms"}
    with WarmServer(tmp_path, RETENTION) as server, zufluss.connect(server.bootstrap) as conn:
        table = create_table(conn, "id INT, n INT", primary_key=["id"], properties=properties)
        upsert(table, id=[1, 2, 3], n=[1, 1, 1])
        wait_for(lambda: conn.admin.list_offsets(table.path, "earliest") == {0: 3})
        frame = zufluss.spark.table(spark, str(table.path), bootstrap=server.bootstrap)
        assert plain(frame) == [(1, 1), (2, 1), (3, 1)]


# -- partitions --------------------------------------------------------------------------------


@pytest.fixture
def parted(connection: Connection) -> Iterator[Table]:
    schema = "id INT, day STRING"
    with lake_table(connection, schema, partition_keys=["day"], bucket_count=1) as table:
        for day in ("mon", "tue"):
            connection.admin.create_partition(table.path, {"day": day})
        yield table


def test_partitions_are_pruned_in_lake_and_log(lake, parted):
    append(parted, id=[1, 2], day=["mon", "tue"])
    lake.rounds.tier(parted)
    append(parted, id=[3, 4], day=["mon", "tue"])
    assert lake.rows(parted) == [(1, "mon"), (2, "tue"), (3, "mon"), (4, "tue")]
    assert lake.rows(parted, partitions=["tue"]) == [(2, "tue"), (4, "tue")]
    assert lake.rows(parted, partitions=[{"day": "mon"}], columns=["id"]) == [(1,), (3,)]
    assert len(lake.frame(parted, filter=col("day") == "mon").inputFiles()) == 1
    with pytest.raises(PartitionNotExistError, match="sun"):
        lake.frame(parted, partitions=["sun"])


def test_a_partition_dropped_under_a_frame_fails_the_read_and_says_so(lake, parted):
    append(parted, id=[1, 2], day=["mon", "tue"])
    frame = lake.frame(parted)
    lake.connection.admin.drop_partition(parted.path, {"day": "mon"})
    with pytest.raises(Exception, match="make the DataFrame anew"):
        frame.collect()


@pytest.mark.parametrize("key", [[], ["day", "id"]], ids=["log", "primary key"])
def test_a_partition_created_again_has_none_of_the_rows_of_the_old_one(lake, connection, key):
    schema, keys = "id INT, day STRING", ["day"]
    with lake_table(connection, schema, primary_key=key, partition_keys=keys) as table:
        write = upsert if key else append
        for day in ("mon", "tue"):
            connection.admin.create_partition(table.path, {"day": day})
        write(table, id=[1, 2, 3], day=["mon", "mon", "tue"])
        lake.rounds.tier(table)
        connection.admin.drop_partition(table.path, {"day": "mon"})
        connection.admin.create_partition(table.path, {"day": "mon"})
        assert lake.rows(table) == [(3, "tue")]
        write(table, id=[2, 4], day=["mon", "mon"])
        wanted = [(2, "mon"), (3, "tue"), (4, "mon")]
        assert lake.rows(table) == lake.client_rows(table) == wanted
        assert lake.rows(table, suffix="$lake") == [(1, "mon"), (2, "mon"), (3, "tue")]
        lake.rounds.tier(table)
        assert lake.rows(table) == lake.rows(table, suffix="$lake") == wanted


# -- types -------------------------------------------------------------------------------------

TYPES: dict[str, tuple[str, str, list[Any], list[Any]]] = {
    "b": ("BOOLEAN", "boolean", [True, None], [True, None]),
    "i8": ("TINYINT", "tinyint", [-128, 127], [-128, 127]),
    "i16": ("SMALLINT", "smallint", [-32768, 5], [-32768, 5]),
    "i32": ("INT", "int", [-5, None], [-5, None]),
    "i64": ("BIGINT", "bigint", [1 << 60, None], [1 << 60, None]),
    "f": ("FLOAT", "float", [1.5, None], [1.5, None]),
    "d": ("DOUBLE", "double", [2.5, None], [2.5, None]),
    "dec": ("DECIMAL(10, 2)", "decimal(10,2)", [Decimal("1.25"), None], [Decimal("1.25"), None]),
    "big": (
        "DECIMAL(38, 4)",
        "decimal(38,4)",
        [Decimal("123456789012345678901234.5678"), None],
        [Decimal("123456789012345678901234.5678"), None],
    ),
    "c": ("CHAR(3)", "string", ["abc", None], ["abc", None]),
    "s": ("STRING", "string", ["ä", None], ["ä", None]),
    "fix": ("BINARY(2)", "binary", [b"ab", None], [b"ab", None]),
    "raw": ("BYTES", "binary", [b"\x00x", None], [b"\x00x", None]),
    "day": ("DATE", "date", [dt.date(1969, 7, 20), None], [dt.date(1969, 7, 20), None]),
    "t0": ("TIME(0)", "bigint", [dt.time(1, 2, 3), None], [3_723_000_000, None]),
    "t3": ("TIME(3)", "bigint", [dt.time(0, 0, 0, 4000), None], [4000, None]),
    "ts": (
        "TIMESTAMP(3)",
        "timestamp_ntz",
        [dt.datetime(2024, 7, 1, 1, 2, 3, 4000), None],
        [dt.datetime(2024, 7, 1, 1, 2, 3, 4000), None],
    ),
    "l": ("ARRAY<TINYINT>", "array<tinyint>", [[1, 2], None], [[1, 2], None]),
    "m": ("MAP<STRING, SMALLINT>", "map<string,smallint>", [{"a": 1}, None], [{"a": 1}, None]),
    "r": (
        "ROW<x SMALLINT, y TIME(0)>",
        "struct<x:smallint,y:bigint>",
        [{"x": 1, "y": dt.time(1)}, None],
        [(1, 3_600_000_000), None],
    ),
}


def test_every_type_is_the_same_from_lake_and_log(lake, connection):
    schema = "id INT, " + ", ".join(f"{name} {kind[0]}" for name, kind in TYPES.items())
    with lake_table(connection, schema, bucket_count=1) as table:
        written = {name: kind[2] for name, kind in TYPES.items()}
        append(table, id=[1, 2], **written)
        lake.rounds.tier(table)
        append(table, id=[3, 4], **written)
        frame = lake.frame(table)
        assert frame.dtypes[1:] == [(name, kind[1]) for name, kind in TYPES.items()]
        found = {row["id"]: row for row in frame.collect()}
    for name, kind in TYPES.items():
        for first in (1, 3):
            read = [found[first][name], found[first + 1][name]]
            assert read == kind[3], f"{name} from {'lake' if first == 1 else 'log'}"


def test_times_finer_than_a_microsecond_are_cut_down_in_lake_and_log(lake, connection):
    import pyarrow as pa

    with lake_table(connection, "id INT, at TIMESTAMP_LTZ(9)", bucket_count=1) as table:
        fine = pa.array([1_999, -1], pa.timestamp("ns", "UTC"))
        append(table, id=[1, 2], at=fine)
        lake.rounds.tier(table)
        append(table, id=[3, 4], at=fine)
        micros = lake.frame(table).selectExpr("id", "unix_micros(at) AS at").collect()
    assert sorted(map(tuple, micros)) == [(1, 1), (2, -1), (3, 1), (4, -1)]


# -- filters -----------------------------------------------------------------------------------

ZONED = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
FILTERS = [
    col("n") > 2,
    ~(col("n") > 2),
    col("n") != 3,
    col("n").isin([1, 4]),
    ~col("n").isin([1, 4]),
    col("n").isin([]),
    col("n").is_null(),
    ~col("n").is_null(),
    col("x") > 1.5,
    ~(col("x") <= 1.5),
    col("x") < 1.5,
    col("x") != 1.5,
    col("f") == 0.1,
    col("s").starts_with("a"),
    ~col("s").starts_with("a"),
    col("s").contains("b") | (col("n") == 4),
    (col("s") >= "ab") & (col("n") < 4),
    col("flag") & ~col("flag"),
    ~col("flag"),
    col("day") >= dt.date(2024, 1, 2),
    col("clock") < dt.time(12),
    col("at") == dt.datetime(2024, 1, 2, 3, 4, 5),
    col("utc") <= ZONED,
    col("price") > Decimal("1.10"),
    col("raw") == b"\x01",
]


@pytest.fixture(scope="module")
def filtered(connection: Connection, rounds: Rounds) -> Iterator[Table]:
    schema = (
        "n INT, x DOUBLE, f FLOAT, s STRING, flag BOOLEAN, day DATE, clock TIME(3), "
        "at TIMESTAMP(6), utc TIMESTAMP_LTZ(3), price DECIMAL(8, 2), raw BYTES"
    )
    moments = [dt.datetime(2024, 1, day, 3, 4, 5) for day in (1, 2, 3)]
    columns: dict[str, list[Any]] = {
        "n": [1, 2, 3, 4, None],
        "x": [1.0, float("nan"), 2.0, 1.5, None],
        "f": [0.1, 0.2, float("nan"), 0.1, None],
        "s": ["a", "ab", "b", "", None],
        "flag": [True, False, True, False, None],
        "day": [*(m.date() for m in moments), moments[0].date(), None],
        "clock": [dt.time(1), dt.time(12), dt.time(13), dt.time(0), None],
        "at": [*moments, moments[1], None],
        "utc": [*(m.replace(tzinfo=dt.UTC) for m in moments), ZONED, None],
        "price": [Decimal("1.10"), Decimal("1.11"), Decimal("0.00"), Decimal("-2.00"), None],
        "raw": [b"\x01", b"", b"\xff", b"\x01", None],
    }
    with lake_table(connection, schema, bucket_count=1) as table:
        append(table, **columns)
        rounds.tier(table)
        append(table, **columns)
        yield table


@pytest.mark.parametrize("number", range(0, len(FILTERS), 1 if FULL else 4))
def test_a_filter_keeps_the_rows_that_it_keeps_in_the_client(lake, filtered, number):
    wanted = FILTERS[number]
    found = lake.rows(filtered, columns=["n", "s"], filter=wanted)
    assert found == lake.client_rows(filtered, columns=["n", "s"], filter=wanted)
    in_lake = lake.rows(filtered, columns=["n", "s"], filter=wanted, read_optimized=True)
    assert found == sorted(in_lake * 2, key=repr), "the log has the same rows once more"


@pytest.mark.parametrize(
    ("kind", "values", "names"),
    [
        ("INT", [12, 3], ["12", "3"]),
        ("BOOLEAN", [True, False], ["true", "false"]),
        ("DATE", [dt.date(2024, 1, 2), dt.date(1969, 12, 31)], ["2024-01-02", "1969-12-31"]),
    ],
)
def test_partition_keys_of_other_types_are_pruned_too(lake, connection, kind, values, names):
    schema = f"id INT, part {kind}"
    with lake_table(connection, schema, partition_keys=["part"], bucket_count=1) as table:
        for name in names:
            connection.admin.create_partition(table.path, {"part": name})
        append(table, id=[1, 2], part=values)
        lake.rounds.tier(table)
        append(table, id=[3, 4], part=values)
        assert lake.rows(table, partitions=[names[0]], columns=["id"]) == [(1,), (3,)]
        assert len(lake.rows(table, partitions=names)) == 4
