"""Tasks fail, their processes are killed, attempts run side by side: each row once.

Every job here has tasks that go wrong in all of these ways at once (`sinks.py`). The executors of a
cluster are killed only with `ZUFLUSS_FAULT=full`: starting them takes its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

import zufluss
from tests.client.pk import create_table
from tests.counts import only_full
from tests.spark.cluster import SparkCluster
from tests.spark.sinks import (
    AGGREGATION,
    COUNTS,
    FAULTS,
    ROWS,
    Overtaken,
    add_rows,
    append,
    doubled,
    expected,
    faulty_source,
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


TASKS = len(FAULTS)
COUNT = 1200
SMALL = {"client.writer.batch-size": "1kb"}
"""Many batches of few rows."""
CANONICAL = {"write.order": "canonical"}
"""For tasks whose rows come in another order when they are run again."""


@pytest.fixture(scope="module")
def conn(dev_server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(dev_server.bootstrap) as connection:
        yield connection


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marks")


@pytest.fixture(scope="module")
def session(spark: SparkSession, marks: Path) -> Iterator[SparkSession]:
    sources = (faulty_source(marks), faulty_source(marks, "shuffled", reverse=True), Overtaken)
    for source in (FlussDataSource, *sources):
        spark.dataSource.register(source)
    rows = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(rows)
    spark.conf.set(rows, "50")  # a task sends its rows in several steps
    yield spark
    spark.conf.set(rows, before)


@pytest.fixture
def create(conn: Connection) -> Callable[..., str]:
    """Makes tables that no other test knows: `create("id INT, …")` gives the name."""

    def table(schema: str, **more: Any) -> str:
        return str(create_table(conn, schema, **{"bucket_count": 2} | more).path)

    return table


@pytest.fixture
def everything_went_wrong(marks: Path) -> Iterator[None]:
    """Assert that every fault has happened when a test ends."""
    for mark in marks.iterdir():
        mark.unlink()
    yield
    found = {mark.name for mark in marks.iterdir()}
    assert found == {f"{task}-{fault}" for task, fault in enumerate(FAULTS)}


class Tables:
    """A table of each kind, and the rows that each must have."""

    def __init__(self, conn: Connection, create: Callable[..., str]) -> None:
        self._conn = conn
        self.log = create(ROWS)
        self.keyed = create(f"{ROWS}, PRIMARY KEY (id)")
        self.counts = create(COUNTS, properties=AGGREGATION)

    def check(self, rows: int) -> None:
        found = log_rows(self._conn, self.log)
        assert (len(found), doubled(found)) == (rows, [])
        assert {i: row["v"] for i, row in state(self._conn, self.keyed).items()} == {
            i: i for i in range(rows)
        }
        assert state(self._conn, self.counts, "k") == expected(rows)


@only_full
@pytest.mark.usefixtures("everything_went_wrong")
def test_a_batch_job_whose_tasks_fail_is_in_every_kind_of_table_once(
    session: SparkSession, conn: Connection, dev_server: DevServer, create: Callable[..., str]
) -> None:
    tables, server = Tables(conn, create), dev_server.bootstrap
    rows = session.range(0, COUNT, 1, TASKS).selectExpr("id", "id % 7 AS k", "id AS v")
    append(rows, server, tables.log, "shuffled", **SMALL, **CANONICAL)
    append(inputs(rows), server, tables.counts, "faulty", **SMALL)
    older = rows.selectExpr("id", "k", "v - 5 AS v")
    twice = older.unionAll(rows).repartition(TASKS, "id").sortWithinPartitions("v")
    append(twice, server, tables.keyed, "faulty", **SMALL)
    tables.check(COUNT)
    for table in (tables.keyed, tables.counts):
        assert conn.admin.list_producers(table) == []


@pytest.mark.usefixtures("everything_went_wrong")
def test_a_stream_whose_tasks_fail_is_in_every_kind_of_table_once(
    session: SparkSession,
    conn: Connection,
    dev_server: DevServer,
    create: Callable[..., str],
    tmp_path: Path,
) -> None:
    tables, server = Tables(conn, create), dev_server.bootstrap
    source = create(ROWS, bucket_count=1)
    add_rows(conn, source, 0, COUNT)
    split = {"scan.maxRecordsPerPartition": str(COUNT // TASKS)}
    read = stream(session, server, source, **split)
    run(read, server, tables.log, tmp_path / "log", "faulty", **SMALL)
    run(read, server, tables.keyed, tmp_path / "keyed", "faulty", **SMALL)
    run(inputs(read), server, tables.counts, tmp_path / "counts", "faulty", **SMALL)
    tables.check(COUNT)


@only_full  # test_sink_tasks.py has it too
def test_a_driver_that_should_be_gone_cannot_write_older_rows_over_newer_ones(
    session: SparkSession,
    conn: Connection,
    dev_server: DevServer,
    create: Callable[..., str],
    tmp_path: Path,
) -> None:
    server, source = dev_server.bootstrap, create(ROWS, bucket_count=1)
    keyed = create(f"{ROWS}, PRIMARY KEY (id)")
    add_rows(conn, source, 0, 10)
    with pytest.raises(Exception, match="this writer must end"):
        run(stream(session, server, source), server, keyed, tmp_path / "state", "overtaken")
    assert {i: row["v"] for i, row in state(conn, keyed).items()} == dict.fromkeys(range(10), -1)


KILLED = """
import os, pathlib, signal, subprocess
server, log, keyed, counts, mark = sys.argv[1:]

def once(batches):
    from pyspark import TaskContext
    path = pathlib.Path(mark)
    for number, rows in enumerate(batches):
        if number == 2 and TaskContext.get().partitionId() == 1 and not path.exists():
            path.touch()
            pids = subprocess.run(
                ["ps", "-o", "ppid=", "-p", str(os.getppid())], capture_output=True, text=True)
            os.kill(int(pids.stdout), signal.SIGKILL)  # the executor, the parent of our parent
            os.kill(os.getpid(), signal.SIGKILL)
        yield rows

spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
rows = spark.range(0, 1200, 1, 4).selectExpr("id", "id % 7 AS k", "id AS v")
for table in (log, keyed, counts):
    mark += "+"
    faulty = rows.mapInArrow(once, rows.schema)
    faulty = faulty.selectExpr("k", "1L AS n", "v AS top") if table == counts else faulty
    options = {"bootstrap.servers": server, "table": table, "client.writer.batch-size": "1kb"}
    faulty.write.format("fluss").options(**options).mode("append").save()
"""


@only_full  # starts a cluster
def test_jobs_whose_executors_are_killed_are_in_every_kind_of_table_once(
    local_cluster: SparkCluster,
    conn: Connection,
    dev_server: DevServer,
    create: Callable[..., str],
    tmp_path: Path,
) -> None:
    tables = Tables(conn, create)
    names = (tables.log, tables.keyed, tables.counts)
    local_cluster.run(KILLED, dev_server.bootstrap, *names, str(tmp_path / "mark"))
    assert len(list(tmp_path.iterdir())) == len(names)
    tables.check(COUNT)
