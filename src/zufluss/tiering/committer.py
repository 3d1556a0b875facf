"""The two commits of a round, first lake, then cluster, and recovery from a crash between them.

A lake snapshot carries everything that is needed to report it to the cluster later: the identity of
the table, the path of the offsets file that the coordinator prepared, and the offsets themselves if
they are few. So the next round of the table first asks the lake for the newest snapshot of ours
(`recover`), reports it if the cluster does not know it, and plans from there.

| lake commit | then |
|---|---|
| done | tell the cluster |
| refused | remove this round's files; the round fails |
| unknown | look for this round in the lake: found is done; else the round fails, files stay |
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from zufluss.client.sync.admin import Admin
from zufluss.client.tiering import TieringClient, TieringLease
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.lake.base import (
    COMMIT_USER,
    COMMIT_USER_KEY,
    EPOCH_KEY,
    OFFSETS_KEY,
    OFFSETS_PATH_KEY,
    ROUND_KEY,
    CommitResult,
    CommittedSnapshot,
    LakeCommitRefusedError,
    LakeCommitter,
    LakeCommitUnknownError,
    LakeTableError,
    offsets_from_json,
    offsets_to_json,
    table_identity,
)
from zufluss.model.lake import LakeSnapshot
from zufluss.model.table import TableBucket, TableInfo

INLINE_OFFSETS_BYTES_MAX: Final = 2 * 1024
"""Longer offsets stand in the offsets file only, since lake metadata repeats them per snapshot."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The state of the table before a round."""

    newest: CommittedSnapshot | None
    """The newest snapshot of ours in the lake; None if there is none."""
    known: LakeSnapshot | None
    """The same snapshot as the cluster knows it, with the offsets to plan from."""
    reported: bool
    """Whether the snapshot was reported to the cluster just now."""


class TableCommitter:
    """Commits rounds of one table under one lease."""

    def __init__(
        self,
        tiering: TieringClient,
        admin: Admin,
        lease: TieringLease,
        lake: LakeCommitter[Any, Any],
    ) -> None:
        self._tiering = tiering
        self._admin = admin
        self._lease = lease
        self._lake = lake

    def recover(self) -> Recovery:
        """Report the newest snapshot of ours to the cluster if the cluster does not know it.

        Raises `LakeTableError` if the lake lost a snapshot that the cluster knows.
        """
        known = self._admin.lake_snapshot(self._lease.path)
        newest = self._lake.newest()
        if newest is None:
            if known is not None:
                raise LakeTableError(_lost(self._lease, known))
            return Recovery(None, None, reported=False)
        if known is not None and known.snapshot_id == newest.snapshot_id:
            return Recovery(newest, known, reported=False)
        self._report(newest, known)
        return Recovery(newest, self._admin.lake_snapshot(self._lease.path), reported=True)

    def _report(self, newest: CommittedSnapshot, known: LakeSnapshot | None) -> None:
        inline = inline_offsets(self._lease.table_id, newest.properties)
        if known is not None and any(o < known.offsets.get(b, 0) for b, o in inline.items()):
            raise LakeTableError(_lost(self._lease, known))
        try:
            self._commit(newest, self._offsets_path(newest))
        except ZuflussError as problem:
            if problem.retriable or is_fenced(problem):
                raise
            if not inline:
                raise self._contradiction(newest, known, problem) from problem
            stored = self._tiering.prepare(self._lease, self._live(inline), ignore_previous=True)
            self._commit(newest, stored)

    def _offsets_path(self, newest: CommittedSnapshot) -> str:
        """The path of the offsets file; `LakeTableError` if an old Fluss left something else."""
        path = newest.properties.get(OFFSETS_PATH_KEY)
        if path is None or path.lstrip().startswith("{"):
            raise LakeTableError(
                f"snapshot {newest.snapshot_id} of the lake table of {self._lease.path} names no "
                f"offsets file under {OFFSETS_PATH_KEY!r}: a tiering job of Fluss before 0.9 wrote "
                "it, and how far it got is not known"
            )
        return path

    def _contradiction(
        self, newest: CommittedSnapshot, known: LakeSnapshot | None, problem: ZuflussError
    ) -> LakeTableError:
        kept = "none" if known is None else known.snapshot_id
        return LakeTableError(
            f"the newest tiering snapshot in the lake table of {self._lease.path}, "
            f"{newest.snapshot_id}, was never reported, and cannot be now ({problem.message}). A "
            "tiering job that had lost the table may have committed it, with rows that the lake "
            f"has twice then. Roll the lake table back to snapshot {kept}, which the cluster "
            "knows; the rows after it are tiered again"
        )

    def _live(self, offsets: Mapping[TableBucket, int]) -> Mapping[TableBucket, int]:
        """Offsets of existing partitions only; the coordinator accepts no others."""
        if all(bucket.partition_id is None for bucket in offsets):
            return offsets
        there = {p.partition_id for p in self._admin.list_partitions(self._lease.path)}
        return {bucket: o for bucket, o in offsets.items() if bucket.partition_id in there}

    def _commit(self, newest: CommittedSnapshot, offsets_path: str) -> None:
        self.commit_to_server(newest.snapshot_id, offsets_path, readable=newest.readable)

    def prepare(self, offsets: Mapping[TableBucket, int]) -> str:
        """Store the offsets of a round, merged with those of other buckets; returns their path."""
        return self._tiering.prepare(self._lease, offsets)

    def commit_to_lake(
        self,
        results: Sequence[Any],
        properties: Mapping[str, str],
        expected: int | None,
        fresh: Collection[str] = (),
    ) -> CommitResult:
        """Commit one snapshot with all results on top of `expected`; see the table above."""
        committable = self._lake.to_committable(results)
        try:
            return self._lake.commit(committable, properties, expected, fresh)
        except LakeCommitRefusedError:
            self._lake.abort(committable)
            raise
        except Exception as problem:  # whatever the error says, the outcome is unknown
            return self._find(properties[ROUND_KEY], problem)

    def abort(self, results: Sequence[Any]) -> None:
        """Remove the files of a round whose commit was not attempted."""
        self._lake.abort(self._lake.to_committable(results))

    def commit_to_server(self, snapshot_id: int, offsets_path: str, *, readable: bool) -> None:
        """Commit a snapshot to the cluster. Union reads use it if it is `readable`."""
        self._tiering.commit(
            self._lease,
            snapshot_id,
            offsets_path,
            readable_offsets_path=offsets_path if readable else None,
        )

    def _find(self, round_id: str, problem: Exception) -> CommitResult:
        try:
            newest = self._lake.newest()
        except Exception as second:
            raise _unknown(self._lease, round_id, problem) from second
        if newest is None or newest.properties.get(ROUND_KEY) != round_id:
            raise _unknown(self._lease, round_id, problem) from problem
        return CommitResult(newest.snapshot_id)


