"""`make demo`: two tables, a million rows in and out again, and both of them in a lake meanwhile.

Everything happens in a temporary directory and on a free port; nothing is left behind. In between
a third table counts page views, once each although their writer is killed (`demo_counts.py`). It
takes about a minute, most of it in the last part (`demo_lake.py`): writers go on while Spark moves
what they wrote to Iceberg, and every few seconds lake and log together are compared with the table.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from demo_counts import counts_part
from demo_lake import TIERED, DemoError, check, console, lake_part, say
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

import zufluss
from zufluss.errors import ZuflussError
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import TieringProcess

ROWS = 1_000_000
BATCH = 50_000
PLACES = ["Bern", "Graz", "Kiel", "Linz", "Ulm"]
ORDERS = 400_000
SINGLE_LOOKUPS = 1_000


def main() -> int:
    """Run the demo; the exit code is 0 if everything was as it should be."""
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="zufluss-demo-") as directory:
            story(directory)
    except (DemoError, ZuflussError, RuntimeError) as problem:
        console.print(f"[bold red]✗ the demo failed:[/] {escape(str(problem))}")
        return 1
    except KeyboardInterrupt:
        console.print("[bold yellow]stopped[/]")
        return 130
    say(f"that was the demo, in {time.perf_counter() - began:.0f} s; nothing is left behind")
    return 0


def story(directory: str) -> None:
    """A server, a tiering service beside it, four parts."""
    began = time.perf_counter()
    with DevServer(directory, {"datalake.format": "iceberg"}) as server:
        say(f"server ready on {server.bootstrap} in {time.perf_counter() - began:.1f} s")
        service = TieringProcess(server.bootstrap, {"spark.driver.memory": "1g"})
        with (
            ThreadPoolExecutor(1) as starter,
            zufluss.connect(server.bootstrap) as connection,
            ended(service),
        ):
            started = starter.submit(service.start)  # a JVM takes a while; the story goes on
            console.rule("[bold]a log table[/]: readings come in, nothing changes afterwards")
            log_table(connection)
            console.rule("[bold]a primary-key table[/]: orders, and what becomes of them")
            primary_key_table(connection)
            console.rule("[bold]an aggregation table[/]: page views, and a writer that is killed")
            counts_part(connection, server.bootstrap, directory)
            console.rule("[bold]a lake[/]: Spark moves both tables to Iceberg while they change")
            lake_part(connection, started)
            check(service.stop() == 0, f"the tiering service ended badly:\n{service.log()}")
        check(server.stop() == 0, f"the server ended badly:\n{server.log()}")
        say("tiering service and server stopped cleanly")


@contextmanager
def ended(service: TieringProcess) -> Iterator[None]:
    """Stop the service and its child processes, whatever happens."""
    try:
        yield
    except BaseException:
        if service.running:
            service.kill()
        raise


# -- a log table -------------------------------------------------------------------------------


def log_table(connection: zufluss.Connection) -> None:
    """Create, append, scan."""
    rng = np.random.default_rng(7)
    connection.admin.create_table(
        "fluss.readings",
        "id BIGINT, place STRING, celsius DOUBLE, at TIMESTAMP(3)",
        bucket_count=4,
        properties=TIERED,
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
    total = pc.sum(result["id"]).as_py()
    check(result.num_rows == ROWS, f"{result.num_rows} rows came back, {ROWS} were written")
    check(total == ROWS * (ROWS - 1) // 2, "some id came back twice, another one not at all")
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
        properties=TIERED,
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
        """Called with the number of changes so far."""
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
        check(arrived, f"{self.seen} changes after a minute, {count} were to come")

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
    check(order is not None, f"order {some[0]} is not there")
    assert order is not None
    say(f"order {order['id']}: {order['status']}, {order['cents'] / 100:.2f} €")
    began = time.perf_counter()
    for key in some:
        check(orders.lookup(key)["status"] == "shipped", f"order {key} is not shipped")
    took = time.perf_counter() - began
    say(f"{len(some):,} lookups one after the other: {took / len(some) * 1e6:,.0f} µs each")
    began = time.perf_counter()
    rows = orders.lookup(pa.array(np.arange(ORDERS)), missing="drop")
    took = time.perf_counter() - began
    check(rows.num_rows == ORDERS - len(cancelled), f"{rows.num_rows} orders were found")
    say(f"{ORDERS:,} keys in one lookup: {ORDERS / took:,.0f} keys/s, {rows.num_rows:,} are there")
    check(orders.lookup(int(cancelled[0])) is None, "a cancelled order is still there")


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
    check(table.cast(rows.schema).equals(rows), "the changelog and the table differ")
    say(f"the changelog, folded, is the table: {rows.num_rows:,} orders, all equal")
    for row in rows.group_by("status").aggregate([("id", "count")]).sort_by("status").to_pylist():
        console.print(f"    {row['status']:<8} {row['id_count']:>8,}")


def bar() -> tuple[ProgressColumn, ...]:
    """The columns of a progress line."""
    text = TextColumn("  {task.description:<24}")
    return (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


if __name__ == "__main__":
    sys.exit(main())
