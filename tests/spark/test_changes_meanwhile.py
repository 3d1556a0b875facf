"""Tables, partitions, schemas and servers that change during a query.

What a query gives then is right, or it fails with an error that says what happened; it never gives
something else, and never hangs. First every change against reads whose tasks are planned and not
yet run, and against the steps of a stream; then whole queries of Spark, reads and writes.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.counts import FULL
from tests.waiting import WAIT_SECONDS

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

from pyspark.errors import StreamingQueryException

import zufluss
from tests.client.rounds import Rounds
from tests.servers import WarmServer
from tests.spark.read.test_table import append, upsert
from tests.spark.stream_queries import BatchRead, StreamRead
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import (
    PartitionNotExistError,
    TableNotExistError,
    ZuflussError,
)
from zufluss.testing.server import DevServer

pytestmark = pytest.mark.slow

SMALL = {
    "client.scanner.log.fetch.max-bytes-for-bucket": "1kb",
    "client.scanner.kv.fetch.max-bytes": "4kb",
}
"""A scan has rows to fetch when the first ones are there."""
HASTY = {"client.request-timeout": "500ms"}
"""Gives up after 2 seconds."""
LATEST = {"scan.startup.mode": "latest"}
MANY = 2_000

Write = Callable[..., None]


class World:
    """A server with tables that change."""

    def __init__(self, server: DevServer, connection: Connection) -> None:
        self.server = server
        self.connection = connection
        self.rounds = Rounds(connection, server.bootstrap)

    def create(
        self, kind: str, name: str | None = None, schema: str = "id INT, name STRING"
    ) -> Table:
        """A table of a kind: log, keyed, or one of them with partitions `p`."""
        path = f"fluss.{name or 'a6_' + secrets.token_hex(4)}"
        parted = "parted" in kind
        keys = ["id", "p"] if parted else ["id"]
        self.connection.admin.create_table(
            path,
            schema + (", p STRING" if parted else ""),
            primary_key=keys if "keyed" in kind else None,
            partition_keys=["p"] if parted else [],
            bucket_count=1 if parted else 2,
            properties={"table.datalake.enabled": "true", "table.datalake.freshness": "1ms"},
        )
        return self.connection.table(path)

    def drop(self, table: Table) -> None:
        self.connection.admin.drop_table(table.path)

    def restart(self) -> None:
        self.server.kill()
        self.server.start()


def write(table: Table, **columns: list[Any]) -> None:
    """Rows into a table of either kind."""
    (upsert if table.info.has_primary_key else append)(table, **columns)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("a6")
    with (
        WarmServer(directory, {"datalake.format": "iceberg"}) as server,
        zufluss.connect(server.bootstrap) as connection,
    ):
        yield World(server, connection)


def planned(how: str, world: World, table: Table, **options: str) -> BatchRead | StreamRead:
    """A read of all rows, its tasks planned."""
    if how == "batch":
        return BatchRead(world.server.bootstrap, table, **options)
    read = StreamRead(world.server.bootstrap, table, **options)
    return read.plan()


EITHER = pytest.mark.parametrize("how", ["batch", "stream"])
KINDS_OF_QUERIES = ("log parted", "keyed parted") if FULL else ("keyed parted",)
KINDS = pytest.mark.parametrize("kind", ["log", "keyed"])


# -- tables ------------------------------------------------------------------------------------


@EITHER
@KINDS
@pytest.mark.parametrize("again", [False, True], ids=["dropped", "made again"])
def test_a_planned_read_of_a_dropped_table_fails_or_has_its_rows(world, how, kind, again):
    table = world.create(kind)
    write(table, id=[1, 2], name=["a", "b"])
    read = planned(how, world, table)
    world.drop(table)
    if again:
        other = world.create(kind, table.path.table)
        write(other, id=[7, 8], name=["other", "other"])
    assert right_or_gone(read, table) in ([(1, "a"), (2, "b")], None)


def right_or_gone(read: BatchRead | StreamRead, table: Table) -> Any:
    """The rows of a read, None if it says that its table is gone."""
    try:
        return read.rows()
    except ZuflussError as gone:
        return None if str(table.path) in str(gone) else str(gone)


@EITHER
@KINDS
def test_a_planned_read_of_lake_files_fails_or_has_its_rows(world, how, kind):
    table = world.create(kind)
    write(table, id=[1, 2], name=["a", "b"])
    world.rounds.tier(table)
    read = planned(how, world, table)
    world.drop(table)
    other = world.create(kind, table.path.table)
    write(other, id=[7, 8], name=["other", "other"])
    world.rounds.tier(other)
    assert right_or_gone(read, table) in ([(1, "a"), (2, "b")], None)


@KINDS
@pytest.mark.parametrize("again", [False, True], ids=["dropped", "made again"])
def test_a_stream_of_a_dropped_table_ends(world, kind, again):
    table = world.create(kind)
    write(table, id=[1], name=["a"])
    stream = StreamRead(world.server.bootstrap, table)
    assert stream.all_rows() == [(1, "a")]
    world.drop(table)
    if again:
        write(world.create(kind, table.path.table), id=[7, 8], name=["other", "other"])
    with pytest.raises(TableNotExistError, match=str(table.path)):
        stream.plan()
    if again:
        fresh = StreamRead(world.server.bootstrap, table)
        with pytest.raises(TableNotExistError, match="another checkpointLocation"):
            fresh.reader.latestOffset(stream.end, None)


# -- partitions --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["log parted", "keyed parted"])
@pytest.mark.parametrize("again", [False, True], ids=["dropped", "made again"])
def test_a_planned_read_of_a_dropped_partition_fails(world, kind, again):
    table = world.create(kind)
    write(table, id=[1, 2], name=["a", "b"], p=["x", "y"])
    reads = [planned(how, world, table) for how in ("batch", "stream")]
    world.connection.admin.drop_partition(table.path, {"p": "x"})
    if again:
        write(table, id=[7], name=["other"], p=["x"])
    for read in reads:
        with pytest.raises(PartitionNotExistError, match=str(table.path)):
            read.rows()
    rows = [(2, "b", "y"), *([(7, "other", "x")] if again else [])]
    assert planned("batch", world, table).rows() == rows


@pytest.mark.parametrize("kind", ["log parted", "keyed parted"])
def test_a_stream_goes_on_without_a_dropped_partition_and_with_new_ones(world, kind):
    table = world.create(kind)
    write(table, id=[1, 2], name=["a", "b"], p=["x", "y"])
    stream = StreamRead(world.server.bootstrap, table)
    assert stream.all_rows() == [(1, "a", "x"), (2, "b", "y")]
    write(table, id=[3, 4], name=["c", "d"], p=["x", "y"])
    world.connection.admin.drop_partition(table.path, {"p": "x"})
    write(table, id=[5, 6], name=["e", "f"], p=["x", "z"])
    assert stream.all_rows() == [(4, "d", "y"), (5, "e", "x"), (6, "f", "z")]
    again = stream.reader.partitions(stream.start, stream.end)
    assert again, "a batch that was dropped out of can be planned again"


def test_a_stream_of_named_partitions_goes_on_when_one_is_dropped_and_comes_back(world):
    table = world.create("log parted")
    write(table, id=[1, 2, 3], name=["a", "b", "c"], p=["x", "y", "z"])
    stream = StreamRead(world.server.bootstrap, table, partitions="x,y")
    assert stream.all_rows() == [(1, "a", "x"), (2, "b", "y")]
    world.connection.admin.drop_partition(table.path, {"p": "x"})
    write(table, id=[4, 5], name=["d", "e"], p=["y", "z"])
    assert stream.all_rows() == [(4, "d", "y")]
    write(table, id=[6], name=["f"], p=["x"])
    assert stream.all_rows() == [(6, "f", "x")]


@pytest.mark.parametrize("kind", ["log parted", "keyed parted"])
def test_a_planned_read_does_not_see_a_new_partition(world, kind):
    table = world.create(kind)
    write(table, id=[1], name=["a"], p=["x"])
    reads = [planned(how, world, table) for how in ("batch", "stream")]
    write(table, id=[2], name=["b"], p=["y"])
    for read in reads:
        assert read.rows() == [(1, "a", "x")]
        assert read.rows() == [(1, "a", "x")], "a task that runs again reads the same"


# -- schemas -----------------------------------------------------------------------------------


@EITHER
@KINDS
@pytest.mark.parametrize("tiered", [False, True], ids=["log", "lake"])
def test_a_query_goes_on_with_its_columns_when_one_is_added(world, how, kind, tiered):
    table = world.create(kind)
    write(table, id=[1], name=["a"])
    if tiered:
        world.rounds.tier(table)
    read = planned(how, world, table)
    world.connection.admin.alter_table(table.path, add_columns="n INT")
    wider = world.connection.table(str(table.path))
    write(wider, id=[2], name=["b"], n=[5])
    if tiered:
        world.rounds.tier(wider)
    assert read.rows() == [(1, "a")]
    if isinstance(read, StreamRead):
        assert read.all_rows() == [(2, "b")]
    assert planned("batch", world, wider).rows() == [(1, "a", None), (2, "b", 5)]


# -- servers -----------------------------------------------------------------------------------


def test_reads_fail_in_bounded_time_while_the_server_is_away_and_go_on_when_it_is_back(world):
    rows = [(i, f"{i:0100}") for i in range(MANY)]
    columns = {"id": [i for i, _ in rows], "name": [name for _, name in rows]}
    tables = [world.create(kind) for kind in ("log", "keyed")]
    for table in tables:
        write(table, **columns)
    reads = [planned(how, world, table, **SMALL) for table in tables for how in ("batch", "stream")]
    begun = [(read, found, next(found)) for read in reads for found in (read.batches(),)]
    hasty = [planned("batch", world, table, **HASTY) for table in tables]
    follow = [StreamRead(world.server.bootstrap, table, **LATEST, **HASTY) for table in tables]
    world.server.kill()
    for ask in [*(read.rows for read in hasty), *(stream.plan for stream in follow)]:
        with pytest.raises(ZuflussError):
            ask()
    world.server.start()
    for table in tables:
        write(table, id=[MANY], name=["later"])
    for read, rest, first in begun:
        found = [row for batch in [first, *rest] for row in batch.to_pylist()]
        assert sorted(tuple(row.values()) for row in found) == rows
        if isinstance(read, StreamRead):
            assert read.all_rows() == [(MANY, "later")]


# -- queries of Spark: reads -------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(spark: Any, world: World) -> Any:
    zufluss.spark.register(spark, world.server.bootstrap)
    return spark


def follow(session: Any, table: Table) -> Any:
    """A streaming query of a table into memory, under the table's name."""
    frame = session.readStream.format("fluss").load(str(table.path))
    writer = frame.writeStream.format("memory").queryName(table.path.table)
    return writer.start()


