"""The base of all writers: takes rows of any form and has them acknowledged in batches.

    write → convert to Arrow → partition → bucket → open batch → encode in a thread → send

`BatchWriter` does the steps up to the sealed batch. `write/sender.py` sends, retries and numbers
batches; the subclasses (`write/append.py`, `write/upsert.py`) encode them. Input larger than
`client.writer.batch-size` is cut into even slices of about that size and sealed at once. Smaller
input waits in the open batch of its bucket until that is full or `client.writer.batch-timeout` has
passed. Single rows are gathered before they are converted (`write/rows.py`), and sent when the
oldest has waited that long.

`write` returns when the writer has taken the rows; it waits while more than
`client.writer.buffer.memory-size` is unacknowledged. `flush` returns when all rows written before
are acknowledged. A batch that failed for good is reported once, by the next `write`, `flush` or
`close`. Rows of one bucket arrive in the order in which they were written.

No row is lost quietly (`core/unsent.py`): a writer that is dropped unclosed sends its rows in the
background, and its connection waits for them when it is closed. If an exception leaves the block of
a writer, rows that `write` took before are still sent, for `LAST_FLUSH_MS` at most.

The writer of a producer (`Identity`) differs in two ways. It ends with the first batch that fails,
and every later call says so. And the writer of a task cuts its batches by its input alone, never by
time or load: a task that runs again sends the same batches under the same numbers, and the server
drops those that it has. For that reason rows in an open batch are dropped when the task fails (an
exception leaves its `with`): a batch that ends early would take the number of a whole one.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa

from zufluss.client.core.buckets import BucketAssigner, split_partitions
from zufluss.client.core.budget import MemoryBudget
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.convert import is_stream, single_row, to_batches
from zufluss.client.core.unsent import LAST_FLUSH_MS, UNSETTLED, WRITERS, note, warn
from zufluss.client.write.router import Router
from zufluss.client.write.rows import ROWS_PER_CHECK, RowBuffer, RowChunk, UnfitRow
from zufluss.client.write.sender import BucketQueue, PendingBatch, SendableBatch, Sender, WriteCall
from zufluss.errors import (
    ConfigError,
    PartitionNotExistError,
    RequestTimeoutError,
    UnsentRowsError,
    ZuflussError,
    error,
    reason_of,
)
from zufluss.model.table import TableBucket, TableInfo

FULL: Final = 0.75
"""An open batch with this fraction of `client.writer.batch-size` is full: more would exceed it."""


class Identity(NamedTuple):
    """The writer id of a producer's writer."""

    writer_id: int
    """The writer id in the batches; sequences begin at 0."""
    seed: int | None = None
    """Set for a task: batches are cut by the input alone, and rows without bucket key begin at the
    bucket of this number."""

    @property
    def repeatable(self) -> bool:
        """Whether the same input gives the same batches."""
        return self.seed is not None


class _OpenBatch:
    """The rows of one bucket that wait for more."""

    __slots__ = ("chunks", "memory", "rows", "since")

    def __init__(self, since: float) -> None:
        self.chunks: list[RowChunk] = []
        self.memory = 0
        self.rows = 0
        self.since = since


