"""Mutated requests: the server answers or closes the connection, and stays correct.

Each example takes a request that a client could send, damages it (bytes changed, cut, repeated,
numbers pushed to their limits, a batch's CRC made right again), and sends it. Whatever the server
makes of it, the connection answers the next request or is closed, another connection works, and
in the end every row that was accepted is read back by pyfluss.

`ZUFLUSS_FAULT=full` tries 200 000 of them, otherwise 300.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import Any

import fluss
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.counts import rounds
from tests.end_to_end.bad_batches import good, message, wrapped
from tests.end_to_end.helpers import DATABASE, append, create, fresh_path, ids, read_arrow
from tests.end_to_end.raw import (
    ConnectionEndedError,
    RawClient,
    fetch_request,
    produce_request,
    table_path,
    versions_request,
)
from zufluss.record.header import HEADER_SIZES, LENGTH_OVERHEAD, seal
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.frame import ResponseFrame, pack_request

EXAMPLES = rounds(300, 200_000)
EXTREMES = [0, 1, -1, 127, 128, 255, 2**15 - 1, 2**15, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]

pytestmark = pytest.mark.timeout(3600 if EXAMPLES > 1000 else 400)


@pytest.fixture(scope="module")
def fuzzed(dev_server: DevServer, conn: fluss.FlussConnection) -> Iterator[fluss.FlussTable]:
    """The table that mutated requests use; at the end pyfluss reads all accepted rows."""
    path = fresh_path("fuzzed")
    properties = {"table.statistics.columns": "id,text"}
    table = asyncio.run(create(conn, path, properties=properties))
    asyncio.run(append(table, ids(0, 10)))
    yield table
    rows = asyncio.run(read_arrow(table))
    rows.validate(full=True)
    assert rows.column("id").to_pylist()[:10] == list(range(10))
    assert asyncio.run(read_arrow(table, columns=["text"])).num_rows == rows.num_rows
    with RawClient(dev_server.port) as client:
        batches = client.batches(table.get_table_info().table_id)
    assert batches[-1].next_offset == rows.num_rows
    assert [b.base_offset for b in batches[1:]] == [b.next_offset for b in batches[:-1]]


def requests(table: fluss.FlussTable) -> list[tuple[int, bytes]]:
    """One valid request of every kind a client sends; none that would drop the table."""
    path, table_id = table.get_table_path(), table.get_table_info().table_id
    where = table_path(path.database_name, path.table_name)
    bucket = m.PbTableStatsReqForBucket(bucket_id=0)
    offsets: dict[str, Any] = {"follower_server_id": -1, "table_id": table_id, "bucket_id": [0]}
    found = [
        (ApiKey.API_VERSIONS, versions_request()),
        (ApiKey.GET_METADATA, m.MetadataRequest(table_path=[where])),
        (ApiKey.GET_TABLE_INFO, m.GetTableInfoRequest(table_path=where)),
        (ApiKey.GET_TABLE_SCHEMA, m.GetTableSchemaRequest(table_path=where, schema_id=1)),
        (ApiKey.LIST_TABLES, m.ListTablesRequest(database_name=DATABASE)),
        (ApiKey.INIT_WRITER, m.InitWriterRequest(table_path=[where])),
        (ApiKey.LIMIT_SCAN, m.LimitScanRequest(table_id=table_id, bucket_id=0, limit=5)),
        (ApiKey.GET_TABLE_STATS, m.GetTableStatsRequest(table_id=table_id, buckets_req=[bucket])),
        (ApiKey.LIST_OFFSETS, m.ListOffsetsRequest(offset_type=1, **offsets)),
        (ApiKey.LIST_OFFSETS, m.ListOffsetsRequest(offset_type=2, startTimestamp=9, **offsets)),
        (ApiKey.FETCH_LOG, fetch_request(table_id, max_wait_ms=50)),
        (ApiKey.FETCH_LOG, fetch_request(table_id, columns=(0, 1), max_wait_ms=50)),
        (ApiKey.FETCH_LOG, _filtered_fetch(table_id)),
        (ApiKey.AUTHENTICATE, m.AuthenticateRequest(protocol="PLAIN", token=b"\0a\0b")),
        (ApiKey.PRODUCE_LOG, produce_request(table_id, good())),
        (ApiKey.PRODUCE_LOG, produce_request(table_id, wrapped(message(compression="zstd")))),
        (ApiKey.PRODUCE_LOG, produce_request(table_id, wrapped(message(compression="lz4")))),
    ]
    return [(int(key), request.SerializeToString()) for key, request in found]


def _filtered_fetch(table_id: int) -> m.FetchLogRequest:
    """A fetch with `id > 5 AND text = 'row 3'`."""
    request = fetch_request(table_id, columns=(0,), max_wait_ms=50)
    table = request.tables_req[0]
    table.filter_schema_id = 1
    predicate = table.filter_predicate
    predicate.type = 1
    predicate.compound.function = 0
    greater = predicate.compound.children.add(type=0).leaf
    greater.function, greater.field_id = 4, 0
    greater.literals.add(literal_type=4, is_null=False, bigint_value=5)
    equal = predicate.compound.children.add(type=0).leaf
    equal.function, equal.field_id = 0, 1
    equal.literals.add(literal_type=8, is_null=False, string_value="row 3")
    return request


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """One to four kinds of damage."""
    damaged = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        damaged = _damage(draw, damaged)
    return bytes(damaged)


def _damage(draw: st.DrawFn, data: bytearray) -> bytearray:
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    kind = draw(st.sampled_from(["flip", "byte", "number", "cut", "drop", "repeat", "insert"]))
    if not data:
        return bytearray(draw(st.binary(max_size=20)))
    if kind == "flip":
        data[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == "byte":
        data[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    elif kind == "number":
        fmt = draw(st.sampled_from(["<h", "<i", "<q", ">i"]))
        size = struct.calcsize(fmt)
        value = draw(st.sampled_from(EXTREMES)) & (256**size - 1)
        data[at : at + size] = value.to_bytes(size, "little" if fmt[0] == "<" else "big")
    elif kind == "cut":
        del data[at:]
    elif kind == "drop":
        del data[at : at + draw(st.integers(1, 16))]
    elif kind == "repeat":
        data[at:at] = data[at : at + draw(st.integers(1, 64))]
    else:
        data[at:at] = draw(st.binary(min_size=1, max_size=16))
    return data


def resealed(batch: bytes) -> bytes:
    """The batch with a CRC that is right for whatever stands in it now, where it can have one."""
    data = bytearray(batch)
    magic = data[12] if len(data) > 12 else 255
    if magic < len(HEADER_SIZES) and len(data) >= HEADER_SIZES[magic]:
        struct.pack_into("<i", data, 8, len(data) - LENGTH_OVERHEAD)
        seal(data, 0)
    return bytes(data)


def survives(server: DevServer, data: bytes) -> None:
    """Send a frame; asserts that the next request is answered, or the connection closed."""
    with RawClient(server.port) as client:
        try:
            client.send(data)
            client.send(pack_request(ApiKey.API_VERSIONS, 0, 1, versions_body()))
            while (frame := client.receive()).request_id != 1:
                expected(frame)
        except ConnectionEndedError:
            pass
    with RawClient(server.port) as other:
        assert other.alive()


def versions_body() -> bytes:
    return versions_request().SerializeToString()


def expected(frame: ResponseFrame) -> None:
    """Assert that an error has a known code."""
    assert frame.error is None or "internal server error" not in frame.error.message


SETTINGS = settings(
    max_examples=EXAMPLES // 3,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@SETTINGS
@given(data=st.data())
def test_a_request_with_a_damaged_body_is_answered_or_closed(
    dev_server: DevServer, fuzzed: fluss.FlussTable, data: st.DataObject
) -> None:
    key, body = data.draw(st.sampled_from(requests(fuzzed)))
    damaged = data.draw(mutations(body))
    survives(dev_server, pack_request(key, 0, 0, damaged))


@SETTINGS
@given(data=st.data())
def test_a_damaged_frame_is_answered_or_closed(
    dev_server: DevServer, fuzzed: fluss.FlussTable, data: st.DataObject
) -> None:
    key, body = data.draw(st.sampled_from(requests(fuzzed)))
    damaged = data.draw(mutations(pack_request(key, 0, 0, body)))
    with RawClient(dev_server.port) as client:
        try:
            client.send(damaged)
        except ConnectionEndedError:
            pass
        for frame in client.finish():
            expected(frame)
    with RawClient(dev_server.port) as other:
        assert other.alive()


@SETTINGS
@given(data=st.data())
def test_a_damaged_batch_is_refused_or_can_be_read_by_everybody(
    dev_server: DevServer, fuzzed: fluss.FlussTable, data: st.DataObject
) -> None:
    table_id = fuzzed.get_table_info().table_id
    with RawClient(dev_server.port) as client:
        with_statistics = client.fetch(table_id, max_bytes=1).records
        bases = [wrapped(message(compression=c)) for c in (None, "zstd", "lz4")]
        batch = data.draw(mutations(data.draw(st.sampled_from([*bases, with_statistics]))))
        if data.draw(st.booleans()):
            batch = resealed(batch)
        before = client.end_offset(table_id)
        entry = client.produce(table_id, batch)
        after = client.end_offset(table_id)
        if entry.error_code:
            assert after == before, entry
        else:
            assert after - before in (0, 7, 10, 14, 20), "a known batch, a new one, or two"
            rows = asyncio.run(read_arrow(fuzzed, {0: before}))
            assert rows.num_rows == after - before
