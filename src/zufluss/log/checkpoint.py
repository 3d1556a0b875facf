"""The recovery point of one log, kept in a file of two slots.

A checkpoint says: everything below `recovery_point` is durable in the segment files themselves, and
the recovery point lies at `position` of the segment that starts at `segment_base`. Recovery trusts
the segments below it and verifies the rest. A clean stop leaves a checkpoint at the log end beside
a writer snapshot of the same offset; a log whose last segment ends exactly there needs no scan.

The file `log.checkpoint` has two slots of 512 bytes that are written in turn and in place: a torn
write can only hurt the slot that was being written, and one fdatasync of a file that never grows
makes it durable. Little-endian:

| field          | type | at |                                                                   |
|----------------|------|----|-------------------------------------------------------------------|
| magic          | u32  | 0  | `ZCP1`                                                            |
| crc32c         | u32  | 4  | of bytes 8 to 56                                                  |
| counter        | i64  | 8  | the higher of two valid slots is the checkpoint                   |
| recovery point | i64  | 16 | offset                                                            |
| segment base   | i64  | 24 | offset the segment of the recovery point starts at                |
| position       | i64  | 32 | byte of the recovery point in that segment                        |
| last timestamp | i64  | 40 | commit timestamp of the last batch below the recovery point, or 0 |
| incarnation    | i64  | 48 | raised by every truncation; the commit log is matched against it  |

Between two checkpoints, acknowledged entries are durable in the commit log or, large ones, in their
segment. A segment that loses its end would look as if the end had never been synced. So the *mark*
at byte 1024 tells what may not be missing. It is written after each sync of a segment, and not
synced itself: it outlives the process, and after a power failure it is there or not, or torn. Only
a log that was found to lack acknowledged data has it synced, so that later starts refuse it, too.
A log whose end is in the shared log (`zufluss.log.durability = remote`) may have rows that were
never acknowledged. Its mark is the high watermark at the last sync: what is below is true for ever,
and a later start keeps that and takes the rest from the shared log.

| field       | type | at   |                                                                   |
|-------------|------|------|-------------------------------------------------------------------|
| magic       | u32  | 1024 | `ZCM1`                                                            |
| crc32c      | u32  | 1028 | of bytes 1032 to 1048                                             |
| end offset  | i64  | 1032 | everything below is durable, in the segments or the commit log    |
| incarnation | i64  | 1040 | of the log then; a mark of another incarnation does not count     |
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from zufluss.log.files import Files

FILE_NAME = "log.checkpoint"
"""Name of the file in the log's directory."""

_SLOT_BYTES = 512
_MAGIC = 0x3150435A
_PREFIX = struct.Struct("<II")
_FIELDS = struct.Struct("<qqqqqq")
_MARK_AT = 2 * _SLOT_BYTES
_MARK_MAGIC = 0x314D435A
_MARK_FIELDS = struct.Struct("<qq")


class LogCheckpoint(NamedTuple):
    """What is known to be durable in the segment files of a log."""

    counter: int
    """How many checkpoints were written before, in the life of the log."""
    recovery_point: int
    """Everything below this offset is durable."""
    segment_base: int
    """Base offset of the segment the recovery point lies in."""
    position: int
    """Byte of the recovery point in that segment."""
    last_timestamp: int
    """Commit timestamp of the last batch below the recovery point, 0 if there is none."""
    incarnation: int
    """Number of truncations so far."""


def write_checkpoint(files: Files, directory: Path, checkpoint: LogCheckpoint) -> None:
    """Write the checkpoint into its slot and make it durable."""
    fields = _FIELDS.pack(*checkpoint)
    slot = _PREFIX.pack(_MAGIC, crc32c(fields)) + fields
    file = files.open(directory / FILE_NAME, create=True)
    position = (checkpoint.counter & 1) * _SLOT_BYTES
    files.write_all(file.fd, slot.ljust(_SLOT_BYTES, b"\0"), position)
    files.fdatasync(file.fd)
    if checkpoint.counter == 0:  # the first one; a mark may have made the file
        files.sync_directory(directory)


class DurableMark(NamedTuple):
    """The offset up to which a log was durable, in its segments or the commit log."""

    end_offset: int
    """Everything below this offset was durable."""
    incarnation: int
    """Number of truncations then."""


def write_mark(files: Files, directory: Path, mark: DurableMark, *, sync: bool = False) -> None:
    """Write the mark; with `sync` it is durable afterwards."""
    fields = _MARK_FIELDS.pack(*mark)
    file = files.open(directory / FILE_NAME, create=True)
    files.write_all(file.fd, _PREFIX.pack(_MARK_MAGIC, crc32c(fields)) + fields, _MARK_AT)
    if sync:
        files.fdatasync(file.fd)
        files.sync_directory(directory)


def read_mark(directory: Path) -> DurableMark | None:
    """The mark, or None if there is no valid one."""
    data = _read(directory)[_MARK_AT:]
    if len(data) < _PREFIX.size + _MARK_FIELDS.size:
        return None
    magic, crc = _PREFIX.unpack_from(data)
    fields = data[_PREFIX.size : _PREFIX.size + _MARK_FIELDS.size]
    if magic != _MARK_MAGIC or crc != crc32c(fields):
        return None
    return DurableMark(*_MARK_FIELDS.unpack(fields))


def read_checkpoint(directory: Path) -> LogCheckpoint | None:
    """The newest valid checkpoint, or None if there is none."""
    data = _read(directory)
    slots = (_read_slot(data, 0), _read_slot(data, _SLOT_BYTES))
    return max((slot for slot in slots if slot is not None), default=None)


def _read(directory: Path) -> bytes:
    """The file, empty if there is none."""
    try:
        fd = os.open(directory / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(fd, 3 * _SLOT_BYTES, 0)
    finally:
        os.close(fd)


def _read_slot(data: bytes, at: int) -> LogCheckpoint | None:
    slot = data[at : at + _PREFIX.size + _FIELDS.size]
    if len(slot) < _PREFIX.size + _FIELDS.size:
        return None
    magic, crc = _PREFIX.unpack_from(slot)
    fields = slot[_PREFIX.size :]
    if magic != _MAGIC or crc != crc32c(fields):
        return None
    return LogCheckpoint(*_FIELDS.unpack(fields))
