"""The log keeps rows that the lake lacks; after retention a union read still has every row.

Segments of a kilobyte and a time to live of a millisecond, looked at every few milliseconds. That
retention has been at work is seen by a table without lake beside it, as in
`tests/end_to_end/test_lake_retention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.servers import WarmServer
from tests.tiering.support import LAKE, Driver, append, create_table, delete, upsert
from tests.tiering.test_round import KEYED
from tests.tiering.tiered_cluster import rows_of
from tests.waiting import eventually
from zufluss.client.sync.table import Table
from zufluss.testing.server import DevServer

SERVER = LAKE | {
    "log.segment.file-size": "1kb",
    "log.retention.check-interval": "5ms",
    "kv.snapshot.interval": "100ms",  # a changelog stays from its oldest snapshot on
    "kv.snapshot.num-retained": "1",
}
EXPIRES = {"table.log.ttl": "1ms"}
BATCHES, ROWS = 10, 20
COLUMNS = ["id", "name"]


class Aging:
    """A server that forgets at once, and the table of the test with what it must have."""

    def __init__(self, server: DevServer, keyed: bool) -> None:
        self.driver = Driver(server)
        self.admin = self.driver.admin
        self.keyed = keyed
        schema = KEYED if keyed else "id INT, name STRING"
        self.path = create_table(
            self.driver.connection, "aging", schema, bucket_count=2, properties=EXPIRES
        )
        self.wanted: list[tuple[int, str]] = []

    def write(self, start: int, label: str) -> None:
        """Many small batches, so that there are many segments."""
        for first in range(start, start + BATCHES * ROWS, ROWS):
            data = {"id": [*range(first, first + ROWS)], "name": [f"{label} {first}"] * ROWS}
            (upsert if self.keyed else append)(self.driver.connection, self.path, data)
            self._write(data)

    def _write(self, data: dict[str, list[Any]]) -> None:
        if self.keyed:
            self.wanted = [row for row in self.wanted if row[0] not in data["id"]]
        self.wanted += zip(data["id"], data["name"], strict=True)

    def delete(self, ids: list[int]) -> None:
        delete(self.driver.connection, self.path, {"id": ids})
        self.wanted = [row for row in self.wanted if row[0] not in ids]

    def looked(self) -> None:
        """Wait until retention has looked at everything that was there before."""
        path = "fluss.without_lake"
        self.admin.create_table(path, "id INT, name STRING", bucket_count=1, properties=EXPIRES)
        for start in range(BATCHES):
            append(self.driver.connection, path, {"id": [start], "name": ["x" * 200]})
        eventually(lambda: set(self.begins(path)) == {BATCHES})
        self.admin.drop_table(path)

    def begins(self, path: str | None = None) -> list[int]:
        """The first offsets that the log still has."""
        return [*self.admin.list_all_offsets(path or self.path, "earliest").values()]

    def ends(self) -> list[int]:
        return [*self.admin.list_all_offsets(self.path).values()]

    def check(self) -> None:
        """A union read has every row, once."""
        found = self.table.scan(source="union").to_arrow()
        assert rows_of(found, COLUMNS) == sorted((repr(i), repr(n)) for i, n in self.wanted)

    @property
    def table(self) -> Table:
        return self.driver.connection.table(self.path)


@contextmanager
def aging(server: DevServer, keyed: bool) -> Iterator[Aging]:
    made = Aging(server, keyed)
    try:
        yield made
    finally:
        made.driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [False, True], ids=["log", "primary key"])
def test_the_log_waits_for_tiering_and_a_union_read_has_what_left_it(
    tmp_path: Path, keyed: bool
) -> None:
    with WarmServer(tmp_path, SERVER) as server, aging(server, keyed) as cluster:
        cluster.write(0, "first")
        cluster.looked()
        assert cluster.begins() == [0, 0], "nothing was tiered"
        cluster.check()

        cluster.driver.round()
        eventually(lambda: cluster.begins() == cluster.ends())
        cluster.check()

        cluster.write(100, "second")
        if keyed:
            cluster.delete([5, 150, 299])
        cluster.looked()
        tiered = cluster.admin.lake_snapshot(cluster.path)
        assert all(
            begin <= tiered.offsets[bucket]
            for bucket, begin in cluster.admin.list_all_offsets(cluster.path, "earliest").items()
        ), "what came after the round is still there"
        cluster.check()

        cluster.driver.round()
        eventually(lambda: cluster.begins() == cluster.ends())
        cluster.check()
        server.kill()
        server.start()
        cluster.check()
