"""Leases of key-value snapshots on a real server: over bare frames, with passwords, by the client.

One server with an open listener and one that asks for a password, a super user, and snapshots all
the time of which one is kept.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import zufluss
from tests.conftest import SERVERS
from tests.end_to_end.guarded import guarded_properties, listener_ports, logged_in
from tests.end_to_end.leases.stage import beside
from tests.end_to_end.raw import RawClient, table_path
from tests.servers import WarmServer
from zufluss.client.sync.connection import Connection
from zufluss.errors import ErrorCode
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

USERS = ("admin", "anna", "bert")
HOUR_MS = 3_600_000
REFUSED = int(ErrorCode.AUTHORIZATION_EXCEPTION)
DROP = ApiKey.DROP_KV_SNAPSHOT_LEASE
LATEST = ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE
METADATA = ApiKey.GET_KV_SNAPSHOT_METADATA
RENEW = ApiKey.RENEW_KV_SNAPSHOT_LEASE


@contextmanager
def started(
    request: pytest.FixtureRequest, directory: Path, **properties: str
) -> Iterator[tuple[DevServer, dict[str, int]]]:
    ports = listener_ports()
    known = guarded_properties(ports, *USERS) | {
        "super.users": "User:admin",
        "kv.snapshot.interval": "20ms",
        "kv.snapshot.num-retained": "1",
    }
    server = WarmServer(directory, known | properties)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        yield server, ports


@pytest.fixture(scope="module")
def ports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, int]]:
    with started(request, tmp_path_factory.mktemp("leases")) as (_, ports):
        yield ports


@pytest.fixture
def conn(ports: dict[str, int]) -> Iterator[Connection]:
    with zufluss.connect(f"127.0.0.1:{ports['OPEN']}") as connection:
        yield connection


@pytest.fixture
def raw(ports: dict[str, int]) -> Iterator[RawClient]:
    with RawClient(ports["OPEN"]) as client:
        yield client


@pytest.fixture
def users(ports: dict[str, int]) -> Iterator[dict[str, RawClient]]:
    """A connection of each user."""
    with ExitStack() as stack:
        yield {u: stack.enter_context(logged_in(ports["SECURE"], u)) for u in USERS}


def new_snapshot(conn: Connection, name: str, value: int) -> tuple[int, int]:
    """Write a row to a table, made if need be; its id, and the first snapshot with that row."""
    conn.admin.create_table(
        name,
        "id INT NOT NULL, v INT",
        primary_key=["id"],
        bucket_count=1,
        ignore_if_exists=True,
    )
    table = conn.table(name)
    with table.upsert() as writer:
        writer.write({"id": [1], "v": [value]})
    end = conn.admin.list_offsets(name)[0]
    while True:
        snapshots = conn.admin.latest_kv_snapshots(name)
        if snapshots and snapshots[0].log_offset >= end:
            return table.info.table_id, snapshots[0].snapshot_id


def unique() -> str:
    return f"t{uuid.uuid4().hex[:8]}"


def latest(table_id: int, lease_id: str) -> m.AcquireLatestKvSnapshotLeaseRequest:
    return m.AcquireLatestKvSnapshotLeaseRequest(
        lease_id=lease_id,
        lease_duration_ms=HOUR_MS,
        targets=[m.PbLeaseTarget(table_id=table_id)],
    )


def metadata(table_id: int, snapshot_id: int) -> m.GetKvSnapshotMetadataRequest:
    return m.GetKvSnapshotMetadataRequest(table_id=table_id, bucket_id=0, snapshot_id=snapshot_id)


def wait_until_gone(raw: RawClient, request: m.GetKvSnapshotMetadataRequest, code: int) -> None:
    while (error_code := raw.error_code(METADATA, request)) != code:
        assert error_code == 0


def test_a_leased_snapshot_stays_while_newer_ones_come_and_goes_when_it_is_released(
    conn: Connection, raw: RawClient
) -> None:
    name = unique()
    table_id, first = new_snapshot(conn, name, 1)
    wanted = m.PbKvSnapshotLeaseForTable(
        table_id=table_id,
        bucket_snapshots=[m.PbKvSnapshotLeaseForBucket(bucket_id=0, snapshot_id=first)],
    )
    request = m.AcquireKvSnapshotLeaseRequest(
        lease_id=name, lease_duration_ms=HOUR_MS, snapshots_to_lease=[wanted]
    )
    answer = raw.call(ApiKey.ACQUIRE_KV_SNAPSHOT_LEASE, request)
    assert (answer.lease_epoch, list(answer.unavailable_snapshots)) == (1, [])
    for value in (2, 3):
        _, newest = new_snapshot(conn, name, value)
    found = raw.call(METADATA, metadata(table_id, first))
    paths = [Path(each.remote_path.removeprefix("file://")) for each in found.snapshot_files]
    assert all(path.is_file() for path in paths)
    (lease,) = conn.admin.kv_snapshot_leases(name)
    assert [each.snapshot_id for each in lease.snapshots.values()] == [first]
    assert lease.tables[0].table == f"fluss.{name}"
    assert lease.tables[0].bytes == sum(path.stat().st_size for path in beside(paths))
    bucket = m.PbTableBucket(table_id=table_id, bucket_id=0)
    release = m.ReleaseKvSnapshotLeaseRequest(lease_id=name, buckets_to_release=[bucket])
    raw.call(ApiKey.RELEASE_KV_SNAPSHOT_LEASE, release)
    gone = int(ErrorCode.KV_SNAPSHOT_NOT_EXIST)
    wait_until_gone(raw, metadata(table_id, first), gone)
    assert raw.error_code(METADATA, metadata(table_id, newest)) == 0
    assert conn.admin.kv_snapshot_leases(name) == []


def test_a_user_cannot_use_the_lease_of_another_and_a_super_user_can(
    conn: Connection, raw: RawClient, users: dict[str, RawClient]
) -> None:
    name = unique()
    table_id, _ = new_snapshot(conn, name, 1)
    anna, bert, admin = users["anna"], users["bert"], users["admin"]
    anna.call(LATEST, latest(table_id, name))
    renew = m.RenewKvSnapshotLeaseRequest(lease_id=name, lease_duration_ms=HOUR_MS)
    drop = m.DropKvSnapshotLeaseRequest(lease_id=name)
    release = m.ReleaseKvSnapshotLeaseRequest(lease_id=name)
    for other in (bert, raw):
        assert other.error_code(LATEST, latest(table_id, name)) == REFUSED
        assert other.error_code(RENEW, renew) == REFUSED
        assert other.error_code(ApiKey.RELEASE_KV_SNAPSHOT_LEASE, release) == REFUSED
        assert other.error_code(DROP, drop) == REFUSED
    (lease,) = conn.admin.kv_snapshot_leases(name)
    assert (lease.owner, lease.epoch) == ("anna", 1)
    assert anna.call(RENEW, renew).remaining_ms <= HOUR_MS
    assert admin.error_code(DROP, drop) == 0
    assert anna.error_code(RENEW, renew) == int(ErrorCode.KV_SNAPSHOT_LEASE_NOT_FOUND)
    assert bert.call(LATEST, latest(table_id, name)).lease_epoch == 2


def test_a_dropped_table_is_readable_until_its_lease_is_dropped(
    conn: Connection, raw: RawClient
) -> None:
    name = unique()
    table_id, snapshot_id = new_snapshot(conn, name, 1)
    answer = raw.call(LATEST, latest(table_id, name))
    (snapshot_id,) = answer.leased[0].snapshot_ids
    conn.admin.drop_table(name)
    found = raw.call(METADATA, metadata(table_id, snapshot_id))
    paths = [Path(each.remote_path.removeprefix("file://")) for each in found.snapshot_files]
    assert paths
    assert all(path.is_file() for path in paths)
    new_id, _ = new_snapshot(conn, name, 1)
    assert new_id != table_id
    conn.admin.drop_kv_snapshot_lease(name)
    gone = int(ErrorCode.KV_SNAPSHOT_NOT_EXIST)
    assert raw.error_code(METADATA, metadata(table_id, snapshot_id)) == gone
    info = m.GetTableInfoRequest(table_path=table_path("fluss", name))
    assert raw.call(ApiKey.GET_TABLE_INFO, info).table_id == new_id


def test_with_revoke_the_reader_of_a_dropped_table_is_told_also_after_a_kill(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    properties = {"zufluss.kv.snapshot.lease.on-drop": "revoke"}
    with started(request, tmp_path, **properties) as (server, ports):
        with (
            zufluss.connect(f"127.0.0.1:{ports['OPEN']}") as conn,
            RawClient(ports["OPEN"]) as raw,
        ):
            table_id, _ = new_snapshot(conn, "t", 1)
            (snapshot_id,) = raw.call(LATEST, latest(table_id, "l")).leased[0].snapshot_ids
            conn.admin.drop_table("t")
            revoked = int(ErrorCode.KV_SNAPSHOT_REVOKED)
            wait_until_gone(raw, metadata(table_id, snapshot_id), revoked)
        server.kill()
        server.start()
        with RawClient(ports["OPEN"]) as raw:
            renew = m.RenewKvSnapshotLeaseRequest(lease_id="l", lease_duration_ms=HOUR_MS)
            (lost,) = raw.call(RENEW, renew).revoked
            assert (lost.table_id, lost.what) == (table_id, "fluss.t")
            assert raw.error_code(METADATA, metadata(table_id, snapshot_id)) == revoked
