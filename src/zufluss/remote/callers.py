"""The end of a process whose event loops were called by threads of obstore.

obstore runs its requests in threads that Python does not know, and hands each result to the event
loop with `call_soon_threadsafe`. asyncio's own loops write a byte to a socket there, without the
GIL: the loop can go on with the result, and the script can end, before the thread has the GIL
again. Python ends a thread that asks for the GIL of an interpreter that is gone; below Rust this
aborts the whole process, so a script that did all its work would exit with SIGABRT. uvloop, which
keeps the GIL meanwhile, is not affected.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
import time
from types import FrameType
from typing import Final

WAIT_SECONDS: Final = 5.0
"""Longest wait at the exit: such a call takes microseconds, unless a thread does nothing else."""
PAUSE_SECONDS: Final = 0.001

_CALL: Final = asyncio.BaseEventLoop.call_soon_threadsafe.__name__


def calling_threads() -> list[int]:
    """The ids of other threads that are in `call_soon_threadsafe` of a loop."""
    own = threading.get_ident()
    frames = sys._current_frames()
    return [ident for ident, frame in frames.items() if ident != own and _calls(frame)]


def _calls(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _CALL:
            return True
        frame = frame.f_back
    return False


@atexit.register
def _let_callers_finish() -> None:
    end = time.monotonic() + WAIT_SECONDS
    while calling_threads() and time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)
