"""The append writer: rows of any shape in, acknowledged batches out.

    write → convert to Arrow → partition → bucket → open batch → encode in a thread → send

`AsyncAppendWriter` does the steps up to the sealed batch; encoding is `encode.py`, sending, retries
and idempotence are `sender.py`. Input that is larger than `client.writer.batch-size` is cut into
even slices of about that size and sealed at once; smaller input waits in the open batch of its
bucket until that is full or `client.writer.batch-timeout` has passed. Rows given one by one as
dicts are gathered the same way before they are converted.

`write` returns when the rows are taken over; it waits while more than
`client.writer.buffer.memory-size` is unacknowledged. `flush` returns when everything written
before is acknowledged. A batch that failed for good is reported once, by the next `write`, `flush`
or `close`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

from zufluss.client.assign import BucketAssigner, assigner_of, split
from zufluss.client.connection import AsyncConnection, table_path
from zufluss.client.convert import ColumnMismatchError, is_row, rows_to_batch, to_batches
from zufluss.client.encode import BatchEncoder
from zufluss.client.sender import BucketQueue, PendingBatch, Sender
from zufluss.errors import InvalidTableError, PartitionNotExistError, ZuflussError
from zufluss.model.partition import partition_values, spec_of
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

ROWS_GATHERED_MAX: Final = 2_000
"""Single rows that wait to be converted together."""

FULL: Final = 0.75
"""An open batch with this part of `client.writer.batch-size` is full: more would overshoot it."""
THREAD_ROWS_MIN: Final = 4_096
"""Batches of fewer rows are hashed and split where they are."""


class MemoryBudget:
    """Counts bytes; whoever wants more than is left waits, first come first served."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, size: int) -> bool:
        """Take now, unless it is too much; a single piece over the limit passes when alone."""
        if self._waiting or (self._used and self._used + size > self._limit):
            return False
        self._used += size
        return True

    async def take(self, size: int) -> None:
        """Wait until there is room, then take."""
        if self.try_take(size):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)
            else:
                self._waiting = deque(w for w in self._waiting if w[1] is not turn)
            raise

    def give(self, size: int) -> None:
        """Give back; a negative size takes without waiting."""
        self._used -= size
        while self._waiting:
            wanted, turn = self._waiting[0]
            if self._used and self._used + wanted > self._limit:
                return
            self._waiting.popleft()
            if not turn.cancelled():
                self._used += wanted
                turn.set_result(None)


class _OpenBatch:
    """Rows of one bucket that wait for more."""

    __slots__ = ("chunks", "memory", "since")

    def __init__(self, since: float) -> None:
        self.chunks: list[pa.RecordBatch] = []
        self.memory = 0
        self.since = since


