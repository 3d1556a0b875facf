"""The aggregation functions of columns: from the forms that users write to the stored form.

A function can be named in three places; it is always stored in the schema:

| place                                                  | for                                  |
|--------------------------------------------------------|--------------------------------------|
| the schema: `pv BIGINT SUM`, `agg_function` in JSON    | everybody                            |
| `fields.<column>.agg = <function>` and                 | SQL dialects whose column lists have |
| `fields.<column>.<function>.<parameter> = <value>`     | no functions, Arrow schemas          |
| `table.merge-engine.aggregation.default-function`      | columns that name none               |

`fields.*` may be properties or custom properties of CREATE TABLE, or of an ALTER TABLE that adds
columns. They become part of the schema and are not stored themselves. Two places may name the same
function, but not different ones. On tables with other engines custom properties belong to the user,
except `fields.<column>.agg` of an existing column, which is refused: the engine was forgotten.

Every column outside the primary key has a function. An auto-increment column keeps its first
number: its function is `first_value_ignore_nulls`. All refusals have code 39.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from zufluss.config import table_options as o
from zufluss.config.nearest import suggestion
from zufluss.errors import ConfigError
from zufluss.model.aggregate import (
    BY,
    DELIMITER,
    FIRST_VALUE_IGNORE_NULLS,
    FLOATS,
    FUNCTIONS,
    IGNORE_RETRACT,
    LIMIT,
    OVERFLOW,
    AggFunction,
    canonical_function,
)
from zufluss.model.schema import Column, Schema
from zufluss.model.types import Root

AGGREGATION: Final = "aggregation"
"""The engine that merges column by column."""
PREFIX: Final = "fields."
"""Prefix of the options of single columns."""
LIMIT_MAX: Final = 2**31 - 1
"""The greatest `limit` of a list."""
_SUFFIX: Final = ".agg"
_DEFAULT: Final = o.TABLE_MERGE_ENGINE_AGGREGATION_DEFAULT_FUNCTION.key
_NUMBERED: Final = AggFunction(FIRST_VALUE_IGNORE_NULLS)
_BY_FUNCTIONS: Final = {"max_by": "max", "min_by": "min"}


class FieldOption(NamedTuple):
    """One `fields.*` option."""

    key: str
    """The whole key."""
    value: str
    """The value of the option."""
    column: str
    """The column that it configures."""
    function: str
    """The function it names, or whose parameter it sets; in canonical spelling."""
    parameter: str | None
    """The parameter it sets, None if it names the function."""

    @classmethod
    def of(cls, key: str, value: str) -> FieldOption:
        """The option of a key that begins with `fields.`."""
        rest = key.removeprefix(PREFIX)
        if rest.endswith(_SUFFIX):
            column = rest.removesuffix(_SUFFIX)
            option = cls(key, value, column, canonical_function(value), None)
        else:
            column, function, parameter = ("", "", *rest.rsplit(".", 2))[-3:]
            option = cls(key, value, column, canonical_function(function), parameter)
        if not option.column or not option.function or option.parameter == "":
            raise ConfigError(
                f"{key!r:.120} is not an option of a column; allowed: {PREFIX}<column>{_SUFFIX} = "
                f"<function> and {PREFIX}<column>.<function>.<parameter> = <value>"
            )
        return option


def is_field_option(key: str, schema: Schema, engine: str | None) -> bool:
    """Whether a property is a `fields.*` option, not a property of the user."""
    if not key.startswith(PREFIX):
        return False
    named = key.removeprefix(PREFIX).removesuffix(_SUFFIX)
    return engine == AGGREGATION or (key.endswith(_SUFFIX) and named in schema)


def take_field_options(
    properties: Mapping[str, str], schema: Schema, engine: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the properties without `fields.*`, and the `fields.*` alone."""
    ours = {k: v for k, v in properties.items() if is_field_option(k, schema, engine)}
    return {k: v for k, v in properties.items() if k not in ours}, ours


def merge_field_options(*sources: Mapping[str, str]) -> dict[str, str]:
    """The options of all sources; raises if two sources set a key to different values."""
    merged: dict[str, str] = {}
    for source in sources:
        for key, value in source.items():
            if merged.setdefault(key, value) != value:
                raise ConfigError(
                    f"{key} is {merged[key]!r:.80} among the properties and {value!r:.80} among "
                    "the custom properties; keep one"
                )
    return merged


