"""The source, the sink and the helper on every kind of master that Spark has here.

Workers of other processes find their interpreter, the client, the lake's files and the format. One
driver for each cluster does it all, since what takes time is to start it. `make test` has Connect
here and one cluster in `tests/tiering/test_clusters.py`; `ZUFLUSS_FAULT=full` has all of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.rounds import Rounds, lake_table
from tests.counts import FULL
from tests.spark.cluster import SparkCluster
from zufluss.client.sync.connection import Connection
from zufluss.testing.server import DevServer

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

DRIVER = """
source, log, bootstrap = sys.argv[1:]
union = zufluss.spark.table(spark, source, bootstrap=bootstrap)
print(sorted(tuple(row) for row in union.collect()))
zufluss.spark.register(spark, bootstrap)
rows = spark.read.format("fluss").load(source)
rows.write.format("fluss").option("table", log).mode("append").save()
"""
CLUSTERS = [*(["local_cluster", "standalone"] if FULL else []), "connect_server"]
ROWS = [(1, "a"), (2, "B"), (4, "d")]


def test_other_tests_run_on_two_threads_with_four_attempts(spark: Any) -> None:
    assert spark.sparkContext.master == "local[2,4]"


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_reads_and_writes_every_row_once(
    request: pytest.FixtureRequest,
    name: str,
    connection: Connection,
    rounds: Rounds,
    lake_server: DevServer,
) -> None:
    cluster: SparkCluster = request.getfixturevalue(name)
    columns = "id INT, name STRING"
    with (
        lake_table(connection, columns, primary_key=["id"], bucket_count=2) as table,
        lake_table(connection, columns, bucket_count=2) as log,
    ):
        with table.upsert() as writer:
            writer.write({"id": [1, 2, 3], "name": ["a", "b", "c"]})
        rounds.tier(table)
        with table.upsert() as writer:
            writer.write({"id": [2, 4], "name": ["B", "d"]})
            writer.delete({"id": [3]})
        said = cluster.run(DRIVER, str(table.path), str(log.path), lake_server.bootstrap)
        written = log.scan().to_arrow().to_pylist()
    assert said.splitlines()[-1] == str(ROWS)
    assert sorted((row["id"], row["name"]) for row in written) == ROWS
