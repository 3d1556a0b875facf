"""A location is moved while a tablet server commits files that it uploaded to the old address.

Coordinator and tablet server are real, in one process. The commit is held back until the move is
done. The new address has what the location had when it was copied: not the files of this commit.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.coordinator.support import TABLET, Cluster
from tests.end_to_end.kv import Codec, kv_batch, put_request
from tests.log.disk import SilentFiles
from tests.log.support import entry
from tests.tablet.keyed import KEYED
from tests.tablet.support import SCHEMA, Connection, batch, no_ids
from zufluss.cluster.remote import BucketRemote, ManifestCommit, RemoteGateway
from zufluss.config.load import Configuration
from zufluss.coordinator.remote.location_service import CHECKS
from zufluss.errors import LocationMovedError, NetworkError
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TablePath
from zufluss.remote.locations import AlterOp
from zufluss.remote.snapshot import KvSnapshot
from zufluss.remote.storage import RemoteStorage
from zufluss.replica.replica import Replica
from zufluss.tablet.server import TabletServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.codec import decode

PATH = TablePath("fluss", "moving")
BATCHES = 7
"""A segment of 1 kb has two of them."""


async def nothing() -> None:
    """Hold nothing back."""


class HeldGateway:
    """The gateway of a real coordinator, with something that happens before its next commit."""

    def __init__(self, coordinator: RemoteGateway) -> None:
        self.coordinator = coordinator
        self.before_commit: Callable[[], Awaitable[None]] = nothing
        self.versions: list[int] = []
        """The versions of the registry that commits named."""
        self.manifests: list[ManifestCommit] = []
        """The commits of manifests."""
        self.lose_answer = False
        """The answers to commits of manifests do not come."""

    async def _arrive(self, version: int) -> None:
        self.versions.append(version)
        before, self.before_commit = self.before_commit, nothing
        await before()

    async def bucket_remotes(
        self, buckets: Sequence[TableBucket]
    ) -> dict[TableBucket, BucketRemote]:
        return await self.coordinator.bucket_remotes(buckets)

    async def commit_manifest(self, commit: ManifestCommit) -> bool:
        await self._arrive(commit.locations_version)
        self.manifests.append(commit)
        taken = await self.coordinator.commit_manifest(commit)
        if self.lose_answer:
            self.lose_answer = False
            raise NetworkError("the connection broke before the answer came")
        return taken

    async def commit_snapshot(
        self, metadata: bytes, leader_epoch: int, locations_version: int = 0
    ) -> None:
        await self._arrive(locations_version)
        await self.coordinator.commit_snapshot(metadata, leader_epoch, locations_version)

    async def lake_offset(self, path: TablePath, bucket: TableBucket) -> int:
        return await self.coordinator.lake_offset(path, bucket)


class Moving:
    """A coordinator, a tablet server, and a table of one bucket in a location that moves."""

    def __init__(
        self, root: Path, cluster: Cluster, server: TabletServer, gateway: HeldGateway
    ) -> None:
        self.old = root / "old"
        self.new = root / "new"
        self.cluster = cluster
        self.server = server
        self.gateway = gateway
        self.codec = Codec(KEYED)

    @property
    def bucket(self) -> TableBucket:
        return TableBucket(self.cluster.image.table(PATH).info.table_id, None, 0)

    @property
    def replica(self) -> Replica:
        return self.server.buckets.replica(*self.bucket)

    def copy(self) -> None:
        """Copy the location as it is now."""
        shutil.copytree(self.old, self.new)

    async def move(self) -> None:
        """Move the location to its copy; its old address is gone afterwards."""
        await self.cluster.call(
            ApiKey.ALTER_LOCATION, op=AlterOp.MOVE, location_id=1, uri=str(self.new)
        )
        shutil.rmtree(self.old)

    async def fail(self) -> None:
        """The commit does not arrive."""
        raise NetworkError("the connection broke before the request was sent")

    async def write(self, batches: int) -> None:
        for _ in range(batches):
            appended = self.replica.log.append(*entry(batch()), 1000)
            self.replica.advance(appended.end_offset)
        synced = asyncio.get_running_loop().create_future()
        self.server.logs._flusher.flush(self.server.logs.logs, synced.set_result)
        await synced

    async def round(self) -> None:
        remote = self.replica.remote
        assert remote is not None
        remote.retry_at = 0.0
        self.server.remote_logs.begin()
        await self.server.remote_logs.settled()

    async def put(self, key: int, text: str) -> None:
        request = put_request(self.bucket.table_id, kv_batch([self.codec.put((key, text))]), 0)
        connection = Connection()
        answer = await connection.answer(connection.send(self.server.put.handle, request))
        (done,) = decode(m.PutKvResponse, answer).buckets_resp
        assert not done.error_code, done.error_message

    async def snapshot(self) -> KvSnapshot | None:
        return await self.server.snapshots.snapshot(self.replica)

    async def check(self) -> None:
        """Every file that the coordinator refers to is where the location is now."""
        found = await self.cluster.call(ApiKey.INSPECT_LOCATION, location_id=1, depth=CHECKS)
        assert found.groups
        assert found.done == found.total
        assert [group for group in found.groups if group.problems] == []


@asynccontextmanager
async def moving(root: Path, schema: Schema, *, shared: bool) -> AsyncIterator[Moving]:
    """Both roles; with `shared` they use one `RemoteStorage`, as in `zufluss dev`."""
    conf = {
        "remote.data.dirs": str(root / "old"),
        "remote.log.task-interval-duration": "1h",
        "log.segment.file-size": "1kb",
        "log.index.interval-size": "100b",
        "zufluss.log.flush": "os",
        "data.dir": str(root / "data"),
        "tablet-server.id": str(TABLET.node_id),
    }
    cluster = Cluster(root / "meta", conf)
    await cluster.start()
    coordinator = cluster.coordinator
    parsed = Configuration.of(conf)
    storage = coordinator.locations.storage
    if not shared:
        known = coordinator.locations.locations
        cluster_id = coordinator.catalog.cluster_id
        storage = RemoteStorage(parsed, known, state_file=None, cluster_id=cluster_id)
    gateway = HeldGateway(coordinator.remote)
    server = TabletServer(parsed, SilentFiles(), lambda: 1000, storage, gateway, no_ids)
    await coordinator.attach(TABLET, server)
    descriptor = TableDescriptor(
        schema, bucket_count=1, properties={"table.log.tiered.local-segments": "1"}
    )
    await coordinator.catalog.create_table(PATH, descriptor.to_json())
    try:
        yield Moving(root, cluster, server, gateway)
    finally:
        await cluster.stop()
        await server.close()


@pytest.mark.parametrize("shared", [True, False])
async def test_segments_that_were_uploaded_before_a_move_are_uploaded_again(
    tmp_path: Path, shared: bool
) -> None:
    """The commit counted, and retention deleted the only copy of its records."""
    async with moving(tmp_path, SCHEMA, shared=shared) as it:
        it.copy()
        await it.write(BATCHES)
        it.gateway.before_commit = it.move
        await it.round()
        assert it.replica.log.log_start_offset == 0, "nothing is deleted here"
        assert not (await it.gateway.bucket_remotes([it.bucket]))
        await it.round()
        assert it.replica.log.log_start_offset > 0
        await it.check()
        assert sorted(set(it.gateway.versions)) == [1, 2]


@pytest.mark.parametrize("shared", [True, False])
async def test_a_commit_of_unknown_outcome_is_given_up_after_a_move(
    tmp_path: Path, shared: bool
) -> None:
    """A pending manifest was sent again as if its files were at the new address."""
    async with moving(tmp_path, SCHEMA, shared=shared) as it:
        it.copy()
        await it.write(BATCHES)
        it.gateway.before_commit = it.fail
        await it.round()
        remote = it.replica.remote
        assert remote is not None
        assert remote.pending is not None
        await it.move()
        await it.round()
        assert remote.pending is None
        await it.round()
        assert it.replica.log.log_start_offset > 0
        await it.check()


@pytest.mark.parametrize("shared", [True, False])
async def test_a_commit_that_counted_before_the_move_counts_when_it_is_sent_again(
    tmp_path: Path, shared: bool
) -> None:
    async with moving(tmp_path, SCHEMA, shared=shared) as it:
        await it.write(BATCHES)
        it.gateway.lose_answer = True
        await it.round()
        assert len(await it.gateway.bucket_remotes([it.bucket])) == 1
        it.copy()
        await it.move()
        assert await it.gateway.commit_manifest(it.gateway.manifests[0])
        await it.round()
        await it.check()


@pytest.mark.parametrize("shared", [True, False])
async def test_a_snapshot_that_was_uploaded_before_a_move_is_uploaded_again(
    tmp_path: Path, shared: bool
) -> None:
    """The snapshot counted, and a lost disk could not be restored."""
    async with moving(tmp_path, KEYED, shared=shared) as it:
        await it.put(1, "committed before the copy")
        assert await it.snapshot() is not None
        it.copy()
        await it.put(2, "uploaded to the old address")
        it.gateway.before_commit = it.move
        with pytest.raises(LocationMovedError):
            await it.snapshot()
        assert await it.snapshot() is not None
        await it.check()
