"""A reader of a large snapshot while newer ones keep coming and only one is retained."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import zufluss
from tests.counts import rounds
from tests.end_to_end.leases.stage import Stage, exist, stage
from tests.waiting import eventually
from zufluss.client.keyed import snapshot_reader
from zufluss.client.sync.table import Table
from zufluss.errors import KvSnapshotLeaseNotFoundError
from zufluss.model.table import TableBucket

KEYS = rounds(20_000, 1_000_000)
AT_ONCE = 20_000
"""Rows of one write."""
CHANGED = 50
"""Rows of a write while somebody reads."""
READS = rounds(3, 10)

pytestmark = pytest.mark.timeout(900)


class Changing(threading.Thread):
    """Writes to a table continuously, so that new snapshots keep coming."""

    def __init__(self, it: Stage, table: Table) -> None:
        super().__init__()
        self.bootstrap, self.path = it.server.bootstrap, table.path
        self.over = threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        rng = np.random.default_rng(1)
        try:
            with zufluss.connect(self.bootstrap) as conn:
                table = conn.table(self.path)
                while not self.over.is_set():
                    ids = rng.integers(0, 2 * KEYS, CHANGED).astype(np.int32)
                    with table.upsert() as writer:
                        writer.write({"id": ids, "text": ["changed"] * CHANGED})
        except Exception as problem:
            self.failure = problem

    def __enter__(self) -> Changing:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        self.join()
        assert self.failure is None


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server that keeps one snapshot of a bucket."""
    with stage(tmp_path_factory.mktemp("one"), {"kv.snapshot.num-retained": "1"}) as it:
        yield it


@pytest.fixture
def table(it: Stage, monkeypatch: pytest.MonkeyPatch) -> Table:
    """A table with many rows, read in many small batches."""
    monkeypatch.setattr(snapshot_reader, "BATCH_ROWS", KEYS // 20)
    table = it.create()
    for at in range(0, KEYS, AT_ONCE):
        it.take(table, range(at, at + AT_ONCE), "first")
    return table


def newest(it: Stage, table: Table) -> int:
    (found,) = it.admin.latest_kv_snapshots(table.path)
    return found.snapshot_id


def wait_for_newer(it: Stage, table: Table) -> None:
    """Wait for a new snapshot."""
    before = newest(it, table)
    eventually(lambda: newest(it, table) > before, "a newer snapshot")


def check(found: pa.Table) -> None:
    """All rows as they were when the lease was taken, each once."""
    assert sorted(found["id"].to_pylist()) == list(range(KEYS))
    assert set(found["text"].to_pylist()) == {"first"}


def test_a_reader_with_a_lease_never_fails_however_many_newer_snapshots_there_are(
    it: Stage, table: Table
) -> None:
    bucket = TableBucket(table.info.table_id, None, 0)
    with it.admin.kv_snapshot_lease(table.path, duration="30s") as lease, Changing(it, table):
        held = lease.snapshots[bucket].snapshot_id
        for _ in range(READS):
            with table.kv_snapshot(bucket, lease=lease) as reader:
                batches = [next(reader)]
                wait_for_newer(it, table)
                batches += [next(reader), next(reader)]
                wait_for_newer(it, table)
                last_key = reader.last_key
            with table.kv_snapshot(bucket, lease=lease, after=last_key) as reader:
                check(pa.Table.from_batches([*batches, *reader]))
        assert it.is_kept(bucket, held)
        assert newest(it, table) >= held + 2 * READS
    eventually(lambda: not it.is_kept(bucket, held), "it goes with the lease")


def test_a_reader_that_lost_its_lease_ends_with_that_and_with_nothing_else(
    it: Stage, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both while the reader has the files already, and while it downloads them."""
    monkeypatch.setattr(snapshot_reader, "DOWNLOADS_AT_ONCE", 1)
    bucket = TableBucket(table.info.table_id, None, 0)
    with (
        it.admin.kv_snapshot_lease(table.path, duration="30s") as lease,
        table.kv_snapshot(bucket, lease=lease) as reader,
        Changing(it, table),
    ):
        assert next(reader).num_rows
        files = it.files(bucket, lease.snapshots[bucket].snapshot_id)
        wait_for_newer(it, table)
        lost_while_downloading(it, table, lease.lease_id, files, monkeypatch)
        with pytest.raises(KvSnapshotLeaseNotFoundError, match="there is no lease"):
            table.kv_snapshot(bucket, lease=lease)
        for call in (lambda: next(reader), lease.renew, lease.check):
            with pytest.raises(KvSnapshotLeaseNotFoundError, match="there is no lease"):
                call()


def lost_while_downloading(
    it: Stage, table: Table, lease_id: str, files: set[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drop the lease, and with it its files, at the second file of the next download."""
    download, begun = snapshot_reader._download, iter((True, False))

    async def losing(*given: object) -> None:
        if not next(begun, False):
            it.calls.drop(lease_id)
            eventually(lambda: exist(files) != files, "files of the snapshot go")
        await download(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshot_reader, "_download", losing)
