"""One target per decoder: bytes in, and either a result that holds what it promises or a refusal.

A target is a function of bytes. It may raise the errors that the decoder declares (`refusals`);
anything else that leaves it is a bug: another exception, an assertion, a hang. Most targets also
compare: a hand-written scanner with protobuf, a kernel with its plain twin, an accepted batch with
what pyarrow makes of it. Checksums are made right first, since no fuzzer would guess them.

`run.py` drives the targets with atheris, `test_targets.py` with hypothesis. Seeds come from the
captured exchanges of a real server (`tests/fixtures`) and from our own encoders.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import seeds
from tests.log.disk import SilentFiles
from tests.record.batch import plain_check as plain
from tests.record.rows import plain_rows
from zufluss.errors import ConfigError, CorruptMessageError, CorruptRecordError, ZuflussError
from zufluss.log.checkpoint import read_checkpoint
from zufluss.log.commit_log import GROUP_HEADER, read_commit_log, seal_group
from zufluss.log.config import LogConfig
from zufluss.log.log import Log
from zufluss.log.writer_state import WriterState
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor
from zufluss.model.validation import check_table, complete
from zufluss.record.arrow.layout import Layout
from zufluss.record.arrow.message import decode as decode_arrow
from zufluss.record.arrow.message import parse_message
from zufluss.record.arrow.project import Projector
from zufluss.record.batch.check import BatchChecker, CheckedBatch
from zufluss.record.batch.row_body import decode_body
from zufluss.record.batch.stats import may_match, read_statistics
from zufluss.record.fault import BatchFault, RefusedBatchError
from zufluss.record.header import iter_headers, read_header, seal
from zufluss.record.kernels.batch_check import check_batch
from zufluss.remote import wal
from zufluss.remote.errors import ObjectCorruptError
from zufluss.wire import messages as m
from zufluss.wire.api import APIS
from zufluss.wire.codec import decode
from zufluss.wire.frame import unpack_response
from zufluss.wire.hot.fetch import read_fetch_response
from zufluss.wire.hot.produce import scan_produce, scan_produce_steps
from zufluss.wire.predicates import predicate_from_proto, predicate_to_proto
from zufluss.wire.sasl import PlainAuthenticator, parse_jaas, parse_plain
from zufluss.wire.tables import partition_id_of

TABLE_ID = 7


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder under test."""

    name: str
    run: Callable[[bytes], None]
    """Takes any bytes."""
    seeds: Callable[[], list[bytes]]
    """Bytes the decoder accepts."""
    refusals: tuple[type[Exception], ...]
    """What it may raise."""

    def __call__(self, data: bytes) -> None:
        """Run the decoder; a declared refusal is no failure."""
        with suppress(*self.refusals):
            self.run(data)


# -- frames and messages ----------------------------------------------------------------------


def frame(data: bytes) -> None:
    """The headers of responses."""
    unpack_response(memoryview(data))


def request(data: bytes) -> None:
    """The body of any request; the first two bytes choose the API."""
    api = seeds.API_LIST[int.from_bytes(data[:2], "big") % len(APIS)]
    message = decode(api.request, data[2:])
    assert decode(api.request, message.SerializeToString()) == message


def response(data: bytes) -> None:
    """The body of any answer, as a client gets it."""
    api = seeds.API_LIST[int.from_bytes(data[:2], "big") % len(APIS)]
    decode(api.response, data[2:])


def fetched(data: bytes) -> None:
    """Our client's own reader of fetch answers agrees with protobuf."""
    buckets = read_fetch_response(memoryview(data))
    with suppress(CorruptMessageError):
        message = decode(m.FetchLogResponse, data)
        found = [(b.bucket.bucket_id, b.error_code, bytes(b.records)) for b in buckets]
        entries = [entry for table in message.tables_resp for entry in table.buckets_resp]
        assert found == [(e.bucket_id, e.error_code, e.records) for e in entries]


