"""Streaming reads: every row once, from the first batch on, over restarts and limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

import zufluss
import zufluss.spark
from tests.client.pk import create_table
from tests.client.read.test_union_scan import RETENTION, wait_for
from tests.client.rounds import lake_table
from tests.counts import only_full
from tests.servers import WarmServer
from tests.spark.cluster import QUICK
from tests.spark.read.test_table import append, delete, plain, upsert
from tests.spark.stream_queries import StreamRead, everything
from tests.spark.stream_queries import stream_reader as reader
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import (
    ConfigError,
    OffsetOutOfRangeError,
    TableNotExistError,
    ZuflussError,
)
from zufluss.spark.read import stream_limits
from zufluss.spark.read.stream_limits import shares
from zufluss.testing.server import DevServer

LIMITS = pytest.mark.skipif(stream_limits.datasource is None, reason="needs Spark 4.2")


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


def ids(found: Any, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    groups = found.partitions(start, end)
    return sorted(i for g in groups for b in found.read(g) for i in b.column("id").to_pylist())


def at_most(rows: int) -> Any:
    """A limit of Spark's, as far as a reader looks at it."""
    return SimpleNamespace(max_rows=rows)


# -- queries -----------------------------------------------------------------------------------


@LIMITS
def test_a_log_table_is_read_from_lake_and_log_and_goes_on(stream, rounds, log_table):
    append(log_table, id=[1, 2], name=["a", "b"])
    rounds.tier(log_table)
    append(log_table, id=list(range(3, 13)), name=["c"] * 10)
    expected = [(1, "a"), (2, "b"), *((i, "c") for i in range(3, 13))]
    assert sorted(stream.run(log_table, maxRowsPerTrigger="7")) == expected
    assert [rows for rows in stream.batches if rows] == [2, 7, 3], "the lake's part has no limit"
    append(log_table, id=[13], name=["d"])
    rounds.tier(log_table)
    append(log_table, id=[14], name=["e"])
    assert sorted(stream.run(log_table)) == [*expected, (13, "d"), (14, "e")]


DRIVER = """
import sys, zufluss.spark
bootstrap, table, directory, conf = sys.argv[1:]
spark = zufluss.spark.session("killed", "local[2]", eval(conf))
zufluss.spark.register(spark, bootstrap)
frame = spark.readStream.format("fluss").option("maxRowsPerTrigger", "40").load(table)
writer = frame.writeStream.format("parquet").option("checkpointLocation", directory + "/checkpoint")
writer.start(directory + "/rows").awaitTermination()
"""


@LIMITS
@only_full
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
        while driver.poll() is None and len(list(commits.glob("[0-9]"))) < 2:
            upsert(keyed_table, id=[100 + number], name=[f"log {number}"])
            number += 1
            time.sleep(0.05)
        assert driver.poll() is None
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    upsert(keyed_table, id=[1, 2], name=["after", "after"])
    expected = [(i, "state") for i in range(50)] + [(1, "after"), (2, "after")]
    expected += [(100 + i, f"log {i}") for i in range(number)]
    assert stream.run(keyed_table, maxRowsPerTrigger="100000") == sorted(expected, key=repr)


# -- offsets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["log", "keyed", "log parted", "keyed parted"])
@pytest.mark.parametrize("tiered", [False, True], ids=["log", "lake"])
def test_modes_begin_where_they_say(lake_server, connection, rounds, kind, tiered):
    parted = "parted" in kind
    options: dict[str, Any] = {"partition_keys": ["p"], "bucket_count": 1} if parted else {}
    if "keyed" in kind:
        options["primary_key"] = ["id", "p"] if parted else ["id"]
    write = upsert if "keyed" in kind else append
    with lake_table(connection, "id INT, p STRING", **{"bucket_count": 2} | options) as table:
        write(table, id=[1, 2], p=["a", "b"])
        moment = later_moment()
        write(table, id=[3, 4], p=["a", "c"])
        if tiered:
            rounds.tier(table)
        modes: dict[str, dict[str, str]] = {mode: {} for mode in ("full", "earliest", "latest")}
        modes["timestamp"] = {"scan.startup.timestamp": str(moment)}
        begun = {
            mode: StreamRead(lake_server.bootstrap, table, **{"scan.startup.mode": mode, **more})
            for mode, more in modes.items()
        }
        write(table, id=[5, 6], p=["b", "d"])
        found = {mode: [row[0] for row in stream.all_rows()] for mode, stream in begun.items()}
        begun["full"].reader.stop()
    assert found["full"] == found["earliest"] == [1, 2, 3, 4, 5, 6]
    assert found["timestamp"] == [3, 4, 5, 6]
    assert found["latest"] == [5, 6]


