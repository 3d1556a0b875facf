"""Writes located rows as the buffers of an Arrow message, without pyarrow in between.

The changelog of a put is compressed at once and never read here; an Arrow array for each column
would cost as much as writing all columns. Only rows without nested values are written this way.
"""

from __future__ import annotations

import numpy as np

from zufluss.record.arrow.zstd import Buffers
from zufluss.record.kernels import message_write
from zufluss.record.kernels import row_read as k
from zufluss.record.rows.cells import LocatedRows, beyond_arrow
from zufluss.record.rows.plan import Plan

_MOMENTS = (k.MOMENT, k.FINE_MOMENT)
_PADDING_BYTES = 32
"""Largest padding of the buffers of a field."""


class RowBuffers:
    """Writes the buffers of rows of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._widths = np.array(plan.widths, np.int64)
        fields = len(plan.types)
        texts = sum(sink in (k.TEXT, k.RAW) for sink in plan.sinks)
        self._numbers = 2 * fields + 2 * (2 * fields + texts)
        wide = (w for w, sink in zip(plan.widths, plan.sinks, strict=True) if sink == k.PADDED)
        self._padded_width = sum(wide)
        self._moments = [i for i, sink in enumerate(plan.sinks) if sink in _MOMENTS]

    def check(self, located: LocatedRows) -> None:
        """Raise `CorruptRecordError` if Arrow cannot hold a timestamp of the rows."""
        for i in self._moments:
            if beyond := int(located.facts[i, k.BEYOND]):
                raise beyond_arrow(f"record {beyond - 1}", i, self._plan)

    def of(self, located: LocatedRows) -> Buffers:
        """Return the buffers of one or more rows that `check` accepted."""
        count, data, cells = located.count, located.rows.data, located.cells
        placed = int(located.facts[:, k.PLACED].sum()) if located.shared else data.size
        room = cells.size + placed + _PADDING_BYTES * len(self._widths)
        body = np.empty(room + count * self._padded_width, np.uint8)
        numbers = np.empty(self._numbers, np.int64)
        size = message_write.lay_out(
            data, cells, located.facts, self._plan.program, self._widths, count, body, numbers
        )
        if size == message_write.OUTSIDE:
            raise IndexError(f"the columns of {count} rows leave their cells")
        return Buffers(count, numbers, body[:size])
