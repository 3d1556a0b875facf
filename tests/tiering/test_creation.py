"""Lake tables at CREATE TABLE and ALTER TABLE, with a real server and its process for the lake."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

import zufluss
from tests.servers import WarmServer
from tests.tiering.hanging_catalog import HangingCatalog
from tests.tiering.support import LAKE, TIERED, Driver, append, create_table, upsert
from tests.tiering.test_round import KEYED, rows
from tests.tiering.tiered_cluster import catalog_of, lake_table
from tests.waiting import eventually
from zufluss.errors import (
    InvalidAlterTableError,
    InvalidTableError,
    LakeTableAlreadyExistError,
)
from zufluss.testing.server import DevServer

NEWEST = "zufluss.newest"


def test_the_lake_table_is_there_when_create_table_is_answered(driver: Driver) -> None:
    """The first round finds nothing to change in it."""
    own = {"table.log.ttl": "3d"}
    path = create_table(driver.connection, "made", KEYED, properties=own, bucket_count=2)
    info = driver.admin.table_info(path)
    before = lake_table(info).metadata
    assert before.current_snapshot_id is None
    assert (before.last_sequence_number, before.format_version) == (0, 2)
    upsert(driver.connection, path, rows(3))
    driver.round()
    after = lake_table(info).metadata
    assert (after.table_uuid, after.schemas, after.partition_specs, after.sort_orders) == (
        before.table_uuid,
        before.schemas,
        before.partition_specs,
        before.sort_orders,
    )
    assert {k: v for k, v in after.properties.items() if k != NEWEST} == before.properties
    assert before.properties["fluss.table.log.ttl"] == "3d"
    assert len(after.metadata_log) == 1


def test_alter_table_creates_and_follows(driver: Driver) -> None:
    """Enabled later; a column and a property arrive before the first row that has them."""
    connection, admin = driver.connection, driver.admin
    admin.create_table("fluss.later", "id INT, name STRING", bucket_count=1)
    info = admin.table_info("fluss.later")
    with pytest.raises(NoSuchTableError):
        catalog_of(info).load_table(tuple(info.path))
    assert admin.alter_table("fluss.later", set=TIERED) is None
    assert lake_table(info).schema().column_names[:2] == ["id", "name"]
    append(connection, "fluss.later", rows(2))
    driver.round()
    assert admin.alter_table("fluss.later", add_columns="note STRING") is None
    names = ["id", "name", "note", "__bucket", "__offset", "__timestamp"]
    assert lake_table(info).schema().column_names == names
    admin.alter_table("fluss.later", set={"iceberg.write.summary.partition-limit": "5"})
    assert lake_table(info).properties["write.summary.partition-limit"] == "5"
    append(connection, "fluss.later", {"id": [7], "name": ["a"], "note": ["b"]})
    driver.round()
    assert lake_table(info).scan().to_arrow().num_rows == 3


def test_alter_table_creates_a_lake_table_that_went_missing(driver: Driver) -> None:
    """Also if it changes nothing: there is no other way to ask for it."""
    path = create_table(driver.connection, "gone")
    info = driver.admin.table_info(path)
    catalog_of(info).drop_table(tuple(info.path))
    driver.admin.alter_table(path, set={"table.datalake.enabled": "true"})
    assert lake_table(info).current_snapshot() is None


@pytest.mark.parametrize(
    ("columns", "options", "reason"),
    [
        ("id DOUBLE, PRIMARY KEY (id)", {}, "no identifier fields"),
        ("at TIMESTAMP(9), PRIMARY KEY (at)", {"bucket_keys": "at"}, "Iceberg has microseconds"),
        ("id INT, at TIME", {"partition_keys": "at"}, "partition key 'at'"),
    ],
)
def test_a_table_that_can_never_be_tiered_is_refused(
    driver: Driver, columns: str, options: dict[str, str], reason: str
) -> None:
    """By CREATE TABLE, and by the ALTER TABLE that would have it tiered; nothing is left."""
    admin = driver.admin
    with pytest.raises(InvalidTableError, match=reason):
        admin.create_table("fluss.never", columns, properties=TIERED, **options)
    assert not admin.table_exists("fluss.never")
    admin.create_table("fluss.never", columns, **options)
    with pytest.raises(InvalidAlterTableError, match=reason):
        admin.alter_table("fluss.never", set=TIERED)
    info = admin.table_info("fluss.never")
    assert info.descriptor.properties.get("table.datalake.enabled") != "true"
    assert not catalog_of(info).table_exists(tuple(info.path))


def test_a_dropped_table_leaves_its_lake_table_to_nobody_or_to_the_next_one(
    driver: Driver,
) -> None:
    """Without rows it is dropped; with rows it is renamed, and its rows stay."""
    path = create_table(driver.connection, "again", bucket_count=1)
    first = lake_table(driver.admin.table_info(path)).metadata
    driver.admin.drop_table(path)
    create_table(driver.connection, "again", bucket_count=1)
    info = driver.admin.table_info(path)
    second = lake_table(info).metadata
    assert second.table_uuid != first.table_uuid
    names = [name for _, name in catalog_of(info).list_tables("fluss")]
    assert [name for name in names if name.startswith("again")] == ["again"]
    assert second.properties["zufluss.table-id"] == str(info.table_id)
    append(driver.connection, path, rows(4))
    driver.round()
    driver.admin.drop_table(path)
    create_table(driver.connection, "again", bucket_count=1)
    third = driver.admin.table_info(path)
    assert lake_table(third).scan().to_arrow().num_rows == 0
    old = lake_table(third, f"again__{info.table_id}_{info.created_time}")
    assert old.scan().to_arrow().num_rows == 4


@pytest.fixture
def catalog(driver: Driver) -> Iterator[Catalog]:
    """The catalog itself, without its tables of the database `theirs` afterwards."""
    path = create_table(driver.connection, "any")
    catalog = catalog_of(driver.admin.table_info(path))
    driver.admin.create_database("theirs", ignore_if_exists=True)
    catalog.create_namespace_if_not_exists("theirs")
    yield catalog
    for identifier in catalog.list_tables("theirs"):
        catalog.drop_table(identifier)
    driver.admin.drop_database("theirs", cascade=True)


def test_a_lake_table_of_somebody_else_is_adopted_only_if_it_is_empty_and_fits(
    driver: Driver, catalog: Catalog
) -> None:
    """A CREATE TABLE that is refused changes nothing in the lake."""
    made = lake_table(driver.admin.table_info("fluss.any"))
    args = {"properties": TIERED}
    for name in ("fits", "full"):
        catalog.create_table(
            f"theirs.{name}",
            made.schema(),
            partition_spec=made.spec(),
            sort_order=made.sort_order(),
            properties={"format-version": "2", "owner": "they"},
        )
    theirs = pa.schema([("id", pa.int32())])
    catalog.create_table("theirs.other", theirs)
    full = catalog.load_table("theirs.full")
    full.append(full.schema().as_arrow().empty_table())
    driver.admin.create_table("theirs.fits", "id INT, name STRING", **args)
    fits = catalog.load_table("theirs.fits").properties
    assert (fits["owner"], fits["zufluss.table-id"]) == (
        "they",
        str(driver.admin.table_info("theirs.fits").table_id),
    )
    for name, reason in (("full", "it has rows or snapshots"), ("other", "its columns are id")):
        before = catalog.load_table(f"theirs.{name}").metadata
        with pytest.raises(LakeTableAlreadyExistError, match=reason):
            driver.admin.create_table(f"theirs.{name}", "id INT, name STRING", **args)
        assert not driver.admin.table_exists(f"theirs.{name}")
        assert catalog.load_table(f"theirs.{name}").metadata == before


def test_create_table_is_refused_while_a_directory_has_rows_of_an_old_table(
    tmp_path: Path,
) -> None:
    """A catalog of type hadoop cannot rename; the table waits until somebody drops the rows."""
    with server_on(tmp_path, "hadoop") as server, driver_on(server) as driver:
        path = create_table(driver.connection, "old")
        append(driver.connection, path, rows(2))
        driver.round()
        driver.admin.drop_table(path)
        with pytest.raises(LakeTableAlreadyExistError, match="type hadoop cannot rename it"):
            create_table(driver.connection, "old")
        HangingCatalog("c", warehouse=f"file://{tmp_path}/w").drop_table("fluss.old")
        create_table(driver.connection, "old")


def test_a_catalog_that_is_down_is_said_and_the_next_alter_table_tries_again(
    tmp_path: Path,
) -> None:
    """The table exists and takes rows; its first round creates the lake table, too."""
    with server_on(tmp_path, "hadoop") as server, driver_on(server) as driver:
        (tmp_path / "w").parent.mkdir(exist_ok=True)
        (tmp_path / "w").write_text("no directory")
        reason = driver.admin.create_table("fluss.a", "id INT, name STRING", properties=TIERED)
        driver.admin.create_table("fluss.b", "id INT, name STRING", properties=TIERED)
        assert reason is not None
        for path in ("fluss.a", "fluss.b"):
            append(driver.connection, path, rows(2))
            told = driver.admin.no_lake_snapshot(path)
            assert told is not None
            assert "its lake table could not be created" in told
            assert driver.connection.table(path).scan(source="union").to_arrow().num_rows == 2
        assert server.log().count("lake_table_missing") == 2
        (tmp_path / "w").unlink()
        assert driver.admin.alter_table("fluss.a", set={"table.datalake.enabled": "true"}) is None
        assert "could not" not in (driver.admin.no_lake_snapshot("fluss.a") or "")
        assert lake_in(tmp_path, "a").current_snapshot() is None
        for _ in range(2):
            driver.round()
        for path in ("fluss.a", "fluss.b"):
            lake = lake_in(tmp_path, path.removeprefix("fluss."))
            assert lake.scan().to_arrow().num_rows == 2
            assert driver.admin.no_lake_snapshot(path) is None


def test_a_slow_catalog_holds_up_nobody_else(tmp_path: Path) -> None:
    """Neither rows nor other changes of the catalog wait; in the end CREATE TABLE says so."""
    limit = {"zufluss.lake.catalog-timeout": "3s"}
    with server_on(tmp_path, "hanging", limit) as server, driver_on(server) as driver:
        assert driver.admin.create_table("fluss.before", "id INT", properties=TIERED) is None
        (tmp_path / "w" / "hang").touch()
        creation = Creation(server, "slow")
        eventually(lambda: (tmp_path / "w" / "fluss" / "slow" / "metadata").exists())
        driver.admin.create_table("fluss.other", "id INT, name STRING")
        append(driver.connection, "fluss.other", rows(3))
        assert driver.connection.table("fluss.other").scan().to_arrow().num_rows == 3
        assert creation.running
        assert creation.result() == "the lake's catalog did not answer within 3000 ms"
        (tmp_path / "w" / "hang").unlink()
        append(driver.connection, "fluss.slow", rows(2))
        while driver.round().table.path.table != "slow":
            pass
        assert lake_in(tmp_path, "slow").scan().to_arrow().num_rows == 2


def test_a_server_killed_between_lake_table_and_table_lets_create_table_be_repeated(
    tmp_path: Path,
) -> None:
    """With another lifetime of the process that asks the lake, which may still be at it."""
    with server_on(tmp_path, "hanging") as server:
        (tmp_path / "w").mkdir(exist_ok=True)
        (tmp_path / "w" / "hang").touch()
        creation = Creation(server, "torn")
        place = tmp_path / "w" / "fluss" / "torn" / "metadata" / "version-hint.text"
        eventually(place.exists)
        os.kill(server.pid, signal.SIGKILL)
        (tmp_path / "w" / "hang").unlink()
        server.kill()
        server.start()
        assert isinstance(creation.result(), zufluss.ZuflussError)
        with driver_on(server) as driver:
            assert not driver.admin.table_exists("fluss.torn")
            path = create_table(driver.connection, "torn")
            info = driver.admin.table_info(path)
            lake = lake_in(tmp_path, "torn")
            assert lake.properties["zufluss.table-created"] == str(info.created_time)
            append(driver.connection, path, rows(3))
            driver.round()
            assert lake.refresh().scan().to_arrow().num_rows == 3


def test_the_process_that_asks_the_lake_ends_with_a_killed_server(tmp_path: Path) -> None:
    with server_on(tmp_path, "hadoop") as server, driver_on(server) as driver:
        create_table(driver.connection, "one")
        [process] = lake_processes(server)
        server.kill()
        eventually(lambda: b"zufluss.lake.process" not in _command(process))
        server.start()


def test_the_process_that_waits_for_a_catalog_ends_with_a_killed_server(tmp_path: Path) -> None:
    with server_on(tmp_path, "hanging") as server:
        (tmp_path / "w").mkdir(exist_ok=True)
        (tmp_path / "w" / "hang").touch()
        creation = Creation(server, "torn")
        eventually((tmp_path / "w" / "fluss" / "torn" / "metadata" / "version-hint.text").exists)
        [process] = lake_processes(server)
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: b"zufluss.lake.process" not in _command(process))
        server.kill()
        server.start()
        assert isinstance(creation.result(), zufluss.ZuflussError)


def lake_processes(server: DevServer) -> list[int]:
    """The processes of a server that ask the lake."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    if not children.exists():
        pytest.skip("this system does not list the children of a process")
    pids = [int(pid) for pid in children.read_text().split()]
    return [p for p in pids if b"zufluss.lake.process" in _command(p)]


