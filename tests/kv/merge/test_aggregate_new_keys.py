"""Puts of whole rows, where the first row of a key is stored as it came and the rest is folded.

The same rows with all their columns named as targets go the other way, where every row is taken
apart first and folded. Both ways must agree; without this a row could be lost, doubled or misplaced
where new keys, stored keys and several rows of a key meet in one batch.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kv.merge.aggregating import (
    AGGREGATION,
    Bucket,
    Row,
    arrow,
    column,
    comparable,
    schema_of,
)
from tests.kv.merge.test_aggregate_functions import FLOATS, FUNCTIONS, VALUES, root_of
from zufluss.errors import AggregationError, CorruptRecordError
from zufluss.model.merge import MergeMode
from zufluss.model.schema import Schema
from zufluss.record.aggregate import opcodes as k
from zufluss.record.aggregate.registry import BUILDERS
from zufluss.record.batch.kv import build_kv_batch
from zufluss.record.rows.codec import LocatedRows, RowCodec
from zufluss.record.slices import Slices

EXAMPLES = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
FLAT = [data_type for data_type in VALUES if "<" not in data_type]
CASES = [
    (name, data_type)
    for name, declared in FUNCTIONS.items()
    for data_type in FLAT
    if root_of(data_type) in declared.roots
    and all(op in k.AS_CAME for op in BUILDERS[name](column("v", data_type, name))[:2])
]
"""Functions that begin with what came, with each type that they take and has nothing nested."""
KEYS = 12


class Sample(NamedTuple):
    """A table and batches for it."""

    schema: Schema
    batches: list[list[Row]]


def table_of(cases: Sequence[tuple[str, str]]) -> Schema:
    """A table with a column for each case, and one that decides for some."""
    columns = [
        column(f"v{i}", data_type, name, **({"by": "by"} if name in ("max_by", "min_by") else {}))
        for i, (name, data_type) in enumerate(cases)
    ]
    return schema_of(column("by", "DOUBLE", "max"), *columns)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Tables of some columns, and batches that have keys again and again, and deletes."""
    cases = draw(st.lists(st.sampled_from(CASES), min_size=1, max_size=6))
    values = [st.none() | VALUES[data_type] for _, data_type in cases]
    key = st.integers(0, KEYS - 1)
    row = st.tuples(key, st.none() | FLOATS, *values)
    record = st.one_of(row, row, row, st.tuples(key))
    batches = draw(st.lists(st.lists(record, min_size=1, max_size=14), min_size=1, max_size=4))
    return Sample(table_of(cases), batches)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bucket]]:
    """Makes buckets of tables that take deletes, and closes them."""
    made: list[Bucket] = []

    def bucket(schema: Schema) -> Bucket:
        properties = {**AGGREGATION, "table.delete.behavior": "ALLOW"}
        made.append(Bucket(tmp_path / f"{len(made)}", [schema], properties))
        return made[-1]

    yield bucket
    for each in made:
        each.close()


def outcome(bucket: Bucket, rows: list[Row], mode: MergeMode, targets: Sequence[str]) -> Any:
    """The changelog of a put, or what it is refused with."""
    try:
        return comparable(bucket.put(*rows, mode=mode, targets=targets))
    except AggregationError as e:
        return str(e)


def test_rows_of_new_and_stored_keys_are_as_if_all_were_folded(make: Callable[..., Bucket]) -> None:
    @EXAMPLES
    @given(samples(), st.sampled_from([MergeMode.AGGREGATE, MergeMode.MERGE_STATE]))
    def check(sample: Sample, mode: MergeMode) -> None:
        one, other = make(sample.schema), make(sample.schema)
        for rows in sample.batches:
            names = sample.schema.names
            assert outcome(one, rows, mode, ()) == outcome(other, rows, mode, names)
            keys = [(key,) for key in range(KEYS)]
            assert comparable(one.rows(*keys)) == comparable(other.rows(*keys))
            assert one.tablet.row_count == other.tablet.row_count

    check()


