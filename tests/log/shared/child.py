"""A process that appends to a session in a directory and prints what became durable.

    python -m tests.log.shared.child DIRECTORY EPOCH

A line is `durable BUCKET END` or `fenced`, besides those of the log; it is flushed before anything
else happens, as an answer to a client would be.
"""

from __future__ import annotations

import asyncio
import sys

from zufluss.log.shared.api import SessionFencedError
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.model.table import TableBucket
from zufluss.remote.objects import Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.shared_log import BUCKETS, WrittenSession, session


class PrintingSession(WrittenSession):
    """A session that tells its parent."""

    def _on_durable(self, ends: list[tuple[TableBucket, int]]) -> None:
        super()._on_durable(ends)
        for bucket, end in ends:
            print("durable", BUCKETS.index(bucket), end)
        sys.stdout.flush()

    def _on_fenced(self, error: SessionFencedError) -> None:
        super()._on_fenced(error)
        print("fenced", flush=True)


async def main(directory: str, epoch: int) -> None:
    """Append until the session is fenced."""
    objects = Objects(parse_location(directory, "test"))
    written = PrintingSession(ObjectLog(objects, WalSettings(interval_seconds=0)), session(epoch))
    rounds = 0
    while not written.fenced:
        rounds += 1
        for bucket in BUCKETS[: 1 + rounds % len(BUCKETS)]:
            written.append(bucket)
        await written.writer.room()
        await asyncio.sleep(0)
        if rounds % 3 == 0:
            await written.settle()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
