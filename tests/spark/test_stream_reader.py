"""Streaming reads: every row once, from the first batch on, over restarts and limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zufluss.spark
from tests.client.rounds import lake_table
from tests.spark.cluster import QUICK
from tests.spark.test_union import append, delete, plain, upsert
from zufluss.client.sync import Connection, Table
from zufluss.errors import ConfigError, TableNotExistError
from zufluss.spark.reader import source_schema
from zufluss.spark.source_options import Use, parse_options
from zufluss.spark.stream_limits import shares
from zufluss.testing.server import DevServer

pytest.importorskip("pyspark.sql.streaming.datasource", reason="needs Spark 4.2")
pytestmark = pytest.mark.timeout(300)


class Stream:
    """Queries of one table into one directory, each until nothing is left to read."""

    def __init__(self, spark: Any, directory: Path) -> None:
        self.spark = spark
        self.directory = directory
        self.batches: list[int] = []

    def run(self, table: Table, suffix: str = "", **options: str) -> list[tuple[Any, ...]]:
        """Go on with the query until it has everything; the rows of all runs together."""
        frame = self.spark.readStream.format("fluss").options(**options)
        query = (
            frame.load(f"{table.path}{suffix}")
            .writeStream.format("parquet")
            .option("checkpointLocation", str(self.directory / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(self.directory / "rows"))
        )
        query.awaitTermination()
        self.batches = [p.numInputRows for p in query.recentProgress]
        return plain(self.spark.read.parquet(str(self.directory / "rows")))


@pytest.fixture
def stream(spark: Any, lake_server: DevServer, tmp_path: Path) -> Stream:
    zufluss.spark.register(spark, lake_server.bootstrap)
    return Stream(spark, tmp_path)


@pytest.fixture
def log_table(connection: Connection) -> Iterator[Table]:
    with lake_table(connection, "id INT, name STRING", bucket_count=2) as table:
        yield table


@pytest.fixture
def keyed_table(connection: Connection) -> Iterator[Table]:
    schema = "id INT, name STRING"
    with lake_table(connection, schema, primary_key=["id"], bucket_count=2) as table:
        yield table


def reader(bootstrap: str, table: Table, suffix: str = "", **options: str) -> Any:
    """A reader as Spark makes one, without Spark."""
    from zufluss.spark.stream_reader import FlussStreamReader

    said = {"bootstrap.servers": bootstrap, "table": f"{table.path}{suffix}", **options}
    parsed = parse_options(said)
    parsed.check_for(Use.STREAM)
    return FlussStreamReader(parsed, source_schema(parsed))


def ids(found: Any, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    groups = found.partitions(start, end)
    return sorted(i for g in groups for b in found.read(g) for i in b.column("id").to_pylist())


def everything() -> Any:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    return ReadAllAvailable()


def at_most(rows: int) -> Any:
    from pyspark.sql.streaming.datasource import ReadMaxRows

    return ReadMaxRows(rows)


# -- queries -----------------------------------------------------------------------------------


def test_a_log_table_is_read_from_lake_and_log_and_goes_on(stream, rounds, log_table):
    append(log_table, id=[1, 2], name=["a", "b"])
    rounds.tier(log_table)
    append(log_table, id=[3], name=["c"])
    assert stream.run(log_table) == [(1, "a"), (2, "b"), (3, "c")]
    append(log_table, id=[4], name=["d"])
    rounds.tier(log_table)
    append(log_table, id=[5], name=["e"])
    expected = [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]
    assert stream.run(log_table) == expected
    assert stream.run(log_table) == expected, "there is nothing more"


def test_a_primary_key_table_is_its_rows_and_then_what_they_become(stream, keyed_table):
    upsert(keyed_table, id=[1, 2], name=["a", "b"])
    upsert(keyed_table, id=[1], name=["a2"])
    assert stream.run(keyed_table) == [(1, "a2"), (2, "b")]
    upsert(keyed_table, id=[1, 3], name=["a3", "c"])
    delete(keyed_table, id=[2])
    assert stream.run(keyed_table) == [(1, "a2"), (1, "a3"), (2, "b"), (3, "c")]


def test_a_changelog_has_all_changes(stream, keyed_table):
    upsert(keyed_table, id=[1], name=["a"])
    upsert(keyed_table, id=[1], name=["b"])
    delete(keyed_table, id=[1])
    found = stream.run(keyed_table, "$changelog", columns="_change_type,name")
    assert found == [("+I", "a"), ("+U", "b"), ("-D", "b"), ("-U", "a")]


def test_limits_make_small_batches_and_lose_nothing(stream, log_table):
    append(log_table, id=list(range(100)), name=["x"] * 100)
    found = stream.run(log_table, maxRowsPerTrigger="15")
    assert [row[0] for row in found] == sorted(range(100), key=lambda i: repr((i, "x")))
    assert max(stream.batches) == 15


DRIVER = """
import sys, zufluss.spark
bootstrap, table, directory, conf = sys.argv[1:]
spark = zufluss.spark.session("killed", "local[2]", eval(conf))
zufluss.spark.register(spark, bootstrap)
frame = spark.readStream.format("fluss").option("maxRowsPerTrigger", "40").load(table)
writer = frame.writeStream.format("parquet").option("checkpointLocation", directory + "/checkpoint")
writer.start(directory + "/rows").awaitTermination()
"""


@pytest.mark.slow
def test_a_query_whose_driver_is_killed_goes_on_without_losing_or_doubling(
    stream, lake_server, keyed_table
):
    upsert(keyed_table, id=list(range(50)), name=["state"] * 50)
    arguments = [lake_server.bootstrap, str(keyed_table.path), str(stream.directory), repr(QUICK)]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, *arguments], start_new_session=True)
    try:
        commits = stream.directory / "checkpoint" / "commits"
        number = 0
        while driver.poll() is None and len(list(commits.glob("[0-9]"))) < 3:
            upsert(keyed_table, id=[100 + number], name=[f"log {number}"])
            number += 1
        assert driver.poll() is None
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    upsert(keyed_table, id=[1, 2], name=["after", "after"])
    expected = [(i, "state") for i in range(50)] + [(1, "after"), (2, "after")]
    expected += [(100 + i, f"log {i}") for i in range(number)]
    assert stream.run(keyed_table, maxRowsPerTrigger="100000") == sorted(expected, key=repr)


# -- offsets -----------------------------------------------------------------------------------


def test_modes_begin_where_they_say(lake_server, log_table):
    append(log_table, id=[1], name=["old"])
    late = reader(lake_server.bootstrap, log_table, **{"scan.startup.mode": "latest"})
    start = late.initialOffset()
    early = reader(lake_server.bootstrap, log_table, **{"scan.startup.mode": "earliest"})
    append(log_table, id=[2], name=["new"])
    assert ids(late, start, late.latestOffset(start, everything())) == [2]
    first = early.initialOffset()
    assert ids(early, first, early.latestOffset(first, everything())) == [1, 2]
    far = {"scan.startup.mode": "timestamp", "scan.startup.timestamp": "0"}
    past = reader(lake_server.bootstrap, log_table, **far)
    first = past.initialOffset()
    assert ids(past, first, past.latestOffset(first, everything())) == [1, 2]


@pytest.mark.parametrize("mode", ["full", "earliest", "latest"])
@pytest.mark.parametrize("keyed", [False, True], ids=["log", "primary key"])
def test_a_first_batch_that_runs_again_has_the_same_rows(
    lake_server, log_table, keyed_table, keyed, mode
):
    table, write = (keyed_table, upsert) if keyed else (log_table, append)
    write(table, id=[1, 2], name=["a", "b"])
    before = reader(lake_server.bootstrap, table, **{"scan.startup.mode": mode})
    start = before.initialOffset()
    write(table, id=[3], name=["c"])
    end = before.latestOffset(start, everything())
    found = ids(before, start, end)
    assert found == {"full": [1, 2] if keyed else [1, 2, 3], "latest": [3]}.get(mode, [1, 2, 3])
    before.stop()
    write(table, id=[4], name=["d"])
    again = reader(lake_server.bootstrap, table, **{"scan.startup.mode": mode})
    assert ids(again, again.initialOffset(), end) == found, "Spark asks for another first offset"
    after = again.latestOffset(end, everything())
    assert sorted(found + ids(again, end, after)) == ([3, 4] if mode == "latest" else [1, 2, 3, 4])
    again.stop()


def test_partitions_join_and_leave_a_query(lake_server, connection):
    with lake_table(connection, "id INT, p STRING", bucket_count=1, partition_keys=["p"]) as table:
        append(table, id=[1], p=["a"])
        stream = reader(lake_server.bootstrap, table)
        start = stream.initialOffset()
        end = stream.latestOffset(start, everything())
        assert ids(stream, start, end) == [1]
        append(table, id=[2, 3], p=["b", "a"])
        after = stream.latestOffset(end, everything())
        assert ids(stream, end, after) == [2, 3]
        append(table, id=[4, 5], p=["a", "b"])
        planned = stream.latestOffset(after, everything())
        connection.admin.drop_partition(table.path, {"p": "a"})
        assert ids(stream, after, planned) == [5]
        rest = stream.latestOffset(planned, everything())
        assert ids(stream, planned, rest) == []
        assert stream.latestOffset(rest, everything()) == rest


def test_nothing_new_is_the_same_offset(lake_server, log_table):
    append(log_table, id=[1], name=["a"])
    stream = reader(lake_server.bootstrap, log_table)
    end = stream.latestOffset(stream.initialOffset(), everything())
    assert stream.latestOffset(end, everything()) == end
    append(log_table, id=list(range(10)), name=["x"] * 10)
    assert len(ids(stream, end, stream.latestOffset(end, at_most(4)))) == 4


def test_a_limit_is_shared_out_and_used_up():
    assert shares({"a": 90, "b": 10, "c": 1}, 10) == {"a": 9, "b": 1, "c": 0}
    assert shares({"a": 1, "b": 1, "c": 1}, 1) == {"a": 1, "b": 0, "c": 0}
    assert shares({"a": 5}, None) == {"a": 5}
    assert sum(shares(dict.fromkeys(range(9), 7), 20).values()) == 20


def test_a_limit_of_bytes_is_kept_about(lake_server, log_table):
    from pyspark.sql.streaming.datasource import ReadMaxBytes

    append(log_table, id=list(range(1000)), name=["x" * 100] * 1000)
    stream = reader(lake_server.bootstrap, log_table)
    start = stream.initialOffset()
    found = ids(stream, start, stream.latestOffset(start, ReadMaxBytes(20_000)))
    assert 100 <= len(found) <= 250


def test_tasks_are_cut_by_the_offsets_alone(lake_server, log_table):
    append(log_table, id=list(range(100)), name=["x"] * 100)
    stream = reader(lake_server.bootstrap, log_table)
    start = stream.initialOffset()
    end = stream.latestOffset(start, everything())
    assert len(stream.partitions(start, end)) == 1, "a small batch is one task"
    options = {"scan.maxRecordsPerPartition": "10"}
    cut = reader(lake_server.bootstrap, log_table, **options)
    assert len(cut.partitions(start, end)) >= 10


# -- errors ------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_dropped_table_is_refused(lake_server, connection, log_table):
    stream = reader(lake_server.bootstrap, log_table)
    start = stream.initialOffset() | {"table_id": 99_999}
    with pytest.raises(TableNotExistError, match="another checkpointLocation"):
        stream.latestOffset(start, everything())


@pytest.mark.parametrize(
    ("suffix", "options", "message"),
    [
        ("$lake", {}, "cannot be read as a stream"),
        ("", {"scan.startup.mode": "timestamp"}, "give both or none"),
        ("", {"scan.startup.timestamp": "5"}, "give both or none"),
        ("", {"maxRowsPerTrigger": "5", "maxBytesPerTrigger": "1kb"}, "not both"),
        ("", {"limit": "5"}, "limit has no meaning for a streaming read"),
    ],
)
def test_wrong_options_say_what_is_allowed(lake_server, log_table, suffix, options, message):
    with pytest.raises(ConfigError, match=message):
        reader(lake_server.bootstrap, log_table, suffix, **options)
