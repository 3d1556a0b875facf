"""Even shares with the fewest moves: how many buckets of each row every server shall lead.

A row is a table or a partition, a column is a server. Of a row with b buckets and n servers, each
server gets b // n, and b % n servers get one more, an *extra*. Who gets the extras is decided for
all rows together, so that

1. the sum of each column is within its bounds: the servers lead equally many buckets;
2. each rack of m servers has m / n of the extras of a row, rounded up or down;
3. as many extras as possible go to servers that have a bucket more anyway (*keepers*), because each
   of these saves a move.

There is always a solution for bounds that are the mean, rounded: 1 / n of each extra at every
server keeps all of them, and in a network of whole capacities a flow can be made whole. The search
is that of a flow of least cost, on a graph of servers only. A *hop* from server a to b takes the
extra of some row from a to b; it costs a move if a is a keeper of the row and b is not, and saves
one in the opposite case. At first each row has the best extras for itself. Then extras go along the
shortest paths of hops from servers with too many to servers with too few. Of paths of one cost that
with the fewest hops is taken, so that no row takes part in two hops that exclude each other.

The hops of all rows are counted in matrices of servers by servers, which are kept up to date, so
that one step takes a fraction of a millisecond with 200 servers, whatever the number of rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]

COSTS: Final = (-1, 0, 1)
"""What a hop can cost."""
ROWS_AT_ONCE: Final = 1024
"""Rows whose hops are counted in one piece."""
_NONE: Final = np.iinfo(np.int64).max // 4
"""The length of a path that does not exist."""


def even_shares(
    held: Ints, sizes: Ints, racks: Ints, low: Ints | None = None, high: Ints | None = None
) -> Ints | None:
    """The number of buckets of each row that each server shall lead, with the fewest moves.

    `held` has those that the servers lead now, by row and server; `sizes` all buckets of each row,
    also those of servers that are not among the columns. `racks` has the number of each server's
    rack, from 0 on. `low` and `high` bound the sums of columns; without them they are the mean,
    rounded. Returns None if no shares keep the bounds.
    """
    servers = held.shape[1]
    each, extra = np.divmod(sizes, servers)
    if low is None or high is None:
        total = int(sizes.sum())
        low = np.full(servers, total // servers)
        high = np.full(servers, -(-total // servers))
    shares = np.repeat(each[:, None], servers, axis=1)
    rows = np.flatnonzero(extra)
    base = int(each.sum())
    search = _Search(held[rows] > each[rows, None], extra[rows], racks, low - base, high - base)
    if not search.run():
        return None
    shares[rows] += search.extras
    return shares


class _Search:
    """Distributes the extras of rows."""

    def __init__(self, keepers: Bools, extra: Ints, racks: Ints, low: Ints, high: Ints) -> None:
        self.keepers = np.asfortranarray(keepers)
        self.racks, self.low, self.high = racks, low, high
        servers = len(racks)
        sizes = np.bincount(racks)
        self.rack_count = len(sizes)
        self.rack_low = extra[:, None] * sizes // servers
        self.rack_high = -(-extra[:, None] * sizes // servers)
        self.same_rack = racks[:, None] == racks
        self.extras = np.zeros(keepers.shape, np.bool_, order="F")
        self._choose_all(extra)
        self.sums = self.extras.sum(axis=0, dtype=np.int64)
        self.in_rack = self._in_racks(self.extras)
        self.hops = np.zeros((len(COSTS), servers, servers), np.float32)
        self._counted: tuple[Bools, Ints] | None = None
        """The extras, and their numbers in racks, whose hops are counted."""

    # The best extras of each row for itself

    def _choose_all(self, extra: Ints) -> None:
        """Give the extras of each row to keepers, as far as the racks allow; few per server."""
        kept = self._in_racks(self.keepers)
        simple = (kept.sum(axis=1) == extra) & (kept >= self.rack_low).all(axis=1)
        simple &= (kept <= self.rack_high).all(axis=1)
        self.extras[simple] = self.keepers[simple]
        load = self.extras.sum(axis=0, dtype=np.int64)
        for row in np.flatnonzero(~simple).tolist():
            chosen = self._choose(row, int(extra[row]), kept[row], load)
            self.extras[row, chosen] = True
            load[chosen] += 1

    def _choose(self, row: int, count: int, kept: Ints, load: Ints) -> Ints:
        """The servers that get the extras of a row."""
        order = np.lexsort((load, ~self.keepers[row]))
        low, high = self.rack_low[row], self.rack_high[row]
        if len(low) == 1:
            return order[:count]
        rack_load = np.bincount(self.racks, load, len(low)) / np.bincount(self.racks)
        first = np.lexsort((rack_load, kept <= low, high == low))
        quota = low.copy()
        quota[first[: count - int(low.sum())]] += 1
        racks = self.racks[order]
        chosen = [order[racks == rack][:most] for rack, most in enumerate(quota.tolist())]
        return np.concatenate(chosen)

    # From servers with too many to servers with too few

    def run(self) -> bool:
        """Move extras until all sums are within their bounds; whether that is possible.

        The last stage moves between sums that are within their bounds, if that saves a move.
        """
        low, high, sums = self.low, self.high, self.sums
        while (sums > high).any() and (sums < low).any() and self._push(high, low):
            pass
        while (sums > high).any() and self._push(high, high):
            pass
        while (sums < low).any() and self._push(low, low):
            pass
        if (sums > high).any() or (sums < low).any():
            return False
        if (self.extras & ~self.keepers).any():
            while (sums > low).any() and (sums < high).any() and self._push(low, high, saving=True):
                pass
        return True

    def _push(self, surplus: Ints, lack: Ints, *, saving: bool = False) -> bool:
        """Push extras along shortest paths of one length, one to each server; whether it could.

        The sources have more than `surplus`, the targets less than `lack`. With `saving`, only
        along paths that save a move. A push along a shortest path makes no other path shorter, so
        what is left of the others after it is as good as before.
        """
        self._count()
        lengths, reached, before = self._tree(self.sums > surplus)
        targets = self.sums < lack
        shortest = reached[targets].min(initial=_NONE)
        if shortest >= (0 if saving else _NONE // 2):
            return False
        for end in np.flatnonzero(targets & (reached == shortest)).tolist():
            path = [end]
            while before[path[0]] >= 0:
                path.insert(0, int(before[path[0]]))
            first = path[0]
            count = min(self.sums[first] - surplus[first], lack[end] - self.sums[end])
            if count > 0:
                self._push_along(path, lengths, int(count))
        return True

    def _push_along(self, path: list[int], lengths: Ints, count: int) -> None:
        hops = list(pairwise(path))
        rows = [self._rows(a, b, int(lengths[a, b]) // len(self.sums)) for a, b in hops]
        count = min(count, *map(len, rows))
        for (a, b), some in zip(hops, rows, strict=True):
            chosen = some[:count]
            self.extras[chosen, a] = False
            self.extras[chosen, b] = True
            self.in_rack[chosen, self.racks[a]] -= 1
            self.in_rack[chosen, self.racks[b]] += 1
            self.sums[a] -= count
            self.sums[b] += count

    def _tree(self, sources: Bools) -> tuple[Ints, Ints, Ints]:
        """Lengths of hops, lengths of the shortest paths, and the servers before the last hops.

        A hop has the length cost x servers + 1: of paths with one cost, that with the fewest hops
        is shorter.
        """
        servers = len(sources)
        lengths = np.full((servers, servers), _NONE)
        for index in (2, 1, 0):
            lengths[self.hops[index] > 0] = COSTS[index] * servers + 1
        reached = np.where(sources, 0, _NONE)
        before = np.full(servers, -1)
        for _ in range(servers):
            by_hop = reached[:, None] + lengths
            nearest = by_hop.min(axis=0)
            nearer = (nearest < reached) & (nearest < _NONE // 2)
            if not nearer.any():
                break
            before[nearer] = by_hop[:, nearer].argmin(axis=0)
            reached[nearer] = nearest[nearer]
        return lengths, reached, before

    def _rows(self, a: int, b: int, cost: int) -> Ints:
        """The rows of the hops from server a to b with a cost."""
        keepers = self.keepers
        rows = self.extras[:, a] & ~self.extras[:, b]
        if cost == 0:
            rows &= keepers[:, a] == keepers[:, b]
        else:
            rows &= keepers[:, a] if cost > 0 else ~keepers[:, a]
            rows &= ~keepers[:, b] if cost > 0 else keepers[:, b]
        from_rack, to_rack = self.racks[a], self.racks[b]
        if from_rack != to_rack:
            rows &= self.in_rack[:, from_rack] > self.rack_low[:, from_rack]
            rows &= self.in_rack[:, to_rack] < self.rack_high[:, to_rack]
        return np.flatnonzero(rows)

    def _in_racks(self, of: Bools) -> Ints:
        """How many servers of each rack have something of each row."""
        counts = np.zeros(self.rack_low.shape, np.int64)
        for rack in range(self.rack_count):
            counts[:, rack] = of[:, self.racks == rack].sum(axis=1)
        return counts

    def _count(self) -> None:
        """Bring the matrices of hops up to date."""
        if self._counted is None:
            self._add(np.arange(len(self.extras)), self.extras, self.in_rack, +1)
            self._counted = self.extras.copy(order="F"), self.in_rack.copy()
            return
        extras, in_rack = self._counted
        rows = np.flatnonzero((extras != self.extras).any(axis=1))
        self._add(rows, extras, in_rack, -1)
        self._add(rows, self.extras, self.in_rack, +1)
        extras[rows], in_rack[rows] = self.extras[rows], self.in_rack[rows]

    def _add(self, rows: Ints, extras: Bools, in_rack: Ints, sign: int) -> None:
        """Add the hops of rows to the matrices, or take them away."""
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[begin : begin + ROWS_AT_ONCE]
            self._add_some(some, extras[some], in_rack[some], sign)

    def _add_some(self, rows: Ints, extras: Bools, in_rack: Ints, sign: int) -> None:
        keepers = self.keepers[rows]
        leaves = np.take(in_rack > self.rack_low[rows], self.racks, axis=1)
        enters = np.take(in_rack < self.rack_high[rows], self.racks, axis=1)
        for keeps_a in (False, True):
            away = extras & (keepers == keeps_a)
            for keeps_b in (False, True):
                to = ~extras & (keepers == keeps_b)
                counts = _product(away, to)
                if self.rack_count > 1:
                    across = _product(away & leaves, to & enters)
                    counts = np.where(self.same_rack, counts, across)
                self.hops[COSTS.index(keeps_a - keeps_b)] += sign * counts


def _product(away: Bools, to: Bools) -> Floats:
    """How many rows have an extra that can leave the one server and go to the other."""
    return away.T.astype(np.float32) @ to.astype(np.float32)
