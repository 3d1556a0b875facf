"""JSON values as values of an Arrow type: the inverse of what `zufluss scan` prints.

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
import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

_FRACTION = re.compile(r"(?P<head>[^.]*)\.(?P<digits>[0-9]{1,9})(?P<zone>Z|[+-][0-9:]+)?")
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


def value(item: Any, data_type: pa.DataType, name: str) -> Any:
    """The value for `pa.array` of a JSON value; `ValueError` names the column."""
    try:
        return _convert(item, data_type)
    except (ValueError, TypeError, AttributeError, ArithmeticError) as problem:
        raise ValueError(f"column {name}: {item!r:.80} is no {data_type}: {problem}") from None


def _convert(item: Any, data_type: pa.DataType) -> Any:
    if item is None:
        return None
    if pat.is_list(data_type):
        return [_convert(element, data_type.value_type) for element in item]
    if pat.is_struct(data_type):
        return {field.name: _convert(item.get(field.name), field.type) for field in data_type}
    if pat.is_map(data_type):
        entries = item.items() if isinstance(item, dict) else item
        return [
            (_convert(key, data_type.key_type), _convert(element, data_type.item_type))
            for key, element in entries
        ]
    for matches, convert in _SCALARS:
        if matches(data_type):
            return convert(item, data_type)
    return item


def _binary(item: Any, _: pa.DataType) -> bytes:
    return base64.b64decode(item, validate=True)


def _date(item: Any, _: pa.DataType) -> date:
    return date.fromisoformat(item)


def _decimal(item: Any, _: pa.DataType) -> Decimal:
    return Decimal(item)


def _float(item: Any, _: pa.DataType) -> float:
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
    """The text without its fraction of a second, the fraction in units, and the zone after it."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return text, 0, ""
    digits = match["digits"].ljust(9, "0")
    kept, cut = digits[: _DIGITS[unit]], digits[_DIGITS[unit] :]
    if cut.strip("0"):
        raise ValueError(f"finer than the column's unit {unit}")
    return match["head"], int(kept or "0"), match["zone"] or ""


def _units(moment: datetime, unit: str) -> int:
    whole = moment - datetime(1970, 1, 1, tzinfo=UTC)
    seconds = whole.days * 86_400 + whole.seconds
    return int(seconds * 10 ** _DIGITS[unit])


_SCALARS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Any], Any]], ...] = (
    (pat.is_binary, _binary),
    (pat.is_fixed_size_binary, _binary),
    (pat.is_date32, _date),
    (pat.is_time, _time),
    (pat.is_timestamp, _timestamp),
    (pat.is_decimal, _decimal),
    (pat.is_floating, _float),
)
