"""The batch header: it reads back as written, and a bad one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.record.arrow_samples import SMALL_ROWS, log_batch
from tests.record.record_samples import FIXTURES, fixture
from zufluss.errors import CorruptRecordError
from zufluss.record.header import (
    CRC_OFFSETS,
    HEADER_SIZES,
    build_batch,
    iter_headers,
    read_header,
    seal,
    stamp,
    verify_crc,
)

magics = st.sampled_from([0, 1, 2])
FETCHED = sorted({path.stem for path in (FIXTURES / "fetch-log").glob("*.bin")} - {"empty-batch"})


@given(
    magics,
    st.integers(-(2**15), 2**15 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.binary(max_size=40),
)
def test_a_built_header_reads_back(
    magic: int, schema_id: int, count: int, writer_id: int, sequence: int, body: bytes
) -> None:
    batch = build_batch(schema_id, body, count, magic=magic, writer_id=writer_id, sequence=sequence)
    header = read_header(batch)
    assert header.size == len(batch) == HEADER_SIZES[magic] + len(body)
    assert (header.magic, header.schema_id, header.record_count) == (magic, schema_id, count)
    assert (header.writer_id, header.batch_sequence) == (writer_id, sequence)
    assert header.last_offset_delta == max(count - 1, 0)
    assert header.leader_epoch == -1
    assert batch[header.body_offset :] == body
    assert verify_crc(batch, 0, header)


@given(magics, st.integers(0, 2**62), st.integers(0, 2**62), st.integers(0, 2**31 - 1))
def test_stamping_changes_offset_time_and_epoch_and_keeps_the_crc(
    magic: int, offset: int, timestamp: int, epoch: int
) -> None:
    batch = build_batch(3, b"rows", 7, magic=magic)
    padded = bytearray(b"..") + batch
    stamp(padded, 2, magic, offset, timestamp, epoch)
    header = read_header(padded, 2)
    assert (header.base_offset, header.timestamp) == (offset, timestamp)
    assert header.leader_epoch == (epoch if magic == 2 else -1)
    assert header.next_offset == offset + 7
    assert verify_crc(padded, 2, header)


def test_every_byte_behind_the_crc_is_covered_by_it() -> None:
    for magic in (0, 1, 2):
        batch = build_batch(1, b"body", 1, magic=magic)
        for position in range(CRC_OFFSETS[magic] + 4, len(batch)):
            damaged = bytearray(batch)
            damaged[position] ^= 0x40
            assert not verify_crc(damaged, 0, read_header(batch))
            seal(damaged, 0)
            assert read_header(damaged).crc != read_header(batch).crc


def test_statistics_and_change_types_stand_before_the_records() -> None:
    batch = build_batch(
        1, b"records", 2, magic=1, append_only=False, change_types=b"\x01\x04", statistics=b"stats"
    )
    header = read_header(batch)
    assert not header.append_only
    assert batch[header.header_size : header.header_size + 5] == b"stats"
    assert batch[header.body_offset - 2 : header.body_offset] == b"\x01\x04"
    assert batch[header.body_offset :] == b"records"


def test_values_that_a_header_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="magic 0 has no field"):
        build_batch(1, b"", 1, statistics=b"x")
    with pytest.raises(ValueError, match="change_types go with"):
        build_batch(1, b"", 1, append_only=False)


def test_a_batch_cut_at_the_end_is_left_out() -> None:
    one = bytes(log_batch(SMALL_ROWS))
    for kept in range(len(one)):
        assert [pos for pos, _ in iter_headers(one + one[:kept])] == [0]
    assert [pos for pos, _ in iter_headers(one + one)] == [0, len(one)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({12: 3}, "magic 3 is unknown"),
        ({8: 0, 9: 0}, "less than its own header"),
        ({11: 0xFF}, "less than its own header"),
    ],
)
def test_an_impossible_header_is_refused(change: dict[int, int], words: str) -> None:
    batch = build_batch(1, b"body", 1)
    for position, value in change.items():
        batch[position] = value
    with pytest.raises(CorruptRecordError, match=words):
        read_header(batch)
    with pytest.raises(CorruptRecordError, match=words):
        list(iter_headers(batch))


def test_a_cut_header_is_refused() -> None:
    batch = build_batch(1, b"", 1, magic=2)
    for size in range(len(batch)):
        with pytest.raises(CorruptRecordError, match="the header is cut"):
            read_header(batch[:size])


@pytest.mark.parametrize("name", FETCHED)
def test_captured_headers_read_as_their_json_says(name: str) -> None:
    described, data = fixture(f"fetch-log/{name}")
    found = list(iter_headers(data))
    assert len(found) == len(described["batches"])
    for (pos, header), expected in zip(found, described["batches"], strict=True):
        assert header.base_offset == expected["base"]
        assert header.size == expected["bytes"]
        assert header.attributes == expected["attributes"]
        assert (header.magic, header.schema_id) == (expected["magic"], expected["schema_id"])
        assert (header.last_offset_delta, header.record_count) == (
            expected["delta"],
            expected["count"],
        )
        assert (header.writer_id, header.batch_sequence) == (expected["writer"], expected["seq"])
        stale = described["projected_fields"] is not None and header.record_count > 0
        assert verify_crc(data, pos, header) is not stale


def test_an_empty_batch_of_a_real_server_takes_one_offset() -> None:
    _, data = fixture("fetch-log/empty-batch")
    [(pos, header)] = iter_headers(data)
    assert (header.record_count, header.last_offset_delta, header.size) == (0, 0, 48)
    assert header.next_offset == header.base_offset + 1
    assert verify_crc(data, pos, header)
