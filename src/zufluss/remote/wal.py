"""The objects of the shared log: the appended bytes of all buckets, as a server makes them durable.

A server session (one registration, one server epoch) writes numbered objects, each created if
absent and never changed. One object has the entries of all buckets of one moment, so the number of
puts does not depend on the number of buckets. The epoch is in the name: a server that was replaced
writes into names that its successor never uses. This module is the format and nothing else; it
does no I/O. `log/shared` writes, seals and reads the objects.

| path below the location | content |
|---|---|
| `wal/EPOCH/NUMBER` | an object; server epoch and number have 16 hexadecimal digits, numbers begin at 0 and are dense |

All numbers are little-endian. An object is a header, an index, and a body:

| header, 96 bytes | type | |
|---|---|---|
| magic | 8 B | `ZUFLWAL1` |
| format | u16 | 1 |
| kind | u16 | 0 data; 1 seal: the session ends before this number; 2 close: its owner ended it itself |
| server id | i32 | |
| cluster id | 16 B | a UUID |
| server epoch | i64 | as in the name |
| number | i64 | as in the name |
| nonce | 16 B | random, of this object: its writer knows its own object by it |
| coordinator epoch, or durable | i64 | of a seal: who sealed; otherwise: objects below this number were durable when this one was sent |
| entries | u32 | 0 for a seal and a close, which are the header alone |
| body bytes | u64 | |
| CRC-32C of the index | u32 | |
| zero | 4 B | |
| CRC-32C of the 92 bytes before | u32 | |

| index entry, 56 bytes, sorted by bucket | type | |
|---|---|---|
| table id | i64 | |
| partition id | i64 | −1 for a table without partitions |
| first offset, end offset | i64, i64 | the end is exclusive |
| bucket | i32 | |
| leader epoch | i32 | |
| position, length | u32, u32 | in the body; entries lie one behind the other without gaps |
| CRC-32C of the bytes | u32 | |
| kind | u16 | 0 batches; 1 carry: written again, so that older objects can go; 2 release: none follow |
| zero | u16 | |

The body has batches exactly as they lie in the segment, stamped. Header and index are checked
before anything in them is used, an entry when its bytes are taken: damage to one entry costs its
bucket alone, and every error names the object, and where it is known the bucket and its offsets.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from crc32c import crc32c

from zufluss.model.table import TableBucket
from zufluss.remote.errors import ObjectCorruptError

MAGIC: Final = b"ZUFLWAL1"
FORMAT: Final = 1
HEADER_BYTES: Final = 96
ENTRY_BYTES: Final = 56
NONCE_BYTES: Final = 16
OBJECT_BYTES_MAX: Final = 1 << 30
"""Size of the largest object. A server cuts objects at a few MiB; one append may be larger."""

PIECE_BYTES_MIN: Final = 1 << 14
"""Pieces from this size on are sent as they are: a piece costs less than copying so much."""

_HEADER = struct.Struct("<8sHHi16sqq16sqIQII")
_ENTRY = struct.Struct("<qqqqiiIIIHH")
_CRC = struct.Struct("<I")
_NAME = re.compile(r"wal/([0-9a-f]{16})/([0-9a-f]{16})")
_LARGEST: Final = 2**63 - 1


class WalKind(IntEnum):
    """What an object is."""

    DATA = 0
    SEAL = 1
    CLOSE = 2


class EntryKind(IntEnum):
    """What an entry says about its bucket."""

    BATCHES = 0
    """Appended batches."""
    CARRY = 1
    """Batches that older objects have, too, or another session."""
    RELEASE = 2
    """The session has nothing of the bucket from here on."""


class WalObjectDamagedError(ObjectCorruptError):
    """The header or the index of an object is damaged: nothing in the object can be used."""


class WalEntryDamagedError(ObjectCorruptError):
    """The bytes of one entry are damaged or missing; the other entries are not concerned."""

    def __init__(self, uri: str, path: str, entry: WalEntry, reason: str) -> None:
        super().__init__(
            uri,
            path,
            f"offsets {entry.first_offset} to {entry.end_offset - 1} of {entry.bucket}: {reason}",
        )
        self.entry = entry


class WalName(NamedTuple):
    """The name of an object."""

    server_epoch: int
    number: int

    @property
    def path(self) -> str:
        """The path below the root of the location."""
        return f"{session_directory(self.server_epoch)}/{self.number:016x}"

    @classmethod
    def parse(cls, path: str) -> WalName | None:
        """The name in a path; None if it is no path of an object."""
        match = _NAME.fullmatch(path)
        return match and cls(int(match[1], 16), int(match[2], 16))


class WalHeader(NamedTuple):
    """Who wrote an object, and how much it has."""

    kind: WalKind
    cluster_id: str
    """A UUID in 32 hexadecimal digits."""
    server_id: int
    server_epoch: int
    number: int
    nonce: bytes
    said: int = 0
    """Of a seal: the epoch of the coordinator that sealed. Of other objects: all below this number
    were durable when it was sent."""
    entries: int = 0
    body_bytes: int = 0
    index_crc: int = 0

    @property
    def name(self) -> WalName:
        """The name of the object."""
        return WalName(self.server_epoch, self.number)

    @property
    def body_position(self) -> int:
        """Where the body begins."""
        return HEADER_BYTES + ENTRY_BYTES * self.entries


class WalEntry(NamedTuple):
    """A range of a bucket's offsets in an object."""

    bucket: TableBucket
    leader_epoch: int
    kind: EntryKind
    first_offset: int
    end_offset: int
    position: int
    """In the body."""
    length: int
    crc: int


