"""What every writer does: rows of any shape in, acknowledged batches out.

    write → convert to Arrow → partition → bucket → open batch → encode in a thread → send

`BatchWriter` does the steps up to the sealed batch; sending, retries and idempotence are
`write/sender.py`; what the rows are and how a batch is encoded say the writers themselves
(`write/append.py`, `write/upsert.py`). Input that is larger than `client.writer.batch-size` is cut
into even slices of about that size and sealed at once; smaller input waits in the open batch of its
bucket until that is full or `client.writer.batch-timeout` has passed. Rows given one by one as
dicts are gathered the same way before they are converted.

`write` returns when the rows are taken over; it waits while more than
`client.writer.buffer.memory-size` is unacknowledged. `flush` returns when everything written
before is acknowledged. A batch that failed for good is reported once, by the next `write`, `flush`
or `close`. Whatever goes to one bucket arrives there in the order it was written.

A producer's writer (`Identity`) is different in two ways. With the first batch that fails it ends,
and says so to whoever calls it. And the writer of a task cuts its batches by its input alone, never
by time or by what else is under way: a task that is run again sends the same batches under the same
numbers, and the server drops those that it has. So what is in no batch yet when it fails (an
exception leaves its `with`) is dropped: a batch that ends early would stand for a whole one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa

from zufluss.client.core.buckets import BucketAssigner, assigner_of, split_partitions
from zufluss.client.core.budget import MemoryBudget
from zufluss.client.core.catalog import list_partitions
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.convert import ColumnMismatchError, is_row, rows_to_batch, to_batches
from zufluss.client.write.sender import BucketQueue, Encoded, PendingBatch, Sender, WriteCall
from zufluss.errors import (
    ConfigError,
    PartitionNotExistError,
    TableNotExistError,
    ZuflussError,
    error,
)
from zufluss.model.partition import spec_of
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import path_to_proto

ROWS_GATHERED_MAX: Final = 2_000
"""Single rows that wait to be converted together."""

FULL: Final = 0.75
"""An open batch with this part of `client.writer.batch-size` is full: more would overshoot it."""
THREAD_ROWS_MIN: Final = 4_096
"""Batches of fewer rows are hashed and split where they are."""


class Chunk(NamedTuple):
    """Rows of one bucket that were written together."""

    rows: pa.RecordBatch
    """Whole rows, or the keys of rows to delete."""
    delete: bool
    """They are to be deleted."""


class Identity(NamedTuple):
    """Who a producer's writer is."""

    writer_id: int
    """Stands in its batches; sequences begin at 0."""
    seed: int | None = None
    """Of a task: batches are cut by the input alone, buckets without key begin with this one."""

    @property
    def repeatable(self) -> bool:
        """The same input gives the same batches."""
        return self.seed is not None


class _OpenBatch:
    """What one bucket was given and waits for more."""

    __slots__ = ("chunks", "memory", "since")

    def __init__(self, since: float) -> None:
        self.chunks: list[Chunk] = []
        self.memory = 0
        self.since = since


