"""The catalog of directories: its layout, its races, its crashes."""

from __future__ import annotations

import errno
import functools
import gzip
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table

from tests.lake.iceberg.hadoop_tables import (
    SCHEMA,
    add_snapshot,
    history,
    interfere,
    opened,
    set_property,
    started,
    values,
    versions,
)
from tests.lake.iceberg.hadoop_writer import STEPS, TABLE, commit
from tests.lake.readers import duckdb_rows
from zufluss import system
from zufluss.errors import ConfigError
from zufluss.lake.base import LakeCommitUnknownError, LakeError
from zufluss.lake.iceberg import hadoop
from zufluss.lake.iceberg.catalog import load
from zufluss.lake.iceberg.hadoop import HadoopCatalog
from zufluss.lake.iceberg.orphans import sweep

ONE_OLD = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "1",
}
"""A table that keeps one version behind the newest."""


@pytest.fixture
def catalog(tmp_path: Path) -> HadoopCatalog:
    return opened(f"file://{tmp_path}/w")


@pytest.fixture
def table(catalog: HadoopCatalog) -> Table:
    return catalog.create_table(TABLE, SCHEMA)


@pytest.fixture
def metadata(table: Table, tmp_path: Path) -> Path:
    """The directory of the table's versions."""
    return tmp_path / "w/db/t/metadata"


# -- layout --------------------------------------------------------------------------------------


def test_versions_lie_where_the_iceberg_runtime_looks_for_them(
    table: Table, metadata: Path
) -> None:
    table.append(pa.table({"a": [1]}))
    assert versions(metadata) == ["v1.metadata.json", "v2.metadata.json", "version-hint.text"]
    assert (metadata / "version-hint.text").read_text() == "2"
    assert table.metadata_location == f"file://{metadata}/v2.metadata.json"
    assert table.location() == f"file://{metadata.parent}"
    log = [entry.metadata_file for entry in table.metadata.metadata_log]
    assert log == [f"file://{metadata}/v1.metadata.json"]


def test_duckdb_reads_the_directory_of_a_table_by_its_hint(table: Table, metadata: Path) -> None:
    table.append(pa.table({"a": [1, 2]}))
    rows = duckdb_rows(str(metadata.parent), "SELECT sum(a) AS total FROM lake")
    assert rows.to_pylist() == [{"total": 3}]


def test_namespaces_are_directories_and_directories_with_versions_are_tables(
    catalog: HadoopCatalog, tmp_path: Path
) -> None:
    assert catalog.list_namespaces() == []
    catalog.create_namespace("db")
    assert (tmp_path / "w/db").is_dir()
    assert (catalog.list_namespaces(), catalog.list_tables("db")) == ([("db",)], [])
    with pytest.raises(NamespaceAlreadyExistsError):
        catalog.create_namespace("db")
    catalog.create_table(TABLE, SCHEMA)
    catalog.create_namespace(("db", "inner"))
    assert catalog.list_tables("db") == [("db", "t")]
    assert catalog.list_namespaces("db") == [("db", "inner")]
    assert catalog.load_namespace_properties("db") == {"location": f"file://{tmp_path}/w/db"}
    assert catalog.table_exists(TABLE)
    assert not catalog.namespace_exists(TABLE)
    with pytest.raises(NamespaceNotEmptyError):
        catalog.drop_namespace("db")
    catalog.drop_namespace(("db", "inner"))
    catalog.drop_table(TABLE)
    catalog.drop_namespace("db")
    assert catalog.list_namespaces() == []
    with pytest.raises(NoSuchNamespaceError):
        catalog.list_tables("db")


def test_dropping_a_table_removes_its_directory(
    catalog: HadoopCatalog, table: Table, metadata: Path
) -> None:
    table.append(pa.table({"a": [1]}))
    catalog.drop_table(TABLE)
    assert not metadata.parent.exists()
    with pytest.raises(NoSuchTableError):
        catalog.load_table(TABLE)
    with pytest.raises(NoSuchTableError):
        catalog.drop_table(TABLE)


