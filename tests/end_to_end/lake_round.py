"""A round of tiering without a lake: a service takes a table and reports a snapshot of it."""

from __future__ import annotations

from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.client.tiering import TieringClient, TieringStats
from zufluss.model.table import TableBucket

FRESH = {"table.datalake.enabled": "true", "table.datalake.freshness": "1ms"}
"""Properties of a table that is due at once."""


def report_tiered(connection: Connection, table: str, snapshot_id: int, offset: int) -> None:
    """Take a table of one bucket, and report that the lake has everything below an offset."""
    tiering = TieringClient(connection)

    def reported() -> bool:
        lease = tiering.heartbeat(request_table=True).table
        if lease is None:
            return False
        if own := lease.path.table == table:
            file = tiering.prepare(lease, {TableBucket(lease.table_id, None, 0): offset})
            tiering.commit(lease, snapshot_id, file)
        tiering.heartbeat(finished={lease: TieringStats()})
        return own

    eventually(reported, f"a round of {table}")
