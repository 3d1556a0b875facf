"""Bad bytes sent to a live server: the right error or a closed connection, no other effect.

After every case a second connection still works, the table's end has not moved, and pyfluss reads
exactly what it read before.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.bad_batches import BAD, CORRUPT, good, message, wrapped
from tests.end_to_end.helpers import append, create, fresh_path, ids, read_arrow
from tests.end_to_end.raw import (
    ConnectionEndedError,
    RawClient,
    code_of,
    fetch_request,
    produce_request,
    table_path,
    versions_request,
)
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.frame import pack_request

MALFORMED, UNSUPPORTED, TOO_LARGE = 3, 2, 13
UNKNOWN_BUCKET, BAD_PROJECTION, BAD_FILTER = 21, 34, 68
MIB = 1 << 20
FRAME_MAX = 100 * MIB


@pytest.fixture(scope="module")
def target(conn: fluss.FlussConnection) -> fluss.FlussTable:
    """A table with ten rows that must stay as they are."""

    async def fill() -> fluss.FlussTable:
        table = await create(conn, fresh_path("bad_input"), bucket_count=2)
        await append(table, ids(0, 10))
        return table

    return asyncio.run(fill())


@pytest.fixture
def table_id(target: fluss.FlussTable) -> int:
    return int(target.get_table_info().table_id)


@pytest.fixture
def attacker(
    dev_server: DevServer, raw: RawClient, target: fluss.FlussTable, table_id: int
) -> Iterator[RawClient]:
    """A connection to misuse; afterwards other connections work and the table is unchanged."""
    before = [raw.end_offset(table_id, bucket) for bucket in (0, 1)]
    with RawClient(dev_server.port, silent=True) as client:
        yield client
    assert [raw.end_offset(table_id, bucket) for bucket in (0, 1)] == before
    with RawClient(dev_server.port) as fresh:
        assert fresh.alive()
    rows = asyncio.run(read_arrow(target))
    assert rows.column("id").to_pylist() == list(range(10))


def resident(server: DevServer) -> int:
    """Memory of the server process in bytes."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


# -- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BAD)
def test_a_bad_batch_is_refused_and_nothing_is_written(
    raw: RawClient, table_id: int, case: str
) -> None:
    code, records = BAD[case]
    before = raw.end_offset(table_id)
    entry = raw.produce(table_id, records)
    assert (entry.bucket_id, entry.error_code) == (0, code), entry.error_message
    assert entry.error_message
    assert raw.end_offset(table_id) == before


def test_after_all_bad_batches_the_table_is_unchanged_and_takes_a_good_one(
    attacker: RawClient, raw: RawClient, table_id: int, conn: fluss.FlussConnection
) -> None:
    for code, records in BAD.values():
        assert attacker.produce(table_id, records).error_code == code
    other = asyncio.run(create(conn, fresh_path("good"))).get_table_info()
    assert attacker.produce(other.table_id, good()).error_code == 0
    assert raw.end_offset(other.table_id) == 7


