"""An executor for calls that may never return, such as reads from a file system that hangs.

The interpreter waits for the threads of an ordinary executor when it exits, so one hung disk would
keep a server from stopping. Threads of this executor are daemons. They end when the executor is
garbage-collected.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Threads(Executor):
    """An executor of at most `count` threads, which are started when there is work."""

    def __init__(self, count: int) -> None:
        self._unused = count
        self._lock = threading.Lock()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._end = weakref.finalize(self, _end_threads, self._work, count)
        self._end.atexit = False

    def submit(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Call a function in one of the threads."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*arguments, **named))
                except BaseException as problem:
                    future.set_exception(problem)

        self._work.put(run)
        with self._lock:
            if self._unused:
                self._unused -= 1
                threading.Thread(target=_serve, args=(self._work,), daemon=True).start()
        return future


def _serve(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := work.get()) is not None:
        run()
        del run


def _end_threads(work: SimpleQueue[Callable[[], None] | None], count: int) -> None:
    for _ in range(count):
        work.put(None)
