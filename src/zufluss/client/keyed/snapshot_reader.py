"""Reads a key-value snapshot: the rows of one bucket at an offset of its changelog.

A snapshot is a RocksDB checkpoint in remote storage. Its files are downloaded into a temporary
directory, checked by size and CRC-32C if the server names them, and opened read-only. Rows come in
the order of their keys, a batch at a time, so memory holds one batch whatever the size of the
snapshot. An interrupted reader can continue behind the last key it handed out. A reader with a
lease checks it before each file and each batch, and raises how the lease was lost.

The directory is removed when the reader is closed or fails to open. The next process removes the
directory of a killed one (`keyed/scratch.py`).

A value is a schema id (i16) and a row. Our servers store rows compacted, those of Apache Fluss in
`table.kv.format`; only ours name checksums. Rows of older schemas are read under the schema that
the table was opened with, by column id.

RocksDB is opened here and not through `zufluss.kv`, which belongs to servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, ParamSpec, Self, TypeVar

import pyarrow as pa

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.keys import check_primary_key
from zufluss.client.keyed.scratch import Scratch
from zufluss.client.keyed.snapshots import (
    KvSnapshotFile,
    KvSnapshotMetadata,
    kv_snapshot_metadata,
)
from zufluss.client.keyed.values import ValueDecoder, slices_of
from zufluss.client.lease.lease import AsyncKvSnapshotLease
from zufluss.client.read.scan import AsyncBatches
from zufluss.errors import (
    ConfigError,
    CorruptRecordError,
    InvalidColumnProjectionError,
    KvSnapshotNotExistError,
)
from zufluss.model.table import TableBucket, TableInfo
from zufluss.remote.errors import ObjectCorruptError, ObjectForbiddenError, ObjectMissingError
from zufluss.tasks import together

if TYPE_CHECKING:
    from zufluss.remote.objects import Objects

BATCH_ROWS: Final = 65_536
"""Rows per batch."""
DOWNLOADS_AT_ONCE: Final = 4
"""Files of a snapshot that are downloaded concurrently."""
OPEN_FILES_MAX: Final = 256
"""Table files that RocksDB keeps open."""
PREFIX: Final = "zufluss-kv-snapshot-"
"""Prefix of the names of temporary directories."""

P = ParamSpec("P")
R = TypeVar("R")

OpenDirectory = Callable[[str], Awaitable[tuple["Objects", str]]]
"""Returns the store of a directory, given by its full address, and the path in that store."""


class AsyncKvSnapshotReader(AsyncBatches):
    """The rows of a snapshot; `await table.kv_snapshot(…)` opens it. Iterate it, then close it.

    >>> async with await table.kv_snapshot(bucket, 7) as reader:  # doctest: +SKIP
    ...     async for batch in reader:
    ...         print(batch.num_rows)
    """

    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        metadata: KvSnapshotMetadata,
        columns: Sequence[str] | None = None,
        *,
        after: bytes | None = None,
        lease: AsyncKvSnapshotLease | None = None,
    ) -> None:
        self.metadata = metadata
        """The snapshot and its files."""
        self.schema: pa.Schema = _projected(info, columns)
        """The Arrow schema of the rows."""
        self.last_key = after
        """The encoded key of the last row handed out: an `after` to continue from."""
        self._lease = lease
        self._path = info.path
        self._files = connection.remote
        ours = all(file.crc32c is not None for file in metadata.files)
        self._decoder = ValueDecoder(connection, info, "COMPACTED" if ours else None)
        self._scratch: Scratch | None = None
        self._rows: SnapshotRows | None = None

    @property
    def log_offset(self) -> int:
        """The changelog continues from this offset."""
        return self.metadata.log_offset

    async def open(self) -> Self:
        """Download the files and open them; removes them again on failure."""
        self._scratch = Scratch(PREFIX)
        try:
            target = self._scratch.path
            await download(self.metadata, target, self._directory)
            self._rows = await _in_thread(SnapshotRows, target, self.last_key)
        except BaseException:
            await self.close()
            raise
        return self

    async def next_batch(self) -> pa.RecordBatch | None:
        """Return the next rows in the order of their keys; None at the end."""
        self._check_lease()
        if self._rows is None:
            return None
        values = await _in_thread(self._rows.take, BATCH_ROWS)
        if not values:
            return None
        batch = await self._decoder.decode(slices_of(values))
        self.last_key = self._rows.last_key
        return batch.select(self.schema.names)

    async def _directory(self, directory: str) -> tuple[Objects, str]:
        """The store of a directory; checks the lease, because each file asks here."""
        self._check_lease()
        return await self._files.objects(self._path, directory)

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check(self.metadata.bucket)

    async def close(self) -> None:
        """Close and remove the files. Closing twice is no error."""
        rows, self._rows = self._rows, None
        scratch, self._scratch = self._scratch, None
        try:
            if rows is not None:
                await _in_thread(rows.close)
        finally:
            if scratch is not None:
                await _in_thread(scratch.close)

    def __repr__(self) -> str:
        about = self.metadata
        return f"<AsyncKvSnapshotReader {about.bucket}, snapshot {about.snapshot_id}>"


async def open_snapshot(
    connection: ClusterConnection,
    info: TableInfo,
    bucket: TableBucket,
    snapshot_id: int | None,
    columns: Sequence[str] | None,
    after: bytes | None,
    lease: AsyncKvSnapshotLease | None,
) -> AsyncKvSnapshotReader:
    """Open a snapshot for `table.kv_snapshot`; raises the loss of the lease if it is the cause."""
    number = _chosen(connection.metadata.name_of(bucket), bucket, snapshot_id, lease)
    try:
        metadata = await kv_snapshot_metadata(connection, bucket, number)
        reader = AsyncKvSnapshotReader(
            connection, info, metadata, columns, after=after, lease=lease
        )
        return await reader.open()
    except (ObjectMissingError, ObjectForbiddenError, KvSnapshotNotExistError):
        if lease is not None:
            await lease.verify(bucket)
        raise


class SnapshotRows:
    """The values of a RocksDB checkpoint behind one key; for one thread at a time."""

    def __init__(self, directory: Path, after: bytes | None = None) -> None:
        from rocksdict import AccessType, Options, Rdict

        self.last_key = after
        """The key of the last value taken; None before the first."""
        options = Options(raw_mode=True)
        options.set_max_open_files(OPEN_FILES_MAX)
        try:
            self._database = Rdict(str(directory), options, access_type=AccessType.read_only())
        except Exception as problem:  # rocksdict raises plain exceptions
            raise _unreadable(directory, problem) from problem
        self._directory = directory
        self._at = self._database.iter()
        self._begin(after)

    def _begin(self, after: bytes | None) -> None:
        if after is None:
            self._at.seek_to_first()
            return
        self._at.seek(after)
        if self._at.valid() and self._at.key() == after:
            self._at.next()

    def take(self, count: int) -> list[bytes]:
        """Take the next values, at most `count`; empty at the end."""
        at = self._at
        values: list[bytes] = []
        try:
            while len(values) < count and at.valid():
                values.append(at.value())
                at.next()
            at.status()  # raises if the iterator became invalid by a read error
        except Exception as problem:
            raise _unreadable(self._directory, problem) from problem
        if values:
            self.last_key = self._key_before()
        return values

    def _key_before(self) -> bytes:
        """The key before the iterator; read once per batch instead of once per row."""
        if self._at.valid():
            self._at.prev()
        else:
            self._at.seek_to_last()
        key = self._at.key()
        self._at.next()
        assert isinstance(key, bytes)
        return key

    def close(self) -> None:
        """Close the files."""
        del self._at
        self._database.close()


async def download(
    metadata: KvSnapshotMetadata, target: Path, open_directory: OpenDirectory
) -> None:
    """Download all files of a snapshot into `target`; the first failure cancels the others."""
    slots = asyncio.Semaphore(DOWNLOADS_AT_ONCE)

    async def one(file: KvSnapshotFile) -> None:
        async with slots:
            await _download(file, target, open_directory)

    await together(one(file) for file in metadata.files)


async def _download(file: KvSnapshotFile, target: Path, open_directory: OpenDirectory) -> None:
    if Path(file.name).name != file.name:
        raise CorruptRecordError(
            f"a file of a key-value snapshot has the name {file.name!r:.200}, which is no plain "
            "file name"
        )
    directory, _, name = file.remote_path.rpartition("/")
    objects, path = await open_directory(directory)
    path = f"{path}/{name}".lstrip("/")
    size, crc32c = await objects.get_file(path, target / file.name)
    if file.size not in (None, size):
        reason = f"{size} bytes were read, the snapshot says {file.size}"
        raise ObjectCorruptError(objects.uri.text, path, reason)
    if file.crc32c not in (None, crc32c):
        reason = f"its CRC-32C is {crc32c:08x}, the snapshot says {file.crc32c:08x}"
        raise ObjectCorruptError(objects.uri.text, path, reason)


async def _in_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run work on the files in a thread; a cancelled caller waits until it has ended."""
    job = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait([job])
        raise


