"""Undoes what earlier epochs of a producer wrote, bucket by bucket, on the leaders.

The leader of a bucket reads its changelog from the given offset and takes back the changes of this
producer; the network carries only requests and progress. Every bucket of every existing partition
is asked, even without changes, because only the leader knows what was under way when the epoch
began. A bucket without a baseline is newer than the checkpoint and is undone from its beginning; a
dropped partition has nothing to undo.

After a timeout, or if a leader moves or restarts, the request is repeated: undoing twice does no
harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.offsets import BucketPlace
from zufluss.client.core.partitions import chosen_places
from zufluss.client.core.retry import PASSING, Backoff
from zufluss.client.producer.handle import ProducerHandle
from zufluss.errors import (
    ErrorCode,
    PartitionNotExistError,
    RequestTimeoutError,
    ZuflussError,
)
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

BUCKETS_AT_ONCE: Final = 32
"""Buckets of a table that are undone concurrently."""
STALLED_MS: Final = 10 * 60_000
"""An undo without progress for this long is given up."""
AGAIN: Final = PASSING | {ErrorCode.UNDO_UNDER_WAY}
"""Errors after which the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class UndoProgress:
    """The progress of an undo."""

    buckets: int
    """Buckets of the table."""
    buckets_done: int = 0
    """Buckets that are finished."""
    records: int = 0
    """Changes of all writers since the baseline, in buckets that were begun."""
    records_read: int = 0
    """Changes that were read."""
    keys: int = 0
    """Keys whose row was restored."""


OnUndo = Callable[[UndoProgress], None]
"""Called with the progress of an undo, from time to time and at its end."""


class UndoTally:
    """Adds up the progress of the buckets."""

    def __init__(self, buckets: int, on_progress: OnUndo | None) -> None:
        self.total = UndoProgress(buckets)
        """The progress of all buckets."""
        self._on_progress = on_progress
        self._known: dict[TableBucket, tuple[int, int, int]] = {}

    def note(self, bucket: TableBucket, records: int, read: int, keys: int, done: bool) -> None:
        """Note the progress of one bucket; it replaces earlier figures of the bucket."""
        before = self._known.get(bucket, (0, 0, 0))
        self._known[bucket] = (records, read, keys)
        total = self.total
        self.total = UndoProgress(
            total.buckets,
            total.buckets_done + done,
            total.records + records - before[0],
            total.records_read + read - before[1],
            total.keys + keys - before[2],
        )
        self._tell()

    def gone(self) -> None:
        """Count a dropped bucket as finished."""
        self.total = replace(self.total, buckets_done=self.total.buckets_done + 1)
        self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.total)


async def undo_on_leaders(
    connection: ClusterConnection,
    info: TableInfo,
    handle: ProducerHandle,
    baseline: Mapping[TableBucket, int],
    on_progress: OnUndo | None = None,
) -> UndoProgress:
    """Let every leader undo the writes of earlier epochs behind the baseline."""
    places = await chosen_places(connection, info, None, None)
    undo = _Undo(connection, info, handle, UndoTally(len(places), on_progress))
    work = iter(places)
    workers = [
        asyncio.create_task(undo.buckets(work, baseline))
        for _ in range(min(BUCKETS_AT_ONCE, len(places)))
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return undo.tally.total


class _Undo:
    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        handle: ProducerHandle,
        tally: UndoTally,
    ) -> None:
        self.tally = tally
        self._connection = connection
        self._info = info
        self._handle = handle
        self._time_limit_ms = connection.options.request_timeout_ms // 2

    async def buckets(
        self, places: Iterable[BucketPlace], baseline: Mapping[TableBucket, int]
    ) -> None:
        """Undo buckets one after the other; several tasks share the iterator."""
        for place in places:
            try:
                await self._bucket(place, baseline.get(place.bucket, 0))
            except PartitionNotExistError:
                self.tally.gone()

    async def _bucket(self, place: BucketPlace, start: int) -> None:
        bucket = place.bucket
        request = m.UndoProducerRequest(
            table_id=bucket.table_id,
            partition_id=bucket.partition_id,
            bucket_id=bucket.bucket_id,
            producer_number=self._handle.number,
            epoch=self._handle.epoch,
            from_offset=start,
            time_limit_ms=self._time_limit_ms,
        )
        backoff = Backoff(STALLED_MS)
        away: Backoff | None = None
        before: UndoProgress | None = None
        while True:
            try:
                async with (away or backoff).attempt():
                    answer: m.UndoProducerResponse = await self._connection.call_leader(
                        bucket, ApiKey.UNDO_PRODUCER, request
                    )
            except ZuflussError as failure:
                if failure.code not in AGAIN:
                    raise
                if failure.code in PASSING:
                    away = away or Backoff(self._connection.options.delivery_timeout_ms)
                await (away or backoff).pause(failure)
                async with (away or backoff).attempt():
                    await find_leader(self._connection, self._info, place)
                continue
            away = None
            records, read = answer.end_offset - start, answer.position - start
            self.tally.note(bucket, records, read, answer.keys, answer.done)
            if answer.done:
                return
            if self.tally.total != before:  # of any bucket: a leader undoes few at a time
                before, backoff = self.tally.total, Backoff(STALLED_MS)
            else:
                name = self._connection.metadata.name_of(bucket)
                await backoff.pause(_stalled(name, answer))


def _stalled(name: str, answer: m.UndoProducerResponse) -> ZuflussError:
    return RequestTimeoutError(
        f"{name}: an undo made no progress at offset {answer.position} of {answer.end_offset}; "
        "the server continues it, so start the writer again later"
    )


async def find_leader(connection: ClusterConnection, info: TableInfo, place: BucketPlace) -> None:
    """Refresh the leader of a bucket; raises `PartitionNotExistError` if it is gone."""
    names = [] if place.partition is None else [place.partition]
    try:
        await connection.refresh_leaders(info, names)
    except PartitionNotExistError:
        raise
    except ZuflussError as failure:
        if failure.code not in PASSING:
            raise
    known = connection.metadata.partitions.get((info.table_id, place.partition or ""))
    if known is not None and known.partition_id != place.bucket.partition_id:
        raise PartitionNotExistError(
            f"table {info.path}: partition {place.partition!r} was dropped and created again"
        )
