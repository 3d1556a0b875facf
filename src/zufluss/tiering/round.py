"""One round: a table that the coordinator handed out, from its lake snapshot to the next.

| step | what happens | a crash before it leaves |
|---|---|---|
| received | the lease is here | nothing; the lease times out |
| recover | a lake snapshot that the cluster does not know is reported | |
| plan | new records become splits; the round ends if there are none | |
| job | a Spark job writes files that no snapshot references yet | |
| validate | one result per split, the table exists, the lease is ours | files that are swept |
| prepare | the coordinator stores the offsets | |
| lake-commit | one snapshot in the lake | an offsets file, files that are swept |
| server-commit | the cluster learns of the snapshot | what `recover` of the next round reports |
| finish | | a table that is handed out again when the lease times out |

`on_step` is called with the name of each step before the step; tests kill the process there.

A round reads the state of the table in this order: partitions, lake snapshot, end offsets, first
offsets, key-value snapshots, and the table itself last. So the schema covers every row below the
end offsets and in the snapshots, and every key-value snapshot ends at an offset that the log still
has. The round leases the key-value snapshots (`docs/leases.md`) and releases them at its end, so
tasks find them however long they take. A round that loses this lease ends; the next one plans anew.

A partition that was dropped and created again has a new id and no offset in the lake snapshot. The
first round that writes the new partition removes the rows of the old one in the same snapshot.
Until then the lake table still shows the old rows; union reads do not.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from zufluss.client.core.offsets import Position
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.lease import KvSnapshotLease
from zufluss.client.tiering import TieringClient, TieringLease
from zufluss.config import table_options as t
from zufluss.config.values import MINUTE_MS
from zufluss.errors import (
    ConfigError,
    TableNotExistError,
    ZuflussError,
)
from zufluss.lake.base import (
    CommitterContext,
    LakeError,
    LakeTableError,
    LakeTieringFactory,
    catalog_properties,
)
from zufluss.model.lake import LakeSnapshot
from zufluss.model.lease import Unavailable
from zufluss.model.table import TableBucket, TableInfo
from zufluss.tiering import options as o
from zufluss.tiering.committer import Recovery, TableCommitter, is_fenced, snapshot_properties
from zufluss.tiering.runner import JobRunner
from zufluss.tiering.splits import (
    BucketSnapshot,
    TieringInput,
    TieringPlan,
    TieringSnapshotSplit,
    asks_for_rows,
    asks_for_snapshot,
    known_offsets,
    pack,
    plan_splits,
)
from zufluss.tiering.tasks import BucketResult, TieringJob, cached_factory

_log = structlog.get_logger("zufluss.tiering")

STEPS: Final = (
    "received",
    "recover",
    "plan",
    "job",
    "validate",
    "prepare",
    "lake-commit",
    "server-commit",
    "finish",
)
SNAPSHOT_LEASE_MS: Final = 10 * MINUTE_MS
"""The duration of the lease on key-value snapshots: how long a killed service keeps them."""

OnStep = Callable[[str], None]


class RoundEndedError(LakeError):
    """The round ends early without a fault: table dropped, round fenced or cancelled."""


class TableGoneError(RoundEndedError):
    """The table was dropped."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The connections and options that all rounds of a service share."""

    connection: Connection
    """The driver's connection."""
    tiering: TieringClient
    """The tiering calls on it."""
    runner: JobRunner
    """Runs the Spark jobs."""
    options: o.TieringOptions
    """The options of the service."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The outcome of a successful round."""

    table: TableInfo
    """The table as it was planned."""
    snapshot_id: int | None
    """The newest lake snapshot that tiering committed; None if there is none yet."""
    offsets_path: str | None
    """The path of the snapshot's offsets file; None if this round committed no snapshot."""
    records: int = 0
    """Records that this round wrote to the lake."""
    size: int = 0
    """Their bytes in memory."""
    remaining: int = 0
    """Records that are left to the next round."""
    max_timestamp_ms: int | None = None
    """The commit time of the newest record written; None without records."""
    total_bytes: int | None = None
    """The size of the lake table; None if the format does not report it."""
    total_records: int | None = None
    """Rows of the lake table; None if the format does not report them."""
    recovered: bool = False
    """Whether a snapshot of an earlier round was reported to the cluster first."""

    @property
    def committed(self) -> bool:
        """Whether this round committed a snapshot."""
        return self.offsets_path is not None


