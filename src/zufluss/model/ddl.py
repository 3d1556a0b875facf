"""Types and column lists as text: `id BIGINT NOT NULL, tags ARRAY<STRING>, PRIMARY KEY (id)`.

The grammar is that of SQL column lists. The command line and the client read it with `parse_type`
and `Schema.of("…")`. `str()` of a type or column is text that parses back to an equal one (without
ids).

    columns := item ("," item)*
    item    := name type [function] ["COMMENT" 'text']
             | "PRIMARY" "KEY" "(" name ("," name)* ")"
    type    := word ["(" number ["," number] ")"] ["NOT" "NULL" | "NULL"]
             | "ARRAY" "<" type ">" | "MAP" "<" type "," type ">"
             | "ROW" "<" name type ["COMMENT" 'text'] ("," …)* ">"
    function := word ["(" name "=" value ("," name "=" value)* ")"]
    value   := 'text' | word | number

A function is one of the aggregation engine (`aggregate.py`): `pv BIGINT SUM`,
`names STRING LISTAGG(delimiter = ';', limit = 1000)`, `place STRING MAX_BY(by = seen)`.
Words are case-insensitive; names keep their case, and are in back-quotes unless they are plain
words. The `InvalidTableError` of a mistake shows its place in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from zufluss.config.nearest import suggestion
from zufluss.errors import InvalidTableError
from zufluss.model import types as t
from zufluss.model.aggregate import FUNCTIONS, AggFunction, canonical_function
from zufluss.model.types import check_unique

T = TypeVar("T")

_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|('(?:[^']|'')*')|([^\W\d]\w*)|(\d+)|([<>(),=])|(\S))")
_SCALARS = {
    "BOOLEAN": t.BOOLEAN,
    "BOOL": t.BOOLEAN,
    "TINYINT": t.TINYINT,
    "SMALLINT": t.SMALLINT,
    "INT": t.INTEGER,
    "INTEGER": t.INTEGER,
    "BIGINT": t.BIGINT,
    "FLOAT": t.FLOAT,
    "DOUBLE": t.DOUBLE,
    "STRING": t.STRING,
    "BYTES": t.BYTES,
    "DATE": t.DATE,
}
_LENGTH = {"CHAR": t.Root.CHAR, "BINARY": t.Root.BINARY}
_TEMPORAL = {
    "TIME": t.Root.TIME,
    "TIMESTAMP": t.Root.TIMESTAMP,
    "TIMESTAMP_LTZ": t.Root.TIMESTAMP_LTZ,
}
_KNOWN = (*_SCALARS, *_LENGTH, *_TEMPORAL, "DECIMAL", "ARRAY", "MAP", "ROW")


@dataclass(frozen=True, slots=True)
class ColumnText:
    """A column of a column list."""

    name: str
    """The column's name."""
    data_type: t.DataType
    """Its type."""
    comment: str | None
    """Its comment."""
    agg_function: AggFunction | None = None
    """How an aggregation table merges it."""


def parse_type(text: str) -> t.DataType:
    """The type of a text such as `DECIMAL(10, 2) NOT NULL`."""
    parser = _DdlParser(text)
    data_type = parser.data_type(0)
    parser.end()
    return data_type


def parse_columns(text: str) -> tuple[tuple[ColumnText, ...], tuple[str, ...]]:
    """Columns and primary key of a column list."""
    parser = _DdlParser(text)
    columns: list[ColumnText] = []
    primary_key: list[str] = []
    for column, key in parser.items(parser.column_or_key):
        columns.extend(column)
        if key and primary_key:
            raise InvalidTableError("the column list has two PRIMARY KEY clauses; keep one")
        primary_key.extend(key)
    parser.end()
    return tuple(columns), tuple(primary_key)


