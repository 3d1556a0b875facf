"""Assembling a process: `zufluss dev` (both roles) and `zufluss server --role …` (one of them).

Start order: data directory locked, kernels warmed, metadata opened, logs recovered, sockets
opened, ready line printed. Stop order (SIGTERM, SIGINT) is the reverse: sockets drained, logs
synced and closed with a clean marker, metadata closed. The ready line is the only thing on
standard output.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import ConfigError

log = structlog.get_logger(__name__)

MALLOC_TRIM_THRESHOLD = -1
MALLOC_MMAP_THRESHOLD = -3
SLOW_WARM_UP_SECONDS = 2.0


def clock_ms() -> int:
    """Wall clock in epoch milliseconds; the only one the server reads."""
    return time.time_ns() // 1_000_000


def run_dev(conf: Configuration) -> int:
    """Serve both roles until a signal; returns the exit code."""
    return _run(conf, _serve_dev)


def run_role(role: str, conf: Configuration) -> int:
    """Serve one role until a signal; returns the exit code."""
    serve = {"coordinator": _serve_coordinator, "tablet": _serve_tablet}[role]
    return _run(conf, serve)


Serve = Callable[[Configuration, asyncio.Event], Awaitable[None]]


def _run(conf: Configuration, serve: Serve) -> int:
    _keep_freed_memory()
    data_dir = Path(conf.get(options.DATA_DIR))
    data_dir.mkdir(parents=True, exist_ok=True)
    with _owned(data_dir):
        _warm_kernels()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_until_signal(conf, serve))
    return 0


async def _until_signal(conf: Configuration, serve: Serve) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(conf, stop)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # uvloop is not made for every platform; asyncio's own loop serves as well
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]


def _keep_freed_memory() -> None:
    """Have malloc keep large freed blocks: a fresh 1 MiB costs more in page faults than its use."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc; only speed is lost
    mallopt(MALLOC_MMAP_THRESHOLD, 64 * 1024 * 1024)
    mallopt(MALLOC_TRIM_THRESHOLD, 256 * 1024 * 1024)


def _warm_kernels() -> None:
    from zufluss.record import kernels

    seconds = kernels.warm()
    if seconds > SLOW_WARM_UP_SECONDS:
        log.info("kernels_compiled", seconds=round(seconds, 1), note="once per install")


@contextmanager
def _owned(data_dir: Path) -> Iterator[None]:
    """Hold the data directory: two servers on one would destroy each other's logs."""
    lock = os.open(data_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"data.dir {data_dir} is in use by another server; stop it or choose another "
                "directory"
            ) from None
        yield
    finally:
        os.close(lock)
