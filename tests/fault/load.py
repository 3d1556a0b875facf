"""Load for a server that may be killed at any moment: writers that retry, and readers.

Every writer and reader is a thread with a connection of its own that survives any number of kills:
it sends the batches that were in flight again with the same sequence numbers, as a client does.
`Load` starts the threads and lets them finish after the faults, so that at the end every batch that
a writer can repeat is acknowledged.
"""

from __future__ import annotations

import asyncio
import random
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

import fluss
import numpy as np
import pyarrow as pa

import zufluss
from tests.end_to_end.raw import (
    OFFSET_EARLIEST,
    OFFSET_LATEST,
    ConnectionEndedError,
    RawClient,
    fetch_request,
    produce_request,
    table_path,
)
from tests.fault.history import Ack, Batch, Content, History, Lane, digest
from tests.waiting import WAIT_SECONDS
from zufluss.errors import RETRIABLE, ErrorCode
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor
from zufluss.record.arrow.message import decode
from zufluss.record.header import BatchHeader, build_batch, iter_headers, verify_crc
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

DATABASE = "crash"
SCHEMA = Schema.of("key BIGINT NOT NULL, payload STRING")
DAILY_SCHEMA = Schema.of("key BIGINT NOT NULL, payload STRING, day STRING NOT NULL")
"""Columns of a table with partitions."""
LOST = (ConnectionEndedError, ConnectionError)
"""Errors that mean that the server is not running."""

INFLIGHT_MAX = 5
"""Batches in flight per bucket; the server remembers as many."""
BATCHES_AHEAD = 20
"""Batches a writer sends before it waits for one answer."""
RECONNECT_SECONDS = 0.01
DEADLINE_SECONDS = WAIT_SECONDS
"""Deadline of every wait."""


class Target(NamedTuple):
    """A table, or a partition of one, under load."""

    name: str
    table_id: int
    buckets: int
    partition_id: int | None = None
    day: str | None = None
    """Name of the partition, which is the value of its column `day`."""

    @property
    def schema(self) -> Schema:
        """Columns of a log table under load."""
        return SCHEMA if self.day is None else DAILY_SCHEMA

    @property
    def fixed_values(self) -> tuple[str, ...]:
        """Values that all rows have behind their other columns."""
        return () if self.day is None else (self.day,)

    def bucket(self, number: int) -> TableBucket:
        return TableBucket(self.table_id, self.partition_id, number)

    @property
    def all_buckets(self) -> list[TableBucket]:
        return [self.bucket(i) for i in range(self.buckets)]


def create_target(
    port: int,
    name: str,
    buckets: int = 3,
    properties: dict[str, str] | None = None,
    *,
    daily: bool = False,
) -> Target:
    """Create a table for the load; a `daily` one has a partition per day."""
    schema, partition_keys = (DAILY_SCHEMA, ("day",)) if daily else (SCHEMA, ())
    options = {"table.replication.factor": "1", **(properties or {})}
    descriptor = TableDescriptor(schema, None, partition_keys, (), buckets, options, {})
    with RawClient(port) as client:
        client.call(
            ApiKey.CREATE_DATABASE,
            m.CreateDatabaseRequest(database_name=DATABASE, ignore_if_exists=True),
        )
        client.call(
            ApiKey.CREATE_TABLE,
            m.CreateTableRequest(
                table_path=table_path(DATABASE, name),
                table_json=descriptor.to_json(),
                ignore_if_exists=False,
            ),
        )
        return Target(name, client.table_id(DATABASE, name), buckets)


def add_partition(port: int, table: Target, day: str) -> Target:
    """Create a partition of a table that has the partition key `day`."""
    path = table_path(DATABASE, table.name)
    spec = m.PbPartitionSpec(partition_key_values=[m.PbKeyValue(key="day", value=day)])
    with RawClient(port) as client:
        creation = m.CreatePartitionRequest(
            table_path=path, partition_spec=spec, ignore_if_not_exists=False
        )
        client.call(ApiKey.CREATE_PARTITION, creation)
        listing = m.ListPartitionInfosRequest(table_path=path, partial_partition_spec=spec)
        (info,) = client.call(ApiKey.LIST_PARTITION_INFOS, listing).partitions_info
    return table._replace(partition_id=info.partition_id, day=day)


def rows(first_key: int, count: int, payload: int, target: Target | None = None) -> pa.RecordBatch:
    """Rows with consecutive keys, about `payload` bytes each."""
    keys = np.arange(first_key, first_key + count)
    texts = [f"{key:x}".ljust(payload, ".") for key in keys.tolist()]
    fixed = [pa.array([value] * count) for value in (target.fixed_values if target else ())]
    schema = target.schema if target else SCHEMA
    columns = [pa.array(keys), pa.array(texts), *fixed]
    return pa.RecordBatch.from_arrays(columns, schema=schema.arrow)


