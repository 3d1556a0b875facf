"""Single rows on their way to a batch, and rows that are batches already.

`RowBuffer` gathers rows that are written one by one, so that a row costs an append to a list and
not a turn of the event loop. It is the only place where such rows wait. They are converted to Arrow
together, by the thread that fills the buffer, or by the event loop when the oldest row has waited
for `client.writer.batch-timeout`, and for `flush` and `close`. Until the loop takes them, `count`
has all of them: gathered, converted, and those that do not fit their columns.

The buffer is full after `ROWS_MAX` rows, or when the rows are as large as a batch. Sizes are
estimated from the first and every `ROWS_PER_CHECK`th row, which is also when the buffer may be
found full.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import pyarrow as pa

from zufluss.client.core.convert import ColumnMismatchError, rows_to_batch
from zufluss.errors import ZuflussError, reason_of

ROWS_PER_CHECK: Final = 32
"""After so many rows the size of the last one is looked at."""
ROWS_MAX: Final = 125 * ROWS_PER_CHECK
"""Rows that are gathered before they are converted together."""
VALUE_BYTES: Final = 8
"""Estimated size of a value that has no length."""


class RowChunk(NamedTuple):
    """Rows that were written together."""

    rows: pa.RecordBatch
    """Whole rows, or the keys of rows to delete."""
    delete: bool
    """True if the rows are to be deleted."""


class UnfitRow(NamedTuple):
    """A row that does not fit the columns of the table."""

    reason: ZuflussError
    """What is wrong."""


class RowBuffer:
    """Rows that were written one by one. Threads share it; its user holds a lock for every call."""

    def __init__(
        self,
        schema: pa.Schema,
        columns_of: Callable[[bool], Sequence[str] | None],
        bytes_max: int,
    ) -> None:
        self.since = 0.0
        """When the oldest row was added, by `time.monotonic`."""
        self._schema = schema
        self._columns_of = columns_of
        self._bytes_max = bytes_max
        self._bytes = 0
        self.gathered: list[Mapping[str, Any]] = []
        """Rows that are not converted yet."""
        self._delete = False
        """Whether the last row is to be deleted."""
        self._turns: list[int] = []
        """Where rows to delete follow rows to write in `gathered`, or the other way round."""
        self._converted: list[RowChunk | UnfitRow] = []
        self._converted_rows = 0

    @property
    def count(self) -> int:
        """Number of rows that the loop has not taken."""
        return len(self.gathered) + self._converted_rows

    def add(self, row: Mapping[str, Any], delete: bool) -> int:
        """Add a copy of a row; returns how many are gathered since rows were last converted."""
        rows = self.gathered
        if delete is not self._delete:
            self._delete = delete
            self._turns.append(len(rows))
        rows.append(row.copy() if type(row) is dict else dict(row))
        return len(rows)

    def check(self) -> bool:
        """Whether the buffer is full; called for the first row and every `ROWS_PER_CHECK`th."""
        rows = self.gathered
        first = len(rows) == 1
        if first and not self._converted_rows:
            self.since = time.monotonic()
        self._bytes += (1 if first else ROWS_PER_CHECK) * _estimated_bytes(rows[-1])
        return len(rows) >= ROWS_MAX or self._bytes >= self._bytes_max

    def convert(self) -> None:
        """Convert the gathered rows."""
        rows, converted = self.gathered, [*self._converted]
        # After an even number of turns the kind is that of the last row.
        delete = self._delete ^ bool(len(self._turns) % 2)
        for begin, end in pairwise([0, *self._turns, len(rows)]):
            if begin < end:
                self._convert(rows[begin:end], delete, converted)
            delete = not delete
        # In one call: an exception of a signal comes before or after it, and no row is lost.
        vars(self).update(
            gathered=[],
            _turns=[],
            _bytes=0,
            _converted=converted,
            _converted_rows=self._converted_rows + len(rows),
        )

    def take(self) -> tuple[int, list[RowChunk | UnfitRow]]:
        """Return all rows in order, and their number; the buffer is empty then."""
        self.convert()
        taken = (self.count, self._converted)
        self.clear()
        return taken

    def clear(self) -> None:
        """Drop all rows."""
        self._converted_rows, self._bytes = 0, 0
        self.gathered, self._turns, self._converted = [], [], []

    def _convert(
        self, rows: list[Mapping[str, Any]], delete: bool, converted: list[RowChunk | UnfitRow]
    ) -> None:
        """Convert rows together, or each half by itself if some do not fit."""
        try:
            batch = rows_to_batch(rows, self._schema, self._columns_of(delete))
            converted.append(RowChunk(batch, delete))
        except Exception as e:
            if len(rows) == 1:
                converted.append(UnfitRow(_reason(e, rows[0])))
                return
            middle = len(rows) // 2
            self._convert(rows[:middle], delete, converted)
            self._convert(rows[middle:], delete, converted)


def _reason(problem: Exception, row: Mapping[str, Any]) -> ZuflussError:
    if isinstance(problem, ZuflussError):
        return problem
    reason = ColumnMismatchError(f"the row {row!r:.200} cannot be read: {reason_of(problem)}")
    reason.__cause__ = problem
    return reason


def _estimated_bytes(value: object) -> int:
    """About the bytes of a row or a value in Arrow."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value) + VALUE_BYTES
    if isinstance(value, Mapping):
        return sum(map(_estimated_bytes, value.values()))
    if isinstance(value, list | tuple):
        return VALUE_BYTES + sum(map(_estimated_bytes, value))
    return VALUE_BYTES
