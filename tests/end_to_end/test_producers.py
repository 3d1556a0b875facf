"""Producers on a real server: over bare frames, with passwords, over crashes, by the admin client.

One server with an open listener and one that asks for a password, and a super user.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import zufluss
from tests.conftest import SERVERS
from tests.counts import FULL
from tests.end_to_end.raw import RawClient
from tests.end_to_end.test_leases import ports, raw, started, users
from tests.servers import WarmServer
from zufluss.client.sync.connection import Connection
from zufluss.errors import ErrorCode
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import offsets_from_proto, offsets_to_proto

__all__ = ["ports", "raw", "started", "users"]


INIT = ApiKey.INIT_PRODUCER
CHECKPOINT = ApiKey.CHECKPOINT_PRODUCER
RELEASE = ApiKey.RELEASE_PRODUCER
LIST = ApiKey.LIST_PRODUCERS
COLUMNS = "k INT NOT NULL, pv BIGINT SUM, seen BIGINT MAX"
TTL_MS = 600_000


@pytest.fixture
def conn(ports: dict[str, int]) -> Iterator[Connection]:
    with zufluss.connect(f"127.0.0.1:{ports['OPEN']}") as connection:
        yield connection


def unique() -> str:
    return f"t{uuid.uuid4().hex[:8]}"


def new_table(conn: Connection, name: str) -> int:
    """A table that aggregates; its id."""
    conn.admin.create_table(
        name,
        COLUMNS,
        primary_key=["k"],
        bucket_count=2,
        properties={"table.merge-engine": "aggregation"},
    )
    return conn.admin.table_info(name).table_id


@pytest.fixture
def table_id(conn: Connection) -> int:
    return new_table(conn, unique())


def init(
    table_id: int, producer_id: str = "job", *columns: int, **more: object
) -> m.InitProducerRequest:
    return m.InitProducerRequest(
        producer_id=producer_id, table_id=table_id, ttl_ms=TTL_MS, column_ids=columns, **more
    )


def checkpoint(
    table_id: int, epoch: int, *offsets: int, **more: object
) -> m.CheckpointProducerRequest:
    baseline = offsets_to_proto({(None, i): offset for i, offset in enumerate(offsets)})
    return m.CheckpointProducerRequest(
        producer_id="job", table_id=table_id, epoch=epoch, baseline=baseline, **more
    )


def release(table_id: int, epoch: int | None = None) -> m.ReleaseProducerRequest:
    return m.ReleaseProducerRequest(producer_id="job", table_id=table_id, epoch=epoch)


def test_epochs_checkpoints_and_the_end(raw: RawClient, table_id: int) -> None:
    producer = raw.call(INIT, init(table_id))
    assert (producer.epoch, producer.created, producer.exclusive) == (1, True, True)
    assert offsets_from_proto(producer.baseline) == {(None, 0): 0, (None, 1): 0}
    again = raw.call(INIT, init(table_id))
    assert (again.epoch, again.producer_number) == (2, producer.producer_number)
    fenced = int(ErrorCode.PRODUCER_FENCED)
    assert raw.error_code(CHECKPOINT, checkpoint(table_id, 1)) == fenced
    assert raw.error_code(RELEASE, release(table_id, 1)) == fenced
    assert raw.call(CHECKPOINT, checkpoint(table_id, 2, 0, 0)).remaining_ms > 0
    assert raw.error_code(INIT, init(table_id)) == int(ErrorCode.PRODUCER_STATE_INVALID)
    raw.call(RELEASE, release(table_id, 2))
    raw.call(RELEASE, release(table_id, 2))
    gone = int(ErrorCode.PRODUCER_NOT_FOUND)
    assert raw.error_code(RELEASE, release(table_id)) == gone
    assert raw.error_code(CHECKPOINT, checkpoint(table_id, 2)) == gone
    assert raw.call(INIT, init(table_id)).producer_number > producer.producer_number


def test_columns_have_one_owner(raw: RawClient, table_id: int) -> None:
    raw.call(INIT, init(table_id, "a", 1))
    raw.call(INIT, init(table_id, "b", 2))
    answer = raw.request(INIT, init(table_id, "c"))
    assert answer.error is not None
    assert answer.error.code == int(ErrorCode.COLUMN_LOCKED)
    assert "'a' owns the columns pv" in str(answer.error)


@pytest.mark.parametrize("producer_id", ["", "../x", "x" * 300])
def test_ids_that_are_none(raw: RawClient, table_id: int, producer_id: str) -> None:
    code = int(ErrorCode.INVALID_PRODUCER_ID_EXCEPTION)
    assert raw.error_code(INIT, init(table_id, producer_id)) == code
    register = m.RegisterProducerOffsetsRequest(producer_id=producer_id)
    assert raw.error_code(ApiKey.REGISTER_PRODUCER_OFFSETS, register) == code


def test_a_producer_belongs_to_who_made_it(users: dict[str, RawClient], table_id: int) -> None:
    refused = int(ErrorCode.AUTHORIZATION_EXCEPTION)
    users["anna"].call(INIT, init(table_id))
    for key, request in (
        (INIT, init(table_id)),
        (CHECKPOINT, checkpoint(table_id, 1)),
        (RELEASE, release(table_id)),
    ):
        assert users["bert"].error_code(key, request) == refused
    (found,) = users["bert"].call(LIST, m.ListProducersRequest(table_id=table_id)).producers
    assert found.owner == "anna"
    users["admin"].call(RELEASE, release(table_id))


def test_offsets_that_sinks_of_fluss_register(raw: RawClient, table_id: int) -> None:
    job = unique()
    offsets = m.PbProducerTableOffsets(
        table_id=table_id, bucket_offsets=[m.PbBucketOffset(bucket_id=1, log_end_offset=7)]
    )
    register = m.RegisterProducerOffsetsRequest(producer_id=job, table_offsets=[offsets])
    assert raw.call(ApiKey.REGISTER_PRODUCER_OFFSETS, register).result == 0
    assert raw.call(ApiKey.REGISTER_PRODUCER_OFFSETS, register).result == 1
    get = m.GetProducerOffsetsRequest(producer_id=job)
    assert list(raw.call(ApiKey.GET_PRODUCER_OFFSETS, get).table_offsets) == [offsets]
    delete = m.DeleteProducerOffsetsRequest(producer_id=job)
    raw.call(ApiKey.DELETE_PRODUCER_OFFSETS, delete)
    assert not raw.call(ApiKey.GET_PRODUCER_OFFSETS, get).HasField("producer_id")


def test_an_administrator_lists_and_drops(conn: Connection, raw: RawClient) -> None:
    name = unique()
    table_id = new_table(conn, name)
    producer = raw.call(INIT, init(table_id, "job", 1))
    (found,) = conn.admin.list_producers(name)
    assert (found.producer_id, found.table, found.columns) == ("job", f"fluss.{name}", ("pv",))
    assert (found.number, found.epoch, found.lost) == (producer.producer_number, 1, False)
    assert sorted(found.baseline.values()) == [0, 0]
    assert found.producer_id in {each.producer_id for each in conn.admin.list_producers()}
    conn.admin.drop_producer(name, "job")
    assert conn.admin.list_producers(name) == []
    with pytest.raises(zufluss.errors.ProducerNotFoundError):
        conn.admin.drop_producer(name, "job")


@pytest.mark.parametrize("end", ["stop", "kill"][0 if FULL else 1 :])
def test_epochs_grow_over_restarts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, end: str
) -> None:
    """An epoch of before must stay fenced by a server that begins with an empty memory."""
    server = WarmServer(tmp_path_factory.mktemp("producers"), {})
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        with zufluss.connect(server.bootstrap) as connection:
            table_id = new_table(connection, "views")
        seen: list[tuple[int, int]] = []
        for _ in range(3):
            with RawClient(server.port) as client:
                for _ in range(2):
                    producer = client.call(INIT, init(table_id))
                    seen.append((producer.producer_number, producer.epoch))
            if end == "stop":
                assert server.stop() == 0
            else:
                server.kill()
            server.start()
        assert seen == [(1, epoch) for epoch in range(1, 7)]
        with RawClient(server.port) as client:
            code = client.error_code(CHECKPOINT, checkpoint(table_id, 5))
            assert code == int(ErrorCode.PRODUCER_FENCED)
            client.call(CHECKPOINT, checkpoint(table_id, 6, 0, 0, checkpoint_id=3))
            server.kill()
        server.start()
        with RawClient(server.port) as client:
            producer = client.call(INIT, init(table_id))
            assert (producer.epoch, producer.checkpoint_id) == (7, 3)
