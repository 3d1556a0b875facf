"""How long a second connection waits while another one sends requests that cost a lot.

    python -m bench.stalls

prints for each request its length and the worst latency of a small request of another connection
meanwhile, also as a ratio to the worst latency without load. Then it does the same for bursts:
thousands of small requests that a client sends without waiting for answers. The bounds are in
docs/limits.md.
"""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from google.protobuf.message import Message

import zufluss
from zufluss.model.alter import ConfigOp
from zufluss.model.predicate import LITERALS_MAX, Leaf, LeafFunction
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor
from zufluss.record.batch.kv import build_kv_batch
from zufluss.record.slices import Slices
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.frame import pack_request
from zufluss.wire.hot.buckets import BUCKETS_MAX
from zufluss.wire.predicates import predicate_to_proto

BUCKETS = 500
WIDE_COLUMNS = 10_000
BURST = 5_000
"""Small requests that are sent at once."""
UNLOADED_PINGS = 500
"""Pings before the first request: their worst latency is the other side of the ratio."""
PAUSE_SECONDS = 0.001
"""Between two pings, so that the pings themselves are no load."""
PING = m.ApiVersionsRequest(client_software_name="bench", client_software_version="1")


class Client:
    """A connection with one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, key: ApiKey, body: bytes, version: int = 0) -> int:
        """Send a request and wait for its answer; returns the length of the answer."""
        self._socket.sendall(pack_request(key, version, 1, body))
        (length,) = struct.unpack(">i", self._read(4))
        self._read(length)
        return int(length)

    def burst(self, key: ApiKey, body: bytes, version: int = 0) -> int:
        """Send a request `BURST` times, and read the answers meanwhile; returns their length."""
        frames = pack_request(key, version, 1, body) * BURST
        sending = threading.Thread(target=self._socket.sendall, args=(frames,), daemon=True)
        sending.start()
        lengths = 0
        for _ in range(BURST):
            (length,) = struct.unpack(">i", self._read(4))
            self._read(length)
            lengths += int(length)
        sending.join()
        return lengths

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(min(1 << 20, size - len(data)))
            if not part:
                raise ConnectionError("the server closed the connection")
            data += part
        return bytes(data)


class Pings(threading.Thread):
    """Small requests, one after the other, and the longest time that one of them took."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._client = Client(port)
        self._worst_seconds = 0.0
        self._ends = False
        self._count = 0
        self._ended = threading.Condition()
        """Guards the fields above; notified after each ping."""
        self.start()

    def worst(self, pings: int = 2) -> float:
        """Wait for some more pings; return the longest time of a ping since the last call.

        The first of two pings may have been under way, and been held up, when this was called.
        """
        with self._ended:
            end = self._count + pings
            self._ended.wait_for(lambda: self._count >= end)
            worst, self._worst_seconds = self._worst_seconds, 0.0
            return worst

    def stop(self) -> None:
        """Ask no more."""
        self._ends = True
        self.join()

    def run(self) -> None:
        """Ask until `stop`."""
        body = PING.SerializeToString()
        while not self._ends:
            began = time.perf_counter()
            self._client.ask(ApiKey.API_VERSIONS, body)
            seconds = time.perf_counter() - began
            with self._ended:
                self._worst_seconds = max(self._worst_seconds, seconds)
                self._count += 1
                self._ended.notify_all()
            time.sleep(PAUSE_SECONDS)


def requests(log_id: int, keyed_id: int) -> Iterator[tuple[ApiKey, int, Message]]:
    """Requests that name as many things as they may: API, version, message."""
    ids = [number % BUCKETS for number in range(BUCKETS_MAX)]
    produce = m.ProduceLogRequest(acks=-1, table_id=log_id, timeout_ms=30_000)
    put = m.PutKvRequest(acks=-1, table_id=keyed_id, timeout_ms=30_000)
    lookup = m.LookupRequest(table_id=keyed_id)
    stats = m.GetTableStatsRequest(table_id=log_id)
    fetch = m.FetchLogRequest(follower_server_id=-1, max_bytes=1, max_wait_ms=1, min_bytes=1)
    table = fetch.tables_req.add(table_id=log_id, projection_pushdown_enabled=False)
    for bucket in ids[1:]:
        produce.buckets_req.add(bucket_id=bucket, records=b"")
        put.buckets_req.add(bucket_id=bucket, records=b"")
        lookup.buckets_req.add(bucket_id=bucket, keys=[b"\0\0\0\0"] * 4)
        stats.buckets_req.add(bucket_id=bucket)
        table.buckets_req.add(bucket_id=bucket, fetch_offset=0, max_fetch_bytes=1)
    yield ApiKey.PRODUCE_LOG, 0, produce
    yield ApiKey.PUT_KV, 2, put
    yield ApiKey.LOOKUP, 1, lookup
    yield ApiKey.GET_TABLE_STATS, 0, stats
    yield ApiKey.FETCH_LOG, 0, fetch
    offsets = m.ListOffsetsRequest(
        follower_server_id=-1, offset_type=1, table_id=log_id, bucket_id=ids
    )
    yield ApiKey.LIST_OFFSETS, 0, offsets
    path = m.PbTablePath(database_name="fluss", table_name="events")
    yield ApiKey.GET_METADATA, 0, m.MetadataRequest(table_path=[path] * 100_000)
    lease = m.AcquireLatestKvSnapshotLeaseRequest(lease_id="l", lease_duration_ms=1000)
    for _ in range(200_000):
        lease.targets.add(table_id=keyed_id)
    yield ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE, 0, lease
    filtered = m.FetchLogRequest(follower_server_id=-1, max_bytes=1, max_wait_ms=1, min_bytes=1)
    table = filtered.tables_req.add(table_id=log_id, projection_pushdown_enabled=False)
    table.buckets_req.add(bucket_id=0, fetch_offset=0, max_fetch_bytes=1)
    one = Leaf(LeafFunction.IN, 0, (0,) * LITERALS_MAX)
    table.filter_predicate.CopyFrom(predicate_to_proto(one, Schema.of("id INT")))
    yield ApiKey.FETCH_LOG, 0, filtered
    yield from wide_tables()


