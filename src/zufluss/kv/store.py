"""The rows of one bucket by key: the newest in memory, all flushed ones on disk.

Two tiers under one interface: versions in memory (`hot/memtable.py`), flushed rows in RocksDB
(`cold/rocks.py`). Every write carries the log offset of its batch. A reader gives a horizon, the
high watermark, and sees the newest version below it: every acknowledged write and none that a crash
could take back. Three rules always hold:

* Versions at or above `flushed_offset` that a reader may still see are in memory.
* If memory has no version of a key below a horizon, the cold tier has the right one.
* While `resident`, all rows of the cold tier are in memory too: a key that memory does not have
  does not exist.

A store is not a log: after a crash it is what the last flush recorded, and its owner (`tablet.py`)
replays the changelog from `flushed_offset`.

One thread, the key-value worker, owns a store. The event loop sets `horizon` and calls `answer`,
which never waits; lookups of keys that are not in memory go to the worker (`get_at`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog

from zufluss.errors import RecordTooLargeError, StorageBackpressureError, refusal_of
from zufluss.kv.cold.checkpoint import COLD_DIRECTORY, remove_left_overs
from zufluss.kv.cold.flush import TABLE_FILE, FlushView, OnFlushed
from zufluss.kv.cold.rocks import ColdTier
from zufluss.kv.cold.state import STATE_FILE, KvState, read_state
from zufluss.kv.hot.answer import NOT_HERE, answer_lookup
from zufluss.kv.hot.entries import NEWEST
from zufluss.kv.hot.index import UNKNOWN
from zufluss.kv.hot.memtable import SEED, Block, Memtable, group_keys, hash_keys
from zufluss.kv.hot.order import KeyOrder
from zufluss.kv.hot.sorting import packed
from zufluss.kv.memory import KvMemory
from zufluss.kv.rest import NO_PUTS, Rests
from zufluss.kv.scan.pins import PINS_DIRECTORY, PinDirectory
from zufluss.log.files import Files
from zufluss.record.slices import ABSENT, Bytes, Positions, Slices

__all__ = ["KvStore", "group_keys", "hash_keys"]

log = structlog.get_logger(__name__)

SCAN_ROWS = 4096
"""Keys that a scan reads in one step."""

COLD_ROWS = 32
"""Rows that are read from the cold tier at a time if there is a limit to their bytes."""


class RowsTooLargeError(RecordTooLargeError):
    """The rows of a read take more bytes than its caller has room for."""


class LookupPlaces(NamedTuple):
    """Arrays for lookups: places of keys in the request, and scratch space for places of values."""

    starts: Positions
    ends: Positions
    value_starts: Positions
    value_ends: Positions

    @classmethod
    def of(cls, count: int) -> LookupPlaces:
        """Allocate arrays for `count` keys."""
        return cls(*(np.empty(count, np.int64) for _ in range(4)))


class KvStore:
    """The rows of one bucket."""

    def __init__(self, directory: Path, memory: KvMemory, files: Files, state: KvState) -> None:
        self.directory = directory
        self.horizon = state.flushed_offset
        """The high watermark; set by the event loop, never decreases."""
        self.dirty_bytes = 0
        """Bytes of memory that wait for a flush, rounded up to whole segments at its end."""
        self.used = True
        """The store was read or written since rows were last dropped to make room."""
        self.last_use = memory.evicted_bytes
        """The `evicted_bytes` of the memory when `used` was last found set."""
        self.flush_wanted: Callable[[], None] = self._flush_as_recorded
        """Begins a flush when memory is short; the owner, which knows the row count, sets it."""
        self._state = state
        self._memory = memory
        self.files = files
        self._flush: Future[KvState] | None = None
        self._flush_horizon = NEWEST
        self._held: list[Block] = []
        self._cold = ColdTier(directory / COLD_DIRECTORY)
        self.resident = self._cold.empty
        """All rows of the cold tier are in memory too. Once False, False until the next start."""
        self._memtable = Memtable(memory.arena, self._retire)
        self.order = KeyOrder(self._memtable)
        """The keys in memory in order."""
        self.pins = PinDirectory(directory / PINS_DIRECTORY, files)
        """The pinned states of the bucket."""
        memory.stores.add(self)

    @classmethod
    def open(cls, directory: Path, memory: KvMemory, files: Files) -> KvStore:
        """Open a bucket as its last flush left it; creates the directory if it is missing."""
        for parent in files.make_directories(directory):
            files.sync_directory(parent)
        for left_over in (TABLE_FILE, f"{STATE_FILE}.new"):
            files.unlink_if_there(directory / left_over)
        remove_left_overs(files, directory)
        store = cls(directory, memory, files, read_state(directory))
        try:
            store.pins.remove_unfinished()
        except BaseException:
            store.abandon()
            raise
        return store

    def __repr__(self) -> str:
        return (
            f"KvStore({self.directory.name}: {self._memtable.keys} keys in {self.memory_bytes} "
            f"bytes, flushed to {self.flushed_offset}, horizon {self.horizon})"
        )

    @property
    def flushed_offset(self) -> int:
        """Every change below this log offset is in the cold tier."""
        return self._state.flushed_offset

    @property
    def row_count(self) -> int:
        """Rows as of `flushed_offset`."""
        return self._state.row_count

    @property
    def meta(self) -> dict[str, Any]:
        """The values that the owner stored with the last flush."""
        return self._state.meta

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the store has."""
        return self._memtable.bytes

    # ------------------------------------------------------------------------- on the event loop

    def answer(
        self,
        buf: Bytes,
        places: LookupPlaces,
        count: int,
        horizon: int,
        partition: int,
        bucket: int,
        out: Bytes,
    ) -> int:
        """Write the answer to a lookup of the first `count` places; return its size.

        Returns a negative number if the answer does not fit or the cold tier has to be asked.
        """
        memtable, resident = self._memtable, self.resident
        self.used = True
        size: int = answer_lookup(
            memtable.arena.data, memtable.root, SEED, buf, places.starts, places.ends, count,
            horizon, resident, partition, bucket, places.value_starts, places.value_ends, out,
        )  # fmt: skip
        # The worker may have dropped rows meanwhile: a key that was not found may exist.
        return size if resident == self.resident else NOT_HERE

    # ---------------------------------------------------------------------------- by the worker

    def get(self, keys: Slices, hashes: Positions, bytes_max: int) -> Slices:
        """Return the newest values of keys, valid until the next read or write of any store.

        Values from the cold tier are not kept in memory: the caller is about to write these keys.
        Raises `RowsTooLargeError` if the values take more than `bytes_max`.
        """
        self._poll()
        self.used = True
        values, unknown = self._memtable.find(keys, hashes, NEWEST)
        if keys.count > 1:  # absent and unknown values begin where they end
            bytes_max -= int(values.ends.sum() - values.starts.sum())
            _check_room(bytes_max)
        if not unknown:
            return values
        if self.resident:
            np.maximum(values.starts, ABSENT, out=values.starts)
            return values
        return self._with_cold(keys, hashes, values, keep=False, bytes_max=bytes_max)

    def get_at(
        self, keys: Slices, horizon: int, *, keep: bool = True, bytes_max: int | None = None
    ) -> Slices:
        """Return values below the horizon in a new buffer; `keep` holds cold ones in memory.

        Raises `RowsTooLargeError`, before they are all in the buffer, if they take more bytes.
        """
        self._poll()
        self.used = True
        hashes = hash_keys(keys)
        values, unknown = self._memtable.find(keys, hashes, max(horizon, self.horizon))
        if bytes_max is not None:
            present = values.starts >= 0
            bytes_max -= int(np.sum(values.ends[present] - values.starts[present]))
            _check_room(bytes_max)
        if unknown and not self.resident:
            return self._with_cold(keys, hashes, values, keep=keep, bytes_max=bytes_max)
        np.maximum(values.starts, ABSENT, out=values.starts)
        return packed(values)

    def put(
        self,
        keys: Slices,
        hashes: Positions,
        values: Slices,
        offset: int,
        *,
        replay: bool = False,
    ) -> None:
        """Write versions under a log offset; an absent value deletes its key.

        No key may appear twice. The values must not lie in the arena: making room may reuse it.
        Raises `StorageBackpressureError` if there is no memory at the moment, `RecordTooLargeError`
        if there never will be enough; neither changes anything. A replay waits for longer.
        """
        if values.data is self._memory.arena.data:
            raise ValueError("values to be put lie in the arena; copy them out first")
        try:
            self._poll()
            self._memory.make_room_ahead()
        except MemoryError as e:
            raise refusal_of(e) from e
        try:
            written = self._put(keys, hashes, values, offset, replay=replay)
        except StorageBackpressureError:
            # Its own last segment and its index may lie in the way, and are not in use now.
            if not self._evict_own():
                raise
            written = self._put(keys, hashes, values, offset, replay=replay)
        self._count_dirty(written)
        if not self.flushing:
            self._memtable.clean_some(written, self.horizon, self.flushed_offset)

    def _evict_own(self) -> int:
        """Drop all flushed rows of this store before a put is tried again."""
        try:
            return self.evict(self.memory_bytes)
        except MemoryError as e:
            raise refusal_of(e) from e

    def _put(
        self, keys: Slices, hashes: Positions, values: Slices, offset: int, *, replay: bool
    ) -> int:
        memory = self._memory
        self.used = True
        alloc, bytes_max = memory.alloc, memory.put_bytes_max
        if replay:
            alloc, bytes_max = memory.alloc_for_replay, memory.arena.usable_bytes
        return self._memtable.put(keys, hashes, values, offset, self._cut, alloc, bytes_max)

    def page(
        self,
        low: bytes,
        high: bytes | None,
        horizon: int,
        bytes_max: int,
        rows_max: int = SCAN_ROWS,
    ) -> tuple[Slices, bytes | None]:
        """Return values of the first keys in [low, high), and the key to continue from.

        That key is None at the end; a page may be empty before it. `high` is None for no bound.
        Raises `RowsTooLargeError` if the page takes more than `bytes_max`.
        """
        names, following = self._next_keys(low, high, min(rows_max, SCAN_ROWS))
        if len(names) > rows_max:
            names, following = names[:rows_max], names[rows_max]
        if not names:
            self.used = True
            return Slices.of(()), following
        values = self.get_at(Slices.of(names), horizon, keep=False, bytes_max=bytes_max)
        return values.take(np.flatnonzero(values.starts >= 0)), following

    def scan(
        self, after: bytes | None, limit_rows: int, limit_bytes: int, horizon: int
    ) -> tuple[Slices, Slices]:
        """Return the next keys behind `after` (None: from the first) and their values, in order.

        Returns at least one row if there is one, then no more than the limits. No rows mean the
        end.
        """
        keys: list[bytes] = []
        values: list[bytes] = []
        low: bytes | None = b"" if after is None else after + b"\0"
        while low is not None and limit_rows and limit_bytes > 0:
            names, low = self._next_keys(low, None, SCAN_ROWS)
            for name, value in zip(names, self._values(names, horizon), strict=True):
                if value is None:
                    continue
                keys.append(name)
                values.append(value)
                limit_rows -= 1
                limit_bytes -= len(name) + len(value)
                if not limit_rows or limit_bytes <= 0:
                    break
        return Slices.of(keys), Slices.of(values)

    # -------------------------------------------------------------------------------- the flush

    @property
    def flushing(self) -> bool:
        """A flush was begun, and `flush_end` has not seen its end yet."""
        return self._flush is not None

    def flush_begin(
        self,
        horizon: int,
        row_count: int,
        meta: dict[str, Any] | None = None,
        done: OnFlushed | None = None,
        rests: Rests = NO_PUTS,
    ) -> None:
        """Begin to write everything below the horizon to the cold tier; returns at once.

        `row_count` is the number of rows at the horizon; `meta` is stored with it (None: the last
        one again). The flush thread calls `done` at the end. The worker sees the end with its next
        read or write, or by `flush_end`.
        """
        if self._flush is not None:
            raise RuntimeError(f"{self!r} is flushing already")
        state = KvState(
            max(horizon, self.flushed_offset), row_count, self.meta if meta is None else meta
        )
        dirty = (s for s in self._memtable.segments if s.newest >= self.flushed_offset)
        view = FlushView(
            self._memory.arena, self._memtable.root, tuple((s.start, s.used) for s in dirty),
            self.flushed_offset, state.flushed_offset,
        )  # fmt: skip
        self._flush_horizon = state.flushed_offset
        flush = self._memory.flusher.flush
        self._flush = flush(view, self.directory, self._cold, self.files, state, rests)
        if done is not None:
            self._flush.add_done_callback(lambda _: done())

    @property
    def flush_under_way(self) -> Future[KvState] | None:
        """The flush that was begun, None if no flush is under way."""
        return self._flush

    def flush_end(self) -> bool:
        """Take over the result of a flush that has ended; return whether one succeeded.

        A flush that failed is logged and changes nothing; the next one tries again.
        """
        if self._flush is None or not self._flush.done():
            return False
        failure = self._flush.exception()
        if failure is None:
            self._state = self._flush.result()
            self._count_dirty(self._memtable.bytes_from(self.flushed_offset) - self.dirty_bytes)
        else:
            log.error("kv_flush_failed", directory=str(self.directory), error=str(failure))
        self._flush, self._flush_horizon = None, NEWEST
        self._memory.flush_ended(failed=failure is not None)
        while self._held:
            self._memory.retire(*self._held[-1])
            self._held.pop()
        return failure is None

    def flush_wait(self) -> None:
        """Wait for the end of a flush and take over its result; raises the failure of the flush."""
        flush = self._flush
        if flush is None:
            return
        failure = flush.exception()
        self.flush_end()
        if failure is not None:
            raise failure

    def evict(self, wanted: int) -> int:
        """Drop rows that the cold tier has, oldest first; return the bytes retired.

        All memory is given back if all rows are flushed and so many bytes or more are wanted.
        """
        self._poll()
        if self.flushing or not self._memtable.evictable(self.flushed_offset):
            return 0
        self.resident = False
        retired = self._memtable.evict(wanted, self.horizon, self.flushed_offset)
        if not self._memtable.bytes:
            self.order.forget()
        return retired

    # ------------------------------------------------------------------------------- end of life

    def close(self, horizon: int, row_count: int, meta: dict[str, Any] | None = None) -> None:
        """Flush everything below the horizon, then release all memory and files.

        They are released also if the flush fails, which is raised: the log has all changes.
        """
        try:
            self.flush_wait()
            if horizon > self.flushed_offset:
                self.flush_begin(horizon, row_count, meta)
                self.flush_wait()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release all memory and files without a flush; the next start replays the changelog."""
        if self._flush is not None:
            self._flush.exception()
            self.flush_end()
        self._memory.stores.discard(self)
        self._count_dirty(-self.dirty_bytes)
        self._memtable.release()
        self._cold.close()

    def destroy(self) -> None:
        """Release all memory and remove the files."""
        self.abandon()
        self.pins.end()
        self.files.remove_tree(self.directory)
        self.files.sync_directory(self.directory.parent)

    def checkpoint(self, target: Path) -> KvState:
        """Copy the cold tier as hard links to a new directory; return the state of the copy."""
        self._poll()
        if self._flush is not None:
            raise RuntimeError(f"{self!r} is flushing; its files are ahead of its state")
        self._cold.checkpoint(target)
        return self._state

    def pin(self, target: Path) -> KvState:
        """Do as `checkpoint`, but create no directory for a cold tier without rows."""
        if self._cold.empty and self._flush is None:
            return self._state
        return self.checkpoint(target)

    def rewrite_begin(self) -> Future[KvState]:
        """Begin to write all table files again in the present format; counts as a flush."""
        if self._flush is not None:
            raise RuntimeError(f"{self!r} is flushing already")
        self._flush = self._memory.flusher.rewrite(self._cold, self._state)
        return self._flush

    # ----------------------------------------------------------------------------------- inside

    @property
    def _cut(self) -> int:
        """The offset below which only the newest version of a key is still needed."""
        return min(self.horizon, self._flush_horizon)

    def _poll(self) -> None:
        if self._flush is not None:
            self.flush_end()

    def _count_dirty(self, more: int) -> None:
        self.dirty_bytes += more
        self._memory.dirty_bytes += more

    def _retire(self, block: Block) -> None:
        if self._flush is not None:
            self._held.append(block)
        else:
            self._memory.retire(*block)

    def _flush_as_recorded(self) -> None:
        self.flush_begin(self.horizon, self.row_count)

    def _with_cold(
        self,
        keys: Slices,
        hashes: Positions,
        values: Slices,
        *,
        keep: bool,
        bytes_max: int | None = None,
    ) -> Slices:
        """Return values in a new buffer, the unknown ones read from the cold tier."""
        missing = np.flatnonzero(values.starts == UNKNOWN)
        cold_keys = keys.take(missing)
        cold = self._read_cold(cold_keys, bytes_max)
        values = packed(values)
        at = len(values.data)
        values.starts[missing] = np.where(cold.starts >= 0, cold.starts + at, ABSENT)
        values.ends[missing] = cold.ends + at
        if keep:
            self._keep(cold_keys, hashes[missing], cold)
        return values._replace(data=np.concatenate([values.data, cold.data]))

    def _read_cold(self, keys: Slices, bytes_max: int | None) -> Slices:
        names = _names(keys)
        order = sorted(range(len(names)), key=names.__getitem__)
        values: list[bytes | None] = [None] * len(names)
        step = COLD_ROWS if bytes_max is not None else max(len(order), 1)
        for begin in range(0, len(order), step):
            some = order[begin : begin + step]
            for i, value in zip(some, self._cold.get([names[i] for i in some]), strict=True):
                values[i] = value
            if bytes_max is not None:
                bytes_max -= sum(len(value) for i in some if (value := values[i]) is not None)
                _check_room(bytes_max)
        return Slices.of(values)

    def _keep(self, keys: Slices, hashes: Positions, values: Slices) -> None:
        """Write rows of the cold tier to memory if memory has no version of their keys."""
        known, unknown = self._memtable.find(keys, hashes, NEWEST)
        new = np.flatnonzero((known.starts == UNKNOWN) & (values.starts >= 0))
        size = int(np.sum(values.ends[new] - values.starts[new]))
        if not unknown or not len(new) or not self._memory.has_room(size):
            return
        keys, hashes, values = keys.take(new), hashes[new], values.take(new)
        try:
            alloc = self._memory.alloc_at_once
            self._memtable.put(keys, hashes, values, -1, self._cut, alloc)
        except StorageBackpressureError as e:
            log.debug("kv_rows_not_kept", directory=str(self.directory), reason=e.message)

    def _next_keys(
        self, low: bytes, high: bytes | None, count: int
    ) -> tuple[list[bytes], bytes | None]:
        """Return the first keys in [low, high), `count` or a few more, and where to continue."""
        hot = self.order.keys_from(low, high, count)
        cold = [] if self.resident else self._cold.keys_from(low, high, count)
        names = sorted({*hot, *cold})
        ends = [part[-1] for part in (hot, cold) if len(part) == count]
        if not ends:
            return names, None
        last = min(ends)
        return [name for name in names if name <= last], last + b"\0"

    def _values(self, names: list[bytes], horizon: int) -> list[bytes | None]:
        return self.get_at(Slices.of(names), horizon, keep=False).tolist()


def _check_room(bytes_left: int) -> None:
    if bytes_left < 0:
        raise RowsTooLargeError("the rows take more bytes than their reader has room for")


def _names(keys: Slices) -> list[bytes]:
    view = memoryview(keys.data.data)
    return [bytes(view[s:e]) for s, e in zip(keys.starts.tolist(), keys.ends.tolist(), strict=True)]
