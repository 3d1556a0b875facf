"""Valid requests that cost as much as they can: their answers and memory stay within stated bounds.

Requests are composed at random: long lists, buckets and keys that are named again and again, large
stored rows, unknown buckets, many tables and partitions, many entries in one write, filters that
are deep, wide or have long lists, small batches that unpack to the largest size. After each one the
answer is no internal error and no longer than `docs/limits.md` says, the server has not grown by
more than the page says, and a second connection is answered. `python -m bench.stalls` measures
how long the second connection waits; tests assert no durations.

Clients also send many such requests at once, on several connections, and read no answer at first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.message import Message

import zufluss
from tests.counts import rounds
from tests.end_to_end.kv import (
    LOOKUP_VERSION,
    PUT_VERSION,
    Codec,
    kv_batch,
    lookup_request,
    prefix_request,
    put,
)
from tests.end_to_end.raw import RawClient, table_path
from tests.end_to_end.scans import next_request, open_request, page_request, pin, pin_request
from tests.memory import growth
from tests.record.arrow_samples import log_batch
from tests.servers import WarmServer
from zufluss.client.sync.connection import Connection
from zufluss.model.predicate import (
    DEPTH_MAX,
    LITERALS_MAX,
    TESTS_MAX,
    Compound,
    CompoundFunction,
    Leaf,
    LeafFunction,
    Predicate,
)
from zufluss.model.schema import Schema
from zufluss.net.connection import WRITE_BUFFER_HIGH
from zufluss.record.kernels.batch_check import MAX_UNCOMPRESSED_BYTES
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.hot.buckets import BUCKETS_MAX
from zufluss.wire.predicates import predicate_to_proto

REQUESTS = rounds(54, 5_000)
BURSTS = rounds(6, 300)
CONNECTIONS, REQUESTS_AT_ONCE, AT_ONCE_BYTES = 10, 50, 4_000
"""Of a burst: connections, requests of each, and the length of the longest request."""
PINGS = 100
"""Requests of another connection while nobody reads the answers to a burst."""
BUCKETS, LARGE_ROWS, LARGE_BYTES, PARTITIONS, BATCHES = 50, 10, 1_000_000, 20, 50
ANSWER_BYTES_MAX = 65 << 20
"""Bound of every answer: 64 MiB of rows, and their frame."""
GROWTH_BYTES = 320 << 20
"""Bound of the growth of one request: its answer a few times over while it is being made."""
GROWTH_PER_BYTE = 100
"""Bound of the growth per byte sent beside that."""

SEND_MEMORY = 64 << 20
"""`zufluss.net.send-memory`."""
ANSWERS_GROWTH_BYTES = 2 * GROWTH_BYTES
"""Bound of the growth for answers that are being made, few large ones at a time."""
BURST_GROWTH_BYTES = ANSWERS_GROWTH_BYTES + SEND_MEMORY + CONNECTIONS * WRITE_BUFFER_HIGH
"""Bound of the growth of a burst, beside that per byte sent."""

pytestmark = pytest.mark.timeout(3600 if REQUESTS > 1000 else 300)


@dataclass
class World:
    """Tables of all kinds, and random requests about them."""

    raw: RawClient
    log_id: int
    keyed_id: int
    days_id: int
    wide_id: int
    partition_ids: list[int]
    wide: Schema
    codec: Codec
    rng: random.Random

    def count(self, most: int) -> int:
        """A number of items; each order of magnitude is equally likely."""
        return max(1, int(most ** self.rng.random()))

    def bucket(self) -> int:
        """A bucket that exists, mostly."""
        return self.rng.choice([0, 1, self.rng.randrange(BUCKETS), 10**6])

    def keys(self, most: int) -> list[bytes]:
        ids = [self.rng.randrange(2 * LARGE_ROWS) for _ in range(self.count(8))]
        few = [self.codec.key((i, "")) for i in ids]
        return [self.rng.choice(few) for _ in range(self.count(most))]

    def predicate(self, schema: Schema, tests: int, literals: int) -> Predicate:
        """A filter of at most so many tests and literals: deep, wide, or with a long list."""
        column = self.rng.choice(schema.columns)
        text = column.name in ("name", "v")

        def leaf(function: LeafFunction, count: int = 1) -> Leaf:
            numbers = [self.rng.randrange(10**6) for _ in range(count)]
            values = tuple(f"y{number}" for number in numbers) if text else tuple(numbers)
            return Leaf(function, column.id, values)

        functions = [LeafFunction.EQUAL, LeafFunction.NOT_EQUAL, LeafFunction.LESS_THAN]
        if text:
            functions += [LeafFunction.STARTS_WITH, LeafFunction.CONTAINS]
        join = self.rng.choice(list(CompoundFunction))
        shape = self.rng.choice(["deep", "wide", "list"])
        if shape == "list" or tests < 4:
            many = self.count(min(literals, LITERALS_MAX))
            return leaf(self.rng.choice([LeafFunction.IN, LeafFunction.NOT_IN]), many)
        if shape == "wide":
            count = min(self.count(tests - 1), literals)
            return Compound(join, tuple(leaf(self.rng.choice(functions)) for _ in range(count)))
        found: Predicate = leaf(self.rng.choice(functions))
        for _ in range(min(self.count(DEPTH_MAX - 2), (tests - 1) // 2, literals - 1)):
            found = Compound(join, (leaf(self.rng.choice(functions)), found))
        return found

    def end_scans(self) -> None:
        """End the scans and pins of earlier requests, so that there is room for others."""
        scans = self.raw.call(ApiKey.LIST_KV_SCANS, m.ListKvScansRequest()).scans
        numbers = [scan.number for scan in scans]
        self.raw.call(ApiKey.END_KV_SCANS, m.EndKvScansRequest(numbers=numbers))

    # -- requests -------------------------------------------------------------------------------

    def lookup(self) -> Message:
        request = m.LookupRequest(table_id=self.keyed_id)
        entries = self.count(2_000)
        for _ in range(entries):
            request.buckets_req.add(bucket_id=self.rng.choice([0, 9]), keys=self.keys(60))
        return self.rng.choice([request, lookup_request(self.keyed_id, self.keys(65_536))])

    def prefix_lookup(self) -> Message:
        absent = [b"absent %d" % number for number in range(self.count(65_536))]
        return prefix_request(self.keyed_id, self.rng.choice([[b"", *self.keys(2_000)], absent]))

    def scan_kv(self) -> Message:
        self.end_scans()
        size = self.rng.choice([1, 2**20, 2**31 - 1])
        limit = self.rng.choice([None, 1, 2**62])
        request = open_request(self.keyed_id, size=size, limit=limit)
        if self.rng.random() < 0.5:
            return request
        first = self.raw.call(ApiKey.SCAN_KV, open_request(self.keyed_id, size=1))
        return next_request(first.scanner_id, 1, size)

    def open_kv_snapshot(self) -> Message:
        self.end_scans()
        buckets = [self.rng.choice([0, 0, 0, 9]) for _ in range(self.count(BUCKETS_MAX))]
        request = pin_request(self.keyed_id, self.rng.choice([buckets, [0] * len(buckets)]))
        request.partial = self.rng.random() < 0.5
        return request

    def scan_kv_snapshot(self) -> Message:
        self.end_scans()
        (pinned,) = pin(self.raw, self.keyed_id)
        schema = self.codec.schema
        return page_request(
            self.keyed_id,
            pinned.pin_id,
            size=self.rng.choice([1, 2**31 - 1]),
            filter=self.predicate(schema, TESTS_MAX, LITERALS_MAX),
            schema=schema,
            projected_columns=self.rng.choice([[], [0], [1]]),
        )

    def limit_scan(self) -> Message:
        return m.LimitScanRequest(
            table_id=self.keyed_id, bucket_id=0, limit=self.rng.choice([1, 100, 2**31 - 1])
        )

    def put_kv(self) -> Message:
        request = m.PutKvRequest(acks=-1, table_id=self.keyed_id, timeout_ms=30_000)
        small = kv_batch([self.codec.put((10**6, "x"))])
        for _ in range(self.count(BUCKETS_MAX)):
            records = self.rng.choice([small, b"", small[:-1]])
            request.buckets_req.add(bucket_id=self.rng.choice([0, 9]), records=records)
        return request

    def produce_log(self) -> Message:
        request = m.ProduceLogRequest(acks=-1, table_id=self.log_id, timeout_ms=30_000)
        if self.rng.random() < 0.5:
            packed = self.packed_batch()
            for _ in range(self.count(8)):
                request.buckets_req.add(bucket_id=self.bucket(), records=packed)
            return request
        for _ in range(self.count(BUCKETS_MAX)):
            request.buckets_req.add(bucket_id=self.bucket(), records=b"\0" * self.count(60))
        return request

    def packed_batch(self) -> bytes:
        """A compressed batch that takes up to the allowed size when it is unpacked."""
        rows = self.count(MAX_UNCOMPRESSED_BYTES // 4)
        batch = pa.RecordBatch.from_arrays([pa.array(np.zeros(rows, np.int32))], names=["id"])
        return bytes(log_batch(batch, self.rng.choice(["lz4", "zstd"])))

    def fetch_log(self) -> Message:
        request = m.FetchLogRequest(
            follower_server_id=-1, max_bytes=2**31 - 1, max_wait_ms=1, min_bytes=1
        )
        tables = self.count(100)
        if self.rng.random() < 0.5:
            for _ in range(tables):
                self.add_filtered(request, TESTS_MAX // tables, LITERALS_MAX // tables)
            return request
        for _ in range(tables):
            table = request.tables_req.add(
                table_id=self.rng.choice([self.log_id, self.keyed_id, 999]),
                projection_pushdown_enabled=False,
            )
            for _ in range(self.count(200)):
                table.buckets_req.add(
                    bucket_id=self.bucket(), fetch_offset=0, max_fetch_bytes=2**31 - 1
                )
        return request

    def add_filtered(self, request: m.FetchLogRequest, tests: int, literals: int) -> None:
        """Add a table with a filter and a projection to a fetch."""
        columns = range(len(self.wide.columns))
        predicate = self.predicate(self.wide, tests, literals)
        table = request.tables_req.add(
            table_id=self.wide_id,
            projection_pushdown_enabled=True,
            projected_fields=sorted(self.rng.sample(columns, self.rng.randint(1, len(columns)))),
            filter_predicate=predicate_to_proto(predicate, self.wide),
            filter_schema_id=1,
        )
        table.buckets_req.add(bucket_id=0, fetch_offset=0, max_fetch_bytes=2**31 - 1)

    def list_offsets(self) -> Message:
        return m.ListOffsetsRequest(
            follower_server_id=-1,
            offset_type=self.rng.randrange(3),
            startTimestamp=1,
            table_id=self.rng.choice([self.log_id, 999]),
            bucket_id=[self.bucket() for _ in range(self.count(BUCKETS_MAX))],
        )

    def get_table_stats(self) -> Message:
        request = m.GetTableStatsRequest(table_id=self.keyed_id)
        for _ in range(self.count(BUCKETS_MAX)):
            request.buckets_req.add(bucket_id=self.bucket())
        return request

    def get_metadata(self) -> Message:
        names = ["events", "rows", "days"]
        paths = [table_path("fluss", name) for name in names]
        return m.MetadataRequest(
            table_path=[self.rng.choice(paths) for _ in range(self.count(50_000))],
            partitions_id=[self.rng.choice(self.partition_ids) for _ in range(self.count(100_000))],
        )

    def acquire_latest_kv_snapshot_lease(self) -> Message:
        request = m.AcquireLatestKvSnapshotLeaseRequest(lease_id="l", lease_duration_ms=1000)
        for _ in range(self.count(100_000)):
            request.targets.add(table_id=self.keyed_id)
        return request

    def release_kv_snapshot_lease(self) -> Message:
        request = m.ReleaseKvSnapshotLeaseRequest(lease_id="l")
        for _ in range(self.count(100_000)):
            request.buckets_to_release.add(table_id=self.keyed_id, bucket_id=self.bucket())
        return request

    def lake_tiering_heartbeat(self) -> Message:
        request = m.LakeTieringHeartbeatRequest(request_table=False)
        for _ in range(self.count(50_000)):
            request.tiering_tables.add(table_id=self.log_id, coordinator_epoch=1, tiering_epoch=1)
        return request

    def alter_table(self) -> Message:
        request = m.AlterTableRequest(
            table_path=table_path("fluss", "days"), ignore_if_not_exists=False
        )
        for number in range(self.count(5_000)):  # the last one is refused, so that nothing changes
            request.add_columns.add(
                column_name=f"c{number}",
                data_type_json=b'{"type":"INTEGER"}',
                column_position_type=0,
            )
        request.add_columns.add(
            column_name="id", data_type_json=b'{"type":"INTEGER"}', column_position_type=0
        )
        return request

    def init_writer(self) -> Message:
        path = table_path("fluss", "events")
        return m.InitWriterRequest(table_path=[path] * self.count(50_000))


VERSIONS = {
    ApiKey.PUT_KV: PUT_VERSION,
    ApiKey.LOOKUP: LOOKUP_VERSION,
    ApiKey.PREFIX_LOOKUP: LOOKUP_VERSION,
}
CALLS = [key for key in ApiKey if hasattr(World, key.name.lower())]
LARGE_ANSWERS = [ApiKey.LOOKUP, ApiKey.PREFIX_LOOKUP, ApiKey.LIMIT_SCAN, ApiKey.FETCH_LOG]
"""Half of the requests of a burst: their answers are what takes memory."""


@pytest.fixture
def world(tmp_path: Path, rng: random.Random) -> Iterator[tuple[WarmServer, World]]:
    with (
        WarmServer(tmp_path, {"zufluss.net.send-memory": str(SEND_MEMORY)}) as server,
        zufluss.connect(server.bootstrap) as connection,
        RawClient(server.port) as raw,
    ):
        yield server, set_up(raw, connection, rng)


def set_up(raw: RawClient, connection: Connection, rng: random.Random) -> World:
    admin = connection.admin
    admin.create_table("events", "id INT", bucket_count=BUCKETS)
    admin.create_table("rows", "id INT NOT NULL, v STRING", primary_key=["id"], bucket_count=1)
    admin.create_table("days", "id INT, day STRING", partition_keys=["day"], bucket_count=1)
    for number in range(PARTITIONS):
        admin.create_partition("days", {"day": f"d{number}"})
    statistics = {"table.statistics.columns": "*"}
    admin.create_table(
        "wide", "id BIGINT, name STRING, n INT", bucket_count=1, properties=statistics
    )
    names = ("events", "rows", "days", "wide")
    info = {name: admin.table_info(name) for name in names}
    codec = Codec(info["rows"].schema)
    for number in range(LARGE_ROWS):
        row = kv_batch([codec.put((number, "y" * LARGE_BYTES))])
        assert not put(raw, info["rows"].table_id, row).error_code
    with connection.table("wide").append() as writer:
        for number in range(BATCHES):
            writer.write({"id": [number] * 100, "name": [f"y{number}"] * 100, "n": [7] * 100})
            writer.flush()
    partitions = [each.partition_id for each in admin.list_partitions("days")]
    ids = [info[name].table_id for name in names]
    return World(raw, *ids, partitions, info["wide"].schema, codec, rng)


def test_the_cost_of_a_request_is_bounded(world: tuple[WarmServer, World]) -> None:
    server, requests = world
    assert server.process is not None
    pid = server.process.pid
    with RawClient(server.port) as raw, RawClient(server.port) as other:
        for number in range(REQUESTS):
            key = CALLS[number % len(CALLS)]
            body = getattr(requests, key.name.lower())().SerializeToString()

            def ask(key: ApiKey = key, body: bytes = body) -> None:
                sent = raw.begin(key, body, VERSIONS.get(key, 0))
                assert other.alive()
                answer = raw.answer(sent)
                problem = "" if answer.error is None else answer.error.message
                assert "internal server error" not in problem, APIS[key].name
                assert answer.error is not None or len(answer.body) <= ANSWER_BYTES_MAX

            grown = growth(pid, ask)
            assert grown <= GROWTH_BYTES + GROWTH_PER_BYTE * len(body), (
                f"{APIS[key].name} of {len(body)} bytes made the server grow by {grown}"
            )


def test_the_cost_of_many_requests_at_once_is_bounded(world: tuple[WarmServer, World]) -> None:
    server, requests = world
    with ExitStack() as stack:
        other = stack.enter_context(RawClient(server.port))
        pool = stack.enter_context(ThreadPoolExecutor(2 * CONNECTIONS))
        for _ in range(BURSTS):
            bursts = [
                [short_request(requests) for _ in range(REQUESTS_AT_ONCE)]
                for _ in range(CONNECTIONS)
            ]
            sent = sum(len(body) for burst in bursts for _, body in burst)

            def ask(bursts: list[list[tuple[ApiKey, bytes]]] = bursts) -> None:
                with ExitStack() as clients:
                    raws = [clients.enter_context(RawClient(server.port)) for _ in bursts]
                    sending = [
                        pool.submit(send, raw, burst)
                        for raw, burst in zip(raws, bursts, strict=True)
                    ]
                    for _ in range(PINGS):
                        assert other.alive()
                    for each in [pool.submit(read_answers, raw) for raw in raws] + sending:
                        each.result()

            assert growth(server.pid, ask) <= BURST_GROWTH_BYTES + GROWTH_PER_BYTE * sent
            assert other.alive()


def short_request(requests: World) -> tuple[ApiKey, bytes]:
    """A random request that is short enough to be sent with many others."""
    while True:
        key = requests.rng.choice(requests.rng.choice([CALLS, LARGE_ANSWERS]))
        body = getattr(requests, key.name.lower())().SerializeToString()
        if len(body) <= AT_ONCE_BYTES:
            return key, body


def send(raw: RawClient, burst: list[tuple[ApiKey, bytes]]) -> None:
    """Send the requests one behind the other, as fast as the server takes them."""
    for key, body in burst:
        raw.begin(key, body, VERSIONS.get(key, 0))


def read_answers(raw: RawClient) -> None:
    """Read the answers to a burst: each request has one, and none is an internal error."""
    answered = set()
    for _ in range(REQUESTS_AT_ONCE):
        answer = raw.receive()
        problem = "" if answer.error is None else answer.error.message
        assert "internal server error" not in problem
        assert answer.error is not None or len(answer.body) <= ANSWER_BYTES_MAX
        answered.add(answer.request_id)
    assert answered == set(range(REQUESTS_AT_ONCE))
