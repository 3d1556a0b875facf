"""Leases in the metadata store: a few small binary values each, and how they are read again.

| path below `/leases/kv-snapshot` | value |
|---|---|
| `ID` | the head; written when the lease is created, is taken over, or gets or loses a table |
| `ID/expiry` | the time it has left; the only value that a renewal writes |
| `ID/tables/TABLE_ID` | its pins and revocations of a table; changed apart from other tables |

Every value begins with its version (u8, 1) and ends with the CRC-32C of the rest (u32, little
endian). Between them, numbers are unsigned varints (LEB128) and texts are UTF-8 after their length:

| value | fields, in this order |
|---|---|
| head | epoch; created (epoch ms); owner (length + 1, text; 0 for none); tables: count, ids as differences |
| expiry | ms left; duration asked for last, ms |
| table | deflated: the five columns of the pins, then the revocations |

| column of the pins | one for each | form |
|---|---|---|
| partition id + 1, 0 for none | owner: table or partition | count of owners, then differences to the one before |
| number of buckets | owner | as it is |
| bucket | pin | difference to the one before in its owner |
| snapshot id | pin | zigzag of the difference to the pin before |
| location of `_METADATA` | pin | as it is |

Revocations: their count, then of each the partition id + 1 (0: the whole table) and the name.

A lease is read in parts. A part that cannot be read makes the lease damaged; `leases/rules.py` says
what a damaged lease holds.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from crc32c import crc32c

from zufluss.coordinator.leases.rules import Lease, LeasedTable, SnapshotPin
from zufluss.coordinator.records import LEASES_PATH
from zufluss.errors import ConfigError, CorruptRecordError
from zufluss.meta.api import VALUE_BYTES_MAX, Create, Delete, Entry, Op, Put
from zufluss.model.table import TableBucket
from zufluss.varint import CUT, TOO_LONG, decode_varint, encode_varint

VERSION = 1
BODY_BYTES_MAX = 64 * 1024 * 1024
"""Largest table value, before it is deflated."""
NUMBER_MAX = 2**63 - 1
"""Largest number in a value."""
EXPIRIES_KNOWN_MAX = 1_000
"""Encoded expiry values that are cached: renewals for the same duration write the same bytes."""

_CHECKSUM = struct.Struct("<I")

T = TypeVar("T")


class Head(NamedTuple):
    """The head of a lease."""

    owner: str | None
    """The principal that created it; None without authentication."""
    epoch: int
    """Its epoch."""
    created_ms: int
    """When it was created, epoch milliseconds."""
    table_ids: tuple[int, ...]
    """Tables that have a value of their own."""


class Expiry(NamedTuple):
    """The time a lease has left."""

    remaining_ms: int
    """The time it had left when this was written."""
    duration_ms: int
    """The duration that the last acquire or renewal asked for."""


class StoredLease(NamedTuple):
    """A lease as the store has it."""

    lease: Lease
    """The lease without a deadline; its pins have only snapshot ids and locations."""
    remaining_ms: int
    """The time it had left; 0 where that cannot be read."""


# Paths and operations


def head_path(lease_id: str) -> str:
    """The path of a lease's head."""
    return f"{LEASES_PATH}/{lease_id}"


def expiry_path(lease_id: str) -> str:
    """The path of the time a lease has left."""
    return f"{head_path(lease_id)}/expiry"


def table_path(lease_id: str, table_id: int) -> str:
    """The path of the pins and revocations of a lease in one table."""
    return f"{head_path(lease_id)}/tables/{table_id}"


def put_expiry(lease_id: str, remaining_ms: int, duration_ms: int) -> Op:
    """The operation that replaces the time a lease has left."""
    return Put(expiry_path(lease_id), encode_expiry(Expiry(remaining_ms, duration_ms)))


def create(lease: Lease, tables: Mapping[int, bytes]) -> list[Op]:
    """Operations that create a lease whose time begins now."""
    i = lease.lease_id
    return [
        Create(head_path(i), encode_head(_head(lease, tables))),
        Create(expiry_path(i), encode_expiry(Expiry(lease.duration_ms, lease.duration_ms))),
        *(Create(table_path(i, table_id), value) for table_id, value in tables.items()),
    ]


def change(before: Lease, after: Lease, tables: Mapping[int, bytes]) -> list[Op]:
    """Operations that replace a lease; `tables` are the encoded tables that differ."""
    i = before.lease_id
    ops: list[Op] = []
    if (before.epoch, before.tables.keys()) != (after.epoch, after.tables.keys()):
        ops.append(Put(head_path(i), encode_head(_head(after, after.tables))))
    for table_id, value in tables.items():
        known = table_id in before.tables
        ops.append((Put if known else Create)(table_path(i, table_id), value))
    gone = before.tables.keys() - after.tables.keys()
    return ops + [Delete(table_path(i, table_id)) for table_id in sorted(gone)]


