"""The columns of a table: names, types, ids, primary key.

A schema is immutable and always consistent: its constructor checks names, keys and ids, makes
primary-key columns NOT NULL and assigns missing ids. Column ids survive every change of the table;
readers use them to align old batches with a new schema, and predicates use them to name columns.
Numbering is depth-first (a ROW column, its fields, then the next column), as in the clients.

JSON form (`GetTableSchema.schema_json`, and inside the table descriptor):

| key                   | value                                                              |
|-----------------------|--------------------------------------------------------------------|
| version               | 1                                                                  |
| columns               | [{name, data_type, comment?, agg_function?, id}]                   |
| primary_key           | [name], absent if there is none; an empty list is refused          |
| auto_increment_column | [name], absent if there is none; at most one                       |
| highest_field_id      | the largest id ever given, also to columns that are gone           |

Unknown keys are ignored when reading. Unknown aggregation functions are kept, so that clients can
read tables of a newer server; CREATE TABLE refuses them (`agg_columns.py`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Self

from zufluss.errors import InvalidTableError
from zufluss.model import types as t
from zufluss.model.aggregate import AggFunction
from zufluss.model.arrow_types import from_arrow
from zufluss.model.ddl import parse_columns
from zufluss.model.foreign_schemas import arrow_schema_of
from zufluss.model.html import html_table

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    """The column's name, unique in the table."""
    data_type: t.DataType
    """Its type; `data_type.nullable` says whether it may hold NULL."""
    comment: str | None = None
    """A comment."""
    id: int = t.UNKNOWN_ID
    """The id that outlives renames and moves; −1 until the schema gives one."""
    agg_function: AggFunction | None = None
    """How an aggregation table merges the column."""

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the column."""
        out: dict[str, Any] = {"name": self.name, "data_type": self.data_type.to_json()}
        if self.comment is not None:
            out["comment"] = self.comment
        if self.agg_function is not None:
            out["agg_function"] = self.agg_function.to_json()
        out["id"] = self.id
        return out

    @classmethod
    def from_json(cls, obj: object) -> Self:
        """The column of a JSON object."""
        if not isinstance(obj, Mapping) or not isinstance(obj.get("name"), str):
            raise InvalidTableError(f"a column must be an object with a 'name', not {obj!r:.80}")
        comment, column_id = obj.get("comment"), obj.get("id", t.UNKNOWN_ID)
        if isinstance(column_id, bool) or not isinstance(column_id, int):
            raise InvalidTableError(f"id {column_id!r:.40} of {obj['name']!r} is not a number")
        return cls(
            name=obj["name"],
            data_type=t.from_json(obj.get("data_type")),
            comment=None if comment is None else str(comment),
            id=column_id,
            agg_function=_agg_from_json(obj.get("agg_function"), obj["name"]),
        )

    def __str__(self) -> str:
        function = "" if self.agg_function is None else f" {self.agg_function}"
        comment = t.comment_clause(self.comment)
        return f"{t.quote_name(self.name)} {self.data_type}{function}{comment}"


def _agg_from_json(obj: object, column: str) -> AggFunction | None:
    if obj is None:
        return None
    name = obj.get("type") if isinstance(obj, Mapping) else None
    parameters = obj.get("parameters") if isinstance(obj, Mapping) else None
    if not isinstance(name, str) or not isinstance(parameters, Mapping | None):
        raise InvalidTableError(
            f"agg_function {obj!r:.80} of column {column!r:.80} must be an object with a 'type', "
            "and maybe 'parameters'"
        )
    return AggFunction.named(name, parameters)


REPR_CHARACTERS_MAX: Final = 100
"""A longer `repr` of a schema has one column per line."""


@dataclass(frozen=True, slots=True, repr=False)
class Schema:
    """The columns of a table and its primary key; the module describes the constructor."""

    columns: tuple[Column, ...]
    """The columns in order."""
    primary_key: tuple[str, ...] = ()
    """Names of the primary-key columns, empty for a log table."""
    auto_increment_column: tuple[str, ...] = ()
    """The column the server fills, none or one."""
    highest_field_id: int = t.UNKNOWN_ID
    """The largest id ever given; −1 stands for the largest in use."""
    _positions: dict[str, int] = field(init=False, repr=False, compare=False)
    _arrow: Any = field(init=False, repr=False, compare=False, default=None)
    _json: bytes | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        columns = _with_ids(tuple(self.columns), self.highest_field_id)
        _check_names(columns, self.primary_key, self.auto_increment_column)
        key = frozenset(self.primary_key)
        columns = tuple(
            replace(column, data_type=column.data_type.as_nullable(False))
            if column.name in key
            else column
            for column in columns
        )
        largest = max(_ids(self.columns), default=t.UNKNOWN_ID)
        if t.UNKNOWN_ID < self.highest_field_id < largest:
            raise InvalidTableError(
                f"highest_field_id {self.highest_field_id} is below the id {largest} of a column; "
                f"give {largest} or more, or leave it out"
            )
        highest = max(_ids(columns), default=t.UNKNOWN_ID)
        set_ = object.__setattr__  # the one place that may: the value is not built yet
        set_(self, "columns", columns)
        set_(self, "primary_key", tuple(self.primary_key))
        set_(self, "auto_increment_column", tuple(self.auto_increment_column))
        set_(self, "highest_field_id", max(highest, self.highest_field_id))
        set_(self, "_positions", {column.name: i for i, column in enumerate(columns)})

    @classmethod
    def of(
        cls,
        source: Any,
        primary_key: str | Sequence[str] | None = (),
        auto_increment_column: str | Sequence[str] | None = (),
    ) -> Schema:
        """A schema from a column list as text, from columns, or from what another library has.

        That is a pyarrow schema, a polars `Schema`, a polars or pandas `DataFrame`, or any object
        that exports an Arrow schema (`model/foreign_schemas.py`). Text may have a
        `PRIMARY KEY (…)` clause; the argument wins.

        >>> Schema.of("id BIGINT, name STRING", primary_key="id")
        Schema(id BIGINT NOT NULL, name STRING, PRIMARY KEY (id))
        """
        primary_key = names_of(primary_key)
        auto_increment_column = names_of(auto_increment_column)
        if isinstance(source, Schema):
            return source if not primary_key else replace(source, primary_key=primary_key)
        if isinstance(source, str):
            texts, key = parse_columns(source)
            columns = [
                Column(c.name, c.data_type, c.comment, agg_function=c.agg_function) for c in texts
            ]
            primary_key = primary_key or tuple(key)
        else:
            columns = _columns_of(source)
        return cls(tuple(columns), primary_key, auto_increment_column)

    @classmethod
    def from_json(cls, source: bytes | str | Mapping[str, Any]) -> Self:
        """The schema of its JSON, as an object or as text."""
        obj = parse_object(source, "a schema") if isinstance(source, (bytes, str)) else source
        columns = obj.get("columns") if isinstance(obj, Mapping) else None
        if not isinstance(columns, list):
            raise InvalidTableError(f"a schema needs a list of 'columns', not {columns!r:.80}")
        highest = obj.get("highest_field_id", t.UNKNOWN_ID)
        if isinstance(highest, bool) or not isinstance(highest, int):
            raise InvalidTableError(f"highest_field_id {highest!r:.40} is not a number")
        primary_key = name_list(obj, "primary_key")
        if not primary_key and obj.get("primary_key") is not None:
            raise InvalidTableError(
                "'primary_key' is empty; name its columns, or leave it out for a log table"
            )
        return cls(
            columns=tuple(Column.from_json(column) for column in columns),
            primary_key=primary_key,
            auto_increment_column=name_list(obj, "auto_increment_column"),
            highest_field_id=highest,
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the schema."""
        out: dict[str, Any] = {"version": 1, "columns": [c.to_json() for c in self.columns]}
        if self.primary_key:
            out["primary_key"] = list(self.primary_key)
        if self.auto_increment_column:
            out["auto_increment_column"] = list(self.auto_increment_column)
        out["highest_field_id"] = self.highest_field_id
        return out

    def to_json_bytes(self) -> bytes:
        """The JSON on the wire and in storage; made once, which takes 10 ms for 10,000 columns."""
        if self._json is None:
            object.__setattr__(self, "_json", dump_object(self.to_json()))
        assert self._json is not None
        return self._json

    @property
    def arrow(self) -> pa.Schema:
        """The Arrow schema of a batch with all columns, in order; made once."""
        if self._arrow is None:
            import pyarrow as pa

            fields = [t.arrow_field(column.name, column.data_type) for column in self.columns]
            object.__setattr__(self, "_arrow", pa.schema(fields))
        return self._arrow

    @property
    def names(self) -> tuple[str, ...]:
        """The column names in order."""
        return tuple(column.name for column in self.columns)

    @property
    def ids(self) -> tuple[int, ...]:
        """The column ids in order."""
        return tuple(column.id for column in self.columns)

    def index_of(self, name: str) -> int:
        """The position of a column; `InvalidTableError` names the existing columns."""
        at = self._positions.get(name)
        if at is None:
            raise InvalidTableError(
                f"column {name!r:.80} does not exist; the columns are {', '.join(self.names)}"
            )
        return at

    def column(self, name: str) -> Column:
        """The column of a name."""
        return self.columns[self.index_of(name)]

    def column_of_id(self, column_id: int) -> Column | None:
        """The top-level column of an id, None if there is none."""
        return next((column for column in self.columns if column.id == column_id), None)

    def indexes_of(self, names: Iterable[str]) -> tuple[int, ...]:
        """The positions of several columns."""
        return tuple(self.index_of(name) for name in names)

    def add_column(
        self,
        name: str,
        data_type: t.DataType,
        comment: str | None = None,
        agg_function: AggFunction | None = None,
    ) -> Schema:
        """The schema with one more column at the end, its ids the next free ones."""
        return self.add_columns([Column(name, data_type, comment, agg_function=agg_function)])

    def add_columns(self, columns: Iterable[Column]) -> Schema:
        """The schema with these columns at the end; their ids are the next free ones."""
        counter = itertools.count(self.highest_field_id + 1)
        added = []
        for column in columns:
            column_id = next(counter)
            data_type = t.assign_field_ids(column.data_type, counter.__next__, keep=False)
            added.append(replace(column, id=column_id, data_type=data_type))
        highest = max(_ids(added), default=self.highest_field_id)
        return replace(self, columns=(*self.columns, *added), highest_field_id=highest)

    def __contains__(self, name: object) -> bool:
        return name in self._positions

    def __len__(self) -> int:
        return len(self.columns)

    def __str__(self) -> str:
        return ", ".join(self._items())

    def _items(self) -> list[str]:
        """The column list as text, item by item."""
        items = [str(column) for column in self.columns]
        if self.primary_key:
            items.append(f"PRIMARY KEY ({', '.join(map(t.quote_name, self.primary_key))})")
        return items

    def __repr__(self) -> str:
        items = self._items()
        line = f"Schema({', '.join(items)})"
        return (
            line
            if len(line) <= REPR_CHARACTERS_MAX
            else "Schema(\n  " + ",\n  ".join(items) + "\n)"
        )

    def _repr_html_(self) -> str:
        rows = []
        for column in self.columns:
            kind = column.data_type.as_nullable(True)
            null = "" if column.data_type.nullable else "NOT NULL"
            key = "primary key" if column.name in self.primary_key else ""
            if column.name in self.auto_increment_column:
                key = "auto-increment"
            function = "" if column.agg_function is None else str(column.agg_function)
            rows.append((column.name, str(kind), null, key or function, column.comment or ""))
        return html_table(("column", "type", "null", "role", "comment"), rows)