def produce(data: bytes) -> None:
    """The scanner of produce requests never reads anything else than protobuf does."""
    scan = scan_produce(memoryview(data), 0, len(data))
    if scan is None:  # of many fields
        *_, scan = scan_produce_steps(memoryview(data), 0, len(data))
    assert scan is not None
    message = decode(m.ProduceLogRequest, data)
    assert (scan.acks, scan.table_id, scan.timeout_ms) == (
        message.acks,
        message.table_id,
        message.timeout_ms,
    )
    for found, entry in zip(scan.buckets, message.buckets_req, strict=True):
        partition_id = partition_id_of(entry)
        assert found[:2] == (partition_id, entry.bucket_id)
        assert data[found[2] : found[3]] == entry.records


def small_produce(data: bytes) -> None:
    """What the kernel for small produce requests accepts, scanner and checker accept the same."""
    checker = _checker("small", "ARROW")
    array = np.frombuffer(bytearray(data), dtype=np.uint8)
    found = checker.check_produce(array, memoryview(array), 0, len(data), TABLE_ID)
    if found is None:
        return
    batch, (_, partition, bucket, timeout_ms) = CheckedBatch(*found[:8]), found[8:]
    scan = scan_produce(memoryview(data), 0, len(data))
    assert (scan.acks, scan.table_id, scan.timeout_ms) == (-1, TABLE_ID, timeout_ms)
    ((partition_id, bucket_id, start, end),) = scan.buckets
    assert (partition, bucket) == (-1 if partition_id is None else partition_id, bucket_id)
    assert _checker("small", "ARROW").check(array, start, end) == (batch,)


# -- batches ----------------------------------------------------------------------------------


@cache
def _schema(name: str) -> Schema:
    return seeds.SCHEMAS[name]()


@cache
def _checker(name: str, log_format: str) -> BatchChecker:
    checker = BatchChecker(lambda schema_id: _schema(name) if schema_id == 1 else None, log_format)
    first = next(iter(seeds.batches(name)))
    checker.check(np.frombuffer(first, dtype=np.uint8), 0, len(first))
    return checker


def _sealed(data: bytes) -> bytearray:
    """The bytes with the right length and CRC of a single batch, where there is room for it."""
    batch = bytearray(data)
    with suppress(ZuflussError, struct.error, IndexError):
        struct.pack_into("<i", batch, 8, len(batch) - 12)
        seal(batch, 0)
    return batch


def arrow_batch(name: str) -> Callable[[bytes], None]:
    """Batches of one schema: the checker, its twin, pyarrow and the projection agree."""

    def run(data: bytes) -> None:
        batch = _sealed(data)
        array = np.frombuffer(batch, dtype=np.uint8)
        _same_verdict(batch, array, Layout.of(_schema(name).arrow))
        _checker(name, "ARROW").check(array, 0, len(batch))
        schema = _schema(name)
        header = read_header(batch)
        decoded, _ = decode_arrow(batch, 0, header, schema.arrow)
        decoded.validate(full=True)
        assert decoded.num_rows == header.record_count
        columns = tuple(range(0, len(schema.columns), 2))
        projector = Projector({1: schema}.get, schema)
        projected = b"".join(projector.project_all(memoryview(batch), columns))
        chosen = decoded.select(list(columns))
        again, _ = decode_arrow(projected, 0, read_header(projected), chosen.schema)
        assert again.equals(chosen) or _has_nan(chosen)

    return run


def _same_verdict(batch: bytearray, array: Any, layout: Layout) -> None:
    found = BatchFault(check_batch(array, 0, len(batch), layout.program(1), False)[0])
    if found == BatchFault.OTHER_SCHEMA:
        return
    try:
        expected = plain.check_batch(batch, 0, len(batch), layout, changelog=False)
    except RefusedBatchError as e:
        expected = e.fault
    assert found == expected, f"the kernel says {found!r}, its twin {expected!r}"


def _has_nan(batch: Any) -> bool:
    return any(str(field.type) in ("float", "double") for field in batch.schema)


