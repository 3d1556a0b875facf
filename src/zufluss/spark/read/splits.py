"""Splits: the pinned work of tasks. A split gives the same rows whenever and wherever it is read.

| split | of | read by |
|---|---|---|
| `LogSplit` | a range of a bucket's log: rows, or changes | a scan of the log |
| `KeySplit` | the keys that a range of a changelog changes | a scan of the log |
| `StateSplit` | the state of a primary-key bucket at an offset | its pin, or a new one |
| `LakeSplit` | files of a lake snapshot | the lake's reader |
| `KeyedLakeSplit` | files of a primary-key table, and the tails of their buckets | both, by key |

A task has a `SplitGroup`: usually one split, or all splits if the read has a limit. A task of a
read with `read.fresh` has a `FreshShare` instead: nothing is pinned, and the task plans its
buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from zufluss.client.keyed.pins import BucketPin
from zufluss.client.read.union_plan import TailRange
from zufluss.lake.base import LakeFile


@dataclass(frozen=True, slots=True)
class LogSplit:
    """A range of a bucket's log."""

    part: TailRange
    """The range."""


@dataclass(frozen=True, slots=True)
class StateSplit:
    """The rows of a primary-key bucket at one offset of its changelog."""

    pin: BucketPin
    """The pinned state."""


@dataclass(frozen=True, slots=True)
class LakeSplit:
    """Files of the lake."""

    snapshot_id: int
    """The snapshot of the files."""
    files: tuple[LakeFile, ...]
    """The files."""


@dataclass(frozen=True, slots=True)
class KeyedLakeSplit:
    """Files of a primary-key table, and the tails that may change their rows."""

    lake: LakeSplit | None
    """The files; None if there are none."""
    tails: tuple[TailRange, ...]
    """The tails."""


@dataclass(frozen=True, slots=True)
class KeySplit:
    """The keys that a range of a changelog changes: rows of the lake that it hides."""

    part: TailRange
    """The range."""


Split = LogSplit | KeySplit | StateSplit | LakeSplit | KeyedLakeSplit


class SplitGroup(InputPartition):
    """The splits of one task."""

    def __init__(self, *splits: Split) -> None:
        super().__init__(splits)
        self.splits = splits
        """The splits, read one after the other."""


class FreshShare(InputPartition):
    """A share of the buckets, read as they are when the task begins."""

    def __init__(self, remainder: int, shares: int) -> None:
        super().__init__((remainder, shares))
        self.share = (remainder, shares)
        """The remainder of the bucket numbers, and their divisor."""
