"""A tablet server without sockets, and a connection that remembers what it was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.log.disk import SilentFiles
from tests.tablet.gateway import Gateway
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.image import BucketState, ClusterImage, TableEntry, TablePut
from zufluss.cluster.replicas import ReplicaStop, assignments
from zufluss.cluster.token_service import MayRead, everybody
from zufluss.config.load import Configuration
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.log.files import Files
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TableInfo, TablePath
from zufluss.pacing import Pace
from zufluss.record.header import build_batch
from zufluss.remote.registry import reconcile
from zufluss.remote.storage import RemoteStorage
from zufluss.tablet.forwarding import Connect
from zufluss.tablet.put import AllocateIds
from zufluss.tablet.server import TabletServer
from zufluss.wire import messages as m
from zufluss.wire.codec import decode

TABLE = 7
SCHEMA = Schema.of("a BIGINT, b STRING")


def picture(
    schema: Schema, buckets: int, properties: Mapping[str, str] | None = None
) -> ClusterImage:
    """A cluster with table 7, whose buckets are led by tablet server 1."""
    descriptor = TableDescriptor(schema, bucket_count=buckets, properties=dict(properties or {}))
    info = TableInfo(TablePath("db", "t"), TABLE, 1, descriptor, 0, 0)
    image = ClusterImage()
    image.apply([TablePut(TableEntry(info, {1: schema}, (BucketState((1,), 1),) * buckets))])
    return image


async def no_ids(table_id: int, column_id: int, count: int) -> tuple[int, int]:
    raise AssertionError("the table has no auto-increment column")


class Tablet:
    """A tablet server that leads every bucket of table 7."""

    def __init__(
        self,
        data_dir: Path,
        files: Files | None = None,
        *,
        buckets: int = 2,
        conf: Mapping[str, str] | None = None,
        properties: Mapping[str, str] | None = None,
        schema: Schema = SCHEMA,
        gateway: Gateway | None = None,
        may_read: MayRead = everybody,
        monotonic: Callable[[], float] = time.monotonic,
        allocate_ids: AllocateIds = no_ids,
        expiry_ms: Callable[[], int] | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.image = picture(schema, buckets, properties or {})
        settings = {"data.dir": str(data_dir), "tablet-server.id": "1", **(conf or {})}
        self.now_ms = 1000
        parsed = Configuration.of(settings)
        self.gateway = gateway or Gateway()
        self.server = TabletServer(
            parsed,
            files or SilentFiles(),
            lambda: self.now_ms,
            RemoteStorage(parsed, reconcile(None, parsed, {}), state_file=None),
            self.gateway,
            allocate_ids,
            may_read=may_read,
            monotonic=monotonic,
            expiry_ms=expiry_ms,
            connect=connect,
        )

    async def start(self) -> Tablet:
        await self.server.assign(self.image, assignments(self.image, 1))
        return self

    async def drop(self, *buckets: int) -> None:
        await self.server.stop_replicas(
            [ReplicaStop(TableBucket(TABLE, None, bucket), 0, True) for bucket in buckets]
        )

    async def produce(
        self, *buckets: int, timeout_ms: int = 30_000, **writer: int
    ) -> tuple[Connection, int]:
        """Send one batch to each bucket in one request; the connection and the request's id."""
        request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=timeout_ms)
        for bucket in buckets:
            request.buckets_req.add(bucket_id=bucket, records=batch(**writer))
        connection = Connection()
        return connection, connection.send(self.server.produce.handle, request)

    def fetch(self, connection: Connection, bucket: int = 0, **options: Any) -> int:
        """Send a fetch of one bucket; its id."""
        return connection.send(self.server.fetch.handle, fetch_request(bucket, **options))


def fetch_request(
    bucket: int = 0,
    *,
    offset: int = 0,
    max_wait_ms: int = 30_000,
    min_bytes: int = 1,
    max_bytes: int = 1 << 24,
    columns: Sequence[int] | None = None,
) -> m.FetchLogRequest:
    request = m.FetchLogRequest(
        follower_server_id=-1, max_bytes=max_bytes, max_wait_ms=max_wait_ms, min_bytes=min_bytes
    )
    table = request.tables_req.add(
        table_id=TABLE,
        projection_pushdown_enabled=columns is not None,
        projected_fields=columns or (),
    )
    table.buckets_req.add(bucket_id=bucket, fetch_offset=offset, max_fetch_bytes=max_bytes)
    return request


