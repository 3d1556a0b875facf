"""One column of every type a log table can have, with its extremes and its nulls.

`SAMPLES` names each type once; the tests of pyfluss, of our own client, and of the two together
write these values and expect exactly them back. Rows of Python values are narrower than Arrow:
pyfluss carries times in them to the millisecond and timestamps to the microsecond, so those types
have `rows` beside their `values`.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Sample:
    """A type and values that show whether it survives the way."""

    name: str
    """Name of the column, and of the test case."""
    type: pa.DataType
    """Its Arrow type, the one pyfluss gives back."""
    values: tuple[Any, ...]
    """Values with extremes and at least one null, as `pa.array` takes them."""
    rows: tuple[Any, ...] | None = None
    """Values that rows of Python values can carry, where those are not all `values`."""

    def array(self) -> pa.Array:
        """The values as an Arrow column."""
        return pa.array(self.values, self.type)

    def row_array(self) -> pa.Array:
        """Those values that rows can carry, as an Arrow column."""
        return pa.array(self.values if self.rows is None else self.rows, self.type)


def _integers(name: str, arrow: pa.DataType) -> Sample:
    top = 2 ** (arrow.bit_width - 1)
    return Sample(name, arrow, (0, 1, -1, top - 1, -top, None, 7))


def _times() -> list[Sample]:
    day = 24 * 3600
    samples = []
    for unit, per_second, arrow in (
        ("s", 1, pa.time32("s")),
        ("ms", 10**3, pa.time32("ms")),
        ("us", 10**6, pa.time64("us")),
        ("ns", 10**9, pa.time64("ns")),
    ):
        values = (0, None, 1, day * per_second - 1, 12 * 3600 * per_second)
        milli = max(per_second // 1000, 1)
        rows = (0, None, milli, day * per_second - milli, 12 * 3600 * per_second)
        samples.append(Sample(f"time_{unit}", arrow, values, rows))
    return samples


def _timestamps(zone: str | None) -> list[Sample]:
    name = "timestamp" if zone is None else "timestamp_ltz"
    samples = []
    for unit, per_second in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        # 1970, the tick before it, a day in 2033, and (within nanoseconds' reach) 1678 and 2261
        ends = (-9_200_000_000 * per_second, 9_200_000_000 * per_second)
        values = (0, -1, 2_000_000_000 * per_second + 1, None, *ends)
        micro = max(per_second // 10**6, 1)
        rows = (0, 2_000_000_000 * per_second + micro, None, *ends)
        samples.append(Sample(f"{name}_{unit}", pa.timestamp(unit, zone), values, rows))
    return samples


def _nested() -> list[Sample]:
    point = pa.struct([("x", pa.int32()), ("label", pa.string())])
    return [
        Sample("array_int", pa.list_(pa.int32()), ([1, None, 3], [], None, [2**31 - 1])),
        Sample("array_text", pa.list_(pa.string()), (["a", None, ""], None, [], ["ü" * 40])),
        Sample("array_array", pa.list_(pa.list_(pa.int64())), ([[1], None, []], None, [[2, 3]])),
        Sample(
            "map_text_int",
            pa.map_(pa.string(), pa.int64()),
            ([("a", 1), ("b", None)], [], None, [("", -(2**63))]),
        ),
        Sample(
            "row", point, ({"x": 1, "label": "one"}, {"x": None, "label": None}, None, {"x": -1})
        ),
        Sample("array_row", pa.list_(point), ([{"x": 1, "label": "a"}, None], [], None)),
        Sample(
            "map_int_array",
            pa.map_(pa.int32(), pa.list_(pa.float64())),
            ([(1, [0.5, None]), (2, None)], None, []),
        ),
        Sample(
            "deep",
            pa.list_(pa.struct([("m", pa.map_(pa.int32(), pa.list_(pa.string()))), ("p", point)])),
            (
                [{"m": [(1, ["a", None]), (2, [])], "p": {"x": 5, "label": None}}, None],
                None,
                [{"m": None, "p": None}],
                [],
            ),
        ),
    ]


_DIGITS_38 = "9" * 28 + "." + "9" * 10

SAMPLES: tuple[Sample, ...] = (
    Sample("boolean", pa.bool_(), (True, False, None, True)),
    _integers("tinyint", pa.int8()),
    _integers("smallint", pa.int16()),
    _integers("int", pa.int32()),
    _integers("bigint", pa.int64()),
    Sample(
        "float",
        pa.float32(),
        (0.0, -0.0, 1.5, None, 3.4028234663852886e38, 1e-45, float("inf"), float("-inf")),
    ),
    Sample(
        "double",
        pa.float64(),
        (0.0, -0.0, 0.1, None, 1.7976931348623157e308, 5e-324, float("inf"), float("-inf")),
    ),
    Sample("string", pa.string(), ("", "a", "zufluß → 水 🌊", None, "x" * 5000)),
    Sample("bytes", pa.binary(), (b"", b"\x00\xff\x80", None, bytes(range(256)) * 8)),
    Sample("binary_4", pa.binary(4), (b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", None, b"abcd")),
    Sample(
        "decimal_9_2",
        pa.decimal128(9, 2),
        (Decimal("0.00"), Decimal("9999999.99"), Decimal("-9999999.99"), None),
    ),
    Sample(
        "decimal_38_10",
        pa.decimal128(38, 10),
        (Decimal("0E-10"), Decimal(_DIGITS_38), Decimal(f"-{_DIGITS_38}"), None, Decimal("1E-10")),
    ),
    Sample(
        "date",
        pa.date32(),
        (dt.date(1970, 1, 1), dt.date(1969, 12, 31), None, dt.date(1, 1, 1), dt.date(9999, 12, 31)),
    ),
    *_times(),
    *_timestamps(None),
    *_timestamps("UTC"),
    *_nested(),
)

ALL_TYPES = pa.schema([pa.field(s.name, s.type) for s in SAMPLES])
"""A table with one column of every type."""


def all_types_batch(rows: int = 16) -> pa.RecordBatch:
    """A batch of the table with every type, each column running through its values."""
    columns = []
    for sample in SAMPLES:
        values = sample.array()
        columns.append(values.take(pa.array([i % len(values) for i in range(rows)])))
    return pa.RecordBatch.from_arrays(columns, schema=ALL_TYPES)