async def test_a_batch_of_another_tables_schema_is_refused(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> None:
    wide = pa.schema([("a", pa.int32()), ("b", pa.list_(pa.string())), ("c", pa.float64())])
    other = await create(conn, path, wide)
    other_id = other.get_table_info().table_id
    assert raw.produce(other_id, good()).error_code == CORRUPT
    assert raw.end_offset(other_id) == 0


async def test_a_null_in_a_column_that_has_none_is_refused(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> None:
    strict = pa.schema([pa.field("a", pa.int32(), nullable=False)])
    table = await create(conn, path, strict)
    table_id = table.get_table_info().table_id
    batch = pa.record_batch([pa.array([1, None], pa.int32())], ["a"])
    assert raw.produce(table_id, wrapped(message(batch), 2)).error_code == CORRUPT
    assert raw.end_offset(table_id) == 0


async def test_a_produce_to_a_primary_key_table_is_refused(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient
) -> None:
    table = await create(conn, path, primary_keys=["id"])
    table_id = table.get_table_info().table_id
    assert raw.produce(table_id, good()).error_code == 15
    assert raw.end_offset(table_id) == 0


# -- frames -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 7, -1, -(2**31)])
def test_a_frame_shorter_than_its_header_closes_the_connection(
    attacker: RawClient, length: int
) -> None:
    attacker.send(struct.pack(">ihhi", length, ApiKey.API_VERSIONS, 0, 1))
    assert attacker.closed()


@pytest.mark.parametrize("length", [FRAME_MAX + 1, 2**31 - 1])
def test_a_frame_over_the_limit_is_refused_by_name_and_the_connection_closed(
    attacker: RawClient, length: int
) -> None:
    attacker.send(struct.pack(">ihhi", length, ApiKey.PRODUCE_LOG, 0, 77))
    frame = attacker.receive()
    assert (frame.request_id, code_of(frame.error)) == (77, TOO_LARGE)
    assert attacker.closed()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"\xff" * 64,
        bytes(64),
    ],
    ids=["http", "tls", "ones", "zeros"],
)
def test_another_protocol_closes_the_connection(attacker: RawClient, data: bytes) -> None:
    attacker.send(data)
    attacker.finish()


@pytest.mark.parametrize("cut", [1, 3, 4, 8, 11, 12, 30])
def test_a_frame_that_ends_early_hurts_nobody(attacker: RawClient, table_id: int, cut: int) -> None:
    body = produce_request(table_id, good()).SerializeToString()
    attacker.send(pack_request(ApiKey.PRODUCE_LOG, 0, 5, body)[:cut])
    assert attacker.finish() == []


def test_a_frame_may_arrive_byte_by_byte(raw: RawClient) -> None:
    frame = pack_request(ApiKey.API_VERSIONS, 0, 9, versions_request().SerializeToString())
    for i in range(len(frame)):
        raw.send(frame[i : i + 1])
    answer = raw.receive()
    assert (answer.request_id, answer.error) == (9, None)


def test_many_frames_in_one_packet_are_all_answered(raw: RawClient) -> None:
    body = versions_request().SerializeToString()
    raw.send(b"".join(pack_request(ApiKey.API_VERSIONS, 0, i, body) for i in range(1000)))
    assert sorted(raw.receive().request_id or 0 for _ in range(1000)) == list(range(1000))


def test_declared_lengths_reserve_no_memory(dev_server: DevServer, attacker: RawClient) -> None:
    """Two hundred frames of 100 MiB each are announced; what arrives of each is a kilobyte."""
    before = resident(dev_server)
    clients = [RawClient(dev_server.port, silent=True) for _ in range(200)]
    try:
        for client in clients:
            client.send(struct.pack(">ihhi", FRAME_MAX, ApiKey.PRODUCE_LOG, 0, 1) + bytes(1000))
        assert attacker.alive()
        assert resident(dev_server) - before < 100 * MIB
    finally:
        for client in clients:
            client.socket.close()
    assert attacker.alive()


def test_a_large_frame_of_nonsense_is_refused_and_its_memory_comes_back(
    dev_server: DevServer, attacker: RawClient, table_id: int
) -> None:
    body = produce_request(table_id, bytes(40 * MIB)).SerializeToString()
    attacker.error_code(ApiKey.PRODUCE_LOG, body)
    before = resident(dev_server)
    for _ in range(4):
        assert attacker.produce(table_id, bytes(40 * MIB)).error_code == CORRUPT
    assert resident(dev_server) - before < 100 * MIB


def test_a_client_that_does_not_read_does_not_fill_the_servers_memory(
    dev_server: DevServer, attacker: RawClient, conn: fluss.FlussConnection
) -> None:
    """Requests fetches of a megabyte each, and does not read the answers."""
    assert attacker.alive()
    blob = pa.schema([("b", pa.binary())])
    path = fresh_path("unread")
    table = asyncio.run(
        create(conn, path, blob, properties={"table.log.arrow.compression.type": "NONE"})
    )
    asyncio.run(append(table, pa.record_batch([[bytes(MIB)]], schema=blob)))
    table_id = table.get_table_info().table_id
    before = resident(dev_server)
    for _ in range(2000):
        attacker.begin(ApiKey.FETCH_LOG, fetch_request(table_id, max_wait_ms=0))
    with RawClient(dev_server.port) as other:
        assert all(other.alive() for _ in range(50))
    assert resident(dev_server) - before < 400 * MIB, "of the two thousand that were asked for"


