"""Bad input to primary-key tables: an error of the protocol, nothing written, no hanging up.

Everything that pyfluss would never send: batches that are wrong in one way (`bad_kv`), keys and
rows that do not fit, target columns that cannot be, tables and buckets of the wrong kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.bad_batches import wrapped
from tests.end_to_end.bad_kv import BAD, CODEC, RESIDENT, ROW, good, with_field
from tests.end_to_end.helpers import append, create, fresh_path, ids
from tests.end_to_end.kv import (
    KEYED,
    LOOKUP_VERSION,
    PUT_VERSION,
    Codec,
    create_by_hand,
    kv_batch,
    lookup_request,
    prefix_request,
    prefixed,
    put,
    put_request,
    raw_changelog,
    values_of,
)
from tests.end_to_end.raw import RawClient
from zufluss.model.schema import Schema
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

UNKNOWN_BUCKET, NO_PRIMARY_KEY, BAD_TARGETS = 21, 20, 35
TOO_LARGE = 13
EMPTY_VALUES = bytes.fromhex("050000000000000000")
"""What a limit scan of an empty primary-key table answers."""


@pytest.fixture(scope="module")
def table_id(dev_server: DevServer, conn: fluss.FlussConnection) -> int:
    """A table with one row, which nothing here may change."""
    with RawClient(dev_server.port) as client:
        table_id = create_by_hand(client, fresh_path("kv_bad").table_name, CODEC.schema)
        entry = put(client, table_id, kv_batch([CODEC.put(RESIDENT)]))
        assert not entry.error_code, entry.error_message
    return table_id


@pytest.fixture(scope="module")
def log_table_id(conn: fluss.FlussConnection) -> int:
    """A log table with two rows."""

    async def make() -> int:
        table = await create(conn, fresh_path("kv_log"))
        await append(table, ids(0, 2))
        return int(table.get_table_info().table_id)

    return asyncio.run(make())


def nothing_happened(raw: RawClient, table_id: int) -> None:
    """Assert that the table is unchanged, and that the connection answers."""
    keys = [CODEC.key(RESIDENT), CODEC.key(ROW)]
    assert raw.end_offset(table_id) == 1
    assert [CODEC.value(v) for v in values_of(raw, table_id, keys)] == [RESIDENT, None]
    assert raw.alive()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_refused_and_nothing_is_written(
    raw: RawClient, table_id: int, name: str
) -> None:
    code, data = BAD[name]
    entry = put(raw, table_id, data)
    assert entry.error_code == code, entry
    assert entry.error_message
    nothing_happened(raw, table_id)


@pytest.mark.parametrize("writer_id", [5, -2, -(2**63)])
def test_a_writer_without_a_sequence_is_refused(
    raw: RawClient, table_id: int, writer_id: int
) -> None:
    """Refused as an invalid batch, or as one out of order, as Fluss does."""
    assert put(raw, table_id, with_field("writer_id", writer_id)).error_code in (14, 31)
    nothing_happened(raw, table_id)


def test_the_batch_the_bad_ones_are_made_of_is_taken(raw: RawClient, path: fluss.TablePath) -> None:
    fresh = create_by_hand(raw, path.table_name, CODEC.schema)
    entry = put(raw, fresh, good())
    assert (entry.error_code, entry.log_end_offset) == (0, 1), entry.error_message
    assert [CODEC.value(v) for v in values_of(raw, fresh, [CODEC.key(ROW)])] == [ROW]


@pytest.mark.parametrize(
    "targets", [[1], [1, 2], [0, 6], [0, 99], [-1], [0, -1], [2**31 - 1, 0]], ids=str
)
def test_target_columns_without_the_key_or_out_of_range_are_refused(
    raw: RawClient, table_id: int, targets: list[int]
) -> None:
    entry = put(raw, table_id, good(), targets=targets)
    assert entry.error_code == BAD_TARGETS, entry
    nothing_happened(raw, table_id)


SMALL = Schema.of("id BIGINT NOT NULL, text STRING, n INT", primary_key=["id"])
STRICT = Schema.of("id BIGINT NOT NULL, text STRING, n INT NOT NULL", primary_key=["id"])
SMALL_ROW = (1, "a", 2)


@pytest.mark.parametrize("targets", [[0, 1], [0], [0, 2], [0, 1, 2]], ids=str)
def test_a_partial_update_of_a_table_with_another_not_null_column_is_refused(
    raw: RawClient, path: fluss.TablePath, targets: list[int]
) -> None:
    fresh = create_by_hand(raw, path.table_name, STRICT)
    entry = put(raw, fresh, kv_batch([Codec(STRICT).put(SMALL_ROW)]), targets=targets)
    assert entry.error_code == BAD_TARGETS, entry
    assert raw.end_offset(fresh) == 0
    assert raw.alive()


def test_null_in_a_not_null_column_is_refused(raw: RawClient, path: fluss.TablePath) -> None:
    fresh = create_by_hand(raw, path.table_name, STRICT)
    entry = put(raw, fresh, kv_batch([Codec(STRICT).put((1, "a", None))]))
    assert entry.error_code == 14, entry
    assert raw.end_offset(fresh) == 0
    assert raw.alive()


ENGINES = {
    "first_row": {"table.merge-engine": "first_row"},
    "versioned": {
        "table.merge-engine": "versioned",
        "table.merge-engine.versioned.ver-column": "n",
    },
}


@pytest.mark.parametrize("targets", [[0, 1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_partial_update_is_refused_by_engines_that_need_whole_rows(
    raw: RawClient, path: fluss.TablePath, engine: str, targets: list[int]
) -> None:
    fresh = create_by_hand(raw, path.table_name, SMALL, ENGINES[engine])
    entry = put(raw, fresh, kv_batch([Codec(SMALL).put(SMALL_ROW)]), targets=targets)
    assert entry.error_code == BAD_TARGETS, entry
    assert raw.end_offset(fresh) == 0
    assert raw.alive()


def test_a_batch_with_a_disabled_delete_is_refused_as_a_whole(
    raw: RawClient, path: fluss.TablePath
) -> None:
    fresh = create_by_hand(raw, path.table_name, SMALL, {"table.delete.behavior": "DISABLE"})
    codec = Codec(SMALL)
    entry = put(raw, fresh, kv_batch([codec.put(SMALL_ROW), codec.delete((2,))]))
    assert entry.error_code == 57, entry
    assert raw.end_offset(fresh) == 0
    assert values_of(raw, fresh, [codec.key(SMALL_ROW)]) == [b""]


@pytest.mark.parametrize("bucket", [1, 9, -1, 2**31 - 1])
def test_an_unknown_bucket_is_refused(raw: RawClient, table_id: int, bucket: int) -> None:
    assert put(raw, table_id, good(), bucket).error_code == UNKNOWN_BUCKET
    for key, request in (
        (ApiKey.LOOKUP, lookup_request(table_id, [b"\x01"], bucket)),
        (ApiKey.PREFIX_LOOKUP, prefix_request(table_id, [b"\x01"], bucket)),
    ):
        (entry,) = raw.call(key, request, LOOKUP_VERSION).buckets_resp
        assert entry.error_code == UNKNOWN_BUCKET
    scan = m.LimitScanRequest(table_id=table_id, bucket_id=bucket, limit=1)
    assert raw.call(ApiKey.LIMIT_SCAN, scan).error_code == UNKNOWN_BUCKET
    nothing_happened(raw, table_id)


def test_an_unknown_table_and_a_partition_that_is_none_are_refused(
    raw: RawClient, table_id: int
) -> None:
    assert put(raw, 987_654, good()).error_code == UNKNOWN_BUCKET
    request = put_request(table_id, good())
    request.buckets_req[0].partition_id = 77
    (entry,) = raw.call(ApiKey.PUT_KV, request, PUT_VERSION).buckets_resp
    assert entry.error_code == UNKNOWN_BUCKET
    assert entry.partition_id == 77
    nothing_happened(raw, table_id)


def test_a_log_table_takes_no_puts_and_knows_no_keys(raw: RawClient, log_table_id: int) -> None:
    assert put(raw, log_table_id, good()).error_code == NO_PRIMARY_KEY
    for key, request in (
        (ApiKey.LOOKUP, lookup_request(log_table_id, [b"\x01"])),
        (ApiKey.PREFIX_LOOKUP, prefix_request(log_table_id, [b"\x01"])),
    ):
        (entry,) = raw.call(key, request, LOOKUP_VERSION).buckets_resp
        assert entry.error_code == NO_PRIMARY_KEY, entry
    assert raw.end_offset(log_table_id) == 2
    assert raw.alive()


def test_a_primary_key_table_takes_no_log_batches(raw: RawClient, table_id: int) -> None:
    body = pa.RecordBatch.from_pylist([], schema=KEYED).serialize().to_pybytes()
    assert raw.produce(table_id, wrapped(body)).error_code == 15
    nothing_happened(raw, table_id)


def test_the_wrong_number_of_acknowledgements_is_refused(raw: RawClient, table_id: int) -> None:
    request = put_request(table_id, good(), acks=2)
    assert raw.error_code(ApiKey.PUT_KV, request, PUT_VERSION) == 18
    nothing_happened(raw, table_id)


def test_one_bad_bucket_entry_does_not_touch_the_others(
    raw: RawClient, path: fluss.TablePath
) -> None:
    fresh = create_by_hand(raw, path.table_name, SMALL)
    request = put_request(fresh, kv_batch([Codec(SMALL).put(SMALL_ROW)]))
    request.buckets_req.add(bucket_id=7, records=good())
    answer = raw.call(ApiKey.PUT_KV, request, PUT_VERSION)
    assert {e.bucket_id: e.error_code for e in answer.buckets_resp} == {0: 0, 7: UNKNOWN_BUCKET}
    assert raw.end_offset(fresh) == 1


def test_the_same_bucket_twice_in_one_request_is_applied_in_order(
    raw: RawClient, path: fluss.TablePath
) -> None:
    fresh, codec = create_by_hand(raw, path.table_name, SMALL), Codec(SMALL)
    request = put_request(fresh, kv_batch([codec.put((1, "first", 1))]))
    request.buckets_req.add(bucket_id=0, records=kv_batch([codec.put((1, "second", 2))]))
    answer = raw.call(ApiKey.PUT_KV, request, PUT_VERSION)
    assert {e.error_code for e in answer.buckets_resp} == {0}
    assert [(kind, row) for _, kind, row in raw_changelog(raw, fresh, SMALL)] == [
        ("+I", (1, "first", 1)),
        ("-U", (1, "first", 1)),
        ("+U", (1, "second", 2)),
    ]


def test_a_second_batch_in_a_bucket_entry_is_applied_or_refused_but_never_dropped(
    raw: RawClient, path: fluss.TablePath
) -> None:
    fresh, codec = create_by_hand(raw, path.table_name, SMALL), Codec(SMALL)
    two = kv_batch([codec.put((1, "a", 1))]) + kv_batch([codec.put((2, "b", 2))])
    entry = put(raw, fresh, two)
    values = [v != b"" for v in values_of(raw, fresh, [codec.key((1,)), codec.key((2,))])]
    assert values == ([False, False] if entry.error_code else [True, True])
    assert raw.end_offset(fresh) == (0 if entry.error_code else 2)
    assert raw.alive()


@pytest.mark.parametrize("limit", [0, -1, 5])
def test_a_limit_scan_without_rows_answers_an_empty_value_batch(
    raw: RawClient, path: fluss.TablePath, table_id: int, limit: int
) -> None:
    fresh = create_by_hand(raw, path.table_name, SMALL)
    tables = [fresh] if limit > 0 else [fresh, table_id]
    for one in tables:
        request = m.LimitScanRequest(table_id=one, bucket_id=0, limit=limit)
        answer = raw.call(ApiKey.LIMIT_SCAN, request)
        assert (answer.error_code, answer.is_log_table, answer.records) == (0, False, EMPTY_VALUES)


def test_keys_that_no_row_can_have_are_looked_up_and_not_found(
    raw: RawClient, table_id: int
) -> None:
    strange = [b"", b"\x80", b"\xff" * 300, bytes(5000), CODEC.key(RESIDENT) + b"\x00"]
    assert values_of(raw, table_id, strange) == [b""] * len(strange)
    assert prefixed(raw, table_id, strange[1:]) == [[]] * (len(strange) - 1)
    known = CODEC.key(RESIDENT)
    values = values_of(raw, table_id, [known, b"\x63", known])
    assert [CODEC.value(v) for v in values] == [RESIDENT, None, RESIDENT]
    assert values_of(raw, table_id, []) == []
    nothing_happened(raw, table_id)


def test_a_value_over_the_size_limit_is_refused(new_server: Callable[..., DevServer]) -> None:
    server, codec = new_server({"zufluss.kv.value.max-size": "64kb"}), Codec(SMALL)
    with RawClient(server.port) as client:
        fresh = create_by_hand(client, "large", SMALL)
        rows: list[Any] = [(1, "x" * 1000, 1), (2, "x" * 70_000, 1)]
        entry = put(client, fresh, kv_batch([codec.put(row) for row in rows]))
        assert entry.error_code == TOO_LARGE, entry
        assert "max-size" in entry.error_message
        assert client.end_offset(fresh) == 0
        assert values_of(client, fresh, [codec.key(row) for row in rows]) == [b"", b""]
        assert put(client, fresh, kv_batch([codec.put(rows[0])])).error_code == 0
