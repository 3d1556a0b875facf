"""Tables and partitions are dropped, servers stop, and files break during a scan."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import zufluss
from tests.client.pk import create_table, upsert
from tests.end_to_end.kv_scans.support import (
    EXPIRED,
    bucket_directory,
    close_pins,
    create,
    drop,
    fresh_name,
    open_pins,
)
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    Row,
    all_rows,
    call,
    good,
    in_key_order,
    next_request,
    open_request,
    page,
    page_request,
    pages,
    pin,
    put_rows,
    rows_of,
)
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.errors import (
    ErrorCode,
    LogStorageError,
    PartitionNotExistError,
    TableNotExistError,
)
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.codec import decode

COLUMNS = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
PARTED = "id BIGINT NOT NULL, day STRING NOT NULL, text STRING, PRIMARY KEY (id, day)"
STORAGE = ErrorCode.LOG_STORAGE_EXCEPTION
COUNT, SMALL = 2_000, 20_000


def incompressible(count: int) -> list[Row]:
    """Write rows with large files."""
    return [(i, random.Random(i).randbytes(90).hex()) for i in range(count)]


# -- dropped tables and stopping servers ---------------------------------------------------------


def test_a_table_that_is_dropped_ends_its_scans_and_frees_what_they_held(
    server: DevServer, raw: RawClient
) -> None:
    before, name = open_pins(server), fresh_name()
    table_id = create(raw, name=name)
    put_rows(raw, table_id, incompressible(100))
    (made,) = pin(raw, table_id)
    begun = page(raw, table_id, made.pin_id, size=500)
    session = good(raw, open_request(table_id, size=500))
    place = bucket_directory(server, table_id)
    assert (place / "pins").is_dir()
    drop(raw, name)
    request = page_request(table_id, made.pin_id, after_key=begun.last_key)
    unknown = ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION
    assert raw.error_code(ApiKey.SCAN_KV_SNAPSHOT, request) == unknown
    answer = call(raw, next_request(session.scanner_id, 1))
    assert answer.error_code in (EXPIRED, unknown)
    assert not answer.HasField("records")
    assert open_pins(server) == before
    eventually(lambda: not place.exists(), f"the end of {place}")
    close_pins(raw, made.pin_id)


def test_a_client_is_told_that_its_table_was_dropped(server: DevServer, paged: Connection) -> None:
    before = open_pins(server)
    table = create_table(paged, COLUMNS, bucket_count=3)
    upsert(table, {"id": [*range(600)], "text": ["a row"] * 600})
    with table.scan().open() as scanner:
        next(scanner)
        paged.admin.drop_table(table.path)
        with pytest.raises(TableNotExistError):
            list(scanner)
        with pytest.raises(TableNotExistError):
            next(scanner)
    assert open_pins(server) == before


def test_a_server_with_open_scans_stops(new_server: Callable[..., DevServer]) -> None:
    """Also while calls are in progress; `stop` has a timeout."""
    server = new_server()
    with RawClient(server.port) as raw:
        table_id = create(raw, buckets=4)
        for bucket in range(4):
            put_rows(raw, table_id, incompressible(500), bucket)
        pins = pin(raw, table_id, *range(4))
        for bucket in range(4):
            good(raw, open_request(table_id, bucket, size=1))
        for bucket, each in enumerate(pins):
            raw.begin(ApiKey.SCAN_KV_SNAPSHOT, page_request(table_id, each.pin_id, bucket))
        assert server.stop() == 0


# -- damaged files -------------------------------------------------------------------------------


class Broken:
    """Damage part of a pinned file until the end of the block."""

    def __init__(self, place: Path) -> None:
        (path,) = place.glob("pins/*/rocks/*.sst")
        self._file = path.open("r+b", buffering=0)
        self._whole = self._file.read()
        assert len(self._whole) > 200_000, "what comes may have been read ahead"

    def __enter__(self) -> None:
        half = len(self._whole) // 2
        self._write(half, b"\xaa" * (half // 2))

    def __exit__(self, *error: object) -> None:
        self._write(0, self._whole)
        self._file.close()

    def _write(self, at: int, data: bytes) -> None:
        self._file.seek(at)
        self._file.write(data)


def until_it_fails(raw: RawClient, table_id: int, pin_id: bytes) -> tuple[list[Row], bytes]:
    """The rows of a pin up to the damage, and the last key."""
    found, after = list[Row](), b""
    while True:
        request = page_request(table_id, pin_id, size=SMALL, after_key=after)
        frame = raw.request(ApiKey.SCAN_KV_SNAPSHOT, request)
        if frame.error is not None:
            assert frame.error.code == STORAGE
            return found, after
        answer = decode(m.ScanKvSnapshotResponse, frame.body)
        assert not answer.done, f"the rows ended after {len(found)} of {COUNT}"
        found += all_rows([answer])
        after = answer.last_key


def session_until_it_fails(raw: RawClient, first: m.ScanKvResponse) -> tuple[list[Row], int]:
    """The rows of a scan up to the damage, and the call that failed."""
    found, seq = rows_of(first), 0
    while True:
        seq += 1
        answer = call(raw, next_request(first.scanner_id, seq, SMALL))
        if answer.error_code:
            assert answer.error_code == STORAGE
            return found, seq
        assert answer.has_more_results, f"the rows ended after {len(found)} of {COUNT}"
        found += rows_of(answer)


def test_a_file_that_cannot_be_read_is_an_error_and_no_early_end(
    server: DevServer, raw: RawClient
) -> None:
    """The scan continues where it was once the disk works again."""
    table_id, rows = create(raw), in_key_order(incompressible(COUNT))
    put_rows(raw, table_id, rows)
    (made,) = pin(raw, table_id)
    first = good(raw, open_request(table_id, size=SMALL))
    with Broken(bucket_directory(server, table_id)):
        found, after = until_it_fails(raw, table_id, made.pin_id)
        taken, seq = session_until_it_fails(raw, first)
        assert until_it_fails(raw, table_id, made.pin_id)[0] == found, "whenever it is asked"
        assert found == rows[: len(found)]
        assert taken == rows[: len(taken)]
        assert 0 < len(found) < COUNT > len(taken) > 0
    rest = pages(raw, table_id, made.pin_id, size=SMALL, after_key=after)
    assert found + all_rows(rest) == rows
    answer = good(raw, next_request(first.scanner_id, seq, SMALL))
    while answer.has_more_results:
        taken += rows_of(answer)
        seq += 1
        answer = good(raw, next_request(first.scanner_id, seq, SMALL))
    assert taken + rows_of(answer) == rows
    close_pins(raw, made.pin_id)


def test_a_client_gets_an_error_and_not_fewer_rows(server: DevServer) -> None:
    impatient = {"client.scanner.kv.fetch.max-bytes": "20kb", "client.request-timeout": "500ms"}
    with (
        zufluss.connect(server.bootstrap) as patient,
        zufluss.connect(server.bootstrap, **impatient) as connection,
    ):
        table, rows = create_table(patient, COLUMNS, bucket_count=1), incompressible(COUNT)
        upsert(table, {"id": [i for i, _ in rows], "text": [text for _, text in rows]})
        with table.scan(prefetch=0).open(), Broken(bucket_directory(server, table.info.table_id)):
            scanner = connection.table(table.path).scan(prefetch=0).open()
            with pytest.raises(LogStorageError):
                list(scanner)
            assert not scanner.finished
        assert table.scan().to_arrow().num_rows == COUNT


# -- dropped partitions --------------------------------------------------------------------------


def test_a_partition_that_is_dropped_during_a_scan_is_the_only_one_that_errors(
    server: DevServer, paged: Connection
) -> None:
    before = open_pins(server)
    table = create_table(paged, PARTED, partition_keys=["day"], bucket_count=2)
    days = ("1", "2", "3")
    for day in days:
        paged.admin.create_partition(table.path, {"day": day})
        upsert(table, {"id": [*range(500)], "day": [day] * 500, "text": [f"of {day}"] * 500})
    taken: list[pa.RecordBatch] = []
    problems: list[PartitionNotExistError] = []
    with table.scan(prefetch=0).open() as scanner:
        taken.append(next(scanner))
        (begun,) = set(taken[0]["day"].to_pylist())
        gone = next(day for day in days if day != begun)
        paged.admin.drop_partition(table.path, {"day": gone})
        while not scanner.finished:
            try:
                taken += scanner
            except PartitionNotExistError as e:
                problems.append(e)
            assert len(problems) == 1, "told once"
    rows = pa.Table.from_batches(taken).to_pylist()
    keys = sorted((row["day"], row["id"]) for row in rows)
    assert keys == sorted((day, i) for day in days if day != gone for i in range(500))
    assert open_pins(server) == before


def test_pins_of_other_partitions_go_on(server: DevServer, paged: Connection) -> None:
    """The partition being read is dropped; with raw frames, so that no retry hides an error."""
    table = create_table(paged, PARTED, partition_keys=["day"], bucket_count=1)
    for day in ("1", "2"):
        paged.admin.create_partition(table.path, {"day": day})
        upsert(table, {"id": [*range(100)], "day": [day] * 100, "text": [day] * 100})
    ids = {p.name: p.partition_id for p in paged.admin.list_partitions(table.path)}
    table_id = table.info.table_id
    with RawClient(server.port) as raw:
        opened = {day: good_session(raw, table_id, ids[day]) for day in ("1", "2")}
        paged.admin.drop_partition(table.path, {"day": "1"})
        lost = call(raw, next_request(opened["1"], 1))
        assert lost.error_code in (EXPIRED, ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION)
        assert not lost.HasField("records")
        kept = good(raw, next_request(opened["2"], 1))
        assert kept.records
        assert not kept.has_more_results
    assert table.scan().to_arrow().num_rows == 100


def good_session(raw: RawClient, table_id: int, partition_id: int) -> bytes:
    first = good(raw, open_request(table_id, size=10, partition_id=partition_id))
    assert first.has_more_results
    return first.scanner_id
