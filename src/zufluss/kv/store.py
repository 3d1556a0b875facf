"""The rows of one bucket by key: the newest in memory, all of them on disk.

Two tiers under one interface: versions in memory (`hot/memtable.py`), flushed rows in RocksDB
(`cold/rocks.py`). Every write carries the log offset of its batch, and a reader gives a horizon,
the high watermark: it sees the newest version below it, so nothing that might still be lost, and
everything that was acknowledged. What holds at any time:

* a version at or above `flushed_offset` that somebody may still see is in memory;
* a key that memory does not answer for a horizon is in the cold tier as it is to be answered;
* while `resident`, everything in the cold tier is in memory too, and no answer means no row.

Nothing here is a log: after a crash the state is what the last flush recorded, and the owner
replays the changelog from `flushed_offset`.

One thread, the key-value worker, owns a store. The event loop sets `horizon` and calls `answer`,
which never waits: what is not in memory is answered by the worker (`get_at`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog

from zufluss.kv.cold.checkpoint import COLD_DIRECTORY, remove_left_overs
from zufluss.kv.cold.flush import TABLE_FILE, Done, View
from zufluss.kv.cold.rocks import ColdTier
from zufluss.kv.cold.state import STATE_FILE, KvState, read_state
from zufluss.kv.hot.answer import answer_lookup
from zufluss.kv.hot.entries import NEWEST
from zufluss.kv.hot.index import UNKNOWN
from zufluss.kv.hot.memtable import SEED, Block, Memtable, group_keys, hash_keys
from zufluss.kv.hot.order import KeyOrder, successor
from zufluss.kv.hot.sorting import packed
from zufluss.kv.memory import KvMemory
from zufluss.kv.rest import NO_PUTS, Rests
from zufluss.kv.scan.pins import PINS_DIRECTORY, PinDirectory
from zufluss.log.files import Files
from zufluss.record.slices import ABSENT, Bytes, Positions, Slices

__all__ = ["KvStore", "group_keys", "hash_keys"]

log = structlog.get_logger(__name__)

PREFIX_ROWS_MAX = 1 << 20
"""Keys that one prefix may match."""

SCAN_ROWS = 4096
"""Keys that a scan looks at in one step."""


class LookupPlaces(NamedTuple):
    """Where the keys of lookups lie in their requests, and room for where their values lie."""

    starts: Positions
    ends: Positions
    begins: Positions
    behinds: Positions

    @classmethod
    def of(cls, count: int) -> LookupPlaces:
        """Places for so many keys."""
        return cls(*(np.empty(count, np.int64) for _ in range(4)))


class KvStore:
    """One bucket."""

    def __init__(self, directory: Path, memory: KvMemory, files: Files, state: KvState) -> None:
        self.directory = directory
        self.horizon = state.flushed_offset
        """The high watermark, set by the event loop; it never goes back."""
        self.dirty_bytes = 0
        """Bytes written to memory since the last flush."""
        self.flush_wanted: Callable[[], None] = self._flush_as_recorded
        """Begins a flush when memory is short; the owner, who knows the row count, replaces it."""
        self._state = state
        self._memory = memory
        self.files = files
        self._flush: Future[KvState] | None = None
        self._flush_horizon = NEWEST
        self._flush_bytes = 0
        self._held: list[Block] = []
        self._cold = ColdTier(directory / COLD_DIRECTORY)
        self.resident = self._cold.empty
        """Everything in the cold tier is in memory too. Once lost, lost until the next start."""
        self._memtable = Memtable(memory.arena, memory.alloc, self._retire)
        self._order = KeyOrder(self._memtable)
        self.pins = PinDirectory(directory / PINS_DIRECTORY, files)
        """States of the bucket that are kept as they were."""
        memory.stores.add(self)

    @classmethod
    def open(cls, directory: Path, memory: KvMemory, files: Files) -> KvStore:
        """Open a bucket as its last flush left it; the directory is made if it is missing."""
        for parent in files.make_directories(directory):
            files.sync_directory(parent)
        for left_over in (TABLE_FILE, f"{STATE_FILE}.new"):
            files.unlink_if_there(directory / left_over)
        remove_left_overs(files, directory)
        store = cls(directory, memory, files, read_state(directory))
        store.pins.remove_unfinished()
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
        """What the owner had recorded with the last flush."""
        return self._state.meta

    @property
    def memory_bytes(self) -> int:
        """Memory taken."""
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
        """Write the answer to a lookup of the first `count` places; its size.

        Negative if it does not fit or the cold tier has to be asked.
        """
        memtable = self._memtable
        size: int = answer_lookup(
            memtable.arena.data, memtable.root, SEED, buf, places.starts, places.ends, count,
            horizon, self.resident, partition, bucket, places.begins, places.behinds, out,
        )  # fmt: skip
        return size

    # ---------------------------------------------------------------------------- by the worker

    def get(self, keys: Slices, hashes: Positions) -> Slices:
        """The newest values of keys, good until the next read or write of any store.

        What had to be read from the cold tier is not kept: who asks is about to write these keys.
        """
        self._poll()
        found, unknown = self._memtable.find(keys, hashes, NEWEST)
        if not unknown:
            return found
        if self.resident:
            np.maximum(found.starts, ABSENT, out=found.starts)
            return found
        return self._with_cold(keys, hashes, found, keep=False)

    def get_at(self, keys: Slices, horizon: int, *, keep: bool = True) -> Slices:
        """Values below the horizon, in a buffer of their own; `keep` what was cold in memory."""
        self._poll()
        hashes = hash_keys(keys)
        found, unknown = self._memtable.find(keys, hashes, max(horizon, self.horizon))
        if unknown and not self.resident:
            return self._with_cold(keys, hashes, found, keep=keep)
        np.maximum(found.starts, ABSENT, out=found.starts)
        return packed(found)

    def put(self, keys: Slices, hashes: Positions, values: Slices, offset: int) -> None:
        """Write versions under a log offset; an absent value deletes.

        Each key at most once. The values must not lie in the arena: making room may move it.
        """
        self._poll()
        if values.data is self._memory.arena.data:
            raise ValueError("values to be put lie in the arena; copy them out first")
        written = self._memtable.put(keys, hashes, values, offset, self._cut)
        self.dirty_bytes += written
        if not self.flushing:
            self._memtable.clean_some(written, self.horizon, self.flushed_offset)

    def prefix(self, prefixes: Slices, horizon: int) -> list[Slices]:
        """For each prefix the values of all keys that begin with it, in the order of the keys."""
        return [self._prefix(prefix or b"", horizon) for prefix in prefixes.tolist()]

    def scan(
        self, after: bytes | None, limit_rows: int, limit_bytes: int, horizon: int
    ) -> tuple[Slices, Slices]:
        """The next keys behind `after` (None: from the first) and their values, in order.

        At least one row if there is one, then no more than the limits; no rows: the end.
        """
        keys: list[bytes] = []
        values: list[bytes] = []
        low: bytes | None = b"" if after is None else after + b"\0"
        while low is not None and limit_rows and limit_bytes > 0:
            names, low = self._next_keys(low)
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
        """A flush was begun and its end not yet taken notice of."""
        return self._flush is not None

    def flush_begin(
        self,
        horizon: int,
        row_count: int,
        meta: dict[str, Any] | None = None,
        done: Done | None = None,
        rests: Rests = NO_PUTS,
    ) -> None:
        """Begin to move everything below the horizon to the cold tier; returns at once.

        `row_count` is that at the horizon, `meta` is recorded with it (None: as before). `done` is
        called in the flush thread at the end; `flush_end` by the worker, or its next read or write,
        then takes notice.
        """
        if self._flush is not None:
            raise RuntimeError(f"{self!r} is flushing already")
        state = KvState(
            max(horizon, self.flushed_offset), row_count, self.meta if meta is None else meta
        )
        dirty = (s for s in self._memtable.segments if s.newest >= self.flushed_offset)
        view = View(
            self._memory.arena, self._memtable.root, tuple((s.start, s.used) for s in dirty),
            self.flushed_offset, state.flushed_offset,
        )  # fmt: skip
        self._flush_horizon, self._flush_bytes = state.flushed_offset, self.dirty_bytes
        flush = self._memory.flusher.flush
        self._flush = flush(view, self.directory, self._cold, self.files, state, rests)
        if done is not None:
            self._flush.add_done_callback(lambda _: done())

    @property
    def flush_under_way(self) -> Future[KvState] | None:
        """The flush that was begun, None if there is none."""
        return self._flush

    def flush_end(self) -> bool:
        """Take notice of a flush that has ended; whether it moved `flushed_offset`.

        One that failed changes nothing: it is logged, and the next one tries again.
        """
        if self._flush is None or not self._flush.done():
            return False
        failure = self._flush.exception()
        if failure is None:
            self._state = self._flush.result()
            self.dirty_bytes -= self._flush_bytes
        else:
            log.error("kv_flush_failed", directory=str(self.directory), error=str(failure))
        self._flush, self._flush_horizon = None, NEWEST
        held, self._held = self._held, []
        for block in held:
            self._memory.retire(*block)
        return failure is None

    def flush_wait(self) -> None:
        """Wait for the end of a flush and take notice of it; raises why it failed."""
        flush = self._flush
        if flush is None:
            return
        failure = flush.exception()
        self.flush_end()
        if failure is not None:
            raise failure

    def evict(self, wanted: int) -> int:
        """Drop rows that the cold tier has, oldest first, to free memory; bytes retired."""
        self._poll()
        if self.flushing or not self._memtable.evictable(self.flushed_offset):
            return 0
        self.resident = False
        return self._memtable.evict(wanted, self.horizon, self.flushed_offset)

    # ------------------------------------------------------------------------------- end of life

    def close(self, horizon: int, row_count: int, meta: dict[str, Any] | None = None) -> None:
        """Flush everything below the horizon and let go of all memory and files."""
        self.flush_wait()
        if horizon > self.flushed_offset:
            self.flush_begin(horizon, row_count, meta)
            self.flush_wait()
        self.abandon()

    def abandon(self) -> None:
        """Let go of all memory and files; the next start replays what was not flushed."""
        if self._flush is not None:
            self._flush.exception()
            self.flush_end()
        self._memory.stores.discard(self)
        self._memtable.release()
        self._cold.close()

    def destroy(self) -> None:
        """Let go of everything and remove the files."""
        self.abandon()
        self.pins.end()
        self.files.remove_tree(self.directory)
        self.files.sync_directory(self.directory.parent)

    def checkpoint(self, target: Path) -> KvState:
        """Copy the cold tier as hard links to a directory that is not there; what it holds."""
        self._poll()
        if self._flush is not None:
            raise RuntimeError(f"{self!r} is flushing; its files are ahead of its state")
        self._cold.checkpoint(target)
        return self._state

    def pin(self, target: Path) -> KvState:
        """As `checkpoint`, but a cold tier without rows makes no directory."""
        if self._cold.empty and self._flush is None:
            return self._state
        return self.checkpoint(target)

    def rewrite_begin(self) -> Future[KvState]:
        """Begin to write the cold tier again, all in the present format; counts as a flush."""
        if self._flush is not None:
            raise RuntimeError(f"{self!r} is flushing already")
        self._flush_bytes = 0
        self._flush = self._memory.flusher.rewrite(self._cold, self._state)
        return self._flush

    # ----------------------------------------------------------------------------------- inside

    @property
    def _cut(self) -> int:
        """Below this, only the newest version of a key is still of use to anybody."""
        return min(self.horizon, self._flush_horizon)

    def _poll(self) -> None:
        if self._flush is not None:
            self.flush_end()

    def _retire(self, block: Block) -> None:
        if self._flush is not None:
            self._held.append(block)
        else:
            self._memory.retire(*block)

    def _flush_as_recorded(self) -> None:
        self.flush_begin(self.horizon, self.row_count)

    def _with_cold(self, keys: Slices, hashes: Positions, found: Slices, *, keep: bool) -> Slices:
        """Fill in what memory does not know, in a buffer of its own."""
        missing = np.flatnonzero(found.starts == UNKNOWN)
        wanted = keys.take(missing)
        cold = self._read_cold(wanted)
        found = packed(found)
        at = len(found.data)
        found.starts[missing] = np.where(cold.starts >= 0, cold.starts + at, ABSENT)
        found.ends[missing] = cold.ends + at
        if keep:
            self._keep(wanted, hashes[missing], cold)
        return found._replace(data=np.concatenate([found.data, cold.data]))

    def _read_cold(self, keys: Slices) -> Slices:
        names = _names(keys)
        order = sorted(range(len(names)), key=names.__getitem__)
        values: list[bytes | None] = [None] * len(names)
        answers = self._cold.get([names[i] for i in order])
        for i, answer in zip(order, answers, strict=True):
            values[i] = answer
        return Slices.of(values)

    def _keep(self, keys: Slices, hashes: Positions, values: Slices) -> None:
        """Hold rows of the cold tier in memory, those of which memory has no version at all."""
        _, unknown = known = self._memtable.find(keys, hashes, NEWEST)
        new = np.flatnonzero((known[0].starts == UNKNOWN) & (values.starts >= 0))
        size = int(np.sum(values.ends[new] - values.starts[new]))
        if unknown and len(new) and self._memory.has_room(size):
            self._memtable.put(keys.take(new), hashes[new], values.take(new), -1, self._cut)

    def _prefix(self, prefix: bytes, horizon: int) -> Slices:
        high = successor(prefix)
        names = set(self._order.keys_from(prefix, high, PREFIX_ROWS_MAX))
        if not self.resident:
            names.update(self._cold.keys_from(prefix, high, PREFIX_ROWS_MAX))
        found = self.get_at(Slices.of(sorted(names)), horizon, keep=False)
        return found.take(np.flatnonzero(found.starts >= 0))

    def _next_keys(self, low: bytes) -> tuple[list[bytes], bytes | None]:
        """Some keys from `low` on, and where to go on; None at the end."""
        hot = self._order.keys_from(low, None, SCAN_ROWS)
        cold = [] if self.resident else self._cold.keys_from(low, None, SCAN_ROWS)
        names = sorted({*hot, *cold})
        ends = [part[-1] for part in (hot, cold) if len(part) == SCAN_ROWS]
        if not ends:
            return names, None
        last = min(ends)
        return [name for name in names if name <= last], last + b"\0"

    def _values(self, names: list[bytes], horizon: int) -> list[bytes | None]:
        return self.get_at(Slices.of(names), horizon, keep=False).tolist()


def _names(keys: Slices) -> list[bytes]:
    view = memoryview(keys.data.data)
    return [bytes(view[s:e]) for s, e in zip(keys.starts.tolist(), keys.ends.tolist(), strict=True)]