class AsyncAppendWriter:
    """Appends to a log table. Make it with `table.append()`.

    >>> async with table.append() as writer:  # doctest: +SKIP
    ...     await writer.write({"id": [1, 2], "name": ["a", "b"]})
    ...     await writer.flush()
    """

    def __init__(self, connection: AsyncConnection, info: TableInfo) -> None:
        if info.has_primary_key:
            raise InvalidTableError(
                f"table {info.path} has a primary key; rows are upserted into it, not appended"
            )
        self.info = info
        """The table as it was when the writer was made."""
        self._connection = connection
        self._options = connection.options
        self._loop = asyncio.get_running_loop()
        self._encoder = BatchEncoder(info)
        self._sender = Sender(connection, info, self._finished)
        self._budget = MemoryBudget(self._options.buffer_bytes)
        self._assigners: dict[str | None, BucketAssigner] = {}
        self._queues: dict[tuple[str | None, int], BucketQueue] = {}
        self._open: dict[BucketQueue, _OpenBatch] = {}
        self._pending: set[PendingBatch] = set()
        self._writer_id: int | None = None
        self._failure: ZuflussError | None = None
        self._closed = False
        self._order = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._rows: list[Mapping[str, Any]] = []
        self._rows_lock = threading.Lock()
        self._rows_timer: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._pending)} batches under way"
        return f"<AsyncAppendWriter {self.info.path}, {state}>"

    # -- what users call -----------------------------------------------------------------------

    async def write(self, data: Any) -> None:
        """Take over rows; see `zufluss.client.convert` for everything `data` may be.

        >>> await writer.write(pandas_frame)  # doctest: +SKIP
        >>> await writer.write({"id": 1, "name": "one row"})  # doctest: +SKIP
        """
        if is_row(data, self.info.schema.arrow):
            if self.add_row(data):
                await self.take_rows()
        else:
            await self.write_batches(to_batches(data, self.info.schema.arrow))

    async def write_batches(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Take over record batches that have the table's schema already."""
        self._check()
        async with self._order:
            await self._convert_rows()
            for batch in batches:
                await self._route(batch)

    def add_row(self, row: Mapping[str, Any]) -> bool:
        """Keep one row for later; True when it is time for `take_rows`. From any thread."""
        self._check()
        with self._rows_lock:
            self._rows.append(row)
            count = len(self._rows)
        if count == 1:
            self._loop.call_soon_threadsafe(self._start_rows_timer)
        return count >= ROWS_GATHERED_MAX

    async def take_rows(self) -> None:
        """Convert and write the rows kept by `add_row`."""
        async with self._order:
            await self._convert_rows()

    async def flush(self) -> None:
        """Wait until everything written before is acknowledged; raise the first failure."""
        await self.take_rows()
        async with self._order:
            self._seal_all()
        if self._pending:
            await asyncio.wait([batch.done for batch in self._pending])
        self._raise_failure()

    async def close(self) -> None:
        """Flush, then let nothing more be written."""
        if self._closed:
            return
        try:
            await self.flush()
        finally:
            self._closed = True
            for timer in (self._timer, self._rows_timer):
                if timer is not None:
                    timer.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            await self._sender.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except ZuflussError as e:
            if exc is None:
                raise
            exc.add_note(f"and the writer failed: {e}")

    def _check(self) -> None:
        if self._closed:
            raise ZuflussError(f"the writer of table {self.info.path} is closed; make a new one")
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -- single rows ---------------------------------------------------------------------------

    def _start_rows_timer(self) -> None:
        delay = self._options.batch_timeout_ms / 1000
        self._rows_timer = self._loop.call_later(delay, self._rows_due)

    def _rows_due(self) -> None:
        task = self._loop.create_task(self._take_rows_late())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _take_rows_late(self) -> None:
        try:
            await self.take_rows()
        except ZuflussError as e:
            self._failure = self._failure or e

    async def _convert_rows(self) -> None:
        with self._rows_lock:
            rows, self._rows = self._rows, []
        if not rows:
            return
        schema = self.info.schema.arrow
        try:
            batch = rows_to_batch(rows, schema)
        except ColumnMismatchError:
            await self._convert_each(rows)
        else:
            await self._route(batch)

    async def _convert_each(self, rows: list[Mapping[str, Any]]) -> None:
        """One row among them does not fit: write the others, then raise."""
        failure: ZuflussError | None = None
        for row in rows:
            try:
                await self._route(rows_to_batch([row], self.info.schema.arrow))
            except ColumnMismatchError as e:
                failure = failure or e
        if failure is not None:
            raise failure

    # -- routing -------------------------------------------------------------------------------

    async def _route(self, batch: pa.RecordBatch) -> None:
        if self._writer_id is None:
            self._writer_id = await self._sender.new_writer_id()
        for partition, rows in self._partitions(batch):
            partition_id = await self._partition_id(partition)
            assigner = self._assigners.get(partition)
            if assigner is None:
                assigner = self._assigners[partition] = assigner_of(self.info, self._options)
            for piece in _slices(rows, self._options.batch_bytes * self._fan_out):
                for bucket, part in await self._assign(assigner, piece):
                    queue = self._queue(partition, partition_id, bucket)
                    await self._append(queue, part, assigner)

    async def _assign(
        self, assigner: BucketAssigner, rows: pa.RecordBatch
    ) -> Iterable[tuple[int, pa.RecordBatch]]:
        """Hash large batches in a thread, so that sending goes on meanwhile."""
        if not self.info.bucket_keys or rows.num_rows < THREAD_ROWS_MIN:
            return assigner.assign(rows)
        executor = self._connection.executor
        return await self._loop.run_in_executor(executor, lambda: list(assigner.assign(rows)))

    @property
    def _fan_out(self) -> int:
        """Over how many buckets one piece of input is spread."""
        return self.info.bucket_count if self.info.bucket_keys else 1

    def _partitions(self, batch: pa.RecordBatch) -> Iterator[tuple[str | None, pa.RecordBatch]]:
        if not self.info.is_partitioned:
            yield None, batch
            return
        types = {key: self.info.schema.column(key).data_type for key in self.info.partition_keys}
        names = partition_values(batch, self.info.partition_keys, types)
        indexes = names.indices.to_numpy(zero_copy_only=False)
        for group, rows in split(batch, indexes):
            yield names.dictionary[group].as_py(), rows

    async def _partition_id(self, name: str | None) -> int | None:
        if name is None:
            return None
        try:
            return (await self._connection.partition(self.info, name)).partition_id
        except PartitionNotExistError as e:
            if not self._options.create_partitions:
                raise PartitionNotExistError(
                    f"table {self.info.path} has no partition {name!r}; create it, or allow "
                    "client.writer.dynamic-create-partition.enabled"
                ) from e
        await self._create_partition(name)
        return (await self._connection.partition(self.info, name)).partition_id

    async def _create_partition(self, name: str) -> None:
        request = m.CreatePartitionRequest(
            table_path=table_path(self.info.path), ignore_if_not_exists=True
        )
        for key, value in spec_of(self.info.partition_keys, name).items():
            request.partition_spec.partition_key_values.add(key=key, value=value)
        await self._connection.call_coordinator(ApiKey.CREATE_PARTITION, request)

    def _queue(self, name: str | None, partition_id: int | None, bucket: int) -> BucketQueue:
        queue = self._queues.get((name, bucket))
        if queue is None or queue.bucket.partition_id != partition_id:
            place = TableBucket(self.info.table_id, partition_id, bucket)
            assert self._writer_id is not None
            queue = BucketQueue(place, name, self._writer_id)
            self._queues[name, bucket] = queue
        return queue

    # -- open batches --------------------------------------------------------------------------

    async def _append(
        self, queue: BucketQueue, rows: pa.RecordBatch, assigner: BucketAssigner
    ) -> None:
        memory = rows.nbytes
        if not self._budget.try_take(memory):
            self._seal_all()
            await self._budget.take(memory)
        batch = self._open.get(queue)
        if batch is None:
            batch = self._open[queue] = _OpenBatch(self._loop.time())
            self._start_timer(self._options.batch_timeout_ms / 1000)
        batch.chunks.append(rows)
        batch.memory += memory
        if batch.memory >= FULL * self._options.batch_bytes:
            self._seal(queue)
            assigner.batch_full(queue.bucket.bucket_id)

    def _start_timer(self, delay: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(delay, self._seal_old)

    def _seal_old(self) -> None:
        """Seal what has waited long enough, and look again when the next one has."""
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
        """Close the open batch of a bucket and have it encoded."""
        rows = self._open.pop(queue)
        batch = self._sender.add(queue, rows.memory)
        self._pending.add(batch)
        encoding = self._loop.run_in_executor(
            self._connection.executor,
            self._encoder.encode,
            rows.chunks,
            queue.writer_id,
            batch.sequence,
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
        self._pending.discard(batch)
        self._budget.give(batch.memory)
        if failure is not None and self._failure is None:
            self._failure = failure
        if not batch.done.done():
            batch.done.set_result(None)


def _slices(rows: pa.RecordBatch, bytes_wanted: int) -> Iterator[pa.RecordBatch]:
    """The rows in even slices of about the size wanted; the same object if they are fewer."""
    count = min(round(rows.nbytes / bytes_wanted), rows.num_rows)
    if count <= 1:
        yield rows
        return
    step = -(-rows.num_rows // count)
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)
