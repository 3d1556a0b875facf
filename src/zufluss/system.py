"""The differences between operating systems: the only module that knows them.

Servers run on Linux and macOS, clients on Windows too. Where a system lacks something, a function
here does the next best, or nothing; callers do not ask which system they run on. What is lacking is
found when the module is imported, so on Linux a call costs what it cost without this module.

| need | Linux | macOS |
|---|---|---|
| data on the medium (`sync_data`) | `fdatasync` | `F_FULLFSYNC` |
| names on the medium (`sync_directory`) | `fsync` | `F_FULLFSYNC` |
| blocks behind the end of a file (`reserve`) | `fallocate` | none; a write allocates its blocks |
| reads that never wait (`NOWAIT`) | `RWF_NOWAIT` | none; a cold read keeps the event loop waiting |
| huge pages, pages faulted in ahead | `madvise` | none; writers fault pages in |
| early write-back (`begin_writeback`) | `posix_fadvise` | none; the sync at the end takes longer |
| large pipes (`widen_pipe`) | `F_SETPIPE_SZ` | none; more switches between processes |
| the end of lost peers (`watch_peers`) | `TCP_KEEPIDLE` | `TCP_KEEPALIVE` |
| time with sleep (`UPTIME_CLOCK`) | `CLOCK_BOOTTIME` | `CLOCK_MONOTONIC_RAW` |

On macOS `fsync` hands the data to the drive, which may still lose it when the power fails; only
`F_FULLFSYNC` empties the drive's cache, and with it all that was handed to the drive before. So the
files that RocksDB synced are on the medium when the state file is that is synced after them.
`F_BARRIERFSYNC` is cheaper and keeps the order of writes, but what was acknowledged could be lost,
so it is not used. A file system without `F_FULLFSYNC`, such as a network share, gets an `fsync` and
one warning.

The processes that the server starts for RocksDB import this module too: it must import nothing but
the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import mmap
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final


def optional_module(name: str) -> Any:
    """Return a module of the standard library, None if this system does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl = optional_module("fcntl")
_resource = optional_module("resource")

LINUX: Final = sys.platform == "linux"
"""Whether this is Linux."""

SERVERS_RUN: Final = _fcntl is not None and _resource is not None
"""Whether servers run on this system; on Windows only clients do."""

FORKS_AFTER_IMPORTS: Final = LINUX
"""Whether a process may fork after it has imported numpy. On macOS numpy uses a library of Apple's
that need not work in a forked process."""

OPEN_FILES_MAX: Final = 1 << 20
"""Open files that a process asks for at most, and has if there is no limit."""

OPEN_FILES: Final = Path("/proc/self/fd" if LINUX else "/dev/fd")
"""Has an entry for each file that the process has open."""

# -- making things durable ----------------------------------------------------------------------

_FULL_SYNC: Final = getattr(_fcntl, "F_FULLFSYNC", None)
_NOT_SUPPORTED: Final = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL)


def _full_sync(fd: int) -> None:
    try:
        _fcntl.fcntl(fd, _FULL_SYNC)
    except OSError as e:
        if e.errno not in _NOT_SUPPORTED:
            raise
        _warn_of_weak_sync(str(e))
        os.fsync(fd)


@functools.cache
def _warn_of_weak_sync(reason: str) -> None:
    import structlog  # not above: the server's helper processes stay small

    structlog.get_logger(__name__).warning(
        "full_sync_not_supported",
        reason=reason,
        note="this file system cannot empty the drive's cache: a power failure may lose "
        "acknowledged writes",
    )


sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
"""Makes the data of an open file durable."""

sync_names: Callable[[int], None] = os.fsync
"""Makes the names in an open directory, or all of an open file, durable."""

if _FULL_SYNC is not None:
    sync_data = sync_names = _full_sync


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_names(fd)
    finally:
        os.close(fd)


# -- files and pipes ----------------------------------------------------------------------------

NOWAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)
"""Flag of `os.preadv` for a read that does not wait for the disk; 0 where every read may wait."""

_KEEP_SIZE: Final = 1
_fallocate: Any = getattr(ctypes.CDLL(None), "fallocate", None) if LINUX else None
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_fadvise: Any = getattr(os, "posix_fadvise", None)
_WRITTEN: Final[int] = getattr(os, "POSIX_FADV_DONTNEED", 0)
_PIPE_SIZE: Final = getattr(_fcntl, "F_SETPIPE_SZ", None)


def reserve(fd: int, position: int, length: int) -> bool:
    """Reserve disk blocks behind the end of a file, whose size stays; whether that was possible."""
    return _fallocate is not None and _fallocate(fd, _KEEP_SIZE, position, length) == 0


def begin_writeback(fd: int, position: int, length: int) -> None:
    """Ask the system to write a part of a file now, so that a later sync has less to do."""
    if _fadvise is not None:
        _fadvise(fd, position, length, _WRITTEN)


