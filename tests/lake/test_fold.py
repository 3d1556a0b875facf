"""The fold leaves exactly the last change of every key, whatever the key's type."""

from __future__ import annotations

import datetime as dt
import math
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lake.changes import Change, changelog
from tests.lake.iceberg.tables import table_info
from zufluss.lake import fold
from zufluss.lake.fold import FoldedChanges, Folder
from zufluss.lake.keys import KeySet, number_keys
from zufluss.model.table import TableInfo

KEYS: dict[str, list[Any]] = {
    "TINYINT": [-128, -1, 0, 127],
    "SMALLINT": [-32768, 0, 32767],
    "INT": [-(2**31), 0, 2**31 - 1],
    "BIGINT": [-(2**63), -1, 0, 2**63 - 1],
    "BOOLEAN": [True, False],
    "STRING": ["", "a", "A", "ä", "a\0", "a\0b"],
    "CHAR(3)": ["", "abc"],
    "BYTES": [b"", b"\0", b"\0\0", b"\xff"],
    "BINARY(2)": [b"\0\0", b"\0\1", b"\xff\xff"],
    "DECIMAL(5, 2)": [Decimal("0.00"), Decimal("-1.50"), Decimal("999.99")],
    "DECIMAL(38, 0)": [Decimal(10**37), Decimal(-(10**37))],
    "DATE": [dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(9999, 12, 31)],
    "TIME(3)": [dt.time(0), dt.time(23, 59, 59, 999000)],
    "TIMESTAMP(6)": [dt.datetime(1969, 1, 1), dt.datetime(2024, 1, 1, 0, 0, 0, 1)],
    "TIMESTAMP_LTZ(3)": [dt.datetime(2024, 1, 1, tzinfo=dt.UTC)],
    "DOUBLE": [0.0, -0.0, 1.5, math.inf],
}


def folded(table: TableInfo, batches: list[list[Change]]) -> FoldedChanges:
    folder, offset = Folder(table, 3), 0
    for batch in batches:
        folder.add(changelog(table, batch, offset))
        offset += len(batch)
    return folder.finish()


def expected(batches: list[list[Change]], key: list[str]) -> tuple[list[Any], list[Any]]:
    """Offsets of the upserts and of the deletes that must be left."""
    last: dict[Any, tuple[int, str]] = {}
    offset = 0
    for batch in batches:
        for kind, row in batch:
            if kind != "-U":
                last[repr([row[name] for name in key])] = (offset, kind)
            offset += 1
    left = sorted(last.values())
    return [o for o, k in left if k != "-D"], [o for o, k in left if k == "-D"]


@pytest.mark.parametrize("kind", KEYS)
def test_the_last_change_of_every_key_is_left_for_keys_of_any_type(kind: str) -> None:
    table = table_info(f"k {kind}, j INT, v INT", primary_key=["k", "j"])
    draw = random.Random(5)
    batches = [
        [
            (
                draw.choice(["+I", "-U", "+U", "-D"]),
                {"k": draw.choice(KEYS[kind]), "j": draw.choice([1, 2]), "v": draw.randrange(9)},
            )
            for _ in range(20)
        ]
        for _ in range(4)
    ]
    left = folded(table, batches)
    upserts, deletes = expected(batches, ["k", "j"])
    assert left.upserts["__offset"].to_pylist() == upserts
    assert left.deletes["__offset"].to_pylist() == deletes
    assert left.changes == 80
    assert left.deletes.column_names == ["k", "j", "__offset"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["+I", "-U", "+U", "-D"]), st.integers(-3, 12)), max_size=8
        ),
        max_size=8,
    ),
    st.integers(1, 10),
)
def test_folding_in_pieces_gives_what_a_dict_gives(
    changes: list[list[tuple[str, int]]], pending: int
) -> None:
    table = table_info("id BIGINT, name STRING", primary_key=["id"])
    batches = [[(k, {"id": i, "name": f"{k}{i}"}) for k, i in batch] for batch in changes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold, "PENDING_ROWS", pending)
        left = folded(table, batches)
    upserts, deletes = expected(batches, ["id"])
    assert left.upserts["__offset"].to_pylist() == upserts
    assert left.deletes["__offset"].to_pylist() == deletes
    flat = [row for batch in batches for _, row in batch]
    assert left.upserts.select(["id", "name"]).to_pylist() == [flat[o] for o in upserts]


