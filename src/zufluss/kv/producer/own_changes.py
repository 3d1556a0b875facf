"""What one producer changed in a part of a changelog, in steps that a bucket can undo one by one.

Every batch of a changelog tells who wrote it (`model/producer.py`), so the changes of a producer
are found by their batches' writer ids; those of earlier undos are among them. Two ways lead from
changes to steps (`undo.py` has what a step does):

*Exclusive*: nobody else changed the columns, so what a key was before the first change is what it
has to be again. Keys that were seen are remembered by 128 bits of hash, so many at most; when there
are more, the pass goes on with the lower half of them, and a further pass reads the changelog again
for the rest. Memory is bounded, whatever the range is.

*Shared*: others changed the same columns, meanwhile and since. What the producer added to each key
is summed up and taken away again, all at once for a key. Undos are changes, too, so a key that was
undone before has a sum of 0. There is a limit of keys and there are passes as above.

Both ways a crash in between costs nothing but doing it again.
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
from zufluss.kv.producer.undo import Added, Restore, Step, fitted, invertible, signed
from zufluss.kv.replay import Kinds, decode_changes
from zufluss.kv.table import KvTable
from zufluss.model.producer import ProducerWriter
from zufluss.model.schema import Column
from zufluss.record.header import iter_headers
from zufluss.record.slices import Positions, Slices

UNDO_KEYS_MAX: Final = 1_000_000
"""Keys that one pass over the changelog remembers."""
UNDO_SUMS_MAX: Final = 200_000
"""Keys that one pass adds up changes of."""
STEP_ROWS: Final = 10_000
"""Rows of a step, about; more if one batch has more."""
STEP_BYTES: Final = 16 << 20
"""Bytes of the rows of a step, about."""
_SEED: Final = 0x2545F4914F6CDD1D
"""Of the second half of the hash; the first has a seed of the process."""
_HASH: Final = ""
"""The name of the hash beside the columns of a key; no column has it."""
LEAST, MOST = -(1 << 63), (1 << 63) - 1

Flags = npt.NDArray[np.bool_]


class Source(NamedTuple):
    """A part of a changelog that can be read again and again."""

    table: KvTable
    """Whose changes they are."""
    batches: Callable[[], Generator[memoryview, None, None]]
    """Whole batches in order, from the one at `start`, or an earlier one, on."""
    start: int
    """The first offset of the part."""
    end: int
    """The offset after it."""
    number: int
    """The producer whose changes are wanted."""


class OwnChanges(NamedTuple):
    """Changes of the producer that follow each other, without those of others in between."""

    rows: pa.RecordBatch
    """In the table's schema."""
    kinds: Kinds
    """Their change types."""
    end_offset: int
    """Everything below it was looked at."""


class Progress(NamedTuple):
    """A step, and how far the undo is when it is done."""

    step: Step | None
    """None: nothing to do here."""
    position: int
    """An offset between start and end; it may go back when a pass turns out not to be the last."""


