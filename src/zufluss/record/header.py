"""The log batch header: reading, building and stamping.

A log is a sequence of batches. This module has the layout of their header;
`kernels/batch_header.py` repeats its numbers for kernels, and a test holds them equal. Everything
is little-endian.

| field                    | type | magic 0 | magic 1 | magic 2 | set by | in CRC |
|--------------------------|------|---------|---------|---------|--------|--------|
| base offset              | i64  | 0       | 0       | 0       | server | no     |
| length (bytes after it)  | i32  | 8       | 8       | 8       | client | no     |
| magic                    | u8   | 12      | 12      | 12      | client | no     |
| commit timestamp, ms     | i64  | 13      | 13      | 13      | server | no     |
| leader epoch             | i32  | –       | –       | 21      | server | no     |
| CRC-32C of what follows  | u32  | 21      | 21      | 25      | client | no     |
| schema id                | i16  | 25      | 25      | 29      | client | yes    |
| attributes (1 = append)  | u8   | 27      | 27      | 31      | client | yes    |
| last offset delta        | i32  | 28      | 28      | 32      | client | yes    |
| writer id (−1 none)      | i64  | 32      | 32      | 36      | client | yes    |
| batch sequence (−1 none) | i32  | 40      | 40      | 44      | client | yes    |
| record count             | i32  | 44      | 44      | 48      | client | yes    |
| statistics length        | i32  | –       | 48      | 52      | client | yes    |
| body                     |      | 48      | 52      | 56      | client | yes    |

body = statistics (magic ≥ 1), change types (one byte per record, only when not append-only), then
one Arrow message (`arrow/message.py`) or rows (`batch/row_body.py`). The fields of the server
are outside the CRC, so a batch is stamped in place. An empty changelog batch (count 0, delta 0, no
body) still takes one offset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from crc32c import crc32c

from zufluss.errors import CorruptRecordError

Buffer: TypeAlias = Any
"""Anything with the buffer protocol: bytes, bytearray, memoryview, a numpy array of uint8."""

MAX_MAGIC = 2
"""The newest header this version reads."""

HEADER_SIZES = (48, 52, 56)
"""Header size by magic."""

CRC_OFFSETS = (21, 21, 25)
"""Position of the CRC, by magic; the bytes that it covers start four bytes later."""

LENGTH_OVERHEAD = 12
"""Bytes of base offset and length, which the length does not count."""

MIN_BATCH_SIZE = HEADER_SIZES[0]
"""Size of the smallest batch, a bare magic 0 header."""

ATTRIBUTE_APPEND_ONLY = 1
"""Attribute bit: every record is an append, no change types are stored."""

NO_WRITER_ID = -1
NO_SEQUENCE = -1
NO_LEADER_EPOCH = -1

_MAGIC_0 = struct.Struct("<qiBqIhBiqii")
_MAGIC_1 = struct.Struct("<qiBqIhBiqiii")
_MAGIC_2 = struct.Struct("<qiBqiIhBiqiii")
_OFFSET_LENGTH_MAGIC = struct.Struct("<qiB")
_OFFSET = struct.Struct("<q")
_TIMESTAMP_EPOCH = struct.Struct("<qi")
_CRC = struct.Struct("<I")


class BatchHeader(NamedTuple):
    """The header of one batch; fields that its magic lacks have their "none" value."""

    base_offset: int
    """Offset of the first record."""
    length: int
    """Bytes after the length field."""
    magic: int
    """Header version, 0 to 2."""
    timestamp: int
    """Commit time in milliseconds, set by the server."""
    leader_epoch: int
    """Epoch of the leader that appended the batch, −1 if the magic has none."""
    crc: int
    """CRC-32C of everything from the schema id on."""
    schema_id: int
    """Schema the body was written with."""
    attributes: int
    """Bit 0: append-only."""
    last_offset_delta: int
    """Last offset minus base offset."""
    writer_id: int
    """Idempotent writer, −1 for none."""
    batch_sequence: int
    """Sequence of the batch within its writer, −1 for none."""
    record_count: int
    """Number of records."""
    statistics_length: int
    """Bytes of the statistics block, 0 for none."""

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return self.length + LENGTH_OVERHEAD

    @property
    def header_size(self) -> int:
        """Bytes before the body."""
        return HEADER_SIZES[self.magic]

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Offset after the last record."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def append_only(self) -> bool:
        """Whether the batch has no change types, because all records are appends."""
        return bool(self.attributes & ATTRIBUTE_APPEND_ONLY)

    @property
    def change_types_size(self) -> int:
        """Bytes of the change types that precede the records."""
        return 0 if self.attributes & ATTRIBUTE_APPEND_ONLY else self.record_count

    @property
    def body_offset(self) -> int:
        """Bytes before the records: header, statistics and change types."""
        return self.header_size + self.statistics_length + self.change_types_size


def read_header(view: Buffer, pos: int = 0) -> BatchHeader:
    """Read the header at `pos`; raises `CorruptRecordError` if it is cut, unknown or impossible."""
    try:
        magic = view[pos + LENGTH_OVERHEAD]
        if magic == 0:
            f = _MAGIC_0.unpack_from(view, pos)
            header = BatchHeader._make((*f[:4], NO_LEADER_EPOCH, *f[4:], 0))
        elif magic == 1:
            f = _MAGIC_1.unpack_from(view, pos)
            header = BatchHeader._make((*f[:4], NO_LEADER_EPOCH, *f[4:]))
        elif magic == MAX_MAGIC:
            header = BatchHeader._make(_MAGIC_2.unpack_from(view, pos))
        else:
            raise CorruptRecordError(
                f"batch at byte {pos}: magic {magic} is unknown, 0 to {MAX_MAGIC} are readable"
            )
    except (struct.error, IndexError):
        raise CorruptRecordError(
            f"batch at byte {pos}: the header is cut, {max(len(view) - pos, 0)} bytes are left"
        ) from None
    if header.length + LENGTH_OVERHEAD < header.header_size:
        raise CorruptRecordError(
            f"batch at byte {pos}: length {header.length} is less than its own header"
        )
    return header


def iter_headers(view: Buffer, pos: int = 0) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of every whole batch; a batch that is cut at the end is left out.

    Servers may cut the last batch of a fetch at their byte limit.
    """
    end = len(view)
    while end - pos >= MIN_BATCH_SIZE:
        _, length, magic = _OFFSET_LENGTH_MAGIC.unpack_from(view, pos)
        if magic <= MAX_MAGIC and length + LENGTH_OVERHEAD > end - pos:
            return
        header = read_header(view, pos)
        yield pos, header
        pos += header.length + LENGTH_OVERHEAD


