"""A tiering service's calls against a real server, which is killed in the middle of rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zufluss
from zufluss.client.sync.connection import Connection
from zufluss.client.tiering import (
    HEARTBEAT_TIMEOUT_MS,
    Heartbeat,
    TieringClient,
    TieringLease,
    TieringStats,
)
from zufluss.errors import (
    FencedTieringEpochError,
    LakeNotConfiguredError,
    NetworkError,
    OffsetOutOfRangeError,
    PartitionNotExistError,
    TableNotExistError,
)
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

LAKE = {"datalake.format": "iceberg"}
FRESH = {"table.datalake.enabled": "true", "table.datalake.freshness": "1ms"}


@pytest.fixture
def server(new_server: Callable[..., DevServer]) -> DevServer:
    """A server with a lake."""
    return new_server(LAKE)


@pytest.fixture
def connection(server: DevServer) -> Iterator[Connection]:
    """A connection that lives over restarts of the server.

    It waits for long: the first table in a lake needs a process that imports the lake's library.
    """
    with zufluss.connect(server.bootstrap, **{"client.request-timeout": "300s"}) as connection:
        yield connection


@pytest.fixture
def tiering(connection: Connection) -> TieringClient:
    """A service's end of the connection."""
    return TieringClient(connection)


def take(tiering: TieringClient, timeout_ms: int = HEARTBEAT_TIMEOUT_MS) -> TieringLease:
    """Ask until a table is handed out."""
    while (answer := ask(tiering, timeout_ms)).table is None:
        pass
    return answer.table


def ask(tiering: TieringClient, timeout_ms: int) -> Heartbeat:
    return tiering.heartbeat(request_table=True, timeout_ms=timeout_ms)


def bucket(lease: TieringLease, bucket_id: int = 0) -> TableBucket:
    return TableBucket(lease.table_id, None, bucket_id)


def create(connection: Connection, path: str = "fluss.events", buckets: int = 2) -> None:
    connection.admin.create_table(
        path, "a INT", bucket_count=buckets, bucket_keys=["a"], properties=FRESH
    )


def create_filled(connection: Connection) -> None:
    """A table of 200 rows, which are about a hundred in each bucket."""
    create(connection)
    with connection.table("fluss.events").append() as writer:
        writer.write({"a": list(range(200))})


def test_a_round_runs_from_hand_out_to_finish(
    connection: Connection, tiering: TieringClient
) -> None:
    create_filled(connection)
    assert connection.admin.lake_snapshot("fluss.events") is None
    lease = take(tiering)
    assert str(lease.path) == "fluss.events"
    assert tiering.heartbeat(running=[lease], timeout_ms=10_000).refused == {}
    file = tiering.prepare(lease, {bucket(lease): 10})
    tiering.commit(lease, 4711, file)
    found = connection.admin.lake_snapshot("fluss.events")
    assert found is not None
    assert (found.table_id, found.snapshot_id) == (lease.table_id, 4711)
    assert found.offsets == {bucket(lease): 10}
    stats = TieringStats(file_size=100, record_count=10)
    assert tiering.heartbeat(finished={lease: stats}).refused == {}
    again = take(tiering)
    assert again.tiering_epoch > lease.tiering_epoch
    file = tiering.prepare(again, {bucket(lease, 1): 5})
    tiering.commit(again, 42, file, earliest_to_keep=4711)
    for snapshot_id in (4711, 42):
        found = connection.admin.lake_snapshot("fluss.events", snapshot_id)
        assert found is not None
        assert found.snapshot_id == snapshot_id
    assert connection.admin.lake_snapshot("fluss.events", 1) is None
    assert connection.admin.lake_snapshot("fluss.events", readable=True) is None


def test_a_table_with_more_to_tier_comes_again_at_once(
    connection: Connection, tiering: TieringClient
) -> None:
    create(connection)
    lease = take(tiering)
    connection.admin.alter_table("fluss.events", set={"table.datalake.freshness": "1h"})
    answer = tiering.heartbeat(
        finished={lease: TieringStats()}, force_finished=[lease.table_id], request_table=True
    )
    assert answer.table is not None
    assert answer.table.table_id == lease.table_id
    tiering.heartbeat(finished={answer.table: TieringStats()})
    assert tiering.heartbeat(request_table=True).table is None


