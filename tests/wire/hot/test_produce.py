"""PRODUCE_LOG requests and responses by hand say what protobuf says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.codec import decode
from zufluss.wire.hot.buckets import (
    BUCKETS_MAX,
    ENTRIES_AT_ONCE,
    ENTRY_FIELDS_MAX,
    FIELDS_AT_ONCE,
)
from zufluss.wire.hot.produce import (
    FIELDS_MAX,
    ProducedBucket,
    ProduceScan,
    produce_ok,
    produce_request,
    produce_response,
    scan_produce,
    scan_produce_steps,
)
from zufluss.wire.tables import partition_id_of

INT32 = st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 300)
INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 300)
REFUSED = "refused"

Read = tuple[int, int, int, list[tuple[int | None, int, bytes]]] | str


def scanned(scan: object, body: bytes, before: bytes = b"", after: bytes = b"") -> Read:
    """What a scanner finds, with the records as bytes."""
    view = memoryview(bytearray(before + body + after))
    try:
        found = scan(view, len(before), len(before) + len(body))  # type: ignore[operator]
    except CorruptMessageError:
        return REFUSED
    assert isinstance(found, ProduceScan)
    buckets = [(p, b, bytes(view[start:end])) for p, b, start, end in found.buckets]
    return found.acks, found.table_id, found.timeout_ms, buckets


def decoded(body: bytes) -> Read:
    """What protobuf finds."""
    try:
        message = decode(m.ProduceLogRequest, body)
    except CorruptMessageError:
        return REFUSED
    buckets = [(partition_id_of(b), b.bucket_id, b.records) for b in message.buckets_req]
    return message.acks, message.table_id, message.timeout_ms, buckets


def request(acks: int = -1, table_id: int = 7, timeout_ms: int = 30000, **bucket: object) -> bytes:
    message = m.ProduceLogRequest(acks=acks, table_id=table_id, timeout_ms=timeout_ms)
    message.buckets_req.add(**{"bucket_id": 3, "records": b"records", **bucket})  # type: ignore[arg-type]
    return message.SerializeToString()


def scan_plain(view: memoryview, start: int, end: int) -> Any:
    """The last of the steps of the plain twin."""
    *nothing, scan = scan_produce_steps(view, start, end)
    assert nothing == [None] * len(nothing)
    return scan


@st.composite
def requests(draw: st.DrawFn) -> m.ProduceLogRequest:
    message = m.ProduceLogRequest(acks=draw(INT32), table_id=draw(INT64), timeout_ms=draw(INT32))
    for _ in range(draw(st.integers(0, 4))):
        bucket = message.buckets_req.add(bucket_id=draw(INT32), records=draw(st.binary()))
        if draw(st.booleans()):
            bucket.partition_id = draw(INT64)
    return message


def encode_varint(value: int, padding: int = 0) -> bytes:
    """A varint, longer than it need be by `padding` bytes."""
    value &= (1 << 64) - 1
    out = []
    while value or not out:
        out.append(value & 0x7F)
        value >>= 7
    out += [0] * padding
    return bytes(byte | 0x80 for byte in out[:-1]) + bytes(out[-1:])


@st.composite
def integers(draw: st.DrawFn) -> bytes:
    value = draw(INT64)
    used = len(encode_varint(value))
    return encode_varint(value, draw(st.integers(0, 10 - used)))


def field(number: int, wire_type: int, content: bytes) -> bytes:
    size = encode_varint(len(content)) if wire_type == 2 else b""
    return encode_varint(number << 3 | wire_type) + size + content


UNKNOWN = st.one_of(
    integers().map(lambda raw: (0, raw)),
    st.binary(min_size=8, max_size=8).map(lambda raw: (1, raw)),
    st.binary(max_size=9).map(lambda raw: (2, raw)),
    st.binary(min_size=4, max_size=4).map(lambda raw: (5, raw)),
)
UNKNOWN_FIELD = st.tuples(st.integers(5, 40) | st.just(2**29 - 1), UNKNOWN).map(
    lambda drawn: field(drawn[0], *drawn[1])
)


def shuffled(fields: list[st.SearchStrategy[bytes]]) -> st.SearchStrategy[bytes]:
    """Each field once or more, unknown ones between, in any order."""
    repeated = [st.lists(one, min_size=1, max_size=2) for one in fields]
    groups = st.tuples(*repeated, st.lists(UNKNOWN_FIELD, max_size=2))
    return groups.flatmap(
        lambda drawn: st.permutations([raw for group in drawn for raw in group])
    ).map(b"".join)


BUCKET = shuffled(
    [
        integers().map(lambda raw: field(1, 0, raw)),
        integers().map(lambda raw: field(2, 0, raw)),
        st.binary(max_size=9).map(lambda raw: field(3, 2, raw)),
    ]
).map(lambda raw: field(4, 2, raw))
ANY_SHAPE = shuffled(
    [*(integers().map(lambda raw, n=n: field(n, 0, raw)) for n in (1, 2, 3)), BUCKET]
)


@settings(max_examples=200)
@given(requests(), st.binary(max_size=9), st.binary(max_size=9))
def test_what_protobuf_writes_is_found_as_protobuf_reads_it(
    message: m.ProduceLogRequest, before: bytes, after: bytes
) -> None:
    body = message.SerializeToString()
    expected = decoded(body)
    assert expected != REFUSED
    assert scanned(scan_produce, body, before, after) == expected
    assert scanned(scan_plain, body, before, after) == expected


@settings(max_examples=200)
@given(ANY_SHAPE)
def test_any_order_repetition_and_unknown_fields_read_as_protobuf_does(body: bytes) -> None:
    expected = decoded(body)
    assert expected != REFUSED
    assert scanned(scan_produce, body) == expected


@settings(max_examples=200)
@given(requests(), st.data())
@example(m.ProduceLogRequest(acks=-1, table_id=1, timeout_ms=1), None)
def test_changed_and_cut_requests_are_refused_or_read_as_protobuf_does(
    message: m.ProduceLogRequest, data: st.DataObject | None
) -> None:
    body = bytearray(message.SerializeToString())
    if data is not None:
        for _ in range(data.draw(st.integers(0, 3))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        del body[data.draw(st.integers(0, len(body))) :]
    both_agree(bytes(body))


@settings(max_examples=200)
@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda raw: request() + raw))
def test_random_bytes_are_refused_or_read_as_protobuf_does(body: bytes) -> None:
    both_agree(body)


def both_agree(body: bytes) -> None:
    """The scanner may be stricter than protobuf, never laxer, and never reads something else."""
    fast = scanned(scan_produce, body, after=b"\x01\x02")
    assert fast == scanned(scan_plain, body, after=b"\x01\x02")
    if fast != REFUSED:
        assert fast == decoded(body)


@pytest.mark.parametrize("acks", [-1, 0, 1, 127, 128, -2])
@pytest.mark.parametrize("table_id", [0, 34, 127, 128, 2**35, 2**63 - 1, -1])
@pytest.mark.parametrize("partition_id", [None, 0, 300, -1])
def test_usual_values_are_found(acks: int, table_id: int, partition_id: int | None) -> None:
    bucket = {} if partition_id is None else {"partition_id": partition_id}
    body = request(acks, table_id, **bucket)
    assert scanned(scan_produce, body, b"..", b"..") == decoded(body)


def test_records_of_a_mebibyte_and_empty_ones_are_found() -> None:
    for records in (b"x" * (1 << 20), b""):
        view = memoryview(request(records=records))
        (bucket,) = scan_produce(view, 0, len(view)).buckets
        assert bucket.end == len(view)
        assert bucket.end - bucket.start == len(records)


def test_a_request_without_buckets_has_none() -> None:
    body = m.ProduceLogRequest(acks=1, table_id=2, timeout_ms=3).SerializeToString()
    assert scanned(scan_produce, body) == (1, 2, 3, [])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "required fields acks"),
        (b"\x08\x01\x10\x01", "required fields acks"),
        (b"\x08\x01\x10\x01\x18\x01\x22\x02\x10\x01", "required fields bucket_id"),
        (b"\x08\x01\x10\x01\x18\x01\x22\x00", "required fields bucket_id"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "longer than 10 bytes"),
        (b"\x08\xff\xff", "ends within the integer"),
        (b"\x08\x01\x10\x01\x18\x01\x22\x09\x10\x01", "claims 9 bytes, 2 are there"),
        (b"\x08\x01\x10\x01\x18\x01\x22\x04\x10\x01\x1a\x01", "claims 1 bytes, 0 are there"),
        (b"\x08\x01\x10\x01\x18\x01\x22\xff\xff\xff\xff\x0f", "claims 4294967295 bytes"),
        (b"\x08\x01\x10\x01\x18\x01\x22\x80\x80\x80\x80\x80\x00", "longer than 5 bytes"),
        (b"\x0a\x01\x01", "field 1 of a ProduceLogRequest has the wire type 2"),
        (b"\x20\x01", "field 4 of a ProduceLogRequest has the wire type 0"),
        (b"\x22\x02\x18\x01", "field 3 of a bucket entry has the wire type 0"),
        (b"\x2b\x2c", "wire type 3"),
        (b"\x2f\x01", "wire type 7"),
        (b"\x2d\x01\x01", "ends within the field"),
        (b"\x00\x01", "field number 0"),
        (b"\xf8\xff\xff\xff\x7f\x01", "field number"),
    ],
)
def test_malformed_requests_are_refused_with_the_reason(body: bytes, reason: str) -> None:
    for scan in (scan_produce, scan_plain):
        with pytest.raises(CorruptMessageError, match=reason):
            scan(memoryview(body), 0, len(body))


def test_the_scanner_never_reads_past_the_end_it_was_given() -> None:
    body = request() + request()
    for end in range(len(body)):
        cut = scanned(scan_produce, body[:end], after=body[end:])
        assert cut == scanned(scan_plain, body[:end], after=body[end:])
        assert cut == decoded(body[:end])


def test_a_frame_of_nothing_but_tiny_buckets_is_refused_at_the_limit() -> None:
    head, bucket = b"\x08\x01\x10\x01\x18\x01", b"\x22\x04\x10\x01\x1a\x00"
    most = memoryview(head + bucket * BUCKETS_MAX)
    assert scan_produce(most, 0, len(most)) is None
    assert len(scan_plain(most, 0, len(most)).buckets) == BUCKETS_MAX
    more = memoryview(head + bucket * (BUCKETS_MAX + 1))
    with pytest.raises(CorruptMessageError, match=f"more than {BUCKETS_MAX} buckets"):
        scan_plain(more, 0, len(more))


@pytest.mark.parametrize("head", [b"\x08\x01\x10\x01\x18\x01", b"\x18\x01\x10\x01\x08\x01"])
def test_a_request_with_many_entries_is_scanned_in_steps(head: bytes) -> None:
    bucket = b"\x22\x04\x10\x01\x1a\x00"
    few = head + bucket * ENTRIES_AT_ONCE
    assert scanned(scan_produce, few) == decoded(few)
    many = memoryview(head + bucket * 10 * FIELDS_AT_ONCE)
    assert scan_produce(many, 0, len(many)) is None
    steps = list(scan_produce_steps(many, 0, len(many)))
    assert steps[:-1] == [None] * 10
    assert len(steps[-1].buckets) == 10 * FIELDS_AT_ONCE


def test_tiny_fields_without_end_are_refused_whether_known_or_not() -> None:
    """Fifty million of them fit into the longest request, and each takes a microsecond."""
    head, bucket = b"\x08\x01\x10\x01\x18\x01", b"\x10\x01\x1a\x00"
    for tiny in (b"\x08\x01", b"\x28\x01"):
        many = memoryview(head + tiny * (FIELDS_MAX + FIELDS_AT_ONCE))
        assert scan_produce(many, 0, len(many)) is None
        with pytest.raises(CorruptMessageError, match=f"more than {FIELDS_MAX} fields"):
            scan_plain(many, 0, len(many))
        entry = bucket + tiny * ENTRY_FIELDS_MAX
        one = memoryview(head + b"\x22" + encode_varint(len(entry)) + entry)
        with pytest.raises(CorruptMessageError, match=f"more than {ENTRY_FIELDS_MAX} fields"):
            scan_produce(one, 0, len(one))


def test_many_different_requests_do_not_grow_memory_without_bound() -> None:
    from zufluss.wire.hot import produce

    for table_id in range(produce.CACHE_ENTRIES_MAX + 100):
        body = request(table_id=table_id)
        assert scan_produce(memoryview(body), 0, len(body)).table_id == table_id
    assert len(produce._values) <= produce.CACHE_ENTRIES_MAX


@given(
    st.sampled_from([-1, 0, 1]),
    INT64,
    st.integers(0, 2**31 - 1),
    st.lists(st.tuples(st.none() | INT64, st.integers(0, 2**31 - 1), st.binary(max_size=300))),
)
def test_a_produce_request_is_what_protobuf_would_write(acks, table_id, timeout_ms, entries):  # type: ignore[no-untyped-def]
    batches = [(TableBucket(table_id, p, b), records) for p, b, records in entries]
    expected = m.ProduceLogRequest(acks=acks, table_id=table_id, timeout_ms=timeout_ms)
    for partition_id, bucket_id, records in entries:
        expected.buckets_req.add(partition_id=partition_id, bucket_id=bucket_id, records=records)
    if batches:
        body = b"".join(produce_request(acks, table_id, timeout_ms, batches))
        assert body == expected.SerializeToString()


TEXT = st.none() | st.text(max_size=20)
produced_buckets = st.builds(
    ProducedBucket, st.none() | INT64, INT32, st.none() | INT64, INT32, TEXT, st.none()
)


def optional(message: object, name: str) -> object:
    """The value of a field, None where it is absent."""
    return getattr(message, name) if message.HasField(name) else None  # type: ignore[attr-defined]


@given(INT32, st.none() | INT64, INT64)
def test_one_acknowledged_bucket_has_the_bytes_of_protobuf(
    bucket_id: int, partition_id: int | None, base_offset: int
) -> None:
    message = m.ProduceLogResponse()
    entry = message.buckets_resp.add(bucket_id=bucket_id, base_offset=base_offset)
    if partition_id is not None:
        entry.partition_id = partition_id
    assert produce_ok(bucket_id, partition_id, base_offset) == message.SerializeToString()


def test_an_acknowledgement_has_the_bytes_a_real_server_sent() -> None:
    assert produce_ok(0, None, 0).hex() == "0a0410002800"


@given(st.lists(produced_buckets, max_size=4))
def test_produce_responses_decode_to_what_was_put_in(buckets: list[ProducedBucket]) -> None:
    message = decode(m.ProduceLogResponse, produce_response(buckets))
    read = [
        ProducedBucket(
            optional(entry, "partition_id"),
            entry.bucket_id,
            optional(entry, "base_offset"),
            entry.error_code,
            optional(entry, "error_message"),
        )
        for entry in message.buckets_resp
    ]
    assert read == buckets


@given(st.none() | st.integers(0, 2**31 - 1))
def test_an_answer_to_a_put_tells_how_many_rows_its_deletes_removed(deleted: int | None) -> None:
    body = produce_response([ProducedBucket(None, 1, 7, deleted_rows=deleted)])
    (entry,) = decode(m.PutKvResponse, body).buckets_resp
    assert optional(entry, "deleted_rows") == deleted
    assert (entry.bucket_id, entry.log_end_offset) == (1, 7)


def test_a_response_about_no_bucket_is_empty() -> None:
    assert produce_response([]) == b""


def test_text_that_is_not_unicode_does_not_break_an_answer() -> None:
    body = produce_response([ProducedBucket(None, 1, None, 10, "file \udcff")])
    assert decode(m.ProduceLogResponse, body).buckets_resp[0].error_message == "file ?"