# -- requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [-1, 0, 999, 1065, 9999, 29_999, 32_767, -(2**15)])
def test_an_unknown_api_key_is_answered_and_the_connection_lives(
    attacker: RawClient, key: int
) -> None:
    assert attacker.error_code(key, b"anything") == UNSUPPORTED
    assert attacker.alive()


FOR_SERVERS = [key for key in ApiKey if not APIS[key].for_clients]


@pytest.mark.parametrize("key", FOR_SERVERS, ids=lambda k: k.name)
def test_an_api_between_servers_is_not_for_clients(attacker: RawClient, key: ApiKey) -> None:
    body = APIS[key].request().SerializePartialToString()
    assert attacker.error_code(key, body) in (UNSUPPORTED, 48)
    assert attacker.alive()


SERVED = [
    ApiKey.API_VERSIONS,
    ApiKey.PRODUCE_LOG,
    ApiKey.FETCH_LOG,
    ApiKey.LIST_OFFSETS,
    ApiKey.LIMIT_SCAN,
    ApiKey.GET_TABLE_STATS,
    ApiKey.INIT_WRITER,
    ApiKey.GET_METADATA,
    ApiKey.GET_TABLE_INFO,
    ApiKey.GET_TABLE_SCHEMA,
    ApiKey.CREATE_TABLE,
    ApiKey.CREATE_PARTITION,
    ApiKey.ALTER_TABLE,
    ApiKey.LIST_PARTITION_INFOS,
]


@pytest.mark.parametrize("version", [1, 2, -1, 32_767])
@pytest.mark.parametrize("key", SERVED, ids=lambda k: k.name)
def test_a_version_outside_the_range_is_refused(
    attacker: RawClient, key: ApiKey, version: int
) -> None:
    body = APIS[key].request().SerializePartialToString()
    assert attacker.error_code(key, body, version) == UNSUPPORTED
    assert attacker.alive()


NOT_MESSAGES = {
    "an open varint": b"\x08" + b"\xff" * 11,
    "a varint without end": b"\xff" * 10,
    "a cut varint": b"\x08\x80",
    "field number 0": b"\x00\x01",
    "a group end": b"\x0c",
    "wire type 7": b"\x0f\x00",
    "a length past the end": b"\x22\xff\xff\xff\x7f",
    "a negative length": b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    "text": b"this is no message",
}


@pytest.mark.parametrize("case", NOT_MESSAGES)
@pytest.mark.parametrize("key", SERVED, ids=lambda k: k.name)
def test_a_body_that_is_no_message_is_refused_and_the_connection_lives(
    attacker: RawClient, key: ApiKey, case: str
) -> None:
    assert attacker.error_code(key, NOT_MESSAGES[case]) == MALFORMED
    assert attacker.alive()


REQUIRED = [k for k in SERVED if any(f.is_required for f in APIS[k].request.DESCRIPTOR.fields)]


@pytest.mark.parametrize("key", REQUIRED, ids=lambda k: k.name)
def test_a_request_without_its_required_fields_is_refused(attacker: RawClient, key: ApiKey) -> None:
    assert attacker.error_code(key, b"") == MALFORMED
    assert attacker.alive()


def test_a_request_with_fields_from_the_future_is_served(raw: RawClient, table_id: int) -> None:
    unknown = b"\xfa\x3f\x03abc" + b"\xf8\x3f\x2a" + b"\xfd\x3f\x00\x00\x00\x00"
    request = fetch_request(table_id).SerializeToString() + unknown
    assert raw.error_code(ApiKey.FETCH_LOG, request) == 0
    batch = produce_request(2**40, good()).SerializeToString() + unknown
    assert raw.error_code(ApiKey.PRODUCE_LOG, batch) == 0


