"""Flushes: what is durable in the log goes from memory to the cold tier, beside everything else.

A flush runs in a thread of its own over a frozen view of a bucket: the index as it was, the
segments as far as they were filled, one horizon. Whatever is written meanwhile lies above that
horizon, and the bucket neither cleans nor gives memory back while it is read, so the view stays
true. The thread picks the newest version below the horizon of every key that changed since the last
flush, sorts them, has the flush process write them as one table file, hands that to RocksDB and
records the new state:

    table file durable → ingested → state file durable → the bucket goes on from the new offset

A flush that a scan waits for rests between its pieces where puts come (`zufluss.kv.rest`).

A crash in between costs nothing: the old state file stands, the log is replayed from its offset,
and since changelogs carry whole rows, replaying over newer rows ends in the same state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog
from crc32c import crc32c

from zufluss.errors import LogStorageError
from zufluss.kv.cold.flush_process import LENGTH, PIECE, ROWS_AT_ONCE
from zufluss.kv.cold.rocks import ColdTier
from zufluss.kv.hot import kernels, sorting
from zufluss.kv.hot.arena import Arena
from zufluss.kv.hot.memtable import SEED
from zufluss.kv.rest import NO_PUTS, Rests
from zufluss.log.files import Files
from zufluss.record.slices import Bytes, Positions, Slices

log = structlog.get_logger(__name__)

STATE_FILE = "state.json"
"""Name of the state file in a bucket's directory."""

TABLE_FILE = "flush.sst"
"""A table on its way to the cold tier."""

STATE_VERSION = 1
"""Of the state file."""


class KvState(NamedTuple):
    """What the cold tier of a bucket holds."""

    flushed_offset: int = 0
    """Every change below this log offset is in it."""
    row_count: int = 0
    """Rows as of that offset."""
    meta: dict[str, Any] = {}  # noqa: RUF012
    """What the owner keeps with it."""