def declare(
    schema: Schema,
    options: Mapping[str, str],
    default: str | None,
    engine: str | None,
    columns: Iterable[str] | None = None,
) -> Schema:
    """The schema with the functions of the options and the default function.

    Only `columns` may get a function; all columns if it is None.
    """
    options_of: dict[str, list[FieldOption]] = {}
    for option in map(FieldOption.of, options, options.values()):
        options_of.setdefault(option.column, []).append(option)
    open_columns = set(schema.names if columns is None else columns)
    for name, group in options_of.items():
        if name not in open_columns:
            names = ", ".join(c for c in schema.names if c in open_columns)
            raise ConfigError(
                f"{group[0].key!r:.120} is about the column {name!r:.80}, but the columns are "
                f"{names}; correct it or leave it out"
            )
    return _with_columns(
        schema,
        [
            _declared(schema, column, options_of.get(column.name, ()), default, engine)
            if column.name in open_columns
            else column
            for column in schema.columns
        ],
    )


def _with_columns(schema: Schema, columns: list[Column]) -> Schema:
    return schema if tuple(columns) == schema.columns else replace(schema, columns=tuple(columns))


def _declared(
    schema: Schema,
    column: Column,
    options: Iterable[FieldOption],
    default: str | None,
    engine: str | None,
) -> Column:
    """The column with the function that the schema, its options or the default give it."""
    function = column.agg_function
    for option in sorted(options, key=lambda each: each.parameter is not None):
        if option.parameter is None:
            _check_same(column, function, option)
            function = function or AggFunction(option.function)
            continue
        function = function or _fallback(schema, column, default, engine)
        _check_same(column, function, option)
        function = _with_parameter(column, function or AggFunction(option.function), option)
    return replace(column, agg_function=function or _fallback(schema, column, default, engine))


def _fallback(
    schema: Schema, column: Column, default: str | None, engine: str | None
) -> AggFunction | None:
    if engine != AGGREGATION or column.name in schema.primary_key:
        return None
    if column.name in schema.auto_increment_column:
        return _NUMBERED
    return None if default is None else AggFunction.named(default)


def _check_same(column: Column, function: AggFunction | None, option: FieldOption) -> None:
    if function is not None and function.type != option.function:
        raise ConfigError(
            f"{option.key} = {option.value!r:.80} is about the function {option.function}, but "
            f"column {column.name!r} has {function.type}; keep one of them"
        )
    if function is None and option.parameter is not None:
        raise ConfigError(
            f"{option.key} is a parameter, but column {column.name!r} has no function; set "
            f"{PREFIX}{column.name}{_SUFFIX} = {option.function} too"
        )


def _with_parameter(column: Column, function: AggFunction, option: FieldOption) -> AggFunction:
    added = AggFunction.named(function.type, {option.parameter or "": option.value})
    parameters = dict(function.parameters)
    for key, value in added.parameters:
        if parameters.setdefault(key, value) != value:
            raise ConfigError(
                f"{option.key} = {option.value!r:.80}, but column {column.name!r} has {key} = "
                f"{parameters[key]!r:.80} already; keep one of them"
            )
    return AggFunction(function.type, tuple(parameters.items()))


def check_agg_functions(schema: Schema, properties: Mapping[str, str], engine: str | None) -> None:
    """Raise 39 for functions without the engine, missing ones, and those that do not fit."""
    _check_default(properties, engine)
    for column in schema.columns:
        if engine != AGGREGATION and column.agg_function is not None:
            raise ConfigError(
                "Aggregation function is only supported for aggregation merge engine table. Column "
                f"{column.name!r} has the function {column.agg_function.type}; set "
                f"{o.TABLE_MERGE_ENGINE.key} = aggregation or remove the function"
            )
        if engine == AGGREGATION and column.name not in schema.primary_key:
            _check_column(schema, column)
            _check_room(column, properties)


def _check_default(properties: Mapping[str, str], engine: str | None) -> None:
    default = properties.get(_DEFAULT)
    if default is None:
        return
    if engine != AGGREGATION:
        raise ConfigError(
            f"{_DEFAULT} = {default!r:.80} is for the aggregation engine; set "
            f"{o.TABLE_MERGE_ENGINE.key} = aggregation or remove it"
        )
    name = canonical_function(default)
    if name not in FUNCTIONS:
        raise ConfigError(f"{_DEFAULT} = {_no_function(default)}")


