"""`array_agg` and `collect`: the elements of arrays, in the order they arrive; all, or each once.

A state is a tuple of element numbers, and equal elements may be known by equal `marks`: elements
are never looked at here, so they can be of any type, nested ones included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from zufluss.model.schema import Column
from zufluss.record.aggregate.base import Builder, Carried, outside
from zufluss.record.aggregate.limits import Limit

ELEMENTS_MAX: Final = 100_000
"""Elements of an array, unless the column says otherwise."""

Elements = tuple[int, ...]


class Collected:
    """Elements by number."""

    def __init__(self, limit: Limit, *, distinct: bool) -> None:
        self._limit = limit
        self.distinct = distinct
        """Whether equal elements are kept once."""
        self.marks: Sequence[int] = ()
        """Of each element: a number that equal ones share. Set for each batch."""

    def first(self, value: Elements, *, merging: bool) -> Elements:
        """The elements, each once where that is wanted."""
        return self._with((), value)

    def add(self, state: Elements, value: Elements, *, merging: bool) -> Elements:
        """The elements of both."""
        return self._with(state, value)

    def _with(self, state: Elements, value: Elements) -> Elements:
        more: Iterable[int] = self._unknown(state, value) if self.distinct else value
        joined = (*state, *more)
        return joined if self._limit.fits(len(joined)) else joined[: self._limit.most]

    def _unknown(self, state: Elements, value: Elements) -> list[int]:
        known = {self.marks[element] for element in state}
        found = {self.marks[e]: e for e in reversed(value) if self.marks[e] not in known}
        return sorted(found.values())


def _collected(distinct: bool) -> Builder:
    def build(column: Column) -> Carried:
        limit = Limit.of(column, ELEMENTS_MAX, "elements")
        return outside(Collected(limit, distinct=distinct))

    return build


ARRAYS: Final[Mapping[str, Builder]] = {"array_agg": _collected(False), "collect": _collected(True)}
"""The family, by name."""
