"""Cluster keys `datalake.<format>.*`: the catalog properties of a lake format.

The format defines the part after the prefix (`datalake.iceberg.uri` is Iceberg's `uri`), so these
keys are not declared. They are kept as text. A server sends them to clients as properties
`table.datalake.<format>.*` of lake tables, so readers and the tiering service need only the
bootstrap address.

Secrets are never sent, shown or logged: every client of the cluster may ask for a table, but not
every client may write to the lake. A process that needs a secret has it in its own configuration.
A property is a secret if its key says so, or if its value is an address with a password.

In an environment variable `_` stands for `.` and `__` for `-`, because the keys are not declared:
`ZUFLUSS_DATALAKE_ICEBERG_S3_ACCESS__KEY__ID` is `datalake.iceberg.s3.access-key-id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from zufluss.config.option import Kind, Option
from zufluss.lake_formats import LAKE_FORMATS

SECRET_PARTS = ("password", "secret", "token", "credential", "key", "authorization")
"""A key that contains one of these words is a secret."""

PYTHON_CLASSES = ("py-catalog-impl", "py-io-impl")
"""Properties that name a class, which every process that opens the catalog loads."""

EMBEDDED_LAKE = "lake"
"""Folder in the data directory for the lake of `zufluss dev` when none is configured."""

_KEY = re.compile(rf"datalake\.({'|'.join(LAKE_FORMATS)})\.(.+)")
_VARIABLE = re.compile(rf"ZUFLUSS_DATALAKE_({'|'.join(LAKE_FORMATS).upper()})_(.+)")
_ADDRESS_WITH_PASSWORD = re.compile(r"://[^/?#\s]*:[^/?#\s]*@")


def is_lake_key(key: str) -> bool:
    """Whether a cluster key belongs to a lake format."""
    return _KEY.fullmatch(key) is not None


def lake_option(key: str) -> Option[str] | None:
    """The option of a key that belongs to a lake format; it changes at run time, as in Fluss.

    The name of a Python class does not: tiering services and readers would import it and call it.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    help = "A property of the catalog of a lake format."
    return Option(key, Kind.STRING, "", help, dynamic=match[2] not in PYTHON_CLASSES)


def lake_key_of_variable(name: str) -> str | None:
    """The key of an environment variable, None if it is not one of a lake format."""
    match = _VARIABLE.fullmatch(name)
    if match is None:
        return None
    words = match[2].lower().replace("__", "-").replace("_", ".")
    return f"datalake.{match[1].lower()}.{words}"


def is_secret(key: str, value: str) -> bool:
    """Whether a lake property must not be shown or handed out."""
    name = key.lower()
    return any(part in name for part in SECRET_PARTS) or bool(_ADDRESS_WITH_PASSWORD.search(value))


def embedded_lake(format: str, data_dir: Path) -> dict[str, str]:
    """The keys of a lake in a data directory; empty for a format that cannot be embedded."""
    embedded = LAKE_FORMATS[format].embedded
    properties = {} if embedded is None else embedded(data_dir.resolve() / EMBEDDED_LAKE)
    return {f"datalake.{format}.{key}": value for key, value in properties.items()}


def table_prefix(format: str) -> str:
    """Returns the prefix of a format's keys among the properties of a table."""
    return f"table.datalake.{format}."


def handed_out(format: str, properties: Mapping[str, str]) -> dict[str, str]:
    """Returns a format's properties as table properties for clients, without secrets."""
    prefix = table_prefix(format)
    return {prefix + k: v for k, v in properties.items() if not is_secret(k, v)}
