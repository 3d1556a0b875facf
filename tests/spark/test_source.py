"""`format("fluss")` reads what the client reads: every kind of table, its lake and its changes."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zufluss.spark
from tests.client.rounds import lake_table
from tests.end_to_end.kv_scans.support import open_pins
from tests.spark.read.test_table import TYPES, append, delete, plain, upsert
from zufluss import col
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import (
    ConfigError,
    InvalidTableError,
    InvalidTimestampError,
    PartitionNotExistError,
    TableNotExistError,
)
from zufluss.lake.base import LakeError
from zufluss.model.predicate import InvalidPredicateError
from zufluss.spark import source_options as o
from zufluss.spark.read.batch import FlussReader, source_schema
from zufluss.spark.source_options import Use, parse_options
from zufluss.testing.server import DevServer

Read = Callable[..., Any]


@pytest.fixture
def read(spark: Any, lake_server: DevServer) -> Read:
    """A DataFrame of a table through the data source; keywords are options, `_` for `.`."""
    zufluss.spark.register(spark, lake_server.bootstrap)

    def frame(table: Table, suffix: str = "", **options: Any) -> Any:
        reader = spark.read.format("fluss").options(**options)
        return reader.load(f"{table.path}{suffix}")

    return frame


@pytest.fixture
def log_table(connection: Connection) -> Iterator[Table]:
    with lake_table(connection, "id INT, name STRING", bucket_count=2) as table:
        yield table


@pytest.fixture
def keyed_table(connection: Connection) -> Iterator[Table]:
    schema = "id INT, name STRING"
    with lake_table(connection, schema, primary_key=["id"], bucket_count=2) as table:
        yield table


def planned(bootstrap: str, table: Table, suffix: str = "", **options: str) -> Any:
    """A reader as Spark makes one, without Spark."""
    said = {"bootstrap.servers": bootstrap, "table": f"{table.path}{suffix}", **options}
    parsed = parse_options(said)
    parsed.check_for(Use.BATCH)
    return FlussReader(parsed, source_schema(parsed))


# -- kinds of tables ---------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "primary key"])
@pytest.mark.parametrize("parted", [False, True], ids=["plain", "partitioned"])
def test_every_type_is_the_same_from_log_pins_and_lake(read, connection, rounds, keyed, parted):
    schema = "id INT, p STRING, " + ", ".join(f"{name} {kind[0]}" for name, kind in TYPES.items())
    schema += ", z TIMESTAMP_LTZ(3), must INT NOT NULL"
    keys = (["id", "p"] if parted else ["id"]) if keyed else None
    options = {"partition_keys": ["p"]} if parted else {}
    moment = dt.datetime(2024, 7, 1, tzinfo=dt.UTC)
    rest = {"p": ["a", "b"], "z": [moment, None], "must": [1, 2]}
    rest |= {name: kind[2] for name, kind in TYPES.items()}
    write = upsert if keyed else append
    with lake_table(connection, schema, primary_key=keys, bucket_count=1, **options) as table:
        if parted:
            for name in ("a", "b"):
                connection.admin.create_partition(table.path, {"p": name})
        write(table, id=[1, 2], **rest)
        before = read(table)
        assert before.dtypes[2:-2] == [(name, kind[1]) for name, kind in TYPES.items()]
        found = before.collect()
        rounds.tier(table)
        write(table, id=[3, 4], **rest)
        found += read(table).collect()
    assert sorted(row["id"] for row in found) == [1, 1, 2, 2, 3, 4]
    for row in found:
        at = (row["id"] - 1) % 2
        assert {name: row[name] for name in TYPES} == {n: kind[3][at] for n, kind in TYPES.items()}
        assert (row["must"], row["p"]) == (at + 1, "ab"[at])
        assert (row["z"] is None) == bool(at)


def test_an_empty_table_has_columns_and_no_rows(read, log_table, keyed_table):
    for table in (log_table, keyed_table):
        frame = read(table)
        assert frame.dtypes == [("id", "int"), ("name", "string")]
        assert frame.collect() == []


def test_changes_behind_the_lake_hide_its_rows(read, rounds, keyed_table):
    upsert(keyed_table, id=list(range(100)), name=["lake"] * 100)
    rounds.tier(keyed_table)
    upsert(keyed_table, id=[1, 200], name=["changed", "new"])
    delete(keyed_table, id=[2])
    expected = dict.fromkeys(range(100), "lake") | {1: "changed", 200: "new"}
    del expected[2]
    assert dict(plain(read(keyed_table))) == expected
    assert plain(read(keyed_table, columns="name", filter="id = 1")) == [("changed",)]


def test_a_bucket_that_did_not_change_is_read_from_the_lake_alone(rounds, keyed_table, lake_server):
    upsert(keyed_table, id=list(range(100)), name=["lake"] * 100)
    rounds.tier(keyed_table)
    upsert(keyed_table, id=[1], name=["changed"])
    groups = planned(lake_server.bootstrap, keyed_table).partitions()
    kinds = sorted(type(split).__name__ for group in groups for split in group.splits)
    assert kinds == ["KeyedLakeSplit", "LakeSplit"]


def test_an_added_column_is_null_in_older_rows(read, connection, log_table):
    append(log_table, id=[1], name=["old"])
    connection.admin.alter_table(log_table.path, add_columns="n INT")
    append(connection.table(str(log_table.path)), id=[2], name=["new"], n=[5])
    assert plain(read(log_table)) == [(1, "old", None), (2, "new", 5)]


# -- names -------------------------------------------------------------------------------------


def test_the_lake_alone_has_what_was_tiered(read, rounds, log_table):
    append(log_table, id=[1], name=["lake"])
    rounds.tier(log_table)
    append(log_table, id=[2], name=["log"])
    assert plain(read(log_table, "$lake")) == [(1, "lake")]
    assert plain(read(log_table, **{"read.optimized": "true"})) == [(1, "lake")]


def test_a_changelog_has_every_change_with_its_kind(read, keyed_table):
    upsert(keyed_table, id=[1], name=["a"])
    upsert(keyed_table, id=[1], name=["b"])
    delete(keyed_table, id=[1])
    frame = read(keyed_table, "$changelog")
    assert frame.columns == ["_change_type", "_log_offset", "_commit_timestamp", "id", "name"]
    rows = sorted(frame.collect(), key=lambda row: row["_log_offset"])
    assert [(r[0], r[1], r[3], r[4]) for r in rows] == [
        ("+I", 0, 1, "a"),
        ("-U", 1, 1, "a"),
        ("+U", 2, 1, "b"),
        ("-D", 3, 1, "b"),
    ]
    assert all(abs(r[2].timestamp() - time.time()) < 3600 for r in rows)
    only = read(keyed_table, "$changelog", columns="_change_type")
    assert sorted(row[0] for row in only.collect()) == ["+I", "+U", "-D", "-U"]


def test_the_changelog_of_a_log_table_is_its_appends(read, log_table):
    append(log_table, id=[1, 2], name=["a", "b"])
    frame = read(log_table, "$changelog", filter="id = 2")
    assert [(row[0], row["id"]) for row in frame.collect()] == [("+A", 2)]


def test_the_helper_reads_a_changelog_too(spark, read, keyed_table):
    upsert(keyed_table, id=[1, 2], name=["a", "b"])
    upsert(keyed_table, id=[1], name=["c"])
    path = f"{keyed_table.path}$changelog"
    pushed = zufluss.spark.table(
        spark, path, columns=["name", "_change_type"], filter=col("id") == 1
    )
    assert plain(pushed) == [("a", "+I"), ("a", "-U"), ("c", "+U")]
    text = zufluss.spark.table(spark, path, filter="id = 1 AND name = 'c'")
    assert plain(text.filter("_change_type = '+U'").select("name")) == [("c",)]
    with pytest.raises(InvalidPredicateError, match="not one that a changelog adds"):
        zufluss.spark.table(spark, path, filter="_change_type = '+U'")
    assert zufluss.spark.table(spark, path, limit=2).count() == 2


# -- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("tiered", [False, True], ids=["log", "lake"])
def test_a_range_of_times_has_the_rows_from_start_to_before_end(read, rounds, log_table, tiered):
    times = []
    for number in range(3):
        append(log_table, id=[number], name=[str(number)])
        rows = log_table.scan(with_offsets=True).to_arrow().to_pylist()
        times.append(max(row["__timestamp"] for row in rows))
        wait_until_after(times[-1])
    if tiered:
        rounds.tier(log_table)

    def between(start: dt.datetime | None, end: dt.datetime | None) -> list[int]:
        options = {}
        if start is not None:
            options[o.INCREMENTAL_START.key] = str(round(start.timestamp() * 1000))
        if end is not None:
            options[o.INCREMENTAL_END.key] = end.isoformat()
        return [row[0] for row in plain(read(log_table, **options))]

    tick = dt.timedelta(milliseconds=1)
    assert between(times[1], None) == [1, 2]
    assert between(times[1] + tick, None) == [2]
    assert between(None, times[1]) == [0]
    assert between(times[0], times[2]) == [0, 1]
    assert between(times[1], times[1]) == []
    future = dt.datetime(2200, 1, 1, tzinfo=dt.UTC)
    assert between(future, None) == []


@pytest.mark.parametrize("suffix", ["", "$changelog"])
def test_an_end_that_is_not_over_is_refused_and_says_the_time_of_the_server(
    lake_server, log_table, suffix
):
    append(log_table, id=[1], name=["a"])
    soon = str(round(time.time() * 1000) + 60_000)
    options = {o.INCREMENTAL_END.key: soon}
    text = rf"{soon} is not over yet.* the current timestamp \d{{13}} of this server"
    with pytest.raises(InvalidTimestampError, match=text):
        planned(lake_server.bootstrap, log_table, suffix, **options).partitions()


def wait_until_after(moment: dt.datetime) -> None:
    while dt.datetime.now(dt.UTC) <= moment + dt.timedelta(milliseconds=2):
        time.sleep(0.001)


def test_a_bucket_is_split_by_records(read, lake_server, log_table):
    append(log_table, id=list(range(1000)), name=["x"] * 1000)
    options = {"scan.maxRecordsPerPartition": "100"}
    groups = planned(lake_server.bootstrap, log_table, **options).partitions()
    sizes = [split.part.stop - split.part.start for group in groups for split in group.splits]
    assert sum(sizes) == 1000
    assert max(sizes) == 100
    assert sorted(row[0] for row in read(log_table, **options).collect()) == list(range(1000))


def test_a_split_read_twice_has_the_same_rows(lake_server, keyed_table):
    upsert(keyed_table, id=list(range(50)), name=["first"] * 50)
    reader = planned(lake_server.bootstrap, keyed_table)
    groups = reader.partitions()
    upsert(keyed_table, id=list(range(100)), name=["second"] * 100)
    delete(keyed_table, id=[7])

    def rows() -> list[tuple[int, str]]:
        found = [b.to_pylist() for group in groups for b in reader.read(group)]
        return sorted((row["id"], row["name"]) for batch in found for row in batch)

    expected = [(i, "first") for i in range(50)]
    assert rows() == expected
    assert rows() == expected, "the pins were closed, and the state is made again"


def test_plans_that_nobody_runs_do_not_use_up_the_pins(lake_server, keyed_table):
    upsert(keyed_table, id=[1], name=["a"])
    reader = planned(lake_server.bootstrap, keyed_table)
    for _ in range(20):
        groups = reader.partitions()
    assert [b.to_pylist() for group in groups for b in reader.read(group)] == [
        [{"id": 1, "name": "a"}]
    ]


def test_options_narrow_what_is_read(read, connection):
    schema = "id INT, p STRING, cents BIGINT"
    with lake_table(connection, schema, bucket_count=2, partition_keys=["p"]) as table:
        append(table, id=[1, 2, 3, 4], p=["a", "a", "b", "b"], cents=[10, 20, 30, 40])
        assert plain(read(table, columns="cents, id")) == [(10, 1), (20, 2), (30, 3), (40, 4)]
        assert plain(read(table, partitions="b", columns="id")) == [(3,), (4,)]
        assert plain(read(table, filter="cents > 10 AND p = 'a'", columns="id")) == [(2,)]
        assert read(table, limit=3).count() == 3
        assert read(table, limit=3, filter="id <= 2").count() == 2


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "primary key"])
def test_partitions_that_the_filter_leaves_out_are_not_read(connection, lake_server, rounds, keyed):
    schema = "id INT NOT NULL, p STRING NOT NULL, n INT NOT NULL"
    options = {"primary_key": ["id", "p", "n"]} if keyed else {}
    keys = ["p", "n"]
    with lake_table(connection, schema, bucket_count=1, partition_keys=keys, **options) as table:
        for name, n in (("a", "1"), ("b", "1"), ("b", "20")):
            connection.admin.create_partition(table.path, {"p": name, "n": n})
        write = upsert if keyed else append
        write(table, id=[1, 2, 3], p=["a", "b", "b"], n=[1, 1, 20])

        def read(text: str) -> tuple[int, list[int]]:
            reader = planned(lake_server.bootstrap, table, filter=text)
            groups = reader.partitions()
            rows = [row["id"] for g in groups for b in reader.read(g) for row in b.to_pylist()]
            return sum(len(group.splits) for group in groups), sorted(rows)

        assert read("p = 'b' AND id > 2") == (2, [3])
        assert read("p = 'b' AND n < 10") == (1, [2])
        assert read("n IN (20, 30) OR p = 'a'") == (2, [1, 3])
        assert read("id = 1 OR p = 'b'") == (3, [1, 2, 3]), "it says nothing about partitions"
        assert read("p = 'c'") == (0, [])
        rounds.tier(table)
        write(table, id=[4, 5], p=["a", "b"], n=[1, 1])
        assert read("p = 'b' AND n < 10")[1] == [2, 5]
        assert read("p LIKE 'a%'")[1] == [1, 4]


def test_a_limit_lets_go_of_the_buckets_that_it_does_not_need(lake_server, keyed_table):
    upsert(keyed_table, id=list(range(100)), name=["x"] * 100)
    before = open_pins(lake_server)
    reader = planned(lake_server.bootstrap, keyed_table, limit="1")
    (group,) = reader.partitions()
    assert open_pins(lake_server) == before + 2
    assert sum(batch.num_rows for batch in reader.read(group)) == 1
    assert open_pins(lake_server) == before


def test_a_schema_given_by_the_user_says_which_columns_are_read(spark, read, log_table):
    append(log_table, id=[1], name=["a"])
    reader = spark.read.format("fluss")
    assert plain(reader.schema("name STRING").load(str(log_table.path))) == [("a",)]
    with pytest.raises(Exception, match="'id' is int in Spark, the schema given says bigint"):
        spark.read.format("fluss").schema("id BIGINT").load(str(log_table.path)).collect()


# -- relations ---------------------------------------------------------------------------------


def test_the_module_that_spark_finds_has_the_source():
    import pyspark_zufluss

    assert pyspark_zufluss.DefaultSource.name() == "fluss"


@pytest.fixture
def views(spark, connection, lake_server):
    """Views `v_log` and `v_keyed` of tables with the columns id and cents."""
    admin = connection.admin
    admin.create_database("views", ignore_if_exists=True)
    admin.create_table("views.log", "id INT, cents BIGINT", bucket_count=1)
    admin.create_table("views.keyed", "id INT, cents BIGINT", primary_key=["id"], bucket_count=1)
    yield zufluss.spark.register_views(spark, "views", "v_", bootstrap=lake_server.bootstrap)
    admin.drop_database("views", cascade=True)


def test_views_make_plain_sql_work_and_see_new_rows(spark, connection, views):
    assert sorted(views) == ["v_keyed", "v_log"]
    append(connection.table("views.log"), id=[1], cents=[5])
    assert plain(spark.sql("SELECT sum(cents) FROM v_log")) == [(5,)]
    append(connection.table("views.log"), id=[2], cents=[7])
    assert plain(spark.sql("SELECT sum(cents) FROM v_log")) == [(12,)]


def test_insert_into_a_view_appends_or_upserts_and_overwrites_nothing(spark, connection, views):
    spark.sql("INSERT INTO v_log VALUES (1, 5), (2, 7)")
    spark.sql("INSERT INTO v_log (cents, id) SELECT cents + 1, id FROM v_log WHERE id = 1")
    spark.sql("INSERT INTO v_keyed SELECT * FROM v_log WHERE cents <> 6")
    spark.sql("INSERT INTO v_keyed VALUES (1, 9)")
    assert plain(spark.sql("SELECT * FROM v_log")) == [(1, 5), (1, 6), (2, 7)]
    assert plain(spark.sql("SELECT * FROM v_keyed")) == [(1, 9), (2, 7)]
    for view in views:
        with pytest.raises(Exception, match="cannot be overwritten by Spark; write with mode"):
            spark.sql(f"INSERT OVERWRITE {view} VALUES (3, 3)")
    assert len(connection.table("views.log").scan().to_arrow()) == 3
    assert len(connection.table("views.keyed").scan().to_arrow()) == 2


def test_views_have_the_options_of_the_client(spark, connection, lake_server, views):
    append(connection.table("views.log"), id=[1], cents=[5])
    options = {"client.id": "it's me", "client.request-timeout": "20s"}
    again = zufluss.spark.register_views(spark, "views", "o_", options=options)
    assert sorted(again) == ["o_keyed", "o_log"]
    assert plain(spark.sql("SELECT cents FROM o_log")) == [(5,)]
    with pytest.raises(Exception, match="request-timeot is not an option"):
        zufluss.spark.register_views(spark, "views", options={"client.request-timeot": "1s"})


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "primary key"])
def test_a_fresh_read_of_a_table_that_was_created_again_says_what_to_do(
    connection, lake_server, keyed
):
    key = ["id"] if keyed else None
    connection.admin.create_table("fluss.again", "id INT", primary_key=key, bucket_count=1)
    reader = planned(
        lake_server.bootstrap, connection.table("fluss.again"), **{"read.fresh": "true"}
    )
    (share,) = reader.partitions()
    assert list(reader.read(share)) == []
    connection.admin.drop_table("fluss.again")
    connection.admin.create_table("fluss.again", "id INT", primary_key=key, bucket_count=1)
    try:
        with pytest.raises(TableNotExistError, match="call register_views again"):
            list(reader.read(share))
    finally:
        connection.admin.drop_table("fluss.again")


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "primary key"])
def test_a_fresh_read_follows_writes_and_rounds(read, rounds, log_table, keyed_table, keyed):
    table, write = (keyed_table, upsert) if keyed else (log_table, append)
    frame = read(table, **{"read.fresh": "true"})
    pinned = read(table)
    write(table, id=[1, 2, 3], name=["a", "b", "c"])
    assert plain(frame) == plain(pinned) == [(1, "a"), (2, "b"), (3, "c")]
    rounds.tier(table)
    write(table, id=[4], name=["d"])
    assert plain(frame) == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    assert plain(pinned) == [(1, "a"), (2, "b"), (3, "c")], "planned when it was first used"


# -- errors ------------------------------------------------------------------------------------


def test_a_missing_table_is_named(spark, read):
    with pytest.raises(Exception, match=r"fluss\.nowhere"):
        spark.read.format("fluss").load("fluss.nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colums": "id"}, r"colums is not an option of format fluss \(did you mean columns\?\)"),
        ({"columns": "id,idd"}, "has no column 'idd'; it has id, name"),
        ({"columns": "id,id"}, "column 'id' is named twice"),
        ({"filter": "id >"}, "at its end .character 5.: expected a number"),
        ({"filter": "oid = 1"}, "one of the columns id, name"),
        ({"partitions": "a"}, "not a partitioned table"),
        ({"maxRowsPerTrigger": "5"}, "maxRowsPerTrigger has no meaning for a batch read"),
        ({"scan.incremental.start.timestamp": "soon"}, "neither epoch milliseconds nor a time"),
        ({"limit": "-1"}, "limit = '-1' is not allowed"),
    ],
)
def test_wrong_options_say_what_is_allowed(lake_server, log_table, options, message):
    with pytest.raises(Exception, match=message):
        planned(lake_server.bootstrap, log_table, **options).partitions()


@pytest.mark.parametrize("suffix", ["$lake", "$lake and option"])
def test_the_lake_of_a_table_without_one_is_refused(connection, lake_server, suffix):
    connection.admin.create_table("fluss.no_lake", "id INT", bucket_count=1)
    table = connection.table("fluss.no_lake")
    options = {"read.optimized": "true"} if "option" in suffix else {}
    try:
        with pytest.raises(InvalidTableError, match=r"fluss\.no_lake"):
            planned(
                lake_server.bootstrap, table, "" if options else "$lake", **options
            ).partitions()
    finally:
        connection.admin.drop_table(table.path)


def test_a_missing_partition_is_named(connection, lake_server):
    with lake_table(connection, "id INT, p STRING", bucket_count=1, partition_keys=["p"]) as table:
        append(table, id=[1], p=["a"])
        with pytest.raises(PartitionNotExistError, match="nowhere"):
            planned(lake_server.bootstrap, table, partitions="a,nowhere").partitions()


def test_a_range_of_times_of_rows_with_keys_points_to_the_changelog(lake_server, keyed_table):
    with pytest.raises(ConfigError, match=r"\$changelog"):
        planned(
            lake_server.bootstrap, keyed_table, **{"scan.incremental.end.timestamp": "5"}
        ).partitions()


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "primary key"])
def test_files_gone_from_the_lake_are_an_error_that_names_the_table(
    lake_server, rounds, log_table, keyed_table, keyed
):
    table, write = (keyed_table, upsert) if keyed else (log_table, append)
    write(table, id=[1, 2, 3], name=["a", "b", "c"])
    rounds.tier(table)
    reader = planned(lake_server.bootstrap, table)
    groups = reader.partitions()
    warehouse = lake_server.data_dir / "lake" / "warehouse" / table.path.database
    for file in (warehouse / table.path.table).rglob("*.parquet"):
        file.unlink()
    with pytest.raises(LakeError, match=f"{table.path}.*is gone now; make the DataFrame anew"):
        [batch for group in groups for batch in reader.read(group)]
    for file in (warehouse / table.path.table).rglob("*.avro"):
        file.unlink()
    with pytest.raises(LakeError, match=f"{table.path}: a file of lake snapshot .* is gone"):
        planned(lake_server.bootstrap, table).partitions()


def test_a_partition_dropped_under_a_plan_fails_the_read_and_says_so(connection, lake_server):
    with lake_table(connection, "id INT, p STRING", bucket_count=1, partition_keys=["p"]) as table:
        append(table, id=[1, 2], p=["a", "b"])
        reader = planned(lake_server.bootstrap, table)
        groups = reader.partitions()
        connection.admin.drop_partition(table.path, {"p": "a"})
        with pytest.raises(Exception, match="are gone now"):
            [batch for group in groups for batch in reader.read(group)]
