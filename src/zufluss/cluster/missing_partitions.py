"""The pace of answers about partitions that do not exist.

Some clients ask for the metadata of one missing partition again as soon as they have the answer:
pyfluss does when rows wait for the partition, for ever, thousands of times a second. Others ask
once per row and take the error for "no row", as lookup joins do. So the first question of a
connection about a partition is answered at once, and repetitions are answered in turn, one per
`INTERVAL_SECONDS`. A question waits no longer than `LONGEST_HOLD_SECONDS`, however many are under
way. Connections and partitions do not slow each other down.

The last `REMEMBERED` pairs of connection and partition are remembered, by their hash, since names
come from clients; a forgotten pair begins anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

INTERVAL_SECONDS: Final = 0.01
LONGEST_HOLD_SECONDS: Final = 0.5
REMEMBERED: Final = 1024


class MissingPartitions:
    """When the next answer about a missing partition is due, by connection and partition."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next: OrderedDict[int, float] = OrderedDict()

    def hold_seconds(self, peer: str, partition: Hashable) -> float:
        """How long to hold the answer to a question that has just come from `peer`."""
        now = self._clock()
        key = hash((peer, partition))
        due = min(max(now, self._next.pop(key, now)), now + LONGEST_HOLD_SECONDS)
        self._next[key] = due + INTERVAL_SECONDS
        if len(self._next) > REMEMBERED:
            self._next.popitem(last=False)
        return due - now
