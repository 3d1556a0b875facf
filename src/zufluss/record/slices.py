"""Many byte strings in one buffer: the argument of all batch interfaces of rows, keys and values.

A thousand keys as a thousand `bytes` objects cost more than the work on them. `Slices` holds their
places in one buffer instead: a kernel walks over all of them, and nothing is copied needlessly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Positions: TypeAlias = npt.NDArray[np.int64]

ABSENT = -1
"""Start of a byte string that does not exist, such as the row of a delete."""


class Slices(NamedTuple):
    """Byte strings; number i is `data[starts[i]:ends[i]]`."""

    data: Bytes
    """The buffer of all strings, which stand there in any order and may overlap."""
    starts: Positions
    """Position of each string; `ABSENT` if it does not exist."""
    ends: Positions
    """Position after each string."""

    @classmethod
    def of(cls, values: Iterable[bytes | None]) -> Slices:
        """Copy byte strings into one buffer; for tests and small numbers."""
        known = list(values)
        lengths = np.fromiter((len(v) if v is not None else 0 for v in known), np.int64, len(known))
        ends = np.cumsum(lengths)
        starts = ends - lengths
        absent = np.fromiter((v is None for v in known), np.bool_, len(known))
        starts[absent] = ABSENT
        data = np.frombuffer(b"".join(v for v in known if v is not None), np.uint8)
        return cls(data, starts, ends)

    @classmethod
    def contiguous(cls, data: Bytes, offsets: Positions) -> Slices:
        """Return strings that follow each other; number i is `data[offsets[i]:offsets[i + 1]]`."""
        return cls(data, offsets[:-1], offsets[1:])

    @property
    def count(self) -> int:  # type: ignore[override]  # hides tuple.count, which is not used
        """Number of strings, absent ones included."""
        return len(self.starts)

    @property
    def lengths(self) -> Positions:
        """Length of each string, 0 for absent ones."""
        return np.where(self.starts == ABSENT, 0, self.ends - self.starts)

    def take(self, indexes: npt.NDArray[np.intp] | npt.NDArray[np.int64]) -> Slices:
        """Return the strings with these indexes, in this order."""
        return Slices(self.data, self.starts[indexes], self.ends[indexes])

    def item(self, i: int) -> bytes | None:
        """Return string i as bytes, None if it is absent."""
        start = int(self.starts[i])
        return None if start == ABSENT else self.data[start : int(self.ends[i])].tobytes()

    def tolist(self) -> list[bytes | None]:
        """Return all strings as bytes, None for absent ones."""
        return [self.item(i) for i in range(self.count)]
