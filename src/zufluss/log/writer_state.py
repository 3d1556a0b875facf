"""What a log remembers of its idempotent writers.

A writer numbers its batches per bucket: 0, 1, 2 … 2^31−1, 0 … For each writer the log keeps the
last five batches. A batch whose number is among them is a retry whose answer was lost: it gets the
original offsets and nothing is written. A batch with the next number is appended. Anything else is
a gap, and accepting it would hide a loss. The batches of one bucket entry stand or fall together.

A writer that wrote nothing for the expiry time may come back with any number. It is remembered as
expired for one more such period, so that coming back works, and forgotten after that; a writer
nobody remembers must start at 0. No more than `writers_max` writers are remembered: when there are
more, a tenth of them goes, those that wrote least recently.

The writers of producers (`model/producer.py`) are stricter, since a task that is run again sends
what it had sent before, from its first batch on. A task is remembered with its newest epoch only:
a batch of an older one is fenced, a newer one begins at 0. Every number up to the last is a retry,
also of a batch that is not among the five any more; then the answer has an offset before it, not
its own. Their numbers do not begin again at 0, and expiry allows no gap. Epochs are compared modulo
2^20, as serial numbers are.

Snapshot file `<offset, 20 digits>.writer_snapshot`: the state right before that offset, as JSON
`{version: 1, writer_id_entries: [{writer_id, last_batch_sequence, last_batch_base_offset,
offset_delta, last_batch_timestamp}]}`, where "last_batch_base_offset" is really the *last* offset.
Two keys of our own that other readers ignore: `zufluss_recent` in an entry holds the up to four
batches before the last as `[sequence, last offset, delta, timestamp]`, oldest first, so that a
retry is still known after a restart; `zufluss_crc32c` covers the text without itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from heapq import nsmallest
from typing import Any, NamedTuple

from crc32c import crc32c

from zufluss.errors import OutOfOrderSequenceError, ProducerFencedError
from zufluss.model.producer import EPOCH_MAX, ProducerWriter, is_producer, task_of
from zufluss.record.batch.check import CheckedBatch

RETAINED_BATCHES = 5
"""Batches remembered per writer; a client has at most this many in flight per bucket."""

SEQUENCE_MAX = (1 << 31) - 1
"""The number after which a writer starts again at 0."""

UNLIMITED = 1 << 62
"""As many writers as there are."""

SNAPSHOT_VERSION = 1
_CRC_KEY = "zufluss_crc32c"
_RECENT_KEY = "zufluss_recent"


class LoggedBatch(NamedTuple):
    """A batch that was appended."""

    sequence: int
    """Its number."""
    base_offset: int
    """Offset of its first record."""
    end_offset: int
    """Offset after its last record."""
    timestamp: int
    """Its commit timestamp."""


class WriterState:
    """The last batches of every writer of one log."""

    __slots__ = ("_tasks", "_writers", "expiry_ms", "writers_max")

    def __init__(self, expiry_ms: int, writers_max: int = UNLIMITED) -> None:
        self.expiry_ms = expiry_ms
        self.writers_max = writers_max
        """Writers that are remembered, without those of producers."""
        self._writers: dict[int, list[LoggedBatch]] = {}
        self._tasks: dict[int, int] = {}
        """Of each task of a producer: the writer id of its newest epoch, which is in `_writers`."""

    def __len__(self) -> int:
        return len(self._writers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WriterState) and self._writers == other._writers

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> WriterState:
        """A copy that changes independently."""
        other = WriterState(self.expiry_ms, self.writers_max)
        other._writers = {writer: list(retained) for writer, retained in self._writers.items()}
        other._tasks = dict(self._tasks)
        return other

    @property
    def last_timestamp(self) -> int:
        """The time of the newest batch of all writers, 0 if there are none."""
        return max((retained[-1].timestamp for retained in self._writers.values()), default=0)

    def retained(self, writer_id: int) -> tuple[LoggedBatch, ...]:
        """The remembered batches of a writer, oldest first."""
        return tuple(self._writers.get(writer_id, ()))

    def producer_writers(self) -> list[ProducerWriter]:
        """The tasks of producers that are remembered, each with its newest epoch."""
        return [who for w in self._tasks.values() if (who := ProducerWriter.of(w)) is not None]

    def next_sequence(self, writer_id: int) -> int:
        """The number after the last one of a writer; 0 if it is not remembered."""
        retained = self._writers.get(writer_id)
        return 0 if retained is None else _next(retained[-1].sequence)

    def is_next(self, writer_id: int, sequence: int) -> bool:
        """Whether this is the number after the last one of a writer that is remembered."""
        retained = self._writers.get(writer_id)
        return retained is not None and sequence == retained[-1][0] + 1

    def check(self, batches: Sequence[CheckedBatch], now_ms: int) -> tuple[int, int] | None:
        """Decide about a bucket entry: None to append it, or the offsets of its first copy.

        Raises `OutOfOrderSequenceError` when a number is neither known nor next.
        """
        if len(batches) == 1:
            batch = batches[0]
            writer_id = batch.writer_id
            if writer_id < 0 or self.is_next(writer_id, batch.batch_sequence):
                return None
        return self._decide(batches, now_ms)

    def _decide(self, batches: Sequence[CheckedBatch], now_ms: int) -> tuple[int, int] | None:
        copies: list[LoggedBatch] = []
        last: dict[int, int] = {}
        for batch in batches:
            writer_id, sequence = batch.writer_id, batch.batch_sequence
            if writer_id < 0:
                continue
            if writer_id in last:
                self._require(sequence == _next(last[writer_id]), writer_id, sequence)
            else:
                copy = self._copy_of(writer_id, sequence)
                if copy is not None:
                    copies.append(copy)
                    continue
                allowed = self._may_follow(writer_id, sequence, now_ms)
                self._require(allowed, writer_id, sequence)
            last[writer_id] = sequence
        if not copies:
            return None
        if len(copies) != len(batches):
            raise OutOfOrderSequenceError(
                f"{len(copies)} of the {len(batches)} batches of the entry were appended before; "
                "a retry must hold exactly the batches of the first attempt"
            )
        return copies[0].base_offset, copies[-1].end_offset

    def _copy_of(self, writer_id: int, sequence: int) -> LoggedBatch | None:
        retained = self._writers.get(writer_id, ())
        for batch in retained:
            if batch.sequence == sequence:
                return batch
        if is_producer(writer_id):
            self._check_epoch(writer_id)
            if retained and sequence < retained[0].sequence:
                oldest = retained[0]
                return LoggedBatch(
                    sequence, oldest.base_offset, oldest.base_offset, oldest.timestamp
                )
        return None

    def _check_epoch(self, writer_id: int) -> None:
        newest = self._tasks.get(task_of(writer_id), writer_id)
        if newest != writer_id and not _is_newer(writer_id, newest):
            mine, other = ProducerWriter.of(writer_id), ProducerWriter.of(newest)
            assert mine is not None
            assert other is not None
            raise ProducerFencedError(
                f"task {mine.task} of producer {mine.number} writes as epoch {mine.epoch}, and "
                f"epoch {other.epoch} has written here; this writer must end"
            )

    def _may_follow(self, writer_id: int, sequence: int, now_ms: int) -> bool:
        retained = self._writers.get(writer_id)
        if retained is None:
            return sequence == 0
        last = retained[-1]
        if is_producer(writer_id):
            return sequence == last.sequence + 1
        return sequence == _next(last.sequence) or now_ms - last.timestamp > self.expiry_ms

    def _require(self, allowed: bool, writer_id: int, sequence: int) -> None:
        if allowed:
            return
        retained = self._writers.get(writer_id)
        if retained is None:
            known = "the log does not know this writer, which must start at 0"
        else:
            known = (
                f"its last batch here is {retained[-1].sequence}, so {_next(retained[-1].sequence)}"
                " is next"
            )
        raise OutOfOrderSequenceError(
            f"batch sequence {sequence} of writer {writer_id}: {known}; if the batches between "
            "were refused, send them again first; if they are lost, go on with a new writer id"
        )

    def record(
        self, writer_id: int, sequence: int, base_offset: int, end_offset: int, timestamp: int
    ) -> None:
        """Remember an appended batch."""
        batch = LoggedBatch(sequence, base_offset, end_offset, timestamp)
        retained = self._writers.get(writer_id)
        if retained is None or sequence != _next(retained[-1][0]):
            self._writers[writer_id] = [batch]
            if is_producer(writer_id):
                self._begin_epoch(writer_id)
            elif len(self._writers) - len(self._tasks) > self.writers_max:
                self.forget_oldest()
            return
        retained.append(batch)
        if len(retained) > RETAINED_BATCHES:
            del retained[0]

    def _begin_epoch(self, writer_id: int) -> None:
        """Forget the earlier epoch of a producer's task, if there was one."""
        task = task_of(writer_id)
        earlier = self._tasks.get(task, writer_id)
        if earlier != writer_id:
            del self._writers[earlier]
        self._tasks[task] = writer_id

    def forget_oldest(self) -> None:
        """Forget the writers that wrote least recently, if there are too many.

        Producers' tasks stay: a task that is run again sends everything again, from 0 on.
        """
        if len(self._writers) - len(self._tasks) <= self.writers_max:
            return
        last = [(r[-1].end_offset, w) for w, r in self._writers.items() if not is_producer(w)]
        surplus = len(last) - self.writers_max + self.writers_max // 10
        for _, writer_id in nsmallest(surplus, last):
            del self._writers[writer_id]

    def forget_expired(self, now_ms: int) -> int:
        """Drop writers that have been expired for a whole further period; return how many."""
        before = now_ms - 2 * self.expiry_ms
        gone = [w for w, retained in self._writers.items() if retained[-1].timestamp < before]
        for writer_id in gone:
            del self._writers[writer_id]
            if is_producer(writer_id):
                del self._tasks[task_of(writer_id)]
        return len(gone)

    def to_json(self) -> bytes:
        """The snapshot text."""
        entries = [_entry_json(w, retained) for w, retained in sorted(self._writers.items())]
        document = {"version": SNAPSHOT_VERSION, "writer_id_entries": entries}
        text = _dump(document)
        return text[:-1] + f',"{_CRC_KEY}":{crc32c(text)}}}'.encode()

    @classmethod
    def from_json(cls, data: bytes, expiry_ms: int) -> WriterState:
        """Read a snapshot; `ValueError` if it is damaged."""
        document = json.loads(data)
        if not isinstance(document, dict) or document.get("version") != SNAPSHOT_VERSION:
            raise ValueError("not a writer snapshot of version 1")
        crc = document.pop(_CRC_KEY, None)
        if crc is not None and crc != crc32c(_dump(document)):
            raise ValueError("the checksum of the writer snapshot does not fit")
        state = cls(expiry_ms)
        try:
            for entry in document["writer_id_entries"]:
                state._restore(entry["writer_id"], _entry_batches(entry))
        except (KeyError, TypeError) as e:
            raise ValueError(f"writer snapshot: {e!r}") from e
        return state

    def _restore(self, writer_id: int, batches: list[LoggedBatch]) -> None:
        """Add a writer from a snapshot; if a task occurs twice, its newer epoch counts."""
        if is_producer(writer_id):
            other = self._tasks.get(task_of(writer_id), writer_id)
            if other != writer_id and not _is_newer(writer_id, other):
                return
            self._begin_epoch(writer_id)
        self._writers[writer_id] = batches


