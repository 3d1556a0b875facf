"""Partial updates: a put writes some columns, the others stay.

| record | key exists | key is new |
|---|---|---|
| row | -U old, +U with the record's target columns | +I, other columns NULL |
| row, target columns are just the key | nothing | +I |
| delete, all other columns are NULL | -D old | nothing |
| delete, some are not | -U old, +U with the target columns NULL | |

With the changelog image WAL there is no -U. The primary key is always among the target columns. A
table with an auto-increment column takes only partial updates: the server fills that column when
the key is new and keeps it after that.

Records of one batch write the same columns, so a row consists of at most three candidates: one for
the key, one for the target columns, one (always the stored row) for the other columns. The kernel
keeps these three numbers and the assigned id for each key, and describes each change by them; rows
are put together column by column afterwards.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from zufluss.errors import RecordTooLargeError
from zufluss.kv.merge.base import (
    DELETE,
    INSERT,
    KINDS_OUT,
    NO_ROW,
    NUMBERS_IN,
    NUMBERS_OUT,
    UNCHANGED,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    Candidates,
    Fold,
    Numbers,
)
from zufluss.model.schema import Schema
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel

KEY, TARGET, OTHER, ASSIGNED = range(4)
"""Sources of a row: the candidates of its key, target and other columns, and the assigned id."""
CHANGELOG_BYTES_MAX: Final = 512 << 20
"""Bytes of the rows that a batch may put together: an Arrow column stays below 2 GiB."""
_SOURCES_OUT = types.Array(types.int64, 2, "C")


class Ids:
    """Numbers for an auto-increment column: ranges go in, each number comes out once."""

    def __init__(self) -> None:
        self._ranges: deque[tuple[int, int]] = deque()
        self.promised = 0
        """Numbers that batches under way may need; kept by the event loop."""

    @property
    def left(self) -> int:
        """How many numbers are left."""
        return sum(end - start for start, end in tuple(self._ranges))

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges that are left: first number, and the one after the last."""
        return tuple(self._ranges)

    def add(self, start: int, end: int) -> None:
        """Add the numbers from `start` to before `end`. Any thread may call this."""
        self._ranges.append((start, end))

    def peek(self, count: int) -> Numbers:
        """Return the next `count` numbers, fewer if no more are left."""
        parts: list[Numbers] = []
        for start, end in tuple(self._ranges):
            parts.append(np.arange(start, min(end, start + count), dtype=np.int64))
            count -= len(parts[-1])
            if not count:
                break
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def use(self, count: int) -> None:
        """Remove the next `count` numbers."""
        while count:
            start, end = self._ranges[0]
            used = min(count, end - start)
            if used == end - start:
                self._ranges.popleft()
            else:
                self._ranges[0] = (start + used, end)
            count -= used


class PartialFold(NamedTuple):
    """What a batch of partial updates does."""

    fold: Fold
    """The changes; their rows and final rows are numbers of `rows`."""
    rows: pa.RecordBatch
    """The rows of the changelog."""
    ids_used: int
    """How many ids were assigned."""


class PartialUpdate:
    """Decides about puts that write the same columns of one table."""

    def __init__(
        self,
        schema: Schema,
        *,
        targets: frozenset[int],
        keys: frozenset[int],
        auto_increment: int | None,
        before_images: bool,
        ignore_deletes: bool,
    ) -> None:
        self._schema = schema
        self._targets = targets
        self._keys = keys
        self._auto = auto_increment
        self._key_only = targets == keys
        self._before_images = before_images
        self._ignore_deletes = ignore_deletes

    def fold(self, candidates: Candidates, ids: Numbers, sizes: Numbers) -> PartialFold:
        """Decide about a batch; `ids` has a number for every record, should all be inserts.

        `sizes` are the bytes of the candidates. Raises `RecordTooLargeError` if the rows of the
        changelog would be too large: each is a whole row, however little a record writes.
        """
        count = len(candidates.new)
        kinds = np.empty(2 * count, np.uint8)
        sources = np.empty((2 * count, 4), np.int64)
        current = np.full((len(candidates.old), 4), NO_ROW, np.int64)
        current[:, :ASSIGNED] = candidates.old[:, None]
        final = np.full(len(candidates.old), UNCHANGED, np.int64)
        changes, used = _fold(
            candidates.group,
            candidates.new,
            self._bare(candidates),
            ids,
            np.array(
                [self._key_only, self._before_images, self._ignore_deletes, self._auto is not None]
            ),
            current,
            kinds,
            sources,
            final,
        )
        _check_size(sizes, sources[:changes])
        rows = self._rows(candidates.rows, sources[:changes])
        numbers = np.arange(changes, dtype=np.int64)
        return PartialFold(Fold(kinds[:changes], numbers, final), rows, used)

    def _bare(self, candidates: Candidates) -> Any:
        """Return for each candidate whether all columns but the target columns are NULL."""
        assert candidates.rows is not None
        bare = np.ones(candidates.rows.num_rows, np.bool_)
        for i, column in enumerate(candidates.rows.columns):
            if i not in self._targets:
                bare &= column.is_null().to_numpy(zero_copy_only=False)
        return bare

    def _rows(self, rows: pa.RecordBatch, sources: Any) -> pa.RecordBatch:
        """Put the rows of the changelog together."""
        taken = [_indexes(sources[:, which]) for which in (KEY, TARGET, OTHER)]
        columns = []
        for i, column in enumerate(rows.columns):
            which = KEY if i in self._keys else TARGET if i in self._targets else OTHER
            values = column.take(taken[which])
            columns.append(self._assign(values, sources) if i == self._auto else values)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema.arrow)

    def _assign(self, values: pa.Array, sources: Any) -> pa.Array:
        """Replace values by assigned ids where a row has one."""
        ids = _indexes(sources[:, ASSIGNED]).cast(values.type)
        return pa.compute.coalesce(ids, values)


