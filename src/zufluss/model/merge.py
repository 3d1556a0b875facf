"""Rules of merge engines: what a primary-key table does with a second row of a key.

| engine      | needs                                           | deletes                |
|-------------|-------------------------------------------------|------------------------|
| (none)      |                                                 | ALLOW, IGNORE, DISABLE |
| first_row   | primary key                                     | IGNORE, DISABLE        |
| versioned   | primary key, version column (`VERSION_ROOTS`)   | IGNORE, DISABLE        |
| aggregation | primary key, changelog image FULL               | ALLOW, IGNORE, DISABLE |

Aggregation functions of columns belong to the aggregation engine alone. All refusals are 39.
"""

from __future__ import annotations

from collections.abc import Mapping

from zufluss.config import table_options as o
from zufluss.errors import ConfigError
from zufluss.model.schema import Column, Schema
from zufluss.model.table import TableDescriptor
from zufluss.model.types import Root

VERSION_ROOTS = (Root.INTEGER, Root.BIGINT, Root.TIMESTAMP, Root.TIMESTAMP_LTZ)
"""Types a version column may have."""
_NUMBERS = frozenset(
    {Root.TINYINT, Root.SMALLINT, Root.INTEGER, Root.BIGINT, Root.FLOAT, Root.DOUBLE, Root.DECIMAL}
)
_TEXTS = frozenset({Root.CHAR, Root.STRING})
_TIMES = frozenset({Root.DATE, Root.TIME, Root.TIMESTAMP, Root.TIMESTAMP_LTZ})
_AGG_ROOTS = {
    "sum": _NUMBERS,
    "product": _NUMBERS,
    "max": _NUMBERS | _TEXTS | _TIMES,
    "min": _NUMBERS | _TEXTS | _TIMES,
    "listagg": _TEXTS,
    "string_agg": _TEXTS,
    "bool_and": frozenset({Root.BOOLEAN}),
    "bool_or": frozenset({Root.BOOLEAN}),
    "rbm32": frozenset({Root.BYTES}),
    "rbm64": frozenset({Root.BYTES}),
}
_DELIMITED = ("listagg", "string_agg")


def merge_engine(properties: Mapping[str, str]) -> str | None:
    """The canonical name of the merge engine, None if there is none or it is unknown."""
    text = properties.get(o.TABLE_MERGE_ENGINE.key, "").strip().lower()
    return text if text in o.TABLE_MERGE_ENGINE.allowed else None


def check_merge_engine(descriptor: TableDescriptor) -> None:
    """Raise 39 unless merge engine, delete behaviour and aggregation functions fit the table."""
    engine = merge_engine(descriptor.properties)
    if engine is not None and not descriptor.has_primary_key:
        raise ConfigError(
            f"{o.TABLE_MERGE_ENGINE.key} = {engine} needs a primary key; define one or remove it"
        )
    _check_delete_behavior(descriptor, engine)
    check_agg_functions(descriptor.schema, engine)
    if engine == "versioned":
        _check_version_column(descriptor)
    image = descriptor.properties.get(o.TABLE_CHANGELOG_IMAGE.key, "FULL").strip().upper()
    if engine == "aggregation" and image == "WAL":
        raise ConfigError(
            f"{o.TABLE_CHANGELOG_IMAGE.key} = WAL does not go with the aggregation engine, which "
            "needs old values to undo; set FULL or remove it"
        )


def _check_delete_behavior(descriptor: TableDescriptor, engine: str | None) -> None:
    key = o.TABLE_DELETE_BEHAVIOR.key
    text = descriptor.properties.get(key)
    if text is None:
        return
    if not descriptor.has_primary_key:
        raise ConfigError(f"{key} is for primary-key tables; remove it from this log table")
    if text.strip().upper() == "ALLOW" and engine in ("first_row", "versioned"):
        raise ConfigError(
            f"{key} = {text} does not go with the {engine} engine, which cannot delete; "
            "allowed: IGNORE, DISABLE"
        )


def _check_version_column(descriptor: TableDescriptor) -> None:
    key = o.TABLE_MERGE_ENGINE_VERSIONED_VER_COLUMN.key
    name = descriptor.properties.get(key, "").strip()
    if name not in descriptor.schema:
        raise ConfigError(
            f"{key} = {name!r:.80} is no column; the versioned engine needs one of "
            f"{', '.join(descriptor.schema.names)}"
        )
    data_type = descriptor.schema.column(name).data_type
    if data_type.root not in VERSION_ROOTS:
        raise ConfigError(
            f"{key} = {name} is {data_type}; allowed: INT, BIGINT, TIMESTAMP, TIMESTAMP_LTZ"
        )


def check_agg_functions(schema: Schema, engine: str | None) -> None:
    """Raise 39 for aggregation functions without the engine, or that do not fit their column."""
    for column in schema.columns:
        if column.agg_function is None:
            continue
        if engine != "aggregation":
            raise ConfigError(
                f"column {column.name!r} has the aggregation function {column.agg_function.type}; "
                f"set {o.TABLE_MERGE_ENGINE.key} = aggregation or remove the function"
            )
        _check_agg_function(column)


def _check_agg_function(column: Column) -> None:
    function = column.agg_function
    assert function is not None
    allowed = _AGG_ROOTS.get(function.type, frozenset(Root))
    if column.data_type.root not in allowed:
        names = ", ".join(sorted(root.name for root in allowed))
        raise ConfigError(
            f"aggregation function {function.type} cannot merge column {column.name!r} of type "
            f"{column.data_type}; allowed: {names}"
        )
    for key, value in function.parameters:
        if function.type not in _DELIMITED or key != "delimiter":
            raise ConfigError(
                f"aggregation function {function.type} of column {column.name!r} has no parameter "
                f"{key!r:.40}; only listagg and string_agg have one, delimiter"
            )
        if not value:
            raise ConfigError(f"the delimiter of column {column.name!r} is empty; give a text")
