"""An event loop in a thread of its own, on which synchronous code runs coroutines.

The thread is a daemon, so that it does not keep a program alive. `sync/exit.py` ends it before the
interpreter does: a thread that still runs compiled code while the interpreter is torn down crashes
the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from zufluss.client.sync import exit
from zufluss.errors import NetworkError

R = TypeVar("R")

INTERRUPT_SECONDS: Final = 0.5
"""A waiting caller wakes up this often, so that it notices an interrupt."""


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="zufluss-client", daemon=True)
        self._thread.start()
        self.forked = False
        """Whether this process was forked since; the thread runs in the parent only."""
        exit.THREADS.add(self)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop and wait for its result; an interrupt cancels it.

        The caller waits in steps, because an interrupt that arrives just before an endless wait
        would be noticed only after it.
        """
        future = self.start(work)
        try:
            while True:
                try:
                    return future.result(INTERRUPT_SECONDS)
                except TimeoutError:
                    if future.done():  # the coroutine raised it, or ended just now
                        return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def start(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Start a coroutine on the loop; the future is for another thread."""
        if not self.alive or threading.current_thread() is self._thread:
            work.close()
            if self.forked:
                raise NetworkError(
                    "the connection belongs to the process that forked this one; connect after "
                    "the fork"
                )
            raise NetworkError("the connection is closed, or used from its own event loop")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], R]) -> R:
        """Run a function on the loop's thread and wait for its result."""

        async def work() -> R:
            return function()

        return self.run(work())

    def close(self) -> None:
        """Cancel all tasks of the loop, stop the loop, and wait for the thread."""
        if self._thread.is_alive():
            self.run(exit.cancel_others())
            self.stop()
        exit.THREADS.discard(self)

    def stop(self, timeout: float | None = None) -> None:
        """Stop the loop as it is, and wait for the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
