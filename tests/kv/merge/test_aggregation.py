"""The aggregation engine: changelog, deletes, partial updates, modes, schemas, limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from tests.kv.merge.aggregating import AGGREGATION, Bucket, Row, column, comparable, schema_of
from tests.record.aggregate.plain_aggregation import PlainAggregation
from zufluss.errors import (
    AggregationError,
    ErrorCode,
    InvalidTargetColumnError,
    RecordTooLargeError,
    ZuflussError,
)
from zufluss.model.merge import MergeMode
from zufluss.model.schema import Schema

INSERT, BEFORE, AFTER, DELETE = 1, 2, 3, 4
BIGINT_MAX = 2**63 - 1
Make = Callable[..., Bucket]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes buckets with schemas and properties, and closes them."""
    made: list[Bucket] = []

    def bucket(*schemas: Schema, **properties: str) -> Bucket:
        named = {key.replace("__", ".").replace("_", "-"): v for key, v in properties.items()}
        made.append(Bucket(tmp_path / f"{len(made)}", schemas, {**AGGREGATION, **named}))
        return made[-1]

    yield bucket
    for each in made:
        each.close()


def sums(*more: Any) -> Schema:
    """A table with a sum, a last value, and what else is wanted."""
    return schema_of(
        column("n", "BIGINT", "sum"), column("t", "STRING", "last_value_ignore_nulls"), *more
    )


def test_an_update_logs_the_row_before_and_after_if_it_changes_the_row(make: Make) -> None:
    bucket = make(sums())
    assert bucket.put((1, 5, "a"), (1, None, None), (1, 2, None)) == [
        (INSERT, (1, 5, "a")),
        (BEFORE, (1, 5, "a")),
        (AFTER, (1, 7, "a")),
    ]
    assert bucket.put((1, 0, None), (1, 1, None), (1, None, "a"), (2, None, "b")) == [
        (BEFORE, (1, 7, "a")),
        (AFTER, (1, 8, "a")),
        (INSERT, (2, None, "b")),
    ]
    assert bucket.tablet.row_count == 2


def test_the_last_update_of_a_put_stays_if_nothing_changed(make: Make) -> None:
    """Fluss's sinks wait for a record at the end of the changelog, which an empty batch has not."""
    bucket = make(sums())
    bucket.put((1, 5, "a"), (2, 6, "b"))
    changes, end = bucket.prepared((2, 0, None), (1, None, "a"), (1, None, None), (3,))
    assert (changes, end) == ([(BEFORE, (1, 5, "a")), (AFTER, (1, 5, "a"))], 4)
    changes, end = bucket.prepared((1,), (2,))
    assert (changes, end) == ([], 5), "ignored deletes update no row"
    assert bucket.rows((1,), (2,)) == [(1, 5, "a"), (2, 6, "b")]
    assert bucket.tablet.row_count == 2


@pytest.mark.parametrize("deletes", ["IGNORE", "ALLOW", "DISABLE", None])
def test_deletes_do_what_the_table_says(make: Make, deletes: str | None) -> None:
    bucket = make(sums(), **({} if deletes is None else {"table__delete__behavior": deletes}))
    bucket.put((1, 5, "a"))
    if deletes == "DISABLE":
        with pytest.raises(ZuflussError, match="takes no deletes"):
            bucket.put((1,))
    elif deletes == "ALLOW":
        assert bucket.put((1,), (1,), (1, 3, None)) == [
            (DELETE, (1, 5, "a")),
            (INSERT, (1, 3, None)),
        ]
        assert bucket.put((1,)) == [(DELETE, (1, 3, None))]
        assert bucket.tablet.row_count == 0
    else:
        assert bucket.put((1,), (2,)) == []
        assert bucket.rows((1,)) == [(1, 5, "a")]


