"""Producers by bare frames: epochs, puts and undos, with nothing in the background."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.end_to_end.kv import PUT_VERSION, Codec, kv_batch, put_request
from tests.end_to_end.raw import RawClient
from zufluss.client.producer.wire import offsets_to_wire
from zufluss.client.sync.table import Table
from zufluss.errors import ErrorCode
from zufluss.model.producer import ProducerWriter
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

HOUR_MS = 3_600_000


def init(
    raw: RawClient,
    table: Table,
    producer_id: str = "job",
    columns: Sequence[int] = (),
    *,
    ttl_ms: int = HOUR_MS,
    restored: Mapping[TableBucket, int] | None = None,
) -> m.InitProducerResponse:
    """INIT_PRODUCER; `columns` are ids."""
    request = m.InitProducerRequest(
        producer_id=producer_id,
        table_id=table.info.table_id,
        column_ids=columns,
        ttl_ms=ttl_ms,
        is_restore=restored is not None,
    )
    request.restored.extend(offsets_to_wire(restored or {}))
    answer: m.InitProducerResponse = raw.call(ApiKey.INIT_PRODUCER, request)
    return answer


@dataclass
class Epoch:
    """One epoch of a producer on a table with one bucket, and its next sequence number."""

    raw: RawClient
    table: Table
    number: int
    epoch: int
    sequence: int = 0
    targets: Sequence[int] = field(default=())
    """Positions of the columns that it puts; empty means all."""

    @classmethod
    def begin(cls, raw: RawClient, table: Table, producer_id: str = "job", **more: Any) -> Epoch:
        """Begin an epoch."""
        answer = init(raw, table, producer_id, **more)
        return cls(raw, table, answer.producer_number, answer.epoch)

    def batch(self, *rows: tuple[Any, ...], sequence: int, task: int = 0) -> bytes:
        """A batch of rows."""
        codec = Codec(self.table.info.schema, self.table.info.schema_id)
        writer_id = ProducerWriter(self.number, self.epoch, task).writer_id
        records = [codec.put(row) for row in rows]
        return kv_batch(records, schema_id=codec.schema_id, writer_id=writer_id, sequence=sequence)

    def send(self, *rows: tuple[Any, ...], sequence: int, task: int = 0) -> ErrorCode:
        """Put rows with a sequence number; returns the error code."""
        data = self.batch(*rows, sequence=sequence, task=task)
        request = put_request(self.table.info.table_id, data, targets=self.targets)
        (entry,) = self.raw.call(ApiKey.PUT_KV, request, PUT_VERSION).buckets_resp
        return ErrorCode(entry.error_code)

    def put(self, *rows: tuple[Any, ...]) -> ErrorCode:
        """Put rows with the next sequence number."""
        code = self.send(*rows, sequence=self.sequence)
        self.sequence += code is ErrorCode.NONE
        return code

    def undo(
        self, from_offset: int, *, bucket: int = 0, limit_ms: int | None = None
    ) -> m.UndoProducerResponse:
        """UNDO_PRODUCER."""
        request = m.UndoProducerRequest(
            table_id=self.table.info.table_id,
            bucket_id=bucket,
            producer_number=self.number,
            epoch=self.epoch,
            from_offset=from_offset,
            time_limit_ms=limit_ms,
        )
        answer: m.UndoProducerResponse = self.raw.call(ApiKey.UNDO_PRODUCER, request)
        return answer
