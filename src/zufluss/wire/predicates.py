"""Predicates between their wire form and the model.

| message             | fields                                                                  |
|---------------------|-------------------------------------------------------------------------|
| PbPredicate         | type 0 leaf, 1 compound; leaf or compound                               |
| PbLeafPredicate     | function, field_id = id of a top-level column, literals                 |
| PbCompoundPredicate | function 0 AND, 1 OR; children                                          |
| PbLiteralValue      | literal_type, is_null, and the value in the field of the type:          |

| literal type            | value field                                                         |
|-------------------------|---------------------------------------------------------------------|
| BOOLEAN                 | boolean_value                                                       |
| TINYINT, SMALLINT, INT  | int_value                                                           |
| BIGINT                  | bigint_value                                                        |
| DATE                    | bigint_value, days                                                  |
| TIME                    | int_value, milliseconds of the day                                  |
| FLOAT, DOUBLE           | float_value, double_value                                           |
| CHAR, VARCHAR           | string_value                                                        |
| BINARY, BYTES           | binary_value                                                        |
| DECIMAL                 | decimal_value unscaled, or decimal_bytes unscaled big-endian        |
| TIMESTAMP_NTZ, _LTZ     | timestamp_millis_value, timestamp_nano_of_millis_value              |

What comes from a client is checked against the table's schema and refused with
`InvalidPredicateError` if it is malformed. A NULL literal matches nothing, so it is left out of a
list, and any other test with one is weakened to "has a value", which is safe for pruning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from decimal import Decimal
from enum import IntEnum
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from zufluss.model.predicate import (
    DEPTH_MAX,
    LIST_TESTS,
    LITERALS_MAX,
    TESTS_MAX,
    Compound,
    CompoundFunction,
    InvalidPredicateError,
    Leaf,
    LeafFunction,
    Predicate,
    Value,
    check_function,
    pruning_leaf,
    unscaled_decimal,
)
from zufluss.model.schema import Column, Schema
from zufluss.model.types import DataType, DecimalType, Root
from zufluss.wire import messages as m

LITERALS_AT_ONCE = 64
"""Literals of a filter that are read in one step."""
LEAF = 0
COMPOUND = 1
NANOS_PER_MILLI = 1_000_000

_CODES = {
    Root.BOOLEAN: 0,
    Root.TINYINT: 1,
    Root.SMALLINT: 2,
    Root.INTEGER: 3,
    Root.BIGINT: 4,
    Root.FLOAT: 5,
    Root.DOUBLE: 6,
    Root.CHAR: 7,
    Root.STRING: 8,
    Root.DECIMAL: 9,
    Root.DATE: 10,
    Root.TIME: 11,
    Root.TIMESTAMP: 12,
    Root.TIMESTAMP_LTZ: 13,
    Root.BINARY: 14,
    Root.BYTES: 15,
}
_ROOTS = {code: root for root, code in _CODES.items()}
_ALIKE = ({Root.CHAR, Root.STRING}, {Root.BINARY, Root.BYTES})
_FIELDS = {
    Root.BOOLEAN: "boolean_value",
    Root.TINYINT: "int_value",
    Root.SMALLINT: "int_value",
    Root.INTEGER: "int_value",
    Root.BIGINT: "bigint_value",
    Root.FLOAT: "float_value",
    Root.DOUBLE: "double_value",
    Root.CHAR: "string_value",
    Root.STRING: "string_value",
    Root.BINARY: "binary_value",
    Root.BYTES: "binary_value",
    Root.DATE: "bigint_value",
    Root.TIME: "int_value",
}

E = TypeVar("E", bound=IntEnum)


def predicate_to_proto(predicate: Predicate, schema: Schema) -> m.PbPredicate:
    """The message of a predicate over columns of the schema."""
    out = m.PbPredicate()
    _write(predicate, schema, out, 0)
    return out


def _write(predicate: Predicate, schema: Schema, out: m.PbPredicate, depth: int) -> None:
    _check_depth(depth)
    if isinstance(predicate, Compound):
        out.type = COMPOUND
        out.compound.function = predicate.function
        for child in predicate.children:
            _write(child, schema, out.compound.children.add(), depth + 1)
        return
    column = _column(predicate.field_id, {c.id: c for c in schema.columns})
    out.type = LEAF
    out.leaf.function = predicate.function
    out.leaf.field_id = predicate.field_id
    out.leaf.literals.extend(_literal_to_proto(v, column.data_type) for v in predicate.literals)


def _check_depth(depth: int) -> None:
    if depth > DEPTH_MAX:
        raise InvalidPredicateError(
            f"the filter is nested deeper than {DEPTH_MAX} levels; join it in one AND or OR"
        )


def predicate_from_proto(message: m.PbPredicate, schema: Schema) -> Predicate:
    """The predicate of a message, checked against the schema it was written for."""
    *_, predicate = predicate_steps(message, schema)
    assert isinstance(predicate, Leaf | Compound)
    return predicate


def predicate_steps(message: m.PbPredicate, schema: Schema) -> Iterator[PredicateSize | Predicate]:
    """`predicate_from_proto` in steps: yields the size of each one, and last the predicate."""
    predicate_size(message)
    columns = {column.id: column for column in schema.columns}
    yield (yield from _from_proto(message, columns, 0))


class PredicateSize(NamedTuple):
    """How much there is in a predicate."""

    tests: int
    """Leaves and compounds."""
    literals: int
    """Literals of all leaves."""


_ONE_TEST = PredicateSize(1, 0)
_Columns = Mapping[int, Column]
"""Columns by their id."""
_Steps = Generator[PredicateSize, None, Predicate]


def predicate_size(message: m.PbPredicate) -> PredicateSize:
    """The size of a predicate; refuses one with too many tests or literals.

    Looks at no more of the message than is allowed.
    """
    tests, literals = 1, 0
    rest = [message]
    while rest:
        part = rest.pop()
        tests += len(part.compound.children)
        literals += len(part.leaf.literals)
        if tests > TESTS_MAX:
            raise InvalidPredicateError(
                f"the filter has more than {TESTS_MAX} tests; use IN or a range instead"
            )
        if literals > LITERALS_MAX:
            raise InvalidPredicateError(
                f"the filter has {literals} literals; at most {LITERALS_MAX} are allowed, "
                "compare with a range instead"
            )
        rest += part.compound.children
    return PredicateSize(tests, literals)


def _from_proto(message: m.PbPredicate, columns: _Columns, depth: int) -> _Steps:
    _check_depth(depth)
    yield _ONE_TEST
    if message.type == LEAF and message.HasField("leaf"):
        return (yield from _leaf(message.leaf, columns))
    if message.type == COMPOUND and message.HasField("compound"):
        function = _known(CompoundFunction, message.compound.function)
        children = []
        for child in message.compound.children:
            children.append((yield from _from_proto(child, columns, depth + 1)))
        return Compound(function, tuple(children))
    raise InvalidPredicateError(
        f"predicate type {message.type} without its part; send {LEAF} with a leaf or {COMPOUND} "
        "with a compound"
    )


def _leaf(message: m.PbLeafPredicate, columns: _Columns) -> _Steps:
    function = _known(LeafFunction, message.function)
    column = _column(message.field_id, columns)
    check_function(function, column.name, column.data_type)
    values: list[Value | None] = []
    for begin in range(0, len(message.literals), LITERALS_AT_ONCE):
        some = message.literals[begin : begin + LITERALS_AT_ONCE]
        values += [_literal(literal, column) for literal in some]
        yield PredicateSize(0, len(some))
    present = tuple(value for value in values if value is not None)
    if len(present) < len(values) and not (function in LIST_TESTS and present):
        return Leaf(LeafFunction.IS_NOT_NULL, column.id)
    return pruning_leaf(function, column.id, column.data_type, present)


def _known(kind: Callable[[int], E], number: int) -> E:
    try:
        return kind(number)
    except ValueError as e:
        raise InvalidPredicateError(f"the filter has an unknown function: {e}") from None


def _column(field_id: int, columns: _Columns) -> Column:
    column = columns.get(field_id)
    if column is None:
        known = ", ".join(f"{c.id} {c.name}" for c in islice(columns.values(), 20))
        raise InvalidPredicateError(
            f"the filter names field id {field_id}, which the table does not have; "
            f"its columns are {known}"
        )
    return column


def _literal(literal: m.PbLiteralValue, column: Column) -> Value | None:
    """The canonical value of a literal, None for NULL."""
    if literal.is_null:
        return None
    root, column_root = _ROOTS.get(literal.literal_type), column.data_type.root
    if root is not column_root and not any({root, column_root} <= alike for alike in _ALIKE):
        raise InvalidPredicateError(
            f"a literal of type {root or literal.literal_type} cannot be compared with column "
            f"{column.name!r} of type {column.data_type}"
        )
    if column_root is Root.DECIMAL:
        return _decimal(literal, column)
    if column_root in (Root.TIMESTAMP, Root.TIMESTAMP_LTZ):
        millis: int = _present(literal, "timestamp_millis_value", column)
        return millis * NANOS_PER_MILLI + literal.timestamp_nano_of_millis_value
    value: Value = _present(literal, _FIELDS[column_root], column)
    if isinstance(value, float) and math.isnan(value):
        return None  # like NULL, it compares with nothing
    return value


def _present(literal: Any, field: str, column: Column) -> Any:
    if not literal.HasField(field):
        raise InvalidPredicateError(
            f"a literal for column {column.name!r} of type {column.data_type} has no {field}"
        )
    return getattr(literal, field)


def _decimal(literal: m.PbLiteralValue, column: Column) -> Decimal:
    assert isinstance(column.data_type, DecimalType)
    if literal.HasField("decimal_bytes"):
        if len(literal.decimal_bytes) > 16:
            raise InvalidPredicateError(
                f"a decimal literal for column {column.name!r} has {len(literal.decimal_bytes)} "
                "bytes; at most 16 hold 38 digits"
            )
        unscaled = int.from_bytes(literal.decimal_bytes, "big", signed=True)
    else:
        unscaled = _present(literal, "decimal_value", column)
    sign, digits = int(unscaled < 0), tuple(map(int, str(abs(unscaled))))
    return Decimal((sign, digits, -column.data_type.scale))


def _literal_to_proto(value: Value, data_type: DataType) -> m.PbLiteralValue:
    out = m.PbLiteralValue(literal_type=_CODES[data_type.root], is_null=False)
    if isinstance(data_type, DecimalType):
        assert isinstance(value, Decimal)
        unscaled = unscaled_decimal(value, data_type)
        if data_type.precision <= 18:
            out.decimal_value = unscaled
        else:
            size = (unscaled + (unscaled < 0)).bit_length() // 8 + 1
            out.decimal_bytes = unscaled.to_bytes(size, "big", signed=True)
    elif data_type.root in (Root.TIMESTAMP, Root.TIMESTAMP_LTZ):
        assert isinstance(value, int)
        millis, nanos = divmod(value, NANOS_PER_MILLI)
        out.timestamp_millis_value, out.timestamp_nano_of_millis_value = millis, nanos
    else:
        setattr(out, _FIELDS[data_type.root], value)
    return out