def _chosen(
    name: str, bucket: TableBucket, snapshot_id: int | None, lease: AsyncKvSnapshotLease | None
) -> int:
    """The id of the snapshot to read: the given one, or the one that the lease holds."""
    if lease is None:
        if snapshot_id is None:
            raise ConfigError(f"which snapshot of {name}? Give its snapshot_id, or a lease")
        return snapshot_id
    lease.check(bucket)
    held = lease.snapshots[bucket].snapshot_id
    if snapshot_id not in (None, held):
        raise ConfigError(
            f"lease {lease.lease_id} holds snapshot {held} of {name}, not {snapshot_id}; leave "
            "snapshot_id out"
        )
    return held


def _projected(info: TableInfo, columns: Sequence[str] | None) -> pa.Schema:
    check_primary_key(info, "key-value snapshot", "scan")
    if columns is None:
        return info.schema.arrow
    unknown = [name for name in columns if name not in info.schema.names]
    if unknown:
        raise InvalidColumnProjectionError(
            f"table {info.path} has no column {unknown[0]!r}; its columns are "
            f"{', '.join(info.schema.names)}"
        )
    return pa.schema([info.schema.arrow.field(name) for name in columns])


def _unreadable(directory: Path, problem: Exception) -> CorruptRecordError:
    return CorruptRecordError(f"RocksDB cannot read the snapshot in {directory}: {problem}")
