"""The key-value side of a tablet server: a worker thread, one budget of memory, all tablets.

Everything that prepares or changes key-value state runs in the worker, one job at a time, so state
needs no locks; the event loop reads beside it (`KvStore.answer`) and owns the logs. The memory and
the flush process come into being with the first bucket of a primary-key table.

A bucket's state lies beside its log: `<data dir>/<database>/<table>-<id>[/…]/kv-<bucket>`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import UnknownTableOrBucketError, reason_of
from zufluss.kv.cold.checkpoint import CHECKPOINT_DIRECTORY, Checkpoint, remove_left_overs
from zufluss.kv.cold.rocks import start_rocksdb_threads
from zufluss.kv.cold.state import KvState
from zufluss.kv.memory import KvMemory
from zufluss.kv.replay import EarlierChangelog
from zufluss.kv.rest import Rests
from zufluss.kv.store import KvStore
from zufluss.kv.table import KvTable
from zufluss.kv.tablet import KvTablet
from zufluss.log.config import FlushMode
from zufluss.log.files import Files
from zufluss.log.holds import Holder
from zufluss.log.log import Log
from zufluss.log.manager import caseless, log_directory, owner_directories
from zufluss.log.worker import Done, Job, ThreadWorker
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.replica.encoders import ChangelogEncoders
from zufluss.replica.memory_limit import kv_memory

log = structlog.get_logger(__name__)

T = TypeVar("T")
_KV = re.compile(r"kv-\d+")


def kv_directory(data_dir: Path, path: PhysicalTablePath, bucket: TableBucket) -> Path:
    """Directory of the state of a bucket."""
    return log_directory(data_dir, path, bucket).with_name(f"kv-{bucket.bucket_id}")


def kv_directories(data_dir: Path) -> list[Path]:
    """Every directory below `data_dir` that `kv_directory` can have named."""
    return [
        entry
        for owner in owner_directories(data_dir)
        for entry in owner.iterdir()
        if _KV.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
    ]


def log_lost(store: KvStore, changelog: Log) -> bool:
    """Whether a whole log ends before what was flushed: its end was not synced when power went.

    Where acknowledging does not wait for a sync that may happen, and all there is to the state is
    what the log still has.
    """
    return store.flushed_offset > changelog.log_end_offset and changelog.log_start_offset == 0


class KvBucket(Protocol):
    """A bucket with key-value state (`replica.Replica`)."""

    @property
    def path(self) -> PhysicalTablePath:
        """The table or partition that the bucket belongs to."""

    @property
    def bucket(self) -> TableBucket:
        """The bucket."""

    @property
    def log(self) -> Log:
        """Its changelog."""

    @property
    def tablet(self) -> KvTablet:
        """Its key-value state, once it is open."""


class KvHost:
    """Worker, memory and tablets of a server. Belongs to the event loop."""

    def __init__(
        self,
        conf: Configuration,
        data_dir: Path,
        files: Files,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._conf = conf
        self._data_dir = data_dir
        self._files = files
        self._loop = loop
        self._memory: KvMemory | None = None
        self.worker = ThreadWorker("zufluss-kv", loop)
        """The thread that all key-value work is done in."""
        self.encoders = ChangelogEncoders(loop)
        """The threads that changelog batches are encoded in, after the worker."""
        self._tablets: dict[KvTablet, KvBucket] = {}
        self._dropped: dict[Path, tuple[Job, Done]] = {}
        """Buckets whose state is removed: the first one by the worker now, the others after it."""
        start_rocksdb_threads()

    @property
    def memory(self) -> KvMemory | None:
        """The memory of all buckets; None before the first bucket is opened."""
        return self._memory

    async def call(self, job: Callable[[], T]) -> T:
        """Run a job in the worker, after every job submitted earlier."""
        future: asyncio.Future[T] = self._loop.create_future()
        self.worker.submit(job, partial(_settle, future))
        try:
            return await future
        finally:
            # The traceback of its error has this frame. All its frames, and the rows that they
            # hold, would wait for a collection of garbage.
            del future

    @property
    def memory_bytes(self) -> tuple[int, int]:
        """Bytes of key-value memory in use, and the budget; 0 before the first bucket."""
        if self._memory is None:
            return 0, 0
        arena = self._memory.arena
        return arena.budget - arena.free_bytes, arena.budget

    async def settled(self) -> None:
        """Wait until the worker has done every job submitted so far."""
        await self.call(lambda: None)

    async def open(
        self, replica: KvBucket, table: KvTable, earlier: EarlierChangelog | None = None
    ) -> KvTablet:
        """The state of a bucket, brought to the end of its log.

        `earlier` is what remote storage has of the changelog before the log.
        `CorruptRecordError` if the state and the log do not belong together.
        """
        return await self._open(replica, table, lambda tablet: tablet.recover(replica.log, earlier))

    async def open_as_flushed(self, replica: KvBucket, table: KvTable) -> KvTablet:
        """The state of a bucket as of its last flush, for one that follows its log in steps."""
        return await self._open(replica, table, lambda tablet: None)

    async def _open(
        self, replica: KvBucket, table: KvTable, bring_up: Callable[[KvTablet], None]
    ) -> KvTablet:
        if self._memory is None:
            self._memory = KvMemory(kv_memory(self._conf), self._when_passed)
        memory = self._memory
        directory = kv_directory(self._data_dir, replica.path, replica.bucket)
        if directory in self._dropped:
            self._remove_dropped_now()
        value_bytes_max = self._conf.get(options.ZUFLUSS_KV_VALUE_MAX_SIZE)
        synced = FlushMode(self._conf.get(options.ZUFLUSS_LOG_FLUSH)) is FlushMode.ACK

        def work() -> KvTablet:
            store = KvStore.open(directory, memory, self._files)
            try:
                if not synced and log_lost(store, replica.log):
                    log.warning("kv_state_rebuilt", bucket=str(replica.bucket), state=repr(store))
                    store.destroy()
                    store = KvStore.open(directory, memory, self._files)
                tablet = KvTablet(table, store, value_bytes_max)
                tablet.on_flushed = partial(self._when_passed, partial(self._flush_ended, tablet))
                bring_up(tablet)
            except BaseException:
                store.abandon()
                raise
            return tablet

        tablet = await self.call(work)
        try:
            replica.log.holds.set(Holder.KV_STATE, tablet.store.flushed_offset)
        except BaseException:
            self.worker.submit(tablet.store.abandon, partial(self._logged, tablet, "kv_not_closed"))
            raise
        self._tablets[tablet] = replica
        return tablet

    async def checkpoint(self, replica: KvBucket) -> Checkpoint:
        """Flush up to the high watermark and hard-link the table files beside the state.

        There is one of a bucket at a time: the next one takes its place.
        """
        tablet = replica.tablet
        target = tablet.store.directory / CHECKPOINT_DIRECTORY
        horizon = tablet.store.horizon
        while True:
            self._check_open(tablet, replica)
            checkpoint = await self.call(partial(tablet.checkpoint, target, horizon))
            if isinstance(checkpoint, Checkpoint):
                return checkpoint
            await asyncio.shield(asyncio.wrap_future(checkpoint))

    async def pin(self, replica: KvBucket, target: Path, horizon: int, rests: Rests) -> KvState:
        """Flush at least up to `horizon` and hard-link the table files; returns the linked state.

        `target` is not made if there are no rows. `rests` paces a flush that the pin needs.
        """
        tablet = replica.tablet
        while True:
            self._check_open(tablet, replica)
            state = await self.call(partial(tablet.pin, target, horizon, rests))
            if isinstance(state, KvState):
                return state
            await asyncio.shield(asyncio.wrap_future(state))

    async def remove_checkpoint(self, replica: KvBucket) -> None:
        """Remove the files of a checkpoint, unless the bucket was closed."""
        store = replica.tablet.store
        if replica.tablet in self._tablets:
            await self.call(partial(remove_left_overs, self._files, store.directory))

    def _check_open(self, tablet: KvTablet, replica: KvBucket) -> None:
        if tablet not in self._tablets:
            raise UnknownTableOrBucketError(f"{replica.bucket.named(replica.path)} has stopped")

    def _when_passed(self, work: Callable[[], None]) -> None:
        """Run something on the event loop in its next turn. For any thread."""
        self._loop.call_soon_threadsafe(work)

    def _flush_ended(self, tablet: KvTablet) -> None:
        """Move the hold on the log to the offset up to which the state is on disk."""
        replica = self._tablets.get(tablet)
        if replica is not None:
            self.worker.submit(
                tablet.store.flush_end,
                lambda _: replica.log.holds.set(Holder.KV_STATE, tablet.store.flushed_offset),
            )

    def flush_held_back(self) -> None:
        """Flush buckets whose state alone keeps old changelog segments."""
        for tablet, replica in self._tablets.items():
            if replica.log.held_back:
                self.worker.submit(tablet.flush, partial(self._logged, tablet, "kv_flush_failed"))

    def forget_expired_writers(self, now_ms: int) -> None:
        """Forget writers that have expired."""
        for tablet in self._tablets:
            self.worker.submit(
                partial(tablet.forget_expired_writers, now_ms),
                partial(self._logged, tablet, "kv_writers_not_expired"),
            )

    def stop(
        self,
        replica: KvBucket,
        *,
        delete: bool,
        failed: bool,
        then: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Close the state of a bucket after the jobs under way; with `delete` remove it.

        The state of a bucket that `failed` is not flushed: its log tells what is true. States are
        removed one after the other, so that the puts of others run in between: a drop may concern
        thousands of buckets.
        """
        tablet = replica.tablet
        directory = tablet.store.directory

        def close() -> None:
            tablet.failure = tablet.failure or UnknownTableOrBucketError(
                f"{replica.bucket.named(replica.path)} has stopped"
            )
            if delete:
                tablet.store.destroy()
            elif failed:
                tablet.store.abandon()
            else:
                tablet.close()

        def done(outcome: object) -> None:
            self._logged(tablet, "kv_not_removed", outcome)
            then(directory)

        if delete:
            self._dropped[directory] = (close, done)
            if len(self._dropped) == 1:
                self._remove_next()
        else:
            self.worker.submit(close, done)
        self._tablets.pop(tablet, None)

    def _remove_next(self) -> None:
        """Have the worker remove the state of the next dropped bucket."""
        directory, (job, done) = next(iter(self._dropped.items()))

        def removed(outcome: object) -> None:
            if self._dropped.pop(directory, None) is not None and self._dropped:
                self._remove_next()
            done(outcome)

        self.worker.submit(job, removed)

    def _remove_dropped_now(self) -> None:
        """Have the worker remove the states of all dropped buckets before its next job."""
        dropped, self._dropped = list(self._dropped.values()), {}
        for job, done in dropped[1:]:  # the worker has the first one
            self.worker.submit(job, done)

    def remove(self, path: PhysicalTablePath, bucket: TableBucket) -> None:
        """Remove the state of a bucket that is not open."""
        self._remove(kv_directory(self._data_dir, path, bucket))

    def remove_others(self, assigned: set[Path]) -> list[Path]:
        """Remove the states of buckets that are not assigned; returns their directories."""
        names = {caseless(directory) for directory in assigned}
        others = [d for d in kv_directories(self._data_dir) if caseless(d) not in names]
        for directory in others:
            self._remove(directory)
        return others

    def directory(self, path: PhysicalTablePath, bucket: TableBucket) -> Path:
        """Directory of the state of a bucket."""
        return kv_directory(self._data_dir, path, bucket)

    def _remove(self, directory: Path) -> None:
        if directory.is_dir():
            self._files.remove_tree(directory)

    def _logged(self, tablet: KvTablet, event: str, outcome: object) -> None:
        if isinstance(outcome, Exception):
            log.error(event, tablet=repr(tablet.store), exc_info=outcome)

    async def close(self) -> None:
        """Flush every bucket, so that the next start replays nothing, and end the worker."""
        for tablet in self._tablets:
            try:
                await self.call(tablet.close)
            except Exception as e:  # the next start replays what was not flushed
                log.error("kv_close_failed", tablet=repr(tablet.store), error=reason_of(e))
        self._tablets = {}
        self._remove_dropped_now()
        await self._loop.run_in_executor(None, self.worker.stop)
        await self._loop.run_in_executor(None, self.encoders.stop)
        if self._memory is not None:
            await self._loop.run_in_executor(None, self._memory.close)


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Give the outcome of a job to the task that waits for it, unless it was cancelled."""
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
