"""The checker finds each kind of violation: a test that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.fault.history import Ack, Batch, Content, History, KeyHistory, violations
from zufluss.model.table import TableBucket

BUCKET = TableBucket(7, None, 0)
OTHER = TableBucket(7, None, 1)


def good() -> tuple[History, dict[TableBucket, Content]]:
    """Two lanes in one bucket, rows 0 to 3 of each, all acknowledged; batches of two rows."""
    history = History()
    lanes = [history.lane(gapless=True), history.lane(gapless=True)]
    keys = []
    for _ in range(2):
        for lane in lanes:
            first = lane.take(2)
            history.acknowledged(Ack(first, 2, BUCKET, len(keys)))
            keys += [first, first + 1]
    batches = {at: Batch(at + 2, bytes([at])) for at in range(0, 8, 2)}
    for at, batch in batches.items():
        history.read(BUCKET, at, batch)
    history.saw_high_watermark(BUCKET, 8)
    return history, {BUCKET: Content(0, np.array(keys), batches)}


def test_a_right_history_has_no_violations() -> None:
    assert violations(*good()) == []


def lose_the_tail(history: History, content: Content) -> None:
    content.keys = content.keys[:-2]
    history.high[BUCKET] = 0
    history.seen[BUCKET].pop(6)


def store_twice(history: History, content: Content) -> None:
    content.keys = np.append(content.keys, content.keys[-1])


def swap(history: History, content: Content) -> None:
    content.keys[[0, 1]] = content.keys[[1, 0]]


def move(history: History, content: Content) -> None:
    content.keys = np.roll(content.keys, 2)


def invent(history: History, content: Content) -> None:
    content.keys = np.append(content.keys, (9 << 32) + 1)


def make_a_hole(history: History, content: Content) -> None:
    history.acks.clear()
    content.keys = np.delete(content.keys, [4, 5])
    history.lanes[0].sent = 8
    content.keys = np.append(content.keys, (1 << 32) + 6)


def change_what_was_read(history: History, content: Content) -> None:
    content.batches[2] = Batch(4, b"other")


def forget_what_was_read(history: History, content: Content) -> None:
    del content.batches[2]


def go_back(history: History, content: Content) -> None:
    history.saw_high_watermark(BUCKET, 5)


def read_two_things(history: History, content: Content) -> None:
    history.read(BUCKET, 0, Batch(2, b"first"))


def end_below_what_was_seen(history: History, content: Content) -> None:
    history.high[BUCKET] = 9


def give_a_writer_id_twice(history: History, content: Content) -> None:
    history.new_writer_id(3)
    history.new_writer_id(3)


def lose_rows_of_unknown_place(history: History, content: Content) -> None:
    lane = history.lane(gapless=False)
    history.acknowledged(Ack(lane.take(2), 2))


PLANTED: dict[str, Callable[[History, Content], None]] = {
    "lost: acknowledged at 6": lose_the_tail,
    "more than once": store_twice,
    "out of order": swap,
    "acknowledged at": move,
    "nobody sent": invent,
    "missing before": make_a_hole,
    "changed or vanished: [2]": change_what_was_read,
    "vanished: [2]": forget_what_was_read,
    "high watermark went from 8 back to 5": go_back,
    "later Batch": read_two_things,
    "ends at 8, readers saw 9": end_below_what_was_seen,
    "writer ids given twice": give_a_writer_id_twice,
    "acknowledged and not there": lose_rows_of_unknown_place,
}


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_violation_is_found(text: str) -> None:
    history, contents = good()
    PLANTED[text](history, contents[BUCKET])
    problems = violations(history, contents)
    assert any(text.removeprefix("lost: ") in violation for violation in problems), problems


def test_rows_below_the_start_of_the_log_may_be_gone() -> None:
    history, contents = good()
    content = contents[BUCKET]
    contents[BUCKET] = Content(4, content.keys[4:], {4: content.batches[4], 6: content.batches[6]})
    assert violations(history, contents) == []


def test_lookups_may_give_what_was_acknowledged_before_and_what_is_under_way() -> None:
    history = History()
    keys = KeyHistory(history)
    for row in ("a", None, "b"):
        keys.sent(1, row)
    keys.acknowledged(1, 1)
    for row in ("a", None, "b", "b"):
        keys.end([1], keys.begin([1]), [row], "someone")
    assert history.problems == []
    assert keys.answers == 4


@pytest.mark.parametrize(
    ("row", "text"), [("a", "stale"), (None, "stale"), ("c", "no row that was sent")]
)
def test_a_lookup_of_an_older_row_is_found(row: str | None, text: str) -> None:
    history = History()
    keys = KeyHistory(history)
    for sent in ("a", "b"):
        keys.acknowledged(1, keys.sent(1, sent))
    keys.end([1], keys.begin([1]), [row], "someone")
    assert text in history.problems[0]


def test_a_lookup_that_goes_back_behind_another_is_found() -> None:
    history = History()
    keys = KeyHistory(history)
    before = keys.begin([1])
    keys.sent(1, "a")
    keys.end([1], keys.begin([1]), ["a"], "one")
    keys.end([1], before, [None], "one that began earlier")
    assert history.problems == []
    keys.end([1], keys.begin([1]), [None], "another")
    assert "another looked up 1: None is stale" in history.problems[0]
