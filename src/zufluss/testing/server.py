"""A real server process for tests, users' tests included.

    with DevServer(tmp_path) as server:
        conn = zufluss.connect(server.bootstrap)

`kill` is SIGKILL, `stop` a clean stop; `start` after either uses the same data directory and, so
that clients can reconnect, the same port. Readiness is the server's own ready line, never a sleep.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

READY = re.compile(r"zufluss ready on ([^\s]+):(\d+)")
STOP_SECONDS = 60.0


class DevServer:
    """`zufluss dev` in a process of its own."""

    def __init__(
        self,
        data_dir: str | Path,
        properties: Mapping[str, str] | None = None,
        *,
        port: int = 0,
        environ: Mapping[str, str] | None = None,
        command: tuple[str, ...] = (sys.executable, "-m", "zufluss.cli.main", "dev"),
    ) -> None:
        self.data_dir = Path(data_dir)
        self.properties = dict(properties or {})
        self.port = port
        self.environ = dict(environ or {})
        self.command = command
        self.process: subprocess.Popen[str] | None = None
        self.output: deque[str] = deque(maxlen=400)
        """The last lines the server printed."""
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.running:
            self.kill()

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """The process is there."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> Self:
        """Start and wait for the ready line."""
        arguments = [*self.command, "--data-dir", str(self.data_dir)]
        if "bind.listeners" not in self.properties:
            arguments += ["--host", "127.0.0.1", "--port", str(self.port)]
        for key, value in self.properties.items():
            arguments += ["-D", f"{key}={value}"]
        self.process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.environ},
        )
        self._await_ready()
        return self

    def _await_ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))
            match = READY.search(line)
            if match:
                self.port = int(match[2])
                self._reader = threading.Thread(target=self._drain, daemon=True)
                self._reader.start()
                return
        code = self.process.wait()
        raise RuntimeError(f"the server exited with {code} before it was ready:\n{self.log()}")

    def _drain(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))

    def log(self) -> str:
        """The last lines the server printed, for messages."""
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
        code = self.process.wait(STOP_SECONDS)
        self._join()
        return code

    def wait(self) -> int:
        """Wait for the process to end by itself (a failpoint); returns the exit code."""
        assert self.process is not None
        code = self.process.wait(STOP_SECONDS)
        self._join()
        return code

    def _join(self) -> None:
        if self._reader is not None:
            self._reader.join()
            self._reader = None
