"""Orders that are enriched with data of their customers as they arrive.

    orders (log) ──► stream ──► mapInArrow: look up the customers of a batch ──► bills (primary key)
                                     │
                                     ▼
                               customers (primary key), changing meanwhile

A lookup asks the server that has the key, so an order gets the current row of its customer, without
a copy of the table in Spark, state or a watermark. One request has all keys of an Arrow batch.
Bills are upserted by order id, so a task that runs again writes the same rows again.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from running import check, empty_database, in_session, run, say

import zufluss

BILL = "id BIGINT, customer INT, name STRING, cents BIGINT"


def main(spark: SparkSession, bootstrap: str) -> None:
    """Append orders, change a customer, append more orders."""
    with zufluss.connect(bootstrap) as connection, tempfile.TemporaryDirectory() as checkpoint:
        create_tables(connection)
        orders = spark.readStream.format("fluss").load("example_bills.orders")
        bills = orders.mapInArrow(completed(bootstrap), BILL)
        writing = bills.writeStream.format("fluss").option("table", "example_bills.bills")
        query = writing.option("checkpointLocation", checkpoint).start()

        customers(connection, {"id": [1, 2], "name": ["Ada", "Bob"], "discount": [0, 10]})
        take(connection, {"id": [100, 101], "customer": [1, 2], "cents": [500, 500]})
        query.processAllAvailable()
        say("two orders are billed; now Ada marries and gets a discount")
        customers(connection, {"id": [1], "name": ["Ada Lovelace"], "discount": [20]})
        take(connection, {"id": [102, 103], "customer": [1, 9], "cents": [500, 500]})
        query.processAllAvailable()
        query.stop()

        rows = connection.table("example_bills.bills").scan().to_arrow().sort_by("id").to_pylist()
        for bill in rows:
            say(f"order {bill['id']}: {bill['name'] or 'somebody'} pays {bill['cents'] / 100:.2f}")
        said = [(bill["name"], bill["cents"]) for bill in rows]
        expected = [("Ada", 500), ("Bob", 450), ("Ada Lovelace", 400), (None, 500)]
        check(said == expected, f"billed was {said}, not {expected}")


def create_tables(connection: zufluss.Connection) -> None:
    """Create the tables of orders, customers and bills."""
    empty_database(connection, "example_bills")
    create = connection.admin.create_table
    create("example_bills.orders", "id BIGINT, customer INT, cents BIGINT", bucket_count=2)
    create("example_bills.customers", "id INT, name STRING, discount INT, PRIMARY KEY (id)")
    create("example_bills.bills", f"{BILL}, PRIMARY KEY (id)", bucket_count=2)


def completed(bootstrap: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What runs in Spark's tasks: Arrow batches of orders in, bills out."""

    def look_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with zufluss.connect(bootstrap) as connection:
            customers = connection.table("example_bills.customers")
            for orders in batches:
                rows = customers.lookup(orders["customer"])  # one row for each, null if unknown
                percent = pc.subtract(100, pc.fill_null(rows["discount"], 0))
                cents = pc.divide(pc.multiply(orders["cents"], percent), 100)
                bill = [orders["id"], orders["customer"], rows["name"], cents]
                yield from pa.table(bill, ["id", "customer", "name", "cents"]).to_batches()

    return look_up


def customers(connection: zufluss.Connection, rows: dict[str, list[object]]) -> None:
    """Upsert customers."""
    with connection.table("example_bills.customers").upsert() as writer:
        writer.write(rows)


def take(connection: zufluss.Connection, rows: dict[str, list[object]]) -> None:
    """Append orders."""
    with connection.table("example_bills.orders").append() as writer:
        writer.write(rows)


if __name__ == "__main__":
    sys.exit(run(in_session(main)))
