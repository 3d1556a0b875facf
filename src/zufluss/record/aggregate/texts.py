"""`listagg` and `string_agg`: texts joined by a delimiter, in the order they arrive.

With `overflow = truncate` a text that does not fit is left out as a whole. A state that is merged
is split at its delimiters first, so the result is the same whether its texts came one by one or
joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zufluss.model.aggregate import DELIMITER
from zufluss.model.schema import Column
from zufluss.record.aggregate.functions import Builder, Implementation, in_python
from zufluss.record.aggregate.limits import Limit

BYTES_MAX: Final = 1 << 20
"""Bytes of a text, unless the column says otherwise."""


class TextJoin:
    """Texts with a delimiter between them, as UTF-8."""

    def __init__(self, delimiter: bytes, limit: Limit) -> None:
        self._delimiter = delimiter
        self._limit = limit

    def first(self, value: bytes, *, merging: bool) -> bytes | None:
        """Return the text, or as many of its parts as fit; None if none does."""
        if self._limit.fits(len(value)):
            return value
        return self._fitting(None, value) if merging else None

    def add(self, state: bytes, value: bytes, *, merging: bool) -> bytes:
        """Return both texts joined, or the state with as many parts of the value as fit."""
        if self._limit.fits(len(state) + len(self._delimiter) + len(value)):
            return state + self._delimiter + value
        return (self._fitting(state, value) or state) if merging else state

    def _fitting(self, state: bytes | None, value: bytes) -> bytes | None:
        for part in value.split(self._delimiter):
            longer = part if state is None else state + self._delimiter + part
            if len(longer) <= self._limit.most:
                state = longer
        return state


def _text_join(column: Column) -> Implementation:
    assert column.agg_function is not None
    delimiter = column.agg_function.parameter(DELIMITER) or ","
    return in_python(TextJoin(delimiter.encode(), Limit.of(column, BYTES_MAX, "bytes")))


TEXTS: Final[Mapping[str, Builder]] = {"listagg": _text_join, "string_agg": _text_join}
"""Builders of these functions, by name."""
