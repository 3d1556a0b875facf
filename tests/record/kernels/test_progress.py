"""What is shown while kernels are compiled, once per install."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from zufluss.record.kernels.progress import Display

KERNEL = """
import sys
import numba
from zufluss.record.kernels import library, types
library.ignore()
from zufluss.record.kernels.cache import kernel

settings = {name: getattr(numba.config, name) for name in dir(numba.config) if name.isupper()}

@kernel(types.int64(types.int64))
def next_number(number):
    return number + 1

assert next_number(1) == 2
assert settings == {name: getattr(numba.config, name) for name in settings}, "changed settings"
print(sum(next_number.stats.cache_hits.values()))
"""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_is_removed_at_the_end() -> None:
    terminal = Terminal()
    display = Display(terminal, total=3)
    for _ in range(3):
        display.begin()
    display.clear()
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown[1:4] == [f"compiling {i} of 3 kernels, once per install …" for i in (1, 2, 3)]
    assert shown[4:] == [""]
    assert "\n" not in terminal.getvalue()


def test_a_file_gets_a_few_lines() -> None:
    file = io.StringIO()
    display = Display(file, total=95)
    for _ in range(95):
        display.begin()
    display.clear()
    counts = [int(line.split()[1]) for line in file.getvalue().splitlines()]
    assert counts == [1, 2, 4, 8, 16, 32, 64, 95]


def test_progress_is_shown_at_the_first_start_only_and_settings_of_numba_stay(
    tmp_path: Path,
) -> None:
    (tmp_path / "one_kernel.py").write_text(KERNEL)

    def run() -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", "import one_kernel"],
            env={
                **os.environ,
                "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
                "PYTHONPATH": str(tmp_path),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip(), done.stderr

    assert run() == ("0", "compiling kernel 1, once per install …\n")
    assert list(tmp_path.glob("cache/kernels-*/**/*.nbi"))
    assert run() == ("1", "")
