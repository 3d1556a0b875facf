"""Filters as a user writes them: `(col("a") > 5) & (col("b").starts_with("x") | ~col("c"))`.

An expression names columns and holds Python values, without a schema. It has two translations:

* `resolve(schema)`: a `Predicate` that the server prunes batches by. It may be weaker than the
  expression (see `predicate.py`), never stronger.
* `to_arrow(schema)`: a pyarrow compute expression that filters rows exactly.

Rows where a column is NULL match no comparison, negated or not; only `is_null()` finds them.
`~` is pushed down to the columns at once, so a tree never contains a negation except of a text
test. Literals get the type of the column: see `predicate.canonical`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from zufluss.model import types as t
from zufluss.model.predicate import (
    NULL_TESTS,
    Compound,
    CompoundFunction,
    InvalidPredicateError,
    Leaf,
    LeafFunction,
    Predicate,
    Value,
    canonical,
    check_function,
    pruning_leaf,
    time_micros,
)
from zufluss.model.schema import Column, Schema

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

IN_LITERALS_MAX = 1000
"""A longer `isin` list is sent to the server as the range from its smallest to its largest."""

_INVERSE = {
    LeafFunction.EQUAL: LeafFunction.NOT_EQUAL,
    LeafFunction.NOT_EQUAL: LeafFunction.EQUAL,
    LeafFunction.LESS_THAN: LeafFunction.GREATER_OR_EQUAL,
    LeafFunction.GREATER_OR_EQUAL: LeafFunction.LESS_THAN,
    LeafFunction.GREATER_THAN: LeafFunction.LESS_OR_EQUAL,
    LeafFunction.LESS_OR_EQUAL: LeafFunction.GREATER_THAN,
    LeafFunction.IS_NULL: LeafFunction.IS_NOT_NULL,
    LeafFunction.IS_NOT_NULL: LeafFunction.IS_NULL,
    LeafFunction.IN: LeafFunction.NOT_IN,
    LeafFunction.NOT_IN: LeafFunction.IN,
}
_ARROW_COMPARE = {
    LeafFunction.EQUAL: "__eq__",
    LeafFunction.NOT_EQUAL: "__ne__",
    LeafFunction.LESS_THAN: "__lt__",
    LeafFunction.LESS_OR_EQUAL: "__le__",
    LeafFunction.GREATER_THAN: "__gt__",
    LeafFunction.GREATER_OR_EQUAL: "__ge__",
}
_SIGNS = {
    LeafFunction.EQUAL: "=",
    LeafFunction.NOT_EQUAL: "<>",
    LeafFunction.LESS_THAN: "<",
    LeafFunction.LESS_OR_EQUAL: "<=",
    LeafFunction.GREATER_THAN: ">",
    LeafFunction.GREATER_OR_EQUAL: ">=",
    LeafFunction.IS_NULL: "IS NULL",
    LeafFunction.IS_NOT_NULL: "IS NOT NULL",
    LeafFunction.IN: "IN",
    LeafFunction.NOT_IN: "NOT IN",
}
_PATTERNS = {
    LeafFunction.STARTS_WITH: "{}%",
    LeafFunction.CONTAINS: "%{}%",
    LeafFunction.END_WITH: "%{}",
}
_ARROW_TEXT = {
    LeafFunction.STARTS_WITH: "starts_with",
    LeafFunction.CONTAINS: "match_substring",
    LeafFunction.END_WITH: "ends_with",
}


class Expression:
    """A filter; combine with `&`, `|` and `~`. Its `repr` is the filter as text, as SQL has it."""

    __slots__ = ()

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns it reads."""
        raise NotImplementedError

    def resolve(self, schema: Schema) -> Predicate:
        """The predicate to prune by; raises `InvalidPredicateError` if it does not fit."""
        raise NotImplementedError

    def to_arrow(self, schema: Schema) -> pc.Expression:
        """The pyarrow expression that filters exactly the matching rows."""
        raise NotImplementedError

    def __and__(self, other: Expression) -> Expression:
        return _join(CompoundFunction.AND, self, other)

    def __or__(self, other: Expression) -> Expression:
        return _join(CompoundFunction.OR, self, other)

    def __invert__(self) -> Expression:
        raise NotImplementedError

    def __bool__(self) -> NoReturn:
        raise TypeError("a filter has no truth value; combine filters with & | ~ and parentheses")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison(Expression):
    """A test of one column."""

    function: LeafFunction
    """What is tested."""
    name: str
    """The column."""
    values: tuple[object, ...]
    """Python values as the user gave them."""
    negated: bool = False
    """The test must fail; only for text tests, others have an inverse."""

    @property
    def columns(self) -> frozenset[str]:
        """The column it reads."""
        return frozenset({self.name})

    def __invert__(self) -> Expression:
        inverse = _INVERSE.get(self.function)
        if inverse is None:
            return replace(self, negated=not self.negated)
        return replace(self, function=inverse)

    def __repr__(self) -> str:
        name = t.quote_name(self.name)
        if self.function in _PATTERNS:
            pattern = _PATTERNS[self.function].format(self.values[0])
            return f"{name} {'NOT ' if self.negated else ''}LIKE {_literal_text(pattern)}"
        sign = _SIGNS[self.function]
        if self.function in (LeafFunction.IN, LeafFunction.NOT_IN):
            return f"{name} {sign} ({', '.join(map(_literal_text, self.values))})"
        return " ".join([name, sign, *map(_literal_text, self.values)])

    def resolve(self, schema: Schema) -> Predicate:
        """The predicate to prune by."""
        column, literals = self._literals(schema)
        if self.negated or self.function in NULL_TESTS:
            function = LeafFunction.IS_NOT_NULL if self.negated else self.function
            return Leaf(function, column.id)
        if not literals:  # no value is in an empty list; every value except NULL is outside
            present = Leaf(LeafFunction.IS_NOT_NULL, column.id)
            if self.function is LeafFunction.NOT_IN:
                return present
            absent = Leaf(LeafFunction.IS_NULL, column.id)
            return Compound(CompoundFunction.AND, (absent, present))
        if len(literals) > IN_LITERALS_MAX:
            return self._range(column, literals)
        return pruning_leaf(self.function, column.id, column.data_type, literals)

    def _range(self, column: Column, literals: tuple[Any, ...]) -> Predicate:
        if self.function is LeafFunction.NOT_IN:
            return Leaf(LeafFunction.IS_NOT_NULL, column.id)
        low = Leaf(LeafFunction.GREATER_OR_EQUAL, column.id, (min(literals),))
        high = Leaf(LeafFunction.LESS_OR_EQUAL, column.id, (max(literals),))
        return Compound(CompoundFunction.AND, (low, high))

    def to_arrow(self, schema: Schema) -> pc.Expression:
        """The pyarrow expression that filters exactly the matching rows."""
        import pyarrow.compute as pc

        column, literals = self._literals(schema)
        field = pc.field(self.name)
        if self.function is LeafFunction.IS_NULL:
            return field.is_null()
        if self.function is LeafFunction.IS_NOT_NULL:
            return field.is_valid()
        if self.function in _ARROW_TEXT:
            test = getattr(pc, _ARROW_TEXT[self.function])(field, pattern=str(literals[0]))
            return ~test if self.negated else test
        if column.data_type.root is t.Root.BINARY:
            import pyarrow as pa

            field = field.cast(pa.binary())
        scalars = [
            arrow_scalar(raw, literal, column)
            for raw, literal in zip(self.values, literals, strict=True)
        ]
        if self.function in _ARROW_COMPARE:
            return getattr(field, _ARROW_COMPARE[self.function])(scalars[0])
        return self._arrow_list(field, scalars)

    def _arrow_list(self, field: pc.Expression, scalars: list[pa.Scalar]) -> pc.Expression:
        """IN and NOT_IN; pyarrow counts NULL as outside of every list."""
        import pyarrow.compute as pc

        inside = field.isin(_array(scalars)) if scalars else pc.scalar(False)
        return inside if self.function is LeafFunction.IN else field.is_valid() & ~inside

    def _literals(self, schema: Schema) -> tuple[Column, tuple[Value, ...]]:
        if self.name not in schema:
            raise InvalidPredicateError(
                f"column {self.name!r} of the filter does not exist; "
                f"the columns are {', '.join(schema.names)}"
            )
        column = schema.column(self.name)
        check_function(self.function, self.name, column.data_type)
        return column, tuple(canonical(v, column.data_type, self.name) for v in self.values)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Combination(Expression):
    """AND or OR of expressions."""

    function: CompoundFunction
    """How the children are joined."""
    children: tuple[Expression, ...]
    """The joined expressions."""

    @property
    def columns(self) -> frozenset[str]:
        """The columns it reads."""
        return frozenset().union(*(child.columns for child in self.children))

    def __repr__(self) -> str:
        texts = [
            f"({child!r})" if isinstance(child, Combination) else repr(child)
            for child in self.children
        ]
        return f" {self.function.name} ".join(texts)

    def __invert__(self) -> Expression:
        other = (
            CompoundFunction.OR if self.function is CompoundFunction.AND else (CompoundFunction.AND)
        )
        return Combination(other, tuple(~child for child in self.children))

    def resolve(self, schema: Schema) -> Predicate:
        """The predicate to prune by."""
        return Compound(self.function, tuple(child.resolve(schema) for child in self.children))

    def to_arrow(self, schema: Schema) -> pc.Expression:
        """The pyarrow expression that filters exactly the matching rows."""
        tests = [child.to_arrow(schema) for child in self.children]
        out = tests[0]
        for more in tests[1:]:
            out = out & more if self.function is CompoundFunction.AND else out | more
        return out


