"""Well-formed requests that are not true: offsets, paths, epochs and ids from nowhere.

Every call of the coordinator that a client may send is filled at random, by the names of its
fields: ids of real tables, buckets and snapshots beside those of none, offsets before and beyond
the end, paths of other tables and out of all directories, epochs of the past and of the future.
Meanwhile two tables are handed out to a tiering service, a snapshot is leased, a producer has its
columns, files lie in two remote locations, and retention deletes at once what it may.

What a caller may do by right is not sent: drops and alterations name things that do not exist, and
nobody else knows the lease, the producer and the epochs of the hand-outs. So in the end, and after
a kill -9, everything must be as it was (promises A1 to A8): each row is there, nothing was deleted
that is not in the lake, the tiering service goes on, lease and producer are alive, the catalog and
the locations are unchanged, and no request ended in an internal error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

import zufluss
from tests.counts import rounds
from tests.end_to_end.lake_round import FRESH
from tests.end_to_end.raw import RawClient
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.client.tiering import TieringClient, TieringLease
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, Api, ApiKey

REQUESTS = rounds(400, 40_000)
KILL_EVERY = 5_000
ROWS, TIERED = 200, 60
SERVER = {
    "datalake.format": "iceberg",
    "log.segment.file-size": "1kb",
    "log.retention.check-interval": "20ms",
    "kv.snapshot.interval": "100ms",
    "kv.snapshot.num-retained": "1",
    "remote.log.task-interval-duration": "200ms",
}
LAKE = {**FRESH, "table.log.ttl": "1ms"}
"""What is in the lake expires at once."""
TABLES = ("waiting", "tiering", "state", "days")
JOB, LEASE = "job", "reader"
HOLD_MS = 600_000
"""How long hand-outs, lease and producer last."""

pytestmark = pytest.mark.timeout(3600 if REQUESTS > 1000 else 400)

BY_RIGHT = {
    ApiKey.DROP_DATABASE, ApiKey.DROP_TABLE, ApiKey.DROP_PARTITION, ApiKey.ALTER_TABLE,
    ApiKey.ALTER_DATABASE, ApiKey.ALTER_CLUSTER_CONFIGS, ApiKey.ALTER_LOCATION,
}  # fmt: skip
"""Calls that change what they name: they name nothing that exists."""
NOT_ASKED = {ApiKey.AUTHENTICATE, ApiKey.INSPECT_LOCATION}
"""The connection would end, or the answer is a listing of directories."""
CALLS = [
    api
    for api in APIS.values()
    if api.for_clients and "coordinator" in api.roles and api.key not in NOT_ASKED
]
CLAIMS = [
    APIS[key]
    for key in (
        ApiKey.PREPARE_LAKE_TABLE_SNAPSHOT, ApiKey.COMMIT_LAKE_TABLE_SNAPSHOT,
        ApiKey.LAKE_TIERING_HEARTBEAT, ApiKey.CHECKPOINT_PRODUCER,
    )
]  # fmt: skip
"""Calls that decide what may be deleted; they are a third of all."""


@dataclass
class World:
    """What is there while untrue requests arrive, and what is known of it."""

    server: DevServer
    connection: Connection
    directories: Sequence[Path]
    leases: dict[str, TieringLease] = field(default_factory=dict)
    offsets_file: str = ""
    epoch: int = 0
    table_ids: dict[str, int] = field(default_factory=dict)
    partition_ids: Sequence[int] = ()

    def set_up(self) -> None:
        """Create the tables, and have one tiered in part, one leased and one produced."""
        admin = self.connection.admin
        admin.create_table("waiting", "id INT", bucket_count=1, properties=LAKE)
        admin.create_table("tiering", "id INT", bucket_count=1, properties=LAKE)
        admin.create_table("state", "id INT NOT NULL, v INT", primary_key=["id"], bucket_count=1)
        admin.create_table("days", "id INT, day STRING", partition_keys=["day"], bucket_count=1)
        for day in ("x", "y"):
            admin.create_partition("days", {"day": day})
        self.table_ids = {name: admin.table_info(name).table_id for name in TABLES}
        self.partition_ids = [p.partition_id for p in admin.list_partitions("days")]
        for _ in range(ROWS // 20):
            self.write(20)
        self.take_tables()
        lease = self.leases["tiering"]
        self.offsets_file = self.tiering.prepare(lease, self.at("tiering", TIERED))
        self.tiering.commit(lease, 1, self.offsets_file)
        eventually(lambda: bool(admin.latest_kv_snapshots("state")), "a snapshot to lease")
        acquire = m.AcquireLatestKvSnapshotLeaseRequest(lease_id=LEASE, lease_duration_ms=HOLD_MS)
        acquire.targets.add(table_id=self.table_ids["state"])
        self.call(ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE, acquire)
        self.epoch = self.call(ApiKey.INIT_PRODUCER, self.producer()).epoch

    def write(self, rows: int) -> None:
        """Append or upsert so many more rows to each table."""
        first = next(self._written) * rows
        ids = pa.array(range(first, first + rows), pa.int32())
        for name in ("waiting", "tiering"):
            with self.connection.table(name).append() as writer:
                writer.write(pa.table({"id": ids}))
        with self.connection.table("state").upsert() as upserter:
            upserter.write(pa.table({"id": ids, "v": ids}))
        with self.connection.table("days").append() as writer:
            writer.write(pa.table({"id": ids, "day": ["x", "y"] * (rows // 2)}))

    def take_tables(self) -> None:
        """Have the tiering service hold both tables of the lake."""

        def taken() -> bool:
            lease = self.tiering.heartbeat(request_table=True, timeout_ms=HOLD_MS).table
            if lease is not None:
                self.leases[lease.path.table] = lease
            return {"waiting", "tiering"} <= self.leases.keys()

        self.leases.clear()
        eventually(taken, "both hand-outs")

    @property
    def tiering(self) -> TieringClient:
        return TieringClient(self.connection)

    def at(self, table: str, offset: int) -> dict[TableBucket, int]:
        return {TableBucket(self.table_ids[table], None, 0): offset}

    def producer(self) -> m.InitProducerRequest:
        return m.InitProducerRequest(
            producer_id=JOB, table_id=self.table_ids["state"], ttl_ms=HOLD_MS
        )

    def call(self, key: ApiKey, request: Message) -> Any:
        return self.connection.call_coordinator(key, request)

    def __post_init__(self) -> None:
        self._written = count()

    # -- what must be true afterwards -------------------------------------------------------------

    def check(self, rows: int) -> None:
        """Everything is as it was."""
        admin = self.connection.admin
        assert {admin.table_info(name).table_id for name in TABLES} == {*self.table_ids.values()}
        assert self.logged("waiting") == list(range(rows)), "nothing of it is in the lake"
        assert self.logged("tiering")[-(rows - TIERED) :] == list(range(TIERED, rows))
        state = self.connection.table("state").scan(source="live").to_arrow()
        assert sorted(state["id"].to_pylist()) == list(range(rows))
        assert sorted(self.logged("days")) == list(range(rows))
        assert admin.lake_snapshot("waiting") is None
        lake = admin.lake_snapshot("tiering")
        assert lake is not None
        assert (lake.snapshot_id, lake.offsets) == (1, self.at("tiering", TIERED))
        leased = self.call(ApiKey.LIST_KV_SNAPSHOT_LEASES, m.ListKvSnapshotLeasesRequest())
        assert LEASE in [lease.lease_id for lease in leased.leases]
        alive = m.CheckpointProducerRequest(
            producer_id=JOB, table_id=self.table_ids["state"], epoch=self.epoch
        )
        self.call(ApiKey.CHECKPOINT_PRODUCER, alive)
        places = self.call(ApiKey.LIST_LOCATIONS, m.ListLocationsRequest()).locations
        assert len(places) == len(self.directories)

    def logged(self, table: str) -> list[int]:
        """The rows of a log table from the first that the log still has."""
        rows = self.connection.table(table).scan(start="earliest").to_arrow()
        return [int(each) for each in rows["id"].to_pylist()]

    def check_tiering(self) -> None:
        """The service goes on where it was."""
        for name, offset in (("tiering", TIERED + 20), ("waiting", 40)):
            lease = self.leases[name]
            file = self.tiering.prepare(lease, self.at(name, offset))
            self.tiering.commit(lease, 2, file)
            lake = self.connection.admin.lake_snapshot(name)
            assert lake is not None
            assert lake.offsets == self.at(name, offset)


class Liar:
    """Fills requests at random, by the names of their fields."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._chance = chance
        self._names = count()
        lease = world.leases["tiering"]
        epochs = [lease.tiering_epoch, lease.coordinator_epoch]
        ids = [*world.table_ids.values()]
        large = [-1, 0, 1, 2**31 - 1, 2**63 - 1, -(2**63)]
        self._numbers: Mapping[str, Sequence[int]] = {
            "table_id": [*ids, 99],
            "partition_id": [*world.partition_ids, 99],
            "bucket_id": [0, 0, 1, -1],
            "location_id": [0, 3, 99, -1],
            "tiering_epoch": [e + d for e in epochs for d in (-1, 7)],
            "epoch": [7, 0, -1, 2**20],
            "offset": [0, TIERED - 1, TIERED, ROWS, ROWS + 1, 10**15, -1, 2**63 - 1],
            "snapshot_id": [0, 1, 2, 99],
            "heartbeat_timeout_ms": [1_000, 600_000, 0],
            "duration_ms": [1, 60_000, 2**62],
            "ttl_ms": [1, 60_000, 2**62],
            "": large,
        }
        real = [str(d) for d in world.directories]
        self._texts: Mapping[str, Sequence[str]] = {
            "database_name": ["fluss", "fluss", "nowhere"],
            "table_name": [*TABLES, "nothing"],
            "path": [world.offsets_file, "/etc/passwd", "../..", f"{real[0]}/../x", *real, ""],
            "uri": ["memory://x", f"{real[0]}/inside", f"{real[0]}/../up", "s3://", "ftp://h/x"],
            "producer_id": ["other", "", "../x", "p" * 300],
            "lease_id": ["liar", "", "../x"],
            "partition_name": ["x", "nowhere"],
            "config_key": ["remote.data.dirs", "no.such.key", "iceberg.write.data.path"],
            "config_value": ["memory://x", f"{real[0]}/..", "true", ""],
            "": ["", "x", "..", "\N{BOMB}", "a" * 1000],
        }

    def request(self, api: Api) -> Message:
        """A request of a kind."""
        request = api.request()
        self._fill(request, api.key in BY_RIGHT, 0)
        return request

    def _fill(self, message: Message, unreal: bool, depth: int) -> None:
        for each in message.DESCRIPTOR.fields:
            needed = each.is_required
            if each.is_repeated:
                self._fill_list(message, each, unreal, depth)
            elif each.message_type is not None:
                if needed or self._chance.random() < 0.7:
                    child = getattr(message, each.name)
                    child.SetInParent()
                    self._fill(child, unreal, depth + 1)
            elif needed or self._chance.random() < 0.7:
                setattr(message, each.name, self._value(each, unreal))

    def _fill_list(self, message: Message, each: FieldDescriptor, unreal: bool, depth: int) -> None:
        items = getattr(message, each.name)
        for _ in range(self._chance.choice([0, 1, 1, 2]) if depth < 5 else 0):
            if each.message_type is None:
                items.append(self._value(each, unreal))
            else:
                self._fill(items.add(), unreal, depth + 1)

    def _value(self, each: FieldDescriptor, unreal: bool) -> Any:
        if each.type == FieldDescriptor.TYPE_BOOL:
            return self._chance.random() < 0.5
        if each.type == FieldDescriptor.TYPE_BYTES:
            return self._chance.choice([b"", b"{}", b"\xff" * 9, b'{"version":1}'])
        if each.type == FieldDescriptor.TYPE_STRING:
            if unreal and each.name in ("table_name", "database_name"):
                return f"no_such_{next(self._names)}"
            return self._chance.choice(_pool(self._texts, each.name))
        value = self._chance.choice(_pool(self._numbers, each.name))
        if each.type == FieldDescriptor.TYPE_INT32:
            return max(-(2**31), min(value, 2**31 - 1))
        return value


