"""Has lake tables created, from within a server: the other end of `process.py`.

A catalog may be slow, down, or need a library that holds the GIL for seconds. So a process of its
own asks it; this end only waits, on the event loop, and not for ever. It imports no lake library,
and it is the one module of this package that servers import.

`prepare` has three outcomes: the lake table is there and fits (None), it cannot be there (a typed
error), or nobody here can know (a text that says why). After the last one the table appears with
the first round of the tiering service, or when `prepare` is called again.

Calls take turns: the process has one at a time. A call that takes longer than its limit costs the
process, which is killed; the catalog may still carry the call out. That is harmless, because an
empty lake table of a table that does not exist gives way to the next one of its name.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import structlog

from zufluss.errors import InvalidTableError, LakeTableAlreadyExistError
from zufluss.model.table import TableInfo

log = structlog.get_logger(__name__)

LENGTH: Final = struct.Struct("<I")
"""The length of a request or answer, before it."""
DONE: Final = "done"
INVALID: Final = "invalid"
TAKEN: Final = "taken"
ABSENT: Final = "absent"
START_LIMIT_S: Final = 120
"""How long the process may import its libraries, on the busiest machine."""

_UNANSWERED: Final = (OSError, asyncio.IncompleteReadError)  # TimeoutError is an OSError, too


class LakeTableCreator:
    """Creates and alters lake tables in a process of its own, one at a time."""

    def __init__(self, command: tuple[str, ...] = ("-m", "zufluss.lake.process")) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._stopped = asyncio.Event()

    @property
    def process_id(self) -> int | None:
        """Process id, None while no process runs."""
        return None if self._process is None else self._process.pid

    async def warm(self) -> None:
        """Start the process, which imports its libraries before they are needed."""
        async with self._turn:
            try:
                await self._started()
            except _UNANSWERED as problem:
                log.warning("lake_process_not_started", error=repr(problem))
                self._end()

    async def prepare(
        self, table: TableInfo, format: str, properties: Mapping[str, str], limit_ms: int
    ) -> str | None:
        """Create the lake table, or alter it to fit; returns why it is not there, if it is not.

        Raises `InvalidTableError` if the format can never hold the table, and
        `LakeTableAlreadyExistError` if another lake table has its name.
        """
        async with self._turn:
            outcome, text = await self._asked((format, dict(properties), table), limit_ms)
        if outcome == INVALID:
            raise InvalidTableError(text)
        if outcome == TAKEN:
            raise LakeTableAlreadyExistError(text)
        return None if outcome == DONE else text

    async def stop(self) -> None:
        """End the process; a call under way fails."""
        self._stopped.set()
        process = self._process
        self._end()
        if process is not None:
            await process.wait()

    async def _asked(self, request: object, limit_ms: int) -> tuple[str, str]:
        try:
            process = await self._started()
            async with asyncio.timeout(limit_ms / 1000):
                return await _answer(process, request)
        except TimeoutError:
            self._end()
            return ABSENT, f"the lake's catalog did not answer within {limit_ms} ms"
        except _UNANSWERED as problem:
            self._end()
            return ABSENT, f"the process that asks the lake's catalog ended ({problem})"
        except BaseException:
            self._end()  # its answer would be taken for the next one's
            raise

    async def _started(self) -> asyncio.subprocess.Process:
        """The process, with its libraries imported: that does not count as the catalog's time."""
        if self._stopped.is_set():
            raise OSError("the server stops")
        if self._process is None or self._process.returncode is not None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            if self._stopped.is_set():  # meanwhile: `stop` has not seen the process
                self._end()
                await process.wait()
                raise OSError("the server stops")
            async with asyncio.timeout(START_LIMIT_S):
                await _answer(self._process, None)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()

    def __repr__(self) -> str:
        return f"LakeTableCreator(process_id={self.process_id})"


async def _answer(process: asyncio.subprocess.Process, request: object) -> tuple[str, str]:
    """Send a request and return its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    data = pickle.dumps(request)
    process.stdin.write(LENGTH.pack(len(data)) + data)
    await process.stdin.drain()
    [size] = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    answer: tuple[str, str] = pickle.loads(await process.stdout.readexactly(size))
    return answer