class RoundLease:
    """The lease of a running round. Any thread may tell the round to end."""

    def __init__(self, table: TieringLease) -> None:
        self.table = table
        """The lease as the coordinator granted it."""
        self.tag = f"zufluss-tiering-{table.table_id}-{table.tiering_epoch}"
        """The tag of its Spark job."""
        self.since = time.monotonic()
        """The monotonic time at which the lease was received."""
        self.lost = False
        """Whether another service may have the table; then nothing is reported about it."""
        self._ended = threading.Event()
        self._reason = ""

    def end(self, reason: str, *, lost: bool = False) -> None:
        """Make the round end at its next step."""
        self._reason = self._reason or reason
        self.lost = self.lost or lost
        self._ended.set()

    @property
    def reason(self) -> str | None:
        """Why the round has to end, None while it may go on."""
        return self._reason if self._ended.is_set() else None


class TieringRound:
    """One round of one table; call `run` once."""

    def __init__(self, cluster: Cluster, lease: RoundLease, on_step: OnStep) -> None:
        self._cluster = cluster
        self._admin = cluster.connection.admin
        self._lease = lease
        self._path = lease.table.path
        self._on_step = on_step
        self._id = uuid.uuid4().hex
        self._plan: TieringPlan | None = None
        self._held = ExitStack()
        self._snapshots: KvSnapshotLease | None = None

    def run(self) -> RoundResult:
        """Tier all new records. Raises `RoundEndedError` if the round has to end early."""
        with self._held:
            try:
                return self._run()
            except RoundEndedError:
                raise
            except Exception as problem:
                explained = self._explain(problem)
                if explained is None:
                    raise
                raise explained from problem

    def _run(self) -> RoundResult:
        self._step("received")
        self._step("recover")
        first = self._table_info()
        factory = self._factory(first)
        with _Lake(self._cluster, self._lease, factory, first) as lake:
            recovered = lake.committer.recover()
            self._step("plan")
            state, info = self._read_state(first, recovered.known)
            self._plan = plan_splits(state, self._cluster.options[o.BUCKET_RECORDS_MAX])
            if not any(isinstance(split, TieringSnapshotSplit) for split in self._plan.splits):
                self._held.close()
                self._snapshots = None
            self._tell_holes()
            newest = recovered.newest
            expired = newest is not None and newest.expired and factory.capabilities.empty_commit
            if newest is None or expired or self._plan.splits:
                lake.follow(info)
            if not (self._plan.splits or expired):
                return self._idle(info, recovered)
            return self._move(lake, factory, info, state, recovered)

    def _tell_holes(self) -> None:
        assert self._plan is not None
        for bucket, start, stop in self._plan.holes:
            _log.warning(
                "records_missing_in_lake",
                table=str(self._path),
                bucket=str(bucket),
                first_offset=start,
                last_offset=stop - 1,
                reason="table.log.ttl removed them while the table was not tiered",
            )

    def _idle(self, info: TableInfo, recovered: Recovery) -> RoundResult:
        self._step("finish")
        newest = recovered.newest
        snapshot_id = None if newest is None else newest.snapshot_id
        return RoundResult(info, snapshot_id, None, recovered=recovered.reported)

    def _move(
        self,
        lake: _Lake,
        factory: LakeTieringFactory[Any, Any],
        info: TableInfo,
        state: TieringInput,
        recovered: Recovery,
    ) -> RoundResult:
        """Run the steps from `job` on; without splits an empty snapshot replaces an expired one."""
        assert self._plan is not None
        self._step("job")
        results: list[BucketResult] = []
        if self._plan.splits:
            job = self._job(info, factory.format, lake.handle(self._plan.fresh))
            results = self._cluster.runner.run(job, self._lease.tag)
        written = [factory.write_result_serde.loads(r.write_result) for r in results]
        try:
            self._step("validate")
            validate(self._plan, results)
            self._table_info()
            self._step("prepare")
            path = lake.committer.prepare(self._plan.offsets)
            self._step("lake-commit")
        except Exception:
            lake.committer.abort(written)
            raise
        before = {} if state.lake is None else state.lake.offsets
        offsets = known_offsets(state.partitions, before) | self._plan.offsets
        properties = snapshot_properties(info, self._lease.table, self._id, path, offsets)
        expected = None if recovered.newest is None else recovered.newest.snapshot_id
        fresh = self._plan.fresh
        done = lake.committer.commit_to_lake(written, properties, expected, fresh)
        self._on_step("server-commit")
        lake.committer.commit_to_server(done.snapshot_id, path, readable=done.readable)
        self._on_step("finish")
        times = [r.max_timestamp_ms for r in results if r.max_timestamp_ms is not None]
        return RoundResult(
            info,
            done.snapshot_id,
            path,
            records=sum(result.records for result in results),
            size=sum(result.size for result in results),
            remaining=self._plan.remaining,
            max_timestamp_ms=max(times, default=None),
            total_bytes=done.total_bytes,
            total_records=done.total_records,
            recovered=recovered.reported,
        )

    # -- what is read of the table --------------------------------------------------------------

    def _table_info(self) -> TableInfo:
        """The table. Raises `TableGoneError` if it is not the one that the lease is for."""
        table_id = self._lease.table.table_id
        try:
            info = self._admin.table_info(self._path)
        except TableNotExistError:
            raise TableGoneError(f"table {self._path} (id {table_id}) was dropped") from None
        if info.table_id != table_id:
            raise TableGoneError(
                f"table {self._path} (id {table_id}) was dropped and re-created (id "
                f"{info.table_id})"
            )
        return info

    def _read_state(
        self, first: TableInfo, known: LakeSnapshot | None
    ) -> tuple[TieringInput, TableInfo]:
        partitions = {}
        if first.is_partitioned:
            listed = self._admin.list_partitions(self._path)
            partitions = {partition.partition_id: partition.name for partition in listed}
        ends = known_offsets(partitions, self._admin.list_all_offsets(self._path))
        offsets = {} if known is None else known.offsets
        begins = ends
        if any(offsets.get(bucket, 0) != end for bucket, end in ends.items()):
            at: Position = "unbroken" if first.has_primary_key else "earliest"
            begins = self._admin.list_all_offsets(self._path, at)
        ends = {bucket: end for bucket, end in ends.items() if bucket in begins}
        keyed = first.has_primary_key
        state = TieringInput(self._path, keyed, partitions, known, ends, begins)
        state = replace(state, kv_snapshots=self._kv_snapshots(state))
        return state, self._table_info()

    def _kv_snapshots(self, state: TieringInput) -> dict[TableBucket, BucketSnapshot]:
        """Lease the newest key-value snapshot of every bucket whose plan may use one."""
        buckets = [bucket for bucket in state.ends if asks_for_snapshot(state, bucket)]
        if not buckets:
            return {}
        lease = self._admin.kv_snapshot_lease(
            buckets=buckets, duration=SNAPSHOT_LEASE_MS, lease_id=f"{self._lease.tag}-{self._id}"
        )
        self._snapshots = self._held.enter_context(lease)
        for bucket, reason in lease.unavailable.items():
            if reason is Unavailable.NO_BUCKET and bucket.partition_id is not None:
                raise self._dropped(state.partitions[bucket.partition_id])
        return {
            bucket: self._counted(state, bucket, BucketSnapshot(*snapshot))
            for bucket, snapshot in lease.snapshots.items()
        }

    def _counted(
        self, state: TieringInput, bucket: TableBucket, snapshot: BucketSnapshot
    ) -> BucketSnapshot:
        if not asks_for_rows(state, bucket, snapshot):
            return snapshot
        metadata = self._admin.kv_snapshot_metadata(bucket, snapshot.snapshot_id)
        return snapshot._replace(row_count=metadata.row_count)

    def _factory(self, info: TableInfo) -> LakeTieringFactory[Any, Any]:
        format = info.property(t.TABLE_DATALAKE_FORMAT)
        only = self._cluster.options[o.DATALAKE_FORMAT]
        if format is None or only not in (None, format):
            raise ConfigError(
                f"table {self._path} has table.datalake.format {format}; this service is for "
                f"{only or 'tables that have one'}"
            )
        factory = cached_factory(format)
        if info.has_primary_key and not factory.capabilities.primary_key:
            raise LakeTableError(
                f"table {self._path} has a primary key, and lake format {format} takes log tables "
                "only"
            )
        factory.validate_table(info)
        return factory

    def _job(self, info: TableInfo, format: str, handle: bytes) -> TieringJob:
        assert self._plan is not None
        options, runner = self._cluster.options, self._cluster.runner
        groups = pack(self._plan.splits, runner.cores * options[o.TASKS_PER_CORE])
        return TieringJob(
            bootstrap=options[o.BOOTSTRAP_SERVERS],
            client=options.client,
            format=format,
            table=info,
            handle=handle,
            tiering_epoch=self._lease.table.tiering_epoch,
            round_id=self._id,
            groups=tuple(groups),
        )

    # -- ends before the end --------------------------------------------------------------------

    def _step(self, name: str) -> None:
        self._on_step(name)
        if self._lease.reason is not None:
            raise RoundEndedError(f"{self._path}: {self._lease.reason}")

    def _explain(self, problem: Exception) -> RoundEndedError | None:
        """The reason why the round failed without a fault; None if the failure is a fault."""
        if self._lease.reason is not None:
            return RoundEndedError(f"{self._path}: {self._lease.reason}")
        if is_fenced(problem):
            self._lease.end("another tiering service has the table", lost=True)
            return RoundEndedError(f"{self._path}: {self._lease.reason}")
        try:
            self._table_info()
            return self._partition_gone() or self._snapshots_lost()
        except RoundEndedError as gone:
            return gone
        except ZuflussError:
            return None  # the cluster cannot say; then the failure stands for itself

    def _partition_gone(self) -> RoundEndedError | None:
        splits = self._plan.splits if self._plan else ()
        planned = {s.bucket.partition_id: s.partition for s in splits if s.partition}
        if not planned:
            return None
        there = {partition.partition_id for partition in self._admin.list_partitions(self._path)}
        gone = [name for partition_id, name in planned.items() if partition_id not in there]
        if not gone:
            return None
        return self._dropped(gone[0])

    def _dropped(self, partition: str) -> RoundEndedError:
        return RoundEndedError(
            f"{self._path}: partition {partition} was dropped; the next round plans without it"
        )

    def _snapshots_lost(self) -> RoundEndedError | None:
        """The error to raise if the lease of key-value snapshots is lost; None if it is held."""
        if self._snapshots is None:
            return None
        try:
            self._snapshots.verify()
        except ZuflussError as lost:
            return RoundEndedError(f"{self._path}: {lost.message}; the next round plans anew")
        return None


