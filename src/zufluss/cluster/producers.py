"""The producers of a table as leaders must know them, and their form on the wire.

The coordinator keeps them (`coordinator/producers/calls.py`) and tells them to every leader of
the table: all of the table at once, with a version that grows, so that news that come late change
nothing. A leader needs no more of a producer than what its puts are checked by, and from where on
the changelog must be kept for an undo of it.
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
    """Its id, the same after every restart of it."""
    number: int
    """What its writer ids are made of; no other producer ever has it."""
    epoch: int
    """Its present epoch; writers of others are fenced."""
    column_ids: frozenset[int]
    """The columns it writes, none of the key; empty: all there are, also those added later."""
    exclusive: bool
    """Nobody else may write them."""
    lost: bool
    """Others have taken columns of it: every epoch of it is fenced, and it locks nothing."""
    baseline: Baseline = field(default_factory=dict)
    """Its changes from these offsets on may have to be undone."""
    holds: bool = True
    """The changelog from `baseline` on must be kept; a bucket that is not in it from 0 on."""


@dataclass(frozen=True, slots=True)
class TableProducers:
    """Every producer of a table."""

    table_id: int
    """The table."""
    version: int
    """Grows with each change, also over restarts of the coordinator."""
    producers: tuple[ProducerEntry, ...] = ()
    """All there are; none: the table is free."""


def producers_to_proto(table: TableProducers) -> m.PbTableProducers:
    """The producers of a table as they travel to a leader."""
    return m.PbTableProducers(
        table_id=table.table_id,
        version=table.version,
        producers=[_entry_to_proto(table.table_id, entry) for entry in table.producers],
    )


def producers_from_proto(message: m.PbTableProducers) -> TableProducers:
    """The producers of a table as they arrived."""
    return TableProducers(
        message.table_id, message.version, tuple(map(_entry_from_proto, message.producers))
    )


def _entry_to_proto(table_id: int, entry: ProducerEntry) -> m.PbProducer:
    """What leaders need not know stays behind."""
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