@pytest.mark.parametrize("deletes", ["IGNORE", "DISABLE"])
def test_an_overwrite_deletes_whatever_the_table_says_of_deletes(make: Make, deletes: str) -> None:
    """An undo by OVERWRITE puts takes rows back that the aggregation cannot delete."""
    bucket = make(sums(), table__delete__behavior=deletes)
    bucket.put((1, 5, "a"), (2, 6, None))
    assert bucket.put((1,), (3,), mode=MergeMode.OVERWRITE) == [(DELETE, (1, 5, "a"))]
    assert bucket.put((2,), targets=["k", "n"], mode=MergeMode.OVERWRITE) == [
        (DELETE, (2, 6, None))
    ]
    assert bucket.tablet.row_count == 0


def test_a_row_that_comes_and_goes_in_one_batch_leaves_nothing(make: Make) -> None:
    bucket = make(sums(), table__delete__behavior="ALLOW")
    assert bucket.put((1, 5, "a"), (1,)) == [(INSERT, (1, 5, "a")), (DELETE, (1, 5, "a"))]
    assert bucket.rows((1,)) == [None]
    assert bucket.tablet.row_count == 0


def test_a_partial_put_aggregates_its_columns_and_a_partial_delete_clears_them(make: Make) -> None:
    bucket = make(sums(), table__delete__behavior="ALLOW")
    bucket.put((1, 5, "a"))
    assert bucket.put((1, 2, None), (2, 9, None), targets=["k", "n"]) == [
        (BEFORE, (1, 5, "a")),
        (AFTER, (1, 7, "a")),
        (INSERT, (2, 9, None)),
    ]
    assert bucket.put((1,), (2,), targets=["k", "n"]) == [
        (BEFORE, (1, 7, "a")),
        (AFTER, (1, None, "a")),
        (DELETE, (2, 9, None)),
    ]
    bucket.put((1,), targets=["k", "n"])
    assert bucket.rows((1,)) == [(1, None, "a")], "it was NULL already"
    assert bucket.put((1,), targets=["k", "t"]) == [(DELETE, (1, None, "a"))]


def test_a_partial_put_needs_the_key_and_nullable_columns(make: Make) -> None:
    with pytest.raises(InvalidTargetColumnError, match="k is missing"):
        make(sums()).put((1, 2, None), targets=["n"])
    fixed = make(schema_of(column("n", "BIGINT NOT NULL", "sum"), column("m", "INT", "max")))
    with pytest.raises(InvalidTargetColumnError, match="n are NOT NULL"):
        fixed.put((1, 2, None), targets=["k", "n"])


def test_max_by_and_its_column_are_written_together(make: Make) -> None:
    bucket = make(
        schema_of(
            column("at", "BIGINT", "max"),
            column("who", "STRING", "max_by", by="at"),
            column("n", "INT", "sum"),
        )
    )
    bucket.put((1, 5, "a", 1), (1, 5, "b", 1), (1, 4, "c", 1), (1, None, "d", 1))
    assert bucket.rows((1,)) == [(1, 5, "b", 4)]
    with pytest.raises(InvalidTargetColumnError, match=r"'who'.*both columns or neither"):
        bucket.put((1, 9, None, None), targets=["k", "at"])
    bucket.put((1, None, None, 2), targets=["k", "n"])
    assert bucket.rows((1,)) == [(1, 5, "b", 6)]


def test_a_sum_beyond_its_type_is_refused_with_column_and_key_and_changes_nothing(
    make: Make,
) -> None:
    bucket = make(schema_of(column("n", "BIGINT", "sum"), column("d", "DECIMAL(5, 2)", "sum")))
    bucket.put((1, BIGINT_MAX, Decimal("999.99")))
    with pytest.raises(AggregationError, match=r"'n' \(sum\) of key k = 1: .* BIGINT"):
        bucket.put((2, 1, None), (1, 1, None))
    with pytest.raises(AggregationError, match=r"'d' \(sum\) of key k = 1: .* DECIMAL\(5, 2\)"):
        bucket.put((2, 1, None), (1, None, Decimal("0.01")))
    assert bucket.rows((1,), (2,)) == [(1, BIGINT_MAX, Decimal("999.99")), None]
    assert bucket.put((1, -1, Decimal("-0.99")))[1][1] == (1, BIGINT_MAX - 1, Decimal("999.00"))


