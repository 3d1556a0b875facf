"""Rounds of tiering without Spark: the real round, its tasks run one after the other right here."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.client.tiering import TieringClient, TieringLease, TieringStats
from zufluss.tiering.options import TieringOptions
from zufluss.tiering.round import Cluster, OnStep, RoundLease, RoundResult, TieringRound
from zufluss.tiering.tasks import BucketResult, TieringJob, run_group

LAKE = {"table.datalake.enabled": "true", "table.datalake.freshness": "1ms"}
LEASE_MS = 60_000
"""Nobody else takes a table for so long, however busy the machine is."""
_NUMBERS = itertools.count()
_RUN = secrets.token_hex(3)


class Hiding(TieringClient):
    """Reports snapshots as some formats have to: they cannot be read yet."""

    def commit(
        self, lease: TieringLease, snapshot_id: int, offsets_path: str, **options: Any
    ) -> None:
        options["readable_offsets_path"] = None
        super().commit(lease, snapshot_id, offsets_path, **options)


class HereRunner:
    """Runs the tasks of a job in the caller's thread."""

    cores = 2

    def run(self, job: TieringJob, tag: str) -> list[BucketResult]:
        return [result for number in range(len(job.groups)) for result in run_group(job, number)]

    def cancel(self, tag: str) -> None:
        raise AssertionError("nobody cancels these rounds")

    def alive(self) -> bool:
        return True


class Rounds:
    """Tiers tables of a cluster when told to."""

    def __init__(self, connection: Connection, bootstrap: str, *, readable: bool = True) -> None:
        self._client = TieringClient(connection) if readable else Hiding(connection)
        options = TieringOptions.of({"fluss.bootstrap.servers": bootstrap})
        self._cluster = Cluster(connection, self._client, HereRunner(), options)

    def tier(self, table: Table, on_step: OnStep = lambda step: None) -> RoundResult:
        """One round of this table; `on_step` is called before each of its steps."""
        lease = self._lease(table.info.table_id)
        result = TieringRound(self._cluster, RoundLease(lease), on_step).run()
        stats = TieringStats(result.total_bytes, result.total_records)
        self._client.heartbeat(finished={lease: stats}, timeout_ms=LEASE_MS)
        return result

    def _lease(self, table_id: int) -> TieringLease:
        """Take leases until the one of this table comes; others are given back."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            lease = self._client.heartbeat(request_table=True, timeout_ms=LEASE_MS).table
            if lease is not None and lease.table_id == table_id:
                return lease
            if lease is not None:
                self._client.heartbeat(failed=[lease], timeout_ms=LEASE_MS)
        raise AssertionError(f"table {table_id} was not handed out")


@contextmanager
def lake_table(connection: Connection, schema: Any, **options: Any) -> Iterator[Table]:
    """A tiered table that no other test knows; dropped at the end."""
    name = f"fluss.lake_{_RUN}_{next(_NUMBERS)}"
    properties = {**LAKE, **options.pop("properties", {})}
    connection.admin.create_table(name, schema, properties=properties, **options)
    yield connection.table(name)
    connection.admin.drop_table(name)
