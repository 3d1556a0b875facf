"""Auto partitions: what is planned, what is done, and what does not stop the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.coordinator.support import DAY_MS, EVENTS, NOON, Cluster, auto_partitioned, table_json
from zufluss.coordinator.catalog.auto_partitions import plan
from zufluss.errors import LogStorageError
from zufluss.model.table import TablePath


def names(cluster: Cluster, path: TablePath = EVENTS) -> list[str]:
    return sorted(cluster.image.partitions(cluster.image.table(path).info.table_id))


@pytest.mark.parametrize(
    ("unit", "wanted"),
    [
        ("HOUR", ["2024060112", "2024060113"]),
        ("DAY", ["20240601", "20240602"]),
        ("MONTH", ["202406", "202407"]),
        ("QUARTER", ["20242", "20243"]),
        ("YEAR", ["2024", "2025"]),
    ],
)
async def test_the_current_and_the_next_period_are_created(
    cluster: Cluster, unit: str, wanted: list[str]
) -> None:
    """Every time unit, and nothing a second time."""
    await cluster.catalog.create_table(EVENTS, auto_partitioned(time_unit=unit))
    todo = plan(cluster.image, NOON)
    assert [step.partition for step in todo.creates] == wanted
    assert todo.drops == ()
    await cluster.coordinator.partitions.check()
    assert names(cluster) == wanted
    assert plan(cluster.image, NOON).creates == ()


async def test_periods_begin_in_the_tables_time_zone(cluster: Cluster) -> None:
    """At noon UTC the second of June has begun on Kiribati."""
    json = auto_partitioned(num_precreate="1", time_zone="Pacific/Kiritimati")
    await cluster.catalog.create_table(EVENTS, json)
    assert [step.partition for step in plan(cluster.image, NOON).creates] == ["20240602"]


async def test_time_goes_on_and_old_partitions_go(cluster: Cluster) -> None:
    """Created ahead, dropped after the retention, never both at once for one partition."""
    await cluster.catalog.create_table(EVENTS, auto_partitioned(num_retention="2"))
    for _ in range(6):
        await cluster.coordinator.partitions.check()
        cluster.clock.now_ms += DAY_MS
    assert names(cluster) == ["20240604", "20240605", "20240606", "20240607"]
    assert len(cluster.tablet.buckets) == 4, "a dropped partition gives its buckets back"


async def test_a_clock_far_ahead_drops_nothing_while_it_is_doubted(cluster: Cluster) -> None:
    await cluster.catalog.create_table(EVENTS, auto_partitioned(num_retention="2"))
    await cluster.coordinator.partitions.check()
    ahead = NOON + 400 * DAY_MS
    assert len(plan(cluster.image, ahead).drops) == 2
    assert plan(cluster.image, ahead, expiry_ms=NOON).drops == ()


async def test_partitions_that_a_user_made_count_too(cluster: Cluster) -> None:
    """A partition within the retention stays, whoever created it."""
    await cluster.catalog.create_table(EVENTS, auto_partitioned(num_retention="2"))
    await cluster.catalog.create_partition(EVENTS, {"d": "20240531"})
    await cluster.coordinator.partitions.check()
    assert names(cluster) == ["20240531", "20240601", "20240602"]
    cluster.clock.now_ms += 2 * DAY_MS
    await cluster.coordinator.partitions.check()
    assert names(cluster) == ["20240601", "20240602", "20240603", "20240604"]


async def test_tables_without_auto_partition_are_left_alone(cluster: Cluster) -> None:
    await cluster.catalog.create_table(EVENTS, table_json())
    json = table_json("a INT, d STRING", partitions=("d",))
    await cluster.catalog.create_table(TablePath("fluss", "by_hand"), json)
    assert plan(cluster.image, NOON).creates == ()


async def test_one_failure_does_not_stop_the_others(cluster: Cluster) -> None:
    """A failed step is tried again with the next check."""
    await cluster.catalog.create_table(EVENTS, auto_partitioned())
    cluster.tablet.failure = LogStorageError("no space left on device")
    await cluster.coordinator.partitions.check()
    assert names(cluster) == []
    cluster.tablet.failure = None
    await cluster.coordinator.partitions.check()
    assert names(cluster) == ["20240601", "20240602"]


async def test_a_plan_for_a_table_that_was_replaced_does_nothing(cluster: Cluster) -> None:
    old = await cluster.catalog.create_table(EVENTS, auto_partitioned())
    await cluster.catalog.drop_table(EVENTS)
    json = table_json("a INT, d STRING", partitions=("d",))
    await cluster.catalog.create_table(EVENTS, json)
    await cluster.coordinator.partitions.check([old])
    assert names(cluster) == []


async def test_the_check_repeats_by_itself(tmp_path: Path) -> None:
    """A table gets its next partition while nobody asks."""
    cluster = await Cluster(tmp_path, {"auto-partition.check.interval": "1ms"}).start()
    await cluster.catalog.create_table(EVENTS, auto_partitioned(num_precreate="1"))
    for day in range(1, 4):
        assert await cluster.tablet.started.get() == f"2024060{day}"
        cluster.clock.now_ms += DAY_MS
    await cluster.stop()
