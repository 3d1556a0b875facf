"""Writers for synchronous code: each method does what its async twin does, and waits for it.

Input is converted to Arrow in the caller's thread, so that it may come from the connection itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from zufluss.client.core.convert import is_row
from zufluss.client.producer.exactly_once import (
    AsyncExactlyOnceWriter,
    AsyncTaskUpsertWriter,
    AsyncTaskWriter,
    TaskOffsets,
)
from zufluss.client.producer.handle import ProducerHandle
from zufluss.client.producer.state import ProducerState
from zufluss.client.producer.undo import UndoProgress
from zufluss.client.write.append import AsyncAppendWriter
from zufluss.client.write.upsert import AsyncUpsertWriter
from zufluss.client.write.writer import BatchWriter
from zufluss.errors import InvalidTableError

if TYPE_CHECKING:
    from zufluss.client.sync.connection import LoopThread

W = TypeVar("W", bound=BatchWriter)
U = TypeVar("U", bound=AsyncUpsertWriter)


class _Writer(Generic[W]):
    """What the writers have in common."""

    def __init__(self, thread: LoopThread, writer: W) -> None:
        self._thread = thread
        self._writer: W = writer

    def write(self, data: Any) -> None:
        """Take over rows: Arrow, pandas, polars, a dict of columns, a dict row, a list of rows.

        >>> writer.write(pandas_frame)  # doctest: +SKIP
        """
        self._take_over(data, delete=False)

    def _take_over(self, data: Any, *, delete: bool) -> None:
        """Convert in this thread, so that `data` may come from the connection itself."""
        if is_row(data, self._writer.info.schema.arrow):
            if self._writer.add_row(data, delete=delete):
                self._thread.run(self._writer.take_rows())
            return
        for batch in self._writer.convert(data, delete=delete):
            self._thread.run(self._writer.write_batches([batch], delete=delete))

    def flush(self) -> None:
        """Wait until everything written before is acknowledged; raise the first failure."""
        self._thread.run(self._writer.flush())

    def close(self) -> None:
        """Flush, then let nothing more be written."""
        self._thread.run(self._writer.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.run(self._writer.__aexit__(kind, exc, trace))

    def __repr__(self) -> str:
        return repr(self._writer).replace("Async", "", 1)


class AppendWriter(_Writer[AsyncAppendWriter]):
    """Appends to a log table; `table.append()` makes it."""


class _Upserts(_Writer[U]):
    """What the writers of primary-key tables have in common."""

    def delete(self, data: Any) -> None:
        """Delete rows; `data` has whole rows or only the key columns, in every form of `write`.

        >>> writer.delete({"id": [1, 2]})  # doctest: +SKIP
        """
        self._writer.check_deletes()
        self._take_over(data, delete=True)


class UpsertWriter(_Upserts[AsyncUpsertWriter]):
    """Writes to a primary-key table; `table.upsert()` makes it."""


class ExactlyOnceWriter(_Upserts[AsyncExactlyOnceWriter]):
    """Writes each row once, whatever crashes; `table.exactly_once_writer(…)` makes it.

    Each method does what the method of the same name of `AsyncExactlyOnceWriter` does, and waits
    for it. It gives signs of life in the background whatever the caller's thread does.

    >>> with table.exactly_once_writer("views", state=kept) as writer:  # doctest: +SKIP
    ...     writer.write({"page": ["/"], "views": [1]})
    ...     kept = writer.checkpoint().to_bytes()
    """

    @property
    def handle(self) -> ProducerHandle:
        """What tasks of the job need to write as this producer."""
        return self._writer.handle

    @property
    def producer_id(self) -> str:
        """Its id, the same after each restart."""
        return self._writer.producer_id

    @property
    def epoch(self) -> int:
        """Which start of the producer it is."""
        return self._writer.epoch

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are written, in table order."""
        return self._writer.columns

    @property
    def last_checkpoint_id(self) -> int | None:
        """The number of the last checkpoint that was reported with one, before this start."""
        return self._writer.last_checkpoint_id

    @property
    def exclusive(self) -> bool:
        """Nobody else can write its columns."""
        return self._writer.exclusive

    @property
    def state(self) -> ProducerState | None:
        """The last checkpoint: made by this writer, or restored; None before the first."""
        return self._writer.state

    @property
    def undone(self) -> UndoProgress | None:
        """What was undone before it began; None if nothing had to be."""
        return self._writer.undone

    def checkpoint(
        self, *, checkpoint_id: int | None = None, tasks: Iterable[TaskOffsets] | None = None
    ) -> ProducerState:
        """Have everything acknowledged, and say where the table stands.

        Keep the state, in one step with the position of the source, before the next checkpoint: by
        coming back you say that you have it. With a `checkpoint_id`, a number of your own that
        grows, the checkpoint counts at once, and `last_checkpoint_id` tells it after a restart.

        All tasks of the job must have ended. If others go on, `tasks` has the offsets of those that
        ended, from their `finish`, and no two tasks may write to the same buckets.
        """
        work = self._writer.checkpoint(checkpoint_id=checkpoint_id, tasks=tasks)
        return self._thread.run(work)

    def close(self, *, release: bool = False) -> None:
        """Have everything acknowledged, and end; with `release` the producer is over for good.

        Without it the producer stays: the next start is given the last checkpoint, and undoes what
        was written behind it. After a release its columns are free, and a start under the same id
        is a new producer.
        """
        self._thread.run(self._writer.close(release=release))

    def release(self) -> None:
        """The work is done: close, and let go of the columns; nothing is ever undone."""
        self.close(release=True)

    def for_task(self, task: int, *, pre_aggregate: bool = False) -> TaskWriter:
        """A writer of a task of this job, in this process; elsewhere use `handle`."""
        make = functools.partial(self._writer.for_task, task, pre_aggregate=pre_aggregate)
        return TaskWriter(self._thread, self._thread.call(make))


class TaskWriter(_Writer[AsyncTaskWriter]):
    """A task's writer; `table.producer_writer(handle, task)` makes it."""

    def delete(self, data: Any) -> None:
        """Delete rows of a primary-key table; `data` is as for `table.upsert()`."""
        if not isinstance(self._writer, AsyncTaskUpsertWriter):
            raise InvalidTableError(f"table {self._writer.info.path} is a log; it has no deletes")
        self._writer.check_deletes()
        self._take_over(data, delete=True)

    def finish(self) -> TaskOffsets:
        """Have everything acknowledged, end, and say where the buckets written to stand."""
        return self._thread.run(self._writer.finish())
