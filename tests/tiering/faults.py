"""Helpers for fault tests of tiering: drivers that die, a load that continues, lake checks.

A driver is a real process, forked from one that has everything imported, so that it can be killed a
hundred times in a minute; `spark_driver` is one with a JVM. What is in the lake is read by
pyiceberg and DuckDB and compared with the live table, row by row.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import IntegerType

import zufluss
from tests import servers
from tests.lake.iceberg.tables import write_data
from tests.lake.readers import duckdb_rows, pyiceberg_rows
from tests.paths import ROOT
from tests.tiering import fault_driver
from tests.tiering.fault_driver import ORDERS, Orders
from tests.tiering.support import create_table
from tests.waiting import WAIT_SECONDS, eventually, unless_away
from zufluss.errors import NetworkError, RequestTimeoutError
from zufluss.lake.base import (
    COMMIT_USER,
    COMMIT_USER_KEY,
    EPOCH_KEY,
    ROUND_KEY,
    CommitterContext,
    catalog_properties,
)
from zufluss.lake.iceberg.committer import IcebergCommitter
from zufluss.lake.iceberg.files import local_path
from zufluss.lake.iceberg.handle import WriterHandle
from zufluss.lake.iceberg.orphans import references
from zufluss.lake.iceberg.private import data_file
from zufluss.model.table import TableInfo
from zufluss.testing.tiering import TieringProcess

QUICK = {
    "lake.tiering.poll-interval": "20ms",
    "lake.tiering.heartbeat-interval": "200ms",
    "lake.tiering.heartbeat-timeout": "1s",
    "lake.tiering.parallel-tables": "1",
}
"""A dead driver's table is free after a second."""
AWAY = (NetworkError, RequestTimeoutError)
KEYS = 60
KEYED = "id INT NOT NULL, name STRING, PRIMARY KEY (id)"
PARTED = "id INT NOT NULL, day STRING NOT NULL, name STRING, PRIMARY KEY (id, day)"
DAYS = 3

_forks = multiprocessing.get_context("forkserver")
assert servers  # it says what the fork server imports, this module's processes included


def wait_until(what: Callable[[], bool], why: str = "") -> None:
    """Wait until `what` is true; the server may be away meanwhile."""
    eventually(lambda: unless_away(what), why)


# -- drivers -------------------------------------------------------------------------------------


class DriverProcess:
    """A tiering service in a process of its own, with jobs in the process; see `Orders`."""

    _numbers = count()

    def __init__(self, bootstrap: str, directory: Path, **orders: Any) -> None:
        name = f"driver-{next(self._numbers)}"
        options = {"fluss.bootstrap.servers": bootstrap, **QUICK, **orders.pop("options", {})}
        self.journal = directory / f"{name}.journal"
        self.log = directory / f"{name}.log"
        self.orders = Orders(options, str(self.journal), **orders)
        self._process: BaseProcess = _forks.Process(
            target=fault_driver.forked, args=(self.orders, str(self.log))
        )

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self) -> int:
        """The exit code, minus a signal's number; it must end within a limit."""
        self._process.join(WAIT_SECONDS)
        code = self._process.exitcode
        assert code is not None, f"the driver goes on:\n{self.log.read_text()[-4000:]}"
        return code

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def is_stopped(self) -> bool:
        """SIGSTOP has had its effect."""
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

    def notes(self) -> list[dict[str, Any]]:
        """The rounds so far."""
        return read_journal(self.journal)

    def has_noted(self, event: str, epoch: int | None = None) -> bool:
        return any(n["event"] == event and epoch in (None, n["epoch"]) for n in self.notes())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The rounds that a driver noted."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def spark_driver(
    bootstrap: str, journal: Path, conf: Mapping[str, str], **orders: Any
) -> TieringProcess:
    """The same as `DriverProcess` with a JVM; started on entering."""
    options = {"fluss.bootstrap.servers": bootstrap, **QUICK, **conf}
    options["lake.tiering.heartbeat-timeout"] = "3s"
    made = Orders(options, str(journal), spark=True, **orders)
    environ = {ORDERS: made.to_json(), "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", fault_driver.__name__)
    return TieringProcess(bootstrap, environ=environ, command=command)


# -- load ----------------------------------------------------------------------------------------


