"""What may enter a log: everything sound, nothing that a reader could stumble over.

The proof runs over mutations: whatever the check accepts must decode in pyarrow, and the kernel
must give the verdict of its plain-Python twin, fault by fault.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.record.arrow_samples import (
    CODECS,
    NESTED,
    NESTED_ROWS,
    SMALL,
    SMALL_ROWS,
    array,
    log_batch,
    message,
    only,
    tables,
)
from tests.record.batch import plain_check as plain
from tests.record.record_samples import FIXTURES, fixture, table_schema
from zufluss.errors import CorruptRecordError, SchemaNotExistError
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Schema
from zufluss.record.arrow.layout import Layout
from zufluss.record.arrow.message import decode, parse_message
from zufluss.record.batch.check import BatchChecker, CheckedBatch
from zufluss.record.fault import BatchFault, RefusedBatchError
from zufluss.record.header import HEADER_SIZES, LENGTH_OVERHEAD, build_batch, read_header, seal
from zufluss.record.kernels.batch_check import check_batch

ROW_FORMATS = {"log_indexed": "INDEXED", "log_compacted": "COMPACTED"}
CAPTURED = sorted(path.stem for path in (FIXTURES / "produce-log").glob("*.bin"))
SAMPLES = {"small": (SMALL, SMALL_ROWS), "nested": (NESTED, NESTED_ROWS)}


def check(data: Any, schema: Schema, log_format: str = "ARROW", **options: Any) -> Any:
    checker = BatchChecker(only(schema), log_format, **options)
    return checker.check(array(data), 0, len(data))


def kernel_verdict(data: Any, layout: Layout, changelog: bool = False) -> BatchFault:
    return BatchFault(check_batch(array(data), 0, len(data), layout.program(1), changelog)[0])


def plain_verdict(data: Any, layout: Layout, changelog: bool = False) -> BatchFault:
    try:
        return plain.check_batch(data, 0, len(data), layout, changelog=changelog)
    except RefusedBatchError as error:
        return error.fault


def assert_sound_or_refused(data: bytearray, schema: Schema) -> bool:
    """Whether it was accepted, in which case pyarrow reads it without complaint."""
    try:
        check(data, schema)
    except (CorruptRecordError, SchemaNotExistError):
        return False
    decoded, _ = decode(data, 0, read_header(data), schema.arrow)
    decoded.validate(full=True)
    assert decoded.num_rows == read_header(data).record_count
    for field, column in zip(schema.arrow, decoded.columns, strict=True):
        assert field.nullable or column.null_count == 0
    return True


def assert_same_verdict(data: bytearray, layout: Layout) -> None:
    expected = plain_verdict(data, layout)
    found = kernel_verdict(data, layout)
    if found != BatchFault.OTHER_SCHEMA:
        assert found == expected


# --- what is accepted ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAPTURED)
def test_batches_that_the_java_client_sent_are_accepted(name: str) -> None:
    described, data = fixture(f"produce-log/{name}")
    schema = table_schema(described["table"])
    (found,) = check(data, schema, ROW_FORMATS.get(name, "ARROW"))
    header = read_header(data)
    assert found == CheckedBatch(0, len(data), header.magic, 1, 3, 2, header.writer_id, 0)


@pytest.mark.parametrize("name", ["agg", "kv_all"])
def test_changelogs_of_a_real_server_are_accepted_as_changelogs_only(name: str) -> None:
    described, data = fixture(f"fetch-log/{name}")
    schema = table_schema(described["table"])
    found = check(data, schema, changelog=True)
    assert len(found) == len(described["batches"])
    assert found[-1].end == len(data)
    with pytest.raises(RefusedBatchError, match="carries change types"):
        check(data, schema)


@settings(max_examples=80)
@given(tables(), st.sampled_from(CODECS), st.sampled_from([0, 1, 2]))
def test_whatever_pyarrow_writes_is_accepted(
    table: tuple[Schema, pa.RecordBatch], codec: str | None, magic: int
) -> None:
    schema, rows = table
    data = log_batch(rows, codec, magic=magic)
    (found,) = check(data, schema)
    assert (found.end, found.record_count, found.magic) == (len(data), rows.num_rows, magic)
    accepted = BatchFault.NONE if codec is None else BatchFault.COMPRESSED
    assert plain_verdict(data, Layout.of(schema.arrow)) == accepted


def test_several_batches_of_several_schemas_are_checked_in_one_go() -> None:
    wider = SMALL.add_column("z", parse_type("INT"), None)
    rows = SMALL_ROWS.append_column(wider.arrow.field("z"), pa.array([1, 2, None], pa.int32()))
    one = log_batch(SMALL_ROWS, writer_id=7, sequence=0)
    two = log_batch(rows, "zstd", schema_id=2, writer_id=7, sequence=1)
    data = b"before" + one + two + one + b"behind"
    checker = BatchChecker({1: SMALL, 2: wider}.get, "ARROW")
    found = checker.check(array(data), 6, len(data) - 6)
    assert [(b.schema_id, b.batch_sequence) for b in found] == [(1, 0), (2, 1), (1, 0)]
    assert [b.start for b in found] == [6, 6 + len(one), 6 + len(one) + len(two)]
    assert found[-1].end == len(data) - 6


def test_a_slice_with_offsets_that_do_not_begin_at_zero_is_accepted() -> None:
    schema = Schema.of("s STRING")
    rows = pa.record_batch([pa.array(["ab", "cd", "ef"])], schema=schema.arrow)
    data = bytearray(log_batch(rows))
    found = parse_message(data, 48, len(data))
    offset, _ = struct.unpack_from("<qq", data, found.buffers_pos + 16)
    struct.pack_into("<4i", data, found.body_start + offset, 1, 2, 4, 6)
    seal(data, 0)
    assert check(data, schema)


def test_garbage_below_a_null_is_accepted() -> None:
    schema = Schema.of("s STRING, t TIME(3), d DECIMAL(3,0)")
    validity = pa.py_buffer(b"\x02")
    strings = pa.Array.from_buffers(
        pa.utf8(),
        2,
        [validity, pa.py_buffer(struct.pack("<3i", 0, 2, 4)), pa.py_buffer(b"\xff\x80ok")],
    )
    times = pa.Array.from_buffers(
        pa.time32("ms"), 2, [validity, pa.py_buffer(struct.pack("<2i", -5, 7))]
    )
    decimals = pa.Array.from_buffers(
        pa.decimal128(3, 0), 2, [validity, pa.py_buffer(struct.pack("<4q", 5, 5, 999, 0))]
    )
    data = log_batch(pa.record_batch([strings, times, decimals], schema=schema.arrow))
    assert check(data, schema)
    assert plain_verdict(data, Layout.of(schema.arrow)) == BatchFault.NONE


# --- the proof over mutations -------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_single_bit_mutation_is_refused_or_decodes(sample: str) -> None:
    schema, rows = SAMPLES[sample]
    layout = Layout.of(schema.arrow)
    data = log_batch(rows)
    accepted = 0
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            assert_same_verdict(changed, layout)
            if position >= 8:
                seal_if_framed(changed)
            accepted += assert_sound_or_refused(changed, schema)
    assert 0 < accepted < 8 * len(data)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_mutations_of_compressed_batches_are_refused_or_decode(sample: str, codec: str) -> None:
    schema, rows = SAMPLES[sample]
    layout = Layout.of(schema.arrow)
    data = log_batch(rows, codec)
    for position in range(8, len(data)):
        for value in (0, 0xFF, data[position] ^ 1, data[position] ^ 0x80):
            changed = bytearray(data)
            changed[position] = value
            assert_same_verdict(changed, layout)
            seal_if_framed(changed)
            assert_sound_or_refused(changed, schema)


@pytest.mark.parametrize("name", ["log_none", "log_stats", "log_nested", "log_zstd", "log_lz4"])
def test_mutations_of_captured_batches_are_refused_or_decode(name: str) -> None:
    described, original = fixture(f"produce-log/{name}")
    schema = table_schema(described["table"])
    layout = Layout.of(schema.arrow)
    for position in range(8, len(original)):
        changed = bytearray(original)
        changed[position] ^= 1 << position % 8
        assert_same_verdict(changed, layout)
        seal_if_framed(changed)
        assert_sound_or_refused(changed, schema)


@pytest.mark.parametrize("codec", CODECS)
def test_every_truncation_is_refused(codec: str | None) -> None:
    layout = Layout.of(NESTED.arrow)
    data = log_batch(NESTED_ROWS, codec)
    for size in range(len(data)):
        cut = data[:size]
        with pytest.raises(CorruptRecordError):
            check(cut, NESTED)
        if size >= HEADER_SIZES[0]:
            struct.pack_into("<i", cut, 8, size - LENGTH_OVERHEAD)
            seal(cut, 0)
            with pytest.raises(CorruptRecordError):
                check(cut, NESTED)
        assert_same_verdict(cut, layout)


@settings(max_examples=150)
@given(tables(), st.sampled_from(CODECS), st.data())
def test_kernel_and_twin_agree_on_any_schema_and_any_damage(
    table: tuple[Schema, pa.RecordBatch], codec: str | None, data: st.DataObject
) -> None:
    schema, rows = table
    batch = log_batch(rows, codec, magic=data.draw(st.sampled_from([0, 1, 2])))
    places = st.tuples(st.integers(8, len(batch) - 1), st.integers(0, 255))
    for position, value in data.draw(st.lists(places, min_size=1, max_size=3)):
        batch[position] = value
    assert_same_verdict(batch, Layout.of(schema.arrow))
    seal_if_framed(batch)
    assert_sound_or_refused(batch, schema)


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises((CorruptRecordError, SchemaNotExistError)):
        check(data, SMALL)


def seal_if_framed(data: bytearray) -> None:
    """Make the CRC right again, so that the body is looked at."""
    length, magic = struct.unpack_from("<iB", data, 8)
    if magic <= 2 and HEADER_SIZES[magic] - LENGTH_OVERHEAD <= length <= len(data) - 12:
        seal(data, 0)


# --- the words ----------------------------------------------------------------------------------


def refused(data: Any, words: str, schema: Schema = SMALL, **options: Any) -> None:
    with pytest.raises(CorruptRecordError, match=re.escape(words)):
        check(data, schema, **options)


def test_an_entry_without_a_batch_is_refused() -> None:
    refused(b"", "batch 0 of the bucket entry: 0 bytes are left")


def test_bytes_behind_the_last_batch_are_refused() -> None:
    refused(log_batch(SMALL_ROWS) + b"x", "batch 1 of the bucket entry: 1 bytes are left")


def test_one_corrupt_batch_refuses_the_whole_entry() -> None:
    good, bad = log_batch(SMALL_ROWS), log_batch(SMALL_ROWS)
    bad[-1] ^= 1
    refused(good + bad + good, "batch 1 of the bucket entry: its CRC-32C is")


def test_a_damaged_body_is_reported_as_a_wrong_crc() -> None:
    for position in range(25, 48):
        data = log_batch(SMALL_ROWS)
        data[position] ^= 0x11
        refused(data, "its CRC-32C is")


def test_an_unknown_schema_id_has_its_own_error() -> None:
    with pytest.raises(SchemaNotExistError, match="has no schema 9; refresh"):
        check(log_batch(SMALL_ROWS, schema_id=9), SMALL)


def test_a_batch_of_another_tables_schema_is_refused() -> None:
    refused(log_batch(NESTED_ROWS), "was it written with another table's schema?")


@pytest.mark.parametrize(
    ("fmt", "position", "value", "words"),
    [
        ("<B", 12, 3, "magic 3 is unknown"),
        ("<i", 8, -1, "it claims 11 bytes, less than its own header of 48"),
        ("<i", 8, 10**6, "it claims 1000012 bytes"),
        ("<i", 28, 10**9, "last offset delta 1000000000 does not fit its record count 3"),
        ("<B", 27, 3, "attributes 0x03 have unknown bits"),
        ("<i", 44, -1, "record count -1 is negative"),
        ("<i", 44, 0, "it has no records"),
        ("<q", 32, -2, "writer id -2 with batch sequence -1"),
        ("<q", 32, 5, "writer id 5 with batch sequence -1"),
    ],
)
def test_header_fields_are_checked(fmt: str, position: int, value: int, words: str) -> None:
    data = log_batch(SMALL_ROWS)
    struct.pack_into(fmt, data, position, value)
    seal_if_framed(data)
    refused(data, words)


def test_an_absurd_count_is_refused_without_work() -> None:
    data = log_batch(SMALL_ROWS)
    struct.pack_into("<i", data, 28, 2**31 - 2)
    struct.pack_into("<i", data, 44, 2**31 - 1)
    seal(data, 0)
    refused(data, "its Arrow message has 3 records, its header says 2147483647")


def place_of(data: bytearray, buffer: int) -> tuple[int, int, int]:
    """Position of a buffer's entry, of its bytes, and its size."""
    found = parse_message(data, 48, len(data))
    entry = found.buffers_pos + 16 * buffer
    offset, size = struct.unpack_from("<qq", data, entry)
    return entry, found.body_start + offset, size


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ((0, 9, 4, 4), "the offsets of column 's' are not monotone: 4 follows at position 2"),
        ((-1, 4, 4, 14), "the offsets of column 's' reach -1, 0 to"),
        ((0, 4, 4, 400), "the offsets of column 's' reach 400, 0 to"),
        ((0, 4, 4, 13), "column 's': value 2 is not UTF-8"),
    ],
)
def test_offsets_are_checked_with_the_columns_name(offsets: tuple[int, ...], words: str) -> None:
    data = log_batch(SMALL_ROWS)
    _, at, _ = place_of(data, 3)
    struct.pack_into("<4i", data, at, *offsets)
    seal(data, 0)
    refused(data, words)


