"""A tablet server with sockets in the process of the test, a client that retries, and its model.

The server has a log table of two buckets and a primary-key table of one. The `Load` writes to both
with idempotent batches, one at a time, and sends a refused batch again until it is acknowledged. It
knows what the logs and the rows must be afterwards, and checks each refusal: the answer must be
retriable, and a write that is refused for a shortage has changed nothing.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa

from tests.end_to_end.kv import Codec, kv_batch, lookup_request, put_request, records_of
from tests.fault.injection import Injector
from tests.tablet.gateway import Gateway
from tests.tablet.support import no_ids
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.image import BucketState, ClusterImage, TableEntry, TablePut
from zufluss.cluster.replicas import assignments
from zufluss.config.load import Configuration
from zufluss.errors import ErrorCode, NetworkError, ZuflussError
from zufluss.log.files import Files
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath
from zufluss.net.listeners import resolve_listeners
from zufluss.net.server import NetServer
from zufluss.net.services import Services
from zufluss.record.arrow.message import decode as decode_arrow
from zufluss.record.header import build_batch, iter_headers
from zufluss.remote.registry import reconcile
from zufluss.remote.storage import RemoteStorage
from zufluss.replica.replica import Replica
from zufluss.tablet.server import TabletServer
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.codec import decode
from zufluss.wire.frame import pack_request, unpack_response

LOG, KEYED = 7, 8
"""Ids of the two tables."""

LOG_BUCKETS: Final = (0, 1)
LOG_SCHEMA: Final = Schema.of("a BIGINT, b STRING")
KEYED_SCHEMA: Final = Schema.of("id BIGINT NOT NULL, text STRING, n INT", primary_key=["id"])
CODEC: Final = Codec(KEYED_SCHEMA)
T = TypeVar("T")
WRITER: Final = 5
"""The writer id of all batches; sequences are counted by bucket."""

NO_EFFECT: Final = (ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION, ErrorCode.STORAGE_EXCEPTION)
"""Refusals that promise that the write has changed nothing."""

TIMEOUT_MS: Final = 2000
"""When a write is answered at the latest: then its outcome is unknown, and it is sent again."""

PAUSE_SECONDS: Final = 0.01
"""Pause before a refused request is sent again."""

CONFIGURATION: Final = {
    "tablet-server.id": "1",
    "zufluss.log.flush": "ack",
    "log.segment.file-size": "64kb",
    "remote.log.task-interval-duration": "1h",
    "kv.snapshot.interval": "1h",
    "zufluss.kv.memory": "8mb",
    "bind.listeners": "A://127.0.0.1:0",
}

Row = tuple[int, str | None, int | None]
Change = tuple[str, Row]
BucketId = tuple[int, int]
"""Table id and bucket."""


def picture() -> ClusterImage:
    """Return a cluster with both tables, led by tablet server 1."""
    image = ClusterImage()
    for table_id, schema, buckets in ((LOG, LOG_SCHEMA, 2), (KEYED, KEYED_SCHEMA, 1)):
        descriptor = TableDescriptor(schema, bucket_count=buckets)
        info = TableInfo(TablePath("db", f"t{table_id}"), table_id, 1, descriptor, 0, 0)
        states = (BucketState((1,), 1),) * buckets
        image.apply([TablePut(TableEntry(info, {1: schema}, states))])
    return image


class Client:
    """One connection; a request that is not answered in time is a failure of the test."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader
        self._sent = 0

    async def call(self, key: ApiKey, request: Any, version: int = 0) -> Any:
        """Return the response message; raises the error that was answered, or `NetworkError`."""
        self._sent += 1
        body = request.SerializeToString()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                if self._writer is None:
                    self._reader, self._writer = await asyncio.open_connection(
                        "127.0.0.1", self._port
                    )
                self._writer.write(pack_request(key, version, self._sent, body))
                (length,) = struct.unpack(">i", await self._reader.readexactly(4))
                frame = unpack_response(memoryview(await self._reader.readexactly(length)))
        except (ConnectionError, EOFError) as e:
            self.close()
            raise NetworkError(f"the connection was lost: {e}") from e
        assert frame.request_id == self._sent, "a request was answered twice"
        if frame.error is not None:
            raise frame.error
        return decode(APIS[key].response, frame.body)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Node:
    """A tablet server and its sockets."""

    def __init__(self, root: Path, gateway: Gateway) -> None:
        conf = Configuration.of(
            CONFIGURATION | {"data.dir": str(root / "data"), "remote.data.dirs": f"{root}/remote"}
        )
        self.root, self.gateway = root, gateway
        storage = RemoteStorage(conf, reconcile(None, conf, {}), state_file=None)
        self.server = TabletServer(conf, Files(), lambda: 1000, storage, gateway, no_ids)
        services = Services()
        self.server.register(services)
        self.net = NetServer(services, resolve_listeners(conf))
        self.client: Client

    async def start(self) -> None:
        """Open all buckets, or refuse them for a while; then serve."""
        image = picture()
        await self.server.assign(image, assignments(image, 1))
        await self.connect()

    async def connect(self) -> None:
        await self.net.start()
        self.client = Client(self.net.listeners[0].bind.port)

    def replica(self, bucket: BucketId) -> Replica | None:
        """Return the replica of a bucket, None while it is closed."""
        table = self.server.buckets.tables.get(bucket[0])
        return None if table is None else table.replicas.get((None, bucket[1]))

    async def keyed_replica(self) -> Replica:
        """Return the replica of the primary-key table when it is open."""
        async with asyncio.timeout(WAIT_SECONDS):
            while (replica := self.replica((KEYED, 0))) is None or replica.failure is not None:
                await asyncio.sleep(PAUSE_SECONDS)
        return replica

    async def until_open(self) -> None:
        """Wait until every bucket is served."""
        async with asyncio.timeout(WAIT_SECONDS):
            for bucket in ((LOG, 0), (LOG, 1), (KEYED, 0)):
                while (replica := self.replica(bucket)) is None or replica.failure is not None:
                    await asyncio.sleep(PAUSE_SECONDS)

    async def stop(self) -> None:
        self.client.close()
        await self.net.stop(5)
        await self.server.close()


