"""Functions that choose one of the values there are: the first, the last, the greatest, the least.

`bool_and` is the least of flags and `bool_or` the greatest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zufluss.record.aggregate import kernels as k
from zufluss.record.aggregate.base import Builder, always

PICKS: Final[Mapping[str, Builder]] = {
    "last_value": always(k.LAST),
    "last_value_ignore_nulls": always(k.LAST_SET),
    "first_value": always(k.FIRST),
    "first_value_ignore_nulls": always(k.FIRST_SET),
    "max": always(k.MAX),
    "min": always(k.MIN),
    "max_by": always(k.MAX_BY),
    "min_by": always(k.MIN_BY),
    "bool_and": always(k.MIN),
    "bool_or": always(k.MAX),
}
"""The family, by name."""
