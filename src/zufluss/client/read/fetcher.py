"""The fetching half of a log scan: keeps decoded rows ahead of the consumer.

Each tablet server that leads buckets of the scan has one task, which sends one fetch at a time. The
next fetch is sent as soon as an answer was split by bucket, while threads decode its batches and
the consumer works. Fetching pauses while more than `BUFFERED_FETCHES` times the bytes of a fetch
wait for the consumer.

| answer for a bucket | reaction |
|---|---|
| records | decoded in order; the position moves behind the last whole batch |
| filtered_end_offset | the position moves there |
| segments in remote storage | a task of the bucket reads them (`read/remote.py`) |
| a passing error, no answer | pause, refresh leaders, retry until the deadline |
| 34 on a table that was altered | from then on the client projects, not the server |
| 19 and every other error | the scan fails |

| outcome of a remote read | reaction |
|---|---|
| the location does not answer | as for a passing error, with a warning, and at most for `client.remote-file.read-timeout`; other buckets continue |
| a file is missing | the same: it expired, and the server knows what is there now |
| a file is forbidden, even with a new token | the same once: some stores say so of missing files |
| bytes differ from those written | the scan fails |

A server that answers at once although nothing is new is asked at most every `IDLE_MS`.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from zufluss.client.core.budget import MemoryBudget
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.metadata import ServerNode
from zufluss.client.core.offsets import BucketPlace
from zufluss.client.core.retry import PASSING, Backoff
from zufluss.client.read.decode import DecodedRows, FetchedChunk, LogDecoder
from zufluss.client.read.remote import RemoteReader, SegmentBatches
from zufluss.errors import (
    CorruptMessageError,
    CorruptRecordError,
    ErrorCode,
    LeaderNotAvailableError,
    OffsetOutOfRangeError,
    PartitionNotExistError,
    RequestTimeoutError,
    ZuflussError,
    error,
)
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableInfo
from zufluss.record.header import LENGTH_OVERHEAD, BatchHeader, iter_headers
from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectForbiddenError,
)
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.hot.fetch import BucketAnswer, read_fetch_response

log = logging.getLogger(__name__)

IDLE_MS: Final = 50
"""The shortest time between two fetches without progress."""
BUFFERED_FETCHES: Final = 2
"""Bytes that may wait for the consumer, in fetches."""
_NO_FOLLOWER: Final = -1
_PASSING: Final = PASSING | {
    ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION,
}


@dataclass(slots=True, eq=False)
class BucketProgress:
    """The progress of a scan in one bucket."""

    place: BucketPlace
    """The bucket and its partition's name."""
    position: int
    """The offset to fetch next."""
    stop: int | None
    """The scan ends before this offset; None follows the log."""
    fetch_bytes: int
    """The size that a fetch of this bucket aims at."""
    paused: bool = False
    """True while the bucket waits for a leader."""
    remote: bool = False
    """True while the bucket is read from remote storage."""
    forbidden: str = ""
    """The remote file that was forbidden at the last try; else empty."""
    backoff: Backoff | None = None
    """Set from the first failure to the next success."""
    failing_since: float = 0.0
    """Loop time of that failure."""
    failures: int = 0
    """Failures since then."""
    patience_ms: int = 0
    """How long the bucket may fail in the way it does now."""

    @property
    def finished(self) -> bool:
        """Whether everything up to the stop was fetched."""
        return self.stop is not None and self.position >= self.stop

    @property
    def is_fetched(self) -> bool:
        """Whether fetches to the leader contain this bucket."""
        return not (self.paused or self.remote or self.finished)


class ReadyChunk(NamedTuple):
    """A chunk that waits for the consumer."""

    bucket: TableBucket
    """The bucket."""
    rows: asyncio.Future[list[DecodedRows]]
    """The rows, once a thread has decoded them."""
    size: int
    """Bytes that the chunk takes from the budget."""
    end: int
    """The offset after the chunk."""


@dataclass(slots=True)
class FetchPlan:
    """What every fetch of a scan asks for."""

    info: TableInfo
    """The table."""
    decoder: LogDecoder
    """Decodes the answers."""
    predicate: m.PbPredicate | None
    """The filter for the server; None without a filter."""
    push_projection: bool
    """True if the server projects the columns."""
    partitions_may_go: bool
    """True if a dropped partition ends quietly; otherwise it is an error."""
    schema_of: Callable[[int], Coroutine[Any, Any, Schema]]
    """Returns another schema of the table from the cluster."""