def _join(function: CompoundFunction, *parts: Expression) -> Expression:
    """Join and flatten, so that a long chain of `&` is one level deep."""
    children: list[Expression] = []
    for part in parts:
        if isinstance(part, ColumnRef):
            part = part == True  # noqa: E712 - builds a comparison
        if not isinstance(part, Expression):
            raise TypeError(f"a filter can be joined with a filter only, not {part!r:.80}")
        if isinstance(part, Combination) and part.function is function:
            children.extend(part.children)
        else:
            children.append(part)
    return Combination(function, tuple(children))


class ColumnRef(Expression):
    """A column in a filter; alone it stands for "the BOOLEAN column is true"."""

    __slots__ = ("name",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"col() takes the name of a column, not {name!r:.80}")
        self.name = name

    def _compare(self, function: LeafFunction, *values: object) -> Comparison:
        if any(value is None for value in values):
            raise TypeError(f"nothing equals NULL; use col({self.name!r}).is_null()")
        return Comparison(function, self.name, values)

    def __eq__(self, value: object) -> Comparison:  # type: ignore[override]
        return self._compare(LeafFunction.EQUAL, value)

    def __ne__(self, value: object) -> Comparison:  # type: ignore[override]
        return self._compare(LeafFunction.NOT_EQUAL, value)

    def __lt__(self, value: object) -> Comparison:
        return self._compare(LeafFunction.LESS_THAN, value)

    def __le__(self, value: object) -> Comparison:
        return self._compare(LeafFunction.LESS_OR_EQUAL, value)

    def __gt__(self, value: object) -> Comparison:
        return self._compare(LeafFunction.GREATER_THAN, value)

    def __ge__(self, value: object) -> Comparison:
        return self._compare(LeafFunction.GREATER_OR_EQUAL, value)

    def __invert__(self) -> Comparison:
        return self._compare(LeafFunction.EQUAL, False)

    def is_null(self) -> Comparison:
        """Rows where the column is NULL."""
        return self._compare(LeafFunction.IS_NULL)

    def is_not_null(self) -> Comparison:
        """Rows where the column has a value."""
        return self._compare(LeafFunction.IS_NOT_NULL)

    def isin(self, values: Iterable[object]) -> Comparison:
        """Rows where the column equals one of the values."""
        return self._compare(LeafFunction.IN, *values)

    def between(self, low: object, high: object) -> Expression:
        """Rows from `low` to `high`, both included."""
        return (self >= low) & (self <= high)

    def starts_with(self, prefix: str) -> Comparison:
        """Rows where the text starts so."""
        return self._compare(LeafFunction.STARTS_WITH, prefix)

    def ends_with(self, suffix: str) -> Comparison:
        """Rows where the text ends so."""
        return self._compare(LeafFunction.END_WITH, suffix)

    def contains(self, infix: str) -> Comparison:
        """Rows where the text contains this."""
        return self._compare(LeafFunction.CONTAINS, infix)

    @property
    def columns(self) -> frozenset[str]:
        """The column it reads."""
        return frozenset({self.name})

    def resolve(self, schema: Schema) -> Predicate:
        """The predicate to prune by."""
        return (self == True).resolve(schema)  # noqa: E712 - builds a comparison

    def to_arrow(self, schema: Schema) -> pc.Expression:
        """The pyarrow expression that filters exactly the matching rows."""
        return (self == True).to_arrow(schema)  # noqa: E712 - builds a comparison

    def __repr__(self) -> str:
        return f"col({self.name!r})"


