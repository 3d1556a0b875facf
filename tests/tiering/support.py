"""Helpers for tiering tests: tables that are due at once, rounds by hand, rows of the lake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import zufluss
from tests.servers import WarmServer
from zufluss.client.tiering import TieringClient, TieringStats
from zufluss.lake.base import catalog_properties
from zufluss.model.table import TableInfo
from zufluss.testing.server import DevServer
from zufluss.tiering.options import TieringOptions
from zufluss.tiering.round import Cluster, OnStep, RoundLease, RoundResult, TieringRound
from zufluss.tiering.runner import JobRunner
from zufluss.tiering.service import no_step
from zufluss.tiering.tasks import BucketResult, TieringJob, run_group

LAKE = {"datalake.format": "iceberg"}
TIERED = {"table.datalake.enabled": "true", "table.datalake.freshness": "1ms"}


class InlineRunner:
    """Runs jobs in the calling thread, as a Spark worker would; `before` may interfere."""

    cores = 2

    def __init__(self, before: Callable[[TieringJob], None] | None = None) -> None:
        self.before = before
        self.jobs: list[TieringJob] = []
        self.cancelled: list[str] = []

    def run(self, job: TieringJob, tag: str) -> list[BucketResult]:
        self.jobs.append(job)
        if self.before is not None:
            self.before(job)
        return [result for n in range(len(job.groups)) for result in run_group(job, n)]

    def cancel(self, tag: str) -> None:
        self.cancelled.append(tag)

    def alive(self) -> bool:
        return True

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)


class Driver:
    """A tiering service by hand: asks for a table, runs its round, reports it."""

    def __init__(self, server: DevServer, runner: JobRunner | None = None, **options: str) -> None:
        self.connection = zufluss.connect(server.bootstrap)
        self.admin = self.connection.admin
        pairs = {"fluss.bootstrap.servers": server.bootstrap}
        pairs |= {f"lake.tiering.{key.replace('_', '-')}": value for key, value in options.items()}
        self.options = TieringOptions.of(pairs)
        self.tiering = TieringClient(self.connection)
        self.runner = runner or InlineRunner()
        self.cluster = Cluster(self.connection, self.tiering, self.runner, self.options)

    def close(self) -> None:
        self.connection.close()

    def receive(self) -> RoundLease:
        """Wait for the coordinator to hand out a table."""
        while True:
            answer = self.tiering.heartbeat(request_table=True, timeout_ms=600_000)
            if answer.table is not None:
                return RoundLease(answer.table)

    def tier(self, lease: RoundLease, on_step: OnStep = no_step) -> RoundResult:
        return TieringRound(self.cluster, lease, on_step).run()

    def finish(self, lease: RoundLease) -> None:
        answer = self.tiering.heartbeat(finished={lease.table: TieringStats()})
        assert not answer.refused

    def fail(self, lease: RoundLease) -> None:
        self.tiering.heartbeat(failed=[lease.table])

    def round(self, on_step: OnStep = no_step) -> RoundResult:
        """A whole round of the next table, and its report."""
        lease = self.receive()
        try:
            result = self.tier(lease, on_step)
        except BaseException:
            self.fail(lease)
            raise
        self.finish(lease)
        return result


def create_table(
    connection: zufluss.Connection, name: str, schema: str = "id INT, name STRING", **more: Any
) -> str:
    """A table that is handed out as soon as it exists."""
    properties = TIERED | more.pop("properties", {})
    path = f"fluss.{name}"
    connection.admin.create_table(path, schema, properties=properties, **more)
    return path


def append(connection: zufluss.Connection, path: str, rows: Mapping[str, list[Any]]) -> None:
    with connection.table(path).append() as writer:
        writer.write(rows)


def upsert(connection: zufluss.Connection, path: str, rows: Mapping[str, list[Any]]) -> None:
    with connection.table(path).upsert() as writer:
        writer.write(rows)


def delete(connection: zufluss.Connection, path: str, keys: Mapping[str, list[Any]]) -> None:
    with connection.table(path).upsert() as writer:
        writer.delete(keys)


def lake_rows(info: TableInfo) -> pa.Table:
    """The rows of a lake table as pyiceberg reads them."""
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("zufluss", **catalog_properties(info, "iceberg"))
    return catalog.load_table((info.path.database, info.path.table)).scan().to_arrow()


def offsets_in_lake(info: TableInfo) -> list[tuple[int, int]]:
    """The (bucket, offset) of every row in the lake, sorted."""
    rows = lake_rows(info)
    return sorted(zip(rows["__bucket"].to_pylist(), rows["__offset"].to_pylist(), strict=True))


@contextmanager
def lake_server(directory: Path) -> Iterator[DevServer]:
    with WarmServer(directory, LAKE | {"zufluss.log.flush": "os"}) as server:
        yield server
