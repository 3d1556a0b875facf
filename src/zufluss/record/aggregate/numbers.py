"""Sums, products and counts. Integers and decimals never lose digits unless the column says wrap.

A product of decimals is rounded to the scale of the column, half away from zero, and so is the
quotient when a factor is taken back. Both have more digits than a kernel computes with, so they are
computed in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zufluss.model.schema import Column
from zufluss.model.types import DecimalType
from zufluss.record.aggregate import opcodes as op
from zufluss.record.aggregate.functions import (
    Builder,
    Implementation,
    RefusedValue,
    always,
    in_python,
)


class DecimalProduct:
    """Products of unscaled decimals."""

    def __init__(self, data_type: DecimalType, *, divide: bool = False) -> None:
        self._type = data_type
        self._one = 10**data_type.scale
        self._limit = 10**data_type.precision
        self._divide = divide

    def first(self, value: int, *, merging: bool) -> int:
        """Return the value; there is no product yet to divide."""
        if self._divide:
            raise RefusedValue(op.FAULTS[op.NO_STATE])
        return value

    def add(self, state: int, value: int, *, merging: bool) -> int:
        """Return the product, or with `divide` the quotient."""
        if self._divide and value == 0:
            raise RefusedValue(op.FAULTS[op.BY_ZERO])
        factors = (state * self._one, value) if self._divide else (state * value, self._one)
        product = _rounded(*factors)
        if abs(product) >= self._limit:
            raise RefusedValue(op.FAULTS[op.OVERFLOWS].format(self._type))
        return product


def _rounded(dividend: int, divisor: int) -> int:
    """The quotient, rounded half away from zero."""
    whole, rest = divmod(abs(dividend), abs(divisor))
    whole += 2 * rest >= abs(divisor)
    return whole if (dividend < 0) == (divisor < 0) else -whole


def _product(column: Column) -> Implementation:
    data_type = column.data_type
    if isinstance(data_type, DecimalType):
        return in_python(DecimalProduct(data_type), DecimalProduct(data_type, divide=True))
    return Implementation(op.PRODUCT, op.PRODUCT, op.DIVIDE)


NUMBERS: Final[Mapping[str, Builder]] = {
    "sum": always(op.SUM, retract=op.SUBTRACT),
    "product": _product,
    "count": always(op.COUNT, merge=op.SUM, retract=op.UNCOUNT),
}
"""Builders of these functions, by name."""