def names_of(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names of columns; a text is one name, None is no name."""
    return (names,) if isinstance(names, str) else tuple(names or ())


def _columns_of(source: Any) -> list[Column]:
    """The columns of a schema of another library, or of a list of columns and Arrow fields."""
    arrow = arrow_schema_of(source)
    if arrow is None and (isinstance(source, Mapping) or not isinstance(source, Iterable)):
        raise InvalidTableError(
            f"a {type(source).__module__}.{type(source).__qualname__} is no schema; give a column "
            "list such as 'id BIGINT, name STRING', a zufluss.Schema, a pyarrow or polars schema, "
            "or a pyarrow table, polars or pandas DataFrame with the columns"
        )
    return [_column_of(item) for item in (source if arrow is None else arrow)]


def _column_of(item: Any) -> Column:
    """A column as it is, or the column of an Arrow field."""
    if isinstance(item, Column):
        return item
    if not hasattr(item, "nullable"):
        raise InvalidTableError(f"{item!r:.80} is no column; give zufluss.Columns or Arrow fields")
    try:
        return Column(item.name, from_arrow(item.type, item.nullable))
    except InvalidTableError as e:
        raise InvalidTableError(f"column {item.name!r:.80}: {e.message}") from None


def _field_ids(data_type: t.DataType) -> Iterable[int]:
    for inner in t.walk(data_type):
        if isinstance(inner, t.RowType):
            yield from (row_field.field_id for row_field in inner.fields)


def _ids(columns: Iterable[Column]) -> list[int]:
    """Every id in the columns and the ROW fields inside them."""
    return [i for c in columns for i in (c.id, *_field_ids(c.data_type))]


def _with_ids(columns: tuple[Column, ...], highest: int) -> tuple[Column, ...]:
    """Number columns without ids depth-first from zero; raises if only some have ids."""
    has_id = [column.id != t.UNKNOWN_ID for column in columns]
    if any(has_id) and not all(has_id):
        without = columns[has_id.index(False)].name
        raise InvalidTableError(
            f"column {without!r} has no id while others have one; give all columns an id or none"
        )
    keep = any(has_id)
    start = max([highest, *_ids(columns)], default=t.UNKNOWN_ID) + 1 if keep else 0
    counter = itertools.count(start)
    numbered = []
    for column in columns:
        column_id = column.id if keep else next(counter)
        data_type = t.assign_field_ids(column.data_type, counter.__next__, keep)
        numbered.append(replace(column, id=column_id, data_type=data_type))
    ids = _ids(numbered)
    if any(i < 0 for i in ids):
        raise InvalidTableError(f"column ids {sorted(i for i in ids if i < 0)} are negative")
    doubles = t.repeated(ids)
    if doubles:
        raise InvalidTableError(f"the ids {doubles} are given twice; each column has its own id")
    return tuple(numbered)


def _check_names(
    columns: tuple[Column, ...], primary_key: Sequence[str], auto_increment: Sequence[str]
) -> None:
    names = [column.name for column in columns]
    if not all(names):
        raise InvalidTableError("a column has an empty name; give it one")
    t.check_unique(names, "column")
    t.check_unique(primary_key, "primary key column")
    known, key = frozenset(names), frozenset(primary_key)
    for name in (*primary_key, *auto_increment):
        if name not in known:
            what = "primary key" if name in primary_key else "auto-increment"
            raise InvalidTableError(
                f"{what} column {name!r:.80} does not exist; the columns are {', '.join(names)}"
            )
    for column in columns:
        if column.agg_function is not None and column.name in key:
            raise InvalidTableError(
                f"primary key column {column.name!r} cannot have an aggregation function; remove it"
            )
    _check_auto_increment(columns, primary_key, auto_increment)


def _check_auto_increment(
    columns: tuple[Column, ...], primary_key: Sequence[str], auto_increment: Sequence[str]
) -> None:
    if not auto_increment:
        return
    if len(auto_increment) > 1:
        raise InvalidTableError(
            f"columns {', '.join(auto_increment)} are auto-increment; at most one column may be"
        )
    if not primary_key:
        raise InvalidTableError("an auto-increment column needs a primary key; define one")
    name = auto_increment[0]
    if name in primary_key:
        raise InvalidTableError(f"auto-increment column {name!r} cannot be in the primary key")
    data_type = next(column.data_type for column in columns if column.name == name)
    if data_type.root not in (t.Root.INTEGER, t.Root.BIGINT):
        raise InvalidTableError(
            f"auto-increment column {name!r} is {data_type}; it must be INT or BIGINT"
        )


def parse_object(source: bytes | str, what: str) -> dict[str, Any]:
    """A JSON object from its text; raises `InvalidTableError` if it is anything else."""
    try:
        obj = json.loads(source)
        dump_object(obj)  # half a surrogate pair can be parsed, but neither stored nor sent
    except (ValueError, RecursionError) as e:
        raise InvalidTableError(f"{what} is not valid JSON: {e}") from None
    if not isinstance(obj, dict):
        raise InvalidTableError(f"{what} must be a JSON object, not {obj!r:.80}")
    return obj


def dump_object(obj: Mapping[str, Any]) -> bytes:
    """A JSON object as compact UTF-8, for the wire and for storage."""
    return json.dumps(obj, ensure_ascii=False, separators=(",", ":")).encode()


def dump_with(head: Mapping[str, Any], key: str, value: bytes, tail: Mapping[str, Any]) -> bytes:
    """`dump_object` of `head`, then `key` with a value that is encoded already, then `tail`.

    >>> dump_with({"a": 1}, "b", b'[2]', {"c": 3})
    b'{"a":1,"b":[2],"c":3}'
    """
    encoded = json.dumps(key).encode() + b":" + value
    parts = [dump_object(head)[1:-1], encoded, dump_object(tail)[1:-1]]
    return b"{" + b",".join(filter(None, parts)) + b"}"


def name_list(obj: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The list of names under a key, empty if the key is absent."""
    names = obj.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidTableError(f"'{key}' must be a list of column names, not {names!r:.80}")
    return tuple(names)
