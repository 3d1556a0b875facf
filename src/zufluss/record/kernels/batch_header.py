"""Where the fields of a batch header stand, for kernels; `zufluss.record.header` has the table.

The fields from the CRC on stand four bytes later with magic 2, which has a leader epoch before
them. So kernels find the CRC first and the other fields by their distance from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels.cache import kernel

LENGTH_AT, MAGIC_AT = 8, 12
"""Positions of fields before the CRC."""
LENGTH_OVERHEAD = 12
"""Bytes of base offset and length, which the length does not count."""
MAGIC_MAX = 2
HEADER_BYTES_MIN = 48
"""Size of the header with magic 0; every further magic has four bytes more."""

SCHEMA_ID, ATTRIBUTES, LAST_OFFSET_DELTA, WRITER_ID, SEQUENCE = 4, 6, 7, 11, 19
RECORD_COUNT, STATISTICS_LENGTH = 23, 27
"""Distances from the CRC; magic 0 has no statistics."""

CHANGE_TYPE_MAX = 4
"""The largest change type, -D."""


@kernel(inline=True)
def crc_at(start: Any, magic: Any) -> Any:
    """Position of the CRC of the batch at `start`."""
    return start + np.int64(25 if magic == 2 else 21)
