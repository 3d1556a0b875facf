"""Filters as text, in a small part of SQL: `id > 5 AND (name LIKE 'x%' OR paid IS NULL)`.

    filter   = all { OR all }                 all   = test { AND test }
    test     = NOT test | "(" filter ")" | column | column comparison
    compare  = ( = | <> | != | < | <= | > | >= ) value
             | IS [NOT] NULL | [NOT] IN "(" value { "," value } ")"
             | [NOT] BETWEEN value AND value | [NOT] LIKE text
    value    = number | 'text' | X'hex' | TRUE | FALSE     column = name | "name" | `name`

A column alone stands for "is true". Keywords may be written in any case. A quote inside of a text
or name is doubled. Dates, times, timestamps and decimals may be written as text, binary values as
text in hex; the column's type decides. A TIMESTAMP_LTZ without zone is UTC. LIKE takes `%` at the
beginning, at the end, or both.

The result is the `Expression` that `col` builds, so both mean the same. Scans of the client, the
command line and Spark (`zufluss.spark.table`, the option `filter`) read their texts here.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple, NoReturn

from zufluss.model.expression import ColumnRef, Expression, col
from zufluss.model.predicate import InvalidPredicateError
from zufluss.model.schema import Schema
from zufluss.model.types import Root

TEXT_CHARACTERS_MAX: Final = 100_000
"""Longest text of a filter."""
DEPTH_MAX: Final = 100
"""Most parentheses and NOTs inside of each other."""

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?![\w.])
      | (?P<binary>[xX]'(?:[0-9a-fA-F]{2})*')
      | (?P<text>'(?:[^']|'')*')
      | (?P<quoted>"(?:[^"]|"")+"|`(?:[^`]|``)+`)
      | (?P<word>[^\W\d]\w*)
      | (?P<sign><>|!=|<=|>=|==|=|<|>|\(|\)|,)
    )""",
    re.VERBOSE,
)
_COMPARE: Final[Mapping[str, Callable[[ColumnRef, Any], Expression]]] = {
    "=": lambda column, value: column == value,
    "==": lambda column, value: column == value,
    "<>": lambda column, value: column != value,
    "!=": lambda column, value: column != value,
    "<": lambda column, value: column < value,
    "<=": lambda column, value: column <= value,
    ">": lambda column, value: column > value,
    ">=": lambda column, value: column >= value,
}


def _with_zone(text: str) -> dt.datetime:
    moment = dt.datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


_FROM_TEXT: Final[Mapping[Root, Callable[[str], Any]]] = {
    Root.DATE: dt.date.fromisoformat,
    Root.TIME: dt.time.fromisoformat,
    Root.TIMESTAMP: dt.datetime.fromisoformat,
    Root.TIMESTAMP_LTZ: _with_zone,
    Root.DECIMAL: Decimal,
    Root.BINARY: bytes.fromhex,
    Root.BYTES: bytes.fromhex,
}
_KEYWORDS: Final = frozenset(
    ["AND", "OR", "NOT", "IS", "NULL", "IN", "BETWEEN", "LIKE", "TRUE", "FALSE"]
)


class _Token(NamedTuple):
    kind: str
    """`number`, `binary`, `text`, `quoted`, `word`, `sign` or `end`."""
    value: str
    """As it is written; keywords in capitals."""
    at: int
    """Its position in the filter."""


def parse_filter(text: str, schema: Schema) -> Expression:
    """The filter that a text describes; `InvalidPredicateError` says where it cannot be read."""
    if len(text) > TEXT_CHARACTERS_MAX:
        raise InvalidPredicateError(
            f"the filter has {len(text)} characters; at most {TEXT_CHARACTERS_MAX} are allowed"
        )
    return _Parser(text, schema).whole()


