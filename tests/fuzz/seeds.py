"""What the decoders accept: captured from a real server, or made by our own encoders."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from crc32c import crc32c

from tests.end_to_end.samples import ALL_TYPES, all_types_batch
from tests.log.disk import SilentFiles
from tests.paths import FIXTURES
from tests.record.arrow_samples import (
    CODECS,
    NESTED,
    NESTED_ROWS,
    SMALL,
    SMALL_ROWS,
    log_batch,
    message,
)
from zufluss.config.load import Configuration
from zufluss.config.options import OPTIONS
from zufluss.config.table_options import TABLE_OPTIONS
from zufluss.errors import ZuflussError
from zufluss.log.checkpoint import LogCheckpoint, write_checkpoint
from zufluss.log.commit_log import BLOCK_BYTES
from zufluss.log.writer_state import WriterState
from zufluss.model.expression import col
from zufluss.model.predicate import Predicate
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket
from zufluss.record.batch.stats import build_statistics
from zufluss.record.header import read_header
from zufluss.remote import wal
from zufluss.wire import messages as m
from zufluss.wire.api import APIS
from zufluss.wire.frame import pack_error, pack_response
from zufluss.wire.predicates import predicate_to_proto
from zufluss.wire.sasl import build_plain

CONFIGURATION = Configuration.of({})
OPTION_LIST = [*OPTIONS.values(), *TABLE_OPTIONS.values()]
API_LIST = [APIS[key] for key in sorted(APIS)]

COMMIT_HEADER = struct.pack("<8sq", b"ZUFLCMT1", 1)
COMMIT_HEADER = (COMMIT_HEADER + struct.pack("<I", crc32c(COMMIT_HEADER))).ljust(BLOCK_BYTES, b"\0")
"""The first block of a commit file of generation 1."""


def captured(pattern: str) -> list[bytes]:
    """The bytes of captured exchanges."""
    return [path.read_bytes() for path in sorted(FIXTURES.glob(pattern))]


@cache
def table_schema(table: str) -> Schema:
    return Schema.from_json(json.loads((FIXTURES / table).read_text())["schema"])


SCHEMAS: dict[str, Callable[[], Schema]] = {
    "small": lambda: SMALL,
    "nested": lambda: NESTED,
    "all": lambda: Schema.of(ALL_TYPES),
    "stats": lambda: table_schema("tables/log_stats.stored.json"),
    "indexed": lambda: table_schema("tables/log_indexed.stored.json"),
    "compacted": lambda: table_schema("tables/log_compacted.stored.json"),
}
"""Schemas of the tables that batches are made for."""


@cache
def batches(name: str) -> list[bytes]:
    """Batches of a schema, plain and compressed, of every magic."""
    if name == "stats":
        return captured("produce-log/log_stats.bin")
    rows = {"small": SMALL_ROWS, "nested": NESTED_ROWS, "all": all_types_batch(5)}[name]
    found = [bytes(log_batch(rows, codec)) for codec in CODECS]
    if name == "small":
        block = build_statistics(rows, SMALL, (0, 1))
        found += [bytes(log_batch(rows, magic=magic)) for magic in (1, 2)]
        found.append(bytes(log_batch(rows, magic=2, statistics=block)))
        found.append(bytes(log_batch(rows, writer_id=5, sequence=9)))
    return found


def bodies(log_format: str) -> list[bytes]:
    """The count and the rows of captured batches."""
    found = []
    for data in captured(f"produce-log/log_{log_format}.bin"):
        header = read_header(data)
        found.append(bytes([header.record_count]) + data[header.body_offset : header.size])
    return found


def arrow_messages() -> list[bytes]:
    rows = (SMALL_ROWS, NESTED_ROWS, all_types_batch(3))
    return [message(batch, codec) for batch in rows for codec in CODECS]


def statistics() -> list[bytes]:
    """The statistics blocks of captured batches."""
    found = []
    for data in captured("produce-log/log_stats.bin"):
        header = read_header(data)
        start = header.header_size
        found.append(data[start : start + header.statistics_length])
    return found


@cache
def predicates(schema: Schema) -> list[Predicate]:
    """A filter on each column that can have one."""
    found: list[Predicate] = []
    for column in schema.columns:
        found.append(col(column.name).is_null().resolve(schema))
        for value in (1, "a", True, 1.5, Decimal("1.5")):
            with suppress(ZuflussError):
                found.append(
                    ((col(column.name) > value) | (col(column.name) == value)).resolve(schema)
                )
    return found


def predicate_messages() -> list[bytes]:
    schema = SCHEMAS["stats"]()
    return [predicate_to_proto(p, schema).SerializeToString() for p in predicates(schema)]


# -- messages ---------------------------------------------------------------------------------


def _numbered(api_index: int, body: bytes) -> bytes:
    return api_index.to_bytes(2, "big") + body


def _filled(message_type: Any, depth: int = 0) -> Any:
    """A message with every field set."""
    message = message_type()
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            if depth > 3:
                continue
            child = _filled(field.message_type._concrete_class, depth + 1)
            target = getattr(message, field.name)
            target.append(child) if field.is_repeated else target.CopyFrom(child)
        elif field.is_repeated:
            getattr(message, field.name).append(_value(field))
        else:
            setattr(message, field.name, _value(field))
    return message


def _value(field: Any) -> Any:
    values = {field.CPPTYPE_STRING: "text", field.CPPTYPE_BOOL: True, field.CPPTYPE_DOUBLE: 1.5}
    if field.type == field.TYPE_BYTES:
        return b"bytes"
    return values.get(field.cpp_type, 3)


def requests() -> list[bytes]:
    return [
        _numbered(i, _filled(api.request).SerializePartialToString())
        for i, api in enumerate(API_LIST)
    ]


def responses() -> list[bytes]:
    return [
        _numbered(i, _filled(api.response).SerializePartialToString())
        for i, api in enumerate(API_LIST)
    ]


def fetch_answers() -> list[bytes]:
    return [_filled(m.FetchLogResponse).SerializeToString(), *_fetch_fixtures()]


def _fetch_fixtures() -> list[bytes]:
    found = []
    for data in captured("fetch-log/log_*.bin"):
        answer = m.FetchLogResponse()
        answer.tables_resp.add(table_id=7).buckets_resp.add(bucket_id=1, records=data)
        found.append(answer.SerializeToString())
    return found


def produce_requests() -> list[bytes]:
    return [_produce(data) for data in captured("produce-log/*.bin")]


def small_produces() -> list[bytes]:
    found = [_produce(data) for data in batches("small")]
    return found + [_produce(data, partition_id=300) for data in batches("small")]


def _produce(records: bytes, **bucket: int) -> bytes:
    request = m.ProduceLogRequest(acks=-1, table_id=7, timeout_ms=30_000)
    request.buckets_req.add(bucket_id=2, records=records, **bucket)
    return request.SerializeToString()


def frames() -> list[bytes]:
    return [pack_response(1, b"body")[4:], pack_error(1, 3, "a message")[4:]]


# -- texts ------------------------------------------------------------------------------------


def tokens() -> list[bytes]:
    return [build_plain("alice", "secret"), b"other\0alice\0secret"]


def jaas_texts() -> list[bytes]:
    module = "org.apache.fluss.security.auth.sasl.plain.PlainLoginModule required"
    return [
        f'{module} user_admin="admin-secret" user_bob="b\\"ob";'.encode(),
        f'{module} username="x" password="ü";'.encode(),
    ]


def tables() -> list[bytes]:
    return [_with_functions(table) for table in captured("tables/*.json")]


def _with_functions(table: bytes) -> bytes:
    """Fluss aggregates columns that name no function; we want to be told."""
    document = json.loads(table)
    properties = document.get("properties", {})
    if properties.get("table.merge-engine", "").lower() == "aggregation":
        properties["table.merge-engine.aggregation.default-function"] = "last_value_ignore_nulls"
    return json.dumps(document).encode()


def schemas() -> list[bytes]:
    return [json.dumps(json.loads(t)["schema"]).encode() for t in tables() if b'"schema"' in t]


def type_texts() -> list[bytes]:
    texts = {str(c.data_type) for name in SCHEMAS for c in SCHEMAS[name]().columns}
    return [text.encode() for text in sorted(texts)]


def options() -> list[bytes]:
    """The default of every option that has one."""
    return [
        bytes([i]) + option.format(option.default).encode()
        for i, option in enumerate(OPTION_LIST)
        if option.default is not None
    ]


# -- files ------------------------------------------------------------------------------------


def commit_files() -> list[bytes]:
    entry = struct.pack("<qqiii", 1, -1, 0, 0, len(batches("small")[0])) + batches("small")[0]
    return [COMMIT_HEADER, b"S" + entry, b"S" + entry * 2]


def checkpoints() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        for counter in range(2):
            write_checkpoint(SilentFiles(), Path(directory), LogCheckpoint(counter, 1, 2, 3, 4, 5))
        return [(Path(directory) / "log.checkpoint").read_bytes()]


def snapshots() -> list[bytes]:
    state = WriterState(1000)
    for sequence in range(7):
        state.record(4, sequence, 10 * sequence, 10 * sequence + 10, 99)
    without_checksum = json.loads(state.to_json())
    del without_checksum["zufluss_crc32c"]
    fixtures = captured("remote-log/**/*.writer_snapshot")
    return [state.to_json(), json.dumps(without_checksum).encode(), *fixtures]


def segments() -> list[bytes]:
    return [b"".join(batches("small")[:2]), *captured("remote-log/**/*.log")]


WAL_NAME = wal.WalName(7, 3)
"""The name of the objects of the shared log that are decoded."""


def wal_objects() -> list[bytes]:
    """Objects of the shared log, as they are and with `S` before them, which seals them again."""
    header = wal.WalHeader(wal.WalKind.SEAL, "00" * 16, 1, *WAL_NAME, b"n" * wal.NONCE_BYTES, 5)
    found = [wal.encode(header), wal.encode(header._replace(kind=wal.WalKind.CLOSE))]
    data, offset = batches("small")[0], 0
    new = [
        wal.NewEntry(
            TableBucket(table, partition, 0), 1, kind, offset, end, (body,), len(body), crc
        )
        for table, partition in ((1, None), (1, 4), (2, None))
        for kind, end, body, crc in (
            (wal.EntryKind.CARRY, 3, data, crc32c(data)),
            (wal.EntryKind.BATCHES, 3, data, crc32c(data)),
            (wal.EntryKind.RELEASE, 0, b"", 0),
        )
    ]
    found.append(wal.encode(header._replace(kind=wal.WalKind.DATA), new))
    return found + [b"S" + each for each in found]


def sealed_wal(data: bytes) -> bytes:
    """The bytes with right checksums, as far as the counts in them can be followed."""
    if len(data) < wal.HEADER_BYTES:
        return data
    body = wal.HEADER_BYTES + wal.ENTRY_BYTES * int.from_bytes(data[72:76], "little")
    changed = bytearray(data)
    for start in range(wal.HEADER_BYTES, min(body, len(data) - wal.ENTRY_BYTES), wal.ENTRY_BYTES):
        position, length = struct.unpack_from("<II", data, start + 40)
        batches = data[body + position : body + position + length]
        changed[start + 48 : start + 52] = crc32c(batches).to_bytes(4, "little")
    changed[84:88] = crc32c(bytes(changed[wal.HEADER_BYTES : body])).to_bytes(4, "little")
    changed[92:96] = crc32c(bytes(changed[:92])).to_bytes(4, "little")
    return bytes(changed)
