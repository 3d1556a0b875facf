"""Rows and writers at the offset of a flush are those of the batches below it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.kv.settled import WAITING_MAX, SettledBatch, SettledState
from zufluss.log.writer_state import WriterState
from zufluss.model.producer import ProducerWriter

EXPIRY_MS = 1000
WRITERS = (3, 4, ProducerWriter(1, 2, 0).writer_id)


def state_of(batches: list[SettledBatch]) -> bytes:
    state = WriterState(EXPIRY_MS)
    for batch in batches:
        state.record(*batch)
    return state.to_json()


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from((*WRITERS, None)), st.integers(0, 8)), max_size=60))
def test_a_flush_knows_the_writers_and_rows_at_its_own_offset(
    steps: list[tuple[int | None, int]],
) -> None:
    """The worker is ahead by as many batches as a step says, more than a writer remembers."""
    settled, batches, ends = SettledState(5), [], [10]
    settled.recovered(WriterState(EXPIRY_MS), 10, 10)
    sequences = dict.fromkeys(WRITERS, 0)
    flushed = 10
    for number, (writer, ahead) in enumerate(steps):
        written = None
        end = ends[-1] + 1 + number % 3
        if writer is not None:
            written = SettledBatch(writer, sequences[writer], ends[-1], end, number)
            sequences[writer] += 1
            batches.append(written)
        ends.append(end)
        settled.add(end, 5 + len(ends), written, flushed)
        horizon = ends[max(0, len(ends) - 1 - ahead)]
        if horizon > flushed:
            assert settled.flush(horizon, flushed) == 5 + ends.index(horizon) + 1
            known = settled.writers_at(horizon)
            assert known is not None
            assert known.to_json() == state_of([b for b in batches if b.end_offset <= horizon])
            assert settled.writers_at(flushed) is not None, "until this flush has ended"
            flushed = horizon


def test_the_writers_are_unknown_until_the_log_was_read_to_its_end() -> None:
    """Memory may run out, and be flushed, in the middle of a replay."""
    settled = SettledState(0)
    settled.add(10, 1, None, 0)
    settled.flush(10, 0)
    assert settled.writers_at(10) is None
    settled.recovered(WriterState(EXPIRY_MS), 20, 10)
    assert settled.writers_at(10) is None
    settled.flush(20, 10)
    assert settled.writers_at(20) is not None


def test_batches_do_not_pile_up_between_flushes() -> None:
    settled = SettledState(0)
    settled.recovered(WriterState(EXPIRY_MS), 0, 0)
    for number in range(3 * WAITING_MAX):
        settled.add(number + 1, number, SettledBatch(7, number, number, number + 1, number), number)
    assert len(settled._waiting) <= WAITING_MAX
    settled.forget_expired(10 * EXPIRY_MS)
    assert settled.flush(3 * WAITING_MAX, 0) == 3 * WAITING_MAX - 1


def test_expired_writers_are_forgotten() -> None:
    settled = SettledState(0)
    settled.recovered(WriterState(EXPIRY_MS), 0, 0)
    settled.add(1, 1, SettledBatch(7, 0, 0, 1, 0), 1)
    settled.until(1)
    settled.forget_expired(10 * EXPIRY_MS)
    settled.flush(1, 0)
    known = settled.writers_at(1)
    assert known is not None
    assert len(known) == 0
