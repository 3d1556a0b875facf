"""The hot messages by hand: PRODUCE_LOG requests in, PRODUCE_LOG and FETCH_LOG responses out.

Protobuf copies every `bytes` field, which for these messages is the payload: 1 MiB of records costs
several hundred microseconds and twice the memory. Here a request is only *located*: the scanner
answers with positions into the caller's buffer, and the response builder keeps the records as the
buffers they came in. Everything else on the wire goes through protobuf (`codec.decode`).

| ProduceLogRequest          | field | PbProduceLogReqForBucket | field |
|----------------------------|-------|--------------------------|-------|
| acks        int32          | 1     | partition_id int64       | 1     |
| table_id    int64          | 2     | bucket_id    int32       | 2     |
| timeout_ms  int32          | 3     | records      bytes       | 3     |
| buckets_req repeated       | 4     |                          |       |

Clients write the fields in number order and integers in their shortest form, so `scan_produce`
matches exactly that shape with one regular expression (C speed, no copy) and hands everything else
to `scan_produce_any`, which reads any order, skips unknown fields, and lets the last of several
values win, as protobuf does (`fields.py`). Both agree with protobuf by property test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from zufluss.errors import CorruptMessageError
from zufluss.varint import ONE_BYTE, decode_varint, encode_varint
from zufluss.wire.fields import (
    BYTES,
    VARINT,
    BucketScan,
    read_length,
    read_tag,
    read_varint,
    refuse_type,
    scan_bucket,
    skip_field,
    to_int32,
    to_int64,
)

Buffer = bytes | bytearray | memoryview

BUCKETS_MAX: Final = 1 << 16
"""Entries of one produce request; a frame of nothing but tiny entries must not fill the memory."""

_CACHE_ENTRIES_MAX: Final = 1 << 14


class ProduceScan(NamedTuple):
    """A produce request without its payload."""

    acks: int
    """As sent; -1, 0 and 1 have a meaning."""
    table_id: int
    """The table all buckets belong to."""
    timeout_ms: int
    """How long the client waits for the answer."""
    buckets: list[BucketScan]
    """In the order of the request."""


class ProducedBucket(NamedTuple):
    """What became of one bucket of a produce request."""

    partition_id: int | None
    """As in the request."""
    bucket_id: int
    """As in the request."""
    base_offset: int | None = None
    """The offset of the first record, when it was appended."""
    error_code: int = 0
    """0 when it was appended."""
    error_message: str | None = None
    """Why it was not."""


class FetchedBucket(NamedTuple):
    """What a fetch found in one bucket."""

    partition_id: int | None
    """As in the request."""
    bucket_id: int
    """As in the request."""
    error_code: int = 0
    """0 when the bucket could be read."""
    error_message: str | None = None
    """Why it could not."""
    high_watermark: int | None = None
    """Records below it are committed."""
    log_start_offset: int | None = None
    """The first offset that is still there."""
    records: Sequence[Buffer] | None = None
    """Whole batches, in any number of buffers; None leaves the field out."""
    filtered_end_offset: int | None = None
    """Where to go on when every batch was pruned."""
    remote: bytes | None = None
    """A PbRemoteLogFetchInfo, instead of records."""


class FetchedTable(NamedTuple):
    """What a fetch found in one table."""

    table_id: int
    """As in the request."""
    buckets: Sequence[FetchedBucket]
    """In any order."""


# ---- The request: usual shape


class _Values(dict[bytes, int]):
    """Varints by their bytes: a client sends the same few again and again."""

    def __missing__(self, raw: bytes) -> int:
        value, _ = decode_varint(raw, 0, len(raw))
        if len(self) >= _CACHE_ENTRIES_MAX:
            self.clear()
        self[raw] = value
        return value


# Up to nine bytes are a non-negative int64, up to four a non-negative int32: no sign to think of.
_INT64 = rb"([\x80-\xff]{0,8}[\x00-\x7f])"
_INT32 = rb"([\x80-\xff]{0,3}[\x00-\x7f])"
_BUCKET = rb"\x22" + _INT32 + rb"(?:\x08" + _INT64 + rb")?\x10" + _INT32 + rb"\x1a" + _INT32
_ACKS = rb"\x08(\xff{9}\x01|[\x00-\x7f])"

_match_first: Final = re.compile(_ACKS + rb"\x10" + _INT64 + rb"\x18" + _INT32 + _BUCKET).match
_match_next: Final = re.compile(_BUCKET).match
_new: Final = tuple.__new__
_values: Final = _Values()


def scan_produce(view: memoryview, start: int, end: int) -> ProduceScan:
    """Locate what stands in the ProduceLogRequest at `view[start:end]`.

    Raises CorruptMessageError for bytes that are not such a message.
    """
    found = _match_first(view, start, end)
    if found is None:
        return scan_produce_any(view, start, end)
    acks, table_id, timeout_ms, size, partition, bucket, length = found.groups()
    size_end = found.end(4)
    buckets: list[BucketScan] = []
    while True:
        records = found.end()
        stop = records + _values[length]
        if stop > end or stop != size_end + _values[size]:
            return scan_produce_any(view, start, end)
        partition_id = None if partition is None else _values[partition]
        # The generated constructors of named tuples cost as much as the match; this is their core.
        buckets.append(_new(BucketScan, (partition_id, _values[bucket], records, stop)))
        if stop == end:
            acks = -1 if len(acks) > 1 else acks[0]
            return _new(ProduceScan, (acks, _values[table_id], _values[timeout_ms], buckets))
        found = _match_next(view, stop, end)
        if found is None or len(buckets) >= BUCKETS_MAX:
            return scan_produce_any(view, start, end)
        size, partition, bucket, length = found.groups()
        size_end = found.end(1)


# ---- The request: any shape


def scan_produce_any(view: memoryview, start: int, end: int) -> ProduceScan:
    """The plain twin of `scan_produce`: any field order, unknown fields, any length of integers."""
    acks = table_id = timeout_ms = None
    buckets: list[BucketScan] = []
    position = start
    while position < end:
        tag, position = read_tag(view, position, end)
        field, wire_type = tag >> 3, tag & 7
        if field > 4:
            position = skip_field(view, position, end, wire_type)
        elif wire_type != (BYTES if field == 4 else VARINT):
            refuse_type("ProduceLogRequest", field, wire_type)
        elif field == 4:
            bucket_start, position = read_length(view, position, end)
            if len(buckets) >= BUCKETS_MAX:
                raise CorruptMessageError(
                    f"a ProduceLogRequest has more than {BUCKETS_MAX} buckets; send several"
                )
            buckets.append(scan_bucket(view, bucket_start, position))
        else:
            value, position = read_varint(view, position, end)
            if field == 1:
                acks = to_int32(value)
            elif field == 2:
                table_id = to_int64(value)
            else:
                timeout_ms = to_int32(value)
    if acks is None or table_id is None or timeout_ms is None:
        raise CorruptMessageError(
            "a ProduceLogRequest lacks one of its required fields acks, table_id, timeout_ms"
        )
    return ProduceScan(acks, table_id, timeout_ms, buckets)


# ---- Responses


_MORE: Final = [bytes((value | 0x80,)) for value in range(0x80)]
"""Seven bits of an integer that has more."""


class _Encoded(dict[int, bytes]):
    """Varints by their value: buckets, and the offsets of buckets where nothing moves."""

    def __missing__(self, value: int) -> bytes:
        if len(self) >= _CACHE_ENTRIES_MAX:
            self.clear()
        raw = self[value] = encode_varint(value)
        return raw


_encoded: Final = _Encoded()


def produce_ok(bucket_id: int, partition_id: int | None, base_offset: int) -> bytes:
    """The body of a ProduceLogResponse that acknowledges one bucket."""
    entry = b"\x10" + _encoded[bucket_id] + b"\x28"
    if base_offset < 0x4000:
        entry += _encoded[base_offset]
    else:  # the high bits stay the same for many offsets
        entry += _MORE[base_offset & 0x7F] + _MORE[base_offset >> 7 & 0x7F]
        entry += _encoded[base_offset >> 14]
    if partition_id is not None:
        entry = b"\x08" + _encoded[partition_id] + entry
    return b"\x0a" + ONE_BYTE[len(entry)] + entry


def produce_response(buckets: Iterable[ProducedBucket]) -> bytes:
    """The body of a ProduceLogResponse for any number of buckets and outcomes."""
    body = bytearray()
    for bucket in buckets:
        entry = b"\x10" + encode_varint(bucket.bucket_id)
        if bucket.partition_id is not None:
            entry += b"\x08" + encode_varint(bucket.partition_id)
        entry += _failure(bucket.error_code, bucket.error_message)
        if bucket.base_offset is not None:
            entry += b"\x28" + encode_varint(bucket.base_offset)
        body += b"\x0a" + encode_varint(len(entry)) + entry
    return bytes(body)


def fetch_response(tables: Iterable[FetchedTable]) -> tuple[list[Buffer], int]:
    """The body of a FetchLogResponse as buffers to send in turn, and its size in bytes.

    The buffers of the records are in the list as they are; only what stands between is new.
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
    """A bucket of a fetch answer up to its records, which come last, and their size."""
    partition_id, bucket_id, code, message, watermark, start, records, filtered_end, remote = bucket
    entry = b"\x10" + _encoded[bucket_id]
    if partition_id is not None:
        entry += b"\x08" + _encoded[partition_id]
    if code or message is not None:
        entry += _failure(code, message)
    if watermark is not None:
        entry += b"\x28" + _encoded[watermark]
    if start is not None:
        entry += b"\x30" + _encoded[start]
    if filtered_end is not None:
        entry += b"\x48" + _encoded[filtered_end]
    if remote is not None:
        entry += b"\x3a" + encode_varint(len(remote)) + remote
    if records is None:
        return b"\x12" + encode_varint(len(entry)) + entry, 0
    payload = sum(map(len, records))
    entry += b"\x42" + encode_varint(payload)
    return b"\x12" + encode_varint(len(entry) + payload) + entry, payload


def _failure(code: int, message: str | None) -> bytes:
    out = b"\x18" + encode_varint(code) if code else b""
    if message is None:
        return out
    text = message.encode("utf-8", "replace")
    return out + b"\x22" + encode_varint(len(text)) + text
