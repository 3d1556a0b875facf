"""FETCH_LOG responses by hand, both ways: written by tablet servers, read by clients.

| FetchLogResponse            | field | PbFetchLogRespForBucket          | field |
|-----------------------------|-------|----------------------------------|-------|
| tables_resp repeated        | 1     | partition_id int64               | 1     |
|                             |       | bucket_id int32                  | 2     |
| PbFetchLogRespForTable      |       | error_code int32                 | 3     |
| table_id int64              | 1     | error_message string             | 4     |
| buckets_resp repeated       | 2     | high_watermark int64             | 5     |
|                             |       | log_start_offset int64           | 6     |
|                             |       | remote_log_fetch_info message    | 7     |
|                             |       | records bytes                    | 8     |
|                             |       | filtered_end_offset int64        | 9     |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket
from zufluss.varint import encode_varint
from zufluss.wire.frame import Buffer
from zufluss.wire.hot.buckets import ENCODED, failure_fields
from zufluss.wire.hot.fields import fields_of

_NOTHING: Final = memoryview(b"")


# ---- The server's side


class FetchedBucket(NamedTuple):
    """One bucket of a response, as the server writes it."""

    partition_id: int | None
    """As in the request."""
    bucket_id: int
    """As in the request."""
    error_code: int = 0
    """0 when the bucket could be read."""
    error_message: str | None = None
    """Why the bucket could not be read."""
    high_watermark: int | None = None
    """Records below it are committed."""
    log_start_offset: int | None = None
    """The first offset that the log still has."""
    records: Sequence[Buffer] | None = None
    """Whole batches, in any number of buffers; None leaves the field out."""
    filtered_end_offset: int | None = None
    """The offset to read next when every batch was pruned."""
    remote: bytes | None = None
    """A PbRemoteLogFetchInfo, instead of records."""


class FetchedTable(NamedTuple):
    """One table of a response, as the server writes it."""

    table_id: int
    """As in the request."""
    buckets: Sequence[FetchedBucket]
    """In any order."""


def fetch_response(tables: Iterable[FetchedTable]) -> tuple[list[Buffer], int]:
    """Returns the body of a FetchLogResponse as buffers to send in turn, and its size in bytes.

    The list holds the buffers of the records themselves; only the bytes between them are new.
    """
    buffers: list[Buffer] = []
    between = bytearray()
    total = 0
    for table_id, buckets in tables:
        heads = [_fetched_head(bucket) for bucket in buckets]
        table = b"\x08" + encode_varint(table_id)
        size = len(table) + sum(len(head) + payload for head, payload in heads)
        prefix = b"\x0a" + encode_varint(size) + table
        between += prefix
        total += size + len(prefix) - len(table)
        for bucket, (head, payload) in zip(buckets, heads, strict=True):
            between += head
            if payload and bucket.records is not None:
                buffers.append(bytes(between))
                buffers.extend(bucket.records)
                between.clear()
    if between:
        buffers.append(bytes(between))
    return buffers, total


def _fetched_head(bucket: FetchedBucket) -> tuple[bytes, int]:
    """Returns a bucket entry up to its records, which come last, and the size of the records."""
    partition_id, bucket_id, code, message, watermark, start, records, filtered_end, remote = bucket
    entry = b"\x10" + ENCODED[bucket_id]
    if partition_id is not None:
        entry += b"\x08" + ENCODED[partition_id]
    if code or message is not None:
        entry += failure_fields(code, message)
    if watermark is not None:
        entry += b"\x28" + ENCODED[watermark]
    if start is not None:
        entry += b"\x30" + ENCODED[start]
    if filtered_end is not None:
        entry += b"\x48" + ENCODED[filtered_end]
    if remote is not None:
        entry += b"\x3a" + encode_varint(len(remote)) + remote
    if records is None:
        return b"\x12" + encode_varint(len(entry)) + entry, 0
    payload = sum(map(len, records))
    entry += b"\x42" + encode_varint(payload)
    return b"\x12" + encode_varint(len(entry) + payload) + entry, payload


# ---- The client's side


@dataclass(slots=True)
class BucketAnswer:
    """One bucket of a response, as the client reads it."""

    bucket: TableBucket
    """The bucket."""
    error_code: int = 0
    """0 when the bucket could be read."""
    error_message: str = ""
    """Why the bucket could not be read."""
    high_watermark: int | None = None
    """Records below it are committed."""
    log_start_offset: int | None = None
    """The first offset that the log still has."""
    records: memoryview = _NOTHING
    """Batches, the last one perhaps incomplete; a view of the frame."""
    filtered_end_offset: int | None = None
    """The offset to read next when the batches before it were pruned."""
    remote: memoryview = _NOTHING
    """A PbRemoteLogFetchInfo when the records are in remote storage; empty otherwise."""


def read_fetch_response(body: memoryview) -> list[BucketAnswer]:
    """Returns the buckets of a FETCH_LOG response; `CorruptMessageError` for other bytes."""
    buckets = []
    for field, value in fields_of(body):
        if field == 1 and isinstance(value, memoryview):
            buckets += _table(value)
    return buckets


def _table(view: memoryview) -> list[BucketAnswer]:
    table_id, entries = None, []
    for field, value in fields_of(view):
        if field == 1 and isinstance(value, int):
            table_id = value
        elif field == 2 and isinstance(value, memoryview):
            entries.append(value)
    if table_id is None:
        raise CorruptMessageError("a table of a fetch answer has no table_id")
    return [_bucket(table_id, entry) for entry in entries]


def _bucket(table_id: int, view: memoryview) -> BucketAnswer:
    values = dict(fields_of(view))
    bucket_id, partition_id = values.get(2), values.get(1)
    if not isinstance(bucket_id, int) or not isinstance(partition_id, int | None):
        raise CorruptMessageError("a bucket of a fetch answer has no bucket_id")
    return BucketAnswer(
        TableBucket(table_id, partition_id, bucket_id),
        _int(values.get(3)) or 0,
        bytes(_view(values.get(4))).decode("utf-8", "replace"),
        _int(values.get(5)),
        _int(values.get(6)),
        _view(values.get(8)),
        _int(values.get(9)),
        _view(values.get(7)),
    )


def _int(value: int | memoryview | None) -> int | None:
    if isinstance(value, memoryview):
        raise CorruptMessageError("a fetch answer has bytes where a number belongs")
    return value


def _view(value: int | memoryview | None) -> memoryview:
    if isinstance(value, int):
        raise CorruptMessageError("a fetch answer has a number where bytes belong")
    return _NOTHING if value is None else value
