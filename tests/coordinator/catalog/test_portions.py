"""Tables, partitions and databases that are too large for one transaction of the metadata store."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.support import COORDINATOR, Cluster, counted, picture, table_json
from tests.counts import rounds
from tests.meta.zookeepers import opener
from tests.waiting import eventually_async
from zufluss.cluster.image import DatabaseEntry, PartitionEntry, TableEntry
from zufluss.coordinator import records
from zufluss.coordinator.catalog import portions as catalog_portions
from zufluss.coordinator.catalog.placement import place
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.server import Coordinator
from zufluss.errors import DatabaseNotExistError, TableNotExistError
from zufluss.meta import api
from zufluss.meta.api import Create, MetaStore, Op, Put, portions
from zufluss.model.table import (
    DatabaseDescriptor,
    TableBucket,
    TableDescriptor,
    TableInfo,
    TablePath,
)
from zufluss.testing.zookeeper import ZooKeeper

LARGE = TablePath("fluss", "large")
TABLES = rounds(12, 500)
PARTITIONS = rounds(8, 100)


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = await Cluster(tmp_path / "meta").start()
    yield cluster
    await cluster.stop()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transactions of a hundredth of the size, so that few tables need many of them."""
    for module in (api, catalog_portions):
        monkeypatch.setattr(module, "PORTION_BYTES", 4_000)


class Interruption(Exception):
    """The process is killed here."""


