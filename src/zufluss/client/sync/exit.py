"""The end of the interpreter: unsent rows are sent or named, and loop threads are stopped.

A script may end with a connection open: at its last line, by `sys.exit`, by an exception, by Ctrl-C
or by SIGTERM. Python then waits for threads that are no daemons, and after that calls `_at_exit`.
It closes every connection, which sends unsent rows for `LAST_FLUSH_MS` at most, names rows that
could not be sent on stderr, and stops the loop threads.

SIGTERM ends a Python process at once, unless somebody handles it. `catch_sigterm` does, and only
if nobody else does: while there are unsent rows, SIGTERM raises `SystemExit` in the main thread,
so that the blocks of the script are left and rows are sent; the exit code is 143. Without unsent
rows the process dies by the signal, as it would have. A process that is killed otherwise (SIGKILL,
`os._exit`) loses rows that no `flush` has returned for.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
from concurrent.futures import wait
from types import FrameType
from typing import TYPE_CHECKING, Final

from zufluss.client.core.unsent import LAST_FLUSH_MS, UNSETTLED, OpenWriter, warn
from zufluss.errors import UnsentRowsError
from zufluss.system import after_fork_in_child

if TYPE_CHECKING:
    from zufluss.client.sync.loop import LoopThread

STOP_SECONDS: Final = 2.0
"""How long the end of the interpreter waits for a loop thread beyond `LAST_FLUSH_MS`."""

THREADS: Final[set[LoopThread]] = set()
"""The loop threads that run."""


@atexit.register
def _at_exit() -> None:
    threads = list(THREADS)
    try:
        ends = [thread.start(_end()) for thread in threads]
        wait(ends, LAST_FLUSH_MS / 1000 + STOP_SECONDS)
    except (KeyboardInterrupt, SystemExit):
        pass  # a second Ctrl-C or SIGTERM: send no more
    for writer in list(UNSETTLED):  # its loop has ended, or does not answer
        warn(UnsentRowsError(f"{writer.unsent} were not sent; close writer and connection"))
    for thread in threads:
        thread.stop(STOP_SECONDS)


async def _end() -> None:
    """Send the rows of all writers of this loop, then cancel its other tasks."""
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(_end_writer(w) for w in list(UNSETTLED) if w.loop is loop))
    await cancel_others()


async def _end_writer(writer: OpenWriter) -> None:
    try:
        await writer.end(LAST_FLUSH_MS)
    except UnsentRowsError as e:
        warn(e)


async def cancel_others() -> None:
    """Cancel all tasks of the loop but this one, and wait for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def catch_sigterm() -> None:
    """Let SIGTERM leave the script's blocks while rows are unsent, if nobody handles it."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if UNSETTLED:
        raise SystemExit(128 + number)
    _die_of(number)


def _die_of(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _forget_parent() -> None:
    """In a forked process the threads do not run, and its SIGTERM is not ours."""
    THREADS.clear()
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


after_fork_in_child(_forget_parent)
