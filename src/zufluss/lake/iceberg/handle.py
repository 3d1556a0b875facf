"""The plain data that driver and tasks of an Iceberg round exchange, without a library.

A task gets a `WriterHandle`, which describes files that fit the table, without a catalog. For a
primary-key table it also names the live files of the base snapshot, so that the task can find the
rows that its changes replace. The task returns an `IcebergWriteResult`: its files, with statistics
for manifest entries. All results of a round together are an `IcebergCommittable`.

Partition values are in Iceberg's own form (text, integers, booleans; a date is its day number),
in the order of the partition spec: `schema.partition_values` makes them from a partition's name
and a bucket. Bounds are Iceberg's single-value bytes, by field id.

Bytes are JSON, bounds as hex; a handle is deflated, because it names every live file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, TypeAlias

PartitionValue: TypeAlias = str | int | bool | None
PartitionValues: TypeAlias = tuple[PartitionValue, ...]
FileKind: TypeAlias = Literal["data", "position-deletes"]

DATA: FileKind = "data"
POSITION_DELETES: FileKind = "position-deletes"
_BOUNDS = ("lower_bounds", "upper_bounds")
_COUNTS = ("column_sizes", "value_counts", "null_counts", "nan_counts")


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of the base snapshot, with its delete files."""

    path: str
    """Its location, exactly as position deletes must name it."""
    records: int
    """Rows in it, deleted ones included."""
    size: int
    """Bytes."""
    deletes: tuple[str, ...] = ()
    """Position delete files that apply to it."""
    deleted: int = 0
    """Rows in the delete files; all rows are deleted if it equals `records`."""
    lower_bounds: Mapping[int, bytes] = field(default_factory=dict)
    """Smallest value per identifier field, where known; texts may be cut."""
    upper_bounds: Mapping[int, bytes] = field(default_factory=dict)
    """Largest value per identifier field."""


@dataclass(frozen=True, slots=True)
class WriterHandle:
    """The description of a table for tasks that write its files."""

    schema: str
    """The Iceberg schema as JSON."""
    spec: str
    """The partition spec as JSON."""
    location: str
    """The table's location."""
    data_location: str
    """The directory of data and delete files; writers choose the partition directories."""
    io: Mapping[str, str]
    """Properties of the file system."""
    properties: Mapping[str, str]
    """Table properties (`write.*` among them)."""
    base_snapshot_id: int | None = None
    """The snapshot of the live files; None for an empty table."""
    files: Mapping[PartitionValues, tuple[LiveFile, ...]] = field(default_factory=dict)
    """Live files by partition values; empty for log tables."""

    def live(self, partition: PartitionValues) -> tuple[LiveFile, ...]:
        """The live files of one bucket."""
        return self.files.get(partition, ())

    def narrowed(self, partitions: Iterable[PartitionValues]) -> WriterHandle:
        """The handle with the live files of these buckets only."""
        files = {p: self.files[p] for p in partitions if p in self.files}
        return WriterHandle(**{**_shallow(self), "files": files})

    def to_bytes(self) -> bytes:
        """The handle as bytes."""
        obj = _shallow(self)
        obj["io"], obj["properties"] = dict(self.io), dict(self.properties)
        obj["files"] = [[list(p), [_live_out(f) for f in fs]] for p, fs in self.files.items()]
        return zlib.compress(_dump(obj), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The handle of its bytes."""
        obj = json.loads(zlib.decompress(data))
        obj["files"] = {tuple(p): tuple(map(_live_in, files)) for p, files in obj["files"]}
        return cls(**obj)


@dataclass(frozen=True, slots=True)
class FileWritten:
    """A file that a task wrote and no snapshot references yet."""

    kind: FileKind
    """Rows, or positions of deleted rows."""
    path: str
    """Its location, with scheme."""
    size: int
    """Bytes."""
    records: int
    """Rows in it."""
    partition: PartitionValues
    """Values of the partition spec's fields."""
    column_sizes: Mapping[int, int] = field(default_factory=dict)
    """Bytes per field id."""
    value_counts: Mapping[int, int] = field(default_factory=dict)
    """Values per field id, nulls included."""
    null_counts: Mapping[int, int] = field(default_factory=dict)
    """Nulls per field id."""
    nan_counts: Mapping[int, int] = field(default_factory=dict)
    """NaNs per field id."""
    lower_bounds: Mapping[int, bytes] = field(default_factory=dict)
    """Smallest value per field id."""
    upper_bounds: Mapping[int, bytes] = field(default_factory=dict)
    """Largest value per field id."""
    split_offsets: tuple[int, ...] = ()
    """Where row groups start."""
    referenced_data_file: str | None = None
    """The data file of position deletes; required for them."""


@dataclass(frozen=True, slots=True)
class IcebergWriteResult:
    """The files that one task wrote for one bucket."""

    files: tuple[FileWritten, ...] = ()
    """The files; none when there was nothing to write."""
    base_snapshot_id: int | None = None
    """The base snapshot of the handle."""

    def to_bytes(self) -> bytes:
        """The result as bytes."""
        files = [_written_out(file) for file in self.files]
        return _dump({"base": self.base_snapshot_id, "files": files})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The result of its bytes."""
        obj = json.loads(data)
        return cls(tuple(map(_written_in, obj["files"])), obj["base"])


class IcebergCommittable(IcebergWriteResult):
    """All files of a round."""

    __slots__ = ()


def _dump(obj: Mapping[str, Any]) -> bytes:
    return json.dumps(obj, ensure_ascii=False, separators=(",", ":")).encode()


def _shallow(value: WriterHandle | LiveFile | FileWritten) -> dict[str, Any]:
    return {item.name: getattr(value, item.name) for item in fields(value)}


def _hex_out(obj: dict[str, Any]) -> dict[str, Any]:
    for key in _BOUNDS:
        obj[key] = {i: bound.hex() for i, bound in obj[key].items()}
    return {key: value for key, value in obj.items() if value not in ((), {}, None)}


def _hex_in(obj: dict[str, Any]) -> dict[str, Any]:
    for key in _BOUNDS:
        obj[key] = {int(i): bytes.fromhex(bound) for i, bound in obj.get(key, {}).items()}
    return obj


def _live_out(file: LiveFile) -> dict[str, Any]:
    return _hex_out(_shallow(file))


def _live_in(obj: dict[str, Any]) -> LiveFile:
    return LiveFile(**_hex_in(obj | {"deletes": tuple(obj.get("deletes", ()))}))


def _written_out(file: FileWritten) -> dict[str, Any]:
    return _hex_out(_shallow(file)) | {"partition": list(file.partition)}


def _written_in(obj: dict[str, Any]) -> FileWritten:
    counts = {key: {int(i): n for i, n in obj.get(key, {}).items()} for key in _COUNTS}
    tuples = {key: tuple(obj.get(key, ())) for key in ("partition", "split_offsets")}
    return FileWritten(**_hex_in(obj | counts | tuples))
