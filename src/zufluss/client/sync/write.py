"""Writers for synchronous code, derived from the async ones.

Input is converted to Arrow in the caller's thread, so that it may come from a scan of the same
connection.
"""

from __future__ import annotations

from typing import Any, TypeVar

from zufluss.client.core.convert import is_plain_row, is_stream, single_row
from zufluss.client.producer.exactly_once import (
    AsyncExactlyOnceWriter,
    AsyncTaskUpsertWriter,
    AsyncTaskWriter,
    TaskOffsets,
)
from zufluss.client.producer.handle import ProducerHandle
from zufluss.client.producer.state import ProducerState
from zufluss.client.producer.undo import UndoProgress
from zufluss.client.sync.facade import BlockFacade, documented_by, makes, waits
from zufluss.client.write.append import AsyncAppendWriter
from zufluss.client.write.upsert import AsyncUpsertWriter
from zufluss.client.write.writer import BatchWriter
from zufluss.errors import InvalidTableError

W = TypeVar("W", bound=BatchWriter, covariant=True)
U = TypeVar("U", bound=AsyncUpsertWriter, covariant=True)


@documented_by(BatchWriter)
class _Writer(BlockFacade[W]):
    """What the writers have in common."""

    def write(self, data: Any) -> None:
        if not is_plain_row(data):
            self._take_over(data, delete=False)
        elif self._twin.add_row(data):
            self._take_rows()

    def _take_over(self, data: Any, *, delete: bool) -> None:
        """Convert in this thread, then hand the batches to the loop."""
        row = single_row(data, self._twin.arrow)
        if row is not None:
            if self._twin.add_row(row, delete):
                self._take_rows()
        elif is_stream(data):
            for item in data:
                self._take_over(item, delete=delete)
        else:
            for batch in self._twin.convert(data, delete=delete):
                self._thread.run(self._twin.write_batches([batch], delete=delete))

    def _take_rows(self) -> None:
        """Convert the gathered rows in this thread, then hand them to the loop."""
        self._twin.convert_rows()
        self._thread.run(self._twin.take_rows())

    flush = waits(BatchWriter.flush)

    def close(self) -> None:
        if not self._twin.closed:  # the connection may have closed it, and ended its loop
            self._thread.run(self._twin.close())

    def __exit__(self, *exc: object) -> None:
        if not self._twin.closed:
            super().__exit__(*exc)


class AppendWriter(_Writer[AsyncAppendWriter]):
    """Appends to a log table; `table.append()` makes it."""


@documented_by(AsyncUpsertWriter)
class _DeletingWriter(_Writer[U]):
    """What the writers of primary-key tables have in common."""

    def delete(self, data: Any) -> None:
        self._twin.check_deletes()
        self._take_over(data, delete=True)

    @property
    def deleted_rows(self) -> int | None:
        return self._twin.deleted_rows


class UpsertWriter(_DeletingWriter[AsyncUpsertWriter]):
    """Writes to a primary-key table; `table.upsert()` makes it."""


@documented_by(AsyncTaskUpsertWriter)
class TaskWriter(_Writer[AsyncTaskWriter]):
    """The writer of one task of a job; `table.producer_writer(handle, task)` makes it."""

    def delete(self, data: Any) -> None:
        """Delete rows of a primary-key table; `data` is as for `table.upsert()`."""
        if not isinstance(self._twin, AsyncTaskUpsertWriter):
            raise InvalidTableError(f"table {self._twin.info.path} is a log; it has no deletes")
        self._twin.check_deletes()
        self._take_over(data, delete=True)

    def finish(self) -> TaskOffsets:
        return self._thread.run(self._twin.finish())


@documented_by(AsyncExactlyOnceWriter)
class ExactlyOnceWriter(_DeletingWriter[AsyncExactlyOnceWriter]):
    """Writes each row once, even after a crash; `table.exactly_once_writer(…)` makes it.

    It renews its producer in the background, whatever the caller's thread does.

    >>> with table.exactly_once_writer("views", state=state) as writer:  # doctest: +SKIP
    ...     writer.write({"page": ["/"], "views": [1]})
    ...     state = writer.checkpoint()
    """

    @property
    def handle(self) -> ProducerHandle:
        return self._twin.handle

    @property
    def producer_id(self) -> str:
        return self._twin.producer_id

    @property
    def epoch(self) -> int:
        return self._twin.epoch

    @property
    def columns(self) -> tuple[str, ...]:
        return self._twin.columns

    @property
    def last_checkpoint_id(self) -> int | None:
        return self._twin.last_checkpoint_id

    @property
    def exclusive(self) -> bool:
        return self._twin.exclusive

    @property
    def state(self) -> ProducerState | None:
        """The last checkpoint, made by this writer or restored; None before the first one."""
        return self._twin.state

    @property
    def undone(self) -> UndoProgress | None:
        """What was undone when the writer began; None if nothing was."""
        return self._twin.undone

    checkpoint = waits(AsyncExactlyOnceWriter.checkpoint)

    def close(self, *, release: bool = False) -> None:
        if not self._twin.closed:
            self._thread.run(self._twin.close(release=release))

    release = waits(AsyncExactlyOnceWriter.release)
    for_task = makes(AsyncExactlyOnceWriter.for_task, TaskWriter)
