"""Reads the changelog of an open bucket in a thread: its remote part, then the log.

The log belongs to the event loop, which reads it for the thread, a part at a time. Segments of the
remote part are fetched into a directory, each while the one before is read. Local retention may
delete segments meanwhile that are in remote storage by then: the reader gets
`OffsetOutOfRangeError` and starts over. Used by undos and by rebuilds of pinned states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, NamedTuple

from zufluss.cluster.remote import BucketRemote
from zufluss.errors import UnknownTableOrBucketError
from zufluss.kv.replay import EarlierChangelog
from zufluss.log.reader import LogRead
from zufluss.log.segment import PagesNotCachedError
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.remote.restore import Restorer

READ_BYTES: Final = 1 << 20
"""Bytes of the log that the event loop reads at a time."""


class Changelog(NamedTuple):
    """The changelog of a bucket: a remote part and the log."""

    replica: Replica
    earlier: EarlierChangelog | None
    """The part before the log, which is only in remote storage; None if it is not needed."""
    log_start: int
    """The first offset of the log."""

    @property
    def start(self) -> int:
        """The first offset of the changelog."""
        return self.log_start if self.earlier is None else self.earlier.start_offset


class ChangelogReader:
    """Reads changelogs. Belongs to the event loop; `batches` is for a thread."""

    def __init__(self, buckets: Buckets, restorer: Restorer, readers: Executor) -> None:
        """`readers` are the threads that bring cold pages into the page cache."""
        self._buckets = buckets
        self._restorer = restorer
        self._readers = readers
        self._loop = asyncio.get_running_loop()

    async def changelog(
        self, replica: Replica, remote: BucketRemote, until: int, directory: Path
    ) -> Changelog:
        """The changelog up to an offset; remote segments are fetched into `directory`."""
        log_start = replica.log.log_start_offset
        manifest = await self._restorer.manifest(remote) if log_start else None
        earlier = self._restorer.earlier(manifest, min(log_start, until), directory)
        return Changelog(replica, earlier, log_start)

    def batches(
        self, changelog: Changelog, offset: int, until: int
    ) -> Generator[memoryview, None, None]:
        """The batches from `offset` up to `until`. Not for the event loop."""
        replica, earlier, log_start = changelog
        if earlier is not None and offset < min(log_start, until):
            yield from earlier.batches(offset)
        yield from self._log_batches(replica, max(offset, log_start), until)

    def _log_batches(self, replica: Replica, offset: int, until: int) -> Iterator[memoryview]:
        while offset < until:
            reading = asyncio.run_coroutine_threadsafe(self._read(replica, offset), self._loop)
            records, offset = reading.result()
            yield records

    async def _read(self, replica: Replica, offset: int) -> LogRead:
        """Read a part of the log, on the event loop."""
        while True:
            if not self._buckets.serves(replica):
                raise UnknownTableOrBucketError(f"{replica.bucket.named(replica.path)} has stopped")
            try:
                return replica.log.read(offset, READ_BYTES, at_least_one=True)
            except PagesNotCachedError as cold:
                await self._loop.run_in_executor(self._readers, cold.load)
