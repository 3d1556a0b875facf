"""Runs the real command, and a real server process for it."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog

from zufluss.cli.main import main

COMMAND = [sys.executable, "-m", "zufluss.cli.main"]
READY = "zufluss ready on "


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """The environment of this process without our own variables."""
    return {key: value for key, value in os.environ.items() if not key.startswith("ZUFLUSS_")}


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Result]]:
    """Runs the command in this process, optionally with text on stdin."""
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    for name, value in {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)

    def run_command(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["zufluss", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return Result(int(end.value.code or 0), out, err)

    handlers, level = logging.root.handlers[:], logging.root.level
    yield run_command
    logging.root.handlers[:], logging.root.level = handlers, level
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def server_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `zufluss dev` process that serves all tests of the session."""
    data_dir = tmp_path_factory.mktemp("cli-server")
    with start_dev(data_dir) as (process, address):
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


class start_dev:
    """A `zufluss dev` process on a free port; killed at the end if it still runs."""

    def __init__(self, data_dir: Path, *arguments: str) -> None:
        self._command = [*COMMAND, "dev", "--port", "0", "--data-dir", str(data_dir), *arguments]
        self._log = (data_dir / "stderr.log").open("wb")

    def __enter__(self) -> tuple[subprocess.Popen[str], str]:
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(),
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(READY):
            self.__exit__()
            pytest.fail(f"no ready line but {line!r}: {Path(self._log.name).read_text()}")
        return self._process, line.removeprefix(READY).split()[0]

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
