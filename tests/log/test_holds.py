"""The retention floor of a log: who holds which records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zufluss.log.holds import RECORD_HOLDERS, Holder, Holds

OFFSETS = st.one_of(st.none(), st.integers(0, 100))


def test_nothing_is_held_at_first() -> None:
    holds = Holds()
    assert holds.floor(17, *Holder) == 17
    assert all(holds.offset(holder) is None for holder in Holder)
    assert repr(holds) == "Holds()"


def test_a_hold_is_moved_in_both_directions_and_released() -> None:
    holds = Holds()
    for offset in (5, 9, 2):
        holds.set(Holder.LAKE, offset)
        assert holds.offset(Holder.LAKE) == holds.floor(10, Holder.LAKE) == offset
    holds.set(Holder.LAKE, None)
    assert holds.floor(10, Holder.LAKE) == 10


def test_the_floor_is_the_lowest_hold_of_those_asked_for() -> None:
    holds = Holds()
    holds.set(Holder.KV_STATE, 3)
    holds.set(Holder.SNAPSHOT, 8)
    holds.set(Holder.UNDO, 6)
    assert holds.floor(10, *RECORD_HOLDERS) == 6
    assert holds.floor(10, Holder.KV_STATE) == 3
    assert holds.floor(10, *Holder) == 3
    assert holds.floor(10) == 10


def test_a_hold_at_the_first_offset_is_a_hold() -> None:
    holds = Holds()
    holds.set(Holder.REMOTE_COPY, 0)
    assert holds.floor(10, Holder.REMOTE_COPY) == 0


def test_what_is_held_and_why_can_be_read() -> None:
    holds = Holds()
    holds.set(Holder.PRODUCER, 4)
    assert repr(holds) == "Holds(PRODUCER from 4 on: a producer may have to undo these changes)"


@given(
    offsets=st.lists(OFFSETS, min_size=len(Holder), max_size=len(Holder)), end=st.integers(0, 90)
)
def test_the_floor_is_never_above_the_end_or_a_hold(offsets: list[int | None], end: int) -> None:
    holds = Holds()
    for holder, offset in zip(Holder, offsets, strict=True):
        holds.set(holder, offset)
    held = [offset for offset in offsets if offset is not None]
    assert holds.floor(end, *Holder) == min([end, *held])
