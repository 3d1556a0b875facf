"""Offsets files: how far each bucket of a table got in one lake snapshot.

A file is written once, made durable with its name, and never changed. It lies at

    <remote.data.dir>/lake/DATABASE/TABLE-ID/metadata/UUID.offsets

and is JSON in Fluss's form, because its tools read the path from the properties of a snapshot:

| field | value |
|---|---|
| `version` | 1 |
| `table_id` | the table |
| `bucket_offsets` | by bucket number the offset after the last record in the lake, -1 for none |
| `partition_offsets` | of a partitioned table instead: a list of `partition_id`, `bucket_offsets` |

The metadata store has the path from `lake` on, so a data directory can be moved; clients get and
give the whole path, which must lie below the directory of its own table. Everything here blocks;
`lake.py` calls it in a thread.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import ConfigError, ErrorCode, ZuflussError
from zufluss.model.schema import dump_object
from zufluss.model.table import TableBucket, TableInfo

VERSION = 1
SUFFIX = ".offsets"
FILE_BYTES_MAX = 64 * 1024 * 1024
"""Largest offsets file that is read."""
NOTHING = -1

Offsets = Mapping[TableBucket, int]


class OffsetsFileError(ZuflussError):
    """An offsets file cannot be read or is damaged."""

    code = ErrorCode.UNKNOWN_SERVER_ERROR


def remote_directory(conf: Configuration) -> Path:
    """Where `remote.data.dir` is."""
    text = conf.get(options.REMOTE_DATA_DIR)
    if text is None:
        return Path(conf.get(options.DATA_DIR)).absolute() / "remote"
    return local_path(text, options.REMOTE_DATA_DIR.key).absolute()


def local_path(text: str, what: str) -> Path:
    """The path of a plain path or `file:` URI; `ConfigError` for any other."""
    path = text
    if text.startswith("file:"):
        path = unquote(text.removeprefix("file:"))
        path = path.removeprefix("//localhost") if path.startswith("//localhost/") else path
        path = path.removeprefix("//") if path.startswith("///") else path
    if not path or "\0" in path or "://" in path or path.startswith("//"):
        raise ConfigError(f"{what} {text!r:.200} is not supported; give a path or a file: URI")
    return Path(path)


class OffsetsFiles:
    """The offsets files below one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def directory(self, table: TableInfo) -> Path:
        """Everything of a table."""
        name = f"{table.path.table}-{table.table_id}"
        return self._root / "lake" / table.path.database / name

    def new_name(self, table: TableInfo) -> str:
        """The name of a file to write."""
        return self._name(self.directory(table) / "metadata" / f"{uuid.uuid4()}{SUFFIX}")

    def path(self, name: str) -> Path:
        """Where a file is."""
        return self._root / name

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._root))

    def write(self, table: TableInfo, name: str, offsets: Offsets) -> None:
        """Write a new file; durable with its name when this returns."""
        path = self.path(name)
        try:
            directory = path.parent
            _make_durable_directory(directory)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(to_json(table.table_id, offsets))
                file.flush()
                os.fsync(file.fileno())
            _sync_directory(directory)
        except OSError as problem:
            raise OffsetsFileError(
                f"offsets file {path} of table '{table.path}' cannot be written: {problem}",
                code=ErrorCode.STORAGE_EXCEPTION,
            ) from problem

    def resolve(self, table: TableInfo, text: str) -> str:
        """The name of a file that a client gave; `ConfigError` unless it is one of this table."""
        given = local_path(text, f"offsets file of table '{table.path}'")
        own = self.directory(table).resolve()
        try:
            found = given.resolve()
        except (OSError, RuntimeError):
            found = Path("/")  # a loop of links leads nowhere
        if not found.is_relative_to(own) or found.suffix != SUFFIX:
            raise ConfigError(
                f"offsets file {text!r:.200} is not one of table '{table.path}'; name the path "
                f"that PREPARE_LAKE_TABLE_SNAPSHOT gave for it"
            )
        return self._name(self.directory(table) / found.relative_to(own))

    def read(self, table: TableInfo, name: str) -> dict[TableBucket, int]:
        """What a file says; `OffsetsFileError` when it is missing or damaged."""
        path = self.path(name)
        try:
            with path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
            if len(data) > FILE_BYTES_MAX:
                raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
            return from_json(table.table_id, data)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as problem:
            raise OffsetsFileError(
                f"offsets file {path!s:.200} of table '{table.path}' cannot be read: "
                f"{problem!r:.300}; restore it, or commit a snapshot with all buckets' offsets"
            ) from problem

    def names(self, table: TableInfo) -> list[str]:
        """The files of a table."""
        return [self._name(path) for path in self.directory(table).glob(f"metadata/*{SUFFIX}")]

    def unlink(self, names: Iterable[str]) -> None:
        """Remove files."""
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def remove(self, table: TableInfo) -> None:
        """Remove everything of a table that was dropped."""
        self.unlink(self.names(table))
        directory = self.directory(table)
        for each in (directory / "metadata", directory):
            if each.is_dir() and not any(each.iterdir()):
                each.rmdir()

    def __repr__(self) -> str:
        return f"OffsetsFiles({str(self._root)!r})"


def to_json(table_id: int, offsets: Offsets) -> bytes:
    """The bytes of a file."""
    by_partition: dict[int | None, dict[int, int]] = {}
    for bucket, offset in offsets.items():
        by_partition.setdefault(bucket.partition_id, {})[bucket.bucket_id] = offset
    value: dict[str, Any] = {"version": VERSION, "table_id": table_id}
    if None in by_partition:
        value["bucket_offsets"] = _row(by_partition[None])
    elif by_partition:
        value["partition_offsets"] = [
            {"partition_id": partition_id, "bucket_offsets": _row(found)}
            for partition_id, found in sorted(by_partition.items(), key=lambda item: item[0] or 0)
        ]
    return dump_object(value)


def from_json(table_id: int, data: bytes) -> dict[TableBucket, int]:
    """What the bytes of a file say; ValueError and its like when they are none of this table."""
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


def _row(found: Mapping[int, int]) -> list[int]:
    return [found.get(i, NOTHING) for i in range(max(found) + 1)]


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is neither an offset nor an id")
    return value


def _make_durable_directory(path: Path) -> None:
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
