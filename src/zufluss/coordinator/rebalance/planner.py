"""Which buckets move where, so that every tablet server leads its share.

A pure function of who leads what, and of the servers that are there with their racks and tags. When
all moves are done,

* a server with a tag leads nothing;
* of each table, and of each partition, the other servers lead equally many buckets but for one, and
  the same is true of all buckets of the cluster;
* the servers of a rack lead their part of each table, rounded up or down, so that a rack that fails
  takes no more of a table than others. Racks of different sizes have different parts. Where this
  and equal numbers exclude each other for the partitions of a table, the numbers count.

Of all plans with this effect one with the fewest moves is made for tables without partitions
(`shares.py`); for a table with partitions the fewest that give each server its part of the table,
and then the fewest for its partitions. The same question has the same answer, and a cluster that is
even has no moves.

Buckets of servers that are not there cannot move; they neither count nor move.

The first moves are those away from servers with tags, and the moves from one server are not side
by side, so that those that are made at the same time burden different servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zufluss.cluster.image import BucketState, ClusterImage
from zufluss.coordinator.rebalance.shares import Ints, even_shares
from zufluss.errors import RebalanceFailureError
from zufluss.model.table import TableBucket


class PlanServer(NamedTuple):
    """A tablet server that is there."""

    server_id: int
    """Its id."""
    rack: str | None = None
    """Its rack; servers that name none are in one."""
    tagged: bool = False
    """Whether it shall lead nothing."""


class PlanHolder(NamedTuple):
    """The buckets of a table or a partition."""

    table_id: int
    """The table."""
    partition_id: int | None
    """The partition, None for a table without partitions."""
    buckets: Sequence[BucketState]
    """Its buckets by number."""


class Move(NamedTuple):
    """A bucket that changes its leader."""

    bucket: TableBucket
    """The bucket."""
    source: int
    """The server that leads it."""
    target: int
    """The server that shall lead it."""


class _Servers(NamedTuple):
    """The servers that shall lead buckets."""

    ids: list[int]
    racks: Ints


def servers_of(image: ClusterImage) -> list[PlanServer]:
    """The tablet servers that are there."""
    return [
        PlanServer(node.node_id, node.rack, node.node_id in image.tags)
        for node in image.tablets.values()
    ]


def holders_of(image: ClusterImage) -> list[PlanHolder]:
    """All tables and partitions; takes no time per bucket."""
    holders: list[PlanHolder] = []
    for table in image.tables():
        table_id = table.info.table_id
        if table.buckets:
            holders.append(PlanHolder(table_id, None, table.buckets))
        for partition in image.partitions(table_id).values():
            holders.append(PlanHolder(table_id, partition.partition_id, partition.buckets))
    return holders


def plan(holders: Iterable[PlanHolder], servers: Iterable[PlanServer]) -> list[Move]:
    """The moves after which every server leads its share, in the order in which they are made.

    `RebalanceFailureError` if there is no server that may lead buckets.
    """
    there = {server.server_id: server for server in servers}
    ids = sorted(i for i, server in there.items() if not server.tagged)
    if not ids:
        raise RebalanceFailureError(
            f"buckets cannot be shared out: of {len(there)} tablet servers all have tags; remove "
            "one (zufluss cluster tag remove), or start another server"
        )
    names = sorted({there[i].rack or "" for i in ids})
    target = _Servers(ids, np.array([names.index(there[i].rack or "") for i in ids]))
    tables: dict[int, list[_Held]] = {}
    for holder in sorted(holders, key=lambda holder: (holder.table_id, holder.partition_id or 0)):
        tables.setdefault(holder.table_id, []).append(_Held(holder, there.keys(), target))
    moves: list[Move] = []
    for held, shares in _shares(list(tables.values()), target):
        moves += held.moves(shares, target)
    return _in_order(moves, {i for i, server in there.items() if server.tagged})


class _Held:
    """The buckets of a holder by the server that leads them."""

    def __init__(self, holder: PlanHolder, there: Iterable[int], target: _Servers) -> None:
        self._ids = holder.table_id, holder.partition_id
        by_server: dict[int, list[int]] = {}
        for number, state in enumerate(holder.buckets):
            by_server.setdefault(state.leader, []).append(number)
        self._by_server = {i: by_server[i] for i in by_server.keys() & there}
        self.size = sum(map(len, self._by_server.values()))
        self.counts = [len(self._by_server.get(i, ())) for i in target.ids]

    def moves(self, shares: Sequence[int], target: _Servers) -> Iterator[Move]:
        """The moves that give each server its share; buckets with low numbers stay."""
        keeps = dict(zip(target.ids, shares, strict=True))
        leaving = sorted(
            (number, server)
            for server, numbers in self._by_server.items()
            for number in numbers[keeps.get(server, 0) :]
        )
        takers = [
            server
            for server, share in keeps.items()
            for _ in range(share - len(self._by_server.get(server, ())))
        ]
        for (number, source), taker in zip(leaving, takers, strict=True):
            yield Move(TableBucket(*self._ids, number), source, taker)


def _shares(tables: list[list[_Held]], target: _Servers) -> Iterator[tuple[_Held, Sequence[int]]]:
    """The share of each server in each table without partitions, and in each partition."""
    if not tables:
        return
    counts = [np.array([held.counts for held in table]) for table in tables]
    sizes = [np.array([held.size for held in table]) for table in tables]
    of_tables = even_shares(
        np.array([some.sum(axis=0) for some in counts]),
        np.array([some.sum() for some in sizes]),
        target.racks,
    )
    assert of_tables is not None, "an even distribution always exists"
    for table, held, size, whole in zip(tables, counts, sizes, of_tables, strict=True):
        if len(table) == 1:
            yield table[0], whole.tolist()
            continue
        shares = even_shares(held, size, target.racks, whole, whole)
        if shares is None:  # with these racks; without racks there always is one
            shares = even_shares(held, size, np.zeros_like(target.racks), whole, whole)
        assert shares is not None, "nearly equal numbers of servers can be had of any partitions"
        yield from zip(table, shares.tolist(), strict=True)


def _in_order(moves: list[Move], tagged: set[int]) -> list[Move]:
    """Moves away from tagged servers first, and those of each server spread over the plan."""
    of_source: Counter[int] = Counter()
    ranked: list[tuple[bool, int, Move]] = []
    for move in moves:
        ranked.append((move.source not in tagged, of_source[move.source], move))
        of_source[move.source] += 1
    ranked.sort(key=lambda each: each[:2])
    return [move for _, _, move in ranked]