def test_a_service_that_was_silent_is_fenced_and_changes_nothing(
    connection: Connection, tiering: TieringClient
) -> None:
    create_filled(connection)
    zombie = take(tiering, timeout_ms=1_000)
    file = tiering.prepare(zombie, {bucket(zombie): 10})
    lease = take(tiering, timeout_ms=60_000)
    assert lease.tiering_epoch > zombie.tiering_epoch
    with pytest.raises(FencedTieringEpochError):
        tiering.prepare(zombie, {bucket(zombie): 10})
    with pytest.raises(FencedTieringEpochError):
        tiering.commit(zombie, 1, file)
    assert connection.admin.lake_snapshot("fluss.events") is None
    for answer in (
        tiering.heartbeat(running=[zombie]),
        tiering.heartbeat(failed=[zombie]),
        tiering.heartbeat(finished={zombie: TieringStats()}),
    ):
        assert isinstance(answer.refused[zombie.table_id], FencedTieringEpochError)
    tiering.commit(lease, 1, file)


def test_a_failed_table_is_handed_out_again(connection: Connection, tiering: TieringClient) -> None:
    create(connection)
    lease = take(tiering)
    answer = tiering.heartbeat(failed=[lease], request_table=True)
    assert answer.table is not None
    assert answer.table.tiering_epoch == lease.tiering_epoch + 1


def test_errors_have_their_own_types(connection: Connection, tiering: TieringClient) -> None:
    create_filled(connection)
    lease = take(tiering)
    file = tiering.prepare(lease, {bucket(lease): 10})
    tiering.commit(lease, 1, file)
    with pytest.raises(OffsetOutOfRangeError, match="would go back"):
        tiering.prepare(lease, {bucket(lease): 9})
    with pytest.raises(OffsetOutOfRangeError, match="the lake cannot have it up to 201"):
        tiering.prepare(lease, {bucket(lease): 201})
    connection.admin.drop_table("fluss.events")
    with pytest.raises(TableNotExistError):
        tiering.prepare(lease, {bucket(lease): 11})
    with pytest.raises(TableNotExistError):
        tiering.commit(lease, 2, file)
    with pytest.raises(TableNotExistError):
        connection.admin.lake_snapshot("fluss.events")


def test_a_server_without_a_lake_hands_nothing_out(dev_server: DevServer) -> None:
    with zufluss.connect(dev_server.bootstrap) as connection:
        connection.admin.create_table("fluss.no_lake", "a INT", ignore_if_exists=True)
        tiering = TieringClient(connection)
        assert tiering.heartbeat(request_table=True).table is None
        info = connection.admin.table_info("fluss.no_lake")
        lease = TieringLease(info.table_id, info.path, 1, 1)
        with pytest.raises(LakeNotConfiguredError):
            tiering.prepare(lease, {})
        assert connection.admin.lake_snapshot("fluss.no_lake") is None


# -- kill -9 --------------------------------------------------------------------------------------


def restart(server: DevServer, connection: Connection) -> None:
    server.kill()
    server.start()
    connection.admin.list_databases()  # tried again until the connection is there


def test_a_server_killed_between_prepare_and_commit_lets_the_snapshot_be_recovered(
    server: DevServer, connection: Connection, tiering: TieringClient
) -> None:
    """The lake has the snapshot, the server does not know it: the next round reports it."""
    create_filled(connection)
    lease = take(tiering)
    tiering.commit(lease, 1, tiering.prepare(lease, {bucket(lease): 10}))
    file = tiering.prepare(lease, {bucket(lease): 20, bucket(lease, 1): 5})
    restart(server, connection)
    found = connection.admin.lake_snapshot("fluss.events")
    assert found is not None
    assert (found.snapshot_id, found.offsets) == (1, {bucket(lease): 10})
    with pytest.raises(FencedTieringEpochError):
        tiering.commit(lease, 2, file)
    again = take(tiering)
    assert again.tiering_epoch > lease.tiering_epoch
    assert again.coordinator_epoch > lease.coordinator_epoch
    assert Path(file).exists()
    tiering.commit(again, 2, file)
    found = connection.admin.lake_snapshot("fluss.events")
    assert found is not None
    assert (found.snapshot_id, found.offsets) == (
        2,
        {bucket(lease): 20, bucket(lease, 1): 5},
    )


