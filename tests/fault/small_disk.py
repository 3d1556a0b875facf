"""A disk of a few megabytes: a tmpfs in a mount namespace of its own, gone with the test.

A process holds the namespace; servers are started inside of it with nsenter, and the test reaches
the same files through `/proc`. Making a namespace and mounting needs privileges; without them the
test is skipped and says why.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import pytest

from tests.servers import free_port
from zufluss.testing.server import DevServer


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A file system with little space."""

    path: Path
    """Where it is mounted, seen from inside."""
    holder: int
    """The process whose mount namespace it is in."""

    @property
    def outside(self) -> Path:
        """The same directory for everybody else."""
        return Path(f"/proc/{self.holder}/root{self.path}")

    @property
    def _filler(self) -> Path:
        return self.outside / "filler"

    def fill(self, leave: int) -> None:
        """Take all space but `leave` bytes."""
        self.free()
        with self._filler.open("wb", buffering=0) as file:
            while _fits(file):
                pass
            file.truncate(max(0, file.tell() - leave))

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)

    def server(self, properties: dict[str, str]) -> DevServer:
        """A server on this disk."""
        command = ("nsenter", "-t", str(self.holder), "-m")
        command += (sys.executable, "-m", "zufluss.cli.main", "dev")
        return DevServer(self.path / "data", properties, port=free_port(), command=command)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[SmallDisk]:
    """A disk of `size` mounted at `path`, for the length of a block."""
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        pytest.skip("unshare and nsenter (util-linux) are not installed; they make the small disk")
    path.mkdir()
    script = f"mount -t tmpfs -o size={size} none {path} && echo mounted && exec sleep infinity"
    holder = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert holder.stdout is not None
        answer = holder.stdout.readline()
        if answer != "mounted\n":
            pytest.skip(f"a mount namespace with a tmpfs is not allowed here: {answer.strip()}")
        yield SmallDisk(path, holder.pid)
    finally:
        holder.kill()
        holder.wait()


def _fits(file: RawIOBase) -> bool:
    try:
        return file.write(bytes(4096)) == 4096
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        return False
