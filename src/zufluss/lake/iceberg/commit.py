"""Commits one snapshot to a catalog: attempts, the fence, and the meaning of errors.

A commit has three outcomes. This table tells them apart after an error:

| error | then | outcome of the attempt |
|---|---|---|
| conflict, failed requirement, 4xx | the snapshot is in the table | done |
| | it is not | not applied: check the fence on the current table, try again |
| anything else | the snapshot is in the table | done, once a local table's directory is synced |
| | it is not, and the table's head has moved | not applied (the parent was required) |
| | it is not, and the catalog is a local file or directory | not applied (nothing is under way) |
| | it is not, and the head is the parent | unknown: the request may still arrive |
| | the table cannot be loaded | unknown |
| | the table is gone | unknown: it may have gone after the commit, under another name |
| there is no such table, or any of a local catalog | the table is gone | not applied |

The snapshot's id is chosen once, so an applied attempt is found by it. Manifests of attempts that
were certainly not applied are removed; after an unknown outcome nothing is removed.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    ForbiddenError,
    NoSuchNamespaceError,
    NoSuchTableError,
    UnauthorizedError,
)
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.snapshots import Summary
from sqlalchemy.exc import OperationalError

from zufluss.lake.base import (
    CommitResult,
    LakeCommitRefusedError,
    LakeCommitUnknownError,
    LakeError,
)
from zufluss.lake.iceberg.catalog import answered, is_local
from zufluss.lake.iceberg.files import LakeFiles
from zufluss.lake.iceberg.private import SnapshotBuilder, SnapshotChange, delete_old_metadata

ATTEMPTS_MAX = 40
"""The most attempts of one commit that lose against commits of others."""
WAIT_MIN_S = 0.01
WAIT_MAX_S = 1.0
RECHECKS = 3
"""How often the catalog is asked for the outcome of a commit, at most a second apart."""

REFUSALS = (CommitFailedException, BadRequestError, UnauthorizedError, ForbiddenError)
"""Errors with which a catalog refuses a commit without any effect."""

Check = Callable[[Table], None]
"""Raises an error if the change must not be applied to this state of the table."""


@dataclass(frozen=True, slots=True)
class AppliedCommit:
    """A commit that had its effect."""

    snapshot_id: int
    """The snapshot."""
    table: Table
    """The table with it."""

    def result(self) -> CommitResult:
        """The result for the caller of the committer, with the totals of the summary."""
        snapshot = self.table.metadata.snapshot_by_id(self.snapshot_id)
        summary = snapshot.summary if snapshot is not None else None
        return CommitResult(
            self.snapshot_id,
            total_bytes=_total(summary, "total-files-size"),
            total_records=_total(summary, "total-records"),
        )


def _total(summary: Summary | None, key: str) -> int | None:
    text = None if summary is None else summary.additional_properties.get(key)
    return None if text is None else int(text)


def new_snapshot_id() -> int:
    """A random positive id of 63 bits."""
    return uuid.uuid4().int >> 65


def commit_snapshot(
    table: Table, change: SnapshotChange, check: Check, snapshot_id: int | None = None
) -> AppliedCommit:
    """Commit a change; `check` is called with every state of the table that an attempt builds on.

    The first attempt builds on `table` as it is, if `check` accepts it. That is safe however old
    `table` is: an attempt requires that the head of the table has not moved. Raises the errors of
    `check`, `LakeCommitRefusedError` after too many conflicts, or `LakeCommitUnknownError`.
    """
    builder = SnapshotBuilder(change, snapshot_id or new_snapshot_id())
    try:
        with answered(f"lake table {'.'.join(table.name())}"):
            landed = _attempts(table, builder, check)
    except LakeCommitUnknownError:
        raise
    except Exception:
        builder.discard(table.io, landed=False)
        raise
    builder.discard(table.io, landed=True)
    return AppliedCommit(builder.snapshot_id, landed)


def _attempts(table: Table, builder: SnapshotBuilder, check: Check) -> Table:
    """The table with the snapshot. Any error but `LakeCommitUnknownError` means: not applied."""
    table = _checked(table, check)
    for attempt in range(ATTEMPTS_MAX):
        staged = builder.stage(table)
        try:
            answer = table.catalog.commit_table(table, staged.requirements, staged.updates)
            return _after(table, answer)
        except Exception as problem:
            now, landed = _settle(table, builder.snapshot_id, problem)
            if landed:
                return now
            _check_worth_trying(table, now, problem)
        wait = min(WAIT_MAX_S, WAIT_MIN_S * 2**attempt)
        time.sleep(wait * random.uniform(0.5, 1.0))
        table = _reloaded(table)
        if table.metadata.snapshot_by_id(builder.snapshot_id) is not None:
            return table  # it was applied; the state seen before was older
        check(table)
    raise LakeCommitRefusedError(
        f"commit to {'.'.join(table.name())} lost against other writers {ATTEMPTS_MAX} times and "
        "was not applied; the next round tries again"
    )


def _checked(table: Table, check: Check) -> Table:
    """The table; loaded again if `check` refuses the state that we have."""
    try:
        check(table)
    except LakeError:
        table = _reloaded(table)
        check(table)
    return table


def _reloaded(table: Table) -> Table:
    try:
        return table.catalog.load_table(table.name())
    except NoSuchTableError as problem:
        raise LakeError(
            f"lake table {'.'.join(table.name())} was dropped while a round committed to it"
        ) from problem


def _after(table: Table, answer: CommitTableResponse) -> Table:
    delete_old_metadata(table.io, table.metadata, answer.metadata)
    table.metadata, table.metadata_location = answer.metadata, answer.metadata_location
    return table


def _settle(table: Table, snapshot_id: int, problem: Exception) -> tuple[Table, bool]:
    """The current table and whether the attempt was applied; `LakeCommitUnknownError`."""
    for recheck in range(RECHECKS):
        now = _load_or_none(table, problem)
        if now is not None:
            if now.metadata.snapshot_by_id(snapshot_id) is not None:
                _sync_applied(now, snapshot_id)
                return now, True
            if _certainly_not_applied(table, now, problem):
                return now, False
        if recheck + 1 < RECHECKS:
            time.sleep(WAIT_MIN_S * 10**recheck)
    raise LakeCommitUnknownError(
        f"commit of snapshot {snapshot_id} to {'.'.join(table.name())} ended with "
        f"{type(problem).__name__}: {problem}; whether it was applied is not known, look for the "
        "snapshot before anything is removed"
    ) from problem


def _sync_applied(now: Table, snapshot_id: int) -> None:
    """Sync the metadata of an applied commit: it may be the sync that failed."""
    try:
        sync_metadata(now)
    except OSError as problem:
        raise LakeCommitUnknownError(
            f"snapshot {snapshot_id} was committed to {'.'.join(now.name())} and cannot be made "
            f"durable: {problem}; repair the file system, the next round looks for the snapshot"
        ) from problem


def sync_metadata(table: Table) -> None:
    """Make the names of a local table's metadata files durable; each was synced as it got one."""
    directory, _, _name = table.metadata_location.rpartition("/")
    with suppress(FileNotFoundError):  # the table was dropped meanwhile
        LakeFiles({}, table.location()).sync_all([directory])


