"""A coordinator and tablet servers with one shared log, each a process that can be lost.

A server that is lost loses its disk, too. It may come back, with an empty disk, at its address.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from tests.end_to_end.raw import ConnectionEndedError, RawClient, table_path
from tests.servers import RoleServer
from tests.waiting import eventually
from zufluss.errors import ZuflussError
from zufluss.log.files import KILL_AT_VARIABLE
from zufluss.meta.embedded import DATABASE_FILE
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import bucket_to_proto

SERVERS = (1, 2, 3)
QUICK = {"zufluss.lookup.lease": "1s", "zufluss.wal.interval": "20ms"}
"""A server is given up after two seconds of silence."""
ANSWER_SECONDS = 3.0
"""A client looks for another leader after this time without an answer."""


class HastyClient(RawClient):
    """A connection that ends when the server is silent, as that of a client with a deadline."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.socket.settimeout(ANSWER_SECONDS)

    def receive(self) -> Any:
        try:
            return super().receive()
        except TimeoutError:
            raise ConnectionEndedError from None


class SharedServers:
    """A cluster with `zufluss.log.durability = remote`; `own` ends its servers with the test."""

    def __init__(
        self,
        directory: Path,
        own: Callable[[DevServer], None],
        properties: Mapping[str, str] | None = None,
        servers: tuple[int, ...] = SERVERS,
    ) -> None:
        self.directory = directory
        self.location = directory / "location"
        """The location, unless `properties` have another one."""
        self._own = own
        self.properties = {
            "zufluss.log.durability": "remote",
            "remote.data.dir": str(self.location),
            **QUICK,
            **(properties or {}),
        }
        self.coordinator = self._role("coordinator", "coordinator", {})
        own(self.coordinator)
        self.tablets: dict[int, RoleServer] = {}
        for server_id in servers:
            self.add(server_id)

    def _role(self, role: str, name: str, properties: Mapping[str, str]) -> RoleServer:
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        return RoleServer(role, directory, {**self.properties, **properties})

    def tablet(self, server_id: int, name: str = "", **properties: str) -> RoleServer:
        """A tablet server that is not started; `name` is that of its directory."""
        options = {
            "zufluss.coordinator.address": self.coordinator.bootstrap,
            "tablet-server.id": str(server_id),
            **{key.replace("__", "."): value for key, value in properties.items()},
        }
        return self._role("tablet", name or f"server-{server_id}", options)

    def add(self, server_id: int) -> None:
        """Start another tablet server."""
        self.tablets[server_id] = self.tablet(server_id)
        self._own(self.tablets[server_id])

    # What the cluster says

    def metadata(self, *paths: tuple[str, str]) -> Any:
        """The metadata of tables, as the first server has it that answers."""
        request = m.MetadataRequest(table_path=[table_path(*path) for path in paths])
        for server in (self.coordinator, *self.tablets.values()):
            with (
                suppress(OSError, ConnectionEndedError, ZuflussError),
                HastyClient(server.port) as client,
            ):
                return client.call(ApiKey.GET_METADATA, request)
        return None

    def leader(self, database: str, table: str, bucket: int = 0) -> int | None:
        """Who leads a bucket; None while nobody is known."""
        answer = self.metadata((database, table))
        if answer is None:
            return None
        for each in answer.table_metadata[0].bucket_metadata:
            if each.bucket_id == bucket and each.HasField("leader_id"):
                return int(each.leader_id)
        return None

    def leader_port(self, database: str, table: str, bucket: int = 0) -> int | None:
        """Where the leader of a bucket listens."""
        leader = self.leader(database, table, bucket)
        return None if leader not in self.tablets else self.tablets[leader].port

    @property
    def registered(self) -> set[int]:
        """The tablet servers that the metadata names."""
        answer = self.metadata()
        return set() if answer is None else {node.node_id for node in answer.tablet_servers}

    def await_registered(self, *server_ids: int) -> None:
        """Wait until servers are in the metadata."""
        eventually(lambda: self.registered >= set(server_ids), f"{server_ids} are back")

    def await_gone(self, server_id: int) -> None:
        """Wait until the coordinator has given a server up."""
        eventually(lambda: server_id not in self.registered, f"{server_id} is given up")

    # What happens to it

    def lose(self, server_id: int, *, disk: bool = True) -> None:
        """Kill a tablet server, and remove its data directory."""
        server = self.tablets[server_id]
        if server.running:
            server.kill()
        if disk:
            shutil.rmtree(server.data_dir, ignore_errors=True)

    def start(self, server_id: int, kill_at: str = "") -> None:
        """Start a tablet server again; with `kill_at` it may die while it starts."""
        server = self.tablets[server_id]
        server.environ = {KILL_AT_VARIABLE: kill_at}
        try:
            server.start()
        except RuntimeError:
            assert kill_at, server.log()

    def restart_coordinator(self, kill_at: str = "") -> None:
        """Kill the coordinator if it runs, and start it again; its store stays."""
        if self.coordinator.running:
            self.coordinator.kill()
        self.coordinator.environ = {KILL_AT_VARIABLE: kill_at}
        try:
            self.coordinator.start()
        except RuntimeError:
            assert kill_at, self.coordinator.log()

    def freeze(self, server_id: int) -> None:
        """Stop a process in its tracks."""
        os.kill(self.tablets[server_id].pid, signal.SIGSTOP)

    def thaw(self, server_id: int) -> None:
        """Let it go on."""
        os.kill(self.tablets[server_id].pid, signal.SIGCONT)

    def pause(self, process: RoleServer, seconds: float) -> None:
        """Stop a process for a while; the length of the pause is the fault."""
        os.kill(process.pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(process.pid, signal.SIGCONT)

    def move(self, bucket: TableBucket, server_id: int) -> None:
        """Have another live server lead a bucket."""
        request = m.MoveBucketRequest(bucket=bucket_to_proto(bucket), server_id=server_id)
        with RawClient(self.coordinator.port) as client:
            client.call(ApiKey.MOVE_BUCKET, request)

    def ended(self) -> list[str]:
        """The sessions on record that do not go on."""
        sessions = self.entries("/wal/sessions/")
        return [path for path, value in sessions.items() if json.loads(value)["state"] != "live"]

    def sources(self) -> set[int]:
        """The sessions that have the ends of buckets, as the coordinator has on record."""
        found = set()
        for path, value in self.entries("/tables/").items():
            if path.rpartition("/")[0].endswith("/buckets"):
                found |= {row[5] for row in json.loads(value)["buckets"] if len(row) > 5}
        return found

    def entries(self, prefix: str) -> dict[str, bytes]:
        """What the store of the coordinator has below a path, from a copy of it.

        A copy counts if nothing was committed while it was made.
        """
        directory = self.coordinator.data_dir / "meta"
        originals = [directory / DATABASE_FILE, directory / f"{DATABASE_FILE}-wal"]
        with tempfile.TemporaryDirectory(dir=self.directory) as copy:

            def is_whole() -> bool:
                before = [_state(path) for path in originals]
                for path in originals:
                    (Path(copy) / path.name).unlink(missing_ok=True)
                    with suppress(FileNotFoundError):
                        shutil.copy(path, copy)
                return before == [_state(path) for path in originals]

            eventually(is_whole, "a copy between two commits")
            with closing(sqlite3.connect(Path(copy) / DATABASE_FILE)) as store:
                query = "SELECT path, value FROM entry WHERE path LIKE ?"
                return dict(store.execute(query, (f"{prefix}%",)))


def _state(path: Path) -> tuple[int, int] | None:
    """Changes with the file; None if there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size
