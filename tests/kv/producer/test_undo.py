"""Undo of a producer's changes in a bucket, against a dict that never got these puts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.kv_samples import small_memory
from tests.kv.producer.undo_bucket import Bucket, Record, table_of
from zufluss.errors import AggregationError, ProducerFencedError, ProducerStateError
from zufluss.kv.memory import KvMemory
from zufluss.kv.producer import own_changes
from zufluss.kv.producer.own_changes import LEAST, MOST, SeenKeys
from zufluss.model.aggregate import AggFunction
from zufluss.model.producer import TASK_MAX
from zufluss.model.schema import Column, Schema
from zufluss.record.slices import Slices

OWN, FOREIGN = (0, 1), (0, 2)
"""Target columns: the key and one more."""
PARTIAL = Schema.of("id BIGINT NOT NULL, a BIGINT, b STRING", primary_key=["id"])
WHOLE = Schema.of("id BIGINT NOT NULL, a BIGINT NOT NULL, b STRING NOT NULL", primary_key=["id"])

Rows = dict[int, tuple[Any, ...]]


@pytest.fixture(scope="module")
def memory() -> Iterator[KvMemory]:
    made = small_memory(32)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of a few changes take several steps."""
    monkeypatch.setattr(own_changes, "STEP_ROWS", 3)


class Put(NamedTuple):
    """A put of one batch to one of two columns; None deletes."""

    own: bool
    task: int
    values: tuple[tuple[int, Any], ...]

    def send(self, bucket: Bucket) -> None:
        if self.own:
            own: list[Record] = [k if v is None else (k, v, None) for k, v in self.values]
            bucket.put(own, OWN, task=self.task)
        else:
            others: list[Record] = [k if v is None else (k, None, str(v)) for k, v in self.values]
            bucket.put(others, FOREIGN)

    def apply(self, rows: Rows) -> None:
        """The same, to a dict."""
        mine, others = (0, 1) if self.own else (1, 0)
        for key, value in self.values:
            row = list(rows.get(key, (None, None)))
            if value is not None:
                row[mine] = value if self.own else str(value)
            elif key not in rows:
                continue
            elif row[others] is None:
                del rows[key]
                continue
            else:
                row[mine] = None
            rows[key] = tuple(row)


KEYS = st.integers(0, 11)
VALUES = st.lists(
    st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 3), st.integers(0, 3))),
    min_size=1, max_size=5,
).map(tuple)  # fmt: skip
CRASHES = st.lists(st.integers(0, 15), max_size=3)
"""After how many steps an undo dies, one time after the other."""
PUTS = st.builds(Put, st.booleans(), st.sampled_from([0, 3, TASK_MAX]), VALUES)


@given(
    before=st.lists(PUTS, max_size=4),
    after=st.lists(PUTS, max_size=8),
    meanwhile=st.lists(PUTS.map(lambda p: p._replace(own=False)), max_size=3),
    keys_max=st.integers(2, 20),
    crashes=CRASHES,
)
@settings(max_examples=30, deadline=None)
def test_an_undo_leaves_the_changes_of_others_wherever_it_crashes(
    memory: KvMemory,
    before: list[Put],
    after: list[Put],
    meanwhile: list[Put],
    keys_max: int,
    crashes: list[int],
) -> None:
    """The undo dies after some steps and is repeated, while others continue to write."""
    with tempfile.TemporaryDirectory() as directory:
        bucket = Bucket(Path(directory), memory, table_of(PARTIAL), [1])
        expected: Rows = {}
        for put in before:
            put.send(bucket)
            put.apply(expected)
        start = bucket.end
        for put in after:
            put.send(bucket)
            if not put.own:
                put.apply(expected)
        bucket.begin(2)
        for steps, put in zip(crashes, meanwhile, strict=False):
            bucket.undo(start, keys_max=keys_max, steps_max=steps)
            bucket.crash()
            put.send(bucket)
            put.apply(expected)
        bucket.undo(start, keys_max=keys_max)
        assert bucket.rows() == bucket.folded() == expected
        end = bucket.end
        assert bucket.undo(start, keys_max=keys_max) == 0, "and nothing is left to do"
        assert bucket.end == end
        bucket.close()


