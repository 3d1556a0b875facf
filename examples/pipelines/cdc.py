"""Changes of a database kept as a table, and its changelog fanned out to two others.

    changes of a database (op, id, name, city)
         │ insert, update_after, delete: `write.change-type-column`
         ▼
      customers (primary key)
         │ customers$changelog: +I, -U, +U, -D
         ├──────────────► audit (log): every change, and when
         └──────────────► cities (aggregation): +1 and -1 add up to customers per city

Each target has a query and a checkpoint of its own, and continues where it was stopped.
The counts per city follow updates and deletes: the changelog has the row before and after.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from running import check, empty_database, in_session, run, say

import zufluss

CHANGE = "round INT, seq INT, op STRING, id INT, name STRING, city STRING"
CHANGES = [
    (1, 1, "insert", 1, "Ada", "Bern"),
    (1, 2, "insert", 2, "Bob", "Graz"),
    (1, 3, "insert", 3, "Cyd", "Bern"),
    (2, 4, "update_before", 2, "Bob", "Graz"),  # databases send it; the table does not need it
    (2, 5, "update_after", 2, "Bob", "Bern"),
    (2, 6, "delete", 1, "Ada", "Bern"),
    (2, 7, "insert", 4, "Dan", "Ulm"),
]
AUDIT = ("_commit_timestamp AS at", "_change_type AS kind", "id", "name", "city")
CITIES = ("city", "IF(_change_type IN ('+I', '+U'), 1L, -1L) AS customers")


def main(spark: SparkSession, bootstrap: str) -> None:
    """Apply two rounds of changes while both targets follow."""
    with zufluss.connect(bootstrap) as connection, tempfile.TemporaryDirectory() as checkpoints:
        create_tables(connection)
        log = spark.readStream.format("fluss").load("example_cdc.customers$changelog")
        queries = [
            follow(log.selectExpr(*AUDIT), "audit", checkpoints),
            follow(log.selectExpr(*CITIES), "cities", checkpoints),
        ]
        changes = spark.createDataFrame(CHANGES, CHANGE)
        for nth in (1, 2):
            apply(changes.where(f"round = {nth}"))
            for query in queries:
                query.processAllAvailable()
            say(f"customers per city after round {nth}: {counted(connection)}")
        for query in queries:
            query.stop()

        cities = connection.table("example_cdc.customers").scan().to_arrow()["city"].to_pylist()
        check(counted(connection) == Counter(cities), f"the customers live in {cities}")
        kinds = Counter(connection.table("example_cdc.audit").scan().to_arrow()["kind"].to_pylist())
        check(kinds == {"+I": 4, "-U": 1, "+U": 1, "-D": 1}, f"the audit log has {kinds}")
        say(f"that is right, and the audit log has {kinds.total()} changes")


def create_tables(connection: zufluss.Connection) -> None:
    """Create the table and the tables that follow it."""
    empty_database(connection, "example_cdc")
    create = connection.admin.create_table
    customer = "id INT, name STRING, city STRING"
    create("example_cdc.customers", f"{customer}, PRIMARY KEY (id)", bucket_count=2)
    create("example_cdc.audit", f"at TIMESTAMP_LTZ(3), kind STRING, {customer}", bucket_count=1)
    create(
        "example_cdc.cities",
        "city STRING, customers BIGINT SUM, PRIMARY KEY (city)",
        bucket_count=1,
        properties={"table.merge-engine": "aggregation"},
    )


def apply(changes: DataFrame) -> None:
    """Apply changes to the table: those of one customer in one task, in order."""
    ordered = changes.repartition("id").sortWithinPartitions("seq").drop("round", "seq")
    writing = ordered.write.format("fluss").option("write.change-type-column", "op")
    writing.option("table", "example_cdc.customers").mode("append").save()


def follow(rows: DataFrame, table: str, checkpoints: str) -> StreamingQuery:
    """Start a query that writes a stream to a table, exactly once."""
    writing = rows.writeStream.format("fluss").option("table", f"example_cdc.{table}")
    query = writing.option("checkpointLocation", f"{checkpoints}/{table}").start()
    query.processAllAvailable()
    return query


def counted(connection: zufluss.Connection) -> dict[str, int]:
    """Customers per city, as the aggregation table has them."""
    rows = connection.table("example_cdc.cities").scan().to_arrow().to_pylist()
    return {row["city"]: row["customers"] for row in rows if row["customers"]}


if __name__ == "__main__":
    sys.exit(run(in_session(main)))
