"""The tiering service on Spark clusters of real processes, and through Spark Connect.

`make test` has one cluster here and Connect in `tests/spark/test_masters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zufluss
from tests.counts import FULL
from tests.lake.readers import READERS
from tests.spark.cluster import QUICK, SparkCluster, connect_server, local_cluster, standalone
from tests.tiering.support import create_table
from tests.tiering.test_service import tiered
from tests.tiering.tiered_cluster import lake_table
from tests.waiting import eventually
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import TieringProcess

__all__ = ["connect_server", "local_cluster", "standalone"]

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

CLUSTERS = ["local_cluster", *(["standalone", "connect_server"] if FULL else [])]


@pytest.fixture
def connection(lake: DevServer) -> Iterator[zufluss.Connection]:
    with zufluss.connect(lake.bootstrap) as made:
        yield made


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_service_runs_on_a_cluster(
    request: pytest.FixtureRequest, name: str, lake: DevServer, connection: zufluss.Connection
) -> None:
    """Executors in processes of their own read the servers and write the lake's files."""
    cluster: SparkCluster = request.getfixturevalue(name)
    log = create_table(connection, "events", bucket_count=4)
    keyed = create_table(connection, "users", "id INT NOT NULL, name STRING", primary_key=["id"])
    remote = cluster.master.startswith("sc://")
    options = {"spark.master": cluster.master, **({} if remote else {**QUICK, **cluster.conf})}
    with TieringProcess(lake.bootstrap, options) as service:
        with connection.table(log).append() as writer:
            writer.write({"id": list(range(10_000)), "name": ["a"] * 10_000})
        with connection.table(keyed).upsert() as writer:
            writer.write({"id": [1, 2, 3], "name": ["a", "b", "c"]})
        eventually(lambda: tiered(connection, log) and tiered(connection, keyed))
        with connection.table(keyed).upsert() as writer:
            writer.write({"id": [2, 4], "name": ["B", "d"]})
            writer.delete({"id": [3]})
        eventually(lambda: tiered(connection, keyed))
        assert service.stop() == 0, service.log()
    for read in READERS.values():
        events = read(lake_table(connection.admin.table_info(log)).metadata_location)
        assert sorted(events["id"].to_pylist()) == list(range(10_000))
        users = read(lake_table(connection.admin.table_info(keyed)).metadata_location)
        found = sorted(zip(users["id"].to_pylist(), users["name"].to_pylist(), strict=True))
        assert found == [(1, "a"), (2, "B"), (4, "d")]