@pytest.mark.parametrize("exclusive", [True, False])
def test_an_undo_may_die_at_every_step_in_turn(
    memory: KvMemory, tmp_path: Path, exclusive: bool
) -> None:
    table = table_of(summed("BIGINT"), table_merge__engine="aggregation")
    bucket = Bucket(tmp_path, memory, table, [1, 2], exclusive=exclusive)
    bucket.put([(key, 10, None) for key in range(8)], task=0, mode=1)
    expected, start = bucket.rows(), bucket.end
    for key in (1, 2, 3, 1, 5, 6, 7, 2):
        bucket.put([(key, 10 * key, None)], task=0, mode=1)
    bucket.begin(2)
    steps = 0
    while bucket.undo(start, keys_max=5, steps_max=steps) is None:
        bucket.crash()
        steps += 1
    assert steps > 3
    assert bucket.rows() == bucket.folded() == expected
    bucket.close()


@given(
    after=st.lists(VALUES, min_size=1, max_size=6),
    again=st.lists(VALUES, max_size=4),
    deletes=st.sampled_from(["ALLOW", "IGNORE", "DISABLE"]),
)
@settings(max_examples=15, deadline=None)
def test_a_producer_of_all_columns_leaves_nothing_behind_over_many_epochs(
    memory: KvMemory, after: list[Any], again: list[Any], deletes: str
) -> None:
    """NOT NULL columns, whole rows, and an undo that deletes whatever table.delete.behavior is."""
    with tempfile.TemporaryDirectory() as directory:
        table = table_of(WHOLE, table_delete_behavior=deletes)
        bucket = Bucket(Path(directory), memory, table, [1, 2])
        first = [(key, key, "first") for key in range(0, 12, 2)]
        bucket.put(first, task=0)
        expected, start = bucket.rows(), bucket.end
        for epoch, puts in enumerate((after, again), 2):
            for values in puts:
                records = [
                    (k, v or 0, f"{epoch}") if v or deletes != "ALLOW" else k for k, v in values
                ]
                bucket.put(records, task=1)
            bucket.begin(epoch)
            bucket.undo(start, keys_max=3)
            assert bucket.rows() == bucket.folded() == expected
        bucket.close()


def test_an_undo_restores_the_state_at_any_offset(memory: KvMemory, tmp_path: Path) -> None:
    """Also one from before an undo, and one that an undo has left behind: undos are changes."""
    bucket = Bucket(tmp_path, memory, table_of(PARTIAL), [1])
    states: dict[int, Rows] = {bucket.end: {}}
    for epoch in range(1, 6):
        bucket.begin(epoch)
        if epoch > 1:
            bucket.undo(sorted(states)[epoch % len(states)])
        for value in range(3):
            bucket.put([((epoch + value) % 4, 10 * epoch + value, None)], OWN, task=0)
            states[bucket.end] = bucket.rows()
    for epoch, start in enumerate([*reversed(states), *states], 6):
        bucket.begin(epoch)
        bucket.undo(start, keys_max=2)
        assert bucket.rows() == bucket.folded() == states[start]
    bucket.close()


def test_an_undo_is_for_the_present_epoch_before_it_writes(
    memory: KvMemory, tmp_path: Path
) -> None:
    bucket = Bucket(tmp_path, memory, table_of(PARTIAL), [1])
    bucket.put([(1, 1, None)], OWN, task=0)
    with pytest.raises(ProducerStateError, match="epoch 1 of producer 5 has written"):
        bucket.undo(0)
    bucket.begin(3)
    bucket.epoch = 2
    with pytest.raises(ProducerFencedError, match="is in epoch 3, not 2"):
        bucket.undo(0)
    bucket.crash()
    bucket.begin(3)
    assert bucket.undo(0) == 1
    bucket.put([(1, 2, None)], OWN, task=0)
    bucket.crash()
    with pytest.raises(ProducerStateError):  # also known after a restart
        bucket.undo(0)
    bucket.close()