class Load:
    """Writes to tables until it is told to stop; a server that is away is waited for."""

    def __init__(self, bootstrap: str, rng: random.Random, paths: list[str]) -> None:
        self._bootstrap = bootstrap
        self._rng = rng
        self._paths = paths
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self._problem: BaseException | None = None
        self._ids = count()
        self.rows = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        try:
            with zufluss.connect(self._bootstrap) as connection:
                while not self._ended.wait(0.01):
                    for path in self._paths:
                        self._try_write(connection.table(path))
        except BaseException as problem:
            self._problem = problem

    def _try_write(self, table: Any) -> None:
        try:
            write_some(table, self._rng, self._ids)
            self.rows += 1
        except AWAY:
            pass  # whether it is in the table is for the comparison with the live table to find


def write_some(table: Any, rng: random.Random, ids: Iterator[int]) -> None:
    """A few appends, or a few upserts and deletes of few keys."""
    if not table.info.has_primary_key:
        numbers = [next(ids) for _ in range(rng.randrange(1, 20))]
        with table.append() as writer:
            writer.write({"id": numbers, "name": [f"n{i}" for i in numbers]})
        return
    keys = rng.sample(range(KEYS), 8)
    with table.upsert() as writer:
        writer.write(_keyed(table, keys[:6]) | {"name": [f"v{next(ids)}" for _ in keys[:6]]})
        writer.delete(_keyed(table, keys[5:]))


def _keyed(table: Any, keys: list[int]) -> dict[str, list[Any]]:
    """The key columns of some rows."""
    columns = {"id": keys, "day": [f"d{key % DAYS}" for key in keys]}
    return {name: columns[name] for name in table.info.schema.primary_key}


# -- what must be in the lake --------------------------------------------------------------------


def create_tables(connection: zufluss.Connection, name: str, **properties: str) -> list[str]:
    """A log table and two primary-key tables, one of them partitioned."""
    kinds: dict[str, dict[str, Any]] = {
        "log": {"schema": "id INT, name STRING"},
        "keyed": {"schema": KEYED},
        "parted": {"schema": PARTED, "partition_keys": ["day"]},
    }
    return [
        create_table(connection, f"{name}_{kind}", bucket_count=2, properties=properties, **more)
        for kind, more in kinds.items()
    ]


def is_tiered(connection: zufluss.Connection, path: str) -> bool:
    """The cluster knows a lake snapshot with everything that is in the table now."""
    ends = connection.admin.list_all_offsets(path)
    known = connection.admin.lake_snapshot(path)
    found = {} if known is None else known.offsets
    return all(found.get(bucket, 0) == end for bucket, end in ends.items())


def lake_table(info: TableInfo) -> Table:
    """The lake table as pyiceberg loads it."""
    catalog = load_catalog("zufluss", **catalog_properties(info, "iceberg"))
    return catalog.load_table((info.path.database, info.path.table))


def live_rows(table: Any) -> list[tuple[Any, ...]]:
    """The rows of the live table; those of a log table with bucket and offset."""
    if not table.info.has_primary_key:
        found = table.scan(with_offsets=True, source="log").to_arrow()
        return _rows(found, ["__bucket", "__offset", *table.info.schema.names])
    keys = _keyed(table, list(range(KEYS)))
    found = table.lookup(keys, missing="drop")
    return _rows(found, table.info.schema.names)


def check_lake(connection: zufluss.Connection, path: str) -> int:
    """No gap, no duplicate: two readers find exactly what is in the live table; how many rows.

    Rows of foreign writers (bucket 99) are left out.
    """
    table = connection.table(path)
    wanted = live_rows(table)
    names = list(table.info.schema.names)
    if not table.info.has_primary_key:
        names = ["__bucket", "__offset", *names]
        ends = connection.admin.list_all_offsets(path)
        dense = sorted((b.bucket_id, o) for b, end in ends.items() for o in range(end))
        assert [row[:2] for row in wanted] == dense
    location = lake_table(table.info).metadata_location
    for reader in (pyiceberg_rows, duckdb_rows):
        found = reader(location)
        ours = found.filter(pa.compute.not_equal(found["__bucket"], FOREIGN_BUCKET))
        assert _rows(ours, names) == wanted, f"{path} as {reader.__name__} sees it"
    check_epochs(table.info)
    return len(wanted)


