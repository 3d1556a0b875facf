"""Reads the code blocks of the pages and runs the shell blocks; for tests/docs and newcomer.py.

A comment in the line before a block says how the block is run:

| comment                    | the block                                                          |
|----------------------------|--------------------------------------------------------------------|
| none                       | is run, and has to succeed                                         |
| `<!-- until stopped -->`   | is one command that runs until the end of the page, then Ctrl-C    |
| `<!-- not run: reason -->` | is not run                                                         |

What stands behind a `print(…)` as a comment is what it prints; `…` in it stands for any text.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- (?P<how>[^\n]*) -->\n)?^```(?P<language>sh|python)\n(?P<code>.*?)^```$", re.M | re.S
)
_PRINT = re.compile(r"^ *print\(.*?\)(?:  # (.*))?$", re.M)
UNTIL_STOPPED = "until stopped"
NOT_RUN = "not run: "
STOP_SECONDS = 120
"""How long a command may take to end after Ctrl-C."""
POLL_SECONDS = 0.05
INTERRUPTED = (0, 130, -signal.SIGINT)
"""Exit codes of a command that Ctrl-C ended."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    place: str
    """The page and the line, for messages."""
    language: str
    code: str
    until_stopped: bool
    """Whether the block runs until the end of the page."""
    not_run: str | None
    """Why the block is not run; None if it is."""

    def check_printed(self, printed: str) -> None:
        """Raise unless the block printed what its comments say.

        When every `print` has a comment, nothing else may be printed; otherwise the lines of the
        comments have to be among the printed ones, in this order.
        """
        comments = [match[1] for match in _PRINT.finditer(self.code)]
        expected = [comment for comment in comments if comment]
        patterns = [re.escape(line).replace("…", ".*") for line in expected]
        lines = iter(printed.splitlines())
        fits = all(any(re.fullmatch(p, line) for line in lines) for p in patterns)
        complete = len(expected) == len(comments) > 0
        if not fits or (complete and printed.count("\n") != len(expected)):
            wanted = "\n".join(expected)
            raise PageError(f"{self.place} should print\n{wanted}\nand printed\n{printed}")


class PageError(Exception):
    """A block of a page does not do what the page says."""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the shell and Python blocks of a page."""
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        how = match["how"] or ""
        yield Block(
            place=f"{page.name}:{line}",
            language=match["language"],
            code=match["code"],
            until_stopped=how == UNTIL_STOPPED,
            not_run=how.removeprefix(NOT_RUN) if how.startswith(NOT_RUN) else None,
        )


def fenced(page: Path, language: str) -> list[str]:
    """Return the text of the blocks of a page in one language, such as yaml."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


@dataclass(frozen=True, slots=True)
class StartedBlock:
    """A block that runs until its terminal is closed."""

    place: str
    process: subprocess.Popen[bytes]
    output: Path


class Terminal:
    """Runs shell blocks in one directory; variables that a block sets are there in the next one."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self.directory = directory
        self.environ = dict(environ)
        """The variables of the next block."""
        self._state = directory / ".environment"
        self._running: list[StartedBlock] = []

    def run(self, place: str, code: str) -> str:
        """Run a block until it ends and return its output; raises `PageError` if a line fails."""
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", f'{code}\nenv -0 > "{self._state}"'],
            cwd=self.directory,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise PageError(f"{place} ended with {done.returncode}:\n{code}\n{done.stdout}")
        variables = self._state.read_text().split("\0")[:-1]
        self.environ = dict(variable.split("=", 1) for variable in variables)
        return done.stdout

    def start(self, place: str, code: str, ready: str = "") -> None:
        """Start a block that runs until the terminal is closed; wait until it prints `ready`."""
        output = self.directory / f".output-{len(self._running)}"
        with output.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {code}"],
                cwd=self.directory,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(StartedBlock(place, process, output))
        while ready not in output.read_text():
            if process.poll() is not None:
                raise PageError(f"{place} ended with {process.returncode}:\n{output.read_text()}")
            time.sleep(POLL_SECONDS)

    def processor_seconds(self) -> float:
        """Return the processor time of the block that was started last, without its children."""
        stat = Path(f"/proc/{self._running[-1].process.pid}/stat").read_text()
        user, system = stat.rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the started blocks with Ctrl-C, the last one first; raises if one ended otherwise."""
        problems = []
        while self._running:
            block = self._running.pop()
            block.process.send_signal(signal.SIGINT)
            try:
                block.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(block.process.pid, signal.SIGKILL)
                block.process.wait()
            code, output = block.process.returncode, block.output.read_text()
            if code not in INTERRUPTED or "Traceback" in output:
                problems.append(f"{block.place} ended with {code}:\n{output}")
        if problems:
            raise PageError("\n".join(problems))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
