"""A lost disk that takes changes between the uploaded changelog and the last snapshot.

The table directories of a real server are removed. Snapshots reach further than the uploaded
changelog, so that changes are lost whose effect is in the rows. The log continues behind them, is
uploaded, and survives another lost disk. Nobody reads across the loss without an error.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

import zufluss
from tests.fault.load import DATABASE
from tests.fault.remote_load import BUSY, CLIENT, TABLE, remotes
from tests.lake.readers import pyiceberg_rows
from tests.servers import WarmServer
from tests.tiering.faults import is_tiered, lake_table
from tests.tiering.support import LAKE, TIERED, Driver
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.coordinator.bucket_remotes import BucketRecord
from zufluss.errors import OffsetOutOfRangeError
from zufluss.lake.base import LakeError
from zufluss.model.table import TableBucket

ROWS: Final = 300
BATCH: Final = 10
TIERED_WHOLLY, TIERED_PARTLY, NOT_TIERED = (
    f"{DATABASE}.{name}" for name in ("wholly", "partly", "later")
)
PATHS: Final = (TIERED_WHOLLY, TIERED_PARTLY, NOT_TIERED)
"""Tables of which the lake has everything, a part or nothing when the disk is lost."""


class LossyServer:
    """A server with one remote location whose disk is lost repeatedly."""

    def __init__(self, server: WarmServer) -> None:
        self.server = server
        self.ends: dict[str, int] = {}
        """The end of each changelog, which has one record per row."""
        self.buckets: dict[str, TableBucket] = {}

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        with zufluss.connect(self.server.bootstrap, **CLIENT) as connection:
            yield connection

    def create(self) -> None:
        with self.connect() as connection:
            connection.admin.create_database(DATABASE)
            for path in PATHS:
                enabled = TIERED | {"table.datalake.enabled": str(path != NOT_TIERED).lower()}
                connection.admin.create_table(
                    path, "id INT NOT NULL, text STRING", primary_key=["id"], bucket_count=1,
                    properties=TABLE | enabled,
                )  # fmt: skip
                self.ends[path] = 0
                table_id = connection.table(path).info.table_id
                self.buckets[path] = TableBucket(table_id, None, 0)

    def write(self, path: str, rows: int) -> None:
        with self.connect() as connection, connection.table(path).upsert() as writer:
            for at in range(self.ends[path], self.ends[path] + rows, BATCH):
                ids = range(at, at + BATCH)
                writer.write({"id": list(ids), "text": [text(i) for i in ids]})
                writer.flush()
        self.ends[path] += rows

    def lose_disk(self) -> dict[str, int]:
        """Lose the disk once snapshots have all rows; returns the offset behind each loss."""
        eventually(lambda: all(map(self._snapshot_is_newest, PATHS)), "snapshots have all rows")
        self.server.kill()
        for path in PATHS:
            assert 0 < self.uploaded(path) < self.ends[path]
        shutil.rmtree(self.server.data_dir / DATABASE)
        self.server.start()
        return dict(self.ends)

    def _snapshot_is_newest(self, path: str) -> bool:
        snapshots = self._record(path).snapshots
        return bool(snapshots) and snapshots[-1].log_offset == self.ends[path]

    def uploaded(self, path: str) -> int:
        """The end of the uploaded changelog."""
        manifest = self._record(path).manifest
        return 0 if manifest is None else manifest.end_offset

    def _record(self, path: str) -> BucketRecord:
        return remotes(self.server, [self.buckets[path]])[self.buckets[path]]


def text(number: int) -> str:
    return f"{number}".ljust(200, ".")


def rows(count: int) -> list[tuple[int, str]]:
    return [(i, text(i)) for i in range(count)]


def check_rows(lossy: LossyServer) -> None:
    """Assert that lookups and scans find all rows."""
    with lossy.connect() as connection:
        for path, count in lossy.ends.items():
            table = connection.table(path)
            found = table.lookup({"id": list(range(count))}, missing="drop").to_pylist()
            assert sorted((r["id"], r["text"]) for r in found) == rows(count)
            assert sorted(table.scan(["id"]).to_arrow()["id"].to_pylist()) == list(range(count))


def check_changelog(connection: Connection, path: str, lost: int, begin: int, end: int) -> None:
    """Assert that readers get every change before and behind the loss, and an error at it."""
    table = connection.table(path)
    earlier = table.changelog(stop={0: lost}).to_arrow()
    assert earlier["_log_offset"].to_pylist() == list(range(lost))
    message = f"{lost} to {begin - 1} were lost with a disk or location; read on at offset {begin}"
    for start in ("earliest", {0: lost}, {0: begin - 1}):
        with pytest.raises(OffsetOutOfRangeError, match=message):
            table.changelog(start=start).to_arrow()
    later = table.changelog(start="unbroken").to_arrow()
    assert later["_log_offset"].to_pylist() == list(range(begin, end))
    assert later["id"].to_pylist() == list(range(begin, end))
    assert connection.admin.list_offsets(path, "earliest") == {0: 0}
    assert connection.admin.list_offsets(path, "unbroken") == {0: begin}


def tier(driver: Driver, *paths: str) -> list[str]:
    """Tier tables until these have everything in the lake; returns the errors of the others."""
    problems = set()
    while not all(is_tiered(driver.connection, path) for path in paths):
        lease = driver.receive()
        try:
            driver.tier(lease)
        except LakeError as problem:
            assert str(lease.table.path) not in paths
            problems.add(str(problem))
            driver.fail(lease)
        else:
            driver.finish(lease)
    return sorted(problems)


@pytest.mark.slow
def test_a_changelog_goes_on_behind_changes_that_a_lost_disk_took(
    warm_server: Callable[..., WarmServer], tmp_path: Path
) -> None:
    location = {"remote.data.dirs": f"file://{tmp_path / 'cold'}"}
    server = warm_server(BUSY | LAKE | location).start()
    lossy = LossyServer(server)
    lossy.create()
    for path in PATHS:
        lossy.write(path, ROWS)
    with closing(Driver(server)) as driver:
        tier(driver, TIERED_WHOLLY, TIERED_PARTLY)
    for path in (TIERED_PARTLY, NOT_TIERED):
        lossy.write(path, ROWS)

    begins = lossy.lose_disk()
    lost = {path: lossy.uploaded(path) for path in PATHS}
    check_rows(lossy)
    for path in PATHS:
        lossy.write(path, ROWS)
    eventually(lambda: all(lossy.uploaded(p) > begins[p] for p in PATHS), "uploads go on")
    check_rows(lossy)
    with lossy.connect() as connection:
        for path in PATHS:
            check_changelog(connection, path, lost[path], begins[path], lossy.ends[path])
        check_lake(connection, lossy, server)

    lossy.lose_disk()
    check_rows(lossy)
    with lossy.connect() as connection:
        for path in PATHS:
            message = f"{lost[path]} to {begins[path] - 1} were lost with a disk"
            with pytest.raises(OffsetOutOfRangeError, match=message):
                connection.table(path).changelog().to_arrow()


def check_lake(connection: Connection, lossy: LossyServer, server: WarmServer) -> None:
    """Assert that tiering and union reads have all rows, or say what is lost."""
    union = connection.table(TIERED_WHOLLY).scan(["id"], source="union").to_arrow()
    assert sorted(union["id"].to_pylist()) == list(range(lossy.ends[TIERED_WHOLLY]))
    with pytest.raises(OffsetOutOfRangeError, match="lost with a disk"):
        connection.table(TIERED_PARTLY).scan(["id"], source="union").to_arrow()
    connection.admin.alter_table(NOT_TIERED, set={"table.datalake.enabled": "true"})
    with closing(Driver(server)) as driver:
        problems = tier(driver, TIERED_WHOLLY, NOT_TIERED)
        while not problems:
            problems = refused(driver)
    assert all("lost with a disk" in problem for problem in problems), problems
    for path in (TIERED_WHOLLY, NOT_TIERED):
        found = pyiceberg_rows(lake_table(connection.table(path).info).metadata_location)
        columns = (found[name].to_pylist() for name in ("id", "text"))
        assert sorted(zip(*columns, strict=True)) == rows(lossy.ends[path])


def refused(driver: Driver) -> list[str]:
    """Run one round; returns its error, if there is one."""
    lease = driver.receive()
    try:
        driver.tier(lease)
    except LakeError as problem:
        driver.fail(lease)
        return [str(problem)]
    driver.finish(lease)
    return []
