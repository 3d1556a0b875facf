"""Housekeeping of an Iceberg table: compaction, expiry of snapshots, sweeping of orphans.

Runs in the driver between rounds of its table, and leaves a table whose rows are the same.

* **compact** replaces files in one snapshot (`replace`), which repeats the properties of the newest
  snapshot of ours and so takes its place. It is fenced as a round's commit is. A foreign commit in
  between is fine unless it touched a file that was rewritten, or deleted rows of it.
* **expire** removes snapshots from the metadata, then the files that only they used. These stay at
  any age: heads of branches and tags, `keep`, the newest snapshot of ours and all newer ones, and
  the newest `history.expire.min-snapshots-to-keep`.
* **sweep** removes old files that nothing refers to; see `orphans.py`.

`gc.enabled=false` says that files may also belong to other tables: then nothing is removed. A crash
at any point leaves files that the next sweep removes, never a hole in the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.manifest import FileFormat
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
)

from zufluss.clock import ClockMs, wall_ms
from zufluss.lake.base import (
    CommitResult,
    CommittedSnapshot,
    CommitterContext,
    LakeCommitRefusedError,
    LakeCommitUnknownError,
    LakeError,
    LakeTableError,
    SweepReport,
)
from zufluss.lake.iceberg.catalog import answered, load
from zufluss.lake.iceberg.commit import commit_snapshot, load_table, new_snapshot_id
from zufluss.lake.iceberg.committer import (
    NEWEST_KEY,
    check_fence,
    newest_json,
    newest_snapshot,
    owned,
)
from zufluss.lake.iceberg.compaction import (
    BucketPlan,
    CompactionOptions,
    Rewriter,
    plan_bucket,
    property_number,
)
from zufluss.lake.iceberg.files import LakeFiles
from zufluss.lake.iceberg.handle import LiveFile
from zufluss.lake.iceberg.orphans import remove, sweep, unreferenced_by_expiry
from zufluss.lake.iceberg.parquet import arrow_schema
from zufluss.lake.iceberg.private import (
    SnapshotChange,
    equality_deletes,
    is_data,
    is_position_deletes,
    live_entries,
    live_files,
)
from zufluss.model.lake import OFFSET_COLUMN

ATTEMPTS_MAX = 10
"""The most attempts to expire snapshots against concurrent commits."""
COMPACT_BYTES_MAX = 4 << 30
"""The approximate bytes that one call rewrites; the next call continues."""
KEEP_MIN_KEY = "history.expire.min-snapshots-to-keep"


class IcebergMaintenance:
    """The `LakeMaintenance` of one table. Not thread-safe."""

    def __init__(self, context: CommitterContext, clock_ms: ClockMs = wall_ms) -> None:
        self._clock_ms = clock_ms
        self.table = context.table
        self._identifier = (context.table.path.database, context.table.path.table)
        self._catalog = load(context.properties)

    def compact(self, expected: int | None) -> CommitResult | None:
        """Merge small files and apply deletes; None if there was nothing to do."""
        with answered(f"lake table {self.table.path}"):
            lake = self._load()
            check_fence(lake.metadata, self.table, expected)
            newest = newest_snapshot(lake.metadata, self.table)
            plans = plan_table(lake)
            if newest is None or not plans:
                return None
            return self._carry_out(lake, plans, newest)

    def expire(self, older_than_ms: int, keep: Collection[int]) -> int:
        """Expire older snapshots, and remove files that only they used."""
        with answered(f"lake table {self.table.path}"):
            for _ in range(ATTEMPTS_MAX):
                lake = self._load()
                gone = self._expirable(lake.metadata, older_than_ms, keep)
                if not gone or not _may_remove(lake.metadata):
                    return 0
                if self._expire(lake, gone):
                    retained = [s for s in lake.metadata.snapshots if s not in gone]
                    remove(lake, unreferenced_by_expiry(lake.io, gone, retained))
                    return len(gone)
        raise LakeError(
            f"snapshots of lake table {self.table.path} could not be expired: others committed "
            f"{ATTEMPTS_MAX} times in between; the next run tries again"
        )

    def sweep(self, older_than_ms: int) -> SweepReport:
        """Remove older files that nothing refers to."""
        with answered(f"lake table {self.table.path}"):
            lake = self._load()
            if not _may_remove(lake.metadata):
                return SweepReport(0, 0, 0)
            return sweep(lake, older_than_ms)

    def close(self) -> None:
        """Does nothing; catalogs are shared by the process."""

    def _load(self) -> Table:
        lake = load_table(self._catalog, self._identifier)
        if lake is None or not owned(lake.metadata, self.table):
            raise LakeTableError(
                f"table {self.table.path} has no lake table of its own yet; its first round of "
                "tiering creates it"
            )
        return lake

    def _carry_out(
        self, lake: Table, plans: list[BucketPlan], newest: CommittedSnapshot
    ) -> CommitResult:
        """Write the files of the plans and commit them; if that fails, remove the files."""
        rewriter = Rewriter(
            LakeFiles(_text(lake.io.properties), lake.location()),
            arrow_schema(lake.schema().model_dump_json()),
            lake.metadata.properties,
        )
        try:
            for plan in plans:
                rewriter.carry_out(plan)
            rewriter.finish()
        except BaseException:
            rewriter.abort()
            raise
        try:
            return self._replace(lake, rewriter, newest)
        except LakeCommitUnknownError:
            raise
        except Exception:  # not for interruptions: after one the outcome is not known
            self._abort(rewriter)
            raise

    def _abort(self, work: Rewriter) -> None:
        """Remove the written files, unless the commit was applied in spite of the error."""
        lake = self._load()
        entries = live_entries(lake.io, lake.metadata.current_snapshot())
        used = {entry.data_file.file_path for entry in entries}
        if not any(file.path in used for file in work.added):
            work.abort()

    def _replace(self, lake: Table, work: Rewriter, newest: CommittedSnapshot) -> CommitResult:
        """Commit the rewritten files on top of the newest snapshot of ours."""
        snapshot_id, base = new_snapshot_id(), lake.metadata.current_snapshot_id
        change = SnapshotChange(
            operation="replace",
            added=work.added,
            removed=_removed(lake, work),
            properties=newest.properties,
            table_properties={
                NEWEST_KEY: newest_json(snapshot_id, newest.properties, self._clock_ms())
            },
        )

        def check(now: Table) -> None:
            check_fence(now.metadata, self.table, newest.snapshot_id)
            if now.metadata.current_snapshot_id != base:
                _check_untouched(now, [*work.replaced, *work.merged])

        return commit_snapshot(lake, change, check, snapshot_id).result()

    def _expirable(
        self, metadata: TableMetadata, older_than_ms: int, keep: Collection[int]
    ) -> list[Snapshot]:
        safe = {*keep, *(ref.snapshot_id for ref in metadata.refs.values())}
        newest = newest_snapshot(metadata, self.table)
        least = property_number(metadata.properties, KEEP_MIN_KEY, 1, int, 1)
        for count, snapshot in enumerate(_history(metadata)):
            if newest is None and count >= least:
                break
            safe.add(snapshot.snapshot_id)
            if newest is not None and newest.snapshot_id == snapshot.snapshot_id:
                newest = None
        old = [s for s in metadata.snapshots if s.timestamp_ms < older_than_ms]
        return [snapshot for snapshot in old if snapshot.snapshot_id not in safe]

    def _expire(self, lake: Table, gone: list[Snapshot]) -> bool:
        """Remove snapshots from the metadata; False if another commit came first."""
        heads = [
            AssertRefSnapshotId.model_validate({"ref": name, "snapshot-id": ref.snapshot_id})
            for name, ref in lake.metadata.refs.items()
        ]
        ids = [snapshot.snapshot_id for snapshot in gone]
        update = RemoveSnapshotsUpdate.model_validate({"snapshot-ids": ids})
        try:
            self._catalog.commit_table(
                lake, (AssertTableUUID(uuid=lake.metadata.table_uuid), *heads), (update,)
            )
        except CommitFailedException:
            return False
        except CommitStateUnknownException as problem:
            raise LakeCommitUnknownError(
                f"whether {len(gone)} snapshots of {self.table.path} were expired is not known "
                f"({problem}); no file was removed, a later sweep removes what is left over"
            ) from problem
        return True


def _history(metadata: TableMetadata) -> Iterator[Snapshot]:
    """The current snapshot, its parent, and so on."""
    at = metadata.current_snapshot_id
    while at is not None and (snapshot := metadata.snapshot_by_id(at)) is not None:
        yield snapshot
        at = snapshot.parent_snapshot_id


def plan_table(lake: Table) -> list[BucketPlan]:
    """The plans of compaction, by bucket; empty if there is nothing to do."""
    metadata = lake.metadata
    options = CompactionOptions.of(metadata.properties)
    offset_id = metadata.schema().find_field(OFFSET_COLUMN).field_id
    foreign = _foreign_files(lake)
    plans: list[BucketPlan] = []
    for partition, files in live_files(lake.io, metadata.current_snapshot(), [offset_id]).items():
        own = [file for file in files if file.path not in foreign]
        plan = plan_bucket(partition, own, offset_id, options)
        if plan.rewrites or plan.merges:
            plans.append(plan)
        if sum(plan.bytes for plan in plans) > COMPACT_BYTES_MAX:
            break
    return plans


def _foreign_files(lake: Table) -> set[str]:
    """Data files that compaction leaves alone: of another partition spec, no Parquet, or with
    rows that are deleted by key."""
    head = lake.metadata.current_snapshot()
    out = set(equality_deletes(lake.io, head, lake.schema().identifier_field_ids))
    for entry in live_entries(lake.io, head):
        file = entry.data_file
        odd = file.file_format != FileFormat.PARQUET
        if is_data(entry) and (odd or file.spec_id != lake.metadata.default_spec_id):
            out.add(file.file_path)
    return out


def _removed(lake: Table, work: Rewriter) -> frozenset[str]:
    """Paths to remove: replaced data files, and delete files that no file needs any more."""
    replaced = {file.path for file in work.replaced}
    merged = {file.path for file in work.merged}
    head = lake.metadata.current_snapshot()
    entries = live_entries(lake.io, head)
    deletes = {entry.data_file.file_path for entry in entries if is_position_deletes(entry)}
    for files in live_files(lake.io, head, ()).values():
        for file in files:
            if file.path not in replaced and file.path not in merged:
                deletes.difference_update(file.deletes)
    return frozenset(replaced | deletes)


def _check_untouched(now: Table, files: list[LiveFile]) -> None:
    """`LakeCommitRefusedError` unless all files are live, with the deletes they had.

    They had no rows that are deleted by key, and must still have none.
    """
    head = now.metadata.current_snapshot()
    by_key = equality_deletes(now.io, head, now.schema().identifier_field_ids)
    current = {
        file.path: file.deletes
        for bucket_files in live_files(now.io, head, ()).values()
        for file in bucket_files
        if file.path not in by_key
    }
    touched = [file.path for file in files if current.get(file.path) != file.deletes]
    if touched:
        raise LakeCommitRefusedError(
            f"another writer changed {len(touched)} files of {'.'.join(now.name())} that were "
            f"being compacted ({min(touched)} is one); nothing was committed, plan again"
        )


def _may_remove(metadata: TableMetadata) -> bool:
    return metadata.properties.get("gc.enabled", "true").lower() != "false"


def _text(properties: Mapping[str, object]) -> dict[str, str]:
    return {key: str(value) for key, value in properties.items()}
