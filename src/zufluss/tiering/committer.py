"""The two commits of a round, lake first and cluster second, and what a crash between them leaves.

The lake's snapshot carries everything that is needed to tell the cluster of it later: whose table
it is, the path of the offsets file that the coordinator prepared, the offsets themselves where they
are few. So whoever tiers the table next asks the lake for the newest snapshot of ours first
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
"""Longer ones stand in the offsets file only: a lake's metadata has those of every snapshot."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Where the table stands before a round."""

    newest: CommittedSnapshot | None
    """The newest snapshot of ours in the lake."""
    known: LakeSnapshot | None
    """The same as the cluster knows it, with the offsets to plan from."""
    reported: bool
    """The cluster did not know it until now."""


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
        """Let the cluster know the newest snapshot of ours; `LakeTableError` if it is gone."""
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
            self._commit(newest, newest.properties[OFFSETS_PATH_KEY])
        except ZuflussError as problem:
            if not inline or problem.retriable or is_fenced(problem):
                raise
            stored = self._tiering.prepare(self._lease, self._live(inline), ignore_previous=True)
            self._commit(newest, stored)

    def _live(self, offsets: Mapping[TableBucket, int]) -> Mapping[TableBucket, int]:
        """Those of partitions that are still there; the coordinator takes no others."""
        if all(bucket.partition_id is None for bucket in offsets):
            return offsets
        there = {found.partition_id for found in self._admin.list_partitions(self._lease.path)}
        return {bucket: o for bucket, o in offsets.items() if bucket.partition_id in there}

    def _commit(self, newest: CommittedSnapshot, offsets_path: str) -> None:
        self.commit_to_server(newest.snapshot_id, offsets_path, readable=newest.readable)

    def prepare(self, offsets: Mapping[TableBucket, int]) -> str:
        """Store the offsets of the buckets of a round, merged with the others; where they are."""
        return self._tiering.prepare(self._lease, offsets)

    def commit_to_lake(
        self,
        results: Sequence[Any],
        properties: Mapping[str, str],
        expected: int | None,
        fresh: Collection[str] = (),
    ) -> CommitResult:
        """One snapshot with all results, on top of `expected`; see the table above."""
        committable = self._lake.to_committable(results)
        try:
            return self._lake.commit(committable, properties, expected, fresh)
        except LakeCommitRefusedError:
            self._lake.abort(committable)
            raise
        except Exception as problem:  # an outcome that nobody knows, whatever it looks like
            return self._find(properties[ROUND_KEY], problem)

    def abort(self, results: Sequence[Any]) -> None:
        """Remove the files of a round that no commit was tried for."""
        self._lake.abort(self._lake.to_committable(results))

    def commit_to_server(self, snapshot_id: int, offsets_path: str, *, readable: bool) -> None:
        """Make a snapshot the table's lake snapshot, and the one union reads use if readable."""
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
    """What a round's snapshot carries; `offsets` are those of all buckets."""
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
    """The offsets in a snapshot's properties; empty where they stand in a file only."""
    text = properties.get(OFFSETS_KEY)
    return {} if text is None else offsets_from_json(table_id, json.loads(text))


def is_fenced(problem: BaseException) -> bool:
    """The lease belongs to somebody else by now."""
    code = problem.code if isinstance(problem, ZuflussError) else None
    return code is ErrorCode.FENCED_TIERING_EPOCH_EXCEPTION


def _lost(lease: TieringLease, known: LakeSnapshot) -> str:
    return (
        f"lake table of {lease.path} no longer has snapshot {known.snapshot_id}, up to which the "
        "cluster counts on it: it was dropped, replaced or set back from outside. Restore it, or "
        "drop and re-create the table"
    )


def _unknown(lease: TieringLease, round_id: str, problem: Exception) -> LakeCommitUnknownError:
    return LakeCommitUnknownError(
        f"{lease.path}: whether round {round_id} is in the lake is not known ({problem}); its "
        "files stay, and the next round looks again"
    )
