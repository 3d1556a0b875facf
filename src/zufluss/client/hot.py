"""The hot messages by hand, from the client's side: writes out, FETCH_LOG answers in.

The mirror image of `zufluss.wire.scan`: records are the payload of these messages, and protobuf
would copy them. A PRODUCE_LOG or PUT_KV request is a list of buffers with the encoded batches in it
as they are; a fetch answer is taken apart into views of the received frame. Everything else goes
through protobuf.

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

The layout of the requests stands in `zufluss.wire.scan` and in `kv.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket
from zufluss.varint import encode_varint
from zufluss.wire.fields import read_varint
from zufluss.wire.frame import Buffer

_VARINT: Final = 0
_FIXED_SIZES: Final = {1: 8, 5: 4}
_BYTES: Final = 2
_NOTHING: Final = memoryview(b"")


def produce_request(
    acks: int, table_id: int, timeout_ms: int, batches: Sequence[tuple[TableBucket, Buffer]]
) -> list[Buffer]:
    """The body of a PRODUCE_LOG request as buffers to send in turn.

    >>> [bytes(b) for b in produce_request(1, 7, 30, [(TableBucket(7, None, 2), b"abc")])]
    [b'\\x08\\x01\\x10\\x07\\x18\\x1e"\\x07\\x10\\x02\\x1a\\x03', b'abc']
    """
    return _write_request(_prefix(acks, table_id, timeout_ms), b"\x22", batches)


def put_request(
    target_columns: Sequence[int],
    acks: int,
    table_id: int,
    timeout_ms: int,
    batches: Sequence[tuple[TableBucket, Buffer]],
    *,
    agg_mode: int = 0,
) -> list[Buffer]:
    """The body of a PUT_KV request as buffers to send in turn; no target columns mean all.

    >>> [bytes(b) for b in put_request([0, 2], 1, 7, 30, [(TableBucket(7, None, 2), b"abc")])]
    [b'\\x08\\x01\\x10\\x07\\x18\\x1e"\\x02\\x00\\x02*\\x07\\x10\\x02\\x1a\\x03', b'abc']
    """
    prefix = _prefix(acks, table_id, timeout_ms)
    if target_columns:
        packed = b"".join(encode_varint(index) for index in target_columns)
        prefix += b"\x22" + encode_varint(len(packed)) + packed
    if agg_mode:
        prefix += b"\x30" + encode_varint(agg_mode)
    return _write_request(prefix, b"\x2a", batches)


def _prefix(acks: int, table_id: int, timeout_ms: int) -> bytes:
    return (
        b"\x08"
        + encode_varint(acks)
        + b"\x10"
        + encode_varint(table_id)
        + b"\x18"
        + encode_varint(timeout_ms)
    )


def _write_request(
    prefix: bytes, tag: bytes, batches: Sequence[tuple[TableBucket, Buffer]]
) -> list[Buffer]:
    pieces: list[Buffer] = []
    for bucket, records in batches:
        entry = b"\x10" + encode_varint(bucket.bucket_id) + b"\x1a" + encode_varint(len(records))
        if bucket.partition_id is not None:
            entry = b"\x08" + encode_varint(bucket.partition_id) + entry
        pieces += (prefix + tag + encode_varint(len(entry) + len(records)) + entry, records)
        prefix = b""
    return pieces


@dataclass(slots=True)
class FetchedBucket:
    """What a fetch found in one bucket."""

    bucket: TableBucket
    """Which one."""
    error_code: int = 0
    """0 when it could be read."""
    error_message: str = ""
    """Why it could not."""
    high_watermark: int | None = None
    """Records below it are committed."""
    log_start_offset: int | None = None
    """The first offset that is still there."""
    records: memoryview = _NOTHING
    """Batches, the last one perhaps cut; a view of the frame."""
    filtered_end_offset: int | None = None
    """Where to go on when the batches up to there were pruned."""
    remote: memoryview = _NOTHING
    """Where in remote storage the records are, a PbRemoteLogFetchInfo; empty if they are not."""


def fetch_answer(body: memoryview) -> list[FetchedBucket]:
    """Take the body of a FETCH_LOG answer apart; `CorruptMessageError` if it is none."""
    buckets = []
    for field, value in _fields(body):
        if field == 1 and isinstance(value, memoryview):
            buckets += _table(value)
    return buckets


def _table(view: memoryview) -> list[FetchedBucket]:
    table_id, entries = None, []
    for field, value in _fields(view):
        if field == 1 and isinstance(value, int):
            table_id = value
        elif field == 2 and isinstance(value, memoryview):
            entries.append(value)
    if table_id is None:
        raise CorruptMessageError("a table of a fetch answer has no table_id")
    return [_bucket(table_id, entry) for entry in entries]


def _bucket(table_id: int, view: memoryview) -> FetchedBucket:
    found = dict(_fields(view))
    bucket_id, partition_id = found.get(2), found.get(1)
    if not isinstance(bucket_id, int) or not isinstance(partition_id, int | None):
        raise CorruptMessageError("a bucket of a fetch answer has no bucket_id")
    return FetchedBucket(
        TableBucket(table_id, partition_id, bucket_id),
        _int(found.get(3)) or 0,
        bytes(_view(found.get(4))).decode("utf-8", "replace"),
        _int(found.get(5)),
        _int(found.get(6)),
        _view(found.get(8)),
        _int(found.get(9)),
        _view(found.get(7)),
    )


def _int(value: int | memoryview | None) -> int | None:
    if isinstance(value, memoryview):
        raise CorruptMessageError("a fetch answer has bytes where a number belongs")
    return value


def _view(value: int | memoryview | None) -> memoryview:
    if isinstance(value, int):
        raise CorruptMessageError("a fetch answer has a number where bytes belong")
    return _NOTHING if value is None else value


def _fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Every field of a message: its number, and its value as a number or as a view."""
    position, end = 0, len(view)
    while position < end:
        tag, position = read_varint(view, position, end)
        field, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            number, position = read_varint(view, position, end)
            yield field, number - (1 << 64) if number >> 63 else number
            continue
        size = _FIXED_SIZES.get(wire_type)
        if wire_type == _BYTES:
            size, position = read_varint(view, position, end)
        if size is None or size > end - position:
            raise CorruptMessageError(f"field {field} of a fetch answer leaves its message")
        yield field, view[position : position + size]
        position += size
