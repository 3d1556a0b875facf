"""Log bodies made of rows: finds the row of each record.

A record is its length (i32), its change type (u8) and its row (`zufluss.record.batch.row_body`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.batch_header import CHANGE_TYPE_MAX
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, load_i32, load_u8

RECORD_CUT, CHANGE_TYPE, LEFT_OVER = range(1, 4)


@kernel(
    types.UniTuple(types.int64, 3)(
        BYTES, types.int64, types.int64, types.Array(types.int64, 2, "C")
    )
)
def read_body(data: Any, pos: Any, end: Any, table: Any) -> Any:
    """Find the rows of as many records as `table` has columns: starts in line 0, ends in line 1.

    Returns fault, record, detail. The caller has compared `pos` and `end` with the data.
    """
    zero, count = np.int64(0), table.shape[1]
    for record in range(count):
        left = end - pos - 4
        size = load_i32(data, pos) if left >= 0 else np.int64(0)
        if size < 1 or size > left:
            return np.int64(RECORD_CUT), np.int64(record), size
        change = load_u8(data, pos + 4)
        if change > CHANGE_TYPE_MAX:
            return np.int64(CHANGE_TYPE), np.int64(record), change
        table[0, record], table[1, record] = pos + 5, pos + 4 + size
        pos += 4 + size
    if pos != end:
        return np.int64(LEFT_OVER), np.int64(count), end - pos
    return zero, zero, zero
