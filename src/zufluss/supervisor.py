"""Several server processes under one: started by fork, watched, restarted, ended together.

The supervisor does nothing else: it has no threads and no event loop, so a fork of it is safe at
any time, and a child that died is replaced at once, without imports.

| event | consequence |
|---|---|
| start | the first child; when it is ready, the others; when all are ready, `on_ready` |
| a child dies | logged, started again after a pause that doubles up to `PAUSE_SECONDS_MAX` |
| a child refuses its configuration before it ever was ready | all end, with its exit code |
| SIGTERM, SIGINT | SIGINT to all but the first, then to the first; exit code 0 |
| the supervisor dies | the children see the end of a pipe, and stop as after a SIGINT |

Children lead process groups of their own: Ctrl-C reaches the supervisor alone. A child says that it
is ready by a line on its standard output, which is a pipe to the supervisor; nothing else is
written there. Files that the supervisor has locked with `flock` stay locked until the last child
has ended, because children inherit them.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

import structlog

log = structlog.get_logger(__name__)

PAUSE_SECONDS: Final = 0.2
"""The pause before a child that died is started again."""
PAUSE_SECONDS_MAX: Final = 30.0
"""The longest pause, after several deaths in a row."""
STEADY_SECONDS: Final = 60.0
"""A child that was ready for so long died for a new reason: the pauses begin anew."""
USAGE: Final = 2
"""Exit code of a process with a wrong configuration: another try would end the same way."""
READ_BYTES: Final = 65536
"""Most bytes of a child's output that are read at once."""

Serve = Callable[[int], int]
"""Runs a server until a signal, or until the pipe with this descriptor ends; the exit code."""


@dataclass(slots=True)
class Child:
    """A server process."""

    name: str
    """Its name in log lines."""
    serve: Serve
    """What it does."""
    pid: int | None = None
    """Its process, None while there is none."""
    output: int = -1
    """The supervisor's end of its standard output."""
    ready_at: float | None = None
    """When it was ready, in seconds of the monotonic clock; None while it starts."""
    was_ready: bool = False
    """Whether it was ready at least once."""
    start_at: float = 0.0
    """When it is to be started, in seconds of the monotonic clock."""
    deaths: int = 0
    """How often it died since it was ready for long."""


class Supervisor:
    """Runs children until a signal. Use one per process."""

    def __init__(self, children: Sequence[Child], on_ready: Callable[[], None]) -> None:
        """The others are started when the first child is ready, and have ended before it ends."""
        self._children = list(children)
        self._on_ready = on_ready
        self._all_were_ready = False
        self._stopping = False
        self._told: set[int] = set()
        self._exit_code = 0
        self._selector = selectors.DefaultSelector()
        self._life, self._life_end = os.pipe()
        self._wakeup, self._wakeup_end = os.pipe()
        for fd in (self._wakeup, self._wakeup_end):
            os.set_blocking(fd, False)

    def run(self) -> int:
        """Supervise until all children have ended. In a child it returns what the child returns."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._signalled)
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            for child in self._due():
                self._start(child)
                if child.pid == 0:
                    return self._be(child)
            self._wait()
            self._reap()
            if self._stopping and self._stopped():
                return self._exit_code

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._stopping = True

    # -- starting ---------------------------------------------------------------------------------

    def _due(self) -> list[Child]:
        """The children to start now."""
        if self._stopping:
            return []
        first, *others = self._children
        now = time.monotonic()
        wanted = [first, *others] if first.was_ready else [first]
        return [child for child in wanted if child.pid is None and child.start_at <= now]

    def _start(self, child: Child) -> None:
        """Fork; in the child, `child.pid` is 0 then."""
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        child.pid, child.ready_at = os.fork(), None
        if child.pid == 0:
            os.close(reader)
            child.output = writer
            return
        os.close(writer)
        child.output = reader
        self._selector.register(reader, selectors.EVENT_READ, child)

    def _be(self, child: Child) -> int:
        """Become a child: leave everything of the supervisor, and serve."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        outputs = [c.output for c in self._children if c is not child and c.output >= 0]
        for fd in (self._life_end, self._wakeup, self._wakeup_end, *outputs):
            os.close(fd)
        os.dup2(child.output, sys.stdout.fileno())
        os.close(child.output)
        return child.serve(self._life)

    # -- watching ---------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for a signal, a line of a child, or the end of a pause."""
        starts = [child.start_at for child in self._children if child.pid is None]
        pause = None
        if starts and not self._stopping and self._children[0].was_ready:
            pause = max(min(starts) - time.monotonic(), 0)
        for key, _ in self._selector.select(pause):
            data = os.read(key.fd, READ_BYTES)
            if isinstance(child := key.data, Child):
                self._heard(child, data)

    def _heard(self, child: Child, data: bytes) -> None:
        if not data:
            self._forget_output(child)
        elif child.ready_at is None:
            child.ready_at, child.was_ready = time.monotonic(), True
            log.info("server_ready", child=child.name, pid=child.pid)
            if not self._all_were_ready and all(c.was_ready for c in self._children):
                self._all_were_ready = True
                self._on_ready()

    def _forget_output(self, child: Child) -> None:
        if child.output >= 0:
            self._selector.unregister(child.output)
            os.close(child.output)
            child.output = -1

    def _reap(self) -> None:
        for child in self._children:
            if child.pid is not None:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    self._died(child, os.waitstatus_to_exitcode(status))

    def _died(self, child: Child, code: int) -> None:
        """Have a child started again, unless it ended because it should or will never run."""
        pid, child.pid = child.pid, None
        self._forget_output(child)
        if self._stopping:
            return
        if code == USAGE and not child.was_ready:
            self._stopping, self._exit_code = True, code
            return
        now = time.monotonic()
        if child.ready_at is not None and now - child.ready_at > STEADY_SECONDS:
            child.deaths = 0
        pause = min(PAUSE_SECONDS * 2**child.deaths, PAUSE_SECONDS_MAX)
        child.deaths += 1
        child.start_at = now + pause
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        log.error(
            "server_died", child=child.name, pid=pid, cause=cause, restart_in=f"{pause:.1f} s"
        )

    # -- stopping ---------------------------------------------------------------------------------

    def _stopped(self) -> bool:
        """Tell those to stop whose turn it is; whether all have ended."""
        first, *others = self._children
        alive = [child.pid for child in others if child.pid is not None]
        if not alive and first.pid is not None:
            alive = [first.pid]
        for pid in alive:
            if pid not in self._told:
                self._told.add(pid)
                os.kill(pid, signal.SIGINT)  # with SIGTERM it would hand over its buckets first
        return not alive
