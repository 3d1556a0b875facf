"""Each aggregation function of each type: a bucket against the fold in plain Python.

Without this a function could be wrong for one type, for NULLs, for the first row of a key, or for
several rows of a key in one batch, and only the totals of some user would tell.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasketches
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap, BitMap64

from tests.kv.merge.aggregating import Bucket, Row, arrow, column, comparable, rows_of, schema_of
from tests.record.aggregate.plain_aggregation import PlainAggregation
from zufluss.errors import AggregationError
from zufluss.model.aggregate import FUNCTIONS
from zufluss.model.merge import MergeMode
from zufluss.model.schema import Schema
from zufluss.model.types import Root
from zufluss.record.aggregate.functions import RefusedValue
from zufluss.record.aggregate.local import pre_aggregate
from zufluss.record.aggregate.registry import BUILDERS

FEW_EXAMPLES = settings(
    max_examples=3, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
ADDING = [MergeMode.AGGREGATE, MergeMode.MERGE_STATE]
KEYS = st.integers(0, 2)


def _hll(*items: int) -> bytes:
    sketch = datasketches.hll_sketch(8)
    for item in items:
        sketch.update(item)
    return bytes(sketch.serialize_compact())


def _theta(*items: int) -> bytes:
    sketch = datasketches.update_theta_sketch()
    for item in items:
        sketch.update(item)
    return bytes(sketch.compact().serialize())


def integers(bits: int) -> st.SearchStrategy[int]:
    """Small ones mostly, so that sums are not beyond their type all the time."""
    half = 1 << (bits - 1)
    return st.integers(-9, 9) | st.sampled_from([half - 1, -half]) | st.integers(-half, half - 1)


FEW = st.lists(st.integers(0, 99), max_size=3)
TEXT = st.text("aé€😀z", max_size=20)
FLOATS = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 0.1, 3.5]) | st.floats(width=32)
MOMENT = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1))
DECIMAL = st.decimals(-999, 999, places=2) | st.decimals(-5, 5, places=2)
BIG = DECIMAL | st.sampled_from([Decimal(10) ** 27 - 1, -(Decimal(10) ** 27) + 1])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "TINYINT": integers(8),
    "SMALLINT": integers(16),
    "INT": integers(32),
    "BIGINT": integers(64),
    "FLOAT": FLOATS,
    "DOUBLE": FLOATS,
    "DECIMAL(5, 2)": DECIMAL,
    "DECIMAL(38, 10)": BIG,
    "CHAR(5)": TEXT,
    "STRING": TEXT,
    "DATE": st.dates(),
    "TIME(0)": st.times().map(lambda t: t.replace(microsecond=0)),
    "TIME(6)": st.times().map(lambda t: t.replace(microsecond=t.microsecond // 1000 * 1000)),
    "TIMESTAMP(0)": MOMENT.map(lambda m: m.replace(microsecond=0)),
    "TIMESTAMP(3)": MOMENT.map(lambda m: m.replace(microsecond=m.microsecond // 1000 * 1000)),
    "TIMESTAMP(6)": MOMENT,
    "TIMESTAMP_LTZ(6)": MOMENT.map(lambda m: m.replace(tzinfo=dt.UTC)),
    "BOOLEAN": st.booleans(),
    "BYTES": st.binary(max_size=20),
    "BINARY(3)": st.binary(min_size=3, max_size=3),
    "ARRAY<INT>": st.lists(st.none() | st.integers(0, 3), max_size=4),
    "ARRAY<STRING>": st.lists(st.none() | TEXT, max_size=3),
    "ARRAY<ROW<a INT, b ARRAY<STRING>>>": st.lists(
        st.none()
        | st.fixed_dictionaries(
            {"a": st.none() | st.integers(0, 1), "b": st.lists(TEXT, max_size=2)}
        ),
        max_size=3,
    ),
    "MAP<STRING, INT>": st.dictionaries(TEXT, st.integers(0, 9), max_size=2).map(
        lambda d: list(d.items())
    ),
    "ROW<x INT, y STRING>": st.fixed_dictionaries({"x": st.integers(0, 2), "y": TEXT}),
}
"""The types, and values of them."""
BYTES: dict[str, st.SearchStrategy[Any]] = {
    "rbm32": FEW.map(lambda items: BitMap(items).serialize()),
    "rbm64": FEW.map(lambda items: BitMap64([i << 40 for i in items]).serialize()),
    "hll": FEW.map(lambda items: _hll(*items)),
    "theta": FEW.map(lambda items: _theta(*items)),
}
"""What bytes have to be for some functions."""
PARAMETERS: dict[str, list[dict[str, object]]] = {
    "sum": [{}, {"overflow": "wrap"}],
    "product": [{}, {"overflow": "wrap"}],
    "count": [{}],
    "listagg": [{}, {"delimiter": " | ", "limit": 20}, {"limit": 20, "overflow": "truncate"}],
    "array_agg": [{}, {"limit": 5}, {"limit": 5, "overflow": "truncate"}],
    "collect": [{}, {"limit": 3, "overflow": "truncate"}],
}
WRAPS = ("TINYINT", "SMALLINT", "INT", "BIGINT")


def root_of(data_type: str) -> Root:
    """The root of a type."""
    return column("x", data_type).data_type.root


def cases() -> Iterator[Any]:
    """Every function with every type it takes, and its parameters."""
    for name, declared in FUNCTIONS.items():
        for data_type in VALUES:
            if root_of(data_type) not in declared.roots:
                continue
            for parameters in PARAMETERS.get(name, [{}]):
                if parameters.get("overflow") != "wrap" or data_type in WRAPS:
                    words = "-".join(f"{k}={v}" for k, v in parameters.items())
                    yield pytest.param(
                        name, data_type, parameters, id=f"{name}-{data_type}-{words}"
                    )


def schema_for(name: str, data_type: str, parameters: dict[str, object]) -> Schema:
    """A table with one such column, and another function beside it."""
    if name in ("max_by", "min_by"):
        by = column("by", "DOUBLE", name[:3])
        return schema_of(by, column("v", data_type, name, by="by"))
    return schema_of(
        column("by", "DOUBLE", "last_value"), column("v", data_type, name, **parameters)
    )


def rows_for(name: str, data_type: str) -> st.SearchStrategy[list[list[Row]]]:
    """Batches of rows for such a table."""
    values = BYTES.get(name, VALUES[data_type])
    row = st.tuples(KEYS, st.none() | FLOATS, st.none() | values)
    return st.lists(st.lists(row, min_size=1, max_size=6), min_size=1, max_size=4)


def test_every_declared_function_is_carried_out() -> None:
    assert set(BUILDERS) == set(FUNCTIONS)


@pytest.fixture
def buckets(tmp_path: Path) -> Iterator[Callable[[Schema], Bucket]]:
    """Makes buckets, and closes them."""
    made: list[Bucket] = []

    def make(schema: Schema) -> Bucket:
        made.append(Bucket(tmp_path / f"{len(made)}", [schema]))
        return made[-1]

    yield make
    for bucket in made:
        bucket.close()


@pytest.mark.parametrize(("name", "data_type", "parameters"), list(cases()))
def test_a_bucket_aggregates_as_plain_python_does(
    name: str, data_type: str, parameters: dict[str, object], buckets: Callable[[Schema], Bucket]
) -> None:
    schema = schema_for(name, data_type, parameters)

    bucket, plain, numbers = buckets(schema), PlainAggregation(schema), itertools.count()

    @FEW_EXAMPLES
    @given(batches=rows_for(name, data_type), mode=st.sampled_from(ADDING))
    def check(batches: list[list[Row]], mode: MergeMode) -> None:
        number = next(numbers)
        for rows in batches:
            agree(bucket, plain, under_new_keys(rows, number), mode)

    check()


def agree(bucket: Bucket, plain: PlainAggregation, rows: list[Row], mode: MergeMode) -> None:
    """Put rows to both; changelog and rows are the same, or both refuse."""
    rows = _as_read(bucket, rows)
    try:
        wanted = plain.put(rows, mode)
    except RefusedValue:
        with pytest.raises(AggregationError, match=r"column 'v' .* of key k = "):
            bucket.put(*rows, mode=mode)
    else:
        assert comparable(bucket.put(*rows, mode=mode)) == comparable(_read(bucket, wanted))
    keys = sorted({row[:1] for row in rows})
    stored = [plain.rows.get(key) for key in keys]
    assert comparable(bucket.rows(*keys)) == comparable(
        [None if row is None else _as_read(bucket, [row])[0] for row in stored]
    )


def keys_of(number: int) -> list[Row]:
    """The keys of an example."""
    return [(3 * number + key,) for key in range(3)]


def under_new_keys(rows: list[Row], number: int) -> list[Row]:
    """Rows under keys that only one example has: a bucket serves all examples of a test."""
    return [(3 * number + row[0], *row[1:]) for row in rows]


def _read(bucket: Bucket, changes: list[tuple[int, Row]]) -> list[tuple[int, Row]]:
    rows = _as_read(bucket, [row for _, row in changes])
    return [(kind, row) for (kind, _), row in zip(changes, rows, strict=True)]


def _as_read(bucket: Bucket, rows: list[Row]) -> list[Row]:
    """Rows as Arrow gives them back: floats of 32 bits, maps as lists of pairs."""
    return rows_of(arrow(bucket.schema, rows))


TAKEN_BACK = [
    (name, data_type)
    for name in ("sum", "product", "count")
    for data_type in VALUES
    if root_of(data_type) in FUNCTIONS[name].roots
]


@pytest.mark.parametrize(("name", "data_type"), TAKEN_BACK)
def test_retracts_agree_with_plain_python(
    name: str, data_type: str, buckets: Callable[[Schema], Bucket]
) -> None:
    schema = schema_of(
        column("by", "DOUBLE", "last_value", ignore_retract="true"), column("v", data_type, name)
    )
    modes = st.sampled_from([MergeMode.AGGREGATE, MergeMode.RETRACT])

    bucket, plain, numbers = buckets(schema), PlainAggregation(schema), itertools.count()

    @FEW_EXAMPLES
    @given(batches=rows_for(name, data_type), data=st.data())
    def check(batches: list[list[Row]], data: st.DataObject) -> None:
        number = next(numbers)
        for rows in batches:
            agree(bucket, plain, under_new_keys(rows, number), data.draw(modes))

    check()


EXACT = [
    case
    for case in cases()
    if case.values[1] not in ("FLOAT", "DOUBLE")
    and "limit" not in case.values[2]
    and not (case.values[0] == "product" and "DECIMAL" in case.values[1])
]


@pytest.mark.parametrize(("name", "data_type", "parameters"), EXACT)
def test_states_that_a_client_aggregated_give_the_same_rows(
    name: str, data_type: str, parameters: dict[str, object], buckets: Callable[[Schema], Bucket]
) -> None:
    schema = schema_for(name, data_type, parameters)

    one, other, numbers = buckets(schema), buckets(schema), itertools.count()

    @FEW_EXAMPLES
    @given(batches=rows_for(name, data_type))
    def check(batches: list[list[Row]]) -> None:
        number = next(numbers)
        for few in batches:
            rows = under_new_keys(few, number)
            try:
                states = pre_aggregate(arrow(schema, rows), schema, ["k"])
                other.put(*rows_of(states), mode=MergeMode.MERGE_STATE)
                one.put(*rows)
            except AggregationError:
                return
        keys = keys_of(number)
        assert comparable(_held(name, one.rows(*keys))) == comparable(
            _held(name, other.rows(*keys))
        )

    check()


def _held(name: str, rows: list[Row | None]) -> list[Any]:
    """Rows with what their sketches hold in place of their bytes, which may differ."""
    if name not in ("hll", "theta"):
        return rows
    kind = datasketches.hll_sketch if name == "hll" else datasketches.compact_theta_sketch
    return [
        None
        if row is None
        else (
            row[:-1],
            None if row[-1] is None else round(kind.deserialize(row[-1]).get_estimate(), 6),
        )
        for row in rows
    ]


def test_a_client_aggregates_part_of_a_batch_by_several_key_columns() -> None:
    schema = schema_of(
        column("j", "STRING NOT NULL"),
        column("n", "BIGINT", "sum"),
        column("t", "STRING", "max"),
        column("b", "BINARY(2)", "last_value"),
        key=("k", "j"),
    )
    rows = [
        (1, "a", 1, "x", b"pq"),
        (1, "b", 2, None, None),
        (2, "a", None, "y", b"rs"),
        (1, "b", 3, "zz", b"tu"),
        (1, "a", 5, "w", None),
    ]
    batch = arrow(schema, rows)
    assert rows_of(pre_aggregate(batch, schema, ["k", "j"])) == [
        (1, "a", 6, "x", None),
        (1, "b", 5, "zz", b"tu"),
        (2, "a", None, "y", b"rs"),
    ]
    assert rows_of(pre_aggregate(batch.slice(1, 3), schema, ["k", "j"])) == [
        (1, "b", 5, "zz", b"tu"),
        (2, "a", None, "y", b"rs"),
    ]
    some = pre_aggregate(batch, schema, ["k", "j"], targets=["n"])
    assert rows_of(some)[0] == (1, "a", 6, None, None)
    narrow = pre_aggregate(batch.select(["k", "j", "n"]), schema, ["k", "j"])
    assert narrow.schema.names == ["k", "j", "n"]
    assert rows_of(narrow) == [(1, "a", 6), (1, "b", 5), (2, "a", None)]
    assert rows_of(pre_aggregate(batch.slice(0, 0), schema, ["k", "j"])) == []
