"""Which partitions a filter leaves."""

from __future__ import annotations

import datetime as dt

import pytest

from zufluss import Schema, col
from zufluss.client.core.partition_filter import possible_partitions
from zufluss.model.expression import Expression
from zufluss.model.table import TableDescriptor, TableInfo, TablePath


def info(*keys: str) -> TableInfo:
    schema = Schema.of("n INT, day DATE, name STRING, other INT")
    descriptor = TableDescriptor(schema, partition_keys=keys, bucket_count=1)
    return TableInfo(TablePath("fluss", "t"), 1, 1, descriptor, 0, 0)


NEW_YEAR = dt.date(2026, 1, 1)


@pytest.mark.parametrize(
    ("keys", "filter", "names", "expected"),
    [
        ("n", col("n") > 5, {"3", "7", "12"}, {"7", "12"}),
        ("n", (col("n") > 5) | (col("other") == 1), {"3", "7"}, {"3", "7"}),
        ("n,name", (col("n") > 5) & (col("name") == "a"), {"3$a", "7$a", "7$b"}, {"7$a"}),
        ("n", col("n") > 5, {"3", "7", "abc"}, {"7", "abc"}),
        ("day", col("day") == NEW_YEAR, {"2026-01-01", "2026-01-02", "20260101"}, None),
        ("n,day", col("n") > 5, {"3$x", "7$x", "3$2026-01-01"}, {"3$x", "7$x"}),
        ("n", col("n") > 5, {"abc"}, {"abc"}),
    ],
)
def test_partitions_stay_that_may_have_rows_or_whose_name_is_no_value(
    keys: str, filter: Expression, names: set[str], expected: set[str] | None
) -> None:
    found = possible_partitions(info(*keys.split(",")), filter, names)
    assert found == (expected or {"2026-01-01", "20260101"})
