"""Handlers of the lake: tiering services ask for tables and report snapshots, readers ask for them.

A request may name several tables, and each gets its own answer or error; a table that is refused
never holds up its neighbours. `lake/tables.py` and `lake/queue.py` have the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from zufluss.cluster.image import ClusterImage
from zufluss.coordinator.lake.queue import HandOut, check_timeout_ms
from zufluss.coordinator.lake.tables import LakeCommit, LakeTables
from zufluss.errors import ConfigError, TableNotExistError, ZuflussError
from zufluss.model.lake import LakeSnapshot
from zufluss.model.table import TableBucket, unknown_table
from zufluss.pacing import paced
from zufluss.wire import messages as m
from zufluss.wire.tables import bucket_in_table, path_from_proto, path_to_proto

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext


class LakeService:
    """Handlers of the APIs of tiering."""

    def __init__(self, lake: LakeTables, image: ClusterImage) -> None:
        self._lake = lake
        self._image = image

    # Heartbeats

    async def lake_tiering_heartbeat(
        self, request: m.LakeTieringHeartbeatRequest, ctx: RequestContext
    ) -> m.LakeTieringHeartbeatResponse:
        """LAKE_TIERING_HEARTBEAT (1042): failed, running, finished tables; then a new one.

        A service that declares a timeout knows our extensions, so it names epochs in its reports.
        """
        declared = request.HasField("heartbeat_timeout_ms")
        timeout_ms = check_timeout_ms(request.heartbeat_timeout_ms if declared else None)
        forced = set(request.force_finished_tables)
        queue = self._lake.queue
        response = m.LakeTieringHeartbeatResponse(coordinator_epoch=queue.coordinator_epoch)
        response.failed_table_resp.extend(
            await self._each(request.failed_tables, lambda held, _: queue.fail(held))
        )
        response.tiering_table_resp.extend(
            await self._each(request.tiering_tables, lambda held, _: queue.renew(held, timeout_ms))
        )
        response.finished_table_resp.extend(
            await self._each(request.finished_tables, lambda held, t: self._finish(held, t, forced))
        )
        if request.request_table:
            await self._give_table(response, timeout_ms, declared)
        return response

    async def _each(
        self,
        tables: Iterable[m.PbHeartbeatReqForTable],
        act: Callable[[HandOut, m.PbHeartbeatReqForTable], None],
    ) -> list[m.PbHeartbeatRespForTable]:
        answers = []
        async for table in paced(tables):
            answer = m.PbHeartbeatRespForTable(table_id=table.table_id)
            try:
                if self._image.table_by_id(table.table_id) is None:
                    raise TableNotExistError(f"{unknown_table(table.table_id)} does not exist")
                act(HandOut(table.table_id, table.tiering_epoch, table.coordinator_epoch), table)
            except ZuflussError as problem:
                answer.error.error_code = problem.code
                answer.error.error_message = problem.message
            answers.append(answer)
        return answers

    def _finish(self, hand_out: HandOut, table: m.PbHeartbeatReqForTable, forced: set[int]) -> None:
        stats = table.lake_tiering_stats
        self._lake.queue.finish(
            hand_out,
            by_force=hand_out.table_id in forced,
            file_size=stats.file_size if stats.HasField("file_size") else None,
            record_count=stats.record_count if stats.HasField("record_count") else None,
        )

    async def _give_table(
        self, response: m.LakeTieringHeartbeatResponse, timeout_ms: int, names_epochs: bool
    ) -> None:
        turn = await self._lake.hand_out(timeout_ms, names_epochs)
        if turn is not None:
            info, hand_out = turn
            response.tiering_table.table_id = hand_out.table_id
            response.tiering_table.table_path.CopyFrom(path_to_proto(info.path))
            response.tiering_table.tiering_epoch = hand_out.tiering_epoch

    # Snapshots

    async def prepare_lake_table_snapshot(
        self, request: m.PrepareLakeTableSnapshotRequest, ctx: RequestContext
    ) -> m.PrepareLakeTableSnapshotResponse:
        """PREPARE_LAKE_TABLE_SNAPSHOT (1052): offsets into a file each."""
        response = m.PrepareLakeTableSnapshotResponse()
        async for table in paced(request.bucket_offsets):
            answer = response.prepare_lake_table_resp.add(table_id=table.table_id)
            try:
                answer.lake_table_offsets_path = await self._lake.prepare(
                    table.table_id,
                    path_from_proto(table.table_path),
                    await _offsets(table.table_id, table.bucket_offsets),
                    ignore_previous=request.ignore_previous_table_offsets,
                    hand_out=self._hand_out_of(table),
                )
            except ZuflussError as problem:
                answer.error_code, answer.error_message = problem.code, problem.message
        return response

    async def commit_lake_table_snapshot(
        self, request: m.CommitLakeTableSnapshotRequest, ctx: RequestContext
    ) -> m.CommitLakeTableSnapshotResponse:
        """COMMIT_LAKE_TABLE_SNAPSHOT (1030): snapshots with files, or with offsets (old form).

        Fluss's services send both forms for one table; then the file counts.
        """
        response = m.CommitLakeTableSnapshotResponse()
        with_file = {table.table_id for table in request.lake_table_snapshot_metadata}
        async for table in paced(request.lake_table_snapshot_metadata):
            answer = response.table_resp.add(table_id=table.table_id)
            try:
                await self._lake.commit(self._commit(table))
            except ZuflussError as problem:
                answer.error_code, answer.error_message = problem.code, problem.message
        async for old in paced(request.tables_req):
            if old.table_id in with_file:
                continue
            answer = response.table_resp.add(table_id=old.table_id)
            try:
                await self._commit_offsets(old)
            except ZuflussError as problem:
                answer.error_code, answer.error_message = problem.code, problem.message
        return response

    def _commit(self, table: m.PbLakeTableSnapshotMetadata) -> LakeCommit:
        readable = table.HasField("readable_bucket_offsets_file_path")
        earliest = table.HasField("earliest_snapshot_id_to_keep")
        return LakeCommit(
            table_id=table.table_id,
            snapshot_id=table.snapshot_id,
            offsets_path=table.tiered_bucket_offsets_file_path,
            readable_path=table.readable_bucket_offsets_file_path if readable else None,
            earliest_to_keep=table.earliest_snapshot_id_to_keep if earliest else None,
            hand_out=self._hand_out_of(table),
        )

    async def _commit_offsets(self, table: m.PbLakeTableSnapshotInfo) -> None:
        if not table.HasField("table_id"):
            raise ConfigError("a lake snapshot without table_id is not allowed; name the table")
        path = path_from_proto(table.table_path) if table.HasField("table_path") else None
        offsets = await _offsets(table.table_id, table.buckets_req)
        await self._lake.commit_offsets(table.table_id, path, table.snapshot_id, offsets)

    def _hand_out_of(
        self, table: m.PbTableOffsets | m.PbLakeTableSnapshotMetadata
    ) -> HandOut | None:
        """The hand-out that a request names; Fluss's own services name none."""
        if not table.HasField("tiering_epoch") and not table.HasField("coordinator_epoch"):
            return None
        return HandOut(table.table_id, table.tiering_epoch, table.coordinator_epoch)

    async def get_lake_snapshot(
        self, request: m.GetLakeSnapshotRequest, ctx: RequestContext
    ) -> m.GetLakeSnapshotResponse:
        """GET_LAKE_SNAPSHOT (1032): the newest, the newest readable, or one by its id."""
        snapshot = await self._lake.snapshot(
            path_from_proto(request.table_path),
            request.snapshot_id if request.HasField("snapshot_id") else None,
            readable=request.readable,
        )
        return m.GetLakeSnapshotResponse(
            table_id=snapshot.table_id,
            snapshotId=snapshot.snapshot_id,
            bucket_snapshots=[
                m.PbLakeSnapshotForBucket(
                    partition_id=bucket.partition_id,
                    bucket_id=bucket.bucket_id,
                    log_offset=offset,
                    partition_name=_name(bucket, snapshot),
                )
                for bucket, offset in sorted(
                    snapshot.offsets.items(),
                    key=lambda item: (item[0].partition_id or 0, item[0].bucket_id),
                )
            ],
        )


def _name(bucket: TableBucket, snapshot: LakeSnapshot) -> str | None:
    partition_id = bucket.partition_id
    return None if partition_id is None else snapshot.partition_names.get(partition_id)


async def _offsets(
    table_id: int, buckets: Iterable[m.PbBucketOffset | m.PbLakeTableOffsetForBucket]
) -> dict[TableBucket, int]:
    """The offsets in a request, without buckets that have none."""
    offsets: dict[TableBucket, int] = {}
    async for each in paced(buckets):
        if each.HasField("log_end_offset"):
            offsets[bucket_in_table(table_id, each)] = each.log_end_offset
    return offsets