def read_state(directory: Path) -> KvState:
    """The recorded state of a bucket; a bucket without one is empty."""
    path = directory / STATE_FILE
    try:
        found = json.loads(path.read_bytes())
        crc = found.pop("crc32c")
        whole = crc == crc32c(_canonical(found)) and found.pop("version") == STATE_VERSION
    except FileNotFoundError:
        return KvState()
    except (ValueError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise LogStorageError(
            f"{path} is damaged or of another version: expected version {STATE_VERSION} with a "
            "matching checksum. Restore it from a backup, or remove the directory to rebuild the "
            "state from a changelog that is still complete"
        )
    return KvState(**found)


def write_state(files: Files, directory: Path, state: KvState) -> None:
    """Replace the state file; durable when it returns."""
    content = {"version": STATE_VERSION, **state._asdict()}
    content["crc32c"] = crc32c(_canonical(content))
    fresh = directory / f"{STATE_FILE}.new"
    files.put(fresh, json.dumps(content).encode(), sync=True)
    files.rename(fresh, directory / STATE_FILE)
    files.sync_directory(directory)


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class View:
    """A bucket as it was when its flush began."""

    arena: Arena
    root: Positions
    """Its index."""
    pieces: tuple[tuple[int, int], ...]
    """Where entries lie that may have to be flushed."""
    flushed_offset: int
    """What the cold tier has."""
    horizon: int
    """What it is to have."""

    def rows(self) -> Positions:
        """The entries to be flushed, in the order of their keys."""
        return sort_by_key(self.arena.data, self._dirty())

    def _dirty(self) -> Positions:
        found = [np.empty(0, np.int64)]
        for start, end in self.pieces:
            out = np.empty((end - start) // kernels.HEADER_BYTES, np.int64)
            count = kernels.select(
                self.arena.data, self.root, SEED, start, end, self.flushed_offset, self.horizon, out
            )
            if count < 0:
                raise LogStorageError(f"key-value memory is damaged: segment {start} is not whole")
            found.append(out[:count].copy())
        return np.concatenate(found)


def sort_by_key(arena: Bytes, refs: Positions) -> Positions:
    """Entries in the order of their keys."""
    keys = np.empty(len(refs), np.int64)
    if sorting.prefixes(arena, refs, keys) < 0:
        raise LogStorageError("key-value memory is damaged: an entry to be sorted is not whole")
    order = np.argsort(keys, kind="stable")
    refs, keys = refs[order], keys[order]
    sorting.sort_ties(arena, refs, keys, np.empty(len(refs), np.int64))
    return refs


def _pieces(arena: Bytes, refs: Positions, rests: Rests) -> Iterator[bytes | memoryview]:
    """Rows as the flush process takes them."""
    stretch = rests.begin()
    for begin in range(0, len(refs), ROWS_AT_ONCE):
        part = refs[begin : begin + ROWS_AT_ONCE]
        starts, middles, ends = spans_of(arena, part)
        data = copied(Slices(arena, starts, np.where(ends < 0, middles, ends))).data
        yield PIECE.pack(len(part), len(data))
        yield (middles - starts).astype(np.int32).data
        yield np.where(ends < 0, -1, ends - middles).astype(np.int32).data
        yield data.data
        stretch = rests.between(stretch)
    yield PIECE.pack(0, 0)


def spans_of(arena: Bytes, refs: Positions) -> tuple[Positions, Positions, Positions]:
    """Where the keys of entries begin, their values begin, and end (−1: deleted)."""
    out = np.empty(3 * len(refs), np.int64)
    if sorting.spans(arena, refs, out) < 0:
        raise LogStorageError("key-value memory is damaged: an entry to be copied is not whole")
    starts, middles, ends = np.ascontiguousarray(out.reshape(-1, 3).T)
    return starts, middles, ends


def copied(slices: Slices) -> Slices:
    """Byte strings in a buffer of their own, one behind the other; absent ones stay absent."""
    present = slices.starts >= 0
    sizes = np.where(present, slices.ends - slices.starts, 0)
    ends = np.cumsum(sizes)
    out = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    if sorting.copy_out(slices.data, slices.starts, slices.ends, out) < 0:
        raise ValueError(f"a byte string leaves its {len(slices.data)} bytes")
    return Slices(out, np.where(present, ends - sizes, slices.starts), ends)


class Flusher:
    """The thread that flushes, and the process it has write table files."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-flush")
        self._process: subprocess.Popen[bytes] | None = None

    def flush(
        self,
        view: View,
        directory: Path,
        cold: ColdTier,
        files: Files,
        state: KvState,
        rests: Rests = NO_PUTS,
    ) -> Future[KvState]:
        """Begin a flush; the result is the state that is recorded when it is done."""

        def run() -> KvState:
            stretch = rests.begin()
            rows = view.rows()
            rests.wait_until(rests.end(stretch))
            if len(rows):
                table = directory / TABLE_FILE
                self._write(table, view.arena.data, rows, files, rests)
                cold.ingest(table)
            write_state(files, directory, state)
            return state

        return self._thread.submit(run)

    def rewrite(self, cold: ColdTier, state: KvState) -> Future[KvState]:
        """Begin to write a cold tier again in the present format; its state stays."""

        def run() -> KvState:
            cold.rewrite()
            return state

        return self._thread.submit(run)

    def stop(self) -> None:
        """Finish the flushes that were begun, end the process. Blocks."""
        self._thread.shutdown()
        self._end_process()

    @property
    def process_id(self) -> int | None:
        """Of the flush process, None while there is none."""
        return self._process.pid if self._process is not None else None

    def _write(
        self, table: Path, arena: Bytes, rows: Positions, files: Files, rests: Rests
    ) -> None:
        """Have a table written; a process that dies over it is replaced once."""
        for attempt in (1, 2):
            files.unlink_if_there(table)
            try:
                answer = self._ask(table, arena, rows, rests)
            except OSError as e:
                answer = f"the flush process is gone: {e}"
            if answer == "done":
                return
            self._end_process()
            log.warning("kv_table_not_written", table=str(table), attempt=attempt, reason=answer)
        raise LogStorageError(
            f"{table} could not be written: {answer}. Nothing is lost, the log has it all; check "
            "the space and the permissions of the directory"
        )

    def _ask(self, table: Path, arena: Bytes, rows: Positions, rests: Rests) -> str:
        process = self._process
        if process is None:
            command = [sys.executable, "-m", "zufluss.kv.cold.flush_process"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        path = os.fsencode(table.resolve())
        process.stdin.write(LENGTH.pack(len(path)) + path)
        for part in _pieces(arena, rows, rests):
            process.stdin.write(part)
        process.stdin.flush()
        answer = process.stdout.readline()
        return answer.decode().strip() or f"exit status {process.wait()}"

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError as e:
                log.debug("kv_flush_pipe_closed", reason=str(e))
        process.wait()


Done = Callable[[], None]
"""Called in the flush thread when a flush has ended, one way or the other."""
