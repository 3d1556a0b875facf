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

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from zufluss.errors import LogStorageError
from zufluss.kv.cold.flush_process import LENGTH, PIECE, ROWS_AT_ONCE
from zufluss.kv.cold.rocks import ColdTier
from zufluss.kv.cold.state import KvState, write_state
from zufluss.kv.hot.arena import Arena
from zufluss.kv.hot.entries import HEADER_BYTES
from zufluss.kv.hot.memtable import SEED
from zufluss.kv.hot.segments import select
from zufluss.kv.hot.sorting import packed, sort_by_key, spans_of
from zufluss.kv.rest import NO_PUTS, Rests
from zufluss.log.files import Files
from zufluss.record.slices import Bytes, Positions, Slices

log = structlog.get_logger(__name__)

TABLE_FILE = "flush.sst"
"""A table on its way to the cold tier."""


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
            out = np.empty((end - start) // HEADER_BYTES, np.int64)
            count = select(
                self.arena.data, self.root, SEED, start, end, self.flushed_offset, self.horizon, out
            )
            if count < 0:
                raise LogStorageError(f"key-value memory is damaged: segment {start} is not whole")
            found.append(out[:count].copy())
        return np.concatenate(found)


def _pieces(arena: Bytes, refs: Positions, rests: Rests) -> Iterator[bytes | memoryview]:
    """Rows as the flush process takes them."""
    stretch = rests.begin()
    for begin in range(0, len(refs), ROWS_AT_ONCE):
        part = refs[begin : begin + ROWS_AT_ONCE]
        starts, middles, ends = spans_of(arena, part)
        data = packed(Slices(arena, starts, np.where(ends < 0, middles, ends))).data
        yield PIECE.pack(len(part), len(data))
        yield (middles - starts).astype(np.int32).data
        yield np.where(ends < 0, -1, ends - middles).astype(np.int32).data
        yield data.data
        stretch = rests.between(stretch)
    yield PIECE.pack(0, 0)


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
