"""The responses built by hand against protobuf."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.varint import encode_varint
from zufluss.wire import messages as m
from zufluss.wire.codec import decode
from zufluss.wire.frame import response_header, unpack_response
from zufluss.wire.scan import (
    FetchedBucket,
    FetchedTable,
    ProducedBucket,
    fetch_response,
    produce_ok,
    produce_response,
)

INT32 = st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 300)
INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 300)
TEXT = st.none() | st.text(max_size=20)
BUFFER = st.binary(max_size=300).flatmap(
    lambda raw: st.sampled_from([raw, bytearray(raw), memoryview(raw)])
)
REMOTE = st.text(max_size=20).map(
    lambda text: m.PbRemoteLogFetchInfo(remote_log_tablet_dir=text).SerializeToString()
)

produced_buckets = st.builds(
    ProducedBucket, st.none() | INT64, INT32, st.none() | INT64, INT32, TEXT
)
fetched_buckets = st.builds(
    FetchedBucket,
    partition_id=st.none() | INT64,
    bucket_id=INT32,
    error_code=INT32,
    error_message=TEXT,
    high_watermark=st.none() | INT64,
    log_start_offset=st.none() | INT64,
    records=st.none() | st.lists(BUFFER, max_size=3),
    filtered_end_offset=st.none() | INT64,
    remote=st.none() | REMOTE,
)
fetched_tables = st.builds(FetchedTable, INT64, st.lists(fetched_buckets, max_size=4))


def optional(message: object, name: str) -> object:
    """The value of a field, None where it is absent."""
    return getattr(message, name) if message.HasField(name) else None  # type: ignore[attr-defined]


@given(INT64)
def test_integers_are_written_as_protobuf_writes_them(value: int) -> None:
    expected = m.InitWriterResponse(writer_id=value).SerializeToString()
    assert b"\x08" + encode_varint(value) == expected


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


@settings(max_examples=150)
@given(st.lists(fetched_tables, max_size=3))
def test_fetch_responses_decode_to_what_was_put_in(tables: list[FetchedTable]) -> None:
    buffers, size = fetch_response(tables)
    body = b"".join(buffers)
    assert len(body) == size
    message = decode(m.FetchLogResponse, body)
    read = [
        (t.table_id, [_fetched(entry) for entry in t.buckets_resp]) for t in message.tables_resp
    ]
    assert read == [(t.table_id, list(map(_joined, t.buckets))) for t in tables]


def _fetched(entry: m.PbFetchLogRespForBucket) -> tuple[object, ...]:
    return (
        optional(entry, "partition_id"),
        entry.bucket_id,
        entry.error_code,
        optional(entry, "error_message"),
        optional(entry, "high_watermark"),
        optional(entry, "log_start_offset"),
        optional(entry, "records"),
        optional(entry, "filtered_end_offset"),
        entry.remote_log_fetch_info.SerializeToString()
        if entry.HasField("remote_log_fetch_info")
        else None,
    )


def _joined(bucket: FetchedBucket) -> tuple[object, ...]:
    records = None if bucket.records is None else b"".join(bucket.records)
    return (*bucket[:6], records, bucket.filtered_end_offset, bucket.remote)


def test_records_are_passed_through_and_not_copied() -> None:
    records = [memoryview(b"first"), memoryview(b"second"), memoryview(b"third")]
    found = FetchedBucket(None, 0, high_watermark=9, records=records[:2])
    other = FetchedBucket(None, 1, high_watermark=9, records=records[2:])
    buffers, _ = fetch_response([FetchedTable(7, [found, FetchedBucket(None, 2), other])])
    assert [id(b) for b in buffers if isinstance(b, memoryview)] == [id(r) for r in records]
    assert len(buffers) == 5


def test_a_fetch_response_makes_a_frame_with_the_header_in_front() -> None:
    tables = [FetchedTable(7, [FetchedBucket(None, 0, records=[b"abc"])])]
    buffers, size = fetch_response(tables)
    packed = b"".join([response_header(5, size), *buffers])
    answer = unpack_response(memoryview(packed)[4:])
    assert answer.request_id == 5
    assert decode(m.FetchLogResponse, answer.body).tables_resp[0].buckets_resp[0].records == b"abc"


def test_an_answer_about_nothing_is_empty() -> None:
    assert fetch_response([]) == ([], 0)
    assert produce_response([]) == b""


def test_text_that_is_not_unicode_does_not_break_an_answer() -> None:
    body = produce_response([ProducedBucket(None, 1, None, 10, "file \udcff")])
    assert decode(m.ProduceLogResponse, body).buckets_resp[0].error_message == "file ?"
