"""Sums, products and counts. Integers and decimals never lose digits unless the column says wrap.

A product of decimals is rounded to the scale of the column, half away from zero; so is what is left
when a factor is taken back. It has more digits than a kernel computes with, so it is made outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zufluss.model.schema import Column
from zufluss.model.types import DecimalType
from zufluss.record.aggregate import kernels as k
from zufluss.record.aggregate.base import Builder, Carried, Refused, always, outside


class DecimalProduct:
    """Products of unscaled decimals."""

    def __init__(self, data_type: DecimalType, *, divide: bool = False) -> None:
        self._type = data_type
        self._one = 10**data_type.scale
        self._limit = 10**data_type.precision
        self._divide = divide

    def first(self, value: int, *, merging: bool) -> int:
        """The value itself."""
        if self._divide:
            raise Refused(k.FAULTS[k.NO_STATE])
        return value

    def add(self, state: int, value: int, *, merging: bool) -> int:
        """The product, or what is left of it without a factor."""
        if self._divide and value == 0:
            raise Refused(k.FAULTS[k.BY_ZERO])
        factors = (state * self._one, value) if self._divide else (state * value, self._one)
        made = _rounded(*factors)
        if abs(made) >= self._limit:
            raise Refused(k.FAULTS[k.OVERFLOWS].format(self._type))
        return made


def _rounded(dividend: int, divisor: int) -> int:
    """The quotient, rounded half away from zero."""
    whole, rest = divmod(abs(dividend), abs(divisor))
    whole += 2 * rest >= abs(divisor)
    return whole if (dividend < 0) == (divisor < 0) else -whole


def _product(column: Column) -> Carried:
    data_type = column.data_type
    if isinstance(data_type, DecimalType):
        return outside(DecimalProduct(data_type), DecimalProduct(data_type, divide=True))
    return Carried(k.PRODUCT, k.PRODUCT, k.DIVIDE)


NUMBERS: Final[Mapping[str, Builder]] = {
    "sum": always(k.SUM, retract=k.SUBTRACT),
    "product": _product,
    "count": always(k.COUNT, merge=k.SUM, retract=k.UNCOUNT),
}
"""The family, by name."""