def seen(session: Any, table: Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in session.table(table.path.table).collect())


def test_streaming_queries_live_through_changes_until_their_table_is_dropped(session, world):
    tables = [world.create(kind) for kind in KINDS_OF_QUERIES]
    queries = [follow(session, table) for table in tables]

    def arrived(number: int, p: str, **more: Any) -> None:
        """Write a row, and have the queries take it."""
        for table in tables:
            now = world.connection.table(str(table.path))
            write(now, id=[number], name=["row"], p=[p], **more)
        for query in queries:
            query.processAllAvailable()

    arrived(1, "x")
    arrived(2, "y")  # a new partition
    for table in tables:
        world.connection.admin.drop_partition(table.path, {"p": "x"})
    arrived(3, "y")
    for table in tables:
        world.connection.admin.alter_table(table.path, add_columns="n INT")
    arrived(4, "y", n=[5])
    world.restart()
    arrived(5, "x")
    for table, query in zip(tables, queries, strict=True):
        expected = [(1, "x"), (2, "y"), (3, "y"), (4, "y"), (5, "x")]
        assert seen(session, table) == [(i, "row", p) for i, p in expected]
        world.drop(table)
        with pytest.raises(Exception, match="TableNotExistError"):
            query.processAllAvailable()
        assert not query.isActive


