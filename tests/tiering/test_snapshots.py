"""Key-value snapshots in tiering: where the changelog's beginning is gone, the rows are not.

Segments of a kilobyte, a time to live of a millisecond and a snapshot every few milliseconds: a
table that is not tiered yet soon has nothing left of its changelog but the part behind a snapshot.
What a round made of it is asked of readers that share no code with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.servers import WarmServer
from tests.tiering.support import (
    LAKE,
    Driver,
    InlineRunner,
    create_table,
    delete,
    lake_rows,
    upsert,
)
from tests.tiering.test_round import KEYED, Crash, crash_at
from tests.tiering.test_service import tiered
from tests.tiering.tiered_cluster import SPARK, lake_table, rows_of, seen_by_all
from tests.waiting import eventually
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import TieringProcess
from zufluss.tiering import round as tiering_round
from zufluss.tiering.round import RoundEndedError
from zufluss.tiering.splits import (
    TieringInput,
    TieringSnapshotSplit,
    TieringSplit,
    asks_for_snapshot,
)
from zufluss.tiering.tasks import TieringJob

SERVER = LAKE | {
    "log.segment.file-size": "1kb",
    "log.retention.check-interval": "5ms",
    "kv.snapshot.interval": "20ms",
    "kv.snapshot.num-retained": "1",
}
NOT_TIERED = {"table.datalake.enabled": "false", "table.log.ttl": "1ms"}
BATCHES, ROWS = 10, 20


class Cut:
    """A primary-key table whose changelog has lost its beginning, and the rows it must have."""

    def __init__(self, driver: Driver, schema: str = KEYED, name: str = "cut", **more: Any) -> None:
        self.driver, self.admin = driver, driver.admin
        properties = NOT_TIERED | more.pop("properties", {})
        more = {"bucket_count": 2} | more
        self.path = create_table(driver.connection, name, schema, properties=properties, **more)
        self.rows: dict[int, dict[str, Any]] = {}

    def write(self, start: int, label: str, **columns: Any) -> None:
        """Many small batches, so that there are many segments."""
        for first in range(start, start + BATCHES * ROWS, ROWS):
            ids = [*range(first, first + ROWS)]
            data = {"id": ids, "name": [f"{label} {first}"] * ROWS}
            data |= {name: [value] * ROWS for name, value in columns.items()}
            upsert(self.driver.connection, self.path, data)
            self.rows |= {row["id"]: row for row in pa.table(data).to_pylist()}

    def delete(self, ids: list[int]) -> None:
        delete(self.driver.connection, self.path, {"id": ids})
        for key in ids:
            del self.rows[key]

    def snapshots(self) -> dict[TableBucket, int]:
        """Up to which offset the newest snapshots go."""
        names = [None]
        if self.admin.table_info(self.path).is_partitioned:
            names = [found.name for found in self.admin.list_partitions(self.path)]
        return {
            each.bucket: each.log_offset
            for name in names
            for each in self.admin.latest_kv_snapshots(self.path, name)
        }

    def wait_for_snapshots(self) -> None:
        """Wait until a snapshot has everything, and retention has taken what it can."""
        ends = self.admin.list_all_offsets(self.path)
        eventually(lambda: self.snapshots() == ends)
        eventually(lambda: all(self.begins().values()))

    def begins(self) -> dict[TableBucket, int]:
        return self.admin.list_all_offsets(self.path, "earliest")

    def tier(self) -> None:
        """Switch tiering on."""
        self.admin.alter_table(self.path, set={"table.datalake.enabled": "true"})

    @property
    def wanted(self) -> list[dict[str, Any]]:
        return [self.rows[key] for key in sorted(self.rows)]

    def check(self) -> None:
        """Lake and union read have every row, once; the lake must be up to date."""
        names = list(self.wanted[0])
        expected = rows_of(pa.Table.from_pylist(self.wanted), names)
        info = self.admin.table_info(self.path)
        assert seen_by_all(lake_table(info), names) == expected
        self.check_union()

    def check_union(self) -> None:
        names = list(self.wanted[0])
        union = self.driver.connection.table(self.path).scan(source="union").to_arrow()
        assert rows_of(union, names) == rows_of(pa.Table.from_pylist(self.wanted), names)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with WarmServer(tmp_path_factory.mktemp("snapshots"), SERVER) as server:
        yield server


@pytest.fixture
def cutting(server: DevServer) -> Iterator[Driver]:
    """A tiering service by hand, on a server that forgets at once."""
    driver = Driver(server)
    yield driver
    for table in driver.admin.list_tables("fluss"):
        driver.admin.drop_table(f"fluss.{table}")
    driver.close()


def splits(driver: Driver) -> list[TieringSplit]:
    """What the last job read."""
    assert isinstance(driver.runner, InlineRunner)
    return [split for group in driver.runner.jobs[-1].groups for split in group]


def test_a_table_whose_changelog_was_cut_arrives_whole(cutting: Driver) -> None:
    table = Cut(cutting)
    table.write(0, "first")
    table.write(100, "second")
    table.delete([5, 150])
    table.wait_for_snapshots()
    table.tier()
    result = cutting.round()
    assert {type(split) for split in splits(cutting)} == {TieringSnapshotSplit}
    assert result.records == len(table.rows)
    assert result.max_timestamp_ms is None
    table.check()
    found = lake_rows(cutting.admin.table_info(table.path))
    assert set(found["__offset"].to_pylist()) == {-1}


def test_rounds_after_it_go_on_with_the_changelog(cutting: Driver) -> None:
    table = Cut(cutting)
    table.write(0, "first")
    table.wait_for_snapshots()
    table.tier()
    cutting.round()
    table.write(150, "second")
    table.delete([0, 199, 210])
    table.check_union()
    cutting.round()
    assert TieringSnapshotSplit not in {type(split) for split in splits(cutting)}
    table.check()


def test_a_column_added_between_two_writes_is_null_in_the_rows_before(cutting: Driver) -> None:
    table = Cut(cutting)
    table.write(0, "old")
    table.rows = {key: row | {"note": None} for key, row in table.rows.items()}
    table.admin.alter_table(table.path, add_columns="note STRING")
    table.write(100, "new", note="x")
    table.wait_for_snapshots()
    table.tier()
    cutting.round()
    table.check()


def test_partitions_are_tiered_from_their_own_snapshots(cutting: Driver) -> None:
    table = Cut(
        cutting,
        "id INT NOT NULL, name STRING, day STRING NOT NULL, PRIMARY KEY (id, day)",
        partition_keys=["day"],
        bucket_count=1,
    )
    table.write(0, "first", day="a")
    table.write(1000, "second", day="b")
    table.wait_for_snapshots()
    table.tier()
    cutting.round()
    assert sorted(str(split.partition) for split in splits(cutting)) == ["a", "b"]
    table.check()


def test_a_crash_between_the_commits_loses_and_doubles_nothing(cutting: Driver) -> None:
    table = Cut(cutting)
    table.write(0, "first")
    table.wait_for_snapshots()
    table.tier()
    with pytest.raises(Crash):
        cutting.round(crash_at("server-commit"))
    table.write(100, "second")
    assert cutting.round().recovered
    table.check()


def replace_before_the_job(table: Cut, then: Callable[[], None] = lambda: None) -> None:
    """Let newer snapshots come between planning and reading, in every bucket."""
    planned = table.snapshots()

    def replace(job: TieringJob) -> None:
        table.write(0, "newer")
        eventually(lambda: all(table.snapshots()[b] > planned[b] for b in planned))
        then()

    assert isinstance(table.driver.runner, InlineRunner)
    table.driver.runner.before = replace


def leases_of(driver: Driver) -> list[str]:
    return [lease.lease_id for lease in driver.admin.kv_snapshot_leases()]


def test_a_snapshot_that_is_replaced_before_it_is_read_is_read_all_the_same(
    cutting: Driver,
) -> None:
    table = Cut(cutting)
    table.write(0, "first")
    table.wait_for_snapshots()
    table.tier()
    rows = len(table.rows)
    replace_before_the_job(table)
    result = cutting.round()
    assert {type(split) for split in splits(cutting)} == {TieringSnapshotSplit}
    assert result.records == rows
    assert leases_of(cutting) == []
    table.check_union()


def test_a_round_whose_lease_is_dropped_ends_and_the_next_one_plans_anew(cutting: Driver) -> None:
    table = Cut(cutting)
    table.write(0, "first")
    table.wait_for_snapshots()
    table.tier()
    held = []

    def drop() -> None:
        (lease_id,) = leases_of(cutting)
        held.append(lease_id)
        kept = table.admin.list_kv_snapshots(table.path)
        table.admin.drop_kv_snapshot_lease(lease_id)
        eventually(lambda: len(table.admin.list_kv_snapshots(table.path)) < len(kept))

    replace_before_the_job(table, drop)
    with pytest.raises(RoundEndedError, match=r"zufluss-tiering-.*; the next round plans anew"):
        cutting.round()
    assert held[0].startswith("zufluss-tiering-")
    assert cutting.admin.lake_snapshot(table.path) is None
    assert isinstance(cutting.runner, InlineRunner)
    cutting.runner.before = None
    table.wait_for_snapshots()
    cutting.round()
    table.check()


def test_a_partition_that_is_dropped_while_a_round_plans_ends_the_round(
    cutting: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Cut(
        cutting,
        "id INT NOT NULL, name STRING, day STRING NOT NULL, PRIMARY KEY (id, day)",
        partition_keys=["day"],
        bucket_count=1,
    )
    table.write(0, "first", day="a")
    table.wait_for_snapshots()
    table.tier()

    def drop_and_ask(state: TieringInput, bucket: TableBucket) -> bool:
        table.admin.drop_partition(table.path, "a", ignore_if_not_exists=True)
        return asks_for_snapshot(state, bucket)

    monkeypatch.setattr(tiering_round, "asks_for_snapshot", drop_and_ask)
    with pytest.raises(RoundEndedError, match="partition a was dropped; the next round plans with"):
        cutting.round()
    assert leases_of(cutting) == []


def test_a_round_that_reads_only_changes_holds_no_snapshots(cutting: Driver) -> None:
    table = Cut(cutting, properties={"table.log.ttl": "7d"})
    table.write(0, "first")
    table.tier()
    assert isinstance(cutting.runner, InlineRunner)
    seen: list[list[str]] = []
    cutting.runner.before = lambda job: seen.append(leases_of(cutting))
    cutting.round()
    assert seen == [[]]
    table.check()


@contextmanager
def spark_service(directory: Path) -> Iterator[tuple[Driver, TieringProcess]]:
    settings = SERVER | {"kv.snapshot.interval": "500ms"}
    with (
        WarmServer(directory, settings) as server,
        TieringProcess(server.bootstrap, SPARK) as service,
    ):
        driver = Driver(server)
        try:
            yield driver, service
        finally:
            driver.close()


@pytest.mark.slow
def test_spark_tiers_a_table_whose_changelog_was_cut_while_it_is_written(tmp_path: Path) -> None:
    with spark_service(tmp_path) as (driver, service):
        table = Cut(driver)
        table.write(0, "first")
        table.write(1_000, "never changed")
        table.wait_for_snapshots()
        table.tier()
        for number in range(10):  # meanwhile snapshots are replaced, and rounds may end for that
            table.write(number * 7, f"round {number}")
        eventually(lambda: tiered(driver.connection, table.path))
        table.check()
        found = lake_rows(driver.admin.table_info(table.path))
        still = found.filter(pc.greater_equal(found["id"], 1_000))
        assert still["__offset"].to_pylist() == [-1] * BATCHES * ROWS
        assert service.running
