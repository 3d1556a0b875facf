"""`zufluss metadata`: a cluster moves from a directory to ZooKeeper and back, with all its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import zufluss
from tests.servers import WarmServer
from zufluss.testing.zookeeper import ZooKeeper

from .conftest import Result

Run = Callable[..., Result]


def _write(connection: zufluss.Connection, ids: range) -> None:
    with connection.table("events").append() as writer:
        writer.write({"id": list(ids), "day": [str(i % 2) for i in ids]})
    with connection.table("latest").upsert() as writer:
        writer.write({"id": list(ids), "n": list(ids)})


def _check(connection: zufluss.Connection, end: int) -> None:
    rows = connection.table("events").scan(stop="latest").to_arrow()["id"].to_pylist()
    assert sorted(rows) == list(range(end))
    latest = connection.table("latest")
    assert latest.count() == end
    assert latest.lookup(end - 1) == {"id": end - 1, "n": end - 1}
    changes = latest.changelog().to_arrow()["id"].to_pylist()
    assert sorted(changes) == list(range(end))


def _options(keys: dict[str, str]) -> list[str]:
    return [part for key, value in keys.items() for part in ("-D", f"{key}={value}")]


@pytest.mark.slow
def test_a_server_moves_its_metadata_to_zookeeper_and_back(run: Run, tmp_path: Path) -> None:
    data, first, second = tmp_path / "data", tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    in_directory = {"data.dir": str(data)}
    with WarmServer(data) as server:
        with zufluss.connect(server.bootstrap) as connection:
            admin = connection.admin
            admin.create_table("events", "id BIGINT, day STRING", partition_keys=["day"])
            for day in "01":
                admin.create_partition("events", {"day": day})
            admin.create_table("latest", "id BIGINT, n BIGINT", primary_key=["id"], bucket_count=3)
            _write(connection, range(100))
        refused = run("metadata", "dump", str(first), *_options(in_directory))
        assert refused.code == 1
        assert "is open in process" in refused.err
        assert server.stop() == 0
    dumped = run("metadata", "dump", str(first), *_options(in_directory))
    assert dumped.code == 0, dumped
    (data / "meta").rename(tmp_path / "former")

    with ZooKeeper(tmp_path / "ensemble", members=1) as ensemble:
        keys = {"zookeeper.address": ensemble.address, "zookeeper.path.root": "/moved"}
        restored = run("metadata", "restore", str(first), *_options(keys))
        assert restored.code == 0, restored
        assert f"in ZooKeeper {ensemble.address}, /moved" in restored.err
        with WarmServer(data, keys) as server:
            with zufluss.connect(server.bootstrap) as connection:
                _check(connection, 100)
                _write(connection, range(100, 150))
                connection.admin.create_table("later", "id BIGINT")
            again = run("metadata", "restore", str(first), *_options(keys))
            assert again.code == 1
            assert "not empty" in again.err
            assert server.stop() == 0
        assert run("metadata", "dump", str(second), *_options(keys)).code == 0

    assert run("metadata", "restore", str(second), *_options(in_directory)).code == 0
    with WarmServer(data) as server, zufluss.connect(server.bootstrap) as connection:
        _check(connection, 150)
        assert connection.admin.list_tables("fluss") == ["events", "later", "latest"]


def test_a_directory_without_metadata_is_not_dumped_and_not_touched(
    run: Run, tmp_path: Path
) -> None:
    result = run("metadata", "dump", str(tmp_path / "d.jsonl"), "-D", f"data.dir={tmp_path / 'x'}")
    assert result.code == 2
    assert "has no metadata" in result.err
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_no_dump_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"dump": 1}\n{"path": "/a", "text": "b"}\n')
    result = run("metadata", "restore", str(file), "-D", f"data.dir={tmp_path / 'data'}")
    assert result.code == 1
    assert "was cut" in result.err
    assert not (tmp_path / "data").exists()
