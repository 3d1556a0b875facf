"""An event loop in a thread of its own, on which synchronous code runs coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

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

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop and wait for its result; an interrupt cancels it.

        The caller waits in steps, because an interrupt that arrives just before an endless wait
        would be noticed only after it.
        """
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            work.close()
            raise NetworkError("the connection is closed, or used from its own event loop")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
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

    def call(self, function: Callable[[], R]) -> R:
        """Run a function on the loop's thread and wait for its result."""

        async def work() -> R:
            return function()

        return self.run(work())

    def close(self) -> None:
        """Cancel all tasks of the loop, stop the loop, and wait for the thread."""
        if self._thread.is_alive():
            self.run(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