def batch(rows: int = 3, *, statistics: bytes = b"", **writer: int) -> bytes:
    """An Arrow batch of the table."""
    columns = [pa.array(range(rows), pa.int64()), pa.array(["text"] * rows)]
    message = pa.RecordBatch.from_arrays(columns, names=["a", "b"]).serialize().to_pybytes()
    magic = 1 if statistics else 0
    return bytes(build_batch(1, message, rows, magic=magic, statistics=statistics, **writer))


class Connection:
    """What the handlers use of `zufluss.net.connection.Connection`."""

    def __init__(self) -> None:
        self.peer = "test"
        self.software = ""
        self.closing = False
        self.backlogged = self.short = False
        self.inflight = 0
        self.answers: dict[int, list[Any]] = {}
        self.drained: list[Callable[[], None]] = []
        self.gone: list[Callable[[], None]] = []
        self._answered = asyncio.Event()
        self.pace = Pace(asyncio.get_running_loop())

    def send(self, handle: Any, request: Any, version: int = 0) -> int:
        """Give a request to a handler as the network does."""
        request_id = 100 + len(self.answers)
        self.answers[request_id] = []
        array = np.frombuffer(bytearray(b"head" + request.SerializeToString()), np.uint8)
        self.inflight += 1
        try:
            handle(self, request_id, version, array, memoryview(array), 4, len(array))
        except ZuflussError as e:
            self.respond_error(request_id, e.code, e.message)
            self.done()
        return request_id

    def respond(self, request_id: int, buffers: Sequence[Any], size: int) -> None:
        body = b"".join(buffers)
        assert len(body) == size
        self._answer(request_id, body)

    def respond_small(self, request_id: int, body: bytes) -> None:
        self._answer(request_id, body)

    def finish(self, request_id: int, body: bytes) -> None:
        self._answer(request_id, body)
        self.done()

    def task_ended(self, task: asyncio.Task[None]) -> None:
        self.closing = self.closing or task.exception() is not None

    def stop_requests(self) -> None:
        """The test sends nothing meanwhile."""

    def go_on(self) -> None:
        """The test may send again."""

    def hold(self, more: int) -> None:
        """The memory of answers is not counted."""

    async def has_read(self) -> None:
        """The client has read what it was sent."""

    @property
    def has_room(self) -> bool:
        return not (self.backlogged or self.short)

    async def room(self) -> None:
        while not self.has_room:
            await asyncio.sleep(0)

    def at_turn_end(self, work: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(work)

    def respond_error(self, request_id: int, code: int, message: str) -> None:
        self._answer(request_id, ErrorCode(code))

    def _answer(self, request_id: int, answer: Any) -> None:
        self.answers[request_id].append(answer)
        self._answered.set()

    def done(self) -> None:
        self.inflight -= 1

    def when_gone(self, callback: Callable[[], None]) -> None:
        self.gone.append(callback)

    def when_drained(self, callback: Callable[[], None]) -> None:
        self.drained.append(callback)

    async def answer(self, request_id: int) -> Any:
        """The only answer to a request; nothing may be in flight after it."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not self.answers[request_id]:
                self._answered.clear()
                await self._answered.wait()
        (answer,) = self.answers[request_id]
        assert self.inflight == 0
        return answer

    async def produced(self, request_id: int) -> list[tuple[int, int]]:
        """Bucket and error code of each entry of a produce answer."""
        response = decode(m.ProduceLogResponse, await self.answer(request_id))
        return [(entry.bucket_id, entry.error_code) for entry in response.buckets_resp]

    async def fetched(self, request_id: int) -> Any:
        """The only bucket of a fetch answer."""
        response = decode(m.FetchLogResponse, await self.answer(request_id))
        (table,) = response.tables_resp
        (bucket,) = table.buckets_resp
        return bucket
