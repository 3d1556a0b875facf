"""The commit log: one sequence of preallocated files for the small entries of all buckets.

A sync per bucket file makes small appends expensive: each growing file needs a journal commit of
its own. So in flush mode `ack` small entries are written twice, to their segment (for readers) and,
all entries of a moment in one group, to the commit log, where one fdatasync of a file that was
written full of zeros beforehand makes the whole group durable. The commit log is read only after a
crash.

The files `commit-<n>.log` are used in turn. A file is used again only when every entry in it is
durable in its segment file and covered by the log's checkpoint. Old bytes in a reused file are told
apart by the generation, which grows with every use and stands in each group. Groups start at
multiples of 4096 bytes, so writing one never touches a block of another. Little-endian:

| file header, block 0 | type | | group header         | type | | entry        | type |
|----------------------|------|-|----------------------|------|-|--------------|------|
| magic `ZUFLCMT1`     | 8 B  | | magic `ZCG1`         | u32  | | table id     | i64  |
| generation           | i64  | | crc32c of the rest   | u32  | | partition id | i64  |
| crc32c of both       | u32  | | generation           | i64  | | bucket       | i32  |
|                      |      | | group number         | i64  | | incarnation  | i32  |
|                      |      | | bytes of the entries | i32  | | length       | i32  |
|                      |      | | entries              |      | | batches      |      |

The partition id of a table without partitions is −1. The batches are stamped as in the segment.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import NamedTuple

import structlog
from crc32c import crc32c

from zufluss.errors import CorruptRecordError
from zufluss.log.files import Files, OpenFile
from zufluss.log.log import Log
from zufluss.log.recovery import ReplayEntry
from zufluss.model.table import TableBucket

BLOCK_BYTES = 4096
"""Groups are aligned to this."""

GROUP_HEADER = struct.Struct("<IIqqi")
"""Magic, crc32c, generation, group number, bytes of the entries."""

ENTRY_LENGTH = struct.Struct("<i")
"""Length of an entry's batches, after its key."""

_FILE_MAGIC = b"ZUFLCMT1"
_FILE_HEADER = struct.Struct("<8sqI")
_GROUP_MAGIC = 0x3147435A
_GROUP_REST = struct.Struct("<qqi")
_GROUP_FIELDS = struct.Struct("<qqqi")
_ENTRY_KEY = struct.Struct("<qqii")
_PATTERN = "commit-*.log"
_KEPT_SUFFIX = ".kept"

EntryKey = tuple[int, int, int]
"""Table id, partition id or −1, bucket."""

_logger = structlog.get_logger(__name__)


class Group(NamedTuple):
    """A group read back."""

    generation: int
    """Generation of its file."""
    number: int
    """Its number; groups of one commit log are numbered without gaps."""
    entries: memoryview
    """Its entries."""


def key_of(bucket: TableBucket) -> EntryKey:
    """The key of the entries of a bucket."""
    partition_id = -1 if bucket.partition_id is None else bucket.partition_id
    return bucket.table_id, partition_id, bucket.bucket_id


def entry_prefix(log: Log) -> bytes:
    """The bytes before the length in every entry of a log."""
    if log.bucket is None:
        raise ValueError(f"{log!r} was opened without its bucket, the commit log needs it")
    return _ENTRY_KEY.pack(*key_of(log.bucket), log.incarnation)


