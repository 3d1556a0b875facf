"""The changes of one producer in a part of a changelog, as steps that a bucket can undo.

Every batch of a changelog has the id of its writer (`model/producer.py`), which tells the changes
of a producer; those of its earlier undos are among them. There are two ways from changes to steps
(`undo.py` defines the steps):

*Exclusive*: nobody else changed the columns, so a key goes back to its row before the first change.
Keys that were seen are remembered by 128 bits of hash, up to a limit. Beyond the limit the pass
continues with the keys of the lower half of the hashes, and a further pass reads the changelog
again for the rest. So memory is bounded, however long the changelog is.

*Shared*: others changed the same columns too. The changes of the producer to each key are summed up
and subtracted, all at once for a key. Undos are changes too, so a key that was undone before has a
sum of 0. There is a limit of keys and there are passes as above.

After a crash the undo is repeated from the beginning, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.errors import CorruptRecordError
from zufluss.kv.hot import words
from zufluss.kv.hot.memtable import group_keys, hash_keys
from zufluss.kv.merge.base import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from zufluss.kv.producer.undo import (
    RestoreStep,
    SubtractStep,
    UndoStep,
    extended,
    invertible,
    signed,
)
from zufluss.kv.replay import Kinds, decode_changes
from zufluss.kv.table import KvTable
from zufluss.model.producer import ProducerWriter
from zufluss.model.schema import Column
from zufluss.record.header import iter_headers
from zufluss.record.slices import Positions, Slices

UNDO_KEYS_MAX: Final = 1_000_000
"""Keys that one exclusive pass remembers at most."""
UNDO_SUMS_MAX: Final = 200_000
"""Keys that one shared pass sums up at most."""
STEP_ROWS: Final = 10_000
"""Rows of a step, about; more if one batch has more."""
STEP_BYTES: Final = 16 << 20
"""Bytes of the rows of a step, about."""
_SEED: Final = 0x2545F4914F6CDD1D
"""Seed of the second half of the hash; the first half has a seed of the process."""
_HASH: Final = ""
"""Name of the hash column in tables of sums; no column of a table is called like this."""
LEAST, MOST = -(1 << 63), (1 << 63) - 1

Flags = npt.NDArray[np.bool_]


class Source(NamedTuple):
    """A part of a changelog that can be read several times."""

    table: KvTable
    """The table of the changelog."""
    batches: Callable[[], Generator[memoryview, None, None]]
    """Returns whole batches in order; the first one contains `start` or lies before it."""
    start: int
    """The first offset of the part."""
    end: int
    """The offset after the part."""
    number: int
    """Number of the producer whose changes are undone."""


class OwnChanges(NamedTuple):
    """Consecutive changes of the producer; those of other writers are left out."""

    rows: pa.RecordBatch
    """The rows, in the table's schema."""
    kinds: Kinds
    """Their change types."""
    end_offset: int
    """The changelog was read up to this offset."""


class Progress(NamedTuple):
    """A step, and the progress of the undo after it."""

    step: UndoStep | None
    """None: this part of the changelog has nothing to undo."""
    position: int
    """An offset between start and end; it decreases when a further pass becomes necessary."""


def own_changes(source: Source) -> Iterator[OwnChanges]:
    """Yield the changes of the producer in pieces; empty pieces report the progress.

    Raises `CorruptRecordError` if changes are missing in between.
    """
    table, offset = source.table, source.start
    parts: list[tuple[pa.RecordBatch, Kinds]] = []
    rows = size = 0
    with closing(source.batches()) as batches:
        for records in batches:
            for position, header in iter_headers(records):
                if header.next_offset <= offset or offset >= source.end:
                    continue
                if header.base_offset > offset:
                    raise _hole(table, offset, header.base_offset)
                writer = ProducerWriter.of(header.writer_id)
                if writer is not None and writer.number == source.number and header.record_count:
                    changed, kinds = decode_changes(table, records, position, header)
                    parts.append(_from(changed, kinds, offset - header.base_offset))
                    rows, size = rows + header.record_count, size + changed.nbytes
                offset = header.next_offset
                if rows >= STEP_ROWS or size >= STEP_BYTES:
                    yield _joined(table, parts, offset)
                    parts, rows, size = [], 0, 0
            if offset >= source.end:
                break
            if not parts:
                yield _joined(table, parts, offset)
    if offset < source.end:
        raise _hole(table, offset, source.end)
    yield _joined(table, parts, offset)