class _Parser:
    def __init__(self, text: str, schema: Schema) -> None:
        self._text = text
        self._schema = schema
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0

    def whole(self) -> Expression:
        """The filter, which must be the whole text."""
        filter = self._either()
        if self._next.kind != "end":
            self._fail("AND, OR or the end")
        return filter

    # -- grammar ------------------------------------------------------------------------------

    def _either(self) -> Expression:
        filter = self._all()
        while self._takes("OR"):
            filter = filter | self._all()
        return filter

    def _all(self) -> Expression:
        filter = self._test()
        while self._takes("AND"):
            filter = filter & self._test()
        return filter

    def _test(self) -> Expression:
        if self._depth == DEPTH_MAX:
            self._fail(f"fewer than {DEPTH_MAX} NOTs and parentheses inside of each other")
        self._depth += 1
        try:
            if self._takes("NOT"):
                return ~self._test()
            if self._takes("("):
                filter = self._either()
                self._expect(")")
                return filter
        finally:
            self._depth -= 1
        return self._column_test()

    def _column_test(self) -> Expression:
        column = self._column()
        sign = self._next.value if self._next.kind == "sign" else ""
        if sign in _COMPARE:
            self._at += 1
            return _COMPARE[sign](column, self._value(column))
        if self._takes("IS"):
            negated = self._takes("NOT")
            self._expect("NULL")
            return column.is_not_null() if negated else column.is_null()
        negated = self._takes("NOT")
        test = self._listed(column)
        if test is None:
            if negated:
                self._fail("IN, BETWEEN or LIKE")
            return column == True  # noqa: E712 - builds a comparison
        return ~test if negated else test

    def _listed(self, column: ColumnRef) -> Expression | None:
        """IN, BETWEEN or LIKE; None if there is none of them."""
        if self._takes("IN"):
            self._expect("(")
            values = [self._value(column)]
            while self._takes(","):
                values.append(self._value(column))
            self._expect(")")
            return column.isin(values)
        if self._takes("BETWEEN"):
            low = self._value(column)
            self._expect("AND")
            return column.between(low, self._value(column))
        if self._takes("LIKE"):
            return self._like(column)
        return None

    def _like(self, column: ColumnRef) -> Expression:
        token = self._next
        if token.kind != "text":
            self._fail("a text in single quotes")
        self._at += 1
        pattern = _unquoted(token.value)
        begins, ends = pattern.startswith("%"), len(pattern) > 1 and pattern.endswith("%")
        middle = pattern[begins : len(pattern) - ends]
        if "%" in middle or "_" in middle:
            self._at -= 1
            self._fail("LIKE with % at the beginning or the end only, and no _")
        if begins and ends:
            return column.contains(middle)
        if begins:
            return column.ends_with(middle)
        return column.starts_with(middle) if ends else column == middle

    # -- names and values ---------------------------------------------------------------------

    def _column(self) -> ColumnRef:
        token = self._next
        if token.kind not in ("word", "quoted") or token.value in _KEYWORDS:
            self._fail("the name of a column")
        name = _unquoted(token.value) if token.kind == "quoted" else token.value
        if name not in self._schema:
            added = " (not one that a changelog adds)" if name.startswith("_") else ""
            self._fail(f"one of the columns {', '.join(self._schema.names)}{added}")
        self._at += 1
        return col(name)

    def _value(self, column: ColumnRef) -> object:
        token, of = self._next, self._schema.column(column.name).data_type
        expected = "a number, a text in single quotes, TRUE, FALSE or X'0aff'"
        try:
            value = _literal(token, of.root)
        except (ValueError, ArithmeticError):
            value, expected = None, f"a value of type {of}"
        if value is None:
            self._fail(expected)
        self._at += 1
        return value

    # -- tokens -------------------------------------------------------------------------------

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _takes(self, value: str) -> bool:
        """Step over the next token, if it is this keyword or sign."""
        token = self._next
        if token.value != value or token.kind not in ("word", "sign"):
            return False
        self._at += 1
        return True

    def _expect(self, value: str) -> None:
        if not self._takes(value):
            self._fail(value)

    def _fail(self, expected: str) -> NoReturn:
        raise _unreadable(self._text, self._next.at, expected)


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            start = at + len(text[at:]) - len(text[at:].lstrip())
            raise _unreadable(text, start, "a column, a value or a comparison")
        kind = match.lastgroup or ""
        value = match[kind]
        if kind == "word" and value.upper() in _KEYWORDS:
            value = value.upper()
        tokens.append(_Token(kind, value, match.start(kind)))
        at = match.end()
    return [*tokens, _Token("end", "", end)]


def _unreadable(text: str, at: int, expected: str) -> InvalidPredicateError:
    where = f"at {text[at : at + 30]!r}" if at < len(text.rstrip()) else "at its end"
    return InvalidPredicateError(
        f"the filter {text!r:.200} cannot be read {where} (character {at + 1}): expected "
        f"{expected}. Write it like id > 5 AND name LIKE 'x%', or as zufluss.col(\"id\") > 5"
    )


def _literal(token: _Token, root: Root) -> object:
    """The value of a token for a column of a type; None if it is none."""
    if token.kind == "text":
        return _FROM_TEXT.get(root, str)(_unquoted(token.value))
    if token.kind == "binary":
        return bytes.fromhex(token.value[2:-1])
    if token.kind == "number":
        if root is Root.DECIMAL:
            return Decimal(token.value)
        whole = token.value.lstrip("+-").isdecimal()
        return int(token.value) if whole else float(token.value)
    return {"TRUE": True, "FALSE": False}.get(token.value)


def _unquoted(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(quote * 2, quote)