def kill_after(ledger: Ledger, count: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a number of transactions pass and no other one; returns the sizes of those that did."""
    commit, sizes = ledger.commit, list[int]()

    async def commit_or_die(ops: Sequence[Op]) -> None:
        if len(sizes) == count:
            raise Interruption
        await commit(ops)
        sizes.append(sum(map(api.op_bytes, ops)))

    monkeypatch.setattr(ledger, "commit", commit_or_die)
    return sizes


async def leftovers(cluster: Cluster) -> list[str]:
    """What the store has of tables, and of drops under way."""
    trees = [await cluster.store.tree(path) for path in ("/tables", records.DROPS_PATH)]
    return [entry.path for tree in trees for entry in tree]


async def nothing_is_left(cluster: Cluster) -> None:
    async def empty() -> bool:
        return not await leftovers(cluster)

    await eventually_async(empty, "everything is deleted")


# Bucket states in values of 128


async def test_the_states_of_many_buckets_are_in_many_values(cluster: Cluster) -> None:
    """One value would reach its limit with 12,000 buckets, and be written with each leader."""
    await cluster.catalog.create_table(LARGE, table_json(buckets=300))
    assert await cluster.store.children("/tables/0/buckets") == ["0", "1", "2"]
    before = {e.path: e.version for e in await cluster.store.tree("/tables/0/buckets")}
    table = cluster.image.table(LARGE)
    moved = {TableBucket(0, None, i): replace(table.buckets[i], leader_epoch=7) for i in (3, 299)}
    done, changes = await cluster.catalog.states.change(lambda: moved)
    assert (set(done), len(changes)) == (set(moved), 1)
    after = {e.path: e.version for e in await cluster.store.tree("/tables/0/buckets")}
    assert [path[-1] for path in before if before[path] != after[path]] == ["0", "2"]
    again = await cluster.restart()
    assert again.image.table(LARGE).buckets[299] == moved[TableBucket(0, None, 299)]
    cluster.store, cluster.coordinator = again.store, again.coordinator


async def test_a_catalog_of_the_old_layout_is_upgraded(cluster: Cluster) -> None:
    """One value per table or partition becomes many; what they say stays as it was."""
    await cluster.catalog.create_table(LARGE, table_json(buckets=200))
    days = TablePath("fluss", "days")
    await cluster.catalog.create_table(
        days, table_json("a INT, d STRING", partitions=("d",), buckets=3)
    )
    for day in ("1", "2"):
        await cluster.catalog.create_partition(days, {"d": day})
    before = picture(cluster.image)
    await _downgrade(cluster.store)
    old = await Coordinator.open(cluster.conf, cluster.store, COORDINATOR, cluster.clock)
    await old.stop()
    found = [e for e in await cluster.store.tree("/tables") if e.path.endswith("/buckets")]
    assert found == []
    form = await cluster.store.read(records.FORMAT_PATH)
    assert form is not None
    assert form.value == b"2"
    assert await cluster.store.children("/tables/0/buckets") == ["0", "1"]
    again = await cluster.restart()
    assert picture(again.image) == before
    cluster.store, cluster.coordinator = again.store, again.coordinator


@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_an_interrupted_upgrade_goes_on(
    cluster: Cluster, small: None, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    for name in ("a", "b", "c"):
        await cluster.catalog.create_table(TablePath("fluss", name), table_json(buckets=40))
    before = picture(cluster.image)
    await _downgrade(cluster.store)
    with monkeypatch.context() as patch:
        opened = Ledger.open

        async def interrupted(store: MetaStore) -> Ledger:
            ledger = await opened(store)
            kill_after(ledger, steps, patch)
            return ledger

        patch.setattr(Ledger, "open", interrupted)
        with pytest.raises(Interruption):
            await Coordinator.open(cluster.conf, cluster.store, COORDINATOR, cluster.clock)
    again = await cluster.restart()
    assert picture(again.image) == before
    cluster.store, cluster.coordinator = again.store, again.coordinator


async def _downgrade(store: MetaStore) -> None:
    """Write bucket states as format 1 had them."""
    rows: dict[str, list[Any]] = {}
    ops: list[Op] = [Put(records.FORMAT_PATH, b"1")]
    for entry in await store.tree("/tables"):
        above, _, number = entry.path.rpartition("/")
        if above.endswith("/buckets"):
            rows.setdefault(above, []).append((int(number), records.json.loads(entry.value)))
            ops.append(api.Delete(entry.path))
    for path, values in rows.items():
        states = [
            row for _, value in sorted(values, key=lambda v: v[0]) for row in value["buckets"]
        ]
        ops.append(Create(path, records.dump_object({"buckets": states})))
    await store.transact(ops)


# Creations and drops in portions


async def test_a_large_table_is_created_and_dropped_in_portions(
    cluster: Cluster, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = kill_after(cluster.catalog.ledger, 1_000, monkeypatch)
    await cluster.catalog.create_table(
        LARGE, counted().replace(b'"bucket_count":2', b'"bucket_count":90')
    )
    assert len(sizes) > 5
    assert max(sizes) < 2 * 4_000
    again = await cluster.restart()
    cluster.store, cluster.coordinator, cluster.catalog = (
        again.store,
        again.coordinator,
        again.catalog,
    )
    assert len(again.image.table(LARGE).buckets) == 90
    assert await cluster.store.tree(records.DROPS_PATH) == []
    await again.catalog.drop_table(LARGE)
    await nothing_is_left(again)


async def test_a_creation_that_fails_leaves_nothing(
    cluster: Cluster, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only after the next start: clients try again and again."""
    ledger = cluster.catalog.ledger
    with monkeypatch.context() as patch:
        commit = ledger.commit

        async def refuse_tables(ops: Sequence[Op]) -> None:
            if any(isinstance(op, Create) and op.path == "/tables/0" for op in ops):
                raise api.TransactionTooLargeError("the description is too large")
            await commit(ops)

        patch.setattr(ledger, "commit", refuse_tables)
        with pytest.raises(api.TransactionTooLargeError):
            await cluster.catalog.create_table(LARGE, table_json(buckets=300))
    await nothing_is_left(cluster)
    await cluster.catalog.create_table(LARGE, table_json(buckets=300))
    assert len(cluster.image.table(LARGE).buckets) == 300


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_a_creation_that_was_killed_leaves_nothing(
    cluster: Cluster, small: None, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Its table does not exist, its id is not given again, and its remains are deleted."""
    kill_after(cluster.catalog.ledger, count, monkeypatch)
    with pytest.raises(Interruption):
        await cluster.catalog.create_table(LARGE, table_json(buckets=60))
    assert await leftovers(cluster)
    monkeypatch.undo()
    again = await cluster.restart()
    cluster.store, cluster.coordinator = again.store, again.coordinator
    with pytest.raises(TableNotExistError):
        again.image.table(LARGE)
    await nothing_is_left(again)
    entry = await again.catalog.create_table(LARGE, table_json())
    assert entry.info.table_id == 1


async def _fill(cluster: Cluster, tables: int, partitions: int, begin: int = 0) -> None:
    """Put tables with partitions into the store, without servers that open them."""
    json = table_json("a INT, d STRING", partitions=("d",), buckets=1)
    descriptor = TableDescriptor.from_json(json)
    node = next(iter(cluster.image.tablets.values()))
    states = place(1, [node], {})
    entry = DatabaseEntry("full", DatabaseDescriptor(), 0, 0)
    ops: list[Op] = [records.put_database(entry, new=True)]
    number = 0
    for table_id in range(begin, begin + tables):
        info = TableInfo(TablePath("full", f"t{table_id}"), table_id, 1, descriptor, 0, 0)
        ops += records.create_table(TableEntry(info, {1: descriptor.schema}, (), None)).all
        for _ in range(partitions):
            spec = {"d": str(number)}
            part = PartitionEntry(number, table_id, str(number), spec, 0, states, None)
            ops += records.create_partition(info.path, part).all
            number += 1
    ops += [
        Create(records.TABLE_COUNTER, records.number(tables))
        if not begin
        else Put(records.TABLE_COUNTER, records.number(begin + tables)),
        Create(records.PARTITION_COUNTER, records.number(number)),
    ]
    for portion in portions(ops):
        await cluster.store.transact(portion)


@pytest.mark.parametrize("killed", [None, 0, 1, 2, 3, 5, 8])
async def test_a_database_with_many_tables_is_dropped_although_the_process_is_killed(
    cluster: Cluster, small: None, monkeypatch: pytest.MonkeyPatch, killed: int | None
) -> None:
    """Between any two transactions: what was dropped stays so, and the same drop goes on."""
    await _fill(cluster, TABLES, PARTITIONS)
    here = await cluster.restart()
    cluster.store, cluster.coordinator = here.store, here.coordinator
    with monkeypatch.context() as patch:
        sizes = kill_after(here.catalog.ledger, 10**9 if killed is None else killed, patch)
        try:
            await here.catalog.drop_database("full", cascade=True)
            assert killed is None or len(sizes) <= killed
            if killed is None:
                await nothing_is_left(here)
        except Interruption:
            assert killed is not None
        assert max(sizes, default=0) < 2 * 4_000
    again = await here.restart()
    cluster.store, cluster.coordinator = again.store, again.coordinator
    with contextlib.suppress(DatabaseNotExistError):  # only remains were left at the kill
        await again.catalog.drop_database("full", cascade=True)
    await nothing_is_left(again)
    assert "full" not in again.image.databases


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    with ZooKeeper(tmp_path_factory.mktemp("zookeeper")) as zookeeper:
        yield zookeeper


async def test_a_database_with_many_tables_is_dropped_in_zookeeper(
    zookeeper: ZooKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its true limit, which `make fault` passes many times: killed, and dropped again."""
    cluster = Cluster(tmp_path / "meta", {"max.bucket.num": "5000"})
    cluster.open_store = opener(zookeeper.address)
    await (await cluster.start()).catalog.create_table(
        LARGE, table_json(buckets=rounds(500, 5_000))
    )
    await _fill(cluster, rounds(20, 500), rounds(10, 100), begin=1)
    cluster = await cluster.restart()
    assert len(cluster.image.table_names("full")) == rounds(20, 500)
    with monkeypatch.context() as patch:
        kill_after(cluster.catalog.ledger, 1, patch)
        with contextlib.suppress(Interruption):
            await cluster.catalog.drop_database("full", cascade=True)
    cluster = await cluster.restart()
    with contextlib.suppress(DatabaseNotExistError):
        await cluster.catalog.drop_database("full", cascade=True)
    assert len(cluster.image.table(LARGE).buckets) == rounds(500, 5_000)
    await cluster.catalog.drop_table(LARGE)
    await nothing_is_left(cluster)
    await cluster.stop()


async def test_remains_without_a_note_are_damage(cluster: Cluster) -> None:
    """A table whose own value is lost was not dropped: its data must not be deleted."""
    await cluster.catalog.create_table(LARGE, table_json())
    await cluster.store.transact([api.Delete("/tables/0")])
    with pytest.raises(records.CatalogDamagedError, match="no drop of it is noted"):
        await Coordinator.open(cluster.conf, cluster.store, COORDINATOR, cluster.clock)