def test_a_request_of_many_megabytes_without_records_is_refused(attacker: RawClient) -> None:
    request = m.MetadataRequest()
    for _ in range(1000):
        request.table_path.add(database_name="x" * 10_000, table_name="y" * 10_000)
    assert attacker.error_code(ApiKey.GET_METADATA, request) == TOO_LARGE
    assert attacker.alive()


def test_a_produce_with_absurdly_many_entries_is_answered(
    dev_server: DevServer, attacker: RawClient, table_id: int
) -> None:
    request = m.ProduceLogRequest(acks=-1, table_id=table_id, timeout_ms=1000)
    for i in range(20_000):
        request.buckets_req.add(bucket_id=i + 2, records=b"x")
    answer = attacker.call(ApiKey.PRODUCE_LOG, request)
    assert {e.error_code for e in answer.buckets_resp} == {UNKNOWN_BUCKET}
    assert attacker.alive()


@pytest.mark.parametrize("bucket", [2, -1, 2**31 - 1, -(2**31)])
def test_a_bucket_that_is_not_there_is_refused_everywhere(
    attacker: RawClient, table_id: int, bucket: int
) -> None:
    assert attacker.produce(table_id, good(), bucket).error_code == UNKNOWN_BUCKET
    assert attacker.fetch(table_id, 0, bucket, max_wait_ms=1).error_code == UNKNOWN_BUCKET
    scan = m.LimitScanRequest(table_id=table_id, bucket_id=bucket, limit=1)
    assert attacker.call(ApiKey.LIMIT_SCAN, scan).error_code == UNKNOWN_BUCKET


@pytest.mark.parametrize(
    "columns", [(2,), (-1,), (0, 0), (1, 0), (0, 1, 2), (2**31 - 1,), (0,) * 1000], ids=str
)
def test_a_projection_out_of_range_is_refused(
    attacker: RawClient, table_id: int, columns: tuple[int, ...]
) -> None:
    assert attacker.fetch(table_id, columns=columns).error_code == BAD_PROJECTION
    assert attacker.alive()


def _leaf(**fields: int) -> m.PbPredicate:
    return m.PbPredicate(type=0, leaf=m.PbLeafPredicate(**fields))


def _compound(*children: m.PbPredicate, function: int = 0) -> m.PbPredicate:
    body = m.PbCompoundPredicate(function=function, children=children)
    return m.PbPredicate(type=1, compound=body)


def _nested(depth: int) -> m.PbPredicate:
    predicate = _leaf(function=6, field_id=0)
    for _ in range(depth):
        predicate = _compound(predicate)
    return predicate


FILTERS: dict[str, tuple[int, m.PbPredicate]] = {
    "neither leaf nor compound": (BAD_FILTER, m.PbPredicate(type=7)),
    "a leaf without its body": (BAD_FILTER, m.PbPredicate(type=0)),
    "a compound without its body": (BAD_FILTER, m.PbPredicate(type=1)),
    "an unknown test": (BAD_FILTER, _leaf(function=99, field_id=0)),
    "an unknown column": (BAD_FILTER, _leaf(function=6, field_id=99)),
    "an unknown combination": (BAD_FILTER, _compound(_nested(0), function=9)),
    "a comparison with nothing": (BAD_FILTER, _leaf(function=0, field_id=0)),
    "too deep for us": (BAD_FILTER, _nested(42)),
}


@pytest.mark.parametrize("case", FILTERS)
def test_a_malformed_filter_is_refused(attacker: RawClient, table_id: int, case: str) -> None:
    code, predicate = FILTERS[case]
    request = fetch_request(table_id)
    request.tables_req[0].filter_predicate.CopyFrom(predicate)
    (table,) = attacker.call(ApiKey.FETCH_LOG, request).tables_resp
    assert table.buckets_resp[0].error_code == code
    assert attacker.alive()


