"""A process that used an object store ends as it would have ended without."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, time
from asyncio import selector_events
from zufluss.remote.cloud import CloudDirectory
from zufluss.remote.uri import parse_location

write = selector_events.BaseSelectorEventLoop._write_to_self

def write_and_pause(self):
    write(self)
    time.sleep(0.5)  # the thread of obstore comes back when the script has long ended

selector_events.BaseSelectorEventLoop._write_to_self = write_and_pause

async def main():
    directory = CloudDirectory(parse_location("memory://exit/x", "a location"), {}, 10_000)
    await directory.put("a", b"bytes", if_absent=True)
    print(await directory.get("a", 10), flush=True)

asyncio.run(main())
"""
"""Threads of obstore hold up the end of `call_soon_threadsafe`, as a busy machine does."""


def test_a_script_that_read_an_object_and_ends_at_once_exits_with_0() -> None:
    command = [sys.executable, "-c", SCRIPT]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stdout) == (0, "b'bytes'\n"), process.stderr
