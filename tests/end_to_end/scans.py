"""Scans of primary-key tables with raw frames: SCAN_KV as Fluss clients send it, and pins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from tests.end_to_end.kv import Codec, create_by_hand, kv_batch, limit_values, put
from tests.end_to_end.raw import RawClient
from zufluss.model.predicate import Predicate
from zufluss.model.schema import Schema
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.predicates import predicate_to_proto

SCANNED = Schema.of("id BIGINT NOT NULL, text STRING", primary_key=["id"])
CODEC = Codec(SCANNED)
SIZE = 1 << 20

Row = tuple[Any, ...]


def numbered(start: int, end: int, text: str = "row") -> list[Row]:
    return [(i, f"{text} {i}") for i in range(start, end)]


def put_rows(raw: RawClient, table_id: int, rows: Iterable[Row], bucket: int = 0) -> int:
    """Put rows in one batch; returns the end offset of the changelog."""
    entry = put(raw, table_id, kv_batch([CODEC.put(row) for row in rows]), bucket)
    assert not entry.error_code, entry.error_message
    return int(entry.log_end_offset)


def create_filled(raw: RawClient, rows: Iterable[Row], name: str = "t") -> int:
    """Create a table with one bucket and these rows; its id."""
    table_id = create_by_hand(raw, name, SCANNED)
    put_rows(raw, table_id, rows)
    return table_id


def delete_rows(raw: RawClient, table_id: int, rows: Iterable[Row]) -> None:
    entry = put(raw, table_id, kv_batch([CODEC.delete(row) for row in rows]))
    assert not entry.error_code, entry.error_message


def in_key_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=CODEC.key)


# -- SCAN_KV ------------------------------------------------------------------------------------


def open_request(
    table_id: int, bucket: int = 0, *, size: int = SIZE, seq: int = 0, **options: Any
) -> m.ScanKvRequest:
    """Open a scan; `limit` and `partition_id` are options."""
    request = m.PbScanReqForBucket(table_id=table_id, bucket_id=bucket, **options)
    return m.ScanKvRequest(bucket_scan_req=request, call_seq_id=seq, batch_size_bytes=size)


def next_request(scanner_id: bytes, seq: int, size: int = SIZE) -> m.ScanKvRequest:
    return m.ScanKvRequest(scanner_id=scanner_id, call_seq_id=seq, batch_size_bytes=size)


def close_request(scanner_id: bytes) -> m.ScanKvRequest:
    return m.ScanKvRequest(scanner_id=scanner_id, close_scanner=True)


def call(raw: RawClient, request: m.ScanKvRequest) -> m.ScanKvResponse:
    """The answer, an error or not."""
    answer = raw.call(ApiKey.SCAN_KV, request)
    assert isinstance(answer, m.ScanKvResponse)
    return answer


def good(raw: RawClient, request: m.ScanKvRequest) -> m.ScanKvResponse:
    """The answer; raises if it is an error."""
    answer = call(raw, request)
    assert not answer.error_code, answer.error_message
    return answer


def rows_of(answer: m.ScanKvResponse, codec: Codec = CODEC) -> list[Row]:
    values = limit_values(answer.records) if answer.HasField("records") else []
    found = [codec.value(value) for value in values]
    assert None not in found
    return [row for row in found if row is not None]


def go_on(
    raw: RawClient, first: m.ScanKvResponse, size: int = SIZE, codec: Codec = CODEC
) -> list[Row]:
    """The rows of a scan from its first answer to its end."""
    rows, answer, seq = rows_of(first, codec), first, 0
    while answer.has_more_results:
        seq += 1
        answer = good(raw, next_request(first.scanner_id, seq, size))
        rows += rows_of(answer, codec)
    return rows


# -- pins ---------------------------------------------------------------------------------------


def pin_request(
    table_id: int, buckets: Sequence[int] = (0,), at: Sequence[int | None] | None = None
) -> m.OpenKvSnapshotRequest:
    request = m.OpenKvSnapshotRequest(table_id=table_id)
    for bucket, offset in zip(buckets, at or [None] * len(buckets), strict=True):
        request.buckets.add(bucket_id=bucket, log_offset=offset)
    return request


def pin(raw: RawClient, table_id: int, *buckets: int) -> list[m.PbPin]:
    """Pin the present state of buckets, of the first by default."""
    return list(raw.call(ApiKey.OPEN_KV_SNAPSHOT, pin_request(table_id, buckets or (0,))).pins)


def page_request(
    table_id: int,
    pin_id: bytes,
    bucket: int = 0,
    *,
    size: int = SIZE,
    filter: Predicate | None = None,
    schema: Schema = SCANNED,
    **fields: Any,
) -> m.ScanKvSnapshotRequest:
    """The next rows of a pin; other fields by their names."""
    request = m.ScanKvSnapshotRequest(
        table_id=table_id,
        bucket_id=bucket,
        pin_id=pin_id,
        batch_size_bytes=size,
        schema_id=fields.pop("schema_id", 1),
        **fields,
    )
    if filter is not None:
        request.filter = predicate_to_proto(filter, schema).SerializeToString()
    return request


def page(
    raw: RawClient, table_id: int, pin_id: bytes, bucket: int = 0, **options: Any
) -> m.ScanKvSnapshotResponse:
    request = page_request(table_id, pin_id, bucket, **options)
    answer = raw.call(ApiKey.SCAN_KV_SNAPSHOT, request)
    assert isinstance(answer, m.ScanKvSnapshotResponse)
    return answer


def arrow_of(answer: m.ScanKvSnapshotResponse, schema: pa.Schema = SCANNED.arrow) -> pa.RecordBatch:
    """The rows of an answer."""
    if not answer.HasField("records"):
        assert answer.rows == 0
        return pa.RecordBatch.from_pylist([], schema=schema)
    batch = pa.ipc.read_record_batch(pa.py_buffer(answer.records), schema)
    batch.validate(full=True)
    assert batch.num_rows == answer.rows
    return batch


def pages(
    raw: RawClient, table_id: int, pin_id: bytes, bucket: int = 0, **options: Any
) -> list[m.ScanKvSnapshotResponse]:
    """All answers of a scan of a pin, from its first row or `after_key` on."""
    answers = [page(raw, table_id, pin_id, bucket, **options)]
    while not answers[-1].done:
        if answers[-1].HasField("last_key"):
            options["after_key"] = answers[-1].last_key
        answers.append(page(raw, table_id, pin_id, bucket, **options))
    return answers


def all_rows(answers: Iterable[m.ScanKvSnapshotResponse]) -> list[Row]:
    return [tuple(row.values()) for answer in answers for row in arrow_of(answer).to_pylist()]
