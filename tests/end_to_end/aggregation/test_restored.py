"""A server that lost its memory, its state, or its disk has the same rows, bit for bit.

The table has every function and has gone through an undo. Rows are compared as the bytes of a
lookup.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import zufluss
from tests.conftest import SERVERS
from tests.counts import rounds
from tests.end_to_end.aggregation.job import Work, job
from tests.end_to_end.aggregation.producers import Epoch
from tests.end_to_end.aggregation.recovery import (
    EVERY_FUNCTION,
    KEYS,
    create,
    lose_tables,
    put_plain,
    rows_of,
    without_crash,
    written,
)
from tests.end_to_end.kv import Codec, values_of
from tests.end_to_end.raw import RawClient
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.errors import ErrorCode

EVENTS = rounds(50, 400)
OFTEN = {"kv.snapshot.interval": "50ms", "log.segment.file-size": "4kb"}


@dataclass
class Place:
    """A server, a table with rows, and the bytes expected for every key."""

    server: WarmServer
    work: Work

    def values(self) -> list[bytes]:
        """The stored bytes of every key."""
        with zufluss.connect(self.server.bootstrap) as conn, RawClient(self.server.port) as raw:
            table = conn.table(self.work.table)
            codec = Codec(table.info.schema)
            width = len(table.info.schema.columns) - 1
            keys = [codec.key((k, *[None] * width)) for k in range(KEYS)]
            return values_of(raw, table.info.table_id, keys)

    def snapshot_offset(self, conn: Connection) -> int:
        """The offset of the newest snapshot."""
        snapshots = conn.admin.latest_kv_snapshots(self.work.table)
        return max((s.log_offset for s in snapshots), default=0)

    def until_snapshot(self) -> None:
        """Wait for a snapshot that contains everything."""
        with zufluss.connect(self.server.bootstrap) as conn:
            end = conn.admin.list_offsets(self.work.table)[0]
            eventually(lambda: self.snapshot_offset(conn) >= end, "a snapshot of everything")

    def write_more(self) -> None:
        """Write rows after the newest snapshot."""
        with zufluss.connect(self.server.bootstrap) as conn:
            conn.admin.drop_producer(self.work.table, "job")
            table = conn.table(self.work.table)
            for first in range(EVENTS, EVENTS + 20, 4):
                put_plain(table, written(table, self.work.seed, range(first, first + 4)))


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, rng: random.Random) -> Iterator[Place]:
    """A table that a job wrote to, was killed, and wrote to again."""
    remote = {"remote.data.dir": str(tmp_path / "remote")}
    server = WarmServer(tmp_path / "server", OFTEN | remote)
    known = request.config.stash.setdefault(SERVERS, [])
    known.append(server)
    with server:
        with zufluss.connect(server.bootstrap) as conn:
            table = create(conn, EVERY_FUNCTION, buckets=1)
        seed = rng.randrange(1 << 30)
        work = Work(server.bootstrap, str(table.path), tmp_path / "kept", seed, EVENTS)
        with job(work) as running:
            for _ in range(5):
                running.until("wrote")
        with job(work) as running:
            assert running.until("done") == "done"
        yield Place(server, work)
    known.remove(server)


def lose_nothing(server: WarmServer) -> None:
    """Kill the process; the disk stays."""


def lose_state(server: WarmServer) -> None:
    """Remove the key-value state; the changelog stays."""
    for path in server.data_dir.glob("fluss/*/kv-*"):
        shutil.rmtree(path)


@pytest.mark.parametrize("lose", [lose_nothing, lose_state])
def test_from_snapshot_and_changelog_every_aggregate_is_the_same_bit_for_bit(
    place: Place, lose: Callable[[WarmServer], None]
) -> None:
    place.until_snapshot()
    place.server.stop()
    place.server.properties["kv.snapshot.interval"] = "1h"
    place.server.start()
    place.write_more()
    before = place.values()
    place.server.kill()
    lose(place.server)
    place.server.start()
    assert place.values() == before
    assert any(before)
    with zufluss.connect(place.server.bootstrap) as conn:
        expected = without_crash(conn, place.work.seed, EVENTS + 20)
        assert rows_of(conn.table(place.work.table)) == expected


def test_from_snapshots_alone_after_the_disk_was_lost(place: Place) -> None:
    place.until_snapshot()
    before = place.values()
    place.server.kill()
    lose_tables(place.server)
    place.server.start()
    assert place.values() == before
    assert any(before)


def test_batches_that_were_acknowledged_before_the_disk_was_lost_are_known(
    place: Place,
) -> None:
    with zufluss.connect(place.server.bootstrap) as conn:
        table = create(conn, "page INT, views BIGINT SUM, PRIMARY KEY (page)", buckets=1)
        with RawClient(place.server.port) as raw:
            epoch = Epoch.begin(raw, table)
            for _ in range(3):
                assert epoch.put((1, 1)) is ErrorCode.NONE
        place.work = Work(place.server.bootstrap, str(table.path), Path(), 0, 0)
        place.until_snapshot()
        place.server.kill()
        lose_tables(place.server)
        place.server.start()
        with RawClient(place.server.port) as raw:
            epoch.raw = raw
            assert epoch.send((1, 1), sequence=2) is ErrorCode.NONE
            assert epoch.send((1, 1), sequence=0) is ErrorCode.NONE
            assert epoch.put((1, 1)) is ErrorCode.NONE
        assert rows_of(table) == [{"page": 1, "views": 4}]
