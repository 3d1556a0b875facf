"""`array_agg` and `collect`: the elements of arrays in the order they arrive, all or each once.

A state is a tuple of element numbers, and equal elements have equal `marks`. The elements
themselves are not looked at here, so they can be of any type, nested types included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from zufluss.model.schema import Column
from zufluss.record.aggregate.functions import Builder, Implementation, in_python
from zufluss.record.aggregate.limits import Limit

ELEMENTS_MAX: Final = 100_000
"""Elements of an array, unless the column says otherwise."""

Elements = tuple[int, ...]


class ElementCollector:
    """Joins arrays, whose elements are known by number."""

    def __init__(self, limit: Limit, *, distinct: bool) -> None:
        self._limit = limit
        self.distinct = distinct
        """Whether equal elements are kept only once."""
        self._marks: Sequence[int] = ()
        self._last: tuple[Elements, set[int]] = ((), set())
        """The state returned last, with its marks; the next call mostly starts from it."""

    def begin(self, marks: Sequence[int]) -> None:
        """Begin a batch; `marks` has a number for each element, the same for equal elements."""
        self._marks, self._last = marks, ((), set())

    def first(self, value: Elements, *, merging: bool) -> Elements:
        """Return the elements, each once if `distinct`."""
        return self._with((), value)

    def add(self, state: Elements, value: Elements, *, merging: bool) -> Elements:
        """Return the elements of state and value, each once if `distinct`."""
        return self._with(state, value)

    def _with(self, state: Elements, value: Elements) -> Elements:
        more: Sequence[int] = self._unknown(state, value) if self.distinct else value
        if not more:
            return state
        joined = (*state, *more)
        if not self._limit.fits(len(joined)):
            return joined[: self._limit.most]
        if self.distinct:
            _, known = self._last
            known.update(self._marks[element] for element in more)
            self._last = joined, known
        return joined

    def _unknown(self, state: Elements, value: Elements) -> list[int]:
        last, known = self._last
        if last is not state:
            known = {self._marks[element] for element in state}
            self._last = state, known
        unknown = {self._marks[e]: e for e in reversed(value) if self._marks[e] not in known}
        return sorted(unknown.values())


def _collector(distinct: bool) -> Builder:
    def build(column: Column) -> Implementation:
        limit = Limit.of(column, ELEMENTS_MAX, "elements")
        return in_python(ElementCollector(limit, distinct=distinct))

    return build


ARRAYS: Final[Mapping[str, Builder]] = {"array_agg": _collector(False), "collect": _collector(True)}
"""Builders of these functions, by name."""
