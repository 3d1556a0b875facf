"""Equality of primary keys, over whole columns.

Keys are equal when their columns are equal bit for bit, as in the server's store: zero and minus
zero are two keys, and a NaN equals itself. No hash is involved that might collide: columns are
numbered by their distinct values, and several columns by the distinct combinations of these
numbers. Key columns are never NULL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

DENSE: Final = 8
"""Whole numbers are used as they are if their range is at most this many times their count."""

_FLOAT_BITS: Final = {pa.float32(): pa.int32(), pa.float64(): pa.int64()}


def number_keys(keys: pa.Table) -> tuple[npt.NDArray[np.integer], int]:
    """A number for every row, equal for equal keys; and a bound that all numbers are below."""
    first, *more = [_bits(column) for column in keys.columns]
    numbers, count = _number(first)
    for column in more:
        other, others = _number(column)
        mixed = numbers.astype(np.int64) * others + other
        numbers, count = _number(pa.chunked_array([pa.array(mixed)]))
    return numbers, count


class KeySet:
    """A set of keys that whole tables can be tested against.

    Each test builds a hash table of the set, so test many rows at a time. Only for whole numbers of
    a narrow range the table is built once.
    """

    def __init__(self, keys: pa.Table) -> None:
        self._values: list[pa.Array] = []
        self._mixed: list[pa.Array] = []
        self._dense = _Dense.of(keys.column(0)) if keys.num_columns == 1 else None
        at: pa.ChunkedArray | None = None
        for column in (_bits(column) for column in keys.columns):
            self._values.append(pc.unique(column))
            if at is None and keys.num_columns == 1:
                return
            here = _indices(column, self._values[-1])
            if at is not None:
                here = self._mix(at, here)
                self._mixed.append(pc.unique(here))
                here = _indices(here, self._mixed[-1])
            at = here

    def contains(self, keys: pa.Table) -> npt.NDArray[np.bool_]:
        """Which rows have a key of the set; columns are in the order of the set's columns."""
        first, *more = [_bits(column) for column in keys.columns]
        if self._dense is not None:
            return self._dense.contains(first)
        if not more:
            return _numpy(pc.is_in(first, value_set=self._values[0]))
        at = _indices(first, self._values[0])
        for position, column in enumerate(more):
            mixed = self._mix(at, _indices(column, self._values[position + 1]), position + 1)
            at = _indices(mixed, self._mixed[position])
        return _numpy(at.is_valid())

    def _mix(
        self, at: pa.ChunkedArray, here: pa.ChunkedArray, position: int = -1
    ) -> pa.ChunkedArray:
        """One number for two numbers below 2^31; NULL where one of them is NULL."""
        width = pa.scalar(len(self._values[position]), pa.int64())
        return pc.add(pc.multiply(at.cast(pa.int64()), width), here.cast(pa.int64()))


class _Dense(NamedTuple):
    """A set of whole numbers of a narrow range, as a table of flags."""

    start: int
    there: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> _Dense | None:
        """The table of a column, None if its range is too wide."""
        dense = _dense_range(column)
        if dense is None:
            return None
        there = np.zeros(len(dense), np.bool_)
        there[_integers(column) - dense.start] = True
        return cls(dense.start, there)

    def contains(self, column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
        at = (_integers(column) - self.start).view(np.uint64)  # smaller values wrap to huge ones
        inside = at < len(self.there)
        return self.there[np.where(inside, at, 0)] & inside


def _dense_range(column: pa.ChunkedArray) -> range | None:
    if not pa.types.is_integer(column.type) or not len(column):
        return None
    low, high = (scalar.as_py() for scalar in pc.min_max(column).values())
    return range(low, high + 1) if high - low < DENSE * len(column) else None


def _integers(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    return _joined([chunk.to_numpy() for chunk in column.chunks]).astype(np.int64, copy=False)


def _bits(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column in a form whose equality is that of keys."""
    bits = _FLOAT_BITS.get(column.type)
    if bits is None:
        return column
    return pa.chunked_array([chunk.view(bits) for chunk in column.chunks], bits)


def _number(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.integer], int]:
    dense = _dense_range(column)
    if dense is not None:
        return _integers(column) - dense.start, len(dense)
    encoded = pc.dictionary_encode(column)
    if not encoded.num_chunks:
        return np.empty(0, np.int32), 0
    numbers = [chunk.indices.to_numpy() for chunk in encoded.chunks]
    return _joined(numbers), len(encoded.chunk(encoded.num_chunks - 1).dictionary)


def _indices(column: pa.ChunkedArray, values: pa.Array) -> pa.ChunkedArray:
    return pc.index_in(column, value_set=values, skip_nulls=True)


def _numpy(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return _joined([chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks], np.bool_)


def _joined(parts: Sequence[npt.NDArray[np.generic]], empty: type = np.int32) -> npt.NDArray:  # type: ignore[type-arg]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, empty)
