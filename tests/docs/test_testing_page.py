"""docs/testing.md does what it says: its files are written to a directory and run there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.paths import DOCS


def test_the_files_of_the_page_run_as_they_are_written(tmp_path: Path) -> None:
    page = (DOCS / "testing.md").read_text()
    files = dict(re.findall(r"^```python\n# ([\w.]+)\n(.*?)^```$", page, re.M | re.S))
    assert list(files) == ["conftest.py", "test_orders.py", "script.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    tests = _run(tmp_path, "-m", "pytest", *options)
    assert "1 passed" in tests.stdout, tests.stdout + tests.stderr
    script = _run(tmp_path, "script.py")
    assert script.stdout.strip() == "['fluss']", script.stderr


def _run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_the_fixtures_of_the_page_are_those_there_are() -> None:
    import zufluss.testing.fixtures as module

    page = (DOCS / "testing.md").read_text()
    listed = set(re.findall(r"^\| `(zufluss_\w+)` \|", page, re.M))
    assert listed == {name for name in dir(module) if name.startswith("zufluss_")}
