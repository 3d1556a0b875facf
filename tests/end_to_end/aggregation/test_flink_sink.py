"""Flink's aggregation sink fails and starts again: its calls, with the results of a real Fluss."""

from __future__ import annotations

import secrets

import pytest

from tests.end_to_end.aggregation.flink_sink import (
    ALREADY_EXISTS,
    CREATED,
    FlinkSink,
    SinkTable,
    registered_offsets,
)
from tests.end_to_end.aggregation.tables import fresh_name
from tests.end_to_end.raw import RawClient
from zufluss.model.schema import Schema

COUNTS = Schema.of("k INT, n BIGINT SUM, t STRING LISTAGG", ["k"])
DAYS = Schema.of("day STRING, k INT, n BIGINT SUM", ["day", "k"])
HERE = (None, 0)
BEHAVIORS = [None, "IGNORE", "ALLOW", "DISABLE"]


@pytest.fixture
def counts(raw: RawClient) -> SinkTable:
    """A table with one bucket."""
    return SinkTable.create(raw, fresh_name(), COUNTS)


def producer() -> str:
    """A producer id that no other test uses."""
    return f"job-{secrets.token_hex(4)}"


def sums(table: SinkTable, *keys: int) -> list[int | None]:
    """The sums of keys in the first bucket; None where there is no row."""
    return [None if row is None else row[1] for row in table.rows(HERE, *((k,) for k in keys))]


@pytest.mark.parametrize("behavior", BEHAVIORS)
def test_a_job_that_fails_before_its_first_checkpoint_counts_nothing_twice(
    raw: RawClient, behavior: str | None
) -> None:
    """Its second start finds the offsets that the first one registered, and undoes all since."""
    properties = {} if behavior is None else {"table.delete.behavior": behavior}
    counts = SinkTable.create(raw, fresh_name(), COUNTS, properties=properties)
    FlinkSink(counts, producer()).start().write(HERE, (1, 5, "a"))  # an earlier job
    job = producer()
    for attempt in range(3):
        sink = FlinkSink(counts, job).start()
        assert sink.registered == (ALREADY_EXISTS if attempt else CREATED)
        assert sink.baseline == {HERE: 1}
        assert counts.rows(HERE, (1,), (2,)) == [(1, 5, "a"), None]
        sink.write(HERE, (1, 10, "b"), (2, 20, "c"))
        sink.write(HERE, (2, 1, "d"), (1, 1, None))
        assert counts.rows(HERE, (1,), (2,)) == [(1, 16, "a,b"), (2, 21, "c,d")]
    sink.finish()
    assert registered_offsets(counts, job) is None


def test_the_changelog_of_an_undo_is_that_of_fluss(counts: SinkTable) -> None:
    FlinkSink(counts, producer()).start().write(HERE, (1, 5, "a"))
    job = producer()
    FlinkSink(counts, job).start().write(HERE, (1, 10, None), (2, 20, "c"))
    FlinkSink(counts, job).start()
    assert counts.changes(HERE) == [
        (0, "+I", (1, 5, "a")),
        (1, "-U", (1, 5, "a")),
        (2, "+U", (1, 15, "a")),
        (3, "+I", (2, 20, "c")),
        (4, "-U", (1, 15, "a")),
        (5, "+U", (1, 5, "a")),
        (6, "-D", (2, 20, "c")),
    ]


def test_a_job_goes_on_from_its_checkpoint_as_often_as_it_fails(counts: SinkTable) -> None:
    job = producer()
    sink = FlinkSink(counts, job).start()
    sink.write(HERE, (1, 5, "a"), (2, 6, "b"))
    state = sink.checkpoint()
    assert state == {HERE: 2}
    assert registered_offsets(counts, job) == {HERE: 0}, "they stay until a restored job has one"
    sink.write(HERE, (1, 10, "c"), (3, 30, "d"))
    for _ in range(2):
        sink = FlinkSink(counts, job, state).start()
        assert sums(counts, 1, 2, 3) == [5, 6, None]
        sink.write(HERE, (2, 1, "e"), (3, 1, "f"))
    state = sink.checkpoint()
    assert registered_offsets(counts, job) is None
    assert state == {HERE: counts.end_offsets()[HERE]}
    FlinkSink(counts, job, state).start().write(HERE, (1, 1, None))
    assert sums(counts, 1, 2, 3) == [6, 7, 1]