def encode(batch: pa.RecordBatch, writer_id: int = -1, sequence: int = -1) -> bytes:
    """A log batch of schema 1."""
    body = batch.serialize().to_pybytes()
    return bytes(build_batch(1, body, batch.num_rows, writer_id=writer_id, sequence=sequence))


class Worker(threading.Thread, ABC):
    """A thread that does its work over and over until it is told to finish."""

    def __init__(self, load: Load, seed: int) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self.load = load
        self.history = load.history
        self.rng = random.Random(seed)

    @property
    def finishing(self) -> bool:
        """Whether no new work may begin."""
        return self.load.finish.is_set()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as e:
            self.history.problem(f"{self.name} failed: {''.join(traceback.format_exception(e))}")
            raise

    @abstractmethod
    def work(self) -> None:
        """Work until `finishing`."""

    def refused(self) -> None:
        """Note that a batch was refused for now, and wait a little before it is sent again."""
        self.history.refused()
        self.load.given_up.wait(RECONNECT_SECONDS)

    def connect(self) -> RawClient | None:
        """Connect as soon as a server answers; None if the load was aborted."""
        while not self.load.given_up.is_set():
            try:
                return RawClient(self.load.port)
            except OSError:
                self.load.given_up.wait(RECONNECT_SECONDS)
        return None


@dataclass(slots=True)
class Sent:
    """A batch that is not acknowledged yet."""

    first_key: int
    count: int
    data: bytes


@dataclass(slots=True)
class BucketLane:
    """One bucket as a writer sees it."""

    bucket: TableBucket
    lane: Lane
    sequence: int = 0
    unacknowledged: deque[Sent] = field(default_factory=deque)


class RawWriter(Worker):
    """An idempotent, pipelined writer with raw frames; sends unacknowledged batches again."""

    def __init__(self, load: Load, seed: int, target: Target) -> None:
        super().__init__(load, seed)
        self.target = target
        self.writer_id = -1
        self.lanes = [
            BucketLane(bucket, self.history.lane(gapless=True)) for bucket in target.all_buckets
        ]

    @property
    def waiting(self) -> bool:
        return any(lane.unacknowledged for lane in self.lanes)

    def work(self) -> None:
        while not self.finishing or self.waiting:
            client = self.connect()
            if client is None:
                return
            with client:
                try:
                    self.converse(client)
                except LOST:
                    continue

    def converse(self, client: RawClient) -> None:
        """Send batches and receive answers until all is done, or the connection breaks."""
        if self.writer_id < 0:
            self.writer_id = self.new_id(client)
        pending: dict[int, BucketLane] = {}
        for lane in self.lanes:
            for sent in lane.unacknowledged:
                pending[self.send(client, lane, sent)] = lane
        while not self.finishing or pending:
            if not self.finishing:
                for lane in self.rng.sample(self.lanes, len(self.lanes)):
                    if len(lane.unacknowledged) < INFLIGHT_MAX and len(pending) < BATCHES_AHEAD:
                        sent = self.new_batch(lane)
                        pending[self.send(client, lane, sent)] = lane
            if not self.take_answer(client, pending):
                return

    def new_id(self, client: RawClient) -> int:
        request = m.InitWriterRequest()
        request.table_path.add(database_name=DATABASE, table_name=self.target.name)
        writer_id = int(client.call(ApiKey.INIT_WRITER, request).writer_id)
        self.history.new_writer_id(writer_id)
        return writer_id

    def new_batch(self, lane: BucketLane) -> Sent:
        count = self.rng.randint(1, 20)
        size = self.rng.choice((4, 20, 200, 200, 1000))
        if self.rng.random() < 0.01:
            size = 100_000 // count  # too large to be copied to the commit log
        first_key = lane.lane.take(count)
        batch = rows(first_key, count, size, self.target)
        data = encode(batch, self.writer_id, lane.sequence)
        lane.sequence += 1
        sent = Sent(first_key, count, data)
        lane.unacknowledged.append(sent)
        return sent

    def send(self, client: RawClient, lane: BucketLane, sent: Sent) -> int:
        table_id, partition_id, bucket = lane.bucket
        request = produce_request(table_id, sent.data, bucket, partition_id=partition_id)
        return client.begin(ApiKey.PRODUCE_LOG, request)

    def take_answer(self, client: RawClient, pending: dict[int, BucketLane]) -> bool:
        """Note one answer; False when the batches have to be sent again."""
        frame = client.receive()
        if frame.error is not None:
            raise frame.error
        assert frame.request_id is not None
        lane = pending.pop(frame.request_id)
        (entry,) = m.ProduceLogResponse.FromString(bytes(frame.body)).buckets_resp
        if entry.error_code:
            if ErrorCode(entry.error_code) not in RETRIABLE:
                raise AssertionError(f"{lane.bucket}: {entry.error_code} {entry.error_message}")
            self.refused()
            return False
        sent = lane.unacknowledged.popleft()
        self.history.acknowledged(Ack(sent.first_key, sent.count, lane.bucket, entry.base_offset))
        return True


