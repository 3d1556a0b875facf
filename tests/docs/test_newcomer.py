"""The lines of README work for a newcomer: from a wheel, in an empty folder, without this tree.

This version of Python only; `make test-more` has the others.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import newcomer
from tests.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_lines_of_readme_work_from_a_wheel_in_an_empty_folder() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.newcomer"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "pip install zufluss" in newcomer.README.read_text()
    for step in ("python3 -m venv", "zufluss dev", "zufluss table create", "with zufluss.connect"):
        assert step in done.stdout, done.stdout


def test_a_version_that_is_nowhere_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert newcomer.interpreter("3.12", "3.11") is None


def test_a_command_on_the_path_that_does_not_run_is_no_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert newcomer.interpreter("3.12", "3.11") is None


def test_every_section_that_is_walked_has_blocks() -> None:
    sections = [section for section, _ in newcomer.sectioned_blocks()]
    assert set(newcomer.ALL_SECTIONS) <= set(sections)