def _rows(table: pa.Table, names: list[str]) -> list[tuple[Any, ...]]:
    return sorted(zip(*(table[name].to_pylist() for name in names), strict=True))


def our_snapshots(info: TableInfo) -> list[dict[str, str]]:
    """The properties of our snapshots, oldest first."""
    metadata = lake_table(info).metadata
    found = [s.summary.additional_properties for s in metadata.snapshots if s.summary is not None]
    return [dict(each) for each in found if each.get(COMMIT_USER_KEY) == COMMIT_USER]


def check_epochs(info: TableInfo) -> None:
    """Every round under a lease of its own, each later than the one before; none twice."""
    rounds: dict[str, int] = {}
    for each in our_snapshots(info):
        rounds.setdefault(each[ROUND_KEY], int(each[EPOCH_KEY]))
    epochs = list(rounds.values())
    assert all(a < b for a, b in pairwise(epochs)), epochs


def unreferenced(info: TableInfo) -> set[str]:
    """Data files of the lake table that no snapshot refers to."""
    lake = lake_table(info)
    root = local_path(lake.location())
    assert root is not None
    there = {str(path) for path in (root / "data").rglob("*.parquet")}
    return there - {str(local_path(each)) for each in references(lake.refresh())}


@contextmanager
def tiering(bootstrap: str, directory: Path, **orders: Any) -> Iterator[DriverProcess]:
    """A driver that is stopped gracefully at the end."""
    with DriverProcess(bootstrap, directory, **orders) as driver:
        yield driver
        assert driver.stop() == 0, driver.log.read_text()[-4000:]


def settle(
    bootstrap: str, connection: zufluss.Connection, directory: Path, paths: list[str]
) -> int:
    """Let an undisturbed driver tier everything and check the lake; returns the row count."""
    with tiering(bootstrap, directory):
        for path in paths:
            wait_until(lambda path=path: is_tiered(connection, path), f"for {path}")
    return sum(check_lake(connection, path) for path in paths)


# -- foreign writers -----------------------------------------------------------------------------

FOREIGN_BUCKET = 99
"""What stands in `__bucket` of foreign rows; ours never have it."""
FOREIGN_ID = 1_000_000
"""The first id of foreign rows."""


def foreign_row(info: TableInfo, number: int) -> pa.Table:
    """A row that no table of ours has."""
    columns = {
        "id": pa.array([FOREIGN_ID + number], pa.int32()),
        "name": pa.array(["foreign"]),
        "__bucket": pa.array([FOREIGN_BUCKET], pa.int32()),
        "__offset": pa.array([number], pa.int64()),
        "__timestamp": pa.array([1_000_000], pa.timestamp("us", "UTC")),
    }
    return pa.table(columns)


def foreign_append(info: TableInfo, number: int) -> None:
    """Somebody else commits a row, in as many attempts as it takes."""
    committer = IcebergCommitter(CommitterContext(info, catalog_properties(info, "iceberg")))
    handle = WriterHandle.from_bytes(committer.writer_handle())
    written: DataFile | None = None
    while True:
        lake = lake_table(info)
        if written is None:
            partition = _foreign_partition(lake, number)
            written = data_file(write_data(handle, foreign_row(info, number), partition), 0)
        try:
            with lake.transaction() as change, change.update_snapshot().fast_append() as append:
                append.append_data_file(written)
            return
        except CommitFailedException:
            continue


def _foreign_partition(lake: Table, number: int) -> tuple[int]:
    """The partition value of a foreign row: of its id, or the bucket as it is."""
    [field] = lake.spec().fields
    if isinstance(field.transform, BucketTransform):
        return (field.transform.transform(IntegerType())(FOREIGN_ID + number),)
    return (FOREIGN_BUCKET,)


def foreign_numbers(info: TableInfo) -> list[int]:
    """The foreign rows in the lake."""
    found = pyiceberg_rows(lake_table(info).metadata_location)
    foreign = found.filter(pa.compute.equal(found["__bucket"], FOREIGN_BUCKET))
    return sorted(number - FOREIGN_ID for number in foreign["id"].to_pylist())