def small_requests(log_id: int, keyed_id: int) -> Iterator[tuple[ApiKey, int, Message]]:
    """Requests that clients send by the thousand: API, version, message."""
    put = m.PutKvRequest(acks=-1, table_id=keyed_id, timeout_ms=30_000)
    delete = build_kv_batch(1, Slices.of([b"\0\0\0\0"]), Slices.of([None]))
    put.buckets_req.add(bucket_id=0, records=bytes(delete))
    yield ApiKey.PUT_KV, 2, put
    lookup = m.LookupRequest(table_id=keyed_id)
    lookup.buckets_req.add(bucket_id=0, keys=[b"\0\0\0\0"])
    yield ApiKey.LOOKUP, 1, lookup
    fetch = m.FetchLogRequest(follower_server_id=-1, max_bytes=1, max_wait_ms=1, min_bytes=1)
    table = fetch.tables_req.add(table_id=log_id, projection_pushdown_enabled=False)
    table.buckets_req.add(bucket_id=0, fetch_offset=0, max_fetch_bytes=1)
    yield ApiKey.FETCH_LOG, 0, fetch
    yield ApiKey.API_VERSIONS, 0, PING


def wide_tables() -> Iterator[tuple[ApiKey, int, Message]]:
    """Requests about a table with many columns."""
    path = m.PbTablePath(database_name="fluss", table_name="wide")
    schema = Schema.of(
        "id INT NOT NULL, " + ", ".join(f"c{i} INT" for i in range(WIDE_COLUMNS)),
        primary_key=["id"],
    )
    wide = TableDescriptor(schema, bucket_keys=("id",), bucket_count=1).to_json()
    yield (
        ApiKey.CREATE_TABLE,
        0,
        m.CreateTableRequest(table_path=path, table_json=wide, ignore_if_exists=False),
    )
    yield ApiKey.GET_TABLE_SCHEMA, 0, m.GetTableSchemaRequest(table_path=path)
    alter = m.AlterTableRequest(table_path=path, ignore_if_not_exists=False)
    alter.config_changes.add(config_key="owner", config_value="bench", op_type=ConfigOp.SET)
    yield ApiKey.ALTER_TABLE, 0, alter
    yield ApiKey.DROP_TABLE, 0, m.DropTableRequest(table_path=path, ignore_if_not_exists=False)


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as directory, DevServer(Path(directory)) as server:
        with zufluss.connect(server.bootstrap) as connection:
            admin = connection.admin
            admin.create_table("events", "id INT", bucket_count=BUCKETS)
            admin.create_table("rows", "id INT NOT NULL", primary_key=["id"], bucket_count=1)
            ids = [admin.table_info(name).table_id for name in ("events", "rows")]
        pings, client = Pings(server.port), Client(server.port)
        unloaded = pings.worst(UNLOADED_PINGS)
        print(f"{'request':34} {'kB':>8} {'answer kB':>10} {'worst ms':>9} {'ratio':>7}")
        print(f"{'(none)':34} {'':8} {'':10} {unloaded * 1000:9.1f} {1.0:7.1f}")

        def measure(name: str, sent: int, ask: Callable[[], int]) -> None:
            pings.worst()
            answer = ask()
            worst = pings.worst()
            print(
                f"{name:34} {sent / 1000:8.1f} {answer / 1000:10.1f} "
                f"{worst * 1000:9.1f} {worst / unloaded:7.1f}"
            )

        for key, version, message in requests(*ids):
            body = message.SerializeToString()
            measure(key.name, len(body), partial(client.ask, key, body, version))
        for key, version, message in small_requests(*ids):
            body = message.SerializeToString()
            burst = partial(client.burst, key, body, version)
            measure(f"{BURST:,} × {key.name}", BURST * len(body), burst)
        pings.stop()


if __name__ == "__main__":
    main()
