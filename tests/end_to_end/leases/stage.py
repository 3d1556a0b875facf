"""A server with snapshots, and callers that send raw frames, for the tests of leases.

The server takes a snapshot of every changed bucket each 20 ms and keeps two per bucket. It has an
open listener and one that requires a password. `take` writes rows and waits for the snapshot that
contains them, so a test decides how many snapshots exist. Files are inspected in their directories.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import zufluss
from tests.end_to_end.guarded import guarded_properties, listener_ports, logged_in
from tests.end_to_end.raw import RawClient
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client.keyed.snapshots import KvSnapshotInfo
from zufluss.client.lease.info import KvSnapshotLeaseInfo, leases_of
from zufluss.client.lease.wire import leased_of, unavailable_of
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import KvSnapshotNotExistError
from zufluss.model.lease import Unavailable
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import partition_id_of

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
RETAINED = 2
USERS = ("admin", "anna", "bert")
"""Users with passwords; the first one is a super user."""
SERVER = {
    "kv.snapshot.interval": "20ms",
    "kv.snapshot.num-retained": str(RETAINED),
    "remote.log.task-interval-duration": "0",
    "zufluss.metrics.port": "0",
}
KEYED = "id INT NOT NULL, text STRING, PRIMARY KEY (id)"

_NUMBERS = itertools.count()
_RUN = secrets.token_hex(3)


def unique(prefix: str = "t") -> str:
    """A name that no other test uses, valid for a table and for a lease."""
    return f"{prefix}_{_RUN}_{next(_NUMBERS)}"


class Caller:
    """The lease RPCs over one connection; errors are raised as exceptions."""

    def __init__(self, raw: RawClient) -> None:
        self.raw = raw

    def acquire(
        self,
        lease_id: str,
        wanted: Mapping[TableBucket, int],
        duration_ms: int = HOUR_MS,
        epoch: int | None = None,
    ) -> dict[TableBucket, Unavailable]:
        """Acquire snapshots by their ids, as Fluss does; returns those that are unavailable."""
        request = acquire_request(lease_id, wanted, duration_ms, epoch)
        answer = self.raw.call(ApiKey.ACQUIRE_KV_SNAPSHOT_LEASE, request)
        return {
            TableBucket(
                table.table_id,
                partition_id_of(each),
                each.bucket_id,
            ): Unavailable(each.unavailable)
            for table in answer.unavailable_snapshots
            for each in table.bucket_snapshots
        }

    def latest(
        self,
        lease_id: str,
        buckets: Iterable[TableBucket] = (),
        duration_ms: int = HOUR_MS,
        epoch: int | None = None,
    ) -> Latest:
        """Acquire the latest snapshots; without buckets, take over the existing lease."""
        request = m.AcquireLatestKvSnapshotLeaseRequest(
            lease_id=lease_id,
            lease_duration_ms=duration_ms,
            lease_epoch=epoch,
            targets=[
                m.PbLeaseTarget(
                    table_id=b.table_id, partition_id=b.partition_id, bucket_ids=[b.bucket_id]
                )
                for b in buckets
            ],
        )
        return Latest(self.raw.call(ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE, request))

    def renew(self, lease_id: str, duration_ms: int = HOUR_MS, epoch: int | None = None) -> int:
        """The time left, in milliseconds."""
        request = m.RenewKvSnapshotLeaseRequest(
            lease_id=lease_id, lease_duration_ms=duration_ms, lease_epoch=epoch
        )
        return int(self.raw.call(ApiKey.RENEW_KV_SNAPSHOT_LEASE, request).remaining_ms)

    def release(
        self, lease_id: str, buckets: Iterable[TableBucket], epoch: int | None = None
    ) -> None:
        """Release buckets."""
        request = m.ReleaseKvSnapshotLeaseRequest(
            lease_id=lease_id,
            lease_epoch=epoch,
            buckets_to_release=[
                m.PbTableBucket(
                    table_id=b.table_id, partition_id=b.partition_id, bucket_id=b.bucket_id
                )
                for b in buckets
            ],
        )
        self.raw.call(ApiKey.RELEASE_KV_SNAPSHOT_LEASE, request)

    def drop(self, lease_id: str, epoch: int | None = None) -> None:
        """End a lease."""
        request = m.DropKvSnapshotLeaseRequest(lease_id=lease_id, lease_epoch=epoch)
        self.raw.call(ApiKey.DROP_KV_SNAPSHOT_LEASE, request)

    def lease(self, lease_id: str) -> KvSnapshotLeaseInfo | None:
        """A lease with all its snapshots."""
        request = m.ListKvSnapshotLeasesRequest(lease_id=lease_id)
        found = leases_of(self.raw.call(ApiKey.LIST_KV_SNAPSHOT_LEASES, request))
        return found[0] if found else None

    def leased(self, lease_id: str) -> dict[TableBucket, int]:
        """The snapshots of a lease; empty if the lease does not exist."""
        found = self.lease(lease_id)
        return {} if found is None else {b: s.snapshot_id for b, s in found.snapshots.items()}

    def leases(self) -> list[KvSnapshotLeaseInfo]:
        """All leases, without their snapshots."""
        request = m.ListKvSnapshotLeasesRequest()
        return leases_of(self.raw.call(ApiKey.LIST_KV_SNAPSHOT_LEASES, request))


class Latest:
    """The answer to an acquire of the latest snapshots."""

    def __init__(self, answer: m.AcquireLatestKvSnapshotLeaseResponse) -> None:
        self.epoch = answer.lease_epoch if answer.HasField("lease_epoch") else None
        self.remaining_ms = answer.remaining_ms
        self.leased = leased_of(answer.leased)
        self.unavailable = unavailable_of(answer.unavailable)
        self.revoked = [(each.table_id, each.what) for each in answer.revoked]


def acquire_request(
    lease_id: str,
    wanted: Mapping[TableBucket, int],
    duration_ms: int = HOUR_MS,
    epoch: int | None = None,
) -> m.AcquireKvSnapshotLeaseRequest:
    """Fluss's request for snapshots by their ids."""
    tables: dict[int, m.PbKvSnapshotLeaseForTable] = {}
    for bucket, snapshot_id in wanted.items():
        table = tables.setdefault(
            bucket.table_id, m.PbKvSnapshotLeaseForTable(table_id=bucket.table_id)
        )
        table.bucket_snapshots.add(
            partition_id=bucket.partition_id, bucket_id=bucket.bucket_id, snapshot_id=snapshot_id
        )
    return m.AcquireKvSnapshotLeaseRequest(
        lease_id=lease_id,
        lease_duration_ms=duration_ms,
        snapshots_to_lease=list(tables.values()),
        lease_epoch=epoch,
    )


