"""Takes from a Python process on Linux what Windows does not have, as far as zufluss could ask for it.

Python imports this module at its start if the directory is on PYTHONPATH. The standard library has
imported what it needs by then.
"""  # noqa: E501

import asyncio  # noqa: F401 - these need what is removed below
import concurrent.futures.process  # noqa: F401
import multiprocessing  # noqa: F401
import os
import selectors  # noqa: F401
import shutil  # noqa: F401
import signal
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import time
from importlib.abc import MetaPathFinder

MISSING = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "uvloop"}


class WindowsModules(MetaPathFinder):
    """Has no module that only other systems have."""

    def find_spec(self, fullname, path, target=None):
        if fullname in MISSING:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


for name in MISSING:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, WindowsModules())

for module, names in (
    (os, "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK fdatasync fork getuid geteuid killpg nice"),
    (os, "posix_fadvise posix_fallocate pread preadv pwrite pwritev readv register_at_fork"),
    (os, "sysconf writev"),
    (signal, "SIGKILL SIGHUP"),
    (time, "clock_gettime CLOCK_BOOTTIME CLOCK_MONOTONIC_RAW"),
):
    for name in names.split():
        delattr(module, name)
