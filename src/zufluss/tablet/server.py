"""The tablet server: replicas by bucket, and what keeps them healthy.

The coordinator tells it which tables exist (`update_metadata`), which buckets to serve
(`start_replicas`) and which to stop (`stop_replicas`); clients read and write through the
handlers in `service.py`. In one process with the coordinator these are plain calls; apart they
arrive as RPCs. Either way they run on the event-loop thread, which owns every log.

On disk: `<data.dir>/<database>/<table>-<table id>[/<partition>-p<partition id>]/log-<bucket>`.
What is on disk but not assigned at start belongs to dropped tables and is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.log.files import Files
from zufluss.log.log import Log
from zufluss.model.schema import Schema
from zufluss.model.table import TableInfo
from zufluss.record.check import BatchChecker
from zufluss.record.project import Projector
from zufluss.replica.replica import Replica
from zufluss.tablet.durability import Durability
from zufluss.tablet.fetch import Fetcher
from zufluss.tablet.produce import Producer, not_a_log_table, unknown_bucket

if TYPE_CHECKING:
    from zufluss.coordinator.image import ClusterImage
    from zufluss.coordinator.tablets import ReplicaAssignment

log = structlog.get_logger(__name__)

READER_THREADS = 4
"""Threads that bring cold pages into the page cache."""
SWEEP_SECONDS = 0.25
"""How often produce timeouts are looked at."""


class TableState:
    """What the hot paths need to know of a table: its schemas compiled, its replicas by bucket."""

    def __init__(self, info: TableInfo, schemas: dict[int, Schema]) -> None:
        self.info = info
        self.schemas = schemas
        self.replicas: dict[tuple[int | None, int], Replica] = {}
        self.checker = BatchChecker(self.schemas.get, info.log_format)
        self.projector = Projector(self.schemas.get, info.schema)

    def update(self, info: TableInfo, schemas: dict[int, Schema]) -> None:
        """The table was altered."""
        self.info = info
        self.schemas.update(schemas)
        self.projector = Projector(self.schemas.get, info.schema)


class TabletServer:
    """Owns the replicas of this server."""

    def __init__(self, conf: Configuration, files: Files, clock_ms: Callable[[], int]) -> None:
        self.conf = conf
        self.files = files
        self.clock_ms = clock_ms
        self.loop = asyncio.get_running_loop()
        self.server_id = conf.get(options.TABLET_SERVER_ID)
        self.data_dir = Path(conf.get(options.DATA_DIR))
        self.image = ClusterImage()
        self.tables: dict[int, TableState] = {}
        self.readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="reader")
        self.producer = Producer(self)
        self.fetcher = Fetcher(self)
        self.durability: Durability = self._durability()
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- what the coordinator says ----------------------------------------------------------

    async def assign(self, image: ClusterImage, replicas: Sequence[ReplicaAssignment]) -> None:
        """Take over this picture, hold exactly these buckets, delete every other on the disk."""
        self.image = image
        wanted = {self._directory(r.physical_path, r.table_bucket) for r in replicas}
        remove_unknown(self.data_dir, wanted, self.files)
        await self.start_replicas(replicas)
        self.durability.recovered()

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Apply these changes to the picture of the cluster and to the tables served here."""
        self.image.apply(changes)
        for change in changes:
            if isinstance(change, TablePut):
                state = self.tables.get(change.entry.info.table_id)
                if state is not None:
                    state.update(change.entry)
                    for replica in state.replicas.values():
                        replica.log.config = self._log_config(state.info)

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Open the logs of these buckets and lead them."""
        for assignment in replicas:
            self._start(assignment)

    def _start(self, assignment: ReplicaAssignment) -> None:
        bucket = assignment.table_bucket
        state = self._table_state(bucket.table_id)
        key = (bucket.partition_id, bucket.bucket_id)
        running = state.replicas.get(key)
        if running is not None:
            running.leader_epoch = assignment.leader_epoch
            return
        opened = Log.open(
            self._directory(assignment.physical_path, bucket),
            self._log_config(state.info),
            files=self.files,
            now_ms=self.clock_ms(),
        )
        replica = Replica(bucket, assignment.physical_path, opened, assignment.leader_epoch)
        state.replicas[key] = replica
        self.durability.replicas[opened] = replica

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Give these buckets up, and free their disk where it says delete."""
        for stop in replicas:
            bucket = stop.table_bucket
            state = self.tables.get(bucket.table_id)
            if state is None:
                continue
            replica = state.replicas.pop((bucket.partition_id, bucket.bucket_id), None)
            if not state.replicas:
                del self.tables[bucket.table_id]
            if replica is not None:
                self._stop(replica, delete=stop.delete)

    # -- finding buckets --------------------------------------------------------------------

    def find_replica(
        self, table_id: int, partition_id: int | None, bucket_id: int
    ) -> Replica | None:
        """The replica of a bucket, if it is here."""
        state = self.tables.get(table_id)
        return None if state is None else state.replicas.get((partition_id, bucket_id))

    def replica(self, table_id: int, partition_id: int | None, bucket_id: int) -> Replica:
        """The replica of a bucket, or UnknownTableOrBucketError."""
        found = self.find_replica(table_id, partition_id, bucket_id)
        if found is None:
            raise unknown_bucket(table_id, partition_id, bucket_id)
        return found

    def log_replica(self, table_id: int, partition_id: int | None, bucket_id: int) -> Replica:
        """The replica of a bucket of a log table; a primary-key table is refused."""
        state = self.tables.get(table_id)
        if state is None:
            raise unknown_bucket(table_id, partition_id, bucket_id)
        if state.has_primary_key:
            raise not_a_log_table(state.info.path)
        found = state.replicas.get((partition_id, bucket_id))
        if found is None:
            raise unknown_bucket(table_id, partition_id, bucket_id)
        return found