class NewEntry(NamedTuple):
    """An entry that is to be written."""

    bucket: TableBucket
    leader_epoch: int
    kind: EntryKind
    first_offset: int
    end_offset: int
    pieces: Sequence[bytes]
    """Its bytes, in order."""
    length: int
    """Of all pieces."""
    crc: int
    """CRC-32C of all pieces."""


class WalObject:
    """An object whose header and index are right. Its entries are checked when they are read."""

    __slots__ = ("_data", "_uri", "entries", "header")

    def __init__(
        self, uri: str, header: WalHeader, entries: tuple[WalEntry, ...], data: memoryview
    ) -> None:
        self.header = header
        self.entries = entries
        self._uri = uri
        self._data = data

    def bytes_of(self, entry: WalEntry) -> memoryview:
        """Return the batches of an entry; raises `WalEntryDamagedError` if they are damaged."""
        start = self.header.body_position + entry.position
        batches = self._data[start : start + entry.length]
        if len(batches) != entry.length:
            reason = f"the object ends after {len(self._data)} bytes, before the end of the entry"
        elif crc32c(batches) != entry.crc:
            reason = "the checksum of the batches does not match"
        else:
            return batches
        raise WalEntryDamagedError(self._uri, self.header.name.path, entry, reason)

    def only(self, entry: WalEntry) -> WalObject:
        """Return this object as if it had one entry."""
        return WalObject(self._uri, self.header, (entry,), self._data)

    def __repr__(self) -> str:
        header = self.header
        return f"WalObject({header.name.path}, {header.kind.name}, entries={header.entries})"


def session_directory(server_epoch: int) -> str:
    """Return the directory of a session's objects."""
    return f"wal/{server_epoch:016x}"


def bucket_key(bucket: TableBucket) -> tuple[int, int, int]:
    """Return what the index is sorted by."""
    return bucket.table_id, -1 if bucket.partition_id is None else bucket.partition_id, bucket[2]


def encode(header: WalHeader, entries: Sequence[NewEntry] = ()) -> bytes:
    """Return the bytes of an object; see `encode_pieces`."""
    return b"".join(encode_pieces(header, entries))


