"""The calls of a tiering service: ask for tables, report progress, register snapshots.

Every call after a hand-out carries its *lease*. A service loses a table when it was silent for too
long or another coordinator took over; its calls then raise `FencedTieringEpochError` and change
nothing. Calls are repeated while the coordinator is away for a moment, except for a heartbeat that
asks for a table: if its answer is lost, the table returns to the queue by itself, because nobody
sends heartbeats for it. A finish or failure that is reported twice is refused the second time, and
was accepted the first time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from zufluss.client.sync.connection import Connection
from zufluss.config.values import MINUTE_MS
from zufluss.errors import ZuflussError, error
from zufluss.model.table import TableBucket, TablePath
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import path_from_proto, path_to_proto

HEARTBEAT_TIMEOUT_MS: Final = 2 * MINUTE_MS
"""Silence after which the tables of a service are handed out to others, by default."""


@dataclass(frozen=True, slots=True)
class TieringLease:
    """The lease of a table that was handed out to this service."""

    table_id: int
    """The table's id."""
    path: TablePath
    """The table's path when it was handed out."""
    tiering_epoch: int
    """Grows with every hand-out of the table."""
    coordinator_epoch: int
    """The epoch of the coordinator that handed it out."""


@dataclass(frozen=True, slots=True)
class TieringStats:
    """Figures of a lake table, reported at the end of a round."""

    file_size: int | None = None
    """Bytes in the lake table; None if unknown."""
    record_count: int | None = None
    """Rows in the lake table; None if unknown."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The answer to a heartbeat."""

    coordinator_epoch: int
    """The epoch of the coordinator that answered."""
    table: TieringLease | None
    """The table that was handed out; None if none was requested or none waits."""
    refused: Mapping[int, ZuflussError]
    """Errors by table id; `FencedTieringEpochError` ends the round of its table."""


class TieringClient:
    """The tiering calls of a connection. Threads may share it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def heartbeat(
        self,
        *,
        running: Iterable[TieringLease] = (),
        finished: Mapping[TieringLease, TieringStats] | None = None,
        force_finished: Collection[int] = (),
        failed: Iterable[TieringLease] = (),
        request_table: bool = False,
        timeout_ms: int = HEARTBEAT_TIMEOUT_MS,
    ) -> Heartbeat:
        """Report which rounds run, finished or failed; `request_table` asks for another table.

        Ids in `force_finished` name finished tables that have more to tier; these are queued again
        at once. After a silence of `timeout_ms` the tables of this service are
        handed out to others.
        """
        request = m.LakeTieringHeartbeatRequest(
            tiering_tables=map(_lease, running),
            finished_tables=[_lease(each, stats) for each, stats in (finished or {}).items()],
            failed_tables=map(_lease, failed),
            request_table=request_table,
            force_finished_tables=force_finished,
            heartbeat_timeout_ms=timeout_ms,
        )
        answer: m.LakeTieringHeartbeatResponse = self._call(
            ApiKey.LAKE_TIERING_HEARTBEAT, request, repeatable=not request_table
        )
        return _heartbeat(answer)

    def prepare(
        self,
        lease: TieringLease,
        offsets: Mapping[TableBucket, int],
        *,
        ignore_previous: bool = False,
    ) -> str:
        """Store the offsets of a coming snapshot and return the path of their file.

        The offsets are merged over those of the previous snapshot, unless `ignore_previous`.
        """
        table = m.PbTableOffsets(
            table_id=lease.table_id,
            table_path=path_to_proto(lease.path),
            tiering_epoch=lease.tiering_epoch,
            coordinator_epoch=lease.coordinator_epoch,
            bucket_offsets=[
                m.PbBucketOffset(
                    partition_id=bucket.partition_id,
                    bucket_id=bucket.bucket_id,
                    log_end_offset=offset,
                )
                for bucket, offset in offsets.items()
            ],
        )
        request = m.PrepareLakeTableSnapshotRequest(
            bucket_offsets=[table], ignore_previous_table_offsets=ignore_previous
        )
        response: m.PrepareLakeTableSnapshotResponse = self._call(
            ApiKey.PREPARE_LAKE_TABLE_SNAPSHOT, request
        )
        answer = _only(response.prepare_lake_table_resp, lease)
        return str(answer.lake_table_offsets_path)

    def commit(
        self,
        lease: TieringLease,
        snapshot_id: int,
        offsets_path: str,
        *,
        readable_offsets_path: str | None = None,
        earliest_to_keep: int | None = None,
    ) -> None:
        """Register a snapshot that is in the lake, with the offsets file prepared for it.

        The cluster forgets snapshots before `earliest_to_keep`; None means all before this one, -1
        means none.
        """
        table = m.PbLakeTableSnapshotMetadata(
            table_id=lease.table_id,
            snapshot_id=snapshot_id,
            tiered_bucket_offsets_file_path=offsets_path,
            readable_bucket_offsets_file_path=readable_offsets_path,
            earliest_snapshot_id_to_keep=earliest_to_keep,
            tiering_epoch=lease.tiering_epoch,
            coordinator_epoch=lease.coordinator_epoch,
        )
        request = m.CommitLakeTableSnapshotRequest(lake_table_snapshot_metadata=[table])
        response: m.CommitLakeTableSnapshotResponse = self._call(
            ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT, request
        )
        _only(response.table_resp, lease)

    def _call(self, api_key: ApiKey, request: Any, *, repeatable: bool = True) -> Any:
        return self._connection.call_coordinator(api_key, request, repeatable=repeatable)


def _lease(lease: TieringLease, stats: TieringStats | None = None) -> m.PbHeartbeatReqForTable:
    message = m.PbHeartbeatReqForTable(
        table_id=lease.table_id,
        coordinator_epoch=lease.coordinator_epoch,
        tiering_epoch=lease.tiering_epoch,
    )
    if stats is not None:
        message.lake_tiering_stats.CopyFrom(
            m.PbLakeTieringStats(file_size=stats.file_size, record_count=stats.record_count)
        )
    return message


def _heartbeat(answer: m.LakeTieringHeartbeatResponse) -> Heartbeat:
    lease = None
    if answer.HasField("tiering_table"):
        table = answer.tiering_table
        path = path_from_proto(table.table_path)
        lease = TieringLease(table.table_id, path, table.tiering_epoch, answer.coordinator_epoch)
    refused = {
        each.table_id: error(each.error.error_code, each.error.error_message)
        for group in (
            answer.tiering_table_resp,
            answer.finished_table_resp,
            answer.failed_table_resp,
        )
        for each in group
        if each.HasField("error")
    }
    return Heartbeat(answer.coordinator_epoch, lease, refused)


def _only(answers: Iterable[Any], lease: TieringLease) -> Any:
    """The answer for the table of the lease; raises the error in it."""
    for answer in answers:
        if answer.table_id == lease.table_id:
            if answer.error_code:
                raise error(answer.error_code, answer.error_message)
            return answer
    raise ZuflussError(f"the coordinator's answer lacks table {lease.path}")
