"""ALTER TABLE as pure functions: a descriptor in, the changed descriptor out, or a refusal.

SET and DELETE change alterable properties of the table and all custom properties. A new column goes
to the end and may be NULL: old batches have no value for it, and readers fill in NULL. Its
aggregation function may be given as `fields.*` options; functions of existing columns never change.
Everything else is refused with code 56 and the reason. The result must keep the rules of CREATE
TABLE, whose codes (15, 39) then apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Self

from zufluss.config import Configuration
from zufluss.config import options as server
from zufluss.config import table_options as o
from zufluss.config.nearest import suggestion
from zufluss.errors import InvalidAlterTableError, InvalidTableError
from zufluss.model.agg_columns import check_agg_functions, declare, is_field_option
from zufluss.model.aggregate import AggFunction
from zufluss.model.merge import merge_engine
from zufluss.model.partition import plain
from zufluss.model.schema import Column
from zufluss.model.table import TableDescriptor
from zufluss.model.types import DataType
from zufluss.model.validation import check_columns, check_table, closed_lake

TABLE_PREFIX = "table."
LAST = 0
"""The only position a column can be added at."""


class ConfigOp(IntEnum):
    """The operation on a property, numbered as on the wire."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


@dataclass(frozen=True, slots=True)
class PropertyChange:
    """One property to set or delete."""

    key: str
    """The property's key."""
    value: str | None
    """The new value; none to delete."""
    op: int = ConfigOp.SET
    """Set or delete."""


