"""The newest rebalance and its moves, in memory and in the metadata store.

| path | value |
|---|---|
| `/rebalance/newest` | `id`, `status` (its name), `moves` (their number); absent before the first rebalance |
| `/rebalance/moves/ID/N` | `moves`: a list of `[table, partition, bucket, source, target, status, reason]` of the moves from 500 N on, with the number of the status |

A rebalance exists when `/rebalance/newest` names it. Its moves are stored before that, and deleted
after the next one is the newest; other moves are left over from a crash. The stored states of moves
may be old: of a rebalance under way, those that have not ended are looked at again
(`rebalances.py`), and of a cancelled one they count as cancelled.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from zufluss.coordinator import records
from zufluss.coordinator.rebalance.planner import Move
from zufluss.meta.api import Create, Delete, Entry, Put
from zufluss.model.rebalance import FINAL, RebalanceStatus
from zufluss.model.table import TableBucket

NEWEST_PATH: Final = "/rebalance/newest"
MOVES_PATH: Final = "/rebalance/moves"
MOVES_PER_VALUE: Final = 500
"""Moves in one value, which has 25 kB then, and 150 kB if all of them failed."""
REASON_CHARACTERS: Final = 200
"""Longest reason that is kept."""


@dataclass(slots=True)
class MoveState:
    """A move of a rebalance and how it goes."""

    move: Move
    """The bucket, where it was and where it shall be."""
    status: RebalanceStatus = RebalanceStatus.NOT_STARTED
    """How far it is."""
    reason: str = ""
    """Why it failed or was skipped."""


@dataclass(slots=True)
class Rebalance:
    """A plan that is carried out, or was."""

    id: str
    """Its id."""
    moves: list[MoveState]
    """Its moves, in the order in which they begin."""
    status: RebalanceStatus = RebalanceStatus.REBALANCING
    """How far it is."""
    changed: set[int] = field(default_factory=set)
    """The values whose moves have other states than the store knows."""
    counts: Counter[RebalanceStatus] = field(init=False)
    """The number of moves with each status."""

    def __post_init__(self) -> None:
        self.counts = Counter(state.status for state in self.moves)

    @property
    def has_ended(self) -> bool:
        """Whether no further move begins."""
        return self.status in FINAL

    def note(self, number: int, status: RebalanceStatus, reason: str = "") -> None:
        """Note how a move goes."""
        state = self.moves[number]
        self.counts[state.status] -= 1
        self.counts[status] += 1
        state.status, state.reason = status, reason[:REASON_CHARACTERS]
        self.changed.add(number // MOVES_PER_VALUE)

    def cancel(self) -> None:
        """Cancel it: moves that have not begun never begin."""
        self.status = RebalanceStatus.CANCELED
        for state in self.moves:
            if state.status is RebalanceStatus.NOT_STARTED:
                state.status = RebalanceStatus.CANCELED
        self.counts = Counter(state.status for state in self.moves)

    # As it is stored

    def creation(self) -> Iterator[Create]:
        """What is stored before it is the newest."""
        return (Create(self._path(n), self._value(n)) for n in self._numbers)

    def head(self, status: RebalanceStatus, *, first: bool = False) -> Create | Put:
        """What makes it the newest, with this status; `first` if there was none before."""
        value = {"id": self.id, "status": status.name, "moves": len(self.moves)}
        encoded = json.dumps(value).encode()
        return Create(NEWEST_PATH, encoded) if first else Put(NEWEST_PATH, encoded)

    def update(self, numbers: Iterable[int]) -> list[Put]:
        """What brings the stored states of moves up to date."""
        return [Put(self._path(n), self._value(n)) for n in sorted(numbers)]

    def deletion(self) -> list[Delete]:
        """What is deleted after another one is the newest."""
        return [Delete(self._path(number)) for number in self._numbers]

    @property
    def _numbers(self) -> range:
        return range(-(-len(self.moves) // MOVES_PER_VALUE))

    def _path(self, number: int) -> str:
        return f"{MOVES_PATH}/{self.id}/{number}"

    def _value(self, number: int) -> bytes:
        begin = number * MOVES_PER_VALUE
        rows = [
            [*s.move.bucket, s.move.source, s.move.target, s.status, s.reason]
            for s in self.moves[begin : begin + MOVES_PER_VALUE]
        ]
        return json.dumps({"moves": rows}, separators=(",", ":")).encode()


class StoredRebalance(NamedTuple):
    """What the store has of rebalances."""

    newest: Rebalance | None
    """The newest one."""
    leftover: Sequence[str]
    """Paths of moves that belong to no rebalance."""


def load_rebalance(entries: Iterable[Entry]) -> StoredRebalance:
    """Decode what is stored of rebalances; `CatalogDamagedError` if it cannot be read."""
    values = {entry.path: entry.value for entry in entries if entry.path.startswith("/rebalance/")}
    head = values.pop(NEWEST_PATH, None)
    if head is None:
        return StoredRebalance(None, sorted(values))

    def newest(head: bytes) -> Rebalance:
        value = json.loads(head)
        numbers = range(-(-value["moves"] // MOVES_PER_VALUE))
        paths = [f"{MOVES_PATH}/{value['id']}/{number}" for number in numbers]
        moves = [_state(row) for path in paths for row in json.loads(values.pop(path))["moves"]]
        rebalance = Rebalance(value["id"], moves, RebalanceStatus[value["status"]])
        if rebalance.status is RebalanceStatus.CANCELED:
            rebalance.cancel()
        return rebalance

    return StoredRebalance(records.guarded(NEWEST_PATH, newest, head), sorted(values))


def _state(row: Sequence[int | str | None]) -> MoveState:
    table, partition, bucket, source, target, status, reason = row
    move = Move(TableBucket(table, partition, bucket), source, target)  # type: ignore[arg-type]
    known = RebalanceStatus(status)  # type: ignore[arg-type]
    if known not in FINAL:
        known = RebalanceStatus.NOT_STARTED
    return MoveState(move, known, str(reason))