def _no_function(name: str) -> str:
    near = suggestion(canonical_function(name), FUNCTIONS)
    allowed = ", ".join(sorted(FUNCTIONS))
    return f"{name!r:.80} is not an aggregation function{near}; allowed: {allowed}"


def _check_column(schema: Schema, column: Column) -> None:
    function = column.agg_function
    if function is None:
        raise ConfigError(
            f"column {column.name!r} has no aggregation function; name one, as in "
            f"'{column.name} {column.data_type} LAST_VALUE' or {PREFIX}{column.name}{_SUFFIX} = "
            f"last_value, or set {_DEFAULT} for all columns without one"
        )
    if function.type not in FUNCTIONS:
        raise ConfigError(f"column {column.name!r:.80}: {_no_function(function.type)}")
    allowed = FUNCTIONS[function.type].roots
    if column.data_type.root not in allowed:
        names = ", ".join(sorted(root.name for root in allowed))
        raise ConfigError(
            f"aggregation function {function.type} cannot merge column {column.name!r} of type "
            f"{column.data_type}; allowed: {names}"
        )
    if column.name in schema.auto_increment_column and function != _NUMBERED:
        raise ConfigError(
            f"auto-increment column {column.name!r} keeps its first number, so {function.type} "
            f"cannot merge it; leave the function out, or take {_NUMBERED.type}"
        )
    for key, value in function.parameters:
        _check_parameter(column, function, key, value)
    _check_by(schema, column, function)


def _check_room(column: Column, properties: Mapping[str, str]) -> None:
    """Refuse a growing text in a CHAR column of INDEXED rows, which has a fixed length."""
    assert column.agg_function is not None
    listed = DELIMITER in FUNCTIONS[column.agg_function.type].parameters
    row_format = properties.get(o.TABLE_KV_FORMAT.key, "").strip().upper()
    if listed and column.data_type.root is Root.CHAR and row_format == "INDEXED":
        raise ConfigError(
            f"aggregation function {column.agg_function.type} makes texts that are longer than "
            f"column {column.name!r} of type {column.data_type} in {o.TABLE_KV_FORMAT.key} = "
            "INDEXED; make the column a STRING, or take COMPACTED rows"
        )


def _check_parameter(column: Column, function: AggFunction, key: str, value: str) -> None:
    known = {**FUNCTIONS[function.type].parameters, IGNORE_RETRACT: ("true", "false")}
    what = f"parameter {key!r:.40} of {function.type} of column {column.name!r}"
    if key not in known:
        raise ConfigError(
            f"{what} does not exist{suggestion(key, known)}; allowed: {', '.join(sorted(known))}"
        )
    allowed = known[key]
    if allowed is not None and value not in allowed:
        raise ConfigError(f"{what} is {value!r:.80}; allowed: {', '.join(allowed)}")
    if key == DELIMITER and not value:
        raise ConfigError(f"{what} is empty; give a text")
    if key == LIMIT and not (
        value.isascii() and value.isdigit() and len(value) <= 10 and 1 <= int(value) <= LIMIT_MAX
    ):
        raise ConfigError(f"{what} is {value!r:.80}; allowed: 1 to {LIMIT_MAX}")
    root = column.data_type.root
    if key == OVERFLOW and (root in FLOATS or (root is Root.DECIMAL and value == "wrap")):
        raise ConfigError(
            f"{what} is {value!r}, but the column is {column.data_type}: FLOAT and DOUBLE become "
            "infinite, and DECIMAL can only refuse; remove the parameter"
        )


def _check_by(schema: Schema, column: Column, function: AggFunction) -> None:
    """Check that the `by` column of `max_by` or `min_by` exists and has the function max or min."""
    extreme = _BY_FUNCTIONS.get(function.type)
    if extreme is None:
        return
    name = function.parameter(BY)
    by = next((each for each in schema.columns if each.name == name), None)
    if by is None or by.agg_function is None or by.agg_function.type != extreme:
        fitting = [
            c.name for c in schema.columns if c.agg_function and c.agg_function.type == extreme
        ]
        raise ConfigError(
            f"{function.type} of column {column.name!r} goes by {name!r:.80}; set parameter "
            f"{BY} to a column of the function {extreme}: {', '.join(fitting) or 'there is none'}"
        )