def test_a_table_of_many_keys_takes_several_passes(memory: KvMemory, tmp_path: Path) -> None:
    """Positions go up to the end of the changelog, also when it is read again."""
    bucket = Bucket(tmp_path, memory, table_of(PARTIAL), [1])
    for key in range(0, 300, 30):
        bucket.put([(k, k, None) for k in range(key, key + 30)], OWN, task=0)
    bucket.begin(2)
    steps = [*bucket.steps(0, bucket.end, 40)]
    passes = sum(1 for step, _ in steps) / sum(1 for _ in bucket.steps(0, bucket.end, 1000))
    assert passes > 5, "40 of 300 keys are remembered at a time"
    assert max(position for _, position in steps) == steps[-1].position == bucket.end
    assert bucket.undo(0, keys_max=40) == 300
    assert bucket.rows() == {}
    bucket.close()


def test_an_older_row_has_no_value_in_a_column_that_came_later(
    memory: KvMemory, tmp_path: Path
) -> None:
    bucket = Bucket(tmp_path, memory, table_of(PARTIAL), [1])
    bucket.put([(1, None, "others")], FOREIGN)
    start = bucket.end
    bucket.put([(1, 7, None), (2, 8, None)], OWN, task=0)
    info = bucket.table.info
    wider = Schema.of("id BIGINT NOT NULL, a BIGINT, b STRING, c BIGINT", primary_key=["id"])
    later = table_of(wider)
    object.__setattr__(later.info, "schema_id", 2)
    bucket.tablet.table = type(later)(later.info, {1: info.schema, 2: wider})
    bucket.table = bucket.tablet.table
    bucket.begin(2)
    assert bucket.undo(start) == 2
    _, values = bucket.tablet.store.scan(None, 10, 1 << 20, bucket.end)
    (value,) = values.tolist()
    assert value is not None
    assert value[:2] == b"\x02\x00"
    bucket.close()


# -- shared columns -------------------------------------------------------------------------------


def summed(type_: str, **parameters: str) -> Schema:
    """`a` is summed, `m` has the greatest value."""
    plain = Schema.of(f"id BIGINT NOT NULL, a {type_}, m BIGINT", primary_key=["id"])
    functions = [None, AggFunction.named("sum", parameters), AggFunction.named("max")]
    columns = [
        Column(c.name, c.data_type, c.comment, c.id, function)
        for c, function in zip(plain.columns, functions, strict=True)
    ]
    return Schema(tuple(columns), plain.primary_key)


ADDED = st.lists(st.tuples(KEYS, st.integers(-50, 50)), min_size=1, max_size=5)


class Sums:
    """Two producers that add to one column, and what only one of them added."""

    def __init__(self, bucket: Bucket, number: Any = int) -> None:
        self.bucket = bucket
        self.number = number
        self.totals: dict[int, Any] = {}
        self.others: dict[int, Any] = {}

    def add(self, values: list[tuple[int, int]], *, task: int | None, counts: bool) -> None:
        for key, value in values:
            more = self.number(value)
            self.totals[key] = self.totals.get(key, 0) + more
            self.others[key] = self.others.get(key, 0) + (more if counts else 0)
            row = (key, self.totals[key], key)
            self.bucket.put([row], task=task, mode=1)


