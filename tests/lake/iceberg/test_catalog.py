"""Catalogs: spellings, messages, and one SQLite file under several processes."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from pathlib import Path
from threading import Timer

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from tests.lake.iceberg.tables import catalog_properties
from zufluss.errors import ConfigError
from zufluss.lake.base import LakeError
from zufluss.lake.iceberg.catalog import (
    NAME,
    SQLITE_BUSY_MS,
    file_properties,
    load,
    normalized,
    sqlite_path,
)


def test_an_embedded_catalog_is_made_with_its_directory(tmp_path: Path) -> None:
    catalog = load(catalog_properties(tmp_path / "deep" / "er"))
    catalog.create_namespace("shop")
    assert (catalog.name, catalog.list_namespaces()) == (NAME, [("shop",)])
    assert (tmp_path / "deep/er/lake/catalog.db").exists()


def test_the_same_properties_give_the_same_catalog(tmp_path: Path) -> None:
    properties = catalog_properties(tmp_path)
    assert load(properties) is load(dict(reversed(properties.items())))
    assert load(properties) is not load({**properties, "s3.region": "eu-central-1"})


def test_sqlite_connections_wait_for_each_other_and_readers_for_nobody(tmp_path: Path) -> None:
    catalog = load(catalog_properties(tmp_path))
    assert isinstance(catalog, SqlCatalog)
    with catalog.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == SQLITE_BUSY_MS
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ({"type": "jdbc", "uri": "jdbc:sqlite:/data/c.db"}, "sqlite:////data/c.db"),
        ({"type": "jdbc", "uri": "jdbc:sqlite:file:/data/c.db"}, "sqlite:////data/c.db"),
        ({"type": "sql", "uri": "sqlite:////data/c.db"}, "sqlite:////data/c.db"),
        (
            {
                "catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
                "uri": "jdbc:postgresql://db:5432/lake",
                "jdbc.user": "me",
                "jdbc.password": "p@ss",
            },
            "postgresql://me:p%40ss@db:5432/lake",
        ),
    ],
)
def test_jdbc_spellings_of_fluss_configurations_are_understood(
    given: dict[str, str], uri: str
) -> None:
    found = normalized({**given, "warehouse": "file:///w"})
    assert found == {"type": "sql", "uri": uri, "warehouse": "file:///w"}


def test_a_rest_catalog_is_known_by_its_java_class() -> None:
    given = {"catalog-impl": "org.apache.iceberg.rest.RESTCatalog", "uri": "http://c:8181"}
    found = normalized(given)
    assert (found["type"], found["uri"]) == ("rest", "http://c:8181")
    assert found["snapshot-loading-mode"] == "all"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "datalake.iceberg.type is missing"),
        ({"type": "nessie"}, "give one of sql, rest, hadoop"),
        ({"type": "hadoop"}, "needs datalake.iceberg.warehouse"),
        ({"type": "sql", "uri": "sqlite:///x"}, "needs datalake.iceberg.warehouse"),
        ({"type": "rest"}, "needs datalake.iceberg.uri"),
        ({"type": "in-memory", "warehouse": "/w"}, "give one of sql, rest"),
        ({"type": "sql", "uri": "sqlite:///:memory:", "warehouse": "/w"}, "lost when the process"),
        ({"type": "sql", "uri": "sqlite://", "warehouse": "/w"}, "lost when the process ends"),
        ({"catalog-impl": "com.example.Mine"}, "com.example.Mine is not known here"),
    ],
)
def test_what_is_missing_is_named(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(given)


def test_a_driver_that_is_not_installed_is_named_without_the_password() -> None:
    properties = {"type": "sql", "uri": "mssql+nothere://u:secret@h/db", "warehouse": "file:///w"}
    with pytest.raises(ConfigError, match="install the driver of its database") as caught:
        load(properties)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database_is_a_lake_error(tmp_path: Path) -> None:
    properties = catalog_properties(tmp_path)
    path = sqlite_path(properties["uri"])
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(LakeError, match=r"catalog\.db cannot be opened"):
        load(properties)


def test_writers_never_learn_how_to_reach_the_catalogs_database(tmp_path: Path) -> None:
    catalog = load({**catalog_properties(tmp_path), "s3.access-key-id": "k"})
    found = file_properties(catalog.properties)
    assert found["s3.access-key-id"] == "k"
    assert "uri" not in found


def _make_namespace(directory: str, number: int) -> None:
    load(catalog_properties(Path(directory))).create_namespace(f"ns{number}")


def test_processes_may_open_a_new_catalog_at_the_same_moment(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_make_namespace, args=(str(tmp_path), number)) for number in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    found = load(catalog_properties(tmp_path)).list_namespaces()
    assert sorted(found) == [("ns0",), ("ns1",)]


def test_a_forked_process_gets_its_own_catalog(tmp_path: Path) -> None:
    properties = catalog_properties(tmp_path)
    load(properties).create_namespace("before")
    child = os.fork()
    if child == 0:
        try:
            load(properties).create_namespace("child")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert ("child",) in load(properties).list_namespaces()


def test_a_commit_waits_for_a_writer_that_holds_the_database(tmp_path: Path) -> None:
    catalog = load(catalog_properties(tmp_path))
    path = sqlite_path(catalog.properties["uri"])
    assert path is not None
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = Timer(0.2, lambda: other.execute("ROLLBACK"))
    release.start()
    catalog.create_namespace("shop")
    release.join()
    other.close()
    assert catalog.list_namespaces() == [("shop",)]
