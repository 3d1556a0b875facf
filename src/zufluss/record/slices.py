"""Many byte strings in one buffer: what the batch interfaces of rows, keys and values pass on.

A batch of a thousand keys as a thousand `bytes` objects costs more than everything that is done
with them. `Slices` says where each one lies instead, so that a kernel goes through all of them and
nothing is copied until it has to be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Positions: TypeAlias = npt.NDArray[np.int64]

ABSENT = -1
"""The start of a byte string that is not there, such as the row of a delete."""


class Slices(NamedTuple):
    """Byte strings; number i is `data[starts[i]:ends[i]]`."""

    data: Bytes
    """The buffer they lie in, in any order, overlapping or not."""
    starts: Positions
    """Where each begins; `ABSENT` if it is not there."""
    ends: Positions
    """Where each ends."""

    @classmethod
    def of(cls, values: Iterable[bytes | None]) -> Slices:
        """The slices of byte strings, for tests and small numbers."""
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
        """Strings that follow each other; number i begins at `offsets[i]`."""
        return cls(data, offsets[:-1], offsets[1:])

    @property
    def count(self) -> int:  # type: ignore[override]  # nobody counts in a tuple of arrays
        """How many there are, absent ones included."""
        return len(self.starts)

    @property
    def lengths(self) -> Positions:
        """How long each is, absent ones 0."""
        return np.where(self.starts == ABSENT, 0, self.ends - self.starts)

    def take(self, indexes: npt.NDArray[np.intp] | npt.NDArray[np.int64]) -> Slices:
        """Some of them, in another order."""
        return Slices(self.data, self.starts[indexes], self.ends[indexes])

    def item(self, i: int) -> bytes | None:
        """Number i as bytes, None if it is absent."""
        start = int(self.starts[i])
        return None if start == ABSENT else self.data[start : int(self.ends[i])].tobytes()

    def tolist(self) -> list[bytes | None]:
        """All of them as bytes."""
        return [self.item(i) for i in range(self.count)]
