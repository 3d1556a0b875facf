"""Runs the real command, and a real server process for it."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog

from tests.waiting import WAIT_SECONDS
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
    with started("dev", data_dir=tmp_path_factory.mktemp("cli-server")) as (process, address):
        yield address
        stop_cleanly(process)


@pytest.fixture
def zufluss(run: Callable[..., Result], server_address: str) -> Callable[..., Result]:
    """Runs a command against the server and expects it to succeed unless told otherwise."""

    def run_against_server(*arguments: str, stdin: str = "", code: int = 0) -> Result:
        result = run(*arguments, "--bootstrap", server_address, stdin=stdin)
        assert result.code == code, result
        return result

    return run_against_server


@contextmanager
def started(
    *arguments: str, data_dir: Path, port: int = 0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process that is ready, and its address; killed at the end if it still runs."""
    settings = [f"data.dir={data_dir}", f"bind.listeners=FLUSS://localhost:{port}"]
    command = [*COMMAND, *arguments, *(part for setting in settings for part in ("-D", setting))]
    log_path = data_dir / "stderr.log"
    with (
        log_path.open("ab") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=environment(), text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(READY), log_path.read_text()
            yield process, line.removeprefix(READY).split()[0]
        finally:
            process.kill()


def stop_cleanly(process: subprocess.Popen[str]) -> None:
    """SIGTERM, and nothing else, ends the server with success."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_SECONDS) == 0
