"""The sending half of a writer: order, retries, idempotence, back-pressure.

A `BucketQueue` holds the unacknowledged batches of one bucket in order. The `Sender` takes encoded
batches from the front of the queues, packs them into requests by leading server, and handles the
answers. Per bucket it promises:

* Batches are appended in the order in which they were sealed; at most `inflight_max` are under way.
* With idempotence each batch has a sequence, so sending it again cannot write it twice.
* After a passing failure nothing overtakes: the failed batch is sent first and alone, the others
  follow once it succeeded.
* A server under pressure gets fewer batches at a time; at full pressure it gets one.
* A batch that cannot be written is reported, never dropped silently. The batches behind it continue
  under a new writer id, because the server would refuse the gap in the sequences.
* A sender with a fixed writer id (a producer's) cannot change its id: it ends with the first batch
  that cannot be written, and the batches behind it fail for the same reason.

| answer | reaction |
|---|---|
| ok, 32 (duplicate) | the batch is done |
| 31 (gap) behind an unfinished batch | the batch is sent again in its turn |
| 31 at the front, 33 (unknown writer) | sent again under a new id, unless it may be written |
| a passing error, no answer | pause, refresh metadata, send again until the batch's deadline |
| 3, 14 (corrupt) | sent again `CORRUPT_RETRIES_MAX` times |
| bucket missing in the answer, any other error | the batch fails |
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from google.protobuf.message import Message

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.metadata import ServerNode
from zufluss.client.core.retry import PASSING, Backoff
from zufluss.errors import (
    ErrorCode,
    LeaderNotAvailableError,
    NetworkError,
    OutOfOrderSequenceError,
    ZuflussError,
    error,
)
from zufluss.model.table import TableBucket, TableInfo
from zufluss.net.client import RpcConnection
from zufluss.record.header import NO_SEQUENCE, NO_WRITER_ID
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.codec import decode
from zufluss.wire.frame import Buffer
from zufluss.wire.tables import bucket_key, path_to_proto

log = logging.getLogger(__name__)

CORRUPT_RETRIES_MAX: Final = 2
"""Retries of a batch that the server finds corrupt; it may have been damaged on the way."""
_CORRUPT: Final = frozenset({ErrorCode.CORRUPT_MESSAGE, ErrorCode.CORRUPT_RECORD_EXCEPTION})
_UNANSWERED: Final = (NetworkError, TimeoutError)
_SEQUENCE_MASK: Final = 0x7FFF_FFFF


def _may_have_moved(reason: ZuflussError) -> bool:
    """Whether another server may lead the bucket by now: a silent one may be lost."""
    return reason.refresh_metadata or isinstance(reason, TimeoutError)


class SendableBatch(Protocol):
    """A batch ready to send; writer id and sequence can be changed."""

    view: memoryview
    """The bytes of the whole batch."""

    def __len__(self) -> int: ...

    def stamp(self, writer_id: int, sequence: int) -> None:
        """Write the header with this writer id and sequence, if they differ."""


class WriteCall(NamedTuple):
    """The request that carries batches: PRODUCE_LOG or PUT_KV."""

    api_key: ApiKey
    """The API key of the request."""
    response: type[Message]
    """The answer's type; `buckets_resp` has an error code and maybe a pressure per bucket."""
    request: Callable[[int, int, int, Sequence[tuple[TableBucket, Buffer]]], list[Buffer]]
    """Builds the body from acks, table id, timeout and the batch of each bucket."""


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A sealed batch that is not acknowledged yet."""

    done: asyncio.Future[None]
    """Resolved when the batch is acknowledged or has failed."""
    deadline: float
    """Loop time after which the batch is not sent again."""
    sequence: int
    """The batch's number under the writer id of its bucket."""
    memory: int
    """Bytes that the batch takes from the writer's budget."""
    rows: int
    """Number of rows written to the batch, deletes included."""
    deletes: int
    """Number of deletes among them."""
    encoded: SendableBatch | None = None
    """The encoded batch; None while a thread encodes it."""
    in_flight: bool = False
    """True while the batch is sent and not answered."""
    attempts: int = 0
    """Number of times the batch was sent."""
    deleted_rows: int | None = None
    """The number of rows that the deletes of the batch removed, if the answer has it."""
    unanswered: bool = False
    """True if an attempt got no answer, so the server may have written the batch."""