def test_a_sum_wraps_only_if_the_column_says_so(make: Make) -> None:
    bucket = make(schema_of(column("n", "TINYINT", "sum", overflow="wrap")))
    bucket.put((1, 127), (1, 1))
    assert bucket.rows((1,)) == [(1, -128)]


def test_bytes_that_are_no_bitmap_are_refused_at_the_first_write(make: Make) -> None:
    bucket = make(schema_of(column("u", "BYTES", "rbm32")))
    with pytest.raises(AggregationError, match=r"'u' \(rbm32\) of key k = 7: 3 bytes are no Roar"):
        bucket.put((7, b"abc"))
    whole = BitMap([1, 70_000]).serialize()
    with pytest.raises(AggregationError, match="are no Roaring bitmap"):
        bucket.put((7, whole + b"x"))
    bucket.put((7, whole), (7, BitMap([2]).serialize()), (7, whole))
    assert BitMap.deserialize(bucket.rows((7,))[0][1]) == BitMap([1, 2, 70_000])
    before = bucket.rows((7,))
    bucket.put((7, whole))
    assert bucket.rows((7,)) == before, "a union is idempotent"


def test_a_value_that_grows_beyond_the_servers_limit_is_refused(make: Make) -> None:
    bucket = make(schema_of(column("t", "STRING", "listagg")))
    bucket.tablet._value_bytes_max = 100
    bucket.put((1, "x" * 60))
    with pytest.raises(RecordTooLargeError, match=r"zufluss.kv.value.max-size"):
        bucket.put((1, "x" * 60))
    assert bucket.rows((1,)) == [(1, "x" * 60)]


def test_overwrite_goes_past_the_functions(make: Make) -> None:
    bucket = make(sums(), table__delete__behavior="ALLOW")
    bucket.put((1, 5, "a"))
    bucket.put((1, 1, None), mode=MergeMode.OVERWRITE)
    assert bucket.rows((1,)) == [(1, 1, None)]
    bucket.put((1, 9, None), mode=MergeMode.OVERWRITE, targets=["k", "n"])
    assert bucket.rows((1,)) == [(1, 9, None)]
    assert bucket.put((1,), mode=MergeMode.OVERWRITE) == [(DELETE, (1, 9, None))]


@pytest.mark.parametrize("mode", [MergeMode.MERGE_STATE, MergeMode.RETRACT])
@pytest.mark.parametrize("engine", [None, "first_row", "versioned"])
def test_states_and_retracts_are_for_aggregation_tables(
    make: Make, mode: MergeMode, engine: str | None
) -> None:
    schema = schema_of(column("n", "BIGINT"))
    named = {"table.merge-engine": engine, "table.merge-engine.versioned.ver-column": "n"}
    bucket = make(schema)
    bucket.properties = {key: value for key, value in named.items() if engine and value}
    bucket.alter(1)
    with pytest.raises(ZuflussError, match=f"agg_mode {mode:d}") as refused:
        bucket.put((1, 1), mode=mode)
    assert refused.value.code == ErrorCode.UNSUPPORTED_VERSION


def test_a_retract_takes_sums_counts_and_products_back(make: Make) -> None:
    bucket = make(
        schema_of(
            column("n", "BIGINT", "sum"),
            column("c", "INT", "count"),
            column("p", "INT", "product"),
            column("m", "INT", "max", ignore_retract=True),
        )
    )
    bucket.put((1, 5, 0, 6, 3), (1, 7, 0, 2, 4))
    bucket.put((1, 5, 0, 6, 3), mode=MergeMode.RETRACT)
    assert bucket.rows((1,)) == [(1, 7, 1, 2, 4)]
    bucket.put((2, 5, 0, None, 1), mode=MergeMode.RETRACT)
    assert bucket.rows((2,)) == [(2, -5, -1, None, None)]
    for wrong, reason in ((0, "divided by 0"), (4, "not a multiple")):
        with pytest.raises(AggregationError, match=rf"'p' \(product\) of key k = 1: .*{reason}"):
            bucket.put((1, None, None, wrong, None), mode=MergeMode.RETRACT)
    with pytest.raises(AggregationError, match=r"'p'.*no product"):
        bucket.put((3, None, None, 4, None), mode=MergeMode.RETRACT)


