"""The lake side of tables: hand-outs to tiering services, and the snapshots they report.

A round of tiering calls the coordinator four times:

| step | durable afterwards |
|---|---|
| hand-out | the tiering epoch, larger than any before |
| prepare | an offsets file (`lake/offsets.py`): reported offsets merged into the previous ones |
| commit | snapshot and offsets file are the table's lake snapshot, in one transaction |
| finish | nothing: the time of the last tiering is the time of the last commit |

Only the service that holds a table prepares and commits. The queue (`lake/queue.py`) checks the
epochs of every call that carries them. Fluss's own services send none: they are let through while
such a service holds the table. After a commit with epochs they must move an offset forward, too: a
round of theirs that a service of ours has overtaken usually does not. Hand-outs and commits take
turns, so a commit that passed the check is done before the table is given to the next service.

Offsets are checked by prepare and again by commit (`lake/checks.py`), because another commit may
have come in between. They never go back, and never beyond the high watermark. The next file leaves
out the offsets of dropped partitions. Ids of partitions are never used again, so nothing is tiered
twice.

Few snapshots are kept: the newest, all from the earliest on that the service still needs, and the
newest with readable offsets. The offsets files of the others are deleted after the next commit,
those of a dropped table with its other remote files (`remote/cleaner.py`). Tablet servers get the
offsets after each commit, and all offsets when they join; a server that misses some keeps more of
its log than it must.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from zufluss.clock import Clock
from zufluss.cluster.image import ClusterImage, ImageChange, TableGone, TablePut
from zufluss.cluster.replicas import LakeOffsets
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.config.table_options import TABLE_DATALAKE_FORMAT
from zufluss.config.values import INT64_MAX
from zufluss.coordinator import records
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.lake.book import LakeBook, offsets_files
from zufluss.coordinator.lake.checks import (
    check_advance,
    check_buckets,
    check_forward,
    check_reached,
)
from zufluss.coordinator.lake.creation import LakeTableKeeper
from zufluss.coordinator.lake.offsets import Offsets, OffsetsFileError, OffsetsFiles
from zufluss.coordinator.lake.queue import HandOut, TieringQueue
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.records import LakeRecord, OffsetsFile, SnapshotRecord
from zufluss.coordinator.tablets import Tablets
from zufluss.coordinator.tasks import PendingTasks
from zufluss.errors import (
    ConfigError,
    LakeNotConfiguredError,
    LakeSnapshotNotExistError,
    TableNotExistError,
    ZuflussError,
)
from zufluss.meta.api import ConflictError
from zufluss.model.lake import LakeSnapshot
from zufluss.model.table import TableBucket, TableInfo, TablePath, unknown_table
from zufluss.remote.errors import LocationUnavailableError

log = structlog.get_logger(__name__)

SNAPSHOTS_MAX = 100
"""Snapshots of a table that are kept at most; the oldest are dropped first."""
KEEP_ALL = -1
"""Value of `LakeCommit.earliest_to_keep` that keeps all snapshots."""
PREPARED_MAX = 100
"""Prepared files of a table that may wait for their commit; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class LakeCommit:
    """A lake snapshot that a service reports."""

    table_id: int
    """The id of the table."""
    snapshot_id: int
    """The snapshot's id in the lake."""
    offsets_path: str
    """The offsets file that was prepared for it."""
    readable_path: str | None = None
    """The offsets file with the offsets that readers may rely on; None if it is unknown."""
    earliest_to_keep: int | None = None
    """The oldest snapshot that is still needed; None for only this one, `KEEP_ALL` for all."""
    hand_out: HandOut | None = None
    """The hand-out that the snapshot belongs to; None from Fluss's own tools."""