def delete(lease: Lease) -> list[Op]:
    """Operations that delete a lease, also a damaged one."""
    if lease.damage is not None:
        return [Delete(path) for path in sorted(lease.paths)]
    i = lease.lease_id
    tables = [Delete(table_path(i, table_id)) for table_id in lease.tables]
    return [Delete(head_path(i)), Delete(expiry_path(i)), *tables]


def _head(lease: Lease, table_ids: Iterable[int]) -> Head:
    return Head(lease.owner, lease.epoch, lease.created_ms, tuple(sorted(table_ids)))


# Values


def encode_head(head: Head) -> bytes:
    """The head of a lease as it is stored."""
    owner = None if head.owner is None else head.owner.encode()
    return _sealed(
        _varints((head.epoch, head.created_ms))
        + (b"\0" if owner is None else _varints([len(owner) + 1]) + owner)
        + _varints([len(head.table_ids), *_differences(head.table_ids)])
    )


def decode_head(value: bytes) -> Head:
    """Decode a head; `CorruptRecordError` if it is malformed."""
    fields = _Fields(_unsealed(value))
    epoch, created_ms, size = fields.numbers(3)
    owner = fields.text(size - 1) if size else None
    table_ids = tuple(_sums(fields.numbers(fields.number())))
    fields.finish()
    return Head(owner, epoch, created_ms, table_ids)


@lru_cache(maxsize=EXPIRIES_KNOWN_MAX)
def encode_expiry(expiry: Expiry) -> bytes:
    """The time a lease has left as it is stored."""
    return _sealed(_varints(expiry))


def decode_expiry(value: bytes) -> Expiry:
    """Decode the time a lease has left; `CorruptRecordError` if it is malformed."""
    fields = _Fields(_unsealed(value))
    remaining_ms, duration_ms = fields.numbers(2)
    fields.finish()
    return Expiry(remaining_ms, duration_ms)


def encode_table(table: LeasedTable) -> bytes:
    """Encode the part of a lease in one table; `ConfigError` if it is too large."""
    pins = sorted((_owner(b.partition_id), b.bucket_id, pin) for b, pin in table.pins.items())
    owners = [(owner, [p[1] for p in group]) for owner, group in groupby(pins, lambda p: p[0])]
    snapshots = _differences(pin.snapshot_id for _, _, pin in pins)
    body = bytearray(_varints([len(owners), *_differences(owner for owner, _ in owners)]))
    body += _varints(len(buckets) for _, buckets in owners)
    for _, buckets in owners:
        body += _varints(_differences(buckets))
    body += _varints(by << 1 if by >= 0 else (-by << 1) - 1 for by in snapshots)
    body += _varints(pin.location_id for _, _, pin in pins)
    body += _varints([len(table.revoked)])
    for partition_id, name in table.revoked.items():
        text = name.encode()
        body += _varints((_owner(partition_id), len(text))) + text
    value = _sealed(zlib.compress(bytes(body)))
    if len(value) > VALUE_BYTES_MAX:
        raise ConfigError(
            f"the {len(pins)} snapshots that a lease would have of one table need {len(value)} "
            f"bytes, at most {VALUE_BYTES_MAX} are allowed; use several leases"
        )
    return value


def decode_table(table_id: int, value: bytes) -> LeasedTable:
    """Decode the part of a lease in one table; `CorruptRecordError` if it is malformed."""
    fields = _Fields(_inflated(_unsealed(value)))
    owners = list(_sums(fields.numbers(fields.number())))
    counts = fields.numbers(len(owners))
    buckets = [
        TableBucket(table_id, owner - 1 if owner else None, bucket_id)
        for owner, count in zip(owners, counts, strict=True)
        for bucket_id in _sums(fields.numbers(count))
    ]
    zigzag = fields.numbers(len(buckets))
    snapshots = _sums((by >> 1) ^ -(by & 1) for by in zigzag)
    locations = fields.numbers(len(buckets))
    pins = {b: SnapshotPin(i, at) for b, i, at in zip(buckets, snapshots, locations, strict=True)}
    revoked: dict[int | None, str] = {}
    for _ in range(fields.number()):
        owner, size = fields.numbers(2)
        revoked[owner - 1 if owner else None] = fields.text(size)
    fields.finish()
    return LeasedTable(pins, revoked)


def _owner(partition_id: int | None) -> int:
    return 0 if partition_id is None else partition_id + 1


def _sealed(fields: bytes) -> bytes:
    covered = bytes([VERSION]) + fields
    return covered + _CHECKSUM.pack(crc32c(covered))


