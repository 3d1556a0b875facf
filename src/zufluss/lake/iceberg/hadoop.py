"""A catalog that is a directory: the layout of Iceberg's `HadoopCatalog`, which pyiceberg lacks.

| path below the warehouse | content |
|---|---|
| `<namespace>/<table>/metadata/v<N>.metadata.json` | version N of the table's metadata |
| `… v<N>.gz.metadata.json`, `… v<N>.metadata.json.gz` | the same, compressed |
| `… version-hint.text` | a version that was the newest when it was written |
| `… <uuid>.metadata.json` | a version that is being written, or that a crash left |

A namespace is a directory, and a directory with versions is a table; neither is registered
anywhere. The newest version is the table. A commit creates the next version, which fails if another
writer did so first (`warehouse.py`): that is a `CommitFailedException`, and nothing was changed.

Versions are found by listing, and the hint is only written, for others: the Iceberg runtime starts
at the hint and looks for later versions from there. A missing, old or garbled hint does no harm
here.

Creating a version is not the end of a commit. A commit also looks at the table afterwards
(`_check_applied`), because the name was free for the wrong reason if

* other writers committed so often, while this one slept, that this version came and was removed as
  an old one, or
* the table was dropped meanwhile, and perhaps created again, or
* a writer with another compression created the same version, under another name.

Then the version is taken back. The Iceberg runtime itself does not create versions atomically on
local file systems and S3: it looks whether the name is free and then renames, which replaces. It
may overwrite a version that was created in between. The look afterwards finds that if it happened
by then; after that nothing can.

As in Iceberg's catalog a table lies where its name says, so it can neither be renamed nor created
elsewhere, namespaces have no properties, and dropping a table removes its files. Views, registering
and metadata in another directory are refused.
"""

from __future__ import annotations

import gzip
import re
import threading
from collections import OrderedDict
from typing import Any, Final, NamedTuple, NoReturn, cast

import structlog
from pyiceberg.catalog import MetastoreCatalog, PropertiesUpdateSummary
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import TableRequirement, TableUpdate
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties, TableVersion

from zufluss.errors import ConfigError
from zufluss.lake.base import LakeError
from zufluss.lake.iceberg.private import shared
from zufluss.lake.iceberg.warehouse import LocalWarehouse, open_warehouse
from zufluss.remote.errors import RemoteStorageError

HINT: Final = "version-hint.text"
METADATA_CACHED_MAX: Final = 64
"""Table metadata kept per catalog."""
READS_MAX: Final = 10
"""How often the newest version is looked for while versions are removed before they are read."""

_PREFERENCE: Final = (".metadata.json", ".gz.metadata.json", ".metadata.json.gz")
"""Ends of the names of a version, in the order in which the Iceberg runtime looks for them."""
_VERSION: Final = re.compile(rf"v(\d{{1,18}})({'|'.join(map(re.escape, _PREFERENCE))})")
_AFTER: Final = "v"
"""All names of versions sort behind this text; those of manifests and manifest lists do not."""
_PATH_KEY: Final = "write.metadata.path"
_CODEC_KEY: Final = "write.metadata.compression-codec"

_log = structlog.get_logger(__name__)


class _Version(NamedTuple):
    """A version of a table's metadata that exists."""

    number: int
    name: str


class _ReadVersion(NamedTuple):
    """A version with its content."""

    number: int
    path: str
    """Its path below the warehouse."""
    data: bytes
    """Its bytes, compressed or not."""