def widen_pipe(fd: int, size: int) -> None:
    """Give a pipe a buffer of `size` bytes; raises `OSError` at the user's limit of large pipes."""
    if _PIPE_SIZE is not None:
        _fcntl.fcntl(fd, _PIPE_SIZE, size)


PEER_SILENT_SECONDS: Final = 15
"""After this silence the system asks the machine at the other end of a connection for a sign."""
PEER_ASKED_SECONDS: Final = 5
"""How often it asks."""
PEER_ASKED_TIMES: Final = 3
"""Without an answer to so many questions the connection has ended."""
_PEER_OPTIONS: Final = {
    "TCP_KEEPIDLE": PEER_SILENT_SECONDS,
    "TCP_KEEPALIVE": PEER_SILENT_SECONDS,  # macOS
    "TCP_KEEPINTVL": PEER_ASKED_SECONDS,
    "TCP_KEEPCNT": PEER_ASKED_TIMES,
}


def watch_peers(fd: int) -> None:
    """Have the connections of a listening socket end soon after the other machine vanished.

    A process that ends closes its connections; a machine that loses power or its network does not.
    """
    with socket.socket(fileno=os.dup(fd)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PEER_OPTIONS.items():
            if hasattr(socket, name):
                listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def lock_directory(directory: Path, *, wait: bool) -> int | None:
    """Lock a directory; the lock ends when the returned descriptor is closed, or the process ends.

    Raises `BlockingIOError` without `wait` if another process has the lock. Returns None on
    Windows, where directories cannot be locked.
    """
    if _fcntl is None:
        return None
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _fcntl.flock(fd, _fcntl.LOCK_EX | (0 if wait else _fcntl.LOCK_NB))
    except BaseException:
        os.close(fd)
        raise
    return fd


def after_fork_in_child(call: Callable[[], object]) -> None:
    """Have each forked process make a call first; does nothing on Windows, which has no fork."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(after_in_child=call)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def user_id() -> int:
    """Return the number of the user; 0 on Windows, where each user has other directories."""
    getuid: Callable[[], int] = getattr(os, "getuid", lambda: 0)
    return getuid()


def is_private(status: os.stat_result) -> bool:
    """Whether only this user can write to a file; always on Windows, where the mode does not say.

    There, the directories for temporary files and for programs of a user are closed to others.
    """
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not SERVERS_RUN or (status.st_uid == user_id() and not shared)


# -- limits and memory --------------------------------------------------------------------------


def open_files_limit() -> int:
    """Return how many files the process may have open."""
    soft, _ = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    return OPEN_FILES_MAX if soft == _resource.RLIM_INFINITY else int(soft)


def raise_open_files_limit() -> int:
    """Let the process open as many files as the system allows it, and return how many.

    macOS reports no upper limit and refuses what is beyond a limit of the kernel, so less and less
    is asked for.
    """
    limit = open_files_limit()
    _, hard = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == _resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    while wanted > limit:
        try:
            _resource.setrlimit(_resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            wanted //= 2
        else:
            return int(wanted)
    return limit


def open_files_promised() -> int:
    """Return how many files the system says the process could have open; 0 if it does not say.

    Not more than `OPEN_FILES_MAX`, and the system may refuse it all the same.
    """
    _, hard = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    return 0 if hard == _resource.RLIM_INFINITY else min(int(hard), OPEN_FILES_MAX)


_POPULATE_WRITE: Final = 23
"""Advice of Linux 5.14 and later. Others refuse it, and writers fault pages in themselves."""

FAULTS_IN: Final = LINUX
"""Whether `fault_in` does anything."""


def fault_in(address: int, size: int) -> bool:
    """Fault in pages of memory before they are used; whether that was possible."""
    if not FAULTS_IN:
        return False
    madvise = ctypes.CDLL(None).madvise
    return not madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)


def use_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages in a mapping; raises `OSError` if the kernel has none."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        memory.madvise(advice)


# -- time ---------------------------------------------------------------------------------------


def _uptime_clock() -> int | None:
    name = "CLOCK_MONOTONIC_RAW" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
    return getattr(time, name, None)


UPTIME_CLOCK: Final = _uptime_clock()
"""The clock that counts the time in which the machine sleeps; None where `time.monotonic` does."""


# -- what is lacking ----------------------------------------------------------------------------


def lacking() -> list[str]:
    """Return what this system lacks of all that speeds a server up; empty on Linux."""
    features = {
        "reads that never wait for the disk": bool(NOWAIT),
        "reserved disk blocks": _fallocate is not None,
        "early write-back": _fadvise is not None,
        "huge pages": hasattr(mmap, "MADV_HUGEPAGE"),
        "memory faulted in ahead": FAULTS_IN,
        "large pipes": _PIPE_SIZE is not None,
    }
    return [name for name, there in features.items() if not there]
