"""Writes from Spark: what arrives, what is refused, and what a task that runs again does."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

import zufluss
from tests.client.pk import create_table
from tests.spark.sinks import (
    FailsAfterwards,
    FailsAlways,
    FailsHalfway,
    append,
    doubled,
    log_rows,
    run,
    state,
    stream,
    write_files,
)
from zufluss.client.sync import Connection
from zufluss.spark.source import FlussDataSource
from zufluss.testing.server import DevServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)

AGGREGATION = {"table.merge-engine": "aggregation"}
SMALL = {"client.writer.batch-size": "2kb"}
"""Many batches of few rows."""


@pytest.fixture(scope="module")
def conn(dev_server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(dev_server.bootstrap) as connection:
        yield connection


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    for source in (FlussDataSource, FailsAfterwards, FailsAlways, FailsHalfway):
        spark.dataSource.register(source)
    return spark


@pytest.fixture
def server(dev_server: DevServer) -> str:
    return dev_server.bootstrap


@pytest.fixture
def create(conn: Connection) -> Callable[..., str]:
    """Makes tables that no other test knows: `create("id INT, …")` gives the name."""

    def table(schema: str, **more: Any) -> str:
        return str(create_table(conn, schema, **{"bucket_count": 2} | more).path)

    return table


def frame(spark: SparkSession, rows: int, tasks: int = 2) -> Any:
    """Rows (id, k, v) of some tasks."""
    ids = spark.range(0, rows, 1, tasks)
    return ids.selectExpr("id", "id % 7 AS k", "id AS v")


# -- batch writes ------------------------------------------------------------------------------


def test_rows_are_appended_to_a_log_table(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create("id BIGINT, k BIGINT, v BIGINT")
    append(frame(session, 1000), server, table)
    append(frame(session, 10).select("v", "id", "k"), server, table)  # columns go by name
    assert sorted(row["id"] for row in log_rows(conn, table)) == sorted([*range(1000), *range(10)])


def test_every_type_gets_into_a_table(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create(
        "a BOOLEAN, b TINYINT, c SMALLINT, d INT, e BIGINT, f FLOAT, g DOUBLE, h CHAR(3),"
        " i STRING, j BINARY(2), k BYTES, l DECIMAL(20, 3), m DATE, n TIME(3), o TIMESTAMP(6),"
        " p TIMESTAMP_LTZ(6), q ARRAY<INT>, r MAP<STRING, BIGINT>, s ROW<x INT, y ARRAY<STRING>>"
    )
    row = session.sql(
        "SELECT true AS a, 1Y AS b, 2S AS c, 3 AS d, 4L AS e, 1.5F AS f, 2.5D AS g, 'abc' AS h,"
        " 'text' AS i, X'0102' AS j, X'03' AS k, 12.345BD AS l, DATE'2026-01-31' AS m,"
        " 3723004000L AS n, TIMESTAMP_NTZ'2026-01-31 01:02:03.000004' AS o,"
        " TIMESTAMP'2026-01-31 01:02:03Z' AS p, array(1, null, 3) AS q, map('k', 5L) AS r,"
        " named_struct('x', 1, 'y', array('z')) AS s"
    )
    append(row, server, table)
    append(
        row.selectExpr(*(f"IF(a, null, {name}) AS {name}" for name in row.columns)), server, table
    )
    found = log_rows(conn, table)
    assert [None] * 19 in [list(values.values()) for values in found]
    full = next(values for values in found if values["a"])
    assert full == {
        "a": True,
        "b": 1,
        "c": 2,
        "d": 3,
        "e": 4,
        "f": 1.5,
        "g": 2.5,
        "h": "abc",
        "i": "text",
        "j": b"\x01\x02",
        "k": b"\x03",
        "l": Decimal("12.345"),
        "m": dt.date(2026, 1, 31),
        "n": dt.time(1, 2, 3, 4000),
        "o": dt.datetime(2026, 1, 31, 1, 2, 3, 4),
        "p": dt.datetime(2026, 1, 31, 1, 2, 3, tzinfo=dt.UTC),
        "q": [1, None, 3],
        "r": [("k", 5)],
        "s": {"x": 1, "y": ["z"]},
    }


def test_upserts_and_deletes_follow_the_change_column_in_order(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create("id INT, name STRING, PRIMARY KEY (id)")
    changes = [
        ("insert", 1, "a"),
        ("+I", 2, "b"),
        ("delete", 1, None),
        ("update_before", 2, "b"),
        ("update_after", 2, "c"),
        ("-D", 2, "c"),
        ("+U", 2, "d"),
        ("insert", 3, "e"),
    ]
    rows = session.createDataFrame(changes, "op STRING, id INT, name STRING").coalesce(1)
    append(rows, server, table, **{"write.change-type-column": "op"})
    assert {key: row["name"] for key, row in state(conn, table).items()} == {2: "d", 3: "e"}
    wrong = session.createDataFrame([("upsert", 1, "a")], rows.schema)
    with pytest.raises(Exception, match="column 'op' has 'upsert'; allowed are insert"):
        append(wrong, server, table, **{"write.change-type-column": "op"})


def test_a_partial_update_leaves_the_other_columns(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create("id INT, a STRING, b STRING, PRIMARY KEY (id)")
    append(session.createDataFrame([(1, "x", "y")], "id INT, a STRING, b STRING"), server, table)
    part = session.createDataFrame([("z", 1)], "b STRING, id INT")
    append(part, server, table, **{"write.columns": "id,b"})
    assert state(conn, table) == {1: {"id": 1, "a": "x", "b": "z"}}


def test_insert_into_a_view_writes_to_its_table(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create("id BIGINT, name STRING, PRIMARY KEY (id)")
    session.sql(
        "CREATE OR REPLACE TEMPORARY VIEW sink_view USING fluss OPTIONS "
        f"('bootstrap.servers' '{server}', 'table' '{table}')"
    )
    session.sql("INSERT INTO sink_view VALUES (1, 'a'), (2, 'b')")
    session.sql("INSERT INTO sink_view (name, id) SELECT 'c', 2")
    assert {key: row["name"] for key, row in state(conn, table).items()} == {1: "a", 2: "c"}
    with pytest.raises(Exception, match="cannot be overwritten by Spark; write with mode append"):
        session.sql("INSERT OVERWRITE sink_view VALUES (3, 'd')")
    assert state(conn, table).keys() == {1, 2}


@pytest.mark.parametrize(
    ("select", "options", "message"),
    [
        ("id, k", {}, "column 'v' of table .* is missing in the rows"),
        ("id, k, v, 1 AS vv", {}, "column 'vv' of the rows is not in the table"),
        ("id, k, 'x' AS v", {}, "column 'v' of table .* is BIGINT.*the rows have string"),
        ("null AS id, k, v", {}, "column 'id' of table .* is NOT NULL"),
        ("IF(id > 500, null, id) AS id, k, v", {}, "column 'id' has .* nulls.*NOT NULL"),
        ("id, k, v", {"write.columns": "k"}, "lack id of the primary key"),
        ("id, k, v", {"write.change-type-column": "op"}, "column 'op'.*is missing in the rows"),
        ("id, k, v", {"write.order": "canonical"}, "is for log and aggregation tables"),
        ("id, k, v", {"write.orders": "canonical"}, "did you mean|write.order"),
        ("id, k, v", {"columns": "id"}, "option columns has no meaning for a write"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(
    session: SparkSession,
    conn: Connection,
    server: str,
    select: str,
    options: dict[str, str],
    message: str,
) -> None:
    table = "fluss.sink_refused"
    columns = "id BIGINT NOT NULL, k BIGINT, v BIGINT, PRIMARY KEY (id)"
    conn.admin.create_table(table, columns, ignore_if_exists=True)
    rows = frame(session, 1000, 1).selectExpr(*_split(select))
    with pytest.raises(Exception, match=message):
        append(rows, server, table, **options)
    assert state(conn, table) == {}


def _split(select: str) -> list[str]:
    return (
        [part.strip() for part in select.split(", ")]
        if "IF(" not in select
        else [
            "IF(id > 500, null, id) AS id",
            "k",
            "v",
        ]
    )


def test_only_the_mode_append_is_taken(
    session: SparkSession, server: str, create: Callable[..., str]
) -> None:
    table = create("id BIGINT, k BIGINT, v BIGINT")
    writer = frame(session, 3).write.format("fluss")
    writer = writer.option("bootstrap.servers", server).option("table", table)
    with pytest.raises(Exception, match="cannot be overwritten by Spark; write with mode append"):
        writer.mode("overwrite").save()
    with pytest.raises(Exception, match=r"(?i)append"):
        writer.mode("error").save()
    with pytest.raises(Exception, match="can only be read; write to table"):
        append(frame(session, 3), server, f"{table}$lake")


@pytest.mark.parametrize("source", ["fails_afterwards", "fails_halfway"])
@pytest.mark.parametrize("order", ["arrival", "canonical"])
def test_a_task_that_runs_again_appends_nothing_twice(
    session: SparkSession,
    conn: Connection,
    server: str,
    create: Callable[..., str],
    source: str,
    order: str,
) -> None:
    table = create("id BIGINT, k BIGINT, v BIGINT")
    rows = frame(session, 3000)
    append(rows, server, table, source, **{"write.order": order}, **SMALL)
    found = log_rows(conn, table)
    assert doubled(found) == []
    assert len(found) == 3000


def test_a_job_with_a_name_that_is_run_again_appends_nothing_twice(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create("id BIGINT, k BIGINT, v BIGINT", bucket_keys=["id"])
    named = {"txn.id": "nightly-2026-01-31", **SMALL}
    with pytest.raises(Exception, match="this task always fails"):
        append(frame(session, 3000), server, table, "fails_always", **named)
    for _ in range(2):
        append(frame(session, 3000), server, table, **named)
        found = log_rows(conn, table)
        assert (len(found), doubled(found)) == (3000, [])


COUNTS = "k BIGINT, n BIGINT SUM, top BIGINT MAX, PRIMARY KEY (k)"


def inputs(rows: Any) -> Any:
    return rows.selectExpr("k", "1L AS n", "v AS top")


def expected(rows: int) -> dict[int, dict[str, int]]:
    out: dict[int, dict[str, int]] = {}
    for i in range(rows):
        row = out.setdefault(i % 7, {"k": i % 7, "n": 0, "top": 0})
        row["n"] += 1
        row["top"] = i
    return out


@pytest.mark.parametrize("source", ["fluss", "fails_afterwards", "fails_halfway"])
def test_inputs_of_an_aggregation_table_count_once(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str], source: str
) -> None:
    table = create(COUNTS, properties=AGGREGATION)
    append(inputs(frame(session, 3000)), server, table, source)
    assert state(conn, table, "k") == expected(3000)
    assert conn.admin.list_producers(table) == []  # the columns are free again


def test_a_job_that_fails_leaves_nothing_in_an_aggregation_table(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create(COUNTS, properties=AGGREGATION)
    append(inputs(frame(session, 700)), server, table)
    with pytest.raises(Exception, match="this task always fails"):
        append(inputs(frame(session, 3000)), server, table, "fails_always")
    assert state(conn, table, "k") == expected(700)
    assert conn.admin.list_producers(table) == []


# -- streaming writes --------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["fails_afterwards", "fails_halfway"])
def test_a_stream_is_in_every_kind_of_table_once(
    session: SparkSession,
    conn: Connection,
    server: str,
    create: Callable[..., str],
    tmp_path: Path,
    source: str,
) -> None:
    rows = "id BIGINT, k BIGINT, v BIGINT"
    log, keyed = create(rows), create(f"{rows}, PRIMARY KEY (id)")
    counts = create(COUNTS, properties=AGGREGATION)
    files = write_files(tmp_path / "in", files=2, rows=100)
    for round in range(2):
        read = stream(session, files)
        run(read, server, log, tmp_path / "log", source)
        run(read, server, keyed, tmp_path / "keyed", source)
        run(inputs(read), server, counts, tmp_path / "counts", source)
        total = 200 + 100 * round
        found = log_rows(conn, log)
        assert (len(found), doubled(found)) == (total, [])
        assert state(conn, keyed).keys() == set(range(total))
        assert state(conn, counts, "k") == expected(total)
        write_files(files, files=1, rows=100, first=2)


def test_micro_batches_that_spark_forgot_are_not_written_again(
    session: SparkSession,
    conn: Connection,
    server: str,
    create: Callable[..., str],
    tmp_path: Path,
) -> None:
    log, counts = create("id BIGINT, k BIGINT, v BIGINT"), create(COUNTS, properties=AGGREGATION)
    files = write_files(tmp_path / "in", files=2, rows=50)
    for _ in range(2):
        read = stream(session, files)
        run(read, server, log, tmp_path / "log")
        run(inputs(read), server, counts, tmp_path / "counts")
        for name in ("log", "counts"):
            for kept in (tmp_path / name / "commits").glob("*1*"):
                kept.unlink()  # as if the driver was killed before it wrote this down
    found = log_rows(conn, log)
    assert (len(found), doubled(found)) == (100, [])
    assert state(conn, counts, "k") == expected(100)


def test_a_new_checkpoint_is_another_stream(
    session: SparkSession,
    conn: Connection,
    server: str,
    create: Callable[..., str],
    tmp_path: Path,
) -> None:
    log = create("id BIGINT, k BIGINT, v BIGINT")
    files = write_files(tmp_path / "in", files=2, rows=10)
    run(stream(session, files), server, log, tmp_path / "one")
    run(stream(session, files), server, log, tmp_path / "two")
    assert len(log_rows(conn, log)) == 40
    counts = create(COUNTS, properties=AGGREGATION)
    named = {"txn.id": "counts"}
    run(inputs(stream(session, files)), server, counts, tmp_path / "three", **named)
    with pytest.raises(Exception, match=r"micro-batch 0 .* is older than 1"):
        run(inputs(stream(session, files)), server, counts, tmp_path / "four", **named)
    assert state(conn, counts, "k") == expected(20)


def test_a_stream_into_an_aggregation_table_needs_a_name(
    session: SparkSession, server: str, create: Callable[..., str], tmp_path: Path
) -> None:
    counts = create(COUNTS, properties=AGGREGATION)
    files = write_files(tmp_path / "in", files=1, rows=10)
    writer = inputs(stream(session, files)).writeStream.format("fluss")
    writer = writer.option("bootstrap.servers", server).option("table", counts)
    session.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "all"))
    try:
        with pytest.raises(Exception, match="needs a name: give writeStream the option"):
            writer.trigger(availableNow=True).start().awaitTermination()
    finally:
        session.conf.unset("spark.sql.streaming.checkpointLocation")


def test_a_stream_of_complete_results_is_refused(
    session: SparkSession, server: str, create: Callable[..., str], tmp_path: Path
) -> None:
    table = create("k BIGINT, n BIGINT, PRIMARY KEY (k)")
    files = write_files(tmp_path / "in", files=1, rows=10)
    grouped = stream(session, files).groupBy("k").count().withColumnRenamed("count", "n")
    writer = grouped.writeStream.format("fluss").outputMode("complete")
    writer = writer.options(**{"bootstrap.servers": server, "table": table})
    writer = writer.option("checkpointLocation", str(tmp_path / "state"))
    with pytest.raises(Exception, match="cannot be overwritten"):
        writer.trigger(availableNow=True).start().awaitTermination()
