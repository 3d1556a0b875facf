"""The manifest of a bucket's remote log: the list of its segments and their files.

JSON in Fluss's form, with fields of our own beside it. A manifest is written once and never
changed; the coordinator knows the current one of each bucket.

| field | value |
|---|---|
| `version` | 1 |
| `database`, `table`, `partition_name`, `table_id`, `partition_id`, `bucket_id` | the bucket; the fields of the partition only if there is one |
| `remote_log_segments` | a list by offset, of |
| … `segment_id`, `start_offset`, `end_offset`, `max_timestamp`, `size_in_bytes` | the segment; the end is exclusive |
| … `location_id` | ours: the location of its files |
| … `lost_before` | ours: the number of records between this segment and the one before it that were lost with a disk; absent without a loss |
| … `files` | ours: of `log`, `index`, `timeindex`, `writer_snapshot` each `path`, `size`, `crc32c` |
| `zufluss_crc32c` | ours: the checksum of the rest (`seal.py`) |
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zufluss.errors import CorruptRecordError
from zufluss.model.schema import dump_object
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote.files import RemoteFile, file_of, number, text
from zufluss.remote.seal import check_seal, sealed

VERSION = 1
MANIFEST_BYTES_MAX = 64 * 1024 * 1024
"""Size of the largest manifest that is read."""

FILES = ("log", "index", "timeindex", "writer_snapshot")


@dataclass(frozen=True, slots=True)
class RemoteSegment:
    """A closed segment in remote storage; all of its files lie in one location."""

    segment_id: str
    """A UUID, new for each upload."""
    start_offset: int
    end_offset: int
    """The offset after the last record."""
    max_timestamp: int
    """The newest commit timestamp of its records."""
    log: RemoteFile
    index: RemoteFile
    timeindex: RemoteFile
    writer_snapshot: RemoteFile
    lost_before: int = field(default=0, kw_only=True)
    """Records between the segment before and this one; they were lost with a disk."""

    @property
    def location_id(self) -> int:
        """Id of the location."""
        return self.log.location_id

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        """All files of the segment."""
        return (self.log, self.index, self.timeindex, self.writer_snapshot)


@dataclass(frozen=True, slots=True)
class LogManifest:
    """The segments of a bucket's log in remote storage."""

    path: PhysicalTablePath
    """The table or partition."""
    bucket: TableBucket
    segments: tuple[RemoteSegment, ...] = ()
    """In the order of offsets. Each begins where the one before ends, or after a declared loss."""

    @property
    def start_offset(self) -> int | None:
        """The first offset, None without segments."""
        return self.segments[0].start_offset if self.segments else None

    @property
    def end_offset(self) -> int | None:
        """The offset after the last record, None without segments."""
        return self.segments[-1].end_offset if self.segments else None

    @property
    def files(self) -> list[RemoteFile]:
        """All files of all segments."""
        return [file for segment in self.segments for file in segment.files]

    @property
    def losses(self) -> list[tuple[int, int]]:
        """The first and the last lost offset of each loss between two segments."""
        return [
            (s.start_offset - s.lost_before, s.start_offset - 1)
            for s in self.segments[1:]
            if s.lost_before
        ]

    def unbroken(self, end: int) -> tuple[RemoteSegment, ...]:
        """Return the last segments that begin below `end` and reach it without a loss."""
        segments = self.segments[: bisect_left(self.segments, end, key=lambda s: s.start_offset)]
        if not segments or segments[-1].end_offset < end:
            return ()
        first = len(segments) - 1
        while first > 0 and not segments[first].lost_before:
            first -= 1
        return segments[first:]

    def appended(self, segment: RemoteSegment) -> LogManifest:
        """Return the manifest with one more segment at the end."""
        end = self.end_offset
        if end is not None and segment.start_offset != end + segment.lost_before:
            raise ValueError(
                f"segment at {segment.start_offset} does not continue {end} after a loss of "
                f"{segment.lost_before} records"
            )
        return replace(self, segments=(*self.segments, segment))

    def without(self, count: int) -> LogManifest:
        """Return the manifest without the oldest `count` segments."""
        return replace(self, segments=self.segments[count:])

    def without_locations(self, location_ids: Container[int]) -> LogManifest:
        """Return the manifest without the segments in some locations, whose records are lost."""
        left: list[RemoteSegment] = []
        for segment in self.segments:
            if segment.location_id not in location_ids:
                lost = segment.start_offset - left[-1].end_offset if left else 0
                left.append(replace(segment, lost_before=lost))
        return replace(self, segments=tuple(left))

    def to_json(self) -> bytes:
        """Return the bytes of the manifest."""
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
        """Parse the bytes of a manifest; raises `CorruptRecordError` if they are damaged."""
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
        **({"lost_before": segment.lost_before} if segment.lost_before else {}),
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
    manifest = LogManifest(path, bucket)
    for segment in source["remote_log_segments"]:
        manifest = manifest.appended(_segment(segment))
    return manifest


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
        lost_before=number(source.get("lost_before", 0)),
    )


def _timestamp(value: Any) -> int:
    """Return a timestamp, −1 for none."""
    return -1 if value == -1 else number(value)
