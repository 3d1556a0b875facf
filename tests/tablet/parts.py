"""The buckets of one table and what handlers need, without a tablet server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from tests.log.disk import SilentFiles
from tests.tablet.gateway import Gateway
from tests.tablet.support import TABLE, no_ids, picture
from zufluss.cluster.replicas import assignments
from zufluss.config.load import Configuration
from zufluss.model.schema import Schema
from zufluss.remote.registry import reconcile
from zufluss.remote.storage import RemoteStorage
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica, ReplicaHost
from zufluss.tablet.answers import Answers
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.changelog_reader import ChangelogReader
from zufluss.tablet.contention import Contention
from zufluss.tablet.durability import Durability
from zufluss.tablet.fetch import FetchHandler
from zufluss.tablet.forwarding import Forwarding
from zufluss.tablet.lookup import LookupHandler
from zufluss.tablet.produce import ProduceHandler
from zufluss.tablet.producers import KnownProducers
from zufluss.tablet.put import PutHandler
from zufluss.tablet.remote.context import RemoteContext
from zufluss.tablet.remote.copy import BucketCopy
from zufluss.tablet.remote.logs import RemoteLogRunner
from zufluss.tablet.remote.restore import Restorer
from zufluss.tablet.scan.rebuild import Rebuilder
from zufluss.tablet.scan.service import ScanService
from zufluss.tablet.scan.states import PinStates
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.tablet.undo import UndoHandler

NOW_MS = 1000


class NoCopy(BucketCopy):
    """Remote storage that has nothing of a bucket, and gets nothing of it."""

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
        self.producers = KnownProducers()
        self.threads = ThreadPoolExecutor(1)
        storage = RemoteStorage(self.conf, reconcile(None, self.conf, {}), state_file=None)
        self.remote = RemoteContext(self.buckets, storage, Gateway(), self.files)
        self.events: list[str] = []
        self.when_closed: list[Callable[[Replica], None]] = []
        """What handlers do when the bucket is closed."""
        self.stops: list[Callable[[], Awaitable[None]]] = []
        """How handlers with work of their own are stopped."""
        self.host = ReplicaHost(
            self.durability.logs,
            self.kv,
            self.producers,
            lambda: NOW_MS,
            opened=(lambda replica: self.events.append("opened"),),
            closed=(self._closed,),
            failed=lambda replica: self.events.append("failed"),
        )

    def _closed(self, replica: Replica) -> None:
        self.events.append("closed")
        for closed in self.when_closed:
            closed(replica)

    async def open(self) -> Replica:
        (assignment,) = assignments(self.buckets.image, 1)
        settings = self.buckets.table(TABLE).settings
        copy = NoCopy(self._restorer(), self._remote_logs(), assignment, None)
        replica = await Replica.open(self.host, assignment, settings, copy)
        self.buckets.add(replica)
        return replica

    def close_bucket(self, replica: Replica, *, delete: bool) -> None:
        self.buckets.remove(replica)
        replica.close(delete=delete)

    def produce_handler(self) -> ProduceHandler:
        return ProduceHandler(self.buckets, self.durability, self.tasks, lambda: NOW_MS)

    def fetch_handler(self) -> FetchHandler:
        return FetchHandler(self.buckets, self._remote_logs(), self.threads, self.tasks)

    def _remote_logs(self) -> RemoteLogRunner:
        logs, tasks = self.durability.logs, self.tasks
        return RemoteLogRunner(self.conf, self.remote, logs, tasks, lambda: NOW_MS)

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

    def lookup_handler(self, put: PutHandler) -> LookupHandler:
        answers = Answers(self.conf)
        forwarding = Forwarding(self.buckets, None)
        return LookupHandler(
            self.buckets, self.kv, put, self.contention, self.tasks, answers, forwarding
        )

    def scan_service(self) -> ScanService:
        rebuilder = Rebuilder(self.conf, self.remote, self._restorer(), self._changelog_reader())
        states = PinStates(self.conf, self.buckets, self.kv, rebuilder, self.contention, self.tasks)
        scans = ScanService(self.conf, self.buckets, states, self.tasks)
        self.when_closed += [scans.closed, states.closed]
        self.stops.append(states.stop)
        return scans

    def undo_handler(self, put: PutHandler) -> UndoHandler:
        reader = self._changelog_reader()
        undos = UndoHandler(self.remote, put, self.producers, reader, lambda: NOW_MS)
        self.when_closed.append(undos.closed)
        self.stops.append(undos.stop)
        return undos

    def _restorer(self) -> Restorer:
        return Restorer(self.remote, self.durability.logs, self.kv)

    def _changelog_reader(self) -> ChangelogReader:
        return ChangelogReader(self.buckets, self._restorer(), self.threads)

    async def stop(self) -> None:
        self.tasks.cancel()
        for stop in self.stops:
            await stop()
        await self.kv.close()
        await self.durability.logs.close()
        self.threads.shutdown(wait=False)


@asynccontextmanager
async def parts(data_dir: Path, schema: Schema, flush: str = "os") -> AsyncIterator[Parts]:
    table = Parts(data_dir, schema, flush)
    table.durability.logs.started()
    try:
        yield table
    finally:
        await table.stop()
