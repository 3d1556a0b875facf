"""The expected result of every aggregation function, in plain Python without any code of zufluss.

A function gets the whole list of a key's inputs, oldest first, and returns the value of the column
after the last input. The engine instead adds one input after the other, so the two share nothing.

| here | |
|---|---|
| `TAKES` | the types of columns a function is for |
| `SAMPLES` | values of every type, the awkward ones included |
| `value_of` | what the inputs of a column give, None if they do not fit its type |
| `same` | a form in which equal values, and only those, are equal: NaN, −0.0, sketches |
"""

from __future__ import annotations

import datetime as dt
import functools
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import datasketches
import pandas as pd
from pyroaring import BitMap, BitMap64

# -- types --------------------------------------------------------------------------------------

INTEGERS = {"TINYINT": 8, "SMALLINT": 16, "INT": 32, "BIGINT": 64}
"""Integer types with their bits."""
FLOATS = ("FLOAT", "DOUBLE")
DECIMALS = ("DECIMAL(5, 2)", "DECIMAL(18, 4)", "DECIMAL(38, 10)")
TEXTS = ("CHAR(3)", "STRING")
TIMES = (
    "DATE",
    "TIME(0)",
    "TIME(3)",
    "TIMESTAMP(0)",
    "TIMESTAMP(3)",
    "TIMESTAMP(6)",
    "TIMESTAMP(9)",
    "TIMESTAMP_LTZ(3)",
    "TIMESTAMP_LTZ(6)",
)
ARRAYS = ("ARRAY<INT>", "ARRAY<STRING>", "ARRAY<ROW<a INT, b ARRAY<STRING>>>")
OTHERS = ("BOOLEAN", "BYTES", "BINARY(3)", "MAP<STRING NOT NULL, INT>", "ROW<x INT, y STRING>")
NUMBERS = (*INTEGERS, *FLOATS, *DECIMALS)
ORDERED = (*NUMBERS, *TEXTS, *TIMES)
ANY = (*ORDERED, *ARRAYS, *OTHERS)

TAKES: Mapping[str, Sequence[str]] = {
    "sum": NUMBERS,
    "product": NUMBERS,
    "count": ("INT", "BIGINT"),
    "max": ORDERED,
    "min": ORDERED,
    "max_by": ANY,
    "min_by": ANY,
    "last_value": ANY,
    "last_value_ignore_nulls": ANY,
    "first_value": ANY,
    "first_value_ignore_nulls": ANY,
    "listagg": TEXTS,
    "string_agg": TEXTS,
    "array_agg": ARRAYS,
    "collect": ARRAYS,
    "bool_and": ("BOOLEAN",),
    "bool_or": ("BOOLEAN",),
    "rbm32": ("BYTES",),
    "rbm64": ("BYTES",),
    "hll": ("BYTES",),
    "theta": ("BYTES",),
}
"""The types of columns of each function."""

# -- values -------------------------------------------------------------------------------------


def hll(*items: int) -> bytes:
    """A HyperLogLog sketch."""
    sketch = datasketches.hll_sketch(11)
    for item in items:
        sketch.update(item)
    return bytes(sketch.serialize_compact())


def theta(*items: int) -> bytes:
    """A theta sketch."""
    sketch = datasketches.update_theta_sketch()
    for item in items:
        sketch.update(item)
    return bytes(sketch.compact().serialize())


def rbm32(*items: int) -> bytes:
    """A Roaring bitmap of 32-bit numbers."""
    return bytes(BitMap(items).serialize())


def rbm64(*items: int) -> bytes:
    """A Roaring bitmap of 64-bit numbers."""
    return bytes(BitMap64(items).serialize())


def _moments(*fractions: int) -> list[dt.datetime]:
    days = [dt.datetime(1969, 12, 31, 23, 59, 59), dt.datetime(2024, 2, 29), dt.datetime(1, 1, 1)]
    return [day.replace(microsecond=fraction) for day in days for fraction in fractions]


def _zoned(*fractions: int) -> list[dt.datetime]:
    return [moment.replace(tzinfo=dt.UTC) for moment in _moments(*fractions)]


