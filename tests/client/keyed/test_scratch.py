"""Temporary directories: removed on close, on garbage collection, and after a kill."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zufluss.client.keyed.scratch import LEFT_OVER_SECONDS, Scratch, remove_left_over
from zufluss.clock import wall_ms

PREFIX = "zufluss-test-"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make_old(path: Path) -> None:
    """Set the times of a directory as if it were old."""
    then = path.stat().st_mtime - 2 * LEFT_OVER_SECONDS
    os.utime(path, (then, then))


def killed(place: Path) -> Path:
    """The directory that a killed process leaves behind."""
    code = (
        "import os, signal; from zufluss.client.keyed.scratch import Scratch; "
        f"scratch = Scratch({PREFIX!r}); (scratch.path / 'file').write_text('x'); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(place)})
    (left,) = place.iterdir()
    return left


def forget() -> None:
    Scratch(PREFIX)
    gc.collect()


def test_a_closed_directory_is_removed_with_its_files(place: Path) -> None:
    scratch = Scratch(PREFIX)
    (scratch.path / "directory").mkdir()
    (scratch.path / "directory" / "file").write_text("x")
    scratch.close()
    assert list(place.iterdir()) == []


def test_a_garbage_collected_directory_is_removed(place: Path) -> None:
    with pytest.warns(ResourceWarning, match="Implicitly cleaning up"):
        forget()
    assert list(place.iterdir()) == []


def test_the_directory_of_a_killed_process_is_removed_by_the_next_process(place: Path) -> None:
    left = killed(place)
    remove_left_over(PREFIX, wall_ms())
    assert left.is_dir(), "it may just be made"
    make_old(left)
    scratch = Scratch(PREFIX)
    assert list(place.iterdir()) == [scratch.path]
    scratch.close()


def test_a_directory_in_use_stays_however_old_it_is(place: Path) -> None:
    scratch = Scratch(PREFIX)
    make_old(scratch.path)
    other = place / "zufluss-other-1"
    other.mkdir()
    make_old(other)
    remove_left_over(PREFIX, wall_ms())
    assert sorted(place.iterdir()) == sorted([scratch.path, other])
    scratch.close()
