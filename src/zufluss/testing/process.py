"""A child process that says when it is ready: what `DevServer` and `TieringProcess` share.

Readiness is a line the process prints, never a sleep; its last lines are kept for messages.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

STOP_SECONDS = 300.0
"""A process that takes longer to end hangs; a loaded machine may take long to write what it has."""


class ReadyProcess:
    """A process that is up once it has printed its ready line; it leads a session of its own."""

    def __init__(self, ready: re.Pattern[str], environ: Mapping[str, str] | None = None) -> None:
        self.environ = dict(environ or {})
        self.process: subprocess.Popen[str] | None = None
        self.output: deque[str] = deque(maxlen=400)
        """The last lines the process printed."""
        self._ready = ready
        self._reader: threading.Thread | None = None

    def __exit__(self, *exc: object) -> None:
        if self.running:
            self.kill()

    def start(self) -> Self:
        """Start and wait for the ready line."""
        self.launch()
        self.await_ready()
        return self

    def launch(self) -> None:
        """Start without waiting."""
        self.process = subprocess.Popen(
            self.arguments(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.environ},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def arguments(self) -> Sequence[str]:
        """The command line."""
        raise NotImplementedError

    def became_ready(self, line: re.Match[str]) -> None:
        """The ready line was printed."""

    @property
    def running(self) -> bool:
        """Whether the process exists."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process is not None
        return self.process.pid

    def await_ready(self) -> None:
        """Wait for the ready line of a process that was launched."""
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))
            match = self._ready.search(line)
            if match:
                self.became_ready(match)
                self._reader = threading.Thread(target=self._drain, daemon=True)
                self._reader.start()
                return
        code = self.process.wait()
        raise RuntimeError(f"the process exited with {code} before it was ready:\n{self.log()}")

    def _drain(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))

    def log(self) -> str:
        """The last lines the process printed, for messages."""
        return "\n".join(self.output)

    def kill(self) -> None:
        """SIGKILL: no chance to clean up."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._join()

    def stop(self) -> int:
        """SIGTERM and wait; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for the process to end by itself (a failpoint); returns the exit code.

        One that hangs is killed; `RuntimeError` says what it printed.
        """
        assert self.process is not None
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(
                f"the process did not end within {STOP_SECONDS:.0f} s:\n{self.log()}"
            ) from None
        self._join()
        return code

    def _join(self) -> None:
        if self._reader is not None:
            self._reader.join()
            self._reader = None
