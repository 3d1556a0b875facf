"""The file layer: kill points, the pool of open files, removal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zufluss.errors import ConfigError
from zufluss.log.files import OPERATIONS, Files, KillingFiles, files_from_environment

SCRIPT = """
import sys
from pathlib import Path
from zufluss.log.files import files_from_environment
files = files_from_environment()
root = Path(sys.argv[1])
files.mkdir(root / "d")
file = files.open(root / "a", create=True)
for i in range(3):
    files.pwrite(file.fd, b"x", i)
    files.fdatasync(file.fd)
files.truncate(file.fd, 1)
files.rename(root / "a", root / "b")
files.sync_directory(root)
files.unlink(root / "b")
files.rmdir(root / "d")
"""


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_process_dies_at_the_operation_named(tmp_path: Path, operation: str) -> None:
    environment = {**os.environ, "ZUFLUSS_KILL_AT": f"{operation}#1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, check=False
    )
    assert done.returncode == -signal.SIGKILL


def test_the_count_of_a_kill_point_is_exact(tmp_path: Path) -> None:
    environment = {**os.environ, "ZUFLUSS_KILL_AT": "write#3"}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, check=False)
    assert (tmp_path / "a").read_bytes() == b"xx"


def test_without_a_kill_point_the_hot_write_has_no_wrapper() -> None:
    files = files_from_environment({})
    assert type(files) is Files
    assert files.pwrite is os.pwrite
    assert isinstance(files_from_environment({"ZUFLUSS_KILL_AT": "rename#2"}), KillingFiles)


@pytest.mark.parametrize("point", ["fdatasync", "fdatasync#0", "sneeze#1", "write#x"])
def test_a_kill_point_that_does_not_exist_is_refused(point: str) -> None:
    with pytest.raises(ConfigError, match="ZUFLUSS_KILL_AT"):
        files_from_environment({"ZUFLUSS_KILL_AT": point})


def test_the_pool_of_open_files_is_bounded(tmp_path: Path) -> None:
    files = Files(open_files_max=3)
    for i in range(10):
        (tmp_path / str(i)).write_bytes(b"x")
    held = files.cached(tmp_path / "0")
    for i in range(10):
        files.cached(tmp_path / str(i))
    assert len(files._cached) == 3
    assert os.pread(held.fd, 1, 0) == b"x"
    fd = held.fd
    del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
