"""How a server remembers the time by which things expire (`expiry.py`).

The file `clock` in the data directory has the last believed time, in epoch milliseconds as text. It
is written every minute and at a stop; without it, nothing would tell a start with a wrong date from
a start after a holiday.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from zufluss.expiry import ExpiryClock
from zufluss.log.files import Files
from zufluss.periodic import repeat

log = structlog.get_logger(__name__)

REMEMBER_SECONDS: Final = 60.0
"""How often the time is written to the disk."""
CLOCK_FILE: Final = "clock"
COORDINATOR_CLOCK_FILE: Final = "coordinator-clock"


@asynccontextmanager
async def expiry_clock(
    data_dir: Path, files: Files, name: str = CLOCK_FILE
) -> AsyncIterator[ExpiryClock]:
    """The expiry clock of a server, which goes on from the last time that the directory knows.

    `name` is the file of a coordinator that shares its directory with a tablet server. At first it
    goes on from the time of the process that had both roles.
    """
    known = last_known(data_dir, name)
    clock = ExpiryClock(last_known(data_dir) if known is None else known)
    remember(data_dir, files, clock, name)
    again = partial(remember, data_dir, files, clock, name)
    work = repeat(REMEMBER_SECONDS, again, "clock_not_remembered")
    task = asyncio.create_task(work, name="expiry-clock")
    try:
        yield clock
    finally:
        task.cancel()
        remember(data_dir, files, clock, name)


def last_known(data_dir: Path, name: str = CLOCK_FILE) -> int | None:
    """The last time that a server in this directory knew, None if there is none."""
    try:
        return int((data_dir / name).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        log.warning("clock_file_unreadable", reason=str(e))
        return None


def remember(data_dir: Path, files: Files, clock: ExpiryClock, name: str = CLOCK_FILE) -> None:
    """Write the believed time; if that fails, the next start knows an older time."""
    target = data_dir / name
    try:
        files.put(target.with_suffix(".new"), str(clock.now_ms()).encode())
        files.rename(target.with_suffix(".new"), target)
    except OSError as e:
        log.warning("clock_not_remembered", reason=str(e))