def test_a_table_that_is_created_again_is_not_taken_for_the_old_one(
    catalog: HadoopCatalog, table: Table
) -> None:
    catalog.drop_table(TABLE)
    again = catalog.create_table(TABLE, pa.schema([("b", pa.string())]))
    assert again.metadata.table_uuid != table.metadata.table_uuid
    assert catalog.load_table(TABLE).schema().column_names == ["b"]


def test_what_such_a_catalog_cannot_do_is_refused(
    catalog: HadoopCatalog, table: Table, tmp_path: Path
) -> None:
    with pytest.raises(NotImplementedError, match="cannot rename tables"):
        catalog.rename_table(TABLE, "db.other")
    with pytest.raises(NotImplementedError, match="properties of namespaces"):
        catalog.create_namespace("other", {"owner": "me"})
    with pytest.raises(BadRequestError, match="lies where its name says"):
        catalog.create_table("db.u", SCHEMA, location=f"file://{tmp_path}/elsewhere")
    with pytest.raises(BadRequestError, match=r"remove the property write\.metadata\.path"):
        catalog.create_table("db.u", SCHEMA, properties={"write.metadata.path": "/m"})
    with pytest.raises(TableAlreadyExistsError):
        catalog.create_table(TABLE, SCHEMA)
    with pytest.raises(NoSuchTableError, match="cannot be a name"):
        catalog.load_table(("db", "../t"))


def test_a_transaction_creates_a_table_with_its_first_rows(catalog: HadoopCatalog) -> None:
    with catalog.create_table_transaction(TABLE, SCHEMA) as transaction:
        transaction.append(pa.table({"a": [1]}))
    assert values(catalog.load_table(TABLE)) == [1]


def test_pyiceberg_opens_the_catalog_by_its_class(table: Table, tmp_path: Path) -> None:
    implementation = f"{HadoopCatalog.__module__}.{HadoopCatalog.__name__}"
    given = {"py-catalog-impl": implementation, "warehouse": f"{tmp_path}/w"}
    assert load_catalog("mine", **given).list_tables("db") == [("db", "t")]


@pytest.mark.parametrize("end", ["gz.metadata.json", "metadata.json.gz"])
def test_compressed_versions_of_the_iceberg_runtime_are_read(
    end: str, catalog: HadoopCatalog, table: Table, metadata: Path
) -> None:
    plain = metadata / "v1.metadata.json"
    (metadata / f"v1.{end}").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    found = opened(catalog.properties["warehouse"]).load_table(TABLE)
    assert found.metadata_location.endswith(f"/v1.{end}")
    found.append(pa.table({"a": [1]}))
    assert values(catalog.load_table(TABLE)) == [1]


def test_versions_are_compressed_if_the_table_says_so(
    catalog: HadoopCatalog, table: Table, metadata: Path
) -> None:
    with table.transaction() as transaction:
        transaction.set_properties({"write.metadata.compression-codec": "gzip"})
    packed = metadata / "v2.gz.metadata.json"
    assert json.loads(gzip.decompress(packed.read_bytes()))["location"] == table.location()
    assert catalog.load_table(TABLE).metadata_location == f"file://{packed}"


def test_versions_are_numbers_and_not_texts(catalog: HadoopCatalog, table: Table) -> None:
    for number in range(11):
        commit(catalog, f"p-{number}")
    assert catalog.load_table(TABLE).metadata_location.endswith("/v12.metadata.json")


# -- the hint ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hint", [None, "1", "99", "not a number", ""])
def test_a_hint_that_is_wrong_does_no_harm(
    hint: str | None, catalog: HadoopCatalog, table: Table, metadata: Path
) -> None:
    table.append(pa.table({"a": [1]}))
    path = metadata / "version-hint.text"
    path.unlink()
    if hint is not None:
        path.write_text(hint)
    found = catalog.load_table(TABLE)
    assert values(found) == [1]
    found.append(pa.table({"a": [2]}))
    assert path.read_text() == "3", "the next commit mends it"