def test_upserts_are_rows_of_the_table_with_system_columns_behind() -> None:
    table = table_info("id BIGINT, name STRING", primary_key=["id"])
    left = folded(table, [[("+I", {"id": 1, "name": None})]])
    assert left.upserts.column_names == ["id", "name", "__bucket", "__offset", "__timestamp"]
    assert left.upserts["__bucket"].to_pylist() == [3]
    assert left.upserts.schema.field("name").equals(table.schema.arrow.field("name"))


def test_no_changes_leave_empty_tables_of_the_same_schema() -> None:
    table = table_info("id BIGINT, name STRING", primary_key=["id"])
    nothing, something = folded(table, []), folded(table, [[("+I", {"id": 1, "name": "a"})]])
    assert nothing.upserts.schema == something.upserts.schema
    assert nothing.deletes.schema == something.deletes.schema
    assert nothing.upserts.num_rows == nothing.deletes.num_rows == nothing.changes == 0


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_set_of_keys_contains_its_keys_and_no_others(kind: str, columns: int) -> None:
    arrow = table_info(f"k {kind}").schema.arrow.field("k").type
    draw = random.Random(columns)
    names = [f"k{i}" for i in range(columns)]

    def keys(count: int) -> pa.Table:
        return pa.table({n: pa.array(draw.choices(KEYS[kind], k=count), arrow) for n in names})

    members, tested = keys(3), pa.concat_tables([keys(20), keys(20)])
    known = {repr(row) for row in members.to_pylist()}
    found = KeySet(members).contains(tested)
    assert found.tolist() == [repr(row) in known for row in tested.to_pylist()]
    numbers, count = number_keys(tested)
    texts = [repr(row) for row in tested.to_pylist()]
    assert numbers.max() < count
    assert (
        len(set(numbers.tolist())) == len(set(texts)) == len(set(zip(numbers, texts, strict=True)))
    )


def test_numbers_of_many_wide_columns_do_not_overflow() -> None:
    values = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, (6, 5_000))
    keys = pa.table({f"k{i}": column for i, column in enumerate(values)})
    numbers, _ = number_keys(pa.concat_tables([keys, keys]))
    assert (numbers[:5_000] == numbers[5_000:]).all()
    assert len(np.unique(numbers)) == 5_000
    assert KeySet(keys).contains(keys).all()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-(2**63), -(2**63) + 9) | st.integers(2**63 - 9, 2**63 - 1), max_size=9),
    st.lists(st.sampled_from([-(2**63), -(2**63) + 3, -1, 0, 1, 2**63 - 4, 2**63 - 1]), max_size=9),
)
def test_sets_of_the_smallest_and_largest_numbers_are_exact(
    members: list[int], tested: list[int]
) -> None:
    keys, other = (pa.table({"k": pa.array(v, pa.int64())}) for v in (members, tested))
    assert KeySet(keys).contains(other).tolist() == [v in set(members) for v in tested]
    assert KeySet(keys).contains(keys).all()


def test_rows_of_a_snapshot_become_upserts_whose_changes_nobody_knows() -> None:
    table = table_info("id INT NOT NULL, name STRING", primary_key=["id"])
    batches = [
        pa.RecordBatch.from_pydict({"id": ids, "name": names}, schema=table.schema.arrow)
        for ids, names in (([1, 2], ["a", None]), ([3], ["c"]))
    ]
    made = fold.inserted(table, 3, batches)
    like = Folder(table, 3).finish()
    assert (made.upserts.schema, made.deletes) == (like.upserts.schema, like.deletes)
    assert made.changes == 3
    assert made.upserts.select(["id", "name", "__bucket", "__offset"]).to_pydict() == {
        "id": [1, 2, 3],
        "name": ["a", None, "c"],
        "__bucket": [3, 3, 3],
        "__offset": [-1, -1, -1],
    }
    before_1970 = dt.datetime(1969, 12, 31, 23, 59, 59, 999_000, dt.UTC)
    assert made.upserts["__timestamp"].to_pylist() == [before_1970] * 3


def test_an_empty_snapshot_folds_to_nothing() -> None:
    table = table_info("id INT NOT NULL, name STRING", primary_key=["id"])
    made = fold.inserted(table, 0, [])
    assert made == Folder(table, 0).finish()
