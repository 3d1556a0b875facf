"""The kernel of small appends against its plain twin: the field scanner, then the checker."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.errors import ZuflussError
from zufluss.model.schema import Schema
from zufluss.record.batch.check import BatchChecker, CheckedBatch
from zufluss.record.header import build_batch, seal
from zufluss.wire import messages as m
from zufluss.wire.hot.produce import scan_produce

TABLE = 300
SCHEMA = Schema.of("a BIGINT, b STRING, c DOUBLE")


def body(rows: int) -> bytes:
    batch = pa.record_batch(
        [
            pa.array(range(rows), pa.int64()),
            pa.array([f"value {i}" for i in range(rows)]),
            pa.array([i / 2 for i in range(rows)]),
        ],
        schema=SCHEMA.arrow,
    )
    return batch.serialize().to_pybytes()


def log_batch(rows: int, **kw) -> bytes:
    built = build_batch(1, body(rows), rows, **kw)
    seal(built, 0)
    return bytes(built)


def request(records: bytes, *, acks=-1, table_id=TABLE, partition_id=None, bucket_id=3) -> bytes:
    return m.ProduceLogRequest(
        acks=acks,
        table_id=table_id,
        timeout_ms=30_000,
        buckets_req=[
            m.PbProduceLogReqForBucket(
                partition_id=partition_id, bucket_id=bucket_id, records=records
            )
        ],
    ).SerializeToString()


@pytest.fixture
def checker() -> BatchChecker:
    """A checker that has met its schema."""
    checker = BatchChecker({1: SCHEMA}.get, "ARROW")
    data = np.frombuffer(log_batch(1), np.uint8)
    checker.check(data, 0, data.size)
    return checker


def both(checker: BatchChecker, frame: bytes, pad: int = 7):
    """What the kernel says, and what the twin says of the same bytes."""
    array = np.frombuffer(b"\x55" * pad + frame + b"\x55" * pad, np.uint8).copy()
    view = memoryview(array)
    start, end = pad, pad + len(frame)
    fast = None
    if (usual := checker.check_produce(array, view, start, end, TABLE)) is not None:
        _, partition, bucket, timeout_ms = usual[8:]
        bucket = (None if partition < 0 else partition, bucket)
        fast = (bucket, timeout_ms, (CheckedBatch(*usual[:8]),))
    try:
        scan = scan_produce(view, start, end)
        if scan.acks != -1 or scan.table_id != TABLE or len(scan.buckets) != 1:
            return fast, None
        found = scan.buckets[0]
        batches = checker.check(array, found.start, found.end)
    except ZuflussError:
        return fast, None
    return fast, ((found.partition_id, found.bucket_id), scan.timeout_ms, batches)


@pytest.mark.parametrize("partition_id", [None, 0, 5, 2**40])
@pytest.mark.parametrize("bucket_id", [0, 127, 128, 4095])
@pytest.mark.parametrize("rows", [1, 10, 200])
def test_a_usual_request_is_understood_as_its_twin_does(checker, partition_id, bucket_id, rows):
    records = log_batch(rows, writer_id=9, sequence=4)
    fast, plain = both(checker, request(records, partition_id=partition_id, bucket_id=bucket_id))
    assert fast is not None
    assert fast == plain


@pytest.mark.parametrize(
    "frame",
    [
        request(log_batch(3), acks=1),
        request(log_batch(3), table_id=TABLE + 1),
        request(log_batch(3) + log_batch(2)),
        request(b""),
        request(log_batch(3)) + b"\x28\x01",
        request(log_batch(3))[:-1],
        b"",
    ],
)
def test_unusual_requests_are_left_to_the_plain_path(checker, frame):
    assert both(checker, frame)[0] is None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_kernel_takes_no_mutated_request_that_its_twin_refuses(data):
    checker = BatchChecker({1: SCHEMA}.get, "ARROW")
    first = np.frombuffer(log_batch(1), np.uint8)
    checker.check(first, 0, first.size)
    frame = bytearray(request(log_batch(data.draw(st.integers(1, 4)))))
    for _ in range(data.draw(st.integers(0, 3))):
        position = data.draw(st.integers(0, min(len(frame) - 1, 120)))
        frame[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    fast, plain = both(checker, bytes(frame[:cut] if data.draw(st.booleans()) else frame))
    assert fast is None or fast == plain
