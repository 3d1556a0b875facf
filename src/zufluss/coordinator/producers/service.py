"""Handlers of producers; `producers/calls.py` says what each call does.

| API | answer |
|---|---|
| INIT_PRODUCER (30040) | the epoch that may write now, and the offsets from which to undo |
| CHECKPOINT_PRODUCER (30041) | how long other producers cannot take its columns |
| RELEASE_PRODUCER (30042) | nothing |
| LIST_PRODUCERS (30043) | all producers; those of one table with their offsets |
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from zufluss.cluster.image import ClusterImage
from zufluss.cluster.producers import Baseline
from zufluss.coordinator.producers.calls import ProducerCalls
from zufluss.coordinator.producers.rules import InitCall, ProducerStatus
from zufluss.errors import ProducerStateError
from zufluss.wire import messages as m
from zufluss.wire.tables import offsets_from_proto, offsets_to_proto

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

OFFSETS_AT_ONCE: Final = 4096
"""Offsets of a message that are handled on the event loop; more are handled in a thread."""


class ProducerService:
    """Handlers of the APIs of producers."""

    def __init__(self, producers: ProducerCalls, image: ClusterImage) -> None:
        self._producers = producers
        self._image = image

    async def init_producer(
        self, request: m.InitProducerRequest, ctx: RequestContext
    ) -> m.InitProducerResponse:
        """INIT_PRODUCER (30040)."""
        number = request.restored_number if request.HasField("restored_number") else None
        begun = await self._producers.init(
            InitCall(
                request.producer_id,
                request.table_id,
                request.ttl_ms,
                tuple(request.column_ids),
                await _offsets(request.restored) if request.is_restore else None,
                number,
                ctx.principal,
                request.fence_only,
                request.renew,
            )
        )
        producer = begun.producer
        return m.InitProducerResponse(
            producer_number=producer.number,
            epoch=producer.epoch,
            created=begun.created,
            undo_needed=begun.undo_needed,
            exclusive=producer.exclusive,
            baseline=await _messages(producer.baseline),
            column_ids=sorted(producer.column_ids),
            checkpoint_id=producer.checkpoint_id,
        )

    async def checkpoint_producer(
        self, request: m.CheckpointProducerRequest, ctx: RequestContext
    ) -> m.CheckpointProducerResponse:
        """CHECKPOINT_PRODUCER (30041): a call without offsets and id renews the producer."""
        remaining_ms = await self._producers.checkpoint(
            request.table_id,
            request.producer_id,
            request.epoch,
            await _offsets(request.baseline),
            checkpoint_id=request.checkpoint_id if request.HasField("checkpoint_id") else None,
            principal=ctx.principal,
        )
        return m.CheckpointProducerResponse(remaining_ms=remaining_ms)

    async def release_producer(
        self, request: m.ReleaseProducerRequest, ctx: RequestContext
    ) -> m.ReleaseProducerResponse:
        """RELEASE_PRODUCER (30042)."""
        epoch = request.epoch if request.HasField("epoch") else None
        await self._producers.release(
            request.table_id, request.producer_id, epoch, principal=ctx.principal
        )
        return m.ReleaseProducerResponse()

    async def list_producers(
        self, request: m.ListProducersRequest, ctx: RequestContext
    ) -> m.ListProducersResponse:
        """LIST_PRODUCERS (30043): an empty list for an unknown table."""
        table_id = request.table_id if request.HasField("table_id") else None
        response = m.ListProducersResponse()
        for info in await self._producers.producers(table_id):
            baseline = None if table_id is None else info.producer.baseline
            response.producers.append(await self._producer(info, baseline))
        return response

    async def _producer(self, info: ProducerStatus, baseline: Baseline | None) -> m.PbProducer:
        producer = info.producer
        entry = self._image.table_by_id(producer.table_id)
        columns = () if entry is None else entry.info.schema.columns
        names = {column.id: column.name for column in columns}
        column_ids = sorted(producer.column_ids & names.keys())
        return m.PbProducer(
            producer_id=producer.producer_id,
            table_id=producer.table_id,
            table=None if entry is None else str(entry.info.path),
            producer_number=producer.number,
            epoch=producer.epoch,
            column_ids=column_ids,
            column_names=[names[i] for i in column_ids],
            exclusive=producer.exclusive,
            ttl_ms=producer.ttl_ms,
            idle_ms=info.idle_ms,
            lost=producer.lost,
            checkpointed=producer.checkpointed,
            checkpoint_id=producer.checkpoint_id,
            owner=producer.owner,
            baseline=await _messages(baseline),
        )


async def _messages(offsets: Baseline | None) -> list[m.PbBucketOffsets]:
    if offsets is None:
        return []
    if len(offsets) > OFFSETS_AT_ONCE:
        return await asyncio.to_thread(offsets_to_proto, offsets)
    return offsets_to_proto(offsets)


async def _offsets(messages: Iterable[m.PbBucketOffsets]) -> dict[tuple[int | None, int], int]:
    parts = list(messages)
    try:
        if sum(len(part.bucket_ids) for part in parts) > OFFSETS_AT_ONCE:
            return await asyncio.to_thread(offsets_from_proto, parts)
        return offsets_from_proto(parts)
    except ValueError as problem:
        raise ProducerStateError(
            f"the offsets of the producer are malformed: {problem}; give one offset per bucket"
        ) from None
