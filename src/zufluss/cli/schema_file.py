"""Reads a table descriptor from a column list or a schema file.

| source                    | meaning                                                       |
|---------------------------|---------------------------------------------------------------|
| text                      | a column list: `id BIGINT, name STRING, PRIMARY KEY (id)`     |
| `.json`                   | a table descriptor as the protocol has it, as                 |
|                           | `zufluss table describe --output json` prints it, or as below |
| `.yaml`, `.yml`           | the short form below                                          |
| `.parquet`                | the columns of the file                                       |
| `.arrow`, `.feather`, `.ipc` | the columns of the Arrow file or stream                    |

The short form:

    columns:                      # or one text: "id BIGINT, name STRING"
      - id BIGINT
      - name STRING COMMENT 'as shown'
    primary_key: [id]
    partition_by: [day]
    bucket_key: [id]
    buckets: 4
    comment: orders of the shop
    properties: {table.log.ttl: 1d}
    custom_properties: {owner: me}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zufluss.errors import InvalidTableError
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor

if TYPE_CHECKING:
    import pyarrow as pa

SHORT_FORM_KEYS = (
    "columns",
    "primary_key",
    "partition_by",
    "bucket_key",
    "buckets",
    "comment",
    "properties",
    "custom_properties",
)
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")


def descriptor_of_text(columns: str) -> TableDescriptor:
    """The descriptor of a column list."""
    return TableDescriptor(Schema.of(columns))


def descriptor_of_file(path: Path) -> TableDescriptor:
    """The descriptor of a schema file; the suffix tells its kind."""
    suffix = path.suffix.lower()
    if suffix in (".json", ".yaml", ".yml"):
        return _of_document(_document(path), path)
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        return TableDescriptor(Schema.of(pq.read_schema(path)))
    if suffix in ARROW_SUFFIXES:
        return TableDescriptor(Schema.of(_arrow_schema(path)))
    raise InvalidTableError(
        f"{path} is not a schema file; allowed: .json, .yaml, .parquet, {', '.join(ARROW_SUFFIXES)}"
    )


def _document(path: Path) -> Any:
    import yaml

    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as problem:
        raise InvalidTableError(f"{path} cannot be read: {problem}") from None


def _of_document(document: Any, path: Path) -> TableDescriptor:
    if not isinstance(document, Mapping):
        raise InvalidTableError(f"{path} must hold a map with 'columns' or 'schema'")
    if isinstance(document.get("descriptor"), Mapping):
        document = document["descriptor"]
    if "schema" in document:
        return TableDescriptor.from_json(json.dumps(document))
    unknown = sorted(set(map(str, document)) - set(SHORT_FORM_KEYS))
    if unknown or not document.get("columns"):
        problem = f"unknown {', '.join(unknown)}" if unknown else "no 'columns'"
        raise InvalidTableError(f"{path} has {problem}; allowed: {', '.join(SHORT_FORM_KEYS)}")
    return _of_short_form(document)


def _of_short_form(document: Mapping[str, Any]) -> TableDescriptor:
    columns = document["columns"]
    text = columns if isinstance(columns, str) else ", ".join(map(str, columns))
    buckets = document.get("buckets")
    return TableDescriptor(
        schema=Schema.of(text, primary_key=_names(document, "primary_key")),
        comment=document.get("comment"),
        partition_keys=_names(document, "partition_by"),
        bucket_keys=_names(document, "bucket_key"),
        bucket_count=None if buckets is None else int(buckets),
        properties=_texts(document, "properties"),
        custom_properties=_texts(document, "custom_properties"),
    )


def _names(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = document.get(key) or ()
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def _texts(document: Mapping[str, Any], key: str) -> dict[str, str]:
    values = document.get(key) or {}
    if not isinstance(values, Mapping):
        raise InvalidTableError(f"'{key}' must be a map of keys and values, not {values!r:.80}")
    return {
        str(name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def _arrow_schema(path: Path) -> pa.Schema:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        try:
            return pa.ipc.open_file(source).schema
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).schema
