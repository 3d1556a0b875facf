"""What retention must spare, by holder: the records from some offset on, and why.

Expired segments may only leave a log when nobody needs their records any more. Each party that may
need them is a `Holder`, has one hold per log and moves or releases it by itself. `Holds.floor` is
the one place that combines them. It is used by local retention (`log.py`), by the expiry of remote
segments (`tablet/remote/rounds.py`) and by the metrics.

Two holders concern only the files on this server: `KV_STATE` and `REMOTE_COPY`. The others
(`RECORD_HOLDERS`) hold records wherever they lie: on this server while the log is only here, in
remote storage once a copy is there.

Belongs to the event loop.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Holder(IntEnum):
    """The owner of a hold; `reason` says what for."""

    reason: str

    def __new__(cls, reason: str) -> Holder:
        """Number the holders in the order of their definition."""
        holder = int.__new__(cls, len(cls.__members__))
        holder._value_ = len(cls.__members__)
        holder.reason = reason
        return holder

    KV_STATE = "the key-value state on disk does not contain these changes"
    LAKE = "these records are not in the lake"
    SNAPSHOT = "the oldest retained key-value snapshot is continued with these changes"
    PRODUCER = "a producer may have to undo these changes"
    UNDO = "an undo is reading these changes"
    REMOTE_COPY = "remote storage has no copy of these records"


RECORD_HOLDERS: Final = (Holder.LAKE, Holder.SNAPSHOT, Holder.PRODUCER, Holder.UNDO)
"""Holders of the records themselves, on this server or in remote storage."""


class Holds:
    """The holds on one log."""

    __slots__ = ("_offsets",)

    def __init__(self) -> None:
        self._offsets: list[int | None] = [None] * len(Holder)

    def __repr__(self) -> str:
        held = [
            f"{holder.name} from {offset} on: {holder.reason}"
            for holder, offset in zip(Holder, self._offsets, strict=True)
            if offset is not None
        ]
        return f"Holds({'; '.join(held)})"

    def set(self, holder: Holder, offset: int | None) -> None:
        """Hold the records from `offset` on, whatever was held before; None releases the hold."""
        self._offsets[holder] = offset

    def offset(self, holder: Holder) -> int | None:
        """The first offset that a holder holds, None if it holds nothing."""
        return self._offsets[holder]

    def floor(self, end: int, *holders: Holder) -> int:
        """The first offset that any of these holders holds, at most `end`."""
        offsets = (self._offsets[holder] for holder in holders)
        return min([end, *(offset for offset in offsets if offset is not None)])