@dataclass(slots=True, eq=False)
class BucketQueue:
    """The unacknowledged batches of one bucket, in order."""

    bucket: TableBucket
    """The bucket."""
    partition: str | None
    """The partition's name, for requests for its leader; None without partitions."""
    writer_id: int = NO_WRITER_ID
    """The writer id of the sequences."""
    next_sequence: int = 0
    """The sequence of the next batch."""
    last_acked: int = -1
    """The highest sequence acknowledged under this writer id."""
    batches: deque[PendingBatch] = field(default_factory=deque)
    """Unacknowledged batches in order of their sequences."""
    in_flight: int = 0
    """Number of batches that are sent and not answered."""
    backoff: Backoff | None = None
    """Set while the first batch is retried; then it is sent alone."""
    paused: bool = False
    """True while the queue waits for a pause, a socket or a writer id."""
    reset: bool = False
    """True if a new writer id is needed before the next batch is sent."""
    pressure: float = 0.0
    """The pressure that the server reported, 0 to 1."""

    def sendable(self, inflight_max: int) -> PendingBatch | None:
        """The next batch that may be sent now; None if there is none."""
        alone = self.backoff is not None or self.reset
        limit = 1 if alone else max(1, round(inflight_max * (1 - self.pressure)))
        if self.paused or self.in_flight >= limit:
            return None
        waiting = next((b for b in self.batches if not b.in_flight), None)
        return waiting if waiting is not None and waiting.encoded is not None else None


