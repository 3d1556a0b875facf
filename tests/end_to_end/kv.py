"""Helpers for the tests of primary-key tables, with pyfluss and with raw frames.

The first half uses pyfluss: create, upsert, delete, look up, follow the changelog. The second half
builds PUT_KV batches byte by byte and sends raw frames, for cases that pyfluss cannot produce: an
invalid batch, a repeated batch, the exact bytes of an answer.

| KV batch | offset | bytes |
|---|---|---|
| length, bytes after it | 0 | i32 |
| magic, 0 | 4 | u8 |
| CRC-32C of what follows | 5 | u32 |
| schema id | 9 | i16 |
| attributes, 0 | 11 | u8 |
| writer id, sequence | 12, 20 | i64, i32 |
| count | 24 | i32 |
| records: length i32, key length varint, key, row (none: delete) | 28 | |
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import fluss
import pyarrow as pa
from crc32c import crc32c

from tests.end_to_end.helpers import create, everything, in_time, poll_records, select
from tests.end_to_end.raw import RawClient, table_path
from tests.record.rows.plain_rows import compacted_field, decode_compacted, encode_compacted, varint
from tests.record.rows.plain_values import rows_of_batch
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor
from zufluss.record.arrow.message import decode as decode_arrow
from zufluss.record.header import iter_headers
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

KEYED = pa.schema([("id", pa.int64()), ("text", pa.string()), ("n", pa.int32())])
"""The everyday primary-key table: `id` is the key."""

DATABASE = "wire"
"""The database of tables that are created by hand."""
KINDS = ("+A", "+I", "-U", "+U", "-D")
PUT_VERSION, LOOKUP_VERSION = 2, 1
HEADER = struct.Struct("<iBIhBqii")
HEADER_SIZE = 28
CRC_AT, CRC_FROM = 5, 9

Record = tuple[int, str, dict[str, Any]]
"""Offset, kind and row of a changelog record."""


# -- pyfluss ----------------------------------------------------------------------------------


async def create_keyed(
    conn: fluss.FlussConnection,
    path: fluss.TablePath,
    schema: pa.Schema = KEYED,
    keys: Sequence[str] = ("id",),
    **options: Any,
) -> fluss.FlussTable:
    """Create a primary-key table and open it; one bucket unless told otherwise."""
    options.setdefault("bucket_count", 1)
    return await create(conn, path, schema, primary_keys=list(keys), **options)


def writer_of(
    table: fluss.FlussTable, columns: Sequence[int | str] | None = None
) -> fluss.UpsertWriter:
    """A writer of whole rows, or of some columns by name or index."""
    builder = table.new_upsert()
    indexes = [c for c in columns or () if isinstance(c, int)]
    names = [c for c in columns or () if isinstance(c, str)]
    if indexes:
        builder = builder.partial_update_by_index(indexes)
    elif names:
        builder = builder.partial_update_by_name(names)
    return builder.create_writer()


async def upsert(
    table: fluss.FlussTable, *rows: Any, columns: Sequence[int | str] | None = None
) -> None:
    """Upsert rows in one batch per bucket and wait for the acknowledgement."""
    await _write(table, columns, lambda writer: [writer.upsert(row) for row in rows])


async def delete(
    table: fluss.FlussTable, *keys: Any, columns: Sequence[int | str] | None = None
) -> None:
    """Delete keys in one batch per bucket and wait for the acknowledgement."""
    await _write(table, columns, lambda writer: [writer.delete(key) for key in keys])


async def _write(
    table: fluss.FlussTable,
    columns: Sequence[int | str] | None,
    work: Callable[[fluss.UpsertWriter], list[fluss.WriteResultHandle]],
) -> None:
    writer = writer_of(table, columns)
    handles = work(writer)
    await in_time(writer.flush())
    for handle in handles:
        await in_time(handle.wait())


async def lookup(table: fluss.FlussTable, key: Any) -> dict[str, Any] | None:
    """The row of a key."""
    return await in_time(table.new_lookup().create_lookuper().lookup(key))


async def lookups(table: fluss.FlussTable, keys: Iterable[Any]) -> list[dict[str, Any] | None]:
    """The rows of many keys, with one lookuper."""
    lookuper = table.new_lookup().create_lookuper()
    return [await in_time(lookuper.lookup(key)) for key in keys]


async def changelog(
    table: fluss.FlussTable,
    count: int,
    start: dict[int, int] | None = None,
    columns: Sequence[int | str] | None = None,
) -> list[Record]:
    """The first `count` records of the changelog."""
    scanner = await in_time(select(table.new_scan(), columns).create_log_scanner())
    scanner.subscribe_buckets(start or everything(table))
    return [described(record) for record in await poll_records(scanner, count)]


def described(record: fluss.ScanRecord) -> Record:
    """Offset, kind and row."""
    return record.offset, record.change_type.short_string(), record.row


async def limit_scan(
    table: fluss.FlussTable, limit: int, bucket: int = 0, columns: Sequence[int | str] | None = None
) -> pa.Table:
    """At most `limit` rows of a bucket."""
    where = fluss.TableBucket(table.get_table_info().table_id, bucket)
    scan = select(table.new_scan().limit(limit), columns)
    return await in_time(scan.create_bucket_batch_scanner(where).to_arrow())


# -- by hand ----------------------------------------------------------------------------------


def create_by_hand(
    raw: RawClient, name: str, schema: Schema, properties: dict[str, str] | None = None
) -> int:
    """Create a primary-key table with one bucket in the database of the tests; its id."""
    database = m.CreateDatabaseRequest(database_name=DATABASE, ignore_if_exists=True)
    raw.call(ApiKey.CREATE_DATABASE, database)
    keys = tuple(schema.primary_key)
    options = {"table.replication.factor": "1", **(properties or {})}
    descriptor = TableDescriptor(schema, None, (), keys, 1, options, {})
    request = m.CreateTableRequest(
        table_path=table_path(DATABASE, name),
        table_json=descriptor.to_json(),
        ignore_if_exists=False,
    )
    raw.call(ApiKey.CREATE_TABLE, request)
    return raw.table_id(DATABASE, name)


def drop_by_hand(raw: RawClient, name: str) -> None:
    """Drop a table that `create_by_hand` created."""
    request = m.DropTableRequest(table_path=table_path(DATABASE, name), ignore_if_not_exists=False)
    raw.call(ApiKey.DROP_TABLE, request)


def seal_kv(batch: bytearray) -> bytes:
    """The batch with a CRC that is right for what stands in it now."""
    struct.pack_into("<I", batch, CRC_AT, crc32c(bytes(batch[CRC_FROM:])))
    return bytes(batch)


def record(key: bytes, row: bytes | None) -> bytes:
    """One record of a KV batch."""
    body = varint(len(key), 32) + key + (row or b"")
    return struct.pack("<i", len(body)) + body


def kv_batch(
    records: Sequence[bytes],
    *,
    schema_id: int = 1,
    writer_id: int = -1,
    sequence: int = -1,
    count: int | None = None,
) -> bytes:
    """A KV batch of the given records."""
    body = b"".join(records)
    length = HEADER_SIZE - 4 + len(body)
    number = len(records) if count is None else count
    head = HEADER.pack(length, 0, 0, schema_id, 0, writer_id, sequence, number)
    return seal_kv(bytearray(head + body))


class Codec(NamedTuple):
    """Rows and keys of one schema as bytes, by the plain-Python codec."""

    schema: Schema
    schema_id: int = 1

    def key(self, row: Sequence[Any]) -> bytes:
        """The key bytes of a row: its key columns, in key order."""
        parts = [
            compacted_field(row[i], self.schema.columns[i].data_type)
            for i in map(self.schema.names.index, self.schema.primary_key)
        ]
        return b"".join(parts)

    def row(self, row: Sequence[Any]) -> bytes:
        """A compacted row."""
        return encode_compacted(row, [c.data_type for c in self.schema.columns])

    def put(self, row: Sequence[Any]) -> bytes:
        """The record that puts a row."""
        return record(self.key(row), self.row(row))

    def delete(self, row: Sequence[Any]) -> bytes:
        """The record that deletes the key of a row."""
        return record(self.key(row), None)

    def value(self, value: bytes) -> tuple[Any, ...] | None:
        """The row of a stored value: schema id and compacted row."""
        if not value:
            return None
        assert struct.unpack_from("<h", value)[0] == self.schema_id
        types = [c.data_type for c in self.schema.columns]
        return tuple(decode_compacted(memoryview(value), 2, len(value), types))


def put_request(
    table_id: int,
    records: bytes,
    bucket: int = 0,
    acks: int = -1,
    targets: Sequence[int] = (),
    partition_id: int | None = None,
) -> m.PutKvRequest:
    """A PUT_KV request with one bucket entry."""
    request = m.PutKvRequest(
        acks=acks, table_id=table_id, timeout_ms=30_000, target_columns=targets
    )
    request.buckets_req.add(partition_id=partition_id, bucket_id=bucket, records=records)
    return request


def put(raw: RawClient, table_id: int, records: bytes, bucket: int = 0, **options: Any) -> Any:
    """Put a batch into one bucket; the bucket's answer."""
    request = put_request(table_id, records, bucket, **options)
    (entry,) = raw.call(ApiKey.PUT_KV, request, PUT_VERSION).buckets_resp
    return entry


