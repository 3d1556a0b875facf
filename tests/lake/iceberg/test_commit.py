"""The outcomes of a lake commit, row by row of the table in `commit.py`, against a catalog that is
told what to do: which commits it applies, what it answers, and what it shows afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    CommitStateUnknownException,
    ForbiddenError,
    NoSuchTableError,
    UnauthorizedError,
)
from sqlalchemy.exc import OperationalError

from zufluss.lake.base import (
    LakeCommitRefusedError,
    LakeCommitUnknownError,
    LakeError,
    LakeTableError,
)
from zufluss.lake.iceberg import commit as module
from zufluss.lake.iceberg.commit import ATTEMPTS_MAX, RECHECKS, AppliedCommit, commit_snapshot

OURS, PARENT, FOREIGN = 7, 1, 2
LOST = CommitStateUnknownException("the answer was lost")


@dataclass(frozen=True)
class State:
    """A table in the catalog: its snapshots, the newest last."""

    snapshots: tuple[int, ...] = (PARENT,)

    @property
    def current_snapshot_id(self) -> int:
        return self.snapshots[-1]

    def snapshot_by_id(self, snapshot_id: int) -> Any:
        summary = SimpleNamespace(additional_properties={"total-records": "3"})
        return SimpleNamespace(summary=summary) if snapshot_id in self.snapshots else None


@dataclass
class FakeTable:
    """What `commit.py` uses of a pyiceberg table."""

    catalog: FakeCatalog
    metadata: State
    io: None = None

    @property
    def metadata_location(self) -> str:
        return f"{self.metadata.snapshots}"

    @metadata_location.setter
    def metadata_location(self, _location: str) -> None:
        pass

    def name(self) -> tuple[str, ...]:
        return ("db", "t")

    def location(self) -> str:
        return "s3://lake/db/t"


Answer = Callable[["FakeCatalog"], None]


@dataclass
class FakeCatalog:
    """A catalog whose commits and loads do what the test says, one after the other."""

    state: State = field(default_factory=State)
    commits: list[Answer] = field(default_factory=list)
    loads: list[Answer] = field(default_factory=list)
    is_local: bool = False
    asked: int = 0

    def commit_table(self, table: FakeTable, requirements: Any, updates: Any) -> Any:
        assert (requirements, updates) == ("required", "updates")
        if self.commits:
            self.commits.pop(0)(self)
        else:
            self.apply()
        return SimpleNamespace(metadata=self.state, metadata_location="")

    def load_table(self, identifier: tuple[str, ...]) -> FakeTable:
        self.asked += 1
        if self.loads:
            self.loads.pop(0)(self)
        return FakeTable(self, self.state)

    def apply(self, snapshot_id: int = OURS) -> None:
        self.state = replace(self.state, snapshots=(*self.state.snapshots, snapshot_id))


class FakeBuilder:
    """Notes the attempts, and which of their files were discarded."""

    made: list[FakeBuilder]

    def __init__(self, change: Any, snapshot_id: int) -> None:
        self.snapshot_id = snapshot_id
        self.staged_on: list[int] = []
        self.landed: bool | None = None
        FakeBuilder.made.append(self)

    def stage(self, table: FakeTable) -> Any:
        self.staged_on.append(table.metadata.current_snapshot_id)
        return SimpleNamespace(requirements="required", updates="updates")

    def discard(self, io: None, *, landed: bool) -> None:
        self.landed = landed


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces what reaches the world; returns the pauses."""
    pauses: list[float] = []
    FakeBuilder.made = []
    monkeypatch.setattr(module, "SnapshotBuilder", FakeBuilder)
    monkeypatch.setattr(module, "delete_old_metadata", lambda io, before, after: None)
    monkeypatch.setattr(module, "is_local", lambda catalog: catalog.is_local)
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    return pauses


def raising(problem: Exception, *applied: int) -> Answer:
    """Apply some snapshots, then fail."""

    def answer(catalog: FakeCatalog) -> None:
        for snapshot_id in applied:
            catalog.apply(snapshot_id)
        raise problem

    return answer


def showing(*applied: int) -> Answer:
    """A load before which snapshots have arrived."""

    def answer(catalog: FakeCatalog) -> None:
        for snapshot_id in applied:
            catalog.apply(snapshot_id)

    return answer


def committed(
    catalog: FakeCatalog, check: Callable[[Any], None] = lambda table: None
) -> AppliedCommit:
    table: Any = FakeTable(catalog, catalog.state)
    return commit_snapshot(table, None, check, OURS)  # type: ignore[arg-type]


