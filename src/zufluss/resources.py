"""What a server process takes of its system: the data directory, files, memory, the interpreter.

Set once, before the event loop or when everything is loaded. Each default would cost a server more
than a script: in page faults, in pauses of the collector, in threads that wait for a busy loop.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from zufluss import system
from zufluss.errors import ConfigError

log = structlog.get_logger(__name__)

MALLOC_TRIM_THRESHOLD = -1
MALLOC_MMAP_THRESHOLD = -3
COLLECT_AFTER = (3_000, 10, 300)
"""When Python looks for cycles. With its own numbers (700, 10, 10) it looks at everything that was
made since the start whenever thousands of requests are under way, and the event loop waits."""
SWITCH_SECONDS = 0.0002
"""After so long a thread interrupts the event loop. With Python's own number, 5 ms, it never does
while the turns of a busy loop are shorter: between two of them the loop lets go of the interpreter
for an instant, too short for another thread, whose wait begins anew each time. A transaction of
2 ms then lasts as long as the loop is busy."""


def share_interpreter() -> None:
    """Let the threads that write to disks run beside a busy event loop."""
    sys.setswitchinterval(SWITCH_SECONDS)


def keep_freed_memory() -> None:
    """Have malloc keep large freed blocks: a fresh 1 MiB costs more in page faults than its use."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc; only speed is lost
    mallopt(MALLOC_MMAP_THRESHOLD, 64 * 1024 * 1024)
    mallopt(MALLOC_TRIM_THRESHOLD, 256 * 1024 * 1024)


def settle_memory() -> None:
    """Exempt the objects of the start-up from garbage collection, and collect more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def allow_open_files() -> None:
    """Each connection and each bucket holds files; shells allow few by default."""
    allowed, promised = system.raise_open_files_limit(), system.open_files_promised()
    if allowed < promised:
        log.warning("open_files_limited", allowed=allowed, wanted=promised)


@contextmanager
def owned(file: Path) -> Iterator[None]:
    """Hold the data directory: two servers on one would destroy each other's logs."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"data.dir {file.parent} is in use by another server; stop it or choose another "
                "directory"
            ) from None
        yield
    finally:
        os.close(lock)
