"""Producers of tables as an administrator sees them.

`AsyncAdmin.list_producers` returns these. `producer/exactly_once.py` is the writer's view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zufluss.client.producer.wire import offsets_from_wire
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m


@dataclass(frozen=True, slots=True)
class ProducerInfo:
    """A producer of a table."""

    producer_id: str
    """The producer's id."""
    table_id: int
    """The table's id."""
    table: str | None
    """`database.table`; None if the table was just dropped."""
    number: int
    """The producer's number, which its batches contain."""
    epoch: int
    """Grows with each start of the producer."""
    owner: str | None
    """The user who created the producer; None without authentication."""
    columns: tuple[str, ...]
    """The written columns."""
    exclusive: bool
    """Whether the producer is the only writer of its columns."""
    ttl_ms: int
    """Others may take over the columns after a silence of this length."""
    idle_ms: int
    """Time since the producer last reported."""
    lost: bool
    """Whether others took over its columns, so that it cannot continue."""
    checkpointed: bool
    """Whether the producer has reported a checkpoint."""
    checkpoint_id: int | None = None
    """The last `checkpoint_id` that was reported; None if there is none."""
    baseline: Mapping[TableBucket, int] = field(default_factory=dict)
    """Writes from these offsets on may be undone; empty in a list of all tables."""


def producers_of(response: m.ListProducersResponse) -> list[ProducerInfo]:
    """The producers in an answer, by table and id."""
    producers = map(_producer, response.producers)
    return sorted(producers, key=lambda producer: (producer.table_id, producer.producer_id))


def _producer(message: m.PbProducer) -> ProducerInfo:
    return ProducerInfo(
        message.producer_id,
        message.table_id,
        message.table if message.HasField("table") else None,
        message.producer_number,
        message.epoch,
        message.owner if message.HasField("owner") else None,
        tuple(message.column_names),
        message.exclusive,
        message.ttl_ms,
        message.idle_ms,
        message.lost,
        message.checkpointed,
        message.checkpoint_id if message.HasField("checkpoint_id") else None,
        offsets_from_wire(message.table_id, message.baseline),
    )