def later_moment() -> int:
    """A time after all that was written, in milliseconds; nothing else is written in it."""
    before = int(time.time() * 1000)
    while (now := int(time.time() * 1000)) <= before + 1:
        time.sleep(0.001)
    return now


def test_a_stream_that_begins_while_rows_are_written_has_no_gap_and_no_overlap(
    lake_server, keyed_table
):
    keys = list(range(20))
    going, rounds_written = threading.Event(), 0

    def write_on() -> None:
        nonlocal rounds_written
        while not going.is_set():
            rounds_written += 1
            upsert(keyed_table, id=keys, name=[f"{rounds_written:06}"] * len(keys))

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        wait_for(lambda: rounds_written > 3)
        stream = StreamRead(lake_server.bootstrap, keyed_table)
        wait_for(lambda: rounds_written > 6)
        seen = stream.plan().rows() + stream.plan().rows()
        wait_for(lambda: rounds_written > 9)
    finally:
        going.set()
        writer.join()
    seen += stream.all_rows()
    for key in keys:
        versions = sorted(int(name) for found, name in seen if found == key)
        assert versions == list(range(versions[0], rounds_written + 1))


def test_a_changelog_has_all_changes(lake_server, keyed_table):
    upsert(keyed_table, id=[1], name=["a"])
    upsert(keyed_table, id=[1], name=["b"])
    delete(keyed_table, id=[1])
    wanted = {"columns": "_change_type,name"}
    stream = StreamRead(lake_server.bootstrap, keyed_table, "$changelog", **wanted)
    assert stream.all_rows() == [("+I", "a"), ("+U", "b"), ("-D", "b"), ("-U", "a")]
    upsert(keyed_table, id=[1], name=["c"])
    assert stream.all_rows() == [("+I", "c")]


def test_a_query_says_how_far_the_log_is(lake_server, connection):
    with lake_table(connection, "id INT", bucket_count=1) as table:
        stream = StreamRead(lake_server.bootstrap, table, **{"scan.startup.mode": "latest"})
        append(table, id=[1, 2, 3])
        stream.plan(at_most(1))
        assert stream.reader.reportLatestOffset() == {"/0": 3}
        assert stream.end["buckets"] == {"/0": 1}
        append(table, id=[4])
        assert stream.reader.reportLatestOffset() == {"/0": 4}


def test_a_query_with_available_now_reads_up_to_the_end_at_its_beginning(lake_server, log_table):
    append(log_table, id=[1, 2, 3], name=["a", "b", "c"])
    stream = StreamRead(lake_server.bootstrap, log_table)
    stream.reader.prepareForTriggerAvailableNow()
    append(log_table, id=[4], name=["d"])
    found = [stream.plan(at_most(2)).rows() for _ in range(3)]
    assert [len(rows) for rows in found] == [2, 1, 0]


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


def test_the_offset_stays_the_same_without_new_records(lake_server, log_table):
    append(log_table, id=[1], name=["a"])
    stream = reader(lake_server.bootstrap, log_table)
    end = stream.latestOffset(stream.initialOffset(), everything())
    assert stream.latestOffset(end, everything()) == end
    append(log_table, id=list(range(10)), name=["x"] * 10)
    assert len(ids(stream, end, stream.latestOffset(end, at_most(4)))) == 4


def test_a_limit_is_shared_out_and_used_up_and_large_buckets_keep_nobody_waiting():
    assert shares({"a": 1_000_000, "b": 3, "c": 1}, 1000) == {"a": 996, "b": 3, "c": 1}
    assert shares({"a": 90, "b": 10, "c": 0}, 9) == {"a": 5, "b": 4, "c": 0}
    assert sum(shares({"a": 1, "b": 1, "c": 1}, 1).values()) == 1
    assert shares({"a": 5}, None) == {"a": 5}
    assert sum(shares(dict.fromkeys(range(9), 7), 20).values()) == 20


