"""The bucket of each row, and the rows of each bucket.

With a bucket key, the bucket follows from the hash of the key and is the same in every client of
the table; keys of a whole batch are encoded and hashed at once. Without one, the writer chooses:
`sticky` fills a batch for one bucket before it moves to the next, which gives large batches;
`round_robin` takes the next bucket with every write, which spreads small writes evenly.

`split` cuts a batch by an array of numbers (bucket ids, partition indexes) with one stable sort and
one `take`, so the rows of a group keep the order of the input.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.client.core.options import ClientOptions
from zufluss.model.partition import partition_values
from zufluss.model.table import TableInfo

_RADIX_MAX: Final = 1 << 16  # numpy sorts 16-bit numbers by radix


class BucketAssigner(Protocol):
    """Assigns rows to buckets."""

    def assign(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the batch in parts, each with its bucket."""

    def batch_full(self, bucket: int) -> None:
        """Note that a batch of this bucket was closed."""


class HashAssigner:
    """Assigns each row to the bucket of its key."""

    def __init__(self, info: TableInfo, hash: Literal["pyfluss", "java"]) -> None:
        from zufluss.record.keys.encoding import bucket_assign  # loads the compiled kernels

        self._assign = bucket_assign
        self._info = info
        self._hash = hash

    def assign(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of each bucket."""
        return split(batch, self._assign(batch, self._info, self._hash))

    def batch_full(self, bucket: int) -> None:
        """Do nothing: the hash decides."""


class StickyAssigner:
    """Fills a batch of one bucket, then moves to the next; starts at `seed` or anywhere."""

    def __init__(self, buckets: int, seed: int | None = None) -> None:
        self._buckets = buckets
        self._current = _first(buckets, seed)

    def assign(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the whole batch with the current bucket."""
        yield self._current, batch

    def batch_full(self, bucket: int) -> None:
        """Move to the next bucket."""
        if bucket == self._current:
            self._current = (bucket + 1) % self._buckets


class RoundRobinAssigner:
    """Takes the next bucket with every write; starts at `seed` or anywhere."""

    def __init__(self, buckets: int, seed: int | None = None) -> None:
        self._buckets = buckets
        self._next = _first(buckets, seed)

    def assign(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the whole batch with the next bucket."""
        bucket, self._next = self._next, (self._next + 1) % self._buckets
        yield bucket, batch

    def batch_full(self, bucket: int) -> None:
        """Do nothing: every write moves to the next bucket anyway."""


def _first(buckets: int, seed: int | None) -> int:
    return random.randrange(buckets) if seed is None else seed % buckets


def assigner_of(info: TableInfo, options: ClientOptions, seed: int | None = None) -> BucketAssigner:
    """The assigner of a table or of one partition; with a seed it is deterministic."""
    if info.bucket_keys:
        return HashAssigner(info, options.bucket_hash)
    if options.assigner == "round_robin":
        return RoundRobinAssigner(info.bucket_count, seed)
    return StickyAssigner(info.bucket_count, seed)


def split_partitions(
    batch: pa.RecordBatch, info: TableInfo
) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """Yield the rows of each partition with its name; the name is None without partitions."""
    if not info.is_partitioned:
        yield None, batch
        return
    types = {key: info.schema.column(key).data_type for key in info.partition_keys}
    names = partition_values(batch, info.partition_keys, types)
    indexes = names.indices.to_numpy(zero_copy_only=False)
    for group, rows in split(batch, indexes):
        yield names.dictionary[group].as_py(), rows


def split(
    batch: pa.RecordBatch, groups: npt.NDArray[np.signedinteger[Any]]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield each group's rows, in the order of the groups.

    >>> batch = pa.record_batch({"a": [1, 2, 3]})
    >>> [(g, rows["a"].to_pylist()) for g, rows in split(batch, np.array([1, 0, 1]))]
    [(0, [2]), (1, [1, 3])]
    """
    first = int(groups[0]) if len(groups) else 0
    if (groups == first).all():
        if len(groups):
            yield first, batch
        return
    order, runs = _sorted_runs(groups)
    rows = batch.take(pa.array(order))
    for group, start, end in runs:
        yield group, rows.slice(start, end - start)


def group_rows(
    groups: npt.NDArray[np.signedinteger[Any]],
) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each group with the indexes of its rows, in the order of the groups.

    >>> [(g, rows.tolist()) for g, rows in group_rows(np.array([1, 0, 1]))]
    [(0, [1]), (1, [0, 2])]
    """
    if len(groups) <= 1:
        yield from ((int(group), np.zeros(1, np.intp)) for group in groups)
        return
    order, runs = _sorted_runs(groups)
    for group, start, end in runs:
        yield group, order[start:end]


def _sorted_runs(
    groups: npt.NDArray[np.signedinteger[Any]],
) -> tuple[npt.NDArray[np.intp], list[tuple[int, int, int]]]:
    """A stable order by group, with group, start and end of each run in that order."""
    small = groups.min() >= 0 and groups.max() < _RADIX_MAX
    order = np.argsort(groups.astype(np.uint16) if small else groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]).tolist()
    ends = [*starts[1:], len(groups)]
    return order, list(zip(ordered[starts].tolist(), starts, ends, strict=True))
