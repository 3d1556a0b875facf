"""What the module of the operating system does where something is missing or refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from zufluss import system


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that `os.fsync` was called with."""
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    return calls


def drive(answer: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `F_FULLFSYNC` have this effect."""
    monkeypatch.setattr(system, "_fcntl", SimpleNamespace(fcntl=answer))
    system._warn_of_weak_sync.cache_clear()


def test_a_file_system_without_full_syncs_gets_plain_ones_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, synced: list[int]
) -> None:
    def refuse(fd: int, command: int) -> int:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    drive(refuse, monkeypatch)
    with capture_logs() as lines:
        system._full_sync(7)
        system._full_sync(8)
    assert synced == [7, 8]
    assert [line["event"] for line in lines] == ["full_sync_not_supported"]


def test_a_full_sync_that_fails_is_an_error_and_no_plain_one(
    monkeypatch: pytest.MonkeyPatch, synced: list[int]
) -> None:
    def fail(fd: int, command: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    drive(fail, monkeypatch)
    with pytest.raises(OSError, match="Input/output"):
        system._full_sync(7)
    assert synced == []


@pytest.mark.skipif(not system.LINUX, reason="Linux lacks nothing, other systems do")
def test_linux_lacks_nothing_and_calls_go_straight_to_the_system() -> None:
    assert system.lacking() == []
    assert system.sync_data is os.fdatasync
    assert system.NOWAIT == os.RWF_NOWAIT


@pytest.mark.parametrize(("kernel_max", "granted"), [(10_240, 8192), (300, 256)])
def test_the_limit_of_open_files_is_raised_as_far_as_the_kernel_allows(
    monkeypatch: pytest.MonkeyPatch, kernel_max: int, granted: int
) -> None:
    """macOS reports no upper limit, and refuses what is beyond the limit of its kernel."""
    limits = (256, -1)

    def setrlimit(what: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        if wanted[0] > kernel_max:
            raise ValueError("current limit exceeds maximum limit")
        limits = wanted

    fake = SimpleNamespace(
        RLIMIT_NOFILE=7, RLIM_INFINITY=-1, getrlimit=lambda what: limits, setrlimit=setrlimit
    )
    monkeypatch.setattr(system, "_resource", fake)
    assert system.raise_open_files_limit() == granted
    assert system.open_files_limit() == granted
    assert system.open_files_promised() == 0, "the system names no limit"
    limits = (256, 10_000)
    assert system.open_files_promised() == 10_000


def test_a_locked_directory_is_refused_until_its_lock_is_closed(tmp_path: Path) -> None:
    lock = system.lock_directory(tmp_path, wait=True)
    assert lock is not None
    with pytest.raises(BlockingIOError):
        system.lock_directory(tmp_path, wait=False)
    os.close(lock)
    again = system.lock_directory(tmp_path, wait=False)
    assert again is not None
    os.close(again)
