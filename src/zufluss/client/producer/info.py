"""Producers of tables, as an administrator sees them.

What `AsyncAdmin.list_producers` gives, and how it is read from the wire. Whoever writes as one has
another view of it, `producer/exactly_once.py`.
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
    """Its id."""
    table_id: int
    """The table's id."""
    table: str | None
    """`database.table`; None if it was just dropped."""
    number: int
    """What tells its batches from those of others."""
    epoch: int
    """Each start of it has a higher one."""
    owner: str | None
    """Who made it; None without authentication."""
    columns: tuple[str, ...]
    """The columns it writes."""
    exclusive: bool
    """Nobody else may write them."""
    ttl_ms: int
    """Others may take its columns when it is silent for so long."""
    idle_ms: int
    """How long ago it gave a sign of life."""
    lost: bool
    """Others have taken columns of it, so that it cannot come back."""
    checkpointed: bool
    """It has reported a checkpoint."""
    checkpoint_id: int | None = None
    """The id of the last checkpoint that it reported with one."""
    baseline: Mapping[TableBucket, int] = field(default_factory=dict)
    """What it wrote from here on may be undone, if one table was asked for."""


def producers_of(response: m.ListProducersResponse) -> list[ProducerInfo]:
    """The producers of an answer, by table and id."""
    found = map(_producer, response.producers)
    return sorted(found, key=lambda producer: (producer.table_id, producer.producer_id))


def _producer(found: m.PbProducer) -> ProducerInfo:
    return ProducerInfo(
        found.producer_id,
        found.table_id,
        found.table if found.HasField("table") else None,
        found.producer_number,
        found.epoch,
        found.owner if found.HasField("owner") else None,
        tuple(found.column_names),
        found.exclusive,
        found.ttl_ms,
        found.idle_ms,
        found.lost,
        found.checkpointed,
        found.checkpoint_id if found.HasField("checkpoint_id") else None,
        offsets_from_wire(found.table_id, found.baseline),
    )
