"""Offsets files: the offset that each bucket of a table has reached in one lake snapshot.

A file is written once, durably, and never changed. Its path is

    lake/DATABASE/TABLE-ID/metadata/UUID.offsets

in the remote location of its table, or in another location if that one takes no files. It is JSON
in Fluss's form, because Fluss's tools read its path from the properties of a snapshot:

| field | value |
|---|---|
| `version` | 1 |
| `table_id` | the table |
| `bucket_offsets` | by bucket number the offset after the last record in the lake, -1 for none |
| `partition_offsets` | of a partitioned table instead: a list of `partition_id`, `bucket_offsets` |

The metadata store has the id of the location and the path from `lake` on, so that a location can be
moved. Clients get and send the full path, which must be that of a file of the table.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from zufluss.coordinator.records import OffsetsFile
from zufluss.coordinator.remote.checks import check_moves
from zufluss.coordinator.remote.locations import LocationRegistry
from zufluss.errors import ConfigError, ErrorCode, ZuflussError
from zufluss.model.schema import dump_object
from zufluss.model.table import TableBucket, TableInfo
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.files import RemoteFile
from zufluss.remote.layout import LAKE, table_directory
from zufluss.remote.locations import AdminState
from zufluss.remote.placement import PARTITION
from zufluss.remote.storage import Upload
from zufluss.remote.uri import FILE, LocationUri, parse_location

VERSION = 1
SUFFIX = ".offsets"
FILE_BYTES_MAX = 64 * 1024 * 1024
"""Largest offsets file that is read."""
NOTHING = -1

_NAME = re.compile(r"metadata/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.offsets")

Offsets = Mapping[TableBucket, int]


class OffsetsFileError(ZuflussError, code=ErrorCode.UNKNOWN_SERVER_ERROR):
    """An offsets file cannot be read or is damaged."""


class OffsetsFiles:
    """The offsets files of all tables, in all locations."""

    def __init__(self, registry: LocationRegistry) -> None:
        self._registry = registry

    def new_name(self, table: TableInfo) -> str:
        """A new path for a file, below the root of its location."""
        return f"{_directory(table)}/metadata/{uuid.uuid4()}{SUFFIX}"

    def full_path(self, file: OffsetsFile) -> str:
        """The address of a file as clients get it; of a local file only its path."""
        uri = self._registry.locations.get(self._location(file)).uri
        return _joined(parse_location(uri, "a location"), file.path)

    async def write(
        self, table: TableInfo, home: int | None, name: str, offsets: Offsets
    ) -> OffsetsFile:
        """Write a new file, durably, to the location `home` of the table if it takes files."""
        version = self.locations_version
        where = self._registry.home(home).location_id
        unit = Upload(name, to_json(table.table_id, offsets))
        try:
            [file] = await self._registry.storage.upload([unit], PARTITION, where)
            check_moves(self._registry.storage, version)
        except ZuflussError as problem:
            raise OffsetsFileError(
                f"offsets file {name} of table '{table.path}' cannot be written: {problem.message}",
                code=ErrorCode.STORAGE_EXCEPTION,
            ) from problem
        return OffsetsFile(file.path, file.location_id)

    def resolve(self, table: TableInfo, text: str) -> OffsetsFile:
        """The file with a full path; `ConfigError` unless it belongs to this table."""
        what = f"offsets file of table '{table.path}'"
        file = parse_location(re.sub("^file://localhost/", "file:///", text), what)
        for location in self._registry.locations.live:
            root = parse_location(location.uri, what)
            own = root._replace(path=f"{root.path}/{_directory(table)}")
            if own.contains(file) and _NAME.fullmatch(file.path[len(own.path) + 1 :]):
                return OffsetsFile(file.path[len(root.path) + 1 :], location.location_id)
        raise ConfigError(
            f"offsets file {text!r:.200} is not one of table '{table.path}'; name the path that "
            f"PREPARE_LAKE_TABLE_SNAPSHOT gave for it"
        )

    async def read(self, table: TableInfo, file: OffsetsFile) -> dict[TableBucket, int]:
        """The offsets in a file; `OffsetsFileError` if it is missing or damaged.

        `LocationUnavailableError` if its location does not answer.
        """
        location_id = self._location(file)
        try:
            data = await self._registry.storage.read_at(
                location_id, file.path, limit=FILE_BYTES_MAX
            )
            return from_json(table.table_id, data)
        except LocationUnavailableError:
            raise
        except (ZuflussError, ValueError, TypeError, KeyError, RecursionError) as problem:
            raise OffsetsFileError(
                f"offsets file {self.full_path(file)!s:.200} of table '{table.path}' cannot be "
                f"read: {problem!r:.300}; restore it, or commit a snapshot with all buckets' "
                f"offsets"
            ) from problem

    async def find(self, table: TableInfo, locations: Iterable[int]) -> list[OffsetsFile]:
        """The files of a table in some locations."""
        files: list[OffsetsFile] = []
        for location_id in locations:
            objects = self._registry.storage.objects(location_id)
            async for page in objects.list(f"{_directory(table)}/metadata"):
                paths = [each.path for each in page if each.path.endswith(SUFFIX)]
                files += [OffsetsFile(path, location_id) for path in paths]
        return files

    async def delete(self, files: Iterable[OffsetsFile]) -> None:
        """Remove files."""
        await self._registry.storage.delete(
            [RemoteFile(self._location(file), file.path, 0, 0) for file in files]
        )

    @asynccontextmanager
    async def counted(
        self, files: Iterable[OffsetsFile], locations_version: int
    ) -> AsyncIterator[None]:
        """Keep the locations of files as they are in this block, which commits the files.

        `ConfigError` if one of the locations is retired already; `LocationMovedError` if a location
        was moved since `locations_version`, when the files were found or written.
        """
        async with self._registry.turn:
            check_moves(self._registry.storage, locations_version)
            for file in files:
                location = self._registry.locations.get(self._location(file))
                if location.state is AdminState.RETIRED:
                    raise ConfigError(
                        f"{location} was retired, so offsets file {file.path} counts no more; "
                        f"prepare the snapshot again"
                    )
            yield

    @property
    def locations_version(self) -> int:
        """The present version of the registry of locations."""
        return self._registry.locations.version

    def location(self, home: int | None, file: OffsetsFile | None = None) -> int:
        """The location of a file; without a file, that of new files of a table at `home`."""
        return self._registry.home(home).location_id if file is None else self._location(file)

    def _location(self, file: OffsetsFile) -> int:
        known = file.location_id
        return self._registry.locations.first.location_id if known is None else known

    def __repr__(self) -> str:
        return "OffsetsFiles()"


def _directory(table: TableInfo) -> str:
    return table_directory(LAKE, table.path, table.table_id)


def _joined(root: LocationUri, path: str) -> str:
    return f"{root.path if root.scheme == FILE else root.text}/{path}"


def to_json(table_id: int, offsets: Offsets) -> bytes:
    """Encode offsets as the bytes of a file."""
    by_partition: dict[int | None, dict[int, int]] = {}
    for bucket, offset in offsets.items():
        by_partition.setdefault(bucket.partition_id, {})[bucket.bucket_id] = offset
    value: dict[str, Any] = {"version": VERSION, "table_id": table_id}
    if None in by_partition:
        value["bucket_offsets"] = _row(by_partition[None])
    elif by_partition:
        value["partition_offsets"] = [
            {"partition_id": partition_id, "bucket_offsets": _row(row)}
            for partition_id, row in sorted(by_partition.items(), key=lambda item: item[0] or 0)
        ]
    return dump_object(value)


def from_json(table_id: int, data: bytes) -> dict[TableBucket, int]:
    """Decode the bytes of a file; ValueError, KeyError or TypeError if they do not fit."""
    value = json.loads(data)
    if value["version"] != VERSION or value["table_id"] != table_id:
        raise ValueError(
            f"it has version {value['version']} and table {value['table_id']}, expected are "
            f"{VERSION} and {table_id}"
        )
    parts = value.get("partition_offsets", ())
    rows: list[tuple[int | None, Any]] = [(_number(p["partition_id"]), p) for p in parts]
    if "bucket_offsets" in value:
        rows.append((None, value))
    return {
        TableBucket(table_id, partition_id, i): _number(offset)
        for partition_id, row in rows
        for i, offset in enumerate(row["bucket_offsets"])
        if offset != NOTHING
    }


def _row(offsets: Mapping[int, int]) -> list[int]:
    return [offsets.get(i, NOTHING) for i in range(max(offsets) + 1)]


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is neither an offset nor an id")
    return value
