"""PRODUCE_LOG by hand, both ways.

| ProduceLogRequest    | field | ProduceLogResponse    | field | PbProduceLogRespForBucket | field |
|----------------------|-------|-----------------------|-------|---------------------------|-------|
| acks        int32    | 1     | buckets_resp repeated | 1     | partition_id  int64       | 1     |
| table_id    int64    | 2     |                       |       | bucket_id     int32       | 2     |
| timeout_ms  int32    | 3     |                       |       | error_code    int32       | 3     |
| buckets_req repeated | 4     |                       |       | error_message string      | 4     |
|                      |       |                       |       | base_offset   int64       | 5     |
|                      |       |                       |       | deleted_rows  int32       | 1000  |

Answers to PUT_KV have the same fields, but call `base_offset` `log_end_offset`; only they have
`deleted_rows`.

Clients write the fields in number order and integers in their shortest form, so `scan_produce`
matches exactly that shape with one regular expression (C speed, no copy). Every other shape goes to
`scan_produce_steps`, which reads the fields in any order, skips unknown ones, and lets the last of
several values win, as protobuf does. Both agree with protobuf by property test.

A request with many entries takes longer to scan than other clients should wait. `scan_produce`
leaves such a request to `scan_produce_steps`, between whose steps other requests can run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket
from zufluss.varint import ONE_BYTE, decode_varint, encode_varint
from zufluss.wire.frame import Buffer
from zufluss.wire.hot.buckets import (
    BUCKETS_MAX,
    CACHE_ENTRIES_MAX,
    ENCODED,
    ENTRIES_AT_ONCE,
    FIELDS_AT_ONCE,
    BucketScan,
    check_fields,
    failure_fields,
    request_buffers,
    request_head,
    scan_bucket,
)
from zufluss.wire.hot.fields import (
    BYTES,
    VARINT,
    read_length,
    read_tag,
    read_varint,
    refuse_type,
    skip_field,
    to_int32,
    to_int64,
)

FIELDS_MAX: Final = BUCKETS_MAX + 64
"""Fields of one request: its bucket entries, and unknown and repeated ones."""


def produce_request(
    acks: int, table_id: int, timeout_ms: int, batches: Sequence[tuple[TableBucket, Buffer]]
) -> list[Buffer]:
    """Returns the body of a PRODUCE_LOG request as buffers to send in turn.

    >>> [bytes(b) for b in produce_request(1, 7, 30, [(TableBucket(7, None, 2), b"abc")])]
    [b'\\x08\\x01\\x10\\x07\\x18\\x1e"\\x07\\x10\\x02\\x1a\\x03', b'abc']
    """
    return request_buffers(request_head(acks, table_id, timeout_ms), b"\x22", batches)


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
    """The outcome of one bucket of a write request."""

    partition_id: int | None
    """As in the request."""
    bucket_id: int
    """As in the request."""
    base_offset: int | None = None
    """The offset of the first record; None when nothing was appended."""
    error_code: int = 0
    """0 when the records were appended."""
    error_message: str | None = None
    """Why the records were not appended."""
    deleted_rows: int | None = None
    """The number of rows that the deletes of a put removed; None without deletes."""


# ---- The request: usual shape


class _Values(dict[bytes, int]):
    """Varints by their bytes. A client sends the same few again and again."""

    def __missing__(self, raw: bytes) -> int:
        value, _ = decode_varint(raw, 0, len(raw))
        if len(self) >= CACHE_ENTRIES_MAX:
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


def scan_produce(view: memoryview, start: int, end: int) -> ProduceScan | None:
    """Returns the fields of the ProduceLogRequest at `view[start:end]` and where its records lie.

    Returns None for a request with many entries, which `scan_produce_steps` reads. Raises
    CorruptMessageError for bytes that are not such a message.
    """
    match = _match_first(view, start, end)
    if match is None:
        return next(scan_produce_steps(view, start, end))
    acks, table_id, timeout_ms, size, partition, bucket, length = match.groups()
    size_end = match.end(4)
    buckets: list[BucketScan] = []
    while True:
        records = match.end()
        stop = records + _values[length]
        if stop > end or stop != size_end + _values[size]:
            return next(scan_produce_steps(view, start, end))
        partition_id = None if partition is None else _values[partition]
        # The generated constructors of named tuples cost as much as the match; this is their core.
        buckets.append(_new(BucketScan, (partition_id, _values[bucket], records, stop)))
        if stop == end:
            acks = -1 if len(acks) > 1 else acks[0]
            return _new(ProduceScan, (acks, _values[table_id], _values[timeout_ms], buckets))
        if len(buckets) >= ENTRIES_AT_ONCE:
            return None
        match = _match_next(view, stop, end)
        if match is None:
            return next(scan_produce_steps(view, start, end))
        size, partition, bucket, length = match.groups()
        size_end = match.end(1)


# ---- The request: any shape


def scan_produce_steps(view: memoryview, start: int, end: int) -> Iterator[ProduceScan | None]:
    """The plain twin of `scan_produce`: any order, unknown fields, integers of any length.

    Yields None after each `FIELDS_AT_ONCE` fields, and last what the request says.
    """
    acks = table_id = timeout_ms = None
    buckets: list[BucketScan] = []
    position, fields = start, 0
    while position < end:
        fields += 1
        if fields % FIELDS_AT_ONCE == 0:
            check_fields(fields, FIELDS_MAX, "ProduceLogRequest")
            yield None
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
    yield ProduceScan(acks, table_id, timeout_ms, buckets)


# ---- The response


_DELETED_ROWS: Final = encode_varint(1000 << 3)
"""The tag of `deleted_rows`."""
_MORE: Final = [bytes((value | 0x80,)) for value in range(0x80)]
"""Seven bits of a varint that continues."""


def produce_ok(bucket_id: int, partition_id: int | None, base_offset: int) -> bytes:
    """Returns the body of a ProduceLogResponse that acknowledges one bucket."""
    entry = b"\x10" + ENCODED[bucket_id] + b"\x28"
    if base_offset < 0x4000:
        entry += ENCODED[base_offset]
    else:  # the high bits stay the same for many offsets
        entry += _MORE[base_offset & 0x7F] + _MORE[base_offset >> 7 & 0x7F]
        entry += ENCODED[base_offset >> 14]
    if partition_id is not None:
        entry = b"\x08" + ENCODED[partition_id] + entry
    return b"\x0a" + ONE_BYTE[len(entry)] + entry


def produce_response(buckets: Iterable[ProducedBucket]) -> bytes:
    """Returns the body of a ProduceLogResponse for any number of buckets and outcomes."""
    body = bytearray()
    for bucket in buckets:
        entry = b"\x10" + encode_varint(bucket.bucket_id)
        if bucket.partition_id is not None:
            entry += b"\x08" + encode_varint(bucket.partition_id)
        entry += failure_fields(bucket.error_code, bucket.error_message)
        if bucket.base_offset is not None:
            entry += b"\x28" + encode_varint(bucket.base_offset)
        if bucket.deleted_rows is not None:
            entry += _DELETED_ROWS + encode_varint(bucket.deleted_rows)
        body += b"\x0a" + encode_varint(len(entry)) + entry
    return bytes(body)
