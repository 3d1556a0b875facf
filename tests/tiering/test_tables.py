"""Empty, dropped and created tables and partitions, freshness, and switching tiering on and off."""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import chain

import pyarrow as pa
import pytest

from tests.lake.readers import duckdb_rows
from tests.tiering.support import Driver, append, create_table, delete, upsert
from tests.tiering.test_round import KEYED, PARTITIONED, rows
from tests.tiering.tiered_cluster import Tiered, catalog_of, lake_table, rows_of, seen_by_all
from tests.waiting import eventually
from zufluss.model.table import TableInfo
from zufluss.tiering.round import STEPS, RoundEndedError, TableGoneError

FRESH = "table.datalake.freshness"
ENABLED = "table.datalake.enabled"


def names_of(found: list[tuple[str, ...]]) -> list[int]:
    """The ids among rows as the readers give them."""
    return sorted(int(row[0]) for row in found)


def ids_in_lake(info: TableInfo) -> list[int]:
    """The ids in the lake, on which all readers agree."""
    return names_of(seen_by_all(lake_table(info), ["id"]))


def kept_table(info: TableInfo) -> str:
    """The name that the lake table of a table that is gone has."""
    return f"{info.path.table}__{info.table_id}_{info.created_time}"


# -- with the service ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("schema", ["id INT, name STRING", KEYED], ids=["log", "primary key"])
def test_an_empty_table_and_empty_buckets_are_no_trouble(cluster: Tiered, schema: str) -> None:
    keyed = schema == KEYED
    name = f"little_{keyed}"
    path = create_table(cluster.connection, name, schema, bucket_count=8, bucket_keys=["id"])
    info = cluster.admin.table_info(path)
    eventually(lambda: catalog_of(info).table_exists(("fluss", name)))
    assert seen_by_all(cluster.lake(path), ["id"], readers=("pyiceberg",)) == []
    assert cluster.admin.lake_snapshot(path) is None

    write = upsert if keyed else append
    write(cluster.connection, path, {"id": [7], "name": ["only"]})
    cluster.caught_up(path)
    assert seen_by_all(cluster.lake(path), ["id", "name"]) == [("7", "'only'")]
    ends = cluster.admin.list_all_offsets(path)
    assert sorted(ends.values()) == [0] * 7 + [1]
    write(cluster.connection, path, rows(100, 100))
    cluster.caught_up(path)
    assert ids_in_lake(info) == [7, *range(100, 200)]


