"""Opens pyiceberg catalogs, one per process and set of properties.

The catalog is always named `zufluss`: other engines open a SQL catalog by that name. Properties are
pyiceberg's, without prefix; the spellings of Fluss configurations are understood as well:

| Fluss | here |
|---|---|
| `type=jdbc`, `catalog-impl=….JdbcCatalog` | `type=sql` |
| `uri=jdbc:sqlite:<path>`, `jdbc:postgresql://…`, `jdbc:mysql://…` | SQLAlchemy's spelling |
| `jdbc.user`, `jdbc.password` | part of the URI |
| `catalog-impl=….RESTCatalog`, `….GlueCatalog`, `….HiveCatalog` | `type=rest`, `glue`, `hive` |
| `catalog-impl=….HadoopCatalog` | `type=hadoop` |

pyiceberg has no catalog of type `hadoop`; it is in `hadoop.py`.

An embedded catalog is a SQLite file that a tiering service, readers and maintenance open at the
same time. Its connections wait `SQLITE_BUSY_MS` for each other, use a write-ahead log so that
readers never wait, and are not shared with forked processes. The content of a metadata file is
cached by its location, because the file never changes: loading a table again costs one SQL query.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.exceptions import NoSuchTableError, RESTError
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import TableRequirement, TableUpdate
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from zufluss.errors import ConfigError
from zufluss.lake.base import LakeError
from zufluss.lake.iceberg.files import LakeFiles
from zufluss.lake.iceberg.hadoop import HadoopCatalog
from zufluss.lake.iceberg.private import shared
from zufluss.lake.iceberg.warehouse import check_warehouse
from zufluss.remote.errors import RemoteStorageError

NAME = "zufluss"
TYPES = ("sql", "rest", "hadoop", "glue", "hive", "dynamodb", "bigquery")
SQLITE_BUSY_MS = 30_000
"""How long a connection waits for another one's transaction."""
METADATA_CACHED_MAX = 64
"""Table metadata kept per catalog."""

_REQUIRED = {
    "sql": ("uri", "warehouse"),
    "rest": ("uri",),
    "hadoop": ("warehouse",),
    "hive": ("uri",),
}
_EXTRAS = {"rest": "pyiceberg", "glue": "pyiceberg[glue]", "hive": "pyiceberg[hive]"}
_IMPLEMENTATIONS = {
    "Jdbc": "sql",
    "REST": "rest",
    "Hadoop": "hadoop",
    "Glue": "glue",
    "Hive": "hive",
}
_catalogs: dict[tuple[Any, ...], Catalog] = {}
_lock = threading.Lock()


def load(properties: Mapping[str, str]) -> Catalog:
    """The catalog of these properties; a process opens it once."""
    key = (os.getpid(), *sorted(properties.items()))
    with _lock:
        if key not in _catalogs:
            _catalogs[key] = _open(normalized(properties))
        return _catalogs[key]