class _DdlParser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [
            (m.lastindex or 6, m.group(m.lastindex or 6), m.end()) for m in _TOKEN.finditer(text)
        ]
        self.at = 0

    def fail(self, expected: str) -> InvalidTableError:
        token = repr(self.tokens[self.at][1]) if self.at < len(self.tokens) else "the end"
        before = self.text[: self.tokens[self.at - 1][2]] if self.at else ""
        return InvalidTableError(
            f"expected {expected} but found {token} after {before[-60:]!r} in {self.text!r:.200}"
        )

    def peek(self, *words: str) -> bool:
        """Whether the next tokens are these words or signs."""
        ahead = self.tokens[self.at : self.at + len(words)]
        return len(ahead) == len(words) and all(
            kind in (3, 5) and value.upper() == word
            for (kind, value, _), word in zip(ahead, words, strict=True)
        )

    def take(self, *words: str) -> bool:
        """Skip these words if they come next."""
        if not self.peek(*words):
            return False
        self.at += len(words)
        return True

    def expect(self, sign: str) -> None:
        if not self.take(sign):
            raise self.fail(repr(sign))

    def end(self) -> None:
        if self.at < len(self.tokens):
            raise self.fail("the end")

    def items(self, one: Callable[[], T]) -> list[T]:
        """A comma-separated list of at least one thing."""
        items = [one()]
        while self.take(","):
            items.append(one())
        return items

    def name(self) -> str:
        kind = self.kind()
        if kind not in (1, 3):
            raise self.fail("a name")
        value = self.tokens[self.at][1]
        self.at += 1
        return value[1:-1].replace("``", "`") if kind == 1 else value

    def number(self) -> int:
        if self.kind() == 4:
            self.at += 1
            return int(self.tokens[self.at - 1][1][:18])
        raise self.fail("a number")

    def comment(self) -> str | None:
        if not self.take("COMMENT"):
            return None
        if self.kind() == 2:
            return self.text_literal()
        raise self.fail("a text in single quotes")

    def text_literal(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][1][1:-1].replace("''", "'")

    def column_or_key(self) -> tuple[list[ColumnText], list[str]]:
        if not self.take("PRIMARY", "KEY"):
            return [self.column(0)], []
        self.expect("(")
        key = self.items(self.name)
        self.expect(")")
        return [], key

    def column(self, depth: int) -> ColumnText:
        name, data_type = self.name(), self.data_type(depth)
        function = self.function() if depth == 0 else None
        return ColumnText(name, data_type, self.comment(), function)

    def function(self) -> AggFunction | None:
        if self.kind() != 3 or self.peek("COMMENT"):
            return None
        word = self.tokens[self.at][1]
        if canonical_function(word) not in FUNCTIONS:
            hint = suggestion(canonical_function(word), FUNCTIONS)
            raise self.fail(f"an aggregation function{hint}, COMMENT, ',' or the end")
        self.at += 1
        parameters: list[tuple[str, str]] = []
        if self.take("("):
            parameters = self.items(self.parameter)
            self.expect(")")
        check_unique([key for key, _ in parameters], f"parameter of {word}")
        return AggFunction.named(word, dict(parameters))

    def parameter(self) -> tuple[str, str]:
        key = self.name()
        self.expect("=")
        if self.kind() == 2:
            return key, self.text_literal()
        if self.kind() == 4:
            self.at += 1
            return key, self.tokens[self.at - 1][1]
        return key, self.name()

    def kind(self) -> int:
        """The group of `_TOKEN` that the next token belongs to, 0 at the end."""
        return self.tokens[self.at][0] if self.at < len(self.tokens) else 0

    def data_type(self, depth: int) -> t.DataType:
        if depth > t.NESTING_MAX:
            raise InvalidTableError(f"a type is nested deeper than {t.NESTING_MAX} levels")
        if self.kind() != 3:
            raise self.fail("a type")
        word = self.tokens[self.at][1].upper()
        self.at += 1
        data_type = self.nested(word, depth + 1) or self.plain(word)
        if self.take("NOT", "NULL"):
            return data_type.as_nullable(False)
        self.take("NULL")
        return data_type

    def nested(self, word: str, depth: int) -> t.DataType | None:
        if word not in ("ARRAY", "MAP", "ROW"):
            return None
        self.expect("<")
        data_type: t.DataType
        if word == "ARRAY":
            data_type = t.ArrayType(element=self.data_type(depth))
        elif word == "MAP":
            key = self.data_type(depth).as_nullable(False)
            self.expect(",")
            data_type = t.MapType(key=key, value=self.data_type(depth))
        else:
            fields = self.items(lambda: self.column(depth))
            data_type = t.RowType(
                fields=tuple(t.RowField(f.name, f.data_type, f.comment) for f in fields)
            )
        self.expect(">")
        return data_type

    def plain(self, word: str) -> t.DataType:
        if word in _SCALARS:
            return _SCALARS[word]
        if word not in _KNOWN:
            self.at -= 1
            raise self.fail(f"a type ({', '.join(_KNOWN)})")
        arguments = self.arguments(2 if word == "DECIMAL" else 1)
        if word == "DECIMAL":
            precision, scale = (*arguments, *(10, 0)[len(arguments) :])
            return t.DecimalType(precision=precision, scale=scale)
        if word in _LENGTH:
            return t.LengthType(root=_LENGTH[word], length=arguments[0] if arguments else 1)
        root = _TEMPORAL[word]
        default = 0 if root is t.Root.TIME else 6
        return t.TemporalType(root=root, precision=arguments[0] if arguments else default)

    def arguments(self, at_most: int) -> list[int]:
        if not self.take("("):
            return []
        numbers = self.items(self.number)
        if len(numbers) > at_most:
            raise self.fail(f"at most {at_most} number(s) in parentheses")
        self.expect(")")
        return numbers
