"""A real tiering service process for tests: `zufluss tiering` with its JVM and Python workers.

    with DevServer(tmp_path, {"datalake.format": "iceberg"}) as server:
        with TieringProcess(server.bootstrap) as service:
            ...

`kill` takes the whole job down in one instant, driver, JVM and workers; `stop` is graceful.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from zufluss.testing.process import ReadyProcess

READY = re.compile(r"zufluss tiering ready")


class TieringProcess(ReadyProcess):
    """`zufluss tiering` in a process group of its own."""

    def __init__(
        self,
        bootstrap: str,
        options: Mapping[str, str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        command: tuple[str, ...] = (sys.executable, "-m", "zufluss.cli.main", "tiering"),
    ) -> None:
        super().__init__(READY, environ)
        self.options = {"fluss.bootstrap.servers": bootstrap, **(options or {})}
        self.command = command

    def arguments(self) -> list[str]:
        """The command line."""
        return [*self.command, *(f"--{key}={value}" for key, value in self.options.items())]

    def kill(self) -> None:
        """SIGKILL for everything it started."""
        os.killpg(self.pid, signal.SIGKILL)
        super().kill()

    def pids(self) -> list[int]:
        """The process and everything below it, as it is now."""
        return [self.pid, *descendants(self.pid)]


def descendants(pid: int) -> list[int]:
    """The processes below one, at any depth."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended in this moment
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    pids: list[int] = []
    pending = [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        pids += children
        pending += children
    return pids