class OnceWriter(Worker):
    """A writer without an id that sends every batch once, with `acks=1`."""

    def __init__(self, load: Load, seed: int, target: Target) -> None:
        super().__init__(load, seed)
        self.target = target
        self.lane = self.history.lane(gapless=False)

    def work(self) -> None:
        while not self.finishing:
            client = self.connect()
            if client is None:
                return
            with client:
                try:
                    while not self.finishing:
                        self.write(client)
                except LOST:
                    continue

    def write(self, client: RawClient) -> None:
        bucket = self.rng.randrange(self.target.buckets)
        count = self.rng.randint(1, 5)
        first_key = self.lane.take(count)
        data = encode(rows(first_key, count, 50))
        entry = client.produce(self.target.table_id, data, bucket, acks=1)
        if not entry.error_code:
            where = self.target.bucket(bucket)
            self.history.acknowledged(Ack(first_key, count, where, entry.base_offset))


class Reader(Worker):
    """Reads every bucket continuously, and sometimes reads old offsets again."""

    def __init__(self, load: Load, seed: int, target: Target) -> None:
        super().__init__(load, seed)
        self.target = target
        self.positions = dict.fromkeys(target.all_buckets, 0)

    def work(self) -> None:
        while not self.finishing:
            client = self.connect()
            if client is None:
                return
            with client:
                try:
                    while not self.finishing:
                        self.look(client)
                except LOST:
                    continue

    def look(self, client: RawClient) -> None:
        bucket, position = self.rng.choice(list(self.positions.items()))
        again = self.rng.random() < 0.3
        offset = self.rng.randint(0, position) if again else position
        entry = client.fetch(
            bucket.table_id,
            offset,
            bucket.bucket_id,
            max_wait_ms=50,
            max_bucket_bytes=200_000,
            partition_id=bucket.partition_id,
        )
        if entry.error_code == ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION:
            self.move_to_start(client, bucket, offset)
            return
        if self.is_elsewhere(entry.error_code):
            return
        if entry.error_code:
            raise AssertionError(f"{bucket} at {offset}: {entry.error_message}")
        self.history.saw_high_watermark(bucket, entry.high_watermark)
        for base, batch in batches_of(entry.records):
            self.history.read(bucket, base, batch)
            offset = batch.next_offset
        if offset > entry.high_watermark:
            self.history.problem(f"{bucket}: read up to {offset}, high {entry.high_watermark}")
        self.positions[bucket] = max(position, offset)

    def is_elsewhere(self, error_code: int) -> bool:
        """Whether a server does not have the bucket yet: it listens, and is still joining."""
        return error_code in (
            ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION,
            ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION,
        )

    def move_to_start(self, client: RawClient, bucket: TableBucket, offset: int) -> None:
        """The offset has expired, or its record was lost."""
        start = offset_of(client, bucket, OFFSET_EARLIEST)
        if offset >= start:
            end = offset_of(client, bucket, OFFSET_LATEST)
            raise AssertionError(f"{bucket}: {offset} is not there, the log is {start} to {end}")
        self.positions[bucket] = max(self.positions[bucket], start)


class PyflussWriter(Worker):
    """The reference client."""

    def __init__(self, load: Load, seed: int, target: Target) -> None:
        super().__init__(load, seed)
        self.target = target
        self.lane = self.history.lane(gapless=False)

    def work(self) -> None:
        asyncio.run(self.write_all())

    async def write_all(self) -> None:
        config = fluss.Config({"bootstrap.servers": f"127.0.0.1:{self.load.port}"})
        conn = await fluss.FlussConnection.create(config)
        table = await conn.get_table(fluss.TablePath(DATABASE, self.target.name))
        writer = table.new_append().create_writer()
        while not self.finishing:
            count = self.rng.randint(1, 50)
            first_key = self.lane.take(count)
            handle = writer.write_arrow_batch(rows(first_key, count, 30))
            await asyncio.wait_for(_flush(writer), DEADLINE_SECONDS)
            await asyncio.wait_for(_wait(handle), DEADLINE_SECONDS)
            self.history.acknowledged(Ack(first_key, count))
        await conn.close()


async def _flush(writer: fluss.AppendWriter) -> None:
    await writer.flush()


async def _wait(handle: fluss.WriteResultHandle) -> None:
    await handle.wait()