@asynccontextmanager
async def serving(root: Path, gateway: Gateway) -> AsyncIterator[Node]:
    """Start a server, and stop it cleanly afterwards."""
    node = Node(root, gateway)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


class Load:
    """Writes, and what must be there afterwards."""

    def __init__(self, node: Node, injector: Injector) -> None:
        self.node = node
        self._injector = injector
        self.sequences: dict[BucketId, int] = {}
        self.appended: dict[int, list[str]] = {bucket: [] for bucket in LOG_BUCKETS}
        """Values of the column `b`, by bucket of the log table."""
        self.rows: dict[int, Row] = {}
        self.changes: list[Change] = []
        self.refusals: list[ZuflussError] = []

    def _unharmed(self, work: Callable[[], T]) -> T:
        """Do the client's part of the work, in which nothing fails."""
        with self._injector.paused():
            return work()

    # -- writes -----------------------------------------------------------------------------

    async def append(self, *buckets: int, size: int = 20, count: int = 2) -> None:
        """Append a batch to each bucket, in one request, until all are acknowledged."""
        batches = {}
        for bucket in buckets:
            sequence = self._next((LOG, bucket))
            texts = [f"{bucket}-{sequence}-{i}".ljust(size, "x") for i in range(count)]
            columns = [pa.array(range(count), pa.int64()), pa.array(texts)]
            message = pa.RecordBatch.from_arrays(columns, names=["a", "b"]).serialize()
            with self._injector.paused():
                data = build_batch(
                    1, message.to_pybytes(), count, writer_id=WRITER, sequence=sequence
                )
            batches[bucket] = (bytes(data), texts)
        async with asyncio.timeout(WAIT_SECONDS):
            while batches:
                done = await self._append_once({b: data for b, (data, _) in batches.items()})
                for bucket in done:
                    self.appended[bucket] += batches.pop(bucket)[1]

    async def _append_once(self, batches: dict[int, bytes]) -> list[int]:
        request = m.ProduceLogRequest(acks=-1, table_id=LOG, timeout_ms=TIMEOUT_MS)
        for bucket, data in batches.items():
            request.buckets_req.add(bucket_id=bucket, records=data)
        before = {bucket: self._end((LOG, bucket)) for bucket in batches}
        try:
            answer = await self.node.client.call(ApiKey.PRODUCE_LOG, request)
        except ZuflussError as e:
            for bucket in batches:
                await self._refused(e, (LOG, bucket), before[bucket])
            return []
        done = []
        for entry in answer.buckets_resp:
            if entry.error_code:
                error = ZuflussError(entry.error_message, code=ErrorCode(entry.error_code))
                await self._refused(error, (LOG, entry.bucket_id), before[entry.bucket_id])
            else:
                done.append(entry.bucket_id)
        return done

    async def put(self, rows: Sequence[Row]) -> None:
        """Put whole rows; a row of a key that is there replaces it."""
        await self._put(self._unharmed(lambda: [CODEC.put(row) for row in rows]))
        for row in rows:
            self._change(row)

    async def put_texts(self, texts: dict[int, str]) -> None:
        """Update the column `text` only."""
        rows = [(key, text, None) for key, text in texts.items()]
        records = self._unharmed(lambda: [CODEC.put(row) for row in rows])
        await self._put(records, targets=(0, 1))
        for key, text in texts.items():
            old = self.rows.get(key, (key, None, None))
            self._change((key, text, old[2]))

    async def delete(self, keys: Sequence[int]) -> None:
        rows = [(key, None, None) for key in keys]
        await self._put(self._unharmed(lambda: [CODEC.delete(row) for row in rows]))
        for key in keys:
            if (old := self.rows.pop(key, None)) is not None:
                self.changes.append(("-D", old))

    def _change(self, row: Row) -> None:
        old = self.rows.get(row[0])
        if old is None:
            self.changes.append(("+I", row))
        elif old != row:
            self.changes += [("-U", old), ("+U", row)]
        self.rows[row[0]] = row

    async def _put(self, records: Sequence[bytes], targets: tuple[int, ...] = ()) -> None:
        where = (KEYED, 0)
        batch = kv_batch(records, writer_id=WRITER, sequence=self._next(where))
        request = put_request(KEYED, batch, targets=targets)
        request.timeout_ms = TIMEOUT_MS
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                before = self._end(where)
                try:
                    answer = await self.node.client.call(ApiKey.PUT_KV, request, version=2)
                    (entry,) = answer.buckets_resp
                    if not entry.error_code:
                        return
                    raise ZuflussError(entry.error_message, code=ErrorCode(entry.error_code))
                except ZuflussError as e:
                    await self._refused(e, where, before)

    def _next(self, bucket: BucketId) -> int:
        self.sequences[bucket] = self.sequences.get(bucket, -1) + 1
        return self.sequences[bucket]

    def _end(self, bucket: BucketId) -> tuple[Replica | None, int]:
        replica = self.node.replica(bucket)
        return replica, -1 if replica is None else replica.log.log_end_offset

    async def _refused(
        self, error: ZuflussError, bucket: BucketId, before: tuple[Replica | None, int]
    ) -> None:
        """Check the refusal of a write, and wait a moment."""
        if error.code in NO_EFFECT:
            assert self._end(bucket) == before, f"a refused write has changed something: {error}"
        await self._wait(error)

    async def _wait(self, error: ZuflussError) -> None:
        self.refusals.append(error)
        assert error.retriable, f"not retriable: {error}"
        assert error.message, "the refusal has no reason"
        await asyncio.sleep(PAUSE_SECONDS)

    # -- reads ------------------------------------------------------------------------------

    async def look_up(self, keys: Sequence[int]) -> None:
        """Look keys up until the answer comes, and compare it with what was acknowledged."""
        encoded = self._unharmed(lambda: [CODEC.key((key,)) for key in keys])
        request = lookup_request(KEYED, encoded)
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                try:
                    answer = await self.node.client.call(ApiKey.LOOKUP, request)
                    (entry,) = answer.buckets_resp
                    if not entry.error_code:
                        break
                    raise ZuflussError(entry.error_message, code=ErrorCode(entry.error_code))
                except ZuflussError as e:
                    await self._wait(e)
        values = self._unharmed(lambda: [CODEC.value(value.values) for value in entry.values])
        assert values == [self.rows.get(key) for key in keys]

    async def check(self) -> None:
        """Compare logs, changelog, rows and counts with what was acknowledged."""
        for bucket in LOG_BUCKETS:
            assert await self._log_texts(bucket) == self.appended[bucket]
        changes = await self._changelog()
        assert changes == self.changes
        folded: dict[int, Row] = {}
        for kind, row in changes:
            if kind in ("+I", "+U"):
                folded[row[0]] = row
            elif kind == "-D":
                del folded[row[0]]
        assert folded == self.rows
        await self.look_up(sorted({row[0] for _, row in changes}))
        replica = await self.node.keyed_replica()
        assert replica.row_count() == len(self.rows)
        store = replica.tablet.store
        scan = partial(store.scan, None, 1 << 20, 1 << 30, store.horizon)
        _, values = await self.node.server.kv.call(scan)
        rows = self._unharmed(lambda: [CODEC.value(value) for value in values.tolist()])
        assert sorted(rows) == sorted(self.rows.values())
        keys = self._unharmed(lambda: [CODEC.key((row[0],)) for row in rows])
        assert keys == sorted(keys)

    async def _batches(self, bucket: BucketId) -> AsyncIterator[bytes]:
        replica = self.node.replica(bucket)
        assert replica is not None
        offset = 0
        while offset < replica.log.high_watermark:
            request = m.FetchLogRequest(
                follower_server_id=-1, max_bytes=1 << 24, max_wait_ms=0, min_bytes=1
            )
            table = request.tables_req.add(table_id=bucket[0], projection_pushdown_enabled=False)
            table.buckets_req.add(bucket_id=bucket[1], fetch_offset=offset, max_fetch_bytes=1 << 24)
            answer = await self.node.client.call(ApiKey.FETCH_LOG, request)
            ((entry,),) = [t.buckets_resp for t in answer.tables_resp]
            assert not entry.error_code, entry.error_message
            yield entry.records
            offset = [header for _, header in iter_headers(entry.records)][-1].next_offset

    async def _log_texts(self, bucket: int) -> list[str]:
        texts: list[str] = []
        async for data in self._batches((LOG, bucket)):
            for at, header in iter_headers(data):
                rows, _ = decode_arrow(memoryview(data), at, header, LOG_SCHEMA.arrow)
                texts += rows.column("b").to_pylist()
        return texts

    async def _changelog(self) -> list[Change]:
        changes: list[Change] = []
        async for data in self._batches((KEYED, 0)):
            changes += [(kind, row) for _, kind, row in records_of(data, KEYED_SCHEMA)]
        return changes

    # -- other work -------------------------------------------------------------------------

    async def _until_done(self, work: Callable[[Replica], Awaitable[Any]]) -> None:
        """Do something of the server's own until it works: the server tries again later."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                try:
                    return await work(await self.node.keyed_replica())
                except Exception:  # the server logs it
                    await asyncio.sleep(PAUSE_SECONDS)

    async def snapshot(self) -> None:
        """Take a snapshot of the key-value state."""
        await self._until_done(self.node.server.snapshots.snapshot)

    async def evict(self) -> None:
        """Have all flushed rows dropped from memory."""

        async def work(replica: Replica) -> None:
            store = replica.tablet.store
            await self.node.server.kv.call(lambda: store.evict(store.memory_bytes))

        await self._until_done(work)

    def expire(self) -> None:
        """Do the periodic work, whose failures are logged."""
        try:
            self.node.server._expire_data()
        except Exception:  # the server logs it
            return