class CommitFile:
    """One file of the commit log."""

    __slots__ = (
        "capacity", "file", "flushing", "generation", "given_up", "logs", "path", "position",
    )  # fmt: skip

    def __init__(self, path: Path, file: OpenFile, capacity: int) -> None:
        self.path = path
        self.file = file
        self.capacity = capacity
        """Bytes of the file."""
        self.generation = 0
        """0 as long as it is not in use."""
        self.position = BLOCK_BYTES
        """Where the next group goes."""
        self.logs: dict[Log, None] = {}
        """Logs with entries in this use of the file."""
        self.flushing = False
        """Its logs are being made durable in their segments."""
        self.given_up = False
        """It could not be written or synced, and is not used again."""

    @classmethod
    def prepare(cls, files: Files, path: Path, capacity: int) -> CommitFile:
        """Open a file of `capacity` bytes; what it lacks is written as zeros and synced.

        Allocating without writing would not do: the first write of each block would then change
        the file's metadata, and that is the journal commit to be avoided.
        """
        file = files.open(path, create=True)
        size = path.stat().st_size
        if size != capacity:
            files.truncate(file.fd, min(size, capacity))
            zeros = bytes(1 << 20)
            try:
                for at in range(min(size, capacity), capacity, len(zeros)):
                    files.write_all(file.fd, zeros[: capacity - at], at)
                files.fdatasync(file.fd)
            except OSError:
                files.truncate(file.fd, min(size, capacity))  # the disk is full; keep none of it
                raise
        files.sync_directory(path.parent)
        return cls(path, file, capacity)

    def begin(self, generation: int) -> None:
        """Start a new use of the file; the header goes out with the first group."""
        self.generation = generation
        self.position = BLOCK_BYTES
        self.logs = {}

    def room_for(self, length: int) -> bool:
        """Whether a group of `length` bytes fits."""
        return self.position + length <= self.capacity

    def reserve(self, length: int) -> int:
        """Position of a group of `length` bytes that goes out next."""
        position = self.position
        self.position += -(-length // BLOCK_BYTES) * BLOCK_BYTES
        return position


def seal_group(group: bytearray, generation: int, number: int) -> None:
    """Fill in the header that `group` starts with."""
    _GROUP_REST.pack_into(group, 8, generation, number, len(group) - GROUP_HEADER.size)
    with memoryview(group) as view:
        struct.pack_into("<II", group, 0, _GROUP_MAGIC, crc32c(view[8:]))


def leave_out(group: bytearray, prefixes: set[bytes]) -> None:
    """Take the entries with these prefixes out of a sealed group, and seal it again."""
    _, generation, number, _ = _GROUP_FIELDS.unpack_from(group)
    rest = bytearray(GROUP_HEADER.size)
    at = GROUP_HEADER.size
    while at < len(group):
        records = at + _ENTRY_KEY.size + ENTRY_LENGTH.size
        (length,) = ENTRY_LENGTH.unpack_from(group, at + _ENTRY_KEY.size)
        if bytes(group[at : at + _ENTRY_KEY.size]) not in prefixes:
            rest += group[at : records + length]
        at = records + length
    group[:] = rest
    seal_group(group, generation, number)


def write_group(files: Files, target: CommitFile, position: int, group: bytearray) -> None:
    """Write a sealed group and make it durable. For the commit thread."""
    fd = target.file.fd
    if position == BLOCK_BYTES:
        fields = _FILE_HEADER.pack(_FILE_MAGIC, target.generation, 0)[:16]
        files.write_all(fd, fields + struct.pack("<I", crc32c(fields)), 0)
    files.write_all(fd, group, position)
    files.fdatasync(fd)


def paths_in(directory: Path) -> list[Path]:
    """The commit files in a directory, also those kept from an earlier start."""
    return sorted((*directory.glob(_PATTERN), *kept_in(directory)))


def kept_in(directory: Path) -> list[Path]:
    """The commit files that were set aside for logs that could not be opened."""
    return sorted(directory.glob(_PATTERN + _KEPT_SUFFIX))


def keep(files: Files, directory: Path) -> None:
    """Set the files aside because a log that could not be opened may still need them.

    The generation makes the name unique over all starts: nothing kept earlier is replaced. A file
    without groups stays where it is, to be used.
    """
    for path in list(directory.glob(_PATTERN)):
        generation, groups = _read_file(path)
        if groups:
            files.rename(path, path.with_name(f"commit-{generation}-{path.name}{_KEPT_SUFFIX}"))
    files.sync_directory(directory)


def entries_of(directory: Path, bucket: TableBucket) -> list[ReplayEntry]:
    """The entries of one bucket, copied from files that are in use by other buckets. Blocks.

    A file with an entry of this bucket that is still needed is not overwritten meanwhile; groups
    that are being written have no valid checksum, or entries of others only.
    """
    key = key_of(bucket)
    groups: list[Group] = []
    for path in paths_in(directory):
        groups += _read_file(path, copied=True)[1]
    groups.sort(key=lambda group: (group.generation, group.number))
    return [e for group in groups for k, e in _read_entries(group.entries) if k == key]


def read_commit_log(directory: Path) -> tuple[dict[EntryKey, list[ReplayEntry]], int]:
    """All entries by bucket in the order they were appended, and the newest generation seen."""
    groups: list[Group] = []
    generations = [0]
    for path in paths_in(directory):
        generation, file_groups = _read_file(path)
        generations.append(generation)
        groups += file_groups
    groups.sort(key=lambda group: (group.generation, group.number))
    _report_gaps(groups)
    entries: dict[EntryKey, list[ReplayEntry]] = {}
    for group in groups:
        for key, entry in _read_entries(group.entries):
            entries.setdefault(key, []).append(entry)
    return entries, max(generations)


def _read_file(path: Path, *, copied: bool = False) -> tuple[int, list[Group]]:
    """Generation and groups of a file; 0 and none if it was never used or its header is torn.

    With `copied` the groups are checked and kept as copies, for a file that may be overwritten.
    """
    if path.stat().st_size < BLOCK_BYTES:
        return 0, []
    with path.open("rb") as file:
        data = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
    magic, generation, crc = _FILE_HEADER.unpack_from(data)
    if magic != _FILE_MAGIC or crc != crc32c(data[:16]):
        return 0, []
    return generation, list(_groups(data, generation, copied))


def _groups(data: memoryview, generation: int, copied: bool) -> Iterator[Group]:
    """Yield the intact groups of this generation, also after a damaged one, to notice a gap."""
    at = BLOCK_BYTES
    while at + GROUP_HEADER.size <= len(data):
        magic, crc, its_generation, number, length = GROUP_HEADER.unpack_from(data, at)
        end = at + GROUP_HEADER.size + length
        body = data[at + 8 : max(end, at + 8)]
        if copied and magic == _GROUP_MAGIC:
            body = memoryview(bytes(body))
        if (
            magic == _GROUP_MAGIC
            and its_generation == generation
            and at + GROUP_HEADER.size < end <= len(data)
            and crc == crc32c(body)
        ):
            yield Group(generation, number, body[GROUP_HEADER.size - 8 :])
            at += -(-(end - at) // BLOCK_BYTES) * BLOCK_BYTES
        else:
            at += BLOCK_BYTES


def _report_gaps(groups: list[Group]) -> None:
    """Log an error if a group is missing; the logs that lack its entries refuse to open."""
    for before, after in pairwise(groups):
        if after.generation == before.generation and after.number != before.number + 1:
            _logger.error(
                "commit_log_damaged",
                after_group=before.number,
                missing=after.number - before.number,
            )


def _read_entries(data: memoryview) -> Iterator[tuple[EntryKey, ReplayEntry]]:
    at = 0
    while at < len(data):
        if at + _ENTRY_KEY.size + ENTRY_LENGTH.size > len(data):
            raise CorruptRecordError(f"commit log: {len(data) - at} bytes behind the last entry")
        table_id, partition_id, bucket, incarnation = _ENTRY_KEY.unpack_from(data, at)
        at += _ENTRY_KEY.size
        (length,) = ENTRY_LENGTH.unpack_from(data, at)
        at += ENTRY_LENGTH.size
        if length < 0 or at + length > len(data):
            raise CorruptRecordError(f"commit log: an entry of {length} bytes in a valid group")
        yield (table_id, partition_id, bucket), ReplayEntry(incarnation, data[at : at + length])
        at += length