def row_batch(log_format: str) -> Callable[[bytes], None]:
    """Bodies of rows: what passes the check can be decoded. The first byte is the count."""

    def run(data: bytes) -> None:
        count, schema = data[0] if data else 0, _schema(log_format.lower())
        view = memoryview(data)
        rows, changes = decode_body(view, 1, len(data), count, schema, log_format)
        plain_rows.check_body(view, 1, len(data), count, schema, log_format)
        assert rows.num_rows == len(changes) == count

    return run


def arrow_message(data: bytes) -> None:
    """The plain reader of Arrow's metadata."""
    parse_message(data, 0, len(data))


def statistics(data: bytes) -> None:
    """Statistics blocks: what can be read can be asked."""
    schema = _schema("stats")
    statistics = read_statistics(data, 0, len(data), schema)
    for predicate in seeds.predicates(schema):
        may_match(predicate, statistics, 3)


def predicate(data: bytes) -> None:
    """Filters: what is read can be asked of statistics, and written again."""
    schema = _schema("stats")
    predicate = predicate_from_proto(decode(m.PbPredicate, data), schema)
    block = seeds.statistics()[0]
    may_match(predicate, read_statistics(block, 0, len(block), schema), 3)
    with suppress(ValueError):  # a decimal beyond the column's digits compares, but no client asks
        written = predicate_to_proto(predicate, schema).SerializeToString()
        again = predicate_from_proto(decode(m.PbPredicate, written), schema)
        assert predicate_to_proto(again, schema).SerializeToString() == written


# -- texts ------------------------------------------------------------------------------------


def sasl_token(data: bytes) -> None:
    """Tokens of SASL/PLAIN: nobody gets in without the password."""
    plain_token = parse_plain(data)
    authenticator = PlainAuthenticator({"alice": "a secret that no fuzzer finds"})
    with suppress(ZuflussError):
        user = authenticator.authenticate(data)
        assert (user, plain_token.password) == ("alice", "a secret that no fuzzer finds")


def jaas(data: bytes) -> None:
    """JAAS texts."""
    parse_jaas(data.decode("utf-8", "surrogateescape"))


def table_json(data: bytes) -> None:
    """Table descriptors: what is accepted survives its own JSON."""
    descriptor = TableDescriptor.from_json(data)
    assert TableDescriptor.from_json(descriptor.to_json()) == descriptor
    completed = complete(descriptor, seeds.CONFIGURATION)
    check_table(completed, seeds.CONFIGURATION, 1)
    assert TableDescriptor.from_json(completed.to_json()) == completed


def schema_json(data: bytes) -> None:
    """Schemas: what is accepted survives its own JSON and has an Arrow form."""
    try:
        obj = json.loads(data)
    except ValueError:
        return
    schema = Schema.from_json(obj)
    assert Schema.from_json(schema.to_json()) == schema
    assert schema.arrow.names == list(schema.names)


def type_text(data: bytes) -> None:
    """SQL-like types: what is accepted is printed so that it is accepted again."""
    data_type = parse_type(data.decode("utf-8", "replace"))
    assert parse_type(str(data_type)) == data_type


def option(data: bytes) -> None:
    """Values of options: what is accepted is printed so that it is accepted again."""
    chosen = seeds.OPTION_LIST[data[0] % len(seeds.OPTION_LIST)] if data else seeds.OPTION_LIST[0]
    value = chosen.parse(data[1:].decode("utf-8", "replace"))
    assert chosen.parse(chosen.format(value)) == value


# -- files ------------------------------------------------------------------------------------


@cache
def _directory() -> Path:
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="zufluss-fuzz-", dir=memory if memory.is_dir() else None))


def _file(name: str, data: bytes) -> Path:
    path = _directory() / name.replace("/", "-") / name.rpartition("/")[2]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path.parent