def lookup_request(
    table_id: int, keys: Sequence[bytes], bucket: int = 0, partition_id: int | None = None
) -> m.LookupRequest:
    """A LOOKUP request for one bucket."""
    request = m.LookupRequest(table_id=table_id)
    request.buckets_req.add(partition_id=partition_id, bucket_id=bucket, keys=keys)
    return request


def values_of(
    raw: RawClient,
    table_id: int,
    keys: Sequence[bytes],
    bucket: int = 0,
    partition_id: int | None = None,
) -> list[bytes]:
    """The values of keys, in order; empty where there is none."""
    request = lookup_request(table_id, keys, bucket, partition_id)
    (entry,) = raw.call(ApiKey.LOOKUP, request, LOOKUP_VERSION).buckets_resp
    assert not entry.error_code, entry.error_message
    return [value.values for value in entry.values]


def prefix_request(table_id: int, keys: Sequence[bytes], bucket: int = 0) -> m.PrefixLookupRequest:
    """A PREFIX_LOOKUP request for one bucket."""
    request = m.PrefixLookupRequest(table_id=table_id)
    request.buckets_req.add(bucket_id=bucket, keys=keys)
    return request


def prefixed(
    raw: RawClient, table_id: int, keys: Sequence[bytes], bucket: int = 0
) -> list[list[bytes]]:
    """The values under prefixes, in order."""
    request = prefix_request(table_id, keys, bucket)
    (entry,) = raw.call(ApiKey.PREFIX_LOOKUP, request, LOOKUP_VERSION).buckets_resp
    assert not entry.error_code, entry.error_message
    return [list(values.values) for values in entry.value_lists]