def test_a_bucket_of_a_primary_key_table_is_never_cut_so_that_a_key_keeps_its_order(
    lake_server, keyed_table, monkeypatch
):
    monkeypatch.setattr("zufluss.spark.read.packing.TASK_ROWS", 10)
    for name in ("old", "new"):
        upsert(keyed_table, id=list(range(100)), name=[name] * 100)
    stream = reader(lake_server.bootstrap, keyed_table, **{"scan.startup.mode": "earliest"})
    start = stream.initialOffset()
    planned = stream.partitions(start, stream.latestOffset(start, everything()))
    buckets = [split.part.bucket for group in planned for split in group.splits]
    assert len(buckets) == len(set(buckets)) > 0


def test_a_limit_in_bytes_is_kept_approximately(lake_server, log_table):
    append(log_table, id=list(range(1000)), name=["x" * 100] * 1000)
    stream = reader(lake_server.bootstrap, log_table)
    start = stream.initialOffset()
    found = ids(stream, start, stream.latestOffset(start, SimpleNamespace(max_bytes=20_000)))
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


def test_a_checkpoint_whose_offsets_expired_is_refused(tmp_path):
    with (
        WarmServer(tmp_path, RETENTION) as server,
        zufluss.connect(server.bootstrap) as conn,
    ):
        table = create_table(conn, "id INT", properties={"table.log.ttl": "1ms"})
        stream = StreamRead(server.bootstrap, table)
        append(table, id=[1, 2])
        wait_for(lambda: conn.admin.list_offsets(table.path, "earliest") == {0: 2})
        with pytest.raises(OffsetOutOfRangeError, match="at offset 0, but the log begins at 2"):
            stream.plan()


def test_a_version_of_offsets_that_is_not_known_is_refused(lake_server, log_table):
    stream = reader(lake_server.bootstrap, log_table)
    with pytest.raises(ZuflussError, match="go on with the release that wrote it"):
        stream.latestOffset(stream.initialOffset() | {"version": 2}, everything())


# -- Spark 4.1 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "primary key"])
def test_a_reader_that_is_not_told_where_a_batch_begins_knows_it(
    lake_server, log_table, keyed_table, keyed
):
    table, write = (keyed_table, upsert) if keyed else (log_table, append)
    write(table, id=[1], name=["a"])
    first = reader(lake_server.bootstrap, table)
    start, end = first.initialOffset(), first.latestOffset()
    assert ids(first, start, end) == [1]
    write(table, id=[2], name=["b"])
    after = first.latestOffset()
    assert ids(first, end, after) == [2]
    first.stop()
    write(table, id=[3], name=["c"])
    again = reader(lake_server.bootstrap, table)
    last = again.latestOffset()
    assert ids(again, after, last) == [3]
    write(table, id=[4], name=["d"])
    assert ids(again, last, again.latestOffset()) == [4]
    again.stop()


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "primary key"])
def test_a_new_query_that_is_asked_for_its_end_first_has_all_rows_once(
    lake_server, rounds, log_table, keyed_table, keyed
):
    table, write = (keyed_table, upsert) if keyed else (log_table, append)
    write(table, id=[1], name=["a"])
    rounds.tier(table)
    write(table, id=[2], name=["b"])
    stream = reader(lake_server.bootstrap, table)
    end = stream.latestOffset()
    write(table, id=[3], name=["c"])
    start = stream.initialOffset()
    assert ids(stream, start, end) == [1, 2]
    assert ids(stream, end, stream.latestOffset()) == [3]
    stream.stop()
    again = reader(lake_server.bootstrap, table)
    assert ids(again, again.initialOffset(), end) == [1, 2], "the first batch runs again"
    again.stop()


@pytest.mark.parametrize("option", ["maxRowsPerTrigger", "maxBytesPerTrigger"])
def test_limits_are_refused_where_spark_has_none(lake_server, log_table, monkeypatch, option):
    monkeypatch.setattr(stream_limits, "datasource", None)
    with pytest.raises(ConfigError, match=f"{option} needs Spark 4.2"):
        reader(lake_server.bootstrap, log_table, **{option: "10"})


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
