"""Clicks to a live dashboard, without a broker in between.

      people click            Spark, every second           whoever looks
          │ append                   │                            ▲ lookup by page
          ▼                          ▼                            │
    clicks (log) ─────────────► "1 view" ─────────────► dashboard (aggregation)
                                                        views add up, last_seen is the latest

The server merges the rows of the dashboard, so the stream has no state: it passes every click on,
and each is counted once, also when the query is killed and started again.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from running import check, empty_database, in_session, run, say

import zufluss

PAGES = ["start", "search", "cart", "checkout"]
BATCHES, CLICKS_EACH, PAUSE_SECONDS = 20, 500, 0.2


def main(spark: SparkSession, bootstrap: str) -> None:
    """Count clicks while they come, and look at the counts meanwhile."""
    with (
        zufluss.connect(bootstrap) as connection,
        tempfile.TemporaryDirectory() as checkpoint,
        ThreadPoolExecutor(1) as people,
    ):
        create_tables(connection)
        dashboard = connection.table("example_clicks.dashboard")
        query = start(spark, checkpoint)
        clicking = people.submit(click, connection.table("example_clicks.clicks"))
        while not clicking.done():
            show(dashboard)
            time.sleep(1)
        clicked = clicking.result()
        query.processAllAvailable()
        query.stop()
        show(dashboard)
        counts = {row["page"]: row["views"] for row in dashboard.scan().to_arrow().to_pylist()}
        check(counts == clicked, f"counted were {counts}, clicked {clicked}")
        say(f"all {clicked.total():,} clicks are on the dashboard, each once")


def create_tables(connection: zufluss.Connection) -> None:
    """A log of clicks, and a row per page that adds them up."""
    empty_database(connection, "example_clicks")
    connection.admin.create_table(
        "example_clicks.clicks", "page STRING, ms INT, at TIMESTAMP_LTZ(3)", bucket_count=2
    )
    connection.admin.create_table(
        "example_clicks.dashboard",
        "page STRING, views BIGINT SUM, slowest INT MAX, last_seen TIMESTAMP_LTZ(3) MAX,"
        " PRIMARY KEY (page)",
        bucket_count=2,
        properties={"table.merge-engine": "aggregation"},
    )


def start(spark: SparkSession, checkpoint: str) -> StreamingQuery:
    """Start the pipeline itself."""
    clicks = spark.readStream.format("fluss").load("example_clicks.clicks")
    counts = clicks.selectExpr("page", "1L AS views", "ms AS slowest", "at AS last_seen")
    writing = counts.writeStream.format("fluss").option("table", "example_clicks.dashboard")
    writing = writing.option("checkpointLocation", checkpoint)
    query = writing.trigger(processingTime="1 second").start()
    query.processAllAvailable()
    return query


def click(clicks: zufluss.Table) -> Counter[str]:
    """Append clicks for some seconds; returns the clicks per page."""
    rng = np.random.default_rng(5)
    clicked: Counter[str] = Counter()
    with clicks.append() as writer:
        for _ in range(BATCHES):
            pages = rng.choice(PAGES, CLICKS_EACH, p=[0.5, 0.3, 0.15, 0.05]).tolist()
            took = rng.integers(5, 900, CLICKS_EACH)
            writer.write({"page": pages, "ms": took, "at": [datetime.now(UTC)] * CLICKS_EACH})
            writer.flush()
            clicked.update(pages)
            time.sleep(PAUSE_SECONDS)
    return clicked


def show(dashboard: zufluss.Table) -> None:
    """Print the rows of the dashboard."""
    rows = dashboard.lookup(PAGES, missing="drop").to_pylist()
    seen = ", ".join(f"{row['page']} [bold]{row['views']:,}[/]" for row in rows)
    say(f"dashboard: {seen or 'nothing yet'}")


if __name__ == "__main__":
    sys.exit(run(in_session(main)))
