"""Housekeeping of a lake table after a round, while its lease still excludes other services.

| what | when |
|---|---|
| compaction | after a commit, with `table.datalake.auto-compaction` |
| expiry of snapshots | after a commit, with `table.datalake.auto-expire-snapshot` |
| sweeping of orphans | every `lake.tiering.sweep-interval` |

Errors are logged and never fail a round; the next round tries again. Ages are those of an
`ExpiryClock`: a wall clock that jumps ahead while the service runs makes nothing old.
"""

from __future__ import annotations

import time

import structlog

from zufluss.clock import Clock, ClockMs
from zufluss.config import table_options as t
from zufluss.expiry import ExpiryClock
from zufluss.lake.base import LakeMaintenance
from zufluss.tiering import options as o
from zufluss.tiering.round import Cluster, RoundLease, RoundResult, lake_context
from zufluss.tiering.tasks import cached_factory

_log = structlog.get_logger("zufluss.tiering")


class Upkeep:
    """Housekeeping of all tables of a service; remembers when each table was swept."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock = time.monotonic,
        expiry_ms: ClockMs | None = None,
    ) -> None:
        """`expiry_ms` is the time by which things expire, by default that of an `ExpiryClock`."""
        self._cluster = cluster
        self._options = cluster.options
        self._clock = clock
        self._expiry_ms = expiry_ms or ExpiryClock().now_ms
        self._started = clock()
        self._swept: dict[int, float] = {}

    def run(self, lease: RoundLease, result: RoundResult) -> None:
        """Run the housekeeping that is due for a table after its round."""
        info = result.table
        compact = result.committed and info.property(t.TABLE_DATALAKE_AUTO_COMPACTION)
        expire = result.committed and info.property(t.TABLE_DATALAKE_AUTO_EXPIRE_SNAPSHOT)
        sweep = result.snapshot_id is not None and self._sweep_is_due(info.table_id)
        if not (compact or expire or sweep) or lease.reason is not None:
            return
        factory = cached_factory(info.property(t.TABLE_DATALAKE_FORMAT))
        try:
            maintenance = factory.create_maintenance(lake_context(self._options, info))
            try:
                if compact and factory.capabilities.compaction:
                    self._compact(maintenance, lease, result)
                if expire:
                    self._expire(maintenance, lease)
                if sweep:
                    self._sweep(maintenance, lease)
            finally:
                maintenance.close()
        except Exception as problem:
            _log.warning("upkeep_failed", table=str(info.path), problem=str(problem))

    def _compact(
        self, maintenance: LakeMaintenance, lease: RoundLease, result: RoundResult
    ) -> None:
        done = maintenance.compact(result.snapshot_id)
        if done is not None and result.offsets_path is not None:
            path = result.offsets_path
            self._cluster.tiering.commit(
                lease.table,
                done.snapshot_id,
                path,
                readable_offsets_path=path if done.readable else None,
            )
            _log.info("compacted", table=str(lease.table.path), snapshot=done.snapshot_id)

    def _expire(self, maintenance: LakeMaintenance, lease: RoundLease) -> None:
        admin, path = self._cluster.connection.admin, lease.table.path
        known = [admin.lake_snapshot(path), admin.lake_snapshot(path, readable=True)]
        keep = {snapshot.snapshot_id for snapshot in known if snapshot is not None}
        count = maintenance.expire(self._expiry_ms() - self._options[o.SNAPSHOT_AGE], keep)
        if count:
            _log.info("snapshots_expired", table=str(path), count=count)

    def _sweep(self, maintenance: LakeMaintenance, lease: RoundLease) -> None:
        report = maintenance.sweep(self._expiry_ms() - self._options[o.ORPHAN_AGE])
        self._swept[lease.table.table_id] = self._clock()
        if report.removed:
            _log.info(
                "orphans_removed",
                table=str(lease.table.path),
                files=report.removed,
                bytes=report.removed_bytes,
            )

    def _sweep_is_due(self, table_id: int) -> bool:
        last = self._swept.get(table_id, self._started)
        return self._clock() - last >= self._options[o.SWEEP_INTERVAL] / 1000