def _certainly_not_applied(before: Table, now: Table, problem: Exception) -> bool:
    refused = isinstance(problem, REFUSALS)
    return refused or is_local(before.catalog) or _head(before) != _head(now)


def _check_worth_trying(before: Table, now: Table, problem: Exception) -> None:
    """Raise `LakeError` unless a conflict, a busy database or another commit is the reason."""
    passing = isinstance(problem, CommitFailedException | OperationalError)
    if not passing and before.metadata_location == now.metadata_location:
        raise LakeError(
            f"commit to {'.'.join(before.name())} failed and was not applied: "
            f"{type(problem).__name__}: {problem}"
        ) from problem


def _head(table: Table) -> int | None:
    return table.metadata.current_snapshot_id


def _load_or_none(table: Table, problem: Exception) -> Table | None:
    """The current table; None if the catalog does not answer or has no such table."""
    try:
        return _reloaded(table)
    except LakeError:
        if isinstance(problem, NoSuchTableError) or is_local(table.catalog):
            raise
        return None
    except Exception:  # any error only means that the outcome is not known yet
        return None


def load_table(catalog: Catalog, identifier: tuple[str, ...]) -> Table | None:
    """The table; None if there is none. Raises `LakeError` if the catalog does not answer."""
    try:
        with answered(f"lake table {'.'.join(identifier)}"):
            return catalog.load_table(identifier)
    except (NoSuchTableError, NoSuchNamespaceError):
        return None
