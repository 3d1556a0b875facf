"""The catalog: what it allows, in which order it checks, and what survives."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.support import (
    COORDINATOR,
    EVENTS,
    NOON,
    TABLET,
    Cluster,
    RecordingTablet,
    picture,
    successor,
    table_json,
)
from zufluss.cluster.image import ClusterNode
from zufluss.coordinator import records
from zufluss.coordinator.catalog.catalog import DESCRIPTOR_BYTES_MAX
from zufluss.coordinator.server import Coordinator
from zufluss.errors import (
    BucketMaxNumError,
    DatabaseAlreadyExistError,
    DatabaseNotEmptyError,
    DatabaseNotExistError,
    ErrorCode,
    InvalidDatabaseError,
    InvalidPartitionError,
    InvalidReplicationFactorError,
    InvalidTableError,
    LogStorageError,
    NetworkError,
    PartitionAlreadyExistError,
    PartitionMaxNumError,
    PartitionNotExistError,
    TableAlreadyExistError,
    TableNotExistError,
    TableNotPartitionedError,
    ZuflussError,
)
from zufluss.meta.api import Create, Put
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Schema
from zufluss.model.table import (
    DatabaseDescriptor,
    TableBucket,
    TableDescriptor,
    TableInfo,
    TablePath,
)
from zufluss.pacing import ASIDE_BYTES

PARTITIONED = TablePath("fluss", "by_day")


async def partitioned(cluster: Cluster) -> int:
    """Create the table `by_day` with two buckets per partition; its id."""
    json = table_json("a INT, d STRING", partitions=("d",), buckets=2)
    return (await cluster.catalog.create_table(PARTITIONED, json)).info.table_id


# Databases


async def test_the_database_fluss_exists_from_the_start_and_stays(cluster: Cluster) -> None:
    """Users expect it, and Fluss refuses to drop it."""
    assert list(cluster.image.databases) == ["fluss"]
    with pytest.raises(InvalidDatabaseError, match="cannot be dropped"):
        await cluster.catalog.drop_database("fluss", cascade=True)


async def test_a_database_is_created_once(cluster: Cluster) -> None:
    """The error is 6 if the name is taken, unless the caller ignores that."""
    await cluster.catalog.create_database("d", DatabaseDescriptor("first"))
    with pytest.raises(DatabaseAlreadyExistError, match="Database d already exists"):
        await cluster.catalog.create_database("d", DatabaseDescriptor())
    await cluster.catalog.create_database("d", DatabaseDescriptor(), ignore_if_exists=True)
    assert cluster.image.database("d").descriptor.comment == "first"


async def test_a_bad_database_name_is_refused_before_anything_else(cluster: Cluster) -> None:
    """16, also when it would be ignored if it existed."""
    with pytest.raises(InvalidDatabaseError):
        await cluster.catalog.create_database("a b", DatabaseDescriptor(), ignore_if_exists=True)


async def test_alter_database_sets_resets_and_comments(cluster: Cluster) -> None:
    """An empty comment removes it; times tell creation from modification."""
    await cluster.catalog.create_database("d", DatabaseDescriptor("c", {"a": "1", "b": "2"}))
    cluster.clock.now_ms += 5
    await cluster.catalog.alter_database(
        "d", set_properties={"c": "3"}, reset_properties=["a", "z"], comment=""
    )
    entry = cluster.image.database("d")
    assert entry.descriptor == DatabaseDescriptor(None, {"b": "2", "c": "3"})
    assert (entry.created_time, entry.modified_time) == (NOON, NOON + 5)


async def test_alter_of_a_missing_database_is_an_error_unless_ignored(cluster: Cluster) -> None:
    with pytest.raises(DatabaseNotExistError):
        await cluster.catalog.alter_database("x", set_properties={}, reset_properties=())
    await cluster.catalog.alter_database(
        "x", set_properties={"a": "1"}, reset_properties=(), ignore_if_not_exists=True
    )
    assert "x" not in cluster.image.databases


async def test_a_database_with_tables_needs_cascade(cluster: Cluster) -> None:
    """5 without; with cascade tables, partitions and their buckets go too."""
    await cluster.catalog.create_database("d", DatabaseDescriptor())
    await cluster.catalog.create_table(TablePath("d", "t"), table_json(buckets=3))
    json = table_json("a INT, p STRING", partitions=("p",))
    await cluster.catalog.create_table(TablePath("d", "u"), json)
    await cluster.catalog.create_partition(TablePath("d", "u"), {"p": "x"})
    with pytest.raises(DatabaseNotEmptyError, match="2 tables"):
        await cluster.catalog.drop_database("d")
    await cluster.catalog.drop_database("d", cascade=True)
    assert "d" not in cluster.image.databases
    assert cluster.tablet.buckets == {}
    assert await cluster.store.tree("/tables") == []


async def test_drop_of_a_missing_database_is_an_error_unless_ignored(cluster: Cluster) -> None:
    with pytest.raises(DatabaseNotExistError):
        await cluster.catalog.drop_database("x")
    await cluster.catalog.drop_database("x", ignore_if_not_exists=True)


# Tables


async def test_a_created_table_has_leaders_when_the_call_returns(cluster: Cluster) -> None:
    """Fluss may have none for a moment; a client that writes at once must not meet that."""
    entry = await cluster.catalog.create_table(EVENTS, table_json(buckets=3))
    buckets = [TableBucket(entry.info.table_id, None, i) for i in range(3)]
    assert sorted(cluster.tablet.buckets) == buckets
    assert [cluster.image.leader(bucket) for bucket in buckets] == [(1, 0)] * 3
    assert cluster.image.leader(TableBucket(entry.info.table_id, None, 3)) is None


async def test_defaults_are_filled_in_and_stored(cluster: Cluster) -> None:
    """What the server returns always has a bucket count and a replication factor."""
    entry = await cluster.catalog.create_table(EVENTS, table_json(buckets=None))
    assert entry.info.bucket_count == 1
    assert entry.info.descriptor.properties["table.replication.factor"] == "1"
    assert (entry.info.schema_id, entry.info.created_time) == (1, NOON)


@pytest.mark.parametrize(
    ("path", "json", "kind"),
    [
        (TablePath("no", "a b"), b"rubbish", InvalidTableError),
        (TablePath("a b", "t"), b"rubbish", InvalidDatabaseError),
        (TablePath("no", "t"), b"rubbish", InvalidTableError),
        (TablePath("no", "t"), table_json(buckets=5000), BucketMaxNumError),
        (
            TablePath("no", "t"),
            table_json(properties={"table.replication.factor": "2"}),
            InvalidReplicationFactorError,
        ),
        (TablePath("no", "t"), table_json(), DatabaseNotExistError),
    ],
    ids=["name", "database name", "json", "buckets", "replicas", "database"],
)
async def test_create_table_checks_in_the_order_of_fluss(
    cluster: Cluster, path: TablePath, json: bytes, kind: type[ZuflussError]
) -> None:
    """Each case breaks one rule and every later one; the first broken rule answers."""
    with pytest.raises(kind):
        await cluster.catalog.create_table(path, json, ignore_if_exists=True)
    assert await cluster.store.tree("/tables") == []


async def test_a_table_name_is_taken_once(cluster: Cluster) -> None:
    """8, unless ignored; then the table that is there stays as it is."""
    first = await cluster.catalog.create_table(EVENTS, table_json())
    with pytest.raises(TableAlreadyExistError):
        await cluster.catalog.create_table(EVENTS, table_json("c INT"))
    again = await cluster.catalog.create_table(EVENTS, table_json("c INT"), ignore_if_exists=True)
    assert again is first


async def test_of_two_creators_at_once_one_wins(cluster: Cluster) -> None:
    """One change at a time: the loser hears that the name is taken, and no id is lost to both."""
    outcomes = await asyncio.gather(
        *(cluster.catalog.create_table(EVENTS, table_json()) for _ in range(5)),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, TableAlreadyExistError) for outcome in outcomes) == 4
    assert len(cluster.tablet.buckets) == 1


async def test_ids_are_never_used_again(cluster: Cluster) -> None:
    """Not after a drop, not after a restart: old requests must not reach a new table."""
    seen: list[int] = []
    for _ in range(2):
        async with successor(cluster) as later:
            await later.attach(TABLET, RecordingTablet())
            for _ in range(3):
                entry = await later.catalog.create_table(EVENTS, table_json())
                seen.append(entry.info.table_id)
                await later.catalog.drop_table(EVENTS)
    assert seen == [0, 1, 2, 3, 4, 5]


async def test_a_dropped_table_frees_its_buckets_and_its_name(cluster: Cluster) -> None:
    """The disk is free when the answer comes, and nothing is left in the store."""
    table_id = await partitioned(cluster)
    await cluster.catalog.create_partition(PARTITIONED, {"d": "1"})
    await cluster.catalog.create_partition(PARTITIONED, {"d": "2"})
    assert len(cluster.tablet.buckets) == 4
    await cluster.catalog.drop_table(PARTITIONED)
    assert cluster.tablet.buckets == {}
    assert cluster.image.partitions(table_id) == {}
    assert await cluster.store.tree("/tables") == []
    with pytest.raises(TableNotExistError):
        await cluster.catalog.drop_table(PARTITIONED)
    await cluster.catalog.drop_table(PARTITIONED, ignore_if_not_exists=True)


async def test_a_table_whose_leader_does_not_come_up_is_withdrawn(cluster: Cluster) -> None:
    """All or nothing: the caller gets the reason, the name stays free, the id is spent."""
    cluster.tablet.failure = LogStorageError("no space left on device")
    with pytest.raises(LogStorageError, match="no space"):
        await cluster.catalog.create_table(EVENTS, table_json())
    assert cluster.image.find_table(EVENTS) is None
    assert await cluster.store.tree("/tables") == []
    cluster.tablet.failure = None
    assert (await cluster.catalog.create_table(EVENTS, table_json())).info.table_id == 1


async def test_a_table_is_created_at_the_servers_that_answer(cluster: Cluster) -> None:
    """A server that was killed is registered for some seconds more; nobody has to wait for that."""
    other = RecordingTablet()
    await cluster.coordinator.attach(ClusterNode(2, TABLET.endpoints), other)
    cluster.tablet.failure = NetworkError("connection refused")
    entry = await cluster.catalog.create_table(EVENTS, table_json(buckets=4))
    assert {state.leader for state in entry.buckets} == {2}
    assert len(other.buckets) == 4
    later = await cluster.catalog.create_table(TablePath("fluss", "later"), table_json())
    assert [state.leader for state in later.buckets] == [2]
    other.failure = NetworkError("connection refused")
    with pytest.raises(NetworkError):
        await cluster.catalog.create_table(TablePath("fluss", "nowhere"), table_json())


async def test_a_drop_succeeds_when_the_tablet_server_cannot_be_told(cluster: Cluster) -> None:
    """The drop is durable; the server deletes the buckets with its next assignment."""
    await cluster.catalog.create_table(EVENTS, table_json())
    cluster.tablet.stop_failure = NetworkError("gone")
    await cluster.catalog.drop_table(EVENTS)
    assert cluster.image.find_table(EVENTS) is None
    assert len(cluster.tablet.buckets) == 1
    again = await cluster.restart()
    assert again.tablet.buckets == {}
    await again.stop()


async def test_a_change_is_finished_when_its_caller_goes_away(cluster: Cluster) -> None:
    """A closed connection must not leave the store ahead of the image."""
    cluster.tablet.gate = asyncio.Event()
    caller = asyncio.create_task(cluster.catalog.create_table(EVENTS, table_json()))
    await cluster.tablet.waiting.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    cluster.tablet.gate.set()
    await cluster.catalog.settle()
    assert cluster.image.find_table(EVENTS) is not None
    assert len(cluster.tablet.buckets) == 1


async def test_a_descriptor_over_the_limit_is_refused(cluster: Cluster) -> None:
    """A value of the store is limited; the user hears it in terms of the table."""
    long = table_json(properties={})[:-1] + b',"comment":"%s"}' % (b"x" * DESCRIPTOR_BYTES_MAX)
    with pytest.raises(InvalidTableError, match="bytes, at most"):
        await cluster.catalog.create_table(EVENTS, long)
    with pytest.raises(InvalidDatabaseError, match="bytes, at most"):
        await cluster.catalog.create_database("d", DatabaseDescriptor("x" * DESCRIPTOR_BYTES_MAX))


async def test_the_largest_table_fits_the_store(cluster: Cluster) -> None:
    """4096 buckets, the most there are, stay below the limit of one value."""
    entry = await cluster.catalog.create_table(EVENTS, table_json(buckets=4096))
    assert len(entry.buckets) == len(cluster.tablet.buckets) == 4096


async def test_the_schema_of_a_wide_table_is_encoded_once_and_in_a_thread(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema of 10,000 columns takes 10 ms to encode, and was encoded four times for a change."""
    encoded_by: list[str] = []
    plain = Schema.to_json

    def to_json(self: Schema) -> dict[str, Any]:
        encoded_by.append(threading.current_thread().name)
        return plain(self)

    schema = Schema.of(", ".join(f"c{i} BIGINT" for i in range(2_000)))
    source = TableDescriptor(schema, properties={}).to_json()
    assert len(source) > ASIDE_BYTES
    monkeypatch.setattr(Schema, "to_json", to_json)
    await cluster.catalog.create_table(EVENTS, source)
    assert len(encoded_by) == 1

    def add(info: TableInfo) -> TableDescriptor:
        return replace(info.descriptor, schema=info.schema.add_column("c", parse_type("INT")))

    entry = await cluster.catalog.alter_table(EVENTS, add)
    assert entry is not None
    assert entry.schemas[2].to_json_bytes()
    assert len(encoded_by) == 2
    assert threading.current_thread().name not in encoded_by


