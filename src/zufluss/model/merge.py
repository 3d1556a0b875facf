"""Rules of merge engines: how a primary-key table merges rows of the same key.

| engine      | needs                                           | deletes                |
|-------------|-------------------------------------------------|------------------------|
| (none)      |                                                 | ALLOW, IGNORE, DISABLE |
| first_row   | primary key                                     | IGNORE, DISABLE        |
| versioned   | primary key, version column (`VERSION_ROOTS`)   | IGNORE, DISABLE        |
| aggregation | primary key, changelog image FULL, functions    | ALLOW, IGNORE, DISABLE |

The functions of columns have rules of their own, in `agg_columns.py`. All refusals are 39.

A put names the way its rows are merged (`MergeMode`, `agg_mode` on the wire):

| mode            | rows are                                          | tables            |
|-----------------|---------------------------------------------------|-------------------|
| 0 AGGREGATE     | inputs of the table's engine                      | all               |
| 1 OVERWRITE     | the new rows, past engine and delete behavior     | all               |
| 2 MERGE_STATE   | states of a client that aggregates before sending | aggregation       |
| 100 RETRACT     | inputs to take back; an extension                 | aggregation       |
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from zufluss.config import table_options as o
from zufluss.errors import ConfigError
from zufluss.model.agg_columns import AGGREGATION, check_agg_functions
from zufluss.model.table import TableDescriptor
from zufluss.model.types import Root

VERSION_ROOTS = (Root.INTEGER, Root.BIGINT, Root.TIMESTAMP, Root.TIMESTAMP_LTZ)
"""Types a version column may have."""


class MergeMode(IntEnum):
    """How the rows of a put are merged with the stored rows, numbered as on the wire."""

    AGGREGATE = 0
    OVERWRITE = 1
    MERGE_STATE = 2
    RETRACT = 100


def merge_engine(properties: Mapping[str, str]) -> str | None:
    """The canonical name of the merge engine, None if there is none or it is unknown."""
    text = properties.get(o.TABLE_MERGE_ENGINE.key, "").strip().lower()
    return text if text in o.TABLE_MERGE_ENGINE.allowed else None


def column_lock(properties: Mapping[str, str]) -> bool:
    """Whether each producer of a table is the only writer of its columns."""
    text = properties.get(o.TABLE_COLUMN_LOCK_ENABLED.key)
    if text is None:
        return merge_engine(properties) == AGGREGATION
    return bool(o.TABLE_COLUMN_LOCK_ENABLED.parse(text))


def check_merge_engine(descriptor: TableDescriptor) -> None:
    """Raise 39 unless merge engine, delete behaviour and aggregation functions fit the table."""
    engine = merge_engine(descriptor.properties)
    if engine is not None and not descriptor.has_primary_key:
        raise ConfigError(
            f"{o.TABLE_MERGE_ENGINE.key} = {engine} needs a primary key; define one or remove it"
        )
    _check_delete_behavior(descriptor, engine)
    _check_column_lock(descriptor)
    if engine == AGGREGATION and _image(descriptor) == "WAL":
        raise ConfigError(
            "Table with 'AGGREGATION' merge engine does not support 'WAL' changelog image mode. "
            "Aggregation merge engine tables require FULL changelog image mode for correct UNDO "
            f"recovery. Please set '{o.TABLE_CHANGELOG_IMAGE.key}' to 'FULL' or remove the setting."
        )
    check_agg_functions(descriptor.schema, descriptor.properties, engine)
    if engine == "versioned":
        _check_version_column(descriptor)


def _image(descriptor: TableDescriptor) -> str:
    return descriptor.properties.get(o.TABLE_CHANGELOG_IMAGE.key, "FULL").strip().upper()


def _check_column_lock(descriptor: TableDescriptor) -> None:
    key = o.TABLE_COLUMN_LOCK_ENABLED.key
    if key not in descriptor.properties:
        return
    if not descriptor.has_primary_key:
        raise ConfigError(f"{key} is for primary-key tables; remove it from this log table")
    if column_lock(descriptor.properties) and _image(descriptor) == "WAL":
        raise ConfigError(
            f"{key} = true does not go with {o.TABLE_CHANGELOG_IMAGE.key} = WAL: the puts of a "
            "producer are undone by old values; set FULL, or remove one of both"
        )


def _check_delete_behavior(descriptor: TableDescriptor, engine: str | None) -> None:
    key = o.TABLE_DELETE_BEHAVIOR.key
    text = descriptor.properties.get(key)
    if text is None:
        return
    if not descriptor.has_primary_key:
        raise ConfigError(
            f"The '{key}' configuration is only supported for primary key tables. Remove it"
        )
    if text.strip().upper() == "ALLOW" and engine in ("first_row", "versioned"):
        raise ConfigError(
            f"Table with '{engine.upper()}' merge engine does not support delete operations. The "
            f"'{key}' config must be set to 'ignore' or 'disable', but got 'allow'."
        )


def _check_version_column(descriptor: TableDescriptor) -> None:
    key = o.TABLE_MERGE_ENGINE_VERSIONED_VER_COLUMN.key
    name = descriptor.properties.get(key, "").strip()
    if not name:
        raise ConfigError(f"'{key}' must be set for versioned merge engine.")
    if name not in descriptor.schema:
        raise ConfigError(
            f"The version column '{name:.80}' for versioned merge engine doesn't exist in schema. "
            f"The columns are {', '.join(descriptor.schema.names)}"
        )
    data_type = descriptor.schema.column(name).data_type
    if data_type.root not in VERSION_ROOTS:
        raise ConfigError(
            f"The version column '{name}' for versioned merge engine must be one type of [INT, "
            f"BIGINT, TIMESTAMP, TIMESTAMP_LTZ], but got {data_type}. It is named by {key}"
        )
