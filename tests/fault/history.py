"""A record of what clients and readers were told, and a check of the logs against it.

The rules are those of Jepsen's queue checker, for a log with offsets. Every row carries a key that
exists once: the number of its lane (a writer, for one bucket) and its number in the lane. Writers
note what they send and what was acknowledged, readers note every batch they were given, and at the
end `violations` compares both with the whole content of every bucket:

* an acknowledged row exists once, at the acknowledged offset;
* a row that was sent and not acknowledged exists at most once; no other row exists;
* rows of a lane are in the order they were sent, and where the lane retries, without a hole;
* offsets are dense, commit times do not go back, checksums fit;
* a batch that was ever read still exists with the same bytes, unless it has expired;
* the high watermark and the start of the log never decrease; no writer id is given twice.

`KeyHistory` does the same for lookups, one key at a time, as a register: a lookup gives a row that
was sent, not older than what was acknowledged, or looked up, before it began.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from zufluss.model.table import TableBucket

LANE_SHIFT = 32
"""A key is the lane's number above these bits and the row's below."""

EXAMPLES_MAX = 5
"""Keys named in a message."""


class Batch(NamedTuple):
    """A batch that a reader was given."""

    next_offset: int
    digest: bytes


class Ack(NamedTuple):
    """Rows `first_key` to `first_key + count` were acknowledged."""

    first_key: int
    count: int
    bucket: TableBucket | None = None
    """None for a client that does not report it."""
    base_offset: int | None = None


@dataclass(slots=True)
class Lane:
    """The rows one writer sends, in order."""

    number: int
    gapless: bool
    """Whether the writer uses one bucket and repeats unacknowledged rows."""
    sent: int = 0

    def take(self, count: int) -> int:
        """The first key of `count` new rows."""
        key = (self.number << LANE_SHIFT) + self.sent
        self.sent += count
        return key


@dataclass(slots=True)
class Content:
    """The whole content of a bucket."""

    start: int
    """First offset."""
    keys: np.ndarray
    """The key at each offset from `start` on."""
    batches: dict[int, Batch]
    """By base offset."""
    problems: list[str] = field(default_factory=list)
    """Defects of the batches themselves."""

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


def digest(data: Any) -> bytes:
    """Tells two batches apart."""
    return blake2b(data, digest_size=8).digest()


class History:
    """What happened, noted by many threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.lanes: list[Lane] = []
        self.acks: list[Ack] = []
        self.acked_rows = 0
        self.refusals = 0
        """Batches that a server refused for now."""
        self.seen: dict[TableBucket, dict[int, Batch]] = {}
        self.high: dict[TableBucket, int] = {}
        self.writer_ids: list[int] = []
        self.problems: list[str] = []
        """Violations that were found at once, and failures of threads."""

    def lane(self, *, gapless: bool) -> Lane:
        """A new lane."""
        with self._changed:
            lane = Lane(len(self.lanes) + 1, gapless)
            self.lanes.append(lane)
            return lane

    def new_writer_id(self, writer_id: int) -> None:
        """A server gave this id to a writer."""
        with self._changed:
            self.writer_ids.append(writer_id)

    def acknowledged(self, ack: Ack) -> None:
        """A server acknowledged these rows."""
        with self._changed:
            self.acks.append(ack)
            self.acked_rows += ack.count
            self._changed.notify_all()

    def refused(self) -> None:
        """A server refused a batch that may be sent again."""
        with self._changed:
            self.refusals += 1
            self._changed.notify_all()

    def read(self, bucket: TableBucket, base_offset: int, batch: Batch) -> None:
        """A reader was given this batch; an earlier reader must have been given the same."""
        before = self.seen.setdefault(bucket, {}).setdefault(base_offset, batch)
        if before != batch:
            self.problem(f"{bucket} offset {base_offset}: read {before}, later {batch}")

    def saw_high_watermark(self, bucket: TableBucket, offset: int) -> None:
        """A reader was told this high watermark."""
        before = self.high.get(bucket, 0)
        if offset < before:
            self.problem(f"{bucket}: the high watermark went from {before} back to {offset}")
        self.high[bucket] = offset

    def problem(self, text: str) -> None:
        """Note a violation."""
        with self._changed:
            self.problems.append(text)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the history fulfils the condition, or there is a problem."""
        with self._changed:
            return self._changed.wait_for(lambda: condition() or bool(self.problems), seconds)

    def wait_for_acks(self, rows: int, seconds: float) -> bool:
        """Wait until so many more rows are acknowledged."""
        target = self.acked_rows + rows
        return self.wait(lambda: self.acked_rows >= target, seconds)


class KeyHistory:
    """The rows of keys as their writers sent them, and what lookups said. Many threads note it.

    Each key has one writer, which sends its rows in order. So each row of a key has a number, and a
    lookup that began when number n was acknowledged, or had been looked up, must give the row of n
    or a later one. A key that was not written yet has the row None, number 0.
    """

    def __init__(self, history: History) -> None:
        """`history` is told of violations."""
        self._history = history
        self._lock = threading.Lock()
        self._rows: dict[Any, list[Any]] = {}
        self._least: dict[Any, int] = {}
        """The number below which no lookup may give a row that begins now."""
        self.answers = 0
        """Lookups that were answered with rows."""

    def sent(self, key: Any, row: Any) -> int:
        """The next row of a key, None for none, is about to be sent; its number."""
        with self._lock:
            rows = self._rows.setdefault(key, [None])
            rows.append(row)
            return len(rows) - 1

    def acknowledged(self, key: Any, number: int) -> None:
        """A row was acknowledged."""
        with self._lock:
            self._least[key] = max(self._least.get(key, 0), number)

    def keys(self) -> list[Any]:
        """All keys that were ever sent."""
        with self._lock:
            return list(self._rows)

    def begin(self, keys: Iterable[Any]) -> list[int]:
        """A lookup is about to be sent; what `end` needs to judge it."""
        with self._lock:
            return [self._least.get(key, 0) for key in keys]

    def end(self, keys: Sequence[Any], least: Sequence[int], rows: Sequence[Any], who: str) -> None:
        """A lookup was answered."""
        wrong = []
        with self._lock:
            self.answers += 1
            for key, at_least, row in zip(keys, least, rows, strict=True):
                known = self._rows[key]
                number = next((n for n in range(at_least, len(known)) if known[n] == row), None)
                if number is None:
                    older = row in known
                    wrong.append(f"{key}: {row} is {'stale' if older else 'no row that was sent'}")
                else:
                    self._least[key] = max(self._least.get(key, 0), number)
        for text in wrong:
            self._history.problem(f"{who} looked up {text}")


def violations(history: History, contents: Mapping[TableBucket, Content]) -> list[str]:
    """Every way in which the content of the buckets breaks the rules."""
    found = list(history.problems)
    for bucket, content in contents.items():
        found += [f"{bucket}: {problem}" for problem in content.problems]
        found += [f"{bucket}: {problem}" for problem in _order_violations(history, content)]
        found += _vanished(bucket, history.seen.get(bucket, {}), content)
        if content.end < history.high.get(bucket, 0):
            found.append(f"{bucket} ends at {content.end}, readers saw {history.high[bucket]}")
    found += _key_violations(history, contents)
    found += _ack_violations(history, contents)
    twice = [i for i, n in Counter(history.writer_ids).items() if n > 1]
    if twice:
        found.append(f"writer ids given twice: {twice}")
    return found


def _key_violations(history: History, contents: Mapping[TableBucket, Content]) -> Iterable[str]:
    """Assert that every key exists at most once, and was sent."""
    keys = np.concatenate([c.keys for c in contents.values()] or [np.empty(0, np.int64)])
    values, counts = np.unique(keys, return_counts=True)
    if (counts > 1).any():
        yield f"rows stored more than once: {_names(values[counts > 1])}"
    sent = np.zeros(len(history.lanes) + 1, np.int64)
    for lane in history.lanes:
        sent[lane.number] = lane.sent
    lanes = values >> LANE_SHIFT
    known = (lanes > 0) & (lanes < len(sent))
    known[known] = (values[known] & ((1 << LANE_SHIFT) - 1)) < sent[lanes[known]]
    if not known.all():
        yield f"rows nobody sent: {_names(values[~known])}"


def _order_violations(history: History, content: Content) -> Iterable[str]:
    """The rows of each lane are in order, and where it repeats, without a hole."""
    lanes = content.keys >> LANE_SHIFT
    for lane in history.lanes:
        keys = content.keys[lanes == lane.number]
        steps = np.diff(keys)
        if (steps <= 0).any():
            yield f"rows out of order: {_names(keys[1:][steps <= 0])}"
        elif lane.gapless and (steps != 1).any():
            yield f"rows missing before {_names(keys[1:][steps != 1])}"
        elif lane.gapless and content.start == 0 and len(keys) and keys[0] & 0xFFFFFFFF:
            yield f"rows missing before {_names(keys[:1])}"


def _ack_violations(history: History, contents: Mapping[TableBucket, Content]) -> Iterable[str]:
    """Check that every acknowledged, unexpired row is at its offset."""
    somewhere = [ack for ack in history.acks if ack.base_offset is None]
    for ack in history.acks:
        if ack.bucket is None or ack.base_offset is None:
            continue
        content = contents[ack.bucket]
        at = ack.base_offset - content.start
        if at < 0:
            continue
        there = content.keys[at : at + ack.count]
        expected = np.arange(ack.first_key, ack.first_key + ack.count)
        if not np.array_equal(there, expected):
            yield (
                f"{ack.bucket}: acknowledged at {ack.base_offset}: {_names(expected)}, there is "
                f"{_names(there)} and the log ends at {content.end}"
            )
    if somewhere and not any(content.start for content in contents.values()):
        expected = np.concatenate(
            [np.arange(a.first_key, a.first_key + a.count) for a in somewhere]
        )
        keys = np.concatenate([c.keys for c in contents.values()])
        lost = expected[~np.isin(expected, keys)]
        if len(lost):
            yield f"acknowledged and not there: {_names(lost)}"


def _vanished(bucket: TableBucket, seen: Mapping[int, Batch], content: Content) -> Iterable[str]:
    changed = [
        offset
        for offset, batch in seen.items()
        if offset >= content.start and content.batches.get(offset) != batch
    ]
    if changed:
        yield f"{bucket}: batches that were read changed or vanished: {sorted(changed)[:9]}"


def _names(keys: np.ndarray) -> str:
    some = [f"{key >> LANE_SHIFT}/{key & 0xFFFFFFFF}" for key in keys[:EXAMPLES_MAX].tolist()]
    return f"{len(keys)} rows, such as lane/row {', '.join(some)}"
