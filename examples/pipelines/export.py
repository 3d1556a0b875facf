"""Exports the rows of every hour as Parquet: no row twice, none missing.

    readings (log) ──► [12:00, 13:00) ──► window=20260131T120000Z/*.parquet
                   ──► [13:00, 14:00) ──► window=20260131T130000Z/*.parquet
                   ──► …

A window has the rows that the server received from its start (inclusive) to its end (exclusive). So
adjacent windows have every row once, and a window that is exported again has the same rows. The
directory is the only state: the next window begins where the last exported one ends.

Here an hour lasts two seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import SparkSession
from running import check, empty_database, in_session, run, say

import zufluss

WINDOW = timedelta(seconds=2)  # timedelta(hours=1) for you
LATE = timedelta(seconds=0.5)  # how far the clocks of server and scheduler may be apart
BATCHES, ROWS_EACH, PAUSE_SECONDS = 10, 100, 0.4
NAME = "window=%Y%m%dT%H%M%SZ"


def main(spark: SparkSession, bootstrap: str) -> None:
    """Write for some windows, and export them."""
    with zufluss.connect(bootstrap) as connection, tempfile.TemporaryDirectory() as directory:
        empty_database(connection, "example_export")
        connection.admin.create_table(
            "example_export.readings", "id INT, celsius DOUBLE", bucket_count=2
        )
        began = time.time() // WINDOW.total_seconds() * WINDOW.total_seconds()
        first = datetime.fromtimestamp(began, UTC)
        write(connection.table("example_export.readings"))
        written = datetime.now(UTC)
        export(spark, Path(directory), first, until=written - LATE)  # for you a scheduler does it
        time.sleep((WINDOW + LATE).total_seconds())
        export(spark, Path(directory), first, until=written + WINDOW)

        exported = spark.read.parquet(directory)
        rows, ids = exported.count(), exported.select("id").distinct().count()
        expected = BATCHES * ROWS_EACH
        check(rows == ids == expected, f"{rows} rows, {ids} ids are exported of {expected} written")
        say(f"{rows:,} rows exported, every id once")


def write(readings: zufluss.Table) -> None:
    """Append rows for some seconds."""
    with readings.append() as writer:
        for nth in range(BATCHES):
            ids = range(nth * ROWS_EACH, (nth + 1) * ROWS_EACH)
            writer.write({"id": list(ids), "celsius": [id / 10 for id in ids]})
            writer.flush()
            time.sleep(PAUSE_SECONDS)
    say(f"{BATCHES * ROWS_EACH:,} readings came in, over {BATCHES * PAUSE_SECONDS:.0f} seconds")


def export(spark: SparkSession, target: Path, first: datetime, until: datetime) -> None:
    """Export the windows that have ended and are not exported yet."""
    done = sorted(made.parent.name for made in target.glob("*/_SUCCESS"))
    start = datetime.strptime(done[-1], NAME).replace(tzinfo=UTC) + WINDOW if done else first
    while start + WINDOW <= until:
        rows = export_window(spark, start, start + WINDOW, target / start.strftime(NAME))
        say(f"{rows:>5,} rows of \\[{start:%H:%M:%S}, {start + WINDOW:%H:%M:%S})")
        start += WINDOW


def export_window(spark: SparkSession, start: datetime, end: datetime, directory: Path) -> int:
    """Export the rows of [start, end) to a directory, which Spark replaces as a whole."""
    readings = (
        spark.read.format("fluss")
        .option("scan.incremental.start.timestamp", start.isoformat())
        .option("scan.incremental.end.timestamp", end.isoformat())
        .load("example_export.readings")
    )
    readings.write.mode("overwrite").parquet(str(directory))
    return spark.read.parquet(str(directory)).count()


if __name__ == "__main__":
    sys.exit(run(in_session(main)))