def _from(rows: pa.RecordBatch, kinds: Kinds, first: int) -> tuple[pa.RecordBatch, Kinds]:
    """Return the changes from number `first` on; an update keeps its before image."""
    first = max(first, 0)
    if first and kinds[first] == UPDATE_AFTER:
        first -= 1
    return rows.slice(first), kinds[first:]


def _joined(
    table: KvTable, parts: list[tuple[pa.RecordBatch, Kinds]], end_offset: int
) -> OwnChanges:
    if not parts:
        nothing = table.schema.arrow.empty_table().to_batches()
        empty = nothing[0] if nothing else pa.RecordBatch.from_pylist([], table.schema.arrow)
        return OwnChanges(empty, np.empty(0, np.uint8), end_offset)
    batches = [extended(rows, table.schema) for rows, _ in parts]
    (rows,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return OwnChanges(rows, np.concatenate([kinds for _, kinds in parts]), end_offset)


def _hole(table: KvTable, offset: int, end: int) -> CorruptRecordError:
    return CorruptRecordError(
        f"the changelog of {table.info.path} has nothing from offset {offset} to {end}; restore "
        "its files from a backup, or drop the producer with zufluss producer drop"
    )


# -- exclusive ------------------------------------------------------------------------------------


class SeenKeys:
    """A set of keys, within a range of hashes that shrinks when the keys are too many."""

    def __init__(self, low: int, keys_max: int) -> None:
        self.low, self.high = low, MOST
        """Range of the first half of the hash, both ends included; other keys are ignored."""
        self._keys_max = keys_max
        self._first: Positions = np.empty(0, np.int64)
        self._second: Positions = np.empty(0, np.int64)
        """Both halves of the hashes, sorted by the first."""

    @property
    def count(self) -> int:
        """Number of keys in the set."""
        return len(self._first)

    def unseen(self, keys: Slices) -> Positions:
        """Return the keys that are not in the set, in order, and add them."""
        hashes = hash_keys(keys)
        _, candidates = group_keys(keys, hashes)
        first = hashes[candidates]
        inside = (first >= self.low) & (first <= self.high)
        candidates, first = candidates[inside], first[inside]
        second = _second_hashes(keys.take(candidates))
        new = ~self._known(first, second)
        candidates = candidates[new]
        self._add(first[new], second[new])
        return candidates[hashes[candidates] <= self.high]

    def _known(self, first: Positions, second: Positions) -> Flags:
        """Return which hashes are in the set; several may have the same first half."""
        known = np.zeros(len(first), np.bool_)
        at = np.searchsorted(self._first, first)
        open_ = np.arange(len(first))
        while len(open_):
            open_ = open_[at[open_] < self.count]
            open_ = open_[self._first[at[open_]] == first[open_]]
            known[open_] |= self._second[at[open_]] == second[open_]
            at[open_] += 1
        return known

    def _add(self, first: Positions, second: Positions) -> None:
        first, second = np.append(self._first, first), np.append(self._second, second)
        order = np.argsort(first, kind="stable")
        self._first, self._second = first[order], second[order]
        while self.count > self._keys_max and self.low < self.high:
            middle = int(self._first[(self.count - 1) // 2])
            self.high = max(self.low, min(middle, self.high - 1))
            end = int(np.searchsorted(self._first, self.high, side="right"))
            self._first, self._second = self._first[:end], self._second[:end]


def _second_hashes(keys: Slices) -> Positions:
    out = np.empty(keys.count, np.int64)
    done = words.hash_all(keys.data, keys.starts, keys.ends, _SEED, out)
    assert done == keys.count, "the keys were hashed before"
    return out


def exclusive_steps(source: Source, keys_max: int = UNDO_KEYS_MAX) -> Iterator[Progress]:
    """Yield steps that set each key back to its row before the first change."""
    low = LEAST
    while True:
        seen = SeenKeys(low, keys_max)
        for changes in own_changes(source):
            step = _first_of(source.table, changes, seen)
            yield Progress(step, _position(source, seen, changes.end_offset))
        if seen.high == MOST:
            return
        low = seen.high + 1


def _first_of(table: KvTable, changes: OwnChanges, seen: SeenKeys) -> RestoreStep | None:
    before = np.flatnonzero(changes.kinds != UPDATE_AFTER)
    if not len(before):
        return None
    rows = changes.rows.take(pa.array(before))
    unseen = seen.unseen(Slices.contiguous(*table.key.encode(rows)))
    if not len(unseen):
        return None
    inserted = changes.kinds[before[unseen]] == INSERT
    return RestoreStep(rows.take(pa.array(unseen)), inserted)


def _position(source: Source, seen: SeenKeys | ProducerSums, offset: int) -> int:
    """Return the progress as an offset: finished passes, and the present one up to `offset`."""
    width = MOST - LEAST + 1
    done, now = seen.low - LEAST, seen.high - seen.low + 1
    read = (source.end - source.start) * done + (offset - source.start) * now
    return source.start + read // width


# -- shared ---------------------------------------------------------------------------------------


class ProducerSums:
    """Sums of changes by key, within a range of hashes that shrinks when keys are too many."""

    def __init__(self, table: KvTable, columns: Sequence[Column], low: int, keys_max: int) -> None:
        self.low, self.high = low, MOST
        """Range of hashes, both ends included; other keys are ignored."""
        self._table = table
        self._columns = columns
        self._keys_max = keys_max
        self._sums: pa.Table | None = None
        """A row per key: key columns, hash, and the sums, named by column ids."""

    def add(self, changes: OwnChanges) -> None:
        """Add changes to the sums."""
        if not len(changes.kinds):
            return
        rows, schema = changes.rows, self._table.schema
        before = (changes.kinds == UPDATE_BEFORE) | (changes.kinds == DELETE)
        parts = {name: rows.column(name) for name in schema.primary_key}
        parts[_HASH] = pa.array(hash_keys(Slices.contiguous(*self._table.key.encode(rows))))
        for column in self._columns:
            parts[str(column.id)] = signed(column, rows.column(column.name), before)
        self._merge(pa.table(parts))

    def steps(self) -> Iterator[SubtractStep]:
        """Yield steps that subtract the sums, some keys at a time."""
        if self._sums is None:
            return
        for part in self._sums.to_batches(max_chunksize=STEP_ROWS):
            rows = pa.RecordBatch.from_arrays(
                [
                    part.column(field.name)
                    if field.name in self._table.schema.primary_key
                    else pa.nulls(part.num_rows, field.type)
                    for field in self._table.schema.arrow
                ],
                schema=self._table.schema.arrow,
            )
            yield SubtractStep(rows, {c.id: part.column(str(c.id)) for c in self._columns})

    def _merge(self, parts: pa.Table) -> None:
        parts = parts.filter(_within(parts, self.low, self.high))
        if self._sums is not None:
            parts = pa.concat_tables([self._sums, parts])
        keys = [*self._table.schema.primary_key, _HASH]
        names = [str(column.id) for column in self._columns]
        sums = parts.group_by(keys, use_threads=False).aggregate([(name, "sum") for name in names])
        sums = sums.select([*keys, *(f"{name}_sum" for name in names)])
        sums = sums.rename_columns([*keys, *names]).cast(parts.schema).combine_chunks()
        while sums.num_rows > self._keys_max and self.low < self.high:
            hashes = np.sort(sums[_HASH].to_numpy())
            middle = int(hashes[(len(hashes) - 1) // 2])
            self.high = max(self.low, min(middle, self.high - 1))
            sums = sums.filter(_within(sums, self.low, self.high)).combine_chunks()
        self._sums = sums


def _within(sums: pa.Table, low: int, high: int) -> pa.Array:
    hashes = sums[_HASH]
    return pc.and_(pc.greater_equal(hashes, low), pc.less_equal(hashes, high))


def shared_steps(
    source: Source, column_ids: frozenset[int], keys_max: int = UNDO_SUMS_MAX
) -> Iterator[Progress]:
    """Yield steps that subtract the changes to columns whose functions have an inverse."""
    columns = [c for c in source.table.schema.columns if c.id in column_ids and invertible(c)]
    low = LEAST
    while columns:
        sums = ProducerSums(source.table, columns, low, keys_max)
        for changes in own_changes(source):
            sums.add(changes)
            yield Progress(None, _position(source, sums, changes.end_offset))
        for step in sums.steps():
            yield Progress(step, _position(source, sums, source.end))
        if sums.high == MOST:
            return
        low = sums.high + 1
