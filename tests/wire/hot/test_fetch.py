"""FETCH_LOG responses written and read by hand say what protobuf says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.codec import decode
from zufluss.wire.frame import response_header, unpack_response
from zufluss.wire.hot.fetch import FetchedBucket, FetchedTable, fetch_response, read_fetch_response

INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)


BUCKET = st.fixed_dictionaries(
    {"bucket_id": INT32},
    optional={
        "partition_id": INT64,
        "error_code": INT32,
        "error_message": st.text(max_size=20),
        "high_watermark": INT64,
        "log_start_offset": INT64,
        "records": st.binary(max_size=300),
        "filtered_end_offset": INT64,
        "min_retain_offset": INT64,
    },
)


@given(st.lists(st.tuples(INT64, st.lists(BUCKET, max_size=4)), max_size=3))
def test_a_fetch_answer_is_read_as_protobuf_reads_it(tables):  # type: ignore[no-untyped-def]
    response = m.FetchLogResponse()
    for table_id, buckets in tables:
        added = response.tables_resp.add(table_id=table_id)
        for bucket in buckets:
            added.buckets_resp.add(**bucket)
    answers = read_fetch_response(memoryview(response.SerializeToString()))
    expected = [(table_id, bucket) for table_id, buckets in tables for bucket in buckets]
    assert len(answers) == len(expected)
    for answer, (table_id, bucket) in zip(answers, expected, strict=True):
        assert answer.bucket == TableBucket(
            table_id, bucket.get("partition_id"), bucket["bucket_id"]
        )
        assert answer.error_code == bucket.get("error_code", 0)
        assert answer.error_message == bucket.get("error_message", "")
        assert bytes(answer.records) == bucket.get("records", b"")
        assert answer.high_watermark == bucket.get("high_watermark")
        assert answer.log_start_offset == bucket.get("log_start_offset")
        assert answer.filtered_end_offset == bucket.get("filtered_end_offset")
        assert not answer.remote


def test_an_answer_that_points_to_remote_storage_says_so() -> None:
    response = m.FetchLogResponse()
    bucket = response.tables_resp.add(table_id=1).buckets_resp.add(bucket_id=0)
    bucket.remote_log_fetch_info.remote_log_tablet_dir = "/remote"
    assert read_fetch_response(memoryview(response.SerializeToString()))[0].remote


@given(st.binary(max_size=60))
def test_any_bytes_are_an_answer_or_a_corrupt_message(data: bytes) -> None:
    try:
        read_fetch_response(memoryview(data))
    except CorruptMessageError:
        pass


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_cut_answer_is_corrupt(cut: int) -> None:
    response = m.FetchLogResponse()
    response.tables_resp.add(table_id=1).buckets_resp.add(bucket_id=0, records=b"x" * 40)
    with pytest.raises(CorruptMessageError):
        read_fetch_response(memoryview(response.SerializeToString()[:-cut]))


TEXT = st.none() | st.text(max_size=20)
BUFFER = st.binary(max_size=300).flatmap(
    lambda raw: st.sampled_from([raw, bytearray(raw), memoryview(raw)])
)
REMOTE = st.text(max_size=20).map(
    lambda text: m.PbRemoteLogFetchInfo(remote_log_tablet_dir=text).SerializeToString()
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
    first = FetchedBucket(None, 0, high_watermark=9, records=records[:2])
    other = FetchedBucket(None, 1, high_watermark=9, records=records[2:])
    buffers, _ = fetch_response([FetchedTable(7, [first, FetchedBucket(None, 2), other])])
    assert [id(b) for b in buffers if isinstance(b, memoryview)] == [id(r) for r in records]
    assert len(buffers) == 5


def test_a_fetch_response_makes_a_frame_with_the_header_in_front() -> None:
    tables = [FetchedTable(7, [FetchedBucket(None, 0, records=[b"abc"])])]
    buffers, size = fetch_response(tables)
    packed = b"".join([response_header(5, size), *buffers])
    answer = unpack_response(memoryview(packed)[4:])
    assert answer.request_id == 5
    assert decode(m.FetchLogResponse, answer.body).tables_resp[0].buckets_resp[0].records == b"abc"


def test_a_response_about_no_table_is_empty() -> None:
    assert fetch_response([]) == ([], 0)
