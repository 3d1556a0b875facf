"""Servers that leave by their own will hand over all their buckets first.

A server that gets a SIGTERM asks for this with CONTROLLED_SHUTDOWN, and stops when it has the
answer or has waited for long enough. What it still leads then is taken over by others as from any
lost server. From the request on it gets no new buckets, until it registers again. If several
servers leave together, none of them is a target for the others; the last one keeps its buckets.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from zufluss.cluster.image import BucketState, ClusterNode
from zufluss.coordinator.catalog.placement import successors
from zufluss.coordinator.tablets import Tablets
from zufluss.coordinator.wal.handover import Handovers
from zufluss.coordinator.wal.keeper import WalKeeper
from zufluss.errors import ErrorCode, ZuflussError, error
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.tables import bucket_to_proto

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

log = structlog.get_logger(__name__)

MOVES_AT_ONCE: Final = 16
"""Buckets of a server that leaves are handed over so many at a time."""
ROUNDS_MAX: Final = 3
"""How often the buckets are gone through: one whose move failed may go to another server."""


class Departures:
    """CONTROLLED_SHUTDOWN."""

    def __init__(self, handovers: Handovers, keeper: WalKeeper, tablets: Tablets) -> None:
        self._handovers = handovers
        self._keeper = keeper
        self._tablets = tablets
        self._turns = asyncio.Semaphore(MOVES_AT_ONCE)

    async def controlled_shutdown(
        self, request: m.ControlledShutdownRequest, ctx: RequestContext
    ) -> m.ControlledShutdownResponse:
        """CONTROLLED_SHUTDOWN (1043): the answer has the buckets that the server still leads."""
        server_id, epoch = request.tablet_server_id, request.tablet_server_epoch
        live = self._keeper.book.live(server_id)
        if live is None or live.session.server_epoch != epoch:
            raise error(
                ErrorCode.SERVER_NOT_EXIST_EXCEPTION,
                f"tablet server {server_id} with epoch {epoch} is not registered, so others take "
                "its buckets over",
            )
        self._tablets.leaves(server_id)
        log.info("tablet_leaves", server_id=server_id, buckets=len(self._led(server_id)))
        for _ in range(ROUNDS_MAX):
            led, nodes = self._led(server_id), self._others(server_id)
            if not led or not nodes:
                break
            targets = successors([state for _, state in led], nodes, self._keeper.image.leaders)
            moves = (self._move(b, t) for (b, _), t in zip(led, targets, strict=True))
            await asyncio.gather(*moves)
        remaining = self._led(server_id)
        log.info("tablet_has_handed_over", server_id=server_id, remaining=len(remaining))
        return m.ControlledShutdownResponse(
            remaining_leader_buckets=[bucket_to_proto(bucket) for bucket, _ in remaining]
        )

    def _led(self, server_id: int) -> list[tuple[TableBucket, BucketState]]:
        return [(bucket, state) for _, bucket, state in self._keeper.led(server_id)]

    def _others(self, server_id: int) -> list[ClusterNode]:
        image = self._keeper.image
        nodes = image.untagged(self._tablets.answering(image.tablets.values()))
        return [node for node in nodes if node.node_id != server_id]

    async def _move(self, bucket: TableBucket, target: int) -> None:
        async with self._turns:
            try:
                await self._handovers.move(bucket, target)
            except ZuflussError as problem:
                log.warning("bucket_not_handed_over", bucket=str(bucket), reason=problem.message)
