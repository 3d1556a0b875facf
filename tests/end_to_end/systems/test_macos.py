"""Servers run on macOS: shown with real processes from which everything was taken that only Linux has.

Nobody has run these tests on a Mac. `macos/sitecustomize.py` says what such a process sees.
"""  # noqa: E501

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import zufluss
from tests.servers import WarmServer
from zufluss.errors import ZuflussError
from zufluss.testing.server import DevServer

MACOS = Path(__file__).parent / "macos"
FULL_SYNC = "F_FULLFSYNC "


class MacServer(DevServer):
    """`zufluss dev` as on macOS."""

    def __init__(self, directory: Path) -> None:
        self.syncs = directory / "syncs"
        self.syncs.touch()
        environ = {
            "PYTHONPATH": os.pathsep.join([str(MACOS), os.environ.get("PYTHONPATH", "")]),
            "MACOS_SYNCS": str(self.syncs),
        }
        super().__init__(directory / "data", environ=environ)

    def synced(self) -> list[str]:
        """What was synced so far, as lines of a call and a path."""
        return self.syncs.read_text().splitlines()

    def fail_syncs(self, failing: bool) -> None:
        """Let every sync fail, or work again."""
        flag = self.syncs.with_name(f"{self.syncs.name}.fail")
        flag.touch() if failing else flag.unlink()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MacServer]:
    with MacServer(tmp_path) as server:
        yield server


def test_acknowledged_rows_are_on_the_medium_and_survive_a_kill(server: MacServer) -> None:
    rows = {"id": list(range(100)), "name": [f"n{i}" for i in range(100)]}
    with zufluss.connect(server.bootstrap) as connection:
        admin = connection.admin
        admin.create_table("fluss.events", "id INT, name STRING", bucket_count=1)
        admin.create_table("fluss.users", "id INT, name STRING, PRIMARY KEY (id)", bucket_count=1)
        before = len(server.synced())
        with connection.table("fluss.events").append() as writer:
            writer.write(rows)
        acknowledged = server.synced()
        assert any(line.startswith(FULL_SYNC) for line in acknowledged[before:])
        with connection.table("fluss.users").upsert() as writer:
            writer.write(rows)
        assert len(server.synced()) > len(acknowledged)
    server.kill()
    server.start()
    with zufluss.connect(server.bootstrap) as connection:
        events, users = connection.table("fluss.events"), connection.table("fluss.users")
        assert events.scan(stop="latest").to_arrow().to_pydict() == rows
        assert users.lookup(7) == {"id": 7, "name": "n7"}
        state = users.scan().to_arrow()  # through the flush process and a scan process
        assert state.sort_by("id").to_pydict() == rows
        findings = {f.subject: f.text for f in connection.admin.examine_servers()}
    assert " of 512 open files" in findings["descriptors"]
    assert not findings["descriptors"].startswith("0 ")
    assert server.stop() == 0
    assert [line for line in server.synced() if not line.startswith(FULL_SYNC)] == []


def test_the_start_names_everything_that_is_slower_in_one_line(server: MacServer) -> None:
    lines = [line for line in server.output if "slower_on_this_system" in line]
    assert len(lines) == 1
    for feature in ("reads that never wait", "reserved disk blocks", "huge pages", "large pipes"):
        assert feature in lines[0]


def test_a_write_is_not_acknowledged_when_the_full_sync_fails(server: MacServer) -> None:
    """What would be acknowledged after an `fsync` only could be lost with the drive's cache."""
    with zufluss.connect(server.bootstrap, **{"client.writer.retries": "0"}) as connection:
        connection.admin.create_table("fluss.events", "id INT", bucket_count=1)
        writer = connection.table("fluss.events").append()
        server.fail_syncs(True)
        writer.write({"id": [1]})
        with pytest.raises(ZuflussError, match="drive failed"):
            writer.flush()
        server.fail_syncs(False)


def test_databases_that_share_a_directory_keep_their_rows(tmp_path: Path) -> None:
    """The file systems of macOS have one directory for `shop` and `Shop`, with the first's name."""
    rows = {"id": [1, 2], "name": ["a", "b"]}
    (tmp_path / "Shop").mkdir()
    (tmp_path / "shop").symlink_to("Shop")  # opened by both names, listed by one, as there
    paths = [f"{database}.{table}" for database in ("Shop", "shop") for table in ("log", "users")]
    with WarmServer(tmp_path) as server:
        with zufluss.connect(server.bootstrap) as connection:
            for path in paths:
                key = ", PRIMARY KEY (id)" if path.endswith("users") else ""
                connection.admin.create_database(path.partition(".")[0], ignore_if_exists=True)
                connection.admin.create_table(path, f"id INT, name STRING{key}", bucket_count=1)
                table = connection.table(path)
                with table.upsert() if key else table.append() as writer:
                    writer.write(rows)
        assert server.stop() == 0
        server.start()
        with zufluss.connect(server.bootstrap) as connection:
            for path in paths:
                table = connection.table(path)
                scan = table.scan() if path.endswith("users") else table.scan(stop="latest")
                assert scan.to_arrow().sort_by("id").to_pydict() == rows
        assert "removed" not in server.log()