def commit_log(data: bytes) -> None:
    """Commit files: as they are, or as the entries of a group with the right checksum."""
    if data[:1] == b"S":
        group = bytearray(GROUP_HEADER.size) + data[1:]
        seal_group(group, 1, 0)
        data = seeds.COMMIT_HEADER + bytes(group)
    entries, generation = read_commit_log(_file("commit/commit-0.log", data))
    assert generation >= 0 or entries == {} or data[:8] == b"ZUFLCMT1"
    for found in entries.values():
        for entry in found:
            list(iter_headers(entry.batches))


def checkpoint(data: bytes) -> None:
    """Checkpoint files never raise: no checkpoint is an answer."""
    read_checkpoint(_file("checkpoint/log.checkpoint", data))


def writer_snapshot(data: bytes) -> None:
    """Writer snapshots: what is accepted survives its own JSON."""
    state = WriterState.from_json(data, 1000)
    assert WriterState.from_json(state.to_json(), 1000) == state


def segment(data: bytes) -> None:
    """A log opens with any bytes in its last segment, cuts what is no batch, and reads the rest."""
    directory = _file("segment/00000000000000000000.log", data)
    for path in directory.iterdir():
        if path.name != "00000000000000000000.log":
            path.unlink()
    log = Log.open(directory, LogConfig(index_interval_bytes=64), files=SilentFiles(), now_ms=0)
    offset = log.log_start_offset
    while offset < log.high_watermark:
        read = log.read(offset, 500, at_least_one=True, nowait=False)
        assert offset < read.end_offset <= log.high_watermark
        offset = read.end_offset
    log.close(clean=True)


def wal_object(data: bytes) -> None:
    """Objects of the shared log: what is accepted is written again as it was."""
    if data[:1] == b"S":
        data = seeds.sealed_wal(data[1:])
    read = wal.decode(data, seeds.WAL_NAME, "memory://fuzz")
    new = [wal.NewEntry(*e[:5], (bytes(read.bytes_of(e)),), *e[6:]) for e in read.entries]
    assert wal.encode(read.header, new) == data


BATCHES = (CorruptRecordError, ZuflussError)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("frame", frame, seeds.frames, (CorruptMessageError,)),
        Target("request", request, seeds.requests, (CorruptMessageError,)),
        Target("response", response, seeds.responses, (CorruptMessageError,)),
        Target("fetched", fetched, seeds.fetch_answers, (CorruptMessageError,)),
        Target("produce", produce, seeds.produce_requests, (CorruptMessageError,)),
        Target("small_produce", small_produce, seeds.small_produces, ()),
        *(
            Target(
                f"batch_{name}", arrow_batch(name), lambda name=name: seeds.batches(name), BATCHES
            )
            for name in ("small", "nested", "all", "stats")
        ),
        Target("rows_indexed", row_batch("INDEXED"), lambda: seeds.bodies("indexed"), BATCHES),
        Target(
            "rows_compacted", row_batch("COMPACTED"), lambda: seeds.bodies("compacted"), BATCHES
        ),
        Target("arrow_message", arrow_message, seeds.arrow_messages, (CorruptRecordError,)),
        Target("statistics", statistics, seeds.statistics, (CorruptRecordError,)),
        Target("predicate", predicate, seeds.predicate_messages, (ZuflussError,)),
        Target("sasl_token", sasl_token, seeds.tokens, (ZuflussError,)),
        Target("jaas", jaas, seeds.jaas_texts, (ConfigError,)),
        Target("table_json", table_json, seeds.tables, (ZuflussError,)),
        Target("schema_json", schema_json, seeds.schemas, (ZuflussError,)),
        Target("type_text", type_text, seeds.type_texts, (ZuflussError,)),
        Target("option", option, seeds.options, (ConfigError,)),
        Target("commit_log", commit_log, seeds.commit_files, (CorruptRecordError,)),
        Target("checkpoint", checkpoint, seeds.checkpoints, ()),
        Target("writer_snapshot", writer_snapshot, seeds.snapshots, (ValueError,)),
        Target("wal_object", wal_object, seeds.wal_objects, (ObjectCorruptError,)),
        Target("segment", segment, seeds.segments, (CorruptRecordError,)),
    )
}
"""By name."""
