"""Filters as a tree of plain values, which scans send and servers prune batches by.

A `Predicate` is either a `Leaf` (a function of one column and some literals) or a `Compound` (AND
or OR of predicates). Columns are named by their id, so a predicate means the same under every
schema of the table. A predicate is only used to skip batches that cannot match; it may be weaker
than the user's expression, never stronger. The client filters exactly by that expression
(`expression.py`). The wire form is in `wire/predicates.py`.

Literals, and the minimum and maximum of column statistics, are compared in one canonical form:

| column type                         | Python value                                           |
|-------------------------------------|--------------------------------------------------------|
| BOOLEAN                             | bool                                                   |
| TINYINT SMALLINT INTEGER BIGINT     | int                                                    |
| FLOAT DOUBLE                        | float; of a FLOAT rounded to single precision; no NaN  |
| CHAR STRING                         | str                                                    |
| BYTES BINARY                        | bytes                                                  |
| DECIMAL                             | decimal.Decimal                                        |
| DATE                                | int, days since 1970-01-01                             |
| TIME                                | int, milliseconds of the day, rounded down             |
| TIMESTAMP TIMESTAMP_LTZ             | int, nanoseconds since 1970-01-01 (UTC); unbounded     |

NULL matches nothing but IS_NULL; a literal is never None.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from typing import SupportsIndex

from zufluss.errors import ErrorCode, ZuflussError
from zufluss.model.types import DataType, DecimalType, Root, TemporalType

Value = bool | int | float | str | bytes | Decimal
"""A literal in canonical form."""

DEPTH_MAX = 40
"""Predicates nested deeper than this are refused; protobuf's own limit is not much higher."""
TESTS_MAX = 1_000
"""A predicate with more leaves and compounds than this is refused."""
LITERALS_MAX = 10_000
"""A predicate with more literals than this is refused."""


class InvalidPredicateError(ZuflussError, ValueError, code=ErrorCode.INVALID_SCAN_REQUEST):
    """A filter is malformed or does not fit the columns of the table."""


class LeafFunction(IntEnum):
    """The test of a leaf, numbered as on the wire."""

    EQUAL = 0
    NOT_EQUAL = 1
    LESS_THAN = 2
    LESS_OR_EQUAL = 3
    GREATER_THAN = 4
    GREATER_OR_EQUAL = 5
    IS_NULL = 6
    IS_NOT_NULL = 7
    STARTS_WITH = 8
    CONTAINS = 9
    END_WITH = 10
    IN = 11
    NOT_IN = 12


class CompoundFunction(IntEnum):
    """How a compound joins its children, numbered as on the wire."""

    AND = 0
    OR = 1


NULL_TESTS = frozenset({LeafFunction.IS_NULL, LeafFunction.IS_NOT_NULL})
"""Functions without literals."""
TEXT_TESTS = frozenset({LeafFunction.STARTS_WITH, LeafFunction.CONTAINS, LeafFunction.END_WITH})
"""Functions of CHAR and STRING columns only."""
LIST_TESTS = frozenset({LeafFunction.IN, LeafFunction.NOT_IN})
"""Functions with one literal or more."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A test of one column."""

    function: LeafFunction
    """What is tested."""
    field_id: int
    """The id of the top-level column."""
    literals: tuple[Value, ...] = ()
    """Values in canonical form: none for null tests, any number for IN and NOT_IN, else one."""

    def __post_init__(self) -> None:
        count = len(self.literals)
        expected = 0 if self.function in NULL_TESTS else 1
        if count != expected and not (self.function in LIST_TESTS and count > 1):
            raise InvalidPredicateError(
                f"{self.function.name} has {count} literals; it takes "
                + ("at least one" if self.function in LIST_TESTS else str(expected))
            )


@dataclass(frozen=True, slots=True)
class Compound:
    """AND or OR of predicates."""

    function: CompoundFunction
    """How the children are joined."""
    children: tuple[Predicate, ...]
    """At least one predicate."""

    def __post_init__(self) -> None:
        if not self.children:
            raise InvalidPredicateError(f"{self.function.name} has no children; give at least one")


Predicate = Leaf | Compound


def leaves(predicate: Predicate) -> Iterator[Leaf]:
    """Every leaf of a predicate."""
    if isinstance(predicate, Leaf):
        yield predicate
    else:
        for child in predicate.children:
            yield from leaves(child)


def pruning_leaf(
    function: LeafFunction, field_id: int, data_type: DataType, literals: tuple[Value, ...]
) -> Leaf:
    """A leaf that is safe to prune by.

    Statistics and literals of a TIME finer than a millisecond are rounded down: `<` becomes `<=`,
    `>` becomes `>=`, and "is not equal" becomes IS_NOT_NULL.
    """
    if data_type.root is Root.TIME and isinstance(data_type, TemporalType):
        if data_type.precision <= 3:
            return Leaf(function, field_id, literals)
        if function in (LeafFunction.NOT_EQUAL, LeafFunction.NOT_IN):
            return Leaf(LeafFunction.IS_NOT_NULL, field_id)
        function = _LOOSE.get(function, function)
    return Leaf(function, field_id, literals)


_LOOSE = {
    LeafFunction.LESS_THAN: LeafFunction.LESS_OR_EQUAL,
    LeafFunction.GREATER_THAN: LeafFunction.GREATER_OR_EQUAL,
}