@pytest.mark.parametrize("compression", ["ZSTD", "NONE"])
def test_large_batches_of_new_and_stored_keys_are_as_if_all_were_folded(
    tmp_path: Path, compression: str
) -> None:
    schema = schema_of(
        column("n", "BIGINT", "sum"),
        column("h", "BOOLEAN", "last_value_ignore_nulls"),
        column("t", "STRING", "max"),
        column("d", "DOUBLE", "first_value"),
    )
    properties = {**AGGREGATION, "table.log.arrow.compression.type": compression}
    one, other = (Bucket(tmp_path / name, [schema], properties) for name in ("one", "other"))
    random = np.random.default_rng(len(compression))
    for keys in (100, 400, 3_000, 3_000):
        rows = [_random_row(random, keys) for _ in range(700)]
        assert one.put(*rows) == other.put(*rows, targets=schema.names)
    everyone = [(key,) for key in range(3_000)]
    assert one.rows(*everyone) == other.rows(*everyone)
    one.close()
    other.close()


def _random_row(random: np.random.Generator, keys: int) -> Row:
    key, number, flag = (int(random.integers(0, most)) for most in (keys, 99, 3))
    null = random.random(2) < 0.2
    text = None if null[0] else "x" * (number % 40) + str(number)
    return (key, number, [None, False, True][flag], text, None if null[1] else number / 7)


def test_rows_of_new_keys_are_stored_byte_for_byte(make: Callable[..., Bucket]) -> None:
    schema = schema_of(column("n", "BIGINT", "sum"), column("t", "STRING", "last_value"))
    bucket = make(schema)
    rows = RowCodec(schema).encode(arrow(schema, [(1, 5, "a"), (2, None, None), (1, 6, None)]))
    _put(bucket, rows, [1, 2, 1])
    made = RowCodec(schema).encode(arrow(schema, [(1, 11, None)]))
    wanted = [b"\x01\x00" + bytes(row or b"") for row in (made.item(0), rows.item(1))]
    assert _stored(bucket, [1, 2]) == wanted


def test_a_stored_time_equals_the_time_in_the_changelog(make: Callable[..., Bucket]) -> None:
    coarse, fine = (
        schema_of(column("t", f"TIMESTAMP({digits})", "last_value")) for digits in (0, 3)
    )
    bucket = make(coarse)
    row = (1, dt.datetime(2026, 1, 1, microsecond=700_000))
    changes = _put(bucket, RowCodec(fine).encode(arrow(fine, [row])), [1])
    assert changes == [(1, dt.datetime(2026, 1, 1))]
    again = RowCodec(coarse).encode(arrow(coarse, changes))
    assert _stored(bucket, [1]) == [b"\x01\x00" + bytes(again.item(0) or b"")]


@pytest.mark.parametrize("stored", [False, True])
def test_rows_under_another_key_or_cut_are_refused_and_nothing_is_stored(
    make: Callable[..., Bucket], stored: bool
) -> None:
    schema = schema_of(column("n", "BIGINT", "sum"), column("t", "STRING", "last_value"))
    bucket = make(schema)
    before: list[Row | None] = [None, None]
    if stored:
        bucket.put((1, 5, "a"), (2, 5, "b"))
        before = [(1, 5, "a"), (2, 5, "b")]
    rows = RowCodec(schema).encode(arrow(schema, [(1, 7, "x"), (2, 8, "y")]))
    with pytest.raises(CorruptRecordError, match="has the key"):
        _put(bucket, rows, [1, 3])
    with pytest.raises(CorruptRecordError, match="field 2"):
        _put(bucket, rows._replace(ends=rows.ends - np.array([0, 1])), [1, 2])
    assert bucket.rows((1,), (2,)) == before
    assert bucket.rows((3,)) == [None]


def _put(bucket: Bucket, rows: Slices, keys: Sequence[int]) -> list[Row]:
    """Put rows as bytes; the rows of the changelog."""
    table = bucket.tablet.table
    batch = build_kv_batch(1, _keys(bucket, keys), rows)
    prepared = bucket.tablet.prepare(np.frombuffer(batch, np.uint8), (), MergeMode.AGGREGATE, 0)
    assert prepared.changes is not None
    made = prepared.changes.rows
    batches = table.codec.columns(made) if isinstance(made, LocatedRows) else made
    return list(zip(*(c.to_pylist() for c in batches.columns), strict=True))


def _stored(bucket: Bucket, keys: Sequence[int]) -> list[bytes | None]:
    return bucket.tablet.store.get_at(_keys(bucket, keys), 1 << 60).tolist()


def _keys(bucket: Bucket, keys: Sequence[int]) -> Slices:
    schema = bucket.schema
    rows = [(key, *[None] * (len(schema.columns) - 1)) for key in keys]
    return Slices.contiguous(*bucket.tablet.table.key.encode(arrow(schema, rows)))
