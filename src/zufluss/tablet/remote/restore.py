"""Restores buckets from remote storage after their disk was lost.

If the coordinator knows remote files of a bucket and the disk has no directory of its log, or of
its state, that directory was lost.

| lost | restored as |
|---|---|
| the log | an empty log that continues at the furthest of: the end of the last remote segment, the newest snapshot, the state on this disk, and (log tables) the end in the lake; with the writers of that segment or snapshot |
| the state | the newest readable snapshot that the changelog continues, then the changelog: its remote segments and the log |

A snapshot that cannot be read or has damaged files is skipped for an older one. If none is left and
the changelog does not go back to the first row, the bucket is refused: serving it would hide rows.

Records written after the last upload are lost with the disk. If the log continues behind the end of
its remote part, the range in between is logged as an error, and the next uploaded segment declares
it in the manifest. Readers of that range get an error that names it. The
restored writers belong to the offset at which the log continues: a retry of a restored batch is a
duplicate, also if its part of the changelog is lost, and a retry of a lost batch is appended. A log
table never reuses an offset that the lake has, because the new record would not be tiered.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Final

import structlog

from zufluss.cluster.remote import BucketRemote, SnapshotHandle
from zufluss.errors import CorruptRecordError, ErrorCode, ZuflussError
from zufluss.kv.cold.checkpoint import CHANGELOG_DIRECTORY, has_state, incoming_directory, install
from zufluss.kv.cold.state import KvState, read_state
from zufluss.kv.replay import EarlierChangelog
from zufluss.log.files import Files
from zufluss.log.manager import LogManager
from zufluss.log.writer_state import WriterState
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote.manifest import MANIFEST_BYTES_MAX, LogManifest, RemoteSegment
from zufluss.remote.snapshot import SnapshotFile
from zufluss.remote.storage import RemoteStorage
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica
from zufluss.tablet.remote.context import RemoteContext
from zufluss.tablet.remote.kv_snapshots import read_snapshot
from zufluss.tablet.reopen import may_pass
from zufluss.tasks import together

log = structlog.get_logger(__name__)

FILES_AT_ONCE: Final = 8
"""Files of a snapshot that are fetched at the same time."""
WRITERS_BYTES_MAX: Final = 256 << 20
"""Largest writer snapshot that is read."""


class NotRestoredError(ZuflussError, code=ErrorCode.STORAGE_EXCEPTION):
    """A bucket has lost files, and remote storage could not replace them."""

    def __init__(self, message: str, *, retriable: bool) -> None:
        super().__init__(message)
        self._retriable = retriable

    @property
    def retriable(self) -> bool:
        """Whether a later attempt may succeed, because a location may answer by then."""
        return self._retriable


class Restorer:
    """Restores logs and states that the disk of this server lost. Belongs to the event loop."""

    def __init__(self, context: RemoteContext, logs: LogManager, kv: KvHost) -> None:
        self._context = context
        self._storage = context.storage
        self._files = context.files
        self.logs = logs
        self._kv = kv
        self._loop = asyncio.get_running_loop()
        self._fetching = asyncio.Semaphore(FILES_AT_ONCE)

    # -- the log ------------------------------------------------------------------------------

    async def restore_log(self, path: PhysicalTablePath, remote: BucketRemote) -> None:
        """Create the log of a bucket that has none here and something in remote storage.

        A log that cannot be created is refused until the next start, or until `reopen.py` tries
        again.
        """
        if self.logs.has_log(path, remote.bucket):
            return
        try:
            await self._create_log(path, remote)
        except (ZuflussError, OSError) as e:
            self.logs.refuse(remote.bucket, e)
            raise

    async def _create_log(self, path: PhysicalTablePath, remote: BucketRemote) -> None:
        bucket = remote.bucket
        remote_end = remote.remote_end_offset or 0
        end = max([remote_end, *(s.log_offset for s in remote.snapshots)])
        directory = self._kv.directory(path, bucket)
        if has_state(directory):
            end = max(end, read_state(directory).flushed_offset)
        settings = self._context.buckets.table(bucket.table_id).settings
        if settings.tiered:
            lake_end = await self._context.gateway.lake_offset(path.path, bucket)
            if settings.kv is not None and lake_end > end:
                raise _lake_is_ahead(path, bucket, lake_end, end)
            end = max(end, lake_end)
        if end == 0:
            return
        writers, timestamp = await self._writers(remote, bucket)
        log.error(
            "log_restored", bucket=str(bucket), end=end, remote_end=remote_end,
            lost=f"{remote_end} to {end - 1}" if remote_end < end else None,
        )  # fmt: skip
        await asyncio.to_thread(self.logs.create_log_at, path, bucket, end, writers, timestamp)

    async def _writers(self, remote: BucketRemote, bucket: TableBucket) -> tuple[bytes, int]:
        """The writers at the furthest known offset, and the timestamp of the last batch.

        They come from a snapshot beyond the remote log, or else from the end of the remote log.
        """
        at_end = await self.writers_at_end(remote)
        for handle in reversed(remote.snapshots):
            if handle.log_offset <= (remote.remote_end_offset or 0):
                break
            known = await self._snapshot_writers(handle, bucket)
            if known is not None:
                writers, latest = known
                return writers, max(at_end[1], latest)
        return at_end

    async def writers_at_end(self, remote: BucketRemote) -> tuple[bytes, int]:
        """The writers at the end of the remote log, and the timestamp of its last batch."""
        manifest = await self.manifest(remote)
        segments = [] if manifest is None else manifest.segments
        timestamp = segments[-1].max_timestamp if segments else 0
        remote_end = remote.remote_end_offset or 0
        if not segments or segments[-1].end_offset < remote_end:  # the last ones were lost
            return WriterState(0).to_json(), timestamp
        file = segments[-1].writer_snapshot
        return await self._storage.read(file, limit=WRITERS_BYTES_MAX), timestamp

    async def _snapshot_writers(
        self, handle: SnapshotHandle, bucket: TableBucket
    ) -> tuple[bytes, int] | None:
        """The writers of a snapshot, and the timestamp of their last batch.

        None if the snapshot has no writers, as those of earlier versions, or if they can never be
        read: then the bucket continues without them, which is logged.
        """
        try:
            snapshot = await read_snapshot(self._storage, handle)
            if snapshot.writers is None:
                return None
            data = await self._storage.read(snapshot.writers, limit=WRITERS_BYTES_MAX)
            state = await asyncio.to_thread(WriterState.from_json, data, 0)
            return data, state.last_timestamp
        except (ZuflussError, ValueError) as e:
            if may_pass(e):
                raise
            log.error(
                "kv_snapshot_writers_unusable", bucket=str(bucket), snapshot=handle.snapshot_id,
                error=str(e),
            )  # fmt: skip
            return None

    async def manifest(self, remote: BucketRemote) -> LogManifest | None:
        """The manifest of a remote log, None if there is none, or it was lost with its location."""
        if remote.manifest_path is None or remote.manifest_location is None:
            return None
        lost = self._storage.locations.lost
        if remote.manifest_location in lost:
            log.error("manifest_lost", bucket=str(remote.bucket), path=remote.manifest_path)
            return None
        data = await self._storage.read_at(
            remote.manifest_location, remote.manifest_path, limit=MANIFEST_BYTES_MAX
        )
        return LogManifest.from_json(data).without_locations(lost)

    # -- the state ----------------------------------------------------------------------------

    async def discard_state(self, path: PhysicalTablePath, bucket: TableBucket) -> None:
        """Delete the state of a bucket that is not open, which remote storage has, too."""
        await self._kv.settled()
        await asyncio.to_thread(self._kv.remove, path, bucket)

    async def restore_state(
        self, replica: Replica, remote: BucketRemote
    ) -> EarlierChangelog | None:
        """Install a snapshot if the state is lost.

        Returns the part of the changelog before the log if it has to be replayed.
        """
        directory = self._kv.directory(replica.path, replica.bucket)
        start = replica.log.log_start_offset
        there = has_state(directory)
        if there and read_state(directory).flushed_offset >= start:
            return None
        earlier = self.earlier(await self.manifest(remote), start, directory)
        first = start if earlier is None else earlier.start_offset
        if not (there and read_state(directory).flushed_offset >= first):
            await self._install_newest(replica, remote.snapshots, first, directory)
        return earlier

    def earlier(
        self, manifest: LogManifest | None, until: int, directory: Path
    ) -> EarlierChangelog | None:
        """The remote part of a changelog without a loss up to an offset; None if there is none."""
        needed = () if manifest is None else manifest.unbroken(until)
        if not needed:
            return None
        fetched = FetchedSegments(
            self._storage, self._loop, self._files, directory / CHANGELOG_DIRECTORY
        )
        return EarlierChangelog(
            needed[0].start_offset, lambda offset: fetched.batches(needed, offset)
        )

    async def _install_newest(
        self,
        replica: Replica,
        snapshots: Sequence[SnapshotHandle],
        first: int,
        directory: Path,
    ) -> None:
        """Install the newest snapshot that can be read and continued."""
        problems: list[ZuflussError] = []
        for handle in reversed(snapshots):
            if not first <= handle.log_offset <= replica.log.log_end_offset:
                problems.append(_not_continued(handle, first, replica.log.log_end_offset))
                continue
            try:
                await self.install(handle, directory)
            except ZuflussError as e:
                problems.append(e)
                log.error(
                    "kv_snapshot_unusable", bucket=str(replica.bucket),
                    snapshot=handle.snapshot_id, error=str(e),
                )  # fmt: skip
                continue
            log.warning(
                "kv_state_restored", bucket=str(replica.bucket), snapshot=handle.snapshot_id,
                log_offset=handle.log_offset,
            )  # fmt: skip
            return
        if first > 0:
            reasons = "; ".join(e.message for e in problems) or "it has no snapshot"
            raise NotRestoredError(
                f"the state of {replica.bucket.named(replica.path)} is lost and its changelog "
                f"begins at offset {first}: {reasons}. The server tries again while a location "
                "does not answer; otherwise make the files readable and restart it, or drop the "
                "table",
                retriable=any(map(may_pass, problems)),
            )

    async def install(self, handle: SnapshotHandle, directory: Path) -> None:
        """Install a snapshot as the state in this directory."""
        snapshot = await read_snapshot(self._storage, handle)
        files = self._files
        incoming = await asyncio.to_thread(incoming_directory, files, directory)
        await together(self._fetch(file, incoming) for file in snapshot.files)
        state = KvState(snapshot.log_offset, snapshot.row_count or 0, {})
        await asyncio.to_thread(install, files, directory, state)

    async def _fetch(self, file: SnapshotFile, incoming: Path) -> None:
        async with self._fetching:
            await self._storage.download(file.file, incoming / file.name)


def _lake_is_ahead(
    path: PhysicalTablePath, bucket: TableBucket, lake_end: int, end: int
) -> NotRestoredError:
    """The error for a log that would give offsets again which the lake already has."""
    return NotRestoredError(
        f"the disk of {bucket.named(path)} is lost. The lake has its changes up to offset "
        f"{lake_end - 1}, remote storage only up to {end - 1}. To go on with what remote storage "
        "has, set table.datalake.enabled=false, and leave the lake table as it is; to begin anew, "
        "drop the table",
        retriable=True,
    )


def _not_continued(handle: SnapshotHandle, first: int, end: int) -> ZuflussError:
    return CorruptRecordError(
        f"snapshot {handle.snapshot_id} ends at offset {handle.log_offset}, the changelog has "
        f"{first} to {end}"
    )


class FetchedSegments:
    """Remote segments as local files, each fetched while the one before is read."""

    def __init__(
        self,
        storage: RemoteStorage,
        loop: asyncio.AbstractEventLoop,
        files: Files,
        directory: Path,
    ) -> None:
        self._storage = storage
        self._loop = loop
        self._files = files
        self._directory = directory

    def batches(self, segments: Sequence[RemoteSegment], offset: int) -> Iterator[memoryview]:
        """The batches from the segment with `offset` on. Not for the event loop."""
        needed = [segment for segment in segments if segment.end_offset > offset]
        self._files.make_directories(self._directory)
        coming = [self._fetch(segment) for segment in needed[:1]]
        try:
            for i in range(len(needed)):
                path = coming.pop().result()
                coming += [self._fetch(segment) for segment in needed[i + 1 : i + 2]]
                with path.open("rb") as file:
                    data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                self._files.unlink(path)
                yield memoryview(data)
        finally:
            wait(coming)  # a consumer that stops early may remove the directory

    def _fetch(self, segment: RemoteSegment) -> Future[Path]:
        target = self._directory / segment.segment_id

        async def fetch() -> Path:
            await self._storage.download(segment.log, target)
            return target

        return asyncio.run_coroutine_threadsafe(fetch(), self._loop)