def test_a_hint_that_cannot_be_written_fails_no_commit(
    catalog: HadoopCatalog, table: Table, metadata: Path
) -> None:
    (metadata / "version-hint.text").unlink()
    (metadata / "version-hint.text").mkdir()
    table.append(pa.table({"a": [1]}))
    assert values(catalog.load_table(TABLE)) == [1]


def test_the_checksum_of_an_older_hint_goes_with_it(
    catalog: HadoopCatalog, table: Table, metadata: Path
) -> None:
    """Hadoop's local file system would refuse the new hint as damaged."""
    checksum = metadata / ".version-hint.text.crc"
    checksum.write_bytes(b"crc")
    commit(catalog, "p")
    assert not checksum.exists()


# -- races ---------------------------------------------------------------------------------------


def test_processes_that_commit_at_the_same_time_lose_no_commit(
    catalog: HadoopCatalog, table: Table, metadata: Path
) -> None:
    writers = [started(catalog.properties["warehouse"], f"w{n}", 30) for n in range(2)]
    for number in range(30):
        commit(catalog, f"here-{number}")
    assert [writer.wait() for writer in writers] == [0, 0]
    keys = {f"{name}-{n}" for name in ("w0", "w1", "here") for n in range(30)}
    found = catalog.load_table(TABLE)
    assert {
        key for key in found.properties if key.rpartition("-")[0] in ("w0", "w1", "here")
    } == keys
    assert found.metadata_location.endswith(f"/v{1 + len(keys)}.metadata.json"), "each once"


def test_writers_that_create_the_same_table_agree_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (opened(f"{tmp_path}/w") for _ in range(2))
    interfere(first, monkeypatch, lambda: second.create_table(TABLE, SCHEMA))
    with pytest.raises(TableAlreadyExistsError, match="by another writer meanwhile"):
        first.create_table(TABLE, SCHEMA)


