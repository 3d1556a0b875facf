"""KV batches and value batches: captured bytes, round trips, and every kind of damage."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.record.record_samples import FIXTURES, fixture
from zufluss.errors import CorruptRecordError
from zufluss.record.batch.kv import (
    KvBatch,
    build_kv_batch,
    build_value_batch,
    parse_kv_batches,
    parse_value_batch,
    split_values,
)
from zufluss.record.slices import ABSENT, Slices

PUTS = sorted(p.stem for p in (FIXTURES / "put-kv").glob("*.json"))
EXAMPLE = bytes.fromhex(
    "2100000000 23be624b 0100 00 0000000000000000 00000000 01000000 05000000 01 01 000101"
)
"""Key 1 and the row (1, 1), as pyfluss wrote it."""

keys_and_rows = st.lists(
    st.tuples(st.binary(min_size=1, max_size=200), st.none() | st.binary(min_size=1, max_size=40)),
    max_size=8,
)


def parse(data: bytes) -> list[KvBatch]:
    return parse_kv_batches(np.frombuffer(data, np.uint8), 0, len(data))


def plain_records(data: bytes) -> list[tuple[bytes, bytes | None]]:
    """The records of a sound batch, in plain Python."""
    out: list[tuple[bytes, bytes | None]] = []
    pos = 28
    while pos < len(data):
        (size,) = struct.unpack_from("<i", data, pos)
        at, length, shift = pos + 4, 0, 0
        while True:
            length |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 0x80:
                break
        end = pos + 4 + size
        out.append((data[at : at + length], data[at + length : end] or None))
        pos = end
    return out


def batch_of(body: bytes, count: int, *, attributes: int = 0, magic: int = 0) -> bytes:
    """A batch with the right length and CRC around any body."""
    covered = struct.pack("<hBqii", 1, attributes, -1, -1, count) + body
    return struct.pack("<iBI", len(covered) + 5, magic, crc32c(covered)) + covered


@pytest.mark.parametrize("name", PUTS)
def test_a_captured_batch_is_taken_apart_and_put_together_again(name: str) -> None:
    expected, data = fixture(f"put-kv/{name}")
    (batch,) = parse(data)
    assert batch.end == len(data)
    assert [row is None for row in batch.rows.tolist()] == [
        entry["delete"] for entry in expected["expected"]
    ]
    assert list(zip(batch.keys.tolist(), batch.rows.tolist(), strict=True)) == plain_records(data)
    built = build_kv_batch(
        batch.schema_id, batch.keys, batch.rows, batch.writer_id, batch.batch_sequence
    )
    assert built == data


def test_the_measured_example_has_its_fields() -> None:
    (batch,) = parse(EXAMPLE)
    assert batch[:4] == (1, 0, 0, 1)
    assert batch.keys.tolist() == [b"\x01"]
    assert batch.rows.tolist() == [b"\0\x01\x01"]


@settings(max_examples=100, deadline=None)
@given(
    records=keys_and_rows, writer=st.integers(-1, 2**63 - 1), sequence=st.integers(-1, 2**31 - 1)
)
def test_every_batch_reads_back_as_built(records: Any, writer: int, sequence: int) -> None:
    keys, rows = Slices.of(k for k, _ in records), Slices.of(r for _, r in records)
    data = bytes(build_kv_batch(-3, keys, rows, writer, sequence))
    assert plain_records(data) == records
    (batch,) = parse(data)
    assert batch[:4] == (-3, writer, sequence, len(records))
    assert list(zip(batch.keys.tolist(), batch.rows.tolist(), strict=True)) == records
    assert batch.keys.starts.dtype == batch.rows.ends.dtype == np.int64


def test_all_batches_of_an_entry_are_parsed_and_stay_where_they_are() -> None:
    data = np.frombuffer(b"??" + EXAMPLE + EXAMPLE + b"??", np.uint8)
    first, second = parse_kv_batches(data, 2, len(data) - 2)
    assert (first.end, second.end) == (2 + len(EXAMPLE), 2 + 2 * len(EXAMPLE))
    assert second.keys.starts.tolist() == [first.end + 33]
    assert np.shares_memory(second.keys.data, data)


@pytest.mark.parametrize("position", range(len(EXAMPLE)))
def test_a_changed_byte_is_noticed_wherever_it_is(position: int) -> None:
    bad = bytearray(EXAMPLE)
    bad[position] ^= 0x10
    with pytest.raises(CorruptRecordError, match="KV batch 0 of the bucket entry"):
        parse(bytes(bad))


@pytest.mark.parametrize("size", range(len(EXAMPLE)))
def test_a_cut_batch_is_refused(size: int) -> None:
    with pytest.raises(CorruptRecordError, match="KV batch"):
        parse(EXAMPLE[:size])
    with pytest.raises(CorruptRecordError, match="KV batch 1" if size else "KV batch 0"):
        parse(EXAMPLE + EXAMPLE[:size] if size else b"")


@pytest.mark.parametrize(
    ("body", "count", "reason"),
    [
        ("05000000 01 01 000101", -1, "-1 records are claimed"),
        ("05000000 01 01 000101", 2, "2 records are claimed, there is room for 1"),
        ("05000000 01 01 000101", 0, "9 bytes are left over"),
        ("05000000 01 01 000101 00", 1, "1 bytes are left over after record 0"),
        ("06000000 01 01 000101", 1, "record 0 has 6 bytes"),
        ("ffffffff 01 01 000101", 1, "record 0 has -1 bytes"),
        ("00000000 01 01 000101", 1, "record 0 has 0 bytes"),
        ("05000000 00 01 000101", 1, "the key of record 0 is empty"),
        ("05000000 05 01 000101", 1, "the key of record 0 has 5 bytes and runs past"),
        ("05000000 8080808080", 1, "not a number of 32 bits"),
        ("05000000 ffffffff0f", 1, "runs past"),
        ("05000000 80808080ff", 1, "not a number of 32 bits"),
        ("04000000 80808080 00", 1, "runs past"),
    ],
)
def test_a_body_that_does_not_hold_its_records_is_refused(
    body: str, count: int, reason: str
) -> None:
    with pytest.raises(CorruptRecordError, match=reason):
        parse(batch_of(bytes.fromhex(body), count))


def test_unknown_attributes_and_magic_are_refused() -> None:
    with pytest.raises(CorruptRecordError, match="attributes 1 are unknown"):
        parse(batch_of(b"", 0, attributes=1))
    with pytest.raises(CorruptRecordError, match="magic 1 is unknown"):
        parse(batch_of(b"", 0, magic=1))
    assert parse(batch_of(b"", 0))[0].count == 0


def test_a_range_that_leaves_the_buffer_is_refused() -> None:
    data = np.frombuffer(EXAMPLE, np.uint8)
    for start, end in ((-1, 10), (10, 5), (0, len(data) + 1)):
        with pytest.raises(CorruptRecordError, match="leave the buffer"):
            parse_kv_batches(data, start, end)


@settings(max_examples=150, deadline=None)
@given(body=st.binary(max_size=60), count=st.integers(0, 5))
def test_random_records_are_refused_or_read_but_never_crash(body: bytes, count: int) -> None:
    data = batch_of(body, count)
    try:
        (batch,) = parse(data)
    except CorruptRecordError:
        return
    assert list(zip(batch.keys.tolist(), batch.rows.tolist(), strict=True)) == plain_records(data)


def test_an_impossible_record_is_refused_when_built() -> None:
    one = Slices.of([b"k"])
    outside = Slices(one.data, np.array([0]), np.array([9]))
    with pytest.raises(ValueError, match="2 keys do not belong to 1 rows"):
        build_kv_batch(1, Slices.of([b"a", b"b"]), one)
    with pytest.raises(ValueError, match="the key of record 0 is empty"):
        build_kv_batch(1, Slices.of([b""]), one)
    for keys, rows in ((outside, one), (one, outside)):
        with pytest.raises(ValueError, match="does not lie within its 1 bytes"):
            build_kv_batch(1, keys, rows)
    with pytest.raises(ValueError, match="does not lie within"):
        build_value_batch(outside)
    with pytest.raises(ValueError, match="too few for a schema id"):
        build_value_batch(one)


def test_a_captured_value_batch_is_taken_apart_and_put_together_again() -> None:
    expected, _ = fixture("limit-scan/kv_all-0")
    data = bytes.fromhex(expected["response"]["records"])
    values = parse_value_batch(data)
    assert values.count == len(expected["expected"])
    assert build_value_batch(values) == data


def test_an_empty_value_batch_is_what_fluss_answers() -> None:
    assert build_value_batch(Slices.of([])).hex() == "050000000000000000"
    assert parse_value_batch(bytes.fromhex("050000000000000000")).count == 0
    assert parse_value_batch(b"").count == 0


def test_absent_values_are_left_out_of_a_batch_and_kept_when_split() -> None:
    values = Slices.of([b"\1\0ab", None, b"\xfe\xff"])
    assert parse_value_batch(build_value_batch(values)).tolist() == [b"\1\0ab", b"\xfe\xff"]
    schema_ids, rows = split_values(values)
    assert schema_ids.tolist() == [1, -1, -2]
    assert rows.tolist() == [b"ab", None, b""]
    assert rows.starts[1] == ABSENT
    with pytest.raises(CorruptRecordError, match="record 0 has 1 bytes, too few"):
        split_values(Slices.of([b"x"]))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("0500000000", "its header has 9"),
        ("050000000100000000", "magic 1"),
        ("060000000000000000", "its length is 6, 5 bytes follow"),
        ("050000000001000000", "1 records are claimed, there is room for 0"),
        ("0500000000ffffffff", "-1 records"),
        ("0b0000000001000000 03000000 0100", "record 0 has 3 bytes"),
        ("0c0000000001000000 02000000 0100 00", "1 bytes are left over"),
    ],
)
def test_a_malformed_value_batch_is_refused(data: str, reason: str) -> None:
    with pytest.raises(CorruptRecordError, match=reason):
        parse_value_batch(bytes.fromhex(data))
