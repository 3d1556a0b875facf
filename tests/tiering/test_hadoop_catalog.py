"""Rounds into a catalog of type hadoop, in a directory and in a bucket."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import zufluss
from tests.servers import WarmServer
from tests.tiering.support import LAKE, Driver, append, create_table, delete, upsert
from tests.tiering.test_round import KEYED, STEPS, Crash, crash_at, rows
from tests.tiering.tiered_cluster import SPARK, Tiered, seen_by_all
from zufluss.lake.base import catalog_properties
from zufluss.lake.iceberg.catalog import load
from zufluss.lake.iceberg.hadoop import HadoopCatalog
from zufluss.testing.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import TieringProcess

CATALOG = "datalake.iceberg"


@pytest.fixture(scope="module")
def in_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    directory = tmp_path_factory.mktemp("hadoop")
    keys = {f"{CATALOG}.type": "hadoop", f"{CATALOG}.warehouse": f"file://{directory}/a b/w"}
    with WarmServer(directory / "server", LAKE | keys | {"zufluss.log.flush": "os"}) as server:
        yield server


@pytest.fixture
def driver(in_directory: DevServer) -> Iterator[Driver]:
    driver = Driver(in_directory)
    yield driver
    for table in driver.admin.list_tables("fluss"):
        driver.admin.drop_table(f"fluss.{table}")
    driver.close()


def ids_in_lake(driver: Driver, path: str) -> list[int]:
    """The ids in the lake, by a catalog that is the one of the configuration."""
    info = driver.admin.table_info(path)
    catalog = load(catalog_properties(info, "iceberg"))
    assert isinstance(catalog, HadoopCatalog)
    return sorted(catalog.load_table(tuple(info.path)).scan().to_arrow()["id"].to_pylist())


def ids(driver: Driver, path: str, source: str) -> list[int]:
    return sorted(driver.connection.table(path).scan(source=source).to_arrow()["id"].to_pylist())


def test_rounds_of_a_log_table_join_in_lake_and_union_read(driver: Driver) -> None:
    path = create_table(driver.connection, "log", bucket_count=2)
    for start in (0, 10):
        append(driver.connection, path, rows(10, start))
        assert driver.round().committed
    append(driver.connection, path, rows(5, 20))
    assert ids_in_lake(driver, path) == list(range(20))
    assert ids(driver, path, "lake") == list(range(20))
    assert ids(driver, path, "union") == list(range(25))


def test_rounds_of_a_primary_key_table_replace_and_delete_rows(driver: Driver) -> None:
    path = create_table(driver.connection, "keyed", KEYED, bucket_count=2)
    upsert(driver.connection, path, rows(10))
    driver.round()
    upsert(driver.connection, path, rows(5))
    delete(driver.connection, path, {"id": [9]})
    driver.round()
    assert ids_in_lake(driver, path) == list(range(9))
    delete(driver.connection, path, {"id": [8]})
    assert ids(driver, path, "union") == list(range(8))


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_loses_and_doubles_nothing(driver: Driver, step: str) -> None:
    path = create_table(driver.connection, f"crash_{step.replace('-', '_')}", bucket_count=2)
    append(driver.connection, path, rows(20))
    driver.round()
    append(driver.connection, path, rows(20, 20))
    with pytest.raises(Crash):
        driver.round(crash_at(step))
    append(driver.connection, path, rows(20, 40))
    assert driver.round().recovered == (step == "server-commit")
    assert ids_in_lake(driver, path) == list(range(60))


@pytest.mark.slow
def test_the_service_as_users_start_it_tiers_into_a_directory(in_directory: DevServer) -> None:
    with zufluss.connect(in_directory.bootstrap) as connection:
        path = create_table(connection, "served", KEYED, bucket_count=2)
        upsert(connection, path, rows(50))
        delete(connection, path, {"id": [0]})
        with TieringProcess(in_directory.bootstrap, SPARK) as process:
            cluster = Tiered(in_directory, process, connection)
            cluster.caught_up(path)
        lake = load(catalog_properties(connection.admin.table_info(path), "iceberg"))
        table = lake.load_table(tuple(connection.admin.table_info(path).path))
        assert [i for (i,) in seen_by_all(table, ["id"])] == sorted(map(str, range(1, 50)))
        connection.admin.drop_table(path)


def test_rounds_into_a_bucket(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends no keys, so the service has them from its environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    keys = {
        f"{CATALOG}.type": "hadoop",
        f"{CATALOG}.warehouse": f"{s3_server.bucket(f'lake-{uuid.uuid4()}')}/w",
        f"{CATALOG}.s3.endpoint": s3_server.endpoint,
        f"{CATALOG}.s3.region": REGION,
    }
    with WarmServer(tmp_path / "server", LAKE | keys) as server:
        driver = Driver(server)
        path = create_table(driver.connection, "keyed", KEYED, bucket_count=1)
        for start in (0, 5):
            upsert(driver.connection, path, rows(10, start))
            assert driver.round().committed
        delete(driver.connection, path, {"id": [0]})
        assert ids_in_lake(driver, path) == list(range(15))
        assert ids(driver, path, "union") == list(range(1, 15))
        driver.close()