def test_a_commit_that_lost_changes_nothing_and_can_be_repeated(
    catalog: HadoopCatalog, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = opened(catalog.properties["warehouse"])
    interfere(catalog, monkeypatch, lambda: commit(other, "theirs"))
    with pytest.raises(CommitFailedException, match=r"Version 2 of db\.t was created by another"):
        set_property(table)
    assert commit(catalog, "ours") == 0
    assert {"ours", "theirs"} <= set(catalog.load_table(TABLE).properties)


def test_a_writer_that_slept_while_its_version_came_and_went_commits_behind_the_others(
    catalog: HadoopCatalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its version's name is free again; what it creates there would be in nobody's history."""
    table = catalog.create_table(TABLE, SCHEMA, properties=ONE_OLD)
    other = opened(catalog.properties["warehouse"])
    theirs: list[int] = []

    def others() -> None:
        theirs.extend(add_snapshot(other.load_table(TABLE)) for _ in range(4))

    interfere(catalog, monkeypatch, others)
    ours = add_snapshot(table)
    assert history(catalog) == [*theirs, ours]
    names = versions(tmp_path / "w/db/t/metadata")
    assert names == ["v5.metadata.json", "v6.metadata.json", "version-hint.text"]


def test_such_a_writer_without_snapshots_learns_that_the_outcome_is_unknown(
    catalog: HadoopCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = catalog.create_table(TABLE, SCHEMA, properties=ONE_OLD)
    other = opened(catalog.properties["warehouse"])
    interfere(catalog, monkeypatch, lambda: [commit(other, f"theirs-{n}") for n in range(4)])
    with pytest.raises(CommitStateUnknownException, match="later versions do not name it"):
        set_property(table)
    assert "ours" not in catalog.load_table(TABLE).properties


def test_commits_behind_a_new_version_do_not_make_it_doubtful(
    catalog: HadoopCatalog, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = opened(catalog.properties["warehouse"])
    theirs: list[int] = []

    def later() -> None:
        theirs.append(add_snapshot(other.load_table(TABLE)))

    interfere(catalog, monkeypatch, later, after=True)
    ours = add_snapshot(table)
    assert history(catalog) == [ours, *theirs]


def test_a_base_that_went_as_an_old_version_during_the_look_is_no_drop(
    catalog: HadoopCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = catalog.create_table(TABLE, SCHEMA, properties=ONE_OLD)
    other = opened(catalog.properties["warehouse"])
    names = catalog._files.names

    def overtaken(directory: str, after: str) -> list[str]:
        found = names(directory, after)
        monkeypatch.setattr(catalog._files, "names", names)
        commit(other, "theirs")
        return found

    look = functools.partial(monkeypatch.setattr, catalog._files, "names", overtaken)
    interfere(catalog, monkeypatch, look, after=True)
    set_property(table)
    assert {"ours", "theirs"} <= set(catalog.load_table(TABLE).properties)


def test_a_version_that_a_rename_replaced_is_noticed(
    catalog: HadoopCatalog, table: Table, metadata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Iceberg runtime looks whether a name is free and then renames, which replaces."""
    aside = Path(shutil.copytree(metadata.parents[2], metadata.parents[2].with_name("aside")))
    theirs = add_snapshot(opened(f"file://{aside}").load_table(TABLE))
    made = aside / "db/t/metadata/v2.metadata.json"
    interfere(catalog, monkeypatch, lambda: made.rename(metadata / "v2.metadata.json"), after=True)
    ours = add_snapshot(table)
    assert history(catalog) == [theirs, ours]


def test_a_table_that_was_dropped_meanwhile_is_not_revived(
    catalog: HadoopCatalog, table: Table, metadata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = opened(catalog.properties["warehouse"])
    interfere(catalog, monkeypatch, lambda: other.drop_table(TABLE))
    with pytest.raises(LakeError, match="was dropped while a round committed to it"):
        add_snapshot(table)
    assert not metadata.exists()


def test_a_table_that_was_created_again_meanwhile_gets_nothing_of_the_old_one(
    catalog: HadoopCatalog, table: Table, metadata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = opened(catalog.properties["warehouse"])

    def again() -> None:
        other.drop_table(TABLE)
        other.create_table(TABLE, SCHEMA)

    interfere(catalog, monkeypatch, again)
    with pytest.raises(CommitFailedException, match=r"another writer, or db\.t was dropped"):
        set_property(table)
    assert versions(metadata) == ["v1.metadata.json", "version-hint.text"]


def test_two_compressions_of_one_version_do_not_both_count(
    catalog: HadoopCatalog, table: Table, metadata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = metadata / "v2.gz.metadata.json"
    content = gzip.compress((metadata / "v1.metadata.json").read_bytes())
    interfere(catalog, monkeypatch, lambda: packed.write_bytes(content))
    with pytest.raises(CommitFailedException):
        set_property(table)
    assert catalog.load_table(TABLE).metadata_location == f"file://{packed}"


def test_a_file_that_is_no_metadata_is_named(
    catalog: HadoopCatalog, table: Table, metadata: Path
) -> None:
    (metadata / "v2.metadata.json").write_text("{")
    with pytest.raises(LakeError, match=r"v2\.metadata\.json is not the metadata of an Iceberg"):
        catalog.load_table(TABLE)


def test_a_file_system_without_hard_links_is_refused(
    catalog: HadoopCatalog, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(LakeError, match="needs hard links on this file system"):
        set_property(table)
    assert "ours" not in catalog.load_table(TABLE).properties


# -- disks that fail -------------------------------------------------------------------------------


def broken_sync(monkeypatch: pytest.MonkeyPatch, metadata: Path, times: int) -> list[str]:
    """The first syncs of the directory with version 2 fail; returns what came of each."""
    syncs: list[str] = []
    sync = system.sync_names

    def sync_or_fail(fd: int) -> None:
        is_there = (metadata / "v2.metadata.json").exists()
        if is_there and os.fstat(fd).st_ino == metadata.stat().st_ino:
            syncs.append("failed" if len(syncs) < times else "done")
            if syncs[-1] == "failed":
                raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    monkeypatch.setattr(system, "sync_names", sync_or_fail)
    return syncs


def test_a_version_whose_name_could_not_be_synced_is_synced_before_the_commit_counts(
    catalog: HadoopCatalog, table: Table, metadata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = broken_sync(monkeypatch, metadata, 1)
    ours = add_snapshot(table)
    assert history(catalog) == [ours]
    assert syncs == ["failed", "done"]


def test_a_commit_that_cannot_be_made_durable_does_not_count_and_loses_no_file(
    catalog: HadoopCatalog, table: Table, metadata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_sync(monkeypatch, metadata, 1000)
    with pytest.raises(
        LakeCommitUnknownError, match=r"cannot be made durable: .*Input/output error"
    ):
        add_snapshot(table)
    (snapshot,) = catalog.load_table(TABLE).snapshots()
    assert Path(snapshot.manifest_list.removeprefix("file://")).exists()


# -- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_that_is_killed_leaves_the_old_version_or_the_new_one(
    step: str, catalog: HadoopCatalog, table: Table, metadata: Path
) -> None:
    table.append(pa.table({"a": [1]}))
    writer = started(catalog.properties["warehouse"], "killed", 1, die=step)
    assert writer.wait() == -signal.SIGKILL
    applied = step in ("after the link", "before the hint")
    found = catalog.load_table(TABLE)
    assert ("killed-0" in found.properties) == applied
    assert found.metadata_location.endswith("/v3.metadata.json" if applied else "/v2.metadata.json")
    found.append(pa.table({"a": [2]}))
    later = time.time_ns() // 1_000_000 + 60_000
    left = [path for path in metadata.glob("*.metadata.json") if not path.name.startswith("v")]
    assert sweep(catalog.load_table(TABLE), later).removed == len(left)
    assert [path for path in left if path.exists()] == []
    assert values(catalog.load_table(TABLE)) == [1, 2]


def test_the_sweep_keeps_versions_and_hint_and_removes_hints_that_were_being_written(
    catalog: HadoopCatalog, table: Table, metadata: Path
) -> None:
    table.append(pa.table({"a": [1]}))
    (metadata / f"{uuid.uuid4()}-version-hint.temp").write_text("2")
    before = versions(metadata)
    assert sweep(table, time.time_ns() // 1_000_000 + 60_000).removed == 1
    assert versions(metadata) == before


# -- configuration and limits --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, r"needs datalake\.iceberg\.warehouse"),
        ({"warehouse": "hdfs://name/w"}, r"hdfs://name/w; .* a directory .* or S3"),
        ({"warehouse": "gs://bucket/w"}, "use a catalog of type rest or sql"),
        ({"warehouse": "relative/w"}, "a directory .* or S3"),
        ({"warehouse": "/"}, "must name a directory below"),
    ],
)
def test_a_warehouse_that_cannot_be_used_is_refused(given: Mapping[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load({"type": "hadoop", **given})


def test_fluss_names_the_catalog_by_its_class(tmp_path: Path) -> None:
    given = {"catalog-impl": "org.apache.iceberg.hadoop.HadoopCatalog", "warehouse": f"{tmp_path}"}
    assert isinstance(load(given), HadoopCatalog)
    with pytest.raises(ConfigError, match="needs the property warehouse"):
        HadoopCatalog("mine")


def test_versions_that_vanish_before_they_are_read_end_in_an_error(
    catalog: HadoopCatalog, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def gone(path: str) -> bytes:
        reads.append(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(catalog._files, "read", gone)
    with pytest.raises(LakeError, match="disappear before they can be read"):
        catalog.load_table(TABLE)
    assert len(reads) == hadoop.READS_MAX