class Sender:
    """Sends the batches of one writer."""

    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        call: WriteCall,
        finished: Callable[[PendingBatch, ZuflussError | None], None],
        writer_id: int | None = None,
    ) -> None:
        self.ended: ZuflussError | None = None
        """Why a sender has ended; None while it sends."""
        self.trouble: ZuflussError | None = None
        """The last passing failure of a batch; None after an acknowledgement."""
        self._fixed_id = writer_id
        self._connection = connection
        self._options = connection.options
        self._info = info
        self._call = call
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        self._ready: dict[BucketQueue, None] = {}
        self._pump_due = False
        self._tasks: set[asyncio.Task[None]] = set()

    # -- called by the writer -----------------------------------------------------------------

    async def new_writer_id(self) -> int:
        """The fixed writer id, or a new one from the cluster; −1 without idempotence."""
        if self._fixed_id is not None:
            return self._fixed_id
        if not self._options.idempotent:
            return NO_WRITER_ID
        backoff = Backoff(self._options.request_timeout_ms)
        request = m.InitWriterRequest(table_path=[path_to_proto(self._info.path)])
        while True:
            try:
                async with backoff.attempt():
                    response = await self._connection.call_any(ApiKey.INIT_WRITER, request)
                return int(response.writer_id)
            except ZuflussError as e:
                passing = e.retriable or e.code in PASSING
                if not passing and e.code is not ErrorCode.UNKNOWN_SERVER_ERROR:
                    raise
                failure = e
            await backoff.pause(failure)

    def add(self, queue: BucketQueue, memory: int, rows: int, deletes: int = 0) -> PendingBatch:
        """Queue a new batch with its sequence; it is sent once `encoded` was called."""
        sequence = queue.next_sequence if self._options.idempotent else NO_SEQUENCE
        queue.next_sequence = (queue.next_sequence + 1) & _SEQUENCE_MASK
        deadline = self._loop.time() + self._options.delivery_timeout_ms / 1000
        batch = PendingBatch(self._loop.create_future(), deadline, sequence, memory, rows, deletes)
        queue.batches.append(batch)
        return batch

    def encoded(self, queue: BucketQueue, batch: PendingBatch, encoded: SendableBatch) -> None:
        """Note the encoded batch and send it in its turn."""
        batch.encoded = encoded
        self._wake(queue)

    def fail(self, queue: BucketQueue, batch: PendingBatch, reason: ZuflussError) -> None:
        """Give up a batch and report the reason."""
        queue.batches.remove(batch)
        if self._fixed_id is not None:
            self.ended = self.ended or reason
        else:
            queue.reset = self._options.idempotent
        self._finished(batch, reason)
        self._wake(queue)

    def end(self, reason: ZuflussError) -> None:
        """Send no more batches; those under way may still be answered."""
        self.ended = self.ended or reason

    async def close(self) -> None:
        """Cancel retries; for a sender without batches, or to give up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- sending -------------------------------------------------------------------------------

    def _wake(self, queue: BucketQueue) -> None:
        self._ready[queue] = None
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what may be sent now, at most one batch per bucket and request."""
        self._pump_due = False
        queues, self._ready = self._ready, {}
        by_server: dict[ServerNode, list[tuple[BucketQueue, PendingBatch]]] = {}
        for queue in queues:
            if self.ended is not None:
                self._fail_encoded(queue, self.ended)
                continue
            batch = queue.sendable(self._options.inflight_max)
            if batch is None:
                continue
            leader = self._connection.metadata.leader(queue.bucket)
            if queue.reset:
                self._start(queue, self._renumber(queue))
            elif leader is None:
                self._start(queue, self._recover(queue, None))
            else:
                by_server.setdefault(leader, []).append((queue, batch))
        for server, items in by_server.items():
            self._send_to(server, items)

    def _send_to(self, server: ServerNode, items: list[tuple[BucketQueue, PendingBatch]]) -> None:
        socket = self._connection.open_socket(server.address)
        if socket is None:
            for queue, _ in items:
                self._start(queue, self._recover(queue, None))
            return
        for request in _requests(items, self._options.request_bytes):
            self._send(socket, request)
        for queue, _ in items:
            self._wake(queue)

    def _send(self, socket: RpcConnection, items: list[tuple[BucketQueue, PendingBatch]]) -> None:
        records = []
        for queue, batch in items:
            assert batch.encoded is not None
            batch.encoded.stamp(queue.writer_id, batch.sequence)
            batch.in_flight = True
            batch.attempts += 1
            queue.in_flight += 1
            records.append((queue.bucket, batch.encoded.view))
        left_s = min(batch.deadline for _, batch in items) - self._loop.time()
        timeout_ms = max(1, min(self._options.request_timeout_ms, round(left_s * 1000)))
        body = self._call.request(self._options.acks, self._info.table_id, timeout_ms, records)
        try:
            answer = socket.send(self._call.api_key, body, timeout_ms=timeout_ms)
        except ZuflussError as e:
            self._settle(items, e)
            return
        answer.add_done_callback(lambda future: self._answered(items, future))

    def _answered(
        self,
        items: list[tuple[BucketQueue, PendingBatch]],
        future: asyncio.Future[memoryview],
    ) -> None:
        if future.cancelled():
            self._settle(items, NetworkError("the request was cancelled"))
            return
        failure = future.exception()
        if failure is None:
            try:
                response: Any = decode(self._call.response, future.result())
            except ZuflussError as e:
                failure = e
        if isinstance(failure, ZuflussError):
            self._settle(items, failure)
            return
        results = {bucket_key(result): result for result in response.buckets_resp}
        for queue, batch in items:
            result = results.get((queue.bucket.partition_id, queue.bucket.bucket_id))
            queue.pressure = min(max(getattr(result, "pressure", 0.0), 0.0), 1.0)
            if batch.deletes and result is not None and result.HasField("deleted_rows"):
                batch.deleted_rows = result.deleted_rows
            name = self._connection.metadata.name_of
            self._settle([(queue, batch)], _outcome(result, queue.bucket, name))

    # -- answers -------------------------------------------------------------------------------

    def _settle(
        self, items: Iterable[tuple[BucketQueue, PendingBatch]], outcome: ZuflussError | None
    ) -> None:
        for queue, batch in items:
            batch.in_flight = False
            queue.in_flight -= 1
            if outcome is None or outcome.code is ErrorCode.DUPLICATE_SEQUENCE_EXCEPTION:
                self._acknowledged(queue, batch)
            else:
                self._refused(queue, batch, outcome)
            self._wake(queue)

    def _acknowledged(self, queue: BucketQueue, batch: PendingBatch) -> None:
        queue.batches.remove(batch)
        queue.last_acked = max(queue.last_acked, batch.sequence)
        queue.backoff = self.trouble = None
        self._finished(batch, None)

    def _refused(self, queue: BucketQueue, batch: PendingBatch, reason: ZuflussError) -> None:
        if isinstance(reason, _UNANSWERED):
            batch.unanswered = True
        if reason.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_EXCEPTION:
            self._out_of_order(queue, batch, reason)
        elif reason.code is ErrorCode.UNKNOWN_WRITER_ID_EXCEPTION and self._fixed_id is None:
            queue.reset = True
        elif self._may_retry(batch, reason):
            self._retry(queue, reason)
        else:
            self.fail(queue, batch, reason)

    def _out_of_order(self, queue: BucketQueue, batch: PendingBatch, reason: ZuflussError) -> None:
        if batch.sequence <= queue.last_acked:
            self._acknowledged(queue, batch)  # a later batch is written, so this one is, too
        elif batch is not queue.batches[0]:
            return
        elif self._fixed_id is not None:
            self.fail(queue, batch, reason)
        else:
            queue.reset = True

    def _may_retry(self, batch: PendingBatch, reason: ZuflussError) -> bool:
        if self.ended is not None:
            return False
        if reason.code in _CORRUPT and batch.attempts > CORRUPT_RETRIES_MAX:
            return False
        in_time = self._loop.time() < batch.deadline
        return reason.retriable and in_time and batch.attempts <= self._options.retries

    def _retry(self, queue: BucketQueue, reason: ZuflussError) -> None:
        """Pause the queue, then send its first batch again."""
        if queue.backoff is None:
            queue.backoff = Backoff(self._options.delivery_timeout_ms)
        if queue.paused:
            return
        log.debug("writer.retry bucket=%r error=%s", queue.bucket, reason)
        if _may_have_moved(reason):
            self._connection.metadata.forget_leader(queue.bucket)
        self._start(queue, self._recover(queue, reason))

    # -- pauses and recovery -----------------------------------------------------------------

    def _start(self, queue: BucketQueue, work: Coroutine[Any, Any, None]) -> None:
        """Run work for which the queue pauses; the queue is woken afterwards."""
        queue.paused = True
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._resume(queue, done))

    def _resume(self, queue: BucketQueue, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        queue.paused = False
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            reason = failure if isinstance(failure, ZuflussError) else ZuflussError(repr(failure))
            self._fail_waiting(queue, reason)
        self._wake(queue)

    async def _recover(self, queue: BucketQueue, reason: ZuflussError | None) -> None:
        """Pause after a failure, then find the leader and connect to it."""
        while True:
            if reason is not None:
                self.trouble = reason
                self._fail_waiting(queue, reason, self._loop.time())
                if not queue.batches or self.ended is not None:
                    return None
                queue.backoff = queue.backoff or Backoff(self._options.delivery_timeout_ms)
                await asyncio.sleep(queue.backoff.pause_seconds())
            left_s = min(batch.deadline for batch in queue.batches) - self._loop.time()
            # A leader that accepts connections and answers nothing may be replaced meanwhile.
            limit_ms = min(left_s * 1000, self._options.request_timeout_ms)
            try:
                async with Backoff(max(limit_ms, 1)).attempt():
                    return await self._connect(queue)
            except ZuflussError as e:
                if not e.retriable:
                    raise
                if _may_have_moved(e):
                    self._connection.metadata.forget_leader(queue.bucket)
                reason = e

    async def _connect(self, queue: BucketQueue) -> None:
        metadata = self._connection.metadata
        if metadata.leader(queue.bucket) is None:
            names = [] if queue.partition is None else [queue.partition]
            await self._connection.refresh_leaders(self._info, names)
        leader = metadata.leader(queue.bucket)
        if leader is None:
            name = metadata.name_of(queue.bucket)
            raise LeaderNotAvailableError(f"{name} has no leader at the moment")
        await self._connection.socket(leader.address)

    async def _renumber(self, queue: BucketQueue) -> None:
        """Continue under a new writer id with sequences from 0.

        Batches that the server may have written already fail instead.
        """
        name = self._connection.metadata.name_of(queue.bucket)
        for batch in [b for b in queue.batches if b.unanswered]:
            self.fail(
                queue,
                batch,
                OutOfOrderSequenceError(
                    f"{name}: the server forgot writer {queue.writer_id}, and an earlier "
                    "attempt to write this batch got no answer: it may or may not be written"
                ),
            )
        queue.writer_id = await self.new_writer_id()
        for sequence, batch in enumerate(queue.batches):
            batch.sequence = sequence
        queue.next_sequence, queue.last_acked, queue.reset = len(queue.batches), -1, False

    def _fail_encoded(self, queue: BucketQueue, reason: ZuflussError) -> None:
        """Give up batches that could be sent; the others follow once encoded or answered."""
        for batch in [b for b in queue.batches if b.encoded is not None and not b.in_flight]:
            self.fail(queue, batch, reason)

    def _fail_waiting(
        self, queue: BucketQueue, reason: ZuflussError, deadline: float = float("inf")
    ) -> None:
        """Give up batches that are not under way and whose deadline has passed."""
        for batch in [b for b in queue.batches if not b.in_flight and b.deadline <= deadline]:
            self.fail(queue, batch, reason)


def _outcome(
    result: Any, bucket: TableBucket, name_of: Callable[[TableBucket], str]
) -> ZuflussError | None:
    if result is None:
        return ZuflussError(f"{name_of(bucket)} is missing in the server's answer to a write")
    if not result.error_code:
        return None
    text = result.error_message or "refused by the server"
    return error(result.error_code, f"{name_of(bucket)}: {text}")


def _requests(
    items: list[tuple[BucketQueue, PendingBatch]], bytes_max: int
) -> Iterator[list[tuple[BucketQueue, PendingBatch]]]:
    """Cut the batches for one server into requests of at most `bytes_max`, or of one batch."""
    request: list[tuple[BucketQueue, PendingBatch]] = []
    size = 0
    for queue, batch in items:
        assert batch.encoded is not None
        if request and size + len(batch.encoded) > bytes_max:
            yield request
            request, size = [], 0
        request.append((queue, batch))
        size += len(batch.encoded)
    if request:
        yield request
