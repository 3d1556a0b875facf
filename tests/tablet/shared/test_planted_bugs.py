"""Shortcuts that would lose rows or show old ones are found by the scenes of this package.

Otherwise these would be green because they look at nothing. Shortcuts of the shared log itself are
planted in `tests/log/shared`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tablet.shared import test_takeover as takeover
from tests.tablet.shared import test_trim as trim
from zufluss.log.manager import LogManager
from zufluss.tablet.shared.lease import LookupLease
from zufluss.tablet.shared.session import ServerSession


def _floor_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are deleted by a floor that the coordinator does not know."""

    async def raise_floor(self: ServerSession, floor: int) -> None:
        self.floor = floor
        self.writer.trimmed(floor)

    monkeypatch.setattr(ServerSession, "raise_floor", raise_floor)


def _deleted_without_carrying(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in no segment is deleted as if it was written again."""
    monkeypatch.setattr(ServerSession, "carry", lambda *_: None)


def _lease_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers for the present although another one may lead."""
    monkeypatch.setattr(LookupLease, "check", lambda self: None)


def _committed_before_the_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator is told of an end that is not in the session yet."""

    async def carry_over(*_: Any) -> None:
        """Later."""

    monkeypatch.setattr(ServerSession, "carry_over", carry_over)


def _source_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is opened with what segments and the disk have."""
    real = LogManager.open_shared

    async def open_shared(self: LogManager, *args: Any, **options: Any) -> Any:
        async def nothing(start: int) -> tuple[memoryview, ...]:
            return ()

        return await real(self, *args, **(options | {"tail": nothing}))

    monkeypatch.setattr(LogManager, "open_shared", open_shared)


Scene = Callable[[Path], Awaitable[None]]
PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], Scene]] = [
    (_floor_not_recorded, trim.test_nothing_is_deleted_before_the_floor_is_recorded),
    (_deleted_without_carrying, trim.test_what_is_carried_replaces_what_is_trimmed),
    (_lease_not_asked, takeover.test_a_server_without_word_from_the_coordinator_answers_no_offsets),
    (_committed_before_the_carry, takeover.test_sources_do_not_chain),
    (_source_not_read, takeover.test_a_server_without_a_disk_has_everything_that_was_acknowledged),
]


@pytest.mark.parametrize(("bug", "scene"), PLANTED, ids=[bug.__name__ for bug, _ in PLANTED])
async def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None],
    scene: Scene,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await scene(tmp_path)
