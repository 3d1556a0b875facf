"""Rows that writers have taken and no server has acknowledged: where they are kept and reported.

No row is lost quietly. A writer is in `UNSETTLED` while it has unacknowledged rows or a failure
that nobody was told, which keeps a writer alive that the user dropped. Its rows are sent in the
background, and what becomes of the rest is told by the first of these:

| who | rows that cannot be sent |
|---|---|
| the next `write`, `flush` or `close` of the writer | an error |
| `close` of the connection, or the end of its block | `UnsentRowsError` |
| an exception that leaves the block of a writer or connection | a note on the exception |
| the end of the event loop (`asyncio.run`) | `UnsentRowsWarning` |
| the end of the interpreter (`sync/exit.py`) | `UnsentRowsWarning` on stderr |

A forked process sends nothing of its parent, and its writers refuse rows: the loop that would send
them runs in the parent.

Where an exception or an exit has already ended the user's work, sending ends after
`LAST_FLUSH_MS`. A normal `close` waits as long as any flush does.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from typing import Final, Protocol
from weakref import WeakSet

from zufluss.errors import UnsentRowsError, UnsentRowsWarning
from zufluss.system import after_fork_in_child

LAST_FLUSH_MS: Final = 10_000
"""How long rows are still sent after an exception, or at the end of the loop or interpreter."""

warnings.simplefilter("always", UnsentRowsWarning, append=True)  # equal losses are told each time


class OpenWriter(Protocol):
    """A writer, as its connection sees it."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that sends the rows."""

    @property
    def unsent(self) -> str:
        """The number of unacknowledged rows and their table."""

    def leave_to_parent(self) -> None:
        """In a forked process: refuse all further rows."""

    async def end(self, limit_ms: int | None) -> None:
        """Send all rows and close. Raises `UnsentRowsError` with the rows that are lost.

        With a limit the work of the user has failed already: sending ends after `limit_ms`, and
        the writer of a task drops its unfinished batches.
        """


UNSETTLED: Final[set[OpenWriter]] = set()
"""The writers of this process with rows or failures that are not told yet."""

WRITERS: Final[WeakSet[OpenWriter]] = WeakSet()
"""All writers of this process."""


def _leave_to_parent() -> None:
    """The parent sends its rows itself, and nothing would send those of the forked process."""
    UNSETTLED.clear()
    for writer in list(WRITERS):
        writer.leave_to_parent()


after_fork_in_child(_leave_to_parent)


def joined(problems: Sequence[UnsentRowsError]) -> UnsentRowsError:
    """One error for the rows of several writers."""
    if len(problems) == 1:
        return problems[0]
    return UnsentRowsError("; ".join(e.message for e in problems), code=problems[0].code)


def note(exception: BaseException, problem: UnsentRowsError) -> None:
    """Tell of lost rows on the exception that ends a block, which is raised unchanged.

    The end of a program by `sys.exit` or Ctrl-C may show no notes, so there is a warning as well.
    """
    exception.add_note(str(problem))
    if not isinstance(exception, Exception):
        warn(problem)


def warn(problem: UnsentRowsError) -> None:
    """Tell of lost rows where no caller is left."""
    warnings.warn_explicit(problem.message, UnsentRowsWarning, "zufluss", 0)
