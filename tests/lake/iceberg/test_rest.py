"""A REST catalog over real HTTP: lost lines and bad statuses end as done, refused or unknown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lake.iceberg.rest_catalog import RestServer, rest_server
from tests.lake.iceberg.tables import (
    catalog_properties,
    commit_ids,
    ids_in_lake,
    table_info,
    write_round,
)
from zufluss.lake.base import (
    CommitterContext,
    LakeCommitRefusedError,
    LakeCommitUnknownError,
    LakeError,
)
from zufluss.lake.iceberg.catalog import load
from zufluss.lake.iceberg.committer import IcebergCommitter
from zufluss.model.table import TableInfo


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestServer]:
    """A REST catalog in front of the test's SQLite catalog."""
    with rest_server(load(catalog_properties(tmp_path))) as found:
        yield found


def prepared(server: RestServer, table: TableInfo) -> IcebergCommitter:
    """A committer that reaches the table through the server."""
    made = IcebergCommitter(CommitterContext(table, {"type": "rest", "uri": server.uri}))
    made.prepare_table()
    return made


def test_rounds_become_snapshots_through_a_rest_catalog(tmp_path: Path, server: RestServer) -> None:
    table = table_info(primary_key=["id"])
    made = prepared(server, table)
    expected = None
    for number in range(3):
        committable = made.to_committable([write_round(made, [number])])
        expected = made.commit(committable, {"zufluss.round": str(number)}, expected).snapshot_id
    newest = prepared(server, table).newest()
    assert newest is not None
    assert (newest.snapshot_id, newest.properties["zufluss.round"]) == (expected, "2")
    assert ids_in_lake(tmp_path, table) == [0, 1, 2]


@pytest.mark.parametrize("fault", ["lost-answer", "+500", "+502", "+503", "+504", "+409"])
def test_an_applied_commit_is_found_whatever_was_answered(
    tmp_path: Path, server: RestServer, fault: str
) -> None:
    table = table_info()
    made = prepared(server, table)
    committable = made.to_committable([write_round(made, [1])])
    server.faults = [fault]
    done = made.commit(committable, {}, None)
    newest = made.newest()
    assert newest is not None
    assert newest.snapshot_id == done.snapshot_id
    assert ids_in_lake(tmp_path, table) == [1]


@pytest.mark.parametrize("fault", ["lost-request", "500", "502", "503", "504"])
def test_a_commit_that_may_still_arrive_is_unknown(server: RestServer, fault: str) -> None:
    made = prepared(server, table_info())
    committable = made.to_committable([write_round(made, [1])])
    server.faults = [fault]
    with pytest.raises(LakeCommitUnknownError):
        made.commit(committable, {}, None)
    assert made.newest() is None


def test_a_storm_of_409_ends_with_one_snapshot(tmp_path: Path, server: RestServer) -> None:
    table = table_info()
    made = prepared(server, table)
    committable = made.to_committable([write_round(made, [1])])
    server.faults = ["409"] * 5
    made.commit(committable, {}, None)
    assert ids_in_lake(tmp_path, table) == [1]


@pytest.mark.parametrize("fault", ["400", "401", "403"])
def test_a_plain_no_is_a_definite_error(server: RestServer, fault: str) -> None:
    made = prepared(server, table_info())
    committable = made.to_committable([write_round(made, [1])])
    server.faults = [fault] * 2
    with pytest.raises(LakeError, match="was not applied") as caught:
        made.commit(committable, {}, None)
    assert not isinstance(caught.value, LakeCommitUnknownError)


def test_a_zombie_is_refused_through_a_rest_catalog(tmp_path: Path, server: RestServer) -> None:
    table = table_info()
    zombie, other = prepared(server, table), prepared(server, table)
    late = zombie.to_committable([write_round(zombie, [1])])
    other.commit(other.to_committable([write_round(other, [2])]), {}, None)
    with pytest.raises(LakeCommitRefusedError):
        zombie.commit(late, {}, None)
    assert ids_in_lake(tmp_path, table) == [2]


def test_a_table_created_anew_is_made_beside_the_old_one(server: RestServer) -> None:
    commit_ids(prepared(server, table_info()), [1])
    prepared(server, table_info(table_id=8, created=2000))
    assert sorted(server.catalog.list_tables("shop")) == [
        ("shop", "orders"),
        ("shop", "orders__7_1000"),
    ]


def test_a_catalog_that_is_not_there_is_a_lake_error() -> None:
    context = CommitterContext(table_info(), {"type": "rest", "uri": "http://127.0.0.1:1"})
    with pytest.raises(LakeError, match="cannot be opened"):
        IcebergCommitter(context)