def _unsealed(value: bytes) -> bytes:
    covered, checksum = value[:-4], value[-4:]
    if len(value) < 5 or _CHECKSUM.pack(crc32c(covered)) != checksum:
        raise CorruptRecordError(f"the checksum of its {len(value)} bytes does not fit")
    if covered[0] != VERSION:
        raise CorruptRecordError(f"it has version {covered[0]}, this zufluss reads {VERSION}")
    return covered[1:]


def _inflated(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(data, BODY_BYTES_MAX)
    except zlib.error as problem:
        raise CorruptRecordError(f"it cannot be inflated: {problem}") from problem
    if not stream.eof or stream.unused_data:
        raise CorruptRecordError("its deflated bytes end too early or too late")
    return body


def _differences(numbers: Iterable[int]) -> Iterator[int]:
    before = 0
    for each in numbers:
        yield each - before
        before = each


def _sums(differences: Iterable[int]) -> Iterator[int]:
    total = 0
    for by in differences:
        total += by
        if not 0 <= total <= NUMBER_MAX:
            raise CorruptRecordError(f"{total} is out of range")
        yield total


def _varints(numbers: Iterable[int]) -> bytes:
    return b"".join(map(encode_varint, numbers))


class _Fields:
    """Reads the numbers and texts of a value one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self) -> int:
        return self.numbers(1)[0]

    def numbers(self, count: int) -> list[int]:
        """The next numbers."""
        data, at = self._data, self._at
        if count > len(data) - at:
            raise CorruptRecordError(f"{count} numbers are said to be in {len(data) - at} bytes")
        numbers: list[int] = []
        end = len(data)
        for _ in range(count):
            value, at = decode_varint(data, at, end)
            if at == CUT:
                raise CorruptRecordError("it ends within a number")
            if at == TOO_LONG:
                raise CorruptRecordError("a number is too long")
            numbers.append(value)
        self._at = at
        return numbers

    def text(self, size: int) -> str:
        """The next text."""
        data = self._data[self._at : self._at + size]
        if len(data) != size:
            raise CorruptRecordError("it ends within a text")
        self._at += size
        try:
            return data.decode()
        except UnicodeDecodeError as problem:
            raise CorruptRecordError(f"a text is not UTF-8: {problem}") from None

    def finish(self) -> None:
        if self._at != len(self._data):
            raise CorruptRecordError(f"{len(self._data) - self._at} bytes are left over")


# Reading a lease again


def load(entries: Iterable[Entry]) -> list[StoredLease]:
    """All leases in the values at and below `LEASES_PATH`."""
    leases: dict[str, dict[str, bytes]] = {}
    for entry in entries:
        name = entry.path.removeprefix(f"{LEASES_PATH}/").partition("/")[0]
        leases.setdefault(name, {})[entry.path] = entry.value
    return [load_lease(lease_id, values) for lease_id, values in leases.items()]


def load_lease(lease_id: str, values: Mapping[str, bytes]) -> StoredLease:
    """Decode one lease from all values at and below its path."""
    damage: list[str] = []
    head = _part(values, head_path(lease_id), decode_head, damage)
    expiry = _part(values, expiry_path(lease_id), decode_expiry, damage)
    prefix = table_path(lease_id, 0)[:-1]
    named = {int(p[len(prefix) :]) for p in values if p[len(prefix) :].isdecimal()}
    listed = named if head is None else named | set(head.table_ids)
    tables: dict[int, LeasedTable] = {}
    for table_id in sorted(listed):
        path = table_path(lease_id, table_id)
        table = _part(values, path, partial(decode_table, table_id), damage)
        if table is not None:
            tables[table_id] = table
    if head is not None and named - set(head.table_ids):
        damage.append(f"its head does not name tables {sorted(named - set(head.table_ids))}")
    lease = Lease(
        lease_id,
        owner=None if head is None else head.owner,
        epoch=0 if head is None else head.epoch,
        created_ms=0 if head is None else head.created_ms,
        duration_ms=0 if expiry is None else expiry.duration_ms,
        deadline=0.0,
        tables=tables,
        damage="; ".join(damage) or None,
        owner_known=head is not None,
        unreadable=frozenset(listed - tables.keys()),
        holds_all=head is None and not listed,
        paths=frozenset(values) if damage else frozenset(),
    )
    return StoredLease(lease, 0 if expiry is None else expiry.remaining_ms)


def _part(
    values: Mapping[str, bytes], path: str, decode: Callable[[bytes], T], damage: list[str]
) -> T | None:
    """Decode a part of a lease; None if it cannot be read, with the reason added to `damage`."""
    value = values.get(path)
    if value is None:
        damage.append(f"{path} is missing")
        return None
    try:
        return decode(value)
    except CorruptRecordError as problem:
        damage.append(f"{path} cannot be read: {problem.message}")
        return None