def snapshot_properties(
    table: TableInfo,
    lease: TieringLease,
    round_id: str,
    offsets_path: str,
    offsets: Mapping[TableBucket, int],
) -> dict[str, str]:
    """The properties of a round's snapshot; `offsets` are those of all buckets."""
    properties = {
        COMMIT_USER_KEY: COMMIT_USER,
        OFFSETS_PATH_KEY: offsets_path,
        **table_identity(table),
        EPOCH_KEY: str(lease.tiering_epoch),
        ROUND_KEY: round_id,
    }
    inline = json.dumps(offsets_to_json(offsets), separators=(",", ":"))
    if len(inline) <= INLINE_OFFSETS_BYTES_MAX:
        properties[OFFSETS_KEY] = inline
    return properties


def inline_offsets(table_id: int, properties: Mapping[str, str]) -> dict[TableBucket, int]:
    """The offsets in a snapshot's properties; empty if they stand in the offsets file only."""
    text = properties.get(OFFSETS_KEY)
    return {} if text is None else offsets_from_json(table_id, json.loads(text))


def is_fenced(problem: BaseException) -> bool:
    """Whether the error says that another service holds the lease."""
    code = problem.code if isinstance(problem, ZuflussError) else None
    return code is ErrorCode.FENCED_TIERING_EPOCH_EXCEPTION


def _lost(lease: TieringLease, known: LakeSnapshot) -> str:
    return (
        f"lake table of {lease.path} no longer has snapshot {known.snapshot_id}, on which the "
        "cluster relies: the lake table was dropped, replaced or rolled back from outside. Restore "
        "it, or drop and re-create the table"
    )


def _unknown(lease: TieringLease, round_id: str, problem: Exception) -> LakeCommitUnknownError:
    return LakeCommitUnknownError(
        f"{lease.path}: whether round {round_id} is in the lake is not known ({problem}); its "
        "files stay, and the next round looks again"
    )
