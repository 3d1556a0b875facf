"""docs/limits.md has the numbers of the code."""

from __future__ import annotations

import pytest

from tests.fault.test_cost import ANSWERS_GROWTH_BYTES, GROWTH_BYTES, GROWTH_PER_BYTE
from tests.paths import DOCS
from zufluss import pacing
from zufluss.coordinator.catalog.catalog import DESCRIPTOR_BYTES_MAX
from zufluss.coordinator.leases import service as leases
from zufluss.kv.tablet import STORED_BYTES_MAX
from zufluss.model.predicate import LITERALS_MAX, TESTS_MAX
from zufluss.net.connection import (
    REQUESTS_AT_ONCE,
    UNAUTHENTICATED_BYTES_MAX,
    WRITE_BUFFER_HIGH,
)
from zufluss.net.memory import SHORT_SEND_SECONDS
from zufluss.net.refusals import CONTROL_BYTES_MAX
from zufluss.record.batch.check import BATCHES_MAX
from zufluss.replica.encoders import WAITING_BYTES_MAX
from zufluss.tablet import fetch, fetch_reader, lookup, produce, put, service
from zufluss.tablet.scan import service as scans
from zufluss.wire import codec
from zufluss.wire.api import ApiKey
from zufluss.wire.hot.buckets import BUCKETS_MAX, ENTRIES_AT_ONCE, ENTRY_FIELDS_MAX

PAGE = (DOCS / "limits.md").read_text()
ROWS = {
    "any other request": [CONTROL_BYTES_MAX],
    "a request before login": [UNAUTHENTICATED_BYTES_MAX],
    "bucket entries of a request": [BUCKETS_MAX],
    "fields of a bucket entry": [ENTRY_FIELDS_MAX],
    "an answer with rows or records": [
        fetch_reader.FETCH_BYTES_MAX, service.LIMIT_SCAN_BYTES_MAX,
    ],
    "unread answers of a client": [WRITE_BUFFER_HIGH],
    "unread answers of all": [round(SHORT_SEND_SECONDS)],
    "growth of the server while it handles a": [GROWTH_BYTES >> 20, GROWTH_PER_BYTE],
    "growth of the server while it handles many": [
        ANSWERS_GROWTH_BYTES >> 20, WRITE_BUFFER_HIGH, GROWTH_PER_BYTE,
    ],
    "sliced work of all connections": [round(pacing.TURN_SECONDS * 1000)],
    "requests of a read": [REQUESTS_AT_ONCE],
    "a request that is decoded": [codec.BYTES_AT_ONCE],
    "PRODUCE_LOG |": [
        BUCKETS_MAX, BATCHES_MAX, ENTRIES_AT_ONCE, produce.LATER_BYTES_MAX,
    ],
    "PUT_KV |": [
        BUCKETS_MAX, put.QUEUE_BYTES_MAX, put.BATCH_BYTES, ENTRIES_AT_ONCE,
        put.ENTRIES_WITH_WORKER, STORED_BYTES_MAX, WAITING_BYTES_MAX,
    ],
    "FETCH_LOG": [
        BUCKETS_MAX, TESTS_MAX, LITERALS_MAX, fetch_reader.FETCH_BYTES_MAX,
        fetch_reader.READ_BYTES_MAX, fetch_reader.TURN_BYTES, fetch.PARKED_BUCKETS_MAX,
    ],
    "LOOKUP, PREFIX_LOOKUP": [
        lookup.REQUEST_KEYS_MAX, BUCKETS_MAX, lookup.STEP_KEYS, lookup.STEP_PREFIXES,
        lookup.STEP_BYTES,
    ],
    "LIMIT_SCAN": [
        service.LIMIT_SCAN_BYTES_MAX, service.LIMIT_SCANS_MAX, fetch_reader.TURN_BYTES,
        lookup.STEP_KEYS, lookup.STEP_BYTES,
    ],
    "LIST_OFFSETS": [BUCKETS_MAX],
    "SCAN_KV, SCAN_KV_SNAPSHOT": [TESTS_MAX, LITERALS_MAX, scans.CALLS_MAX],
    "OPEN_KV_SNAPSHOT": [BUCKETS_MAX],
    "ACQUIRE_LATEST_KV_SNAPSHOT_LEASE": [leases.BUCKETS_MAX],
    "CREATE_TABLE": [DESCRIPTOR_BYTES_MAX],
    "others": [CONTROL_BYTES_MAX],
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_the_numbers_of_a_row_are_those_of_the_code(row: str) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    numbers = {word.strip(";,") for word in line.split()}
    assert {f"{number:,}" for number in ROWS[row]} <= numbers


def test_apis_that_the_page_names_exist() -> None:
    names = {name.strip(" ,|") for name in PAGE.replace("(", " ").replace(")", " ").split()}
    apis = {name for name in names if name.isupper() and "_" in name}
    assert apis
    assert apis <= {key.name for key in ApiKey}


def test_the_sizes_of_work_that_leaves_the_event_loop_are_those_of_the_code() -> None:
    assert f"{pacing.ASIDE_BYTES:,} bytes" in PAGE
    assert f"{produce.UNPACK_BYTES_MAX:,} bytes" in PAGE
    assert f"{scans.FILTER_BYTES:,} bytes" in PAGE
