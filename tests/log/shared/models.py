"""Exhaustive models of the shared log's protocol: every order of every event, for a few numbers.

A model is a set of rules. A rule takes a state and yields the states that one event leads to; the
explorer visits every state that can be reached and asks of each whether an acknowledged row is
lost. States are frozen, so they can be compared. What the models have in common:

* A put is a request that may arrive at any later time, also after it was sent a second time, and
  whose answer may be lost. A request that arrives creates its object if the number is free.
* The session has at most `under_way` numbers that it does not know to be its own. It stops for good
  when a number has somebody else's object.
* A sealer may be slow between any two of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

FREE, DATA, SEAL = 0, 1, 2
STATES_MAX = 1_000_000

S = TypeVar("S")


class Verdict(NamedTuple):
    """What a model says about a design."""

    states: int
    """How many were visited."""
    loss: str
    """The first loss that was found; "" if every state was visited without one."""


def explore(start: S, events: Callable[[S], Iterator[S]], loss: Callable[[S], str]) -> Verdict:
    """Visit every state that can be reached."""
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        if problem := loss(state):
            return Verdict(len(seen), f"{problem} in {state}")
        for following in events(state):
            if following not in seen:
                seen.add(following)
                waiting.append(following)
        assert len(seen) < STATES_MAX, "the model is too large to be explored"
    return Verdict(len(seen), "")


@dataclass(frozen=True, slots=True)
class World:
    """A session, the store, and the network between them."""

    slots: tuple[int, ...]
    """What lies at each number."""
    sent: int = 0
    """Numbers that were sent at least once."""
    requests: frozenset[int] = frozenset()
    """Puts that did not arrive."""
    answers: frozenset[tuple[int, bool]] = frozenset()
    """Answers that did not arrive: the number, and whether its object is the session's own."""
    own: frozenset[int] = frozenset()
    acknowledged: frozenset[int] = frozenset()
    fenced: bool = False
    floor: int = 0
    """The floor in the metadata."""
    trimmed: int = 0
    """What the session deleted, or sent deletes for."""
    deletes: frozenset[int] = frozenset()
    """Deletes that did not arrive."""
    sealers: tuple[Sealer, ...] = ()
    swept: bool = False
    """The session is over, and its objects were deleted."""

    def at(self, number: int, what: int) -> tuple[int, ...]:
        return (*self.slots[:number], what, *self.slots[number + 1 :])


@dataclass(frozen=True, slots=True)
class Sealer:
    """Who ends a session: looks, puts its seals in any order, looks again."""

    base: int | None = None
    """The number that it counts from, once it has closed the session; None before."""
    puts: frozenset[int] = frozenset()
    """Seals that did not arrive."""
    end: int | None = None
    replayed: frozenset[int] = frozenset()
    """What it has read when it knew the end."""


