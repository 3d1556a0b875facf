"""A server, its locations, and readers of both clients, for the tests of locations.

Every batch is larger than a segment, so each batch but the last one is a closed segment, and every
closed segment is one placement: a test can tell exactly where each batch is. Tests read this from
the committed manifest, and from the locations themselves. A *place* is the address of a location: a
directory, or a bucket of an object store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import fluss
import pyarrow as pa

import zufluss
from tests.end_to_end.helpers import connected, in_time, read_arrow
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.remote.errors import ObjectMissingError
from zufluss.remote.locations import Health
from zufluss.remote.manifest import MANIFEST_BYTES_MAX, LogManifest
from zufluss.remote.objects import Objects
from zufluss.remote.placement import SmoothRoundRobin
from zufluss.remote.uri import parse_location
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

T = TypeVar("T")

DIRS = "remote.data.dirs"
STRATEGY = "remote.data.dirs.strategy"
WEIGHTS = "remote.data.dirs.weights"
PLACEMENT = "table.zufluss.remote.placement"
PROBE_INTERVAL = "zufluss.remote.probe-interval"

ROWS = 10
"""Rows of a batch."""
SERVER = {
    "log.segment.file-size": "1kb",
    "log.index.interval-size": "512b",
    "log.retention.check-interval": "20ms",
    "remote.log.task-interval-duration": "20ms",
    "zufluss.remote.request-timeout": "1s",
}
TABLE = {"table.log.tiered.local-segments": "1", "table.log.arrow.compression.type": "NONE"}
CLIENT = {"client.request-timeout": "5s", "client.scanner.log.fetch.wait-max-time": "20ms"}


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, also from an asynchronous test."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def weighted(dirs: Sequence[object], *weights: object) -> dict[str, str]:
    """The configuration of weighted places."""
    return {
        DIRS: ",".join(map(str, dirs)),
        STRATEGY: "WEIGHTED_ROUND_ROBIN",
        WEIGHTS: ",".join(map(str, weights)),
    }


def smooth(weights: Mapping[int, int], count: int) -> list[int]:
    """The order of locations that weights produce, from the start."""
    picker = SmoothRoundRobin()
    return [picker.pick(weights) for _ in range(count)]


class Stage:
    """A running server and our client's connection to it."""

    def __init__(self, server: WarmServer, conn: Connection) -> None:
        self.server = server
        self.conn = conn
        self.admin = conn.admin

    # -- tables ---------------------------------------------------------------------------------

    def create(self, name: str, *, buckets: int = 1, **properties: str) -> Table:
        """A table of numbers; its rows go to one bucket unless `buckets` says otherwise."""
        self.admin.create_table(
            name,
            "id BIGINT, text STRING",
            bucket_count=buckets,
            bucket_keys=["id"],
            properties={**TABLE, **properties},
        )
        return self.conn.table(name)

    def home(self, name: str) -> str:
        """The location that a table was created with."""
        path = m.PbTablePath(database_name="fluss", table_name=name)
        request = m.GetTableInfoRequest(table_path=path)
        answer = self.conn.call_coordinator(ApiKey.GET_TABLE_INFO, request)
        return str(answer.remote_data_dir)

    # -- what is where --------------------------------------------------------------------------

    def manifests(self, table: Table) -> dict[int, m.PbRemoteLogManifestEntry]:
        """The committed manifests, by bucket."""
        request = m.ListRemoteLogManifestsRequest(table_id=table.info.table_id)
        answer = self.conn.call_coordinator(ApiKey.LIST_REMOTE_LOG_MANIFESTS, request)
        return {each.table_bucket.bucket_id: each for each in answer.manifests}

    def copied(self, table: Table, bucket: int = 0) -> int:
        """The end offset of a bucket in remote storage."""
        manifest = self.manifests(table).get(bucket)
        return 0 if manifest is None else manifest.remote_log_end_offset

    def until_copied(self, table: Table, batches: int, bucket: int = 0) -> None:
        """Wait until all batches but the last are in remote storage."""
        end = (batches - 1) * ROWS
        eventually(lambda: self.copied(table, bucket) == end, f"copied to {end}")

    def until_gone(self, table: Table) -> None:
        """Wait until the server's disk has only the two newest segments of a table."""
        eventually(lambda: len(self.local(table)) <= 2, "local segments are deleted")

    def manifest(
        self, table: Table, bucket: int = 0, properties: Mapping[str, str] | None = None
    ) -> LogManifest:
        """The committed manifest; asserts that it has no gaps and no duplicates."""
        while True:
            path = self.manifests(table)[bucket].remote_log_manifest_path
            root, _, name = path.rpartition("/")
            objects = Objects(parse_location(root, "manifest"), properties or {})
            try:
                data = run(objects.get(name, limit=MANIFEST_BYTES_MAX))
            except ObjectMissingError:  # another one has replaced it
                continue
            manifest = LogManifest.from_json(data)
            check_once(manifest)
            return manifest

    def places(self, table: Table, properties: Mapping[str, str] | None = None) -> list[int]:
        """The location of each segment, oldest first."""
        return [s.location_id for s in self.manifest(table, 0, properties).segments]

    def local(self, table: Table, bucket: int = 0) -> list[str]:
        """The segments on the server's disk."""
        info = table.info
        directory = f"{info.path.database}/{info.path.table}-{info.table_id}/log-{bucket}"
        return sorted(path.name for path in self.server.data_dir.glob(f"{directory}/*.log"))

    # -- locations ------------------------------------------------------------------------------

    def health(self, location_id: int) -> Health:
        """The health of a location, as the server sees it."""
        return self.admin.locations().locations[location_id - 1].health

    def errors(self, location_id: int) -> int:
        """The number of requests that failed at a location."""
        return sum(s.errors for s in self.admin.locations().locations[location_id - 1].servers)

    def configs(self) -> dict[str, tuple[str, str]]:
        """The configuration of the cluster."""
        return {c.key: (c.value, c.source) for c in self.admin.cluster_configs()}


