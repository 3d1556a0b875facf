"""PUT_KV by hand, both ways.

| PutKvRequest            | field |
|-------------------------|-------|
| acks           int32    | 1     |
| table_id       int64    | 2     |
| timeout_ms     int32    | 3     |
| target_columns int32s   | 4     |
| buckets_req    repeated | 5     |
| agg_mode       int32    | 6     |

The response has the fields of a PRODUCE_LOG response (`produce.produce_response`), with
`log_end_offset` in the place of `base_offset`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from zufluss.errors import CorruptMessageError
from zufluss.model.table import TableBucket
from zufluss.varint import encode_varint
from zufluss.wire.frame import Buffer
from zufluss.wire.hot.buckets import (
    BUCKETS_MAX,
    FIELDS_AT_ONCE,
    BucketScan,
    check_fields,
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

TARGETS_MAX: Final = 32_768
"""Target columns of one request; the largest descriptor of a table has room for fewer columns."""
FIELDS_MAX: Final = BUCKETS_MAX + TARGETS_MAX + 64
"""Fields of one request: bucket entries, target columns, and unknown and repeated ones."""


def put_request(
    target_columns: Sequence[int],
    acks: int,
    table_id: int,
    timeout_ms: int,
    batches: Sequence[tuple[TableBucket, Buffer]],
    *,
    agg_mode: int = 0,
) -> list[Buffer]:
    """Returns the body of a PUT_KV request as buffers to send in turn.

    No target columns mean all.


    >>> [bytes(b) for b in put_request([0, 2], 1, 7, 30, [(TableBucket(7, None, 2), b"abc")])]
    [b'\\x08\\x01\\x10\\x07\\x18\\x1e"\\x02\\x00\\x02*\\x07\\x10\\x02\\x1a\\x03', b'abc']
    """
    head = request_head(acks, table_id, timeout_ms)
    if target_columns:
        packed = b"".join(encode_varint(index) for index in target_columns)
        head += b"\x22" + encode_varint(len(packed)) + packed
    if agg_mode:
        head += b"\x30" + encode_varint(agg_mode)
    return request_buffers(head, b"\x2a", batches)


class PutScan(NamedTuple):
    """A PutKvRequest without its payload."""

    acks: int
    """As sent; -1, 0 and 1 have a meaning."""
    table_id: int
    """The table all buckets belong to."""
    timeout_ms: int
    """How long the client waits for the answer."""
    targets: tuple[int, ...]
    """Positions of the columns that are written, empty for all."""
    mode: int
    """`agg_mode`, 0 if it is not sent."""
    buckets: list[BucketScan]
    """In the order of the request."""


def scan_put(view: memoryview, start: int, end: int) -> PutScan | None:
    """Returns the fields of the PutKvRequest at `view[start:end]` and where its records lie.

    Returns None for a request with many fields, which `scan_put_steps` reads. Raises
    CorruptMessageError for bytes that are not such a message.
    """
    return next(scan_put_steps(view, start, end))


def scan_put_steps(view: memoryview, start: int, end: int) -> Iterator[PutScan | None]:
    """Yields None after each `FIELDS_AT_ONCE` fields, and last what the request says."""
    numbers: dict[int, int] = {}
    targets: list[int] = []
    buckets: list[BucketScan] = []
    position, fields = start, 0
    while position < end:
        fields += 1
        if fields % FIELDS_AT_ONCE == 0:
            check_fields(fields, FIELDS_MAX, "PutKvRequest")
            yield None
        tag = view[position]
        if 8 <= tag < 0x80:  # one byte, as all fields that are known
            position += 1
        else:
            tag, position = read_tag(view, position, end)
        field, wire_type = tag >> 3, tag & 7
        if field in (1, 2, 3, 6):
            if wire_type != VARINT:
                refuse_type("PutKvRequest", field, wire_type)
            number, position = read_varint(view, position, end)
            if numbers.setdefault(field, number) != number and field == 6:
                raise CorruptMessageError(
                    "a PutKvRequest has two values of agg_mode; its rows are all of one mode, so "
                    "send several"
                )
            numbers[field] = number
        elif field == 4:
            position = _scan_targets(view, position, end, wire_type, targets)
        elif field == 5:
            if wire_type != BYTES:
                refuse_type("PutKvRequest", field, wire_type)
            bucket, position = read_length(view, position, end)
            if len(buckets) >= BUCKETS_MAX:
                raise CorruptMessageError(
                    f"a PutKvRequest has more than {BUCKETS_MAX} buckets; send several"
                )
            buckets.append(scan_bucket(view, bucket, position))
        else:
            position = skip_field(view, position, end, wire_type)
    if not numbers.keys() >= {1, 2, 3}:
        raise CorruptMessageError(
            "a PutKvRequest lacks one of its required fields acks, table_id, timeout_ms"
        )
    mode = to_int32(numbers.get(6, 0))
    acks, table_id, timeout_ms = to_int32(numbers[1]), to_int64(numbers[2]), to_int32(numbers[3])
    yield PutScan(acks, table_id, timeout_ms, tuple(targets), mode, buckets)


def _scan_targets(
    view: memoryview, position: int, end: int, wire_type: int, targets: list[int]
) -> int:
    """Read target columns, packed or one by one; returns the position after them."""
    if wire_type == VARINT:
        stop = None
    elif wire_type == BYTES:
        position, stop = read_length(view, position, end)
        if stop == position:
            return position
    else:
        refuse_type("PutKvRequest", 4, wire_type)
    while True:
        value, position = read_varint(view, position, end if stop is None else stop)
        targets.append(to_int32(value))
        if len(targets) > TARGETS_MAX:
            raise CorruptMessageError(f"a PutKvRequest has more than {TARGETS_MAX} target columns")
        if stop is None or position == stop:
            return position
