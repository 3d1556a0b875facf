"""The buckets of one table and what handlers need, without a tablet server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.tablet.support import TABLE, no_ids, picture
from zufluss.cluster.replicas import assignments
from zufluss.config.load import Configuration
from zufluss.kv.replay import EarlierChangelog
from zufluss.model.schema import Schema
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica, ReplicaHost
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.contention import Contention
from zufluss.tablet.durability import Durability
from zufluss.tablet.produce import ProduceHandler
from zufluss.tablet.producers import KnownProducers
from zufluss.tablet.put import PutHandler
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.testing.files import SilentFiles

NOW_MS = 1000


class NoCopy:
    """Remote storage that has nothing of a bucket."""

    snapshot_offset = 0

    async def restore_log(self) -> None:
        """There is nothing to restore."""

    async def restore_state(self, replica: Replica) -> EarlierChangelog | None:
        return None

    def attach(self, replica: Replica) -> None:
        """The log stays on its server."""


class Parts:
    """A table with one bucket that a test opens and closes by itself."""

    def __init__(self, data_dir: Path, schema: Schema, flush: str = "os") -> None:
        self.conf = Configuration.of({"data.dir": str(data_dir), "zufluss.log.flush": flush})
        self.files = SilentFiles()
        self.buckets = Buckets(self.conf)
        self.buckets.image = picture(schema, buckets=1)
        self.tasks = BackgroundTasks()
        self.contention = Contention()
        self.durability = Durability(self.conf, self.files, self.buckets)
        self.kv = KvHost(self.conf, data_dir, self.files, asyncio.get_running_loop())
        self.events: list[str] = []
        self.host = ReplicaHost(
            self.durability.logs,
            self.kv,
            KnownProducers(),
            lambda: NOW_MS,
            opened=(lambda replica: self.events.append("opened"),),
            closed=(lambda replica: self.events.append("closed"),),
        )

    async def open(self) -> Replica:
        (assignment,) = assignments(self.buckets.image, 1)
        settings = self.buckets.table(TABLE).settings
        replica = await Replica.open(self.host, assignment, settings, NoCopy())
        self.buckets.add(replica)
        return replica

    def close_bucket(self, replica: Replica, *, delete: bool) -> None:
        self.buckets.remove(replica)
        replica.close(delete=delete)

    def produce_handler(self) -> ProduceHandler:
        return ProduceHandler(self.buckets, self.durability, lambda: NOW_MS)

    def put_handler(self) -> PutHandler:
        return PutHandler(
            self.conf,
            self.buckets,
            self.durability,
            self.kv,
            self.contention,
            self.tasks,
            lambda: NOW_MS,
            no_ids,
        )

    async def stop(self) -> None:
        self.tasks.cancel()
        await self.kv.close()
        await self.durability.logs.close()


@asynccontextmanager
async def parts(data_dir: Path, schema: Schema, flush: str = "os") -> AsyncIterator[Parts]:
    made = Parts(data_dir, schema, flush)
    made.durability.logs.started()
    try:
        yield made
    finally:
        await made.stop()