# Altering


async def test_a_new_schema_gets_the_next_id_and_the_old_ones_stay(cluster: Cluster) -> None:
    """Batches on disk name the schema they were written with."""
    first = await cluster.catalog.create_table(EVENTS, table_json())
    cluster.clock.now_ms += 7

    def add(info: TableInfo) -> TableDescriptor:
        return replace(info.descriptor, schema=info.schema.add_column("c", parse_type("INT")))

    entry = await cluster.catalog.alter_table(EVENTS, add)
    assert entry is not None
    assert (entry.info.schema_id, entry.info.modified_time) == (2, NOON + 7)
    assert entry.schemas == {1: first.info.schema, 2: entry.info.schema}
    assert cluster.tablet.image.table(EVENTS) == entry
    assert cluster.image.leader(TableBucket(entry.info.table_id, None, 0)) == (1, 0)


async def test_an_alteration_that_changes_nothing_writes_nothing(cluster: Cluster) -> None:
    before = await cluster.catalog.create_table(EVENTS, table_json())
    stored = await cluster.store.tree("/tables")
    cluster.clock.now_ms += 7
    assert await cluster.catalog.alter_table(EVENTS, lambda info: info.descriptor) is before
    assert await cluster.store.tree("/tables") == stored


async def test_alter_of_a_missing_table_is_an_error_unless_ignored(cluster: Cluster) -> None:
    with pytest.raises(TableNotExistError):
        await cluster.catalog.alter_table(EVENTS, lambda info: info.descriptor)
    ignored = await cluster.catalog.alter_table(
        EVENTS, lambda info: info.descriptor, ignore_if_not_exists=True
    )
    assert ignored is None


