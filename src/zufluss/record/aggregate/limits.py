"""The limit of functions whose states grow, and what happens beyond it."""

from __future__ import annotations

from typing import NamedTuple

from zufluss.model.aggregate import LIMIT, OVERFLOW
from zufluss.model.schema import Column
from zufluss.record.aggregate.functions import RefusedValue


class Limit(NamedTuple):
    """How large a state may become."""

    most: int
    """Largest size, in `unit`."""
    unit: str
    truncates: bool
    """Whether values that do not fit are left out; otherwise they are refused."""

    @classmethod
    def of(cls, column: Column, default: int, unit: str) -> Limit:
        """Return the limit of a column: its parameter `limit`, else `default`."""
        function = column.agg_function
        assert function is not None
        text = function.parameter(LIMIT)
        truncates = function.parameter(OVERFLOW) == "truncate"
        return cls(default if text is None else int(text), unit, truncates)

    def fits(self, size: int) -> bool:
        """Return whether a state of this size fits; raises `RefusedValue` unless it truncates."""
        if size <= self.most:
            return True
        if self.truncates:
            return False
        raise RefusedValue(
            f"it would have {size} {self.unit}, the limit is {self.most}; raise the column's "
            "limit, or set its overflow to truncate"
        )
