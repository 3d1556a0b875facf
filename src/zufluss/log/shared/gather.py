"""Entries that wait for an object: which go together, and that they follow each other.

Batches of a bucket that are appended one after another become one entry. When an object has
reached its size the next one is begun, so a burst becomes several objects instead of a large one.

A session is read back bucket by bucket, and a reader finds a lost object by the gap that it leaves
(`tails.py`). That only works if the writer leaves no gaps: `add` refuses offsets that do not
follow. A carry has everything of its bucket up to there, so it must not lie in one object with
entries of the bucket that were appended before it. Pure; belongs to `writer.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from crc32c import crc32c

from zufluss.model.table import TableBucket
from zufluss.remote.wal import OBJECT_BYTES_MAX, EntryKind, NewEntry

ENTRY_BYTES_MAX: Final = OBJECT_BYTES_MAX // 4
"""Size of the largest append: an object is cut behind the entry that reaches its size."""


@dataclass(slots=True)
class _OpenEntry:
    """A range of a bucket that grows."""

    first_offset: int
    end_offset: int
    pieces: list[bytes] = field(default_factory=list)
    length: int = 0
    crc: int = 0


_EntryKey = tuple[TableBucket, int, EntryKind]


class _OpenObject:
    """An object that takes entries."""

    __slots__ = ("buckets", "entries", "length")

    def __init__(self) -> None:
        self.entries: dict[_EntryKey, _OpenEntry] = {}
        self.buckets: set[TableBucket] = set()
        self.length = 0


class Gathering:
    """The entries of a session that have no number yet."""

    def __init__(self, object_bytes: int) -> None:
        self._object_bytes = object_bytes
        self._objects: deque[_OpenObject] = deque()
        self._ends: dict[TableBucket, tuple[int, int, bool]] = {}
        """Leader epoch, end offset, and whether it was released, of each bucket of the session."""
        self.length = 0
        """Bytes of all entries."""

    def add(
        self,
        bucket: TableBucket,
        leader_epoch: int,
        first_offset: int,
        end_offset: int,
        batches: bytes | memoryview,
        kind: EntryKind,
    ) -> None:
        """Take an entry, a copy unless it is `bytes`; after an exception nothing was taken.

        Raises ValueError if it does not follow the one before.
        """
        self._check(bucket, leader_epoch, first_offset, end_offset, len(batches), kind)
        copied = bytes(batches)
        pieces = [copied] if copied else []
        current = self._current(bucket if kind is EntryKind.CARRY else None)
        key = bucket, leader_epoch, kind
        known, entry = self._ends.get(bucket), current.entries.get(key)
        crc = crc32c(copied, 0 if entry is None else entry.crc)
        length = len(copied) + (0 if entry is None else entry.length)
        sizes = current.length + len(copied), self.length + len(copied)
        self._ends[bucket] = leader_epoch, end_offset, kind is EntryKind.RELEASE
        try:
            if entry is None:
                entry = _OpenEntry(first_offset, end_offset, pieces, length, crc)
                current.buckets.add(bucket)
                current.entries[key] = entry
                if not self._objects or self._objects[-1] is not current:
                    self._objects.append(current)
            else:
                entry.pieces.extend(pieces)
                entry.end_offset, entry.length, entry.crc = end_offset, length, crc
        except BaseException:  # half of it would be damaged, and without it there would be a gap
            if known is None:
                del self._ends[bucket]
            else:
                self._ends[bucket] = known
            raise
        current.length, self.length = sizes

    def _check(
        self,
        bucket: TableBucket,
        leader_epoch: int,
        first: int,
        end: int,
        length: int,
        kind: EntryKind,
    ) -> None:
        problem = ""
        filled = kind is not EntryKind.RELEASE
        if length > ENTRY_BYTES_MAX:
            problem = f"{length} bytes, at most {ENTRY_BYTES_MAX} are allowed"
        elif not 0 <= first <= end or not (first < end) == (length > 0) == filled:
            problem = f"{length} bytes for offsets {first} to {end}"
        elif (known := self._ends.get(bucket)) is not None:
            epoch, last, released = known
            if leader_epoch < epoch or (released and leader_epoch == epoch):
                problem = f"leader epoch {leader_epoch} after {epoch}"
            elif leader_epoch == epoch and (end if kind is EntryKind.CARRY else first) != last:
                problem = f"offsets {first} to {end} after {last}"
        if problem:
            raise ValueError(f"an entry of {bucket} of kind {kind.name} does not follow: {problem}")

    def _current(self, without: TableBucket | None) -> _OpenObject:
        """Return the object that takes entries, perhaps a new one; it has none of `without`."""
        objects = self._objects
        if (
            not objects
            or objects[-1].length >= self._object_bytes
            or (without is not None and without in objects[-1].buckets)
        ):
            return _OpenObject()
        return objects[-1]

    @property
    def waits(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._objects)

    @property
    def complete(self) -> bool:
        """Whether the oldest object takes no more entries, or has reached its size."""
        objects = self._objects
        return len(objects) > 1 or (bool(objects) and objects[0].length >= self._object_bytes)

    @property
    def objects(self) -> int:
        """How many objects the entries will be."""
        return len(self._objects)

    def end_offset(self, bucket: TableBucket) -> int | None:
        """The end of the entries of a bucket that were added; None if there were none."""
        known = self._ends.get(bucket)
        return None if known is None else known[1]

    def oldest(self) -> list[NewEntry]:
        """Return the entries of the oldest object."""
        return [
            NewEntry(
                bucket, leader_epoch, kind, e.first_offset, e.end_offset, e.pieces, e.length, e.crc
            )
            for (bucket, leader_epoch, kind), e in self._objects[0].entries.items()
        ]

    def drop_oldest(self) -> None:
        """Forget the oldest object: it has a number."""
        self.length -= self._objects.popleft().length

    def clear(self) -> None:
        """Forget everything."""
        self._objects.clear()
        self.length = 0