def normalized(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties in pyiceberg's spelling; `ConfigError` names what is missing."""
    out = dict(properties)
    implementation = out.pop("catalog-impl", None)
    kind = out.get("type", "").lower()
    if implementation is not None and not kind:
        kind = _type_of(implementation)
    kind = "sql" if kind in ("jdbc", "sqlite") else kind
    if "py-catalog-impl" in out:
        return out
    if kind not in TYPES:
        raise ConfigError(
            f"datalake.iceberg.type is {kind or 'missing'}; give one of {', '.join(TYPES)} or jdbc"
        )
    missing = [name for name in _REQUIRED.get(kind, ()) if not out.get(name)]
    if missing:
        raise ConfigError(
            f"an Iceberg catalog of type {kind} needs datalake.iceberg.{missing[0]}; set it in the "
            f"cluster's configuration or give --datalake.iceberg.{missing[0]}"
        )
    out["type"] = kind
    if kind == "sql":
        out["uri"] = _sql_uri(out)
        if out["uri"].startswith("sqlite") and sqlite_path(out["uri"]) is None:
            raise ConfigError(
                f"datalake.iceberg.uri {out['uri']} is a catalog in memory, which is lost when the "
                f"process ends; name a file, such as sqlite:////lake/catalog.db"
            )
    elif kind == "rest":
        out["snapshot-loading-mode"] = "all"  # the newest snapshot of ours may be older than others
    elif kind == "hadoop":
        check_warehouse(out["warehouse"])
    return out


def _type_of(implementation: str) -> str:
    for word, kind in _IMPLEMENTATIONS.items():
        if implementation.rsplit(".", 1)[-1].startswith(word):
            return kind
    raise ConfigError(
        f"datalake.iceberg.catalog-impl {implementation} is not known here; give "
        f"datalake.iceberg.type, one of {', '.join(TYPES)}, or py-catalog-impl"
    )


def _sql_uri(properties: dict[str, str]) -> str:
    """A JDBC address as SQLAlchemy spells it; other addresses are returned unchanged."""
    uri = properties["uri"]
    if not uri.startswith("jdbc:"):
        return uri
    uri = uri.removeprefix("jdbc:")
    if uri.startswith("sqlite:"):
        return "sqlite:///" + uri.removeprefix("sqlite:").removeprefix("file:")
    user, password = properties.pop("jdbc.user", None), properties.pop("jdbc.password", None)
    if user is not None:
        secret = f":{quote(password, safe='')}" if password is not None else ""
        uri = uri.replace("://", f"://{quote(user, safe='')}{secret}@", 1)
    return uri


def _open(properties: dict[str, str]) -> Catalog:
    kind = properties.get("type", "")
    where = properties.get("warehouse", kind) if kind == "hadoop" else properties.get("uri", kind)
    where = re.sub(r"//[^/@]*@", "//", where)
    try:
        if kind == "sql":
            return _open_sql(properties)
        if kind == "hadoop":
            return HadoopCatalog(NAME, **properties)
        return load_catalog(NAME, **properties)
    except (ImportError, ArgumentError) as problem:
        raise ConfigError(
            f"an Iceberg catalog of type {kind} at {where} cannot be opened ({problem}); install "
            f"{_EXTRAS.get(kind, 'the driver of its database')}, or correct the address"
        ) from problem
    except (ValueError, KeyError) as problem:
        raise ConfigError(f"the Iceberg catalog at {where} is not configured: {problem}") from None
    except (OSError, SQLAlchemyError, sqlite3.Error) as problem:
        raise LakeError(f"the Iceberg catalog at {where} cannot be opened: {problem}") from problem


def _open_sql(properties: dict[str, str]) -> Catalog:
    path = sqlite_path(properties["uri"])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_ahead(path)
    return _SqlCatalog(NAME, **{"pool_pre_ping": "true", **properties})


def sqlite_path(uri: str) -> Path | None:
    """The file of a SQLite address; None for other databases and for memory."""
    if not uri.startswith("sqlite"):
        return None
    path = urlsplit(uri).path.removeprefix("/")
    return Path(path) if path and path != ":memory:" else None


def _write_ahead(path: Path) -> None:
    """Create the file in write-ahead mode before tables are created in it."""
    connection = sqlite3.connect(path, timeout=SQLITE_BUSY_MS / 1000)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()


class _SqlCatalog(SqlCatalog):
    """pyiceberg's SQL catalog with a cache, safe for several processes on one SQLite file."""

    def __init__(self, name: str, **properties: str) -> None:
        self._metadata: OrderedDict[str, TableMetadata] = OrderedDict()
        self._metadata_lock = threading.Lock()
        super().__init__(name, **properties)

    def _init_catalog(self) -> None:
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _sqlite_connected)
        super()._init_catalog()

    def create_tables(self) -> None:
        """Create the catalog's tables; another process may do the same at this moment."""
        try:
            super().create_tables()
        except SQLAlchemyError as problem:
            if "already exists" not in str(problem):
                raise
            super().create_tables()

    def _convert_orm_to_iceberg(self, orm_table: IcebergTables) -> Table:
        location = orm_table.metadata_location
        if not location:
            raise NoSuchTableError(f"{orm_table.table_name} has no metadata_location")
        metadata = self._metadata_at(location)
        return Table(
            identifier=(*orm_table.table_namespace.split("."), orm_table.table_name),
            metadata=metadata,
            metadata_location=location,
            io=self._load_file_io(metadata.properties, location),
            catalog=self,
        )

    def _metadata_at(self, location: str) -> TableMetadata:
        with self._metadata_lock:
            metadata = self._metadata.get(location)
        if metadata is None:
            io = load_file_io(properties=self.properties, location=location)
            metadata = shared(FromInputFile.table_metadata(io.new_input(location)))
            self._remember(location, metadata)
        return metadata

    @staticmethod
    def _write_metadata(metadata: TableMetadata, io: FileIO, metadata_path: str) -> None:
        SqlCatalog._write_metadata(metadata, io, metadata_path)
        LakeFiles({}, metadata.location).sync_all([metadata_path])

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        """Commit updates to a table."""
        answer = super().commit_table(table, requirements, updates)
        self._remember(answer.metadata_location, answer.metadata)
        return answer

    def _remember(self, location: str, metadata: TableMetadata) -> None:
        with self._metadata_lock:
            self._metadata[location] = metadata
            while len(self._metadata) > METADATA_CACHED_MAX:
                self._metadata.popitem(last=False)


def _sqlite_connected(connection: Any, _record: Any) -> None:
    connection.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_MS}")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA fullfsync=ON")  # on macOS a sync reaches the medium only with this


def file_properties(properties: Mapping[str, Any]) -> dict[str, str]:
    """The properties that open the files of a table, without those of the catalog's database."""
    hidden: tuple[str, ...] = ("write.", "commit.", "fluss.", "zufluss.")
    if "pool_pre_ping" in properties:  # a SQL catalog
        hidden += ("uri", "jdbc.", "pool_pre_ping")
    return {key: str(value) for key, value in properties.items() if not key.startswith(hidden)}


@contextmanager
def answered(what: str) -> Iterator[None]:
    """Turn errors of a catalog or file system into a `LakeError` that names `what`."""
    try:
        yield
    except (OSError, SQLAlchemyError, RESTError, RemoteStorageError) as problem:
        raise LakeError(f"{what} cannot be read or changed: {problem}") from problem


def is_local(catalog: Catalog) -> bool:
    """Whether the catalog is a SQLite file or a directory: no request outlives a call."""
    if isinstance(catalog, HadoopCatalog):
        return catalog.is_local
    return isinstance(catalog, SqlCatalog) and catalog.engine.dialect.name == "sqlite"


def places_by_name(catalog: Catalog) -> bool:
    """Whether a table lies where its name says: it cannot be renamed or created elsewhere."""
    return isinstance(catalog, HadoopCatalog)
