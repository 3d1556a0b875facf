"""Finds and removes files of an Iceberg table that nothing refers to.

| file | is referred to by |
|---|---|
| data, position deletes (`.parquet`) | live entries of manifests of any retained snapshot |
| manifests, manifest lists (`.avro`) | retained snapshots |
| `.metadata.json` | the catalog, and the metadata log of the current one |
| statistics (`.puffin`, `.stats`) | the current metadata |
| `-version-hint.temp` | nothing: a writer of a catalog of type `hadoop` was killed |

`unreferenced_by_expiry` names what expired snapshots used and nobody else does. `sweep` lists the
table's data and metadata directories first and asks what is referred to afterwards, so that what is
committed in between is seen. It removes only files with these suffixes that are older than a bound:
files of a round that is under way are younger. Anything else stays.

Neither of the two removes anything outside of the table's location. `write.data.path`, a snapshot
and a symbolic link may name files elsewhere, which other tables may share; these stay. A directory
in which another table has metadata, one that was renamed away or that another catalog knows, is not
swept at all: its files look like orphans from here.

Listing goes directory by directory; memory holds the paths of old files, nothing of young ones.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow.fs as fs
from pyiceberg.io import FileIO
from pyiceberg.manifest import ManifestFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from zufluss.lake.base import LakeError, LakeTableError, SweepReport
from zufluss.lake.iceberg.files import local_path
from zufluss.lake.iceberg.private import manifest_entries
from zufluss.lake.iceberg.warehouse import TEMPORARY_HINT

METADATA_SUFFIXES = (".metadata.json", ".metadata.json.gz")
SUFFIXES = (".parquet", ".avro", ".puffin", ".stats", TEMPORARY_HINT, *METADATA_SUFFIXES)
"""Names of files that may be removed."""
GZIP_MAGIC: Final = b"\x1f\x8b"


class ListedFile(NamedTuple):
    """A file in a directory of the table."""

    path: str
    """Its path as the file system has it."""
    size: int
    """Bytes."""
    modified_ms: int
    """The time it was written, in epoch milliseconds."""


def plain_path(location: str) -> str:
    """A location without its scheme, as file systems list it."""
    path = local_path(location)
    return str(path) if path is not None else location.partition("://")[2]


def file_system(io: FileIO, location: str) -> fs.FileSystem:
    """The file system of a location; `LakeError` where the FileIO cannot list."""
    if local_path(location) is not None:
        return fs.LocalFileSystem()
    scheme, _, rest = location.partition("://")
    if hasattr(io, "fs_by_scheme"):
        return io.fs_by_scheme(scheme, rest.partition("/")[0])
    if hasattr(io, "get_fs"):
        return fs.PyFileSystem(fs.FSSpecHandler(io.get_fs(scheme)))
    raise LakeError(
        f"files at {location} cannot be listed through {type(io).__name__}; orphans stay there. "
        "Set py-io-impl to pyiceberg.io.pyarrow.PyArrowFileIO in the catalog's properties"
    )


def list_files(system: fs.FileSystem, directory: str) -> Iterator[ListedFile]:
    """Every file below a directory, one directory at a time; symbolic links are not followed."""
    is_local = isinstance(system, fs.LocalFileSystem)
    waiting = [directory]
    while waiting:
        selector = fs.FileSelector(waiting.pop(), allow_not_found=True)
        for info in system.get_file_info(selector):
            if info.type == fs.FileType.Directory:
                if not (is_local and Path(info.path).is_symlink()):
                    waiting.append(info.path)
            elif info.type == fs.FileType.File:
                yield ListedFile(info.path, info.size, (info.mtime_ns or 0) // 1_000_000)


def directories(metadata: TableMetadata) -> list[str]:
    """The directories of the table's files, without those outside of its location."""
    location = metadata.location.rstrip("/")
    locations = [
        metadata.properties.get("write.data.path", f"{location}/data").rstrip("/"),
        metadata.properties.get("write.metadata.path", f"{location}/metadata").rstrip("/"),
    ]
    return [directory for directory in locations if is_inside(directory, location)]


def is_inside(path: str, location: str) -> bool:
    """Whether a path is below a location, by its name and, of local files, by its real place."""
    name, root = plain_path(path), plain_path(location).rstrip("/")
    if not name.startswith(f"{root}/") or not {".", ".."}.isdisjoint(unquote(name).split("/")):
        return False
    if local_path(path) is None:
        return path.partition("://")[0] == location.partition("://")[0]
    return os.path.realpath(name).startswith(f"{os.path.realpath(root)}/")