def _integers(bits: int) -> list[int]:
    half = 1 << (bits - 1)
    return [0, 1, -1, 2, 3, -5, 10, half - 1, -half, half // 2]


_NUMBERS = [0.0, -0.0, 1.5, -2.25, 0.1, 3e38, -1e-40, math.inf, -math.inf, math.nan]
_TEXTS = ["", "a", "ab", "é€", "😀", "z", "\uffee", "a,b"]
_SMALL = [Decimal(text) for text in ("0.00", "1.00", "-1.00", "0.05", "-2.50", "999.99", "-999.99")]
_NANOS = [pd.Timestamp(n, unit="ns") for n in (0, 1, -1, 10**18 + 1, 10**18 + 2, -(10**17))]

SAMPLES: Mapping[str, Sequence[Any]] = {
    **{name: _integers(bits) for name, bits in INTEGERS.items()},
    "FLOAT": [struct.unpack("<f", struct.pack("<f", n))[0] for n in _NUMBERS],
    "DOUBLE": [*_NUMBERS, 1e308, 5e-324],
    "DECIMAL(5, 2)": _SMALL,
    "DECIMAL(18, 4)": [n.quantize(Decimal("0.0001")) for n in (*_SMALL, Decimal(10**13))],
    "DECIMAL(38, 10)": [Decimal(f"{n}.0000000001") for n in (0, 1, -7, 2**63, -(2**70), 10**27)],
    "CHAR(3)": ["", "a", "ab", "é€z", "abc", "z"],
    "STRING": _TEXTS,
    "DATE": [dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(2024, 2, 29), dt.date(9999, 12, 31)],
    "TIME(0)": [dt.time(0), dt.time(12, 30, 1), dt.time(23, 59, 59)],
    "TIME(3)": [dt.time(0), dt.time(12, 30, 1, 1000), dt.time(23, 59, 59, 999_000)],
    "TIMESTAMP(0)": _moments(0),
    "TIMESTAMP(3)": _moments(0, 1000, 999_000),
    "TIMESTAMP(6)": _moments(0, 1, 1001, 999_999),
    "TIMESTAMP(9)": _NANOS,
    "TIMESTAMP_LTZ(3)": _zoned(0, 1000, 999_000),
    "TIMESTAMP_LTZ(6)": _zoned(0, 1, 1001, 999_999),
    "ARRAY<INT>": [[], [1], [2, 1, 2], [None, None], [3, None, 1], [2**31 - 1, 3]],
    "ARRAY<STRING>": [[], ["a"], ["b", "a", "b"], [None, "é"], ["a", ""], ["é"]],
    "ARRAY<ROW<a INT, b ARRAY<STRING>>>": [
        [],
        [None],
        [{"a": 1, "b": ["x", None]}],
        [{"a": None, "b": None}, {"a": 1, "b": ["x", None]}],
        [{"a": 1, "b": []}],
    ],
    "BOOLEAN": [True, False],
    "BYTES": [b"", b"\x00", b"abc", b"\xff" * 9],
    "BINARY(3)": [b"abc", b"\x00\x00\x00", b"\xff\xfe\xfd"],
    "MAP<STRING NOT NULL, INT>": [[], [("a", 1)], [("b", None), ("a", 2)]],
    "ROW<x INT, y STRING>": [{"x": 1, "y": "a"}, {"x": None, "y": "é"}, {"x": None, "y": None}],
}
"""Values by type."""
SETS: Mapping[str, Sequence[Any]] = {
    "rbm32": [rbm32(), rbm32(1), rbm32(2, 3), rbm32(2**32 - 1, 70_000), rbm32(*range(5000))],
    "rbm64": [rbm64(), rbm64(1), rbm64(2, 1 << 40), rbm64(2**64 - 1), rbm64(*range(5000))],
    "hll": [hll(), hll(1), hll(2, 3), hll(*range(10, 40))],
    "theta": [theta(), theta(1), theta(2, 3), theta(*range(10, 40))],
}
"""BYTES values for the functions that unite sets."""


def samples(function: str, kind: str) -> Sequence[Any]:
    """Input values for a column of this function and type."""
    return SETS.get(function, SAMPLES[kind])


# -- numbers ------------------------------------------------------------------------------------


def _fits(number: Any, kind: str) -> bool:
    """Whether a number fits its type."""
    if kind in INTEGERS:
        half = 1 << (INTEGERS[kind] - 1)
        return bool(-half <= number < half)
    if kind in FLOATS:
        return True
    precision, scale = map(int, re.findall(r"\d+", kind))
    return bool(abs(number) < Decimal(10) ** (precision - scale))


def _as(number: Any, kind: str) -> Any:
    """A computed number, rounded to the digits of its type."""
    if kind == "FLOAT":
        try:
            return struct.unpack("<f", struct.pack("<f", number))[0]
        except OverflowError:
            return math.copysign(math.inf, number)
    if isinstance(number, Decimal):
        return number.quantize(Decimal(1).scaleb(-int(re.findall(r"\d+", kind)[1])))
    return number


def _chain(inputs: Sequence[Any], kind: str, join: Callable[[Any, Any], Any]) -> Any:
    """The result of applying an operation input by input; None if it overflows on the way."""
    with localcontext(prec=100, rounding=ROUND_HALF_UP):
        total = inputs[0]
        for number in inputs[1:]:
            total = _as(join(total, number), kind)
            if not _fits(total, kind):
                return None
    return total


def _times(one: Any, other: Any) -> Any:
    return one * other


def _plus(one: Any, other: Any) -> Any:
    return one + other


def order(value: Any) -> Any:
    """A sort key: NaN above everything, −0.0 below 0.0."""
    if isinstance(value, float):
        return (math.isnan(value), 0.0 if math.isnan(value) else value, math.copysign(1, value))
    return value


# -- functions ----------------------------------------------------------------------------------


def _distinct(elements: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for element in elements:
        if element not in found:
            found.append(element)
    return found


def _united(kind: Any, inputs: Sequence[bytes]) -> bytes:
    sets = [set(kind.deserialize(value)) for value in inputs]
    return bytes(kind(sorted(set().union(*sets))).serialize())


def _of_values(function: str, kind: str, values: Sequence[Any]) -> Any:
    """The result for inputs without NULL; there is at least one."""
    match function:
        case "sum":
            return _chain(values, kind, _plus)
        case "product":
            return _chain(values, kind, _times)
        case "max" | "bool_or":
            return max(values, key=order)
        case "min" | "bool_and":
            return min(values, key=order)
        case "last_value_ignore_nulls":
            return values[-1]
        case "first_value" | "first_value_ignore_nulls":
            return values[0]
        case "listagg" | "string_agg":
            return ",".join(values)
        case "array_agg":
            return [element for value in values for element in value]
        case "collect":
            return _distinct([element for value in values for element in value])
        case "rbm32":
            return _united(BitMap, values)
        case "rbm64":
            return _united(BitMap64, values)
        case "hll" | "theta":
            return functools.reduce(_sketch_union(function), values)
    raise AssertionError(f"{function} has no reference")


def _sketch_union(function: str) -> Callable[[bytes, bytes], bytes]:
    """Unites sketches with their own library, because sketches cannot be taken apart."""

    def unite(one: bytes, other: bytes) -> bytes:
        if function == "hll":
            union = datasketches.hll_union(11)
            read, write = datasketches.hll_sketch.deserialize, "serialize_compact"
        else:
            union = datasketches.theta_union()
            read, write = datasketches.compact_theta_sketch.deserialize, "serialize"
        union.update(read(one))
        union.update(read(other))
        return bytes(getattr(union.get_result(), write)())

    return unite


def _by(function: str, inputs: Sequence[Any], deciding: Sequence[Any]) -> Any:
    ranked = [(order(by), i) for i, by in enumerate(deciding) if by is not None]
    if not ranked:
        return inputs[0]
    best = (max if function == "max_by" else min)(rank for rank, _ in ranked)
    return inputs[max(i for rank, i in ranked if rank == best)]


def value_of(function: str, kind: str, inputs: Sequence[Any], deciding: Sequence[Any] = ()) -> Any:
    """The value of a column after these inputs; `deciding` are those of the `by` column."""
    if function in ("max_by", "min_by"):
        return _by(function, inputs, deciding)
    if function == "last_value":
        return inputs[-1]
    values = [value for value in inputs if value is not None]
    if function == "count":
        return len(values)
    return _of_values(function, kind, values) if values else None


def fitting(function: str, kind: str, inputs: Sequence[Any]) -> list[Any]:
    """The inputs, with NULL instead of those that would overflow the type."""
    taken: list[Any] = []
    for value in inputs:
        enough = function not in ("sum", "product") or value is None
        if not enough and value_of(function, kind, [*taken, value]) is None:
            taken.append(None)
        else:
            taken.append(value)
    return taken


# -- comparing ----------------------------------------------------------------------------------


def same(function: str, value: Any) -> Any:
    """A form that is equal for equal values only."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else struct.pack("<d", value)
    if value is None:
        return None
    if function == "rbm32":
        return frozenset(BitMap.deserialize(value))
    if function == "rbm64":
        return frozenset(BitMap64.deserialize(value))
    if function == "hll":
        return round(datasketches.hll_sketch.deserialize(value).get_estimate(), 3)
    if function == "theta":
        return round(datasketches.compact_theta_sketch.deserialize(value).get_estimate(), 3)
    return value
