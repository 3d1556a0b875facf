"""A producer session: begins an epoch, keeps it alive, reports checkpoints, releases the producer.

`begin` is the decisive moment. When the coordinator has answered, every leader of the table refuses
puts of earlier epochs, so all that must be undone is in the changelogs. From then on a task on the
connection's loop reports that the producer is alive (`core/renewal.py` says when), so that nobody
takes over the columns of a writer that is idle or busy undoing.

A session is lost when somebody began a later epoch, took over its columns after a long silence, or
dropped the producer. The next call that notices raises the reason, and calls `on_loss`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.durations import Duration, duration_ms_of
from zufluss.client.core.renewal import Clock, Renewals
from zufluss.client.producer.state import ProducerState
from zufluss.client.producer.wire import BucketOffsets, offsets_from_wire, offsets_to_wire
from zufluss.client.write.upsert import target_columns
from zufluss.clock import uptime_seconds
from zufluss.config.values import format_duration
from zufluss.errors import (
    ProducerFencedError,
    ProducerNotFoundError,
    ProducerStateError,
    UnsupportedVersionError,
    ZuflussError,
)
from zufluss.model.producer import TASK_MAX, ProducerWriter, check_producer_id
from zufluss.model.table import TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

log = logging.getLogger(__name__)

OWN_TASK: Final = TASK_MAX
"""The task number of an exactly-once writer itself."""
CLIENT_UNDO_TASK: Final = TASK_MAX - 1
"""The task number of an undo by the client."""
JOB_TASK_MAX: Final = TASK_MAX - 2
"""The highest task number of a job."""
LOSSES: Final = (ProducerFencedError, ProducerNotFoundError)
"""Answers after which nothing can be written for this producer any more."""

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ProducerHandle:
    """An epoch of a producer: a small value that a driver sends to the tasks of its job.

    >>> table.producer_writer(handle, task=3)  # doctest: +SKIP
    """

    table_id: int
    """The table's id."""
    producer_id: str
    """The producer's id; empty for an anonymous producer."""
    number: int
    """The producer's number in the cluster."""
    epoch: int
    """The number of the start of the producer."""
    column_ids: tuple[int, ...] = ()
    """The ids of the written columns beside the key; empty for all."""
    last_checkpoint_id: int | None = None
    """The last `checkpoint_id` reported before this epoch; None if there is none."""

    def writer_id(self, task: int) -> int:
        """The writer id of a task."""
        return ProducerWriter(self.number, self.epoch, task).writer_id

    def columns(self, info: TableInfo) -> tuple[str, ...]:
        """The names of the key and of the written columns; columns may have been renamed."""
        self.check(info)
        return column_names(info, self.column_ids)

    def check(self, info: TableInfo) -> None:
        """Raise `ProducerStateError` unless the handle belongs to this table."""
        if self.table_id != info.table_id:
            raise ProducerStateError(
                f"producer {self.producer_id!r} writes to table id {self.table_id}, but "
                f"{info.path} has id {info.table_id}; it was created again"
            )


