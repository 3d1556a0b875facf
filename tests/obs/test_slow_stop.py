"""A stop that takes long says what it waits for."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from structlog.testing import capture_logs

from zufluss.obs.slow_stop import report_slow_stop, reports_end, where_it_waits


async def held() -> None:
    await asyncio.Event().wait()


async def holder() -> None:
    await held()


def test_a_waiting_task_is_named_by_its_functions_the_innermost_last() -> None:
    async def named() -> str:
        task = asyncio.create_task(holder())
        await asyncio.sleep(0)
        name = where_it_waits(task)
        task.cancel()
        return name

    outer, inner, wait = asyncio.run(named()).split(" > ")
    assert outer.startswith("holder:")
    assert inner.startswith("held:")
    assert wait.startswith("Event.wait:")


def test_the_tasks_of_a_slow_stop_are_logged_again_and_again() -> None:
    async def stop_slowly() -> None:
        task = asyncio.create_task(holder())
        await asyncio.sleep(0)  # lets it begin
        with reports_end():
            report_slow_stop(asyncio.get_running_loop(), 0.001)
            while len(logs) < 2:
                await asyncio.sleep(0)
        task.cancel()

    with capture_logs() as logs:
        asyncio.run(stop_slowly())
    for each in logs[:2]:
        assert each["event"] == "stop_is_slow"
        assert any(" > held:" in task for task in each["tasks"])
    assert logs[0]["seconds"] < logs[1]["seconds"]


HANGS = """
import asyncio, threading
from zufluss.obs.slow_stop import report_slow_stop

def hang_for_ever():
    threading.Event().wait()

async def stop():
    report_slow_stop(asyncio.get_running_loop(), 0.001)
    hang_for_ever()

asyncio.run(stop())
"""


def test_the_stacks_are_printed_even_if_the_event_loop_hangs() -> None:
    with subprocess.Popen([sys.executable, "-c", HANGS], stderr=subprocess.PIPE, text=True) as it:
        assert it.stderr is not None
        found = next((line for line in it.stderr if "hang_for_ever" in line), None)
        it.kill()
    assert found is not None
