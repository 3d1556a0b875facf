"""Processes that compile kernels, and what happens when they fail."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from zufluss.record import kernels
from zufluss.record.kernels import library
from zufluss.record.kernels.compile import workers


def test_failing_workers_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    false = shutil.which("false")
    assert false is not None
    for executable, reason in (
        (false, "it ended with 1"),
        (str(tmp_path / "none"), "No such file"),
    ):
        monkeypatch.setattr(sys, "executable", executable)
        workers.compile_in_parallel(os.environ)
        lines = capsys.readouterr().err.splitlines()
        assert lines
        for line in lines:
            assert line.startswith("a process that compiles kernels failed: ")
            assert reason in line


def test_kernels_count_as_compiled_only_after_all_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If workers died, the modules compile their kernels themselves, and may fail, too."""

    def die(environ: Mapping[str, str]) -> None:
        assert environ["NUMBA_CACHE_DIR"]

    complete = tmp_path / "complete"
    monkeypatch.setattr(kernels, "_complete", lambda: complete)
    monkeypatch.setattr(workers, "compile_in_parallel", die)
    monkeypatch.setattr(library, "functions", lambda: None)
    monkeypatch.setattr(library, "kernel_modules", lambda: ("zufluss.does_not_compile",))
    with pytest.raises(ModuleNotFoundError):
        kernels.warm()
    assert not complete.exists()
    monkeypatch.setattr(library, "kernel_modules", lambda: ("zufluss.record.kernels.library",))
    kernels.warm()
    assert complete.exists()
