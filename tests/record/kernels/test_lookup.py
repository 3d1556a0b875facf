"""The kernels of LOOKUP against protobuf, their twin."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zufluss.record.kernels.lookup import scan_lookup, write_values
from zufluss.record.slices import Slices
from zufluss.wire import messages as m

KEYS = 8
keys = st.lists(st.binary(max_size=20), max_size=KEYS + 1)
partitions = st.none() | st.integers(0, 2**62)
buckets = st.integers(0, 2**28 - 1)
values = st.lists(st.none() | st.binary(max_size=300), max_size=6)


def _request(
    table_id: int, partition: int | None, bucket: int, wanted: list[bytes]
) -> m.LookupRequest:
    request = m.LookupRequest(table_id=table_id)
    entry = request.buckets_req.add(bucket_id=bucket, keys=wanted)
    if partition is not None:
        entry.partition_id = partition
    return request


def _scan(body: bytes, cut: int | None = None) -> tuple[tuple[int, ...], list[bytes]]:
    buffer = np.frombuffer(b"\x99" * 3 + body + b"\x99" * 5, np.uint8)
    starts, ends = np.empty(KEYS, np.int64), np.empty(KEYS, np.int64)
    end = 3 + (len(body) if cut is None else cut)
    found = scan_lookup(buffer, 3, end, starts, ends)
    count = max(found[0], 0)
    assert all(3 <= starts[i] <= ends[i] <= end for i in range(count))
    return found, [buffer[starts[i] : ends[i]].tobytes() for i in range(count)]


@given(st.integers(0, 2**62), partitions, buckets, keys, st.booleans())
def test_a_usual_request_is_read_as_protobuf_reads_it(
    table_id: int, partition: int | None, bucket: int, wanted: list[bytes], says_no_insert: bool
) -> None:
    request = _request(table_id, partition, bucket, wanted)
    if says_no_insert:
        request.insert_if_not_exists = False
    found, located = _scan(request.SerializeToString())
    if len(wanted) > KEYS:
        assert found[0] == -1
    else:
        assert found == (len(wanted), table_id, -1 if partition is None else partition, bucket)
        assert located == wanted


def test_requests_that_insert_or_name_two_buckets_are_left_to_protobuf() -> None:
    inserting = _request(1, None, 0, [b"k"])
    inserting.insert_if_not_exists = True
    two = _request(1, None, 0, [b"k"])
    two.buckets_req.add(bucket_id=1, keys=[b"k"])
    for request in (inserting, two, m.LookupRequest(table_id=1)):
        assert _scan(request.SerializeToString())[0][0] == -1


@given(st.integers(0, 2**62), partitions, buckets, keys, st.data())
def test_mutated_requests_stay_within_their_bounds(
    table_id: int, partition: int | None, bucket: int, wanted: list[bytes], data: st.DataObject
) -> None:
    body = bytearray(_request(table_id, partition, bucket, wanted).SerializeToString())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    _scan(bytes(body), data.draw(st.integers(0, len(body))))


@given(partitions, buckets, values, st.integers(0, 5))
def test_an_answer_is_what_protobuf_would_write(
    partition: int | None, bucket: int, found: list[bytes | None], at: int
) -> None:
    expected = m.LookupResponse()
    entry = expected.buckets_resp.add(bucket_id=bucket)
    if partition is not None:
        entry.partition_id = partition
    for value in found:
        entry.values.add(values=value)
    body = expected.SerializeToString()
    out = np.full(at + len(body), 0x99, np.uint8)
    slices = Slices.of(found)
    number = -1 if partition is None else partition
    assert write_values(*slices, number, bucket, at, out) == at + len(body)
    assert out[at:].tobytes() == body
    short = np.full(at + len(body) - 1, 0x99, np.uint8)
    assert write_values(*slices, number, bucket, at, short) == -1 - len(body)
    assert (short == 0x99).all()


def test_a_value_outside_of_its_data_is_not_written() -> None:
    data = np.zeros(10, np.uint8)
    outside = Slices(data, np.array([5]), np.array([11]))
    backwards = Slices(data, np.array([5]), np.array([4]))
    for slices in (outside, backwards):
        assert write_values(*slices, -1, 0, 0, np.empty(100, np.uint8)) == -1
