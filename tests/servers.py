"""Servers for tests: they start quickly, on ports that stay free while they are down."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Self, TextIO

import yaml

from tests import server_fork
from tests.waiting import WAIT_SECONDS
from zufluss.testing.server import DevServer

PORTS = range(20_000, 32_000)
"""Below the range that outgoing connections use: such a port is still free after a restart, and a
client that tries to reconnect cannot by chance connect to itself."""


_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["pytest", server_fork.__name__, "tests.tiering.fault_driver"])


class WarmProcess:
    """A forked server with as much of `subprocess.Popen` as `DevServer` uses."""

    def __init__(self, arguments: list[str], environ: Mapping[str, str]) -> None:
        reader, writer = _forks.Pipe(duplex=False)
        self._process: BaseProcess = _forks.Process(
            target=server_fork.serve, args=(arguments, dict(environ), writer)
        )
        self._process.start()
        writer.close()
        self.stdout: TextIO = os.fdopen(os.dup(reader.fileno()), "r", errors="replace")
        reader.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it may have died meanwhile
                os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, which a busy fork server reports late."""
        limit = WAIT_SECONDS if timeout is None else timeout
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            self._process.join(1)
            code = self._process.exitcode
            if code is None:
                code = _exit_code(self.pid)
            if code is not None:
                return code
        raise subprocess.TimeoutExpired(f"server {self.pid}", limit)


def _exit_code(pid: int) -> int | None:
    """The exit code of a process that ended and that nobody has asked for it; else None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:  # the fork server has asked, and reports the answer
        return None
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == "Z" else None


class WarmServer(DevServer):
    """`zufluss dev`, forked from a process that has everything imported."""

    def __init__(
        self,
        data_dir: str | Path,
        properties: Mapping[str, str] | None = None,
        *,
        port: int = 0,
        environ: Mapping[str, str] | None = None,
        command: tuple[str, ...] = ("dev",),
    ) -> None:
        super().__init__(
            data_dir, properties, port=port or free_port(), environ=environ, command=command
        )

    def launch(self) -> None:
        """Start without waiting for the ready line."""
        process: Any = WarmProcess(self.arguments(), self.environ)
        self.process = process


class RoleServer(WarmServer):
    """`zufluss server --role …` with a configuration file."""

    def __init__(self, role: str, directory: Path, properties: Mapping[str, str]) -> None:
        super().__init__(directory / role, properties, command=("server", "--role", role))
        self._config = directory / f"{role}.yaml"

    def arguments(self) -> list[str]:
        """The arguments after `zufluss` on the command line."""
        settings = {
            "bind.listeners": f"FLUSS://127.0.0.1:{self.port}",
            "data.dir": str(self.data_dir),
            **self.properties,
        }
        self._config.write_text(yaml.safe_dump(settings))
        return [*self.command, "--config", str(self._config)]


class Apart(NamedTuple):
    """The roles in two processes."""

    coordinator: RoleServer
    tablet: RoleServer

    @classmethod
    def in_directory(cls, directory: Path, properties: Mapping[str, str] | None = None) -> Self:
        """Two servers with these properties, not started."""
        coordinator = RoleServer("coordinator", directory, properties or {})
        address = {"zufluss.coordinator.address": coordinator.bootstrap}
        return cls(coordinator, RoleServer("tablet", directory, {**(properties or {}), **address}))


def free_port() -> int:
    """A port that no process listens on."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
