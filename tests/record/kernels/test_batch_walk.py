"""Walking over headers: the kernels find what a plain loop finds, whatever the bytes are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.record.arrow_samples import array
from zufluss.record.header import build_batch, iter_headers, stamp
from zufluss.record.kernels.batch_walk import (
    Walked,
    last_whole,
    scan_plain,
    scan_segment,
    walk,
    walk_plain,
)


@st.composite
def segments(draw: st.DrawFn) -> bytes:
    """Stamped batches with rising offsets, sometimes with a torn or damaged tail."""
    data = bytearray()
    offset = draw(st.integers(0, 2**40))
    for count in draw(st.lists(st.integers(0, 5), max_size=6)):
        magic = draw(st.sampled_from([0, 1, 2]))
        batch = build_batch(
            draw(st.integers(1, 3)),
            bytes(draw(st.integers(0, 30))),
            count,
            magic=magic,
            writer_id=draw(st.integers(-1, 9)),
            sequence=draw(st.integers(-1, 9)),
        )
        stamp(batch, 0, magic, offset, draw(st.integers(0, 2**50)), 4)
        offset += max(count, 1)
        data += batch
    kept = draw(st.integers(0, 60))
    if kept and data:
        data = data[: max(len(data) - kept, 0)]
    for position in draw(st.lists(st.integers(0, 2**16), max_size=2)):
        if data:
            data[position % len(data)] ^= 0x81
    return bytes(data)


def offsets_near(data: bytes) -> list[int]:
    found = [o for _, h in whole(data) for o in (h.base_offset - 1, h.base_offset, h.last_offset)]
    return found or [0]


def whole(data: bytes) -> list:
    return [
        pair
        for pair in iter_headers(data)
        if pair[1].base_offset >= 0 and pair[1].last_offset_delta >= 0
    ]


def sound(count: int = 5) -> tuple[bytes, list[int]]:
    """Batches of 3 records each, and where they begin."""
    data, starts = b"", []
    for i in range(count):
        batch = build_batch(1, bytes(i), 3, magic=i % 3)
        stamp(batch, 0, i % 3, 100 + 3 * i, 1000 + i, 0)
        starts.append(len(data))
        data += batch
    return data, [*starts, len(data)]


@given(segments(), st.integers(0, 400), st.booleans(), st.data())
def test_a_walk_equals_its_plain_twin(
    data: bytes, max_bytes: int, at_least_one: bool, draws: st.DataObject
) -> None:
    try:
        near = offsets_near(data)
    except ValueError:
        near = [0]
    offset, up_to = draws.draw(st.sampled_from(near)), draws.draw(st.sampled_from([*near, 2**62]))
    arguments = (array(data), 0, len(data), offset, max_bytes, up_to)
    assert walk(*arguments, at_least_one=at_least_one) == walk_plain(
        *arguments, at_least_one=at_least_one
    )


@given(segments())
def test_a_scan_equals_its_plain_twin(data: bytes) -> None:
    found, expected = scan_segment(array(data), 0, len(data)), scan_plain(data, 0, len(data))
    assert found.end == expected.end
    for mine, theirs in zip(found[:-1], expected[:-1], strict=True):
        assert mine.dtype == np.int64
        assert mine.tolist() == theirs.tolist()
    last = found.positions[-1] if len(found.positions) else -1
    assert last_whole(array(data), 0, len(data)) == (last, found.end)


@given(st.binary(max_size=300), st.integers(-5, 310), st.integers(-5, 310))
def test_noise_and_odd_bounds_never_leave_the_buffer(data: bytes, start: int, end: int) -> None:
    found = walk(array(data), start, end, 0, 1000)
    assert 0 <= max(start, 0) <= found.first_pos <= found.end_pos <= max(len(data), start)
    scan_segment(array(data), start, end)
    last_whole(array(data), start, end)


def test_a_walk_begins_with_the_batch_that_holds_the_offset() -> None:
    data, starts = sound()
    for offset in range(100, 115):
        found = walk(array(data), 0, len(data), offset, 10**6)
        assert found == Walked(starts[(offset - 100) // 3], len(data), 115, 5 - (offset - 100) // 3)


def test_a_walk_takes_whole_batches_within_its_limit_and_at_least_one() -> None:
    data, starts = sound()
    for limit in range(len(data) + 1):
        taken = max(i for i, at in enumerate(starts) if at <= limit)
        found = walk(array(data), 0, len(data), 100, limit, at_least_one=False)
        assert (found.batches, found.end_pos) == (taken, starts[taken])
        assert walk(array(data), 0, len(data), 100, limit).batches == max(taken, 1)


@pytest.mark.parametrize(("up_to", "batches"), [(100, 0), (101, 1), (103, 1), (104, 2), (999, 5)])
def test_a_walk_stops_before_batches_at_or_above_its_bound(up_to: int, batches: int) -> None:
    data, _ = sound()
    found = walk(array(data), 0, len(data), 100, 10**6, up_to)
    assert found.batches == batches
    assert found.next_offset == 100 + 3 * batches


def test_a_walk_behind_the_end_finds_nothing() -> None:
    data, _ = sound()
    assert walk(array(data), 0, len(data), 115, 10**6) == Walked(len(data), len(data), 115, 0)


def test_a_scan_stops_where_a_batch_is_torn() -> None:
    data, starts = sound()
    for size in range(len(data)):
        found = scan_segment(array(data[:size]), 0, size)
        whole_batches = max(i for i, at in enumerate(starts) if at <= size)
        assert found.end == starts[whole_batches]
        assert found.positions.tolist() == starts[:whole_batches]


def test_a_scan_gives_what_an_index_needs() -> None:
    data, starts = sound(3)
    found = scan_segment(array(data), 0, len(data))
    assert found.base_offsets.tolist() == [100, 103, 106]
    assert found.last_offsets.tolist() == [102, 105, 108]
    assert found.timestamps.tolist() == [1000, 1001, 1002]
    assert found.sizes.tolist() == np.diff(starts).tolist()
