"""Idempotent writers: retries, gaps, wrap-around, expiry, snapshots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.log.support import append, batch, crash, expire, offsets, open_log, read_all
from tests.paths import FIXTURES
from zufluss.errors import OutOfOrderSequenceError, ProducerFencedError
from zufluss.log.log import Log
from zufluss.log.writer_state import RETAINED_BATCHES, SEQUENCE_MAX, WriterState
from zufluss.model.producer import EPOCH_MAX, ProducerWriter
from zufluss.record.batch.check import CheckedBatch

FIXTURES = FIXTURES / "remote-log"


def test_a_retry_gets_the_original_offsets_and_nothing_is_written(tmp_path: Path) -> None:
    """A lost answer makes the client send again; the record must not appear twice."""
    log = open_log(tmp_path)
    for sequence in range(7):
        append(log, batch(2, writer=9, sequence=sequence))
    for sequence in range(7 - RETAINED_BATCHES, 7):
        assert append(log, batch(2, writer=9, sequence=sequence)) == (
            2 * sequence, 2 * sequence + 2, True,
        )  # fmt: skip
    assert len(offsets(read_all(log))) == 7


@pytest.mark.parametrize("sequence", [0, 1, 8, 9, SEQUENCE_MAX, -1])
def test_a_sequence_that_is_neither_known_nor_next_is_refused(
    tmp_path: Path, sequence: int
) -> None:
    log = open_log(tmp_path)
    for known in range(7):
        append(log, batch(writer=9, sequence=known))
    with pytest.raises(OutOfOrderSequenceError, match=f"sequence {sequence} of writer 9"):
        append(log, batch(writer=9, sequence=sequence))
    assert log.log_end_offset == 7


def test_a_new_writer_starts_at_zero(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with pytest.raises(OutOfOrderSequenceError, match="must start at 0"):
        append(log, batch(writer=9, sequence=1))


def test_a_batch_without_a_writer_is_never_a_duplicate(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert [append(log, batch()).base_offset for _ in range(3)] == [0, 1, 2]


def test_the_sequence_wraps_around(tmp_path: Path) -> None:
    state = WriterState(1000)
    state.record(5, SEQUENCE_MAX - 1, 0, 1, 0)
    for sequence in (SEQUENCE_MAX, 0, 1):
        assert state.check(_entry((5, sequence)), 0) is None
        state.record(5, sequence, sequence, sequence + 1, 0)
    assert [b.sequence for b in state.retained(5)] == [SEQUENCE_MAX - 1, SEQUENCE_MAX, 0, 1]


def _entry(*numbers: tuple[int, int]) -> tuple[CheckedBatch, ...]:
    return tuple(CheckedBatch(0, 48, 0, 1, 1, 0, writer, sequence) for writer, sequence in numbers)


def test_the_batches_of_an_entry_stand_or_fall_together(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    first = append(log, batch(writer=1, sequence=0), batch(writer=1, sequence=1))
    again = append(log, batch(writer=1, sequence=0), batch(writer=1, sequence=1))
    assert again == (first.base_offset, first.end_offset, True)
    for bad in (
        [(1, 1), (1, 2)],  # half of it is known
        [(1, 2), (1, 4)],  # a gap inside
        [(1, 2), (2, 1)],  # the second writer has a gap
        [(1, 2), (1, 1)],
    ):
        with pytest.raises(OutOfOrderSequenceError):
            append(log, *(batch(writer=w, sequence=s) for w, s in bad))
    assert log.log_end_offset == 2
    assert append(log, batch(writer=1, sequence=2), batch(writer=2, sequence=0)).end_offset == 4


def test_an_expired_writer_may_come_back_with_any_sequence(tmp_path: Path) -> None:
    log = open_log(tmp_path, writer_expiry_ms=100)
    append(log, batch(writer=1, sequence=0), now_ms=0)
    with pytest.raises(OutOfOrderSequenceError):
        append(log, batch(writer=1, sequence=40), now_ms=100)
    append(log, batch(writer=1, sequence=40), now_ms=101)
    append(log, batch(writer=1, sequence=41), now_ms=102)
    assert [b.sequence for b in log.writers.retained(1)] == [40, 41]


def test_writers_expired_for_long_are_forgotten() -> None:
    state = WriterState(100)
    state.record(1, 0, 0, 1, 0)
    state.record(2, 0, 1, 2, 50)
    assert state.forget_expired(200) == 0
    assert state.forget_expired(201) == 1
    assert state.retained(1) == ()


def test_a_retry_is_known_after_any_kind_of_restart(tmp_path: Path) -> None:
    """Five batches may be in flight when the server goes down; all five will be sent again."""
    log = open_log(tmp_path, segment_bytes_max=200)
    for sequence in range(11):
        append(log, batch(2, writer=3, sequence=sequence))
    expected = log.writers.retained(3)
    crash(log)
    log = open_log(tmp_path, segment_bytes_max=200)
    assert log.writers.retained(3) == expected
    log.close(clean=True)
    log = open_log(tmp_path)
    assert log.writers.retained(3) == expected
    assert append(log, batch(2, writer=3, sequence=7)) == (14, 16, True)


def test_writers_survive_the_deletion_of_their_batches(tmp_path: Path) -> None:
    log = open_log(tmp_path, ttl_ms=10)
    append(log, batch(writer=3, sequence=0), now_ms=0)
    assert expire(log, 100) == [0]
    crash(log)
    log = open_log(tmp_path)
    assert append(log, batch(writer=3, sequence=1)).base_offset == 1


def test_snapshots_of_the_reference_server_are_read() -> None:
    paths = sorted(FIXTURES.rglob("*.writer_snapshot"))
    assert paths
    for path in paths:
        state = WriterState.from_json(path.read_bytes(), 1000)
        (last,) = state.retained(24)
        assert last.end_offset == int(path.stem)
        assert last.end_offset - last.base_offset == 10
        ours = json.loads(state.to_json())
        del ours["zufluss_crc32c"]
        assert ours == json.loads(path.read_bytes())


@given(
    st.dictionaries(
        st.integers(0, 1 << 62),
        st.tuples(st.integers(0, SEQUENCE_MAX - 9), st.integers(1, 7), st.integers(0, 1 << 50)),
        max_size=5,
    )
)
def test_snapshots_round_trip(writers: dict[int, tuple[int, int, int]]) -> None:
    state = WriterState(1000)
    for writer, (first, count, base) in writers.items():
        for i in range(count):
            state.record(writer, first + i, base + i, base + i + 1, i)
    assert WriterState.from_json(state.to_json(), 1000) == state


@given(st.data())
def test_a_damaged_snapshot_is_noticed(data: st.DataObject) -> None:
    state = WriterState(1000)
    for sequence in range(6):
        state.record(12, sequence, sequence, sequence + 1, 1000 + sequence)
    text = bytearray(state.to_json())
    at = data.draw(st.integers(0, len(text) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda v: v != text[at]))
    text[at] = value
    try:
        read = WriterState.from_json(bytes(text), 1000)
    except ValueError:
        return
    assert read == state  # a blank may become another blank, the content may not change


# -- producers ------------------------------------------------------------------------------------

EPOCHS = EPOCH_MAX + 1


def _producer(epoch: int, task: int = 0, number: int = 3) -> int:
    return ProducerWriter(number, epoch % EPOCHS, task).writer_id


def test_a_task_that_is_run_again_appends_only_what_is_missing(tmp_path: Path) -> None:
    """A Spark task that is retried sends everything from its first batch on."""
    log = open_log(tmp_path)
    writer = _producer(1)
    for sequence in range(9):
        append(log, batch(2, writer=writer, sequence=sequence))
    for sequence in range(9):
        again = append(log, batch(2, writer=writer, sequence=sequence))
        assert again.duplicate
        assert again.end_offset <= 2 * sequence + 2 or sequence < 9 - RETAINED_BATCHES
    assert not append(log, batch(2, writer=writer, sequence=9)).duplicate
    with pytest.raises(OutOfOrderSequenceError, match="so 10 is next"):
        append(log, batch(writer=writer, sequence=11))
    assert len(offsets(read_all(log))) == 10


def test_a_newer_epoch_begins_at_zero_and_fences_the_older_one(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, batch(writer=_producer(4), sequence=0))
    with pytest.raises(OutOfOrderSequenceError, match="must start at 0"):
        append(log, batch(writer=_producer(5), sequence=1))
    append(log, batch(writer=_producer(5), sequence=0))
    append(log, batch(writer=_producer(4, task=1), sequence=0))  # another task, another life
    append(log, batch(writer=_producer(4, number=7), sequence=0))
    log = _opened_again(log, tmp_path)
    for sequence in (0, 1):
        with pytest.raises(ProducerFencedError, match=r"epoch 4, and epoch 5 has written here"):
            append(log, batch(writer=_producer(4), sequence=sequence))
    assert append(log, batch(writer=_producer(5), sequence=0)).duplicate


def _opened_again(log: Log, directory: Path) -> Log:
    log.close(clean=True)
    return open_log(directory)


@given(
    first=st.integers(0, EPOCH_MAX),
    steps=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), max_size=40),
)
def test_producers_are_remembered_as_a_plain_model_does(
    first: int, steps: list[tuple[int, int]]
) -> None:
    """Epochs go on after the last one; a snapshot at any time changes nothing."""
    state, newest, count = WriterState(1000), first, 0
    for at, (more, sequence) in enumerate(steps):
        epoch = first + more
        entry = _entry((_producer(epoch), sequence))
        state = WriterState.from_json(state.to_json(), 1000)
        if count and epoch < newest:
            with pytest.raises(ProducerFencedError):
                state.check(entry, 0)
            continue
        last = count - 1 if epoch == newest and count else -1
        if sequence > last + 1:
            with pytest.raises(OutOfOrderSequenceError):
                state.check(entry, 0)
        elif sequence <= last:
            assert state.check(entry, 0) is not None
        else:
            assert state.check(entry, 0) is None
            state.record(_producer(epoch), sequence, at, at + 1, 0)
            newest, count = epoch, sequence + 1
        assert len(state) == (count > 0)
        assert state.copy() == state


def test_a_producers_numbers_have_an_end_and_its_gaps_do_not_expire() -> None:
    state, writer = WriterState(10), _producer(1)
    state.record(writer, SEQUENCE_MAX, 0, 1, 0)
    assert state.check(_entry((writer, 0)), 0) is not None, "sent again, not begun again"
    state.record(_producer(2), 0, 1, 2, 0)
    with pytest.raises(OutOfOrderSequenceError):
        state.check(_entry((_producer(2), 5)), 1000)
    assert state.forget_expired(1000) == 1
    assert not state.producer_writers()
    assert state.check(_entry((_producer(2), 0)), 1000) is None


def test_a_log_remembers_no_more_writers_than_it_may(tmp_path: Path) -> None:
    """The one that wrote last stays, however long ago it came."""
    log = open_log(tmp_path, writers_max=100)
    append(log, batch(writer=1, sequence=0))
    for writer in range(2, 101):
        append(log, batch(writer=writer, sequence=0))
    append(log, batch(writer=1, sequence=1))
    append(log, batch(writer=101, sequence=0))
    assert len(log.writers) == 90
    append(log, batch(writer=1, sequence=2))
    with pytest.raises(OutOfOrderSequenceError, match="does not know this writer"):
        append(log, batch(writer=2, sequence=1))
    crash(log)
    log = open_log(tmp_path, writers_max=50)
    assert len(log.writers) == 45
    assert log.writers.retained(1)


def test_the_tasks_of_producers_are_not_forgotten_for_other_writers() -> None:
    """A task that is run again begins at 0: forgotten, it would write everything twice."""
    state = WriterState(1000, writers_max=10)
    state.record(_producer(1), 0, 0, 1, 0)
    for writer in range(100):
        state.record(writer, 0, writer + 1, writer + 2, 0)
    assert len(state) <= 11
    assert state.check(_entry((_producer(1), 0)), 0) == (0, 1)