def test_a_filter_too_deep_for_any_decoder_is_refused(attacker: RawClient, table_id: int) -> None:
    inner = b""
    for _ in range(5000):  # field 2 of a compound, field 3 of a predicate, again and again
        inner = b"\x08\x01" + _field(3, b"\x08\x00" + _field(2, inner))
    table = _field(3, b"\x08\x00" + b"\x10\x00" + _field(5, inner))
    body = b"\x08\x00\x10\x01" + table
    assert attacker.error_code(ApiKey.FETCH_LOG, body) == MALFORMED
    assert attacker.alive()


def _field(number: int, data: bytes) -> bytes:
    size, length = len(data), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


@pytest.mark.parametrize("offset", [11, -1, -3, 2**63 - 1, -(2**63)])
def test_a_fetch_outside_the_log_is_refused(
    attacker: RawClient, raw: RawClient, table_id: int, offset: int
) -> None:
    assert attacker.fetch(table_id, offset).error_code == 19


@pytest.mark.parametrize("limit", [0, -1, -(2**31)])
def test_a_limit_scan_of_no_rows_returns_none(
    attacker: RawClient, table_id: int, limit: int
) -> None:
    scan = m.LimitScanRequest(table_id=table_id, bucket_id=0, limit=limit)
    answer = attacker.call(ApiKey.LIMIT_SCAN, scan)
    assert (answer.error_code, answer.records) == (0, b"")


@pytest.mark.parametrize("bytes_max", [0, 1, -1, -(2**31)])
def test_absurd_fetch_limits_still_return_a_batch(
    attacker: RawClient, raw: RawClient, table_id: int, bytes_max: int
) -> None:
    bucket = next(b for b in (0, 1) if raw.end_offset(table_id, b))
    entry = attacker.fetch(
        table_id, 0, bucket, max_bytes=bytes_max, max_bucket_bytes=bytes_max, max_wait_ms=0
    )
    assert entry.error_code == 0
    assert len(entry.records) > 48


# -- long polls ---------------------------------------------------------------------------------


def first_answer(client: RawClient, *requests: int) -> int:
    """Which of these requests is answered first."""
    frame = client.receive()
    assert frame.request_id in requests
    return frame.request_id


@pytest.mark.parametrize("case", ["nothing new", "unknown table", "unknown bucket"])
def test_a_fetch_without_an_answer_waits_and_does_not_block_the_connection(
    attacker: RawClient, raw: RawClient, table_id: int, case: str
) -> None:
    """An error that clients retry at once is held like an empty fetch."""
    snapshots = {
        "nothing new": (table_id, raw.end_offset(table_id, 0), 0),
        "unknown table": (2**40, 0, 0),
        "unknown bucket": (table_id, 0, 99),
    }[case]
    held = attacker.begin(ApiKey.FETCH_LOG, fetch_request(*snapshots, max_wait_ms=400))
    others = [attacker.begin(ApiKey.API_VERSIONS, versions_request()) for _ in range(5)]
    order = [attacker.receive().request_id for _ in range(6)]
    assert order == [*others, held]


def test_a_held_error_does_not_hold_back_data(
    attacker: RawClient, raw: RawClient, table_id: int
) -> None:
    bucket = next(b for b in (0, 1) if raw.end_offset(table_id, b))
    request = fetch_request(2**40, max_wait_ms=30_000)
    request.tables_req.append(fetch_request(table_id, 0, bucket).tables_req[0])
    answer = attacker.call(ApiKey.FETCH_LOG, request)
    found = {t.table_id: t.buckets_resp[0] for t in answer.tables_resp}
    assert found[2**40].error_code == UNKNOWN_BUCKET
    assert found[table_id].records