def check_once(manifest: LogManifest) -> None:
    """Assert that every offset is in exactly one segment."""
    segments = manifest.segments
    assert [s.start_offset for s in segments] == [0, *(s.end_offset for s in segments[:-1])]
    assert len({s.segment_id for s in segments}) == len(segments)


@contextmanager
def stage(directory: Path, properties: Mapping[str, str]) -> Iterator[Stage]:
    """A server of its own."""
    server = WarmServer(directory / "data", {**SERVER, **properties})
    with server, zufluss.connect(server.bootstrap, **CLIENT) as conn:
        yield Stage(server, conn)


@contextmanager
def reconnected(server: WarmServer) -> Iterator[Stage]:
    """The same server after a restart."""
    with zufluss.connect(server.bootstrap, **CLIENT) as conn:
        yield Stage(server, conn)


def directories(root: Path, *names: str) -> list[Path]:
    """Directories as locations."""
    return [root / name for name in names]


def batch(number: int) -> pa.Table:
    """The rows of a batch: more than a segment holds."""
    ids = range(number * ROWS, (number + 1) * ROWS)
    return pa.table({"id": list(ids), "text": [f"row {i} ".ljust(150, "x") for i in ids]})


def write(table: Table, begin: int, end: int) -> None:
    """Write batches, each acknowledged before the next."""
    with table.append() as writer:
        for number in range(begin, end):
            writer.write(batch(number))
            writer.flush()


def rows(table: Table) -> list[int]:
    """All rows, read by our client."""
    return sorted(table.scan().to_arrow()["id"].to_pylist())


def rows_by_pyfluss(bootstrap: str, name: str) -> list[int]:
    """All rows, read by pyfluss."""

    async def read() -> list[int]:
        async with connected(bootstrap) as conn:
            table = await in_time(conn.get_table(fluss.TablePath("fluss", name)))
            return sorted((await read_arrow(table))["id"].to_pylist())

    return run(read())


def segment_files(directory: Path) -> list[Path]:
    """The log files of segments in a location."""
    return sorted(directory.glob("log/**/*.log"))


def objects_in(uri: str, properties: Mapping[str, str], *prefixes: str) -> list[str]:
    """The paths of objects in a location."""

    async def listed() -> list[str]:
        objects = Objects(parse_location(uri, "place"), properties)
        return [
            x.path for p in prefixes for page in [x async for x in objects.list(p)] for x in page
        ]

    return run(listed())


def everything(batches: int) -> list[int]:
    """The rows of so many batches."""
    return list(range(batches * ROWS))


class Death:
    """A directory that can disappear or become read-only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._away = directory.with_name(f"{directory.name}-away")
        self._tmp = directory / ".zufluss-tmp"

    def unmount(self) -> None:
        """Make the directory disappear."""
        self.directory.rename(self._away)

    def mount(self) -> None:
        """Bring the directory back with its files."""
        self._away.rename(self.directory)

    def freeze(self) -> None:
        """Make the directory read-only, also for the superuser."""
        if self._tmp.exists():
            self._tmp.rename(self.directory / ".was-tmp")
        self._tmp.write_bytes(b"")

    def thaw(self) -> None:
        """Make the directory writable again."""
        self._tmp.unlink()


def until_health(stage: Stage, location_id: int, *wanted: Health) -> None:
    """Wait until the server sees a location in this state."""
    eventually(lambda: stage.health(location_id) in wanted, f"location {location_id} is {wanted}")