def test_a_batch_query_of_a_dropped_table_says_so(session, world):
    table = world.create("log")
    write(table, id=[1], name=["a"])
    frame = session.read.format("fluss").load(str(table.path))
    assert frame.collect() == [(1, "a")]
    world.drop(table)
    write(world.create("log", table.path.table), id=[7], name=["other"])
    with pytest.raises(Exception, match="TableNotExistError"):
        frame.collect()
    assert session.read.format("fluss").load(str(table.path)).collect() == [(7, "other")]


# -- queries of Spark: writes ------------------------------------------------------------------


class Gate:
    """Holds the task of a job until something was done."""

    def __init__(self) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self._door.settimeout(WAIT_SECONDS)

    def hold(self, frame: Any) -> Any:
        """The frame, whose one task waits before its rows go on."""
        address = self._door.getsockname()

        def wait(batches: Iterator[Any]) -> Iterator[Any]:
            rows = list(batches)
            with suppress(OSError), socket.create_connection(address) as visit:
                visit.recv(1)  # nobody opens to a task that runs again
            yield from rows

        return frame.coalesce(1).mapInArrow(wait, frame.schema)

    def meanwhile(self, job: Callable[[], None], event: Callable[[], object]) -> str:
        """Do something while a job waits; returns `done` or the error of the job."""
        ended = "done"
        with ThreadPoolExecutor(1) as pool:
            happening = pool.submit(self._on_visit, event)
            try:
                job()
            except Exception as problem:
                ended = str(problem)
            assert happening.done(), ended
            happening.result()
        return ended

    def _on_visit(self, event: Callable[[], object]) -> None:
        with self._door, self._door.accept()[0]:
            event()


