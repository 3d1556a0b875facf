"""Makes a Python process on Linux see what a process on macOS sees, as far as zufluss asks for it.

Python imports this module at its start if the directory is on PYTHONPATH, in every process of a
server. What macOS lacks is removed. `F_FULLFSYNC` is there, and each call adds a line to the file
`$MACOS_SYNCS`; it fails with EIO as long as the file `$MACOS_SYNCS.fail` exists. Other calls that
sync add lines, too. Modules of others than zufluss see Linux.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import sys
import time
from pathlib import Path

F_FULLFSYNC = 51
OPEN_FILES_MAX = 512
"""Limit of the kernel, which `getrlimit` does not report."""

syncs = Path(os.environ["MACOS_SYNCS"])
fcntl_call, preadv, fsync, fdatasync = fcntl.fcntl, os.preadv, os.fsync, os.fdatasync
getrlimit, setrlimit = resource.getrlimit, resource.setrlimit


def note(call: str, fd: int) -> None:
    with syncs.open("a") as file:
        file.write(f"{call} {os.readlink(f'/dev/fd/{fd}')}\n")  # noqa: PTH115 - not through `open`


def macos_fcntl(fd, command, argument=0):
    if command != F_FULLFSYNC:
        return fcntl_call(fd, command, argument)
    if syncs.with_name(f"{syncs.name}.fail").exists():
        raise OSError(errno.EIO, "the drive failed")
    fdatasync(fd)
    note("F_FULLFSYNC", fd)
    return 0


def macos_fsync(fd):
    note("fsync", fd)
    fsync(fd)


def macos_preadv(fd, buffers, offset, flags=0):
    if flags:
        raise NotImplementedError("preadv: flags unavailable on this platform")
    return preadv(fd, buffers, offset)


def macos_getrlimit(what):
    soft, hard = getrlimit(what)
    return soft, resource.RLIM_INFINITY if what == resource.RLIMIT_NOFILE else hard


def macos_setrlimit(what, limits):
    if what == resource.RLIMIT_NOFILE:
        if limits[0] > OPEN_FILES_MAX:
            raise ValueError("current limit exceeds maximum limit")
        limits = limits[0], getrlimit(what)[1]
    setrlimit(what, limits)


def without_proc(event: str, arguments: tuple) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc/"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


fcntl.fcntl, fcntl.F_FULLFSYNC = macos_fcntl, F_FULLFSYNC
os.fsync, os.preadv = macos_fsync, macos_preadv
resource.getrlimit, resource.setrlimit = macos_getrlimit, macos_setrlimit
setrlimit(resource.RLIMIT_NOFILE, (256, getrlimit(resource.RLIMIT_NOFILE)[1]))  # as shells do
for module, prefixes in (
    (os, ("fdatasync", "posix_fallocate", "posix_fadvise", "POSIX_FADV", "RWF_", "sched_")),
    (mmap, ("MADV_HUGEPAGE", "MADV_POPULATE")),
    (fcntl, ("F_SETPIPE_SZ", "F_GETPIPE_SZ")),
    (time, ("CLOCK_BOOTTIME",)),
):
    for name in [name for name in vars(module) if name.startswith(prefixes)]:
        delattr(module, name)

linux, sys.platform = sys.platform, "darwin"
import zufluss.system  # noqa: E402, F401 - it looks at the system when it is imported

sys.platform = linux
sys.addaudithook(without_proc)
assert ctypes  # imported above, while the system was still Linux
