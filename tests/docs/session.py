"""Runs the Python blocks of a page in one interpreter, as in a notebook: imports take time once.

A block that imports zufluss begins with an empty namespace, because a reader may start there;
other blocks continue the block before them.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from scripts.pages import Block, PageError
from tests.paths import ROOT

BEGINS = re.compile(r"^import zufluss", re.M)


class PythonSession:
    """An interpreter in a process of its own, started with its first block."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self._directory = directory
        self._environ = {**environ, "PYTHONPATH": str(ROOT)}
        self._process: subprocess.Popen[str] | None = None

    def run(self, block: Block, code: str) -> str:
        """Run the code of a block and return what it printed."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                cwd=self._directory,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([block.place, code]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise PageError(f"{block.place} ended the interpreter with {self._process.wait()}")
        printed, problem = json.loads(answer)
        if problem is not None:
            raise PageError(f"{block.place} failed:\n{printed}{problem}")
        return str(printed)

    def close(self) -> int:
        """End the interpreter and return its exit code."""
        if self._process is None:
            return 0
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()


def serve() -> None:
    """Run blocks from stdin, one JSON document per line, and answer each with one line."""
    answers = sys.stdout
    namespace: dict[str, Any] = {}
    for line in sys.stdin:
        place, code = json.loads(line)
        if BEGINS.search(code):
            namespace = {"__name__": "__main__"}
        printed, problem = io.StringIO(), None
        try:
            with redirect_stdout(printed):
                exec(compile(code, place, "exec"), namespace)
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps([printed.getvalue(), problem]), file=answers, flush=True)


if __name__ == "__main__":
    serve()
