"""The end of the interpreter: unsent rows are sent or named, and loop threads are stopped.

A script may end with a connection open: at its last line, by `sys.exit`, by an exception, by Ctrl-C
or by SIGTERM. Python then waits for threads that are no daemons, and after that calls `_at_exit`.
It closes every connection, which sends unsent rows for `LAST_FLUSH_MS` at most, names rows that
could not be sent on stderr, and stops the loop threads.

SIGTERM ends a Python process at once, unless somebody handles it. `catch_sigterm` does, and only
if nobody else does: while there are unsent rows, SIGTERM raises `SystemExit` in the main thread,
so that the blocks of the script are left and rows are sent; the exit code is 143. Threads that
still run when the time for that is over end with the process. Without unsent rows the process dies
by the signal, as it would have. A process that is killed otherwise (SIGKILL, `os._exit`) loses rows
that no `flush` has returned for.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
import threading
from concurrent.futures import wait
from types import FrameType
from typing import TYPE_CHECKING, Final

from zufluss.client.core.unsent import LAST_FLUSH_MS, UNSETTLED, OpenWriter, warn
from zufluss.errors import UnsentRowsError, reason_of
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
        ends = [thread.start(_end()) for thread in threads if thread.alive]
        wait(ends, LAST_FLUSH_MS / 1000 + STOP_SECONDS)
    except (KeyboardInterrupt, SystemExit):
        pass  # a second Ctrl-C or SIGTERM: send no more
    _name_unsettled()
    for thread in threads:
        thread.stop(STOP_SECONDS)


def _name_unsettled() -> None:
    """Name the rows of writers whose loop has ended or does not answer."""
    for writer in list(UNSETTLED):
        warn(UnsentRowsError(f"{writer.unsent} were not sent; close writer and connection"))


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
    except Exception as e:  # the rows of other writers are still sent
        warn(UnsentRowsError(f"{writer.unsent} may be missing: {reason_of(e)}"))


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
    if not UNSETTLED:
        _die_of(number)
        return
    # Python waits for threads that are no daemons, and these may write for ever.
    limit = threading.Timer(LAST_FLUSH_MS / 1000 + 2 * STOP_SECONDS, _leave, (128 + number,))
    limit.daemon = True
    limit.start()
    raise SystemExit(128 + number)


def _leave(code: int) -> None:
    """End the process from another thread than the main one."""
    _name_unsettled()
    sys.stderr.flush()
    os._exit(code)


def _die_of(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _forget_parent() -> None:
    """In a forked process the threads do not run, and its SIGTERM is not ours."""
    for thread in THREADS:
        thread.forked = True
    THREADS.clear()
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


after_fork_in_child(_forget_parent)
