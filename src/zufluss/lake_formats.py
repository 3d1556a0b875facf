"""The lake formats, and all of their traits that code outside of `lake/<format>` depends on.

A new format is a folder `lake/<format>`, an entry point `zufluss.lake` and a row of this table.
Configuration, table validation, key encoding, the command line and the tiering service read their
rules here. Nothing here imports the libraries of a format.

A format may be in the table without a folder: tables can be created for it, with buckets and keys
as that lake has them, but not tiered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KeyEncoding = Literal["compacted", "paimon", "iceberg", "hudi"]

_PLACE = re.compile(r"iceberg\.write\.(.+\.)?path")
_OPENING = re.compile(
    r"iceberg\.(py-.+|write\.py-.+\.impl|(s3|gcs|adls|hdfs|hf|client|header)\..+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeFormat:
    """The traits of one format."""

    key_encoding: KeyEncoding = "compacted"
    """The encoding of bucket keys, so that zufluss and the lake agree on buckets."""
    stores_encoded_keys: bool = False
    """Whether primary-key tables store their rows under keys of `key_encoding` too."""
    key_columns_max: int | None = None
    """The most columns that a key may have; None for any number."""
    key_types_refused: frozenset[str] = frozenset()
    """Names of the column types (`Root`) that `key_encoding` cannot encode."""
    historical_partitions: bool = False
    """Whether `table.datalake.historical-partition.enabled` is possible."""
    embedded: Callable[[Path], Mapping[str, str]] | None = None
    """The catalog properties of a lake below a directory, which `zufluss dev --lake` creates if
    nobody configured another one; None for formats that cannot be embedded."""
    parquet_files: bool = False
    """Whether Spark can read the files of the lake by itself: parquet, with deleted rows in
    parquet files of `file_path` and `pos`. Other lakes are read through their `LakeReader`."""
    task_module: str | None = None
    """The module that imports the libraries a tiering task needs."""
    driver_module: str | None = None
    """The module that imports the libraries the driver of tiering needs."""


def _sqlite_catalog(directory: Path) -> dict[str, str]:
    """A catalog in SQLite, which pyiceberg, DuckDB and Spark can open too."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{directory / 'catalog.db'}",
        "warehouse": f"file://{directory / 'warehouse'}",
    }


LAKE_FORMATS: Mapping[str, LakeFormat] = {
    "paimon": LakeFormat(
        key_encoding="paimon", stores_encoded_keys=True, historical_partitions=True
    ),
    "iceberg": LakeFormat(
        key_encoding="iceberg",
        stores_encoded_keys=True,
        key_columns_max=1,
        key_types_refused=frozenset({"BOOLEAN", "TINYINT", "SMALLINT", "TIMESTAMP_LTZ"}),
        embedded=_sqlite_catalog,
        parquet_files=True,
        task_module="zufluss.lake.iceberg.writer",
        driver_module="zufluss.lake.iceberg.committer",
    ),
    "lance": LakeFormat(),
    "hudi": LakeFormat(key_encoding="hudi", key_types_refused=frozenset({"BYTES", "BINARY"})),
}
"""By the name that `datalake.format` and `table.datalake.format` use."""


def is_place(key: str) -> bool:
    """Whether a custom property of a table says where files of its lake table lie.

    No table may choose that: its directory is its own, so that its sweep meets no other's files.
    """
    return _PLACE.fullmatch(key) is not None


def opens_files(key: str) -> bool:
    """Whether a custom property of a table says how the files of its lake table are opened.

    pyiceberg puts these over the properties of the catalog. Whoever creates a table could have
    tiering services and readers load a class, or send their requests and tokens to his server.
    """
    return _OPENING.fullmatch(key) is not None
