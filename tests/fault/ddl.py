"""Tables and partitions that are created and dropped while the server is killed, and the checks.

`Ddl` is a thread that creates, alters and drops over one connection. When the connection breaks
during an operation, its outcome is unknown; `Ddl` asks the restarted server. `Ddl` pauses while the
server is down and just after its start, so that the catalog can be compared with the disk: every
bucket of every table has its directory, and there is no other directory.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.end_to_end.raw import RawClient, table_path
from tests.fault.load import DEADLINE_SECONDS, LOST, RECONNECT_SECONDS, Load, Worker
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

DATABASES = ("ddl_one", "ddl_two")
NAMES = ("t1", "t2", "t3", "t4", "parted1", "parted2")
PARTITIONS = ("a", "b", "c", "d")
KEPT_APART = ("meta", ".commit-log", "remote", ".remote")
"""Directories of a data directory that hold no tables."""

Path_ = tuple[str, str]
"""Database and table."""


def descriptor(name: str, buckets: int) -> TableDescriptor:
    partitioned = name.startswith("parted")
    schema = Schema.of("id BIGINT, part STRING NOT NULL")
    keys = ("part",) if partitioned else ()
    return TableDescriptor(schema, None, keys, (), buckets, {"table.replication.factor": "1"}, {})


@dataclass(slots=True)
class Known:
    """A table that exists."""

    table_id: int
    partitions: dict[str, int] = field(default_factory=dict)
    """Partition ids by name."""


class Ddl(Worker):
    """Creates, alters and drops until it is stopped."""

    def __init__(self, load: Load, seed: int) -> None:
        super().__init__(load, seed)
        self.tables: dict[Path_, Known] = {}
        """The tables that exist according to the answers so far."""
        self.unknown: set[Path_] = set()
        """Tables with an operation whose outcome is unknown."""
        self.table_ids: set[int] = set()
        self.partition_ids: set[int] = set()
        self.operations = 0
        self.may_go_on = threading.Event()
        self.holds_still = threading.Event()

    # -- the thread -------------------------------------------------------------------------

    def work(self) -> None:
        try:
            while not self.finishing:
                self.holds_still.set()
                self.may_go_on.wait(RECONNECT_SECONDS)
                if self.may_go_on.is_set():
                    self.holds_still.clear()
                    self.change_until_lost()
        finally:
            self.holds_still.set()

    def change_until_lost(self) -> None:
        """Work with this server only; `settle` must check a later one first."""
        try:
            with RawClient(self.load.port) as client:
                while not self.finishing:
                    self.change(client)
                    self.operations += 1
        except LOST:
            self.may_go_on.clear()

    def change(self, client: RawClient) -> None:
        path = (self.rng.choice(DATABASES), self.rng.choice(NAMES))
        self.unknown.add(path)
        known = self.tables.get(path)
        if known is None:
            self.create(client, path)
        elif path[1].startswith("parted") and self.rng.random() < 0.8:
            self.change_partition(client, path, known)
        elif self.rng.random() < 0.3:
            self.alter(client, path)
        else:
            request = m.DropTableRequest(table_path=table_path(*path), ignore_if_not_exists=False)
            client.call(ApiKey.DROP_TABLE, request)
            del self.tables[path]
        self.unknown.discard(path)

    def create(self, client: RawClient, path: Path_) -> None:
        request = m.CreateTableRequest(
            table_path=table_path(*path),
            table_json=descriptor(path[1], self.rng.randint(1, 3)).to_json(),
            ignore_if_exists=False,
        )
        client.call(ApiKey.CREATE_TABLE, request)
        self.note_table(path, client.table_id(*path))

    def alter(self, client: RawClient, path: Path_) -> None:
        request = m.AlterTableRequest(table_path=table_path(*path), ignore_if_not_exists=False)
        value = f"{self.rng.randint(1, 99)}d"
        request.config_changes.add(config_key="table.log.ttl", config_value=value, op_type=0)
        client.call(ApiKey.ALTER_TABLE, request)

    def change_partition(self, client: RawClient, path: Path_, known: Known) -> None:
        name = self.rng.choice(PARTITIONS)
        spec = m.PbPartitionSpec(partition_key_values=[m.PbKeyValue(key="part", value=name)])
        arguments = {"table_path": table_path(*path), "partition_spec": spec}
        if name in known.partitions:
            request = m.DropPartitionRequest(**arguments, ignore_if_not_exists=False)
            client.call(ApiKey.DROP_PARTITION, request)
            del known.partitions[name]
        else:
            new = m.CreatePartitionRequest(**arguments, ignore_if_not_exists=False)
            client.call(ApiKey.CREATE_PARTITION, new)
            self.note_partition(known, name, partitions_of(client, path)[name])

    def note_table(self, path: Path_, table_id: int) -> None:
        if table_id in self.table_ids:
            self.history.problem(f"{path} got table id {table_id}, which was given before")
        self.table_ids.add(table_id)
        self.tables[path] = Known(table_id)

    def note_partition(self, known: Known, name: str, partition_id: int) -> None:
        if partition_id in self.partition_ids:
            self.history.problem(f"{name} got partition id {partition_id}, given before")
        self.partition_ids.add(partition_id)
        known.partitions[name] = partition_id

    # -- the test ---------------------------------------------------------------------------

    def settle(self, port: int, data_dir: Path) -> None:
        """The server is back: catalog, answers and disk must agree. Then go on.

        Nothing happens if the server is gone again before that can be seen.
        """
        assert self.holds_still.wait(DEADLINE_SECONDS), self.history.problems
        try:
            with RawClient(port) as client:
                found, expected = catalog(client), expected_directories(client)
                for path in sorted(expected - directories(data_dir)):
                    self.history.problem(f"directory {path} of a table is not there")
                self.wait_for_removal(client, data_dir, expected)
        except LOST:
            return
        self.compare(found)
        self.may_go_on.set()

    def wait_for_removal(self, client: RawClient, data_dir: Path, expected: set[str]) -> None:
        """Wait until the running server has removed directories of no table."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while left := directories(data_dir) - expected:
            client.call(ApiKey.LIST_DATABASES, m.ListDatabasesRequest())
            if time.monotonic() > deadline:
                self.history.problem(f"directories {sorted(left)} belong to no table")
                return

    def compare(self, found: dict[Path_, Known]) -> None:
        """Compare the catalog with the answers, and resolve unknown outcomes."""
        for path in {*found, *self.tables}:
            if path in self.unknown:
                self.accept(path, found.get(path))
            elif found.get(path) != self.tables.get(path):
                self.history.problem(
                    f"{path}: the catalog has {found.get(path)}, the answers say "
                    f"{self.tables.get(path)}"
                )
        self.unknown.clear()

    def accept(self, path: Path_, found: Known | None) -> None:
        """Accept the state after an operation without an answer."""
        before = self.tables.pop(path, None)
        if found is None:
            return
        if before is not None and before.table_id == found.table_id:
            self.tables[path] = before
        else:
            self.note_table(path, found.table_id)
        known = self.tables[path]
        for name in set(known.partitions) - set(found.partitions):
            del known.partitions[name]
        for name, partition_id in found.partitions.items():
            if known.partitions.get(name) != partition_id:
                self.note_partition(known, name, partition_id)


