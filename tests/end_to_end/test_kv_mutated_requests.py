"""Mutated requests to primary-key tables: answered or disconnected, and the table stays right.

As `test_mutated_requests`, with PUT_KV, LOOKUP, PREFIX_LOOKUP and LIMIT_SCAN. Whatever gets in, in
the end the state is the fold of the changelog, and pyfluss reads both.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

import fluss
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.end_to_end.bad_kv import CODEC, ROW, SCHEMA, good
from tests.end_to_end.helpers import DATABASE, fresh_path, in_time
from tests.end_to_end.kv import (
    HEADER_SIZE,
    changelog,
    create_by_hand,
    kv_batch,
    limit_values,
    lookup_request,
    prefix_request,
    put,
    put_request,
    raw_changelog,
    seal_kv,
    values_of,
)
from tests.end_to_end.raw import ConnectionEndedError, RawClient
from tests.end_to_end.test_mutated_requests import EXAMPLES, SETTINGS, expected, mutations, survives
from tests.kv.model import Change, Rules, fold
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.frame import pack_request

RULES = Rules(len(SCHEMA.columns), (0,))
OTHER = (6, None, -1, [], [(2, None)], (None, "ü"))
KEYS = [CODEC.key(row) for row in (ROW, OTHER)]
VERSIONS = {ApiKey.PUT_KV: 2, ApiKey.LOOKUP: 1, ApiKey.PREFIX_LOOKUP: 1, ApiKey.LIMIT_SCAN: 0}

pytestmark = pytest.mark.timeout(3600 if EXAMPLES > 1000 else 400)


def batches() -> list[bytes]:
    """Batches the server takes: rows, deletes, several records, a column left out."""
    return [
        good(),
        kv_batch([CODEC.put(ROW), CODEC.put(OTHER), CODEC.delete(ROW)]),
        kv_batch([CODEC.delete(OTHER)]),
    ]


@pytest.fixture(scope="module")
def fuzzed(dev_server: DevServer, conn: fluss.FlussConnection) -> Iterator[int]:
    """The table that mutated requests use; at the end its rows equal its changelog."""
    path = fresh_path("fuzzed_kv")
    with RawClient(dev_server.port) as client:
        table_id = create_by_hand(client, path.table_name, SCHEMA)
        assert put(client, table_id, kv_batch([CODEC.put(OTHER)])).error_code == 0
    yield table_id
    with RawClient(dev_server.port) as client:
        rows = state_is_fold(client, table_id)
    records = asyncio.run(read_by_pyfluss(conn, path, rows))
    assert records == rows


def state_is_fold(client: RawClient, table_id: int) -> int:
    """Check promise A4 with all keys the changelog knows; the number of its records."""
    records = raw_changelog(client, table_id, SCHEMA)
    state = fold([Change(*record) for record in records], RULES)  # type: ignore[arg-type]
    known = {row[0] for _, _, row in records}
    values = values_of(client, table_id, [CODEC.key((key,)) for key in known])
    assert [CODEC.value(v) for v in values] == [state.get((key,)) for key in known]
    request = m.LimitScanRequest(table_id=table_id, bucket_id=0, limit=1_000_000)
    scanned = limit_values(client.call(ApiKey.LIMIT_SCAN, request).records)
    rows = [CODEC.value(v) for v in scanned]
    assert {row[:1]: row for row in rows if row is not None} == state
    return len(records)


async def read_by_pyfluss(conn: fluss.FlussConnection, path: fluss.TablePath, count: int) -> int:
    table = await in_time(conn.get_table(fluss.TablePath(DATABASE, path.table_name)))
    return len(await changelog(table, count))


def requests(table_id: int) -> list[tuple[ApiKey, bytes]]:
    """One valid request of every kind."""
    found = [
        *((ApiKey.PUT_KV, put_request(table_id, batch)) for batch in batches()),
        (ApiKey.PUT_KV, put_request(table_id, good(), targets=[0, 1, 3])),
        (ApiKey.LOOKUP, lookup_request(table_id, [*KEYS, b"\x63"])),
        (ApiKey.PREFIX_LOOKUP, prefix_request(table_id, [b"", *KEYS])),
        (ApiKey.LIMIT_SCAN, m.LimitScanRequest(table_id=table_id, bucket_id=0, limit=5)),
    ]
    return [(key, request.SerializeToString()) for key, request in found]


@SETTINGS
@given(data=st.data())
def test_a_request_with_a_damaged_body_is_answered_or_closed(
    dev_server: DevServer, fuzzed: int, data: st.DataObject
) -> None:
    key, body = data.draw(st.sampled_from(requests(fuzzed)))
    damaged = data.draw(mutations(body))
    survives(dev_server, pack_request(key, VERSIONS[key], 0, damaged))


@SETTINGS
@given(data=st.data())
def test_a_damaged_frame_is_answered_or_closed(
    dev_server: DevServer, fuzzed: int, data: st.DataObject
) -> None:
    key, body = data.draw(st.sampled_from(requests(fuzzed)))
    damaged = data.draw(mutations(pack_request(key, VERSIONS[key], 0, body)))
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
def test_a_damaged_batch_is_refused_or_the_state_is_the_fold_of_the_changelog(
    dev_server: DevServer, fuzzed: int, data: st.DataObject
) -> None:
    batch = bytearray(data.draw(mutations(data.draw(st.sampled_from(batches())))))
    if data.draw(st.booleans()) and len(batch) >= HEADER_SIZE:
        struct.pack_into("<i", batch, 0, len(batch) - 4)
        batch = bytearray(seal_kv(batch))
    targets = data.draw(st.sampled_from([(), (0,), (0, 1, 3)]))
    with RawClient(dev_server.port) as client:
        before = client.end_offset(fuzzed)
        entry = put(client, fuzzed, bytes(batch), targets=targets)
        if entry.error_code:
            assert client.end_offset(fuzzed) == before, entry
        else:
            assert client.end_offset(fuzzed) == entry.log_end_offset
            state_is_fold(client, fuzzed)