@given(
    puts=st.lists(st.tuples(st.booleans(), ADDED), min_size=1, max_size=8),
    checkpoint=st.integers(0, 8),
    meanwhile=ADDED,
    decimal=st.booleans(),
    keys_max=st.integers(3, 20),
    crashes=CRASHES,
)
@settings(max_examples=15, deadline=None)
def test_what_others_added_to_a_shared_column_survives_wherever_the_undo_crashes(
    memory: KvMemory,
    puts: list[tuple[bool, list[tuple[int, int]]]],
    checkpoint: int,
    meanwhile: list[tuple[int, int]],
    decimal: bool,
    keys_max: int,
    crashes: list[int],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        schema = summed("DECIMAL(9, 2)" if decimal else "SMALLINT")
        table = table_of(schema, table_merge__engine="aggregation")
        bucket = Bucket(Path(directory), memory, table, [1, 2], exclusive=False)
        sums = Sums(bucket, (lambda n: Decimal(n) / 100) if decimal else int)
        start = 0
        for i, (own, values) in enumerate(puts):
            start = bucket.end if i == checkpoint else start
            counts = not own or i < checkpoint <= len(puts) - 1
            sums.add(values, task=0 if own else None, counts=counts)
        bucket.begin(2)
        for steps in crashes:
            bucket.undo(start, keys_max=keys_max, steps_max=steps)
            bucket.crash()
            sums.totals = {key: row[0] for key, row in bucket.rows().items()}
            sums.add(meanwhile, task=None, counts=True)
        bucket.undo(start, keys_max=keys_max)
        expected = {key: (total, key) for key, total in sums.others.items()}
        assert bucket.rows() == bucket.folded() == expected
        assert bucket.undo(start) == 0
        bucket.close()


def test_a_sum_that_wraps_is_undone_by_wrapping(memory: KvMemory, tmp_path: Path) -> None:
    table = table_of(summed("TINYINT", overflow="wrap"), table_merge__engine="aggregation")
    bucket = Bucket(tmp_path, memory, table, [1, 2], exclusive=False)
    bucket.put([(1, 100, None)], mode=1)
    bucket.put([(1, -56, None)], task=0, mode=1)  # 100 more
    bucket.put([(1, -46, None)], mode=1)
    bucket.begin(2)
    assert bucket.undo(0) == 1
    assert bucket.rows() == {1: (110, None)}
    bucket.close()


def test_a_sum_that_does_not_fit_without_the_producer_names_key_and_column(
    memory: KvMemory, tmp_path: Path
) -> None:
    """Others added so much only because the producer had taken something away."""
    table = table_of(summed("TINYINT"), table_merge__engine="aggregation")
    bucket = Bucket(tmp_path, memory, table, [1, 2], exclusive=False)
    bucket.put([(1, -100, None)], task=0, mode=1)
    bucket.put([(1, 100, None)], mode=1)
    bucket.begin(2)
    with pytest.raises(AggregationError, match=r"column a .* key \{'id': 1\}: 200 does not fit"):
        bucket.undo(0)
    assert bucket.rows() == {1: (100, None)}
    bucket.close()


# -- keys that were seen --------------------------------------------------------------------------


@given(
    pieces=st.lists(st.lists(st.integers(0, 60), max_size=20), max_size=10),
    keys_max=st.integers(1, 20),
)
@settings(max_examples=50, deadline=None)
def test_each_key_is_met_first_in_exactly_one_pass_or_again_from_its_beginning(
    pieces: list[list[int]], keys_max: int
) -> None:
    """A pass never forgets a key of its range, and all ranges together are all keys."""
    low, covered = LEAST, set[int]()
    while True:
        seen = SeenKeys(low, keys_max)
        met: list[int] = []
        for piece in pieces:
            unseen = seen.unseen(Slices.of(str(key).encode() for key in piece))
            met += [piece[i] for i in unseen.tolist()]
            assert seen.count <= keys_max
        assert len(met) == len(set(met)), "no key twice in a pass"
        covered |= set(met)
        if seen.high == MOST:
            break
        assert seen.high >= low
        low = seen.high + 1
    assert covered == {key for piece in pieces for key in piece}