class ProducerSession:
    """One epoch of a producer, kept alive until it is released or stopped."""

    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        producer_id: str,
        ttl_ms: int,
        *,
        clock: Clock = uptime_seconds,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.producer_id = producer_id
        """The producer's id."""
        self.handle = ProducerHandle(info.table_id, producer_id, 0, 0)
        """The epoch, for tasks."""
        self.undo_from: BucketOffsets | None = None
        """Changes from these offsets on must be undone; None if no undo is needed."""
        self.baseline: BucketOffsets = {}
        """The offsets to which an undo goes back; a missing bucket goes back to 0."""
        self.exclusive = False
        """Whether the producer is the only writer of its columns."""
        self.lost: ZuflussError | None = None
        """Why the producer cannot write any more; None while it can."""
        self.on_loss: Callable[[ZuflussError], None] = lambda loss: None
        """Called once, with the reason, when the session is lost."""
        self._connection = connection
        self._info = info
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._sleep = sleep
        self._renewals = Renewals(ttl_ms / 1000)
        self._calls = asyncio.Lock()
        self._renewer: asyncio.Task[None] | None = None

    async def begin(self, column_ids: Sequence[int], restored: ProducerState | None) -> None:
        """Begin an epoch; earlier epochs are fenced when this returns."""
        sent_at = self._clock()
        request = m.InitProducerRequest(
            producer_id=self.producer_id,
            table_id=self._info.table_id,
            column_ids=column_ids,
            ttl_ms=self._ttl_ms,
            is_restore=restored is not None,
        )
        if restored is not None:
            request.restored.extend(offsets_to_wire(restored.offsets))
            request.restored_number = restored.number
        answer = await init_producer(self._connection, self._info, request)
        self.handle = handle_of(request, answer)
        self.exclusive = answer.exclusive
        self.baseline = offsets_from_wire(self._info.table_id, answer.baseline)
        if answer.undo_needed and not answer.created:
            self.undo_from = self.baseline
        self._renewals.succeeded(sent_at, self._ttl_ms / 1000)
        self._renewer = asyncio.create_task(self._keep())
        self._connection.tasks.add(self._renewer)
        self._renewer.add_done_callback(self._connection.tasks.discard)

    async def report(
        self, baseline: BucketOffsets | None, checkpoint_id: int | None = None
    ) -> None:
        """Report a checkpoint, before which nothing is undone; None only reports being alive."""
        async with self._calls:
            await self._report(baseline, checkpoint_id)

    async def release(self) -> None:
        """End the producer for good: its columns are free, and nothing can be undone."""
        await self.stop()
        request = m.ReleaseProducerRequest(
            producer_id=self.producer_id, table_id=self._info.table_id, epoch=self.handle.epoch
        )
        try:
            await self._connection.call_coordinator(ApiKey.RELEASE_PRODUCER, request)
        except ProducerNotFoundError:
            log.debug("producer %s was released already", self.producer_id)

    async def stop(self) -> None:
        """Stop reporting that the producer is alive."""
        renewer, self._renewer = self._renewer, None
        if renewer is not None:
            renewer.cancel()
            await asyncio.gather(renewer, return_exceptions=True)

    # -- keeping alive -------------------------------------------------------------------------

    async def _keep(self) -> None:
        renewals = self._renewals
        while self.lost is None:
            await self._sleep(renewals.pause(self._clock()))
            try:
                async with asyncio.timeout(renewals.try_seconds), self._calls:
                    if renewals.pause(self._clock()) == 0:  # nobody reported meanwhile
                        await self._report(None, None)
            except (ZuflussError, TimeoutError) as problem:
                if renewals.problem is None and self.lost is None:
                    log.warning(
                        "producer %s could not report that it is alive, others may take its "
                        "columns after %s: %s",
                        self.producer_id,
                        format_duration(self._ttl_ms),
                        problem or type(problem).__name__,
                    )
                renewals.failed(self._clock(), problem)

    async def _report(self, baseline: BucketOffsets | None, checkpoint_id: int | None) -> None:
        sent_at = self._clock()
        request = m.CheckpointProducerRequest(
            producer_id=self.producer_id,
            table_id=self._info.table_id,
            epoch=self.handle.epoch,
            baseline=offsets_to_wire(baseline or {}),
            checkpoint_id=checkpoint_id,
        )
        try:
            answer: m.CheckpointProducerResponse = await self._connection.call_coordinator(
                ApiKey.CHECKPOINT_PRODUCER, request
            )
        except LOSSES as loss:
            self._lose(loss)
            raise
        self._renewals.succeeded(sent_at, answer.remaining_ms / 1000)

    def _lose(self, loss: ZuflussError) -> None:
        if self.lost is None:
            self.lost = loss
            self.on_loss(loss)


async def init_producer(
    connection: ClusterConnection, info: TableInfo, request: m.InitProducerRequest
) -> m.InitProducerResponse:
    """Send INIT_PRODUCER. Repeating it only begins one more epoch."""
    try:
        answer: m.InitProducerResponse = await connection.call_coordinator(
            ApiKey.INIT_PRODUCER, request
        )
    except UnsupportedVersionError:
        raise UnsupportedVersionError(
            f"the cluster of table {info.path} knows no producers, which are an extension of "
            "zufluss; table.upsert() and table.append() write to it, each batch once"
        ) from None
    return answer


def handle_of(request: m.InitProducerRequest, answer: m.InitProducerResponse) -> ProducerHandle:
    """The handle of the epoch in an answer."""
    return ProducerHandle(
        request.table_id,
        request.producer_id,
        answer.producer_number,
        answer.epoch,
        tuple(sorted(request.column_ids)),
        answer.checkpoint_id if answer.HasField("checkpoint_id") else None,
    )


def producer_id_of(connection: ClusterConnection, producer_id: str | None) -> str:
    """The given producer id, or the configured one, or a random one."""
    configured = connection.options.producer_id if producer_id is None else producer_id
    return str(uuid4()) if configured is None else check_producer_id(configured)


def ttl_ms_of(connection: ClusterConnection, ttl: Duration | None) -> int:
    """The given time to live in milliseconds, or the configured one."""
    if ttl is None:
        return connection.options.producer_ttl_ms
    return duration_ms_of(ttl, "ttl of a producer")


def column_ids_of(info: TableInfo, columns: Sequence[str] | None) -> tuple[int, ...]:
    """The ids of columns beside the key, ascending; empty for all."""
    names = target_columns(info, columns)
    if columns is None:
        return ()
    schema = info.schema
    return tuple(sorted(schema.column(n).id for n in names if n not in schema.primary_key))


def column_names(info: TableInfo, column_ids: Collection[int]) -> tuple[str, ...]:
    """The key and the columns with these ids, in table order; no ids mean all columns."""
    if not column_ids:
        return target_columns(info, None)
    schema = info.schema
    gone = set(column_ids) - {column.id for column in schema.columns}
    if gone:
        raise ProducerStateError(
            f"table {info.path} has no column of id {', '.join(map(str, sorted(gone)))} any more, "
            "which the producer wrote; drop the producer and start a new one"
        )
    chosen = [c.name for c in schema.columns if c.id in column_ids or c.name in schema.primary_key]
    return target_columns(info, chosen)