class LogFetcher:
    """Fetches the buckets of one scan and keeps the answers in order of arrival."""

    def __init__(self, connection: ClusterConnection, plan: FetchPlan) -> None:
        self.ready: deque[ReadyChunk] = deque()
        """Chunks for the consumer, in order of arrival."""
        self.arrived = asyncio.Event()
        """Set when a chunk is ready, and when the fetcher has failed or is done."""
        self.failure: Exception | None = None
        """Why the fetcher stopped; chunks that arrived before are valid."""
        self._connection = connection
        self._options = connection.options
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._states: dict[TableBucket, BucketProgress] = {}
        self._servers: dict[ServerNode, asyncio.Task[None]] = {}
        self._own_tasks: set[asyncio.Task[None]] = set()
        self._budget = MemoryBudget(BUFFERED_FETCHES * self._options.fetch_bytes)
        self._turn = 0

    # -- called by the scanner -----------------------------------------------------------------

    def add(self, place: BucketPlace, start: int, stop: int | None) -> None:
        """Add a bucket."""
        self._states[place.bucket] = BucketProgress(
            place, start, stop, self._options.fetch_bucket_bytes
        )

    def remove_partitions(self, names: Collection[str | None]) -> None:
        """Stop fetching the buckets of these partitions."""
        for bucket, state in list(self._states.items()):
            if state.place.partition in names:
                del self._states[bucket]

    @property
    def partitions(self) -> set[str | None]:
        """Names of the partitions that are fetched."""
        return {state.place.partition for state in self._states.values()}

    @property
    def done(self) -> bool:
        """Whether nothing more will arrive."""
        return self.failure is not None or all(s.finished for s in self._states.values())

    def start(self) -> None:
        """Start the missing tasks of servers that lead unfinished buckets."""
        homeless = []
        for state in self._states.values():
            if not state.is_fetched:
                continue
            leader = self._connection.metadata.leader(state.place.bucket)
            if leader is None:
                homeless.append(state)
            elif leader not in self._servers:
                task = self._loop.create_task(self._fetch_from(leader))
                self._servers[leader] = task
                task.add_done_callback(lambda t, s=leader: self._stopped(s, t))  # type: ignore[misc]
        if homeless:
            name = self._name(homeless[0].place.bucket)
            self._recover(homeless, LeaderNotAvailableError(f"{name} has no leader at the moment"))
        if self.done:
            self.arrived.set()

    def _name(self, bucket: TableBucket) -> str:
        return self._connection.metadata.name_of(bucket)

    def release(self, size: int) -> None:
        """Give back the bytes of a chunk that the consumer took."""
        self._budget.give(size)

    async def close(self) -> None:
        """Stop fetching and wait until all tasks have ended."""
        tasks = [*self._servers.values(), *self._own_tasks]
        for task in tasks:
            task.cancel()
        pending = [item.rows for item in self.ready]
        self.ready.clear()
        await asyncio.gather(*tasks, *pending, return_exceptions=True)

    def fail(self, reason: Exception) -> None:
        """Stop with an error, which the consumer gets after the chunks that arrived before."""
        if self.failure is None:
            self.failure = reason
        self.arrived.set()

    # -- one server ----------------------------------------------------------------------------

    def _stopped(self, server: ServerNode, task: asyncio.Task[None]) -> None:
        self._servers.pop(server, None)
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, Exception):
            self.fail(failure)
        elif not task.cancelled() and self.failure is None:
            self.start()

    async def _fetch_from(self, server: ServerNode) -> None:
        """Fetch from one server as long as it leads unfinished buckets."""
        while self.failure is None:
            await self._budget.take(0)
            states = self._states_of(server)
            if not states:
                return
            began = self._loop.time()
            projected = self._plan.push_projection
            try:
                async with self._attempt(states, self._options.fetch_wait_ms):
                    body = await self._fetch(server, states, self._options.fetch_wait_ms)
                progress = await self._split_answer(body, projected)
            except ZuflussError as e:
                if e.code not in _PASSING:
                    raise
                self._recover(states, e, began)
                return
            if not progress:
                await asyncio.sleep(max(0.0, began + IDLE_MS / 1000 - self._loop.time()))

    def _states_of(self, server: ServerNode) -> list[BucketProgress]:
        """The unfinished buckets of a server, each time beginning with another one."""
        leader = self._connection.metadata.leader
        states = [
            state
            for bucket, state in self._states.items()
            if state.is_fetched and leader(bucket) == server
        ]
        self._turn += 1
        first = self._turn % len(states) if states else 0
        return states[first:] + states[:first]

    async def _fetch(
        self, server: ServerNode, states: list[BucketProgress], wait_ms: int
    ) -> memoryview:
        socket = await self._connection.socket(server.address)
        timeout_ms = self._options.request_timeout_ms + wait_ms
        request = self._request(states, wait_ms).SerializeToString()
        return await socket.send(ApiKey.FETCH_LOG, [request], timeout_ms=timeout_ms)

    def _request(self, states: list[BucketProgress], wait_ms: int) -> m.FetchLogRequest:
        plan = self._plan
        table = m.PbFetchLogReqForTable(
            table_id=plan.info.table_id,
            projection_pushdown_enabled=plan.push_projection,
            projected_fields=plan.decoder.projection if plan.push_projection else (),
            filter_predicate=plan.predicate,
            filter_schema_id=None if plan.predicate is None else plan.info.schema_id,
            buckets_req=[
                m.PbFetchLogReqForBucket(
                    partition_id=state.place.bucket.partition_id,
                    bucket_id=state.place.bucket.bucket_id,
                    fetch_offset=state.position,
                    max_fetch_bytes=state.fetch_bytes,
                )
                for state in states
            ],
        )
        return m.FetchLogRequest(
            follower_server_id=_NO_FOLLOWER,
            max_bytes=self._options.fetch_bytes,
            min_bytes=self._options.fetch_bytes_min,
            max_wait_ms=wait_ms,
            tables_req=[table],
            any_location=True,
        )

    # -- answers -------------------------------------------------------------------------------

    async def _split_answer(self, body: memoryview, projected: bool) -> bool:
        """Handle every bucket of an answer; returns whether one made progress."""
        progress = False
        for answer in read_fetch_response(body):
            state = self._states.get(answer.bucket)
            if state is None or not state.is_fetched:
                continue
            before = state.position
            info = await self._take_bucket(state, answer, projected)
            if info is not None:
                self._start_remote(state, info)
            progress = progress or state.position > before or info is not None
        if all(state.finished for state in self._states.values()):
            self.arrived.set()
        return progress

    async def _take_bucket(
        self, state: BucketProgress, answer: BucketAnswer, projected: bool
    ) -> m.PbRemoteLogFetchInfo | None:
        """Handle one bucket of an answer; returns the remote segments to read, if any."""
        if answer.error_code:
            self._refused(state, answer, projected)
            return None
        if len(answer.remote):
            return _remote_info(answer, self._name)
        state.backoff = None
        if len(answer.records):
            await self._take_records(state, answer.records, projected)
        if answer.filtered_end_offset is not None:
            state.position = max(state.position, answer.filtered_end_offset)
        return None

    async def _take_records(
        self, state: BucketProgress, records: memoryview, projected: bool
    ) -> None:
        batches = [b for b in iter_headers(records) if b[1].next_offset > state.position]
        if not batches:
            self._want_more(state, records)
            return
        await self._learn_schemas(batches)
        self._budget.give(-len(records))
        self._take_batches(state, records, batches, len(records), projected)

    async def _learn_schemas(self, batches: Sequence[tuple[int, BatchHeader]]) -> None:
        for schema_id in self._plan.decoder.unknown_schemas(batches):
            self._plan.decoder.add_schema(schema_id, await self._plan.schema_of(schema_id))

    def _take_batches(
        self,
        state: BucketProgress,
        records: memoryview,
        batches: Sequence[tuple[int, BatchHeader]],
        size: int,
        projected: bool,
        source: str = "",
    ) -> None:
        """Decode whole batches in a thread; `size` was taken from the budget."""
        bucket, start = state.place.bucket, state.position
        chunk = FetchedChunk(bucket, records, batches, start, state.stop, projected, source)
        state.position = batches[-1][1].next_offset
        rows = self._loop.run_in_executor(
            self._connection.executor, self._plan.decoder.decode, chunk
        )
        self.ready.append(ReadyChunk(bucket, rows, size, state.position))
        self.arrived.set()

    def _want_more(self, state: BucketProgress, records: memoryview) -> None:
        """Raise the fetch size of a bucket whose first batch was cut at the byte limit."""
        if len(records) < LENGTH_OVERHEAD:
            return
        size = int.from_bytes(records[8:12], "little") + LENGTH_OVERHEAD
        if size <= len(records):
            raise CorruptRecordError(
                f"{self._name(state.place.bucket)}: a fetch from offset {state.position} returned "
                "only records before it"
            )
        state.fetch_bytes = max(state.fetch_bytes, size)

    def _refused(self, state: BucketProgress, answer: BucketAnswer, projected: bool) -> None:
        reason = error(answer.error_code, f"{self._name(answer.bucket)}: {answer.error_message}")
        if reason.code in _PASSING:
            self._recover([state], reason)
            return
        altered = self._plan.info.schema_id > 1
        if reason.code is ErrorCode.INVALID_COLUMN_PROJECTION and projected and altered:
            log.debug("scan.projection_refused bucket=%r", answer.bucket)
            self._plan.push_projection = False
            return
        if isinstance(reason, OffsetOutOfRangeError):
            raise OffsetOutOfRangeError(
                f"{self._name(answer.bucket)}: offset {state.position} is outside the log; it may "
                "have been removed by table.log.ttl. Start at 'earliest', or at an offset that "
                f"exists. The server says: {answer.error_message}"
            )
        raise reason

    # -- remote storage ------------------------------------------------------------------------

    def _start_remote(self, state: BucketProgress, info: m.PbRemoteLogFetchInfo) -> None:
        """Read a bucket from remote storage until its leader has the log again."""
        state.remote = True
        task = self._loop.create_task(self._read_remote(state, info))
        self._own_tasks.add(task)
        task.add_done_callback(self._is_over)

    async def _read_remote(self, state: BucketProgress, info: m.PbRemoteLogFetchInfo) -> None:
        more: m.PbRemoteLogFetchInfo | None = info
        try:
            while more is not None and self._is_wanted(state):
                await self._read_run(state, more)
                more = await self._ask_on(state) if self._is_wanted(state) else None
        except ZuflussError as e:
            if not self._may_pass(state, e):
                raise
            self._recover([state], e)
        finally:
            state.remote = False

    async def _read_run(self, state: BucketProgress, info: m.PbRemoteLogFetchInfo) -> None:
        """Read the remote segments of one answer."""
        reader, table = RemoteReader(self._connection.remote), self._plan.info.path
        before = state.position
        async with aclosing(reader.batches(table, info, state.stop, self._budget)) as run:
            async for part in run:
                await self._take_part(state, part)
                if not self._is_wanted(state):
                    return
        if state.position == before:
            raise CorruptRecordError(
                f"{self._name(state.place.bucket)}: the segments in {info.remote_log_tablet_dir} "
                f"end before offset {before}, which they should have"
            )

    async def _take_part(self, state: BucketProgress, part: SegmentBatches) -> None:
        """Decode the batches of a segment from the bucket's position on."""
        batches = [b for b in part.batches if b[1].next_offset > state.position]
        size = part.size
        try:
            await self._learn_schemas(batches)
            if batches:
                state.backoff, state.forbidden = None, ""
                self._take_batches(state, part.records, batches, size, False, part.source)
                size = 0
        finally:
            self._budget.give(size)

    async def _ask_on(self, state: BucketProgress) -> m.PbRemoteLogFetchInfo | None:
        """Ask the leader for the next part of a bucket, without waiting for new records."""
        server = self._connection.metadata.leader(state.place.bucket)
        if server is None:
            return None
        projected = self._plan.push_projection
        async with self._attempt([state], 0):
            body = await self._fetch(server, [state], 0)
        info = None
        for answer in read_fetch_response(body):
            if answer.bucket == state.place.bucket:
                info = await self._take_bucket(state, answer, projected)
        return info

    def _is_wanted(self, state: BucketProgress) -> bool:
        current = self._states.get(state.place.bucket)
        return current is state and not state.paused and not state.finished

    def _may_pass(self, state: BucketProgress, reason: ZuflussError) -> bool:
        """Whether a failed remote read is retried."""
        if isinstance(reason, ObjectForbiddenError):
            file = f"{reason.uri}/{reason.path}"
            again, state.forbidden = state.forbidden == file, file
            return not again
        return reason.code in _PASSING and not isinstance(reason, ObjectCorruptError)

    # -- recovery ------------------------------------------------------------------------------

    def _patience_ms(self, state: BucketProgress, reason: ZuflussError) -> int:
        """How long a bucket may fail: a scan that follows a log outlives restarts of servers."""
        if isinstance(reason, LocationUnavailableError):
            return self._options.remote_read_timeout_ms
        if state.stop is None:
            return self._options.delivery_timeout_ms
        return self._options.request_timeout_ms

    def _attempt(
        self, states: Sequence[BucketProgress], wait_ms: int
    ) -> AbstractAsyncContextManager[None]:
        """Limit a request: by `client.request-timeout`, and by what is left of the patience."""
        limit = Backoff(self._options.request_timeout_ms + wait_ms)
        for state in states:
            if state.backoff is not None:
                left = Backoff(state.patience_ms + wait_ms, since=state.failing_since)
                limit = min(limit, left, key=lambda each: each.left_ms)
        return limit.attempt()

    def _recover(
        self, states: list[BucketProgress], reason: ZuflussError, since: float | None = None
    ) -> None:
        """Pause buckets, refresh their leaders, then continue; they fail `since` a moment ago."""
        for state in states:
            state.paused = True
            if state.backoff is None:
                state.backoff = Backoff(self._options.request_timeout_ms)
                state.failing_since = self._loop.time() if since is None else since
                state.failures = 0
            state.failures += 1
            state.patience_ms = self._patience_ms(state, reason)
            if reason.refresh_metadata or reason.code is ErrorCode.REQUEST_TIME_OUT:
                self._connection.metadata.forget_leader(state.place.bucket)
        task = self._loop.create_task(self._recover_later(states, reason))
        self._own_tasks.add(task)
        task.add_done_callback(self._is_over)

    def _is_over(self, task: asyncio.Task[None]) -> None:
        """Note the end of a bucket's own task: fetch it with the others again, or fail."""
        self._own_tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, Exception):
            self.fail(failure)
        elif not task.cancelled() and self.failure is None:
            self.start()

    async def _recover_later(self, states: list[BucketProgress], reason: ZuflussError) -> None:
        timeout_ms = min(state.patience_ms for state in states)
        if isinstance(reason, LocationUnavailableError):
            _warn(states, reason, timeout_ms)
        log.debug("scan.recover buckets=%d error=%s", len(states), reason)
        pause = max(state.backoff.pause_seconds() for state in states if state.backoff)
        failing_since = min(state.failing_since for state in states)
        if self._loop.time() + pause - failing_since > timeout_ms / 1000:
            raise reason
        await asyncio.sleep(pause)
        with suppress(RequestTimeoutError):  # left to the next fetch
            async with self._attempt(states, 0):
                await self._refresh_all(states)
        for state in states:
            state.paused = False

    async def _refresh_all(self, states: list[BucketProgress]) -> None:
        for name, id_ in {(s.place.partition, s.place.bucket.partition_id) for s in states}:
            await self._refresh(name, id_)

    async def _refresh(self, partition: str | None, partition_id: int | None) -> None:
        """Refresh the leaders of the table or partition; a dropped partition may be removed."""
        info, names = self._plan.info, [] if partition is None else [partition]
        try:
            await self._connection.refresh_leaders(info, names)
            for name in names:
                now = self._connection.metadata.partitions.get((info.table_id, name))
                if now is not None and now.partition_id != partition_id:
                    raise PartitionNotExistError(
                        f"table {info.path}: partition {name!r} was dropped and created again"
                    )
        except PartitionNotExistError:
            if not self._plan.partitions_may_go:
                raise
            self.remove_partitions(names)
        except ZuflussError as e:
            if e.code not in PASSING:
                raise


def _warn(states: list[BucketProgress], reason: ZuflussError, timeout_ms: int) -> None:
    """Say that buckets wait for a location, at the 1st, 2nd, 4th … failure in a row."""
    for state in states:
        if state.failures.bit_count() == 1:
            log.warning(
                "scan.location_unavailable bucket=%r failures=%d retried_for_ms=%d error=%s",
                state.place.bucket,
                state.failures,
                timeout_ms,
                reason,
            )


def _remote_info(
    answer: BucketAnswer, name_of: Callable[[TableBucket], str]
) -> m.PbRemoteLogFetchInfo:
    try:
        return m.PbRemoteLogFetchInfo.FromString(bytes(answer.remote))
    except DecodeError as e:
        name = name_of(answer.bucket)
        raise CorruptMessageError(f"{name}: the remote log of an answer: {e}") from None
