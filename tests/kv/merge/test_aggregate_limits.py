"""Limits of aggregating puts: invalid sketches, and values that grow with every record."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasketches
import pyroaring
import pytest

from tests.kv.merge.aggregating import Bucket, arrow, column, rows_of, schema_of
from zufluss.errors import AggregationError
from zufluss.record.aggregate.hll_bytes import check_hll
from zufluss.record.aggregate.local import pre_aggregate
from zufluss.record.aggregate.opcodes import UPDATE_AFTER as AFTER
from zufluss.record.aggregate.opcodes import UPDATE_BEFORE as BEFORE
from zufluss.record.aggregate.python_fold import RESULT_BYTES_MAX

KINDS = [
    datasketches.tgt_hll_type.HLL_4,
    datasketches.tgt_hll_type.HLL_6,
    datasketches.tgt_hll_type.HLL_8,
]
HLL = schema_of(column("s", "BYTES", "hll"))


def sketch(lg_k: int, kind: Any, count: int) -> Any:
    made = datasketches.hll_sketch(lg_k, kind)
    for i in range(count):
        made.update(7919 * i)
    return made


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    made = Bucket(tmp_path, [HLL])
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_hll_sketch_that_the_library_makes_is_sound(kind: Any) -> None:
    for lg_k in (4, 7, 8, 12, 21):
        for count in (0, 1, 7, 8, 24, 25, 96, 300, 20_000):
            made = sketch(lg_k, kind, count)
            union = datasketches.hll_union(lg_k)
            union.update(made)
            for each in (made, union.get_result(kind)):
                check_hll(each.serialize_compact())
                check_hll(each.serialize_updatable())


def registers(kind: Any, at: int, value: int) -> bytes:
    """A sketch of 4096 registers with one byte exchanged."""
    data = bytearray(sketch(12, kind, 20_000).serialize_compact())
    data[at] = value
    return bytes(data)


def coupons(count: int) -> bytes:
    """A set that says it has so many coupons."""
    data = bytearray(sketch(12, KINDS[0], 20).serialize_compact())
    struct.pack_into("<i", data, 8, count)
    return bytes(data)


DAMAGED = {
    "too short": b"\x02\x01\x07",
    "cut": sketch(12, KINDS[2], 20_000).serialize_compact()[:-1],
    "no such register": registers(KINDS[2], 40, 200),
    "a full register without exception": registers(KINDS[0], 40, 0xFF),
    "another least register": registers(KINDS[0], 6, 60),
    "too many registers": registers(KINDS[0], 3, 30),
    "more coupons than there are": coupons(21),
    "more coupons than there is room for": coupons(1 << 30),
    "fewer than none": coupons(-1),
    "another mode": registers(KINDS[0], 7, 0),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_hll_sketch_is_refused_before_the_library_reads_it(
    bucket: Bucket, data: bytes
) -> None:
    """The library does not check its input; the process would die."""
    with pytest.raises(AggregationError, match=r"'s' .*k = 1.* no HyperLogLog sketch"):
        bucket.put((1, data))
    assert bucket.rows((1,)) == [None]


def test_damaged_hll_sketches_are_refused_or_merged(bucket: Bucket) -> None:
    rng = random.Random(9)
    good = [sketch(k, kind, n).serialize_compact() for k in (4, 9) for kind in KINDS
            for n in (3, 40, 3000)]  # fmt: skip
    bucket.put((1, good[0]))
    for _ in range(300):
        data = bytearray(rng.choice(good))
        data[rng.randrange(min(len(data), rng.choice([8, 48, len(data)])))] = rng.randrange(256)
        try:
            bucket.put((1, bytes(data)))
        except AggregationError:
            continue
    (row,) = bucket.rows((1,))
    assert row is not None
    check_hll(row[1])


GROWING = [
    ("listagg", "STRING", "x" * 900_000, "y"),
    ("array_agg", "ARRAY<INT>", [1] * 90_000, [2]),
]


@pytest.mark.parametrize(("function", "data_type", "big", "small"), GROWING)
def test_a_put_whose_changes_would_fill_the_memory_is_refused(
    tmp_path: Path, function: str, data_type: str, big: Any, small: Any
) -> None:
    """A few kilobytes came to gigabytes: the changelog has the value for each record, twice."""
    bucket = Bucket(tmp_path, [schema_of(column("v", data_type, function))])
    bucket.put((1, big))
    with pytest.raises(AggregationError, match=r"'v'.*pre_aggregate"):
        bucket.put(*[(1, small)] * 5_000)
    assert bucket.rows((1,)) == [(1, big)]
    bucket.close()


def test_a_partial_put_that_repeats_a_long_text_too_often_is_refused(tmp_path: Path) -> None:
    schema = schema_of(column("t", "STRING", "last_value_ignore_nulls"), column("n", "INT", "sum"))
    bucket = Bucket(tmp_path, [schema])
    text = "x" * (1 << 20)
    bucket.put((1, text, 0))
    records = RESULT_BYTES_MAX // len(text) + 1
    with pytest.raises(AggregationError, match=r"'t'.*batch-size"):
        bucket.put(*[(1, None, 1)] * records, targets=["k", "n"])
    assert bucket.rows((1,)) == [(1, text, 0)]
    bucket.close()


def test_aggregating_before_sending_holds_no_values_in_between() -> None:
    schema = schema_of(column("v", "STRING", "listagg"), column("a", "ARRAY<INT>", "array_agg"))
    batch = arrow(schema, [(1, "0123456789", [i]) for i in range(4_000)])
    tracemalloc.start()
    ((_, text, elements),) = rows_of(pre_aggregate(batch, schema, ["k"]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert text == ",".join(["0123456789"] * 4_000)
    assert elements == list(range(4_000))
    assert peak < 20 << 20, "all states together are 150 MB"


def test_records_that_change_nothing_do_not_count_towards_the_limit(tmp_path: Path) -> None:
    """For example, known users visit the page with the largest sketch again and again."""
    schema = schema_of(column("u", "BYTES", "rbm64"), column("a", "ARRAY<INT>", "collect"))
    bucket = Bucket(tmp_path, [schema])
    users = pyroaring.BitMap64(random.Random(1).sample(range(1 << 40), 15_000)).serialize()
    one = pyroaring.BitMap64(pyroaring.BitMap64.deserialize(users)[:1]).serialize()
    elements = list(range(10_000))
    bucket.put((1, users, elements))
    records = RESULT_BYTES_MAX // len(users) + 100
    row = (1, users, elements)
    assert bucket.put(*[(1, one, [7])] * records) == [(BEFORE, row), (AFTER, row)]
    assert bucket.rows((1,)) == [(1, users, elements)]
    bucket.close()
