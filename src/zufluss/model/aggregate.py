"""The functions of the aggregation engine, declared once: column types, parameters and traits.

| function | column | parameters | NULL input | retract | undone one by one | replay |
|---|---|---|---|---|---|---|
| sum | numbers | overflow = error, wrap | ignored | subtracts | yes (not floats) | |
| product | numbers | overflow = error, wrap | ignored | divides | | |
| count | INT, BIGINT | overflow = error, wrap | not counted | subtracts 1 | yes | |
| max, min | numbers, texts, times | | ignored | | | same |
| max_by, min_by | any | by = a column of max, min | see below | | | same |
| last_value | any | | taken | | | same |
| last_value_ignore_nulls | any | | ignored | | | same |
| first_value, first_value_ignore_nulls | any | | ignored | | | same |
| listagg, string_agg | texts | delimiter, limit, overflow = error, truncate | ignored | | | |
| array_agg | ARRAY | limit, overflow = error, truncate | ignored; elements kept | | | |
| collect | ARRAY | limit, overflow = error, truncate | ignored; one element kept | | | same |
| bool_and, bool_or | BOOLEAN | | ignored | | | same |
| rbm32, rbm64 | BYTES | | ignored | | | same |
| hll, theta | BYTES | | ignored | | | same |

Every function also takes `ignore_retract = true`: a retract then leaves the column as it is and is
not refused. The value of a column is the state of its function, so states merge by the function
itself; only `count` distinguishes an input (counts as 1) from a state (is added). `max_by` and
`min_by` take the value of the row whose `by` is greatest or least, of equal rows the later one; a
row whose `by` is NULL changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

from zufluss.errors import InvalidTableError
from zufluss.model.types import Root

NUMBERS: Final = frozenset(
    {Root.TINYINT, Root.SMALLINT, Root.INTEGER, Root.BIGINT, Root.FLOAT, Root.DOUBLE, Root.DECIMAL}
)
TEXTS: Final = frozenset({Root.CHAR, Root.STRING})
TIMES: Final = frozenset({Root.DATE, Root.TIME, Root.TIMESTAMP, Root.TIMESTAMP_LTZ})
FLOATS: Final = frozenset({Root.FLOAT, Root.DOUBLE})
ANY: Final = frozenset(Root)

IGNORE_RETRACT: Final = "ignore_retract"
OVERFLOW: Final = "overflow"
LIMIT: Final = "limit"
DELIMITER: Final = "delimiter"
BY: Final = "by"
FIRST_VALUE_IGNORE_NULLS: Final = "first_value_ignore_nulls"

_LOWER = frozenset({OVERFLOW, IGNORE_RETRACT})
"""Parameters whose values are words in any case."""
_PLAIN = re.compile(r"[^\W\d]\w*|\d+")


def canonical_function(name: str) -> str:
    """The name of a function as it is stored: `LAST-VALUE` is `last_value`."""
    return name.strip().lower().replace("-", "_")


@dataclass(frozen=True, slots=True)
class AggFunction:
    """How an aggregation table merges a column."""

    type: str
    """The function's name, lower case with underscores."""
    parameters: tuple[tuple[str, str], ...] = ()
    """Parameters, such as the delimiter of `listagg`."""

    @classmethod
    def named(cls, name: str, parameters: Mapping[str, object] | None = None) -> Self:
        """A function by name and parameters in any spelling (`LAST-VALUE`); may be unknown."""
        values: dict[str, str] = {}
        for key, value in (parameters or {}).items():
            canonical = canonical_function(key)
            text = str(value).lower() if canonical in _LOWER else str(value)
            if values.setdefault(canonical, text) != text:
                raise InvalidTableError(
                    f"parameter {canonical!r:.40} of {name!r:.80} is given twice; keep one"
                )
        return cls(canonical_function(name), tuple(values.items()))

    def parameter(self, key: str) -> str | None:
        """The value of a parameter, None if it is not set."""
        return next((value for name, value in self.parameters if name == key), None)

    def __str__(self) -> str:
        """The text in a column list: `LISTAGG(delimiter = ';', limit = 100)`."""
        parameters = ", ".join(f"{key} = {_literal(value)}" for key, value in self.parameters)
        return self.type.upper() + (f"({parameters})" if parameters else "")

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the function."""
        out: dict[str, Any] = {"type": self.type}
        if self.parameters:
            out["parameters"] = dict(self.parameters)
        return out


@dataclass(frozen=True, slots=True)
class FunctionTraits:
    """The column types, parameters and properties of a function."""

    roots: frozenset[Root]
    """Types of columns it can aggregate."""
    parameters: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    """Its parameters, with their allowed values where these can be listed."""
    idempotent: bool = False
    """Replaying the same rows in order after a crash gives the same value."""
    retracts: bool = False
    """An input can be taken back."""
    invertible: bool = False
    """Inputs of one writer can be removed after others have added theirs; not for floats."""


_OVERFLOW = MappingProxyType({OVERFLOW: ("error", "wrap")})
_LIMITED = MappingProxyType({LIMIT: None, OVERFLOW: ("error", "truncate")})
_LISTED = MappingProxyType({DELIMITER: None, **_LIMITED})
_BY = MappingProxyType({BY: None})
_SAME = FunctionTraits(ANY, idempotent=True)
_BYTES = FunctionTraits(frozenset({Root.BYTES}), idempotent=True)
_BOOLEAN = FunctionTraits(frozenset({Root.BOOLEAN}), idempotent=True)
_EXTREME = FunctionTraits(NUMBERS | TEXTS | TIMES, idempotent=True)
_INTEGERS = frozenset({Root.INTEGER, Root.BIGINT})

FUNCTIONS: Final[Mapping[str, FunctionTraits]] = MappingProxyType(
    {
        "sum": FunctionTraits(NUMBERS, _OVERFLOW, retracts=True, invertible=True),
        "product": FunctionTraits(NUMBERS, _OVERFLOW, retracts=True),
        "count": FunctionTraits(_INTEGERS, _OVERFLOW, retracts=True, invertible=True),
        "max": _EXTREME,
        "min": _EXTREME,
        "max_by": FunctionTraits(ANY, _BY, idempotent=True),
        "min_by": FunctionTraits(ANY, _BY, idempotent=True),
        "last_value": _SAME,
        "last_value_ignore_nulls": _SAME,
        "first_value": _SAME,
        "first_value_ignore_nulls": _SAME,
        "listagg": FunctionTraits(TEXTS, _LISTED),
        "string_agg": FunctionTraits(TEXTS, _LISTED),
        "array_agg": FunctionTraits(frozenset({Root.ARRAY}), _LIMITED),
        "collect": FunctionTraits(frozenset({Root.ARRAY}), _LIMITED, idempotent=True),
        "bool_and": _BOOLEAN,
        "bool_or": _BOOLEAN,
        "rbm32": _BYTES,
        "rbm64": _BYTES,
        "hll": _BYTES,
        "theta": _BYTES,
    }
)
"""Every function by its name."""


def _literal(value: str) -> str:
    """A word or number as it is, other text in quotes."""
    return value if _PLAIN.fullmatch(value) else "'" + value.replace("'", "''") + "'"