@pytest.mark.parametrize(
    ("buffer", "offset", "size", "words"),
    [
        (1, 0, 2**40, "a buffer of column 'a' (1099511627776 bytes at 0) is misaligned or outside"),
        (1, 2**40, 24, "is misaligned or outside"),
        (1, -8, 24, "is misaligned or outside"),
        (1, 4, 24, "is misaligned or outside"),
        (1, 0, 16, "the values of column 'a' have 16 bytes, 24 are needed"),
        (3, 64, 8, "the offsets of column 's' have 8 bytes, 16 are needed"),
        (2, 64, 0, "the validity of column 's' has 0 bytes, 1 are needed"),
        (4, 0, 16, "starts at 0, inside the one before"),
    ],
)
def test_places_of_buffers_are_checked(buffer: int, offset: int, size: int, words: str) -> None:
    data = log_batch(SMALL_ROWS)
    entry, _, _ = place_of(data, buffer)
    struct.pack_into("<qq", data, entry, offset, size)
    seal(data, 0)
    refused(data, words)


def test_validity_must_count_the_nulls_that_the_node_claims() -> None:
    data = log_batch(SMALL_ROWS)
    _, at, _ = place_of(data, 2)
    data[at] = 0
    seal(data, 0)
    refused(data, "the validity of column 's' has 3 nulls, its node says 1")


