"""Leases of key-value snapshots of a real server, and a wire to it that is cut on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import zufluss
from tests.client.pk import create_table, upsert
from tests.client.relay import Relay
from tests.servers import WarmServer
from tests.waiting import WAIT_SECONDS
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.lease import KvSnapshotLease
from zufluss.client.sync.table import Table
from zufluss.errors import (
    ConfigError,
    KvSnapshotLeaseFencedError,
    KvSnapshotLeaseNotFoundError,
    KvSnapshotNotExistError,
    KvSnapshotRevokedError,
    NonPrimaryKeyTableError,
)
from zufluss.model.lease import Unavailable
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

KEYED = "id INT NOT NULL, name STRING, PRIMARY KEY (id)"
PARTITIONED = "id INT NOT NULL, day STRING NOT NULL, PRIMARY KEY (id, day)"
FAST = {"kv.snapshot.interval": "20ms", "kv.snapshot.num-retained": "1"}
QUICK = {"client.request-timeout": "2s", "client.connect-timeout": "2s"}


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


@pytest.fixture(scope="module")
def server(relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    """A server that takes snapshots all the time and keeps one; its clients go by the relay."""
    advertised = {"advertised.listeners": f"FLUSS://{relay.bootstrap}"}
    with WarmServer(tmp_path_factory.mktemp("leases"), FAST | advertised) as server:
        relay.target = server.port
        yield server


@pytest.fixture
def conn(server: DevServer, relay: Relay) -> Iterator[Connection]:
    with zufluss.connect(relay.bootstrap, **QUICK) as connection:
        yield connection


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def filled(connection: Connection, **options: object) -> tuple[Table, TableBucket]:
    """A table with a row and a snapshot of it."""
    table = create_table(connection, KEYED, bucket_count=1, **options)
    bucket = TableBucket(table.info.table_id, None, 0)
    replace_snapshot(connection, table, "first")
    return table, bucket


def replace_snapshot(connection: Connection, table: Table, name: str) -> None:
    """Write a row, and wait until a snapshot has it."""
    upsert(table, {"id": [1], "name": [name]})
    end = connection.admin.list_offsets(table.path)[0]

    def there() -> bool:
        found = connection.admin.latest_kv_snapshots(table.path)
        return bool(found) and found[0].log_offset == end

    wait_until(there)


def name_in(table: Table, lease: KvSnapshotLease, bucket: TableBucket) -> str:
    with table.kv_snapshot(bucket, lease=lease) as reader:
        (row,) = pa.Table.from_batches(reader, reader.schema).to_pylist()
        return str(row["name"])


def is_kept(connection: Connection, bucket: TableBucket, snapshot_id: int) -> bool:
    try:
        connection.admin.kv_snapshot_metadata(bucket, snapshot_id)
    except KvSnapshotNotExistError:
        return False
    return True


def test_a_leased_snapshot_stays_while_newer_ones_come_and_goes_at_the_end(
    conn: Connection,
) -> None:
    table, bucket = filled(conn)
    with conn.admin.kv_snapshot_lease(table.path) as lease:
        held = lease.snapshots[bucket].snapshot_id
        for number in range(3):
            replace_snapshot(conn, table, f"newer {number}")
        assert name_in(table, lease, bucket) == "first"
        assert table.lookup(1) == {"id": 1, "name": "newer 2"}
    wait_until(lambda: not is_kept(conn, bucket, held))


def test_releasing_frees_a_snapshot_at_once(conn: Connection) -> None:
    table, bucket = filled(conn)
    with conn.admin.kv_snapshot_lease(table.path) as lease:
        held = lease.snapshots[bucket].snapshot_id
        replace_snapshot(conn, table, "newer")
        assert is_kept(conn, bucket, held)
        lease.release(bucket)
        wait_until(lambda: not is_kept(conn, bucket, held))
        lease.check()
        with pytest.raises(KvSnapshotNotExistError, match="not leased, or released"):
            name_in(table, lease, bucket)


def test_buckets_without_rows_have_nothing_to_lease(conn: Connection) -> None:
    table = create_table(conn, KEYED, bucket_count=2)
    with conn.admin.kv_snapshot_lease(table.path, buckets=[0, 7]) as lease:
        reasons = {bucket.bucket_id: reason for bucket, reason in lease.unavailable.items()}
        assert reasons == {0: Unavailable.NO_SNAPSHOT, 7: Unavailable.NO_BUCKET}
        assert (lease.epoch, lease.snapshots) == (None, {})


def test_two_leases_of_one_process_do_not_touch_each_other(conn: Connection) -> None:
    table, bucket = filled(conn)
    with conn.admin.kv_snapshot_lease(table.path) as one:
        with conn.admin.kv_snapshot_lease(table.path) as other:
            assert one.lease_id != other.lease_id
        replace_snapshot(conn, table, "newer")
        one.renew()
        assert name_in(table, one, bucket) == "first"


def test_partitions_are_leased_together_or_one(conn: Connection) -> None:
    table = create_table(conn, PARTITIONED, partition_keys=["day"], bucket_count=1)
    upsert(table, {"id": [1, 2], "day": ["a", "b"]})
    admin = conn.admin
    ids = {found.name: found.partition_id for found in admin.list_partitions(table.path)}
    for day in ("a", "b"):
        wait_until(lambda day=day: bool(admin.latest_kv_snapshots(table.path, day)))
    with admin.kv_snapshot_lease(table.path) as both:
        assert {bucket.partition_id for bucket in both.snapshots} == {*ids.values()}
    with admin.kv_snapshot_lease(table.path, partition={"day": "b"}) as one:
        assert {bucket.partition_id for bucket in one.snapshots} == {ids["b"]}


def test_what_the_server_refuses_is_typed(conn: Connection) -> None:
    log = create_table(conn, "id INT", bucket_count=1)
    with pytest.raises(NonPrimaryKeyTableError):
        conn.admin.kv_snapshot_lease(log.path)
    table, _ = filled(conn)
    for lease_id in ("", "..", "a/b", "x" * 129):
        with pytest.raises(ConfigError):
            conn.admin.kv_snapshot_lease(table.path, lease_id=lease_id)
    for duration in (0, -1, "8d", 2**62):
        with pytest.raises(ConfigError):
            conn.admin.kv_snapshot_lease(table.path, duration=duration)


def test_another_process_goes_on_with_the_same_snapshots(conn: Connection, relay: Relay) -> None:
    table, bucket = filled(conn)
    lease_id = f"job-{bucket.table_id}"
    with conn.admin.kv_snapshot_lease(table.path, lease_id=lease_id) as lease:
        held = lease.snapshots
        lease.detach()
    replace_snapshot(conn, table, "newer")
    with zufluss.connect(relay.bootstrap) as later:
        again = later.admin.kv_snapshot_lease(lease_id=lease_id, resume=True)
        assert (again.resumed, again.epoch, again.snapshots) == (True, 2, held)
        assert name_in(later.table(table.path), again, bucket) == "first"
        taken = conn.admin.kv_snapshot_lease(lease_id=lease_id, resume=True)
        with pytest.raises(KvSnapshotLeaseFencedError):
            again.renew()
        with pytest.raises(KvSnapshotLeaseFencedError):
            name_in(table, again, bucket)
        again.close()
        taken.renew()
        taken.close()
    with pytest.raises(KvSnapshotLeaseNotFoundError):
        conn.admin.kv_snapshot_lease(table.path, lease_id=lease_id, resume=True)
    with conn.admin.kv_snapshot_lease(
        table.path, lease_id=lease_id, resume=True, if_lost="latest"
    ) as anew:
        assert not anew.resumed
        assert name_in(table, anew, bucket) == "newer"


def test_a_client_that_is_gone_leaves_its_lease_to_expire(conn: Connection, relay: Relay) -> None:
    table, bucket = filled(conn)
    with zufluss.connect(relay.bootstrap) as doomed:
        lease = doomed.admin.kv_snapshot_lease(table.path, duration="2s")
        held = lease.snapshots[bucket].snapshot_id
    replace_snapshot(conn, table, "newer")
    wait_until(lambda: not is_kept(conn, bucket, held))


def test_a_server_out_of_reach_for_two_thirds_of_the_time_loses_nothing(
    conn: Connection, relay: Relay
) -> None:
    table, bucket = filled(conn)
    with conn.admin.kv_snapshot_lease(table.path, duration="6s") as lease:
        replace_snapshot(conn, table, "newer")
        lease.renew()
        relay.cut()
        try:
            wait_until(lambda: lease.remaining_ms <= 2_000)
        finally:
            relay.mend()
        wait_until(lambda: lease.remaining_ms > 4_000)
        lease.check()
        assert lease.epoch == 1
        assert name_in(table, lease, bucket) == "first"


def test_a_server_out_of_reach_for_longer_is_told_before_a_file_is_missing(
    conn: Connection, relay: Relay
) -> None:
    table, bucket = filled(conn)
    with (
        conn.admin.kv_snapshot_lease(table.path, duration="1500ms") as lease,
        table.kv_snapshot(bucket, lease=lease) as reader,
    ):
        held = lease.snapshots[bucket].snapshot_id
        replace_snapshot(conn, table, "newer")
        lease.renew()
        relay.cut()
        try:
            wait_until(lambda: lease.lost is not None)
            with pytest.raises(KvSnapshotLeaseNotFoundError, match="was not renewed for 1500ms"):
                next(reader)
            with pytest.raises(KvSnapshotLeaseNotFoundError, match="was not renewed for 1500ms"):
                table.kv_snapshot(bucket, lease=lease)
        finally:
            relay.mend()
        wait_until(lambda: not is_kept(conn, bucket, held))
        wait_until(lambda: "was not renewed" not in str(lease.lost))
        assert isinstance(lease.lost, KvSnapshotLeaseNotFoundError)


def test_a_lease_outlives_a_coordinator_that_is_away_for_longer_than_its_time(
    tmp_path: Path,
) -> None:
    with WarmServer(tmp_path, FAST) as server, zufluss.connect(server.bootstrap, **QUICK) as conn:
        table, bucket = filled(conn)
        with conn.admin.kv_snapshot_lease(table.path, duration="2s") as lease:
            replace_snapshot(conn, table, "newer")
            server.kill()
            wait_until(lambda: lease.lost is not None)
            server.start()
            wait_until(lambda: lease.lost is None)
            replace_snapshot(conn, table, "newest")
            assert name_in(table, lease, bucket) == "first"
            assert lease.epoch == 1


def test_a_table_that_is_dropped_stays_readable_under_the_lease(conn: Connection) -> None:
    table, bucket = filled(conn)
    with conn.admin.kv_snapshot_lease(table.path) as lease:
        conn.admin.drop_table(table.path)
        conn.admin.create_table(table.path, KEYED, bucket_count=1)
        assert name_in(table, lease, bucket) == "first"
        lease.renew()
        assert list(lease.revoked) == []


def test_a_revoked_snapshot_names_what_was_dropped(tmp_path: Path) -> None:
    revoking = FAST | {"zufluss.kv.snapshot.lease.on-drop": "revoke"}
    with WarmServer(tmp_path, revoking) as server, zufluss.connect(server.bootstrap) as conn:
        table, bucket = filled(conn)
        other, good = filled(conn)
        paths = [table.path, other.path]
        with conn.admin.kv_snapshot_lease(paths) as lease:
            conn.admin.drop_table(table.path)
            wait_until(lambda: [lease.renew(), *lease.revoked] != [None])
            with pytest.raises(KvSnapshotRevokedError, match=f"{table.path} was dropped"):
                name_in(table, lease, bucket)
            assert name_in(other, lease, good) == "first"