def raw_changelog(
    raw: RawClient,
    table_id: int,
    schema: Schema,
    bucket: int = 0,
    start: int = 0,
    partition_id: int | None = None,
) -> list[tuple[int, str, tuple[Any, ...]]]:
    """All of a bucket's changelog: offset, kind, row values."""
    found: list[tuple[int, str, tuple[Any, ...]]] = []
    offset, end = start, raw.end_offset(table_id, bucket, partition_id)
    while offset < end:
        entry = raw.fetch(table_id, offset, bucket, partition_id=partition_id)
        assert not entry.error_code, entry.error_message
        found += records_of(entry.records, schema)
        offset = [header for _, header in iter_headers(entry.records)][-1].next_offset
    return found


def records_of(data: bytes, schema: Schema) -> list[tuple[int, str, tuple[Any, ...]]]:
    """The records of changelog batches."""
    found = []
    for at, header in iter_headers(data):
        if not header.record_count:
            continue
        batch, kinds = decode_arrow(memoryview(data), at, header, schema.arrow)
        rows = rows_of_batch(batch, schema)
        assert kinds is not None, "a changelog carries change types"
        for i, (kind, row) in enumerate(zip(kinds, rows, strict=True)):
            found.append((header.base_offset + i, KINDS[kind], row))
    return found


def limit_values(data: bytes) -> list[bytes]:
    """The values of a LIMIT_SCAN answer's value batch."""
    length, magic, count = struct.unpack_from("<iBi", data)
    assert (length, magic) == (len(data) - 4, 0)
    found, at = [], 9
    for _ in range(count):
        (size,) = struct.unpack_from("<i", data, at)
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    assert at == len(data)
    return found