def test_values_outside_their_type_are_refused() -> None:
    data = log_batch(SMALL_ROWS)
    _, at, _ = place_of(data, 8)
    struct.pack_into("<i", data, at, 86_400_000)
    seal(data, 0)
    refused(data, "column 't': value 0 is out of the range")
    data = log_batch(SMALL_ROWS)
    _, at, _ = place_of(data, 10)
    struct.pack_into("<q", data, at, 100_000)
    seal(data, 0)
    refused(data, "column 'd': value 0 is out of the range")


@pytest.mark.parametrize("codec", CODECS)
def test_a_null_in_a_not_null_column_is_refused(codec: str | None) -> None:
    rows = SMALL_ROWS.set_column(0, "a", pa.array([1, None, 3], pa.int64()))
    refused(log_batch(rows, codec), "'a' has 1 nulls, it is NOT NULL")


@pytest.mark.parametrize("codec", CODECS)
def test_a_not_null_field_is_null_only_where_its_row_is(codec: str | None) -> None:
    schema = Schema.of("r ROW<x INT NOT NULL>")
    inner = pa.array([1, None, None], pa.int32())
    for mask, accepted in (([False, True, True], True), ([True, True, False], False)):
        rows = pa.StructArray.from_arrays(
            [inner], fields=list(schema.arrow.field("r").type), mask=pa.array(mask)
        )
        data = log_batch(pa.record_batch([rows], schema=schema.arrow), codec)
        if accepted:
            assert check(data, schema)
        else:
            refused(data, "'r.x' has", schema)


