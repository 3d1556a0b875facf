"""PUT_KV requests by hand say what protobuf says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.hot.buckets import FIELDS_AT_ONCE
from zufluss.wire.hot.put import FIELDS_MAX, TARGETS_MAX, put_request, scan_put, scan_put_steps
from zufluss.wire.tables import partition_id_of

int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def requests(draw: st.DrawFn) -> m.PutKvRequest:
    request = m.PutKvRequest(
        acks=draw(int32),
        table_id=draw(int64),
        timeout_ms=draw(int32),
        target_columns=draw(st.lists(int32, max_size=5)),
    )
    if draw(st.booleans()):
        request.agg_mode = draw(int32)
    for records in draw(st.lists(st.binary(max_size=40), max_size=3)):
        entry = request.buckets_req.add(bucket_id=draw(int32), records=records)
        if draw(st.booleans()):
            entry.partition_id = draw(int64)
    return request


@given(requests(), st.binary(max_size=7), st.binary(max_size=7))
def test_the_scanner_finds_what_protobuf_finds(
    request: m.PutKvRequest, before: bytes, after: bytes
) -> None:
    body = request.SerializeToString()
    buffer = memoryview(before + body + after)
    scan = scan_put(buffer, len(before), len(before) + len(body))
    assert scan.acks == request.acks
    assert scan.table_id == request.table_id
    assert scan.timeout_ms == request.timeout_ms
    assert scan.targets == tuple(request.target_columns)
    assert scan.mode == request.agg_mode
    found = [(b.partition_id, b.bucket_id, bytes(buffer[b.start : b.end])) for b in scan.buckets]
    assert found == [(partition_id_of(b), b.bucket_id, b.records) for b in request.buckets_req]


@given(requests(), st.data())
def test_mutated_requests_are_refused_or_read_within_their_bounds(
    request: m.PutKvRequest, data: st.DataObject
) -> None:
    body = bytearray(request.SerializeToString())
    if body:
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    try:
        scan = scan_put(memoryview(body), 0, cut)
    except CorruptMessageError:
        return
    assert all(0 <= b.start <= b.end <= cut for b in scan.buckets)


def test_target_columns_may_come_one_by_one() -> None:
    head = m.PutKvRequest(acks=-1, table_id=1, timeout_ms=2).SerializeToString()
    body = head + b"\x20\x03" + b"\x20\x04"
    assert scan_put(memoryview(body), 0, len(body)).targets == (3, 4)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x08\x01\x10\x01", "lacks one of its required fields"),
        (b"\x0a\x00", "field 1 of a PutKvRequest has the wire type 2"),
        (b"\x21" + bytes(8), "field 4 of a PutKvRequest has the wire type 1"),
        (b"\x28\x01", "field 5 of a PutKvRequest has the wire type 0"),
        (b"\x22" + b"\xff\xff\x03" + bytes(0xFFFF), f"more than {TARGETS_MAX} target columns"),
    ],
)
def test_malformed_requests_are_refused_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(CorruptMessageError, match=reason):
        scan_put(memoryview(body), 0, len(body))


def test_a_put_with_many_entries_is_scanned_in_steps() -> None:
    head, bucket = b"\x08\x01\x10\x01\x18\x01", b"\x2a\x04\x10\x01\x1a\x00"
    many = memoryview(head + bucket * 10 * FIELDS_AT_ONCE)
    assert scan_put(many, 0, len(many)) is None
    *nothing, scan = scan_put_steps(many, 0, len(many))
    assert nothing == [None] * 10
    assert len(scan.buckets) == 10 * FIELDS_AT_ONCE


def test_tiny_fields_without_end_are_refused() -> None:
    many = memoryview(b"\x08\x01" * (FIELDS_MAX + FIELDS_AT_ONCE))
    assert scan_put(many, 0, len(many)) is None
    with pytest.raises(CorruptMessageError, match=f"more than {FIELDS_MAX} fields"):
        list(scan_put_steps(many, 0, len(many)))


@given(
    st.lists(st.integers(0, 4_000)),
    int64,
    st.lists(st.tuples(st.none() | int64, st.integers(0, 2**31 - 1), st.binary(max_size=300))),
)
def test_a_put_request_is_what_protobuf_would_write(targets, table_id, entries):  # type: ignore[no-untyped-def]
    batches = [(TableBucket(table_id, p, b), records) for p, b, records in entries]
    expected = m.PutKvRequest(acks=-1, table_id=table_id, timeout_ms=7, target_columns=targets)
    for partition_id, bucket_id, records in entries:
        expected.buckets_req.add(partition_id=partition_id, bucket_id=bucket_id, records=records)
    if batches:
        body = b"".join(put_request(targets, -1, table_id, 7, batches))
        assert body == expected.SerializeToString()