class Stage:
    """A running server, a connection to it, and an anonymous caller."""

    def __init__(self, server: DevServer, ports: Mapping[str, int], conn: Connection) -> None:
        self.server = server
        self.ports = ports
        self.conn = conn
        self.admin = conn.admin
        self._open = ExitStack()
        self.calls = self._open.enter_context(self.caller())

    @contextmanager
    def caller(self, user: str | None = None) -> Iterator[Caller]:
        """Another connection, of a user or anonymous."""
        ports = self.ports
        with RawClient(ports["OPEN"]) if user is None else logged_in(ports["SECURE"], user) as raw:
            yield Caller(raw)

    def close(self) -> None:
        """Close the connection of the anonymous caller."""
        self._open.close()

    # -- tables and snapshots -------------------------------------------------------------------

    def create(self, schema: Any = KEYED, *, buckets: int = 1, **options: Any) -> Table:
        """A table that no other test uses."""
        name = f"fluss.{unique()}"
        self.admin.create_table(name, schema, bucket_count=buckets, **options)
        return self.conn.table(name)

    def take(self, table: Table, ids: Sequence[int], text: str = "x") -> KvSnapshotInfo:
        """Write rows in one batch and wait for their snapshots; returns that of bucket 0."""
        with table.upsert() as writer:
            writer.write({"id": list(ids), "text": [text] * len(ids)})
        ends = {b: end for b, end in self.admin.list_offsets(table.path).items() if end}

        def there() -> bool:
            snapshots = {s.bucket.bucket_id: s for s in self.admin.latest_kv_snapshots(table.path)}
            return all(b in snapshots and snapshots[b].log_offset >= end for b, end in ends.items())

        eventually(there, f"a snapshot of {table.path} with everything")
        first, *_ = self.admin.latest_kv_snapshots(table.path)
        return first

    def filled(self, snapshots: int = 1, *, buckets: int = 1) -> tuple[Table, list[TableBucket]]:
        """A table with this many snapshots in each bucket, and its buckets."""
        table = self.create(buckets=buckets)
        for number in range(snapshots):
            self.take(table, range(8 * buckets), f"snapshot {number}")
        return table, [TableBucket(table.info.table_id, None, i) for i in range(buckets)]

    def kept(self, table: Table, bucket_id: int = 0) -> list[int]:
        """The ids of the snapshots of a bucket that the coordinator keeps, oldest first."""
        snapshots = self.admin.list_kv_snapshots(table.path)
        return sorted(s.snapshot_id for s in snapshots if s.bucket.bucket_id == bucket_id)

    def until_kept(self, table: Table, wanted: Sequence[int], bucket_id: int = 0) -> None:
        """Wait until exactly these snapshots are kept."""
        eventually(
            lambda: self.kept(table, bucket_id) == list(wanted),
            f"{wanted} of {table.path} are kept",
        )

    def is_kept(self, bucket: TableBucket, snapshot_id: int) -> bool:
        """Whether the coordinator knows a snapshot."""
        try:
            self.admin.kv_snapshot_metadata(bucket, snapshot_id)
        except KvSnapshotNotExistError:
            return False
        return True

    def files(self, bucket: TableBucket, snapshot_id: int) -> set[Path]:
        """The paths of the files of a snapshot, without its `_METADATA`."""
        files = self.admin.kv_snapshot_metadata(bucket, snapshot_id).files
        return {Path(file.remote_path.removeprefix("file://")) for file in files}

    def objects(self, bucket: TableBucket, snapshot_id: int) -> set[Path]:
        """The same, with files that readers are not told of."""
        return beside(self.files(bucket, snapshot_id))

    def tables_of(self, bucket: TableBucket, snapshot_id: int) -> set[Path]:
        """The RocksDB table files among them, which snapshots may share."""
        files = self.admin.kv_snapshot_metadata(bucket, snapshot_id).files
        tables = (file for file in files if file.name.endswith(".sst"))
        return {Path(file.remote_path.removeprefix("file://")) for file in tables}


