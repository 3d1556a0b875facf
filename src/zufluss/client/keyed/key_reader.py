"""The sending half of lookups: sends keys to the servers that have them and returns the answers.

Keys of a table are grouped by bucket, and buckets by leading server. Each server gets its keys in
requests of limited size, all at the same time. Each answer is delivered as it
arrives, so a slow server delays only its own keys. Passing errors are retried, after a pause and
with new metadata, until the deadline. A partition that does not exist has no rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf.message import Message

from zufluss.client.core.buckets import group_rows, split_partitions
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.metadata import ServerNode
from zufluss.client.core.retry import PASSING, Backoff
from zufluss.errors import (
    CorruptMessageError,
    ErrorCode,
    LeaderNotAvailableError,
    PartitionNotExistError,
    RecordTooLargeError,
    ZuflussError,
    error,
)
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import bucket_key

if TYPE_CHECKING:
    from zufluss.record.keys.encoding import KeyEncoder

REQUEST_BYTES_MAX: Final = 1 << 20
"""Most bytes of keys in one request; servers refuse requests of twice as much."""
_KEY_OVERHEAD: Final = 6
"""Bytes of a request that a key takes besides its own."""
REQUEST_KEYS_MAX: Final = 4_096
"""Keys in one request."""

_POSITION: Final = "\0position"
_AGAIN: Final = PASSING | {ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION}

T = TypeVar("T")


class KeyGroup(NamedTuple):
    """The keys of one bucket."""

    partition: str | None
    """The partition's name; None without partitions."""
    bucket: int
    """The bucket's number."""
    positions: npt.NDArray[np.int64]
    """The positions of these keys among the caller's keys."""
    keys: list[bytes]
    """The encoded keys."""

    def pieces(self, size: int) -> Iterator[KeyGroup]:
        """Cut the group into parts of at most `size` keys."""
        for start in range(0, len(self.keys), size):
            end = start + size
            yield self._replace(positions=self.positions[start:end], keys=self.keys[start:end])


Deliver: TypeAlias = Callable[[list[tuple[KeyGroup, list[T]]]], Awaitable[None]]
"""Receives groups with their results, one result per key."""


class ReadCall(NamedTuple, Generic[T]):
    """The request of a lookup: LOOKUP or PREFIX_LOOKUP."""

    api_key: ApiKey
    """The API key of the request."""
    request: type[Message]
    """The request's type, with `table_id`, and `keys` per bucket in `buckets_req`."""
    results: Callable[[Any], list[T]]
    """Returns the result of each key from the answer for a bucket."""
    nothing: T
    """The result of a key without rows."""


LOOKUP: Final[ReadCall[bytes | None]] = ReadCall(
    ApiKey.LOOKUP,
    m.LookupRequest,
    lambda answer: [v.values if v.HasField("values") else None for v in answer.values],
    None,
)
PREFIX_LOOKUP: Final[ReadCall[Sequence[bytes]]] = ReadCall(
    ApiKey.PREFIX_LOOKUP,
    m.PrefixLookupRequest,
    lambda answer: [message.values for message in answer.value_lists],
    (),
)


