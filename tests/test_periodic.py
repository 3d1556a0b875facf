"""Work that a server repeats: a shortage between or in two rounds does not end it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from zufluss import periodic
from zufluss.errors import ZuflussError
from zufluss.periodic import pause, repeat


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Failures of the next timers; a timer that does not fail is over at once."""
    failures: list[Exception] = []
    sleep = asyncio.sleep

    async def short(seconds: float) -> Any:
        if seconds and failures:
            raise failures.pop()
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", short)
    return failures


async def test_periodic_work_goes_on_after_memory_ran_out_between_two_rounds(
    timers: list[Exception],
) -> None:
    """Retention, uploads and snapshots would otherwise stop until the next start, unnoticed."""
    done = asyncio.Event()
    timers += [MemoryError(), MemoryError()]
    work = asyncio.ensure_future(repeat(60, done.set, "failed"))
    await done.wait()
    assert timers == []
    work.cancel()


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_round_that_fails_is_logged_and_the_next_one_comes(
    timers: list[Exception], awaited: bool
) -> None:
    rounds = [MemoryError(), ZuflussError("refused")]
    done = asyncio.Event()

    def work() -> None:
        if rounds:
            raise rounds.pop()
        done.set()

    async def later() -> None:
        work()

    with structlog.testing.capture_logs() as lines:
        task = asyncio.ensure_future(repeat(60, later if awaited else work, "failed"))
        await done.wait()
    task.cancel()
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("failed", "warning"),
        ("failed", "error"),
    ]


async def test_a_failure_that_cannot_even_be_logged_does_not_end_the_work(
    timers: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, rounds = asyncio.Event(), [RuntimeError()]

    def work() -> None:
        if rounds:
            raise rounds.pop()
        done.set()

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(periodic.log, "error", no_memory)
    task = asyncio.ensure_future(repeat(60, work, "failed"))
    await done.wait()
    task.cancel()


async def test_a_pause_ends_when_it_is_woken() -> None:
    wake = asyncio.Event()
    asyncio.get_running_loop().call_soon(wake.set)
    await pause(3600, wake)