# Partitions


async def test_a_created_partition_has_leaders_when_the_call_returns(cluster: Cluster) -> None:
    table_id = await partitioned(cluster)
    entry = await cluster.catalog.create_partition(PARTITIONED, {"d": "1"})
    assert (entry.partition_id, entry.name, entry.spec) == (0, "1", {"d": "1"})
    buckets = [TableBucket(table_id, 0, i) for i in range(2)]
    assert sorted(cluster.tablet.buckets, key=str) == buckets
    assert [cluster.image.leader(bucket) for bucket in buckets] == [(1, 0)] * 2
    paths = {str(r.physical_path) for r in cluster.tablet.buckets.values()}
    assert paths == {"fluss.by_day(p=1)"}


async def test_partition_calls_on_the_wrong_table_or_spec_are_refused(cluster: Cluster) -> None:
    """7, 37, 43 in this order."""
    await cluster.catalog.create_table(EVENTS, table_json())
    await partitioned(cluster)
    for action in (cluster.catalog.create_partition, cluster.catalog.drop_partition):
        with pytest.raises(TableNotExistError):
            await action(TablePath("fluss", "none"), {"z": "1"})
        with pytest.raises(TableNotPartitionedError):
            await action(EVENTS, {"z": "1"})
        with pytest.raises(InvalidPartitionError):
            await action(PARTITIONED, {"z": "1"})


