"""Executors whose threads run before they are needed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import pytest

from tests.waiting import WAIT_SECONDS
from zufluss import threads
from zufluss.errors import ErrorCode
from zufluss.threads import Threads, ThreadShortageError, check_start, running_executor

ORIGINAL_START = threading.Thread.start


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def started_twice(error: Exception) -> Callable[[threading.Thread], None]:
    """`Thread.start` that starts two threads, then raises an error."""
    start, left = ORIGINAL_START, [1, 2]

    def start_or_raise(thread: threading.Thread) -> None:
        if not left:
            raise error
        left.pop()
        start(thread)

    return start_or_raise


@pytest.fixture
def reserve(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An empty reserve of this test."""
    empty: list[Any] = []
    monkeypatch.setattr(threads, "_reserve", empty)
    return empty


@pytest.mark.usefixtures("reserve")
def test_all_threads_run_when_the_executor_was_created(monkeypatch: pytest.MonkeyPatch) -> None:
    with Threads(3, "three") as three:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        together = threading.Barrier(3)
        calls = [three.submit(together.wait, 60) for _ in range(3)]
        assert sorted(call.result(60) for call in calls) == [0, 1, 2]


@pytest.mark.usefixtures("reserve")
def test_threads_that_cannot_be_started_are_a_shortage_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    for create in (lambda: Threads(1, "one"), running_executor, threads.fill_reserve):
        with pytest.raises(ThreadShortageError, match="ulimit -u") as refused:
            create()
        assert refused.value.code == ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION
        assert refused.value.retriable
    monkeypatch.setattr(threading.Thread, "start", started_twice(MemoryError()))
    with pytest.raises(ThreadShortageError, match="MemoryError"):
        running_executor()
    for thread in threading.enumerate():
        if thread.name.startswith("zufluss-thread"):
            thread.join(60)
            assert not thread.is_alive(), "the interpreter would wait for it when it exits"
    monkeypatch.setattr("_thread.start_new_thread", no_thread)
    with pytest.raises(ThreadShortageError):
        check_start()


def test_threads_of_an_executor_that_was_shut_down_serve_the_next_one(
    reserve: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Threads(2, "first")
    first.shutdown()
    assert len(reserve) == 2
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with Threads(2, "second") as second:
        name = second.submit(lambda: threading.current_thread().name).result(60)
    assert name.startswith("second_")
    with pytest.raises(RuntimeError, match="shut down"):
        first.submit(int)


@pytest.mark.usefixtures("reserve")
def test_calls_that_wait_are_cancelled_on_request() -> None:
    begin, begun = threading.Event(), threading.Event()
    one = Threads(1, "one")

    def wait() -> bool:
        begun.set()
        return begin.wait(60)

    running = one.submit(wait)
    begun.wait(60)
    waiting: Future[int] = one.submit(int)
    one.shutdown(wait=False, cancel_futures=True)
    begin.set()
    assert running.result(60)
    assert waiting.cancelled()


@pytest.mark.usefixtures("reserve")
def test_a_callback_that_ends_its_thread_does_not_end_the_executor() -> None:
    def leave(_: Future[Any]) -> None:
        raise SystemExit

    begin = threading.Event()
    with Threads(1, "one") as one:
        call = one.submit(begin.wait, 60)
        call.add_done_callback(leave)
        begin.set()
        assert call.result(60)
        assert one.submit(lambda: "next").result(60) == "next"


@pytest.mark.usefixtures("reserve")
def test_a_call_that_was_taken_while_the_executor_was_shut_down_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closers: list[threading.Thread] = []

    class SlowQueue(SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            if isinstance(item, tuple) and isinstance(item[0], Future):
                closers.append(threading.Thread(target=one.shutdown))
                closers[0].start()
                closers[0].join(0.2)  # enough for a shutdown that does not wait for this call
            super().put(item, block, timeout)

    monkeypatch.setattr(threads, "SimpleQueue", SlowQueue)
    one = Threads(1, "one")
    assert one.submit(lambda: "made").result(10) == "made"
    closers[0].join(60)
    assert not closers[0].is_alive()


@pytest.mark.usefixtures("reserve")
def test_an_error_of_a_call_is_that_of_its_future() -> None:
    with Threads(1, "one") as one, pytest.raises(ZeroDivisionError):
        one.submit(lambda: 1 // 0).result(60)


def test_the_interpreter_waits_for_calls_that_return_and_not_for_those_that_may_hang() -> None:
    program = """if True:
        import threading, time
        from zufluss.threads import Threads
        short, hung = Threads(2, "short"), Threads(1, "hung", may_hang=True)
        hung.submit(threading.Event().wait)
        begun = threading.Event()
        short.submit(lambda: (begun.set(), time.sleep(0.1), print("done", flush=True)))
        begun.wait()
    """
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
