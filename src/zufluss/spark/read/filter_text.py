"""Filters as text, for the option `filter`: the part of SQL that servers and lakes understand.

| part | form |
|---|---|
| comparison | `column = value`, also `<> != < <= > >=`; the column stands on the left |
| lists, ranges | `column IN (a, b)`, `column BETWEEN a AND b` |
| nulls | `column IS NULL` |
| texts | `column LIKE 'a%'`, `'%a'`, `'%a%'`; no other pattern |
| combination | `AND`, `OR`, `NOT`, parentheses; a BOOLEAN column by itself |

`NOT` may stand before `IN`, `BETWEEN`, `LIKE` and `NULL` too. Values are numbers, `'texts'` with a
quote doubled, `TRUE`, `FALSE` and `X'0aff'`. Dates and times are texts in ISO form, read as the
column's type; a TIMESTAMP_LTZ without zone is UTC. Columns with difficult names stand in backticks.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from zufluss.client.read.decode import CHANGE_TYPE, COMMIT_TIMESTAMP, LOG_OFFSET
from zufluss.model import types as t
from zufluss.model.expression import ColumnRef, Expression
from zufluss.model.predicate import InvalidPredicateError
from zufluss.model.schema import Schema

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<binary>[xX]'(?:[0-9a-fA-F]{2})*')|(?P<text>'(?:[^']|'')*')"
    r"|(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<quoted>`(?:[^`]|``)+`)|(?P<word>[^\W\d]\w*)|(?P<sign><=|>=|<>|!=|==|[=<>(),]))"
)
_COMPARE: Final[dict[str, Callable[[Any, Any], Expression]]] = {
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "<>": lambda a, b: a != b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
_KEYWORDS: Final = frozenset(
    {"and", "or", "not", "in", "is", "null", "between", "like", "true", "false"}
)
_END: Final = ("end", "")


def parse_filter(text: str, schema: Schema) -> Expression:
    """Parse a filter; `InvalidPredicateError` names the place that is not understood.

    >>> parse_filter("id > 5 AND name LIKE 'a%'", schema)  # doctest: +SKIP
    """
    parser = _FilterParser(text, schema)
    filter = parser.either()
    if parser.here != _END:
        raise parser.strange("AND, OR or the end")
    filter.resolve(schema)
    return filter


class _FilterParser:
    """Parses one text from left to right."""

    def __init__(self, text: str, schema: Schema) -> None:
        self._text = text
        self._schema = schema
        self._tokens = self._split()
        self._at = 0

    def _split(self) -> list[tuple[str, str]]:
        tokens, at = [], 0
        end = len(self._text.rstrip())
        while at < end:
            match = _TOKEN.match(self._text, at)
            if match is None:
                raise InvalidPredicateError(
                    f"filter {self._text!r:.200}: {self._text[at:].strip()!r:.40} is not understood"
                )
            kind = str(match.lastgroup)
            word = match[kind]
            keyword = kind == "word" and word.lower() in _KEYWORDS
            tokens.append(("key", word.lower()) if keyword else (kind, word))
            at = match.end()
        return tokens

    @property
    def here(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else _END

    def strange(self, expected: str) -> InvalidPredicateError:
        shown = "the end" if self.here == _END else repr(self.here[1])
        return InvalidPredicateError(
            f"filter {self._text!r:.200}: expected {expected}, found {shown:.60}"
        )

    def _take(self, *words: str) -> str | None:
        """Take the next word if it is one of these keywords or signs; else None."""
        kind, word = self.here
        if kind not in ("key", "sign") or word not in words:
            return None
        self._at += 1
        return word

    def _need(self, word: str) -> None:
        if not self._take(word):
            raise self.strange(word.upper())

    # -- grammar -------------------------------------------------------------------------------

    def either(self) -> Expression:
        expression = self._both()
        while self._take("or"):
            expression = expression | self._both()
        return expression

    def _both(self) -> Expression:
        expression = self._one()
        while self._take("and"):
            expression = expression & self._one()
        return expression

    def _one(self) -> Expression:
        if self._take("not"):
            return ~self._one()
        if self._take("("):
            expression = self.either()
            self._need(")")
            return expression
        return self._test()

    def _test(self) -> Expression:
        name = self._column()
        column = ColumnRef(name)
        if sign := self._take(*_COMPARE):
            return _COMPARE[sign](column, self._value(name))
        if self._take("is"):
            negated = self._take("not")
            self._need("null")
            return column.is_not_null() if negated else column.is_null()
        negated = self._take("not")
        if self._take("in"):
            expression: Expression = column.isin(self._values(name))
        elif self._take("between"):
            low = self._value(name)
            self._need("and")
            expression = column.between(low, self._value(name))
        elif self._take("like"):
            expression = self._like(column)
        elif negated:
            raise self.strange("IN, BETWEEN or LIKE")
        else:
            return column == True  # noqa: E712 - builds a comparison
        return ~expression if negated else expression

    def _column(self) -> str:
        kind, word = self.here
        if kind not in ("word", "quoted"):
            raise self.strange("a column")
        self._at += 1
        name = word if kind == "word" else word[1:-1].replace("``", "`")
        if name not in self._schema.names:
            if name in (CHANGE_TYPE, LOG_OFFSET, COMMIT_TIMESTAMP):
                raise InvalidPredicateError(
                    f"filter {self._text!r:.200}: {name} is a column of $changelog that cannot be "
                    "pushed down; put this condition on the DataFrame"
                )
            raise InvalidPredicateError(
                f"filter {self._text!r:.200}: the table has no column {name!r}; it has "
                f"{', '.join(self._schema.names)}"
            )
        return name

    def _like(self, column: ColumnRef) -> Expression:
        kind, word = self.here
        if kind != "text":
            raise self.strange("a pattern in quotes")
        self._at += 1
        pattern = word[1:-1].replace("''", "'")
        middle = pattern.strip("%")
        first, last = pattern[:1] == "%", pattern[-1:] == "%"
        if "%" in middle or "_" in middle or "\\" in middle or not middle:
            raise InvalidPredicateError(
                f"filter {self._text!r:.200}: LIKE {word} is none of 'a', 'a%', '%a', '%a%'; put "
                "it on the DataFrame instead"
            )
        if first and last:
            return column.contains(middle)
        if first:
            return column.ends_with(middle)
        return column.starts_with(middle) if last else column == middle

    def _values(self, name: str) -> list[object]:
        self._need("(")
        values = [self._value(name)]
        while self._take(","):
            values.append(self._value(name))
        self._need(")")
        return values

    def _value(self, name: str) -> object:
        kind, word = self.here
        data_type = self._schema.column(name).data_type
        if kind == "key" and word in ("true", "false"):
            value: object = word == "true"
        elif kind == "number":
            value = _number(word, data_type)
        elif kind == "binary":
            value = bytes.fromhex(word[2:-1])
        elif kind == "text":
            value = self._timed(word[1:-1].replace("''", "'"), name, data_type)
        else:
            raise self.strange(f"a value for column {name}")
        self._at += 1
        return value

    def _timed(self, text: str, name: str, data_type: t.DataType) -> object:
        """The value of a text in the type of the column: dates and times are parsed."""
        try:
            if data_type.root is t.Root.DATE:
                return dt.date.fromisoformat(text)
            if data_type.root is t.Root.TIME:
                return dt.time.fromisoformat(text)
            if data_type.root is t.Root.TIMESTAMP:
                return dt.datetime.fromisoformat(text)
            if data_type.root is t.Root.TIMESTAMP_LTZ:
                moment = dt.datetime.fromisoformat(text)
                return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
        except ValueError as problem:
            raise InvalidPredicateError(
                f"filter {self._text!r:.200}: {text!r:.60} is no {data_type} for column {name!r}: "
                f"{problem}"
            ) from None
        return text


def _number(word: str, data_type: t.DataType) -> object:
    if data_type.root in (t.Root.FLOAT, t.Root.DOUBLE):
        return float(word)
    number = Decimal(word)
    whole = number == number.to_integral_value()
    return int(number) if whole and data_type.root is not t.Root.DECIMAL else number
