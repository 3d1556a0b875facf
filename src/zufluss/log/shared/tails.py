"""What a session has of each bucket, and whether anything of a bucket is missing. Pure.

The objects of a session are fed in order. An entry is taken if it begins at or before the end that
the bucket has reached, and leads further. A lost object concerns every bucket that might be in it,
until a later entry proves the opposite by following without a gap: a session writes the offsets of
a bucket without gaps, and a carry has everything up to its place (`gather.py`). Where no later
entry proves it, the bucket is refused, since its last rows may have been in the lost object. A
release names the end that the bucket had then, which is proof as well, or shows that some is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zufluss.log.shared.api import LostObject, LostOffsetsError
from zufluss.model.table import TableBucket
from zufluss.remote.wal import EntryKind, WalEntry, WalEntryDamagedError, WalObject


class TailPiece(NamedTuple):
    """Batches of a bucket that follow what was taken before."""

    bucket: TableBucket
    leader_epoch: int
    first_offset: int
    """May lie below the end that the bucket had reached."""
    end_offset: int
    batches: memoryview


class _Tail:
    __slots__ = ("end_offset", "problem")

    def __init__(self, end_offset: int) -> None:
        self.end_offset = end_offset
        self.problem = ""
        """Why offsets from the end on may be missing; "" if they are not."""


class SessionTails:
    """The buckets of a session, from the offsets on that are elsewhere."""

    def __init__(self, starts: Mapping[TableBucket, int]) -> None:
        self._tails = {bucket: _Tail(start) for bucket, start in starts.items()}

    def add(self, read: WalObject | LostObject) -> Iterator[TailPiece]:
        """Take the next number of the session; yield what it adds to the buckets."""
        if isinstance(read, LostObject):
            for each in self._tails.values():
                each.problem = each.problem or f"{read.name.path}: {read.reason}"
            return
        for entry in read.entries:
            tail = self._tails.get(entry.bucket)
            if tail is None:
                continue
            if entry.kind is EntryKind.RELEASE:
                _check_released(read, entry, tail)
            else:
                yield from self._take(read, entry, tail)

    def _take(self, read: WalObject, entry: WalEntry, tail: _Tail) -> Iterator[TailPiece]:
        if entry.end_offset <= tail.end_offset:
            tail.problem = ""  # the session was no further here, so nothing lost lies beyond
            return
        if entry.first_offset > tail.end_offset:
            gap = f"{read.header.name.path} goes on at {entry.first_offset}"
            tail.problem = tail.problem or gap
            return
        try:
            batches = read.bytes_of(entry)
        except WalEntryDamagedError as error:
            tail.problem = error.message
            return
        tail.problem = ""
        tail.end_offset = entry.end_offset
        yield TailPiece(*entry[:2], entry.first_offset, entry.end_offset, batches)

    @property
    def end_offsets(self) -> dict[TableBucket, int]:
        """The end of each bucket, as far as its offsets are dense."""
        return {bucket: tail.end_offset for bucket, tail in self._tails.items()}

    @property
    def lost(self) -> dict[TableBucket, LostOffsetsError]:
        """Buckets that must not be served, once the last number was added."""
        return {
            bucket: LostOffsetsError(bucket, tail.end_offset, tail.problem)
            for bucket, tail in self._tails.items()
            if tail.problem
        }


def _check_released(read: WalObject, entry: WalEntry, tail: _Tail) -> None:
    """The bucket ended here at this point of the session: nothing else of it was lost before."""
    if entry.end_offset <= tail.end_offset:
        tail.problem = ""
    else:
        name = read.header.name.path
        tail.problem = tail.problem or f"{name} released it at {entry.end_offset}"
