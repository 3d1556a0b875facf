"""Lost disks and damaged remote files: what is remote comes back, and no wrong byte is served.

A server is killed and the directories of its tables are removed; metadata and remote storage stay.
Everything below the last committed manifest or snapshot is restored. For damaged objects the server
answers with the right bytes from another copy, or with an error (A7). A bucket whose location is
down at the start is served as soon as the location is back, without a restart.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import zufluss
from tests.counts import rounds
from tests.end_to_end.raw import RawClient
from tests.fault import damage
from tests.fault.kv_load import RULES, SCHEMA, looked_up
from tests.fault.load import DATABASE
from tests.fault.remote_load import (
    BUSY,
    CLIENT,
    IN_S3,
    QUIET,
    TABLE,
    Locations,
    Traffic,
    check_locations,
    logs_of,
    remotes,
    settle,
)
from tests.kv.model import fold
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.errors import ZuflussError
from zufluss.model.table import TableBucket
from zufluss.testing.proxy import Fault, FaultProxy
from zufluss.testing.s3 import S3Server
from zufluss.testing.server import DevServer

ROWS = 400
HASTY = {"client.request-timeout": "300ms", "client.scanner.log.fetch.wait-max-time": "20ms"}
"""Client options with which a refused bucket soon raises an error."""


def lose_disk(server: DevServer) -> None:
    """Remove the directories of all tables."""
    shutil.rmtree(server.data_dir / DATABASE)


def _all_have_files(server: DevServer, traffic: Traffic) -> bool:
    """Whether every bucket can be restored: one that has nothing elsewhere is refused."""
    try:
        known = remotes(server, traffic.buckets)
    except sqlite3.DatabaseError:  # copied in the middle of a change
        return False
    logs, keyed = traffic.log.all_buckets, traffic.keyed.all_buckets
    return all(known[b].manifest for b in logs) and all(
        known[b].manifest or known[b].snapshots for b in keyed
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(rounds(1, 20)))
def test_after_a_lost_disk_everything_below_the_last_commit_is_there(
    warm_server: Callable[..., WarmServer],
    s3: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    rng: random.Random,
    part: int,
) -> None:
    locations = Locations(tmp_path, s3, proxy)
    server = warm_server(BUSY | locations.properties).start()
    with Traffic(server, rng) as traffic:
        traffic.progress(rng.choice((50, 200, 500)))
        eventually(lambda: _all_have_files(server, traffic), "every bucket has remote files")
        traffic.pause()
        with zufluss.connect(server.bootstrap, **CLIENT) as conn:
            logs = dict(logs_of(conn, traffic.log))
            changes = {b: traffic.changes(conn, b) for b in range(traffic.keyed.buckets)}
        server.kill()
    known = remotes(server, traffic.buckets)
    lose_disk(server)
    server.start()
    eventually(lambda: _served(server, traffic), "all buckets are served")
    with zufluss.connect(server.bootstrap, **CLIENT) as conn:
        for bucket, found in logs_of(conn, traffic.log):
            manifest = known[bucket].manifest
            assert found.end >= (0 if manifest is None else manifest.end_offset)
            assert found.keys.tolist() == logs[bucket].keys[: found.end].tolist()
    with RawClient(server.port) as client:
        for bucket in traffic.keyed.all_buckets:
            end = client.end_offset(bucket.table_id, bucket.bucket_id)
            record = known[bucket]
            assert end >= max((s.log_offset for s in record.snapshots), default=0)
            before = changes[bucket.bucket_id]
            state = fold([c for c in before if c.offset < end], RULES)
            assert looked_up(client, bucket, before) == state


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["kv-*", "*"] if rounds(0, 1) else ["*"])
def test_a_bucket_whose_location_is_down_at_the_start_is_served_when_it_is_back(
    warm_server: Callable[..., WarmServer],
    s3: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    rng: random.Random,
    lost: str,
) -> None:
    locations = Locations(tmp_path, s3, proxy)
    server = warm_server(BUSY | locations.properties).start()
    pinned = {"table.zufluss.remote.placement": f"pinned:{IN_S3}"}
    with Traffic(server, rng, pinned) as traffic:
        traffic.progress(200)
        traffic.pause()
        settle(traffic)
        server.kill()
        for path in server.data_dir.glob(f"{DATABASE}/keyed-{traffic.keyed.table_id}/{lost}"):
            shutil.rmtree(path)
        proxy.set([Fault("status_503")])
        server.start()
        assert "bucket_refused" in server.log()
        with zufluss.connect(server.bootstrap, **CLIENT) as conn:
            conn.admin.create_table(f"{DATABASE}.new", "id INT", bucket_count=1)
            with conn.table(f"{DATABASE}.new").append() as others_go_on:
                others_go_on.write({"id": [1]})
        proxy.set()
        eventually(lambda: _served(server, traffic), "all buckets are served")
        assert "bucket_opened_later" in server.log()
        check_state(server, traffic)
        if lost == "kv-*":
            traffic.check()
            traffic.resume()
            traffic.progress()
            traffic.pause()
            settle(traffic)
            traffic.check()
            check_locations(traffic, locations)
    server.kill()
    server.start()
    assert "bucket_refused" not in server.log().rpartition("catalog_opened")[2]
    check_state(server, traffic)


def check_state(server: DevServer, traffic: Traffic) -> None:
    """Assert that a lookup finds the last version of every row."""
    with RawClient(server.port) as client:
        for bucket in traffic.keyed.all_buckets:
            changes = [c for w in traffic.writers for c in w.lanes[bucket.bucket_id].model.changes]
            rows = looked_up(client, bucket, changes)
            assert rows == fold(changes, RULES)


def _served(server: DevServer, traffic: Traffic) -> bool:
    """Whether no bucket is refused; a slow location may delay a restore."""
    with RawClient(server.port) as client, suppress(ZuflussError, AssertionError):
        for bucket in traffic.buckets:
            client.end_offset(bucket.table_id, bucket.bucket_id)
        return True
    return False


# -- tables with partitions ---------------------------------------------------------------------


def create_partitioned(conn: Connection) -> None:
    admin, columns = conn.admin, "id BIGINT NOT NULL, day STRING NOT NULL, text STRING"
    admin.create_database(DATABASE, ignore_if_exists=True)
    options: dict[str, Any] = {
        "partition_keys": ["day"], "bucket_count": 1, "properties": TABLE,
    }  # fmt: skip
    admin.create_table(f"{DATABASE}.plain", columns, **options)
    admin.create_table(f"{DATABASE}.keyed", columns, primary_key=["id", "day"], **options)
    for name in ("plain", "keyed"):
        for day in ("mon", "tue"):
            admin.create_partition(f"{DATABASE}.{name}", {"day": day})


def rows_of(start: int, end: int) -> dict[str, list[Any]]:
    ids = list(range(start, end))
    return {
        "id": ids,
        "day": ["mon" if i % 2 else "tue" for i in ids],
        "text": [f"{i}".ljust(200, ".") for i in ids],
    }


def partition_buckets(conn: Connection, name: str) -> list[TableBucket]:
    path = f"{DATABASE}.{name}"
    table_id = conn.table(path).info.table_id
    return [TableBucket(table_id, p.partition_id, 0) for p in conn.admin.list_partitions(path)]


def fill(conn: Connection, start: int, end: int) -> None:
    """Write rows to both tables, a few in each batch."""
    with (
        conn.table(f"{DATABASE}.plain").append() as appends,
        conn.table(f"{DATABASE}.keyed").upsert() as upserts,
    ):
        for at in range(start, end, 20):
            rows = rows_of(at, min(at + 20, end))
            appends.write(rows)
            appends.flush()
            upserts.write(rows)
            upserts.flush()


def found_ids(conn: Connection) -> tuple[list[int], list[int]]:
    """The ids in both tables, those of the first one as often as they are there."""
    plain = conn.table(f"{DATABASE}.plain").scan(["id"]).to_arrow()["id"].to_pylist()
    expected = rows_of(0, 3 * ROWS)
    keys = [{"id": i, "day": d} for i, d in zip(expected["id"], expected["day"], strict=True)]
    keyed = conn.table(f"{DATABASE}.keyed").lookup(keys, missing="drop").to_pylist()
    assert all(row["text"] == f"{row['id']}".ljust(200, ".") for row in keyed)
    return sorted(plain), sorted(row["id"] for row in keyed)


@pytest.mark.slow
def test_partitions_come_back_from_remote_storage_after_a_lost_disk(
    warm_server: Callable[..., WarmServer], s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    server = warm_server(BUSY | Locations(tmp_path, s3, proxy).properties).start()
    with zufluss.connect(server.bootstrap, **CLIENT) as conn:
        create_partitioned(conn)
        fill(conn, 0, ROWS)
        plain, keyed = (partition_buckets(conn, name) for name in ("plain", "keyed"))
    ends = dict.fromkeys(keyed, ROWS // 2)
    eventually(
        lambda: all(
            record.snapshots and record.snapshots[-1].log_offset == ends[bucket]
            for bucket, record in remotes(server, keyed).items()
        ),
        "the snapshots are up to date",
    )
    server.kill()
    copied = sum(r.manifest.end_offset for r in remotes(server, plain).values() if r.manifest)
    lose_disk(server)
    server.start()
    with zufluss.connect(server.bootstrap, **CLIENT) as conn:
        appended, upserted = found_ids(conn)
        assert upserted == list(range(ROWS))
        assert len(appended) >= copied > 0
        assert len(set(appended)) == len(appended)
        fill(conn, ROWS, 2 * ROWS)
        more, upserted = found_ids(conn)
        assert more == [*appended, *range(ROWS, 2 * ROWS)]
        assert upserted == list(range(2 * ROWS))


# -- damage -------------------------------------------------------------------------------------

KINDS = {
    "log": "log/**/*.log",
    "index": "log/**/*.index",
    "timeindex": "log/**/*.timeindex",
    "writers": "log/**/*.writer_snapshot",
    "manifest": "log/**/*.manifest",
    "table file": "kv/**/shared/*",
    "small file": "kv/**/snap-*/[0-9a-f]*-*",
    "_METADATA": "kv/**/snap-*/_METADATA",
}


class Damaged:
    """A server with one directory as location, which is damaged and repaired repeatedly."""

    def __init__(self, server: WarmServer, root: Path) -> None:
        self.server = server
        self.root = root
        self.saved = root / "saved"
        self.remote = root / "cold"
        self.expected: dict[int, str] = {}
        self.changes: list[dict[str, Any]] = []
        self.copied = 0
        """How many of the changes are in remote storage."""

    def fill(self) -> None:
        """Write rows, and wait until they are uploaded and in two snapshots."""
        server = self.server
        server.properties |= {"remote.data.dirs": f"file://{self.remote}"}
        server.start()
        with zufluss.connect(server.bootstrap, **CLIENT) as conn:
            conn.admin.create_database(DATABASE)
            conn.admin.create_table(
                f"{DATABASE}.t", SCHEMA, primary_key=["id"], bucket_count=1, properties=TABLE
            )
            table = conn.table(f"{DATABASE}.t")
            bucket = TableBucket(table.info.table_id, None, 0)
            with table.upsert() as writer:
                for at in range(0, ROWS, 10):
                    ids = list(range(at, at + 10))
                    texts = [f"{i}".ljust(300, ".") for i in ids]
                    writer.write({"id": ids, "batch": [at] * 10, "text": texts})
                    writer.flush()
                    self.expected |= dict(zip(ids, texts, strict=True))
                    if at == 0:
                        eventually(lambda: self._snapshots(bucket), "the first snapshot is there")
            eventually(lambda: self._is_copied(bucket), "everything is in remote storage")
            self.changes = table.changelog(stop={0: self.copied}).to_arrow().to_pylist()
        assert len(self.changes) == self.copied
        server.kill()
        server.properties |= QUIET
        for name in ("data", "cold"):
            shutil.copytree(self.root / name, self.saved / name)

    def _snapshots(self, bucket: TableBucket) -> int:
        return len(remotes(self.server, [bucket])[bucket].snapshots)

    def _is_copied(self, bucket: TableBucket) -> bool:
        record = remotes(self.server, [bucket])[bucket]
        self.copied = 0 if record.manifest is None else record.manifest.end_offset
        segments = self.server.data_dir.glob(f"{DATABASE}/t-*/log-0/*.log")
        return (
            self.copied == max(int(path.stem) for path in segments)
            and len(record.snapshots) == 2
            and record.snapshots[-1].log_offset == ROWS
            and not record.dropped
        )

    def make_whole(self) -> None:
        self.server.kill()
        for name in ("data", "cold"):
            shutil.rmtree(self.root / name)
            shutil.copytree(self.saved / name, self.root / name)

    def look(self) -> list[str]:
        """Read everything; returns the errors, and asserts that all rows are right."""
        problems: list[str] = []
        with zufluss.connect(self.server.bootstrap, **HASTY) as conn:
            for read in (self._changelog, self._lookup, self._snapshot):
                try:
                    read(conn)
                except ZuflussError as e:
                    problems.append(f"{read.__name__}: {e}")
        return problems

    def _changelog(self, conn: Connection) -> None:
        """What is in remote storage; the rest may be lost with the disk."""
        table = conn.table(f"{DATABASE}.t")
        assert table.changelog(stop={0: self.copied}).to_arrow().to_pylist() == self.changes

    def _lookup(self, conn: Connection) -> None:
        rows = conn.table(f"{DATABASE}.t").lookup(list(self.expected), missing="drop").to_pylist()
        assert {row["id"]: row["text"] for row in rows} == self.expected

    def _snapshot(self, conn: Connection) -> None:
        table = conn.table(f"{DATABASE}.t")
        (latest,) = conn.admin.latest_kv_snapshots(f"{DATABASE}.t")
        with table.kv_snapshot(latest.bucket, latest.snapshot_id) as reader:
            rows = [row for part in reader for row in part.to_pylist()]
        assert {row["id"]: row["text"] for row in rows} == self.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS if rounds(0, 1) else ("manifest",))
def test_damaged_objects_are_noticed_and_never_served(
    warm_server: Callable[..., WarmServer], tmp_path: Path, rng: random.Random, kind: str
) -> None:
    server = warm_server(BUSY)
    damaged = Damaged(server, tmp_path)
    damaged.fill()
    noticed = 0
    for _ in range(rounds(2, 30)):
        path = rng.choice(sorted(damaged.remote.glob(KINDS[kind])))
        done = damage.hurt(path, rng, may_vanish=True)
        if rng.random() < 0.7:
            lose_disk(server)
        server.start()
        problems = damaged.look()
        noticed += bool(problems)
        print(f"{done}: {problems}")
        damaged.make_whole()
    server.start()
    assert damaged.look() == []
    print(f"{kind}: {noticed} of {rounds(2, 30)} times there was an error, else the right rows")