@dataclass(frozen=True, slots=True)
class NewColumn:
    """One column to add."""

    name: str
    """Its name."""
    data_type: DataType
    """Its type."""
    comment: str | None = None
    """A comment."""
    position: int = LAST
    """The position: 0 last, 1 first, 3 after another column."""
    agg_function: AggFunction | None = None
    """How an aggregation table merges it."""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """All changes of one ALTER TABLE."""

    properties: Sequence[PropertyChange] = ()
    """Properties to change."""
    add_columns: Sequence[NewColumn] = ()
    """Columns to add."""
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Columns to drop, rename or modify, by the verb; these are refused."""

    @classmethod
    def of_columns(
        cls,
        properties: Sequence[PropertyChange],
        add: Sequence[NewColumn],
        drop: Sequence[str],
        rename: Sequence[str],
        modify: Sequence[str],
    ) -> Self:
        """The changes of a request, with the columns to drop, rename and modify."""
        verbs = {"drop": drop, "rename": rename, "modify": modify}
        return cls(properties, add, {verb: names for verb, names in verbs.items() if names})


def alter_table(
    descriptor: TableDescriptor, changes: TableChanges, conf: Configuration
) -> TableDescriptor:
    """The altered descriptor; the same object if nothing changes."""
    for verb, names in changes.refused.items():
        raise InvalidAlterTableError(
            f"Not support {verb} column now. A table only takes new columns at the end; to {verb} "
            f"{', '.join(names)}, create a new table and copy the data"
        )
    if changes.add_columns:
        return add_columns(
            descriptor, changes.add_columns, _field_options(changes.properties, descriptor)
        )
    return alter_properties(descriptor, changes.properties, conf)


def _field_options(
    changes: Sequence[PropertyChange], descriptor: TableDescriptor
) -> dict[str, str]:
    """The `fields.*` options of a request that adds columns; other properties are refused."""
    engine = merge_engine(descriptor.properties)
    options: dict[str, str] = {}
    for change in changes:
        if not is_field_option(change.key, descriptor.schema, engine):
            raise InvalidAlterTableError(
                "properties and columns cannot change in one request; send two"
            )
        if change.op != ConfigOp.SET:
            raise InvalidAlterTableError(f"{change.key!r:.80} can only be SET (0) for a new column")
        _apply(options, change)
    return options


def alter_properties(
    descriptor: TableDescriptor, changes: Sequence[PropertyChange], conf: Configuration
) -> TableDescriptor:
    """The descriptor with changed properties; the same object if nothing changes."""
    properties = dict(descriptor.properties)
    custom = dict(descriptor.custom_properties)
    for change in changes:
        ours = change.key.startswith(TABLE_PREFIX)
        if ours:
            _check_alterable(change.key, descriptor)
        elif is_field_option(change.key, descriptor.schema, merge_engine(properties)):
            raise InvalidAlterTableError(
                f"{change.key!r:.80} cannot be altered: rows are merged by the function a column "
                "was created with; add another column, or create a new table"
            )
        _apply(properties if ours else custom, change)
    _fill_lake_format(descriptor, properties, conf)
    if properties == descriptor.properties and custom == descriptor.custom_properties:
        return descriptor
    changed = replace(descriptor, properties=properties, custom_properties=custom)
    check_table(changed, conf, live_servers=None)
    return changed


def _apply(target: dict[str, str], change: PropertyChange) -> None:
    if change.op == ConfigOp.DELETE:
        target.pop(change.key, None)
    elif change.op == ConfigOp.SET and change.value is not None:
        target[change.key] = change.value
    elif change.op == ConfigOp.SET:
        raise InvalidAlterTableError(f"SET of {change.key!r:.80} has no value; give one")
    else:
        raise InvalidAlterTableError(
            f"operation {change.op} on {change.key!r:.80} is not supported for tables; "
            "allowed: SET (0), DELETE (1)"
        )


def _check_alterable(key: str, descriptor: TableDescriptor) -> None:
    option = o.TABLE_OPTIONS.get(key)
    if option is None or not option.alterable:
        alterable = [known.key for known in o.TABLE_OPTIONS.values() if known.alterable]
        why = "cannot be altered" if option else f"is unknown{suggestion(key, o.TABLE_OPTIONS)}"
        raise InvalidAlterTableError(
            f"The option '{plain(key)}' is not supported to alter yet. It {why}; alterable: "
            f"{', '.join(alterable)}"
        )
    if key == o.TABLE_KV_STANDBY_REPLICA_ENABLED.key and not descriptor.has_primary_key:
        raise InvalidAlterTableError(f"{key} is for primary-key tables; this is a log table")
    if key.startswith("table.datalake.") and not _may_change_lake(key, descriptor):
        raise InvalidAlterTableError(
            f"The option '{key}' cannot be altered for tables that were created before the Fluss "
            "cluster enabled datalake. Their keys are not encoded for a lake; create a new table"
        )


def _may_change_lake(key: str, descriptor: TableDescriptor) -> bool:
    """Whether the table can join a lake: keys are encoded for the lake when a table is created."""
    if o.TABLE_DATALAKE_FORMAT.key in descriptor.properties:
        return True
    keyless = not descriptor.has_primary_key and not descriptor.bucket_keys
    return keyless and key == o.TABLE_DATALAKE_ENABLED.key


def _fill_lake_format(
    descriptor: TableDescriptor, properties: dict[str, str], conf: Configuration
) -> None:
    """A table without keys that joins the lake gets the cluster's format."""
    key = o.TABLE_DATALAKE_ENABLED.key
    if key not in properties or properties.get(key) == descriptor.properties.get(key):
        return
    cluster = conf.get(server.DATALAKE_FORMAT)
    if o.TABLE_DATALAKE_ENABLED.parse(properties[key]):
        closed = closed_lake(conf)
        if cluster is None or closed is not None:
            raise InvalidAlterTableError(
                f"{key} = true, but the cluster has no lake for tables; set {closed} on the servers"
            )
        properties.setdefault(o.TABLE_DATALAKE_FORMAT.key, cluster)


def add_columns(
    descriptor: TableDescriptor,
    columns: Sequence[NewColumn],
    options: Mapping[str, str] = MappingProxyType({}),
) -> TableDescriptor:
    """The descriptor with columns at the end; `options` are their `fields.*`. Raises 56."""
    names = set(descriptor.schema.names)
    for column in columns:
        if column.name in names:
            raise InvalidAlterTableError(
                f"column {column.name!r:.80} exists already; choose another name"
            )
        if column.position != LAST:
            raise InvalidAlterTableError(
                f"column {column.name!r:.80} can be added at the end only; use position LAST (0)"
            )
        if not column.data_type.nullable:
            raise InvalidAlterTableError(
                f"column {column.name!r:.80} is NOT NULL, but rows written before have no value; "
                "add it as nullable"
            )
        names.add(column.name)
    try:
        schema = descriptor.schema.add_columns(
            Column(each.name, each.data_type, each.comment, agg_function=each.agg_function)
            for each in columns
        )
    except InvalidTableError as e:
        raise InvalidAlterTableError(e.message) from None
    check_columns(schema)
    engine, properties = merge_engine(descriptor.properties), descriptor.properties
    default = properties.get(o.TABLE_MERGE_ENGINE_AGGREGATION_DEFAULT_FUNCTION.key)
    schema = declare(schema, options, default, engine, [column.name for column in columns])
    check_agg_functions(schema, properties, engine)
    return replace(descriptor, schema=schema)
