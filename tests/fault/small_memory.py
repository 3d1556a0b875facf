"""A container with little memory: a control group of Linux, gone with the test.

The group is created below that of the test, in version 1 or 2 of the interface. That needs
privileges; without them the test is skipped and says why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers import free_port
from tests.waiting import eventually
from zufluss.replica.memory_limit import GROUPS
from zufluss.testing.server import DevServer

JOIN = 'echo $$ > "$0" && exec "$@"'
"""A shell that enters a group and becomes another command."""


@dataclass(frozen=True, slots=True)
class SmallMemory:
    """A control group with a limit of memory."""

    path: Path

    def server(self, data_dir: Path, properties: dict[str, str]) -> DevServer:
        """A server in this group."""
        command = ("sh", "-c", JOIN, str(self.path / "cgroup.procs"))
        command += (sys.executable, "-m", "zufluss.cli.main", "dev")
        return DevServer(data_dir, properties, port=free_port(), command=command)


@contextmanager
def small_memory(size: int) -> Iterator[SmallMemory]:
    """A group of processes that have `size` bytes together, for the length of a block."""
    first = GROUPS / "memory"  # version 1
    root, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (GROUPS, "memory.max")
    path = root / f"zufluss-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as e:
        pytest.skip(f"a control group cannot be created here: {e}")
    try:
        try:
            (path / limit).write_text(str(size))
        except OSError as e:
            pytest.skip(f"the memory of a control group cannot be limited here: {e}")
        yield SmallMemory(path)
    finally:
        eventually(lambda: not (path / "cgroup.procs").read_text(), "the group is empty")
        path.rmdir()
