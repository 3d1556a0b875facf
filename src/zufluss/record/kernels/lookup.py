"""LOOKUP requests and answers in one call each: calls take the time of a single lookup, not bytes.

`scan_lookup` reads the request that clients send nearly always: fields in number order, one bucket,
no insert. It refuses all others as "not usual", and they go through protobuf, its twin.
`write_values` writes the answer for one bucket straight from the buffer of the values;
`encode_values` writes a part of a larger answer, also of PREFIX_LOOKUP.

| LookupRequest             | field | PbLookupReqForBucket | field |
|---------------------------|-------|----------------------|-------|
| table_id             int64 | 1    | partition_id int64   | 1     |
| buckets_req       repeated | 2    | bucket_id    int32   | 2     |
| insert_if_not_exists  bool | 3    | keys         bytes s | 3     |

| LookupResponse        | field | PbLookupRespForBucket | field | PbValue      | field |
|-----------------------|-------|-----------------------|-------|--------------|-------|
| buckets_resp repeated | 1     | partition_id int64    | 1     | values bytes | 1     |
|                       |       | bucket_id    int32    | 2     |              |       |
|                       |       | values   repeated     | 5     |              |       |

PrefixLookupResponse has the fields of LookupResponse, with PbValueList (`values` repeated bytes,
field 1) in place of PbValue.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, copy, load_u8, store_u8
from zufluss.record.kernels.produce import UINT28, UINT63, read_field
from zufluss.record.kernels.raw import address_of
from zufluss.record.kernels.varint import put_varint, read_varint, varint_size

_RESULT = types.UniTuple(types.int64, 4)
_OUT = types.Array(types.int64, 1, "C")
_IN = types.Array(types.int64, 1, "C", readonly=True)
_BYTES_OUT = types.Array(types.uint8, 1, "C")


@kernel(_RESULT(BYTES, types.int64, types.int64, _OUT, _OUT), short=True)
def scan_lookup(buf: Any, start: Any, end: Any, starts: Any, ends: Any) -> Any:
    """Return number of keys (−1: not usual), table id, partition id (−1: none), bucket id.

    The places of the keys go to `starts` and `ends`; more keys than these hold are not usual.
    """
    zero = np.int64(0)
    unusual = (np.int64(-1), zero, zero, zero)
    if start < 0 or end > buf.size:
        return unusual
    data = address_of(buf)
    table, pos = read_field(data, start, end, 0x08, UINT63)
    size, pos = read_field(data, pos, end, 0x12, UINT28)
    if pos < 0 or pos + size > end:
        return unusual
    # Behind the bucket entry, only insert_if_not_exists = false may follow.
    stop = pos + size
    if stop != end and not (
        stop + 2 == end and load_u8(buf, stop) == 0x18 and load_u8(buf, stop + 1) == 0
    ):
        return unusual
    partition = np.int64(-1)
    if pos < stop and load_u8(buf, pos) == 0x08:
        partition, pos = read_varint(data, pos + 1, stop, UINT63)
    bucket, pos = read_field(data, pos, stop, 0x10, UINT28)
    if pos < 0:
        return unusual
    count = zero
    while pos < stop:
        size, pos = read_field(data, pos, stop, 0x1A, UINT28)
        if pos < 0 or pos + size > stop or count >= len(starts):
            return unusual
        starts[count] = pos
        pos += size
        ends[count] = pos
        count += 1
    return count, table, partition, bucket


@kernel()
def _value_sizes(limit: Any, starts: Any, ends: Any, listed: Any) -> Any:
    """Return the bytes of encoded values, −1 if one lies outside of the first `limit` bytes."""
    size = np.int64(0)
    for value in range(len(starts)):
        if starts[value] < 0:
            size += 0 if listed else 2
            continue
        length = ends[value] - starts[value]
        if length < 0 or ends[value] > limit:
            return np.int64(-1)
        inner = 1 + varint_size(length) + length
        size += inner if listed else 1 + varint_size(inner) + inner
    return size


@kernel()
def _put_values(data: Any, starts: Any, ends: Any, listed: Any, at: Any, out: Any) -> Any:
    """Write encoded values to `out` from `at` on, which has room for them; return the end."""
    to = address_of(out)
    for value in range(len(starts)):
        if starts[value] < 0:
            if not listed:
                store_u8(out, at, 0x2A)
                store_u8(out, at + 1, 0)
                at += 2
            continue
        length = ends[value] - starts[value]
        if not listed:
            store_u8(out, at, 0x2A)
            at = put_varint(1 + varint_size(length) + length, to, at + 1)
        store_u8(out, at, 0x0A)
        at = put_varint(length, to, at + 1)
        copy(out, at, data, starts[value], length)
        at += length
    return at


@kernel(types.int64(BYTES, _IN, _IN, types.int64, types.int64, types.int64, _BYTES_OUT), short=True)
def write_values(
    data: Any, starts: Any, ends: Any, partition: Any, bucket: Any, at: Any, out: Any
) -> Any:
    """Write the answer for one bucket to `out` from `at` on; absent values are empty messages.

    Returns the position after it. If the answer does not fit, returns −1 − its size; if a value
    lies outside of `data`, returns −1. In both cases nothing is written.
    """
    # Protobuf writes the size of a message before it, so all sizes are needed first.
    size = _value_sizes(len(data), starts, ends, False)
    if size < 0:
        return -1
    size += 1 + varint_size(bucket)
    if partition >= 0:
        size += 1 + varint_size(partition)
    whole = 1 + varint_size(size) + size
    if at < 0 or at + whole > len(out):
        return -1 - whole
    # buckets_resp, then partition_id and bucket_id, then values.
    to = address_of(out)
    store_u8(out, at, 0x0A)
    at = put_varint(size, to, at + 1)
    if partition >= 0:
        store_u8(out, at, 0x08)
        at = put_varint(partition, to, at + 1)
    store_u8(out, at, 0x10)
    at = put_varint(bucket, to, at + 1)
    return _put_values(data, starts, ends, False, at, out)


@kernel(types.int64(BYTES, _IN, _IN, types.boolean))
def encoded_size(data: Any, starts: Any, ends: Any, listed: Any) -> Any:
    """Return the size of what `encode_values` writes, −1 if a value lies outside of `data`."""
    return _value_sizes(len(data), starts, ends, listed)


@kernel(types.int64(BYTES, _IN, _IN, types.boolean, _BYTES_OUT))
def encode_values(data: Any, starts: Any, ends: Any, listed: Any, out: Any) -> Any:
    """Write `values` of PbLookupRespForBucket, or with `listed` those of PbValueList, to `out`.

    A list leaves absent values out. Returns the number of bytes, −1 if they do not fit.
    """
    size = _value_sizes(len(data), starts, ends, listed)
    if size < 0 or size > len(out):
        return np.int64(-1)
    return _put_values(data, starts, ends, listed, np.int64(0), out)