def test_an_empty_checkpoint_is_undone_from_the_beginning(counts: SinkTable) -> None:
    """A checkpoint before the first row has no baseline: all that came since was inserted."""
    job = producer()
    sink = FlinkSink(counts, job).start()
    state = sink.checkpoint()
    assert state == {}
    sink.write(HERE, *[(1, 10, None)] * 10)
    sink = FlinkSink(counts, job, state).start()
    assert sums(counts, 1) == [None]
    sink.write(HERE, *[(1, 10, None)] * 13)
    assert sums(counts, 1) == [130]


def test_rows_that_changed_nothing_do_not_hold_an_undo_up(raw: RawClient) -> None:
    """The sink reads up to a record at the end, which the put of a smaller maximum must have."""
    table = SinkTable.create(raw, fresh_name(), Schema.of("k INT, n BIGINT MAX", ["k"]))
    job = producer()
    sink = FlinkSink(table, job).start()
    sink.write(HERE, (1, 5), (2, 6))
    state = sink.checkpoint()
    sink.write(HERE, (2, 1), (1, 3))
    assert table.end_offsets()[HERE] > state[HERE]
    FlinkSink(table, job, state).start()
    assert table.rows(HERE, (1,), (2,)) == [(1, 5), (2, 6)]


def test_an_undo_that_fails_half_way_is_done_by_the_next_start(counts: SinkTable) -> None:
    """Rows that an undo wrote come behind the first change of their keys."""
    FlinkSink(counts, producer()).start().write(HERE, (1, 5, "a"), (2, 6, "b"))
    job = producer()
    FlinkSink(counts, job).start().write(HERE, *((k, 100, "x") for k in (1, 3, 2, 4)))
    for undone in (1, 2, 3):
        FlinkSink(counts, job).start(until=lambda keys, most=undone: keys == most)
    FlinkSink(counts, job).start()
    assert counts.rows(HERE, (1,), (2,), (3,), (4,)) == [(1, 5, "a"), (2, 6, "b"), None, None]


def test_a_sink_of_some_columns_leaves_the_others_alone(counts: SinkTable) -> None:
    """A row is deleted if no other writer has set one of its columns."""
    other = FlinkSink(counts, producer(), columns=(0, 2)).start()
    other.write(HERE, (1, None, "a"))
    job = producer()
    FlinkSink(counts, job, columns=(0, 1)).start().write(
        HERE, (1, 1, None), (2, 2, None), (3, 3, None)
    )
    other.write(HERE, (1, None, "b"), (2, None, "c"))
    FlinkSink(counts, job, columns=(0, 1)).start()
    assert counts.rows(HERE, (1,), (2,), (3,)) == [(1, None, "a,b"), (2, None, "c"), None]


def test_all_buckets_and_partitions_are_undone_new_ones_from_their_beginning(
    raw: RawClient,
) -> None:
    days = SinkTable.create(raw, fresh_name(), DAYS, bucket_count=2, partition_key="day")
    job, first = producer(), days.add_partition("1")
    sink = FlinkSink(days, job).start()
    assert registered_offsets(days, job) == {(first, 0): 0, (first, 1): 0}
    sink.write((first, 1), ("1", 7, 70))
    state = sink.checkpoint()
    assert state == {(first, 1): 1}
    second = days.add_partition("2")
    for bucket, day in (((first, 0), "1"), ((first, 1), "1"), ((second, 1), "2")):
        sink.write(bucket, (day, 7, 1), (day, 8, 1))
    FlinkSink(days, job, state).start()
    assert days.rows((first, 0), ("1", 7), ("1", 8)) == [None, None]
    assert days.rows((first, 1), ("1", 7), ("1", 8)) == [("1", 7, 70), None]
    assert days.rows((second, 1), ("2", 7), ("2", 8)) == [None, None]


def test_a_table_without_partitions_registers_no_offsets_and_undoes_all(raw: RawClient) -> None:
    days = SinkTable.create(raw, fresh_name(), DAYS, partition_key="day")
    job = producer()
    sink = FlinkSink(days, job).start()
    assert (sink.registered, registered_offsets(days, job)) == (CREATED, {})
    bucket = days.add_partition("1"), 0
    sink.write(bucket, ("1", 7, 70))
    again = FlinkSink(days, job).start()
    assert again.registered == ALREADY_EXISTS
    assert days.rows(bucket, ("1", 7)) == [None]
