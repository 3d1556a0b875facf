"""The third part of the demo: two tables under live writes, tiered to Iceberg, read as one.

What is shown is checked: lake and log together against the log alone (the changes, folded by
DuckDB, for the table with a primary key), and at the end the lake alone through pyiceberg, which
knows nothing of zufluss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa
from pyiceberg.catalog import load_catalog
from rich.console import Console
from rich.table import Table as Grid

import zufluss
from zufluss.client.read.union_plan import UnionPlan
from zufluss.client.sync.scan import UnionScanner
from zufluss.lake.base import catalog_properties
from zufluss.testing.tiering import TieringProcess

TIERED = {"table.datalake.enabled": "true", "table.datalake.freshness": "2s"}
CHECKS = 4
READINGS_EACH = 2_000
ORDERS_EACH = 500
PAUSE_SECONDS = 0.1
PATIENCE_SECONDS = 90
LOG_LINES = 15
FOLD = """
    SELECT id, customer, cents, status FROM (
        SELECT *, row_number() OVER (PARTITION BY id ORDER BY _log_offset DESC) AS nth FROM changes
        WHERE _change_type <> '-U'
    ) WHERE nth = 1 AND _change_type <> '-D'
"""
console = Console()


class DemoError(Exception):
    """A check of the demo failed."""


def check(fine: bool, otherwise: str) -> None:
    """Raise unless a check holds."""
    if not fine:
        raise DemoError(otherwise)


def say(text: str) -> None:
    """Print one line."""
    console.print(f"[bold cyan]▸[/] {text}")


def lake_part(connection: zufluss.Connection, started: Future[TieringProcess]) -> None:
    """Write, tier, compare, several times; then look at the lake alone."""
    service = awaited(started)
    shown = [Shown(connection, "fluss.readings", live_log), Shown(connection, "fluss.orders", fold)]
    try:
        with Writing(connection) as writing:
            say("two writers write on meanwhile; every union read is compared with the table:")
            for nth in range(1, CHECKS + 1):
                for table in shown:
                    table.wait(table.moved_on)
                    table.compare(nth)
        say(f"the writers stop: {writing.readings:,} readings and {writing.changes:,} changes")
        for table in shown:
            table.wait(table.caught_up)
            table.look_into_lake()
    except DemoError as problem:
        raise DemoError(
            f"{problem}\nthe tiering service said last:\n{end_of(service.log())}"
        ) from problem
    summary(shown)


def awaited(started: Future[TieringProcess]) -> TieringProcess:
    """The tiering service, once it is ready."""
    began = time.perf_counter()
    try:
        service = started.result()
    except RuntimeError as problem:
        raise DemoError(f"the tiering service did not start:\n{end_of(str(problem))}") from problem
    waited = time.perf_counter() - began
    say(f"tiering service on Spark ready{f', {waited:.0f} s later' if waited > 1 else ''}")
    return service


def end_of(log: str) -> str:
    """The last lines of a log."""
    return "\n".join(log.splitlines()[-LOG_LINES:])


class Writing:
    """Two threads that write to the tables until told to stop."""

    def __init__(self, connection: zufluss.Connection) -> None:
        self.readings = 0
        """Readings appended."""
        self.changes = 0
        """Orders changed, added or cancelled."""
        self._connection = connection
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=[work], daemon=True)
            for work in (self._append, self._upsert)
        ]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as problem:
            self._failure = problem

    def _append(self) -> None:
        rng = np.random.default_rng(23)
        with self._connection.table("fluss.readings").append() as writer:
            while not self._stop.wait(PAUSE_SECONDS):
                first = 10_000_000 + self.readings
                writer.write(
                    {
                        "id": np.arange(first, first + READINGS_EACH),
                        "place": ["Rom"] * READINGS_EACH,
                        "celsius": np.round(rng.normal(18, 6, READINGS_EACH), 2),
                        "at": [np.datetime64("2026-02-01", "ms")] * READINGS_EACH,
                    }
                )
                writer.flush()
                self.readings += READINGS_EACH

    def _upsert(self) -> None:
        rng = np.random.default_rng(29)
        with self._connection.table("fluss.orders").upsert() as writer:
            while not self._stop.wait(PAUSE_SECONDS):
                ids = rng.choice(500_000, ORDERS_EACH, replace=False)
                writer.write(
                    {
                        "id": ids,
                        "customer": rng.integers(0, 20_000, ORDERS_EACH).astype(np.int32),
                        "cents": rng.integers(100, 50_000, ORDERS_EACH),
                        "status": ["changed"] * ORDERS_EACH,
                    }
                )
                writer.delete({"id": rng.choice(500_000, ORDERS_EACH // 5, replace=False)})
                writer.flush()
                self.changes += ORDERS_EACH + ORDERS_EACH // 5

    def __enter__(self) -> Writing:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure


@dataclass
class Shown:
    """A table, and what was seen of it so far."""

    connection: zufluss.Connection
    name: str
    live: Callable[[zufluss.Table, UnionPlan], pa.Table]
    snapshots: list[int] = field(default_factory=list)
    rows: int = 0
    compared: int = 0
    in_lake: int = 0
    files: int = 0
    megabytes: float = 0.0

    def __post_init__(self) -> None:
        self.table = self.connection.table(self.name)

    # -- waiting -------------------------------------------------------------------------------

    def moved_on(self) -> bool:
        """Whether there is a newer snapshot than the last one seen."""
        snapshot = self.connection.admin.lake_snapshot(self.name, readable=True)
        return snapshot is not None and snapshot.snapshot_id not in self.snapshots

    def caught_up(self) -> bool:
        """Whether every row is in the lake."""
        plan = self.connection.plan_union(self.name)
        return plan.lake is not None and all(part.start == part.stop for part in plan.tail)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, with a deadline."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            what = (condition.__doc__ or "").strip(" .").lower()
            check(
                time.monotonic() < deadline,
                f"{self.name}: after {PATIENCE_SECONDS} s it is still not so that {what}",
            )
            time.sleep(PAUSE_SECONDS)

    # -- comparing -----------------------------------------------------------------------------

    def compare(self, nth: int) -> None:
        """Check that lake and log together have the rows of the live table at the same offsets."""
        began = time.perf_counter()
        with self.table.scan(source="union").open() as scanner:
            assert isinstance(scanner, UnionScanner)
            plan = scanner.plan
            rows = pa.Table.from_batches(list(scanner), schema=scanner.schema).sort_by("id")
        took = time.perf_counter() - began
        live = self.live(self.table, plan).sort_by("id")
        check(rows.equals(live), f"{self.name}: union read and live table differ at {plan.tail}")
        check(plan.lake is not None, f"{self.name} has no lake snapshot any more")
        assert plan.lake is not None
        self.snapshots.append(plan.lake.snapshot_id)
        self.rows, self.compared = rows.num_rows, self.compared + 1
        tail = sum(part.stop - part.start for part in plan.tail)
        say(
            f"{nth}. [bold]{self.name}[/]: {rows.num_rows:,} rows [green]= live table[/], "
            f"{tail:,} {'changes' if self.keyed else 'rows'} from the log, {took:.1f} s"
        )

    @property
    def keyed(self) -> bool:
        """The table has a primary key."""
        return self.table.info.has_primary_key

    def look_into_lake(self) -> None:
        """Check that the lake, read by pyiceberg, has exactly the rows of the live table."""
        catalog = load_catalog("zufluss", **catalog_properties(self.table.info, "iceberg"))
        lake = catalog.load_table(tuple(self.name.split(".")))
        names = self.table.schema.names
        found = lake.scan(selected_fields=tuple(names)).to_arrow().select(names)
        live = self.live(self.table, self.connection.plan_union(self.name)).sort_by("id")
        found = found.cast(live.schema).sort_by("id")
        check(found.equals(live), f"{self.name}: pyiceberg finds other rows than the table has")
        files = lake.inspect.files()
        self.in_lake, self.files = found.num_rows, files.num_rows
        self.megabytes = sum(files["file_size_in_bytes"].to_pylist()) / 1e6
        self.snapshots = [snapshot.snapshot_id for snapshot in lake.snapshots()]
        say(
            f"[bold]{self.name}[/] in Iceberg, by pyiceberg: {found.num_rows:,} rows "
            "[green]= live table[/]"
        )


def live_log(table: zufluss.Table, plan: UnionPlan) -> pa.Table:
    """The rows of a log table up to the end of a plan, from its log alone."""
    return table.scan(stop={part.bucket: part.stop for part in plan.tail}).to_arrow()


def fold(table: zufluss.Table, plan: UnionPlan) -> pa.Table:
    """The rows of a primary-key table at the end of a plan: its changes, folded by DuckDB."""
    stops = {part.bucket: part.stop for part in plan.tail}
    changes = table.changelog(stop=stops).to_arrow()
    changes = changes.set_column(0, "_change_type", changes["_change_type"].cast(pa.string()))
    with duckdb.connect() as database:
        database.register("changes", changes)
        return database.sql(FOLD).to_arrow_table().cast(table.schema.arrow)


def summary(shown: list[Shown]) -> None:
    """Print the summary."""
    grid = Grid(title="what the lake has now", title_justify="left")
    for heading in ("table", "rows", "snapshots", "files", "MB", "union reads compared"):
        grid.add_column(heading, justify="left" if heading == "table" else "right")
    for table in shown:
        numbers = (table.in_lake, len(table.snapshots), table.files)
        cells = [*(f"{number:,}" for number in numbers), f"{table.megabytes:.1f}"]
        grid.add_row(table.name, *cells, f"{table.compared}, all equal")
    console.print(grid)
    console.print(
        "Rows that are written can be read at once. A Spark job moves them to Iceberg every few "
        "seconds, where any engine reads them. A union read takes from the lake what was moved, "
        "and the rest from the log: every row once, at any moment."
    )