def test_a_server_killed_after_a_commit_knows_the_snapshot(
    server: DevServer, connection: Connection, tiering: TieringClient
) -> None:
    create_filled(connection)
    epoch = 0
    for snapshot_id in (7, 3, 5):
        lease = take(tiering)
        assert lease.tiering_epoch > epoch
        epoch = lease.tiering_epoch
        file = tiering.prepare(lease, {bucket(lease): 10 + epoch})
        tiering.commit(lease, snapshot_id, file)
        restart(server, connection)
        found = connection.admin.lake_snapshot("fluss.events")
        assert found is not None
        assert (found.snapshot_id, found.offsets) == (snapshot_id, {bucket(lease): 10 + epoch})
        answer = tiering.heartbeat(finished={lease: TieringStats()})
        assert isinstance(answer.refused[lease.table_id], FencedTieringEpochError)


# -- offsets of all buckets -----------------------------------------------------------------------


def test_one_call_returns_the_offsets_of_every_partition_and_bucket(connection: Connection) -> None:
    admin = connection.admin
    create(connection)
    with connection.table("fluss.events").append() as writer:
        writer.write({"a": [1, 2, 3]})
    found = admin.list_all_offsets("fluss.events")
    assert sorted(b.bucket_id for b in found) == [0, 1]
    assert sum(found.values()) == 3
    assert set(admin.list_all_offsets("fluss.events", "earliest").values()) == {0}

    admin.create_table("fluss.by_day", "a INT, d STRING", partition_keys=["d"], bucket_count=2)
    assert admin.list_all_offsets("fluss.by_day") == {}
    for day in ("x", "y"):
        admin.create_partition("fluss.by_day", {"d": day})
    with connection.table("fluss.by_day").append() as writer:
        writer.write({"a": [1, 2, 3], "d": ["x", "x", "y"]})
    ids = {p.name: p.partition_id for p in admin.list_partitions("fluss.by_day")}
    found = admin.list_all_offsets("fluss.by_day")
    assert {b.partition_id for b in found} == set(ids.values())
    assert sum(o for b, o in found.items() if b.partition_id == ids["x"]) == 2


def test_a_partition_that_was_dropped_and_created_again_is_another_one(
    connection: Connection,
) -> None:
    """A connection that lives for long knows partitions by name; their ids change."""
    admin = connection.admin
    admin.create_table("fluss.by_day", "a INT, d STRING", partition_keys=["d"], bucket_count=1)
    admin.create_partition("fluss.by_day", {"d": "x"})
    with connection.table("fluss.by_day").append() as writer:
        writer.write({"a": [1], "d": ["x"]})
    (old,) = admin.list_all_offsets("fluss.by_day")
    with zufluss.connect(_bootstrap(connection)) as other:
        other.admin.drop_partition("fluss.by_day", "x")
        other.admin.create_partition("fluss.by_day", {"d": "x"})
    (new,) = admin.list_all_offsets("fluss.by_day").items()
    assert new[0] != old
    assert new[1] == 0


def _bootstrap(connection: Connection) -> str:
    node = connection.admin.server_nodes()[0]
    return f"{node.host}:{node.port}"


def test_offsets_of_a_dropped_partition_are_refused(
    connection: Connection, tiering: TieringClient
) -> None:
    connection.admin.create_table(
        "fluss.by_day", "a INT, d STRING", partition_keys=["d"], bucket_count=1, properties=FRESH
    )
    connection.admin.create_partition("fluss.by_day", {"d": "x"})
    (place,) = connection.admin.list_all_offsets("fluss.by_day")
    lease = take(tiering)
    tiering.commit(lease, 1, tiering.prepare(lease, {place: 0}))
    found = connection.admin.lake_snapshot("fluss.by_day")
    assert found is not None
    assert found.partition_names == {place.partition_id: "x"}
    connection.admin.drop_partition("fluss.by_day", "x")
    with pytest.raises(PartitionNotExistError):
        tiering.prepare(lease, {place: 1})
    found = connection.admin.lake_snapshot("fluss.by_day")
    assert found is not None
    assert found.partition_names == {}


def test_asking_an_unreachable_server_for_a_table_is_an_error(server: DevServer) -> None:
    """It is unknown whether a table was handed out, so the request is not repeated."""
    with zufluss.connect(server.bootstrap, **{"client.request-timeout": "3s"}) as connection:
        tiering = TieringClient(connection)
        assert tiering.heartbeat(request_table=True).table is None
        server.kill()
        with pytest.raises(NetworkError):
            tiering.heartbeat(request_table=True)
    server.start()