class ZuflussWriter(Worker):
    """Our own client."""

    settings: ClassVar[dict[str, str]] = {}

    def __init__(self, load: Load, seed: int, target: Target) -> None:
        super().__init__(load, seed)
        self.target = target
        self.lane = self.history.lane(gapless=False)

    def work(self) -> None:
        with (
            zufluss.connect(f"127.0.0.1:{self.load.port}", **self.settings) as conn,
            conn.table(f"{DATABASE}.{self.target.name}").append() as writer,
        ):
            while not self.finishing:
                counts = [self.rng.randint(1, 50) for _ in range(self.rng.randint(1, 5))]
                written = [(self.lane.take(count), count) for count in counts]
                for first_key, count in written:
                    writer.write(rows(first_key, count, 30))
                writer.flush()
                for first_key, count in written:
                    self.history.acknowledged(Ack(first_key, count))


class Load:
    """Workers on a server, for the length of a `with` block."""

    def __init__(self, port: int, history: History) -> None:
        self.port = port
        self.history = history
        self.workers: list[Worker] = []
        self.finish = threading.Event()
        self.given_up = threading.Event()

    def __enter__(self) -> Self:
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish.set()
        if kind is not None:
            self.given_up.set()
            return
        for worker in self.workers:
            worker.join(DEADLINE_SECONDS)
            if worker.is_alive():
                self.history.problem(f"{worker.name} did not finish")
        self.given_up.set()

    def add(self, make: Callable[[Load, int, Target], Worker], seed: int, target: Target) -> None:
        """Add a worker."""
        self.workers.append(make(self, seed, target))


# -- reading everything -----------------------------------------------------------------------


def batches_of(records: bytes) -> list[tuple[int, Batch]]:
    """Base offset and identity of each batch."""
    view = memoryview(records)
    return [
        (header.base_offset, Batch(header.next_offset, digest(view[at : at + header.size])))
        for at, header in iter_headers(view)
    ]


def offset_of(client: RawClient, bucket: TableBucket, kind: int) -> int:
    """The earliest or latest offset of a bucket."""
    request = m.ListOffsetsRequest(
        follower_server_id=-1,
        offset_type=kind,
        table_id=bucket.table_id,
        bucket_id=[bucket.bucket_id],
    )
    if bucket.partition_id is not None:
        request.partition_id = bucket.partition_id
    (entry,) = client.call(ApiKey.LIST_OFFSETS, request).buckets_resp
    assert not entry.error_code, f"{bucket}: {entry.error_message}"
    return int(entry.offset)


def read_bucket(client: RawClient, bucket: TableBucket, schema: Schema = SCHEMA) -> Content:
    """The whole content of a bucket; reads again from its new start when a part expires."""
    while True:
        content = _read_from_start(client, bucket, schema)
        if content is not None:
            return content


def _read_from_start(client: RawClient, bucket: TableBucket, schema: Schema) -> Content | None:
    start = offset = offset_of(client, bucket, OFFSET_EARLIEST)
    end = offset_of(client, bucket, OFFSET_LATEST)
    content = Content(start, np.empty(0, np.int64), {})
    parts = [content.keys]
    timestamp = 0
    while offset < end:
        request = fetch_request(
            bucket.table_id, offset, bucket.bucket_id, partition_id=bucket.partition_id
        )
        (table,) = client.call(ApiKey.FETCH_LOG, request).tables_resp
        (entry,) = table.buckets_resp
        if entry.error_code and offset_of(client, bucket, OFFSET_EARLIEST) > offset:
            return None
        assert not entry.error_code, f"{bucket} at {offset}: {entry.error_message}"
        for at, header in iter_headers(entry.records):
            parts.append(_take(content, schema, entry.records, at, header, offset, timestamp))
            offset, timestamp = header.next_offset, header.timestamp
    content.keys = np.concatenate(parts)
    return content


def _take(
    found: Content,
    schema: Schema,
    data: bytes,
    at: int,
    header: BatchHeader,
    offset: int,
    timestamp: int,
) -> np.ndarray:
    if header.base_offset != offset:
        found.problems.append(f"offset {header.base_offset} follows {offset - 1}")
    if header.timestamp < timestamp:
        found.problems.append(f"offset {offset}: time goes from {timestamp} to {header.timestamp}")
    if not verify_crc(data, at, header):
        found.problems.append(f"offset {offset}: the CRC does not fit")
    piece = memoryview(data)[at : at + header.size]
    found.batches[header.base_offset] = Batch(header.next_offset, digest(piece))
    batch, _ = decode(piece, 0, header, schema.arrow)
    keys: np.ndarray = batch.column(0).to_numpy()
    if len(keys) != header.next_offset - header.base_offset:
        found.problems.append(f"offset {offset}: {len(keys)} rows, header {header}")
    return keys


def read_all(port: int, targets: Sequence[Target]) -> dict[TableBucket, Content]:
    """The whole content of every bucket."""
    with RawClient(port) as client:
        return {
            bucket: read_bucket(client, bucket, target.schema)
            for target in targets
            for bucket in target.all_buckets
        }
