"""Helpers for tests of exactly-once writers: a fake coordinator and leader with producers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from tests.client.fake import KV_HEADER, FakeCluster
from zufluss.client.connection import AsyncConnection
from zufluss.client.producer.wire import offsets_from_wire, offsets_to_wire
from zufluss.client.table import AsyncTable
from zufluss.errors import ErrorCode, ProducerFencedError, ProducerNotFoundError, ZuflussError
from zufluss.model.producer import ProducerWriter
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import partition_id_of

NUMBER = 5
"""The number of every producer."""
VIEWS = "page BIGINT, views BIGINT, last STRING, PRIMARY KEY (page)"
MANY = {"page": list(range(200)), "views": [1] * 200}
"""Rows for every bucket."""


class FakeProducers:
    """The producer calls of a fake cluster; every request is kept, in order."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.epoch = 0
        """The present epoch; 0: there is no producer."""
        self.created = False
        self.undo_needed = True
        self.exclusive = True
        self.checkpoint_id: int | None = None
        self.baseline: dict[TableBucket, int] = {}
        self.asked: list[Any] = []
        self.problem: Callable[[Any], ZuflussError | None] = lambda request: None
        """What a call is refused with."""
        self.undo: Callable[[m.UndoProducerRequest], Message | ZuflussError | None] = _done
        for key, handler in {
            ApiKey.INIT_PRODUCER: self._init,
            ApiKey.CHECKPOINT_PRODUCER: self._checkpoint,
            ApiKey.RELEASE_PRODUCER: self._release,
            ApiKey.UNDO_PRODUCER: self._undo,
            ApiKey.LIST_OFFSETS: self._list_offsets,
        }.items():
            cluster.handlers[key] = handler

    def of(self, kind: type) -> list[Any]:
        """The requests of one kind."""
        return [request for request in self.asked if isinstance(request, kind)]

    @property
    def reports(self) -> list[dict[TableBucket, int]]:
        """The offsets of each sign of life; empty where it had none."""
        return [
            offsets_from_wire(request.table_id, request.baseline)
            for request in self.of(m.CheckpointProducerRequest)
        ]

    def _refusal(self, request: Any) -> ZuflussError | None:
        self.asked.append(request)
        if (problem := self.problem(request)) is not None:
            return problem
        if not self.epoch:
            return ProducerNotFoundError("there is no such producer")
        if request.epoch != self.epoch:
            return ProducerFencedError(f"epoch {request.epoch} is over, {self.epoch} has begun")
        return None

    async def _init(self, request: m.InitProducerRequest) -> Any:
        self.asked.append(request)
        if (problem := self.problem(request)) is not None:
            return problem
        self.epoch += 1
        answer = m.InitProducerResponse(
            producer_number=NUMBER,
            epoch=self.epoch,
            created=self.created,
            undo_needed=self.undo_needed,
            exclusive=self.exclusive,
            column_ids=request.column_ids,
            checkpoint_id=self.checkpoint_id,
        )
        given = request.restored if request.is_restore else offsets_to_wire(self.baseline)
        answer.baseline.extend(given)
        return answer

    async def _checkpoint(self, request: m.CheckpointProducerRequest) -> Any:
        return self._refusal(request) or m.CheckpointProducerResponse(remaining_ms=60_000)

    async def _release(self, request: m.ReleaseProducerRequest) -> Any:
        return self._refusal(request) or m.ReleaseProducerResponse()

    async def _undo(self, request: m.UndoProducerRequest) -> Any:
        self.asked.append(request)
        return self.undo(request)

    async def _list_offsets(self, request: m.ListOffsetsRequest) -> Message:
        partition_id = partition_id_of(request)
        answer = m.ListOffsetsResponse()
        for bucket_id in request.bucket_id:
            bucket = TableBucket(request.table_id, partition_id, bucket_id)
            end = max(self.cluster.store(bucket).end, self.cluster.log(bucket).end)
            answer.buckets_resp.add(bucket_id=bucket_id, offset=end)
        return answer

    def refuse_puts(self, code: ErrorCode) -> None:
        """Every batch is refused from now on."""
        self.cluster.produce_fault = lambda *_: code


def _done(request: m.UndoProducerRequest) -> Message:
    start = request.from_offset
    return m.UndoProducerResponse(done=True, position=start + 4, end_offset=start + 4, keys=3)


async def create_views(cluster: FakeCluster, connection: AsyncConnection) -> AsyncTable:
    """A table of two buckets."""
    cluster.create("views", VIEWS, bucket_count=2, bucket_keys=("page",))
    return await connection.table("fluss.views")


def at(table: AsyncTable, *offsets: int) -> dict[TableBucket, int]:
    """Offsets of the buckets 0, 1, …"""
    return {TableBucket(table.info.table_id, None, i): o for i, o in enumerate(offsets)}


def writers(cluster: FakeCluster) -> list[ProducerWriter | None]:
    """The writers of the received batches, in order."""
    return [
        ProducerWriter.of(KV_HEADER.unpack_from(entry.records)[5])
        for put in cluster.puts
        for entry in put.buckets_req
    ]


def sequences(cluster: FakeCluster) -> list[int]:
    """The sequences of the received batches, in order."""
    entries = [entry for put in cluster.puts for entry in put.buckets_req]
    return [KV_HEADER.unpack_from(entry.records)[6] for entry in entries]