def build_batch(
    schema_id: int,
    body: Buffer,
    count: int,
    *,
    magic: int = 0,
    writer_id: int = NO_WRITER_ID,
    sequence: int = NO_SEQUENCE,
    append_only: bool = True,
    change_types: Buffer | None = None,
    statistics: Buffer = b"",
) -> bytearray:
    """Return a batch with this body and its CRC; offset, timestamp and epoch are unset."""
    if magic == 0 and len(statistics):
        raise ValueError("statistics need magic 1 or 2, magic 0 has no field for their length")
    if append_only is not (change_types is None):
        raise ValueError("change_types go with append_only=False, and only with it")
    parts = [memoryview(p).cast("B") for p in (statistics, change_types or b"", body)]
    header_size = HEADER_SIZES[magic]
    size = header_size + sum(p.nbytes for p in parts)
    batch = bytearray(size)
    pos = header_size
    for part in parts:
        batch[pos : pos + part.nbytes] = part
        pos += part.nbytes
    write_header(
        batch,
        schema_id,
        count,
        magic=magic,
        writer_id=writer_id,
        sequence=sequence,
        append_only=append_only,
        statistics_length=len(statistics),
    )
    return batch


def write_header(
    view: Buffer,
    schema_id: int,
    count: int,
    *,
    magic: int = 0,
    writer_id: int = NO_WRITER_ID,
    sequence: int = NO_SEQUENCE,
    append_only: bool = True,
    statistics_length: int = 0,
) -> None:
    """Write header and CRC of the batch that fills `view` and whose body is written already."""
    covered = (schema_id, int(append_only), max(count - 1, 0), writer_id, sequence, count)
    length = len(view) - LENGTH_OVERHEAD
    if magic == 0:
        _MAGIC_0.pack_into(view, 0, 0, length, 0, 0, 0, *covered)
    elif magic == 1:
        _MAGIC_1.pack_into(view, 0, 0, length, 1, 0, 0, *covered, statistics_length)
    else:
        epoch = NO_LEADER_EPOCH
        _MAGIC_2.pack_into(view, 0, 0, length, 2, 0, epoch, 0, *covered, statistics_length)
    seal(view, 0)


def crc_of(view: Buffer, pos: int, magic: int, end: int) -> int:
    """Return the CRC-32C of the batch in [pos, end)."""
    return int(crc32c(memoryview(view)[pos + CRC_OFFSETS[magic] + 4 : end]))


def seal(view: Buffer, pos: int) -> None:
    """Compute the CRC of the batch at `pos` and write it."""
    _, length, magic = _OFFSET_LENGTH_MAGIC.unpack_from(view, pos)
    crc = crc_of(view, pos, magic, pos + length + LENGTH_OVERHEAD)
    _CRC.pack_into(view, pos + CRC_OFFSETS[magic], crc)


def verify_crc(view: Buffer, pos: int, header: BatchHeader) -> bool:
    """Return whether the batch at `pos` is whole and has the CRC of its bytes."""
    end = pos + header.size
    return end <= len(view) and crc_of(view, pos, header.magic, end) == header.crc


def stamp(
    view: Buffer, pos: int, magic: int, base_offset: int, timestamp: int, leader_epoch: int
) -> None:
    """Write the fields of the server: base offset, commit time, leader epoch (magic 2 only)."""
    _OFFSET.pack_into(view, pos, base_offset)
    if magic == MAX_MAGIC:
        _TIMESTAMP_EPOCH.pack_into(view, pos + 13, timestamp, leader_epoch)
    else:
        _OFFSET.pack_into(view, pos + 13, timestamp)
