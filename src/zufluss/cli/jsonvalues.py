"""Converts JSON values to values of an Arrow type: the inverse of `zufluss scan`.

| Arrow type   | JSON                                                                  |
|--------------|-----------------------------------------------------------------------|
| binary       | base64 text                                                           |
| date         | `2026-01-31`                                                          |
| time         | `08:30:00.125`                                                        |
| timestamp    | `2026-01-31T08:30:00.125`, or a space for the T; with `Z` or an       |
|              | offset only where the column has a time zone                          |
| decimal      | text or number                                                        |
| list, struct | array, object                                                         |
| map          | array of `[key, value]`, or an object                                 |

Temporal values become whole numbers of the column's unit, so that nanoseconds survive; a value
finer than the unit is refused rather than cut. Everything else is left to pyarrow.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

_FRACTION = re.compile(r"(?P<head>[^.]*)\.(?P<digits>[0-9]{1,9})(?P<zone>Z|[+-][0-9:]+)?")
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


Convert = Callable[[Any], Any]


def converter(data_type: pa.DataType) -> Convert:
    """A function that converts JSON values of this type for `pa.array`; null stays null."""
    convert = _converter(data_type)
    return lambda item: None if item is None else convert(item)


def _converter(data_type: pa.DataType) -> Convert:
    if pat.is_list(data_type):
        element = converter(data_type.value_type)
        return lambda item: [element(inner) for inner in item]
    if pat.is_struct(data_type):
        fields = {field.name: converter(field.type) for field in data_type}
        return lambda item: {name: one(item.get(name)) for name, one in fields.items()}
    if pat.is_map(data_type):
        return _map_converter(converter(data_type.key_type), converter(data_type.item_type))
    for matches, convert in _SCALARS:
        if matches(data_type):
            return functools.partial(convert, data_type=data_type)
    return lambda item: item


def _map_converter(convert_key: Convert, convert_value: Convert) -> Convert:
    def convert(item: Any) -> list[tuple[Any, Any]]:
        entries = item.items() if isinstance(item, dict) else item
        return [(convert_key(key), convert_value(value)) for key, value in entries]

    return convert


def _binary(item: Any, data_type: pa.DataType) -> bytes:
    return base64.b64decode(item, validate=True)


def _date(item: Any, data_type: pa.DataType) -> date:
    return date.fromisoformat(item)


def _decimal(item: Any, data_type: pa.DataType) -> Decimal:
    return Decimal(item)


def _float(item: Any, data_type: pa.DataType) -> float:
    if isinstance(item, (bool, str)):
        raise ValueError("allowed: a number")
    return float(item)


def _time(item: Any, data_type: pa.DataType) -> int:
    head, units, zone = _split(item, data_type.unit)
    if zone:
        raise ValueError("a time has no zone")
    moment = datetime.fromisoformat(f"1970-01-01T{head}+00:00")
    return _units(moment, data_type.unit) + units


def _timestamp(item: Any, data_type: pa.DataType) -> int:
    head, units, zone = _split(item, data_type.unit)
    moment = datetime.fromisoformat(head + zone)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    elif data_type.tz is None:
        raise ValueError("the column has no time zone")
    return _units(moment, data_type.unit) + units


def _split(text: str, unit: str) -> tuple[str, int, str]:
    """Split into the text before the fraction of a second, the fraction in units, the zone."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return text, 0, ""
    digits = match["digits"].ljust(9, "0")
    digits_kept, cut = digits[: _DIGITS[unit]], digits[_DIGITS[unit] :]
    if cut.strip("0"):
        raise ValueError(f"finer than the column's unit {unit}")
    return match["head"], int(digits_kept or "0"), match["zone"] or ""


def _units(moment: datetime, unit: str) -> int:
    whole = moment - datetime(1970, 1, 1, tzinfo=UTC)
    seconds = whole.days * 86_400 + whole.seconds
    return int(seconds * 10 ** _DIGITS[unit])


_SCALARS: tuple[tuple[Callable[[Any], bool], Callable[..., Any]], ...] = (
    (pat.is_binary, _binary),
    (pat.is_fixed_size_binary, _binary),
    (pat.is_date32, _date),
    (pat.is_time, _time),
    (pat.is_timestamp, _timestamp),
    (pat.is_decimal, _decimal),
    (pat.is_floating, _float),
)
