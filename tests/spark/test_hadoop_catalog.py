"""A lake in a catalog of type hadoop: our Spark reads it, and Iceberg's own runtime commits to it.

The second needs Spark 4.1 (`make test-spark41`) and the jars of Maven Central.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zufluss
import zufluss.spark
from tests.client.rounds import Rounds, lake_table
from tests.servers import WarmServer
from tests.spark.test_iceberg_runtime import jars
from zufluss.client.sync.connection import Connection
from zufluss.lake.iceberg.hadoop import HadoopCatalog
from zufluss.testing.server import DevServer

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hadoop") / "a b"


@pytest.fixture(scope="module")
def hadoop_server(warehouse: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    properties = {
        "datalake.format": "iceberg",
        "datalake.iceberg.type": "hadoop",
        "datalake.iceberg.warehouse": f"file://{warehouse}",
    }
    with WarmServer(tmp_path_factory.mktemp("server"), properties) as server:
        yield server


@pytest.fixture(scope="module")
def connection(hadoop_server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(hadoop_server.bootstrap) as connection:
        yield connection


@pytest.fixture(scope="module")
def rounds(connection: Connection, hadoop_server: DevServer) -> Rounds:
    return Rounds(connection, hadoop_server.bootstrap)


def official(warehouse: Path, *statements: str) -> list[str]:
    """What Iceberg's own Spark runtime answers to statements, in a catalog named `lake`."""
    settings = {
        "spark.jars": jars(),
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
        "spark.sql.catalog.lake.warehouse": f"file://{warehouse}",
    }
    code = f"""
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config(map={settings!r}).getOrCreate()
for statement in {statements!r}:
    print([tuple(row) for row in spark.sql(statement).collect()])
spark.stop()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def test_spark_reads_lake_and_log_together(
    spark, connection: Connection, rounds: Rounds, hadoop_server: DevServer
) -> None:
    schema = "id INT, name STRING"
    with lake_table(connection, schema, primary_key=["id"], bucket_count=2) as table:
        with table.upsert() as writer:
            writer.write({"id": list(range(20)), "name": ["lake"] * 20})
        rounds.tier(table)
        with table.upsert() as writer:
            writer.write({"id": [0, 20], "name": ["log", "log"]})
            writer.delete({"id": [1]})
        frame = zufluss.spark.table(spark, str(table.path), bootstrap=hadoop_server.bootstrap)
        names = {row.id: row.name for row in frame.collect()}
        assert names == {i: "log" if i in (0, 20) else "lake" for i in range(21) if i != 1}


def test_official_iceberg_commits_between_our_rounds_and_we_between_its(
    connection: Connection, rounds: Rounds, warehouse: Path
) -> None:
    schema = "id INT, name STRING"
    with lake_table(connection, schema, primary_key=["id"], bucket_count=2) as table:
        name = f"lake.{table.path}"
        for start in (0, 10):
            with table.upsert() as writer:
                writer.write({"id": list(range(start, start + 10)), "name": ["a"] * 10})
            rounds.tier(table)
        answers = official(
            warehouse,
            "SHOW TABLES IN lake.fluss",
            f"SELECT count(*) FROM {name}",
            f"CALL lake.system.rewrite_data_files('{table.path}')",
            f"ALTER TABLE {name} SET TBLPROPERTIES ('theirs' = 'set')",
            "CREATE TABLE lake.other.t (id INT) TBLPROPERTIES "
            "('write.metadata.compression-codec' = 'gzip')",
            "INSERT INTO lake.other.t VALUES (1), (2)",
        )
        assert table.path.table in answers[0]
        assert answers[1] == "[(20,)]"
        ours = HadoopCatalog("zufluss", warehouse=f"file://{warehouse}")
        before = ours.load_table(tuple(table.path))
        assert before.properties["theirs"] == "set"
        with table.upsert() as writer:
            writer.write({"id": [1], "name": ["b"]})
            writer.delete({"id": [2]})
        rounds.tier(table)
        later = ours.load_table(tuple(table.path))
        assert later.current_snapshot().parent_snapshot_id == before.current_snapshot().snapshot_id
        assert later.properties["theirs"] == "set"
        theirs = ours.load_table("other.t")
        assert theirs.metadata_location.endswith("/v2.gz.metadata.json")
        theirs.append(theirs.scan().to_arrow())
        assert official(
            warehouse,
            f"SELECT count(*), max(name) FROM {name}",
            "SELECT sum(id) FROM lake.other.t",
            f"DELETE FROM {name} WHERE id = 3",
            "DROP TABLE lake.other.t",
        ) == ["[(19, 'b')]", "[(6,)]", "[]", "[]"]
        assert ours.list_tables("other") == []
        with table.upsert() as writer:
            writer.delete({"id": [4]})
        rounds.tier(table)
        assert table.scan(source="lake").to_arrow().num_rows == 17