def test_a_retract_of_what_cannot_be_taken_back_names_the_column(make: Make) -> None:
    bucket = make(schema_of(column("n", "BIGINT", "sum"), column("m", "INT", "max")))
    bucket.put((1, 5, 3))
    with pytest.raises(AggregationError, match=r"'m'.*max.*ignore_retract"):
        bucket.put((1, 5, 3), mode=MergeMode.RETRACT)
    bucket.put((1, 5, None), mode=MergeMode.RETRACT, targets=["k", "n"])
    assert bucket.rows((1,)) == [(1, 0, 3)]


def test_a_not_null_column_cannot_become_null(make: Make) -> None:
    fixed = column("m", "INT NOT NULL", "max", ignore_retract=True)
    bucket = make(schema_of(column("n", "BIGINT", "sum"), fixed))
    with pytest.raises(AggregationError, match=r"'m' \(max\) of key k = 1: it is NOT NULL"):
        bucket.put((1, 5, 3), mode=MergeMode.RETRACT)


def test_an_added_column_begins_with_null_and_old_rows_merge(make: Make) -> None:
    before = sums()
    added = [
        column("c", "INT", "count"),
        column("f", "INT", "first_value"),
        column("l", "STRING", "listagg"),
    ]
    columns = [*before.columns, *(c for c in sums(*added).columns[len(before.columns) :])]
    after = Schema.of([*columns], primary_key=("k",))
    bucket = make(before, after)
    bucket.put((1, 5, "a"), (2, 5, "a"), (3, 5, "a"))
    bucket.alter(2)
    assert bucket.put((1, 1, None, 1, 4, "x")) == [
        (BEFORE, (1, 5, "a", None, None, None)),
        (AFTER, (1, 6, "a", 1, 4, "x")),
    ]
    bucket.put((2, 1, None), version=1)
    assert bucket.rows((2,)) == [(2, 6, "a", None, None, None)], "an old writer knows no more"
    assert bucket.put((3, None, None, None, None, None)) == [
        (BEFORE, (3, 5, "a", None, None, None)),
        (AFTER, (3, 5, "a", 0, None, None)),
    ]
    bucket.put((3, None, None, None, 9, None), (3, None, None, None, 8, None))
    assert bucket.rows((3,)) == [(3, 5, "a", 0, 9, None)], "NULL was no first value"


def test_an_auto_increment_column_is_filled_for_new_keys(make: Make) -> None:
    schema = Schema.of(
        [
            column("k", "INT NOT NULL"),
            column("n", "BIGINT", "sum"),
            column("id", "BIGINT", "first_value_ignore_nulls"),
        ],
        primary_key=("k",),
        auto_increment_column=("id",),
    )
    bucket = make(schema)
    bucket.tablet.ids.add(100, 110)
    bucket.put((1, 5, None), (2, 5, None), (1, 1, None), targets=["k", "n"])
    bucket.put((1, 1, None), (3, 1, None), targets=["k", "n"])
    assert bucket.rows((1,), (2,), (3,)) == [(1, 7, 100), (2, 5, 101), (3, 1, 102)]
    with pytest.raises(InvalidTargetColumnError, match="fills column 'id' itself"):
        bucket.put((1, 1, 7))


