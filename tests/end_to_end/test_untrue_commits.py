"""Commits of remote files that are well-formed and not true: offsets that no log has reached.

The calls of `test_untrue_requests.py` are those of clients. Manifests and key-value snapshots are
committed by tablet servers, on the listener that servers use among themselves, so the roles run
apart here. A liar knows the epochs, the valid manifest and the snapshots, and names files as the
server would. Every offset that it claims lies beyond the high watermark, below 0 or out of order.
Meanwhile the real server uploads, commits and deletes; each of its commits is true and is not
refused. In the end, and after the disk is lost, each row is there (promises A1 and A4).
"""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import zufluss
from tests.counts import rounds
from tests.end_to_end.raw import RawClient
from tests.servers import Apart
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.errors import ErrorCode
from zufluss.model.table import PhysicalTablePath, TableBucket, TablePath
from zufluss.remote import layout
from zufluss.remote.files import RemoteFile
from zufluss.remote.layout import METADATA_NAME
from zufluss.remote.snapshot import KvSnapshot, SnapshotFile
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.codec import decode

REQUESTS = rounds(200, 20_000)
WRITE_EVERY = 50
BATCH = 20
LOGGED, KEYED = "logged", "keyed"
BEYOND = (10**15, 2**63 - 1)
"""Ends that no log of the test reaches."""

pytestmark = pytest.mark.timeout(3600 if REQUESTS > 1000 else 400)

REFUSED = {
    ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION,
    ErrorCode.INVALID_CONFIG_EXCEPTION,
    ErrorCode.CORRUPT_RECORD_EXCEPTION,
    ErrorCode.INVALID_COORDINATOR_EXCEPTION,
    ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION,
    ErrorCode.INVALID_UPDATE_VERSION_EXCEPTION,
}


