"""Tables and rows of the lake conformance suite.

`LOG` and `KEYED` are the plain tables, `ALL_TYPES` has every column type once (with precisions that
differ). `FULL_ROW` has a telling value in each of its columns, `EDGES` the values that formats get
wrong, `NULLS` none at all. Digits below microseconds are zero: a format may cut them.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa

from zufluss.model.ddl import parse_type
from zufluss.model.table import TableInfo
from zufluss.testing.lake_rounds import LakeRounds, Row, Written

LOG = "id INT NOT NULL, name STRING"
KEYED = "id BIGINT, name STRING, n INT, PRIMARY KEY (id)"

ALL_TYPES = """
    id INT NOT NULL, b BOOLEAN, i8 TINYINT, i16 SMALLINT, i32 INT, i64 BIGINT, f32 FLOAT,
    f64 DOUBLE, c CHAR(3), s STRING, raw BYTES, fixed BINARY(4), small DECIMAL(5, 2),
    large DECIMAL(38, 10), d DATE, t0 TIME(0), t3 TIME(3), t6 TIME(6), ts0 TIMESTAMP(0),
    ts3 TIMESTAMP(3), ts6 TIMESTAMP(6), ts9 TIMESTAMP(9), z0 TIMESTAMP_LTZ(0),
    z6 TIMESTAMP_LTZ(6), z9 TIMESTAMP_LTZ(9), numbers ARRAY<INT>, names ARRAY<STRING>,
    counts MAP<STRING, BIGINT>, pair ROW<a INT, b STRING>,
    deep ARRAY<ROW<k STRING, v MAP<STRING, ARRAY<DECIMAL(10, 3)>>>>
"""
_WHEN = dt.datetime(2026, 2, 28, 23, 59, 59)
_MICROS = _WHEN.replace(microsecond=123456)
_ZONED = _MICROS.replace(tzinfo=dt.UTC)
FULL_ROW: Row = {
    "id": 1, "b": True, "i8": -128, "i16": 32767, "i32": -(2**31), "i64": 2**63 - 1,
    "f32": 1.5, "f64": -0.1, "c": "abc", "s": "Grüße, 世界 \N{ROCKET}",
    "raw": b"\x00\xff", "fixed": b"\x00abc",
    "small": Decimal("-999.99"), "large": Decimal("1234567890123456789012345678.0123456789"),
    "d": dt.date(1969, 12, 31), "t0": dt.time(23, 59, 59), "t3": dt.time(0, 0, 0, 1000),
    "t6": dt.time(12, 0, 0, 123456), "ts0": _WHEN, "ts3": _WHEN.replace(microsecond=123000),
    "ts6": _MICROS, "ts9": _MICROS, "z0": _WHEN.replace(tzinfo=dt.UTC), "z6": _ZONED, "z9": _ZONED,
    "numbers": [1, None, 3], "names": ["a", ""], "counts": [("x", 1), ("y", None)],
    "pair": {"a": 1, "b": None},
    "deep": [{"k": "q", "v": [("w", [Decimal("1.250"), None])]}, {"k": None, "v": None}],
}  # fmt: skip
EDGES: Row = {
    "id": 2, "f32": float("nan"), "f64": float("-inf"), "s": "", "raw": b"", "numbers": [],
    "counts": [], "ts6": dt.datetime(1, 1, 1), "d": dt.date(9999, 12, 31),
    "large": Decimal("-0.0000000001"), "deep": [],
}  # fmt: skip
NULLS: Row = {"id": 3}


def named_rows(start: int, count: int, lake: LakeRounds | None = None) -> pa.Table:
    """Rows of the log table; with system columns where a lake is given."""
    ids = pa.array(range(start, start + count), pa.int32())
    rows = pa.table({"id": ids, "name": pa.array([f"n{i}" for i in ids.to_pylist()], pa.string())})
    return rows if lake is None else lake.with_system_columns(rows, 0, 0)


def keyed_rows(ids: Iterable[int], label: str) -> pa.Table:
    """Rows of the primary-key table."""
    ids = list(ids)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": pa.array([f"{label}-{i}" for i in ids], pa.string()),
            "n": pa.array([i * 7 for i in ids], pa.int32()),
        }
    )


def key_rows(ids: Iterable[int]) -> pa.Table:
    """Keys of the primary-key table."""
    return pa.table({"id": pa.array(list(ids), pa.int64())})


def random_changes(lake: LakeRounds, rng: random.Random, number: int) -> Written:
    """A round of upserts and deletes among forty keys, no key twice."""
    keys = rng.sample(range(40), 24)
    cut = rng.randrange(8, 20)
    return lake.change(keyed_rows(keys[:cut], f"r{number}"), key_rows(keys[cut:]))


def partition_rows(lake: LakeRounds, region: str, ids: range, value: str) -> Written:
    """Files with rows of one partition of a table `region, id, v`."""
    rows = pa.table(
        {
            "region": pa.array([region] * len(ids), pa.string()),
            "id": pa.array(ids, pa.int64()),
            "v": pa.array([value] * len(ids), pa.string()),
        }
    )
    if lake.table.has_primary_key:
        return lake.change(rows, partition=region)
    return lake.write(rows, partition=region)


def typed_rows(table: TableInfo, rows: list[Row]) -> pa.Table:
    """Rows in the types of a table; columns that a row lacks are NULL."""
    full = [{name: row.get(name) for name in table.schema.names} for row in rows]
    return pa.Table.from_pylist(full, schema=table.schema.arrow)


def with_column(table: TableInfo, name: str, data_type: str) -> TableInfo:
    """The table after ALTER TABLE … ADD COLUMN."""
    schema = table.schema.add_column(name, parse_type(data_type))
    descriptor = replace(table.descriptor, schema=schema)
    return replace(table, descriptor=descriptor, schema_id=table.schema_id + 1)