def test_puts_of_a_refused_batch_leave_no_trace_in_the_next_one(make: Make) -> None:
    bucket = make(schema_of(column("t", "STRING", "listagg", limit=3)))
    bucket.put((1, "a"))
    with pytest.raises(AggregationError, match="4 bytes, the limit is 3; raise the column's limit"):
        bucket.put((1, "b"), (2, "cccc"))
    bucket.put((1, "c"))
    assert bucket.rows((1,), (2,)) == [(1, "a,c"), None]


MIXED = schema_of(
    column("a", "BIGINT", "sum"),
    column("b", "STRING", "max"),
    column("c", "INT", "count"),
    column("d", "STRING", "listagg"),
    column("e", "ARRAY<INT>", "collect"),
    column("f", "DECIMAL(20, 2)", "min"),
    column("g", "BOOLEAN", "bool_or"),
    column("h", "STRING", "min_by", by="f"),
    column("i", "DECIMAL(30, 4)", "sum"),
)
ROW = st.tuples(
    st.integers(0, 4),
    st.none() | st.integers(-9, 9),
    st.none() | st.text("abü", max_size=12),
    st.none() | st.integers(0, 1),
    st.none() | st.text("xy", max_size=3),
    st.none() | st.lists(st.none() | st.integers(0, 3), max_size=3),
    st.none() | st.decimals(-99, 99, places=2),
    st.none() | st.booleans(),
    st.none() | st.text("pq", max_size=2),
    st.none() | st.decimals(-99, 99, places=4),
)
RECORD = ROW | st.tuples(st.integers(0, 4))
BATCH = st.tuples(st.lists(RECORD, min_size=1, max_size=12), st.booleans())
PARTIAL = frozenset({0, 1, 2, 4, 5})


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(batches=st.lists(BATCH, min_size=1, max_size=4), deletes=st.booleans())
def test_any_mix_of_rows_and_deletes_agrees_with_plain_python(
    batches: list[tuple[list[Row], bool]], deletes: bool, tmp_path_factory: Any
) -> None:
    behavior = {"table.delete.behavior": "ALLOW" if deletes else "IGNORE"}
    bucket = Bucket(tmp_path_factory.mktemp("b"), [MIXED], {**AGGREGATION, **behavior})
    plain = PlainAggregation(MIXED, deletes=deletes)
    try:
        for records, partial in batches:
            names = [MIXED.names[i] for i in sorted(PARTIAL)] if partial else ()
            wanted = plain.put(records, targets=PARTIAL if partial else None)
            assert comparable(bucket.put(*records, targets=names)) == comparable(wanted)
        keys = [(key,) for key in range(5)]
        assert comparable(bucket.rows(*keys)) == comparable([plain.rows.get(k) for k in keys])
        assert bucket.tablet.row_count == len(plain.rows)
    finally:
        bucket.close()


def test_large_batches_of_few_keys_sum_up(make: Make) -> None:
    bucket, rng = make(sums()), np.random.default_rng(3)
    keys, numbers = rng.integers(0, 50, 20_000).tolist(), rng.integers(0, 99, 20_000).tolist()
    bucket.put(*((k, n, None) for k, n in zip(keys, numbers, strict=True)))
    totals = [sum(n for k, n in zip(keys, numbers, strict=True) if k == key) for key in range(50)]
    assert bucket.rows(*((k,) for k in range(50))) == [(k, n, None) for k, n in enumerate(totals)]


def test_partial_updates_that_repeat_a_long_row_too_often_are_refused_and_change_nothing(
    make: Make,
) -> None:
    bucket = make(sums())
    bucket.put((1, 0, "x" * 1_000_000))
    changes = [(1, i, None) for i in range(600)]
    with pytest.raises(RecordTooLargeError, match=r"client\.writer\.batch-size"):
        bucket.put(*changes, mode=MergeMode.OVERWRITE, targets=["k", "n"])
    assert bucket.rows((1,)) == [(1, 0, "x" * 1_000_000)]
    bucket.put(*changes[:3], mode=MergeMode.OVERWRITE, targets=["k", "n"])
    assert bucket.rows((1,)) == [(1, 2, "x" * 1_000_000)]
