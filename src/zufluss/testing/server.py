"""A real server process for tests, users' tests included.

    with DevServer(tmp_path) as server:
        conn = zufluss.connect(server.bootstrap)

`kill` is SIGKILL, `stop` a clean stop; `start` after either uses the same data directory and, so
that clients can reconnect, the same port. Readiness is the server's own ready line, never a sleep.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from zufluss.testing.process import ReadyProcess

READY = re.compile(r"zufluss ready on ([^\s]+):(\d+)")


class DevServer(ReadyProcess):
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
        super().__init__(READY, environ)
        self.data_dir = Path(data_dir)
        self.properties = dict(properties or {})
        self.port = port
        self.command = command

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients."""
        return f"127.0.0.1:{self.port}"

    def arguments(self) -> list[str]:
        """The command line."""
        arguments = [*self.command, "--data-dir", str(self.data_dir)]
        if "bind.listeners" not in self.properties:
            arguments += ["--host", "127.0.0.1", "--port", str(self.port)]
        for key, value in self.properties.items():
            arguments += ["-D", f"{key}={value}"]
        return arguments

    def became_ready(self, line: re.Match[str]) -> None:
        """The port it listens on."""
        self.port = int(line[2])