# --- compression --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "claim", "words"),
    [
        (1, 2**40, "a buffer of column 'a' claims 1099511627776 bytes uncompressed, at most 64"),
        (1, 65, "a buffer of column 'a' claims 65 bytes uncompressed, at most 64"),
        (1, -2, "a buffer of column 'a' claims -2 bytes uncompressed"),
        (4, 2**30, "bytes uncompressed at column 's', the limit is 268435456"),
        (4, 2**28 - 4096, "its compressed Arrow body is bad"),
        (4, 4, "its compressed Arrow body is bad"),
    ],
)
def test_no_buffer_claims_more_than_it_can_need(buffer: int, claim: int, words: str) -> None:
    long = SMALL_ROWS.set_column(1, "s", pa.array(["x" * 99] * 3))
    data = log_batch(long, "zstd")
    _, at, _ = place_of(data, buffer)
    struct.pack_into("<q", data, at, claim)
    seal(data, 0)
    refused(data, words)


def test_content_that_only_shows_after_decompression_is_refused() -> None:
    bad = pa.Array.from_buffers(
        pa.utf8(), 1, [None, pa.py_buffer(struct.pack("<2i", 0, 400)), pa.py_buffer(b"\xff" * 400)]
    )
    schema = Schema.of("s STRING")
    for codec in ("lz4", "zstd"):
        data = log_batch(pa.record_batch([bad], schema=schema.arrow), codec)
        refused(data, "its compressed Arrow body is bad", schema)