class KeyReader(Generic[T]):
    """Reads rows of one table by key."""

    def __init__(
        self, connection: ClusterConnection, info: TableInfo, call: ReadCall[T], encoder: KeyEncoder
    ) -> None:
        from zufluss.record.keys.encoding import KeyEncoder
        from zufluss.record.keys.hash import bucket_ids  # these load the compiled kernels

        self._bucket_ids = bucket_ids
        self._connection = connection
        self._info = info
        self._call = call
        self._encoder = encoder
        self._bucket_encoder = KeyEncoder.of_bucket_key(info)

    def groups(self, keys: pa.RecordBatch) -> list[KeyGroup]:
        """Group keys by partition and bucket; `keys` has the key columns."""
        groups = []
        for partition, rows, positions in self._partitions(keys):
            data, offsets = self._encoder.encode(rows)
            raw, ends = data.tobytes(), offsets.tolist()
            encoded = [raw[start:end] for start, end in pairwise(ends)]
            for bucket, at in group_rows(self._buckets(rows, data, offsets)):
                chosen = [encoded[i] for i in at.tolist()]
                groups.append(KeyGroup(partition, bucket, positions[at], chosen))
        return groups

    def _partitions(
        self, keys: pa.RecordBatch
    ) -> Iterator[tuple[str | None, pa.RecordBatch, npt.NDArray[np.int64]]]:
        """Yield each partition with its keys and their positions."""
        numbers = np.arange(keys.num_rows)
        if not self._info.is_partitioned:
            yield None, keys, numbers
            return
        numbered = keys.append_column(_POSITION, pa.array(numbers))
        for partition, rows in split_partitions(numbered, self._info):
            yield partition, rows, rows.column(_POSITION).to_numpy()

    def _buckets(
        self, rows: pa.RecordBatch, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        """The bucket of each key; encodes the bucket key only if it differs from the key."""
        if self._encoder != self._bucket_encoder:
            data, offsets = self._bucket_encoder.encode(rows)
        count, kind = self._info.bucket_count, self._connection.options.bucket_hash
        return self._bucket_ids(data, offsets, count, self._bucket_encoder.lake, kind)

    async def read(
        self,
        groups: Sequence[KeyGroup],
        deliver: Deliver[T],
    ) -> None:
        """Read all groups and pass the results to `deliver` as they arrive."""
        timeout_ms = self._connection.options.request_timeout_ms
        backoff = Backoff(timeout_ms)
        while True:
            async with backoff.attempt():
                places, absent = await self._places(groups)
            if absent:
                await deliver([(g, [self._call.nothing] * len(g.keys)) for g in absent])
            outcomes = await asyncio.gather(
                *(
                    self._ask(server, request, deliver, backoff)
                    for server, requests in places.items()
                    for request in _requests(requests)
                )
            )
            before, groups = groups, [group for failed, _ in outcomes for group in failed]
            if not groups:
                return
            if len(groups) < len(before) - len(absent):
                backoff = Backoff(timeout_ms)  # servers answer; only those of some buckets are away
            await backoff.pause(next(reason for failed, reason in outcomes if failed and reason))
            async with backoff.attempt():
                await self._refresh({g.partition for g in groups if g.partition is not None})

    async def _places(
        self, groups: Sequence[KeyGroup]
    ) -> tuple[dict[ServerNode | None, list[tuple[TableBucket, KeyGroup]]], list[KeyGroup]]:
        """Group by leader (None without a leader); returns groups without a partition apart."""
        places: dict[ServerNode | None, list[tuple[TableBucket, KeyGroup]]] = {}
        absent = []
        partitions = await self._partition_ids({group.partition for group in groups})
        for group in groups:
            if group.partition not in partitions:
                absent.append(group)
                continue
            partition_id = partitions[group.partition]
            bucket = TableBucket(self._info.table_id, partition_id, group.bucket)
            leader = self._connection.metadata.leader(bucket)
            places.setdefault(leader, []).append((bucket, group))
        return places, absent

    async def _partition_ids(self, names: set[str | None]) -> dict[str | None, int | None]:
        """The ids of existing partitions; several unknown ones are asked for together."""
        ids: dict[str | None, int | None] = {None: None}
        known = self._connection.metadata.partitions
        new = [n for n in names if n is not None and (self._info.table_id, n) not in known]
        if len(new) > 1:
            await self._refresh(new)
        for name in names - {None}:
            assert name is not None
            try:
                partition = await self._connection.partition(self._info, name)
            except PartitionNotExistError:
                continue
            ids[name] = partition.partition_id
        return ids

    async def _ask(
        self,
        server: ServerNode | None,
        groups: list[tuple[TableBucket, KeyGroup]],
        deliver: Deliver[T],
        backoff: Backoff,
    ) -> tuple[list[KeyGroup], ZuflussError | None]:
        """Ask a server once; returns the groups to retry, with the last error."""
        if server is None:
            name = self._connection.metadata.name_of(groups[0][0])
            reason = LeaderNotAvailableError(f"{name} has no leader at the moment")
            return [group for _, group in groups], reason
        try:
            async with backoff.attempt():
                response = await self._send(server, groups, backoff.left_ms)
        except RecordTooLargeError:
            halves = _halves(groups)
            if len(halves) == 1:
                raise
            outcomes = [await self._ask(server, half, deliver, backoff) for half in halves]
            failed = [group for again, _ in outcomes for group in again]
            return failed, next((reason for _, reason in outcomes if reason), None)
        except ZuflussError as e:
            if e.code not in PASSING:
                raise
            for bucket, _ in groups:
                self._connection.metadata.forget_leader(bucket)
            return [group for _, group in groups], e
        done, failed, last = self._split_answer(groups, response)
        if done:
            await deliver(done)
        return failed, last

    def _split_answer(
        self, groups: list[tuple[TableBucket, KeyGroup]], response: Any
    ) -> tuple[list[tuple[KeyGroup, list[T]]], list[KeyGroup], ZuflussError | None]:
        """Split into answered groups and groups to retry, with the last error."""
        answers = {bucket_key(answer): answer for answer in response.buckets_resp}
        done: list[tuple[KeyGroup, list[T]]] = []
        failed: list[KeyGroup] = []
        last: ZuflussError | None = None
        for bucket, group in groups:
            try:
                done.append((group, self._results(bucket, group, answers.get(bucket[1:]))))
            except ZuflussError as e:
                if e.code not in _AGAIN:
                    raise
                failed.append(group)
                last = e
                self._connection.metadata.forget_leader(bucket)
        return done, failed, last

    async def _send(
        self, server: ServerNode, groups: list[tuple[TableBucket, KeyGroup]], timeout_ms: int
    ) -> Any:
        request: Any = self._call.request(table_id=self._info.table_id)
        for bucket, group in groups:
            request.buckets_req.add(
                partition_id=bucket.partition_id, bucket_id=bucket.bucket_id, keys=group.keys
            )
        socket = await self._connection.socket(server.address)
        return await socket.call(self._call.api_key, request, timeout_ms=timeout_ms)

    def _results(self, bucket: TableBucket, group: KeyGroup, answer: Any) -> list[T]:
        name = self._connection.metadata.name_of(bucket)
        if answer is None:
            raise ZuflussError(f"{name} is missing in the server's answer to a lookup")
        if answer.error_code:
            text = answer.error_message or "refused by the server"
            raise error(answer.error_code, f"{name}: {text}")
        results = self._call.results(answer)
        if len(results) != len(group.keys):
            raise CorruptMessageError(
                f"{name}: the server answered {len(results)} values for {len(group.keys)} keys"
            )
        return results

    async def _refresh(self, names: Iterable[str]) -> None:
        """Refresh the leaders of partitions; missing partitions are found when they are used."""
        try:
            await self._connection.refresh_leaders(self._info, names)
        except PartitionNotExistError:
            return
        except ZuflussError as e:
            if e.code not in PASSING:
                raise


def _requests(
    groups: list[tuple[TableBucket, KeyGroup]],
) -> Iterator[list[tuple[TableBucket, KeyGroup]]]:
    """Cut the groups for one server into requests with few enough keys and bytes of keys."""
    request: list[tuple[TableBucket, KeyGroup]] = []
    count = size = 0
    for bucket, group in groups:
        longest = max(map(len, group.keys), default=0) + _KEY_OVERHEAD
        most = max(1, min(REQUEST_KEYS_MAX, REQUEST_BYTES_MAX // longest))
        for piece in group.pieces(most):
            keys = len(piece.keys)
            full = count + keys > REQUEST_KEYS_MAX or size + keys * longest > REQUEST_BYTES_MAX
            if request and full:
                yield request
                request, count, size = [], 0, 0
            request.append((bucket, piece))
            count += keys
            size += keys * longest
    if request:
        yield request


def _halves(
    groups: list[tuple[TableBucket, KeyGroup]],
) -> list[list[tuple[TableBucket, KeyGroup]]]:
    """Cut a request whose answer is too large in two; one key alone cannot be cut."""
    if len(groups) > 1:
        middle = len(groups) // 2
        return [groups[:middle], groups[middle:]]
    [(bucket, group)] = groups
    return [[(bucket, half)] for half in group.pieces(-(-len(group.keys) // 2))]