def col(name: str) -> ColumnRef:
    """A column to build a filter from: `(col("a") > 5) & col("b").is_null()`."""
    return ColumnRef(name)


def _literal_text(value: object) -> str:
    """A value as a filter in text has it (`filter_text.py`)."""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int | float):
        return repr(value)
    text = value.hex() if isinstance(value, bytes) else str(value)
    return "'" + text.replace("'", "''") + "'"


def arrow_scalar(raw: object, literal: Value, column: Column) -> pa.Scalar:
    """A literal as the Arrow value to compare a column with, exact also where `literal` is not."""
    import pyarrow as pa

    data_type = column.data_type
    root = data_type.root
    if root is t.Root.BINARY:
        return pa.scalar(literal, pa.binary())
    if root is t.Root.DATE:
        return pa.scalar(literal, pa.int32()).cast(pa.date32())
    if root is t.Root.TIME:
        return pa.scalar(time_micros(raw), pa.int64()).cast(pa.time64("us"))
    if root in (t.Root.TIMESTAMP, t.Root.TIMESTAMP_LTZ):
        assert isinstance(data_type, t.TemporalType)
        assert isinstance(literal, int)
        unit = "ns" if data_type.unit == "ns" else "us"
        count, rest = divmod(literal, 1 if unit == "ns" else 1000)
        if rest or not -(2**63) <= count < 2**63:
            raise InvalidPredicateError(
                f"{raw!r:.80} cannot be compared with column {column.name!r} of type {data_type}: "
                + ("it is finer than a microsecond" if rest else "the year is out of range")
            )
        return pa.scalar(count, pa.timestamp(unit, data_type.to_arrow().tz))
    return pa.scalar(literal, data_type.to_arrow())


def _array(scalars: list[pa.Scalar]) -> pa.Array:
    import pyarrow as pa

    return pa.array(scalars, type=scalars[0].type)
