"""What one task of a batch read does, pinned: whoever reads a split, and when, gets the same rows.

| split | of | read by |
|---|---|---|
| `LogSplit` | a range of a bucket's log: rows, or changes | a scan of the log |
| `KeySplit` | the keys that a range of a changelog changes | a scan of the log |
| `StateSplit` | a primary-key bucket as it stood at an offset | its pin; if that is gone, another |
|  |  | pin of the state at the same offset |
| `LakeSplit` | files of a lake snapshot | the lake's reader |
| `KeyedLakeSplit` | the same of a primary-key table, and the tails of the same buckets | both, |
|  |  | merged by key |

A task has a `SplitGroup`: usually one split, all of them where a limit is to be kept. Or, of a read
that is to be fresh, a `FreshShare`: nothing is pinned, and the task plans its buckets itself.
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
    """The state, as it was pinned for the plan."""


@dataclass(frozen=True, slots=True)
class LakeSplit:
    """Files of the lake."""

    snapshot_id: int
    """The snapshot they are of."""
    files: tuple[LakeFile, ...]
    """The files."""


@dataclass(frozen=True, slots=True)
class KeyedLakeSplit:
    """Files of a primary-key table, and the tails that may change their rows."""

    lake: LakeSplit | None
    """The files, None where there are none."""
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
        """Read one after the other."""


class FreshShare(InputPartition):
    """Some of the buckets, as they are when the task begins."""

    def __init__(self, remainder: int, shares: int) -> None:
        super().__init__((remainder, shares))
        self.share = (remainder, shares)
        """The remainder of the buckets' numbers, and what they are divided by."""
