"""UNDO_PRODUCER: takes back the changes that earlier epochs of a producer made to a bucket.

    puts of the producer are refused: earlier epochs by the fence, the present one meanwhile
      → the key-value worker notes the end of the changelog                (kv.tablet.begin_undo)
      → wait until the changelog is durable up to that end
      → a thread reads the changelog from the given offset to that end     (kv/producer/own_changes)
      → write steps of some thousand keys: worker, encoder, log, durable   (kv.tablet.undo)
      → accept puts again

An epoch reaches its clients after all leaders know it, so the fence is older than the undo. A put
of an earlier epoch is therefore either below the noted end, or refused. The changes of an undo
carry the producer's number and a task number reserved for undos. They are ordinary changes with
sequence numbers of their own, and survive a crash.

An undo continues after the call that began it was answered or cancelled. A call for the same
producer, epoch and offset joins it, or learns that it is done. If a stop, a crash or a newer epoch
ends an undo half-way, repeating it completes the rest and leaves finished keys as they are.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any, Final

import structlog

from zufluss.errors import (
    InvalidTableError,
    LogStorageError,
    OffsetOutOfRangeError,
    ProducerStateError,
    StorageBackpressureError,
    UndoImpossibleError,
    UndoUnderWayError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.kv.producer import own_changes
from zufluss.kv.producer.fence import Owner
from zufluss.kv.producer.own_changes import Progress, Source, exclusive_steps, shared_steps
from zufluss.kv.producer.undo import StepTooLargeError, UndoStep
from zufluss.kv.tablet import PreparedPut
from zufluss.log.holds import Holder
from zufluss.model.producer import EPOCH_MAX, NUMBER_MAX, UNDO_TASK, ProducerWriter
from zufluss.model.table import TableBucket
from zufluss.net.services import RequestContext
from zufluss.replica.replica import Replica
from zufluss.tablet.changelog_reader import Changelog, ChangelogReader
from zufluss.tablet.pending import ALL
from zufluss.tablet.producers import KnownProducers
from zufluss.tablet.put import PutHandler, ServerPut
from zufluss.tablet.remote.context import RemoteContext
from zufluss.threads import Threads
from zufluss.wire import messages as m
from zufluss.wire.tables import partition_id_of

log = structlog.get_logger(__name__)

AT_ONCE: Final = 2
"""Undos that read at the same time; others wait for their turn."""
ANSWER_SECONDS: Final = 10.0
"""A call is answered after this time, whether the undo is done or not."""
TRIES: Final = 5
"""Attempts of an undo; retention may move segments to remote storage while they are read."""
MEMORY_PAUSE_SECONDS: Final = 0.5
"""How long an undo waits before it tries a step again for which there was no memory."""


class UndoWrite(ServerPut):
    """A put of an undo."""

    __slots__ = ("end_offset", "keys")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.end_offset = 0
        """The end of the log after the put."""
        self.keys = 0
        """Number of keys that the put changed."""

    def appended(self, bucket: TableBucket, end_offset: int, deleted_rows: int | None) -> None:
        """The put is in the log, up to `end_offset`."""
        self.end_offset = end_offset


class Undo:
    """One undo, under way or done."""

    def __init__(self, replica: Replica, owner: Owner, from_offset: int) -> None:
        self.replica = replica
        self.owner = owner
        self.from_offset = from_offset
        """Changes from here on are undone."""
        self.position = from_offset
        """The changelog below this offset is undone; never moves back."""
        self.end_offset = from_offset
        """Changes from here on are not undone."""
        self.keys = 0
        """Number of keys changed so far."""
        self.ended = threading.Event()
        """Set when the thread of the undo shall end."""
        self.writing: asyncio.Task[Any] | None = None
        """Writes a step, for which the thread may wait; None while nothing is written."""
        self.task: asyncio.Task[None]

    @property
    def done(self) -> bool:
        """Whether everything is undone."""
        task = self.task
        return task.done() and not task.cancelled() and task.exception() is None

    @property
    def writer(self) -> ProducerWriter:
        """The writer of the changes that the undo makes."""
        return ProducerWriter(self.owner.number, self.owner.epoch, UNDO_TASK)

    def source(self, reader: ChangelogReader, changelog: Changelog) -> Source:
        """The part of the changelog that the undo reads."""
        batches = partial(reader.batches, changelog, self.from_offset, self.end_offset)
        table = self.replica.tablet.table
        return Source(table, batches, self.from_offset, self.end_offset, self.owner.number)

    def steps(self, source: Source) -> Iterator[Progress]:
        """The steps that have to be written."""
        if self.owner.exclusive:
            return exclusive_steps(source, own_changes.UNDO_KEYS_MAX)
        return shared_steps(source, self.owner.column_ids, own_changes.UNDO_SUMS_MAX)


class UndoHandler:
    """The handler of UNDO_PRODUCER, and the undos of a server. Belongs to the event loop."""

    def __init__(
        self,
        context: RemoteContext,
        put: PutHandler,
        producers: KnownProducers,
        reader: ChangelogReader,
        clock_ms: Callable[[], int],
    ) -> None:
        self.keys_total = 0
        """Keys that undos changed since the server started."""
        self._context = context
        self._put = put
        self._producers = producers
        self._reader = reader
        self._clock_ms = clock_ms
        self._loop = asyncio.get_running_loop()
        self._undos: dict[tuple[TableBucket, int], Undo] = {}
        """Undos under way or done, by bucket and producer number."""
        self._running: set[Undo] = set()
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._threads = Threads(AT_ONCE, "zufluss-undo")

    async def undo_producer(
        self, request: m.UndoProducerRequest, context: RequestContext
    ) -> m.UndoProducerResponse:
        """UNDO_PRODUCER (30046)."""
        partition_id = partition_id_of(request)
        buckets = self._context.buckets
        buckets.check_present()
        replica = buckets.kv_replica(request.table_id, partition_id, request.bucket_id)
        seconds = ANSWER_SECONDS
        if request.HasField("time_limit_ms"):
            seconds = min(seconds, max(0, request.time_limit_ms) / 1000)
        number, epoch = request.producer_number, request.epoch
        if not (0 <= number <= NUMBER_MAX and 0 <= epoch <= EPOCH_MAX):
            raise ProducerStateError(f"there is no producer {number} with epoch {epoch}")
        undo = self._begun(replica, number, epoch, request.from_offset)
        if not undo.task.done():
            await asyncio.wait({undo.task}, timeout=seconds)
        if undo.task.done():
            _outcome(undo)
            buckets.check_present()  # another leader may have changes of the producer by now
        return m.UndoProducerResponse(
            done=undo.done, position=undo.position, end_offset=undo.end_offset, keys=undo.keys
        )

    def _hold_changelog(self, replica: Replica) -> None:
        """Have retention spare the changes that undos of a bucket are reading."""
        offsets = (undo.from_offset for undo in self._running if undo.replica is replica)
        replica.log.holds.set(Holder.UNDO, min(offsets, default=None))

    def forget_others(self, table_id: int) -> None:
        """The producers of a table have changed: end or forget the undos of earlier epochs."""
        fence = self._producers.fence(table_id)
        for key, undo in [*self._undos.items()]:
            owner = fence.owner(undo.owner.number)
            if key[0].table_id == table_id and (owner is None or owner.epoch != undo.owner.epoch):
                self._end(undo)

    def closed(self, replica: Replica) -> None:
        """A bucket was closed: end its undos."""
        for undo in [u for u in self._undos.values() if u.replica is replica]:
            self._end(undo)

    async def stop(self) -> None:
        """End every undo and wait for its thread; the server stops."""
        tasks = [undo.task for undo in self._running]
        for undo in [*self._undos.values()]:
            self._end(undo)
        if tasks:
            await asyncio.wait(tasks)
        self._threads.shutdown(wait=False)

    def _end(self, undo: Undo) -> None:
        """End an undo that is under way, or forget one that is done."""
        undo.ended.set()
        undo.task.cancel()
        key = (undo.replica.bucket, undo.owner.number)
        if self._undos.get(key) is undo:
            del self._undos[key]

    # -- one undo -----------------------------------------------------------------------------

    def _begun(self, replica: Replica, number: int, epoch: int, from_offset: int) -> Undo:
        """The undo of a producer in a bucket, begun if it is neither under way nor done."""
        tablet = replica.tablet
        writer = ProducerWriter(number, epoch, UNDO_TASK)
        owner = tablet.fence.present(tablet.table, writer.writer_id, task=UNDO_TASK)
        known = self._undos.get((replica.bucket, number))
        if known is not None and known.owner.epoch == epoch:
            if known.from_offset == from_offset:
                return known
            if not known.task.done():
                raise UndoUnderWayError(
                    f"{replica.bucket.named(replica.path)}: changes of producer "
                    f"{owner.producer_id} are being undone from offset {known.from_offset} on, not "
                    f"{from_offset}; wait for that"
                )
        if known is not None:
            self._end(known)
        if not tablet.table.before_images:
            raise InvalidTableError(
                f"{replica.path} cannot undo changes: its table.changelog.image is WAL, so its "
                "changelog does not have the rows before them"
            )
        if from_offset < 0:
            raise _impossible(replica, from_offset, "offsets begin at 0")
        baseline = self._producers.baseline(replica.bucket, number)
        if from_offset < baseline:
            raise ProducerStateError(
                f"{replica.bucket.named(replica.path)}: an undo of producer {owner.producer_id} "
                f"cannot begin at offset {from_offset}: its changes below offset {baseline} belong "
                "to a checkpoint and stay. Begin a new epoch with the state to go back to"
            )
        return self._begin(Undo(replica, owner, from_offset))

    def _begin(self, undo: Undo) -> Undo:
        key = (undo.replica.bucket, undo.owner.number)
        tablet = undo.replica.tablet
        tablet.undoing = {**tablet.undoing, undo.owner.number: undo.owner.epoch}
        self._undos[key] = undo
        self._running.add(undo)
        self._hold_changelog(undo.replica)
        undo.task = self._loop.create_task(self._run(undo))
        undo.task.add_done_callback(partial(self._ended, undo))
        return undo

    def _ended(self, undo: Undo, task: asyncio.Task[None]) -> None:
        """Accept puts again; forget an undo that failed, so that the next call tries again."""
        tablet, owner = undo.replica.tablet, undo.owner
        self._running.discard(undo)
        if not any(u.replica is undo.replica and u.writer == undo.writer for u in self._running):
            tablet.undoing = {
                number: epoch
                for number, epoch in tablet.undoing.items()
                if (number, epoch) != (owner.number, owner.epoch)
            }
        self._hold_changelog(undo.replica)
        problem = None if task.cancelled() else task.exception()
        key = (undo.replica.bucket, owner.number)
        if (problem is not None or task.cancelled()) and self._undos.get(key) is undo:
            del self._undos[key]
        log.info(
            "undo_ended", bucket=str(undo.replica.bucket), producer=owner.producer_id,
            epoch=owner.epoch, from_offset=undo.from_offset, end_offset=undo.end_offset,
            keys=undo.keys, done=undo.done, problem=None if problem is None else str(problem),
        )  # fmt: skip

    async def _run(self, undo: Undo) -> None:
        await self._find_end(undo)
        async with self._at_once:
            for left in reversed(range(TRIES)):
                try:
                    await self._read(undo)
                    break
                except OffsetOutOfRangeError:
                    if not left:
                        raise
                    await self._find_end(undo)  # what it has written counts from now on
        undo.position = undo.end_offset

    async def _find_end(self, undo: Undo) -> None:
        """Determine the end of the undo in the worker; returns when the log is durable up to it."""
        marker = UndoWrite(self._loop)
        tablet = undo.replica.tablet
        begin = partial(tablet.begin_undo, undo.writer, self._clock_ms())
        self._put.run(marker, undo.replica, ALL, begin)
        await marker.outcome
        undo.end_offset = marker.end_offset
        if undo.from_offset > undo.end_offset:
            raise _impossible(undo.replica, undo.from_offset, f"it ends at {undo.end_offset}")

    async def _read(self, undo: Undo) -> None:
        """Read the changelog and write the steps. Returns when the thread has ended."""
        if undo.from_offset == undo.end_offset:
            return
        replica, reader = undo.replica, self._reader
        pins = replica.tablet.store.pins
        fresh = await asyncio.to_thread(pins.fresh)
        try:
            remote = await self._context.bucket_remote(replica.bucket)
            changelog = await reader.changelog(replica, remote, undo.end_offset, fresh)
            if undo.from_offset < changelog.start:
                raise _impossible(replica, undo.from_offset, f"it begins at {changelog.start}")
            await self._in_thread(undo, changelog)
        finally:
            await asyncio.to_thread(pins.discard, fresh)

    async def _in_thread(self, undo: Undo, changelog: Changelog) -> None:
        work = self._loop.run_in_executor(self._threads, self._steps, undo, changelog)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            undo.ended.set()
            if undo.writing is not None:  # it may not become durable for long
                undo.writing.cancel()
            await asyncio.wait({work})
            log.info("undo_broken_off", reason=str(work.exception()))
            raise

    def _steps(self, undo: Undo, changelog: Changelog) -> None:
        """In a thread: work out each step while the one before is written."""
        writing: Future[None] | None = None
        source = undo.source(self._reader, changelog)
        steps = undo.steps(source)
        with closing(steps):  # type: ignore[type-var]  # they are generators
            for step, position in steps:
                if undo.ended.is_set():
                    raise LogStorageError("the undo is not needed any more")
                if writing is not None:
                    writing.result()
                writing = asyncio.run_coroutine_threadsafe(
                    self._write(undo, step, position), self._loop
                )
        if writing is not None:
            writing.result()

    async def _write(self, undo: Undo, step: UndoStep | None, position: int) -> None:
        """Write a step, in parts if it is too large, and wait until it is durable."""
        if undo.ended.is_set():
            raise LogStorageError("the undo is not needed any more")
        undo.writing = asyncio.current_task()
        try:
            await self._write_parts(undo, [] if step is None else [step])
        finally:
            undo.writing = None
        undo.position = max(undo.position, position)

    async def _write_parts(self, undo: Undo, parts: list[UndoStep]) -> None:
        while parts:
            part = parts.pop()
            try:
                await self._write_part(undo, part)
            except StorageBackpressureError:
                parts.append(part)
                await asyncio.sleep(MEMORY_PAUSE_SECONDS)
            except StepTooLargeError:
                count = part.rows.num_rows
                parts += [part.part(count // 2, count), part.part(0, count // 2)]

    async def _write_part(self, undo: Undo, step: UndoStep) -> None:
        write = UndoWrite(self._loop)
        tablet, now_ms = undo.replica.tablet, self._clock_ms()

        def prepare() -> PreparedPut:
            prepared = tablet.undo(undo.writer, step, now_ms)
            write.keys = prepared.keys
            return prepared

        self._put.run(write, undo.replica, ALL, prepare)
        await write.outcome
        undo.keys += write.keys
        self.keys_total += write.keys


def _outcome(undo: Undo) -> None:
    """Raise the reason if an undo failed or was cancelled."""
    if undo.task.cancelled():
        tablet = undo.replica.tablet
        tablet.fence.present(tablet.table, undo.writer.writer_id, task=UNDO_TASK)
        raise UnknownTableOrBucketError(
            f"{undo.replica.bucket.named(undo.replica.path)} has stopped before changes of "
            f"producer {undo.owner.producer_id} were undone; refresh the metadata and try again"
        )
    undo.task.result()


def _impossible(replica: Replica, from_offset: int, reason: str) -> ZuflussError:
    return UndoImpossibleError(
        f"{replica.bucket.named(replica.path)} cannot undo changes from offset {from_offset} on: "
        f"{reason} in its changelog, which has offsets {replica.log.log_start_offset} to "
        f"{replica.log.log_end_offset} on this server; nothing was changed. Drop the producer with "
        "zufluss producer drop, and begin with another state or from the data's beginning"
    )