def staged_on() -> Sequence[int]:
    [builder] = FakeBuilder.made
    return builder.staged_on


def landed() -> bool | None:
    """Whether the builder was told that the snapshot landed; None if it was told nothing."""
    [builder] = FakeBuilder.made
    return builder.landed


REFUSED = [
    CommitFailedException("conflict"),
    BadRequestError("400"),
    UnauthorizedError("401"),
    ForbiddenError("403"),
]


def test_a_commit_that_is_answered_is_done() -> None:
    catalog = FakeCatalog()
    done = committed(catalog)
    assert (done.snapshot_id, done.table.metadata.current_snapshot_id) == (OURS, OURS)
    assert (done.result().total_records, done.result().total_bytes) == (3, None)
    assert (landed(), catalog.asked) == (True, 0)


@pytest.mark.parametrize("problem", [*REFUSED, LOST, OSError("reset"), ValueError("nonsense")])
def test_an_error_of_a_commit_that_was_applied_is_no_error(problem: Exception) -> None:
    catalog = FakeCatalog(commits=[raising(problem, OURS)])
    done = committed(catalog)
    assert done.table.metadata.snapshots == (PARENT, OURS)
    assert (staged_on(), landed()) == ([PARENT], True)


def test_a_commit_that_arrives_late_is_found_when_the_catalog_is_asked_again() -> None:
    catalog = FakeCatalog(commits=[raising(LOST)], loads=[showing(), showing(), showing(OURS)])
    assert committed(catalog).table.metadata.snapshots == (PARENT, OURS)
    assert (staged_on(), landed(), catalog.asked) == ([PARENT], True, RECHECKS)


def test_a_commit_below_that_of_another_writer_is_found_too() -> None:
    catalog = FakeCatalog(commits=[raising(LOST, OURS, FOREIGN)])
    assert committed(catalog).table.metadata.snapshots == (PARENT, OURS, FOREIGN)
    assert staged_on() == [PARENT]


def test_after_a_conflict_the_change_is_built_on_the_new_head() -> None:
    catalog = FakeCatalog(commits=[raising(CommitFailedException("conflict"), FOREIGN)])
    assert committed(catalog).table.metadata.snapshots == (PARENT, FOREIGN, OURS)
    assert (staged_on(), landed()) == ([PARENT, FOREIGN], True)


def test_a_conflict_without_a_new_head_is_tried_again() -> None:
    """Somebody changed only the properties."""
    catalog = FakeCatalog(commits=[raising(CommitFailedException("conflict"))])
    assert committed(catalog).table.metadata.snapshots == (PARENT, OURS)
    assert staged_on() == [PARENT, PARENT]


def test_a_lost_answer_is_tried_again_if_another_commit_has_moved_the_head() -> None:
    """The parent was required, so a request that is still under way has no effect."""
    catalog = FakeCatalog(commits=[raising(LOST, FOREIGN)])
    assert committed(catalog).table.metadata.snapshots == (PARENT, FOREIGN, OURS)


def test_a_lost_answer_over_an_unmoved_head_is_unknown_and_nothing_is_removed() -> None:
    catalog = FakeCatalog(commits=[raising(LOST)])
    with pytest.raises(LakeCommitUnknownError, match="look for the snapshot before anything"):
        committed(catalog)
    assert (staged_on(), landed(), catalog.asked) == ([PARENT], None, RECHECKS)


def test_a_catalog_that_does_not_answer_any_more_leaves_it_unknown() -> None:
    silent = raising(OSError("no route"))
    catalog = FakeCatalog(commits=[raising(LOST, OURS)], loads=[silent] * RECHECKS)
    with pytest.raises(LakeCommitUnknownError):
        committed(catalog)
    assert landed() is None


def test_a_table_that_is_gone_after_a_lost_answer_leaves_it_unknown() -> None:
    """It may have been renamed after the commit."""
    gone = raising(NoSuchTableError("gone"))
    catalog = FakeCatalog(commits=[raising(LOST, OURS)], loads=[gone] * RECHECKS)
    with pytest.raises(LakeCommitUnknownError):
        committed(catalog)
    assert landed() is None


def test_a_table_that_was_gone_before_the_commit_is_an_error_and_files_are_removed() -> None:
    gone = raising(NoSuchTableError("gone"))
    catalog = FakeCatalog(commits=[gone], loads=[gone])
    with pytest.raises(LakeError, match="was dropped while a round committed"):
        committed(catalog)
    assert landed() is False


