"""`make demo`: a server, a table, a million rows in, all of them out again.

Everything happens in a temporary directory and on a free port; nothing is left behind.
"""

from __future__ import annotations

import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import zufluss
from zufluss.testing.server import DevServer

ROWS = 1_000_000
BATCH = 50_000
PLACES = ["Bern", "Graz", "Kiel", "Linz", "Ulm"]
console = Console()


def readings(start: int, rng: np.random.Generator) -> pa.RecordBatch:
    """One batch of made-up sensor readings."""
    return pa.record_batch(
        {
            "id": np.arange(start, start + BATCH),
            "place": pa.array(PLACES).take(pa.array(rng.integers(0, len(PLACES), BATCH))),
            "celsius": np.round(rng.normal(12, 8, BATCH), 2),
            "at": pa.array(
                np.datetime64("2026-01-01T00:00:00", "ms")
                + np.arange(start, start + BATCH).astype("timedelta64[ms]")
            ),
        }
    )


def say(text: str) -> None:
    """One line of the story."""
    console.print(f"[bold cyan]▸[/] {text}")


def main() -> None:
    """Run the demo."""
    with tempfile.TemporaryDirectory(prefix="zufluss-demo-") as directory:
        began = time.perf_counter()
        with DevServer(directory) as server:
            say(f"server ready on {server.bootstrap} in {time.perf_counter() - began:.1f} s")
            with zufluss.connect(server.bootstrap) as connection:
                run(connection)
            server.stop()
            say("server stopped cleanly")


def run(connection: zufluss.Connection) -> None:
    """Create, append, scan."""
    rng = np.random.default_rng(7)
    connection.admin.create_table(
        "fluss.readings",
        "id BIGINT, place STRING, celsius DOUBLE, at TIMESTAMP(3)",
        bucket_count=4,
    )
    say("table [bold]fluss.readings[/] created, 4 buckets")
    table = connection.table("fluss.readings")

    batches = [readings(i, rng) for i in range(0, ROWS, BATCH)]
    columns = (TextColumn("  appending"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    began = time.perf_counter()
    with Progress(*columns, console=console) as progress, table.append() as writer:
        task = progress.add_task("append", total=ROWS)
        for batch in batches:
            writer.write(batch)
            progress.advance(task, batch.num_rows)
        writer.flush()
    took = time.perf_counter() - began
    size = sum(b.nbytes for b in batches) / 1e6
    say(f"{ROWS:,} rows appended and on disk: {ROWS / took:,.0f} rows/s, {size / took:,.0f} MB/s")

    began = time.perf_counter()
    result = table.scan(stop="latest").to_arrow()
    took = time.perf_counter() - began
    assert result.num_rows == ROWS, result.num_rows
    assert pc.sum(result["id"]).as_py() == ROWS * (ROWS - 1) // 2
    say(f"{result.num_rows:,} rows scanned back, every id once: {ROWS / took:,.0f} rows/s")

    began = time.perf_counter()
    cold = table.scan(
        columns=["place", "celsius"], filter=zufluss.col("celsius") < -10, stop="latest"
    ).to_arrow()
    took = time.perf_counter() - began
    counts = cold.group_by("place").aggregate([("celsius", "min")]).sort_by("place").to_pylist()
    say(f"{cold.num_rows:,} readings below -10 °C, 2 of 4 columns read, in {took:.2f} s:")
    for row in counts:
        console.print(f"    {row['place']:<6} coldest {row['celsius_min']:>7.2f} °C")


if __name__ == "__main__":
    main()