class LakeTables:
    """The lake side of every table."""

    def __init__(
        self,
        conf: Configuration,
        ledger: Ledger,
        image: ClusterImage,
        changes: Feed[Sequence[ImageChange]],
        tablets: Tablets,
        book: LakeBook,
        files: OffsetsFiles,
        lake_tables: LakeTableKeeper,
        clock_ms: Callable[[], int],
        clock: Clock = time.monotonic,
    ) -> None:
        """`clock_ms` is the wall clock, `clock` the one by which tables are handed out."""
        self.queue = TieringQueue(clock_ms, ledger.epoch, clock)
        """The tables that wait to be tiered, and those that services hold."""
        self._conf = conf
        self._ledger = ledger
        self._image = image
        self._tablets = tablets
        self._book = book
        self._files = files
        self._lake_tables = lake_tables
        self._clock_ms = clock_ms
        self._prepared: dict[int, list[str]] = {}
        self._read: dict[int, dict[str, dict[TableBucket, int]]] = {}
        self._turn = asyncio.Lock()
        self._tasks = PendingTasks("lake")
        for table in image.tables():
            self._put(table.info)
        changes.subscribe(self.changed)

    async def settle(self) -> None:
        """Wait until tablet servers were told and unneeded files were deleted."""
        await self._tasks.settle()

    def __repr__(self) -> str:
        return f"LakeTables({self.queue!r})"

    # Following the catalog

    def changed(self, changes: Sequence[ImageChange]) -> None:
        """Follow the tables that were created, altered and dropped."""
        for change in changes:
            if isinstance(change, TablePut):
                self._put(change.entry.info)
            elif isinstance(change, TableGone):
                self._drop(change.table_id)

    def _put(self, info: TableInfo) -> None:
        if info.property(TABLE_DATALAKE_FORMAT) is not None:
            self.queue.put_table(info, self._book.get(info.table_id).tiered_time)

    def _drop(self, table_id: int) -> None:
        self.queue.remove_table(table_id)
        self._lake_tables.forget(table_id)
        self._prepared.pop(table_id, None)
        self._read.pop(table_id, None)

    # Hand-outs

    async def hand_out(
        self, timeout_ms: int, names_epochs: bool = True
    ) -> tuple[TableInfo, HandOut] | None:
        """Give the table whose turn it is to one service; None when no table waits.

        Nothing is handed out while the cluster has no lake, which may change at run time.
        """
        if self._conf.get(options.DATALAKE_FORMAT) is None:
            return None
        async with self._turn:
            while (info := self.queue.next_table()) is not None:
                epoch = await self._next_epoch(info.table_id)
                if epoch is None:
                    self.queue.remove_table(info.table_id)
                    continue
                hand_out = self.queue.hand_out(info.table_id, epoch, timeout_ms, names_epochs)
                if hand_out is not None:
                    log.info("table_handed_out", table=str(info.path), tiering_epoch=epoch)
                    return info, hand_out
            return None

    async def _next_epoch(self, table_id: int) -> int | None:
        """A tiering epoch above all earlier ones; None when the table is being dropped."""
        try:
            taken = await self._ledger.take_up_to(records.tiering_epoch(table_id), 1, INT64_MAX)
        except ConflictError:
            return None
        return taken.start if taken else None

    # Snapshots

    async def prepare(
        self,
        table_id: int,
        path: TablePath,
        reported: Offsets,
        *,
        ignore_previous: bool = False,
        hand_out: HandOut | None = None,
    ) -> str:
        """Write the offsets that a snapshot will have, durably; returns the path of the file."""
        info = self._table(table_id, path)
        self._check_holder(info, hand_out)
        await check_buckets(info, reported, self._image)
        previous = {} if ignore_previous else await self._newest_offsets(info)
        if hand_out is None and self._book.get(table_id).fenced:
            check_advance(info, previous, reported)
        return await self._prepare(info, previous, reported)

    async def _prepare(self, info: TableInfo, previous: Offsets, reported: Offsets) -> str:
        table_id = info.table_id
        merged = self._merged(info, previous, reported)
        await check_reached(previous, reported, self._image, self._tablets)
        name = self._files.new_name(info)
        waiting = self._prepared.setdefault(table_id, [])
        waiting.append(name)  # before the write, or the next commit would delete the file
        del waiting[:-PREPARED_MAX]
        written = await self._files.write(info, self._home(table_id), name, merged)
        return self._files.full_path(written)

    async def commit(self, commit: LakeCommit) -> None:
        """Make a snapshot the newest one of its table; nothing happens if it is that already.

        The commit is finished even when the caller is cancelled.
        """
        await self._tasks.undisturbed(self._commit(commit))

    async def _commit(self, commit: LakeCommit) -> None:
        info = self._table(commit.table_id)
        self._check_holder(info, commit.hand_out)
        locations_version = self._files.locations_version
        record, offsets = await self._read_commit(info, commit)
        known = await self._read_ahead(info, record.snapshot_id)
        await check_reached(known, offsets, self._image, self._tablets)
        async with self._turn:
            self._check_holder(info, commit.hand_out)
            lake = self._book.get(info.table_id)
            before = lake.snapshots
            if not await self._is_news(info, before, record, offsets):
                return
            after = retained(before, record, commit.earliest_to_keep)
            async with self._files.counted(offsets_files([record]), locations_version):
                named = commit.hand_out is not None
                await self._put_lake(info, LakeRecord(self._clock_ms(), after, named))
            self._forget(info.table_id, after)
            self._lake_tables.forget(info.table_id)
            self._committed(info.table_id, record.offsets_file.path)
        log.info("lake_snapshot_committed", table=str(info.path), snapshot_id=record.snapshot_id)
        newest = after[-1]
        if newest.snapshot_id == record.snapshot_id:
            self._tasks.later(self._after_commit(info, before, newest, offsets))

    async def commit_offsets(
        self, table_id: int, path: TablePath | None, snapshot_id: int, reported: Offsets
    ) -> None:
        """The old form of a commit: prepare and commit in one call."""
        info = self._table(table_id, path)
        self._check_holder(info, None)
        await check_buckets(info, reported, self._image)
        prepared = await self._prepare(info, await self._newest_offsets(info), reported)
        await self.commit(LakeCommit(table_id, snapshot_id, prepared))

    async def snapshot(
        self, path: TablePath, snapshot_id: int | None = None, *, readable: bool = False
    ) -> LakeSnapshot:
        """The newest snapshot of a table, the newest readable one, or one by its id."""
        if readable and snapshot_id is not None:
            raise ConfigError(
                f"snapshot_id {snapshot_id} and readable together are not allowed; ask for one"
            )
        info = self._image.table(path).info
        snapshot = _find(self._book.get(info.table_id).snapshots, snapshot_id, readable)
        if snapshot is None:
            which = "readable " if readable else "" if snapshot_id is None else f"{snapshot_id} "
            missing = self._lake_tables.missing(info.table_id)
            raise LakeSnapshotNotExistError(
                f"table '{path}' (id {info.table_id}) has no lake snapshot {which}yet"
                + ("" if missing is None else f"; its lake table could not be created: {missing}")
            )
        file = snapshot.offsets_file
        if readable and snapshot.readable_file is not None:
            file = snapshot.readable_file
        offsets = await self._offsets(info, file)
        names = {
            bucket.partition_id: partition.name
            for bucket in offsets
            if bucket.partition_id is not None
            and (partition := self._image.partition_by_id(bucket.partition_id)) is not None
        }
        return LakeSnapshot(info.table_id, snapshot.snapshot_id, offsets, names)

    def _check_holder(self, info: TableInfo, hand_out: HandOut | None) -> None:
        """Raise unless the service that holds the table reports; None if it names no epochs."""
        if hand_out is not None:
            self.queue.check(hand_out)
        else:
            self.queue.check_unnamed(info.table_id)

    async def _read_ahead(self, info: TableInfo, snapshot_id: int) -> Offsets:
        """Read the files that `_is_news` compares with before the turn begins.

        Returns the offsets of the newest snapshot; empty if they cannot be read.
        """
        known = self._book.get(info.table_id).snapshots
        same = _find(known, snapshot_id, readable=False)
        newest: Offsets = {}
        for snapshot in (*([same] if same else ()), *known[-1:]):
            newest = {}
            try:
                newest = await self._offsets(info, snapshot.offsets_file)
            except OffsetsFileError as problem:  # `_is_news` raises if it needs the file
                log.debug("lake_offsets_not_read", table=str(info.path), error=str(problem))
        return newest

    async def _is_news(
        self,
        info: TableInfo,
        before: Sequence[SnapshotRecord],
        record: SnapshotRecord,
        offsets: Offsets,
    ) -> bool:
        """Whether a commit changes anything; raises if it contradicts the kept snapshots."""
        same = _find(before, record.snapshot_id, readable=False)
        if same is not None:
            if self._live(await self._offsets(info, same.offsets_file)) != self._live(offsets):
                raise ConfigError(
                    f"lake snapshot {record.snapshot_id} of table '{info.path}' was committed "
                    f"with other offsets before; a snapshot has one set of offsets for ever"
                )
            return record.readable_file is not None and same.readable_file is None
        if before:
            try:
                newest = await self._offsets(info, before[-1].offsets_file)
            except OffsetsFileError as problem:
                log.error("lake_offsets_lost", table=str(info.path), error=str(problem))
                return True
            check_forward(info, self._live(newest), offsets)
        return True

    async def _read_commit(
        self, info: TableInfo, commit: LakeCommit
    ) -> tuple[SnapshotRecord, dict[TableBucket, int]]:
        name = self._files.resolve(info, commit.offsets_path)
        offsets = await self._files.read(info, name)
        readable = None
        if commit.readable_path is not None:
            readable = self._files.resolve(info, commit.readable_path)
            check_forward(info, await self._files.read(info, readable), offsets)
        return SnapshotRecord(commit.snapshot_id, name, readable), offsets

    async def _put_lake(self, info: TableInfo, lake: LakeRecord) -> None:
        try:
            await self._book.put(info.table_id, lake)
        except ConflictError as conflict:
            raise _gone(info.table_id, info.path) from conflict

    def _committed(self, table_id: int, path: str) -> None:
        """Forget the committed file and all files prepared before: they are never committed."""
        waiting = self._prepared.get(table_id, [])
        if path in waiting:
            del waiting[: waiting.index(path) + 1]

    # Offsets

    async def _newest_offsets(self, info: TableInfo) -> dict[TableBucket, int]:
        snapshots = self._book.get(info.table_id).snapshots
        return await self._offsets(info, snapshots[-1].offsets_file) if snapshots else {}

    async def _offsets(self, info: TableInfo, file: OffsetsFile) -> dict[TableBucket, int]:
        """The offsets in a file; files of kept snapshots are read once."""
        offsets = self._read.get(info.table_id, {}).get(file.path)
        if offsets is None:
            offsets = await self._files.read(info, file)
            if file.path in _paths(self._book.get(info.table_id).snapshots):
                self._read.setdefault(info.table_id, {})[file.path] = offsets
        return offsets

    def _forget(self, table_id: int, kept_snapshots: Sequence[SnapshotRecord]) -> None:
        """Forget the offsets of snapshots that are not kept."""
        read, paths = self._read.get(table_id, {}), _paths(kept_snapshots)
        for path in [path for path in read if path not in paths]:
            del read[path]

    def _live(self, offsets: Offsets) -> dict[TableBucket, int]:
        """The offsets without those of dropped partitions."""
        return {b: o for b, o in offsets.items() if self._image.leader(b) is not None}

    def _merged(
        self, info: TableInfo, previous: Offsets, reported: Offsets
    ) -> dict[TableBucket, int]:
        live = self._live(previous)
        check_forward(info, {b: o for b, o in live.items() if b in reported}, reported)
        return live | dict(reported)

    async def offset(self, path: TablePath, bucket: TableBucket) -> int:
        """The offset up to which the lake has all rows of a bucket; 0 where it has none."""
        try:
            snapshot = await self.snapshot(path)
        except LakeSnapshotNotExistError:
            return 0
        return snapshot.offsets.get(bucket, 0)

    async def leave(self, location_id: int) -> None:
        """Write the offsets files of a lost location anew elsewhere, from memory.

        Older snapshots whose offsets are not known any more are forgotten. Raises if those of the
        newest snapshot of a table are not.
        """
        failure: ZuflussError | None = None
        for info in [entry.info for entry in self._image.tables()]:
            try:
                await self._tasks.undisturbed(self._leave(info, location_id))
            except ZuflussError as problem:
                log.error("lake_offsets_lost", table=str(info.path), error=str(problem))
                failure = problem
        if failure is not None:
            raise failure

    async def _leave(self, info: TableInfo, location_id: int) -> None:
        async with self._turn:
            lake = self._book.get(info.table_id)
            files = offsets_files(lake.snapshots)
            lost = [f for f in files if self._files.location(None, f) == location_id]
            if not lost:
                return
            locations_version = self._files.locations_version
            written: dict[OffsetsFile, OffsetsFile] = {}
            for file in lost:
                try:
                    offsets = await self._offsets(info, file)
                except ZuflussError:
                    if file == lake.snapshots[-1].offsets_file:
                        raise
                    continue
                name = self._files.new_name(info)
                written[file] = await self._files.write(
                    info, self._home(info.table_id), name, offsets
                )
                self._read.setdefault(info.table_id, {})[name] = offsets
            after = tuple(
                replace(
                    snapshot,
                    offsets_file=written.get(snapshot.offsets_file, snapshot.offsets_file),
                    readable_file=readable,
                )
                for snapshot in lake.snapshots
                if snapshot.offsets_file in written or snapshot.offsets_file not in lost
                for readable in [_moved(snapshot.readable_file, lost, written)]
            )
            async with self._files.counted(written.values(), locations_version):
                await self._put_lake(info, replace(lake, snapshots=after))
            self._forget(info.table_id, after)

    # Telling tablet servers

    def server_joined(self, server_id: int) -> None:
        """Send a tablet server the lake offsets of all its buckets."""
        self._tasks.later(self._tell_everything(server_id))

    async def _tell_everything(self, server_id: int) -> None:
        news: list[LakeOffsets] = []
        for info, newest in self._book.newest():
            try:
                offsets = await self._offsets(info, newest.offsets_file)
            except (OffsetsFileError, LocationUnavailableError) as problem:
                log.error("lake_offsets_not_told", table=str(info.path), error=str(problem))
                continue
            news += [
                replace(o, replicas=(server_id,))
                for o in self._lake_offsets(newest.snapshot_id, offsets)
                if server_id in o.replicas
            ]
        await self._tablets.notify_lake_offsets(news)

    async def _after_commit(
        self,
        info: TableInfo,
        before: Sequence[SnapshotRecord],
        newest: SnapshotRecord,
        offsets: Offsets,
    ) -> None:
        await self._tablets.notify_lake_offsets(self._lake_offsets(newest.snapshot_id, offsets))
        try:
            await self._remove_unneeded(info, before)
        except ZuflussError as problem:
            log.warning("lake_files_left", table=str(info.path), error=str(problem))

    async def _remove_unneeded(self, info: TableInfo, before: Sequence[SnapshotRecord]) -> None:
        """Delete the offsets files of a table that are neither kept nor prepared."""
        now = self._book.get(info.table_id).snapshots
        places = {self._files.location(self._home(info.table_id))}
        places.update(self._files.location(None, file) for file in offsets_files([*before, *now]))
        there = await self._files.find(info, sorted(places))
        await self._ledger.confirm()  # else these may be files of the next coordinator
        keep = _paths(self._book.get(info.table_id).snapshots)
        keep.update(self._prepared.get(info.table_id, ()))
        await self._files.delete(file for file in there if file.path not in keep)

    def _lake_offsets(self, snapshot_id: int, offsets: Offsets) -> list[LakeOffsets]:
        return [
            LakeOffsets(bucket, snapshot_id, offset, state.replicas)
            for bucket, offset in offsets.items()
            if (state := self._image.bucket_state(bucket)) is not None
        ]

    # Tables

    def _table(self, table_id: int, path: TablePath | None = None) -> TableInfo:
        entry = self._image.table_by_id(table_id)
        if entry is None or path not in (None, entry.info.path):
            raise _gone(table_id, path)
        format = entry.info.property(TABLE_DATALAKE_FORMAT)
        if format is None or self._conf.get(options.DATALAKE_FORMAT) is None:
            raise LakeNotConfiguredError(
                f"table '{entry.info.path}' has lake format {format}, the cluster "
                f"{self._conf.get(options.DATALAKE_FORMAT)}; set {options.DATALAKE_FORMAT.key} on "
                f"the servers, and {TABLE_DATALAKE_FORMAT.key} when creating the table"
            )
        return entry.info

    def _home(self, table_id: int) -> int | None:
        """The remote location of a table; None for a table that is older than locations."""
        entry = self._image.table_by_id(table_id)
        return None if entry is None else entry.remote_location


