"""The limit of functions whose states grow: how far, and what happens then."""

from __future__ import annotations

from typing import NamedTuple

from zufluss.model.aggregate import LIMIT, OVERFLOW
from zufluss.model.schema import Column
from zufluss.record.aggregate.base import Refused


class Limit(NamedTuple):
    """How much a state may hold."""

    most: int
    unit: str
    truncates: bool
    """What does not fit is left out; else it is refused."""

    @classmethod
    def of(cls, column: Column, default: int, unit: str) -> Limit:
        """The limit of a column."""
        function = column.agg_function
        assert function is not None
        text = function.parameter(LIMIT)
        truncates = function.parameter(OVERFLOW) == "truncate"
        return cls(default if text is None else int(text), unit, truncates)

    def fits(self, size: int) -> bool:
        """Whether a state of this size may be; raises `Refused` unless what is more is left out."""
        if size <= self.most:
            return True
        if self.truncates:
            return False
        raise Refused(
            f"it would have {size} {self.unit}, the limit is {self.most}; raise the column's "
            "limit, or set its overflow to truncate"
        )
