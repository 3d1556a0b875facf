"""`listagg`, `string_agg`: texts one after the other, in the order they arrive.

With `overflow = truncate` a text that does not fit is left out as a whole. A state is taken apart
at its delimiters for that, so that it makes no difference who put the texts together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zufluss.model.aggregate import DELIMITER
from zufluss.model.schema import Column
from zufluss.record.aggregate.base import Builder, Carried, outside
from zufluss.record.aggregate.limits import Limit

BYTES_MAX: Final = 1 << 20
"""Bytes of a text, unless the column says otherwise."""


class Listed:
    """Texts with a delimiter between them, as UTF-8."""

    def __init__(self, delimiter: bytes, limit: Limit) -> None:
        self._delimiter = delimiter
        self._limit = limit

    def first(self, value: bytes, *, merging: bool) -> bytes | None:
        """The text, or as many of its parts as fit."""
        if self._limit.fits(len(value)):
            return value
        return self._fitting(None, value) if merging else None

    def add(self, state: bytes, value: bytes, *, merging: bool) -> bytes:
        """Both texts, or as many parts of the second as fit."""
        if self._limit.fits(len(state) + len(self._delimiter) + len(value)):
            return state + self._delimiter + value
        return (self._fitting(state, value) or state) if merging else state

    def _fitting(self, state: bytes | None, value: bytes) -> bytes | None:
        for part in value.split(self._delimiter):
            longer = part if state is None else state + self._delimiter + part
            if len(longer) <= self._limit.most:
                state = longer
        return state


def _listed(column: Column) -> Carried:
    assert column.agg_function is not None
    delimiter = column.agg_function.parameter(DELIMITER) or ","
    return outside(Listed(delimiter.encode(), Limit.of(column, BYTES_MAX, "bytes")))


TEXTS: Final[Mapping[str, Builder]] = {"listagg": _listed, "string_agg": _listed}
"""The family, by name."""