class BatchWriter:
    """Routes rows to buckets and has them sent in batches; the base of the writers."""

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
        """The table as it was when the writer was made."""
        self._connection = connection
        self._options = connection.options
        self._loop = asyncio.get_running_loop()
        self._identity = identity
        writer_id = None if identity is None else identity.writer_id
        self._sender = Sender(connection, info, call, self._finished, writer_id)
        self._budget = MemoryBudget(self._options.buffer_bytes)
        self._assigners: dict[str | None, BucketAssigner] = {}
        self._queues: dict[tuple[str | None, int], BucketQueue] = {}
        self._open: dict[BucketQueue, _OpenBatch] = {}
        self._open_bytes = 0
        self._pending: set[PendingBatch] = set()
        self._writer_id: int | None = writer_id
        self._failure: ZuflussError | None = None
        self._closed = False
        self._order = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._rows: list[tuple[bool, Mapping[str, Any]]] = []
        self._rows_lock = threading.Lock()
        self._rows_timer: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._pending)} batches under way"
        return f"<{type(self).__name__} {self.info.path}, {state}>"

    # -- what a writer is ----------------------------------------------------------------------

    def columns_of(self, *, delete: bool) -> Sequence[str] | None:
        """The columns that are taken of the input; None for all of them."""
        raise NotImplementedError

    def encode(self, chunks: Sequence[Chunk], writer_id: int, sequence: int) -> Encoded:
        """The bytes of a batch; runs in a thread."""
        raise NotImplementedError

    # -- what users call -----------------------------------------------------------------------

    async def write(self, data: Any) -> None:
        """Take over rows; see `zufluss.client.core.convert` for everything `data` may be.

        >>> await writer.write(pandas_frame)  # doctest: +SKIP
        >>> await writer.write({"id": 1, "name": "one row"})  # doctest: +SKIP
        """
        await self._take_over(data, delete=False)

    async def _take_over(self, data: Any, *, delete: bool) -> None:
        if is_row(data, self.info.schema.arrow):
            if self.add_row(data, delete=delete):
                await self.take_rows()
        else:
            await self.write_batches(self.convert(data, delete=delete), delete=delete)

    def convert(self, data: Any, *, delete: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield `data` as batches that `write_batches` takes. From any thread."""
        return to_batches(data, self.info.schema.arrow, self.columns_of(delete=delete))

    async def write_batches(
        self, batches: Iterable[pa.RecordBatch], *, delete: bool = False
    ) -> None:
        """Take over record batches as `convert` gives them."""
        self._check()
        async with self._order:
            await self._convert_rows()
            for batch in batches:
                await self._route(Chunk(batch, delete))

    def add_row(self, row: Mapping[str, Any], *, delete: bool = False) -> bool:
        """Keep one row for later; True when it is time for `take_rows`. From any thread."""
        self._check()
        with self._rows_lock:
            self._rows.append((delete, row))
            count = len(self._rows)
        if count == 1 and not self._repeatable:
            self._loop.call_soon_threadsafe(self._start_rows_timer)
        return count >= ROWS_GATHERED_MAX

    async def take_rows(self) -> None:
        """Convert and write the rows kept by `add_row`."""
        async with self._order:
            await self._convert_rows()

    async def flush(self) -> None:
        """Wait until everything written before is acknowledged; raise the first failure."""
        async with self._order:
            await self._convert_rows()
            self._seal_all()
        await self._acknowledged()

    async def _acknowledged(self) -> None:
        """Wait for every batch that is sealed; raise the first failure."""
        if self._pending:
            await asyncio.wait([batch.done for batch in self._pending])
        self._raise_failure()

    async def close(self) -> None:
        """Flush, then let nothing more be written."""
        if self._closed:
            return
        try:
            if self._sender.ended is None or self._untold:
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
        if exc is not None and self._repeatable:
            self._drop_open()
        try:
            await self.close()
        except ZuflussError as e:
            if exc is None:
                raise
            exc.add_note(f"and the writer failed: {e}")

    def _drop_open(self) -> None:
        """Forget what is in no batch yet: when the task is run again, its batches end elsewhere."""
        for batch in self._open.values():
            self._budget.give(batch.memory)
        self._open.clear()
        self._open_bytes = 0
        with self._rows_lock:
            self._rows.clear()

    def _check(self) -> None:
        if self._closed:
            raise ZuflussError(f"the writer of table {self.info.path} is closed; make a new one")
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        ended = self._sender.ended
        if ended is not None:
            raise error(
                ended.code,
                "the writer ended and takes nothing more; go on from the last checkpoint with a "
                f"new one. It ended by: {ended.message}",
            )

    @property
    def _untold(self) -> bool:
        """There are rows, or a failure, that the caller does not know the end of."""
        return bool(self._pending or self._open or self._rows or self._failure)

    @property
    def _repeatable(self) -> bool:
        return self._identity is not None and self._identity.repeatable

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
        failure: ZuflussError | None = None
        for delete, group in groupby(rows, key=lambda kept: kept[0]):
            try:
                await self._convert_group([row for _, row in group], delete)
            except ColumnMismatchError as e:
                failure = failure or e
        if failure is not None:
            raise failure

    async def _convert_group(self, rows: list[Mapping[str, Any]], delete: bool) -> None:
        """Write rows; where one among them does not fit write the others, then raise."""
        try:
            batch = rows_to_batch(rows, self.info.schema.arrow, self.columns_of(delete=delete))
        except ColumnMismatchError:
            if len(rows) == 1:
                raise
        else:
            await self._route(Chunk(batch, delete))
            return
        failure: ZuflussError | None = None
        for row in rows:
            try:
                await self._convert_group([row], delete)
            except ColumnMismatchError as e:
                failure = failure or e
        if failure is not None:
            raise failure

    # -- routing -------------------------------------------------------------------------------

    async def _route(self, chunk: Chunk) -> None:
        if self._writer_id is None:
            self._writer_id = await self._sender.new_writer_id()
        for partition, rows in split_partitions(chunk.rows, self.info):
            try:
                partition_id = await self._partition_id(partition, create=not chunk.delete)
            except PartitionNotExistError:
                if chunk.delete:
                    continue  # where no partition is there is nothing to delete
                raise
            assigner = self._assigners.get(partition)
            if assigner is None:
                assigner = self._new_assigner()
                self._assigners[partition] = assigner
            for piece in _slices(rows, self._options.batch_bytes * self._fan_out):
                for bucket, part in await self._assign(assigner, piece):
                    queue = self._queue(partition, partition_id, bucket)
                    await self._append(queue, Chunk(part, chunk.delete), assigner)

    def _new_assigner(self) -> BucketAssigner:
        seed = None if self._identity is None else self._identity.seed
        return assigner_of(self.info, self._options, seed)

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

    async def _partition_id(self, name: str | None, *, create: bool) -> int | None:
        if name is None:
            return None
        known = self._connection.metadata.partitions.get((self.info.table_id, name))
        if known is not None:
            return known.partition_id
        if create and self._options.create_partitions and not await self._exists(name):
            await self._create_partition(name)
        try:
            return (await self._connection.partition(self.info, name)).partition_id
        except PartitionNotExistError as e:
            now = self._connection.metadata.tables.get(self.info.path)
            if now is not None and now.table_id != self.info.table_id:
                raise TableNotExistError(
                    f"table {self.info.path} was dropped and created again; open it anew"
                ) from e
            raise PartitionNotExistError(
                f"table {self.info.path} has no partition {name!r}; create it, or allow "
                "client.writer.dynamic-create-partition.enabled"
            ) from e

    async def _exists(self, name: str) -> bool:
        """Whether there is such a partition; servers take their time to say so as metadata."""
        spec = spec_of(self.info.partition_keys, name)
        partitions = await list_partitions(self._connection, self.info.path, spec)
        return any(partition.name == name for partition in partitions)

    async def _create_partition(self, name: str) -> None:
        request = m.CreatePartitionRequest(
            table_path=path_to_proto(self.info.path), ignore_if_not_exists=True
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

    async def _append(self, queue: BucketQueue, chunk: Chunk, assigner: BucketAssigner) -> None:
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
        batch.memory += memory
        self._open_bytes += memory
        if batch.memory >= FULL * self._options.batch_bytes:
            self._seal(queue)
            assigner.batch_full(queue.bucket.bucket_id)

    def _make_room(self, memory: int) -> None:
        """Seal all when too much would be open: decided by the input, whatever is under way."""
        if self._open_bytes + memory > self._budget.limit // 2:
            self._seal_all()

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
        self._open_bytes -= rows.memory
        batch = self._sender.add(queue, rows.memory)
        self._pending.add(batch)
        encoding = self._loop.run_in_executor(
            self._connection.executor,
            self.encode,
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