def own_changes(source: Source) -> Iterator[OwnChanges]:
    """What the producer changed, in pieces; also empty ones, to tell how far it is.

    `CorruptRecordError` if changes are missing in between.
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
                    found = decode_changes(table, records, position, header)
                    parts.append(_from(*found, offset - header.base_offset))
                    rows, size = rows + header.record_count, size + found[0].nbytes
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
    """The changes from one on; a row after an update never without the one before it."""
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
    batches = [fitted(rows, table.schema) for rows, _ in parts]
    (rows,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return OwnChanges(rows, np.concatenate([kinds for _, kinds in parts]), end_offset)


def _hole(table: KvTable, offset: int, end: int) -> CorruptRecordError:
    return CorruptRecordError(
        f"the changelog of {table.info.path} has nothing from offset {offset} to {end}; restore "
        "its files from a backup, or drop the producer with zufluss producer drop"
    )


# -- exclusive ------------------------------------------------------------------------------------


class SeenKeys:
    """Keys that were met, of a range of hashes that gets smaller when they are too many."""

    def __init__(self, low: int, keys_max: int) -> None:
        self.low, self.high = low, MOST
        """The first half of the hash of keys that are looked at, both inclusive."""
        self._keys_max = keys_max
        self._first: Positions = np.empty(0, np.int64)
        self._second: Positions = np.empty(0, np.int64)
        """Both halves, in the order of the first."""

    @property
    def count(self) -> int:
        """How many are remembered."""
        return len(self._first)

    def unseen(self, keys: Slices) -> Positions:
        """Which keys are met for the first time, in their order; they are remembered."""
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
        """Which hashes are there; several may have the same first half."""
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
            kept = int(np.searchsorted(self._first, self.high, side="right"))
            self._first, self._second = self._first[:kept], self._second[:kept]


def _second_hashes(keys: Slices) -> Positions:
    out = np.empty(keys.count, np.int64)
    done = words.hash_all(keys.data, keys.starts, keys.ends, _SEED, out)
    assert done == keys.count, "the keys were hashed before"
    return out


def exclusive_steps(source: Source, keys_max: int = UNDO_KEYS_MAX) -> Iterator[Progress]:
    """Of each key what it was before the first change."""
    low = LEAST
    while True:
        seen = SeenKeys(low, keys_max)
        for changes in own_changes(source):
            step = _first_of(source.table, changes, seen)
            yield Progress(step, _position(source, seen, changes.end_offset))
        if seen.high == MOST:
            return
        low = seen.high + 1


def _first_of(table: KvTable, changes: OwnChanges, seen: SeenKeys) -> Restore | None:
    before = np.flatnonzero(changes.kinds != UPDATE_AFTER)
    if not len(before):
        return None
    rows = changes.rows.take(pa.array(before))
    unseen = seen.unseen(Slices.contiguous(*table.key.encode(rows)))
    if not len(unseen):
        return None
    inserted = changes.kinds[before[unseen]] == INSERT
    return Restore(rows.take(pa.array(unseen)), inserted)


def _position(source: Source, seen: SeenKeys | AddedUp, offset: int) -> int:
    """How far it is, when some passes are done and one has come to an offset."""
    width = MOST - LEAST + 1
    done, now = seen.low - LEAST, seen.high - seen.low + 1
    read = (source.end - source.start) * done + (offset - source.start) * now
    return source.start + read // width


# -- shared ---------------------------------------------------------------------------------------


class AddedUp:
    """What was added to each key, of a range of hashes that gets smaller when they are too many."""

    def __init__(self, table: KvTable, columns: Sequence[Column], low: int, keys_max: int) -> None:
        self.low, self.high = low, MOST
        """The hash of keys that are looked at, both inclusive."""
        self._table = table
        self._columns = columns
        self._keys_max = keys_max
        self._sums: pa.Table | None = None
        """A row per key: its columns, its hash, and the sums, named by the numbers of columns."""

    def add(self, changes: OwnChanges) -> None:
        """Add what changes did."""
        if not len(changes.kinds):
            return
        rows, schema = changes.rows, self._table.schema
        gone = (changes.kinds == UPDATE_BEFORE) | (changes.kinds == DELETE)
        parts = {name: rows.column(name) for name in schema.primary_key}
        parts[_HASH] = pa.array(hash_keys(Slices.contiguous(*self._table.key.encode(rows))))
        for column in self._columns:
            parts[str(column.id)] = signed(column, rows.column(column.name), gone)
        self._merge(pa.table(parts))

    def steps(self) -> Iterator[Added]:
        """What has to be taken away, some keys at a time."""
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
            yield Added(rows, {c.id: part.column(str(c.id)) for c in self._columns})

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
    """What was added to columns that can be inverted, by key."""
    columns = [c for c in source.table.schema.columns if c.id in column_ids and invertible(c)]
    low = LEAST
    while columns:
        sums = AddedUp(source.table, columns, low, keys_max)
        for changes in own_changes(source):
            sums.add(changes)
            yield Progress(None, _position(source, sums, changes.end_offset))
        for step in sums.steps():
            yield Progress(step, _position(source, sums, source.end))
        if sums.high == MOST:
            return
        low = sums.high + 1
