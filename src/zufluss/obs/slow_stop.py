"""Says what a stop waits for, when it takes long.

A clean stop waits for disks, for threads and for other processes. If one of them does not answer,
the only trace would be a process that an operator has to kill. So after `SLOW_SECONDS`, and again
after each further period, the server logs where its tasks wait and prints the stacks of its
threads. The stacks are printed by a thread that needs no interpreter, so a stop that hangs behind
the event loop shows, too.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import structlog

log = structlog.get_logger(__name__)

SLOW_SECONDS: Final = 30.0
"""A stop that takes longer is reported, as often as this time passes."""


def report_slow_stop(loop: asyncio.AbstractEventLoop, seconds: float = SLOW_SECONDS) -> None:
    """Report from now on: tasks until the loop ends, stacks until the block of `reports_end`."""
    loop.call_later(seconds, _report, loop, seconds, seconds)
    with suppress(OSError, RuntimeError, ValueError):  # standard error is no file, or no thread
        faulthandler.dump_traceback_later(seconds, repeat=True, file=sys.stderr)


@contextmanager
def reports_end() -> Iterator[None]:
    """Report no more stacks once the block has ended: the process goes on to do other things."""
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _report(loop: asyncio.AbstractEventLoop, seconds: float, passed: float) -> None:
    tasks = sorted(where_it_waits(task) for task in asyncio.all_tasks(loop))
    log.warning("stop_is_slow", seconds=passed, tasks=tasks)
    loop.call_later(seconds, _report, loop, seconds, passed + seconds)


def where_it_waits(task: asyncio.Task[Any]) -> str:
    """The functions that a task is in, the innermost last."""
    names: list[str] = []
    step: Any = task.get_coro()
    while step is not None:
        frame = getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None)
        if frame is None:
            break
        names.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
    return " > ".join(names) or repr(task)
