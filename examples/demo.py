"""`make demo`: a log table and a primary-key table, a million rows in and out again.

Everything happens in a temporary directory and on a free port; nothing is left behind.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

import zufluss
from zufluss.testing.server import DevServer

ROWS = 1_000_000
BATCH = 50_000
PLACES = ["Bern", "Graz", "Kiel", "Linz", "Ulm"]
ORDERS = 400_000
SINGLE_LOOKUPS = 1_000
console = Console()


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
                console.rule("[bold]a log table[/]: readings come in, nothing changes afterwards")
                log_table(connection)
                console.rule("[bold]a primary-key table[/]: orders, and what becomes of them")
                primary_key_table(connection)
            server.stop()
            say("server stopped cleanly")


# -- a log table -------------------------------------------------------------------------------


def log_table(connection: zufluss.Connection) -> None:
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
    began = time.perf_counter()
    with Progress(*bar(), console=console) as progress, table.append() as writer:
        task = progress.add_task("appending", total=ROWS)
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


# -- a primary-key table -----------------------------------------------------------------------


def primary_key_table(connection: zufluss.Connection) -> None:
    """Upsert orders in rounds while somebody follows the changes, then look them up."""
    connection.admin.create_table(
        "fluss.orders",
        "id BIGINT, customer INT, cents BIGINT, status STRING, PRIMARY KEY (id)",
        bucket_count=4,
    )
    orders = connection.table("fluss.orders")
    say("table [bold]fluss.orders[/] created, primary key id, 4 buckets")
    rng = np.random.default_rng(11)
    ids = rng.permutation(ORDERS)
    paid, shipped, cancelled = ids[: ORDERS // 2], ids[: ORDERS // 4], ids[-ORDERS // 10 :]

    with Follower(orders) as follower:
        with orders.upsert() as writer:
            run_round("new orders", writer.write, new_orders(rng), follower)
        with orders.upsert(["id", "status"]) as writer:  # the other columns stay as they are
            run_round("paid", writer.write, status(paid, "paid"), follower, changes_each=2)
            run_round("shipped", writer.write, status(shipped, "shipped"), follower, changes_each=2)
        with orders.upsert() as writer:
            keys = pa.record_batch({"id": cancelled})
            run_round("cancelled", writer.delete, keys, follower)
        counts = ", ".join(f"{n:,} [bold]{kind}[/]" for kind, n in follower.kinds.items())
        say(f"the changelog, followed live: {counts}")
    some = rng.choice(shipped, SINGLE_LOOKUPS).tolist()
    look_up(orders, some, cancelled)
    compare(orders, follower, some[0])


def run_round(
    what: str,
    write: Callable[[pa.RecordBatch], None],
    rows: pa.RecordBatch,
    follower: Follower,
    changes_each: int = 1,
) -> None:
    """Write rows in batches and wait until the follower has seen every change they make."""
    began = time.perf_counter()
    with Progress(
        *bar(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        written = progress.add_task(f"{what}: written", total=rows.num_rows)
        seen = progress.add_task(f"{what}: changes seen", total=rows.num_rows * changes_each)
        goal = follower.seen + rows.num_rows * changes_each
        follower.on_change = lambda count: progress.advance(seen, count)
        for at in range(0, rows.num_rows, BATCH // 5):
            piece = rows.slice(at, BATCH // 5)
            write(piece)
            progress.advance(written, piece.num_rows)
        follower.wait_for(goal)
    took = time.perf_counter() - began
    say(f"{rows.num_rows:,} {what}, every change seen: {rows.num_rows / took:,.0f} rows/s")


class Follower:
    """Reads the changelog of a table in a thread of its own, as it grows."""

    def __init__(self, table: zufluss.Table) -> None:
        self.seen = 0
        """Changes so far."""
        self.kinds: Counter[str] = Counter()
        """How many of each kind."""
        self.changes: list[pa.RecordBatch] = []
        """All of them, in the order they came."""
        self.on_change: Callable[[int], None] = lambda count: None
        """Told how many changes came."""
        self._scanner = table.changelog(["id", "status"], stop=None).open()
        self._moved = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        while not self._stop.is_set():
            batch = self._scanner.poll(timeout_ms=100)
            if batch is None:
                continue
            with self._moved:
                self.changes.append(batch)
                self.seen += batch.num_rows
                for kind in pc.value_counts(batch["_change_type"]).to_pylist():
                    self.kinds[kind["values"]] += kind["counts"]
                self._moved.notify_all()
            self.on_change(batch.num_rows)

    def wait_for(self, count: int) -> None:
        """Wait until that many changes have come."""
        with self._moved:
            arrived = self._moved.wait_for(lambda: self.seen >= count, timeout=60)
        assert arrived, f"{self.seen} changes after a minute, {count} were to come"

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._scanner.close()


def new_orders(rng: np.random.Generator) -> pa.RecordBatch:
    """Made-up orders that nobody has paid yet."""
    return pa.record_batch(
        {
            "id": np.arange(ORDERS),
            "customer": rng.integers(0, 20_000, ORDERS).astype(np.int32),
            "cents": rng.integers(100, 50_000, ORDERS),
            "status": pa.repeat("new", ORDERS),
        }
    )


def status(ids: np.ndarray, text: str) -> pa.RecordBatch:
    """The rows of a partial update: these orders have this status now."""
    return pa.record_batch({"id": ids, "status": pa.repeat(text, len(ids))})


def look_up(orders: zufluss.Table, some: list[int], cancelled: np.ndarray) -> None:
    """One order, many orders one by one, many at once, and orders that are gone."""
    order = orders.lookup(some[0])
    assert order is not None
    say(f"order {order['id']}: {order['status']}, {order['cents'] / 100:.2f} €")
    began = time.perf_counter()
    for key in some:
        assert orders.lookup(key)["status"] == "shipped"
    took = time.perf_counter() - began
    say(f"{len(some):,} lookups one after the other: {took / len(some) * 1e6:,.0f} µs each")
    began = time.perf_counter()
    found = orders.lookup(pa.array(np.arange(ORDERS)), missing="drop")
    took = time.perf_counter() - began
    assert found.num_rows == ORDERS - len(cancelled)
    say(f"{ORDERS:,} keys in one lookup: {ORDERS / took:,.0f} keys/s, {found.num_rows:,} are there")
    assert orders.lookup(int(cancelled[0])) is None


def compare(orders: zufluss.Table, follower: Follower, one: int) -> None:
    """What happened to one order, and that the last change of every order is what the table has."""
    changes = pa.Table.from_batches(follower.changes)
    story = changes.filter(pc.field("id") == one).select(["_change_type", "status"]).to_pylist()
    steps = ", ".join(f"[bold]{step['_change_type']}[/] {step['status']}" for step in story)
    say(f"the changes of order {one}: {steps}")
    changes = changes.append_column("nth", pa.array(np.arange(changes.num_rows)))
    last = changes.group_by("id").aggregate([("nth", "max")])["nth_max"]
    rows = changes.take(last).filter(pc.field("_change_type") != "-D").select(["id", "status"])
    table = orders.lookup(rows["id"]).select(["id", "status"])
    assert table.cast(rows.schema).equals(rows)
    say(f"the changelog, folded, is the table: {rows.num_rows:,} orders, all equal")
    for row in rows.group_by("status").aggregate([("id", "count")]).sort_by("status").to_pylist():
        console.print(f"    {row['status']:<8} {row['id_count']:>8,}")


def bar() -> tuple[ProgressColumn, ...]:
    """What a progress line shows."""
    text = TextColumn("  {task.description:<24}")
    return (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


if __name__ == "__main__":
    main()
