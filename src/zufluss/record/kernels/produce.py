"""A small append in one call: the usual PRODUCE_LOG request taken apart, its batch checked.

Small appends are bound by calls, not by bytes, so for the request that clients send nearly always
(`acks=all`, fields in number order, one bucket of a known table, one uncompressed Arrow batch) the
field scanner and the batch checker are one kernel. Everything else, and everything that is wrong,
gets the answer "not usual" and takes the plain path (`wire.scan.scan_produce`, then
`BatchChecker.check`), which is this kernel's twin and the one that finds words for what is wrong.

`check_produce(buf, start, end, table_id, program)` returns twelve integers: the eight of a
`CheckedBatch` (its start is -1 if the request is not usual or not right), then CRC, partition id
(-1 for none), bucket id and timeout_ms. The caller compares the CRC.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels.batch_check import check_batch
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, load_u8, types

_RESULT = types.UniTuple(types.int64, 12)
_PROGRAM = types.Array(types.int64, 1, "C", readonly=True)

SHORTEST = 24
"""No usual request is shorter; guards the fixed bytes that are read first."""


@kernel()
def _varint(buf: Any, pos: Any, end: Any, longest: Any) -> Any:
    """Value and position after it of a varint of at most `longest` bytes; position -1 if none."""
    value = np.int64(0)
    for i in range(longest):
        if pos + i >= end:
            break
        byte = load_u8(buf, pos + i)
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, pos + i + 1
    return value, np.int64(-1)


@kernel()
def _field(buf: Any, pos: Any, end: Any, tag: Any, longest: Any) -> Any:
    """A varint field with this tag at `pos`; position -1 if something else is there."""
    if pos < 0 or pos >= end or load_u8(buf, pos) != tag:
        return np.int64(0), np.int64(-1)
    return _varint(buf, pos + 1, end, longest)


@kernel(_RESULT(BYTES, types.int64, types.int64, types.int64, _PROGRAM), short=True)
def check_produce(buf: Any, start: Any, end: Any, table_id: Any, program: Any) -> Any:
    """Take one usual request apart and check its batch; see the module for what comes back."""
    none = np.int64(-1)
    unusual = (none, none, none, none, none, none, none, none, none, none, none, none)
    if start < 0 or end > buf.size or end - start < SHORTEST or load_u8(buf, start) != 0x08:
        return unusual
    for i in range(1, 10):
        if load_u8(buf, start + i) != 0xFF:
            return unusual
    if load_u8(buf, start + 10) != 0x01:
        return unusual
    table, pos = _field(buf, start + 11, end, 0x10, 9)
    timeout_ms, pos = _field(buf, pos, end, 0x18, 4)
    size, pos = _field(buf, pos, end, 0x22, 4)
    if pos < 0 or table != table_id or pos + size != end:
        return unusual
    partition = np.int64(-1)
    if pos < end and load_u8(buf, pos) == 0x08:
        partition, pos = _varint(buf, pos + 1, end, 9)
    bucket, pos = _field(buf, pos, end, 0x10, 4)
    size, pos = _field(buf, pos, end, 0x1A, 4)
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