async def test_a_partition_exists_once_and_its_id_is_never_used_again(cluster: Cluster) -> None:
    """42 unless ignored, 36 unless ignored."""
    await partitioned(cluster)
    first = await cluster.catalog.create_partition(PARTITIONED, {"d": "1"})
    with pytest.raises(PartitionAlreadyExistError):
        await cluster.catalog.create_partition(PARTITIONED, {"d": "1"})
    again = await cluster.catalog.create_partition(PARTITIONED, {"d": "1"}, ignore_if_exists=True)
    assert again is first
    await cluster.catalog.drop_partition(PARTITIONED, {"d": "1"})
    assert cluster.tablet.buckets == {}
    with pytest.raises(PartitionNotExistError):
        await cluster.catalog.drop_partition(PARTITIONED, {"d": "1"})
    await cluster.catalog.drop_partition(PARTITIONED, {"d": "1"}, ignore_if_not_exists=True)
    second = await cluster.catalog.create_partition(PARTITIONED, {"d": "1"})
    assert second.partition_id == first.partition_id + 1


async def test_the_number_of_partitions_is_limited(tmp_path: Path) -> None:
    """45, and creating one that exists is still fine when ignored."""
    cluster = await Cluster(tmp_path, {"max.partition.num": "2"}).start()
    await partitioned(cluster)
    for value in ("1", "2"):
        await cluster.catalog.create_partition(PARTITIONED, {"d": value})
    with pytest.raises(PartitionMaxNumError, match="only allow 2 partitions"):
        await cluster.catalog.create_partition(PARTITIONED, {"d": "3"})
    await cluster.catalog.create_partition(PARTITIONED, {"d": "1"}, ignore_if_exists=True)
    await cluster.stop()


