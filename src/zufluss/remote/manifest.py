"""The manifest of a bucket's remote log: which segments are there, and where.

JSON in Fluss's form, with what we need beside it. A manifest is written once and never changed;
the coordinator knows which one counts.

| field | value |
|---|---|
| `version` | 1 |
| `database`, `table`, `partition_name`, `table_id`, `partition_id`, `bucket_id` | the bucket; the partition's only where there is one |
| `remote_log_segments` | a list by offset, without holes, of |
| … `segment_id`, `start_offset`, `end_offset`, `max_timestamp`, `size_in_bytes` | the segment; the end is exclusive |
| … `location_id` | ours: where its files lie |
| … `files` | ours: of `log`, `index`, `timeindex`, `writer_snapshot` each `path`, `size`, `crc32c` |
| `zufluss_crc32c` | ours: the checksum of the rest (`seal.py`) |
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zufluss.errors import CorruptRecordError
from zufluss.model.schema import dump_object
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote.files import RemoteFile, file_of, number, text
from zufluss.remote.seal import check_seal, sealed

VERSION = 1
MANIFEST_BYTES_MAX = 64 * 1024 * 1024
"""Largest manifest that is read."""

FILES = ("log", "index", "timeindex", "writer_snapshot")


@dataclass(frozen=True, slots=True)
class RemoteSegment:
    """A closed segment in remote storage; all of its files lie in one location."""

    segment_id: str
    """A UUID, made for each upload."""
    start_offset: int
    end_offset: int
    """The offset after its last record."""
    max_timestamp: int
    """The newest commit timestamp in it."""
    log: RemoteFile
    index: RemoteFile
    timeindex: RemoteFile
    writer_snapshot: RemoteFile

    @property
    def location_id(self) -> int:
        """Where it lies."""
        return self.log.location_id

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        """All of its files."""
        return (self.log, self.index, self.timeindex, self.writer_snapshot)


@dataclass(frozen=True, slots=True)
class LogManifest:
    """What a bucket has in remote storage of its log."""

    path: PhysicalTablePath
    """The table or partition."""
    bucket: TableBucket
    segments: tuple[RemoteSegment, ...] = ()
    """By offset; each begins where the one before ends."""

    @property
    def start_offset(self) -> int | None:
        """The first offset, None if there is nothing."""
        return self.segments[0].start_offset if self.segments else None

    @property
    def end_offset(self) -> int | None:
        """The offset after the last one, None if there is nothing."""
        return self.segments[-1].end_offset if self.segments else None

    @property
    def files(self) -> list[RemoteFile]:
        """Every file it refers to."""
        return [file for segment in self.segments for file in segment.files]

    def appended(self, segment: RemoteSegment) -> LogManifest:
        """With one more segment at the end."""
        end = self.end_offset
        if end is not None and segment.start_offset != end:
            raise ValueError(f"segment at {segment.start_offset} does not continue {end}")
        return replace(self, segments=(*self.segments, segment))

    def without(self, count: int) -> LogManifest:
        """Without the oldest `count` segments."""
        return replace(self, segments=self.segments[count:])

    def to_json(self) -> bytes:
        """As it is written."""
        partition: dict[str, Any] = {}
        if self.bucket.partition_id is not None:
            partition = {
                "partition_name": self.path.partition,
                "partition_id": self.bucket.partition_id,
            }
        document = {
            "version": VERSION,
            "database": self.path.database,
            "table": self.path.table,
            "table_id": self.bucket.table_id,
            **partition,
            "bucket_id": self.bucket.bucket_id,
            "remote_log_segments": [_segment_object(s) for s in self.segments],
        }
        return sealed(dump_object(document))

    @classmethod
    def from_json(cls, data: bytes) -> LogManifest:
        """What the bytes of a manifest say; `CorruptRecordError` if they are none."""
        try:
            check_seal(data)
            return _manifest(json.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CorruptRecordError(f"a manifest of a remote log is damaged: {e!r:.300}") from e


def _segment_object(segment: RemoteSegment) -> dict[str, Any]:
    return {
        "segment_id": segment.segment_id,
        "start_offset": segment.start_offset,
        "end_offset": segment.end_offset,
        "max_timestamp": segment.max_timestamp,
        "size_in_bytes": segment.log.size,
        "location_id": segment.location_id,
        "files": {
            name: {"path": file.path, "size": file.size, "crc32c": file.crc32c}
            for name, file in zip(FILES, segment.files, strict=True)
        },
    }


def _manifest(source: Mapping[str, Any]) -> LogManifest:
    if source["version"] != VERSION:
        raise ValueError(f"version {source['version']!r}, this server reads {VERSION}")
    partition_id = source.get("partition_id")
    name = source.get("partition_name")
    bucket = TableBucket(
        number(source["table_id"]),
        None if partition_id is None else number(partition_id),
        number(source["bucket_id"]),
    )
    path = PhysicalTablePath(
        text(source["database"]), text(source["table"]), None if name is None else text(name)
    )
    found = LogManifest(path, bucket)
    for segment in source["remote_log_segments"]:
        found = found.appended(_segment(segment))
    return found


def _segment(source: Mapping[str, Any]) -> RemoteSegment:
    location_id = number(source["location_id"])
    start, end = number(source["start_offset"]), number(source["end_offset"])
    if start >= end:
        raise ValueError(f"segment from {start} to {end} has no records")
    return RemoteSegment(
        text(source["segment_id"]),
        start,
        end,
        _timestamp(source["max_timestamp"]),
        *(file_of(source["files"][name], location_id) for name in FILES),
    )


def _timestamp(value: Any) -> int:
    """-1 where there is none."""
    return -1 if value == -1 else number(value)