def create_databases(port: int) -> None:
    """The databases of `Ddl`."""
    with RawClient(port) as client:
        for name in DATABASES:
            request = m.CreateDatabaseRequest(database_name=name, ignore_if_exists=True)
            client.call(ApiKey.CREATE_DATABASE, request)


def table_names(client: RawClient, database: str) -> list[str]:
    request = m.ListTablesRequest(database_name=database)
    return list(client.call(ApiKey.LIST_TABLES, request).table_name)


def partitions_of(client: RawClient, path: Path_) -> dict[str, int]:
    """Partition ids by name."""
    request = m.ListPartitionInfosRequest(table_path=table_path(*path))
    try:
        answer = client.call(ApiKey.LIST_PARTITION_INFOS, request)
    except ZuflussError as e:
        if e.code is ErrorCode.TABLE_NOT_PARTITIONED_EXCEPTION:
            return {}
        raise
    return {
        "$".join(kv.value for kv in info.partition_spec.partition_key_values): info.partition_id
        for info in answer.partitions_info
    }


def catalog(client: RawClient) -> dict[Path_, Known]:
    """The tables that the server reports in the databases of `Ddl`."""
    return {
        (database, name): Known(
            client.table_id(database, name), partitions_of(client, (database, name))
        )
        for database in DATABASES
        for name in table_names(client, database)
    }


def expected_directories(client: RawClient) -> set[str]:
    """The directories that the tables of the catalog have."""
    found: set[str] = set()
    for database in client.call(ApiKey.LIST_DATABASES, m.ListDatabasesRequest()).database_name:
        for name in table_names(client, database):
            found |= _directories_of(client, database, name)
    return found


def _directories_of(client: RawClient, database: str, name: str) -> set[str]:
    request = m.GetTableInfoRequest(table_path=table_path(database, name))
    info = client.call(ApiKey.GET_TABLE_INFO, request)
    stored = TableDescriptor.from_json(info.table_json)
    root = Path(database) / f"{name}-{info.table_id}"
    if stored.is_partitioned:
        parents = [root / f"{p}-p{i}" for p, i in partitions_of(client, (database, name)).items()]
    else:
        parents = [root]
    logs = [parent / f"log-{b}" for parent in parents for b in range(stored.bucket_count or 0)]
    return {str(each) for log in logs for each in (log, *log.parents) if each != Path()}


def directories(data_dir: Path) -> set[str]:
    """The directories of tables that are on the disk."""
    return {
        str(path.relative_to(data_dir))
        for path in data_dir.rglob("*")
        if path.is_dir() and path.relative_to(data_dir).parts[0] not in KEPT_APART
    }
