"""The session and a union read on clusters of real processes, and through Spark Connect."""

from __future__ import annotations

import pytest

from tests.client.rounds import Rounds, lake_table
from tests.spark.cluster import SparkCluster
from zufluss.client.sync import Connection
from zufluss.testing.server import DevServer

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

READ = """
rows = zufluss.spark.table(spark, sys.argv[1], bootstrap=sys.argv[2])
print(sorted(tuple(row) for row in rows.collect()))
"""


@pytest.mark.parametrize("name", ["local_cluster", "standalone", "connect_server"])
def test_a_union_read_on_a_cluster_has_every_row_once(
    request: pytest.FixtureRequest,
    name: str,
    connection: Connection,
    rounds: Rounds,
    lake_server: DevServer,
) -> None:
    """Workers of other processes find their interpreter, the client and the lake's files."""
    cluster: SparkCluster = request.getfixturevalue(name)
    columns = "id INT, name STRING"
    with lake_table(connection, columns, primary_key=["id"], bucket_count=2) as table:
        with table.upsert() as writer:
            writer.write({"id": [1, 2, 3], "name": ["a", "b", "c"]})
        rounds.tier(table)
        with table.upsert() as writer:
            writer.write({"id": [2, 4], "name": ["B", "d"]})
            writer.delete({"id": [3]})
        said = cluster.run(READ, str(table.path), lake_server.bootstrap)
    assert said.splitlines()[-1] == "[(1, 'a'), (2, 'B'), (4, 'd')]"