@dataclass(frozen=True, slots=True)
class Design:
    """A protocol; the defaults are ours."""

    numbers: int = 4
    under_way: int = 2
    seals: int = 1
    """Seals at consecutive numbers, in any order."""
    sealers: int = 1
    in_order: bool = True
    """Acknowledges a number only if all below it are its own."""
    seal_ahead: int = 0
    """Seals so many numbers behind the first free one."""
    lossy: bool = True
    """Answers may be lost, so that puts are sent again."""
    trim: str = ""
    """How a live session deletes: `floor` recorded first, at once (`list`), all but the newest
    (`newest`); "" not at all."""
    sweep: str = ""
    """What is deleted after the end: `data`, or data and seals (`all`); "" nothing."""

    @property
    def start(self) -> World:
        slots = (FREE,) * (self.numbers + 2 * self.seals + self.seal_ahead + 1)
        return World(slots, sealers=(Sealer(),) * self.sealers)

    def verdict(self) -> Verdict:
        """Explore the design."""
        return explore(self.start, self.events, loss)

    def events(self, w: World) -> Iterator[World]:
        """Everything that can happen next."""
        if not w.fenced:
            yield from self._session(w)
        yield from self._network(w)
        for number in range(len(w.sealers)):
            for sealer, slots in self._sealer(w, w.sealers[number]):
                sealers = (*w.sealers[:number], sealer, *w.sealers[number + 1 :])
                yield replace(w, sealers=sealers, slots=slots)
        if self.sweep and not w.swept and all(s.end is not None for s in w.sealers):
            gone = (DATA,) if self.sweep == "data" else (DATA, SEAL)
            slots = tuple(FREE if what in gone else what for what in w.slots)
            yield replace(w, slots=slots, swept=True)

    def _session(self, w: World) -> Iterator[World]:
        if w.sent < self.numbers and w.sent - len(w.own) < self.under_way:
            yield replace(w, sent=w.sent + 1, requests=w.requests | {w.sent})
        if self.lossy:
            for number in set(range(w.sent)) - w.own - w.requests:
                yield replace(w, requests=w.requests | {number})
        durable = _dense(w.own)
        if self.trim == "floor":
            if all(sealer.base is None for sealer in w.sealers):  # refused once it was closed
                for floor in range(w.floor + 1, durable + 1):
                    yield replace(w, floor=floor)
            if w.trimmed < w.floor:
                yield _deleting(w, w.floor)
        elif self.trim:
            for end in range(w.trimmed + 1, durable + (self.trim == "list")):
                yield _deleting(w, end)

    def _network(self, w: World) -> Iterator[World]:
        for number in w.requests:
            free = w.slots[number] == FREE
            slots = w.at(number, DATA) if free else w.slots
            arrived = replace(w, slots=slots, requests=w.requests - {number})
            yield replace(arrived, answers=w.answers | {(number, slots[number] == DATA)})
            if self.lossy:
                yield arrived
        for number, ours in w.answers:
            rest = replace(w, answers=w.answers - {(number, ours)})
            if w.fenced or not ours:
                yield replace(rest, fenced=True)
                continue
            own = w.own | {number}
            acknowledged = frozenset(range(_dense(own))) if self.in_order else own
            yield replace(rest, own=own, acknowledged=w.acknowledged | acknowledged)
        for number in w.deletes:
            slots = w.at(number, FREE) if w.slots[number] == DATA else w.slots
            yield replace(w, slots=slots, deletes=w.deletes - {number})

    def _sealer(self, w: World, s: Sealer) -> Iterator[tuple[Sealer, tuple[int, ...]]]:
        if s.end is not None:
            return
        if s.base is None:
            base = w.floor
            if self.trim in ("list", "newest"):
                base = next((n for n, what in enumerate(w.slots) if what != FREE), 0)
            yield replace(s, base=base), w.slots
            return
        for number in s.puts:
            free = w.slots[number] == FREE
            yield replace(s, puts=s.puts - {number}), w.at(number, SEAL) if free else w.slots
        if s.puts:
            return
        end = next(n for n in range(s.base, len(w.slots)) if w.slots[n] != DATA)
        if w.slots[end] == SEAL or self._taken_for_end(w, s):
            end = w.slots.index(SEAL)
            data = frozenset(n for n in range(end) if w.slots[n] == DATA)
            yield replace(s, end=end, replayed=data), w.slots
            return
        first = end + self.seal_ahead
        yield (
            replace(s, puts=frozenset(range(first, min(first + self.seals, len(w.slots))))),
            w.slots,
        )

    def _taken_for_end(self, w: World, s: Sealer) -> bool:
        """A sealer that seals too far ahead believes its seal, whatever is free below."""
        return bool(self.seal_ahead) and SEAL in w.slots


def _dense(own: frozenset[int]) -> int:
    """How many numbers from 0 on are known to be the session's own."""
    return next(n for n in range(len(own) + 1) if n not in own)


def _deleting(w: World, end: int) -> World:
    return replace(w, trimmed=end, deletes=w.deletes | frozenset(range(w.trimmed, end)))


def loss(w: World) -> str:
    """Say what is lost: acknowledged, not deleted by the session itself, and read by no sealer."""
    ends = {sealer.end for sealer in w.sealers if sealer.end is not None}
    if len(ends) > 1:
        return f"two ends, {sorted(ends)}"
    for sealer in w.sealers:
        if sealer.end is None:
            continue
        lost = {n for n in w.acknowledged - sealer.replayed if n >= w.trimmed}
        if lost:
            return f"acknowledged and not read: {sorted(lost)}"
    return ""


@dataclass(frozen=True, slots=True)
class Move:
    """A take-over: when may the pointer to the new session be changed?

    A bucket has rows in the old session. The new leader carries them into its own and changes the
    pointer, in either order; it may die between any two steps, and another one begins again from
    what the pointer names. The old session is deleted when nothing points to it.
    """

    carry_first: bool = True
    pointer: int = 0
    """The session that has the bucket's rows: 0 is the old one."""
    leader: int = 0
    """The session of the present leader; 0 before the first."""
    has: frozenset[int] = field(default=frozenset({0}))
    """Sessions that have all rows."""
    knows: bool = False
    """The present leader has read the rows."""
    gone: frozenset[int] = frozenset()
    lost: bool = False

    def events(self) -> Iterator[Move]:
        """Everything that can happen next."""
        if self.leader < 3:  # the leader dies, and another one is chosen
            yield replace(self, leader=self.leader + 1, knows=False)
        if self.leader and not self.knows:
            readable = self.pointer in self.has and self.pointer not in self.gone
            yield replace(self, knows=True, lost=self.lost or not readable)
        if self.knows:
            if self.leader not in self.has:
                yield replace(self, has=self.has | {self.leader})
            if self.leader in self.has or not self.carry_first:
                yield replace(self, pointer=self.leader)
        for session in range(self.leader):
            if session != self.pointer and session not in self.gone:
                yield replace(self, gone=self.gone | {session})

    def verdict(self) -> Verdict:
        """Explore the design."""
        return explore(self, lambda move: move.events(), lambda move: "no rows to read" * move.lost)
