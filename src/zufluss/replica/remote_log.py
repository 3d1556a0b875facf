"""The part of a bucket's log in remote storage, and how readers get to it.

A log is one range of offsets in up to two places that overlap: remote storage has it up to some
closed segment, this server has it from some segment on. After a lost disk, records between two
remote segments, or between the two places, may be lost. Records on this server are served from
here. For older records a reader gets the names of the remote segments, and reads them itself.

The manifest lists the segments of the remote part; the coordinator knows which manifest is
committed. A server that starts reads that manifest. Until then nothing is deleted on this server,
and readers of records that are only in remote storage get a retriable error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from zufluss.errors import ErrorCode, OffsetOutOfRangeError, ZuflussError
from zufluss.log.holds import Holder
from zufluss.log.log import Log
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote.files import RemoteFile
from zufluss.remote.layout import LOG, bucket_directory
from zufluss.remote.manifest import LogManifest, RemoteSegment
from zufluss.replica.remote_index import RemoteIndexes, position_in
from zufluss.wire import messages as m

SEGMENTS_MAX: Final = 64
"""Segments that one answer names; a reader asks again when it has read them."""


class RemoteNotReadError(ZuflussError, code=ErrorCode.STORAGE_EXCEPTION):
    """The remote part of a log is not known yet; a later attempt may succeed."""

    @property
    def retriable(self) -> bool:
        """True: the manifest is read again until that succeeds."""
        return True


class IndexNeededError(Exception):
    """An answer needs an index that has to be fetched first: await `RemoteIndexes.fetch`."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__(file.path)
        self.file = file


class PendingManifest(NamedTuple):
    """A manifest that is uploaded and whose commit has no known outcome yet."""

    manifest: LogManifest
    file: RemoteFile
    """The uploaded manifest."""
    removed: tuple[RemoteFile, ...]
    """Files that can be deleted once the manifest is committed."""
    since: float
    """When the upload of its segments began, by the loop's clock."""
    locations_version: int
    """The version of the registry of locations at that time."""
    copied_to: int | None = None
    """Everything from this offset on is to be copied again; None if nothing was lost."""