# --- statistics and changelogs ------------------------------------------------------------------


def test_damaged_statistics_are_refused_by_kernel_and_twin_alike() -> None:
    described, original = fixture("produce-log/log_stats")
    schema = table_schema(described["table"])
    layout = Layout.of(schema.arrow)
    faults = set()
    for position in range(52, 52 + read_header(original).statistics_length):
        for value in (0, 2, 0x7F, 0xFF):
            changed = bytearray(original)
            changed[position] = value
            assert_same_verdict(changed, layout)
            faults.add(kernel_verdict(changed, layout))
    assert faults > {
        BatchFault.STATISTICS_LENGTH,
        BatchFault.STATISTICS_VERSION,
        BatchFault.STATISTICS_COLUMN,
        BatchFault.STATISTICS_NULL_COUNT,
        BatchFault.STATISTICS_ROW,
    }


def test_change_types_are_checked_in_changelogs() -> None:
    body = message(SMALL_ROWS)
    good = build_batch(1, body, 3, append_only=False, change_types=b"\x01\x02\x03")
    bad = build_batch(1, body, 3, append_only=False, change_types=b"\x01\x05\x03")
    assert check(good, SMALL, changelog=True)
    refused(bad, "change type 5 of record 1 is unknown", changelog=True)
    layout = Layout.of(SMALL.arrow)
    assert plain_verdict(bad, layout, changelog=True) == BatchFault.CHANGE_TYPE
    assert plain_verdict(good, layout, changelog=True) == BatchFault.NONE


def test_an_empty_batch_belongs_to_changelogs_only() -> None:
    empty = build_batch(1, b"", 0, append_only=False, change_types=b"")
    assert check(empty, SMALL, changelog=True)[0].last_offset_delta == 0
    refused(build_batch(1, b"", 0), "it has no records")
    stuffed = build_batch(1, b"body", 0, append_only=False, change_types=b"")
    refused(stuffed, "no records but 4 bytes of body", changelog=True)


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_truncated_and_overlong_row_bodies_are_refused(name: str) -> None:
    described, original = fixture(f"produce-log/{name}")
    schema = table_schema(described["table"])
    for size in range(49, len(original)):
        cut = bytearray(original[:size])
        struct.pack_into("<i", cut, 8, size - LENGTH_OVERHEAD)
        seal(cut, 0)
        with pytest.raises(CorruptRecordError, match="batch 0 of the bucket entry"):
            check(cut, schema, ROW_FORMATS[name])
