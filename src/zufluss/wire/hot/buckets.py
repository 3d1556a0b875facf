"""Bucket entries of the hot messages, as far as requests and responses share them.

The bucket entries of PRODUCE_LOG and PUT_KV requests have the same fields:

| PbProduceLogReqForBucket, PbPutKvReqForBucket | field |
|-----------------------------------------------|-------|
| partition_id int64                            | 1     |
| bucket_id    int32                            | 2     |
| records      bytes                            | 3     |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket
from zufluss.varint import encode_varint
from zufluss.wire.frame import Buffer
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

BUCKETS_MAX: Final = 1 << 16
"""Bucket entries of one request; each costs some microseconds of the event loop and some memory."""

ENTRIES_AT_ONCE: Final = 128
"""Bucket entries of a write request that are handled at once; more are handled in turns."""

FIELDS_AT_ONCE: Final = 256
"""Fields of a write request that are scanned at once."""

ENTRY_FIELDS_MAX: Final = 64
"""Fields of one bucket entry, unknown ones and repeated ones counted."""

CACHE_ENTRIES_MAX: Final = 1 << 14
"""Varints that each cache holds before it is emptied."""


class _EncodedVarints(dict[int, bytes]):
    """Varints by value. The same bucket ids, and the offsets of idle buckets, recur often."""

    def __missing__(self, value: int) -> bytes:
        if len(self) >= CACHE_ENTRIES_MAX:
            self.clear()
        raw = self[value] = encode_varint(value)
        return raw


ENCODED: Final = _EncodedVarints()
"""Varints by value, encoded on first use."""


class BucketScan(NamedTuple):
    """One bucket of a write request, and the position of its records."""

    partition_id: int | None
    """None for a table without partitions."""
    bucket_id: int
    """As sent; the caller checks whether the bucket exists."""
    start: int
    """Position of the first byte of the records in the scanned buffer."""
    end: int
    """Position after their last byte."""


def scan_bucket(view: memoryview, position: int, end: int) -> BucketScan:
    """Returns what the bucket entry at `view[position:end]` says, without its records."""
    partition_id = bucket_id = start = None
    stop = end
    fields = 0
    while position < end:
        fields += 1
        if fields > ENTRY_FIELDS_MAX:
            raise CorruptMessageError(
                f"a bucket entry has more than {ENTRY_FIELDS_MAX} fields; send each field once"
            )
        tag = view[position]
        if 8 <= tag < 0x80:  # one byte, as all fields that are known
            position += 1
        else:
            tag, position = read_tag(view, position, end)
        field, wire_type = tag >> 3, tag & 7
        if field > 3:
            position = skip_field(view, position, end, wire_type)
        elif wire_type != (BYTES if field == 3 else VARINT):
            refuse_type("bucket entry", field, wire_type)
        elif field == 3:
            start, stop = read_length(view, position, end)
            position = stop
        else:
            value, position = read_varint(view, position, end)
            if field == 1:
                partition_id = to_int64(value)
            else:
                bucket_id = to_int32(value)
    if bucket_id is None or start is None:
        raise CorruptMessageError(
            "a bucket entry lacks one of its required fields bucket_id, records"
        )
    return BucketScan(partition_id, bucket_id, start, stop)


def check_fields(fields: int, fields_max: int, message: str) -> None:
    """Refuse a write request with absurdly many fields, most of them unknown or repeated."""
    if fields > fields_max:
        raise CorruptMessageError(
            f"a {message} has more than {fields_max} fields; send each field once"
        )


def request_head(acks: int, table_id: int, timeout_ms: int) -> bytes:
    """Returns the fields in front of the bucket entries of a write request."""
    return (
        b"\x08"
        + encode_varint(acks)
        + b"\x10"
        + encode_varint(table_id)
        + b"\x18"
        + encode_varint(timeout_ms)
    )


def request_buffers(
    head: bytes, tag: bytes, batches: Sequence[tuple[TableBucket, Buffer]]
) -> list[Buffer]:
    """Returns a write request as buffers to send in turn; the records are not copied."""
    pieces: list[Buffer] = []
    for bucket, records in batches:
        entry = b"\x10" + encode_varint(bucket.bucket_id) + b"\x1a" + encode_varint(len(records))
        if bucket.partition_id is not None:
            entry = b"\x08" + encode_varint(bucket.partition_id) + entry
        pieces += (head + tag + encode_varint(len(entry) + len(records)) + entry, records)
        head = b""
    return pieces


def failure_fields(code: int, message: str | None) -> bytes:
    """Returns error_code (field 3) and error_message (field 4) of a bucket of a response."""
    out = b"\x18" + encode_varint(code) if code else b""
    if message is None:
        return out
    text = message.encode("utf-8", "replace")
    return out + b"\x22" + encode_varint(len(text)) + text
