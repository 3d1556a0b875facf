"""A small append in one call: scans the usual PRODUCE_LOG request and checks its batch.

Calls take the time of a small append, not bytes. So the field scanner and the batch checker are one
kernel for the request that clients send nearly always: `acks=all`, fields in number order, one
bucket of a known table, one uncompressed Arrow batch. Other requests, and those with a fault, are
refused as "not usual" and take the plain path (`scan_produce` of `wire/hot/produce.py`, then
`BatchChecker.check`), which is this kernel's twin and has the error messages.

`check_produce(buf, start, end, table_id, program)` returns twelve integers: the eight of a
`CheckedBatch` (its start is −1 if the request is not usual), then CRC, partition id (−1 for none),
bucket id and timeout_ms. The caller compares the CRC.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.batch_check import check_batch
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, load_u8
from zufluss.record.kernels.raw import address_of, peek_u8
from zufluss.record.kernels.varint import read_varint

_RESULT = types.UniTuple(types.int64, 12)
_PROGRAM = types.Array(types.int64, 1, "C", readonly=True)

SHORTEST = 24
"""Least size of a usual request; guards the fixed bytes that are read first."""


UINT28, UINT63 = 28, 63
"""Bits of the varints that a usual request holds: four bytes are never a negative int32, and nine
bytes are never a negative int64."""


@kernel(inline=True)
def read_field(data: Any, pos: Any, end: Any, tag: Any, bits: Any) -> Any:
    """The varint of the protobuf field at `pos`, and the position after it.

    The position is negative if `pos` is, or if another tag or no varint of `bits` bits is there.
    """
    if pos < 0 or pos >= end or peek_u8(data + pos) != tag:
        return np.int64(0), np.int64(-1)
    return read_varint(data, pos + 1, end, bits)


@kernel(_RESULT(BYTES, types.int64, types.int64, types.int64, _PROGRAM), short=True)
def check_produce(buf: Any, start: Any, end: Any, table_id: Any, program: Any) -> Any:
    """Scan a usual request and check its batch; the module's docstring lists the results."""
    none = np.int64(-1)
    unusual = (none, none, none, none, none, none, none, none, none, none, none, none)
    if start < 0 or end > buf.size or end - start < SHORTEST or load_u8(buf, start) != 0x08:
        return unusual
    # Field 1, acks: -1 is a varint of ten bytes.
    for offset in range(1, 10):
        if load_u8(buf, start + offset) != 0xFF:
            return unusual
    if load_u8(buf, start + 10) != 0x01:
        return unusual
    # The rest of ProduceLogRequest: table_id, timeout_ms, then one bucket entry to the end.
    data = address_of(buf)
    table, pos = read_field(data, start + 11, end, 0x10, UINT63)
    timeout_ms, pos = read_field(data, pos, end, 0x18, UINT28)
    size, pos = read_field(data, pos, end, 0x22, UINT28)
    if pos < 0 or table != table_id or pos + size != end:
        return unusual
    # The bucket entry: partition_id if the table has partitions, bucket_id, records to the end.
    partition = np.int64(-1)
    if pos < end and peek_u8(data + pos) == 0x08:
        partition, pos = read_varint(data, pos + 1, end, UINT63)
    bucket, pos = read_field(data, pos, end, 0x10, UINT28)
    size, pos = read_field(data, pos, end, 0x1A, UINT28)
    if pos < 0 or pos + size != end:
        return unusual
    result = check_batch(buf, pos, end, program, False)
    if result[0] != 0 or result[5] != end:
        return unusual
    return (
        pos,
        end,
        result[6],
        result[7],
        result[8],
        result[9],
        result[10],
        result[11],
        result[4],
        partition,
        bucket,
        timeout_ms,
    )
