"""Writes from Spark: what arrives, what is refused, what a job that failed leaves.

What goes wrong with tasks and drivers is in `test_tasks_fail.py` and `test_driver_killed.py`,
what a task does in `test_sink_tasks.py`, and all that the driver refuses in `test_sink_refused.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.counts import only_full

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

import zufluss
from tests.client.pk import create_table
from tests.spark.sinks import (
    AGGREGATION,
    COUNTS,
    ROWS,
    FailsAlways,
    add_rows,
    append,
    doubled,
    expected,
    inputs,
    log_rows,
    run,
    state,
    stream,
)
from zufluss.client.sync.connection import Connection
from zufluss.spark.source import FlussDataSource
from zufluss.testing.server import DevServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

SMALL = {"client.writer.batch-size": "2kb"}
"""Many batches of few rows."""


@pytest.fixture(scope="module")
def conn(dev_server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(dev_server.bootstrap) as connection:
        yield connection


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    for source in (FlussDataSource, FailsAlways):
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


def test_rows_are_appended_to_a_log_table_by_the_names_of_their_columns(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create(ROWS)
    append(frame(session, 1000).selectExpr("v", "id", "CAST(k AS INT) AS k"), server, table)
    assert sorted(row["id"] for row in log_rows(conn, table)) == list(range(1000))


def test_changes_and_partial_updates_go_into_a_primary_key_table(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create("id INT, name STRING, note STRING, PRIMARY KEY (id)")
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
    options = {"write.change-type-column": "op", "write.columns": "id,name"}
    append(rows, server, table, **options)
    part = session.createDataFrame([("z", 2)], "note STRING, id INT")
    append(part, server, table, **{"write.columns": "id,note"})
    assert state(conn, table) == {
        2: {"id": 2, "name": "d", "note": "z"},
        3: {"id": 3, "name": "e", "note": None},
    }
    wrong = session.createDataFrame([("insert", 9, "x"), ("upsert", 1, "a")], rows.schema)
    with pytest.raises(Exception, match="column 'op' has 'upsert'; allowed are insert"):
        append(wrong.coalesce(1), server, table, **options)
    assert state(conn, table).keys() == {2, 3}


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


def test_impossible_writes_are_refused_and_write_nothing(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create("id BIGINT NOT NULL, k BIGINT, v BIGINT")
    writer = frame(session, 3).write.format("fluss")
    writer = writer.option("bootstrap.servers", server).option("table", table)
    with pytest.raises(Exception, match="cannot be overwritten by Spark; write with mode append"):
        writer.mode("overwrite").save()
    with pytest.raises(Exception, match=r"(?i)append"):
        writer.mode("error").save()
    with pytest.raises(Exception, match=r"column 'v' of table .* is missing in the rows"):
        append(frame(session, 3).select("id", "k"), server, table)
    nulls = frame(session, 1000, 1).selectExpr("IF(id > 900, null, id) AS id", "k", "v")
    with pytest.raises(Exception, match=r"column 'id' has .* nulls.*NOT NULL"):
        append(nulls, server, table, **SMALL)
    assert log_rows(conn, table) == []


def test_a_job_with_a_name_that_is_run_again_appends_what_is_missing(
    session: SparkSession, conn: Connection, server: str, create: Callable[..., str]
) -> None:
    table = create(ROWS, bucket_keys=["id"])
    named = {"txn.id": "nightly-2026-01-31", **SMALL}
    with pytest.raises(Exception, match="this task always fails"):
        append(frame(session, 3000), server, table, "fails_always", **named)
    for _ in range(2):
        append(frame(session, 3000), server, table, **named)
    found = log_rows(conn, table)
    assert (len(found), doubled(found)) == (3000, [])


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


@only_full  # test_stream_writer.py has its steps
def test_micro_batches_that_spark_forgot_are_not_written_again(
    session: SparkSession,
    conn: Connection,
    server: str,
    create: Callable[..., str],
    tmp_path: Path,
) -> None:
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="needs Spark 4.2: read limits")
    source = create(ROWS, bucket_count=1)
    add_rows(conn, source, 0, 60)
    log, counts = create(ROWS), create(COUNTS, properties=AGGREGATION)
    named = {"txn.id": "counts"}
    for _ in range(2):
        read = stream(session, server, source, maxRowsPerTrigger="30")
        run(read, server, log, tmp_path / "log", **named)
        run(inputs(read), server, counts, tmp_path / "counts", **named)
        for name in ("log", "counts"):
            for kept in (tmp_path / name / "commits").glob("*1*"):
                kept.unlink()  # as if the driver was killed before it wrote this down
    found = log_rows(conn, log)
    assert (len(found), doubled(found)) == (60, [])
    assert state(conn, counts, "k") == expected(60)
    with pytest.raises(Exception, match="checkpoint of its query was replaced"):
        run(inputs(read), server, counts, tmp_path / "new counts", **named)
    assert state(conn, counts, "k") == expected(60)
    run(read, server, log, tmp_path / "new log", **named)
    assert len(log_rows(conn, log)) == 2 * 60  # a new checkpoint is a new stream


def test_a_stream_of_complete_results_is_refused(
    session: SparkSession, server: str, create: Callable[..., str], tmp_path: Path
) -> None:
    table = create("k BIGINT, n BIGINT, PRIMARY KEY (k)")
    rows = session.readStream.format("rate").load()
    grouped = rows.groupBy("value").count().selectExpr("value AS k", "count AS n")
    writer = grouped.writeStream.format("fluss").outputMode("complete")
    writer = writer.options(**{"bootstrap.servers": server, "table": table})
    writer = writer.option("checkpointLocation", str(tmp_path / "state"))
    with pytest.raises(Exception, match="cannot be overwritten"):
        writer.start().awaitTermination()