def _check_size(sizes: Numbers, sources: Any) -> None:
    """Refuse a batch whose changelog is too large; the size is the sum over all sources."""
    size = int(np.append(sizes, 0)[sources[:, :ASSIGNED]].sum())  # NO_ROW, −1, takes the appended 0
    if size > CHANGELOG_BYTES_MAX:
        raise RecordTooLargeError(
            f"the rows that this partial update changes have {size} bytes, at most "
            f"{CHANGELOG_BYTES_MAX} are allowed, since each of its changes has the whole row in "
            "it; send fewer rows at a time, by a smaller client.writer.batch-size"
        )


def _indexes(candidates: Numbers) -> pa.Array:
    """Return candidates as Arrow indexes, NULL for `NO_ROW`."""
    return pa.array(candidates, mask=candidates == NO_ROW)


_PAIR: Any = types.UniTuple(types.int64, 2)
_FLAGS_IN = types.Array(types.boolean, 1, "C", readonly=True)


@kernel()
def _emit(kind: Any, row: Any, kinds: Any, sources: Any, count: Any) -> Any:
    """Write a change of a row, which is given by its four sources; return the new count."""
    kinds[count] = kind
    for source in range(4):
        sources[count, source] = row[source]
    return count + 1


@kernel(
    _PAIR(
        NUMBERS_IN, NUMBERS_IN, _FLAGS_IN, NUMBERS_IN, _FLAGS_IN, _SOURCES_OUT, KINDS_OUT,
        _SOURCES_OUT, NUMBERS_OUT,
    ),
    boundscheck=True,
    short=True,
)  # fmt: skip
def _fold(
    groups: Any,
    new: Any,
    bare: Any,
    ids: Any,
    flags: Any,
    current: Any,
    kinds: Any,
    sources: Any,
    final: Any,
) -> Any:
    """Write the changes of all records; return the number of changes and of assigned ids.

    `current` has the four sources of each group's row; a key whose KEY source is `NO_ROW` has no
    row. `sources` gets those of each change, `final` the last change of each group.
    """
    key_only, before_images, ignore_deletes, assigns = flags[0], flags[1], flags[2], flags[3]
    count = used = 0
    for record in range(len(new)):
        group = groups[record]
        row = current[group]
        if new[record] == NO_ROW:
            if row[KEY] == NO_ROW or ignore_deletes:
                continue
            # A row goes if nothing but the target columns, which the delete empties, was filled.
            stored = row[OTHER]
            if (stored == NO_ROW or bare[stored]) and row[ASSIGNED] == NO_ROW:
                count = _emit(DELETE, row, kinds, sources, count)
                row[:] = NO_ROW
                final[group] = NO_ROW
                continue
        elif row[KEY] != NO_ROW and key_only:
            continue
        if row[KEY] == NO_ROW:
            row[KEY] = new[record]
            if assigns:
                row[ASSIGNED] = ids[used]
                used += 1
            kind = INSERT
        else:
            if before_images:
                count = _emit(UPDATE_BEFORE, row, kinds, sources, count)
            kind = UPDATE_AFTER
        # For a delete that leaves the row this is `NO_ROW`: the target columns become NULL.
        row[TARGET] = new[record]
        final[group] = count
        count = _emit(kind, row, kinds, sources, count)
    return count, used