class _Lake:
    """The lake committer of a round, created again when the table was altered."""

    def __init__(
        self,
        cluster: Cluster,
        lease: RoundLease,
        factory: LakeTieringFactory[Any, Any],
        info: TableInfo,
    ) -> None:
        self._cluster = cluster
        self._lease = lease
        self._factory = factory
        self._open(info)

    def _open(self, info: TableInfo) -> None:
        self._info = info
        self._lake = self._factory.create_committer(lake_context(self._cluster.options, info))
        admin = self._cluster.connection.admin
        self.committer = TableCommitter(self._cluster.tiering, admin, self._lease.table, self._lake)

    def follow(self, info: TableInfo) -> None:
        """Create the lake table, or alter it to fit the table."""
        if info != self._info:
            self._lake.close()
            self._open(info)
        self._lake.prepare_table()

    def handle(self, fresh: Collection[str]) -> bytes:
        """The handle that writers of this round need."""
        return self._lake.writer_handle(fresh)

    def __enter__(self) -> _Lake:
        return self

    def __exit__(self, *exc: object) -> None:
        self._lake.close()


def validate(plan: TieringPlan, results: Sequence[BucketResult]) -> None:
    """`LakeError` unless there is exactly one result for every split."""
    planned = sorted(split.split_id for split in plan.splits)
    returned = sorted(result.split_id for result in results)
    if planned == returned:
        return
    missing = sorted(set(planned) - set(returned))
    raise LakeError(
        f"the job returned {len(returned)} results for {len(planned)} splits"
        f"{f', none for {missing[0]}' if missing else ', some of them twice'}; nothing is committed"
    )


def lake_context(options: o.TieringOptions, info: TableInfo) -> CommitterContext:
    """The context with which the lake of a table is opened."""
    format = info.property(t.TABLE_DATALAKE_FORMAT)
    overrides = options.lake.get(format, {})
    return CommitterContext(info, catalog_properties(info, format, overrides))