@pytest.mark.slow
@pytest.mark.parametrize(("keyed", "count"), [(False, 100), (True, 20)], ids=["log", "primary key"])
def test_many_partitions_are_tiered_while_some_are_dropped(
    cluster: Tiered, keyed: bool, count: int
) -> None:
    schema = "id INT, day STRING" + (", PRIMARY KEY (id, day)" if keyed else "")
    path = create_table(
        cluster.connection,
        f"parted_{keyed}",
        schema,
        partition_keys=["day"],
        bucket_keys=["id"],
        bucket_count=1,
    )
    write = upsert if keyed else append
    days = [f"d{n:03}" for n in range(count)]
    numbers = pa.array(range(5 * count), pa.int32())
    data = pa.table({"id": numbers, "day": [days[i % count] for i in range(len(numbers))]})
    write(cluster.connection, path, data)
    cluster.caught_up(path)
    per_day = "SELECT day, count(*) AS n, min(id) AS first FROM lake GROUP BY ALL ORDER BY ALL"
    wanted = [{"day": day, "n": 5, "first": n} for n, day in enumerate(days)]
    assert duckdb_rows(cluster.lake(path).metadata_location, per_day).to_pylist() == wanted

    gone = days[::10]
    more = {"id": [*range(1000, 1000 + count)], "day": days}
    write(cluster.connection, path, more)
    for day in gone:
        cluster.admin.drop_partition(path, day)
    write(cluster.connection, path, {"id": [5000, 5001], "day": ["new", days[1]]})
    cluster.caught_up(path)
    lake = cluster.lake(path)
    found = seen_by_all(lake, ["day", "id"])
    stay = pa.table({"id": [1000 + n for n in range(count)], "day": days})
    late = pa.table({"id": [5000, 5001], "day": ["new", days[1]]})
    dropped = {repr(day) for day in gone}

    def of_living(some: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        return [row for row in some if row[0] not in dropped]

    everything = [rows_of(each, ["day", "id"]) for each in (data, stay, late)]
    assert of_living(found) == of_living(sorted(chain(*everything)))
    assert len(set(found)) == len(found)
    assert set(everything[0]) <= set(found), "what was tiered before a drop stays in the lake"


@pytest.mark.slow
def test_a_table_re_created_under_its_name_starts_afresh_beside_the_old_lake_table(
    cluster: Tiered,
) -> None:
    olds = []
    for generation in range(3):
        path = create_table(cluster.connection, "phoenix", bucket_count=2)
        olds.append(cluster.admin.table_info(path))
        append(cluster.connection, path, rows(10, 10 * generation))
        cluster.caught_up(path)
        if generation < 2:
            cluster.admin.drop_table(path)
    assert ids_in_lake(olds[-1]) == list(range(20, 30))
    for generation, old in enumerate(olds[:-1]):
        kept = lake_table(olds[-1], kept_table(old))
        found = names_of(seen_by_all(kept, ["id"]))
        assert found == list(range(10 * generation, 10 * generation + 10))


# -- at every step of a round --------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_a_partition_dropped_at_any_step_costs_no_other_row(driver: Driver, step: str) -> None:
    path = create_table(
        driver.connection, "part_gone", PARTITIONED, partition_keys=["day"], bucket_count=1
    )
    append(driver.connection, path, {"id": [1, 2, 3], "day": ["a", "b", "c"]})

    def drop(name: str) -> None:
        if name == step:
            driver.admin.drop_partition(path, "b")
            append(driver.connection, path, {"id": [4, 5], "day": ["c", "d"]})

    late = step in (
        "job",
        "validate",
        "prepare",
    )  # or early enough to plan without it, or too late to matter
    with pytest.raises(RoundEndedError, match="b was dropped") if late else nullcontext():
        driver.round(drop)
    driver.round()
    found = ids_in_lake(driver.admin.table_info(path))
    assert [i for i in found if i != 2] == [1, 3, 4, 5]
    assert found.count(2) <= 1


@pytest.mark.parametrize("step", STEPS)
def test_a_table_re_created_at_any_step_gets_nothing_of_the_old_one(
    driver: Driver, step: str
) -> None:
    path = create_table(driver.connection, "replaced", bucket_count=1)
    old = driver.admin.table_info(path)
    append(driver.connection, path, rows(4))

    def replace(name: str) -> None:
        if name == step:
            driver.admin.drop_table(path)
            create_table(driver.connection, "replaced", bucket_count=1)
            append(driver.connection, path, rows(2, 100))

    if step == "finish":
        lease = driver.receive()
        assert driver.tier(lease, replace).committed
    else:
        with pytest.raises(TableGoneError, match="was dropped"):
            driver.round(replace)
    driver.round()
    info = driver.admin.table_info(path)
    assert ids_in_lake(info) == [100, 101]
    assert driver.admin.lake_snapshot(path).table_id == info.table_id
    if step in ("server-commit", "finish"):
        kept = lake_table(info, kept_table(old))
        assert names_of(seen_by_all(kept, ["id"])) == [0, 1, 2, 3]


# -- freshness -----------------------------------------------------------------------------------


def due(driver: Driver, path: str, rounds: int = 3) -> bool:
    """Whether a table is among the next ones that are handed out; the others are given back."""
    for _ in range(rounds):
        lease = driver.receive()
        driver.finish(lease)
        if str(lease.table.path) == path:
            return True
    return False


def test_freshness_is_honoured_and_a_change_works_at_once(driver: Driver) -> None:
    path = create_table(driver.connection, "slow", bucket_count=1, properties={FRESH: "1h"})
    append(driver.connection, path, rows(5))
    create_table(driver.connection, "always", bucket_count=1)
    assert not due(driver, path), "only the table that is always due is handed out"

    driver.admin.alter_table(path, set={FRESH: "1ms"})
    eventually(lambda: due(driver, path))
    driver.admin.alter_table(path, set={FRESH: "1h"})
    due(driver, path)  # it may have been in the queue already
    assert not due(driver, path)
    driver.admin.alter_table(path, set={FRESH: "1ms"})
    eventually(lambda: due(driver, path))


def test_a_table_is_not_handed_out_before_its_freshness_is_over(driver: Driver) -> None:
    began = time.monotonic()
    path = create_table(driver.connection, "second", bucket_count=1, properties={FRESH: "1s"})
    for turn in range(2):
        append(driver.connection, path, rows(5, 5 * turn))
        lease = driver.receive()
        assert time.monotonic() - began > 0.99  # the server counts in whole milliseconds
        assert driver.tier(lease).records == 5
        began = time.monotonic()
        driver.finish(lease)


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "primary key"])
def test_rows_written_while_tiering_was_off_are_tiered_when_it_is_on_again(
    driver: Driver, keyed: bool
) -> None:
    schema = KEYED if keyed else "id INT, name STRING"
    path = create_table(driver.connection, "switched", schema, bucket_count=2)
    create_table(driver.connection, "always", bucket_count=1)
    write = upsert if keyed else append
    write(driver.connection, path, rows(10))
    tier(driver, path)
    driver.admin.alter_table(path, set={ENABLED: "false"})
    before = driver.admin.lake_snapshot(path)
    write(driver.connection, path, rows(10, 10))
    if keyed:
        delete(driver.connection, path, {"id": [0, 1, 10]})
        upsert(driver.connection, path, {"id": [2], "name": ["while off"]})
    assert not due(driver, path, rounds=5)
    assert driver.admin.lake_snapshot(path) == before
    driver.admin.alter_table(path, set={ENABLED: "true"})
    tier(driver, path)
    wanted = {i: f"n{i}" for i in range(20)}
    if keyed:
        wanted = {i: name for i, name in wanted.items() if i not in (0, 1, 10)} | {2: "while off"}
    found = seen_by_all(lake_table(driver.admin.table_info(path)), ["id", "name"])
    assert found == sorted((repr(i), repr(name)) for i, name in wanted.items())


def tier(driver: Driver, path: str) -> None:
    """Rounds of whatever is handed out, until this table had one that brought rows."""
    while True:
        lease = driver.receive()
        result = driver.tier(lease)
        driver.finish(lease)
        if str(lease.table.path) == path and result.committed:
            return