@pytest.fixture
def gate() -> Gate:
    return Gate()


def save(frame: Any, table: Table) -> Callable[[], None]:
    writer = frame.write.format("fluss").option("table", str(table.path)).mode("append")
    return writer.save


def held(world: World, table: Table) -> list[tuple[Any, ...]]:
    """The rows of a table, as the client reads them."""
    rows = world.connection.table(str(table.path)).scan().to_arrow().to_pylist()
    return sorted(tuple(row.values()) for row in rows)


ROWS = [(1, "a", "x"), (2, "b", "y")]


@pytest.mark.parametrize("kind", ["log parted", *(["keyed parted"] if FULL else [])])
def test_a_write_to_a_table_that_is_dropped_says_so_and_writes_to_no_other(
    session, world, gate, kind
):
    table = world.create(kind)

    def make_again() -> None:
        world.drop(table)
        world.create(kind, table.path.table)

    frame = gate.hold(session.createDataFrame(ROWS, "id INT, name STRING, p STRING"))
    ended = gate.meanwhile(save(frame, table), make_again)
    assert "TableNotExistError" in ended
    assert held(world, table) == []


@pytest.mark.parametrize("kind", ["log parted", *(["keyed parted"] if FULL else [])])
def test_a_write_is_right_whatever_happens_to_partitions_schema_and_server(
    session, world, gate, kind
):
    table = world.create(kind)
    write(table, id=[9], name=["old"], p=["x"])

    def change_everything() -> None:
        admin = world.connection.admin
        admin.drop_partition(table.path, {"p": "x"})
        admin.create_partition(table.path, {"p": "y"})
        admin.alter_table(table.path, add_columns="n INT")
        world.restart()

    frame = gate.hold(session.createDataFrame(ROWS, "id INT, name STRING, p STRING"))
    assert gate.meanwhile(save(frame, table), change_everything) == "done"
    assert held(world, table) == [(*row, None) for row in ROWS]


def test_streaming_writes_live_through_changes_until_their_table_is_dropped(
    session, world, tmp_path
):
    tables = [world.create(kind) for kind in KINDS_OF_QUERIES]
    schema = "id INT, name STRING, p STRING"
    (tmp_path / "rows").mkdir()
    source = session.readStream.schema(schema).json(str(tmp_path / "rows"))

    def start(table: Table, frame: Any) -> Any:
        writer = frame.writeStream.format("fluss").option("table", str(table.path))
        return writer.option("checkpointLocation", str(tmp_path / table.path.table)).start()

    def put(number: int, p: str) -> None:
        """A row for the queries."""
        made = tmp_path / f"{number}.json"
        made.write_text(json.dumps({"id": number, "name": "row", "p": p}))
        made.rename(tmp_path / "rows" / made.name)

    queries = [start(table, source) for table in tables]

    def arrived(number: int, p: str) -> None:
        put(number, p)
        for query in queries:
            query.processAllAvailable()

    arrived(1, "x")
    for table in tables:
        world.connection.admin.drop_partition(table.path, {"p": "x"})
    arrived(2, "x")
    world.restart()
    arrived(3, "y")
    for table in tables:
        assert held(world, table) == [(2, "row", "x"), (3, "row", "y")]
        world.connection.admin.alter_table(table.path, add_columns="n INT")
    put(4, "y")
    for query in queries:
        with pytest.raises(Exception, match=r"column 'n' of table .* is missing in the rows"):
            query.processAllAvailable()
    queries = [start(table, source.selectExpr("*", "id AS n")) for table in tables]
    arrived(5, "y")
    expected = [(2, "x", None), (3, "y", None), (4, "y", 4), (5, "y", 5)]
    for table in tables:
        assert held(world, table) == [(i, "row", p, n) for i, p, n in expected]
    for table, query in zip(tables, queries, strict=True):
        world.drop(table)
        put(6 + tables.index(table), "y")
        with pytest.raises(StreamingQueryException) as failed:
            query.processAllAvailable()
        assert "TableNotExistError" in whole_text(failed.value)


def whole_text(error: Any) -> str:
    """The text of a Spark error and of its causes."""
    return "" if error is None else f"{error} {error._stackTrace} {whole_text(error._cause)}"