async def test_a_waiting_fetch_is_answered_by_the_append_it_waits_for(
    conn: fluss.FlussConnection, path: fluss.TablePath, raw: RawClient, dev_server: DevServer
) -> None:
    table_id = (await create(conn, path)).get_table_info().table_id
    with RawClient(dev_server.port) as reader:
        request = reader.begin(ApiKey.FETCH_LOG, fetch_request(table_id, max_wait_ms=50_000))
        reader.begin(ApiKey.API_VERSIONS, versions_request())
        assert reader.receive().request_id == request + 1, "the fetch waits"
        assert raw.produce(table_id, good()).error_code == 0
        frame = reader.answer(request)
    answer = m.FetchLogResponse.FromString(bytes(frame.body))
    assert answer.tables_resp[0].buckets_resp[0].records


async def test_a_waiting_fetch_of_a_dropped_table_is_answered(
    conn: fluss.FlussConnection, path: fluss.TablePath, dev_server: DevServer
) -> None:
    table_id = (await create(conn, path)).get_table_info().table_id
    with RawClient(dev_server.port) as reader:
        request = reader.begin(ApiKey.FETCH_LOG, fetch_request(table_id, max_wait_ms=2_000))
        reader.begin(ApiKey.API_VERSIONS, versions_request())
        reader.receive()
        await conn.get_admin().drop_table(path)
        frame = reader.answer(request)
    answer = m.FetchLogResponse.FromString(bytes(frame.body))
    assert answer.tables_resp[0].buckets_resp[0].error_code == UNKNOWN_BUCKET


def test_a_client_that_leaves_during_its_fetch_is_forgotten(
    attacker: RawClient, dev_server: DevServer, raw: RawClient, table_id: int
) -> None:
    offset = raw.end_offset(table_id, 0)
    for _ in range(50):
        with RawClient(dev_server.port) as client:
            client.begin(ApiKey.FETCH_LOG, fetch_request(table_id, offset, max_wait_ms=50_000))
            client.begin(ApiKey.FETCH_LOG, fetch_request(2**40, max_wait_ms=50_000))
    assert attacker.alive()


def test_metadata_of_a_missing_table_is_refused_and_the_connection_lives(
    attacker: RawClient,
) -> None:
    request = m.MetadataRequest(table_path=[table_path("wire", "no such table")])
    assert attacker.error_code(ApiKey.GET_METADATA, request) == 7
    assert attacker.alive()


def test_metadata_of_a_missing_partition_is_held_back_without_blocking_the_connection(
    attacker: RawClient,
) -> None:
    """A writer to a missing partition asks without a pause, tens of thousands of times."""
    missing = m.MetadataRequest(partitions_id=[987_654])
    held = [attacker.begin(ApiKey.GET_METADATA, missing) for _ in range(30)]
    others = [attacker.begin(ApiKey.API_VERSIONS, versions_request()) for _ in range(5)]
    order = [attacker.receive() for _ in range(35)]
    assert {frame.request_id for frame in order} == {*held, *others}
    assert {frame.request_id for frame in order[:-1]} >= set(others)
    assert code_of(order[-1].error) == 36


def test_rows_of_different_missing_partitions_do_not_wait_for_each_other(
    attacker: RawClient,
) -> None:
    """A lookup join asks once for each row, and takes the error for "no row"."""
    again = [
        attacker.begin(ApiKey.GET_METADATA, m.MetadataRequest(partitions_id=[987_655]))
        for _ in range(30)
    ]
    for row in range(987_700, 987_740):
        attacker.begin(ApiKey.GET_METADATA, m.MetadataRequest(partitions_id=[row]))
    order = [attacker.receive() for _ in range(70)]
    assert {code_of(frame.error) for frame in order} == {36}
    assert order[-1].request_id == again[-1]


def test_a_connection_that_is_reset_hurts_nobody(attacker: RawClient, table_id: int) -> None:
    for _ in range(20):
        attacker.begin(ApiKey.FETCH_LOG, fetch_request(table_id, max_wait_ms=0))
    attacker.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    attacker.socket.close()


def test_a_closed_connection_is_noticed_by_this_client(dev_server: DevServer) -> None:
    with RawClient(dev_server.port) as client:
        client.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionEndedError):
            client.receive()