async def test_a_partition_of_a_table_that_was_replaced_is_not_created(cluster: Cluster) -> None:
    """A plan made for the old table must not touch the new one of the same name."""
    old = await partitioned(cluster)
    await cluster.catalog.drop_table(PARTITIONED)
    await partitioned(cluster)
    with pytest.raises(TableNotExistError, match="any more"):
        await cluster.catalog.create_partition(PARTITIONED, {"d": "1"}, table_id=old)


async def test_a_partition_whose_leader_does_not_come_up_is_withdrawn(cluster: Cluster) -> None:
    await partitioned(cluster)
    cluster.tablet.failure = LogStorageError("no space left on device")
    with pytest.raises(LogStorageError):
        await cluster.catalog.create_partition(PARTITIONED, {"d": "1"})
    with pytest.raises(PartitionNotExistError):
        cluster.image.partition(PARTITIONED, "1")


# Durability


async def test_a_restart_finds_everything_as_it_was(cluster: Cluster) -> None:
    """The image loaded from the store is the image that was there, and buckets start again."""
    await cluster.catalog.create_database("d", DatabaseDescriptor("größe", {"k": "v"}))
    await cluster.catalog.create_table(EVENTS, table_json(buckets=3))
    await partitioned(cluster)
    await cluster.catalog.create_partition(PARTITIONED, {"d": "2024-01-15"})
    await cluster.catalog.alter_table(
        EVENTS,
        lambda info: replace(
            info.descriptor, schema=info.schema.add_column("c", parse_type("INT"))
        ),
    )
    before, buckets = picture(cluster.image), set(cluster.tablet.buckets)
    cluster_id, epoch = cluster.catalog.cluster_id, cluster.catalog.epoch
    again = await cluster.restart()
    try:
        assert picture(again.image) == before
        assert set(again.tablet.buckets) == buckets
        assert (again.catalog.cluster_id, again.catalog.epoch) == (cluster_id, epoch + 1)
    finally:
        await again.stop()