def encode_pieces(header: WalHeader, entries: Sequence[NewEntry] = ()) -> list[bytes]:
    """Return the bytes of an object in pieces, the header alone in the first.

    Counts and checksums of `header` are filled in. Entries of one bucket keep their order. Large
    pieces of entries are not copied. Raises ValueError if the entries do not fit the kind of the
    object, or the object would be larger than `OBJECT_BYTES_MAX`.
    """
    if bool(entries) != (header.kind is WalKind.DATA):
        raise ValueError(f"an object of kind {header.kind.name} with {len(entries)} entries")
    index, body, position = bytearray(), list[bytes](), 0
    for entry in sorted(entries, key=lambda new: bucket_key(new.bucket)):
        index += _entry_bytes(entry, position)
        body += entry.pieces
        position += entry.length
    if HEADER_BYTES + len(index) + position > OBJECT_BYTES_MAX:
        raise ValueError(f"an object of {position} bytes; at most {OBJECT_BYTES_MAX} are allowed")
    first = _header_bytes(header, len(entries), position, crc32c(index))
    return [first, *_joined([bytes(index), *body])]


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces with their neighbours."""
    small: list[bytes] = []
    for piece in pieces:
        if len(piece) < PIECE_BYTES_MIN:
            small.append(piece)
            continue
        if small:
            yield b"".join(small)
            small.clear()
        yield piece
    if small:
        yield b"".join(small)


def _header_bytes(header: WalHeader, entries: int, body_bytes: int, index_crc: int) -> bytes:
    data = _HEADER.pack(
        MAGIC,
        FORMAT,
        header.kind,
        header.server_id,
        bytes.fromhex(header.cluster_id),
        header.server_epoch,
        header.number,
        header.nonce,
        header.said,
        entries,
        body_bytes,
        index_crc,
        0,
    )
    return data + _CRC.pack(crc32c(data))


def _entry_bytes(entry: NewEntry, position: int) -> bytes:
    if problem := _contradiction(entry):
        raise ValueError(f"an entry of {entry.bucket} {problem}")
    table_id, partition_id, bucket_id = bucket_key(entry.bucket)
    return _ENTRY.pack(
        table_id,
        partition_id,
        entry.first_offset,
        entry.end_offset,
        bucket_id,
        entry.leader_epoch,
        position,
        entry.length,
        entry.crc,
        entry.kind,
        0,
    )


def read_header(data: bytes | memoryview, name: WalName, uri: str) -> WalHeader:
    """Return the header of the object of this name; raises `WalObjectDamagedError`.

    `data` may end behind the header.
    """
    if len(data) < HEADER_BYTES:
        raise _damaged(uri, name, f"it has {len(data)} bytes, a header has {HEADER_BYTES}")
    fields = _HEADER.unpack_from(data)
    magic, version, kind, server_id, cluster_id, epoch, number, nonce, *rest, zero = fields
    if magic != MAGIC:
        raise _damaged(uri, name, f"it begins with {bytes(magic)!r}, not with {MAGIC!r}")
    if crc32c(memoryview(data)[: _HEADER.size]) != _CRC.unpack_from(data, _HEADER.size)[0]:
        raise _damaged(uri, name, "the checksum of the header does not match")
    if version != FORMAT:
        raise _damaged(uri, name, f"it has format {version}, this server reads {FORMAT}")
    if WalName(epoch, number) != name:
        raise _damaged(uri, name, f"it is number {number} of server epoch {epoch}")
    if kind not in WalKind.__members__.values() or zero:
        raise _damaged(uri, name, f"its kind {kind} is unknown")
    header = WalHeader(WalKind(kind), cluster_id.hex(), server_id, epoch, number, nonce, *rest)
    if bool(header.entries) != (header.kind is WalKind.DATA):
        raise _damaged(uri, name, f"a {header.kind.name} has {header.entries} entries")
    if header.body_position + header.body_bytes > OBJECT_BYTES_MAX:
        raise _damaged(uri, name, f"{header.entries} entries, {header.body_bytes} bytes of body")
    return header


def decode(data: bytes | memoryview, name: WalName, uri: str) -> WalObject:
    """Return the object of this name; raises `WalObjectDamagedError`.

    `data` must have header and index. Where the body is cut, the entries behind the cut are damaged
    and the others are not.
    """
    view = memoryview(data).cast("B")
    header = read_header(view, name, uri)
    index = view[HEADER_BYTES : header.body_position]
    if len(index) != ENTRY_BYTES * header.entries:
        raise _damaged(uri, name, f"it ends in its index, after {len(view)} bytes")
    if crc32c(index) != header.index_crc:
        raise _damaged(uri, name, "the checksum of the index does not match")
    entries = tuple(_entry(fields, name, uri) for fields in _ENTRY.iter_unpack(index))
    position, last = 0, (-_LARGEST, 0, 0)
    for entry in entries:
        key = bucket_key(entry.bucket)
        if entry.position != position or key < last:
            raise _damaged(uri, name, f"the entry of {entry.bucket} is at {entry.position}")
        position, last = position + entry.length, key
    if position != header.body_bytes:
        raise _damaged(uri, name, f"its entries have {position} bytes of {header.body_bytes}")
    if len(view) > header.body_position + position:
        raise _damaged(uri, name, f"it has {len(view)} bytes, more than were written")
    return WalObject(uri, header, entries, view)


def _entry(fields: tuple[int, ...], name: WalName, uri: str) -> WalEntry:
    table_id, partition_id, first, end, bucket_id, leader_epoch, *place, kind, zero = fields
    bucket = TableBucket(table_id, None if partition_id == -1 else partition_id, bucket_id)
    if kind not in EntryKind.__members__.values() or zero:
        raise _damaged(uri, name, f"an entry of {bucket} has the kind {kind}")
    if table_id < 0 or partition_id < -1 or bucket_id < 0:
        raise _damaged(uri, name, f"an entry is of {bucket}")
    entry = WalEntry(bucket, leader_epoch, EntryKind(kind), first, end, *place)
    if problem := _contradiction(entry):
        raise _damaged(uri, name, f"an entry of {bucket} {problem}")
    return entry


def _contradiction(entry: NewEntry | WalEntry) -> str:
    """Say what is wrong with the offsets and the length of an entry; "" if they are right."""
    filled = entry.kind is not EntryKind.RELEASE
    first, end = entry.first_offset, entry.end_offset
    if 0 <= first <= end and (first < end) == (entry.length > 0) == filled:
        return ""
    return f"of kind {entry.kind.name} has {entry.length} bytes for offsets {first} to {end}"


def _damaged(uri: str, name: WalName, reason: str) -> WalObjectDamagedError:
    return WalObjectDamagedError(uri, name.path, reason)