def beside(files: Iterable[Path]) -> set[Path]:
    """Files of a snapshot, and all that lie in its own directory but `_METADATA`."""
    known = set(files)
    own = {path.parent for path in known if (path.parent / "_METADATA").exists()}
    inside = (path for directory in own for path in directory.iterdir())
    return known | {path for path in inside if path.name != "_METADATA"}


def rows(table: Table, bucket: TableBucket, snapshot_id: int) -> dict[int, str]:
    """The rows of a snapshot, read with the client."""
    with table.kv_snapshot(bucket, snapshot_id) as reader:
        found = pa.Table.from_batches(reader, reader.schema).to_pydict()
    return dict(zip(found["id"], found["text"], strict=True))


def exist(paths: Iterable[Path]) -> set[Path]:
    """The files that exist."""
    return {path for path in paths if path.is_file()}


@contextmanager
def stage(directory: Path, properties: Mapping[str, str] | None = None) -> Iterator[Stage]:
    """A server of its own."""
    ports = listener_ports()
    known = guarded_properties(ports, *USERS) | {
        "super.users": f"User:{USERS[0]}",
        "remote.data.dir": str(directory / "remote"),
    }
    server = WarmServer(directory / "data", {**SERVER, **known, **(properties or {})})
    with server, connected(server, ports) as it:
        yield it


@contextmanager
def connected(server: DevServer, ports: Mapping[str, int]) -> Iterator[Stage]:
    """A running server, for instance after a restart: `connected(it.server, it.ports)`."""
    with zufluss.connect(f"127.0.0.1:{ports['OPEN']}") as conn:
        it = Stage(server, ports, conn)
        try:
            yield it
        finally:
            it.close()