class RemoteLog:
    """The remote part of one bucket's log. Belongs to the event loop."""

    def __init__(
        self, bucket: TableBucket, path: PhysicalTablePath, log: Log, indexes: RemoteIndexes
    ) -> None:
        self.log = log
        self.indexes = indexes
        self.directory = bucket_directory(LOG, path, bucket)
        """Directory of the bucket below the root of each location."""
        self.manifest = LogManifest(path, bucket)
        """The committed manifest, once `loaded`."""
        self.manifest_file: tuple[int, str] | None = None
        """Location and path of the committed manifest, None without one."""
        self.loaded = False
        """The committed manifest was read."""
        self.problem: ZuflussError | None = None
        """Why the last attempt to read the manifest failed."""
        self.copied_to = 0
        """Everything below this offset was copied once; it may have expired since."""
        self.range: tuple[int, int] | None = None
        """Start and end of the remote part, None until the coordinator was asked."""
        self.pending: PendingManifest | None = None
        """While set, no other change is begun and nothing is deleted."""
        self.garbage: list[RemoteFile] = []
        """Files that the manifest does not list any more; deleted a round later."""
        self.failures = 0
        """Rounds in a row that failed."""
        self.retry_at = 0.0
        """When the next round is due after a failure, by the loop's clock."""
        self.guard()

    def unload(self) -> None:
        """Forget the manifest because another may be committed; local retention stops meanwhile."""
        self.loaded = False
        self.range = None
        self.guard()

    def note_manifest(self, manifest_file: tuple[int, str] | None, start: int, end: int) -> None:
        """Note the manifest and the offsets that the coordinator reports."""
        self.manifest_file, self.range = manifest_file, (start, end)
        self.copied_to = max(self.copied_to, end)

    def take_over(
        self, manifest: LogManifest, file: tuple[int, str] | None, copied_to: int | None = None
    ) -> None:
        """Take over a committed manifest; `copied_to` has everything behind it copied again."""
        self.manifest, self.manifest_file = manifest, file
        self.loaded, self.problem = True, None
        start, end = manifest.start_offset, manifest.end_offset
        if copied_to is not None:
            self.copied_to = copied_to
        self.copied_to = max(self.copied_to, end or 0)
        self.range = (self.copied_to, self.copied_to)
        if start is not None and end is not None:
            self.range = (start, end)
        self.guard()

    def guard(self) -> None:
        """Let local retention delete copied segments, and nothing while the manifest is unknown."""
        self.hold_back_from(self.manifest.end_offset if self.loaded else 0)

    def hold_back_from(self, offset: int | None) -> None:
        """Keep local retention from records at `offset` and above; None without a remote copy."""
        self.log.holds.set(Holder.REMOTE_COPY, offset)

    @property
    def start_offset(self) -> int | None:
        """The first offset in remote storage, None if it has nothing."""
        if self.range is None:
            raise self._not_read()
        start, end = self.range
        return start if start < end else None

    @property
    def end_offset(self) -> int | None:
        """The offset after the last one in remote storage, None if it has nothing."""
        if self.range is None:
            raise self._not_read()
        start, end = self.range
        return end if start < end else None

    @property
    def losses(self) -> list[tuple[int, int]]:
        """The first and the last offset of each range of records that a lost disk took."""
        if not self.loaded:
            raise self._not_read()
        losses, end = self.manifest.losses, self.manifest.end_offset
        here = self.log.log_start_offset
        if end is not None and end < here:
            losses.append((end, here - 1))
        return losses

    def _not_read(self) -> ZuflussError:
        if self.problem is not None:
            return self.problem
        return RemoteNotReadError(
            f"{self.log}: what remote storage has of it is being read; try again"
        )

    # -- readers ------------------------------------------------------------------------------

    def segment_of(self, offset: int) -> tuple[int, RemoteSegment]:
        """The segment that has an offset, and its number; `OffsetOutOfRangeError` if none has."""
        if not self.loaded:
            raise self._not_read()
        segments = self.manifest.segments
        i = bisect_right(segments, offset, key=lambda s: s.start_offset) - 1
        if i < 0 or offset >= segments[i].end_offset:
            for first, last in self.losses:
                if first <= offset <= last:
                    raise OffsetOutOfRangeError(_lost(self.log, offset, first, last))
            here = f"{self.log.log_start_offset} to {self.log.high_watermark}"
            there = f"{segments[0].start_offset} to {segments[-1].end_offset}" if segments else "-"
            start = min([self.log.log_start_offset, *(s.start_offset for s in segments[:1])])
            hint = f"; what was before has expired or was lost, read on at offset {start}"
            raise OffsetOutOfRangeError(
                f"The fetching offset {offset} is out of range: {self.log} has {here} on the "
                f"server and {there} in remote storage{hint if offset < start else ''}"
            )
        return i, segments[i]

    def segments_from(self, offset: int) -> Sequence[RemoteSegment]:
        """The segment with `offset` and those after it, of one location and not held here.

        They end at a loss, so that a reader asks for the lost records and gets the error.
        """
        i, first = self.segment_of(offset)
        here = self.log.log_start_offset
        further = takewhile(
            lambda s: (
                s.location_id == first.location_id and s.start_offset < here and not s.lost_before
            ),
            self.manifest.segments[i + 1 : i + SEGMENTS_MAX],
        )
        return [first, *further]

    def fetch_info(self, offset: int) -> m.PbRemoteLogFetchInfo:
        """The remote segments and the position from which to read `offset`, not held here.

        `IndexNeededError` if that needs an index; what `RemoteIndexes.get` raises if that cannot be
        fetched.
        """
        segments = self.segments_from(offset)
        first = segments[0]
        position = 0
        if offset > first.start_offset:
            index = self.indexes.get(first.index)
            if index is None:
                raise IndexNeededError(first.index)
            position = position_in(index, offset - first.start_offset)
        info = m.PbRemoteLogFetchInfo(
            remote_log_tablet_dir=self.indexes.storage.objects(first.location_id).full_path(
                self.directory
            ),
            partition_name=self.manifest.path.partition,
            first_start_pos=position,
        )
        for segment in segments:
            info.remote_log_segments.add(
                remote_log_segment_id=segment.segment_id,
                remote_log_start_offset=segment.start_offset,
                remote_log_end_offset=segment.end_offset,
                segment_size_in_bytes=segment.log.size,
                max_timestamp=segment.max_timestamp,
                crc32c=segment.log.crc32c,
            )
        return info

    async def offset_for_timestamp(self, timestamp: int) -> int | None:
        """Base offset of the first batch at or after `timestamp`, None if it is held here or gone.

        Only what is not held here is looked at.
        """
        here = self.log.log_start_offset
        if self.range is not None and self.range[0] >= min(here, self.range[1]):
            return None
        if not self.loaded:
            raise self._not_read()
        for segment in self.manifest.segments:
            if segment.start_offset >= here:
                return None
            if segment.max_timestamp >= timestamp:
                return await self.indexes.first_at_or_after(segment, timestamp)
        return None

    async def batches_below(self, end: int, offset: int, bytes_max: int) -> list[bytes] | None:
        """The batches from the one that has `offset` up to `end`; None if they are too large.

        Lost records are left out.
        """
        if not self.loaded:
            raise self._not_read()
        batches: list[bytes] = []
        for segment in self.manifest.segments:
            if segment.end_offset <= offset or segment.start_offset >= end:
                continue
            start = max(offset, segment.start_offset)
            data = await self.indexes.batches(segment, start, bytes_max)
            if data is None:
                return None
            bytes_max -= len(data)
            batches.append(data)
        return batches


def _lost(log: Log, offset: int, first: int, last: int) -> str:
    return (
        f"offset {offset} of {log}: the records {first} to {last} were lost with a disk or "
        f"location; read on at offset {last + 1}. A scan of a primary-key table has the rows of "
        "its state or last snapshot, a union read those that the lake had"
    )
