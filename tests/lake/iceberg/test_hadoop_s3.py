"""The catalog of type hadoop in a bucket: commits are conditional PUTs."""

from __future__ import annotations

import functools
import uuid

import pyarrow as pa
import pytest
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceNotEmptyError,
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
)
from tests.lake.iceberg.hadoop_writer import TABLE, commit
from zufluss.lake.base import LakeError
from zufluss.lake.iceberg.catalog import load
from zufluss.lake.iceberg.hadoop import HadoopCatalog
from zufluss.remote.errors import LocationUnavailableError
from zufluss.testing.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server


@pytest.fixture
def s3(s3_server: S3Server) -> dict[str, str]:
    """Properties of a catalog in a bucket of its own, spelled as pyiceberg does."""
    bucket = s3_server.bucket(f"lake-{uuid.uuid4()}")
    return {
        "warehouse": f"{bucket}/w",
        "s3.endpoint": s3_server.endpoint,
        "s3.region": REGION,
        "s3.access-key-id": ACCESS_KEY,
        "s3.secret-access-key": SECRET_KEY,
    }


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_a_bucket_is_a_warehouse(scheme: str, s3: dict[str, str]) -> None:
    s3["warehouse"] = s3["warehouse"].replace("s3:", f"{scheme}:")
    catalog = load({"type": "hadoop", **s3})
    assert catalog.list_namespaces() == []
    catalog.create_namespace("db")
    table = catalog.create_table(TABLE, SCHEMA)
    table.append(pa.table({"a": [1]}))
    other = opened(**s3)
    assert (other.list_namespaces(), other.list_tables("db")) == ([("db",)], [("db", "t")])
    assert values(other.load_table(TABLE)) == [1]
    newest = f"{s3['warehouse']}/db/t/metadata/v2.metadata.json"
    assert other.load_table(TABLE).metadata_location == newest
    with pytest.raises(NamespaceNotEmptyError):
        other.drop_namespace("db")
    other.drop_table(TABLE)
    assert catalog.list_namespaces() == []


def test_processes_that_commit_to_a_bucket_lose_no_commit(s3: dict[str, str]) -> None:
    catalog = opened(**s3)
    catalog.create_table(TABLE, SCHEMA)
    settings = {key: value for key, value in s3.items() if key != "warehouse"}
    writers = [started(s3["warehouse"], f"w{n}", 8, **settings) for n in range(2)]
    printed = [writer.communicate()[1].decode() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], printed
    found = catalog.load_table(TABLE)
    keys = {f"{name}-{n}" for name in ("w0", "w1") for n in range(8)}
    assert keys <= set(found.properties)
    assert found.metadata_location.endswith("/v17.metadata.json")


@pytest.fixture
def bucket(s3: dict[str, str]) -> tuple[HadoopCatalog, Table]:
    catalog = opened(**s3)
    return catalog, catalog.create_table(TABLE, SCHEMA)


def lost_answer(catalog: HadoopCatalog, monkeypatch: pytest.MonkeyPatch, arrives: bool) -> None:
    """The next version is put, or not, and then nobody answers."""
    directory = catalog._files._directory  # type: ignore[attr-defined]
    put = directory.put

    async def lost(path: str, data: bytes, if_absent: bool) -> None:
        monkeypatch.setattr(directory, "put", put)
        if arrives:
            await put(path, data, if_absent)
        raise LocationUnavailableError(directory.uri.text, path, "no answer")

    monkeypatch.setattr(directory, "put", lost)


def test_a_store_that_ignores_the_condition_is_refused(
    bucket: tuple[HadoopCatalog, Table], s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commits of one version would both succeed there, and one of them would be lost."""
    catalog = opened(**s3)
    directory = catalog._files._directory  # type: ignore[attr-defined]
    put = directory.put
    monkeypatch.setattr(directory, "put", lambda path, data, if_absent: put(path, data, False))
    table = catalog.load_table(TABLE)
    files = catalog._files.names("db/t/metadata", "")
    with pytest.raises(BadRequestError, match="in spite of If-None-Match"):
        set_property(table)
    with pytest.raises(LakeError, match="was not applied: BadRequestError"):
        add_snapshot(table)
    assert [name for name in catalog._files.names("db/t/metadata", "") if "json" in name] == [
        name for name in files if "json" in name
    ]


def test_a_commit_whose_answer_was_lost_counts_once(
    bucket: tuple[HadoopCatalog, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, table = bucket
    lost_answer(catalog, monkeypatch, arrives=True)
    ours = add_snapshot(table)
    assert history(catalog) == [ours]


def test_a_commit_that_may_still_arrive_is_of_unknown_outcome(
    bucket: tuple[HadoopCatalog, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, table = bucket
    lost_answer(catalog, monkeypatch, arrives=False)
    with pytest.raises(CommitStateUnknownException, match="may still appear"):
        set_property(table)


def test_a_commit_that_cannot_be_looked_at_is_of_unknown_outcome(
    bucket: tuple[HadoopCatalog, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, table = bucket

    def unreachable(directory: str, after: str) -> list[str]:
        raise LocationUnavailableError(catalog.properties["warehouse"], directory, "no answer")

    look = functools.partial(monkeypatch.setattr, catalog._files, "names", unreachable)
    interfere(catalog, monkeypatch, look, after=True)
    with pytest.raises(CommitStateUnknownException, match=r"cannot be read: .* no answer"):
        set_property(table)


def test_a_commit_that_another_writer_overtook_is_a_conflict_though_its_answer_was_lost(
    bucket: tuple[HadoopCatalog, Table], s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, table = bucket
    lost_answer(catalog, monkeypatch, arrives=False)
    interfere(catalog, monkeypatch, lambda: commit(opened(**s3), "theirs"))
    with pytest.raises(CommitFailedException):
        set_property(table)
    assert "theirs" in catalog.load_table(TABLE).properties
