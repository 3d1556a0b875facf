"""Plans pin few states, whatever is planned and never read; reads have the rows of their plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

import zufluss
from tests.client.pk import create_table
from tests.end_to_end.kv_scans.support import metrics_address, open_pins
from tests.servers import WarmServer
from tests.spark.read.test_table import upsert
from tests.spark.stream_queries import BatchRead, StreamRead
from zufluss.client.sync.connection import Connection
from zufluss.spark.read import plan_pins
from zufluss.spark.read import stream as stream_reader
from zufluss.testing.server import DevServer

FEW = 4
ROOM = {"zufluss.metrics.port": "0", "kv.scanner.max-per-server": "6"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    """A server with room for six pins."""
    with WarmServer(tmp_path_factory.mktemp("pins"), ROOM) as server:
        metrics_address(server, server.pid)
        yield server


@pytest.fixture(scope="module")
def connection(server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(server.bootstrap) as connection:
        yield connection


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans have four pins."""
    monkeypatch.setattr(plan_pins, "PINS_MAX", FEW)
    monkeypatch.setattr(stream_reader, "PINS_MAX", FEW)


def test_a_table_with_more_buckets_than_a_server_has_room_for_is_read(server, connection):
    table = create_table(connection, "id INT, n INT", primary_key=["id"], bucket_count=8)
    upsert(table, id=list(range(200)), n=[1] * 200)
    read = BatchRead(server.bootstrap, table)
    assert len(read.groups) == 8
    assert open_pins(server) == FEW
    upsert(table, id=list(range(100, 300)), n=[2] * 200)
    expected = sorted(((i, 1) for i in range(200)), key=repr)
    assert read.rows() == expected, "the rows of the plan, pinned or not"
    assert open_pins(server) == 0
    assert read.rows() == expected, "again, with no pin left"


def test_a_stream_begins_with_the_state_of_more_buckets_than_a_server_has_room_for(
    server, connection
):
    table = create_table(connection, "id INT, n INT", primary_key=["id"], bucket_count=8)
    upsert(table, id=list(range(80)), n=[1] * 80)
    stream = StreamRead(server.bootstrap, table)
    assert open_pins(server) == FEW
    upsert(table, id=list(range(40, 120)), n=[2] * 80)
    assert stream.plan().rows() == sorted(((i, 1) for i in range(80)), key=repr)
    assert stream.plan().rows() == sorted(((i, 2) for i in range(40, 120)), key=repr)
    stream.reader.stop()
    assert open_pins(server) == 0


def test_plans_that_nobody_reads_leave_room_for_others(server, connection):
    tables = [
        create_table(connection, "id INT, n INT", primary_key=["id"], bucket_count=3)
        for _ in range(4)
    ]
    for table in tables:
        upsert(table, id=list(range(30)), n=[1] * 30)
    planned = [BatchRead(server.bootstrap, table) for table in tables for _ in range(3)]
    assert open_pins(server) <= FEW
    assert tables[0].scan().to_arrow().num_rows == 30, "somebody else has room"
    for read in planned:
        assert len(read.rows()) == 30
    assert open_pins(server) == 0


def test_a_limit_lets_go_of_what_it_does_not_read(server, connection):
    table = create_table(connection, "id INT, n INT", primary_key=["id"], bucket_count=8)
    upsert(table, id=list(range(80)), n=[1] * 80)
    assert len(BatchRead(server.bootstrap, table, limit="1").rows()) == 1
    assert open_pins(server) == 0
