"""Threads that run before they are needed.

Starting a thread can fail: for memory, for a limit of the process or of its container. Python may
even wait for ever, because `Thread.start` waits for a word of the new thread, which never comes if
the thread runs out of memory first. So all threads of `Threads` run when it has been created, and
a server creates its executors before it is ready. Threads that are needed later, for the first
primary-key table or for work that comes and goes, such as rebuilding a state or reading a new
location, are taken from a reserve, which is filled when the server starts (`fill_reserve`), and
return to it. Only if the reserve is empty, one is started; and one for each HTTP request, which no
other part of the server waits for.

The threads are daemons, because a call may never return: the interpreter waits for the threads of
an ordinary executor when it exits, so one disk that hangs would keep a server from stopping. An
executor whose calls do return is waited for at the exit; `may_hang` says that they may not.
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from zufluss.errors import StorageBackpressureError
from zufluss.system import after_fork_in_child

T = TypeVar("T")

RESERVE: Final = 24
"""Threads that wait for later work: 2 for the memory of primary-key tables, from the first one on;
4 for each location that is a directory, 4 for requests of tokens, 3 for each state that is rebuilt,
1 for each bucket that is opened again."""


class ThreadShortageError(StorageBackpressureError, RuntimeError):
    """A thread could not be started; one may be later."""


class _Task(NamedTuple):
    future: Future[Any]
    call: Callable[[], Any]


_Queue = SimpleQueue[_Task | None]
"""Work of an executor; None ends one of its threads."""


class Threads(Executor):
    """An executor of `count` threads, all of which run."""

    def __init__(self, count: int, name: str, *, may_hang: bool = False) -> None:
        """Raises `ThreadShortageError` if a thread cannot be started."""
        self._count = count
        self._work: _Queue = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        """An item for each thread that has ended."""
        self._closed = False
        self._closing = threading.Lock()
        """Held while work is added: nothing comes behind the items that end the threads."""
        self._end = weakref.finalize(self, _end_threads, self._work, count)
        self._end.atexit = False
        for number in range(count):
            try:
                _take(_Assignment(f"{name}_{number}", self._work, self._ended))
            except ThreadShortageError:
                self._end()
                raise
        if not may_hang:
            _awaited.add(self)

    def submit(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Call a function in one of the threads."""
        future: Future[T] = Future()
        task = _Task(future, lambda: call(*arguments, **named))
        with self._closing:
            if self._closed:
                raise RuntimeError("this executor was shut down")
            self._work.put(task)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; the threads return to the reserve after those submitted so far."""
        cancelled: list[_Task] = []
        with self._closing:
            if not self._closed:
                self._closed = True
                if cancel_futures:
                    cancelled = self._waiting()
                self._end.detach()  # it does nothing while the interpreter exits
                _end_threads(self._work, self._count)
        for task in cancelled:  # without the lock: somebody may be called back
            task.future.cancel()
        if wait:
            for _ in range(self._count):
                self._ended.get()
            self._count = 0

    def _waiting(self) -> list[_Task]:
        """Take the tasks that have not begun."""
        tasks: list[_Task] = []
        with suppress(Empty):
            while (task := self._work.get_nowait()) is not None:
                tasks.append(task)
        return tasks


class _Assignment(NamedTuple):
    """The work of a thread, until it is taken by another executor."""

    name: str
    work: _Queue
    ended: SimpleQueue[None]


class _ReservedThread(threading.Thread):
    """A thread that serves one executor after the other."""

    def __init__(self) -> None:
        super().__init__(name="zufluss-reserve", daemon=True)
        self.assignments: SimpleQueue[_Assignment] = SimpleQueue()

    def run(self) -> None:
        while True:
            name, work, ended = self.assignments.get()
            self.name = name
            kept = False
            try:
                _serve(work)
                self.name = "zufluss-reserve"
                if len(_reserve) < RESERVE:
                    _reserve.append(self)
                    kept = True
            finally:
                ended.put(None)
            if not kept:
                return
            del work, ended


_reserve: list[_ReservedThread] = []
_awaited: weakref.WeakSet[Threads] = weakref.WeakSet()


def fill_reserve() -> None:
    """Start threads until the reserve is full; raises `ThreadShortageError`."""
    while len(_reserve) < RESERVE:
        _reserve.append(_started())


def running_executor() -> ThreadPoolExecutor:
    """An executor for `asyncio.to_thread`, all of whose threads run.

    An event loop takes no other kind. Raises `ThreadShortageError`.
    """
    count = min(32, (os.cpu_count() or 1) + 4)
    executor = ThreadPoolExecutor(count, thread_name_prefix="zufluss-thread")
    together = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            executor.submit(together.wait)
        together.wait()
    except BaseException as e:
        together.abort()  # the interpreter waits for these threads when it exits
        executor.shutdown(wait=False)
        if isinstance(e, RuntimeError | MemoryError):
            raise _shortage(e) from e
        raise
    return executor


def start(thread: threading.Thread) -> None:
    """Start a thread; raises `ThreadShortageError`."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as e:
        raise _shortage(e) from e


def check_start() -> None:
    """Raise `ThreadShortageError` if no thread can be started at present.

    For libraries that end the process if they cannot start one.
    """
    try:
        _thread.start_new_thread(int, ())  # unlike `Thread.start`, this does not wait for it
    except (RuntimeError, MemoryError) as e:
        raise _shortage(e) from e


def _take(assignment: _Assignment) -> None:
    try:
        thread = _reserve.pop()
    except IndexError:
        thread = _started()
    thread.assignments.put(assignment)


def _started() -> _ReservedThread:
    thread = _ReservedThread()
    start(thread)
    return thread


def _shortage(error: Exception) -> ThreadShortageError:
    return ThreadShortageError(
        f"a thread cannot be started ({error!r}) beside {threading.active_count()} others; allow "
        "the process more threads and memory (ulimit -u, ulimit -v, pids.max of its container)"
    )


def _serve(work: _Queue) -> None:
    while (task := work.get()) is not None:
        try:
            _run(*task)
        except BaseException:  # of a callback; the thread has to serve the others
            with suppress(MemoryError):
                import structlog  # it loads asyncio, which the flush process does without

                structlog.get_logger(__name__).exception("callback_failed")
        del task


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as problem:
        future.set_exception(problem)
        del future, call  # the traceback of the problem has this frame
    else:
        future.set_result(result)


def _end_threads(work: _Queue, count: int) -> None:
    for _ in range(count):
        work.put(None)


def _wait_at_exit() -> None:
    """Let no thread be in the middle of something when the interpreter goes."""
    for threads in list(_awaited):
        threads.shutdown(cancel_futures=True)


def _forget_threads() -> None:
    """A forked process has none of the threads."""
    _reserve.clear()
    _awaited.clear()


atexit.register(_wait_at_exit)
after_fork_in_child(_forget_threads)