def retained(
    before: Sequence[SnapshotRecord], new: SnapshotRecord, earliest: int | None
) -> tuple[SnapshotRecord, ...]:
    """The snapshots to keep when a new one is committed, the newest last.

    A snapshot that is committed again stays in its place. All snapshots from `earliest` on are
    kept; all of them if `earliest` is unknown, since ids have no order. The newest readable one is
    kept in any case.
    """
    ids = [s.snapshot_id for s in before]
    if new.snapshot_id in ids:
        return tuple(new if s.snapshot_id == new.snapshot_id else s for s in before)
    stay: list[SnapshotRecord] = []
    if earliest is not None:
        stay = list(before[ids.index(earliest) if earliest in ids else 0 :])
    stay = stay[-(SNAPSHOTS_MAX - 2) :]
    readable = _find(before, None, readable=True)
    if new.readable_file is None and readable is not None and readable not in stay:
        stay.insert(0, readable)
    return (*stay, new)


def _find(
    snapshots: Sequence[SnapshotRecord], snapshot_id: int | None, readable: bool
) -> SnapshotRecord | None:
    for each in reversed(snapshots):
        if snapshot_id in (None, each.snapshot_id) and (each.readable_file or not readable):
            return each
    return None


def _moved(
    file: OffsetsFile | None,
    lost: Sequence[OffsetsFile],
    written: Mapping[OffsetsFile, OffsetsFile],
) -> OffsetsFile | None:
    """The file in its new place; None if it was lost."""
    return file if file is None or file not in lost else written.get(file)


def _paths(snapshots: Iterable[SnapshotRecord]) -> set[str]:
    return {file.path for file in offsets_files(snapshots)}


def _gone(table_id: int, path: TablePath | None) -> ZuflussError:
    name = unknown_table(table_id) if path is None else f"table '{path}' with id {table_id}"
    return TableNotExistError(f"{name} does not exist any more")
