"""The contract of merge engines: the candidates an engine is given and the fold it returns.

A put batch has records in order; several may have the same key, and each sees the effect of those
before it. Keys are numbered in *groups*; rows are numbered as *candidates*: first the new rows of
the batch, then the stored rows of its keys. An engine answers in these numbers: which rows the
changelog has and which row each key ends up with. So no row is copied to decide about it. The file
of each engine has the table of its changelog; change types are those of the log format.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.record.kernels import types

INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE = 1, 2, 3, 4
"""Change types: +I, -U, +U, -D."""

NO_ROW = -1
"""In place of a candidate: the record is a delete, or the key has no row."""
UNCHANGED = -2
"""In place of the row that a key ends up with: the batch does not change the key."""

Numbers: TypeAlias = npt.NDArray[np.int64]

NUMBERS_IN = types.Array(types.int64, 1, "C", readonly=True)
NUMBERS_OUT = types.Array(types.int64, 1, "C")
KINDS_OUT = types.Array(types.uint8, 1, "C")
"""Types of the arrays that kernels of engines read and write."""


class Candidates(NamedTuple):
    """The records of a put batch and the rows they meet."""

    group: Numbers
    """The group of each record, numbered by the first appearance of its key."""
    new: Numbers
    """The candidate of each record's row, `NO_ROW` for a delete."""
    old: Numbers
    """The candidate of each group's stored row, `NO_ROW` if the key is new."""
    rows: pa.RecordBatch | None
    """All candidates as columns, for engines that read them (`needs_rows`)."""


class Fold(NamedTuple):
    """What a batch does to the changelog and to its keys."""

    kinds: npt.NDArray[np.uint8]
    """The change type of each row of the changelog."""
    rows: Numbers
    """The candidate of each row of the changelog."""
    final: Numbers
    """The row of each group after the batch: a candidate, `NO_ROW` or `UNCHANGED`."""


class MergeEngine(Protocol):
    """One merge engine of one table."""

    needs_rows: bool
    """The engine reads `Candidates.rows`."""
    logs_every_row: bool
    """Every new row gets into the changelog, so checking the changelog's rows checks them all."""

    def fold(self, candidates: Candidates) -> Fold:
        """Decide about a batch of whole rows and deletes."""


class ChangeBuffers(NamedTuple):
    """The arrays that the kernel of an engine writes the changelog to."""

    kinds: npt.NDArray[np.uint8]
    rows: Numbers

    @classmethod
    def for_records(cls, count: int) -> ChangeBuffers:
        """Allocate room for the changes of `count` records, at most two each."""
        return cls(np.empty(2 * count, np.uint8), np.empty(2 * count, np.int64))

    def fold(self, changes: int, old: Numbers, current: Numbers) -> Fold:
        """Return the first `changes` changes; `current` has the row of each group after them."""
        current[current == old] = UNCHANGED
        return Fold(self.kinds[:changes], self.rows[:changes], current)
