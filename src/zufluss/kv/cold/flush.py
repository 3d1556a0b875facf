"""Flushes: rows whose changes are durable in the log are copied from memory to the cold tier.

A flush runs in a thread of its own over a frozen view of a bucket: its index, its segments as far
as they were filled, one horizon. Later writes lie above that horizon, and the bucket neither cleans
nor frees memory during a flush, so the view stays valid. The thread selects the newest version
below the horizon of every key that changed since the last flush, sorts these versions, lets the
flush process write them as one table file, hands the file to RocksDB and writes the state file:

    table file durable → ingested → state file durable → the bucket takes over the new offset

A flush for a scan rests between its pieces while puts arrive (`kv/rest.py`).

A crash in between costs nothing: the old state file is valid, and recovery replays the log from its
offset. Changelogs carry whole rows, so replaying over newer rows ends in the same state.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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
from zufluss.threads import Threads

log = structlog.get_logger(__name__)

OnFlushed = Callable[[], None]
"""Called in the flush thread when a flush has ended, whether it succeeded or not."""

TABLE_FILE = "flush.sst"
"""Name of a table file before the cold tier takes it over."""


@dataclass(frozen=True, slots=True)
class FlushView:
    """A bucket as it was when its flush began."""

    arena: Arena
    root: Positions
    """Root of the index."""
    pieces: tuple[tuple[int, int], ...]
    """Parts of the arena with entries that may have to be flushed: start and end."""
    flushed_offset: int
    """The offset of the last flush."""
    horizon: int
    """The offset of this flush."""

    def rows(self) -> Positions:
        """Return the entries to be flushed, in key order."""
        return sort_by_key(self.arena.data, self._dirty())

    def _dirty(self) -> Positions:
        parts = [np.empty(0, np.int64)]
        for start, end in self.pieces:
            out = np.empty((end - start) // HEADER_BYTES, np.int64)
            count = select(
                self.arena.data, self.root, SEED, start, end, self.flushed_offset, self.horizon, out
            )
            if count < 0:
                raise LogStorageError(f"key-value memory is damaged: segment {start} is not whole")
            parts.append(out[:count].copy())
        return np.concatenate(parts)


def _pieces(arena: Bytes, refs: Positions, rests: Rests) -> Iterator[bytes | memoryview]:
    """Yield rows in the layout of `flush_process.py`."""
    stretch = rests.begin()
    for begin in range(0, len(refs), ROWS_AT_ONCE):
        part = refs[begin : begin + ROWS_AT_ONCE]
        keys, values, ends = spans_of(arena, part)
        data = packed(Slices(arena, keys, np.where(ends < 0, values, ends))).data
        yield PIECE.pack(len(part), len(data))
        yield (values - keys).astype(np.int32).data
        yield np.where(ends < 0, -1, ends - values).astype(np.int32).data
        yield data.data
        stretch = rests.between(stretch)
    yield PIECE.pack(0, 0)


class KvFlusher:
    """The flush thread of a server, and the process that writes table files for it."""

    def __init__(self) -> None:
        self._thread = Threads(1, "zufluss-kv-flush")
        self._process: subprocess.Popen[bytes] | None = None

    def flush(
        self,
        view: FlushView,
        directory: Path,
        cold: ColdTier,
        files: Files,
        state: KvState,
        rests: Rests = NO_PUTS,
    ) -> Future[KvState]:
        """Begin a flush; its result is `state`, which is written at the end."""

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
        """Begin to write a cold tier again in the present format; its result is `state`."""

        def run() -> KvState:
            cold.rewrite()
            return state

        return self._thread.submit(run)

    def stop(self) -> None:
        """Finish the flushes that were begun, then end the process. Blocks."""
        self._thread.shutdown()
        self._end_process()

    @property
    def process_id(self) -> int | None:
        """Process id of the flush process, None while none runs."""
        return self._process.pid if self._process is not None else None

    def _write(
        self, table: Path, arena: Bytes, rows: Positions, files: Files, rests: Rests
    ) -> None:
        """Let the process write a table file; a process that dies is replaced once."""
        for attempt in (1, 2):
            files.unlink_if_there(table)
            try:
                answer = self._ask(table, arena, rows, rests)
            except OSError as e:
                answer = f"the flush process is gone: {e}"
            except BaseException:
                self._end_process()  # it waits for the rest of a request that will not come
                raise
            if answer == "done":
                return
            self._end_process()
            log.warning("kv_table_not_written", table=str(table), attempt=attempt, reason=answer)
        raise LogStorageError(
            f"{table} could not be written: {answer}. Nothing is lost, the log has all changes; "
            "check the space and the permissions of the directory"
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
