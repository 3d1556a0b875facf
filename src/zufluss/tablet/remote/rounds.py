"""One round of a remote log: copy new segments, drop expired ones, empty drained locations.

Every change takes the same steps, and a crash between any two of them loses nothing:

1. Files are uploaded. Nothing refers to them yet: after a crash the sweep deletes them.
2. A manifest that lists the new files, or does not list dropped files any more, is uploaded.
3. The coordinator commits the manifest, if it derives from the committed one and is the leader's.
4. This server takes the manifest over. Only now files may be deleted: copied segments on this
   server, by local retention; dropped remote files a round later, because readers may be at them.

When the coordinator's answer to 3 is lost, the manifest stays *pending*: the coordinator is asked
which manifest is committed, the same commit is sent again until that is known, and nothing is
deleted meanwhile. The commit is not sent again when the files of the manifest may be gone, because
the sweep deleted them or their location was retired. Then everything is copied again, and also when
the coordinator refuses the commit because a location was moved since the round began: the files may
lie at the former address.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from zufluss.cluster.remote import BucketRemote, ManifestCommit
from zufluss.errors import (
    CorruptRecordError,
    ErrorCode,
    LocationMovedError,
    ZuflussError,
    error,
)
from zufluss.log.export import Export, export
from zufluss.log.holds import RECORD_HOLDERS, Holder
from zufluss.log.manager import LogManager
from zufluss.log.segment import Segment
from zufluss.remote.errors import ObjectCorruptError
from zufluss.remote.files import RemoteFile, usage
from zufluss.remote.layout import new_manifest, segment_file
from zufluss.remote.locations import AdminState, Health
from zufluss.remote.manifest import FILES, MANIFEST_BYTES_MAX, LogManifest, RemoteSegment
from zufluss.remote.placement import Policy, Spread
from zufluss.remote.storage import NoLocationError, RemoteStorage, Upload
from zufluss.replica.remote_log import PendingManifest, RemoteLog
from zufluss.replica.replica import Replica
from zufluss.tablet.remote.context import RemoteContext

SEGMENTS_PER_COMMIT: Final = 8
"""Segments that are copied before their manifest is committed and other buckets get a turn."""
MOVED_PER_ROUND: Final = 4
"""Segments that leave drained locations in one round of a bucket."""
GARBAGE_MAX: Final = 10_000
"""Files that are kept to be deleted later; more are left to the sweep."""
UNKNOWN: Final = (OSError, TimeoutError)
"""Errors of a call to the coordinator besides those of the protocol; its outcome is unknown."""

SUFFIXES: Final = tuple(f".{name}" for name in FILES)

log = structlog.get_logger(__name__)


def due(
    replica: Replica, remote: RemoteLog, now_ms: int, storage: RemoteStorage, *, copies: bool
) -> bool:
    """Whether a bucket needs a round; cheap, since most do not."""
    return bool(
        not remote.loaded
        or remote.pending is not None
        or remote.garbage
        or _is_lost(remote, storage)
        or (copies and replica.log.closed_from(remote.copied_to))
        or expired_count(replica, remote, now_ms)
        or _drained(remote, storage)
        or _manifest_drained(remote, storage)
    )


def expired_count(replica: Replica, remote: RemoteLog, now_ms: int) -> int:
    """How many of the oldest remote segments may go: expired, and held by nobody."""
    holds, ttl_ms = replica.log.holds, replica.log.config.ttl_ms
    if ttl_ms <= 0 or (replica.kv is not None and holds.offset(Holder.SNAPSHOT) is None):
        return 0
    limit = holds.floor(replica.log.high_watermark, *RECORD_HOLDERS)
    count = 0
    for segment in remote.manifest.segments:
        if segment.max_timestamp >= now_ms - ttl_ms or segment.end_offset > limit:
            break
        count += 1
    return count


def _drained(remote: RemoteLog, storage: RemoteStorage) -> list[RemoteSegment]:
    """Segments in locations that are being drained."""
    leaving = _leaving(storage)
    return [s for s in remote.manifest.segments if s.location_id in leaving] if leaving else []


def _manifest_drained(remote: RemoteLog, storage: RemoteStorage) -> bool:
    return remote.manifest_file is not None and remote.manifest_file[0] in _leaving(storage)


def _leaving(storage: RemoteStorage) -> set[int]:
    locations = storage.locations.locations
    stay = (AdminState.ACTIVE, AdminState.LOST)  # nothing can be moved out of a lost location
    return {x.location_id for x in locations if x.state not in stay}


def _is_lost(remote: RemoteLog, storage: RemoteStorage) -> bool:
    """Whether segments or the manifest lie in a location that was destroyed."""
    lost = storage.locations.lost
    if not lost:
        return False
    in_lost = remote.manifest_file is not None and remote.manifest_file[0] in lost
    return in_lost or any(s.location_id in lost for s in remote.manifest.segments)


def take_note(remote: RemoteLog, bucket_remote: BucketRemote) -> None:
    """Note in a remote log what the coordinator knows of it."""
    if bucket_remote.manifest_path is None or bucket_remote.manifest_location is None:
        remote.note_manifest(None, 0, 0)
    else:
        remote.note_manifest(
            (bucket_remote.manifest_location, bucket_remote.manifest_path),
            bucket_remote.remote_start_offset or 0,
            bucket_remote.remote_end_offset or 0,
        )


@dataclass(frozen=True, slots=True)
class RemoteRoundSettings:
    """What the rounds of a server share besides remote storage."""

    logs: LogManager
    """Local retention, after segments were copied."""
    clock_ms: Callable[[], int]
    moving_directory: Path
    """Where segments lie on their way from one location to another."""
    sweep_grace_seconds: float
    """How long files that nothing refers to are safe from the sweep."""


class RemoteRound:
    """One round of one bucket."""

    def __init__(
        self,
        context: RemoteContext,
        settings: RemoteRoundSettings,
        replica: Replica,
        remote: RemoteLog,
    ) -> None:
        self.context = context
        self.settings = settings
        self.replica = replica
        self.remote = remote
        self.storage = context.storage
        self.files = context.files
        self._loop = asyncio.get_running_loop()
        self.begun = self._loop.time()
        self.locations_version = self.storage.locations.version
        """Every file of this round is uploaded under this version of the registry or a later."""
        self.uploaded: list[RemoteFile] = []
        """Files of this round that no committed manifest has yet."""

    async def run(self, *, copies: bool = True) -> bool:
        """Carry out the steps that are due; returns whether more segments are to be copied.

        A step that fails is repeated in the next round. Without `copies` no segments are copied;
        remote segments are kept until they expire, and the log expires here only after them.
        """
        remote = self.remote
        if not remote.loaded:
            await self._load()
        if remote.pending is not None:
            await self._settle(remote.pending, send=not self._may_be_gone(remote.pending))
        problem: Exception | None = None
        copy = (self._copy,) if copies else ()
        steps = (self._forget_lost, self._delete_garbage, self._expire, *copy, self._leave_drained)
        for step in steps:
            try:
                await step()
            except (ZuflussError, *UNKNOWN) as e:  # one location's failure stops no other step
                problem = problem or e
            if remote.pending is not None or not remote.loaded:
                break
        if problem is not None:
            raise problem
        return copies and bool(self._to_copy())

    # -- what is there --------------------------------------------------------------------------

    async def _load(self) -> None:
        """Read the committed manifest."""
        remote = self.remote
        if remote.range is None or remote.failures:
            take_note(remote, await self.context.bucket_remote(self.replica.bucket))
        manifest = LogManifest(self.replica.path, self.replica.bucket)
        if remote.manifest_file is not None:
            if remote.manifest_file[0] in self.storage.locations.lost:
                log.error("manifest_lost", log=str(self.replica.log), range=remote.range)
            else:
                manifest = await self._read_manifest(*remote.manifest_file)
        remote.take_over(manifest, remote.manifest_file)
        log.debug("remote_log_read", log=str(self.replica.log), range=remote.range)

    async def _read_manifest(self, location_id: int, path: str) -> LogManifest:
        data = await self.storage.read_at(location_id, path, limit=MANIFEST_BYTES_MAX)
        manifest = await asyncio.to_thread(LogManifest.from_json, data)
        end = manifest.end_offset or 0
        if manifest.bucket != self.replica.bucket:
            raise CorruptRecordError(
                f"manifest {self.storage.uri(location_id)}/{path} is of table id "
                f"{manifest.bucket.table_id}, bucket {manifest.bucket.bucket_id}, not of "
                f"{self.replica.bucket.named(self.replica.path)}"
            )
        if end > self.replica.log.log_end_offset:
            raise CorruptRecordError(
                f"{self.replica.log} ends at {self.replica.log.log_end_offset}, but remote storage "
                f"has it up to {end}: nothing is copied there until the log on this server was "
                "restored"
            )
        return manifest

    # -- changes --------------------------------------------------------------------------------

    async def _upload(self, uploads: Sequence[Upload]) -> list[RemoteFile]:
        bucket, context = self.replica.bucket, self.context
        return await self.storage.upload(uploads, context.policy(bucket), context.home(bucket))

    async def _commit(
        self,
        manifest: LogManifest,
        removed: Sequence[RemoteFile],
        copied_to: int | None = None,
    ) -> None:
        """Upload a manifest and commit it at the coordinator; see `PendingManifest`."""
        path = new_manifest(self.remote.directory)
        data = await asyncio.to_thread(manifest.to_json)
        file = await self._upload_manifest(manifest, Upload(path, data))
        self.uploaded.append(file)
        self.files.reach("remote-manifest")
        self.remote.pending = PendingManifest(
            manifest, file, tuple(removed), self.begun, self.locations_version, copied_to
        )
        await self._settle(self.remote.pending)

    async def _upload_manifest(self, manifest: LogManifest, upload: Upload) -> RemoteFile:
        """Write a manifest beside its newest segment, if that is possible.

        It takes no turn of the round-robin: where each segment comes with a manifest, every second
        location would get nothing but manifests.
        """
        if manifest.segments:
            beside = Policy(Spread.PINNED, (manifest.segments[-1].location_id,))
            try:
                [file] = await self.storage.upload([upload], beside)
                return file
            except NoLocationError as e:
                log.info("manifest_goes_elsewhere", log=str(self.replica.log), reason=str(e))
        [file] = await self._upload([upload])
        return file

    def _may_be_gone(self, pending: PendingManifest) -> bool:
        """Whether the sweep or a retired location may have deleted files of a pending manifest."""
        if self._loop.time() - pending.since > self.settings.sweep_grace_seconds / 2:
            return True
        locations = self.storage.locations.locations
        there = {x.location_id for x in locations if x.state is not AdminState.RETIRED}
        return not there.issuperset(f.location_id for f in (pending.file, *pending.manifest.files))

    async def _settle(self, pending: PendingManifest, *, send: bool = True) -> None:
        """Find out whether a pending manifest is committed; commits it again if `send` is set."""
        taken, problem = False, None
        try:
            if send:
                taken = await self.context.gateway.commit_manifest(self._as_commit(pending))
        except (ZuflussError, *UNKNOWN) as e:
            problem = e
        base = self.remote.manifest_file
        if not taken:
            counts = (await self.context.bucket_remote(self.replica.bucket)).manifest_path
            taken = counts == pending.file.path
            if not taken and problem is not None and counts == (base and base[1]):
                if isinstance(problem, LocationMovedError):
                    self.remote.pending = None  # each commit of it is refused, also one under way
                raise problem
        if not taken:
            await self._refused(pending, problem)
        self.files.reach("remote-committed")
        self._take_over(pending, base)

    def _as_commit(self, pending: PendingManifest) -> ManifestCommit:
        manifest, remote = pending.manifest, self.remote
        end = manifest.end_offset
        start = manifest.start_offset
        nothing_at = remote.copied_to if pending.copied_to is None else pending.copied_to
        return ManifestCommit(
            self.replica.bucket,
            self.replica.leader_epoch,
            pending.file.location_id,
            pending.file.path,
            nothing_at if start is None else start,
            nothing_at if end is None else end,
            usage(manifest.files),
            None if remote.manifest_file is None else remote.manifest_file[1],
            pending.locations_version,
        )

    def _take_over(self, pending: PendingManifest, base: tuple[int, str] | None) -> None:
        remote = self.remote
        remote.pending = None
        file = pending.file.location_id, pending.file.path
        remote.take_over(pending.manifest, file, pending.copied_to)
        remote.garbage += pending.removed
        if base is not None:
            remote.garbage.append(RemoteFile(*base, 0, 0))
        del remote.garbage[:-GARBAGE_MAX]
        self.uploaded.clear()

    async def _refused(self, pending: PendingManifest, problem: Exception | None) -> None:
        """Discard a pending manifest because another one is committed."""
        self.remote.pending = None
        self.remote.unload()
        if problem is None:  # otherwise the commit may still be under way somewhere
            await self._delete(self.uploaded)
        raise error(
            ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION,
            f"manifest {pending.file.path} of {self.replica.log} was not committed: another "
            "manifest or leader came first, or its outcome was unknown for too long",
        ) from problem

    # -- copying --------------------------------------------------------------------------------

    async def _copy(self) -> None:
        """Copy closed segments, oldest first, and let local retention delete the copied ones."""
        segments = self._to_copy()[:SEGMENTS_PER_COMMIT]
        if not segments:
            return
        self._check_placeable()
        self.remote.hold_back_from(self.remote.manifest.end_offset or 0)  # no hole behind us
        try:
            problem = await self._copy_some(segments)
        finally:
            self.remote.guard()
        self.files.reach("remote-local-delete")
        self.settings.logs.expire_log(self.replica.log, self.settings.clock_ms())
        if problem is not None:
            raise problem

    async def _copy_some(self, segments: Sequence[tuple[Segment, int]]) -> Exception | None:
        """Copy segments and commit those that were copied; returns the first failure."""
        manifest, problem = self.remote.manifest, None
        for segment, end in segments:
            try:
                copied = await self._copied(segment, end)
                manifest = manifest.appended(self._after_loss(manifest, copied))
            except (ZuflussError, *UNKNOWN) as e:
                problem = e
                break
        if manifest is not self.remote.manifest:
            await self._commit(manifest, ())
        return problem

    def _check_placeable(self) -> None:
        """Raise if no location takes files at present, before files are prepared."""
        policy, storage = self.context.policy(self.replica.bucket), self.storage
        if not any(
            x.takes_files
            and policy.allows(x.location_id)
            and storage.health(x.location_id) is not Health.DOWN
            for x in storage.locations.live
        ):
            raise error(
                ErrorCode.STORAGE_EXCEPTION,
                f"no location of policy {policy} takes files at present; segments of "
                f"{self.replica.log} stay where they are",
            )

    def _to_copy(self) -> list[tuple[Segment, int]]:
        """Closed segments after the remote log.

        Raises if the next one does not continue the remote log, unless the records in between were
        lost: then the log on this server begins with that segment (`restore.py`).
        """
        replica_log, end = self.replica.log, self.remote.manifest.end_offset
        segments = replica_log.closed_from(self.remote.copied_to)
        if segments and end is not None:
            start = segments[0][0].base_offset
            if start != end and not end < start == replica_log.log_start_offset:
                raise error(
                    ErrorCode.STORAGE_EXCEPTION,
                    f"the next segment of {replica_log} begins at offset {start}, but remote "
                    f"storage has the log up to {end}: nothing is copied",
                )
        return segments

    def _after_loss(self, manifest: LogManifest, segment: RemoteSegment) -> RemoteSegment:
        """The segment, with the number of records that were lost before it."""
        end = manifest.end_offset
        if end is None or segment.start_offset == end:
            return segment
        log.error(
            "remote_log_continues_after_loss",
            log=str(self.replica.log),
            first_offset=end,
            last_offset=segment.start_offset - 1,
        )
        return replace(segment, lost_before=segment.start_offset - end)

    async def _copied(self, segment: Segment, end: int) -> RemoteSegment:
        expiry_ms = self.replica.log.config.writer_expiry_ms
        try:
            exported = await asyncio.to_thread(export, segment, end, self.files, expiry_ms)
        except CorruptRecordError as e:
            if self.replica.log.shared:  # the shared log has it, too: the disk is a cache
                self.settings.logs.distrust(self.replica.bucket)
                self.replica.fail(f"its log on this disk is damaged ({e.message})")
            raise
        copied = await self._upload_segment(exported)
        self.files.reach("remote-uploaded")
        log.info(
            "segment_copied",
            log=str(self.replica.log),
            start=exported.start_offset,
            end=end,
            bytes=copied.log.size,
            location=copied.location_id,
        )
        return copied

    async def _upload_segment(self, exported: Export) -> RemoteSegment:
        segment_id = str(uuid.uuid4())
        start, end = exported.start_offset, exported.end_offset
        sources: tuple[Path | bytes, ...] = (
            exported.log,
            exported.index,
            exported.timeindex,
            exported.writer_snapshot,
        )
        uploads = [
            Upload(segment_file(self.remote.directory, segment_id, offset, suffix), source)
            for offset, suffix, source in zip(
                (start, start, start, end), SUFFIXES, sources, strict=True
            )
        ]
        files = await self._upload(uploads)
        self.uploaded += files
        return RemoteSegment(segment_id, start, end, exported.max_timestamp, *files)

    # -- leaving --------------------------------------------------------------------------------

    async def _expire(self) -> None:
        """Remove segments from the manifest that outlived the table's time to live."""
        remote = self.remote
        count = expired_count(self.replica, remote, self.settings.clock_ms())
        if count:
            gone = remote.manifest.segments[:count]
            await self._commit(
                remote.manifest.without(count), [file for s in gone for file in s.files]
            )
            log.info("remote_segments_expired", log=str(self.replica.log), count=count)

    async def _forget_lost(self) -> None:
        """Remove the segments of destroyed locations from the manifest.

        From the first lost segment on that this server still has, everything is copied again.
        """
        remote, lost = self.remote, self.storage.locations.lost
        if not _is_lost(remote, self.storage):
            return
        self._check_placeable()
        here = self.replica.log.log_start_offset
        before = remote.manifest
        again = [s for s in before.segments if s.start_offset >= here and s.location_id in lost]
        copied_to = before.end_offset or here
        left = before
        if again or not before.segments:
            copied_to = again[0].start_offset if again else here
            left = replace(
                before, segments=tuple(s for s in before.segments if s.end_offset <= copied_to)
            )
        left = left.without_locations(lost)
        kept = {s.segment_id for s in left.segments}
        dropped = [s for s in before.segments if s.segment_id not in kept]
        removed = [f for s in dropped for f in s.files if f.location_id not in lost]
        await self._commit(left, removed, copied_to)
        log.error(
            "remote_segments_lost",
            log=str(self.replica.log),
            lost=[(s.start_offset, s.end_offset) for s in dropped if s.end_offset <= here],
            copied_again_from=copied_to,
        )

    async def _leave_drained(self) -> None:
        """Move a few segments, and the manifest, out of locations that are to become empty."""
        remote = self.remote
        leaving = _drained(remote, self.storage)[:MOVED_PER_ROUND]
        if not leaving and not _manifest_drained(remote, self.storage):
            return
        self._check_placeable()
        moved = {s.segment_id: await self._moved(s) for s in leaving}
        segments = [moved.get(s.segment_id, s) for s in remote.manifest.segments]
        manifest = LogManifest(remote.manifest.path, remote.manifest.bucket, tuple(segments))
        await self._commit(manifest, [file for s in leaving for file in s.files])
        log.info("remote_segments_moved", log=str(self.replica.log), count=len(leaving))

    async def _moved(self, segment: RemoteSegment) -> RemoteSegment:
        """A copy of a segment in a location that stays."""
        directory = self.settings.moving_directory
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / f"{uuid.uuid4()}.log"
        try:
            await self.storage.download(segment.log, target)
            limit = max(file.size for file in segment.files[1:])
            beside = [await self.storage.read(f, limit=limit) for f in segment.files[1:]]
            start, end = segment.start_offset, segment.end_offset
            copy = await self._upload_segment(
                Export(start, end, segment.max_timestamp, target, *beside)
            )
        finally:
            target.unlink(missing_ok=True)
        for before, after in zip(segment.files, copy.files, strict=True):
            if before[2:] != after[2:]:
                raise ObjectCorruptError(
                    self.storage.uri(after.location_id), after.path, "it changed while it was moved"
                )
        return replace(copy, lost_before=segment.lost_before)

    async def _delete_garbage(self) -> None:
        garbage, self.remote.garbage = self.remote.garbage, []
        try:
            await self._delete(garbage)
        except ZuflussError:
            self.remote.garbage += garbage
            raise

    async def _delete(self, files: Sequence[RemoteFile]) -> None:
        if files:
            self.files.reach("remote-delete")
            known = {x.location_id for x in self.storage.locations.live}
            await self._delete_in_retired([x for x in files if x.location_id not in known])
            await self.storage.delete([x for x in files if x.location_id in known])

    async def _delete_in_retired(self, files: Sequence[RemoteFile]) -> None:
        """Try once to delete files in retired locations, which may be gone."""
        try:
            await self.storage.delete(files)
        except ZuflussError as e:
            log.warning("left_in_retired_location", files=len(files), reason=str(e))