class Written:
    """The tables and the number of their rows."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.rows = connection, 0
        admin = connection.admin
        admin.create_table(LOGGED, "id INT", bucket_count=1)
        admin.create_table(KEYED, "id INT NOT NULL, v INT", primary_key=["id"], bucket_count=1)
        self.table_ids = {name: admin.table_info(name).table_id for name in (LOGGED, KEYED)}

    def write(self) -> None:
        ids = pa.array(range(self.rows, self.rows + BATCH), pa.int32())
        with self.connection.table(LOGGED).append() as writer:
            writer.write(pa.table({"id": ids}))
        with self.connection.table(KEYED).upsert() as upserter:
            upserter.write(pa.table({"id": ids, "v": ids}))
        self.rows += BATCH

    def check(self) -> None:
        logged = self.connection.table(LOGGED).scan(start="earliest").to_arrow()["id"]
        assert logged.to_pylist() == list(range(self.rows))
        state = self.connection.table(KEYED).scan(source="live").to_arrow()
        assert sorted(state["id"].to_pylist()) == list(range(self.rows))


class Liar:
    """Makes the commits of a tablet server, with untrue offsets."""

    def __init__(
        self, raw: RawClient, remote: Path, table_ids: dict[str, int], chance: random.Random
    ) -> None:
        self._raw, self._remote, self._ids, self._chance = raw, remote, table_ids, chance

    def known(self, table: str) -> m.PbBucketRemote:
        """What the coordinator knows of the bucket of a table."""
        request = m.GetBucketRemotesRequest()
        request.buckets.add(table_id=self._ids[table], bucket_id=0)
        answer = self._raw.call(ApiKey.GET_BUCKET_REMOTES, request)
        remotes: list[m.PbBucketRemote] = list(answer.remotes)
        return remotes[0] if remotes else m.PbBucketRemote()

    def _directory(self, kind: str, table: str) -> str:
        path = PhysicalTablePath(*TablePath("fluss", table), None)
        return layout.bucket_directory(kind, path, TableBucket(self._ids[table], None, 0))

    def manifest(self) -> m.CommitRemoteLogManifestRequest:
        """The commit of a manifest with an end, or a start, that is not true."""
        table = self._chance.choice([LOGGED, KEYED])
        known = self.known(table)
        end = self._chance.choice([*BEYOND, *BEYOND, -1, known.remote_end_offset - 1])
        start = self._chance.choice([known.remote_start_offset, 0, end])
        if end < known.remote_end_offset:
            start = end + 1  # out of order; an end that goes back is the leader's by right
        return m.CommitRemoteLogManifestRequest(
            table_id=self._ids[table],
            bucket_id=0,
            remote_log_manifest_path=layout.new_manifest(self._directory(layout.LOG, table)),
            remote_log_start_offset=start,
            remote_log_end_offset=end,
            coordinator_epoch=self._mostly(1, 0, 2),
            bucket_leader_epoch=self._mostly(0, -1, 7),
            manifest_location=known.manifest_location or 1,
            base_manifest_path=known.manifest_path if known.HasField("manifest_path") else None,
            locations_version=2**31,
        )

    def snapshot(self) -> m.CommitKvSnapshotRequest:
        """The commit of a snapshot that has the files of a true one, and another offset."""
        known = self.known(KEYED)
        snapshot_id = known.next_snapshot_id + self._chance.choice([0, 1, 5])
        where = layout.snapshot_directory(self._directory(layout.KV, KEYED), snapshot_id)
        made = KvSnapshot(
            TableBucket(self._ids[KEYED], None, 0),
            snapshot_id,
            self._chance.choice(BEYOND),
            (),
            (SnapshotFile("CURRENT", RemoteFile(1, f"{where}/{uuid.uuid4()}", 5, 0)),),
            100,
        )
        if self._chance.random() < 0.2:
            made = replace(made, log_offset=-1)
        full = str(self._remote / where / METADATA_NAME)
        return m.CommitKvSnapshotRequest(
            completed_snapshot=made.to_json(full, lambda file: f"{self._remote}/{file.path}"),
            coordinator_epoch=self._mostly(1, 0, 2),
            bucket_leader_epoch=self._mostly(0, -1, 7),
            locations_version=2**31,
        )

    def _mostly(self, true: int, *others: int) -> int:
        return true if self._chance.random() < 0.8 else self._chance.choice(others)

    def lie(self) -> ErrorCode | None:
        """Send an untrue commit; returns the error, None for one that is refused without any."""
        if self._chance.random() < 0.5:
            answer = self._raw.request(ApiKey.COMMIT_KV_SNAPSHOT, self.snapshot())
            assert answer.error is not None, "a snapshot that is not true was committed"
        else:
            answer = self._raw.request(ApiKey.COMMIT_REMOTE_LOG_MANIFEST, self.manifest())
            if answer.error is None:
                done = decode(m.CommitRemoteLogManifestResponse, answer.body)
                assert not done.commitSuccess, "a manifest that is not true was committed"
                return None
        assert answer.error.code in REFUSED, answer.error
        return answer.error.code


def test_no_commit_that_is_not_true_loses_a_row(
    new_apart: Callable[..., Apart], tmp_path: Path, rng: random.Random
) -> None:
    settings = {
        "remote.data.dirs": str(tmp_path),
        "log.segment.file-size": "1kb",
        "kv.snapshot.interval": "100ms",
        "remote.log.task-interval-duration": "100ms",
    }
    coordinator, tablet = new_apart(settings)
    codes: set[ErrorCode | None] = set()
    with zufluss.connect(coordinator.bootstrap) as connection:
        written = Written(connection)
        for _ in range(10):  # segments are closed, so that they are copied
            written.write()
        with RawClient(coordinator.port) as raw:
            liar = Liar(raw, tmp_path, written.table_ids, rng)
            eventually(lambda: liar.known(KEYED).next_snapshot_id > 0, "a first snapshot")
            eventually(lambda: liar.known(LOGGED).HasField("manifest_path"), "a first manifest")
            for number in range(REQUESTS):
                if number % WRITE_EVERY == 0:
                    written.write()
                codes.add(liar.lie())
            assert ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION in codes
            written.write()
            changes = 2 * written.rows
            eventually(
                lambda: written.rows <= liar.known(KEYED).snapshots[-1].log_offset <= changes,
                "a snapshot of all rows: true commits go on",
            )
            end = liar.known(LOGGED).remote_end_offset
            assert 0 < end <= written.rows
        written.check()
        tablet.kill()
        for directory in tablet.data_dir.glob(f"fluss/{KEYED}-*"):
            shutil.rmtree(directory)  # the log continues where the coordinator says
        tablet.start()
        written.check()
        written.write()
        written.check()