def check_function(function: LeafFunction, name: str, data_type: DataType) -> None:
    """Raise unless the function can test columns of the type."""
    if function in TEXT_TESTS and data_type.root not in (Root.CHAR, Root.STRING):
        raise InvalidPredicateError(
            f"{function.name} needs a STRING or CHAR column; {name!r} is {data_type}"
        )
    if data_type.root not in _CANONICAL and function not in NULL_TESTS:
        raise InvalidPredicateError(
            f"column {name!r} is {data_type}; only is_null and is_not_null can test it"
        )


def canonical(value: object, data_type: DataType, name: str) -> Value:
    """A Python literal in the canonical form of a column type.

    Raises `InvalidPredicateError` if it does not fit: a text for a number, a number out of range,
    a naive datetime for TIMESTAMP_LTZ.
    """
    if value is None:
        raise InvalidPredicateError(
            f"column {name!r} is compared with None, which matches nothing; use is_null()"
        )
    try:
        return _CANONICAL[data_type.root](value, data_type)
    except (TypeError, ValueError, ArithmeticError, struct.error) as e:
        raise InvalidPredicateError(
            f"{value!r:.80} cannot be compared with column {name!r} of type {data_type}: {e}"
        ) from None


def _typed(value: object, kind: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"give {expected}, not {type(value).__name__}")


def _boolean(value: object, _type: DataType) -> bool:
    _typed(value, bool, "True or False")
    return bool(value)


def _integer(bits: int) -> Callable[[object, DataType], int]:
    def convert(value: object, _type: DataType) -> int:
        _typed(value, SupportsIndex, "an int")
        number = operator.index(value)  # type: ignore[arg-type]
        if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
            raise ValueError(f"it is outside the {bits} bits of the type")
        return number

    return convert


def _floating(value: object, data_type: DataType) -> float:
    _typed(value, (float, int), "a float")
    number = float(value)  # type: ignore[arg-type]
    if math.isnan(number):
        raise ValueError("NaN compares with nothing")
    if data_type.root is Root.FLOAT:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    return number


def _text(value: object, _type: DataType) -> str:
    _typed(value, str, "a str")
    return str(value)


def _binary(value: object, _type: DataType) -> bytes:
    _typed(value, (bytes, bytearray, memoryview), "bytes")
    return bytes(value)  # type: ignore[call-overload,no-any-return]


def _decimal(value: object, data_type: DataType) -> Decimal:
    _typed(value, (Decimal, int, float), "a Decimal")
    assert isinstance(data_type, DecimalType)
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)  # type: ignore[arg-type]
    if not number.is_finite():
        raise ValueError("it is not a finite number")
    unscaled_decimal(number, data_type)
    return number


def unscaled_decimal(number: Decimal, data_type: DecimalType) -> int:
    """The digits of a number at the scale of the type; raises ValueError if they do not fit."""
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    shift = exponent + data_type.scale
    whole = int("".join(map(str, digits)) or "0")
    if shift < 0 and whole % 10 ** min(-shift, len(digits)):
        raise ValueError(f"it has more than {data_type.scale} digits after the point")
    if whole and len(digits) + shift > data_type.precision:
        raise ValueError(f"it has more than {data_type.precision} digits")
    unscaled = 0 if not whole else whole * 10**shift if shift >= 0 else whole // 10**-shift
    return -unscaled if sign else unscaled


def _date(value: object, _type: DataType) -> int:
    if isinstance(value, dt.datetime):
        raise TypeError("give a datetime.date, not a datetime")
    _typed(value, dt.date, "a datetime.date")
    return value.toordinal() - _EPOCH.toordinal()  # type: ignore[attr-defined,no-any-return]


def _time(value: object, _type: DataType) -> int:
    return time_micros(value) // 1000


def time_micros(value: object) -> int:
    """The microseconds of the day of a `datetime.time`."""
    _typed(value, dt.time, "a datetime.time")
    assert isinstance(value, dt.time)
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond


def _timestamp(value: object, data_type: DataType) -> int:
    _typed(value, dt.datetime, "a datetime.datetime")
    assert isinstance(value, dt.datetime)
    zoned = data_type.root is Root.TIMESTAMP_LTZ
    if zoned != (value.tzinfo is not None):
        raise TypeError("give one with a time zone" if zoned else "give one without a time zone")
    if zoned:
        value = value.astimezone(dt.UTC)
    span = value.replace(tzinfo=None) - _EPOCH
    micros = (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds
    return micros * 1000 + getattr(value, "nanosecond", 0)


_EPOCH = dt.datetime(1970, 1, 1)
_CANONICAL: dict[Root, Callable[[object, DataType], Value]] = {
    Root.BOOLEAN: _boolean,
    Root.TINYINT: _integer(8),
    Root.SMALLINT: _integer(16),
    Root.INTEGER: _integer(32),
    Root.BIGINT: _integer(64),
    Root.FLOAT: _floating,
    Root.DOUBLE: _floating,
    Root.CHAR: _text,
    Root.STRING: _text,
    Root.BYTES: _binary,
    Root.BINARY: _binary,
    Root.DECIMAL: _decimal,
    Root.DATE: _date,
    Root.TIME: _time,
    Root.TIMESTAMP: _timestamp,
    Root.TIMESTAMP_LTZ: _timestamp,
}