class HadoopCatalog(MetastoreCatalog):
    """Iceberg's catalog of directories; `warehouse` is its only property of its own.

    pyiceberg opens it by `py-catalog-impl=zufluss.lake.iceberg.hadoop.HadoopCatalog`.
    """

    def __init__(self, name: str, **properties: str) -> None:
        super().__init__(name, **properties)
        if not properties.get("warehouse"):
            raise ConfigError("an Iceberg catalog of type hadoop needs the property warehouse")
        self._root = properties["warehouse"].rstrip("/")
        self._files = open_warehouse(self._root, properties)
        self._parsed: OrderedDict[str, tuple[bytes, TableMetadata]] = OrderedDict()
        self._parsed_lock = threading.Lock()

    @property
    def is_local(self) -> bool:
        """Whether the warehouse is a directory: then no request is under way after a call."""
        return isinstance(self._files, LocalWarehouse)

    # -- tables ---------------------------------------------------------------------------------

    def create_table(
        self,
        identifier: str | Identifier,
        schema: Any,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> Table:
        """Create a table at the place of its name; the namespace appears with it."""
        identifier = self.identifier_to_tuple(identifier)
        version = cast("TableVersion", int(properties.get("format-version", 2)))
        converted: Schema = self._convert_schema_if_needed(schema, version)
        metadata = new_table_metadata(
            location=(location or self._location(identifier)).rstrip("/"),
            schema=converted,
            partition_spec=partition_spec,
            sort_order=sort_order,
            properties=properties,
        )
        self._check_place(identifier, None, metadata)
        if self._versions(identifier):
            raise TableAlreadyExistsError(f"Table {'.'.join(identifier)} already exists")
        try:
            self._publish(identifier, None, metadata)
        except CommitFailedException as problem:
            raise TableAlreadyExistsError(
                f"Table {'.'.join(identifier)} was created by another writer meanwhile"
            ) from problem
        return self.load_table(identifier)

    def load_table(self, identifier: str | Identifier) -> Table:
        """The table in its newest version."""
        identifier = self.identifier_to_tuple(identifier)
        newest = self._newest(identifier)
        if newest is None:
            raise NoSuchTableError(f"Table {'.'.join(identifier)} does not exist")
        return self._table(identifier, newest)

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        """Create the next version of a table; `CommitFailedException` if another writer did."""
        identifier = table.name()
        base = self._newest(identifier)
        before = None if base is None else self._table(identifier, base)
        staged = self._update_and_stage_table(before, identifier, requirements, updates)
        if before is not None and staged.metadata == before.metadata:
            return _response(before.metadata, before.metadata_location)
        self._check_place(identifier, before, staged.metadata)
        return _response(staged.metadata, self._publish(identifier, base, staged.metadata))

    def drop_table(self, identifier: str | Identifier) -> None:
        """Remove a table with all files in its directory.

        The newest version goes last of all versions, so that no older one becomes the table.
        """
        identifier = self.identifier_to_tuple(identifier)
        versions = self._versions(identifier)
        if not versions:
            raise NoSuchTableError(f"Table {'.'.join(identifier)} does not exist")
        paths = [self._metadata_path(identifier, version.name) for version in versions]
        older = sum(version.number < versions[-1].number for version in versions)
        self._files.delete(paths[:older])
        self._files.delete(paths[older:])
        self._files.remove_tree(_directory(identifier))

    def purge_table(self, identifier: str | Identifier) -> None:
        """The same as `drop_table`; files outside of the table's directory stay."""
        self.drop_table(identifier)

    def rename_table(
        self, from_identifier: str | Identifier, to_identifier: str | Identifier
    ) -> Table:
        """Refused: the name of a table is its directory."""
        _refuse("rename tables")

    def register_table(
        self, identifier: str | Identifier, metadata_location: str, overwrite: bool = False
    ) -> Table:
        """Refused: a table's metadata is in its directory."""
        _refuse("register tables that lie elsewhere")

    # -- namespaces -----------------------------------------------------------------------------

    def create_namespace(
        self, namespace: str | Identifier, properties: Properties = EMPTY_DICT
    ) -> None:
        """Create a directory. On S3 there are none: a namespace exists while it has a table."""
        if properties:
            _refuse("store properties of namespaces")
        if self._is_namespace(self.identifier_to_tuple(namespace)):
            raise NamespaceAlreadyExistsError(f"Namespace {namespace} already exists")
        self._files.make_directory(_directory(self.identifier_to_tuple(namespace)))

    def drop_namespace(self, namespace: str | Identifier) -> None:
        """Remove an empty namespace."""
        levels = self._checked_namespace(namespace)
        try:
            self._files.remove_directory(_directory(levels))
        except OSError as problem:
            raise NamespaceNotEmptyError(f"Namespace {namespace} is not empty") from problem

    def list_tables(self, namespace: str | Identifier) -> list[Identifier]:
        """The tables of a namespace."""
        levels = self._checked_namespace(namespace)
        names = self._files.directories(_directory(levels))
        return [(*levels, name) for name in names if self._versions((*levels, name))]

    def list_namespaces(self, namespace: str | Identifier = ()) -> list[Identifier]:
        """The namespaces of the warehouse, or of a namespace."""
        levels = self._checked_namespace(namespace) if namespace else ()
        names = self._files.directories(_directory(levels))
        return [(*levels, name) for name in names if not self._versions((*levels, name))]

    def load_namespace_properties(self, namespace: str | Identifier) -> Properties:
        """The location of a namespace."""
        return {"location": self._location(self._checked_namespace(namespace))}

    def update_namespace_properties(
        self,
        namespace: str | Identifier,
        removals: set[str] | None = None,
        updates: Properties = EMPTY_DICT,
    ) -> PropertiesUpdateSummary:
        """Refused."""
        _refuse("store properties of namespaces")

    def _checked_namespace(self, namespace: str | Identifier) -> Identifier:
        levels = self.identifier_to_tuple(namespace)
        if not self._is_namespace(levels):
            raise NoSuchNamespaceError(f"Namespace {'.'.join(levels)} does not exist")
        return levels

    def _is_namespace(self, levels: Identifier) -> bool:
        return self._files.is_directory(_directory(levels)) and not self._versions(levels)

    # -- views, which such a catalog does not have ------------------------------------------------

    def list_views(self, namespace: str | Identifier) -> list[Identifier]:
        """None."""
        return []

    def view_exists(self, identifier: str | Identifier) -> bool:
        """False."""
        return False

    def load_view(self, identifier: str | Identifier) -> NoReturn:
        """Refused."""
        _refuse("keep views")

    def register_view(self, identifier: str | Identifier, metadata_location: str) -> NoReturn:
        """Refused."""
        _refuse("keep views")

    def drop_view(self, identifier: str | Identifier) -> None:
        """Refused."""
        _refuse("keep views")

    # -- versions -------------------------------------------------------------------------------

    def _versions(self, identifier: Identifier) -> list[_Version]:
        """The versions of a table, the newest last; none if there is no such table."""
        names = self._files.names(self._metadata_path(identifier), _AFTER)
        found = [(match, name) for name in names if (match := _VERSION.fullmatch(name))]
        found.sort(key=lambda pair: (int(pair[0][1]), -_PREFERENCE.index(pair[0][2])))
        return [_Version(int(match[1]), name) for match, name in found]

    def _newest(self, identifier: Identifier) -> _ReadVersion | None:
        """The newest version of a table; None if there is no such table."""
        for _ in range(READS_MAX):
            versions = self._versions(identifier)
            if not versions:
                return None
            path = self._metadata_path(identifier, versions[-1].name)
            try:
                return _ReadVersion(versions[-1].number, path, self._files.read(path))
            except FileNotFoundError:
                continue  # the table was dropped, or later versions replaced this one
        raise LakeError(
            f"versions of lake table {'.'.join(identifier)} disappear before they can be read; "
            "try again when fewer writers commit to it"
        )

    def _table(self, identifier: Identifier, version: _ReadVersion) -> Table:
        metadata, location = self._metadata_of(version), self._location_of(version)
        return Table(
            identifier=identifier,
            metadata=metadata,
            metadata_location=location,
            io=self._load_file_io(metadata.properties, location),
            catalog=self,
        )

    def _metadata_of(self, version: _ReadVersion) -> TableMetadata:
        """The metadata in a version. A table that was created again has other bytes there."""
        with self._parsed_lock:
            data, metadata = self._parsed.get(version.path, (b"", None))
        if metadata is not None and data == version.data:
            return metadata
        try:
            metadata = shared(TableMetadataUtil.parse_raw(_decoded(version.data)))
        except (OSError, EOFError, ValueError, ValidationError) as problem:
            raise LakeError(
                f"{self._location_of(version)} is not the metadata of an Iceberg table: {problem}"
            ) from problem
        self._remember(version, metadata)
        return metadata

    def _remember(self, version: _ReadVersion, metadata: TableMetadata) -> None:
        with self._parsed_lock:
            self._parsed[version.path] = version.data, metadata
            self._parsed.move_to_end(version.path)
            while len(self._parsed) > METADATA_CACHED_MAX:
                self._parsed.popitem(last=False)

    def _publish(
        self, identifier: Identifier, base: _ReadVersion | None, metadata: TableMetadata
    ) -> str:
        """Create the version after `base`, or the first one; returns its location."""
        number = 1 if base is None else base.number + 1
        compressed = metadata.properties.get(_CODEC_KEY, "none").lower() == "gzip"
        data = metadata.model_dump_json(exclude_none=True).encode()
        name = f"v{number}{_PREFERENCE[compressed]}"
        path = self._metadata_path(identifier, name)
        version = _ReadVersion(number, path, gzip.compress(data) if compressed else data)
        if base is None:
            self._files.make_directory(self._metadata_path(identifier))
        try:
            self._files.create(path, version.data)
        except FileExistsError as problem:
            raise CommitFailedException(
                f"Version {number} of {'.'.join(identifier)} was created by another writer"
            ) from problem
        try:
            self._check_applied(identifier, base, version)
        except (OSError, RemoteStorageError) as problem:
            raise CommitStateUnknownException(
                f"version {number} of {'.'.join(identifier)} was created, and whether it is in "
                f"force cannot be read: {problem}"
            ) from problem
        self._write_hint(identifier, number)
        self._remember(version, shared(metadata))
        return self._location_of(version)

    def _check_applied(
        self, identifier: Identifier, base: _ReadVersion | None, version: _ReadVersion
    ) -> None:
        """Make sure that a version that was created is the table, or that later ones follow it.

        Otherwise the version is removed. `CommitFailedException` if nothing was built on it,
        `CommitStateUnknownException` if later versions do not tell.
        """
        name = ".".join(identifier)
        if self._is_newest(identifier, base, version):
            return
        versions = self._versions(identifier)
        overtaken = bool(versions) and versions[-1].number > version.number
        if overtaken and self._is_followed(identifier, version) and self._has(version):
            return
        if self._has(version):
            self._files.delete([version.path])
        if not overtaken:
            raise CommitFailedException(
                f"Version {version.number} of {name} was replaced by another writer, or {name} "
                "was dropped meanwhile"
            )
        raise CommitStateUnknownException(
            f"version {version.number} of {name} was created, and later versions do not name it; "
            "look for the changes in the table"
        )

    def _is_newest(
        self, identifier: Identifier, base: _ReadVersion | None, version: _ReadVersion
    ) -> bool:
        """Whether a version is the only one of its number, the last, and behind its base."""
        numbers = [other.number for other in self._versions(identifier)]
        last = numbers[-1:] == [version.number] and numbers.count(version.number) == 1
        return last and self._has(version) and (base is None or self._has(base))

    def _is_followed(self, identifier: Identifier, version: _ReadVersion) -> bool:
        """Whether the newest version still knows a version of this name as one before it."""
        newest = self._newest(identifier)
        if newest is None:
            return False
        name = version.path.rpartition("/")[2]
        log = self._metadata_of(newest).metadata_log
        return any(entry.metadata_file.rpartition("/")[2] == name for entry in log)

    def _has(self, version: _ReadVersion) -> bool:
        """Whether a version exists with exactly these bytes."""
        try:
            return self._files.read(version.path) == version.data
        except FileNotFoundError:
            return False

    def _write_hint(self, identifier: Identifier, number: int) -> None:
        """Name the version for readers that start there. The commit is done without it, too."""
        try:
            self._files.replace(self._metadata_path(identifier, HINT), str(number).encode())
        except (OSError, RemoteStorageError) as problem:
            _log.warning(
                "version_hint_not_written", table=".".join(identifier), reason=str(problem)
            )

    # -- places ---------------------------------------------------------------------------------

    def _check_place(
        self, identifier: Identifier, before: Table | None, metadata: TableMetadata
    ) -> None:
        """Refuse metadata that the Iceberg runtime would not find, or not commit to."""
        place = self._location(identifier) if before is None else before.metadata.location
        if metadata.location.rstrip("/") != place.rstrip("/"):
            raise BadRequestError(
                f"a table of a catalog of type hadoop lies where its name says, {place}, and not "
                f"in {metadata.location}"
            )
        if _PATH_KEY in metadata.properties:
            raise BadRequestError(
                "a catalog of type hadoop keeps the metadata of a table in the table's directory; "
                f"remove the property {_PATH_KEY}"
            )

    def _get_default_warehouse_location(self, database_name: str, table_name: str) -> str:
        return self._location((database_name, table_name))

    def _location(self, identifier: Identifier) -> str:
        return f"{self._root}/{_directory(identifier)}"

    def _location_of(self, version: _ReadVersion) -> str:
        return f"{self._root}/{version.path}"

    def _metadata_path(self, identifier: Identifier, name: str = "") -> str:
        return f"{_directory(identifier)}/metadata/{name}".rstrip("/")


def _response(metadata: TableMetadata, location: str) -> CommitTableResponse:
    return CommitTableResponse.model_validate({"metadata": metadata, "metadata-location": location})


def _directory(identifier: Identifier) -> str:
    """The directory of a table or namespace below the warehouse."""
    for level in identifier:
        if level in ("", ".", "..") or "/" in level:
            raise NoSuchTableError(f"{identifier} cannot be a name in a catalog of directories")
    return "/".join(identifier)


def _decoded(data: bytes) -> str:
    return (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode()


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"an Iceberg catalog of type hadoop cannot {what}")