def _is_newer(writer_id: int, than: int) -> bool:
    """Whether the epoch of a producer's task comes after another one, as serial numbers do."""
    one, other = ProducerWriter.of(writer_id), ProducerWriter.of(than)
    assert one is not None
    assert other is not None
    return 0 < (one.epoch - other.epoch & EPOCH_MAX) <= EPOCH_MAX >> 1


def _next(sequence: int) -> int:
    return 0 if sequence == SEQUENCE_MAX else sequence + 1


def _dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _entry_json(writer_id: int, retained: list[LoggedBatch]) -> dict[str, Any]:
    rows = [
        [b.sequence, b.end_offset - 1, b.end_offset - 1 - b.base_offset, b.timestamp]
        for b in retained
    ]
    sequence, last_offset, delta, timestamp = rows[-1]
    entry: dict[str, Any] = {
        "writer_id": writer_id,
        "last_batch_sequence": sequence,
        "last_batch_base_offset": last_offset,
        "offset_delta": delta,
        "last_batch_timestamp": timestamp,
    }
    if len(rows) > 1:
        entry[_RECENT_KEY] = rows[:-1]
    return entry


def _entry_batches(entry: dict[str, Any]) -> list[LoggedBatch]:
    last = [
        entry["last_batch_sequence"],
        entry["last_batch_base_offset"],
        entry["offset_delta"],
        entry["last_batch_timestamp"],
    ]
    return [
        LoggedBatch(sequence, last_offset - delta, last_offset + 1, timestamp)
        for sequence, last_offset, delta, timestamp in [*entry.get(_RECENT_KEY, ()), last]
    ]
