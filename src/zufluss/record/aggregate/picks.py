"""Functions that choose one value of the key: the first, the last, the greatest, the least.

`bool_and` is the least of flags and `bool_or` the greatest. `first_value` and
`first_value_ignore_nulls` are one function under two names, as in Fluss: a NULL is no first value,
because a stored NULL looks the same whether a put wrote it or left the column out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zufluss.record.aggregate import opcodes as op
from zufluss.record.aggregate.functions import Builder, always

PICKS: Final[Mapping[str, Builder]] = {
    "last_value": always(op.LAST),
    "last_value_ignore_nulls": always(op.LAST_SET),
    "first_value": always(op.FIRST_SET),
    "first_value_ignore_nulls": always(op.FIRST_SET),
    "max": always(op.MAX),
    "min": always(op.MIN),
    "max_by": always(op.MAX_BY),
    "min_by": always(op.MIN_BY),
    "bool_and": always(op.MIN),
    "bool_or": always(op.MAX),
}
"""Builders of these functions, by name."""