def _pool(pools: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    """The values for a field: those of the longest key that its name ends with, or begins with."""
    keys = [key for key in pools if name.removesuffix("s").endswith(key) or key in name]
    return pools[max(keys, key=len)]


@contextmanager
def world_of(server: DevServer, directories: Sequence[Path]) -> Iterator[World]:
    with zufluss.connect(server.bootstrap) as connection:
        world = World(server, connection, directories)
        world.set_up()
        yield world


def problem_of(raw: RawClient, api: Api, request: Message) -> ZuflussError | None:
    """The error that answers, which is never an internal one of the server."""
    problem = raw.request(api.key, request).error
    if problem is not None:
        assert "internal server error" not in problem.message, f"{api.name} {request}"
    return problem


def test_no_request_that_is_not_true_loses_a_row_or_stops_a_service(
    new_server: Callable[..., DevServer], tmp_path: Path, rng: random.Random
) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    dirs = {"remote.data.dirs": ",".join(map(str, directories))}
    server = new_server({**SERVER, **dirs})
    codes: dict[str, set[ErrorCode]] = {}
    with world_of(server, directories) as world:
        liar = Liar(world, rng)
        with ExitStack() as connections:
            raw = connections.enter_context(RawClient(server.port))
            for number in range(REQUESTS):
                api = rng.choice(CLAIMS if rng.random() < 1 / 3 else CALLS)
                problem = problem_of(raw, api, liar.request(api))
                if problem is not None:
                    codes.setdefault(api.name, set()).add(problem.code)
                if (number + 1) % KILL_EVERY == 0:
                    world.check(ROWS)
                    server.kill()
                    server.start()
                    raw = connections.enter_context(RawClient(server.port))
                    world.take_tables()
                    liar = Liar(world, rng)
            assert raw.alive()
        world.check(ROWS)
        world.check_tiering()
    server.kill()
    server.start()
    with zufluss.connect(server.bootstrap) as connection:
        rows_left = connection.table("waiting").scan(start="earliest").to_arrow()["id"]
        assert rows_left.to_pylist()[40 - ROWS :] == list(range(40, ROWS)), "after a restart"
        with connection.table("waiting").append() as writer:
            writer.write(pa.table({"id": pa.array([ROWS], pa.int32())}))
    print(f"{REQUESTS} requests of {len(CALLS)} kinds, {len(codes)} kinds were refused")