def lake_in(directory: Path, name: str) -> Table:
    """A lake table of a server's directory."""
    return HangingCatalog("c", warehouse=f"file://{directory}/w").load_table(f"fluss.{name}")


class Creation:
    """A CREATE TABLE under way in a thread."""

    def __init__(self, server: DevServer, name: str) -> None:
        self._server, self._name = server, name
        self._result: object = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> object:
        """What it returned or raised."""
        self._thread.join()
        return self._result

    def _run(self) -> None:
        try:
            with zufluss.connect(self._server.bootstrap) as connection:
                self._result = connection.admin.create_table(
                    f"fluss.{self._name}", "id INT, name STRING", properties=TIERED
                )
        except zufluss.ZuflussError as problem:
            self._result = problem


@contextmanager
def server_on(
    directory: Path, kind: str, more: dict[str, str] | None = None
) -> Iterator[DevServer]:
    """A server with a catalog in `w`: of type hadoop, or the one that can hang."""
    catalog = {"type": "hadoop"}
    if kind == "hanging":
        catalog = {"py-catalog-impl": "tests.tiering.hanging_catalog.HangingCatalog"}
    catalog["warehouse"] = f"file://{directory}/w"
    keys = {f"datalake.iceberg.{key}": value for key, value in catalog.items()}
    limit = {"zufluss.lake.catalog-timeout": "2min"}
    with WarmServer(directory / "server", LAKE | limit | keys | (more or {})) as server:
        yield server


@contextmanager
def driver_on(server: DevServer) -> Iterator[Driver]:
    driver = Driver(server)
    try:
        yield driver
    finally:
        driver.close()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
