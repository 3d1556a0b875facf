"""What comes again is not what was there before: partitions of an old name, tiering after a pause.

A partition that was dropped and created again is another one. Its first round takes the rows of
the earlier one out of the lake; before and after, a union read has the rows of the live table.

Tiering that was off while `table.log.ttl` passed finds a log that begins behind the lake: a log
table goes on from there, and says what is missing; a primary-key table cannot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.lake.readers import READERS
from tests.servers import WarmServer
from tests.tiering.support import Driver, append, create_table, delete, upsert
from tests.tiering.test_retention import SERVER, Aging, aging
from tests.tiering.test_round import Crash, crash_at
from tests.tiering.tiered_cluster import lake_table, rows_of, seen_by_all
from tests.waiting import eventually
from zufluss.errors import OffsetOutOfRangeError
from zufluss.lake.base import CommitterContext, LakeError, catalog_properties, lake_factory
from zufluss.model.table import TableInfo
from zufluss.tiering.round import RoundEndedError

COLUMNS = ["day", "id", "name"]


class Days:
    """A table partitioned by day, and the rows it has."""

    def __init__(self, driver: Driver, keyed: bool) -> None:
        self.driver = driver
        self.keyed = keyed
        key = ", PRIMARY KEY (day, id)" if keyed else ""
        schema = f"day STRING NOT NULL, id INT NOT NULL, name STRING{key}"
        self.path = create_table(
            driver.connection, "days", schema, partition_keys=["day"], bucket_count=2
        )
        self.wanted: list[tuple[str, int, str]] = []

    def write(self, day: str, ids: range, name: str) -> None:
        data = {"day": [day] * len(ids), "id": [*ids], "name": [name] * len(ids)}
        (upsert if self.keyed else append)(self.driver.connection, self.path, data)
        if self.keyed:
            self.wanted = [row for row in self.wanted if row[0] != day or row[1] not in ids]
        self.wanted += [(day, number, name) for number in ids]

    def delete(self, day: str, ids: list[int]) -> None:
        delete(self.driver.connection, self.path, {"day": [day] * len(ids), "id": ids})
        self.wanted = [row for row in self.wanted if row[0] != day or row[1] not in ids]

    def again(self, day: str) -> None:
        """Drop a partition and create one of its name."""
        self.driver.admin.drop_partition(self.path, day)
        self.driver.admin.create_partition(self.path, {"day": day})
        self.wanted = [row for row in self.wanted if row[0] != day]

    def live(self) -> list[tuple[str, ...]]:
        return sorted(tuple(map(repr, row)) for row in self.wanted)

    def union(self, **options: Any) -> list[tuple[str, ...]]:
        table = self.driver.connection.table(self.path)
        options = {"source": "union"} | options
        return rows_of(table.scan(**options).to_arrow(), COLUMNS)

    def check(self) -> None:
        """A union read is the live table."""
        assert self.union() == self.live()
        if not self.keyed:
            assert self.union(source="log") == self.live()

    def check_lake(self) -> None:
        """And so is the lake to everybody, when all of it was tiered."""
        self.check()
        assert seen_by_all(lake_table(self.info), COLUMNS) == self.live()

    @property
    def info(self) -> TableInfo:
        return self.driver.admin.table_info(self.path)


@pytest.fixture(params=[False, True], ids=["log", "primary key"])
def days(request: pytest.FixtureRequest, driver: Driver) -> Days:
    """Two days that were tiered, in two rounds."""
    made = Days(driver, request.param)
    made.write("mon", range(6), "old")
    made.write("tue", range(6), "kept")
    driver.round()
    made.write("mon", range(6, 9), "older")
    if made.keyed:
        made.delete("mon", [1, 2])
    driver.round()
    made.check_lake()
    return made


def test_a_partition_created_again_starts_without_the_rows_of_the_old_one(days: Days) -> None:
    before = days.live()
    (old,) = {s.snapshot_id for s in lake_table(days.info).metadata.snapshots[-1:]}
    days.again("mon")
    days.check()
    assert days.union(partitions=["mon"]) == []
    assert days.union(source="lake") == before, "until its first round the lake has the old rows"
    days.driver.round()
    days.check()
    days.write("mon", range(3, 8), "new")
    days.check()
    days.driver.round()
    days.check_lake()
    assert days.union(source="lake") == days.live()
    days.write("mon", range(7, 20), "newer")
    days.write("tue", range(4, 9), "kept too")
    days.check()
    days.driver.round()
    days.check_lake()
    assert seen_by_all(lake_table(days.info), COLUMNS, snapshot_id=old) == before
    operations = [s.summary.operation.value for s in lake_table(days.info).metadata.snapshots]
    assert operations[2] == "overwrite"
    assert days.keyed or operations[3] == "append"


def test_rows_that_came_and_went_in_the_new_partition_leave_none_of_the_old_ones(
    driver: Driver,
) -> None:
    days = Days(driver, keyed=True)
    days.write("mon", range(4), "old")
    driver.round()
    days.again("mon")
    days.write("mon", range(2), "new")
    days.delete("mon", [0, 1])
    days.check()
    driver.round()
    days.check_lake()
    assert days.live() == []


def test_a_crash_between_the_commits_brings_no_old_rows_back(days: Days) -> None:
    days.again("mon")
    days.write("mon", range(3), "new")
    lease = days.driver.receive()
    with pytest.raises(Crash):
        days.driver.tier(lease, crash_at("server-commit"))
    days.driver.fail(lease)
    days.check()
    days.write("mon", range(3, 5), "more")
    days.check()
    days.driver.round()
    days.check_lake()


def test_rows_that_others_add_to_the_old_partition_go_with_it(driver: Driver) -> None:
    """Its last rows in the lake, while the round of the new one is about to commit."""
    days = Days(driver, keyed=False)
    days.write("mon", range(6), "old")
    days.driver.round()
    days.again("mon")
    days.write("mon", range(2, 4), "new")

    def meddle(step: str) -> None:
        if step == "lake-commit":
            lake = lake_table(days.info)
            found = lake.scan(row_filter="day = 'mon'").to_arrow()
            lake.append(found.slice(0, 2))

    days.driver.round(meddle)
    days.check_lake()


def test_compaction_before_its_first_round_does_not_matter(days: Days) -> None:
    for number in range(3):
        days.write("mon", range(20 * number, 20 * number + 5), f"small {number}")
        days.driver.round()
    days.again("mon")
    days.write("mon", range(2, 4), "new")
    context = CommitterContext(days.info, catalog_properties(days.info, "iceberg"))
    maintenance = lake_factory("iceberg").create_maintenance(context)
    snapshot = days.driver.admin.lake_snapshot(days.path)
    assert snapshot is not None
    assert maintenance.compact(snapshot.snapshot_id) is not None
    maintenance.close()
    days.check()
    days.driver.round()
    days.check_lake()


@pytest.mark.parametrize("step", ["job", "lake-commit"])
def test_a_partition_created_again_in_mid_round_is_right_after_the_next(
    days: Days, step: str
) -> None:
    days.write("mon", range(30, 33), "late")

    def again(name: str) -> None:
        if name == step:
            days.again("mon")
            days.write("mon", range(2), "new")

    if step == "job":
        with pytest.raises(RoundEndedError, match="partition mon was dropped"):
            days.driver.round(again)
    else:
        days.driver.round(again)
    days.check()
    days.driver.round()
    days.check_lake()


# -- tiering after a pause ---------------------------------------------------------------------


def paused(cluster: Aging) -> None:
    """Some rows are tiered, the next ones pass away while the table is not."""
    cluster.write(0, "first")
    cluster.driver.round()
    cluster.admin.alter_table(cluster.path, set={"table.datalake.enabled": "false"})
    cluster.write(1000, "lost")
    eventually(lambda: cluster.begins() == cluster.ends())
    cluster.admin.alter_table(cluster.path, set={"table.datalake.enabled": "true"})


@pytest.mark.parametrize("more", [True, False], ids=["with new rows", "with nothing left"])
def test_a_log_table_goes_on_behind_what_it_lost_and_says_what(tmp_path: Path, more: bool) -> None:
    with WarmServer(tmp_path, SERVER) as server, aging(server, keyed=False) as cluster:
        paused(cluster)
        cluster.wanted = [row for row in cluster.wanted if row[1].startswith("first")]
        tiered = cluster.admin.lake_snapshot(cluster.path)
        begins = cluster.admin.list_all_offsets(cluster.path, "earliest")
        if more:
            cluster.write(2000, "second")
        with pytest.raises(OffsetOutOfRangeError, match="the log begins at offset"):
            cluster.check()
        with capture_logs() as logs:
            cluster.driver.round()
        told = [entry for entry in logs if entry["event"] == "records_missing_in_lake"]
        found = {e["bucket"]: (e["first_offset"], e["last_offset"]) for e in told}
        assert tiered is not None
        assert found == {str(b): (o, begins[b] - 1) for b, o in tiered.offsets.items()}
        assert {entry["log_level"] for entry in told} == {"warning"}
        cluster.check()
        with capture_logs() as logs:
            cluster.driver.round()
        assert not [entry for entry in logs if entry["event"] == "records_missing_in_lake"]
        cluster.write(3000, "third")
        cluster.driver.round()
        cluster.check()
        seen = READERS["pyiceberg"](lake_table(cluster.table.info).metadata_location)
        assert seen.num_rows == len(cluster.wanted)


def test_a_primary_key_table_that_lost_changes_says_that_it_cannot_go_on(tmp_path: Path) -> None:
    with WarmServer(tmp_path, SERVER) as server, aging(server, keyed=True) as cluster:
        paused(cluster)
        with pytest.raises(LakeError, match=r"key-value snapshot .* drop and re-create the table"):
            cluster.driver.round()
