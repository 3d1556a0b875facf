"""All logs of a server: where they live, in which order they come up, how they become durable.

The order of a start matters. The commit log is read first; then every log is opened with the
entries the commit log has for it, and is durable in its own files when `open_log` returns; when all
logs the catalog knows are open, `started` lets the commit log be used again, and entries of dropped
tables are forgotten. If a log refused to open, the commit files are set aside: they may hold the
end of that log, and the next start reads them again.

A log that failed while it served is opened again by `reopen_log`, in a thread, as after a crash:
the syncs under way are awaited, and its part of the commit log is read again.

`commit` is the one place that knows the flush mode. The owner appends, calls `commit` with the
outcome, and `schedule` once per turn of the event loop.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from zufluss.errors import CorruptRecordError, LogStorageError
from zufluss.log.checkpoint import read_mark
from zufluss.log.commit import FILE_BYTES, GroupCommit, OnDurable
from zufluss.log.commit_log import (
    EntryKey,
    entries_of,
    keep,
    kept_in,
    key_of,
    paths_in,
    read_commit_log,
)
from zufluss.log.config import FlushMode, LogConfig
from zufluss.log.files import Files
from zufluss.log.flush import LogFlusher
from zufluss.log.log import Log
from zufluss.log.recovery import ReplayEntry, continuing
from zufluss.log.retention import remove_deleted
from zufluss.log.segment import DELETED_SUFFIX
from zufluss.log.worker import ThreadWorker, Worker
from zufluss.model.table import PhysicalTablePath, TableBucket

COMMIT_DIRECTORY = ".commit-log"
"""Where the commit files are; no database can have this name."""

OnFailure = Callable[[Log, Exception], None]
"""Told about a log that takes no more writes."""

COPY_BYTES_MAX = 64 << 10
"""Larger entries are synced in their segment file instead of being copied to the commit log."""

_logger = structlog.get_logger(__name__)


class LogBeginning(NamedTuple):
    """Where a log continues whose records before that lie elsewhere."""

    offset: int
    """The first offset of the log."""
    writers: bytes
    """The writer snapshot of that offset."""
    last_timestamp: int
    """The timestamp of the batch before it."""


def log_directory(data_dir: Path, path: PhysicalTablePath, bucket: TableBucket) -> Path:
    """`<data dir>/<database>/<table>-<id>[/<partition>-p<id>]/log-<bucket>`."""
    directory = data_dir / path.database / f"{path.table}-{bucket.table_id}"
    if bucket.partition_id is not None:
        directory /= f"{path.partition}-p{bucket.partition_id}"
    return directory / f"log-{bucket.bucket_id}"


def caseless(directory: Path) -> str:
    """Return the name by which file systems that do not tell `a` from `A` know a directory."""
    return str(directory).casefold()


_DATABASE = re.compile(r"[A-Za-z0-9_-]+")
_TABLE = re.compile(r"[A-Za-z0-9_-]+-\d+")
_PARTITION = re.compile(r"[A-Za-z0-9_$-]+-p\d+")
_LOG = re.compile(rf"log-\d+({re.escape(DELETED_SUFFIX)})?")


def log_directories(data_dir: Path) -> list[Path]:
    """Every directory below `data_dir` that `log_directory` can have named, deleted ones too.

    What has other names is not ours: a user may have given us a directory with something in it.
    """
    owners = owner_directories(data_dir)
    return [directory for owner in owners for directory in _directories(owner, _LOG)]


def owner_directories(data_dir: Path) -> list[Path]:
    """Directories of tables and partitions, each partition before its table."""
    databases = _directories(data_dir, _DATABASE)
    tables = [table for database in databases for table in _directories(database, _TABLE)]
    return [owner for table in tables for owner in (*_directories(table, _PARTITION), table)]


def _directories(parent: Path, name: re.Pattern[str]) -> list[Path]:
    return sorted(
        p for p in parent.iterdir() if name.fullmatch(p.name) and p.is_dir() and not p.is_symlink()
    )


class LogManager:
    """Opens, commits, expires and closes the logs of a server. Belongs to the event loop."""

    def __init__(
        self,
        data_dir: Path,
        *,
        files: Files,
        flush: FlushMode,
        on_durable: OnDurable,
        on_failure: OnFailure,
        flush_interval_ms: int = 100,
        checkpoint_interval_ms: int = 60_000,
        commit_file_bytes: int = FILE_BYTES,
        retention_rolls_active: bool = True,
        make_worker: Callable[[str], Worker] | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._files = files
        self._flush = flush
        self._on_failure = on_failure
        self.retention_rolls_active = retention_rolls_active
        """Close a segment being written when all of it has expired, so that it can go too."""
        self._interval_ms = (
            flush_interval_ms if flush is FlushMode.INTERVAL else checkpoint_interval_ms
        )
        self._logs: dict[TableBucket, Log] = {}
        self._refused: dict[TableBucket, Exception] = {}
        self._allowed: set[TableBucket] = set()
        """Logs that were refused and may be tried again."""
        self._distrusted: set[TableBucket] = set()
        """Logs of which the disk has something else than what was acknowledged."""
        self._given_up: dict[TableBucket, Log] = {}
        """Logs that failed or were closed while the server runs, and were not opened again yet."""
        self._dirty: dict[Log, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._commit_dir = data_dir / COMMIT_DIRECTORY
        for directory in (*files.make_directories(self._commit_dir), data_dir):
            files.sync_directory(directory)
        self._replay: dict[EntryKey, list[ReplayEntry]]
        self._replay, self._generation = read_commit_log(self._commit_dir)
        make_worker = make_worker or _thread_worker
        self._workers = (make_worker("zufluss-flush"), make_worker("zufluss-commit"))
        self._flusher = LogFlusher(files, self._workers[0])
        self._group = GroupCommit(
            self._commit_dir,
            files=files,
            worker=self._workers[1],
            flusher=self._flusher,
            on_durable=on_durable,
            later=lambda seconds, work: asyncio.get_running_loop().call_later(seconds, work),
            generation=self._generation,
            file_bytes=commit_file_bytes,
        )
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove logs whose deletion a crash interrupted, and directories it left empty."""
        for directory in log_directories(self._data_dir):
            if directory.name.endswith(DELETED_SUFFIX):
                self._files.remove_tree(directory)
        for owner in owner_directories(self._data_dir):
            self.remove_empty_parents(owner / "log")

    # -------------------------------------------------------------------------------------- logs

    def open_log(
        self, path: PhysicalTablePath, bucket: TableBucket, config: LogConfig, now_ms: int
    ) -> Log:
        """Open or make the log of a bucket.

        `CorruptRecordError` if its durable data is missing or damaged, `OSError` if the disk does
        not let us: serve the other buckets. A log that was refused stays so until the next start:
        only then the commit log is read, and without its entries the log would lose its end.
        """
        if bucket in self._refused:
            raise self._refused[bucket]
        try:
            log = self._open(path, bucket, config, now_ms, self._replay.get(key_of(bucket), ()))
        except Exception as e:
            self._refused[bucket] = e
            raise
        return self._add(log)

    async def reopen_log(
        self, path: PhysicalTablePath, bucket: TableBucket, config: LogConfig, now_ms: int
    ) -> Log:
        """Open a log that was refused or given up earlier, in a thread; raises as `open_log`.

        Nothing that readers have seen is lost: in the mode `ack`, a log that ends before its former
        high watermark is a `CorruptRecordError`, now and at every later start.
        """
        former = self._given_up.get(bucket)
        self._allowed.discard(bucket)
        await asyncio.gather(*(_turn(worker) for worker in self._workers))

        def open_in_thread() -> Log:
            replay = self._replay.get(key_of(bucket), ())
            if former is not None:
                replay = entries_of(self._commit_dir, bucket)
                if self._flush is FlushMode.ACK:
                    former.mark_durable(former.high_watermark, former.incarnation, sync=True)
            return self._open(path, bucket, config, now_ms, replay, renew=True)

        try:
            log = await asyncio.get_running_loop().run_in_executor(None, open_in_thread)
        except Exception as e:
            self._refused[bucket] = e
            raise
        if former is not None:
            if log.log_end_offset < former.high_watermark:  # the mode promises no more
                lost = log.log_end_offset, former.high_watermark
                _logger.error("log_end_lost", log=str(log), lost=lost)
            del self._given_up[bucket]
            self._group.forget(former)
        return self._add(log)

    def _open(
        self,
        path: PhysicalTablePath,
        bucket: TableBucket,
        config: LogConfig,
        now_ms: int,
        replay: Sequence[ReplayEntry],
        *,
        renew: bool = False,
    ) -> Log:
        return Log.open(
            log_directory(self._data_dir, path, bucket),
            config,
            files=self._files,
            now_ms=now_ms,
            bucket=bucket,
            replay=replay,
            root=self._data_dir,
            renew=renew,
        )

    def _add(self, log: Log) -> Log:
        assert log.bucket is not None
        log.on_roll, log.on_failure = self._rolled, self._on_failure
        self._logs[log.bucket] = log
        return log

    async def open_shared(
        self,
        path: PhysicalTablePath,
        bucket: TableBucket,
        config: LogConfig,
        now_ms: int,
        *,
        remote_end: int,
        beginning: Callable[[], Awaitable[LogBeginning]],
        tail: Callable[[int], Awaitable[Sequence[memoryview]]],
    ) -> Log:
        """Open a log whose end lies in the shared log; everything in it is acknowledged then.

        The disk is a cache: what was acknowledged there (the mark) stays, if remote storage does
        not end behind it and nobody distrusts it. Otherwise the log begins anew at `beginning`,
        which is at `remote_end`. `tail` returns the stamped batches from an offset on. What the
        disk has beyond the mark may not be in the shared log, so it goes, before the tail is
        appended.
        """
        self._refused.pop(bucket, None)
        self._allowed.discard(bucket)
        await asyncio.gather(*(_turn(worker) for worker in self._workers))
        loop, directory = asyncio.get_running_loop(), log_directory(self._data_dir, path, bucket)

        def cached() -> Log | None:
            mark = read_mark(directory)
            if mark is None or mark.end_offset < remote_end:
                return None
            try:
                log = self._open(path, bucket, config, now_ms, ())
            except CorruptRecordError as e:
                _logger.warning("cached_log_discarded", bucket=str(bucket), reason=e.message)
                return None
            if mark.incarnation != log.incarnation or mark.end_offset < log.log_start_offset:
                log.close(clean=False)
                return None
            log.truncate_to(mark.end_offset)
            return log

        def begun(beginning: LogBeginning | None) -> Log:
            self._discard(directory)
            if beginning is not None and beginning.offset:
                Log.create_at(directory, *beginning, self._files)
            return self._open(path, bucket, config, now_ms, ())

        def append(log: Log, batches: Sequence[memoryview]) -> None:
            for some in batches:
                log.append_stamped(some)
            log.advance_high_watermark(log.log_end_offset)

        log = None
        if bucket not in self._distrusted:
            log = await loop.run_in_executor(None, cached)
        if log is None:
            at = await beginning() if remote_end else None
            log = await loop.run_in_executor(None, begun, at)
            self._distrusted.discard(bucket)
        try:
            log.shared = True
            await loop.run_in_executor(None, append, log, await tail(log.log_end_offset))
        except BaseException as e:
            log.give_up(e if isinstance(e, Exception) else LogStorageError(f"{log} was closed"))
            raise
        former = self._given_up.pop(bucket, None)
        if former is not None:
            self._group.forget(former)
        self._flusher.flush([self._add(log)])
        return log

    def distrust(self, bucket: TableBucket) -> None:
        """Have the next `open_shared` begin anew: what the disk has of a bucket is damaged."""
        self._distrusted.add(bucket)

    def _discard(self, directory: Path) -> None:
        """Delete the files of a log that is not open, and what an earlier try left of it.

        For any thread.
        """
        deleted = directory.with_name(directory.name + DELETED_SUFFIX)
        if deleted.is_dir():
            remove_deleted(self._files, deleted)
        if directory.is_dir():
            self._files.rename(directory, deleted)
            remove_deleted(self._files, deleted)

    def refuse(self, bucket: TableBucket, reason: Exception) -> None:
        """Do not open the log of a bucket before the next start, which reads the commit log again.

        For a log that is lost and cannot be made anew at present.
        """
        self._refused[bucket] = reason

    def allow(self, bucket: TableBucket) -> None:
        """Let a refused log be opened: what was missing may be there now.

        The entries that the commit log has for the bucket were kept.
        """
        self._refused.pop(bucket, None)
        self._allowed.add(bucket)

    def settle(self, bucket: TableBucket) -> None:
        """Note that a log refused at the start is open: its kept entries are durable."""
        self._replay.pop(key_of(bucket), None)
        if not self._replay:
            for path in kept_in(self._commit_dir):
                try:
                    self._files.unlink(path)
                except OSError as e:
                    _logger.error("commit_file_not_removed", path=str(path), reason=str(e))

    def has_log(self, path: PhysicalTablePath, bucket: TableBucket) -> bool:
        """Whether the disk has a log of this bucket."""
        return log_directory(self._data_dir, path, bucket).is_dir()

    def create_log_at(
        self,
        path: PhysicalTablePath,
        bucket: TableBucket,
        offset: int,
        writers: bytes,
        last_timestamp: int,
    ) -> None:
        """Create a log that continues at `offset`, for a bucket without one. Blocks.

        `writers` is the writer snapshot of that offset. Of what the commit log has for the bucket,
        only what goes on from there still has a place. If there is more, the log is another
        incarnation: a later start, which may find that again, shall not take it for this log's end.
        """
        known = self._replay.get(key_of(bucket), [])
        incarnation = max((entry.incarnation for entry in known), default=0)
        entries = [entry for entry in known if entry.incarnation == incarnation]
        continued = continuing(entries, offset)
        incarnation += len(continued) < len(entries)
        self._replay[key_of(bucket)] = [e._replace(incarnation=incarnation) for e in continued]
        directory = log_directory(self._data_dir, path, bucket)
        Log.create_at(directory, offset, writers, last_timestamp, self._files, incarnation)

    def started(self) -> None:
        """All logs of the catalog are open, or were refused: begin to use the commit log."""
        refused = {key_of(bucket) for bucket in self._refused}
        self._replay = {key: entries for key, entries in self._replay.items() if key in refused}
        if self._refused:
            _logger.error("commit_log_kept", refused=[str(bucket) for bucket in self._refused])
            keep(self._files, self._commit_dir)
        else:
            self._drop_old_commit_files()
        if self._flush is FlushMode.ACK:
            self._group.start()
        if self._flush is not FlushMode.OS:
            self._start_timer()

    def _drop_old_commit_files(self) -> None:
        """Remove commit files that are not reused: every entry is durable in its own log."""
        for path in paths_in(self._commit_dir):
            if self._flush is not FlushMode.ACK or path.suffix != ".log":
                self._files.unlink(path)

    @property
    def logs(self) -> Iterable[Log]:
        """The open logs."""
        return self._logs.values()

    def log(self, bucket: TableBucket) -> Log | None:
        """The open log of a bucket."""
        return self._logs.get(bucket)

    def drop(self, log: Log) -> None:
        """Delete a log; its disk space is freed in the background."""
        assert log.bucket is not None
        self._logs.pop(log.bucket, None)
        self._dirty.pop(log, None)
        self._group.forget(log)
        self._remove_directory(log.delete())

    def let_go(self, log: Log) -> None:
        """Close a log that failed, or will not be served at present; `reopen_log` opens it again.

        The commit files with its entries are kept until then.
        """
        assert log.bucket is not None
        log.give_up(LogStorageError(f"{log} was closed"))
        self._dirty.pop(log, None)
        self._given_up[log.bucket] = log
        self._logs.pop(log.bucket, None)

    def is_closed(self, bucket: TableBucket) -> bool:
        """Whether a log that was allowed or given up earlier waits to be opened by `reopen_log`."""
        return bucket not in self._refused and (bucket in self._given_up or bucket in self._allowed)

    def drop_refused(self, path: PhysicalTablePath, bucket: TableBucket) -> None:
        """Delete the files of a log that is not open."""
        self._refused.pop(bucket, None)
        former = self._given_up.pop(bucket, None)
        if former is not None:
            self._group.forget(former)
        directory = log_directory(self._data_dir, path, bucket)
        if directory.is_dir():
            deleted = directory.with_name(directory.name + DELETED_SUFFIX)
            self._files.rename(directory, deleted)
            self._remove_directory(deleted)

    def _remove_directory(self, directory: Path) -> None:
        self._in_background(
            lambda: remove_deleted(self._files, directory),
            lambda: self.remove_empty_parents(directory),
        )

    def remove_empty_parents(self, directory: Path) -> None:
        """Remove parents that became empty; on the loop, where new logs are made in them."""
        for parent in directory.parents:
            if parent == self._data_dir or not _is_empty_directory(parent):
                return
            self._files.rmdir(parent)

    def expire(self, now_ms: int) -> int:
        """Delete the segments older than their table's time to live; return how many."""
        return sum(self.expire_log(log, now_ms) for log in self._logs.values())

    def expire_log(self, log: Log, now_ms: int) -> int:
        """Delete segments of one log that have had their time here; return how many."""
        log.writers.forget_expired(now_ms)
        try:
            retired = log.expire(now_ms, rolls_active=self.retention_rolls_active)
        except (CorruptRecordError, OSError) as e:
            _logger.error("log_retention_failed", log=str(log), reason=str(e))
            return 0
        if retired is None:
            return 0
        self._in_background(partial(retired.remove, self._files))
        return len(retired.segments)

    def _in_background(
        self, job: Callable[[], None], then: Callable[[], None] | None = None
    ) -> None:
        """Run a slow job in a thread, `then` something on the loop if it went well."""

        def done(outcome: object) -> None:
            if isinstance(outcome, Exception):
                _logger.error("log_work_failed", reason=str(outcome))
            elif then is not None:
                then()

        self._flusher.submit(job, done)

    # -------------------------------------------------------------------------------- durability

    def commit(self, log: Log, end_offset: int, view: memoryview) -> bool:
        """Make an appended entry durable.

        True: it may be acknowledged now, advance the high watermark to `end_offset`. False: wait
        for `on_durable`. `view` are the entry's stamped batches; they are copied if needed.
        """
        if self._flush is FlushMode.ACK:
            self._group.add(log, end_offset, view if len(view) <= COPY_BYTES_MAX else None)
            return False
        if self._flush is FlushMode.INTERVAL:
            self._dirty[log] = None
        return True

    def schedule(self) -> None:
        """Call once per turn of the event loop after commits."""
        self._group.schedule()

    def _rolled(self, log: Log) -> None:
        owed = log.take_owed_snapshot()
        if owed is not None:
            self._in_background(
                partial(log.write_owed_snapshot, owed), partial(log.snapshot_written, owed)
            )
        self._flusher.flush([log])

    async def flushed(self, log: Log) -> None:
        """Have a log synced to the disk as it is now; returns when that was tried."""
        tried = asyncio.get_running_loop().create_future()
        self._flusher.flush([log], tried.set_result)
        await tried

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_ms / 1000, self._on_timer)

    def _on_timer(self) -> None:
        if self._flush is FlushMode.INTERVAL:
            dirty, self._dirty = self._dirty, {}
        else:
            logs = self._logs.values()
            dirty = {log: None for log in logs if log.unmarked}
        self._start_timer()
        self._group.flush_kept()
        if dirty:
            self._flusher.flush(dirty, self._not_flushed)

    def _not_flushed(self, undone: set[Log]) -> None:
        """Have logs whose files could not be opened synced when the timer fires again."""
        if self._flush is FlushMode.INTERVAL:
            self._dirty.update((log, None) for log in undone if log.failure is None)

    async def close(self, *, clean: bool = True) -> None:
        """Finish what is under way, then close every log."""
        if self._timer is not None:
            self._timer.cancel()
        self._group.closing = True
        while not self._group.idle:
            self._group.schedule()
            await _turn(self._workers[1])
        loop = asyncio.get_running_loop()
        for worker in self._workers:
            await loop.run_in_executor(None, worker.stop)
        await loop.run_in_executor(None, self._close_logs, clean)

    def _close_logs(self, clean: bool) -> None:
        for log in self._logs.values():
            try:
                log.close(clean=clean)
            except (OSError, LogStorageError) as e:
                _logger.error("log_close_failed", log=str(log), reason=str(e))
        self._logs = {}


async def _turn(worker: Worker) -> None:
    """Wait until a worker has done what it was given so far."""
    reached = asyncio.get_running_loop().create_future()
    worker.submit(lambda: None, reached.set_result)
    await reached


def _thread_worker(name: str) -> Worker:
    return ThreadWorker(name, asyncio.get_running_loop())


def _is_empty_directory(path: Path) -> bool:
    """Whether there is a directory without entries; reads one entry, of however many."""
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except (FileNotFoundError, NotADirectoryError):
        return False
