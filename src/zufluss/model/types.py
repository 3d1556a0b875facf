"""Data types of columns, in their four forms: object, JSON, Arrow and text.

A type is a small immutable value. Table descriptors contain the JSON form; the Arrow form is the
layout of log batches; the text form (`DECIMAL(10, 2) NOT NULL`) is for people, the command line
and messages.

| root in JSON                   | JSON keys            | Arrow                 | text             |
|--------------------------------|----------------------|-----------------------|------------------|
| BOOLEAN, TINYINT, SMALLINT     |                      | bool, int8, int16     | the root         |
| INTEGER, BIGINT                |                      | int32, int64          | INT, BIGINT      |
| FLOAT, DOUBLE                  |                      | float32, float64      | the root         |
| CHAR                           | length               | utf8                  | CHAR(n)          |
| STRING, BYTES, DATE            |                      | utf8, binary, date32  | the root         |
| BINARY                         | length               | fixed_size_binary     | BINARY(n)        |
| DECIMAL                        | precision, scale     | decimal128            | DECIMAL(p, s)    |
| TIME_WITHOUT_TIME_ZONE         | precision            | time32 or time64      | TIME(p)          |
| TIMESTAMP_WITHOUT_TIME_ZONE    | precision            | timestamp             | TIMESTAMP(p)     |
| TIMESTAMP_WITH_LOCAL_TIME_ZONE | precision            | same with tz "UTC"    | TIMESTAMP_LTZ(p) |
| ARRAY                          | element_type         | list, child "item"    | ARRAY<e>         |
| MAP                            | key_type, value_type | map                   | MAP<k, v>        |
| ROW                            | fields               | struct                | ROW<a INT, …>    |

`nullable` is written only when false. Unknown JSON keys are ignored. Nothing here touches a file
or a socket; pyarrow is imported on first use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

from zufluss.errors import InvalidTableError

if TYPE_CHECKING:
    import pyarrow as pa

NESTING_MAX = 64
"""Types nested deeper than this are refused: decoding them is recursive."""
UNKNOWN_ID = -1
"""The id of a column or row field that has none yet."""
_INT32_MAX = 2**31 - 1


class Root(StrEnum):
    """The kind of a type, spelled as in JSON."""

    BOOLEAN = "BOOLEAN"
    TINYINT = "TINYINT"
    SMALLINT = "SMALLINT"
    INTEGER = "INTEGER"
    BIGINT = "BIGINT"
    FLOAT = "FLOAT"
    DOUBLE = "DOUBLE"
    CHAR = "CHAR"
    STRING = "STRING"
    BYTES = "BYTES"
    BINARY = "BINARY"
    DECIMAL = "DECIMAL"
    DATE = "DATE"
    TIME = "TIME_WITHOUT_TIME_ZONE"
    TIMESTAMP = "TIMESTAMP_WITHOUT_TIME_ZONE"
    TIMESTAMP_LTZ = "TIMESTAMP_WITH_LOCAL_TIME_ZONE"
    ARRAY = "ARRAY"
    MAP = "MAP"
    ROW = "ROW"


NESTED = frozenset({Root.ARRAY, Root.MAP, Root.ROW})
"""Roots of types that contain other types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataType:
    """The type of a column, an element, a map entry or a row field."""

    root: Root
    """The kind of type."""
    nullable: bool = True
    """Whether NULL is a value of the type."""

    def as_nullable(self, nullable: bool) -> Self:
        """The same type with the given nullability."""
        return self if self.nullable == nullable else replace(self, nullable=nullable)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the type."""
        out: dict[str, Any] = {"type": self.root.value}
        if not self.nullable:
            out["nullable"] = False
        out.update(self._json_extra())
        return out

    def to_arrow(self) -> pa.DataType:
        """The Arrow type of a column of this type."""
        raise NotImplementedError

    def children(self) -> tuple[DataType, ...]:
        """The types directly inside this one."""
        return ()

    def _json_extra(self) -> dict[str, Any]:
        return {}

    def _text(self) -> str:
        return _TEXT_NAMES.get(self.root, self.root.value)

    def __str__(self) -> str:
        return self._text() if self.nullable else f"{self._text()} NOT NULL"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarType(DataType):
    """A type without parameters: numbers, BOOLEAN, STRING, BYTES, DATE."""

    def __post_init__(self) -> None:
        if self.root not in _SCALAR_ARROW:
            raise InvalidTableError(f"type {self.root} needs its parameters")

    def to_arrow(self) -> pa.DataType:
        """The Arrow type of a column of this type."""
        import pyarrow as pa

        return getattr(pa, _SCALAR_ARROW[self.root])()


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthType(DataType):
    """CHAR(length) or BINARY(length)."""

    length: int
    """Characters or bytes, at least 1."""

    def __post_init__(self) -> None:
        _check_range(self.root, "length", self.length, 1, _INT32_MAX)

    def to_arrow(self) -> pa.DataType:
        """The Arrow type of a column of this type."""
        import pyarrow as pa

        return pa.utf8() if self.root is Root.CHAR else pa.binary(self.length)

    def _json_extra(self) -> dict[str, Any]:
        return {"length": self.length}

    def _text(self) -> str:
        return f"{self.root.value}({self.length})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecimalType(DataType):
    """DECIMAL(precision, scale)."""

    root: Root = Root.DECIMAL
    """Always DECIMAL."""
    precision: int
    """Digits in all, 1 to 38."""
    scale: int
    """Digits after the point, 0 to precision."""

    def __post_init__(self) -> None:
        _check_range(self.root, "precision", self.precision, 1, 38)
        _check_range(self.root, "scale", self.scale, 0, self.precision)

    def to_arrow(self) -> pa.DataType:
        """The Arrow type of a column of this type."""
        import pyarrow as pa

        return pa.decimal128(self.precision, self.scale)

    def _json_extra(self) -> dict[str, Any]:
        return {"precision": self.precision, "scale": self.scale}

    def _text(self) -> str:
        return f"DECIMAL({self.precision}, {self.scale})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemporalType(DataType):
    """TIME, TIMESTAMP or TIMESTAMP_LTZ with a precision of fractional seconds."""

    precision: int
    """Digits of the fraction of a second, 0 to 9."""

    def __post_init__(self) -> None:
        _check_range(self.root, "precision", self.precision, 0, 9)

    @property
    def unit(self) -> str:
        """The Arrow time unit that holds the precision: s, ms, us or ns."""
        return ("s", "ms", "us", "ns")[(self.precision + 2) // 3]

    def to_arrow(self) -> pa.DataType:
        """The Arrow type of a column of this type."""
        import pyarrow as pa

        if self.root is Root.TIME:
            return pa.time32(self.unit) if self.precision <= 3 else pa.time64(self.unit)
        return pa.timestamp(self.unit, "UTC" if self.root is Root.TIMESTAMP_LTZ else None)

    def _json_extra(self) -> dict[str, Any]:
        return {"precision": self.precision}

    def _text(self) -> str:
        return f"{_TEXT_NAMES[self.root]}({self.precision})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayType(DataType):
    """ARRAY<element>."""

    root: Root = Root.ARRAY
    """Always ARRAY."""
    element: DataType
    """The type of the elements."""

    def to_arrow(self) -> pa.DataType:
        """The Arrow type of a column of this type."""
        import pyarrow as pa

        return pa.list_(arrow_field("item", self.element))

    def children(self) -> tuple[DataType, ...]:
        """The element type."""
        return (self.element,)

    def _json_extra(self) -> dict[str, Any]:
        return {"element_type": self.element.to_json()}

    def _text(self) -> str:
        return f"ARRAY<{self.element}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class MapType(DataType):
    """MAP<key, value>; keys are never NULL."""

    root: Root = Root.MAP
    """Always MAP."""
    key: DataType
    """The type of the keys."""
    value: DataType
    """The type of the values."""

    def to_arrow(self) -> pa.DataType:
        """The Arrow type of a column of this type."""
        import pyarrow as pa

        key = pa.field("key", self.key.to_arrow(), nullable=False)
        return pa.map_(key, arrow_field("value", self.value))

    def children(self) -> tuple[DataType, ...]:
        """Key type and value type."""
        return (self.key, self.value)

    def _json_extra(self) -> dict[str, Any]:
        return {"key_type": self.key.to_json(), "value_type": self.value.to_json()}

    def _text(self) -> str:
        return f"MAP<{self.key}, {self.value}>"


@dataclass(frozen=True, slots=True)
class RowField:
    """One named field of a ROW."""

    name: str
    """The field's name."""
    data_type: DataType
    """The field's type."""
    description: str | None = None
    """A comment."""
    field_id: int = UNKNOWN_ID
    """The id, unique in the table; −1 until the schema gives one."""

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the field."""
        out: dict[str, Any] = {"name": self.name, "field_type": self.data_type.to_json()}
        if self.description is not None:
            out["description"] = self.description
        out["field_id"] = self.field_id
        return out

    def __str__(self) -> str:
        return f"{quote_name(self.name)} {self.data_type}{comment_clause(self.description)}"


T = TypeVar("T", str, int)


def repeated(items: Iterable[T]) -> list[T]:
    """The values that occur more than once, sorted."""
    return sorted(item for item, count in Counter(items).items() if count > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowType(DataType):
    """ROW<name type, …>."""

    root: Root = Root.ROW
    """Always ROW."""
    fields: tuple[RowField, ...]
    """The fields in order."""

    def __post_init__(self) -> None:
        doubles = repeated(field.name for field in self.fields)
        if doubles:
            raise InvalidTableError(f"a ROW has the field {doubles} twice; rename one of them")

    def to_arrow(self) -> pa.DataType:
        """The Arrow type of a column of this type."""
        import pyarrow as pa

        return pa.struct([arrow_field(field.name, field.data_type) for field in self.fields])

    def children(self) -> tuple[DataType, ...]:
        """The types of the fields."""
        return tuple(field.data_type for field in self.fields)

    def _json_extra(self) -> dict[str, Any]:
        return {"fields": [field.to_json() for field in self.fields]}

    def _text(self) -> str:
        return f"ROW<{', '.join(map(str, self.fields))}>"


_SCALAR_ARROW = {
    Root.BOOLEAN: "bool_",
    Root.TINYINT: "int8",
    Root.SMALLINT: "int16",
    Root.INTEGER: "int32",
    Root.BIGINT: "int64",
    Root.FLOAT: "float32",
    Root.DOUBLE: "float64",
    Root.STRING: "utf8",
    Root.BYTES: "binary",
    Root.DATE: "date32",
}
_TEXT_NAMES = {
    Root.INTEGER: "INT",
    Root.TIME: "TIME",
    Root.TIMESTAMP: "TIMESTAMP",
    Root.TIMESTAMP_LTZ: "TIMESTAMP_LTZ",
}

BOOLEAN = ScalarType(root=Root.BOOLEAN)
TINYINT = ScalarType(root=Root.TINYINT)
SMALLINT = ScalarType(root=Root.SMALLINT)
INTEGER = ScalarType(root=Root.INTEGER)
BIGINT = ScalarType(root=Root.BIGINT)
FLOAT = ScalarType(root=Root.FLOAT)
DOUBLE = ScalarType(root=Root.DOUBLE)
STRING = ScalarType(root=Root.STRING)
BYTES = ScalarType(root=Root.BYTES)
DATE = ScalarType(root=Root.DATE)


def _check_range(root: Root, what: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        name = _TEXT_NAMES.get(root, root.value)
        raise InvalidTableError(
            f"{what} {value!r} of a {name} is not allowed; give a number from {low} to {high}"
        )


def arrow_field(name: str, data_type: DataType) -> pa.Field:
    """The Arrow field of a named type, with its nullability."""
    import pyarrow as pa

    return pa.field(name, data_type.to_arrow(), nullable=data_type.nullable)


def quote_name(name: str) -> str:
    """A column or field name as it stands in text: in back-quotes unless it is a plain word."""
    plain = name.isidentifier() and name.isascii() and name.upper() not in ("PRIMARY", "COMMENT")
    return name if plain else "`" + name.replace("`", "``") + "`"


def fluss_text(data_type: DataType) -> str:
    """The type as messages of Fluss show it: the name of every field of a ROW is in back-quotes."""
    match data_type:
        case ArrayType():
            text = f"ARRAY<{fluss_text(data_type.element)}>"
        case MapType():
            text = f"MAP<{fluss_text(data_type.key)}, {fluss_text(data_type.value)}>"
        case RowType():
            fields = (
                (f.name.replace("`", "``"), fluss_text(f.data_type)) for f in data_type.fields
            )
            text = f"ROW<{', '.join(f'`{name}` {type_}' for name, type_ in fields)}>"
        case _:
            return str(data_type)
    return text if data_type.nullable else f"{text} NOT NULL"


def comment_clause(comment: str | None) -> str:
    """The ` COMMENT '…'` clause, or nothing."""
    return "" if comment is None else " COMMENT '" + comment.replace("'", "''") + "'"


def walk(data_type: DataType) -> Iterator[DataType]:
    """The type and everything inside it, parents first."""
    yield data_type
    for child in data_type.children():
        yield from walk(child)


def assign_field_ids(data_type: DataType, next_id: Callable[[], int], keep: bool) -> DataType:
    """Number the ROW fields inside a type depth-first; with `keep`, existing ids stay."""
    if isinstance(data_type, ArrayType):
        return replace(data_type, element=assign_field_ids(data_type.element, next_id, keep))
    if isinstance(data_type, MapType):
        key = assign_field_ids(data_type.key, next_id, keep)
        return replace(data_type, key=key, value=assign_field_ids(data_type.value, next_id, keep))
    if not isinstance(data_type, RowType):
        return data_type
    fields = []
    for field in data_type.fields:
        field_id = field.field_id if keep and field.field_id != UNKNOWN_ID else next_id()
        inner = assign_field_ids(field.data_type, next_id, keep)
        fields.append(replace(field, data_type=inner, field_id=field_id))
    return replace(data_type, fields=tuple(fields))


def from_json(obj: object, depth: int = 0) -> DataType:
    """Parse the type of a JSON object; `InvalidTableError` says what is wrong."""
    if depth > NESTING_MAX:
        raise InvalidTableError(f"a type is nested deeper than {NESTING_MAX} levels; flatten it")
    if not isinstance(obj, Mapping) or not isinstance(obj.get("type"), str):
        raise InvalidTableError(f"a data type must be an object with a 'type', not {obj!r:.80}")
    try:
        root = Root(obj["type"])
    except ValueError:
        allowed = ", ".join(known.value for known in Root)
        raise InvalidTableError(
            f"data type {obj['type']!r:.80} is not known; allowed are {allowed}"
        ) from None
    nullable = obj.get("nullable", True)
    if not isinstance(nullable, bool):
        raise InvalidTableError(f"'nullable' of a {root} must be true or false, not {nullable!r}")
    if root in _SCALAR_ARROW:
        return ScalarType(root=root, nullable=nullable)
    if root in NESTED:
        return _nested_from_json(root, obj, nullable, depth + 1)
    if root is Root.DECIMAL:
        precision, scale = obj.get("precision", 10), obj.get("scale", 0)
        return DecimalType(precision=precision, scale=scale, nullable=nullable)
    if root in (Root.CHAR, Root.BINARY):
        return LengthType(root=root, length=obj.get("length", 1), nullable=nullable)
    precision = obj.get("precision", 0 if root is Root.TIME else 6)
    return TemporalType(root=root, precision=precision, nullable=nullable)


def _nested_from_json(
    root: Root, obj: Mapping[str, object], nullable: bool, depth: int
) -> DataType:
    if root is Root.ARRAY:
        element = from_json(obj.get("element_type"), depth)
        return ArrayType(element=element, nullable=nullable)
    if root is Root.MAP:
        key, value = from_json(obj.get("key_type"), depth), from_json(obj.get("value_type"), depth)
        return MapType(key=key.as_nullable(False), value=value, nullable=nullable)
    fields = obj.get("fields")
    if not isinstance(fields, list):
        raise InvalidTableError(f"a ROW needs a list of 'fields', not {fields!r:.80}")
    return RowType(fields=tuple(_field_from_json(f, depth) for f in fields), nullable=nullable)


def _field_from_json(obj: object, depth: int) -> RowField:
    if not isinstance(obj, Mapping) or not isinstance(obj.get("name"), str):
        raise InvalidTableError(f"a ROW field must be an object with a 'name', not {obj!r:.80}")
    field_id = obj.get("field_id", UNKNOWN_ID)
    if isinstance(field_id, bool) or not isinstance(field_id, int):
        raise InvalidTableError(f"'field_id' of {obj['name']!r} must be a number, not {field_id!r}")
    description = obj.get("description")
    return RowField(
        name=obj["name"],
        data_type=from_json(obj.get("field_type"), depth),
        description=None if description is None else str(description),
        field_id=field_id,
    )


def check_unique(names: Sequence[str], what: str) -> None:
    """Raise if a name occurs twice."""
    doubles = repeated(names)
    if doubles:
        raise InvalidTableError(f"{what} {', '.join(doubles)} is given twice; keep one of each")