def references(table: Table) -> Iterator[str]:
    """Locations of every file that the table may still need; some more than once."""
    metadata = table.metadata
    yield table.metadata_location
    yield from (entry.metadata_file for entry in metadata.metadata_log)
    for statistics in (*metadata.statistics, *getattr(metadata, "partition_statistics", ())):
        yield statistics.statistics_path
    yield from (snapshot.manifest_list for snapshot in metadata.snapshots)
    for manifest in _manifests(table.io, metadata.snapshots):
        yield manifest.manifest_path
        yield from (entry.data_file.file_path for entry in manifest_entries(table.io, manifest))


def _manifests(io: FileIO, snapshots: Iterable[Snapshot]) -> Iterator[ManifestFile]:
    """Every manifest of some snapshots, once."""
    seen: set[str] = set()
    for snapshot in snapshots:
        for manifest in snapshot.manifests(io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                yield manifest


def unreferenced_by_expiry(io: FileIO, gone: list[Snapshot], retained: list[Snapshot]) -> set[str]:
    """Locations that the snapshots in `gone` used and those in `kept` do not."""
    left = {manifest.manifest_path for manifest in _manifests(io, retained)}
    doomed = {snapshot.manifest_list for snapshot in gone}
    for manifest in _manifests(io, gone):
        if manifest.manifest_path not in left:
            doomed.add(manifest.manifest_path)
            doomed.update(e.data_file.file_path for e in manifest_entries(io, manifest))
    for manifest in _manifests(io, retained):
        doomed.difference_update(e.data_file.file_path for e in manifest_entries(io, manifest))
    return doomed - {snapshot.manifest_list for snapshot in retained}


def remove(table: Table, files: Iterable[str]) -> int:
    """Remove files inside of the table's location; those that are gone already do not count."""
    own = (file for file in files if is_inside(file, table.location()))
    return sum(_delete(file_system(table.io, file), plain_path(file)) for file in own)


def _delete(system: Any, path: str) -> bool:
    try:
        system.delete_file(path)
    except FileNotFoundError:
        return False
    except OSError as problem:
        raise LakeError(f"file {path} of the lake cannot be removed: {problem}") from problem
    return True


def sweep(table: Table, older_than_ms: int) -> SweepReport:
    """Remove older files that nothing refers to."""
    candidates: dict[str, tuple[fs.FileSystem, int]] = {}
    described: dict[str, fs.FileSystem] = {}
    looked_at = 0
    for directory in directories(table.metadata):
        system = file_system(table.io, directory)
        for file in list_files(system, plain_path(directory)):
            looked_at += 1
            if file.modified_ms < older_than_ms and file.path.endswith(SUFFIXES):
                candidates[file.path] = (system, file.size)
            if file.path.endswith(METADATA_SUFFIXES):
                described[file.path] = system
    for location in references(table.refresh()):
        candidates.pop(plain_path(location), None)
        described.pop(plain_path(location), None)
    _check_alone(table, described)
    removed = {path: size for path, (system, size) in candidates.items() if _delete(system, path)}
    return SweepReport(looked_at, len(removed), sum(removed.values()))


def _check_alone(table: Table, described: Mapping[str, fs.FileSystem]) -> None:
    """Raise `LakeTableError` if one of these unused metadata files is of another table."""
    own = str(table.metadata.table_uuid)
    for path, system in described.items():
        uuid = _table_uuid(system, path)
        if uuid not in (None, own):
            raise LakeTableError(
                f"{table.location()} is the directory of lake table {'.'.join(table.name())} and "
                f"of another table ({path} describes table {uuid}), whose files must not be swept; "
                "move one of them, or remove what is left of the other"
            )


def _table_uuid(system: fs.FileSystem, path: str) -> str | None:
    """The table that a metadata file describes; None if the file is gone or incomplete."""
    try:
        with system.open_input_stream(path, compression=None) as source:
            data = source.read()
        text = gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data
        return str(json.loads(text)["table-uuid"])
    except (FileNotFoundError, EOFError, ValueError, KeyError, TypeError, gzip.BadGzipFile):
        return None
