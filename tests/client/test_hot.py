"""The hand-written messages say what protobuf says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zufluss.client.hot import fetch_answer, produce_request, put_request
from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m

INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)


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
        made = b"".join(produce_request(acks, table_id, timeout_ms, batches))
        assert made == expected.SerializeToString()


@given(
    st.lists(st.integers(0, 4_000)),
    INT64,
    st.lists(st.tuples(st.none() | INT64, st.integers(0, 2**31 - 1), st.binary(max_size=300))),
)
def test_a_put_request_is_what_protobuf_would_write(targets, table_id, entries):  # type: ignore[no-untyped-def]
    batches = [(TableBucket(table_id, p, b), records) for p, b, records in entries]
    expected = m.PutKvRequest(acks=-1, table_id=table_id, timeout_ms=7, target_columns=targets)
    for partition_id, bucket_id, records in entries:
        expected.buckets_req.add(partition_id=partition_id, bucket_id=bucket_id, records=records)
    if batches:
        made = b"".join(put_request(targets, -1, table_id, 7, batches))
        assert made == expected.SerializeToString()


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
    found = fetch_answer(memoryview(response.SerializeToString()))
    expected = [(table_id, bucket) for table_id, buckets in tables for bucket in buckets]
    assert len(found) == len(expected)
    for got, (table_id, bucket) in zip(found, expected, strict=True):
        assert got.bucket == TableBucket(table_id, bucket.get("partition_id"), bucket["bucket_id"])
        assert got.error_code == bucket.get("error_code", 0)
        assert got.error_message == bucket.get("error_message", "")
        assert bytes(got.records) == bucket.get("records", b"")
        assert got.high_watermark == bucket.get("high_watermark")
        assert got.log_start_offset == bucket.get("log_start_offset")
        assert got.filtered_end_offset == bucket.get("filtered_end_offset")
        assert not got.remote


def test_an_answer_that_points_to_remote_storage_says_so() -> None:
    response = m.FetchLogResponse()
    bucket = response.tables_resp.add(table_id=1).buckets_resp.add(bucket_id=0)
    bucket.remote_log_fetch_info.remote_log_tablet_dir = "/remote"
    assert fetch_answer(memoryview(response.SerializeToString()))[0].remote


@given(st.binary(max_size=60))
def test_any_bytes_are_an_answer_or_a_corrupt_message(data: bytes) -> None:
    try:
        fetch_answer(memoryview(data))
    except CorruptMessageError:
        pass


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_cut_answer_is_corrupt(cut: int) -> None:
    response = m.FetchLogResponse()
    response.tables_resp.add(table_id=1).buckets_resp.add(bucket_id=0, records=b"x" * 40)
    with pytest.raises(CorruptMessageError):
        fetch_answer(memoryview(response.SerializeToString()[:-cut]))