def test_a_local_catalog_knows_at_once_that_nothing_was_applied() -> None:
    catalog = FakeCatalog(commits=[raising(OSError("disk"))], is_local=True)
    with pytest.raises(LakeError, match=r"not applied: OSError: disk") as caught:
        committed(catalog)
    assert not isinstance(caught.value, LakeCommitUnknownError)
    assert (landed(), catalog.asked) == (False, 1)


def test_a_local_catalog_whose_table_is_gone_is_no_riddle() -> None:
    gone = raising(NoSuchTableError("gone"))
    catalog = FakeCatalog(commits=[raising(OSError("disk"))], loads=[gone], is_local=True)
    with pytest.raises(LakeError, match="was dropped") as caught:
        committed(catalog)
    assert not isinstance(caught.value, LakeCommitUnknownError)


def test_a_busy_local_database_is_tried_again() -> None:
    busy = OperationalError("commit", {}, Exception("database is locked"))
    catalog = FakeCatalog(commits=[raising(busy)], is_local=True)
    assert committed(catalog).table.metadata.snapshots == (PARENT, OURS)


@pytest.mark.parametrize("problem", REFUSED[1:])
def test_a_refusal_that_no_other_commit_explains_is_not_tried_again(problem: Exception) -> None:
    catalog = FakeCatalog(commits=[raising(problem)])
    with pytest.raises(LakeError, match="failed and was not applied"):
        committed(catalog)
    assert (staged_on(), landed()) == ([PARENT], False)


@pytest.mark.parametrize("problem", REFUSED[1:])
def test_a_refusal_beside_another_commit_is_tried_again(problem: Exception) -> None:
    catalog = FakeCatalog(commits=[raising(problem, FOREIGN)])
    assert committed(catalog).table.metadata.snapshots == (PARENT, FOREIGN, OURS)


def test_a_snapshot_that_shows_up_before_the_next_attempt_is_not_committed_twice() -> None:
    """The state that was seen first was older, as a cache or a replica of the catalog may show."""
    conflict = raising(CommitFailedException("conflict"))
    catalog = FakeCatalog(commits=[conflict], loads=[showing(), showing(OURS)])
    assert committed(catalog).table.metadata.snapshots == (PARENT, OURS)
    assert staged_on() == [PARENT]


def test_the_fence_is_checked_on_every_state_that_an_attempt_builds_on() -> None:
    conflict = raising(CommitFailedException("conflict"), FOREIGN)
    catalog, seen = FakeCatalog(commits=[conflict]), []

    def check(table: Any) -> None:
        seen.append(table.metadata.current_snapshot_id)
        if table.metadata.current_snapshot_id == FOREIGN:
            raise LakeCommitRefusedError("fenced")

    with pytest.raises(LakeCommitRefusedError, match="fenced"):
        committed(catalog, check)
    assert (seen, staged_on(), landed()) == ([PARENT, FOREIGN], [PARENT], False)


def test_a_check_that_refuses_an_old_state_sees_the_new_one() -> None:
    catalog = FakeCatalog(loads=[showing(FOREIGN)])

    def check(table: Any) -> None:
        if table.metadata.current_snapshot_id != FOREIGN:
            raise LakeTableError("old")

    assert committed(catalog, check).table.metadata.snapshots == (PARENT, FOREIGN, OURS)
    assert staged_on() == [FOREIGN]


def test_a_check_that_refuses_the_new_state_too_ends_the_commit() -> None:
    def check(table: Any) -> None:
        raise LakeTableError("never")

    with pytest.raises(LakeTableError, match="never"):
        committed(FakeCatalog(), check)
    assert (staged_on(), landed()) == ([], False)


def test_a_commit_that_always_loses_is_refused_after_many_attempts(fakes: list[float]) -> None:
    conflict = raising(CommitFailedException("conflict"), FOREIGN)
    catalog = FakeCatalog(commits=[conflict] * ATTEMPTS_MAX)
    with pytest.raises(LakeCommitRefusedError, match=f"{ATTEMPTS_MAX} times"):
        committed(catalog)
    assert (len(staged_on()), landed()) == (ATTEMPTS_MAX, False)
    assert len(fakes) == ATTEMPTS_MAX
    assert all(0 < pause <= 1 for pause in fakes)
    assert fakes[0] < 0.05 < 0.4 < fakes[-1]


def test_pauses_between_questions_grow(fakes: list[float]) -> None:
    with pytest.raises(LakeCommitUnknownError):
        committed(FakeCatalog(commits=[raising(LOST)]))
    assert len(fakes) == RECHECKS - 1
    assert fakes == sorted(set(fakes))


def test_snapshot_ids_are_positive_and_new() -> None:
    ids = {module.new_snapshot_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(0 < each < 2**63 for each in ids)
