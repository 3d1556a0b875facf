"""The threads that encode changelog batches.

A put of a few bytes can change or delete rows of 64 MB, and its changelog batch, which contains
these rows, takes half a second to compress. One thread encodes the batches in the order in which
the key-value worker prepared them; large ones have a second thread, so that the puts of other
buckets do not wait for them. The batches of a bucket keep their order: while large ones are not
delivered, the later ones of their bucket follow them to the second thread. The worker prepares such
batches faster than they are compressed, so the rows that wait have a bound.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from zufluss.errors import StorageBackpressureError
from zufluss.kv.tablet import KvTablet
from zufluss.log.worker import Done, Job, ThreadWorker

LARGE_BYTES = 4 << 20
"""Changed rows of so many bytes are encoded in the second thread."""
WAITING_BYTES_MAX = 128 << 20
"""Bytes of rows that wait for the second thread, beyond which their buckets take no puts."""
ALL_WAITING_BYTES_MAX = 512 << 20
"""The same for the other buckets, of which each may add one large batch."""


class ChangelogEncoders:
    """The two threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._usual = ThreadWorker("zufluss-changelog", loop)
        self._large = ThreadWorker("zufluss-changelog-large", loop)
        self._following: dict[KvTablet, int] = {}
        """Batches of each bucket that the second thread has, or that are not delivered yet."""
        self._bytes = 0
        """Bytes of rows of these batches."""
        self._lock = threading.Lock()

    def check(self, tablet: KvTablet) -> None:
        """Refuse a put of a bucket, before it is prepared, while too many rows wait."""
        most = WAITING_BYTES_MAX if tablet in self._following else ALL_WAITING_BYTES_MAX
        if self._bytes > most:
            raise StorageBackpressureError(
                f"{self._bytes} bytes of changed rows wait to be written to changelogs, {most} are "
                "allowed; try again after a pause"
            )

    def submit(self, tablet: KvTablet, size: int, job: Job, done: Done) -> None:
        """Run `job`, which encodes `size` bytes of rows, then `done` on the event loop.

        Called by the key-value worker.
        """
        if size < LARGE_BYTES and tablet not in self._following:
            self._usual.submit(job, done)
            return
        delivered = False

        def deliver(outcome: Any) -> None:
            nonlocal delivered
            if not delivered:  # it is called again if memory runs out in it
                delivered = True
                self._count(tablet, -1, -size)
            done(outcome)

        self._count(tablet, 1, size)
        try:
            self._large.submit(job, deliver)
        except BaseException:
            self._count(tablet, -1, -size)
            raise

    def refuse(self, job: Job, done: Done) -> None:
        """Run `job`, which raises why a put was refused; it waits for no batch of its bucket."""
        self._usual.submit(job, done)

    def _count(self, tablet: KvTablet, more: int, size: int) -> None:
        with self._lock:
            self._bytes += size
            count = self._following.get(tablet, 0) + more
            if count:
                self._following[tablet] = count
            else:
                self._following.pop(tablet, None)

    def stop(self) -> None:
        """Finish the batches submitted so far and end the threads. Blocks."""
        self._usual.stop()
        self._large.stop()
