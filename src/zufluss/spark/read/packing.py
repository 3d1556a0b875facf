"""Ranges of logs as the work of tasks: cut, and packed into groups of about equal size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from zufluss.client.read.union_plan import TailRange

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_ROWS: Final = 100_000
"""Records below which a task of its own does not pay."""
TASKS_PER_CORE: Final = 2
"""The most tasks that a tail is packed into, per core."""
CONNECT_TASKS: Final = 8
"""The most tasks that a tail is packed into over Spark Connect, where cores are not known."""


def pack(
    tail: Sequence[TailRange], tasks_max: int, *, split: bool
) -> tuple[tuple[TailRange, ...], ...]:
    """Ranges in at most `tasks_max` groups of about equal size; empty ranges are left out.

    With `split` a range may be cut. Ranges of primary-key tables must not be: the changes of a key
    stand in one bucket, and their reader needs them in order.
    """
    parts = [part for part in tail if part.start < part.stop]
    total = sum(part.stop - part.start for part in parts)
    tasks = max(1, min(tasks_max, -(-total // TASK_ROWS)))
    if split:
        parts = [piece for part in parts for piece in pieces(part, -(-total // tasks))]
    groups: list[list[TailRange]] = [[] for _ in range(min(tasks, len(parts)))]
    sizes = [0] * len(groups)
    for part in sorted(parts, key=lambda part: part.start - part.stop):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(part)
        sizes[smallest] += part.stop - part.start
    return tuple(tuple(group) for group in groups)


def pieces(part: TailRange, records: int | None) -> Iterator[TailRange]:
    """A range in pieces of `records` records, or whole for None; an empty range has no piece."""
    step = records or max(1, part.stop - part.start)
    for start in range(part.start, part.stop, step):
        yield replace(part, start=start, stop=min(part.stop, start + step))


def tasks_max(spark: SparkSession) -> int:
    """The most tasks that the tail of a read is packed into."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        return CONNECT_TASKS
    return TASKS_PER_CORE * int(spark.sparkContext.defaultParallelism)
