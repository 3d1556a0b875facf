"""What a merge engine is given and what it answers.

A put batch has records in order; several may have the same key, and each sees what the ones before
it did. Keys are numbered in *groups*; rows are numbered as *candidates*: first the new rows of the
batch, then the stored rows of the keys that exist, later maybe rows an engine made. An engine says
in terms of these numbers what the changelog is and which row each key ends up with, so no row is
copied to decide about it. What the changelog of each engine looks like stands in its own file; the
kinds are those of the log format.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE = 1, 2, 3, 4
"""Change types: +I, -U, +U, -D."""

NO_ROW = -1
"""In place of a candidate: the record is a delete, or the key has no row."""
UNCHANGED = -2
"""In place of the row a key ends up with: nothing happened to it."""

Numbers: TypeAlias = npt.NDArray[np.int64]


class Candidates(NamedTuple):
    """The records of a put batch and the rows they meet."""

    group: Numbers
    """Of each record: which key, numbered by first appearance."""
    new: Numbers
    """Of each record: the candidate that is its row, `NO_ROW` for a delete."""
    old: Numbers
    """Of each group: the candidate that is the stored row, `NO_ROW` if the key is new."""
    rows: pa.RecordBatch | None
    """All candidates as columns, for engines that look into rows (`needs_rows`)."""


class Fold(NamedTuple):
    """What a batch does."""

    kinds: npt.NDArray[np.uint8]
    """The change type of each row of the changelog."""
    rows: Numbers
    """Which candidate each row of the changelog is."""
    final: Numbers
    """Of each group: its row after the batch, `NO_ROW` if it has none, or `UNCHANGED`."""


class MergeEngine(Protocol):
    """One merge engine of one table."""

    needs_rows: bool
    """`Candidates.rows` must be there."""
    logs_every_row: bool
    """Every new row gets into the changelog, so that whoever reads that has seen them all."""

    def fold(self, candidates: Candidates) -> Fold:
        """Decide about a batch of whole rows and deletes."""
        ...


class Out(NamedTuple):
    """Where a fold kernel writes to."""

    kinds: npt.NDArray[np.uint8]
    rows: Numbers

    @classmethod
    def for_records(cls, count: int) -> Out:
        """Room for what `count` records can cause: at most two changes each."""
        return cls(np.empty(2 * count, np.uint8), np.empty(2 * count, np.int64))

    def folded(self, changes: int, old: Numbers, current: Numbers) -> Fold:
        """What a kernel has written, and the rows it left the keys with."""
        current[current == old] = UNCHANGED
        return Fold(self.kinds[:changes], self.rows[:changes], current)
