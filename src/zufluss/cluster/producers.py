"""The producers of a table as leaders know them, and their form on the wire.

The coordinator (`coordinator/producers/book.py`) sends all producers of a table to every leader at
once, with a version that grows, so that late messages change nothing. A leader knows of a producer
what it needs to check puts, and the offsets from which the changelog is kept for an undo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zufluss.wire import messages as m
from zufluss.wire.tables import offsets_from_proto, offsets_to_proto

Baseline = Mapping[tuple[int | None, int], int]
"""Offsets by partition id (None without partitions) and bucket id; 0 for buckets not in it."""


@dataclass(frozen=True, slots=True)
class ProducerEntry:
    """One producer of a table."""

    producer_id: str
    """Its id, the same after every restart of the producer."""
    number: int
    """The number in its writer ids; no other producer ever has it."""
    epoch: int
    """Its present epoch; writers of other epochs are fenced."""
    column_ids: frozenset[int]
    """The columns it writes, none of the key; empty for all columns, also those added later."""
    exclusive: bool
    """Whether the producer is the only writer of its columns."""
    lost: bool
    """Whether others have taken columns of it: all its epochs are fenced, and it locks nothing."""
    baseline: Baseline = field(default_factory=dict)
    """Its changes from these offsets on may have to be undone."""
    holds: bool = True
    """Whether the changelog must be kept from `baseline` on; from 0 for buckets not in it."""


@dataclass(frozen=True, slots=True)
class TableProducers:
    """Every producer of a table."""

    table_id: int
    """The id of the table."""
    version: int
    """Grows with each change, also over restarts of the coordinator."""
    producers: tuple[ProducerEntry, ...] = ()
    """All producers of the table."""


def producers_to_proto(table: TableProducers) -> m.PbTableProducers:
    """Encode the producers of a table for a leader."""
    return m.PbTableProducers(
        table_id=table.table_id,
        version=table.version,
        producers=[_entry_to_proto(table.table_id, entry) for entry in table.producers],
    )


def producers_from_proto(message: m.PbTableProducers) -> TableProducers:
    """Decode the producers of a table."""
    return TableProducers(
        message.table_id, message.version, tuple(map(_entry_from_proto, message.producers))
    )


def _entry_to_proto(table_id: int, entry: ProducerEntry) -> m.PbProducer:
    """Encode one producer; fields that leaders do not need are 0."""
    return m.PbProducer(
        producer_id=entry.producer_id,
        table_id=table_id,
        producer_number=entry.number,
        epoch=entry.epoch,
        column_ids=sorted(entry.column_ids),
        exclusive=entry.exclusive,
        ttl_ms=0,
        idle_ms=0,
        lost=entry.lost,
        checkpointed=False,
        baseline=offsets_to_proto(entry.baseline),
        holds=entry.holds,
    )


def _entry_from_proto(message: m.PbProducer) -> ProducerEntry:
    return ProducerEntry(
        message.producer_id,
        message.producer_number,
        message.epoch,
        frozenset(message.column_ids),
        message.exclusive,
        message.lost,
        offsets_from_proto(message.baseline),
        message.holds,
    )
