"""Pages of pinned states: the server's side of the scan processes (`process.py`).

Each scan process has a thread that sends one request at a time and receives the answer. The thread
needs the GIL for a few microseconds per page, since the operating system copies the data of a pipe.
All pages of a state are read by the same process, which has its files open.

While puts arrive the thread rests between two pages (`kv/rest.py`). It rests after the answer, so
that a reader of few rows does not wait.

Processes are started when they are first needed. A process that dies is replaced and gets the same
request again: a pinned state does not change, so a page can be read any number of times.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog

from zufluss import system
from zufluss.errors import LogStorageError
from zufluss.kv.rest import NO_PUTS, Rests
from zufluss.kv.scan.process import (
    ANSWER,
    CLOSE,
    FAILURE,
    LAST_ROWS,
    NONE,
    READ,
    Request,
    pack_request,
)
from zufluss.record.slices import Bytes, Slices
from zufluss.threads import Threads

log = structlog.get_logger(__name__)

PROCESSES = (2, 4)
"""Scan processes of a server, at least and at most; within that, one for two processors. With two,
a long run of deleted rows in one state does not hold up all others."""

PIPE_BYTES = 1 << 20
"""Size of the pipe from a process: the process reads on while the server receives."""

TRIES = 2
"""Attempts to read a page if the process dies."""


class Page(NamedTuple):
    """Consecutive rows in the order of their keys."""

    values: Slices
    """Stored values (schema id and row), one behind the other in a buffer of their own."""
    last_key: bytes | None
    """Key of the last row, for the next page; None if there are no rows."""
    done: bool
    """No rows come after this page."""


EMPTY = Page(Slices.of([]), None, True)
"""The page of a state without rows."""


class Scanner:
    """The scan processes of a server. One thread calls it; results arrive in other threads."""

    def __init__(self, processes: int | None = None, rests: Rests = NO_PUTS) -> None:
        least, most = PROCESSES
        count = processes or min(max((os.cpu_count() or 1) // 2, least), most)
        self._processes = [ScanProcess(rests) for _ in range(count)]
        self._reader: dict[Path, ScanProcess] = {}
        """The process that has a state open."""

    def read(
        self, state: Path, after: bytes | None, until: bytes | None, rows: int, size: int
    ) -> Future[Page]:
        """Begin to read the rows of a database behind key `after`, up to and including `until`.

        The page has at least one row if there is one; it ends with `rows` rows or `size` bytes of
        values. The future raises `LogStorageError` if the files cannot be read.
        """
        if rows < 1:
            raise ValueError(f"a page of {rows} rows cannot be read; a page has at least 1")
        process = self._reader.get(state)
        if process is None:
            process = min(self._processes, key=lambda p: p.states)
            self._reader[state] = process
            process.states += 1
        return process.read(Request(READ, str(state), after, until, rows, size))

    def close(self, state: Path) -> Future[None]:
        """Close the files of a database after the pages that were requested before."""
        process = self._reader.pop(state, None)
        if process is None:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        process.states -= 1
        return process.close(str(state))

    def stop(self) -> None:
        """End the processes; reads under way fail. Blocks."""
        for process in self._processes:
            process.stop()

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the scan processes that run."""
        return [p.process_id for p in self._processes if p.process_id is not None]


class ScanProcess:
    """One scan process and the thread that talks to it."""

    def __init__(self, rests: Rests) -> None:
        self.states = 0
        """Number of databases that this process reads."""
        self._rests = rests
        self._rest_until = 0.0
        self._thread = Threads(1, "zufluss-scan-pipe")
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    @property
    def process_id(self) -> int | None:
        """Process id, None while no process runs."""
        process = self._process
        return None if process is None else process.pid

    def read(self, request: Request) -> Future[Page]:
        """Begin to read a page."""
        return self._thread.submit(self._read, request)

    def close(self, path: str) -> Future[None]:
        """Close a database after the requests made before."""
        return self._thread.submit(self._close, Request(CLOSE, path, None, None, 0, 0))

    def stop(self) -> None:
        """Kill the process and end the thread. Blocks."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._end_process()

    def _read(self, request: Request) -> Page:
        self._rests.wait_until(self._rest_until)
        stretch = self._rests.begin()
        try:
            return self._page(request)
        finally:
            self._rest_until = self._rests.end(stretch)

    def _page(self, request: Request) -> Page:
        for attempt in range(1, TRIES + 1):
            if self._stopped:
                break
            try:
                return self._ask(request)
            except LogStorageError:  # the process answered
                raise
            except (EOFError, OSError) as e:  # the process died or could not be started
                status = self._end_process()
                log.warning(
                    "kv_scan_process_gone", state=request.path, attempt=attempt, status=status,
                    reason=str(e),
                )  # fmt: skip
            except BaseException:
                self._end_process()  # the rest of its answer would look like the next answer
                raise
        raise LogStorageError(
            f"{request.path} could not be read: "
            + ("the server stops" if self._stopped else "the scan process died twice")
        )

    def _ask(self, request: Request) -> Page:
        source = self._send(request)
        outcome, rows, size, key_size = ANSWER.unpack(_received(source, ANSWER.size).data)
        key = None if key_size == NONE else _received(source, key_size).tobytes()
        lengths = _received(source, 4 * rows).view(np.int32)
        data = _received(source, size)
        if outcome == FAILURE:
            raise LogStorageError(
                f"{request.path} could not be read: {data.tobytes().decode(errors='replace')}. "
                "Check the disk; open the scan again for another copy of the files"
            )
        offsets = np.zeros(rows + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Page(Slices.contiguous(data, offsets), key, outcome == LAST_ROWS)

    def _close(self, request: Request) -> None:
        if self._process is None:
            return  # no process, no open files
        try:
            self._send(request)
        except BrokenPipeError:
            self._end_process()

    def _send(self, request: Request) -> int:
        """Send a request; return the descriptor to read the answer from."""
        process = self._process
        if process is None:
            command = [sys.executable, "-m", "zufluss.kv.scan.process"]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            self._process = process
            if self._stopped:  # `stop` came too early to see this process
                process.kill()
            _widen(process)
        assert process.stdin is not None
        assert process.stdout is not None
        message = memoryview(pack_request(request))
        while message:
            message = message[process.stdin.write(message) :]
        return process.stdout.fileno()

    def _end_process(self) -> int | None:
        """End the process if one runs; return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        return process.wait()


def _widen(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    try:
        system.widen_pipe(process.stdout.fileno(), PIPE_BYTES)
    except OSError as e:  # the limit of large pipes is reached; a small one works too
        log.info("kv_scan_pipe_small", reason=str(e))


def _received(source: int, size: int) -> Bytes:
    """Receive `size` bytes of an answer; raises `EOFError` if the process ends before."""
    buffer = np.empty(size, np.uint8)
    view = buffer.data
    while len(view):
        count = os.readv(source, [view])
        if not count:
            raise EOFError(f"the answer ends {len(view)} of {size} bytes early")
        view = view[count:]
    return buffer