async def test_a_coordinator_that_was_replaced_changes_nothing(cluster: Cluster) -> None:
    """The later coordinator has the store; the earlier one gets 65 and changes nothing."""
    async with successor(cluster) as later:
        before = await cluster.store.tree("/databases")
        for change in (
            cluster.catalog.create_database("d", DatabaseDescriptor()),
            cluster.catalog.allocate_writer_ids(1),
        ):
            with pytest.raises(ZuflussError) as caught:
                await change
            assert caught.value.code == ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
        assert await cluster.store.tree("/databases") == before
        assert "d" not in cluster.image.databases
        await later.catalog.create_database("d", DatabaseDescriptor())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("/tables/0", b"{}"),
        ("/tables/0", b"not json"),
        ("/tables/0/buckets/0", b'{"buckets":[[1]]}'),
        ("/tables/0/schemas/1", b"[]"),
        ("/databases/fluss", b'{"descriptor":{}}'),
        (records.FORMAT_PATH, b"99"),
    ],
)
async def test_a_damaged_catalog_is_an_error_at_start_that_names_the_place(
    cluster: Cluster, path: str, value: bytes
) -> None:
    """A server that guesses at its catalog would delete data; it does not start."""
    await cluster.catalog.create_table(EVENTS, table_json())
    await cluster.store.transact([Put(path, value)])
    with pytest.raises(records.CatalogDamagedError, match=r"cannot be read|has format"):
        await Coordinator.open(cluster.conf, cluster.store, COORDINATOR, cluster.clock)


async def test_a_catalog_with_two_tables_of_one_name_is_damaged(cluster: Cluster) -> None:
    """Loading only one of them would have the data of the other deleted."""
    await cluster.catalog.create_table(EVENTS, table_json())
    entries = await cluster.store.tree("/tables/0")
    copies = [Create(e.path.replace("/tables/0", "/tables/5"), e.value) for e in entries]
    await cluster.store.transact(copies)
    with pytest.raises(records.CatalogDamagedError, match="twice"):
        await Coordinator.open(cluster.conf, cluster.store, COORDINATOR, cluster.clock)


async def test_writer_ids_come_in_ranges_that_never_overlap(cluster: Cluster) -> None:
    """Two writers with one id would destroy each other's sequence numbers."""
    taken = await asyncio.gather(*(cluster.catalog.allocate_writer_ids(10) for _ in range(4)))
    async with successor(cluster) as later:
        taken.append(await later.catalog.allocate_writer_ids(10))
    assert sorted(i for ids in taken for i in ids) == list(range(50))
