"""Work of the coordinator that must be finished before its owner stops."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import structlog

from zufluss.coordinator.tasks import PendingTasks
from zufluss.errors import TableNotExistError


async def test_work_is_finished_when_its_caller_is_cancelled() -> None:
    tasks, go, finished = PendingTasks("test"), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        finished.set()

    caller = asyncio.create_task(tasks.undisturbed(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go.set()
    await tasks.settle()
    assert finished.is_set()


async def test_the_caller_gets_the_result_or_the_error() -> None:
    tasks = PendingTasks("test")

    async def answer(number: int) -> int:
        if number < 0:
            raise ValueError(number)
        return number

    assert await tasks.undisturbed(answer(3)) == 3
    with pytest.raises(ValueError, match="-1"):
        await tasks.undisturbed(answer(-1))


async def test_settle_waits_for_tasks_that_tasks_begin() -> None:
    tasks, steps = PendingTasks("test"), []

    async def step(number: int) -> None:
        await asyncio.sleep(0)
        steps.append(number)
        if number < 3:
            tasks.later(step(number + 1))

    tasks.later(step(0))
    await tasks.settle()
    assert steps == [0, 1, 2, 3]


async def test_a_failure_that_nobody_waits_for_is_logged() -> None:
    tasks = PendingTasks("test")

    async def fail() -> None:
        raise ValueError("broken")

    with structlog.testing.capture_logs() as logs:
        tasks.later(fail())
        await tasks.settle()
        await asyncio.sleep(0)
    assert [entry["event"] for entry in logs] == ["test_task_failed"]


@pytest.mark.parametrize(
    ("problem", "event"),
    [(TableNotExistError("it was dropped"), "test_task_refused"), (OSError(5), "test_task_failed")],
)
async def test_a_failure_behind_a_caller_that_went_away_is_logged_once(
    problem: Exception, event: str
) -> None:
    """Otherwise asyncio would report that the exception of a task was never retrieved."""
    tasks, go, reports = PendingTasks("test"), asyncio.Event(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))

    async def work() -> None:
        await go.wait()
        raise problem

    caller = asyncio.create_task(tasks.undisturbed(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with structlog.testing.capture_logs() as logs:
        go.set()
        await tasks.settle()
        await asyncio.sleep(0)
    gc.collect()
    assert [entry["event"] for entry in logs] == [event]
    assert reports == []
