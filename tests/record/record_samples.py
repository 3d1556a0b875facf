"""Fixtures, JSON forms and strategies that the tests of rows, keys and statistics share."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from tests.paths import FIXTURES
from zufluss.model import types as t
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Schema


def fixture(name: str) -> tuple[dict[str, Any], bytes]:
    """The JSON and the bytes of a captured exchange."""
    path = FIXTURES / name
    return json.loads(path.with_suffix(".json").read_text()), path.with_suffix(".bin").read_bytes()


def table_schema(table: str) -> Schema:
    """The schema of a captured table descriptor."""
    return Schema.from_json(json.loads((FIXTURES / table).read_text())["schema"])


def json_form(value: Any, data_type: t.DataType) -> Any:
    """A row value as the fixtures write it."""
    if value is None:
        return None
    root = data_type.root
    if root is t.Root.FLOAT:
        return float(f"{value:.8g}")
    if root in (t.Root.BYTES, t.Root.BINARY):
        return {"hex": value.hex()}
    if root is t.Root.DECIMAL:
        return f"{value:f}"
    if root in (t.Root.TIMESTAMP, t.Root.TIMESTAMP_LTZ):
        return {"ms": value // 1_000_000, "ns": value % 1_000_000}
    if isinstance(data_type, t.ArrayType):
        return [json_form(v, data_type.element) for v in value]
    if isinstance(data_type, t.MapType):
        keys = [json_form(k, data_type.key) for k, _ in value]
        return {"keys": keys, "values": [json_form(v, data_type.value) for _, v in value]}
    if isinstance(data_type, t.RowType):
        return json_row(value, data_type.children())
    return value


def json_row(values: Any, types: Any) -> list[Any]:
    """A row as the fixtures write it."""
    return [json_form(v, ty) for v, ty in zip(values, types, strict=True)]


def types_of(schema: Schema) -> list[t.DataType]:
    return [column.data_type for column in schema.columns]


SCALARS = [
    parse_type(text)
    for text in [
        "BOOLEAN",
        "TINYINT",
        "SMALLINT",
        "INT",
        "BIGINT",
        "FLOAT",
        "DOUBLE",
        "CHAR(12)",
        "STRING",
        "BYTES",
        "BINARY(3)",
        "DATE",
        "DECIMAL(9,2)",
        "DECIMAL(18,18)",
        "DECIMAL(19,0)",
        "DECIMAL(38,5)",
        "TIME(0)",
        "TIME(3)",
        "TIME(6)",
        "TIME(9)",
        "TIMESTAMP(0)",
        "TIMESTAMP(3)",
        "TIMESTAMP(6)",
        "TIMESTAMP(9)",
        "TIMESTAMP_LTZ(3)",
        "TIMESTAMP_LTZ(9)",
    ]
]
"""Every scalar type, at each edge of its precision."""

scalar_types = st.sampled_from(SCALARS)


def _nested(children: st.SearchStrategy[t.DataType]) -> st.SearchStrategy[t.DataType]:
    rows = st.lists(children, min_size=1, max_size=3).map(
        lambda types: t.RowType(fields=tuple(t.RowField(f"f{i}", ty) for i, ty in enumerate(types)))
    )
    maps = st.builds(
        lambda k, v: t.MapType(key=k.as_nullable(False), value=v), scalar_types, children
    )
    return rows | maps | children.map(lambda ty: t.ArrayType(element=ty))


any_types = st.recursive(scalar_types, _nested, max_leaves=4)

_UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_BITS = {t.Root.TINYINT: 8, t.Root.SMALLINT: 16, t.Root.INTEGER: 32, t.Root.BIGINT: 64}


def values_for(data_type: t.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, NULL aside, such that its Arrow type holds them exactly."""
    root = data_type.root
    if root in _BITS:
        bound = 2 ** (_BITS[root] - 1)
        return st.integers(-bound, bound - 1)
    if isinstance(data_type, t.DecimalType):
        bound = 10**data_type.precision - 1
        scale = data_type.scale
        return st.integers(-bound, bound).map(
            lambda n: Decimal((int(n < 0), tuple(map(int, str(abs(n)))), -scale))
        )
    if isinstance(data_type, t.TemporalType):
        return _temporal(data_type)
    if isinstance(data_type, t.LengthType):
        if root is t.Root.CHAR:
            return st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3)
        return st.binary(min_size=data_type.length, max_size=data_type.length)
    if isinstance(data_type, t.ArrayType):
        return st.lists(nullable(data_type.element), max_size=4)
    if isinstance(data_type, t.MapType):
        entries = st.tuples(values_for(data_type.key), nullable(data_type.value))
        return st.lists(entries, max_size=3)
    if isinstance(data_type, t.RowType):
        return st.tuples(*(nullable(child) for child in data_type.children()))
    return {
        t.Root.BOOLEAN: st.booleans(),
        t.Root.FLOAT: st.floats(width=32),
        t.Root.DOUBLE: st.floats(),
        t.Root.STRING: st.text(st.characters(codec="utf-8"), max_size=12),
        t.Root.BYTES: st.binary(max_size=12),
        t.Root.DATE: st.integers(-700_000, 2_900_000),
    }[root]


def _temporal(data_type: t.TemporalType) -> st.SearchStrategy[int]:
    if data_type.root is t.Root.TIME:
        if data_type.precision == 0:
            return st.integers(0, 86_399).map(lambda s: s * 1000)
        return st.integers(0, 86_399_999)
    unit = _UNIT_NS[data_type.unit]
    bound = 2**62 // unit
    return st.integers(-bound, bound).map(lambda n: n * unit)


def nullable(data_type: t.DataType) -> st.SearchStrategy[Any]:
    """Values of a type and, where it allows it, NULL."""
    values = values_for(data_type)
    return st.none() | values if data_type.nullable else values


def same(left: Any, right: Any) -> bool:
    """Equality in which NaN equals NaN."""
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right