class BatchWriter:
    """Routes rows to buckets and sends them in batches; the base of the writers."""

    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        call: WriteCall,
        identity: Identity | None = None,
    ) -> None:
        if identity is not None and not connection.options.idempotent:
            raise ConfigError(
                "a producer's writer numbers its batches, which client.writer.enable-idempotence = "
                "false switches off; leave it true"
            )
        self.info = info
        """The table as it was when it was opened."""
        self._connection = connection
        self._options = connection.options
        self._loop = asyncio.get_running_loop()
        self._identity = identity
        writer_id = None if identity is None else identity.writer_id
        self._sender = Sender(connection, info, call, self._finished, writer_id)
        self._budget = MemoryBudget(self._options.buffer_bytes)
        self._router = Router(connection, info, None if identity is None else identity.seed)
        self._queues: dict[tuple[str | None, int], BucketQueue] = {}
        self._open: dict[BucketQueue, _OpenBatch] = {}
        self._open_bytes = 0
        self._pending: set[PendingBatch] = set()
        self._writer_id: int | None = writer_id
        self._failure: ZuflussError | None = None
        self._failed_rows = 0
        self._deleted_rows: int | None = 0
        self._closed = False
        self._gave_up = False
        self._ended = False
        self._ending = asyncio.Lock()
        self._order = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self.arrow = info.schema.arrow
        """The columns of the table."""
        self._linger = self._options.batch_timeout_ms / 1000
        self._rows = RowBuffer(self.arrow, self._columns_of, self._options.batch_bytes)
        self._rows_lock = threading.Lock()
        self._rows_timed = False
        self._rows_in_work = 0
        self._rows_timer: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._forked = False
        connection.writers.add(self)
        WRITERS.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._pending)} batches under way"
        return f"<{type(self).__name__} {self.info.path}, {state}>"

    # -- subclasses ---------------------------------------------------------------------------

    def columns_of(self, *, delete: bool) -> Sequence[str] | None:
        """The columns to take from the input; None for all."""
        raise NotImplementedError

    def _columns_of(self, delete: bool) -> Sequence[str] | None:
        return self.columns_of(delete=delete)

    def encode(self, chunks: Sequence[RowChunk], writer_id: int, sequence: int) -> SendableBatch:
        """Encode one batch; runs in a thread."""
        raise NotImplementedError

    # -- what users call -----------------------------------------------------------------------

    async def write(self, data: Any) -> None:
        """Write rows: Arrow, pandas, polars, a dict of columns, one row, several rows, a generator.

        A row is a dict, a dataclass or a named tuple. A generator, or any other iterable, is read
        item by item; its items are rows or anything else that `write` takes. Rows of one call are
        sent in batches, and only a bounded number is in memory.

        Columns are matched by name and converted to the table's types; `ColumnMismatchError` says
        which column of which row does not fit. Single rows and rows of a generator are converted
        some thousand at a time, so a later call may raise the error of a row, or `flush`. The
        other rows are written.

        Returns when the writer has taken the rows; `flush` waits until they are acknowledged.

        >>> await writer.write(pandas_frame)  # doctest: +SKIP
        >>> await writer.write({"id": 1, "name": "one row"})  # doctest: +SKIP
        >>> await writer.write({"id": n} for n in range(1_000_000))  # doctest: +SKIP
        """
        await self._take_over(data, delete=False)

    async def _take_over(self, data: Any, *, delete: bool) -> None:
        row = single_row(data, self.arrow)
        if row is not None:
            if self.add_row(row, delete):
                await self.take_rows()
        elif isinstance(data, AsyncIterable):
            async for item in data:
                await self._take_over(item, delete=delete)
        elif is_stream(data):
            for item in data:
                await self._take_over(item, delete=delete)
        else:
            await self.write_batches(self.convert(data, delete=delete), delete=delete)

    def convert(self, data: Any, *, delete: bool = False) -> Iterator[pa.RecordBatch]:
        """Convert `data` to batches for `write_batches`. Any thread may call this."""
        return to_batches(data, self.info.schema.arrow, self.columns_of(delete=delete))

    async def write_batches(
        self, batches: Iterable[pa.RecordBatch], *, delete: bool = False
    ) -> None:
        """Write record batches that `convert` returned."""
        self._check()
        async with self._order:
            await self._convert_rows()
            self._raise_failure()
            for batch in batches:
                await self._route(RowChunk(batch, delete))

    def add_row(self, row: Mapping[str, Any], delete: bool = False) -> bool:
        """Gather one row; returns True when `take_rows` is due. Any thread may call this.

        A failure of earlier rows is raised by the first row that is gathered, and every
        `ROWS_PER_CHECK`th.
        """
        with self._rows_lock:
            if self._closed or len(self._rows.gathered) % ROWS_PER_CHECK == 0:
                self._check()
            gathered = self._rows.add(row, delete)
            if gathered % ROWS_PER_CHECK and gathered > 1:
                return False
            full = self._rows.check()
            if gathered == 1:
                UNSETTLED.add(self)
                if not self._rows_timed and not self._repeatable:
                    self._rows_timed = True
                    self._loop.call_soon_threadsafe(self._start_rows_timer)
        return full

    def convert_rows(self) -> None:
        """Convert the rows that `add_row` gathered, for `take_rows`. Any thread may call this."""
        with self._rows_lock:
            self._rows.convert()

    async def take_rows(self) -> None:
        """Convert and write the rows that `add_row` gathered."""
        await self._shielded(self._take_rows())
        self._raise_failure()

    async def _take_rows(self) -> None:
        async with self._order:
            await self._convert_rows()

    async def flush(self) -> None:
        """Wait until all rows written before are acknowledged; raises the first failure."""
        await self._shielded(self._seal_rows())
        await self._acknowledged()

    async def _seal_rows(self) -> None:
        async with self._order:
            await self._convert_rows()
            self._seal_all()

    async def _acknowledged(self) -> None:
        """Wait for all sealed batches; raises the first failure."""
        await self._answered()
        self._raise_failure()

    async def _answered(self) -> None:
        if self._pending:
            await asyncio.wait([batch.done for batch in self._pending])

    async def _shielded(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work on rows that were taken; it goes on if the caller is cancelled."""
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await asyncio.shield(task)

    # -- the end -------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True once the writer takes no more rows."""
        return self._closed

    async def close(self) -> None:
        """Flush and end the writer. Closing twice is no error."""
        async with self._ending:
            if not self._ended:
                await self._close()

    async def _close(self) -> None:
        with self._rows_lock:
            self._closed = True
        try:
            if not self._gave_up and (self._sender.ended is None or self._untold):
                await self.flush()
        except asyncio.CancelledError:
            self._interrupted()
            raise
        finally:
            self._ended = True
            for timer in (self._timer, self._rows_timer):
                if timer is not None:
                    timer.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            if self._gave_up:  # these rows are named already
                self._failure, self._failed_rows = None, 0
            UNSETTLED.discard(self)
            await self._sender.close()

    async def end(self, limit_ms: int | None) -> None:
        """Send all rows and close, for the connection; see `OpenWriter`."""
        with self._rows_lock:
            self._closed = True
        problem = None
        try:
            unfinished = self._open or self._rows.count or self._rows_in_work
            if limit_ms is not None and self._repeatable and unfinished:
                problem = self._give_up(ZuflussError("the task has not finished; run it again"))
            else:
                async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000):
                    await self._shielded(self._seal_rows())
                    await self._answered()
        except TimeoutError:
            late = RequestTimeoutError(f"no server acknowledged them within {limit_ms} ms")
            problem = self._give_up(self._failure or self._sender.trouble or late)
        except asyncio.CancelledError:
            self._interrupted()
            raise
        finally:
            if self._failure is not None:
                problem = self._give_up(self._failure)
            await self.close()
        if problem is not None:
            raise problem

    def _interrupted(self) -> None:
        """Tell of the rows that an interrupted `close` leaves unsent."""
        if self._unsent_rows:
            warn(self._give_up(ZuflussError("closing the writer was interrupted")))

    def _give_up(self, cause: ZuflussError) -> UnsentRowsError:
        """Send no more; returns the error that names the rows."""
        problem = UnsentRowsError(f"{self.unsent} may be missing: {cause.message}", code=cause.code)
        problem.__cause__ = cause
        self._gave_up = True
        self._sender.end(problem)
        for task in self._background:
            task.cancel()
        self._drop_open()
        self._pending.clear()
        self._failure, self._failed_rows = None, 0
        return problem

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that sends the rows."""
        return self._loop

    @property
    def unsent(self) -> str:
        """The number of unacknowledged rows and their table."""
        rows = self._unsent_rows
        return f"{rows} row{'' if rows == 1 else 's'} written to table {self.info.path}"

    @property
    def _unsent_rows(self) -> int:
        """Number of unacknowledged rows, including rows of failures not yet reported."""
        sealed = sum(batch.rows for batch in [*self._pending])
        waiting = sum(batch.rows for batch in [*self._open.values()])
        return sealed + waiting + self._rows.count + self._rows_in_work + self._failed_rows

    @property
    def _untold(self) -> bool:
        """Whether rows are unacknowledged or a failure is unreported."""
        return bool(self._unsent_rows or self._failure)

    def _settled(self) -> None:
        """Let go of the writer if all its rows are acknowledged and all failures are told."""
        with self._rows_lock:
            if not self._untold:
                UNSETTLED.discard(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if exc is None:
            await self.close()
            return
        if self._repeatable:
            self._drop_open()
        try:
            await self.end(LAST_FLUSH_MS)
        except UnsentRowsError as e:
            note(exc, e)

    def _drop_open(self) -> None:
        """Drop rows that are in no sealed batch yet; see the module's docstring."""
        for batch in self._open.values():
            self._budget.give(batch.memory)
        self._open.clear()
        self._open_bytes = 0
        with self._rows_lock:
            self._rows.clear()

    def leave_to_parent(self) -> None:
        """In a forked process: refuse all further rows."""
        self._forked = self._closed = True
        self._rows_lock = threading.Lock()  # a thread of the parent may have held it

    def _check(self) -> None:
        if self._forked:
            raise ZuflussError(
                f"this writer of table {self.info.path} belongs to the process that forked this "
                "one; connect and open a writer after the fork"
            )
        if self._closed or self._connection.closing:
            what = "writer" if self._closed else "connection of the writer"
            raise ZuflussError(f"the {what} of table {self.info.path} is closed; open a new one")
        if self._failure is not None or self._sender.ended is not None:
            self._raise_failure()

    def _failed(self, reason: ZuflussError, rows: int) -> None:
        """Keep the first failure for the next call, and count the rows of all."""
        self._failure = self._failure or reason
        self._failed_rows += rows
        UNSETTLED.add(self)

    def _raise_failure(self) -> None:
        failure, rows = self._failure, self._failed_rows
        if failure is not None:
            self._failure, self._failed_rows = None, 0
            self._loop.call_soon_threadsafe(self._settled)
            if rows > 1:
                failure.add_note(f"{rows} rows for table {self.info.path} were not written")
            raise failure
        ended = self._sender.ended
        if ended is not None:
            raise error(
                ended.code,
                "the writer has ended and takes no more rows; continue from the last checkpoint "
                f"with a new one. It ended by: {ended.message}",
            )

    @property
    def _repeatable(self) -> bool:
        return self._identity is not None and self._identity.repeatable

    # -- single rows ---------------------------------------------------------------------------

    def _start_rows_timer(self) -> None:
        self._rows_timer = self._loop.call_later(self._linger, self._rows_due)

    def _rows_due(self) -> None:
        """Send the rows if the oldest has waited long enough, else wait until it has."""
        with self._rows_lock:
            waited = time.monotonic() - self._rows.since
            self._rows_timed = self._rows.count > 0 and waited < self._linger
            if self._rows_timed:
                rest = max(self._linger - waited, 0.001)
                self._rows_timer = self._loop.call_later(rest, self._rows_due)
                return
        if self._rows.count:
            task = self._loop.create_task(self._seal_rows())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _convert_rows(self) -> None:
        """Convert and route the gathered rows; the next call is told of rows that fail."""
        with self._rows_lock:
            count, chunks = self._rows.take()
            self._rows_in_work += count
        try:
            for chunk in chunks:
                await self._route_gathered(chunk)
                count -= _row_count(chunk)
        except asyncio.CancelledError:
            self._failed(ZuflussError("the writer was interrupted"), count)
            raise
        except Exception as e:
            self._failed(self._reason(e), count)
        finally:
            self._rows_in_work -= count
        self._settled()

    async def _route_gathered(self, chunk: RowChunk | UnfitRow) -> None:
        """Route rows and note those that fail; raises only if no server gives a writer id."""
        if isinstance(chunk, UnfitRow):
            self._failed(chunk.reason, 1)
        else:
            await self._number()
            left = chunk.rows.num_rows
            try:
                for partition, rows in split_partitions(chunk.rows, self.info):
                    left -= rows.num_rows
                    await self._try_partition(partition, RowChunk(rows, chunk.delete))
            except Exception as e:  # rows that belong to no partition
                self._failed(self._reason(e), left)
        self._rows_in_work -= _row_count(chunk)

    async def _try_partition(self, partition: str | None, chunk: RowChunk) -> None:
        try:
            await self._route_partition(partition, chunk)
        except Exception as e:
            self._failed(self._reason(e), chunk.rows.num_rows)

    def _reason(self, problem: Exception) -> ZuflussError:
        if isinstance(problem, ZuflussError):
            return problem
        reason = ZuflussError(f"rows for table {self.info.path} failed: {reason_of(problem)}")
        reason.__cause__ = problem
        return reason

    # -- routing -------------------------------------------------------------------------------

    async def _route(self, chunk: RowChunk) -> None:
        await self._number()
        for partition, rows in split_partitions(chunk.rows, self.info):
            await self._route_partition(partition, RowChunk(rows, chunk.delete))

    async def _number(self) -> None:
        if self._writer_id is None:
            self._writer_id = await self._sender.new_writer_id()

    async def _route_partition(self, partition: str | None, chunk: RowChunk) -> None:
        try:
            partition_id = await self._router.partition_id(partition, create=not chunk.delete)
        except PartitionNotExistError:
            if chunk.delete:
                return  # a missing partition has no rows to delete
            raise
        assigner = self._router.assigner(partition)
        for piece in self._router.pieces(chunk.rows):
            for bucket, rows in await self._router.assign(assigner, piece):
                queue = self._queue(partition, partition_id, bucket)
                await self._append(queue, RowChunk(rows, chunk.delete), assigner)

    def _queue(self, name: str | None, partition_id: int | None, bucket: int) -> BucketQueue:
        queue = self._queues.get((name, bucket))
        if queue is None or queue.bucket.partition_id != partition_id:
            place = TableBucket(self.info.table_id, partition_id, bucket)
            assert self._writer_id is not None
            queue = BucketQueue(place, name, self._writer_id)
            self._queues[name, bucket] = queue
        return queue

    # -- open batches --------------------------------------------------------------------------

    async def _append(self, queue: BucketQueue, chunk: RowChunk, assigner: BucketAssigner) -> None:
        if self._gave_up:
            raise ZuflussError("the writer sends no more rows")
        memory = chunk.rows.nbytes
        if self._repeatable:
            self._make_room(memory)
        if not self._budget.try_take(memory):
            if not self._repeatable:
                self._seal_all()
            await self._budget.take(memory)
        batch = self._open.get(queue)
        if batch is None:
            batch = self._open[queue] = _OpenBatch(self._loop.time())
            if not self._repeatable:
                self._start_timer(self._options.batch_timeout_ms / 1000)
        batch.chunks.append(chunk)
        batch.rows += chunk.rows.num_rows
        batch.memory += memory
        UNSETTLED.add(self)
        self._open_bytes += memory
        if batch.memory >= FULL * self._options.batch_bytes:
            self._seal(queue)
            assigner.batch_full(queue.bucket.bucket_id)

    def _make_room(self, memory: int) -> None:
        """Seal all batches if too much would be open; depends on the input alone."""
        if self._open_bytes + memory > self._budget.limit // 2:
            self._seal_all()

    def _start_timer(self, delay: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(delay, self._seal_old)

    def _seal_old(self) -> None:
        """Seal batches that waited long enough, and set the timer for the next one."""
        self._timer = None
        wait = self._options.batch_timeout_ms / 1000
        now = self._loop.time()
        for queue in [q for q, batch in self._open.items() if now - batch.since >= wait]:
            self._seal(queue)
        if self._open:
            oldest = min(batch.since for batch in self._open.values())
            self._start_timer(max(oldest + wait - now, 0.001))

    def _seal_all(self) -> None:
        for queue in list(self._open):
            self._seal(queue)

    def _seal(self, queue: BucketQueue) -> None:
        """Close the open batch of a bucket and encode it in a thread."""
        rows = self._open.pop(queue)
        self._open_bytes -= rows.memory
        deletes = sum(chunk.rows.num_rows for chunk in rows.chunks if chunk.delete)
        batch = self._sender.add(queue, rows.memory, rows.rows, deletes)
        self._pending.add(batch)
        encoding = self._connection.in_thread(
            functools.partial(self.encode, rows.chunks, queue.writer_id, batch.sequence)
        )
        encoding.add_done_callback(lambda future: self._encoded(queue, batch, future))

    def _encoded(
        self, queue: BucketQueue, batch: PendingBatch, future: asyncio.Future[Any]
    ) -> None:
        failure = ZuflussError("cancelled") if future.cancelled() else future.exception()
        if failure is None:
            encoded = future.result()
            self._budget.give(batch.memory - len(encoded))
            batch.memory = len(encoded)
            self._sender.encoded(queue, batch, encoded)
        elif isinstance(failure, ZuflussError):
            self._sender.fail(queue, batch, failure)
        else:
            reason = ZuflussError(f"a batch for table {self.info.path} cannot be encoded")
            reason.__cause__ = failure
            self._sender.fail(queue, batch, reason)

    def _finished(self, batch: PendingBatch, failure: ZuflussError | None) -> None:
        waited_for = batch in self._pending
        self._pending.discard(batch)
        self._budget.give(batch.memory)
        if failure is None and batch.deletes:
            self._count_deleted(batch.deleted_rows)
        if failure is not None and waited_for:
            self._failed(failure, batch.rows)
        if not batch.done.done():
            batch.done.set_result(None)
        if not self._pending:
            self._settled()

    def _count_deleted(self, rows: int | None) -> None:
        """Add the rows that the deletes of a batch removed; the sum is unknown once one is."""
        if rows is None or self._deleted_rows is None:
            self._deleted_rows = None
        else:
            self._deleted_rows += rows


def _row_count(chunk: RowChunk | UnfitRow) -> int:
    return 1 if isinstance(chunk, UnfitRow) else chunk.rows.num_rows
