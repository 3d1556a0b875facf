"""Rebuilds the state of a bucket at exactly one log offset after it was lost.

    the newest key-value snapshot at or below the offset → the changelog from there to the offset

Without a snapshot the state is rebuilt from the changelog alone, if that begins at 0. Replay is
deterministic, so a reader finds the rows that the lost state had: a scan whose server restarted
goes on after its last key.

The state is built in the directory of an unfinished pinned state, in a store of its own with little
memory, by a thread. The event loop only reads the log for that thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import structlog

from zufluss.cluster.remote import BucketRemote, SnapshotHandle
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import (
    KvPinGoneError,
    LogStorageError,
    OffsetOutOfRangeError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.kv.cold.checkpoint import remove_left_overs
from zufluss.kv.cold.state import KvState
from zufluss.kv.memory import KvMemory
from zufluss.kv.replay import ChangelogPiece, pieces_of
from zufluss.kv.scan.pins import PinnedFiles
from zufluss.kv.store import KvStore
from zufluss.kv.tablet import KvTablet
from zufluss.replica.replica import Replica
from zufluss.tablet.changelog_reader import Changelog, ChangelogReader
from zufluss.tablet.remote.context import RemoteContext
from zufluss.tablet.remote.restore import Restorer
from zufluss.tablet.reopen import may_pass
from zufluss.threads import Threads

log = structlog.get_logger(__name__)

AT_ONCE: Final = 2
"""States that are rebuilt at the same time."""
MEMORY_BYTES: Final = 128 << 20
"""Memory of each; what does not fit is flushed."""
LARGEST_VALUES: Final = 16
"""Additional room, in rows of the largest size."""
WAIT_SECONDS: Final = 60.0
"""How long a replay waits for its own flushes; nobody else uses the memory."""
TRIES: Final = 2
"""How often it is planned: retention may take what was going to be read."""


class Rebuilder:
    """Rebuilds states of buckets. Belongs to the event loop."""

    def __init__(
        self,
        conf: Configuration,
        context: RemoteContext,
        restorer: Restorer,
        reader: ChangelogReader,
    ) -> None:
        self._value_bytes = conf.get(options.ZUFLUSS_KV_VALUE_MAX_SIZE)
        self._context = context
        self._restorer = restorer
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._threads = Threads(AT_ONCE, "zufluss-rebuild")
        self._running: dict[asyncio.Task[PinnedFiles], Replica] = {}

    async def rebuild(self, replica: Replica, log_offset: int) -> PinnedFiles:
        """The state at an offset below the high watermark.

        `KvPinGoneError` says what is missing; retriable errors of remote storage come as they are.
        """
        task = self._loop.create_task(self._rebuild_at_last(replica, log_offset))
        self._running[task] = replica
        task.add_done_callback(self._running.pop)
        await asyncio.wait({task})
        if task.cancelled():
            raise UnknownTableOrBucketError(
                f"{replica.bucket.named(replica.path)} has stopped before "
                f"{_state(replica, log_offset)} was rebuilt; refresh the metadata and open the "
                "scan again"
            )
        return task.result()

    def end(self, replica: Replica) -> None:
        """A bucket has stopped."""
        for task, other in self._running.items():
            if other is replica:
                task.cancel()

    def stop(self) -> None:
        """The server stops; what is under way ends soon."""
        for task in self._running:
            task.cancel()
        self._threads.shutdown(wait=False)

    async def _rebuild_at_last(self, replica: Replica, log_offset: int) -> PinnedFiles:
        """One of a few at a time, and again if the changelog changed meanwhile."""
        async with self._at_once:
            for _ in range(TRIES):
                try:
                    return await self._rebuild(replica, log_offset)
                except OffsetOutOfRangeError as e:
                    log.info("kv_rebuild_again", bucket=str(replica.bucket), reason=str(e))
        raise KvPinGoneError(
            f"{_state(replica, log_offset)} cannot be rebuilt: its changelog expires faster than "
            "it is read; open a new scan"
        )

    async def _rebuild(self, replica: Replica, log_offset: int) -> PinnedFiles:
        pins = replica.tablet.store.pins
        fresh = await asyncio.to_thread(pins.fresh)
        try:
            remote = await self._context.bucket_remote(replica.bucket)
            changelog = await self._reader.changelog(replica, remote, log_offset, fresh)
            await self._install_base(changelog, remote, log_offset, fresh)
            state = await self._replay(changelog, log_offset, fresh)
            files = await asyncio.to_thread(pins.finish, fresh, state)
        except BaseException:
            await asyncio.to_thread(pins.discard, fresh)
            raise
        log.info("kv_state_rebuilt_at", bucket=str(replica.bucket), log_offset=log_offset)
        return files

    # -- the snapshot to begin with -----------------------------------------------------------

    async def _install_base(
        self, changelog: Changelog, remote: BucketRemote, log_offset: int, fresh: Path
    ) -> None:
        """Install the newest snapshot that the changelog goes on from, or none if it has it all."""
        start, replica = changelog.start, changelog.replica
        problems: list[ZuflussError] = []
        for handle in reversed(remote.snapshots):
            if not min(start, log_offset) <= handle.log_offset <= log_offset:
                continue
            try:
                await self._restorer.install(handle, fresh)
            except ZuflussError as e:
                log.warning(
                    "kv_snapshot_unusable", bucket=str(replica.bucket),
                    snapshot=handle.snapshot_id, error=str(e),
                )  # fmt: skip
                problems.append(e)
                continue
            return
        if start == 0 or log_offset == 0:
            return
        for problem in filter(may_pass, problems):
            raise problem
        raise _gone(changelog, remote.snapshots, log_offset, problems)

    # -- the changelog ------------------------------------------------------------------------

    async def _replay(self, changelog: Changelog, log_offset: int, fresh: Path) -> KvState:
        """Bring the state in a directory to an offset; ends only after its thread has ended."""
        ended = threading.Event()
        work = self._loop.run_in_executor(
            self._threads, self._replay_to, changelog, log_offset, fresh, ended
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            ended.set()
            await asyncio.wait({work})
            log.info("kv_rebuild_ended", reason=str(work.exception()))
            raise

    def _replay_to(
        self, changelog: Changelog, log_offset: int, fresh: Path, ended: threading.Event
    ) -> KvState:
        """In a thread."""
        files, value_bytes = self._context.files, self._value_bytes
        budget = MEMORY_BYTES + LARGEST_VALUES * value_bytes
        memory = KvMemory(budget, lambda free: free(), wait_seconds=WAIT_SECONDS)
        store = KvStore.open(fresh, memory, files)
        try:
            tablet = KvTablet(changelog.replica.tablet.table, store, value_bytes)
            offset = store.flushed_offset
            batches = self._reader.batches(changelog, offset, log_offset)
            changes = pieces_of(tablet.table, batches, offset, log_offset)
            with closing(batches), closing(changes):  # nothing is fetched into `fresh` any more
                tablet.replay(_while_needed(changes, ended))
            store.horizon = log_offset
            tablet.close()
        except BaseException:
            store.abandon()
            raise
        finally:
            memory.close()
        remove_left_overs(files, fresh)
        return KvState(log_offset, store.row_count, {})


def _while_needed(
    changes: Iterator[ChangelogPiece], ended: threading.Event
) -> Iterator[ChangelogPiece]:
    for piece in changes:
        if ended.is_set():
            raise LogStorageError("the state is not needed any more")
        yield piece


def _state(replica: Replica, log_offset: int) -> str:
    return f"the state of {replica.bucket.named(replica.path)} at offset {log_offset}"


def _gone(
    changelog: Changelog,
    snapshots: tuple[SnapshotHandle, ...],
    log_offset: int,
    problems: list[ZuflussError],
) -> KvPinGoneError:
    there = ", ".join(str(s.log_offset) for s in snapshots) or "none"
    reasons = "".join(f"; {problem.message}" for problem in problems)
    return KvPinGoneError(
        f"{_state(changelog.replica, log_offset)} cannot be rebuilt: its changelog begins at "
        f"offset {changelog.start}, and no key-value snapshot that can be read lies between there "
        f"and the offset (snapshots: {there}{reasons}); open a new scan"
    )
