"""A producer as its client holds it: begun, kept alive, told of checkpoints, ended.

`begin` is the moment that counts. When the coordinator has answered, every leader of the table
refuses puts of earlier epochs, so that what is found afterwards is all there is to undo. From then
on a task on the connection's loop gives signs of life (`core/renewal.py` says when), so that
nobody else takes the columns of a writer that is idle, or busy undoing.

A producer is lost when somebody began a later epoch of it, took its columns after it was silent for
too long, or dropped it. It is told so by whoever it asks next, and `on_loss` is called.
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
from zufluss.client.core.renewal import Clock, Renewals, lasting_clock
from zufluss.client.producer.state import ProducerState
from zufluss.client.producer.wire import BucketOffsets, offsets_from_wire, offsets_to_wire
from zufluss.client.write.upsert import target_columns
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
"""The task of an exactly-once writer itself."""
CLIENT_UNDO_TASK: Final = TASK_MAX - 1
"""The task of an undo by the client."""
JOB_TASK_MAX: Final = TASK_MAX - 2
"""The last task that a job may give to a process of its own."""
LOSSES: Final = (ProducerFencedError, ProducerNotFoundError)
"""Answers after which nothing can be written as this producer any more."""

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ProducerHandle:
    """An epoch of a producer: small, and to be sent to the tasks of a job.

    >>> table.producer_writer(handle, task=3)  # doctest: +SKIP
    """

    table_id: int
    """The table it writes to."""
    producer_id: str
    """Its id; empty of one that nobody comes back to."""
    number: int
    """What the cluster calls it."""
    epoch: int
    """Which start of it."""
    column_ids: tuple[int, ...] = ()
    """The columns it writes beside the key; none: all there are."""
    last_checkpoint_id: int | None = None
    """The caller's number of the last checkpoint it reported with one, before this epoch."""

    def writer_id(self, task: int) -> int:
        """The writer id of a task."""
        return ProducerWriter(self.number, self.epoch, task).writer_id

    def columns(self, info: TableInfo) -> tuple[str, ...]:
        """The names, with the key, of the columns it writes; they may have changed meanwhile."""
        self.check(info)
        return column_names(info, self.column_ids)

    def check(self, info: TableInfo) -> None:
        """`ProducerStateError` unless it is of this table."""
        if self.table_id != info.table_id:
            raise ProducerStateError(
                f"producer {self.producer_id!r} writes to table id {self.table_id}, but "
                f"{info.path} has id {info.table_id}; it is another table by now"
            )


class ProducerSession:
    """One epoch of a producer, from its begin on."""

    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        producer_id: str,
        ttl_ms: int,
        *,
        clock: Clock = lasting_clock,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.producer_id = producer_id
        """Its id."""
        self.handle = ProducerHandle(info.table_id, producer_id, 0, 0)
        """Its epoch, for tasks."""
        self.undo_from: BucketOffsets | None = None
        """Its changes from here on are to be undone; None: there are none, or it makes no odds."""
        self.baseline: BucketOffsets = {}
        """Where it would be undone to, buckets that are missing to their beginning."""
        self.exclusive = False
        """Nobody else writes its columns."""
        self.lost: ZuflussError | None = None
        """Why it cannot write any more, None while it can."""
        self.on_loss: Callable[[ZuflussError], None] = lambda loss: None
        """Called once, when it is lost."""
        self._connection = connection
        self._info = info
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._sleep = sleep
        self._renewals = Renewals(ttl_ms / 1000)
        self._calls = asyncio.Lock()
        self._renewer: asyncio.Task[None] | None = None

    async def begin(self, column_ids: Sequence[int], restored: ProducerState | None) -> None:
        """Begin an epoch: earlier ones are fenced when this returns."""
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
        """Give a sign of life; changes before `baseline`, if it is given, are never undone."""
        async with self._calls:
            await self._report(baseline, checkpoint_id)

    async def release(self) -> None:
        """End it for good: its columns are free, nothing it wrote can be undone."""
        await self.stop()
        request = m.ReleaseProducerRequest(
            producer_id=self.producer_id, table_id=self._info.table_id, epoch=self.handle.epoch
        )
        try:
            await self._connection.call_coordinator(ApiKey.RELEASE_PRODUCER, request)
        except ProducerNotFoundError:
            log.debug("producer %s was released already", self.producer_id)

    async def stop(self) -> None:
        """Give no more signs of life."""
        renewer, self._renewer = self._renewer, None
        if renewer is not None:
            renewer.cancel()
            await asyncio.gather(renewer, return_exceptions=True)

    # -- signs of life -------------------------------------------------------------------------

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
                        "producer %s could give no sign of life, others may take its columns "
                        "after %s: %s",
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
    """INIT_PRODUCER; beginning twice does no harm, it is one epoch more."""
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
    """The epoch that an answer gave."""
    return ProducerHandle(
        request.table_id,
        request.producer_id,
        answer.producer_number,
        answer.epoch,
        tuple(sorted(request.column_ids)),
        answer.checkpoint_id if answer.HasField("checkpoint_id") else None,
    )


def producer_id_of(connection: ClusterConnection, given: str | None) -> str:
    """The id of a producer that is given one, or takes the configured one, or needs one."""
    found = connection.options.producer_id if given is None else given
    return str(uuid4()) if found is None else check_producer_id(found)


def ttl_ms_of(connection: ClusterConnection, given: Duration | None) -> int:
    """Milliseconds of a time to live; whether they are allowed is for the server to say."""
    if given is None:
        return connection.options.producer_ttl_ms
    return duration_ms_of(given, "ttl of a producer")


def column_ids_of(info: TableInfo, columns: Sequence[str] | None) -> tuple[int, ...]:
    """The ids of columns that are not in the key, ascending; none for all there are."""
    names = target_columns(info, columns)
    if columns is None:
        return ()
    schema = info.schema
    return tuple(sorted(schema.column(n).id for n in names if n not in schema.primary_key))


def column_names(info: TableInfo, column_ids: Collection[int]) -> tuple[str, ...]:
    """The key, and the columns of these ids, in table order; all for no ids."""
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
